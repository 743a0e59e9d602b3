"""Many random trainings, counted: models of many seeds, each in many settings.

``python tests/support/fuzzing/fuzz_many.py 0 1000`` runs models of these seeds.

``--ranks 2``: on a pair of gloo processes, which lives on from case to case. ``--only SEED:NUMBER``: one case, shrunk.
Counts cases that were equal, different, errors, hangs and refused, by what the refusal says; writes each failure's seed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "distributed")]

import torch  # noqa: E402
from fuzz_script import Found, captured_once, compiled_once, kind_of, ran, shrunk  # noqa: E402
from fuzz_settings import Case, cases  # noqa: E402

FAILED = ("different", "error", "hang")


def _serve(connection: Connection, rank: int, ranks: int, rendezvous: str) -> None:
    """Runs the cases that come, until None does."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of thousands of cases
    if ranks:
        from world import join

        join(rendezvous, rank, ranks)
    with captured_once() as known, compiled_once():
        while (case := connection.recv()) is not None:
            if len(known) > 40:
                known.clear()
            connection.send(ran(case))
    os._exit(0)


class Group:
    """The processes of one world, or one that is alone (``ranks`` 0); made anew when they hang."""

    def __init__(self, ranks: int, timeout: float) -> None:
        self.ranks, self.timeout = ranks, timeout
        self.processes: list[Any] = []
        self.count = 0

    def start(self) -> None:
        context = get_context("fork")
        rendezvous = tempfile.mktemp(prefix="fuzz")
        self.connections = []
        for rank in range(max(1, self.ranks)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.ranks, rendezvous), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def stop(self) -> None:
        for process in self.processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        self.processes = []

    def __call__(self, case: Case) -> Found:
        if not self.processes:
            self.start()
        self.count += 1
        answers: dict[int, Found] = {}
        try:
            for connection in self.connections:
                connection.send(case)
            end = time.monotonic() + self.timeout
            while len(answers) < len(self.connections):
                left = [c for i, c in enumerate(self.connections) if i not in answers]
                ready = wait(left, max(0.0, end - time.monotonic()))
                if not ready:
                    break
                for c in ready:
                    answers[self.connections.index(c)] = c.recv()  # type: ignore[arg-type]
        except (EOFError, ConnectionError):
            self.stop()
            return Found("error", "a process ended")
        if len(answers) < len(self.connections):
            self.stop()
            told = "; ".join(f"rank {i}: {f.kind} {f.text}" for i, f in answers.items())
            return Found("hang", f"after {self.timeout:.0f} s; {told}")
        found = [answers[i] for i in range(len(self.connections))]
        if any(f.kind in FAILED for f in found) or len({f.kind for f in found}) > 1 or self.count % 300 == 0:
            self.stop()
        for kind in ("error", "different"):
            if told := [f for f in found if f.kind == kind]:
                return told[0]
        if len({f.kind for f in found}) > 1:
            return Found("different", f"ranks disagree: {[(f.kind, f.text[:200]) for f in found]}")
        return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("end", type=int, nargs="?", default=5)
    parser.add_argument("--settings", type=int, default=24, help="cases of each model")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a case")
    parser.add_argument("--only", default="", help="SEED:NUMBER")
    parser.add_argument("--shrink", type=int, default=2, help="failures of a kind that are shrunk")
    asked = parser.parse_args()
    group = Group(asked.ranks, asked.timeout)
    if asked.only:
        seed, number = map(int, asked.only.split(":"))
        case = cases(seed, asked.settings, asked.ranks)[number]
        print(case, found := group(case), sep="\n", flush=True)
        if found.kind in FAILED and asked.shrink:
            print(*shrunk(case, found, group), sep="\n")
        group.stop()
        return
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    begin = time.time()
    for seed in range(asked.first, asked.end):
        refused = None
        for number, case in enumerate(cases(seed, asked.settings, asked.ranks)):
            if refused == case.compiled_as:  # it would be counted again and again
                continue
            found = group(case)
            refused = case.compiled_as if found.kind == "refused" and found.text.startswith("compile:") else None
            counts[found.kind] += 1
            kind = kind_of(found)
            if found.kind == "refused":
                refusals[kind] += 1
                if refusals[kind] == 1:
                    print(f"{seed}:{number} REFUSED {found.text[:400]}", flush=True)
            if found.kind in FAILED:
                seen[found.kind + kind] += 1
                print(f"{seed}:{number} {found.kind.upper()} {kind}", flush=True)
                if seen[found.kind + kind] <= asked.shrink:
                    print(
                        *(shrunk(case, found, group) if found.kind != "hang" else (case, found)), sep="\n", flush=True
                    )
        if (seed + 1 - asked.first) % 2 == 0 or seed + 1 == asked.end:
            print(f"seed {seed}, {time.time() - begin:.0f} s: {dict(counts)}", flush=True)
    for kind, count in refusals.most_common():
        print(f"{count:5} {kind}")
    group.stop()


if __name__ == "__main__":
    main()

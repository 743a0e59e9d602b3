"""How PyTorch's op database runs: each dim of each input of each op sharded, on 2 and 3 ranks, compared with eager.

python benchmarks/op_coverage.py                         # all of it, some twenty minutes; goes on where it stopped
python benchmarks/op_coverage.py add softmax             # a few
python benchmarks/op_coverage.py --docs docs/reference/coverage.md # write the table of the docs from the results
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from op_database import STATUSES, infos, limit, names, run_op, samples  # noqa: E402

from autoshard.passes.rules import all_rules  # noqa: E402
from autoshard.passes.rules.base import Rule  # noqa: E402

Rows = dict[str, list[dict[str, Any]]]
"""op name → its cases"""

MEANING = {
    "sharded": "one op, its work is divided; values and gradients equal eager's",
    "decomposed": "written as several ops, whose work is divided; equal",
    "replicated": "runs on full tensors; equal",
    "refused": "refused with an error that says what to do",
    "not run": "eager itself cannot run the samples on a CPU",
    "wrong": "differs from eager",
    "crash": "fails with an error that is not autoshard's own",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="op names; default: all")
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "op_coverage.jsonl", help="one line per case")
    parser.add_argument("--docs", type=Path, help="write the table as Markdown")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    args.results.parent.mkdir(parents=True, exist_ok=True)
    wanted = args.ops or names()
    if args.worker:
        work(wanted, args.results)
        return
    complete(wanted, args.results)
    rows = {name: cases for name, cases in read(args.results).items() if name in wanted}
    print(table(rows))
    for name in sorted(rows):
        for case in rows[name]:
            if case["status"] in ("wrong", "crash"):
                print(f"{name} sample {case['sample']} {case['hint']} on {case['ranks']} ranks: {case['status']}")
                print("    " + case["detail"].splitlines()[0])
    if not args.ops:
        print(f"DTensor runs {len(dtensor())} of {len(wanted)} ops with a sharded input")
    if args.docs:
        args.docs.write_text(document(rows), encoding="utf-8")


def complete(wanted: Sequence[str], results: Path) -> None:
    """Run what has no result yet, in a process of its own: some ops abort the process."""
    while missing := [name for name in wanted if name not in read(results)]:
        subprocess.run([sys.executable, __file__, *missing, "--results", results, "--worker"], check=False)
        left = [name for name in missing if name not in read(results)]
        if left:
            crashed = {"op": left[0], "sample": 0, "hint": "", "ranks": 0, "status": "crash", "detail": "aborts"}
            append(results, [crashed])


def work(wanted: Sequence[str], results: Path) -> None:
    for number, name in enumerate(wanted):
        append(results, [o.as_dict() for info in infos(name) for o in run_op(info)] or [_nothing(name)])
        print(f"\r{number + 1}/{len(wanted)} {name:<60}", end="", file=sys.stderr, flush=True)


def _nothing(name: str) -> dict[str, Any]:
    return {"op": name, "sample": 0, "hint": "", "ranks": 0, "status": "not run", "detail": "no samples", "graph": ()}


def append(results: Path, cases: Sequence[Mapping[str, Any]]) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(case) + "\n" for case in cases)


def read(results: Path) -> Rows:
    rows: Rows = defaultdict(list)
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        case = json.loads(line)
        rows[case["op"].partition(":")[0]].append(case)
    return rows


def verdicts(rows: Rows) -> dict[str, str]:
    return {n: next(s for s in STATUSES if any(c["status"] == s for c in cases)) for n, cases in rows.items()}


def table(rows: Rows) -> str:
    found = Counter(verdicts(rows).values())
    cases = sum(len(c) for c in rows.values())
    lines = [f"{found[status]:>5}  {status:<11} {meaning}" for status, meaning in MEANING.items()]
    return "\n".join([*lines, f"{len(rows):>5}  op names, {cases} cases"])


def document(rows: Rows) -> str:
    """The coverage page of the docs."""
    found = verdicts(rows)
    counts = Counter(found.values())
    cases = sum(len(c) for c in rows.values())
    lines = [
        "# Coverage",
        "",
        "Generated by `python benchmarks/op_coverage.py --docs docs/reference/coverage.md`; do not edit.",
        "",
        f"PyTorch's op database has {len(rows)} op names. Each dim of each input was sharded in turn, on meshes of 2 and",
        f"3 ranks: {cases} cases. Values and gradients were compared with eager (float64).",
        "",
        "| status | ops | meaning |",
        "|---|---|---|",
        *(f"| {status} | {counts[status]} | {meaning} |" for status, meaning in MEANING.items()),
        "",
        "## Ops",
        "",
    ]
    for status in MEANING:
        listed = sorted(name for name, s in found.items() if s == status)
        if listed:
            lines += [f"### {status}\n\n```text", textwrap.fill(" ".join(listed), 120, break_on_hyphens=False), "```\n"]
    return "\n".join(lines) + "\n" + rule_table(all_rules())


def rule_table(rules: Iterable[Rule]) -> str:
    """The last section of the page."""
    notes = {str(r.op): r.notation or "by hand" for r in rules}
    rows = [f"| `{op}` | `{text}` |" for op, text in sorted(notes.items())]
    return "\n".join(["## Rules", "", "| op | rule |", "|---|---|", *rows]) + "\n"


def dtensor() -> list[str]:
    """Op names that DTensor runs on any sample with any input sharded; on a fake process group, so values are not seen."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def runs(name: str) -> bool:
        for call in (c for info in infos(name) for c in samples(info)):
            for x, d in ((x, d) for x, t in call.tensors.items() for d in range(t.ndim)):
                try:
                    placed = {
                        n: distribute_tensor(t.detach(), mesh, [Shard(d) if n == x else Replicate()])
                        for n, t in call.tensors.items()
                    }
                    with limit(20), torch.no_grad():
                        call(**placed)
                    return True
                except Exception:
                    continue
        return False

    found = [name for name in names() if runs(name)]
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main()

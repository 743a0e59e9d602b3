"""Gathers and reductions beside compute: a profile of a real FSDP step above, the predicted timeline of its plan below.

    python benchmarks/overlap.py --model llama:small --svg docs/figures/overlap.svg --trace overlap

Two gloo processes run the step; rank 0's profile is drawn, and with ``--trace`` written for Perfetto beside the prediction
(``run.json``, ``plan.trace.json``). Collectives of gloo run in threads of their own: a bar lasts from the call until all
bytes are there. The prediction is for this machine as :func:`autoshard.calibrate` measures it, with ``--overlap`` as the
speed of compute beside communication, which it does not measure: gloo's threads take time on the same cores.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import autoshard
from autoshard import models
from autoshard.report.schedule import COMPUTE_STREAM, step_timeline

RANKS, WARM_UP = 2, 4
COLOURS = {"all_gather": "#2e86ab", "reduce_scatter": "#c0392b", "all_to_all": "#c0392b", "all_reduce": "#e08e0b"}
LEGEND = {"compute": "#b8c7d9", "all-gather": "#2e86ab", "reduction of gradients": "#c0392b", "all-reduce": "#e08e0b"}


class Bar(NamedTuple):
    """Something that takes time; seconds. ``kind``: of a collective; "": compute."""

    start: float
    end: float
    kind: str


def measured(events: Any) -> list[Bar]:
    """What a profile says: the operations of the step that are called by no other, and gloo's collectives."""
    found = []
    for e in events:
        start, end = e.time_range.start * 1e-6, e.time_range.end * 1e-6
        if collective := re.match(r"gloo:(\w+)", e.name):
            kind = collective[1].lower().removeprefix("_")
            found.append(
                Bar(start, end, next((k for k in COLOURS if k.replace("_", "") in kind.replace("_", "")), "all_reduce"))
            )
        elif e.name.startswith("aten::") and not e.is_async and (e.cpu_parent is None or not _is_op(e.cpu_parent)):
            found.append(Bar(start, end, ""))
    first = min(b.start for b in found)
    return [Bar(b.start - first, b.end - first, b.kind) for b in found]


def _is_op(event: Any) -> bool:
    while event is not None:
        if event.name.startswith("aten::"):
            return True
        event = event.cpu_parent
    return False


def predicted(plan: autoshard.Plan) -> list[Bar]:
    """The plan's own timeline."""
    return [
        Bar(e.start, e.start + e.seconds, "" if e.stream == COMPUTE_STREAM else e.name.split("@")[0])
        for e in step_timeline(plan)
    ]


def together(bars: list[Bar], gap: float) -> list[Bar]:
    """Bars of one kind with less than ``gap`` between them as one."""
    found: list[Bar] = []
    for b in sorted(bars):
        last = next((i for i in range(len(found) - 1, -1, -1) if found[i].kind == b.kind), None)
        if last is not None and b.start - found[last].end < gap:
            found[last] = found[last]._replace(end=max(found[last].end, b.end))
        else:
            found.append(b)
    return found


def hidden(bars: list[Bar]) -> float:
    """The share of the time with communication under way in which something is computed."""
    moments = sorted({b.start for b in bars} | {b.end for b in bars})
    under_way = beside = 0.0
    for start, end in itertools.pairwise(moments):
        kinds = {bool(b.kind) for b in bars if b.start < end and b.end > start}
        under_way += (end - start) * (True in kinds)
        beside += (end - start) * (kinds == {True, False})
    return beside / under_way if under_way else 0.0


def svg(panels: dict[str, list[Bar]]) -> str:
    """Two rows for each panel: compute, and communication under way."""
    width, left, row, gap = 900, 110, 30, 62
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {len(panels) * (2 * row + gap) + 34}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (title, bars) in enumerate(panels.items()):
        top, longest = number * (2 * row + gap) + 26, max(b.end for b in bars)
        scale = (width - left - 12) / longest
        share = f"{hidden(bars):.0%} of the time with communication under way is computed in"
        lines.append(f'<text x="8" y="{top - 8}" font-weight="bold">{title}: {longest * 1e3:.0f} ms; {share}</text>')
        for y, what in ((top, "compute"), (top + row, "communication")):
            lines.append(f'<text x="8" y="{y + 18}">{what}</text>')
        for b in together(bars, 0.5 / scale):
            y, colour = (top + row, COLOURS.get(b.kind, "#888")) if b.kind else (top, LEGEND["compute"])
            place = f'x="{left + b.start * scale:.1f}" width="{max(0.4, (b.end - b.start) * scale):.1f}"'
            lines.append(f'<rect {place} y="{y + 3}" height="{row - 6}" fill="{colour}" fill-opacity="0.75"/>')
    for i, (name, colour) in enumerate(LEGEND.items()):
        at, y = left + 180 * i, len(panels) * (2 * row + gap) + 10
        lines.append(
            f'<rect x="{at}" y="{y}" width="12" height="12" fill="{colour}"/><text x="{at + 18}" y="{y + 10}">{name}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    file = f"file://{options.rendezvous}"
    dist.init_process_group("gloo", init_method=file, rank=options.rank, world_size=RANKS)
    torch.manual_seed(0)
    reference = models.get(options.model)
    args, kwargs = reference.inputs(batch=options.batch)
    here = autoshard.calibrate({"dp": RANKS})
    mesh = autoshard.Mesh({"dp": RANKS}, hardware=replace(here, overlap=options.overlap))
    sharded = autoshard.compile(reference.model(), mesh, args, kwargs, like=options.like)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        sharded(*args, **kwargs).loss.backward()

    for _ in range(WARM_UP):
        step()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    if options.rank == 0:
        title = f'{options.model}, like="{options.like}", {RANKS} gloo ranks'
        run = measured(found.events())
        panels = {f"profile of a run of {title}": run, "predicted for this machine": predicted(sharded.plan)}
        options.svg.write_text(svg(panels), encoding="utf-8")
        for name, bars in panels.items():
            print(f"{name}: {max(b.end for b in bars) * 1e3:.1f} ms, {hidden(bars):.0%} hidden", flush=True)
        if options.trace is not None:
            options.trace.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(options.trace / "run.json"))
            sharded.visualize(options.trace / "plan.trace.json")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own way out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama:small", help="a name from autoshard.models with a loss")
    parser.add_argument("--like", default="fsdp", help="a named strategy by name")
    parser.add_argument("--batch", type=int, default=4, help="rows of the global batch")
    parser.add_argument("--overlap", type=float, default=0.8, help="speed of compute beside communication")
    parser.add_argument("--svg", type=Path, default=Path("overlap.svg"), help="the picture")
    parser.add_argument("--trace", type=Path, help="a folder for both traces")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--rendezvous", f"{folder}/rendezvous"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([*command, "--rank", str(r)], env=env) for r in range(RANKS)]
        raise SystemExit(max((rank.wait() for rank in ranks), key=abs))


if __name__ == "__main__":
    main()

"""``autoshard demo``: plan, source, verification and files of a small GPT, in one process."""

from __future__ import annotations

import ast
import shutil
import sys
from pathlib import Path

import torch

import autoshard
from autoshard import models

MESH = {"dp": 2, "tp": 2}
STEPS = 3


def demo(out: Path) -> int:
    """Compile, print, verify and save a GPT on 2 × 2 simulated ranks; exit status 0 if verified."""
    reference = models.get("gpt")
    args, kwargs = reference.inputs(batch=4)
    mesh = autoshard.Mesh(MESH, hardware="ideal_network")
    torch.manual_seed(0)
    model = reference.model()
    print(
        f"A GPT with {sum(p.numel() for p in model.parameters()):,} parameters on {mesh.size} ranks (mesh {mesh}), "
        "as threads of this process.\n"
        'hardware="ideal_network": communication is next to free, so that everything that can be split is split. On\n'
        "real hardware (the default is h100) the best plan for so small a model is to keep it whole on every rank."
    )
    sharded = autoshard.compile(model, mesh, args, kwargs)
    _title("The plan, its collectives, and what it costs")
    print(sharded.plan)
    _title("The generated source that every rank runs: one of its classes")
    print(class_text(sharded.source, "Block"))
    _title(f"Sharded against unsharded, in float64: outputs, gradients, and weights after {STEPS} steps of AdamW")
    report = autoshard.verify(model.double(), mesh, args, kwargs, steps=STEPS)
    print(report)
    sharded.save(out)
    sharded.visualize(out / "plan.html")
    _title("Files")
    _say_files(out, mesh.size)
    return 0 if report.ok else 1


def class_text(source: str, name: str) -> str:
    """The text of class ``name`` in Python ``source``."""
    found = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    return "\n".join(source.splitlines()[found.lineno - 1 : found.end_lineno])


def _title(text: str) -> None:
    print(f"\n=== {text}\n")


def _say_files(out: Path, ranks: int) -> None:
    for name, what in (
        ("rank_module.py", "the program of every rank; needs autoshard.runtime, not the model's code"),
        ("plan.json", "the plan: autoshard.Plan.from_json reads it"),
        ("plan.html", "the plan as a page: open it in a browser"),
        (f"rank0 … rank{ranks - 1}.safetensors", "every rank's shards of the parameters"),
        ("inputs.json", "shapes and value ranges of the inputs"),
        ("lines.json", "which module each line communicates for: names in profiles"),
    ):
        print(f"{out / name}  {what}")
    print(f"\nRun it in {ranks} processes, or all ranks in one:")
    folder = "" if shutil.which("torchrun") else f"{Path(sys.executable).parent}/"
    print(f"  {folder}torchrun --nproc-per-node {ranks} {out / 'rank_module.py'} --steps {STEPS}")
    print(f"  {folder}python {out / 'rank_module.py'} --steps {STEPS}")

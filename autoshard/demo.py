"""``autoshard demo``: an 8B model planned for 8 H100; a tiny one verified, trained and saved."""

from __future__ import annotations

import ast
import inspect
import shutil
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import autoshard
from autoshard import models
from autoshard.api import compile_for_mesh
from autoshard.plans.plan import Plan
from autoshard.report.summary import setting_text, summary_rows

LARGE, LARGE_MESH, LARGE_BATCH, LARGE_LENGTH = "llama:8b", {"dp": 8}, 16, 4096
TINY, TINY_MESH = "llama", {"tp": 2}
STEPS = 3
INPUTS = "inputs.safetensors"


def demo(out: Path) -> int:
    """Plan, compare, print, verify, train and write into ``out``; exit status 0 if verified."""
    begun = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    print(
        f"1  {LARGE} in bfloat16, {LARGE_BATCH} × {LARGE_LENGTH} tokens, planned without weights or GPUs …", flush=True
    )
    plan, source = _large_plan()
    print_summary(plan)
    block = class_text(source, "Block").splitlines()
    print(f"\n2  The source of a block that every rank runs: 20 of {len(block)} lines")
    print("\n".join(block_excerpt(block, 20)))
    ok = _tiny_model(out)
    plan.visualize(out / "plan.html")
    (out / "plan.json").write_text(plan.to_json(alternatives=False), encoding="utf-8")
    (out / "block.py").write_text("\n".join(block) + "\n", encoding="utf-8")
    _print_files(out, time.monotonic() - begun)
    return 0 if ok else 1


def _large_plan() -> tuple[Plan, str]:
    """The plan of the large model, compared with named strategies, and its generated source."""
    reference = models.get(LARGE)
    with torch.device("meta"):
        model = reference.model().bfloat16()
    args, kwargs = reference.inputs(batch=LARGE_BATCH, seq=LARGE_LENGTH)
    found = compile_for_mesh(model, autoshard.Mesh(LARGE_MESH, "h100"), tuple(args), dict(kwargs))
    _ = found.plan.compared
    return found.plan, found.source.text


def print_summary(plan: Plan) -> None:
    """The first lines of a report."""
    print(f"   {setting_text(plan)}")
    for label, text in summary_rows(plan):
        print(f"   {label:14} {text}")


def class_text(source: str, name: str) -> str:
    """The text of class ``name`` in Python ``source``."""
    found = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    return "\n".join(source.splitlines()[found.lineno - 1 : found.end_lineno])


def block_excerpt(lines: list[str], most: int) -> list[str]:
    """The last ``most`` lines of a class whose last method is forward."""
    start = next((i for i, line in enumerate(lines) if line.lstrip().startswith("def forward")), 0)
    return lines[start:][-most:]


def _tiny_model(out: Path) -> bool:
    """Verify, train and save a tiny model on two ranks in this process; whether it is verified."""
    reference, mesh = models.get(TINY), autoshard.Mesh(TINY_MESH, hardware="ideal_network")
    args, kwargs = reference.inputs(batch=4)
    torch.manual_seed(0)
    model = reference.model()
    print(f"\n3  A tiny Llama on {mesh.size} ranks (mesh {mesh}), threads of this process, against one device")
    report = autoshard.verify(model.double(), mesh, args, kwargs, steps=STEPS)
    print(f"   {str(report).splitlines()[0]}: outputs, gradients, weights after {STEPS} steps, in float64")
    model.float()
    sharded = autoshard.compile(model, mesh, args, kwargs)
    sharded.save(out / "tiny")
    inputs = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    save_file({name: x.contiguous() for name, x in inputs.items()}, out / "tiny" / INPUTS)
    losses = [_train(trained, args, kwargs) for trained in (sharded, model)]
    for name, found in zip(("two ranks", "one device"), losses, strict=True):
        print(f"   {name:10} losses of {STEPS} steps of AdamW: {'  '.join(f'{loss:.4f}' for loss in found)}")
    return report.ok


def _train(model: torch.nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(*args, **kwargs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _print_files(out: Path, seconds: float) -> None:
    folder = "" if shutil.which("torchrun") else f"{Path(sys.executable).parent}/"
    print(f"\n4  Written in {seconds:.0f} s")
    print(f"   {out / 'plan.html'}  the plan as a page: open it in a browser ({out / 'plan.json'}: the same as data)")
    print(f"   {out / 'block.py'}  all lines of the block")
    print("   Two processes take the same steps, with the same losses:")
    tiny = out / "tiny"
    print(f"   {folder}torchrun --nproc-per-node 2 {tiny / 'rank_module.py'} --inputs {tiny / INPUTS} --steps {STEPS}")

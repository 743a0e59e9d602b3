"""One rank of a gloo world that trains, saves while it trains on, is killed in a save, and resumes otherwise.

Started by test_resume_gloo.py, see world.py; its argument says which half.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import world
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import autoshard
from autoshard.module.dtensors.module_dtensor import ModuleDTensor
from autoshard.runtime.parameters import gradients
from autoshard.runtime.parameters.bucket import FlatBucket
from autoshard.runtime.transport import process_group

FOLDER = Path(sys.argv[2]).parent
BEFORE, AFTER = 2, 2
"""steps before the checkpoint, and after it"""

SETTINGS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "as it was": ({"tp": 2}, {"micro_batches": 2, "recompute": "blocks"}),
    "another mesh and plan": ({"dp": 2}, {"like": "fsdp"}),
    "other micro-batches and recomputation": ({"dp": 2}, {"like": "zero2", "micro_batches": 4, "recompute": "none"}),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Net(nn.Module):
    def __init__(self, words: int = 24, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Training:
    """A sharded model, its optimizer, and the losses of its steps. Draws and data follow from the step's number."""

    def __init__(self, setting: str, dtype: torch.dtype) -> None:
        axes, options = SETTINGS[setting]
        torch.manual_seed(0)
        mesh = autoshard.Mesh(axes, hardware="ideal_network")
        self.sharded = autoshard.compile(Net().to(dtype), mesh, self.batch(0), **options)
        self.optimizer = torch.optim.AdamW(self.sharded.parameters(), lr=0.01, fused=dtype == torch.float32)
        self.losses: list[float] = []

    @staticmethod
    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(step)
        tokens, labels = torch.randint(0, 24, (2, 8, 6), generator=random)
        labels[1:4, step % 3 :] = -100
        return tokens, labels

    def steps(self, first: int, count: int) -> list[float]:
        found = []
        for step in range(first, first + count):
            torch.manual_seed(100 * dist.get_rank() + step if dist.get_rank() else step)
            loss = self.sharded(*self.batch(step))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.sharded, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def resume(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.sharded, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def folder_of(dtype: torch.dtype, step: int) -> Path:
    return FOLDER / f"{str(dtype).removeprefix('torch.')}-{step}"


def killed() -> dict[str, list[float]]:
    """Saves while it trains on; its second rank ends in the middle of the next save."""
    losses, apart = {}, dist.new_group(backend="gloo")  # saving and training communicate at the same time
    for dtype in (torch.float32, torch.float64):
        training = Training("as it was", dtype)
        training.steps(0, BEFORE)
        saving = dcp.async_save(training.state(), checkpoint_id=folder_of(dtype, BEFORE), process_group=apart)
        losses[str(dtype)] = training.steps(BEFORE, AFTER)
        saving.result()
    if dist.get_rank() == 0:
        (FOLDER / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    write = dcp.FileSystemWriter.write_data

    def cut_off(self: Any, plan: Any, planner: Any) -> Any:
        plan.items[:] = plan.items[: len(plan.items) // 2]
        write(self, plan, planner).wait()
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1:
        dcp.FileSystemWriter.write_data = cut_off  # type: ignore[method-assign]
    dcp.async_save(training.state(), checkpoint_id=folder_of(dtype, BEFORE + AFTER), process_group=apart).result()
    raise AssertionError("the save ended well without its second rank")


def resumed() -> dict[str, dict[str, float]]:
    """For every setting the largest relative difference of the losses after the checkpoint, by dtype."""
    known = json.loads((FOLDER / "losses.json").read_text())
    found: dict[str, dict[str, float]] = {}
    fsdp: Any = None
    for name in SETTINGS:
        for dtype in (torch.float64, torch.float32) if name == "as it was" else (torch.float64,):
            training = Training(name, dtype)
            last = max(p for p in FOLDER.glob(f"{str(dtype).removeprefix('torch.')}-*") if (p / ".metadata").exists())
            assert last == folder_of(dtype, BEFORE), last
            if name == "as it was":
                found["without the checkpoint"] = {"": abs(training.steps(BEFORE, 1)[0] / known[str(dtype)][0] - 1)}
            training.resume(last)
            fsdp = training if name == "another mesh and plan" else fsdp
            pairs = zip(training.steps(BEFORE, AFTER), known[str(dtype)], strict=True)
            found.setdefault(name, {})[str(dtype)] = float(
                torch.tensor([abs(a - b) / abs(b) for a, b in pairs]).max()  # NaN, if one is
            )
    found["fused"] = {"parts": fused_on_parts(), "under way": float(most_under_way(fsdp))}
    return found


def fused_on_parts() -> float:
    """The largest difference of a fused step on parts from the one that DTensor makes of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[bool, list[torch.Tensor]] = {}
    for ours in (False, True):
        random = torch.Generator().manual_seed(0)
        full = [torch.randn(5, 4, generator=random, dtype=torch.float64) for _ in range(4)]
        layouts = ([Shard(0)], [Replicate()], [Shard(0)], [Replicate()])
        w, b, *given = (distribute_tensor(x, mesh, at) for x, at in zip(full, layouts, strict=True))
        if ours:
            w, b, *given = map(ModuleDTensor.of, (w, b, *given))
        parameters = [nn.Parameter(w), nn.Parameter(b)]
        optimizer = torch.optim.AdamW(parameters, fused=True)
        for _ in range(2):
            for p, g in zip(parameters, given, strict=True):
                p.grad = g
            optimizer.step()
        found[ours] = [p.full_tensor().detach() for p in parameters]
    return float(torch.stack([(a - b).abs().max() for a, b in zip(found[False], found[True], strict=True)]).max())


def most_under_way(training: Training) -> int:
    """How many reduce-scatters of a step are under way at most, every bucket alone."""
    begun, most = list[Any](), 0
    reduce_scatter, wait, small = FlatBucket._reduce_scatter, process_group.PendingSum.wait, gradients.MIN_BUCKET_BYTES

    def counted(*args: Any) -> Any:
        nonlocal most
        found = reduce_scatter(*args)
        begun.append(found[1])
        most = max(most, len(begun))
        return found

    def waited(self: Any) -> None:
        begun[:] = [work for work in begun if work is not self]  # sums of two ranks are waited for so, too
        wait(self)

    FlatBucket._reduce_scatter, process_group.PendingSum.wait, gradients.MIN_BUCKET_BYTES = counted, waited, 0  # type: ignore[method-assign]
    try:
        training.steps(0, 1)
    finally:
        FlatBucket._reduce_scatter, process_group.PendingSum.wait, gradients.MIN_BUCKET_BYTES = (
            reduce_scatter,
            wait,
            small,
        )  # type: ignore[method-assign]
    return most


def run(rank: int, ranks: int, rendezvous: str, result: str) -> None:
    world.join(rendezvous, rank, ranks)
    found = killed() if sys.argv[4] == "killed" else resumed()
    if rank == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    world.main(run)

"""One rank of a gloo world with accelerate's Accelerator; see test_accelerate_gloo.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import world
from accelerate.utils import DataLoaderConfiguration
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoshard
from autoshard.accelerate import Accelerator

BATCH = 8

CASES: dict[str, dict[str, Any]] = {
    "shared": {"steps": 2},
    "sharded": {"steps": 2, "compile": {"like": "fsdp"}},
    "local": {"compile": {"inputs": "local"}},
    "split": {"compile": {"inputs": "local"}, "split": True},
    "staged": {"steps": 2, "compile": {"stages": "dp", "micro_batches": 2}},
}


class Net(nn.Module):
    """Embeds words, with tied weights and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(self.words(ids)))
        return nn.functional.cross_entropy(logits, labels), logits


def dataset(rows: int, seed: int) -> TensorDataset:
    ids = torch.randint(12, (2, rows), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(*ids)


def outcome(name: str, folder: str, whole: bool) -> dict[str, Any]:
    """What a script tells, with accelerate's own Accelerator and the full model, or with autoshard's and the sharded one."""
    case, ranks = CASES[name], 1 if whole else dist.get_world_size()
    local = "inputs" in case.get("compile", {})
    batch = BATCH // ranks if local and "split" not in case else BATCH
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = (accelerate.Accelerator if whole else Accelerator)(
        cpu=True,
        gradient_accumulation_steps=case.get("steps", 1),
        dataloader_config=DataLoaderConfiguration(split_batches="split" in case),
    )
    torch.manual_seed(0)
    model: Any = Net().double()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(dataset(32, 1), batch_size=batch, shuffle=not local, generator=generator)
    test = DataLoader(dataset(22, 2), batch_size=batch)
    if not whole:
        rows = BATCH if not local else BATCH // ranks
        example = dataset(rows, 1).tensors
        model = autoshard.compile(model, autoshard.Mesh({"dp": 2}, "ideal_network"), example, **case.get("compile", {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, 0.1, 1.0, 9 * (1 if "split" in case or not local else ranks)
    )
    model, optimizer, loader, test, schedule = accelerator.prepare(model, optimizer, loader, test, schedule)
    told: list[Any] = []

    def epoch() -> None:
        model.train()
        for ids, labels in loader:
            with accelerator.accumulate(model):
                loss, _ = model(ids, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    told.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            told.append(float(accelerator.reduce(loss.detach(), "mean")))
        told.append(schedule.get_last_lr())
        model.eval()
        for ids, labels in test:
            with torch.no_grad():
                logits = model(ids, labels)[1]
            told.append([x.tolist() for x in accelerator.gather_for_metrics((logits.argmax(-1), labels))])

    epoch()
    accelerator.save_state(f"{folder}/{name}", safe_serialization=name != "split")
    before = len(told)
    epoch()
    after = told[before:]
    accelerator.load_state(f"{folder}/{name}")
    if local:
        epoch()
        assert told[-len(after) :] == after
    accelerator.save_model(model, f"{folder}/{name}_model")
    saved = load_file(f"{folder}/{name}_model/model.safetensors")
    assert accelerator.unwrap_model(model) is model
    return {"told": told, "weights": {n: saved[n].tolist() for n in sorted(saved)}, "files": sorted(os.listdir(folder))}


def refusals() -> list[str]:
    """What the sharded module is refused for; it trains with none of it."""

    def prepared(model: Any, **options: Any) -> str:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        kind = options.pop("kind", Accelerator)
        first = options.pop("first", None)
        accelerator = kind(cpu=True, **options)
        if first is not None:
            accelerator.prepare(first)
        try:
            accelerator.prepare(model)
        except Exception as error:
            assert kind is accelerate.Accelerator or not accelerator._models
            return str(error)
        return ""

    model = autoshard.compile(Net().double(), autoshard.Mesh({"dp": 2}, "ideal_network"), dataset(8, 1).tensors)
    return [
        prepared(model, kind=accelerate.Accelerator),
        prepared(model, first=DataLoader(dataset(8, 1))),
        prepared(model),
    ]


def main(rank: int, ranks: int, rendezvous: str, result: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    world.join(rendezvous, rank, ranks)
    folder = Path(result).parent
    found: dict[str, Any] = {}
    for name in sys.argv[4].split(","):
        place = folder / "states" / name
        place.mkdir(parents=True, exist_ok=True)
        found[name] = refusals() if name == "refusals" else outcome(name, str(place), whole=False)
    if rank == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    world.main(main)

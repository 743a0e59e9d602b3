"""One rank of a gloo world with Lightning's Trainer or Fabric; see test_lightning_gloo.py."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
import world
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autoshard
from autoshard.lightning import AutoshardFabricStrategy, AutoshardStrategy

BATCH, WORDS = 8, 12

CASES: dict[str, dict[str, Any]] = {
    "shared": {"validate": 1},
    "sharded": {"compile": {"like": "fsdp"}},
    "local": {"compile": {"inputs": "local"}},
    "bf16": {"precision": "bf16-mixed"},
    "double": {"precision": "64-true"},
    "fabric": {"compile": {"like": "fsdp"}},
    "fabric_local": {"compile": {"inputs": "local"}},
}


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, WORDS))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(self.words(ids)).double(), labels)


def dataset(rows: int, seed: int) -> TensorDataset:
    return TensorDataset(*torch.randint(WORDS, (2, rows), generator=torch.Generator().manual_seed(seed)))


class Setting:
    """A case, on one device or on the ranks of the world."""

    def __init__(self, name: str, whole: bool) -> None:
        case = CASES[name]
        self.options, self.whole = case.get("compile", {}), whole
        self.ranks = 1 if whole else dist.get_world_size()
        self.local = "inputs" in self.options
        self.batch = BATCH // self.ranks if self.local else BATCH
        self.precision, self.validate = case.get("precision", "32-true"), case.get("validate")

    def model(self) -> nn.Module:
        model = Net(0.0 if self.local else 0.1)  # a sampler deals rows out in turn: a mask would be of other rows
        return model if self.precision == "bf16-mixed" else model.double()

    def compiled(self, model: Any) -> Any:
        if self.whole or isinstance(model, autoshard.ShardedModule):
            return model
        mesh = autoshard.Mesh({"dp": self.ranks}, "ideal_network")
        return autoshard.compile(model, mesh, dataset(self.batch, 0).tensors, **self.options)

    def loader(self, rows: int, seed: int, place: Any) -> DataLoader[Any]:
        """``place``: the rank's options of a sampler."""
        data = dataset(rows, seed)
        shared = not self.local or self.whole
        sampler = None if shared else DistributedSampler(data, **place, shuffle=False)
        return DataLoader(data, batch_size=self.batch, sampler=sampler, shuffle=not self.local and seed == 1)


class Training(lightning.LightningModule):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting, self.net, self.told = setting, setting.model(), []

    def configure_model(self) -> None:
        self.net = self.setting.compiled(self.net)

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.net(*batch)
        self.told.append(loss.item())
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        loss = self.net(*batch)
        self.log("loss", loss, sync_dist=True)
        self.told += [loss.item(), float(self.all_gather(batch[0].sum()).sum())]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def train_dataloader(self) -> Any:
        return self.setting.loader(5 * BATCH, 1, self.place())

    def val_dataloader(self) -> Any:
        return self.setting.loader(3 * BATCH, 2, self.place())

    def place(self) -> Any:
        return None if self.setting.whole else self.trainer.strategy.distributed_sampler_kwargs


def trained(setting: Setting, folder: str) -> dict[str, Any]:
    """Two epochs with a validation in between, and a third one from the checkpoint."""
    told: list[float] = []
    for epochs, start in ((2, None), (3, f"{folder}/kept/last.ckpt")):
        torch.manual_seed(epochs)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=0.3,
            precision=setting.precision,
            val_check_interval=setting.validate,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            default_root_dir=folder,
            callbacks=[ModelCheckpoint(f"{folder}/kept", monitor="loss", save_last=True)],
            devices=setting.ranks,
            strategy="auto" if setting.whole else AutoshardStrategy(),
        )
        training = Training(setting)
        trainer.fit(training, ckpt_path=start)
        told += [*training.told, float(trainer.callback_metrics["loss"]), trainer.global_step]
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    state = torch.load(f"{folder}/end.ckpt", weights_only=False)["state_dict"]
    return {
        "told": told,
        "weights": {n: x.tolist() for n, x in state.items()},
        "files": sorted(os.listdir(f"{folder}/kept")),
    }


def looped(setting: Setting, folder: str) -> dict[str, Any]:
    """Fabric's loop; it goes on from a checkpoint as it did."""
    torch.manual_seed(0)
    options = {} if setting.whole else {"strategy": AutoshardFabricStrategy()}
    fabric = lightning.Fabric(accelerator="cpu", devices=setting.ranks, precision=setting.precision, **options)
    fabric.launch()
    net = setting.compiled(setting.model())
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    place = None if setting.whole else fabric.strategy.distributed_sampler_kwargs
    loader = fabric.setup_dataloaders(setting.loader(4 * BATCH, 1, place))
    told: list[float] = []

    def epoch() -> None:
        for number, (ids, labels) in enumerate(loader):
            last = number % 2 == 1
            with fabric.no_backward_sync(model, enabled=not last):
                loss = model(ids, labels)
                fabric.backward(loss / 2)
            if last:
                told.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.3)))
                optimizer.step()
                optimizer.zero_grad()
            told.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))

    epoch()
    fabric.save(f"{folder}/state.ckpt", {"model": model, "optimizer": optimizer, "epoch": 1})
    if setting.local:
        epoch()
        after = told[-6:]
        rest = fabric.load(f"{folder}/state.ckpt", {"model": model, "optimizer": optimizer})
        assert rest == {"epoch": 1}
        epoch()
        assert told[-6:] == after
    state = torch.load(f"{folder}/state.ckpt", weights_only=False)
    moments = {f"{i} {k}": x.tolist() for i, e in state["optimizer"]["state"].items() for k, x in e.items()}
    return {"told": told, "weights": {**{n: x.tolist() for n, x in state["model"].items()}, **moments}, "files": []}


def refusals() -> list[str]:
    """What the strategies refuse; the ranks train nothing."""
    setting = Setting("local", whole=False)

    def refused(training: Training) -> str:
        options: Any = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=AutoshardStrategy(),
            enable_progress_bar=False,
            max_steps=1,
            **options,
        )
        try:
            trainer.fit(training)
        except Exception as error:
            return str(error)
        return ""

    plain, beside = Training(setting), Training(setting)
    plain.setting = Setting("local", whole=True)
    beside.head = nn.Linear(2, 2)
    return [refused(plain), refused(beside)]


def outcome(name: str, folder: str, whole: bool) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return (looped if name.startswith("fabric") else trained)(Setting(name, whole), folder)


def main(rank: int, ranks: int, rendezvous: str, result: str) -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), TORCHELASTIC_RUN_ID="x", **shared)
    world.join(rendezvous, rank, ranks)
    found: dict[str, Any] = {}
    for name in sys.argv[4].split(","):
        folder = Path(result).parent / "states" / name
        folder.mkdir(parents=True, exist_ok=True)
        found[name] = refusals() if name == "refusals" else outcome(name, str(folder), whole=False)
    if rank == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    world.main(main)

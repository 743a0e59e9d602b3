"""Run a saved directory: ``torchrun --nproc-per-node N rank_module.py``, or all ranks in one ``python`` process."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.errors import MeshError, PlanError
from autoshard.runtime.communicator import bind, current
from autoshard.runtime.in_process import World
from autoshard.runtime.module import RankModule
from autoshard.runtime.parameters import wait_gradients
from autoshard.runtime.process_group import TorchCommunicator
from autoshard.runtime.profiling import name_lines
from autoshard.runtime.random import synchronised_rng


def main(rank_module: type[RankModule], file: str) -> None:
    """Load this rank's shards from beside ``file``, take training steps, print the loss.

    ``--inputs``: a safetensors file with the global inputs by name; without it inputs are random, of the shapes and
    value ranges in ``inputs.json``. Raises :class:`MeshError` for a wrong number of processes.
    """
    parser = argparse.ArgumentParser(description=rank_module.__doc__)
    parser.add_argument("--inputs", type=Path, help="safetensors file with the global inputs by name")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps to take (default 1)")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate")
    options = parser.parse_args()
    folder = Path(file).resolve().parent
    _name_lines(rank_module, Path(file))
    if "WORLD_SIZE" in os.environ:
        _distributed(rank_module, folder, options)
    else:
        world = World(rank_module.MESH)
        inputs = _inputs(rank_module, folder, options.inputs)
        runs = [_Run(rank_module, folder, r, torch.device("cpu")) for r in range(world.size)]
        for step in range(options.steps):
            torch.manual_seed(step)
            outputs = world.run(lambda run: run.forward(inputs), [(run,) for run in runs])
            loss = _loss(outputs[0])
            if loss is not None and loss.requires_grad:
                # One graph spans all ranks, and every rank's loss is the whole loss.
                torch.autograd.backward([x for x in map(_loss, outputs) if x is not None])
            for run in runs:
                run.update(options.lr)
            _print(step, outputs[0], loss)


def _distributed(rank_module: type[RankModule], folder: Path, options: argparse.Namespace) -> None:
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        needed = World(rank_module.MESH).size
        if dist.get_world_size() != needed:
            raise MeshError(
                f"the mesh {dict(rank_module.MESH)} has {needed} ranks, but {dist.get_world_size()} processes run: "
                f"torchrun --nproc-per-node {needed} {folder / 'rank_module.py'}"
            )
        comm = TorchCommunicator(rank_module.MESH)
        comm.device = device
        run = _Run(rank_module, folder, comm.rank, device)
        inputs = {n: t.to(device) for n, t in _inputs(rank_module, folder, options.inputs).items()}
        for step in range(options.steps):
            torch.manual_seed(step)
            with bind(comm), synchronised_rng(comm):
                outputs = run.forward(inputs)
                loss = _loss(outputs)
                if loss is not None and loss.requires_grad:
                    loss.backward()
            run.update(options.lr)
            if comm.rank == 0:
                _print(step, outputs, loss)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if not cuda:  # gloo's threads sometimes abort the interpreter's own way out ("terminate called …")
        sys.stdout.flush()
        os._exit(0)


def _name_lines(rank_module: type[RankModule], file: Path) -> None:
    """Modules in profiles from ``lines.json`` beside ``file``, unless that is gone or ``file`` was edited since."""
    table = file.with_name("lines.json")
    if table.exists():
        found = json.loads(table.read_text(encoding="utf-8"))
        if found["sha256"] == sha256(file.read_bytes()).hexdigest():
            name_lines(rank_module, {int(n): module for n, module in found["modules"].items()})


class _Run:
    """One rank's module with its own shards as leaves."""

    def __init__(self, rank_module: type[RankModule], folder: Path, rank: int, device: torch.device) -> None:
        from safetensors import safe_open

        path = folder / f"rank{rank}.safetensors"
        if not path.exists():
            raise PlanError(f"{path} is missing: save the module again with sharded.save({str(folder)!r})")
        self.module = rank_module()
        self.tensors: dict[str, torch.Tensor] = {}
        with safe_open(str(path), framework="pt", device=str(device)) as shards:
            trained = set(json.loads((shards.metadata() or {}).get("trained", "[]")))
            aliases = json.loads((shards.metadata() or {}).get("mutated", "[]"))
            for name in shards.keys():  # noqa: SIM118  not a mapping
                tensor = shards.get_tensor(name)
                self.tensors[name] = nn.Parameter(tensor) if name in trained else tensor
        self.mutated: list[str] = aliases
        self.trained = [t for n, t in self.tensors.items() if n in trained]
        described = folder / "inputs.json"
        self.inputs = json.loads(described.read_text()) if described.exists() else {}
        self.optimizer: torch.optim.Optimizer | None = None

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        waited = dict(zip(self.tensors, wait_gradients(*self.tensors.values()), strict=True))
        self.module.bind_tensors(waited)
        outputs: tuple[Any, ...] = self.module(*(self._part(n, x) for n, x in inputs.items()))
        first = len(outputs) - len(self.mutated)
        for name, new in zip(self.mutated, outputs[first:], strict=True):
            if name in self.tensors:  # of an input it is the caller's business
                self.tensors[name] = new.detach()
        return outputs[:first]

    def _part(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """What this rank brings of an input."""
        for dim, axes in self.inputs.get(name, {}).get("cut", {}).items():
            x = x.narrow(int(dim), *current().chunk(x.shape[int(dim)], current().active(axes)))
        return x

    def update(self, lr: float) -> None:
        if not self.trained:
            return
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.trained, lr=lr)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _inputs(rank_module: type[RankModule], folder: Path, given: Path | None) -> dict[str, torch.Tensor]:
    """The global inputs, in the order forward takes them."""
    names = list(inspect.signature(rank_module.forward).parameters)[1:]
    if given is not None:
        from safetensors.torch import load_file

        found = load_file(str(given))
        if missing := [n for n in names if n not in found]:
            raise PlanError(f"{given} has no input {missing[0]!r}; it needs {', '.join(names)}")
        return {n: found[n] for n in names}
    described = json.loads((folder / "inputs.json").read_text())
    generator = torch.Generator().manual_seed(0)
    return {n: _synthetic(described[n], generator) for n in names}


def _synthetic(described: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    dtype, shape = getattr(torch, described["dtype"]), described["shape"]
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(described["low"], described["high"] + 1, shape, generator=generator).to(dtype)


def _loss(outputs: tuple[Any, ...]) -> torch.Tensor | None:
    """The first scalar."""
    return next((x for x in outputs if isinstance(x, torch.Tensor) and x.ndim == 0 and x.is_floating_point()), None)


def _print(step: int, outputs: tuple[Any, ...], loss: torch.Tensor | None) -> None:
    if loss is not None:
        print(f"step {step}: loss {loss.item():.6f}", flush=True)
        return
    shapes = ", ".join(str(list(x.shape)) for x in outputs if isinstance(x, torch.Tensor))
    print(f"step {step}: outputs (local) {shapes}", flush=True)

"""A saved step on this rank: micro-batches and stages of ``step.json``; by default one of each."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.errors import PlanError
from autoshard.runtime.parameters.block import wait_gradients
from autoshard.runtime.programs.module import RankModule
from autoshard.runtime.programs.pipeline import Form, Message
from autoshard.runtime.transport.communicator import current

Inputs = Mapping[str, torch.Tensor]


@contextlib.contextmanager
def reading(path: Path, remedy: str = "save the module again with sharded.save()") -> Iterator[None]:
    """Raise :class:`PlanError` with ``remedy`` if the file read inside is missing or corrupt."""
    from safetensors import SafetensorError

    try:
        yield
    except (AttributeError, KeyError, OSError, RecursionError, SafetensorError, TypeError, ValueError) as error:
        raise PlanError(f"{path} cannot be read ({type(error).__name__}: {str(error)[:200]}): {remedy}") from error


@dataclass(frozen=True)
class SavedStage:
    """``arguments``: per forward argument (input, micro-batch dim), or number of a message."""

    arguments: tuple[int | tuple[str, int | None], ...]
    sent: int
    mutated: tuple[str, ...]
    """original names of buffers whose new values are the last outputs"""


@dataclass(frozen=True)
class SavedStep:
    """The schedule of a step, besides the classes of its stages."""

    stages: tuple[SavedStage, ...]
    ranks: tuple[tuple[int, ...], ...]
    """per rank along the stage axis: the processes of its stages, by place"""
    schedule: str
    count: int
    """number of micro-batches"""
    loss: int | None
    """which output of the last stage is the loss (a summand per micro-batch); None: unknown"""
    training: bool
    draws: bool
    messages: tuple[tuple[Mapping[str, Any], ...], ...]
    """per stage what it sends: dtype, whether it carries a gradient, shape on every rank"""
    tied: Mapping[str, tuple[int, ...]]
    """parameters that several stages share → these stages"""

    @staticmethod
    def beside(folder: Path, classes: Sequence[type[RankModule]], mutated: Sequence[str]) -> SavedStep:
        """The step that ``step.json`` in ``folder`` describes."""
        path = folder / "step.json"
        if not path.exists():
            names = list(inspect.signature(classes[0].forward).parameters)[1:]
            ranks = 1
            for n in classes[0].MESH.values():
                ranks *= n
            whole = SavedStage(tuple((name, None) for name in names), 0, tuple(mutated))
            return SavedStep((whole,), (tuple(range(ranks)),), "gpipe", 1, None, True, False, ((),), {})
        with reading(path):
            data = json.loads(path.read_text(encoding="utf-8"))
            stages = tuple(
                SavedStage(
                    tuple(a if isinstance(a, int) else tuple(a) for a in s["arguments"]), s["sent"], tuple(s["mutated"])
                )
                for s in data["stages"]
            )
            return SavedStep(
                **{k: data[k] for k in ("schedule", "count", "loss", "training", "draws")},
                stages=stages,
                ranks=tuple(map(tuple, data["ranks"])),
                messages=tuple(map(tuple, data["messages"])),
                tied={fqn: tuple(homes) for fqn, homes in data["tied"].items()},
            )

    def form(self, place: int) -> Form:
        """The form for ranks with this ``place`` among those of their stage."""
        messages = tuple(
            tuple(Message(tuple(m["shapes"][place]), getattr(torch, m["dtype"]), m["grad"]) for m in sent)
            for sent in self.messages
        )
        return Form(self.schedule, self.count, messages, self.loss if self.training else None, self.draws)

    def of_rank(self, rank: int) -> tuple[int, int]:
        """(position of a process along the stage axis, its place within its stage)."""
        return next((k, row.index(rank)) for k, row in enumerate(self.ranks) if rank in row)

    def homes(self, fqn: str) -> list[int]:
        """The ranks along the stage axis that hold a shared parameter."""
        return sorted({stage % len(self.ranks) for stage in self.tied[fqn]})


class Held:
    """State of one process: the modules of its stages, and its shards as leaves."""

    def __init__(
        self, classes: Sequence[type[RankModule]], step: SavedStep | None, folder: Path, rank: int, device: torch.device
    ) -> None:
        from safetensors import safe_open

        path = folder / f"rank{rank}.safetensors"
        if not path.exists():
            raise PlanError(f"{path} is missing: save the module again with sharded.save({str(folder)!r})")
        self.tensors: dict[str, torch.Tensor] = {}
        with reading(path), safe_open(str(path), framework="pt", device=str(device)) as shards:
            metadata = shards.metadata() or {}
            trained = set(json.loads(metadata.get("trained", "[]")))
            for name in shards.keys():  # noqa: SIM118  not a mapping
                tensor = shards.get_tensor(name)
                self.tensors[name] = nn.Parameter(tensor) if name in trained else tensor
        self.step = step or SavedStep.beside(folder, classes, json.loads(metadata.get("mutated", "[]")))
        mine = self.step.of_rank(rank)[0]
        numbers = range(mine, len(classes), len(self.step.ranks))
        self.modules = {number: classes[number]() for number in numbers}
        self.trained = {n: t for n, t in self.tensors.items() if n in trained}
        described = folder / "inputs.json"
        with reading(described):
            self.inputs = json.loads(described.read_text()) if described.exists() else {}
        self.written: dict[str, torch.Tensor] = {}
        self.fresh = [*self.trained.values()]
        """parameters without a gradient so far: dense or sparse is unknown"""
        self.optimizers: list[torch.optim.Optimizer] = []

    def call(self, number: int, index: int, received: Sequence[torch.Tensor], inputs: Inputs) -> tuple[Any, ...]:
        """Outputs of stage ``number`` in micro-batch ``index``. ``inputs``: global."""
        stage, module = self.step.stages[number], self.modules[number]
        own = {name: self.tensors[name] for name in module.tensor_names}
        module.bind_tensors(dict(zip(own, wait_gradients(*own.values()), strict=True)))
        arguments = (received[a] if isinstance(a, int) else self._part(inputs, *a, index) for a in stage.arguments)
        outputs: tuple[Any, ...] = module(*arguments)
        first = len(outputs) - len(stage.mutated)
        self.written |= {n: x.detach() for n, x in zip(stage.mutated, outputs[first:], strict=True)}
        return outputs[:first]

    def _part(self, inputs: Inputs, name: str, dim: int | None, index: int) -> torch.Tensor:
        """This rank's shard of an input in a micro-batch."""
        x = inputs[name]
        if dim is not None:
            length = x.shape[dim] // self.step.count
            x = x.narrow(dim, index * length, length)
        for cut, axes in self.inputs.get(name, {}).get("cut", {}).items():
            x = x.narrow(int(cut), *current().chunk(x.shape[int(cut)], current().active(axes)))
        return x

    def update(self, lr: float) -> None:
        """Write mutated buffers, and step AdamW (SparseAdam for sparse gradients)."""
        self.tensors |= self.written  # a mutated input's value is not read again
        for kind, is_sparse in ((torch.optim.AdamW, False), (torch.optim.SparseAdam, True)):
            own = [x for x in self.fresh if x.grad is not None and x.grad.is_sparse == is_sparse]
            if own:
                self.optimizers.append(kind(own, lr=lr))
        self.fresh = [x for x in self.fresh if x.grad is None]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

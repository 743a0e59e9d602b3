"""A program loaded on a rank, and the tensors that it reads."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from autoshard.layout import Layout, Shard
from autoshard.module.dtensors.owned import local_of
from autoshard.module.model.original import Original
from autoshard.module.programs.executable import Executable
from autoshard.module.programs.simulate import shard_of
from autoshard.module.ranks.leaves import locals_of
from autoshard.passes.ir.program import Program, reads
from autoshard.runtime.parameters.flat_bucket import FlatBucket
from autoshard.runtime.parameters.gradients import SMALL, Entering
from autoshard.runtime.transport.communicator import Communicator
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.process_group import TorchCommunicator


class Trained(NamedTuple):
    """Trained parameters: names; numbers of those reduced last; of those that only enter."""

    names: tuple[str, ...]
    last: tuple[int, ...]
    alone: frozenset[int]


@dataclass(frozen=True)
class Loaded:
    """``module``: a rank module; the names of what it reads are found once."""

    module: Any
    comm: Communicator
    parameters: Sequence[str]
    buffers: Sequence[tuple[str, bool]]
    """(name, whether the forward writes it in a program with a backward)"""
    constants: Mapping[str, torch.Tensor]
    """this rank's shards"""
    layouts: Mapping[str, Layout]
    """of buffers"""
    recorded: bool
    """whether the program has a backward"""
    last: tuple[frozenset[str], tuple[str, ...]]
    """(parameters reduced when the backward ends, over these axes): :func:`summed_last`"""
    alone: frozenset[str]
    """parameters read only by entering their block, see :func:`entering_alone`"""
    buckets: dict[Entering, FlatBucket] = field(default_factory=dict)
    """buckets by which parameters entered their blocks in earlier forwards"""
    sums: dict[tuple[int, bool], FlatBucket] = field(default_factory=dict)
    """(count, whether deferred) → bucket of the parameters that are reduced last"""
    trained: dict[tuple[bool, ...], Trained] = field(default_factory=dict)
    """by requires_grad of each parameter"""

    @staticmethod
    def of(executable: Executable, comm: Communicator, device: torch.device) -> Loaded:
        """Load ``executable`` on the rank of ``comm``, constants on ``device``."""
        graph, layouts = executable.graph, executable.compiled.plan.layouts
        of = {kind: [i for i in graph.inputs if i.kind == kind] for kind in ("parameter", "buffer", "constant")}
        constants = {i.fqn: graph.constants[i.name].to(device) for i in of["constant"]}
        return Loaded(
            executable.rank_module(),
            comm,
            [i.fqn for i in of["parameter"]],
            [(i.fqn, graph.training and i.fqn in graph.mutations) for i in of["buffer"]],
            {fqn: _part(x, layouts[fqn], comm.rank) for fqn, x in constants.items()},
            {i.fqn: layouts[i.fqn] for i in of["buffer"]},
            graph.training,
            summed_last(executable.compiled.program, comm) if graph.training else (frozenset(), ()),
            entering_alone(executable.compiled.program) if graph.training else frozenset(),
        )

    def tensors(self, model: Original) -> dict[str, torch.Tensor]:
        """This rank's shards of all tensors of ``model`` that a forward reads."""
        found, held = dict(self.constants), model.each(self.parameters)
        is_trained = tuple([self.recorded and p.requires_grad for p in held])
        trained = self._trained(is_trained)
        if trained.names:
            parameters = [*itertools.compress(held, is_trained)]
            own = locals_of(self.comm, parameters, self._summed(trained.last), self.buckets, trained.alone)
            found.update(zip(trained.names, own, strict=True))
        if len(trained.names) < len(held):
            rest = zip(self.parameters, held, is_trained, strict=True)
            found.update((name, local_of(p)) for name, p, is_one in rest if not is_one)
        for name, written in self.buffers:
            part = _part(model.tensor(name), self.layouts[name], self.comm.rank)
            found[name] = part.clone() if written else part  # the backward reads the old value
        return found

    def _trained(self, flags: tuple[bool, ...]) -> Trained:
        """The trained parameters for these flags."""
        if flags not in self.trained:
            names = tuple(itertools.compress(self.parameters, flags))
            last = tuple(i for i, name in enumerate(names) if name in self.last[0])
            alone = frozenset(i for i, name in enumerate(names) if name in self.alone)
            self.trained[flags] = Trained(names, last, alone)
        return self.trained[flags]

    def _summed(self, numbers: Sequence[int]) -> tuple[Sequence[int], FlatBucket | None]:
        """Numbers of the parameters whose gradients are reduced last, and their bucket."""
        if not numbers:
            return (), None
        assert isinstance(self.comm, TorchCommunicator)
        key = len(numbers), self.comm.deferred
        if key not in self.sums:
            moves = [Move("I", "R", self.last[1], module="")] * len(numbers)
            self.sums[key] = FlatBucket(self.comm, moves, listed=True)
        return numbers, self.sums[key]


def summed_last(program: Program, comm: Communicator) -> tuple[frozenset[str], tuple[str, ...]]:
    """Parameters (and axes) whose gradients are small enough for one reduction after the backward.

    They need no autograd node per block. Not if the forward reads one elsewhere, which brings no
    partial sum, or if others are trained, such as tables. Expert weights do not count: their
    exchange comes before.
    """
    entering = [s for s in program.statements if s.call.fn == "enter_parameters"]
    groups = {comm.active(s.call.args[1]) for s in entering}
    names = {name for s in entering for name in reads(s)}
    others = {name for s in program.statements if s.call.fn != "enter_parameters" for name in reads(s)}
    of_experts = {name for s in program.statements if s.call.fn == "experts" for name in reads(s)}
    alone = sum(s.parameter for s in program.statements) == len(entering) and names.isdisjoint(
        others | program.returned
    )
    types = [(program.layouts[n], program.types[n]) for n in names]
    size = sum(math.prod(layout.max_local_shape(t.shape)) * t.dtype.itemsize for layout, t in types)
    trained = {i.name for i in program.graph.inputs if i.kind == "parameter" and program.types[i.name].grad}
    alone = alone and names | of_experts >= trained
    if len(groups) != 1 or not all(groups) or not alone or any(s.call.kwargs for s in entering) or size >= SMALL:
        return frozenset(), ()
    return frozenset(i.fqn for i in program.graph.inputs if i.name in names), groups.pop()


def entering_alone(program: Program) -> frozenset[str]:
    """Parameters read only by entering their blocks: they may enter before the forward.

    Not in a recomputed block, which lets them enter again in the backward.
    """
    counts = Counter(name for s in program.statements for name in reads(s))
    entering = (s for s in program.statements if s.call.fn == "enter_parameters" and not s.again)
    names = {name for s in entering for name in reads(s) if counts[name] == 1} - program.returned
    return frozenset(i.fqn for i in program.graph.inputs if i.kind == "parameter" and i.name in names)


def _part(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    if isinstance(full, DTensor):
        return full._local_tensor
    return shard_of(full, layout, rank) if layout.axes_with(Shard) else full

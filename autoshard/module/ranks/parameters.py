"""Parameters of one rank on their way into a forward, and what ``.grad`` is after the backward.
Inside ``no_sync()`` a gradient stays a summand, a DTensor Partial over the axes of its last sum,
which the next backward outside adds: one reduction."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard import runtime
from autoshard.errors import RuntimeMismatchError
from autoshard.layout import Layout, Shard
from autoshard.module.dtensors.accumulate_grad import accumulate_sparse, silence_without_gradient
from autoshard.module.dtensors.module_dtensor import (
    EXTERNAL_GRADIENT,
    from_local_shard,
    local_shard,
    module_dtensor,
    summed,
)
from autoshard.module.dtensors.segments import shard_of
from autoshard.module.model.original import OriginalModel
from autoshard.module.programs.executable import Executable
from autoshard.passes.ir.program import Program, reads
from autoshard.runtime.parameters.block import buckets_entering_early, enter_parameters_early
from autoshard.runtime.parameters.bucket import FlatBucket
from autoshard.runtime.parameters.gradients import MIN_BUCKET_BYTES, EnteringKey
from autoshard.runtime.parameters.recompute import CHANGED_IN_PLACE
from autoshard.runtime.transport.autograd import LeanFunction
from autoshard.runtime.transport.communicator import Communicator
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.process_group import TorchCommunicator
from autoshard.torch_private.autograd import engine_will_run

SummandAxes = tuple[str, ...]


def local_parameters(
    comm: Communicator,
    parameters: Sequence[Any],
    last: tuple[Sequence[int], FlatBucket | None] = ((), None),
    buckets: dict[EnteringKey, FlatBucket] | None = None,
    alone: frozenset[int] = frozenset(),
) -> tuple[Tensor, ...]:
    """Local shards of DTensor parameters, for one forward."""
    gradients = runtime.Gradients(
        comm, lambda numbers, axes: _take_summands(comm, parameters, numbers, axes), last, buckets
    )
    entering = buckets_entering_early(gradients, alone) if buckets and torch.is_grad_enabled() else []
    ahead = {n for key, _ in entering for n in key.numbers}
    others = [n for n in range(len(parameters)) if n not in ahead]
    gradients.numbers = others
    *locals_, begun = _LocalShards.apply(gradients, *parameters)
    if not entering:
        return tuple(locals_)
    found = dict(zip(others, locals_, strict=True)) | enter_parameters_early(
        entering, _parameter_shards(parameters), gradients, begun
    )
    return tuple([found[n] for n in range(len(parameters))])


def _parameter_shards(parameters: Sequence[Any]) -> list[Tensor]:
    """:func:`local_shard` each, without a Python call for shards that this rank has."""
    parts = [(p, p._local_tensor) for p in parameters]
    return [x if x.ndim == p.ndim else local_shard(p) for p, x in parts]


class _LocalShards(LeanFunction):
    """DTensor parameters → local shards (but those that enter ahead) and an empty tensor. The
    backward makes DTensor gradients, :func:`runtime.wait_gradients` included; reductions under
    way are ``pending``."""

    @staticmethod
    def forward(ctx: Any, pending: runtime.Gradients, *parameters: Any) -> tuple[Tensor, ...]:
        ctx.pending, ctx.parameters = pending, parameters
        ctx.specs = [p._spec for p in parameters]
        ctx.versions = _versions(parameters)
        ctx.set_materialize_grads(False)
        begun = parameters[0]._local_tensor.new_empty(0)
        return *[x.detach() for x in _parameter_shards([parameters[n] for n in pending.numbers or ()])], begun

    @staticmethod
    def backward(ctx: Any, *brought: Tensor | None) -> Any:
        # In-place DTensor ops change the local tensor unseen by autograd.
        if _versions(ctx.parameters) != ctx.versions:
            raise RuntimeMismatchError(CHANGED_IN_PLACE.format("a parameter"))
        pending, specs, parameters = ctx.pending, ctx.specs, ctx.parameters
        gradients: list[Tensor | None] = [None] * len(parameters)
        for n, g in zip(pending.numbers or (), brought, strict=False):
            gradients[n] = g
        owned = _unshared_gradients(pending.finish(gradients), gradients)
        if not _all_strides_match(parameters, owned):
            pending.wait()
            owned = [
                None if g is None else _accumulate_or_dense(p, g, spec)
                for p, g, spec in zip(parameters, owned, specs, strict=True)
            ]
        with torch.DisableTorchFunctionSubclass():
            for p, g in zip(parameters, owned, strict=True):
                if g is None and p.requires_grad:
                    silence_without_gradient(p)
        if pending.summands or _unsummed_ids:
            pending.wait()
            owned, specs = _align_gradients(pending, parameters, owned, specs)
        if torch.is_grad_enabled():
            pending.wait()
            pairs = zip(owned, specs, strict=True)
            return None, *(None if g is None else from_local_shard(g, spec) for g, spec in pairs)
        found = [None if g is None else module_dtensor(g, spec) for g, spec in zip(owned, specs, strict=True)]
        # Skip AccumulateGrad nodes that would only assign: they make a DTensor per gradient.
        are_run = _engine_runs_each([leaf for leaf, _ in ctx.next_functions])
        with torch.DisableTorchFunctionSubclass():  # no lookups per DTensor attribute
            leaves = zip(parameters, owned, are_run, strict=True)
            plain = [g is not None and is_run and _takes_gradient_directly(p, g) for p, g, is_run in leaves]
            pending.wait()  # last, so that the above overlaps with communication
            for i, p in enumerate(parameters):
                if plain[i] and p.grad is None:
                    p.grad, found[i] = found[i], None
        return None, *found


def _versions(parameters: Sequence[Any]) -> list[int]:
    with torch.DisableTorchFunctionSubclass():
        return [p._version for p in parameters]


def _takes_gradient_directly(p: Any, local: Tensor) -> bool:
    """Whether ``p`` is a leaf without hooks and in the dtype of ``local``: no conversion needed."""
    hooked = p._backward_hooks or p._post_accumulate_grad_hooks
    return p.is_leaf and p.requires_grad and not hooked and local.dtype == getattr(p, "grad_dtype", p.dtype)


def _unshared_gradients(gradients: Sequence[Tensor | None], brought: Sequence[Tensor | None]) -> list[Tensor | None]:
    """``gradients``, with copies of those ``brought`` by autograd that others hold, too (operands
    of a sum share one), as autograd does for plain parameters."""
    own = list(gradients)
    kept = [i for i, g in enumerate(gradients) if g is not None and g is brought[i] and not g.is_sparse]
    places = [g.data_ptr() for g in brought if g is not None and not g.is_sparse] if kept else []
    apart = len({*places}) == len(places)
    for i in kept:
        g: Any = own[i]
        if g._use_count() > 1 or hasattr(g, EXTERNAL_GRADIENT) or not (apart or places.count(g.data_ptr()) == 1):
            own[i] = g.clone()
    return own


def _accumulate_or_dense(p: Any, gradient: Tensor, spec: Any) -> Tensor | None:
    """A dense gradient with the parameter's strides, which fused optimizers need; None for sparse
    ones, which join ``p.grad`` or, if autograd accumulates none, become dense."""
    if _strides_match(p, gradient):
        return gradient
    if not gradient.is_sparse:
        return gradient.new_empty_strided(gradient.shape, p._local_tensor.stride()).copy_(gradient)
    if not _will_accumulate(p):
        return gradient.to_dense()
    accumulate_sparse(p, gradient, spec)
    return None


def _all_strides_match(parameters: Sequence[Any], gradients: Sequence[Tensor | None]) -> bool:
    """Whether all have their parameter's strides; without a Python call each if contiguous."""
    there = [g for g in gradients if g is not None]
    plain = not any(map(_IS_SPARSE, there)) and all(map(Tensor.is_contiguous, there))
    if plain and all(map(Tensor.is_contiguous, map(_GET_LOCAL, parameters))):
        return True
    return all(map(_strides_match, parameters, gradients))


_IS_SPARSE, _GET_LOCAL = operator.attrgetter("is_sparse"), operator.attrgetter("_local_tensor")


def _strides_match(p: Any, gradient: Tensor | None) -> bool:
    """Whether a gradient is absent, or dense with the parameter's strides."""
    if gradient is None:
        return True
    if gradient.is_sparse:
        return False
    local: Tensor = p._local_tensor
    return (gradient.is_contiguous() and local.is_contiguous()) or gradient.stride() == local.stride()


def _align_gradients(
    pending: runtime.Gradients, parameters: Sequence[Any], gradients: Sequence[Any], specs: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Gradients as partial sums over the axes that they share with ``.grad``, and their specs."""
    comm, given, over = pending.comm, list(gradients), list(specs)
    for i, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
        if g is not None:
            own = pending.summands.get(i, ())
            axes = _align_summands(comm, p, own)
            given[i], over[i] = pending.summand(g, own, axes), _partial_spec(comm, specs[i], axes)
    return given, over


def _unsummed_axes(comm: Communicator, gradient: Any) -> SummandAxes:
    """The axes over which a gradient is a partial sum."""
    if not isinstance(gradient, DTensor):
        return ()
    return tuple(a for a, p in zip(comm.mesh, gradient.placements, strict=True) if p.is_partial())


def _partial_spec(comm: Communicator, spec: Any, axes: SummandAxes) -> Any:
    """``spec`` with partial sums over ``axes`` only."""
    if not axes and not any(p.is_partial() for p in spec.placements):
        return spec
    pairs = zip(comm.mesh, summed(spec.placements), strict=True)
    placements = [Partial() if a in axes else p for a, p in pairs]
    return type(spec)(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def _take_summands(
    comm: Communicator, parameters: Sequence[Any], numbers: Sequence[int], axes: SummandAxes
) -> dict[int, Tensor]:
    """Take partial sums over ``axes`` out of ``.grad``, to add them to this backward's.
    Not from parameters with hooks: those have seen them."""
    found: dict[int, Tensor] = {}
    for number in numbers if _unsummed_ids else ():
        p = parameters[number]
        if (
            p.grad is not None
            and not p._backward_hooks
            and _unsummed_axes(comm, p.grad) == axes
            and _will_accumulate(p)
        ):
            found[number], p.grad = p.grad.to_local(), None
    return found


def _align_summands(comm: Communicator, p: Any, axes: SummandAxes) -> SummandAxes:
    """Align ``p.grad`` and a new partial sum over ``axes``; returns the axes of both."""
    held = None if p.grad is None else _unsummed_axes(comm, p.grad)
    if held is not None and held != axes and not _will_accumulate(p):
        held = None
    if axes:
        _unsummed_ids.add(id(p))
    if held is None or held == axes:
        return axes
    local, spec = p.grad.to_local(), p.grad._spec
    if not axes:  # no bucket included it
        with torch.no_grad():
            total = comm.apply(Move("P", "I", held), local)
        p.grad = module_dtensor(total, _partial_spec(comm, spec, ()))
        return axes
    gradients = runtime.Gradients(comm)
    both = gradients.together(held, axes)
    p.grad = module_dtensor(gradients.summand(local, held, both), _partial_spec(comm, spec, both))
    return both


def _will_accumulate(p: Tensor) -> bool:
    """Whether the running backward adds to ``p.grad``: not under torch.autograd.grad."""
    return p.is_leaf and p.requires_grad and _engine_runs(torch.autograd.graph.get_gradient_edge(p).node)


def _engine_runs(node: Any) -> bool:
    """Whether the running backward executes this node."""
    try:
        return bool(engine_will_run(node))
    except RuntimeError:  # torch.autograd.grad stops at it
        return False


def _engine_runs_each(nodes: Sequence[Any]) -> list[bool]:
    """:func:`_engine_runs` of each, by few Python calls unless torch.autograd.grad stops there."""
    try:
        return [*map(engine_will_run, nodes)]
    except RuntimeError:
        return [*map(_engine_runs, nodes)]


_unsummed_ids: set[int] = set()
"""ids of parameters with partial-sum gradients; weak references would block ``.to(dtype)``"""


def _refuse_unsummed_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not _unsummed_ids:
        return
    waiting = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            waiting += (
                id(p) in _unsummed_ids
                and isinstance(p.grad, DTensor)
                and any(x.is_partial() for x in p.grad.placements)
            )
    if waiting:
        raise RuntimeMismatchError(
            f"{waiting} gradients are not summed over the ranks yet, because the last backward pass "
            "was inside no_sync(). Run the last forward and backward before a step outside no_sync()."
        )


register_optimizer_step_pre_hook(_refuse_unsummed_step)


class TrainedParameters(NamedTuple):
    """Trained parameters: names; numbers of those reduced last; of those that only enter."""

    names: tuple[str, ...]
    last: tuple[int, ...]
    alone: frozenset[int]


@dataclass(frozen=True)
class RankProgram:
    """``module``: a rank module; the names of what it reads are found once."""

    module: Any
    comm: Communicator
    parameters: Sequence[str]
    buffers: Sequence[tuple[str, bool]]
    """(name, whether the forward writes it in a program with a backward)"""
    constants: Mapping[str, Tensor]
    """this rank's shards"""
    layouts: Mapping[str, Layout]
    """of buffers"""
    recorded: bool
    """whether the program has a backward"""
    last: tuple[frozenset[str], tuple[str, ...]]
    """(parameters reduced when the backward ends, over these axes): :func:`summed_last`"""
    alone: frozenset[str]
    """parameters read only by entering their block, see :func:`entering_alone`"""
    buckets: dict[EnteringKey, FlatBucket] = field(default_factory=dict)
    """buckets by which parameters entered their blocks in earlier forwards"""
    sums: dict[tuple[int, bool], FlatBucket] = field(default_factory=dict)
    """(count, whether deferred) → bucket of the parameters that are reduced last"""
    trained: dict[tuple[bool, ...], TrainedParameters] = field(default_factory=dict)
    """by requires_grad of each parameter"""

    @staticmethod
    def of(executable: Executable, comm: Communicator, device: torch.device) -> RankProgram:
        """Load ``executable`` on the rank of ``comm``, constants on ``device``."""
        graph, layouts = executable.graph, executable.compiled.plan.layouts
        of = {kind: [i for i in graph.inputs if i.kind == kind] for kind in ("parameter", "buffer", "constant")}
        constants = {i.fqn: graph.constants[i.name].to(device) for i in of["constant"]}
        return RankProgram(
            executable.rank_module(),
            comm,
            [i.fqn for i in of["parameter"]],
            [(i.fqn, graph.training and i.fqn in graph.mutations) for i in of["buffer"]],
            {fqn: _rank_shard(x, layouts[fqn], comm.rank) for fqn, x in constants.items()},
            {i.fqn: layouts[i.fqn] for i in of["buffer"]},
            graph.training,
            summed_last(executable.compiled.program, comm) if graph.training else (frozenset(), ()),
            entering_alone(executable.compiled.program) if graph.training else frozenset(),
        )

    def without_last(self) -> RankProgram:
        """This program, with every gradient reduced where the backward makes it."""
        return replace(self, last=(frozenset(), ()), trained={}) if self.last[1] else self

    def tensors(self, model: OriginalModel, aside: Mapping[str, Tensor] = {}) -> dict[str, Tensor]:
        """This rank's shards of all tensors of ``model`` that a forward reads. ``aside``: local
        tensors of parameters that others read, too; see :meth:`without_last`."""
        found, held = dict(self.constants), model.each(self.parameters)
        is_trained = tuple(
            [self.recorded and p.requires_grad and n not in aside for n, p in zip(self.parameters, held, strict=True)]
        )
        trained = self._trained(is_trained)
        if trained.names:
            parameters = [*itertools.compress(held, is_trained)]
            own = local_parameters(self.comm, parameters, self._summed(trained.last), self.buckets, trained.alone)
            found.update(zip(trained.names, own, strict=True))
        if len(trained.names) < len(held):
            rest = zip(self.parameters, held, is_trained, strict=True)
            found.update((name, local_shard(p)) for name, p, is_one in rest if not is_one)
        for name, written in self.buffers:
            part = _rank_shard(model.tensor(name), self.layouts[name], self.comm.rank)
            found[name] = part.clone() if written else part  # the backward reads the old value
        found.update(aside)
        return found

    def _trained(self, flags: tuple[bool, ...]) -> TrainedParameters:
        if flags not in self.trained:
            names = tuple(itertools.compress(self.parameters, flags))
            last = tuple(i for i, name in enumerate(names) if name in self.last[0])
            alone = frozenset(i for i, name in enumerate(names) if name in self.alone)
            self.trained[flags] = TrainedParameters(names, last, alone)
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
    """Parameters (and axes) whose gradients are small enough for one reduction after the backward,
    without a node per block. Not if the forward reads one elsewhere (no partial sum), or if
    others are trained, such as tables; expert weights, exchanged before, do not count."""
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
    trained = {i.name for i in program.graph.of_kind("parameter") if program.types[i.name].grad}
    alone = alone and names | of_experts >= trained
    if (
        len(groups) != 1
        or not all(groups)
        or not alone
        or any(s.call.kwargs for s in entering)
        or size >= MIN_BUCKET_BYTES
    ):
        return frozenset(), ()
    return frozenset(i.fqn for i in program.graph.inputs if i.name in names), groups.pop()


def entering_alone(program: Program) -> frozenset[str]:
    """Parameters that may enter before the forward: read only by entering their blocks, and not in
    a recomputed one."""
    counts = Counter(name for s in program.statements for name in reads(s))
    entering = (s for s in program.statements if s.call.fn == "enter_parameters" and not s.again)
    names = {name for s in entering for name in reads(s) if counts[name] == 1} - program.returned
    return frozenset(i.fqn for i in program.graph.of_kind("parameter") if i.name in names)


def _rank_shard(full: Tensor, layout: Layout, rank: int) -> Tensor:
    if isinstance(full, DTensor):
        return full._local_tensor
    return shard_of(full, layout, rank) if layout.axes_with(Shard) else full

"""Local shards of parameters for a forward, and their ``.grad`` after the backward.

Inside ``no_sync()`` a gradient stays a partial sum: a DTensor, Partial over the axes of its last
reduction. The next backward outside adds it, so that several backwards cost one reduction.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard import runtime
from autoshard.errors import RuntimeMismatchError
from autoshard.module.dtensors.made import GIVEN, new_dtensor
from autoshard.module.dtensors.owned import local_of
from autoshard.module.dtensors.sparse_gradients import accumulate
from autoshard.module.parameter_hooks import unheard
from autoshard.runtime.parameters.again import CHANGED
from autoshard.runtime.parameters.block import enter_ahead, to_enter_ahead
from autoshard.runtime.parameters.flat_bucket import FlatBucket
from autoshard.runtime.parameters.gradients import Entering
from autoshard.runtime.transport.communicator import Communicator
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.node import Node

Axes = tuple[str, ...]


def locals_of(
    comm: Communicator,
    parameters: Sequence[Any],
    last: tuple[Sequence[int], FlatBucket | None] = ((), None),
    buckets: dict[Entering, FlatBucket] | None = None,
    alone: frozenset[int] = frozenset(),
) -> tuple[torch.Tensor, ...]:
    """Local shards of DTensor parameters, for one forward."""
    gradients = runtime.Gradients(comm, lambda numbers, axes: _taken(comm, parameters, numbers, axes), last, buckets)
    entering = to_enter_ahead(gradients, alone) if buckets and torch.is_grad_enabled() else []
    ahead = {n for key, _ in entering for n in key.numbers}
    others = [n for n in range(len(parameters)) if n not in ahead]
    gradients.numbers = others
    *locals_, begun = _Locals.apply(gradients, *parameters)
    if not entering:
        return tuple(locals_)
    found = dict(zip(others, locals_, strict=True)) | enter_ahead(entering, _held(parameters), gradients, begun)
    return tuple([found[n] for n in range(len(parameters))])


def _held(parameters: Sequence[Any]) -> list[torch.Tensor]:
    """:func:`local_of` each, without a Python call for shards that this rank has."""
    parts = [(p, p._local_tensor) for p in parameters]
    return [x if x.ndim == p.ndim else local_of(p) for p, x in parts]


class _Locals(Node):
    """DTensor parameters → local shards (but those that enter ahead) and an empty tensor.

    The backward makes DTensor gradients with the parameters' placements. It includes
    :func:`runtime.wait_gradients`; reductions under way are ``pending``.
    """

    @staticmethod
    def forward(ctx: Any, pending: runtime.Gradients, *parameters: Any) -> tuple[torch.Tensor, ...]:
        ctx.pending, ctx.parameters = pending, parameters
        ctx.specs = [p._spec for p in parameters]
        ctx.versions = _versions(parameters)
        ctx.set_materialize_grads(False)
        begun = parameters[0]._local_tensor.new_empty(0)
        return *[x.detach() for x in _held([parameters[n] for n in pending.numbers or ()])], begun

    @staticmethod
    def backward(ctx: Any, *brought: torch.Tensor | None) -> Any:
        # In-place DTensor ops change the local tensor unseen by autograd.
        if _versions(ctx.parameters) != ctx.versions:
            raise RuntimeMismatchError(CHANGED.format("a parameter"))
        pending, specs, parameters = ctx.pending, ctx.specs, ctx.parameters
        gradients: list[torch.Tensor | None] = [None] * len(parameters)
        for n, g in zip(pending.numbers or (), brought, strict=False):
            gradients[n] = g
        owned = _owned(pending.finish(gradients), gradients)
        if not _lie_as(parameters, owned):
            pending.wait()
            owned = [
                None if g is None else _in_rows(p, g, spec) for p, g, spec in zip(parameters, owned, specs, strict=True)
            ]
        with torch._C.DisableTorchFunctionSubclass():
            for p, g in zip(parameters, owned, strict=True):
                if g is None and p.requires_grad:
                    unheard(p)
        if pending.summands or _deferred:
            pending.wait()
            owned, specs = _met(pending, parameters, owned, specs)
        if torch.is_grad_enabled():
            pending.wait()
            there = [i for i, g in enumerate(owned) if g is not None]
            made = iter(_Globals.apply([specs[i] for i in there], *(owned[i] for i in there)))  # type: ignore[no-untyped-call]
            return None, *(None if g is None else next(made) for g in owned)
        found = [
            None if g is None else new_dtensor(DTensor, g, spec, requires_grad=False)
            for g, spec in zip(owned, specs, strict=True)
        ]
        # Skip AccumulateGrad nodes that would only assign: they make a DTensor per gradient.
        are_run = _are_run([leaf for leaf, _ in ctx.next_functions])
        with torch._C.DisableTorchFunctionSubclass():  # no lookups per DTensor attribute
            leaves = zip(parameters, owned, are_run, strict=True)
            plain = [g is not None and is_run and _is_plain(p, g) for p, g, is_run in leaves]
            pending.wait()  # last, so that the above overlaps with communication
            for i, p in enumerate(parameters):
                if plain[i] and p.grad is None:
                    p.grad, found[i] = found[i], None
        return None, *found


def _versions(parameters: Sequence[Any]) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():
        return [p._version for p in parameters]


def _is_plain(p: Any, local: torch.Tensor) -> bool:
    """Whether ``p`` is a leaf without hooks and in the dtype of ``local``: no conversion needed."""
    hooked = p._backward_hooks or p._post_accumulate_grad_hooks
    return p.is_leaf and p.requires_grad and not hooked and local.dtype == getattr(p, "grad_dtype", p.dtype)


def _owned(
    gradients: Sequence[torch.Tensor | None], brought: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """``gradients``, with copies of those ``brought`` by autograd that others hold, too.

    Autograd copies so for plain parameters: operands of a sum share one gradient tensor.
    """
    own = list(gradients)
    kept = [i for i, g in enumerate(gradients) if g is not None and g is brought[i] and not g.is_sparse]
    places = [g.data_ptr() for g in brought if g is not None and not g.is_sparse] if kept else []
    apart = len({*places}) == len(places)
    for i in kept:
        g: Any = own[i]
        if g._use_count() > 1 or hasattr(g, GIVEN) or not (apart or places.count(g.data_ptr()) == 1):
            own[i] = g.clone()
    return own


def _in_rows(p: Any, gradient: torch.Tensor, spec: Any) -> torch.Tensor | None:
    """A dense gradient with the parameter's strides; None for sparse ones, which join ``p.grad``.

    Sparse ones become dense if autograd accumulates none. Fused optimizers need equal strides.
    """
    if _lies_as(p, gradient):
        return gradient
    if not gradient.is_sparse:
        return gradient.new_empty_strided(gradient.shape, p._local_tensor.stride()).copy_(gradient)
    if not _accumulates(p):
        return gradient.to_dense()
    accumulate(p, gradient, spec)
    return None


def _lie_as(parameters: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> bool:
    """Whether all have their parameter's strides; without a Python call each if contiguous."""
    there = [g for g in gradients if g is not None]
    plain = not any(map(_IS_SPARSE, there)) and all(map(torch.Tensor.is_contiguous, there))
    if plain and all(map(torch.Tensor.is_contiguous, map(_LOCAL, parameters))):
        return True
    return all(map(_lies_as, parameters, gradients))


_IS_SPARSE, _LOCAL = operator.attrgetter("is_sparse"), operator.attrgetter("_local_tensor")


def _lies_as(p: Any, gradient: torch.Tensor | None) -> bool:
    """Whether a gradient is absent, or dense with the parameter's strides."""
    if gradient is None:
        return True
    if gradient.is_sparse:
        return False
    local: torch.Tensor = p._local_tensor
    return (gradient.is_contiguous() and local.is_contiguous()) or gradient.stride() == local.stride()


def _global(gradient: torch.Tensor, spec: Any) -> DTensor:
    found: DTensor = new_dtensor(DTensor, gradient.detach(), spec, requires_grad=False)
    return found


def _met(
    pending: runtime.Gradients, parameters: Sequence[Any], gradients: Sequence[Any], specs: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Gradients as partial sums over the axes that they share with ``.grad``, and their specs."""
    comm, given, over = pending.comm, list(gradients), list(specs)
    for i, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
        if g is not None:
            own = pending.summands.get(i, ())
            axes = _meet(comm, p, own)
            given[i], over[i] = pending.summand(g, own, axes), _over(comm, specs[i], axes)
    return given, over


class _Globals(torch.autograd.Function):
    """Local gradients → DTensors as a graph node, differentiable for ``create_graph``."""

    @staticmethod
    def forward(ctx: Any, specs: list[Any], *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.specs = specs
        ctx.set_materialize_grads(False)
        return tuple(map(_global, gradients, specs))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *(
            None if g is None else g.redistribute(spec.mesh, spec.placements).to_local()
            for g, spec in zip(gradients, ctx.specs, strict=True)
        )


def _waiting(comm: Communicator, gradient: Any) -> Axes:
    """The axes over which a gradient is a partial sum."""
    if not isinstance(gradient, DTensor):
        return ()
    return tuple(a for a, p in zip(comm.mesh, gradient.placements, strict=True) if p.is_partial())


def _over(comm: Communicator, spec: Any, axes: Axes) -> Any:
    """``spec`` with partial sums over ``axes`` only."""
    if not axes and not any(p.is_partial() for p in spec.placements):
        return spec
    whole = [Replicate() if p.is_partial() else p for p in spec.placements]
    placements = [Partial() if a in axes else p for a, p in zip(comm.mesh, whole, strict=True)]
    return type(spec)(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def _taken(
    comm: Communicator, parameters: Sequence[Any], numbers: Sequence[int], axes: Axes
) -> dict[int, torch.Tensor]:
    """Take partial sums over ``axes`` out of ``.grad``, to add them to this backward's.
    Not from parameters with hooks: those have seen them."""
    found: dict[int, torch.Tensor] = {}
    for number in numbers if _deferred else ():
        p = parameters[number]
        if p.grad is not None and not p._backward_hooks and _waiting(comm, p.grad) == axes and _accumulates(p):
            found[number], p.grad = p.grad.to_local(), None
    return found


def _meet(comm: Communicator, p: Any, axes: Axes) -> Axes:
    """Align ``p.grad`` and a new partial sum over ``axes``; returns the axes of both."""
    held = None if p.grad is None else _waiting(comm, p.grad)
    if held is not None and held != axes and not _accumulates(p):
        held = None
    if axes:
        _deferred.add(id(p))
    if held is None or held == axes:
        return axes
    local, spec = p.grad.to_local(), p.grad._spec
    if not axes:  # no bucket included it
        with torch.no_grad():
            total = comm.apply(Move("P", "I", held), local)
        p.grad = DTensor(total, _over(comm, spec, ()), requires_grad=False)
        return axes
    gradients = runtime.Gradients(comm)
    both = gradients.together(held, axes)
    p.grad = DTensor(gradients.summand(local, held, both), _over(comm, spec, both), requires_grad=False)
    return both


def _accumulates(p: torch.Tensor) -> bool:
    """Whether the running backward adds to ``p.grad``: not under torch.autograd.grad."""
    return p.is_leaf and p.requires_grad and _is_run(torch.autograd.graph.get_gradient_edge(p).node)


def _is_run(node: Any) -> bool:
    """Whether the running backward executes this node."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad stops at it
        return False


def _are_run(nodes: Sequence[Any]) -> list[bool]:
    """:func:`_is_run` of each, by few Python calls unless torch.autograd.grad stops there."""
    try:
        return [*map(torch._C._will_engine_execute_node, nodes)]
    except RuntimeError:
        return [*map(_is_run, nodes)]


_deferred: set[int] = set()
"""ids of parameters with partial-sum gradients; weak references would block ``.to(dtype)``"""


def _check_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not _deferred:
        return
    waiting = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            waiting += (
                id(p) in _deferred and isinstance(p.grad, DTensor) and any(x.is_partial() for x in p.grad.placements)
            )
    if waiting:
        raise RuntimeMismatchError(
            f"{waiting} gradients are not summed over the ranks yet: the last backward pass was inside no_sync(). Run "
            "the last forward and backward before a step outside of it."
        )


register_optimizer_step_pre_hook(_check_step)

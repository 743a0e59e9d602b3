"""Writes through views of DTensors: ``p.grad[pad] = 0``, ``weight.data[pad].zero_()``. DTensor
returns a copy if the indexed dim is sharded, and silently loses the write. Here it reaches the
shards."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.aten import aten
from autoshard.errors import LayoutError
from autoshard.module.dtensors.dispatch import first_rank_generator
from autoshard.module.dtensors.module_dtensor import (
    ModuleDTensor,
    is_view_op,
    replicated_dtensor,
    shard_full,
    sum_partial,
    tensors_of,
    written_operands,
)

_IN_PLACE_NAME = re.compile(
    r"(?!requires_grad_|detach_|share_memory_)\w*[^_]_|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)
"""names of in-place functions"""
_RANDOM_NAME = re.compile(
    "normal|uniform|bernoulli|random|rand_|randn_|randint|exponential|cauchy|geometric|dropout|orthogonal|sparse|rrelu|"
    "dirac|multinomial|poisson|binomial|gumbel"
)
"""substrings of names of functions that may draw random numbers"""
_VIEW_NAMES = frozenset(
    "__getitem__ select narrow unbind chunk split split_with_sizes tensor_split hsplit vsplit dsplit view view_as reshape "
    "reshape_as transpose t permute movedim moveaxis swapaxes swapdims adjoint squeeze unsqueeze flatten unflatten ravel "
    "expand expand_as broadcast_to diagonal unfold contiguous detach".split()
)
"""functions that may return a view in eager"""
_VIEW_GETTERS = frozenset(getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH"))
"""attributes that return a view"""

VIEWS_IN_PLACE = {
    aten.as_strided_.default: aten.as_strided.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}
"""op that changes the shape of its operand → the view of it that the operand then is"""


class Viewed(ModuleDTensor):
    """A tensor that may be a view in eager, and a copy here: writes into its source are read."""

    def to_local(self, **kwargs: Any) -> Tensor:
        """This rank's shard."""
        refresh_views([self])
        return super().to_local(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """As :meth:`DTensor.redistribute`, after pending writes; ``full_tensor()`` calls it."""
        refresh_views([self])
        return super().redistribute(*args, **kwargs)


class ViewCopy(Viewed):
    """A copy that is a view in eager, of a parameter or gradient; writes reach its source."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        refresh_views(tensors_of(args, kwargs or {}))
        source: Any = args[0] if args else None
        viewed = isinstance(source, DTensor) and "_of" in source.__dict__
        written = written_operands(op, args, kwargs or {})
        if any(isinstance(x, DTensor) and "_of" in x.__dict__ for x in written) and op not in VIEWS_IN_PLACE:
            with torch.no_grad():
                if op._schema.arguments[0].is_write and isinstance(source, Tensor):
                    write_full(op, args, kwargs or {})
                else:
                    write_each(op, args, kwargs or {}, written)
            return written[0] if op._schema.returns else None
        made = super().__torch_dispatch__(op, types, args, kwargs)
        return record_view_source(source, made, op, args[1:]) if viewed and is_view_op(op) else made


def first_by_position(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments with the first one positional: ``torch.nn.init`` passes all by name."""
    if args or "tensor" not in kwargs:
        return args, kwargs
    return (kwargs["tensor"],), {name: x for name, x in kwargs.items() if name != "tensor"}


def record_view_source(
    x: DTensor, made: Any, view: Any, rest: Sequence[Any], named: Mapping[str, Any] | None = None
) -> Any:
    """Record on ``made`` the source of this view of ``x`` and the steps from there."""
    source, steps, _ = x.__dict__.get("_of", (x, (), None))
    for i, each in enumerate(made if isinstance(made, list | tuple) else (made,)):
        if type(each) is ModuleDTensor:
            each.__class__ = ViewCopy
        each.__dict__["_of"] = source, (*steps, (view, rest, named or {}, i)), _source_version(source)
    return made


def _replay_views(whole: Tensor, steps: Sequence[Any]) -> Tensor:
    """Replay recorded views on the full tensor."""
    for step, rest, named, i in steps:
        made = step(whole, *rest, **named)
        whole = made[i] if isinstance(made, list | tuple) else made
    return whole


def is_eager_view(x: DTensor, view: Any, rest: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether ``view`` of ``x`` is a view in eager: not with tensor indices or copies."""
    source, steps, _ = x.__dict__.get("_of", (x, (), None))
    whole = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    try:
        made = _replay_views(whole, (*steps, (view, rest, named, 0)))
    except (RuntimeError, NotImplementedError):
        return False
    return made.untyped_storage()._cdata == whole.untyped_storage()._cdata


def _source_version(source: DTensor) -> tuple[int, int]:
    """Changes with every write into ``source``."""
    return source.__dict__.get("_written", 0), 0 if source.is_inference() else source._version


def aliases_source(x: DTensor) -> bool:
    """Whether writes into the local shard of a view reach its source."""
    source, _, _ = x.__dict__["_of"]
    return x._local_tensor.untyped_storage()._cdata == source._local_tensor.untyped_storage()._cdata


def count_write(x: DTensor) -> None:
    """Count a write into ``x``, for views of its source and for autograd, which does not see it."""
    source, steps, _ = x.__dict__.get("_of", (x, (), None))
    source.__dict__["_written"] = source.__dict__.get("_written", 0) + 1
    for each in {id(x): x, id(source): source}.values():
        _count_for_autograd(each)
    if steps:
        x.__dict__["_of"] = source, steps, _source_version(source)


def _count_for_autograd(x: DTensor) -> None:
    if not x._local_tensor.is_inference():
        torch.autograd.graph.increment_version(x._local_tensor)


def argument_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """The leaves of the arguments of a call; most calls contain no containers."""
    given = [*args, *kwargs.values()]
    plain = all(type(x) in _NO_CONTAINERS or isinstance(x, Tensor) for x in given)
    return given if plain else pytree.tree_leaves(given)


_NO_CONTAINERS = frozenset((torch.dtype, bool, int, float, str, type(None)))


def refresh_views(given: Sequence[Any]) -> None:
    """Refresh views whose sources were written since. Collective."""
    for x in given:
        if isinstance(x, DTensor) and "_of" in x.__dict__:
            source, steps, version = x.__dict__["_of"]
            if version != _source_version(source):
                if aliases_source(x) or 0 in x._local_tensor.stride():  # the write below is into ``x`` alone
                    x._local_tensor = x._local_tensor.detach().clone()
                with torch.set_grad_enabled(source.grad_fn is not None):  # writes into a leaf have no history
                    _assign_full(x, _replay_views(source.full_tensor(), steps))
                _count_for_autograd(x)
                x.__dict__["_of"] = source, steps, _source_version(source)


def _assign_full(x: DTensor, whole: Tensor) -> None:
    """Give ``x`` the values and, if gradients are recorded, the history of ``whole``."""
    noted = x.__dict__.pop("_of", None)  # the writes below are into ``x`` alone
    with torch.no_grad():
        sum_partial(x)  # a partial sum has no values of its own
    if whole.requires_grad and torch.is_grad_enabled():
        x.copy_(replicated_dtensor(x.device_mesh, whole).redistribute(placements=x.placements))
    else:
        x.copy_(shard_full(whole, x._spec))
    if noted is not None:
        x.__dict__["_of"] = noted


def may_be_view(func: Any) -> bool:
    """Whether the result of ``func`` may be a view of its first argument in eager."""
    return getattr(func, "__name__", "") in _VIEW_NAMES or func in _VIEW_GETTERS


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that ``func`` writes: its first argument, by position or as ``input``, each of a list, or ``out``."""
    given = [kwargs.get("out")]
    if is_in_place(func, kwargs):
        given.append(args[0] if args else kwargs.get("input"))
    return [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]


def is_in_place(func: Any, kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether ``func`` writes into its first argument."""
    return _is_writing(getattr(func, "__name__", "")) or bool(kwargs and kwargs.get("inplace") is True)


@functools.lru_cache(maxsize=1 << 10)
def _is_writing(name: str) -> bool:
    return bool(_IN_PLACE_NAME.fullmatch(name))


def may_draw(func: Any) -> bool:
    return bool(_RANDOM_NAME.search(getattr(func, "__name__", "")))


def same_draws_on_ranks(func: Any, x: DTensor, named: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Inside, ``func`` on the full tensor draws the same numbers on all ranks."""
    return first_rank_generator(x, named.get("generator")) if may_draw(func) else nullcontext()


def write_full(write: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Apply ``write`` to the full source of the first argument and reshard it, with its history."""
    x = args[0]
    source, steps, _ = x.__dict__.get("_of", (x, (), None))
    own, named = pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), (tuple(args[1:]), dict(kwargs)))
    whole = source.full_tensor().clone()
    view = _replay_views(whole, steps)
    before = x.shape, view.stride()
    with same_draws_on_ranks(write, source, named):
        write(view, *own, **named)
    if (view.shape, view.stride()) != before:
        raise LayoutError(
            f"{write.__name__}() changes the shape of a sharded output ({list(x.shape)} to "
            f"{list(view.shape)}): use the result of {write.__name__.rstrip('_')}() instead"
        )
    _assign_full(source, whole)
    if x is not source:
        _assign_full(x, view)
    count_write(x)


def write_each(write: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[Any]) -> Any:
    """``write`` on full tensors; those of ``written`` then get their new values."""
    given = tuple(args), dict(kwargs)
    like = next(x for x in written if isinstance(x, DTensor))
    full = pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), given)
    with same_draws_on_ranks(write, like, kwargs):
        made = write(*full[0], **full[1])
    for x, new in zip(pytree.tree_leaves(given), pytree.tree_leaves(full), strict=True):
        if isinstance(x, DTensor) and any(x is y for y in written):
            write_full(Tensor.copy_, (x, new), {})
    return made

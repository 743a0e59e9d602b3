"""Vocabulary-parallel logits in generation: only candidate tokens are sent between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from autoshard import runtime
from autoshard.layout import Layout, Replicate, Shard
from autoshard.module.dtensors.outputs import GatheredOnUse
from autoshard.torch_private.dispatch import make_wrapper_subclass

GatherShards = Callable[[Tensor, Layout, Sequence[int]], Tensor]
"""(local shard, its layout, global shape) → full tensor"""


class ShardedLogits(GatheredOnUse):
    """Logits whose last dim (vocabulary) is sharded; generation loops run on the shards: argmax,
    topk and multinomial send candidates, softmax two numbers per row. Other operations gather
    the full tensor, of which this tensor and its source then consist."""

    _own: tuple[Tensor, Layout]
    """local shard or full tensor, and its layout"""
    _source: tuple[ShardedLogits, Any] | None
    """source and index, if this is a view"""
    _comm: runtime.Communicator
    _gather: GatherShards

    @staticmethod
    def of(
        part: Tensor, layout: Layout, shape: Sequence[int], comm: runtime.Communicator, gather: GatherShards
    ) -> Tensor:
        """The tensor of this global shape."""
        made = make_wrapper_subclass(ShardedLogits, tuple(shape), dtype=part.dtype, device=part.device)
        made._own, made._source, made._comm, made._gather = (part, layout), None, comm, gather
        return made

    def like(
        self, part: Tensor, shape: Sequence[int] | None = None, layout: Layout | None = None, index: Any = None
    ) -> Tensor:
        """Another tensor in this layout, from its shard; ``index``: of a view."""
        layout = self._layout if layout is None else layout
        made = ShardedLogits.of(part, layout, self.shape if shape is None else shape, self._comm, self._gather)
        made._source = None if index is None else (self, index)  # type: ignore[attr-defined]
        return made

    @property
    def _part(self) -> Tensor:
        return self._settled()[0]

    @property
    def _layout(self) -> Layout:
        return self._settled()[1]

    @property
    def _is_cut(self) -> bool:
        return bool(self._layout.axes_with(Shard))

    def _settled(self) -> tuple[Tensor, Layout]:
        if self._source is not None and not self._source[0]._is_cut:
            source, index = self._source
            self._own, self._source = (source._part[index], Layout(source._layout.mesh, {})), None
        return self._own

    def whole(self) -> Tensor:
        """The plain tensor; writes into it reach this one. Collective."""
        if self._is_cut and self._source is not None:
            self._source[0].whole()
        elif self._is_cut:
            self._own = self._full(*self._own, self.shape), Layout(self._layout.mesh, {})
        return self._part

    def _full(self, part: Tensor, layout: Layout, shape: Sequence[int]) -> Tensor:
        with runtime.bind(self._comm):
            return self._gather(part, layout, shape) if layout.axes_with(Shard) else part

    def _rows(self, part: Tensor) -> Tensor:
        """Gather per-row results from the ranks that shard the rows."""
        vocabulary = dict.fromkeys(self._layout.axes_of(self.ndim - 1), Replicate())
        return self._full(part, self._layout.replace(vocabulary), (*self.shape[:-1], *part.shape[self.ndim - 1 :]))

    @staticmethod
    def on_parts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See :meth:`GatheredOnUse.on_parts`."""
        first = args[0] if args else None
        known = func in _VOCAB_PARALLEL_OPS and isinstance(first, ShardedLogits) and first._is_cut
        return _VOCAB_PARALLEL_OPS[func](first, func, args[1:], kwargs) if known else None

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Logits({list(self.shape)}, {self._layout.without_gradient()})"


def gather_logits(tree: Any) -> Any:
    """``tree`` with full tensors, for callers that asked for scores."""
    return pytree.tree_map_only(ShardedLogits, ShardedLogits.whole, tree)


# --- what is done with the parts: None where it cannot be ---


def _index_positions(x: ShardedLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Indexing of unsharded dims."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if not all(isinstance(i, int | slice) for i in index) or len(index) > x.ndim:
        return None
    index = (*index, *[slice(None)] * (x.ndim - len(index)))
    if any(x._layout.axes_of(d) and i != slice(None) for d, i in enumerate(index)):
        return None
    places = {d: n for n, d in enumerate(d for d, i in enumerate(index) if isinstance(i, slice))}
    placed = {a: Shard(places[d]) for d in range(x.ndim) for a in x._layout.axes_of(d)}
    shape = torch.empty(x.shape, device="meta")[index].shape
    return x.like(x._part[index], shape, x._layout.replace(placed), index)


def _elementwise_on_logits(
    x: ShardedLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """A pointwise operation with numbers, equally sharded logits, or one number per row."""
    last = x.ndim - 1
    for other in pytree.tree_leaves((args, kwargs)):
        if isinstance(other, ShardedLogits):
            if (other.shape, other._layout) != (x.shape, x._layout):
                return None
        elif isinstance(other, Tensor) and other.ndim:
            rows_are_whole = not any(x._layout.axes_of(d) for d in range(last))
            if other.ndim != x.ndim or other.shape[last] != 1 or not rows_are_whole:
                return None
    own, named = pytree.tree_map_only(ShardedLogits, lambda other: other._part, (tuple(args), dict(kwargs)))
    part = func(x._part, *own, **named)
    return x if part is x._part else x.like(part)


def _detach_logits(x: ShardedLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    return x.like(x._part.detach(), index=...)


def _vocab_softmax(x: ShardedLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    if not _along_last(x, args[:1], kwargs) or len(args) > 1 or not kwargs.keys() <= {"dim", "dtype", "_stacklevel"}:
        return None
    with runtime.bind(x._comm):
        return x.like(runtime.softmax(x._part, x.ndim - 1, x._layout.axes_of(x.ndim - 1), kwargs.get("dtype")))


def _vocab_argmax(x: ShardedLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    if not _along_last(x, args, kwargs):
        return None
    with runtime.bind(x._comm):
        return x._rows(runtime.argmax(x._part, x.ndim - 1, x.shape[-1], x._layout.axes_of(x.ndim - 1)))


def _vocab_topk(x: ShardedLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given = {"dim": -1, **dict(zip(("k", "dim"), args, strict=False)), **kwargs}
    if not _along_last(x, (), {"dim": given["dim"]}) or len(args) > 2 or given.keys() != {"k", "dim"}:
        return None
    with runtime.bind(x._comm):
        found = runtime.topk(x._part, given["k"], x.ndim - 1, x.shape[-1], x._layout.axes_of(x.ndim - 1))
    return torch.return_types.topk((x._rows(found[0]), x._rows(found[1])))


def _vocab_multinomial(x: ShardedLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    given = {**dict(zip(("num_samples",), args, strict=False)), **kwargs}
    if len(args) > 1 or given != {"num_samples": 1}:
        return None
    dims = {d: axes for d in range(x.ndim) if (axes := x._layout.axes_of(d))}
    with runtime.bind(x._comm):
        return x._rows(runtime.multinomial(x._part, 1, x.shape, dims))


def _along_last(x: ShardedLogits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dims = [*args, *([kwargs["dim"]] if "dim" in kwargs else [])]
    return len(dims) == 1 and dims[0] in (-1, x.ndim - 1) and kwargs.keys() <= {"dim", "dtype", "_stacklevel"}


_PLAIN_TENSOR = Tensor
_VOCAB_PARALLEL_OPS: Mapping[Any, Callable[..., Any]] = {
    _PLAIN_TENSOR.__getitem__: _index_positions,
    **dict.fromkeys(
        (_PLAIN_TENSOR.to, _PLAIN_TENSOR.float, _PLAIN_TENSOR.double, _PLAIN_TENSOR.clone, _PLAIN_TENSOR.contiguous),
        _elementwise_on_logits,
    ),
    _PLAIN_TENSOR.detach: _detach_logits,
    **dict.fromkeys(
        (
            _PLAIN_TENSOR.__truediv__,
            _PLAIN_TENSOR.div,
            _PLAIN_TENSOR.__mul__,
            _PLAIN_TENSOR.mul,
            _PLAIN_TENSOR.masked_fill,
            _PLAIN_TENSOR.__lt__,
            _PLAIN_TENSOR.lt,
        ),
        _elementwise_on_logits,
    ),
    **dict.fromkeys((F.softmax, torch.softmax, _PLAIN_TENSOR.softmax), _vocab_softmax),
    **dict.fromkeys((torch.argmax, _PLAIN_TENSOR.argmax), _vocab_argmax),
    **dict.fromkeys((torch.topk, _PLAIN_TENSOR.topk), _vocab_topk),
    **dict.fromkeys((torch.multinomial, _PLAIN_TENSOR.multinomial), _vocab_multinomial),
}

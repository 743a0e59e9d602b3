"""Operations that DTensor lacks: they run on full tensors, and results are resharded.

Used by initialisers and constraints (``init.orthogonal_``, ``renorm``), and factories with ``out=``
(``init.eye_``), where DTensor would make the shard as large as the full tensor. In lists of
``_foreach_…`` ops (clipping, averaging) plain tensors count as replicated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autoshard.aten import aten
from autoshard.module.dtensors.random_ops import first_rank_generator
from autoshard.module.dtensors.views import replicated_on
from autoshard.torch_private.dispatch import all_op_names
from autoshard.torch_private.dtensor import op_dispatcher

_FACTORY_NAMES = "arange eye full linspace logspace normal ones rand randint randn randperm zeros".split()
OUT_FACTORIES = tuple(
    op
    for packet in (getattr(aten, name) for name in _FACTORY_NAMES)
    for op in (getattr(packet, name) for name in packet.overloads() if name.endswith("out"))
    if sum("Tensor" in str(a.type) for a in op._schema.arguments) == 1
)
"""ops that overwrite ``out``"""


GATHERED_CLASSES: list[type[DTensor]] = []
"""DTensor subclasses that gather before such ops: outputs"""


def patch_missing_ops(is_ours: Callable[[object], bool]) -> None:
    """Patch DTensor's op dispatch for tensors with ``is_ours``."""
    of: Any = type(op_dispatcher)
    propagate = of._propagate_op_sharding_dispatch_slow_path

    def on_whole(dispatcher: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *more: Any) -> Any:
        try:
            return propagate(dispatcher, op, args, kwargs, *more)
        except NotImplementedError:
            given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
            shows = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
            if shows or not all(is_ours(x) and not isinstance(x, (*GATHERED_CLASSES,)) for x in given):
                raise
            return run_on_full(op, args, kwargs)

    of._propagate_op_sharding_dispatch_slow_path = on_whole


def foreach_ops() -> set[Any]:
    """The ``foreach`` ops: the same on each tensor of a list."""
    return {op for op in _aten_overloads() if op.name().startswith("aten::_foreach_")}


def pointwise_ops() -> set[Any]:
    """Out-of-place pointwise ops on several tensors."""
    pointwise = (op for op in _aten_overloads() if torch.Tag.pointwise in op.tags and not op._schema.is_mutable)
    return {op for op in pointwise if sum(str(a.type) == "Tensor" for a in op._schema.arguments) > 1}


def _aten_overloads() -> Iterator[Any]:
    for name in all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and not name.endswith("out"):
            yield getattr(getattr(aten, packet), overload or "default")


@contextlib.contextmanager
def replicate_plain_tensors(args: tuple[Any, ...]) -> Iterator[None]:
    """Inside, plain tensors in a list with DTensors count as replicated."""
    kinds = {isinstance(x, DTensor) for given in args if isinstance(given, list | tuple) for x in given}
    dispatcher: Any = op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = before or len(kinds) > 1
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


def run_on_full(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` on full tensors; written operands keep their layout, even if their shape changes.

    New tensors with the shape of the first operand are sharded like it; others are replicated.
    """
    first: DTensor = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DTensor))
    draws = torch.Tag.nondeterministic_seeded in op.tags
    with torch.no_grad(), first_rank_generator(first, kwargs.get("generator")) if draws else contextlib.nullcontext():
        own, named = pytree.tree_map_only(DTensor, lambda x: x.full_tensor().clone(), (args, kwargs))
        made = op(*own, **named)
        schema = op._schema.arguments
        given = {a.name: (x, new) for a, x, new in zip(schema, args, own, strict=False)}
        given |= {n: (x, named[n]) for n, x in kwargs.items()}
        written = [given[a.name] for a in schema if a.is_write and a.name in given]
        for x, new in written:
            _store_full(x, new)
        if written:
            return written[0][0]
        cut = _without_partial(first)
        return pytree.tree_map_only(
            torch.Tensor,
            lambda x: (
                distribute_tensor(x, first.device_mesh, cut, src_data_rank=None)
                if x.shape == first.shape
                else replicated_on(first.device_mesh, x)
            ),
            made,
        )


def _store_full(x: Any, new: torch.Tensor) -> None:
    """Write the full tensor ``new`` into ``x``."""
    if not isinstance(x, DTensor):
        x.copy_(new)
        return
    parts = distribute_tensor(new, x.device_mesh, _without_partial(x), src_data_rank=None)
    if parts.shape != x.shape:
        torch.Tensor.data.__set__(x, parts)  # type: ignore[attr-defined]
        x._local_tensor, x._spec = parts._local_tensor, parts._spec
        return
    x._spec = parts._spec
    x._local_tensor.copy_(parts._local_tensor)


def _without_partial(x: DTensor) -> list[Any]:
    return [Replicate() if p.is_partial() else p for p in x.placements]

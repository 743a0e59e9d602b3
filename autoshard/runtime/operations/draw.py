"""Random ops of the graph, drawn once at global shape: every layout has one device's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree

from autoshard.aten import aten
from autoshard.runtime.operations.indexing import part_of_batch
from autoshard.runtime.operations.random import drawn, in_memory_order, noise, part, shared
from autoshard.runtime.transport.communicator import Axes, current, device


def draw(
    op: str, *args: Any, dims: Mapping[int, Axes] | None = None, batch: int | None = None, **kwargs: Any
) -> torch.Tensor:
    """This rank's shard of ``aten.op(*args)``: ``draw("rand", [8, 4], dims={0: "dp"})``.

    ``args`` have global shapes. ``dims``: the axes that shard each dim. ``batch``: the dim that
    micro-batches divide; each slices a draw for the full batch. Tensor arguments are replicated."""
    args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    if not any(isinstance(a, torch.Tensor) for a in args):
        kwargs.setdefault("device", device())
    found = shared(getattr(aten, op), *args, **kwargs)
    if batch is not None:
        found = part_of_batch(found, batch, current().micro_batch[1])
    return part(found, dims or {})


def draw_whole(op: str, *args: Any, **kwargs: Any) -> Any:
    """The results of ``op(*args)`` (``aten::rand``) on replicated arguments, drawn once for all."""
    namespace, _, name = op.partition("::")
    whole = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
    return shared(getattr(getattr(torch.ops, namespace), name), *whole[0], **whole[1])


def draw_like(
    op: str,
    x: torch.Tensor,
    shape: Sequence[int],
    dims: Mapping[int, Axes],
    *args: Any,
    order: Sequence[int] = (),
    batch: int | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """This rank's shard of ``aten.op(t, *args)`` for a ``t`` of global ``shape`` with any values.

    ``x``: this rank's shard of ``t``, for dtype and device. ``dims``: the axes that shard each dim.
    ``order``: memory order of the dims of ``t``, which normal draws follow. ``batch``: see
    :func:`~autoshard.runtime.dropout`."""

    def fill(shape: Sequence[int]) -> torch.Tensor:
        empty = partial(torch.empty, dtype=x.dtype, device=x.device)
        filled: torch.Tensor = getattr(aten, op)(in_memory_order(order, empty, shape), *args, **kwargs)
        return filled

    return part(drawn(lambda s: shared(fill, s), shape, (), batch), dims)


def native_dropout(
    x: torch.Tensor,
    p: float,
    shape: Sequence[int],
    dims: Mapping[int, Axes],
    order: Sequence[int] = (),
    batch: int | None = None,
    train: bool | None = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten.native_dropout``: (result, kept mask). In training it draws for every ``p``.

    ``train=None`` trains, too, but torch's gradient is then the mask without the scale."""
    if train is False:
        return x, torch.ones_like(x, dtype=torch.bool)

    def fill(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.native_dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p, True)[1] != 0

    kept = part(drawn(lambda s: shared(fill, s), shape, order, batch), dims)
    scale = 1 / (1 - p) if p < 1 else 0
    if train is None:
        return x * kept + (x * kept * (scale - 1)).detach(), kept
    return x * kept * scale, kept


@torch.library.custom_op("autoshard::packed_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def packed_noise(x: torch.Tensor, lengths: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout factors of packed sequences ``x`` [steps, batch, features], longest first."""
    inside = torch.arange(x.shape[0], device=lengths.device)[:, None] < lengths
    whole = torch.zeros_like(x, memory_format=torch.contiguous_format)
    whole[inside] = noise((int(lengths.sum()), x.shape[2]), p, x.dtype, x.device)
    return whole


packed_noise.register_fake(lambda x, lengths, p: torch.empty_like(x, memory_format=torch.contiguous_format))


def rrelu(x: torch.Tensor, lower: float, upper: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``F.rrelu`` of a replicated ``x`` in training, and the slopes of its negative elements."""
    slopes = shared(aten.rrelu_with_noise_functional, x.detach(), torch.zeros_like(x), lower, upper, True)[1]
    return x * slopes, slopes

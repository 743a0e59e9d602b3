"""Random ops of the graph: drawn once at global shape, so that every layout sees the values of one device."""

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
    """This rank's part of ``aten.op(*args)``, of global shape: ``draw("rand", [8, 4], dims={0: "dp"})``.

    ``dims``: the axes that cut each sharded dim of the result; ``batch``: the dim that several micro-batches share, each of
    which draws for the whole batch, of which sizes in ``args`` are, and takes its part. Tensor arguments are whole; no
    gradient.
    """
    args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    if not any(isinstance(a, torch.Tensor) for a in args):
        kwargs.setdefault("device", device())
    found = shared(getattr(aten, op), *args, **kwargs)
    if batch is not None:
        found = part_of_batch(found, batch, current().micro_batch[1])
    return part(found, dims or {})


def draw_whole(op: str, *args: Any, **kwargs: Any) -> Any:
    """The results of ``op(*args)``, named as ``aten::rand``, of whole arguments: drawn once for all ranks. No gradient."""
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
    """This rank's part of ``aten.op(t, *args)`` for a ``t`` of global ``shape`` whose values do not matter.

    ``x``: this rank's part of ``t``, for its dtype and device; ``dims``: the axes that cut each sharded dim;
    ``order``: the dims of ``t`` as they lie in memory, if not as they are numbered: normal draws of a transposed tensor
    are others. ``batch``: see :func:`~autoshard.runtime.dropout`.
    """

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
    """``aten.native_dropout``: what ``runtime.dropout`` gives, and what was kept. In training it draws for every ``p``.

    ``train``: None trains, too, but torch's gradient is then that of the mask alone.
    """
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
    """What dropout multiplies the packed sequences of ``x`` [steps, batch, features] with, longest first; else 0."""
    inside = torch.arange(x.shape[0], device=lengths.device)[:, None] < lengths
    whole = torch.zeros_like(x, memory_format=torch.contiguous_format)
    whole[inside] = noise((int(lengths.sum()), x.shape[2]), p, x.dtype, x.device)
    return whole


packed_noise.register_fake(lambda x, lengths, p: torch.empty_like(x, memory_format=torch.contiguous_format))


def rrelu(x: torch.Tensor, lower: float, upper: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``F.rrelu`` in training of a whole ``x``, and the slopes, which are drawn for its negative elements."""
    slopes = shared(aten.rrelu_with_noise_functional, x.detach(), torch.zeros_like(x), lower, upper, True)[1]
    return x * slopes, slopes

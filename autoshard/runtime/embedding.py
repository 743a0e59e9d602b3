"""Look-ups in a table whose rows are cut over ranks: every rank looks up what it holds, and the rows sum up."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from autoshard.runtime.collectives import offset
from autoshard.runtime.communicator import Axes


def vocab_embedding(
    weight: torch.Tensor, indices: torch.Tensor, size: int, axes: Axes, padding_idx: int = -1, sparse: bool = False
) -> torch.Tensor:
    """Rows of a table of ``size`` rows cut by ``axes``: weight [size/n S, d], indices [...] → [..., d] P.

    A rank gives zeros for the rows it does not hold. ``padding_idx``: a global row that gets no gradient;
    negative for none. Megatron-LM's VocabParallelEmbedding (arXiv:1909.08053). ``sparse``: the gradient has the rows that
    were looked up here, and no others: an optimizer must not touch them.
    """
    rows = weight.shape[0]
    if rows == 0:
        return weight.new_zeros(*indices.shape, weight.shape[1]) + weight.sum(0)  # the sum keeps the gradient path
    start = offset(size, axes)
    mine = (indices >= start) & (indices < start + rows)
    padding = padding_idx - start if start <= padding_idx < start + rows else None
    if sparse:
        own = F.embedding(indices[mine] - start, weight, padding, sparse=True)
        return own.new_zeros(*indices.shape, own.shape[1]).index_put((mine,), own)
    found = F.embedding(torch.where(mine, indices - start, 0), weight, padding)
    return found.masked_fill(~mine.unsqueeze(-1), 0)


def vocab_embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    size: int,
    axes: Axes,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    sparse: bool = False,
) -> tuple[torch.Tensor, None, None, None]:
    """Sums of the rows of each bag, of a table cut by ``axes``: weight [size/n S, d], indices [k] → [bags, d] P.

    ``offsets``: where each bag starts in ``indices``. Rows of ``padding_idx`` (global; negative for none) do not count.
    A tuple like that of ``aten.embedding_bag``, of whose results only the first is made.
    """
    rows = vocab_embedding(weight, indices, size, axes, padding_idx, sparse)
    if padding_idx >= 0:
        rows = rows.masked_fill((indices == padding_idx).unsqueeze(-1), 0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    starts = offsets[:-1] if include_last_offset else offsets
    bag = torch.searchsorted(starts, torch.arange(len(indices), device=indices.device), right=True) - 1
    return rows.new_zeros(len(starts), rows.shape[1]).index_add(0, bag, rows), None, None, None

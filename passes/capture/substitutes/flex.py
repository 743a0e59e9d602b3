"""``flex_attention`` in a trace: plain ops, as torch runs it uncompiled.

Its higher-order op hides functions from sharding rules and has no backward on CPUs. Here the scores
are one tensor, and ``score_mod`` and ``mask_mod`` are ordinary ops on it.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from autoshard.passes.capture.observer import Observer, Patch

_MODULE = "torch.nn.attention.flex_attention"


def _plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, block_mask: Any, scale: float, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(result [b, h, q, e]; per query: log2 of the sum of exp(scores), maximum score · log2(e))."""
    flex, groups = sys.modules[_MODULE], query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    working = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(working) @ key.to(working).transpose(-2, -1) * scale
    places = [torch.arange(n, device=scores.device) for n in scores.shape]
    with TransformGetItemToIndex():  # x[head] with a batched head becomes an index
        seen = flex._vmap_for_bhqkv(block_mask[-1], prefix=())(*places)
        scores = flex._vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *places)
    scores = scores.masked_fill(~seen, -math.inf)
    weights = torch._safe_softmax(scores, -1)  # zeros for queries that see no key
    log_sum, largest = scores.logsumexp(-1), scores.amax(-1)
    return weights.to(query.dtype) @ value.to(query.dtype), log_sum / math.log(2), largest / math.log(2)


class FlexAttention(Observer):
    """Makes ``flex_attention`` call :func:`_plain`, under any name, uncompiled."""

    def patches(self) -> Iterable[Patch]:
        if (module := sys.modules.get(_MODULE)) is not None:  # else it is not imported
            yield module, "flex_attention_hop", _plain
            yield module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True
            yield module, "_validate_device", lambda query, key, value: None
            yield module, "setup_compilation_env", contextlib.nullcontext  # keeps modes

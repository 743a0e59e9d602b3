"""``flex_attention`` in a traced forward: out of plain ops, as torch runs it where it does not compile it.

The higher-order op holds functions that rules cannot see into, and has no backward on CPUs. Here the scores are one
tensor, and what the model's functions compute of them are ops like all others.
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
    """The result [b, h, q, e], and of the scores of each query log2 of the sum of 2^score, and the largest · log2(e)."""
    flex, groups = sys.modules[_MODULE], query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    working = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(working) @ key.to(working).transpose(-2, -1) * scale
    places = [torch.arange(n, device=scores.device) for n in scores.shape]
    with TransformGetItemToIndex():  # so that x[head] is an index although head stands for many
        seen = flex._vmap_for_bhqkv(block_mask[-1], prefix=())(*places)
        scores = flex._vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *places)
    scores = scores.masked_fill(~seen, -math.inf)
    weights = torch._safe_softmax(scores, -1)  # of what sees nothing: zeros
    log_sum, largest = scores.logsumexp(-1), scores.amax(-1)
    return weights.to(query.dtype) @ value.to(query.dtype), log_sum / math.log(2), largest / math.log(2)


class FlexAttention(Observer):
    """Has it call :func:`_plain`, by whatever name the model imported it, and not compile anything."""

    def patches(self) -> Iterable[Patch]:
        if (module := sys.modules.get(_MODULE)) is not None:  # else nobody has it
            yield module, "flex_attention_hop", _plain
            yield module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True
            yield module, "_validate_device", lambda query, key, value: None
            yield module, "setup_compilation_env", contextlib.nullcontext  # it turns off the modes of the trace

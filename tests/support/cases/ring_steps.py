"""Attention along a ring or gathered in chunks, and on one device; models of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers_models import hugging_face

import autoshard
import autoshard.models
from autoshard import runtime
from autoshard.runtime.transport.window import chunks

B, HEADS, WIDTH = 2, 4, 8


def run(
    ranks: int,
    queries: int,
    keys: int,
    heads: int = HEADS,
    mask: torch.Tensor | None = None,
    value: int = WIDTH,
    **how: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[runtime.Executed]]:
    """(result and gradients of one device, those of a ring, what it sent)."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    given = random(B, HEADS, queries, WIDTH), random(B, heads, keys, WIDTH), random(B, heads, keys, value)
    causal = how.get("causal", False)
    scale = how.get("scale")
    dense = None if how.get("sloped") else mask
    expected = F.scaled_dot_product_attention(*given, dense, 0.0, causal, scale=scale, enable_gqa=heads != HEADS)
    cotangent = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    theirs = [expected, *torch.autograd.grad(expected, given, cotangent)]

    def cut(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.detach().narrow(-2, *c).clone().requires_grad_(x.requires_grad) for c in chunks(x.shape[-2], (ranks,))
        ]

    parts = [cut(x) for x in given]
    masks = [None] * ranks if mask is None else cut(mask) if mask.shape[-2] == queries else [mask] * ranks
    world = runtime.World({"cp": ranks})
    log = world.log = list[runtime.Executed]()

    form = {name: x for name, x in how.items() if name != "causal"}
    spec = runtime.AttentionSpec(queries, keys, "cp", after=0 if causal else None, **form)

    def one(query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        function = runtime.gathered_attention if "pieces" in how else runtime.ring_attention
        return function(query, key, value, spec, mask)

    outs = world.run(one, list(zip(*parts, masks, strict=True)))
    found = torch.autograd.grad(outs, [x for part in parts for x in part], cut(cotangent))
    joined = [torch.cat(found[i * ranks : (i + 1) * ranks], -2) for i in range(3)]
    return theirs, [torch.cat(outs, -2), *joined], log


def error(theirs: list[torch.Tensor], ours: list[torch.Tensor]) -> float:
    found = [(a - b).detach().abs().max() for a, b in zip(theirs, ours, strict=True)]
    return float(torch.stack(found).max().nan_to_num(torch.inf))  # what is no number is far


_SEEN = torch.rand(10, 14, generator=torch.Generator().manual_seed(1)) < 0.5
_SEEN[3], _SEEN[4], _SEEN[:, 9] = False, True, True
_SEEN[5] = False
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "grouped": {"heads": 2},
    "one_key_head": {"heads": 1},
    "causal_across": {"causal": True},
    "scaled": {"scale": 0.3},
    "narrow_values": {"value": 5},
    "bool_mask": {"mask": _SEEN},
    "bool_mask_narrow_values": {"mask": _SEEN, "value": 3, "heads": 2},
    "added_mask": {"mask": torch.linspace(-3, 3, 2 * 10 * 14, dtype=torch.float64).view(2, 1, 10, 14)},
    "mask_of_keys": {"mask": torch.linspace(-3, 3, 4 * 14, dtype=torch.float64).view(1, 4, 1, 14)},
    "mask_of_heads": {"mask": torch.linspace(-3, 3, 4 * 10 * 14, dtype=torch.float64).view(4, 10, 14)},
    "mask_of_rows": {"mask": torch.linspace(-3, 3, 10, dtype=torch.float64).view(10, 1)},
}


@functools.cache
def model(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if name.startswith("hf_"):
        tokens = torch.randint(0, 128, (2, 18), generator=torch.Generator().manual_seed(1))
        labels = tokens.clone()
        labels[0, :3] = -100
        kwargs: dict[str, Any] = {"input_ids": tokens, "labels": labels}
        if name == "hf_llama":  # padded on the left, as a mask that the model builds
            kwargs["attention_mask"] = torch.ones_like(tokens)
            kwargs["attention_mask"][0, :3] = 0
        return hugging_face(name.removeprefix("hf_"), 128), (), kwargs
    reference = autoshard.models.get(name)
    args, kwargs = reference.inputs(batch=2)
    return reference.model().train(), args, kwargs


def labels_of(report: autoshard.VerifyReport) -> set[str]:
    found = [c.labels for c in report.plan.choices.values() if "attention" in c.op]
    assert found
    return {label for labels in found for label in labels}


SLOW = [
    ("hf_llama", {"cp": 2}),
    ("hf_gpt2", {"cp": 2}),
    ("llama", {"cp": 2}),
    ("llama", {"cp": 4}),
    ("llama", {"cp": 8}),
    ("llama", {"a": 2, "b": 2}),
    ("gpt", {"cp": 3}),
    ("gpt", {"cp": 4}),
    ("gpt", {"cp": 2, "tp": 2}),
    ("hf_llama", {"cp": 4}),
    ("hf_llama", {"cp": 8}),
    ("hf_llama", {"cp": 2, "tp": 2}),
    ("hf_gpt2", {"cp": 4}),
    ("hf_gpt2", {"cp": 2, "tp": 2}),
]


class Attention(nn.Module):
    """One layer."""

    def __init__(self, width: int, heads: int, kv_heads: int, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.size, self.causal, self.grouped, self.dropout = width // heads, causal, heads != kv_heads, dropout
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * kv_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        k, v = self.kv(x).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (-1, self.size)).transpose(1, 2) for y in (self.q(x), k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout, is_causal=self.causal, enable_gqa=self.grouped
        )
        result: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixed(x).square().mean()

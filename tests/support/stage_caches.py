"""Caches of layers in pipeline stages: they stay on the stage that reads them, whatever else is done with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from state_harness import close
from torch import nn

import autoshard
from autoshard.module.programs.kv_cache import CachedShards, StageResidentOutput
from autoshard.runtime.programs.pipeline import StageRanks

TOKENS = torch.arange(6).view(2, 3)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, cache: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (m(x).unflatten(-1, (4, 2)).transpose(1, 2) for m in (self.q, self.k))
        keys = k if cache is None else torch.cat([cache, k], 2)
        y = F.scaled_dot_product_attention(q, keys, keys, is_causal=cache is None)
        return x + self.o(y.transpose(1, 2).flatten(2)), keys


class Decoder(nn.Module):
    """Tokens [batch, n] and the caches of its layers → logits, and the caches with these tokens; ``seen`` comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers, self.head = (
            nn.Embedding(16, 8),
            nn.ModuleList(Layer() for _ in range(4)),
            nn.Linear(8, 16),
        )

    def forward(self, tokens: torch.Tensor, caches: Any = None, seen: Any = None) -> Any:
        x, kept = self.table(tokens), []
        for number, layer in enumerate(self.layers):
            x, keys = layer(x, None if caches is None else caches[number])
            kept.append(keys)
        return self.head(x), tuple(kept), seen


def changed(caches: Any) -> Any:
    """What loops do with caches: choose rows, cut, copy, write, compute."""
    one, two, three, four = caches
    one = copy.deepcopy(one).index_select(0, torch.tensor([1, 0]))
    two, rest = two.clone(), two[:, :, 1:]
    two[:, :, 0] = 3
    two[:, 1] = torch.arange(2.0, dtype=two.dtype)
    two[:, :, 1:2].mul_(2)
    one = one.to("cpu").to(torch.float64)
    three = torch.cat([three[:, :, :1], rest], 2)  # of another stage
    assert (four.is_meta, four.device.type, len(four.tolist())) == (False, "cpu", 2)
    return one, two, three, four * 2 + torch.ones(())


def caches_stay(mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Decoder().double().eval()
    asked: dict[str, Any] = {"stages": "pp", "like": "megatron", "training": False, "dynamic": True}
    sharded = autoshard.compile(copy.deepcopy(model), mesh, **asked)
    told: list[str] = []
    tell, whole = StageRanks.tell, CachedShards.whole
    monkeypatch.setattr(StageRanks, "tell", lambda *given: (told.append(given[-1]), tell(*given))[1])
    monkeypatch.setattr(CachedShards, "whole", lambda x: (told.append("put together"), whole(x))[1])
    seen = torch.ones(2, 8).double()
    with torch.no_grad():
        found = [m(TOKENS, None, seen)[1] for m in (sharded, model)]
        close(*(caches[2].flatten(0, 1) for caches in found))  # transposed where it was made
        for step in range(5):
            told.clear()
            results = [m(TOKENS[:, :1], caches, seen) for m, caches in zip((sharded, model), found, strict=True)]
            steps = len(told)
            close(results[0][0], results[1][0], f"step {step}")
            close(results[0][2], seen)
            if step and step != 3:  # the logits
                assert steps == (1 if dist.is_initialized() else 0), told
            found = [changed(r[1]) if step == 2 else r[1] for r in results]
    for own, other in zip(*found, strict=True):
        if dist.is_initialized():
            assert isinstance(own, StageResidentOutput)
            assert own.home.is_mine != own.to_local().is_meta
        close(own, other)
    assert len(sharded.programs) <= 3  # one takes whole caches

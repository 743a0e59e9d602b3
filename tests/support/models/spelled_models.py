"""Attention that models spell out: forms of it, and a model of several."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from autoshard.runtime.attention.ring_geometry import ALL_KEYS, CAUSAL, Band

S = 12
Heads = torch.Tensor
"""[b, h, s, e]"""


def behind(length: int = S) -> torch.Tensor:
    """Where a key lies behind the query."""
    return torch.arange(length) > torch.arange(length)[:, None]


def _slopes(x: Heads) -> torch.Tensor:
    return torch.pow(2.0, -torch.arange(1, 5)).to(x.dtype)


def filled(q: Heads, k: Heads, v: Heads) -> Heads:
    weights = (q @ k.transpose(-2, -1) / math.sqrt(4)).masked_fill(behind(), -torch.inf).softmax(-1)
    return weights @ v


def added(q: Heads, k: Heads, v: Heads) -> Heads:
    """A mask and a scale in another order, a wider softmax, keys turned by hand, and dropout."""
    far = torch.zeros(S, S, dtype=q.dtype).masked_fill(
        behind() | (torch.arange(S) < torch.arange(S)[:, None] - 3), -1e30
    )
    weights = F.softmax((torch.matmul(q, k.permute(0, 1, 3, 2)) + far) / 3, -1, dtype=torch.float64).to(v.dtype)
    return torch.matmul(weights, v)


def flat(q: Heads, k: Heads, v: Heads) -> Heads:
    """As BLOOM: batch and heads in one dim, slopes (ALiBi) repeated for every sample."""
    b, h = q.shape[:2]
    bias = (_slopes(q)[:, None, None] * torch.arange(S)).repeat(b, 1, 1)
    query, key, value = (x.reshape(b * h, S, 4) for x in (q, k, v))
    scores = bias.baddbmm(query, key.transpose(-1, -2), beta=1.0, alpha=0.5).view(b, h, S, S)
    scores = scores + torch.where(behind(), torch.finfo(q.dtype).min, torch.zeros((), dtype=q.dtype))
    return torch.bmm(scores.softmax(-1).view(b * h, S, S), value).view(b, h, S, 4)


def sliced(q: Heads, k: Heads, v: Heads) -> Heads:
    """As MPT: slopes of more positions than there are, filled where hidden."""
    bias = (torch.arange(1 - 32, 1).view(1, 1, 1, 32) * _slopes(q).view(1, 4, 1, 1)).squeeze(0)
    scores = q @ k.mT * 0.5 + bias[:, :, -S:]
    return scores.masked_fill(behind(), torch.finfo(q.dtype).min).softmax(-1) @ v


def contracted(q: Heads, k: Heads, v: Heads) -> Heads:
    """Heads behind the sequence, summed over letters."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)


def capped(q: Heads, k: Heads, v: Heads) -> Heads:
    """As Gemma 2: no score is above 3."""
    scores, n = torch.tanh(q @ k.mT * 0.5 / 3) * 3, q.shape[-2]
    return (scores + torch.zeros(n, n, dtype=q.dtype).masked_fill(behind(n), -torch.inf)).softmax(-1) @ v


class Sunk(nn.Module):
    """As GPT-OSS: a learnt score of every head takes weight from the keys, and the maxima are taken off."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.sinks = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]))

    def forward(self, q: Heads, k: Heads, v: Heads) -> Heads:
        n = q.shape[-2]
        far = torch.arange(n) < torch.arange(n)[:, None] - 3
        scores = (q @ k.mT * 0.5).masked_fill(behind(n) | far, torch.finfo(q.dtype).min)
        scores = torch.cat([scores, self.sinks.reshape(1, -1, 1, 1).expand(len(q), -1, n, -1)], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return F.dropout(scores.softmax(-1)[..., :-1], self.dropout) @ v


Form = Callable[[Heads, Heads, Heads], Heads]
FORMS: dict[Form, tuple[Band, bool]] = {
    filled: (CAUSAL, False),
    added: (Band(3, 0), False),
    flat: (CAUSAL, True),
    sliced: (CAUSAL, True),
    contracted: (ALL_KEYS, False),
    capped: (CAUSAL, False),
    Sunk(): (Band(3, 0), False),
}
"""spelled → (the keys that a query sees, whether with slopes)"""


class Plain(nn.Module):
    """A form without parameters."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, q: Heads, k: Heads, v: Heads) -> Heads:
        return self.form(q, k, v)


class Spelled(nn.Module):
    """A residual attention of each form; two key heads are repeated for four."""

    def __init__(self, *forms: Form) -> None:
        super().__init__()
        self.forms = nn.ModuleList(f if isinstance(f, nn.Module) else Plain(f) for f in forms)
        self.qkv = nn.ModuleList(nn.Linear(16, 32) for _ in forms)
        self.o = nn.ModuleList(nn.Linear(16, 16) for _ in forms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for form, qkv, o in zip(self.forms, self.qkv, self.o, strict=True):
            q, *kv = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in qkv(x).split([16, 8, 8], -1))
            b, s = x.shape[:2]
            k, v = (y[:, :, None].expand(b, 2, 2, s, 4).reshape(b, 4, s, 4) for y in kv)
            x = x + o(form(q, k, v).transpose(1, 2).flatten(2))
        return x.square().mean()


def dropped(q: Heads, k: Heads, v: Heads) -> Heads:
    return F.dropout((q @ k.mT).masked_fill(behind(), -torch.inf).softmax(-1), 0.3) @ v


def capped_and_dropped(q: Heads, k: Heads, v: Heads) -> Heads:
    return F.dropout((torch.tanh(q @ k.mT / 3) * 3).masked_fill(behind(), -torch.inf).softmax(-1), 0.3) @ v


def sloped_and_dropped(q: Heads, k: Heads, v: Heads) -> Heads:
    scores = q @ k.mT + torch.arange(S) * _slopes(q).view(1, 4, 1, 1)
    return F.dropout(scores.masked_fill(behind(), torch.finfo(q.dtype).min).softmax(-1), 0.3) @ v

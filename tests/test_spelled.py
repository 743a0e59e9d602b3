"""Attention that models spell out is one operation: the same numbers, no matrix of queries × keys, rings and cut heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training, collectives
from torch import nn
from transformers_models import ALIBI

import autoshard
from autoshard.check.reference import largest_difference, largest_magnitude
from autoshard.errors import RuntimeMismatchError
from autoshard.passes.capture.export import capture
from autoshard.passes.ir.graph import Graph
from autoshard.passes.rules.families import context_parallel
from autoshard.runtime.attention.masked_attention import banded_op
from autoshard.runtime.attention.ring_geometry import ALL_KEYS, CAUSAL, Band

aten = torch.ops.aten
ATTENTION = {aten.scaled_dot_product_attention.default, banded_op._opoverload}
S = 12
Heads = torch.Tensor
"""[b, h, s, e]"""


def _behind(length: int = S) -> torch.Tensor:
    """Where a key lies behind the query."""
    return torch.arange(length) > torch.arange(length)[:, None]


def _slopes(x: Heads) -> torch.Tensor:
    return torch.pow(2.0, -torch.arange(1, 5)).to(x.dtype)


def filled(q: Heads, k: Heads, v: Heads) -> Heads:
    weights = (q @ k.transpose(-2, -1) / math.sqrt(4)).masked_fill(_behind(), -torch.inf).softmax(-1)
    return weights @ v


def added(q: Heads, k: Heads, v: Heads) -> Heads:
    """A mask and a scale in another order, a wider softmax, keys turned by hand, and dropout."""
    far = torch.zeros(S, S, dtype=q.dtype).masked_fill(
        _behind() | (torch.arange(S) < torch.arange(S)[:, None] - 3), -1e30
    )
    weights = F.softmax((torch.matmul(q, k.permute(0, 1, 3, 2)) + far) / 3, -1, dtype=torch.float64).to(v.dtype)
    return torch.matmul(weights, v)


def flat(q: Heads, k: Heads, v: Heads) -> Heads:
    """As BLOOM: batch and heads in one dim, slopes (ALiBi) repeated for every sample."""
    b, h = q.shape[:2]
    bias = (_slopes(q)[:, None, None] * torch.arange(S)).repeat(b, 1, 1)
    query, key, value = (x.reshape(b * h, S, 4) for x in (q, k, v))
    scores = bias.baddbmm(query, key.transpose(-1, -2), beta=1.0, alpha=0.5).view(b, h, S, S)
    scores = scores + torch.where(_behind(), torch.finfo(q.dtype).min, torch.zeros((), dtype=q.dtype))
    return torch.bmm(scores.softmax(-1).view(b * h, S, S), value).view(b, h, S, 4)


def sliced(q: Heads, k: Heads, v: Heads) -> Heads:
    """As MPT: slopes of more positions than there are, filled where hidden."""
    bias = (torch.arange(1 - 32, 1).view(1, 1, 1, 32) * _slopes(q).view(1, 4, 1, 1)).squeeze(0)
    scores = q @ k.mT * 0.5 + bias[:, :, -S:]
    return scores.masked_fill(_behind(), torch.finfo(q.dtype).min).softmax(-1) @ v


def contracted(q: Heads, k: Heads, v: Heads) -> Heads:
    """Heads behind the sequence, summed over letters."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)


def capped(q: Heads, k: Heads, v: Heads) -> Heads:
    """As Gemma 2: no score is above 3."""
    scores, n = torch.tanh(q @ k.mT * 0.5 / 3) * 3, q.shape[-2]
    return (scores + torch.zeros(n, n, dtype=q.dtype).masked_fill(_behind(n), -torch.inf)).softmax(-1) @ v


class Sunk(nn.Module):
    """As GPT-OSS: a learnt score of every head takes weight from the keys, and the maxima are taken off."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.sinks = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]))

    def forward(self, q: Heads, k: Heads, v: Heads) -> Heads:
        n = q.shape[-2]
        far = torch.arange(n) < torch.arange(n)[:, None] - 3
        scores = (q @ k.mT * 0.5).masked_fill(_behind(n) | far, torch.finfo(q.dtype).min)
        scores = torch.cat([scores, self.sinks.reshape(1, -1, 1, 1).expand(len(q), -1, n, -1)], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return F.dropout(scores.softmax(-1)[..., :-1], self.dropout) @ v


def hidden(q: Heads, k: Heads, v: Heads) -> Heads:
    """Data say what is seen, and of two queries nothing is: all keys count alike, and gradients flow through them."""
    seen = (v[..., 0].detach() > -1)[:, :, None] & (torch.arange(S)[:, None] > 1) & ~_behind()
    return (q @ k.mT + torch.where(seen, torch.zeros((), dtype=q.dtype), -1e30)).softmax(-1) @ v


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


def _attentions(graph: Graph) -> list[Any]:
    return [n for n in graph.nodes if n.op in ATTENTION]


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_is_put_together(dtype: torch.dtype) -> None:
    """Nothing of queries × keys is left; what hides is said by positions, slopes are numbers of heads, keys are shared."""
    graph = capture(Spelled(*FORMS).to(dtype), (torch.randn(2, S, 16, dtype=dtype),))
    nodes = _attentions(graph)
    assert len(nodes) == len(FORMS)
    for node, (form, (band, sloped)) in zip(nodes, FORMS.items(), strict=True):
        assert context_parallel.band_of(node) == band, form
        assert bool(node.argument("sloped", False)) == sloped, form
        assert node.argument("enable_gqa"), form
    assert not any(t.shape[-2:] == (S, S) for t in graph.types.values())


def _of_groups(q: Heads) -> torch.Tensor:
    """A bias of two groups of heads, as many as samples."""
    return (torch.arange(2).view(2, 1, 1, 1) * torch.arange(S)).to(q.dtype)


OTHERS: tuple[Form, ...] = (
    lambda q, k, v: (q @ k.mT).masked_fill(q[:, :1, :, :1] > 0, -1e30).softmax(-1) @ v,  # all keys of some queries
    lambda q, k, v: (q @ k.mT).masked_fill(_behind(), -torch.inf).softmax(-1).nan_to_num() @ v,
    lambda q, k, v: (q @ k.mT).masked_fill(~_behind(), -1e30).softmax(-1) @ v,  # the last query sees none
    lambda q, k, v: (q @ k.mT + q[..., :1].exp()).softmax(-1) @ v,  # learnt
    lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    lambda q, k, v: (q @ k.mT + q[..., :1].detach()).tanh().softmax(-1) @ v,
    lambda q, k, v: (q @ k.mT).tanh().tanh().softmax(-1) @ v,
    lambda q, k, v: (q @ k.mT).softmax(-1)[..., :-1] @ v[..., 1:, :],  # a key
    lambda q, k, v: torch.cat([q @ k.mT, q[..., :1].exp()], -1).softmax(-1)[..., :-1] @ v,  # of every query
    lambda q, k, v: (w := (q @ k.mT).softmax(-1)) @ v + w.sum(-1, keepdim=True),
    lambda q, k, v: ((q @ k.mT).view(2, 2, 2, S, S) + _of_groups(q)).view(2, 4, S, S).softmax(-1) @ v,
    lambda q, k, v: (q.float() @ k.float().mT).softmax(-1).double() @ v,  # rounded on the way
)


def test_others_stay_as_they_are() -> None:
    assert not _attentions(capture(Spelled(*OTHERS).double(), (torch.randn(2, S, 16, dtype=torch.float64),)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "like"),
    [
        ({"cp": 2, "tp": 2}, {"cp": "ring", "tp": "megatron"}),
        pytest.param({"cp": 3}, "ring", marks=pytest.mark.slow),
        pytest.param({"cp": 8}, "ring", marks=pytest.mark.slow),
        pytest.param({"cp": 2}, "ulysses", marks=pytest.mark.slow),
        pytest.param({"tp": 3}, None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_is_equal(axes: dict[str, int], like: Any) -> None:
    report = assert_equal_training(Spelled(*FORMS, hidden), axes, (torch.randn(2, S, 16),), like=like, steps=2)
    attentions = [c for c in report.plan.choices.values() if "attention" in c.op]
    assert len(attentions) == len(FORMS) + 1
    if like is not None and like != "ulysses":
        assert {c.labels[0] for c in attentions} <= {"ring", "folded ring", "ring with helpers"}


@pytest.mark.parametrize("axes", [{"cp": 3}, pytest.param({"cp": 2, "tp": 2}, marks=pytest.mark.slow)], ids=str)
def test_bytes_of_sinks(axes: dict[str, int]) -> None:
    """What goes round is keys and values, as ever; of sinks a sum of their gradients over the ring."""
    like = {"cp": "ring"} if "tp" not in axes else {"cp": "ring", "tp": "megatron"}
    found = collectives(Spelled(Sunk()), axes, None, (torch.randn(2, S, 16),), like=like)
    heads, n = 4 // axes.get("tp", 1), axes["cp"]
    assert found["all_reduce", ("cp",), "backward", 8.0 * heads * 2 * (n - 1) / n], found


def dropped(q: Heads, k: Heads, v: Heads) -> Heads:
    return F.dropout((q @ k.mT).masked_fill(_behind(), -torch.inf).softmax(-1), 0.3) @ v


def capped_and_dropped(q: Heads, k: Heads, v: Heads) -> Heads:
    return F.dropout((torch.tanh(q @ k.mT / 3) * 3).masked_fill(_behind(), -torch.inf).softmax(-1), 0.3) @ v


def sloped_and_dropped(q: Heads, k: Heads, v: Heads) -> Heads:
    scores = q @ k.mT + torch.arange(S) * _slopes(q).view(1, 4, 1, 1)
    return F.dropout(scores.masked_fill(_behind(), torch.finfo(q.dtype).min).softmax(-1), 0.3) @ v


@pytest.mark.parametrize(
    ("axes", "like"),
    [
        ({"cp": 2, "tp": 2}, {"cp": "ring", "tp": "megatron"}),
        pytest.param({"cp": 3}, "ring", marks=pytest.mark.slow),
        pytest.param({"cp": 4}, "ulysses", marks=pytest.mark.slow),
        pytest.param({"cp": 2, "tp": 2}, None, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "cp": 2}, {"dp": "ddp", "cp": "ring"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_drops_the_same(axes: dict[str, int], like: Any) -> None:
    """Dropout of the weights hits what it hits where they are spelled out: beside sinks, caps, slopes and windows, too."""
    forms: tuple[Form, ...] = (dropped, Sunk(0.3), capped_and_dropped, sloped_and_dropped, Sunk(0.3))
    graph = capture(Spelled(*forms), (torch.randn(2, S, 16),))
    assert len(_attentions(graph)) == len(forms)
    assert not any(t.shape[-2:] == (S, S) for t in graph.types.values())
    report = assert_equal_training(Spelled(*forms), axes, (torch.randn(2, S, 16),), like=like, steps=2)
    if like is not None:
        assert all(c.labels != ("I",) * len(axes) for c in report.plan.choices.values() if "attention" in c.op)


def test_second_derivatives() -> None:
    """By inputs that require a gradient, as on one device; by others refused: torch would take the first one for constant."""
    torch.manual_seed(0)
    model, mesh = Spelled(sliced).double(), autoshard.Mesh({"tp": 2}, "ideal_network")
    x = torch.randn(2, S, 16, dtype=torch.float64, requires_grad=True)
    twice = []
    for m in (model, autoshard.compile(model, mesh, (x,))):
        (first,) = torch.autograd.grad(m(x), x, create_graph=True)
        twice.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert largest_difference(*twice) < 1e-9 * largest_magnitude(twice[1])
    sharded = autoshard.compile(model, mesh, (x.detach(),))
    with pytest.raises(RuntimeMismatchError, match="create_graph=True: attention"):
        torch.autograd.grad(sharded(x.detach()), list(sharded.parameters()), create_graph=True)


@pytest.mark.parametrize("name", [*list(ALIBI)[:1], pytest.param("MptForCausalLM", marks=pytest.mark.slow)])
def test_models_of_transformers(name: str) -> None:
    """A ring for what they spell out, found by capture in the types they train in."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**ALIBI[name], use_cache=False)).train()
    tokens = torch.randint(0, 32, (2, S))
    mesh, kwargs = autoshard.Mesh({"cp": 2}, "ideal_network"), {"input_ids": tokens, "labels": tokens}
    report = autoshard.verify(model, mesh, (), kwargs, like="ring", rtol=1e-4)
    assert report.ok, str(report)
    assert {c.labels[0] for c in report.plan.choices.values() if "attention" in c.op} <= {
        "ring",
        "folded ring",
        "ring with helpers",
    }
    assert not any("softmax" in c.op for c in report.plan.choices.values())

"""Attention that models spell out is one operation: the same numbers, no matrix of queries × keys, rings and cut heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import assert_equal_training, collectives
from spelled_models import (
    FORMS,
    Form,
    Heads,
    S,
    Spelled,
    Sunk,
    behind,
    capped_and_dropped,
    dropped,
    sliced,
    sloped_and_dropped,
)
from transformers_models import ALIBI

import autoshard
from autoshard.check.reference import largest_difference, largest_magnitude
from autoshard.errors import RuntimeMismatchError
from autoshard.passes.capture.export import capture
from autoshard.passes.ir.graph import Graph
from autoshard.passes.rules.families import context_parallel
from autoshard.runtime.attention.masked_attention import banded_op

aten = torch.ops.aten
ATTENTION = {aten.scaled_dot_product_attention.default, banded_op._opoverload}


def hidden(q: Heads, k: Heads, v: Heads) -> Heads:
    """Data say what is seen, and of two queries nothing is: all keys count alike, and gradients flow through them."""
    seen = (v[..., 0].detach() > -1)[:, :, None] & (torch.arange(S)[:, None] > 1) & ~behind()
    return (q @ k.mT + torch.where(seen, torch.zeros((), dtype=q.dtype), -1e30)).softmax(-1) @ v


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
    lambda q, k, v: (q @ k.mT).masked_fill(behind(), -torch.inf).softmax(-1).nan_to_num() @ v,
    lambda q, k, v: (q @ k.mT).masked_fill(~behind(), -1e30).softmax(-1) @ v,  # the last query sees none
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
        assert {c.labels[0] for c in attentions} <= {"ring", "zigzag ring", "ring with helpers"}


@pytest.mark.parametrize("axes", [{"cp": 3}, pytest.param({"cp": 2, "tp": 2}, marks=pytest.mark.slow)], ids=str)
def test_bytes_of_sinks(axes: dict[str, int]) -> None:
    """What goes round is keys and values, as ever; of sinks a sum of their gradients over the ring."""
    like = {"cp": "ring"} if "tp" not in axes else {"cp": "ring", "tp": "megatron"}
    found = collectives(Spelled(Sunk()), axes, None, (torch.randn(2, S, 16),), like=like)
    heads, n = 4 // axes.get("tp", 1), axes["cp"]
    assert found["all_reduce", ("cp",), "backward", 8.0 * heads * 2 * (n - 1) / n], found


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
        "zigzag ring",
        "ring with helpers",
    }
    assert not any("softmax" in c.op for c in report.plan.choices.values())

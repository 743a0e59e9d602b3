"""torch.nn's own attention folds time and batch, batch and heads into one dim: here they stay apart, and each can be cut."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
import torch
from attention_models import MODELS, made
from harness import ideal
from microbatch_cases import steps_alike
from torch import nn

import autoshard
from autoshard.compiler import capture_graph
from autoshard.errors import PlanError
from autoshard.passes.capture.translate import graph_from_export
from autoshard.passes.capture.translate.unflatten import unmerge_views
from autoshard.passes.ir.graph import Graph, Input, Node, Ref, TensorType
from autoshard.passes.rules.interpreters import interpret

aten = torch.ops.aten

STEPS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "2 micro-batches": ({"tp": 2}, {"micro_batches": 2}),
    "4 micro-batches": ({"dp": 2}, {"micro_batches": 4}),
    "dp2": ({"dp": 2}, {}),
    "dp2tp2": ({"dp": 2, "tp": 2}, {"like": {"dp": "ddp", "tp": "megatron"}}),
    "free": ({"dp": 2, "tp": 2}, {}),
    "pp2": ({"pp": 2}, {"stages": "pp", "micro_batches": 2}),
    "pp2dp2": ({"pp": 2, "dp": 2}, {"stages": "pp", "micro_batches": 4}),
}
FAST = {("weighing", False, "4 micro-batches")}


@pytest.mark.parametrize(
    ("name", "first", "step"),
    [
        pytest.param(name, first, step, marks=[pytest.mark.slow] * ((name, first, step) not in FAST))
        for name in MODELS
        for first in (True, False)
        for step in STEPS
    ],
)
def test_steps_are_those_of_one_device(name: str, first: bool, step: str) -> None:
    """Outputs, gradients and weights after three AdamW steps, with dropout and masks."""
    (axes, asked), (model, args) = STEPS[step], made(name, first)
    steps_alike(model.train(), ideal(axes), args, {}, 3, **asked)


@pytest.mark.slow_cases("padded-*", "weighing-True")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["padded", pytest.param("decoding", marks=pytest.mark.slow), "weighing"])
def test_a_batch_that_is_cut_stays_cut(name: str, first: bool) -> None:
    """Nothing but a number of the loss and gradients of parameters is sent."""
    model, args = made(name, first)
    plan = autoshard.plan(model.train(), ideal({"dp": 2}), args, like="ddp")
    work = [c.labels for c in plan.choices.values() if "linear" in c.op or "attention" in c.op or "bmm" in c.op]
    assert len(work) > 5
    assert ("R",) not in work
    assert [(c.kind, c.bytes) for c in not_of_parameters(plan, model)] == [("all_reduce", 8)]


@pytest.mark.parametrize("first", [pytest.param(True, marks=pytest.mark.slow), False])
def test_heads_are_cut(first: bool) -> None:
    """A sum behind each pair of layers, forward and backward, and the loss's: as of any attention."""
    model, args = made("padded", first)
    plan = autoshard.plan(model.train(), ideal({"tp": 2}), args, like="megatron")
    assert [c.kind for c in not_of_parameters(plan, model)] == ["all_reduce"] * (2 * 4 + 1)
    assert any(c.op.startswith("aten.scaled_dot_product_attention") for c in plan.choices.values())


def not_of_parameters(plan: autoshard.Plan, model: nn.Module) -> list[Any]:
    return [c for c in plan.collectives if not c.reason.startswith(tuple(model.state_dict()))]


def test_without_it_micro_batches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = made("padded", first=False)
    monkeypatch.setattr(graph_from_export, "unmerge_views", lambda graph: graph)
    monkeypatch.setattr(graph_from_export, "unflatten_rows", lambda graph: graph)
    with pytest.raises(PlanError, match="micro_batches=2"):
        autoshard.plan(model.train(), ideal({"tp": 2}), args, micro_batches=2)


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_open_lengths(first: bool) -> None:
    """Batches and lengths of any size: neither is folded into another."""
    model, args = made("padded", first)
    sharded = autoshard.compile(copy.deepcopy(model).eval(), ideal({"dp": 2}), args, dynamic=True, training=True)
    shorter = tuple(x[:4, :5] if first or x.dim() == 2 else x[:5, :4] for x in args)
    for given in (args, shorter):
        torch.testing.assert_close(sharded(*given), model.eval()(*given), rtol=1e-12, atol=0)
    assert len(sharded.programs) == 1


def chain(random: Random) -> Graph:
    """Reshapes and permutations of a value whose first dim is a batch, with a product after some; all are given back."""
    x = torch.empty(random.choice([(4, 3, 8), (2, 6, 1, 4), (6, 4), (3, 2, 2, 6)]), device="meta")
    value, nodes, types = Ref("x"), list[Node](), {"x": TensorType(tuple(x.shape), torch.float64)}
    for number in range(random.randint(2, 7)):
        kind = random.choice(["reshape", "reshape", "permute", "permute", "transpose", "unsqueeze", "squeeze", "scale"])
        op, args = _step(kind, x, random)
        x, name = op(x, *args), f"v{number}"
        nodes.append(Node(name, op, (value, *args), {}, (name,), (0,)))
        types[name] = TensorType(tuple(x.shape), torch.float64)
        value = Ref(name)
    outputs = (*(Ref(n.name) for n in nodes if random.random() < 0.2), value)
    return Graph((Input("x", "input", "x"),), tuple(nodes), types, outputs, None, None)


def _step(kind: str, x: torch.Tensor, random: Random) -> tuple[Any, tuple[Any, ...]]:
    dims = list(range(x.dim()))
    if kind == "reshape":
        left, shape = x.numel(), list[int]()
        while left > 1:
            shape.append(random.choice([n for n in range(2, left + 1) if left % n == 0]))
            left //= shape[-1]
        return aten.reshape.default, (shape,)
    if kind == "permute":
        return aten.permute.default, (random.sample(dims, len(dims)),)
    if kind == "transpose":
        return aten.transpose.int, (random.choice(dims), random.choice(dims) - len(dims))
    if kind == "unsqueeze":
        return aten.unsqueeze.default, (random.randint(-1, len(dims)),)
    if kind == "squeeze":
        return aten.squeeze.dim, (random.choice(dims),)
    return aten.mul.Tensor, (2.0,)


@pytest.mark.slow
def test_views_are_what_they_were() -> None:
    """Whatever is merged, turned and split on the way: the same elements, and types that say so."""
    changed = 0
    for seed in range(400):
        graph = chain(Random(seed))
        found = unmerge_views(graph)
        changed += found is not graph
        x = {"x": torch.arange(graph.types["x"].numel, dtype=torch.float64).reshape(graph.types["x"].shape)}
        expected, values = interpret(graph, x), interpret(found, x)
        for name in graph.returned:
            torch.testing.assert_close(values[name], expected[name], rtol=0, atol=0)
        assert all(tuple(values[n].shape) == found.types[n].shape for node in found.nodes for n in node.outputs)
        assert found.returned == graph.returned
    assert 50 < changed < 350


def test_plain_chains_stay() -> None:
    """What merges dims and leaves them merged, as of the patches of an image, is written as it was."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(x).flatten(2).transpose(1, 2)).square().mean()

    graph = capture_graph(Patches(), (torch.randn(2, 3, 8, 8),), {}, training=True)
    assert [n.op for n in graph.nodes[1:3]] == [aten.reshape.default, aten.transpose.int]

"""What the tests of capture share: a model made from a function, and the comparison with eager."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from autoshard.passes.capture.export import capture
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.rules.interpreters import interpret, model_outputs

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("float64")


class Model(nn.Module):
    """``forward`` from a function of (self, x, …), with a parameter, a layer and a buffer to use."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))
        self.lin = nn.Linear(4, 4)
        self.buf: torch.Tensor
        self.register_buffer("buf", torch.zeros(4))
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def graph_inputs(graph: Graph, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The model's own tensors and the call's, by input name."""
    values = {n: x for n, x in zip(graph.flat_inputs, pytree.tree_leaves((args, kwargs)), strict=True) if n}
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return values | {i.name: state[i.fqn] for i in graph.inputs if i.kind in ("parameter", "buffer")}


def loss_of(output: Any) -> torch.Tensor:
    """A scalar in which every element of every differentiable output counts differently."""
    parts = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum((t * torch.linspace(0.5, 1.5, t.numel()).reshape(t.shape)).sum() for t in parts)  # type: ignore[return-value]


def distance(ours: Any, theirs: Any) -> float:
    """Largest relative difference of two outputs' tensors; infinite where their structure or flags differ."""
    a, b = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    if type(ours) is not type(theirs) or len(a) != len(b):
        return float("inf")
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if not isinstance(y, torch.Tensor):
            if x is not y and x != y:
                return float("inf")
        elif x.shape != y.shape or x.dtype != y.dtype or x.requires_grad != y.requires_grad:
            return float("inf")
        elif y.numel():
            difference = (x.double() - y.double()).abs().max() / y.double().abs().max().clamp_min(1e-30)
            if difference.isnan():  # of infinities, or of numbers that are none: they have to be the same
                difference = torch.tensor(0.0 if torch.allclose(x, y, 1e-12, 0.0, equal_nan=True) else torch.inf)
            worst = max(worst, difference.item())
    return worst


def gradients(output: Any, model: nn.Module) -> list[torch.Tensor]:
    """Gradients of :func:`loss_of`; zeros where there is none."""
    loss, params = loss_of(output), [p for p in model.parameters() if p.requires_grad]
    if not isinstance(loss, torch.Tensor) or not params:
        return []
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]


def check(model: nn.Module, *args: Any, tolerance: float = 1e-12, **kwargs: Any) -> Graph:
    """Capture, and compare the interpreted graph with eager from the same seed: outputs, gradients, buffers, types."""
    graph = capture(model, args, kwargs)
    reference = copy.deepcopy(model)
    torch.manual_seed(3)
    expected = reference(*args, **kwargs)
    torch.manual_seed(3)
    values = interpret(graph, graph_inputs(graph, model, args, kwargs))
    result = model_outputs(graph, values)
    assert distance(result, expected) <= tolerance
    assert distance(gradients(result, model), gradients(expected, reference)) <= tolerance
    buffers = dict(model.named_buffers()) | {f: values[v].detach() for f, v in graph.mutations.items()}
    assert distance(list(buffers.values()), [reference.get_buffer(n).detach() for n in buffers]) <= tolerance
    for name, kind in graph.types.items():
        assert (kind.shape, kind.dtype) == (tuple(values[name].shape), values[name].dtype), name
        if graph.training:
            assert kind.grad == values[name].requires_grad, name
    return graph


def text(model: nn.Module, *args: Any) -> str:
    """The captured graph as text, an op a line, without types, without numbers of lines."""
    lines = [line.partition("    #")[0].strip() for line in str(capture(model, args)).splitlines()[1:]]
    return re.sub(r"\.py:\d+", ".py", "\n".join(lines))


def ops(graph: Graph) -> list[Any]:
    return [node.op for node in graph.nodes]


def node_of(graph: Graph, op: Any) -> Node:
    return next(node for node in graph.nodes if node.op is op)


X = torch.linspace(-1.3, 1.7, 12, dtype=torch.float64).reshape(3, 4)


def asserts(y: torch.Tensor) -> None:
    """Here, because pytest rewrites the asserts of test modules."""
    assert y is not None and (y < 100).all(), "too large"  # noqa: PT018


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)  # type: ignore[no-any-return]

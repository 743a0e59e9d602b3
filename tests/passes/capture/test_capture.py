"""capture: the graph computes what eager computes (values, gradients, buffers), or is refused with a reason."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from again_cases import full
from capture_models import Inner, Model, X, check, distance, gradients, graph_inputs, node_of, ops
from torch import nn

import autoshard
from autoshard.passes.capture.export import capture
from autoshard.passes.rules.interpreters import interpret, model_outputs

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("float64")


class Written(nn.Module):
    """A buffer that counts calls, a write into a view, a value that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.up(x)
        h[0].mul_(2)
        h.exp()
        return h.tanh()


def test_a_graph_as_text() -> None:
    """No operation writes: the last value of the buffer goes back after the forward."""
    text = re.sub(r"\.py:\d+$", ".py", str(capture(Written(), (torch.zeros(2, 4),))), flags=re.MULTILINE)
    assert text.splitlines() == [
        "graph(p_up_weight: f64[8, 4], b_calls: f64[], x: f64[2, 4]):",
        "    add = aten.add.Tensor(b_calls, 1)    # f64[]    test_capture.py",
        "    linear = aten.linear.default(x, p_up_weight)    # f64[2, 8]  up  test_capture.py",
        "    select = aten.select.int(linear, 0, 0)    # f64[8]    test_capture.py",
        "    mul = aten.mul.Tensor(select, 2)    # f64[8]    test_capture.py",
        "    select_scatter = aten.select_scatter.default(linear, mul, 0, 0)    # f64[2, 8]    test_capture.py",
        "    tanh = aten.tanh.default(select_scatter)    # f64[2, 8]    test_capture.py",
        "    return tanh",
        "    calls ← add",
    ]


# --- values, gradients and buffers


def test_mlp_nodes_carry_module_paths_types_and_source_lines() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    graph = check(model, X)
    assert ops(graph) == [aten.linear.default, aten.gelu.default, aten.linear.default]
    assert [n.fqn for n in graph.nodes] == ["0", "1", "2"]
    assert graph.nodes[0].module_types == (("", "Sequential"), ("0", "Linear"))
    assert [(i.kind, i.fqn) for i in graph.inputs][-2:] == [("parameter", "2.bias"), ("input", "input")]
    inner = check(Inner(), X)
    assert inner.nodes[0].fqn == "lin"
    assert inner.nodes[0].source.startswith("capture_models.py:")


def test_batch_norm_net_writes_its_statistics_back_and_the_model_does_not_move() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3))
    before = copy.deepcopy(model.state_dict())
    graph = check(model, torch.randn(2, 3, 6, 6))
    assert set(graph.mutations) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert aten.dropout.default in ops(graph)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.training
    assert vars(model)["_forward_hooks"] == {}
    assert "forward" not in vars(model)


def test_modes_are_the_modules_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).eval()
    model[1].train()
    graph = capture(model, (X,), training=True)
    assert aten.dropout.default in ops(graph)
    assert graph.training
    assert not graph.mutations
    assert [m.training for m in model.modules()] == [False, False, True, False]
    inference = capture(model, (X,))
    assert not any(t.grad for t in inference.types.values())


def in_place(self: Model, x: torch.Tensor) -> torch.Tensor:
    y = x * self.w
    y[:, 0].add_(1)
    y.view(-1)[2:5].mul_(3)
    y.t()[1] = x[:, 0]
    y[1:].copy_(self.w)
    y.diagonal().mul_(2)
    y[0].zero_()
    y.fill_diagonal_(0.5)
    return y


def test_in_place_ops_and_views_become_functional() -> None:
    graph = check(Model(in_place), X)
    assert not any(node.op._schema.is_mutable for node in graph.nodes)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: F.dropout(F.dropout(x * s.w, 0.3), 0.3, training=False),
        lambda s, x: F.dropout(x * s.w, 0.0),
        lambda s, x: (torch.rand(3), torch.randn(2), F.dropout(x * s.w, 0.5))[2],
        lambda s, x: x * s.w + torch.randn_like(x) * torch.rand(3, 4) + torch.normal(0.0, 1.0, (3, 4)),
        lambda s, x: F.alpha_dropout(x * s.w, 0.3, True) + F.gumbel_softmax(x * s.w, dim=-1),
        lambda s, x: (x * s.w)[torch.randperm(3)],
        lambda s, x: F.scaled_dot_product_attention(*[(x * s.w).view(1, 2, 3, 2)] * 3, dropout_p=0.2, is_causal=True),
    ],
)
def test_random_ops_draw_as_in_eager(function: Callable[..., Any]) -> None:
    check(Model(function), X)


def test_dead_random_ops_stay_and_dead_code_goes() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        (x @ x.t()).sum()
        return F.dropout(x * self.w)

    graph = check(Model(forward), X)
    assert ops(graph) == [aten.rand.default, aten.mul.Tensor, aten.dropout.default]
    assert graph.nodes[0].kwargs.keys().isdisjoint({"device", "pin_memory", "layout"})


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda s, x: F.mse_loss(x * s.w, x), aten.mse_loss.default),
        (lambda s, x: F.mse_loss(x * s.w, x[:1]), aten.mse_loss.default),
        (lambda s, x: F.cross_entropy(x * s.w, torch.tensor([0, 3, 2]), label_smoothing=0.1), None),
        (lambda s, x: torch.where(x > 0, x * s.w, 0.0).topk(2), aten.topk.default),
        (lambda s, x: ((x * s.w).max(1), (x * s.w).argmax(1), (x * s.w).sort(1)[0]), aten.argmax.default),
        (lambda s, x: torch.view_as_real(torch.view_as_complex((x * s.w).view(3, 2, 2).mT.contiguous()) * 1j), None),
        (lambda s, x: torch.fft.rfft(x * s.w).abs(), aten.fft_rfft.default),
        (lambda s, x: (x * s.w).t().contiguous().as_strided((3, 2), (3, 1)), aten.as_strided.default),
        (lambda s, x: torch.vmap(lambda r: s.lin(r).sum())(x), None),
        (lambda s, x: s.w * torch.vmap(lambda i: i.reshape(1).to(x.dtype) - torch.arange(4))(torch.arange(3)), None),
        (lambda s, x: (x * s.w).unbind(1)[2] + (x * s.w).chunk(3, 1)[1].sum(), aten.unbind.int),
        (lambda s, x: x.index_put((torch.tensor([0, 2]),), s.w, accumulate=True), aten.index_put.default),
    ],
)  # fmt: skip
def test_ops(function: Callable[..., Any], op: Any) -> None:
    graph = check(Model(function), X)
    assert op is None or op in ops(graph)


@pytest.mark.slow_cases("LSTM")
@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm(4),
        nn.RMSNorm(4),
        nn.GroupNorm(1, 3),
        nn.LSTM(4, 3, 2, bidirectional=True),
        nn.GRU(4, 3),
        nn.TransformerEncoderLayer(4, 2, 8),
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
        nn.Bilinear(4, 4, 2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers(layer: nn.Module) -> None:
    x = torch.randn(2, 3, 4)
    args = (x, x) if isinstance(layer, nn.Bilinear) else (x,)
    check(layer.double(), *args)
    if isinstance(layer, nn.TransformerEncoderLayer):  # no fast path: gradients are on while tracing
        assert aten.scaled_dot_product_attention.default in ops(capture(layer.eval(), args))


# --- inputs and outputs


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extras: Any = None


def test_outputs_keep_their_types() -> None:
    def forward(self: Model, x: torch.Tensor, flag: bool, *, scale: float = 1.0) -> dict[str, Any]:
        y = x * self.w * scale if flag else x
        return {"a": (y, x, self.w), "b": [None, 3, True, "text", 2.5], "c": Output(y + 1, {"z": y, "k": [1]})}

    graph = check(Model(forward), X, True, scale=2.0)
    assert graph.flat_inputs[1:] == (None, None)
    result = check(Model(lambda s, x: Output(x * s.w)), X)
    assert len(result.outputs) == 1


def test_arguments_nested_reordered_and_shared() -> None:
    def forward(self: Model, a: Any, b: Any = None, *, c: Any, **rest: Any) -> torch.Tensor:
        return a["x"] * self.w + (0 if b is None else b) - c * rest["e"][1]  # type: ignore[no-any-return]

    graph = check(Model(forward), {"n": 3, "x": X}, c=X * 2, e=[None, X * 5], b=X)
    assert {i.fqn for i in graph.inputs if i.kind == "input"} >= {"c", "b", "e[1]"}
    # One tensor under two names stays two inputs: export alone would merge them.
    graph = check(Model(lambda s, x, labels: x * s.w + labels.detach() * 2), X, labels=X)
    assert len({name for name in graph.flat_inputs if name}) == 2
    model = Model(in_place)
    same, other = (
        model_outputs(graph, interpret(graph, graph_inputs(graph, model, (X,), {"labels": y}))) for y in (X, X + 1)
    )
    assert torch.allclose(other - same, torch.tensor(2.0))


def test_input_that_requires_a_gradient() -> None:
    x = X.clone().requires_grad_()
    graph = check(Model(lambda s, x: x * 2), x)
    assert graph.types[graph.outputs[0].name].grad


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.unused = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.ones(7), persistent=False)
        self.twin = nn.Module()
        self.twin.register_buffer("mask", self.mask)
        self.table = torch.arange(7.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = self.twin.mask  # type: ignore[assignment]
        return self.head(self.embed(ids)) * scale + self.table + torch.tensor([1.0] * 7)  # type: ignore[no-any-return]


def test_tied_unused_and_constant_tensors() -> None:
    graph = check(Tied(), torch.tensor([[1, 2], [6, 0]]))
    named = {i.fqn: i for i in graph.inputs}
    assert named["embed.weight"].aliases == ("head.weight",)
    assert named["mask"].aliases == ("twin.mask",)
    assert "head.weight" not in named
    assert named["unused"].kind == "parameter"
    assert graph.types[named["unused"].name].grad
    assert sorted(i.kind for i in graph.inputs).count("constant") == 2
    assert set(graph.constants) == {i.name for i in graph.inputs if i.kind == "constant"}


# --- gradients that must not flow


def no_grad_parameter(self: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = (self.w * 2).view(2, 2)
        with torch.enable_grad():
            through = self.lin(x)
        stopped = through * 2
    return x * scale.sum() + through + stopped + self.w.detach() + self.w.data  # type: ignore[no-any-return]


def no_grad_buffer(self: Model, x: torch.Tensor) -> torch.Tensor:
    shown = self.buf.view(2, 2)
    with torch.no_grad():
        self.buf.copy_(x.mean(0)).add_(self.w)
    return x * self.w + self.buf + shown.sum()


def enable_grad(self: Model, x: torch.Tensor) -> torch.Tensor:
    y = self.lin(x)
    with torch.enable_grad():
        return self.lin(y) + self.w


def inference_mode(self: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = self.lin(x)
    return y + self.w


def autocast(self: Model, x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.lin(x)
        with torch.no_grad():
            z = self.lin(x)
        q = y @ y.t()
    return q.double().sum() + z.double().sum() * self.w.sum()


def written_after_detach(self: Model, x: torch.Tensor) -> torch.Tensor:
    """Without grad_fn of its own, as tables of positions come, until something with a gradient is added in place."""
    with torch.no_grad():
        positions = (self.buf * 2).view(1, 4).expand(3, 4).clone().detach()
    positions += x * self.w
    return positions * 2


def test_what_is_written_into_a_detached_tensor_keeps_its_gradient() -> None:
    check(Model(written_after_detach), X)


def in_autocast(self: Model, h: torch.Tensor) -> None:
    with torch.autocast("cpu", enabled=False):
        self.buf.data.lerp_(h.mean(0), 0.2)


INTO_DATA: dict[str, Callable[[Model, torch.Tensor], Any]] = {
    "lerp_": lambda s, h: s.buf.data.lerp_(h.mean(0), 0.2),
    "two in a row": lambda s, h: s.buf.data.mul_(0.8).add_(h.mean(0), alpha=0.2),
    "copy_": lambda s, h: s.buf.data.copy_(s.buf * 0.8 + h.mean(0)),
    "a view, and again": lambda s, h: [s.buf.data[1:3].add_(h[0, :2]), s.buf.data.mul_(s.buf.data)],
    "an item": lambda s, h: s.buf.data.__setitem__(slice(1, 3), h[0, :2]),
    "in a region": in_autocast,
}


@pytest.mark.parametrize("name", INTO_DATA)
def test_the_gradient_of_what_is_written_through_data_is_forgotten(name: str) -> None:
    def averaged(self: Model, x: torch.Tensor) -> torch.Tensor:
        h = self.lin(x)
        INTO_DATA[name](self, h)
        return h * (self.buf + 1)

    check(Model(averaged), X)


@pytest.mark.parametrize("function", [no_grad_parameter, no_grad_buffer, inference_mode, autocast])
def test_no_grad_and_autocast_regions(function: Callable[..., Any]) -> None:
    model = Model(function)
    model.lin.to(torch.float32 if function is autocast else torch.float64)
    graph = check(model, X)
    assert aten.detach.default in ops(graph)
    linear = node_of(graph, aten.linear.default) if function is not no_grad_buffer else graph.nodes[0]
    assert linear.fqn == ("lin" if function is not no_grad_buffer else "")
    if function is autocast:
        assert graph.types[linear.outputs[0]].dtype is torch.bfloat16


def test_regions_with_gradients_in_a_call_without() -> None:
    """torch gives the functional form of such a region a backward, with inputs of its own, and fails on them."""
    model = Model(enable_grad)
    with torch.no_grad():
        graph = capture(model, (X,), training=False)
        torch.testing.assert_close(
            model_outputs(graph, interpret(graph, graph_inputs(graph, model, (X,), {}))), model(X)
        )


def test_losing_a_detach_is_seen() -> None:
    """Negative control: without its detach nodes the graph has other gradients, and ``distance`` says so."""
    model = Model(no_grad_parameter)
    graph = capture(model, (X,))
    nodes = tuple(
        dataclasses.replace(n, op=aten.clone.default) if n.op is aten.detach.default else n for n in graph.nodes
    )
    broken = dataclasses.replace(graph, nodes=nodes)
    inputs = graph_inputs(graph, model, (X,), {})
    grads = [gradients(model_outputs(g, interpret(g, inputs)), model) for g in (graph, broken)]
    assert distance(grads[0], grads[1]) > 0.1


def test_autocast_around_operations_that_stay_as_they_are() -> None:
    """Its casts are in no trace that export makes: they come with the functional form."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).float()
    x = torch.randn(6, 8, dtype=torch.float32)
    sharded = autoshard.compile(copy.deepcopy(model), autoshard.Mesh({"x": 1}))
    for one in (model, sharded):
        with torch.autocast("cpu", torch.bfloat16):
            out = one(x)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
    for a, b in zip(model.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(a.grad, full(b.grad))

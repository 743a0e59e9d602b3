"""Ops without a rule written as others: all of them in the one run that makes the program functional."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training
from torch import Tensor, nn

from autoshard.models import Llama, LlamaConfig
from autoshard.passes.capture.export import capture
from autoshard.passes.capture.translate import decompose
from autoshard.passes.ir.graph import Graph, Node


class Calling(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def sampled(x: Tensor) -> Tensor:
    return F.grid_sample(x[None, None], torch.zeros(1, 3, 3, 2, dtype=x.dtype))


def multiplied(x: Tensor) -> Tensor:
    return torch.kron(x, x).inner(x[0].repeat(8))


@pytest.mark.parametrize(
    ("function", "origins"),
    [
        (sampled, {"aten.grid_sampler.default"}),
        (multiplied, {"aten.kron.default", "aten.inner.default"}),
    ],
)
def test_parts_of_parts_need_no_further_trace(
    function: Callable[[Tensor], Tensor], origins: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run traces the whole program twice, which is most of the time that a compilation takes."""
    runs = Mock(wraps=decompose.decompose_program)
    monkeypatch.setattr(decompose, "decompose_program", runs)
    graph = capture(Calling(function), (torch.randn(6, 8, dtype=torch.float64),))
    assert runs.call_count == 1
    assert {node.origin for node in graph.nodes} - {""} == origins  # the user's own op, also of the parts of a part
    assert not {str(node.op) for node in graph.nodes} & origins


def without_gradients(m: Odd, y: Tensor, x: Tensor, n: Tensor) -> object:
    """Regions in regions, of values of all kinds, that give what they are given, too."""
    with torch.no_grad():
        halved = m.lin.weight.flatten()[:4] * y / 2
        with torch.enable_grad():
            both = m.norm(halved + y), x
        table = m.table.reshape(2, 2).reshape(-1)
    return both[0] * halved, both[1], table + n[0], m.lin.weight


class Odd(nn.Module):
    """Results in all forms: of parameters, buffers, inputs, constants, twice, and what nobody reads."""

    table: Tensor

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.lin, self.norm, self.function = nn.Linear(4, 4), nn.LayerNorm(4), function
        self.register_buffer("table", torch.arange(4.0, dtype=torch.float64))
        self.constant = torch.ones(4, dtype=torch.float64)

    def forward(self, x: Tensor, n: Tensor) -> object:
        return self.function(self, self.lin(x), x, n)


ODD: dict[str, Callable[..., object]] = {
    "plain": lambda m, y, x, n: m.norm(y),
    "inputs": lambda m, y, x, n: (y, x, n),
    "views of inputs": lambda m, y, x, n: (y, x.view(-1), x.t()),
    "twice": lambda m, y, x, n: (y, y),
    "parameters and buffers": lambda m, y, x, n: (y, m.lin.weight, m.table, m.lin.bias[1:]),
    "constants": lambda m, y, x, n: y * m.constant,
    "detached": lambda m, y, x, n: y * y.detach() + x.detach(),
    "numbers": lambda m, y, x, n: (y, y.shape[0], None, 2.5),
    "unread": lambda m, y, x, n: (y.exp(), y)[1],
    "several results": lambda m, y, x, n: (y.max(-1), y.split(2, -1), y.topk(2)),
    "look-ups": lambda m, y, x, n: F.embedding(n, y).softmax(-1),
    "drawn": lambda m, y, x, n: y * torch.rand_like(y),
    "drawn in turn": lambda m, y, x, n: F.dropout(y, 0.5) * torch.rand_like(y) + F.dropout(x, 0.5, training=False),
    "drawn unread": lambda m, y, x, n: (F.dropout(y), torch.bernoulli(x.detach().sigmoid()), y)[2],
    "drawn attention": lambda m, y, x, n: F.scaled_dot_product_attention(y, y, x, dropout_p=0.5),
    "converted": lambda m, y, x, n: y.float().to(torch.float64),
    "strided": lambda m, y, x, n: y.t().expand(2, 4, 3).transpose(0, 1) @ y,
    "other dtypes": lambda m, y, x, n: F.layer_norm(y.float(), (4,)).double() + n[0],
}


@pytest.mark.slow_cases(
    "views of inputs-*",
    "twice-*",
    "unread-*",
    "several results-*",
    "drawn in turn-*",
    "drawn unread-*",
    "strided-*",
    "look-ups-*",
    "numbers-*",
    "constants-*",
    "converted-*",
)
@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ODD)
def test_what_is_functional_is_not_traced_again(name: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is that of another trace; where it is written as others, there is one."""
    runs = Mock(wraps=decompose.decompose_program)
    monkeypatch.setattr(decompose, "decompose_program", runs)

    def captured() -> tuple[object, ...]:
        runs.reset_mock()
        model = Odd(ODD[name]).double()
        inputs = torch.randn(3, 4, dtype=torch.float64, requires_grad=training), torch.tensor([0, 2])
        graph = capture(model, inputs, training=training)
        return str(graph), repr(graph.nodes), repr(graph.types), repr(graph.inputs), graph.outputs, graph.mutations

    graph = captured()
    assert runs.call_count == 0
    monkeypatch.setattr(decompose, "_is_kept_node", lambda node, tail: False)
    assert graph == captured()
    assert runs.call_count == 1


def placeless(graph: Graph) -> dict[tuple[str, ...], Node]:
    """Its operations by what they define: another trace forgets places in some regions, and makes views of writes anew."""
    return {node.outputs: replace(node, frames=(), fqn="", module_types=()) for node in graph.nodes}


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("training", [True, False])
def test_regions_without_gradients_are_written_where_they_stand(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is that of another trace, which forgets the lines of regions where it is not for training."""
    runs = Mock(wraps=decompose.decompose_program)
    monkeypatch.setattr(decompose, "decompose_program", runs)
    model = Odd(without_gradients).double()
    inputs = torch.randn(3, 4, dtype=torch.float64, requires_grad=training), torch.tensor([0, 2])
    graph = capture(model, inputs, training=training)
    assert runs.call_count == 0
    assert all(node.frames for node in graph.nodes)
    monkeypatch.setattr(decompose, "expand_composites", lambda *a: False)
    again = capture(model, inputs, training=training)
    assert runs.call_count == 1
    assert placeless(graph) == placeless(again)
    assert (graph.types, graph.inputs, graph.outputs) == (again.types, again.inputs, again.outputs)


def test_what_autocast_converts_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region of another kind, whose operations are others by themselves."""
    runs = Mock(wraps=decompose.decompose_program)
    monkeypatch.setattr(decompose, "decompose_program", runs)

    def halved(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.T

    graph = capture(Calling(halved), (torch.randn(6, 8),))
    assert runs.call_count == 1
    assert graph.types[graph.outputs[0].name].dtype == torch.bfloat16


def in_turn(m: Odd, y: Tensor, x: Tensor, n: Tensor) -> object:
    z = y = y.exp()
    before = y.sum()
    y.add_(1).mul_(2)
    z += x
    return z.view(-1), before, y.mean()


def gates(m: Odd, y: Tensor, x: Tensor, n: Tensor) -> object:
    weights, chosen = y.softmax(-1).topk(2)
    weights /= weights.sum(-1, keepdim=True)
    return weights.to(x.dtype).flatten(), chosen


def without_gradient(m: Odd, y: Tensor, x: Tensor, n: Tensor) -> object:
    with torch.no_grad():
        scale = y.exp()
        scale.div_(scale.sum())
    return (y + 1).add_(scale)


def of_two_views(m: Odd, y: Tensor, x: Tensor, n: Tensor) -> object:
    first, rest = x.exp().split([1, 2])
    return first.add_(1), rest


WRITES: dict[str, tuple[Callable[..., object], int]] = {
    "in turn": (in_turn, 0),
    "gates": (gates, 0),
    "of a copy": (lambda m, y, x, n: x.clone().masked_fill_(x > 0, 0.0).clamp_(max=3.0).relu_() * y, 0),
    "without a gradient": (without_gradient, 0),
    "seen by a view of before": (lambda m, y, x, n: (z := y.exp(), z[0], z.add_(1))[1], 1),
    "of a view": (lambda m, y, x, n: (z := y.exp(), z.view(-1).mul_(2))[0], 1),
    "of two views": (of_two_views, 1),
    "of another dtype": (lambda m, y, x, n: y.float().add_(x), 1),
    "of a buffer": (lambda m, y, x, n: m.table.add_(1) * y, 1),
    "drawn": (lambda m, y, x, n: y.exp().uniform_(), 1),
}


@pytest.mark.slow_cases("of two views", "seen by a view of before", "in turn", "gates", "of another dtype")
@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a value that nothing else shows they are written where they stand; else the program is traced again."""
    runs = Mock(wraps=decompose.decompose_program)
    monkeypatch.setattr(decompose, "decompose_program", runs)
    function, expected = WRITES[name]

    def captured() -> tuple[object, ...]:
        runs.reset_mock()
        graph = capture(Odd(function).double(), (torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 2])))
        assert not any(node.op._schema.is_mutable for node in graph.nodes)
        return placeless(graph), graph.types, graph.inputs, graph.outputs, graph.mutations

    graph = captured()
    assert runs.call_count == expected
    monkeypatch.setattr(decompose, "expand_composites", lambda *a: False)
    assert graph == captured()
    assert runs.call_count == 1


VIEWS: dict[str, Callable[..., object]] = {
    "as views": lambda m, y, x, n: y.flatten().unflatten(0, (4, 3)) + x.reshape(4, 3).flatten(1),
    "as copies": lambda m, y, x, n: y.t().reshape(-1) + x.t().flatten(),
    "in parts": lambda m, y, x, n: y.chunk(2, -1)[1] + x.chunk(2, 1)[0],
    "in slices": lambda m, y, x, n: y.tensor_split(2, 1),
    "as nothing": lambda m, y, x, n: y.flatten(1).contiguous().reshape_as(x) * x.view_as(y),
    "as results": lambda m, y, x, n: (y.flatten(), y.chunk(2), x.reshape(-1)),
    "numbered": lambda m, y, x, n: (y.view(12), y.flatten().view(2, 6), x.view(6, 2).reshape(12).view(3, 4)),
    "of buffers": lambda m, y, x, n: y + m.table.reshape(1, 4).expand_as(y) + m.constant.flatten(),
}


@pytest.mark.slow_cases("*-False", "as copies-*", "in slices-*", "as results-*")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", VIEWS)
def test_composite_operations_are_written_where_they_stand(
    name: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is that of another trace, to its names; and there is none, but where one becomes several with results."""
    runs = Mock(wraps=decompose.decompose_program)
    monkeypatch.setattr(decompose, "decompose_program", runs)

    def captured() -> tuple[object, ...]:
        model = Odd(VIEWS[name]).double()
        inputs = torch.randn(3, 4, dtype=torch.float64, requires_grad=training), torch.tensor([0, 2])
        graph = capture(model, inputs, training=training)
        return str(graph), repr(graph.nodes), repr(graph.types), repr(graph.inputs), graph.outputs, graph.mutations

    graph = captured()
    assert runs.call_count == (name == "in slices")
    runs.reset_mock()
    monkeypatch.setattr(decompose, "expand_composites", lambda *a: False)
    assert graph == captured()
    assert runs.call_count == 1


@pytest.mark.slow
def test_calls_of_equal_modules_do_not_have_a_program_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the graph change: markers stand for them until they are written out."""
    runs = Mock(wraps=decompose.decompose_program)
    monkeypatch.setattr(decompose, "decompose_program", runs)
    model, ids = Llama(replace(LlamaConfig.tiny(), layers=4)), torch.zeros(2, 8, dtype=torch.long)
    graph = capture(model, (ids, ids))
    assert runs.call_count == 0
    monkeypatch.setattr(decompose, "expand_composites", lambda *a: False)
    again = capture(model, (ids, ids))
    assert runs.call_count == 1
    assert str(graph) == str(again)
    assert repr(graph.nodes) == repr(again.nodes)
    assert graph.types == again.types


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: products of the lowest frequencies, written into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 6), nn.Linear(6, 1)
        self.weight = nn.Parameter(torch.randn(6, 6, 4, dtype=torch.complex128) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft(self.up(x).mT)
        kept = torch.zeros_like(frequencies)
        kept[..., :4] = torch.einsum("bim,iom->bom", frequencies[..., :4], self.weight)
        kept[..., 5] = frequencies[..., 4]
        return self.down(torch.fft.irfft(kept, n=x.shape[1]).mT)


@pytest.mark.slow_cases("axes0")
@pytest.mark.parametrize("axes", [{"tp": 3}, {"dp": 2, "tp": 2}])
def test_a_write_to_a_slice_of_complex_numbers(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    assert_equal_training(Spectral(), axes, (torch.randn(4, 16, 2),), steps=2)


class Conjugates(nn.Module):
    """Conjugates written into a slice; the imaginary part of one summed along the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(self.up(x).unflatten(-1, (3, 2))).conj()
        written = torch.zeros_like(turned)
        written[..., 1:] = turned[..., :2]
        return torch.view_as_real(written).flatten(-2) * turned.imag.cumsum(0).mean()


@pytest.mark.slow_cases("axes0")
@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 3}])
def test_conjugates_are_computed(axes: dict[str, int]) -> None:
    """Eager ones are views that say so: their memory, which is what would be sent, holds the other sign."""
    torch.manual_seed(0)
    model, x = Conjugates().double(), torch.randn(4, 16, 2, dtype=torch.float64)
    assert_equal_training(model, axes, (x,), steps=2)
    assert not any("_conj" in str(n.op) or "_neg_view" in str(n.op) for n in capture(model, (x,)).nodes)


class Named(nn.Module):
    """Tensors named as what a graph module has: its code, its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.recompile = nn.Parameter(torch.randn(6)), nn.BatchNorm1d(6)
        self.register_buffer("code", torch.randn(5, 6))
        self.register_buffer("to_folder", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.recompile(x * self.graph * self.to_folder)
        nearest = self.code[(y.unsqueeze(1) - self.code).square().sum(-1).argmin(-1)]
        with torch.no_grad():
            self.code.mul_(0.9)
        return (y - nearest).square().mean()


def test_names_of_what_a_graph_module_has() -> None:
    model = Named()
    assert_equal_training(model, {"x": 2}, (torch.randn(4, 6),))
    graph = capture(model, (torch.randn(4, 6, dtype=torch.float64),))
    assert {*dict(model.named_parameters()), *dict(model.named_buffers())} == {i.fqn for i in graph.inputs} - {"x"}
    assert "code" in graph.mutations

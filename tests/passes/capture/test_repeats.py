"""Equal modules are traced once. Whatever a layer does otherwise than the first, the graph computes what eager computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_models import X, check
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from autoshard.models.llama import Llama, LlamaConfig
from autoshard.passes.capture import export
from autoshard.passes.capture.export import capture
from autoshard.passes.capture.shared_regions import observer
from autoshard.passes.capture.shared_regions.recording import REPEATED_REGION, TRACED_REGION, RegionTensors

pytestmark = pytest.mark.usefixtures("float64")
LAYERS = 4


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every program that was written out: how many calls of modules were not traced."""
    found: list[int] = []
    original = export.inline_regions

    def write_out(program: torch.export.ExportedProgram) -> None:
        found.append(sum(n.target is REPEATED_REGION for n in program.graph.nodes))
        original(program)

    monkeypatch.setattr(export, "inline_regions", write_out)
    return found


class Layer(nn.Module):
    """A residual layer, around what a case does."""

    seen = 0

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factor", torch.tensor(1.0 + index % 2))
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor, case: Callable[..., Any], net: Net) -> Any:
        return case(self, x, net)


class Net(nn.Module):
    def __init__(self, case: Callable[..., Any], change: Callable[[nn.ModuleList], Any] = lambda layers: None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i) for i in range(LAYERS))
        self.case, self.kept, self.turn, self.outer = case, [], 0, None
        self.gain = nn.Parameter(torch.ones(4))
        change(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        Layer.seen, self.turn, self.kept = 0, 0, []
        total = torch.zeros(3, 4)
        self.outer, x = total, x * self.gain
        for layer in self.layers:
            self.turn = 1 - self.turn
            x = layer(x, self.case, self)
            x = x[0] if isinstance(x, tuple) else x
            total += x  # in place, and read by a case
        result = x.sum() + sum(k.sin().sum() for k in self.kept) + total.mean()
        Layer.seen, self.turn, self.kept, self.outer = 0, 0, [], None  # a forward that leaves something is traced twice
        return result


def plain(layer: Layer, x: Tensor, net: Net) -> Tensor:
    return x + layer.linear(x[:, :]).tanh()


def index_used(layer: Layer, x: Tensor, net: Net) -> Tensor:
    return x + layer.linear(x) * (layer.index + 1)


def counted_in_the_class(layer: Layer, x: Tensor, net: Net) -> Tensor:
    type(layer).seen += 1
    return x + layer.linear(x) * Layer.seen


def parent_takes_turns(layer: Layer, x: Tensor, net: Net) -> Tensor:
    return x + (layer.linear(x).tanh() if net.turn else layer.linear(x).sigmoid())


def value_of_a_buffer(layer: Layer, x: Tensor, net: Net) -> Tensor:
    return x + (layer.linear(x) if layer.factor > 1.5 else layer.linear(x).tanh())


def number_of_a_buffer(layer: Layer, x: Tensor, net: Net) -> Tensor:
    return x + layer.linear(x) * layer.factor.item()


def random(layer: Layer, x: Tensor, net: Net) -> Tensor:
    torch.rand(2)  # read by nobody, and drawn
    return x + nn.functional.dropout(layer.linear(x), 0.5)


def kept_elsewhere(layer: Layer, x: Tensor, net: Net) -> Tensor:
    y = layer.linear(x)
    net.kept.append(y)
    return x + y.tanh()


def last_ones(layer: Layer, x: Tensor, net: Net) -> Tensor:
    y = layer.linear(x if not net.kept else x + net.kept[-1])
    net.kept = [y]
    return x + y.tanh()


def writes_its_input(layer: Layer, x: Tensor, net: Net) -> Tensor:
    y = x * 1
    y.add_(layer.linear(x))
    if net.kept:
        net.kept[0].mul_(2)
    else:
        net.kept.append(torch.ones(4))
    return y


def writes_its_buffer(layer: Layer, x: Tensor, net: Net) -> Tensor:
    layer.count += x.detach().sum(0) * 2
    return x + layer.linear(x) * layer.count


def sets_its_buffer(layer: Layer, x: Tensor, net: Net) -> Tensor:
    y = x + layer.linear(x) * layer.factor
    layer.factor = layer.factor * 2
    return y


def reads_a_sum(layer: Layer, x: Tensor, net: Net) -> Tensor:
    return x + layer.linear(net.outer + x)


def another_output(layer: Layer, x: Tensor, net: Net) -> Any:
    y = layer.linear(x)
    return (y.tanh(), y) if layer.index != 2 else (y, y.tanh())


def in_a_checkpoint(layer: Layer, x: Tensor, net: Net) -> Any:
    return x + checkpoint(lambda y: layer.linear(y).tanh(), x, use_reentrant=False)


def asks_who_gave_its_input(layer: Layer, x: Tensor, net: Net) -> Tensor:
    same = bool(net.kept) and net.kept[-1] is x
    y = x + layer.linear(x) * (1 if same else 3)
    net.kept = [y]
    return y


def doubles_what_the_last_gave(layer: Layer, x: Tensor, net: Net) -> Tensor:
    if layer.index % 2:
        return x.mul_(2)
    y = layer.linear(x) + 1
    net.kept.append(y)
    return y


def without_gradients(layer: Layer, x: Tensor, net: Net) -> Tensor:
    with torch.no_grad():
        scale = layer.linear(x).norm()
    return x + layer.linear(x) * scale


def returns_a_view(layer: Layer, x: Tensor, net: Net) -> Tensor:
    return x.view(4, 3).view(3, 4) if layer.index else x + layer.linear(x)


def a_hook(layers: nn.ModuleList) -> None:
    layers[2].linear.register_forward_hook(lambda module, args, output: output * 3)


def other_code(layers: nn.ModuleList) -> None:
    def forward(linear: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, linear.weight.exp(), linear.bias)

    layers[1].linear.forward = MethodType(forward, layers[1].linear)


def a_closure(layers: nn.ModuleList) -> None:
    def made(power: int) -> Callable[..., Tensor]:
        return lambda layer, x, case, net: x + layer.linear(x) ** power

    for layer in layers:
        layer.forward = MethodType(made(layer.index // 3 + 1), layer)


def makes_a_constant(layer: Layer, x: Tensor, net: Net) -> Tensor:
    return F.dropout(x, 0.0) + layer.linear(x) * torch.tensor([0.5, 1, 2, 4])


def begins_with_nothing(layer: Layer, x: Tensor, net: Net) -> Tensor:
    """As a cache of transformers."""
    net.kept.append(torch.cat([torch.tensor([]), layer.linear(x)]))
    return x + net.kept[-1].tanh()


def makes_constants_of_its_own(layer: Layer, x: Tensor, net: Net) -> Tensor:
    return x + layer.linear(x) * torch.tensor([0.5, 1, 2, layer.index])


def tied(layers: nn.ModuleList) -> None:
    layers[3].linear.weight = layers[1].linear.weight


def frozen(layers: nn.ModuleList) -> None:
    layers[2].linear.requires_grad_(False)


def evaluated(layers: nn.ModuleList) -> None:
    layers[2].eval()


def nothing(layers: nn.ModuleList) -> None:
    pass


CASES = [
    (plain, nothing, 3),
    (plain, tied, 3),
    (plain, a_hook, 2),
    (plain, other_code, 2),
    (plain, a_closure, 2),
    (plain, frozen, 2),
    (random, nothing, 3),
    (random, evaluated, 2),
    (index_used, nothing, 0),
    (counted_in_the_class, nothing, 0),
    (parent_takes_turns, nothing, 2),
    (value_of_a_buffer, nothing, 0),
    (number_of_a_buffer, nothing, 0),
    (kept_elsewhere, nothing, 3),
    (last_ones, nothing, None),
    (writes_its_input, nothing, None),
    (writes_its_buffer, nothing, 0),
    (sets_its_buffer, nothing, None),
    (reads_a_sum, nothing, 3),
    (another_output, nothing, 3),
    (in_a_checkpoint, nothing, 3),
    (asks_who_gave_its_input, nothing, 0),
    (doubles_what_the_last_gave, nothing, None),
    (without_gradients, nothing, None),
    (returns_a_view, nothing, None),
    (makes_a_constant, nothing, 3),
    (begins_with_nothing, nothing, 3),
    (makes_constants_of_its_own, nothing, 0),
]


@pytest.mark.slow_cases(
    "value_of_a_buffer-nothing-",
    "counted_in_the_class-*",
    "number_of_a_buffer-*",
    "parent_takes_turns-*",
    "index_used-*",
    "plain-a_closure-",
    "last_ones-*",
    "makes_constants_of_its_own-*",
    "returns_a_view-*",
    "plain-other_code-",
)
@pytest.mark.parametrize(("case", "change", "count"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_layers_that_differ(
    repeated: list[int], case: Callable[..., Any], change: Callable[[nn.ModuleList], Any], count: int | None
) -> None:
    """``count``: calls that need no trace; None: the graph is right, and how many does not matter."""
    torch.manual_seed(0)
    graph = check(Net(case, change), X.clone())
    assert not {n.op for n in graph.nodes} & {TRACED_REGION, REPEATED_REGION}
    if count is not None:
        assert repeated[-1] == count


def test_autocast_in_one_of_them(repeated: list[int]) -> None:
    """Casts are no calls. In float32, as autocast leaves float64 as it is."""

    def narrow(layer: Layer, x: Tensor, net: Net) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=layer.index == 2):
            return x + layer.linear(x).float()

    torch.set_default_dtype(torch.float32)  # the fixture puts it back
    check(Net(narrow), X.float(), tolerance=1e-6)
    assert repeated[-1] == 2


def test_a_checkpoint_in_one_of_them(repeated: list[int]) -> None:
    def some(layer: Layer, x: Tensor, net: Net) -> Any:
        return in_a_checkpoint(layer, x, net) if layer.index == 2 else x + layer.linear(x).tanh()

    graph = check(Net(some), X.clone())
    assert repeated[-1] == 2
    assert {n.fqn.split(".linear")[0] for n in graph.nodes if n.checkpoint} == {"layers.2"}


class Caches(nn.Module):
    """Every layer is called with a list of what all keep, adds to its own, and reads that of ``places[i]``.

    What comes into the first needs no gradient: it is like no other.
    """

    def __init__(self, places: list[int]) -> None:
        super().__init__()
        self.layers, self.places = nn.ModuleList(map(Layer, range(LAYERS))), places

    def forward(self, x: Tensor, caches: list[Tensor]) -> Any:
        caches = list(caches)

        def case(layer: Layer, x: Tensor, kept: Any) -> Tensor:
            kept["all"][layer.index] = torch.cat([kept["all"][layer.index], layer.linear(x)])
            return x + kept["all"][self.places[layer.index]].sum(0)

        for layer in self.layers:
            x = layer(x, case, {"all": caches})
        return x, caches


@pytest.mark.slow_cases("places1-*", "places2-*")
@pytest.mark.parametrize(("places", "count"), [([0, 1, 2, 3], 2), ([0, 0, 0, 0], None), ([3, 2, 1, 0], None)])
def test_caches_of_all_layers_in_a_list(repeated: list[int], places: list[int], count: int | None) -> None:
    torch.manual_seed(0)
    model, caches = Caches(places), [torch.randn(2, 4) for _ in range(LAYERS)]
    check(model, X.clone(), caches)
    assert count is None or repeated[-1] == count


def test_functions_that_are_gone_are_not_those_made_in_their_place() -> None:
    tensors = RegionTensors(nn.Linear(1, 1), {})
    assert len({tensors.written(lambda: 1) for _ in range(9)}) == 9
    assert tensors.written(torch.sin) == tensors.written(torch.sin)


@pytest.mark.slow
def test_the_graph_is_that_of_a_whole_trace_and_the_trace_grows_with_distinct_blocks(
    repeated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.zeros(2, 8, dtype=torch.long)
    traced: list[int] = []
    original = export.decompose

    def decompose(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
        traced.append(sum(n.op == "call_function" for n in program.graph.nodes))
        return original(program)

    monkeypatch.setattr(export, "decompose", decompose)
    four, eight = (Llama(dataclasses.replace(LlamaConfig.tiny(), layers=n)) for n in (4, 8))
    graph = capture(four, (ids, ids))
    capture(eight, (ids, ids))
    assert repeated == [3, 7]
    assert traced[1] - traced[0] == 4 * 2  # a call and its result
    monkeypatch.setattr(observer, "MIN_EQUAL_MODULES", 100)
    whole = capture(four, (ids, ids))
    assert repeated[-1] == 0
    assert str(graph) == str(whole)
    assert graph.types == whole.types
    assert [(n.module_types, n.frames) for n in graph.nodes] == [(n.module_types, n.frames) for n in whole.nodes]


def test_a_graph_module_has_no_modules_that_are_called_in_python(repeated: list[int]) -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))))
    assert isinstance(traced, GraphModule)
    check(traced, X)
    assert repeated == [0]

"""What a user reads when something cannot be done: exact texts; and nothing of the model has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import tensor

import autoshard
from autoshard import Shard, api
from autoshard.check.reference import largest_difference

X = torch.ones(4, 8)
HERE = Path(__file__).name


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x).relu())
        return y


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 3 * g


class WithFunction(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Double.apply(super().forward(x))


class WithHook(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.register_hook(lambda g: 2 * g)
        return y


class WithBranch(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.sum() > 0:
            y = 2 * y
        return y


def line_of(text: str) -> str:
    """``file:line`` of a line of this file."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.strip() == text)
    return f"{HERE}:{number}"


def state(model: nn.Module) -> tuple[Any, ...]:
    """What an error must not touch: attributes, hooks, mode, and the generator."""
    attributes = [(n, {k: repr(v) for k, v in vars(m).items()}) for n, m in model.named_modules()]
    tensors = [(n, id(t), t._version) for n, t in model.state_dict(keep_vars=True).items()]
    return attributes, tensors, bytes(torch.get_rng_state().numpy())


def message(model: nn.Module, call: Callable[[nn.Module], Any], kind: type[Exception]) -> str:
    """The text of the error that ``call`` raises, without a change of the model."""
    before = state(model)
    with pytest.raises(kind) as caught:
        call(model)
    assert isinstance(caught.value, autoshard.AutoshardError)
    assert state(model) == before
    return str(caught.value)


def compiled(hints: dict[str, Any] | None = None, mesh: Any = None) -> Callable[[nn.Module], Any]:
    return lambda model: autoshard.compile(model, mesh or {"tp": 2}, (X,), hints=hints)


def test_state_sees_a_change() -> None:
    """Negative control."""
    model = Net()
    before = state(model)
    model.up.register_forward_hook(lambda *_: None)
    assert state(model) != before
    before = state(model)
    with torch.no_grad():
        model.up.weight.add_(1)
    assert state(model) != before


@pytest.mark.one_graph
def test_custom_autograd_function() -> None:
    assert message(WithFunction(), compiled(), autoshard.CaptureError) == (
        f"the model ({line_of('return Double.apply(super().forward(x))')}): custom "
        "autograd.Function 'Double' (test_errors): it draws random numbers, and a trace of its forward would drop its "
        "backward. Write it with differentiable torch ops, or make it an op with torch.library.custom_op and "
        "register_autograd."
    )


@pytest.mark.one_graph
def test_tensor_hook_in_the_forward() -> None:
    assert message(WithHook(), compiled(), autoshard.CaptureError) == (
        f"the model ({line_of('y.register_hook(lambda g: 2 * g)')}): a tensor hook (register_hook) is called in the "
        "forward, and the compiled module loses it. Do it on the compiled module's outputs or gradients, or remove it."
    )


def test_tensor_hook_on_a_parameter() -> None:
    model = Net()
    model.up.weight.register_hook(lambda g: 2 * g)
    assert message(model, compiled(), autoshard.CaptureError) == (
        "parameter 'up.weight': it has a tensor hook, which the compiled module would not call. Remove it before "
        "compiling, and register it on the compiled module's parameter, or change .grad after backward()."
    )


@pytest.mark.one_graph
def test_data_dependent_control_flow() -> None:
    assert message(WithBranch(), compiled(), autoshard.CaptureError) == (
        f"the model ({line_of('if y.sum() > 0:')}): the program depends on the values of a tensor (`if y.sum() > 0:`), "
        "but one graph must serve all inputs. Use torch.where, clamp() or a mask instead of `if`, Python's max() and min(), "
        "and loops over a tensor."
    )


def test_unknown_hint_pattern() -> None:
    assert message(Net(), compiled({"upp.weight": Shard(0)}), autoshard.HintError) == (
        "hint 'upp.weight' matches no parameter, buffer, input or module. Nearest: up.weight, down.weight, up.bias"
    )


def test_hint_by_number() -> None:
    asked: dict[Any, Any] = {0: Shard(0)}
    assert message(Net(), compiled(asked), autoshard.HintError) == (
        "hint 0 is not a pattern: name a parameter, buffer, input or module"
    )


def test_hint_that_cannot_be_met() -> None:
    assert message(Net(), compiled({"up.weight": Shard(3)}), autoshard.HintError) == (
        "hint 'up.weight' asks for Shard(3) on axis 'tp', but parameter 'up.weight' has 2 dims, shape [16, 8]. "
        "Use Shard(0) to Shard(1)."
    )


def test_hint_on_an_axis_that_is_not_there() -> None:
    assert message(Net(), compiled({"up.weight": {"dp": Shard(0)}}), autoshard.HintError) == (
        "hint 'up.weight' names axis 'dp', but the mesh has tp"
    )


def test_hint_that_is_none() -> None:
    assert message(Net(), compiled({"up.weight": "columnwise"}), autoshard.HintError) == (
        "hint 'up.weight': 'columnwise' is not a hint. Use Shard(d), Replicate(), 'colwise', 'rowwise', 'replicate', "
        "or {axis: placement}."
    )


def test_placements_of_torch_are_understood() -> None:
    mesh = autoshard.Mesh({"tp": 2})
    assert autoshard.Layout(mesh, [tensor.Shard(1)]) == autoshard.Layout(mesh, {"tp": Shard(1)})
    assert autoshard.Layout(mesh, {"tp": tensor.Partial()}) == autoshard.Layout(mesh, {"tp": autoshard.Partial()})
    for hint in (tensor.Shard(1), {"tp": tensor.Shard(1)}):
        plan = autoshard.plan(Net(), mesh, (X,), hints={"up.weight": hint})
        assert plan.layouts["up.weight"] == autoshard.Layout(mesh, {"tp": Shard(1)})
    gathered = autoshard.redistribution(tensor.Shard(0), tensor.Replicate(), (4, 4), mesh)
    assert [s.kind for s in gathered.steps] == ["all_gather"]
    with pytest.raises(autoshard.LayoutError, match=r"1 placements for a mesh of 2 axes"):
        autoshard.redistribution(Shard(0), Shard(1), (4, 4), {"dp": 2, "tp": 2})
    with pytest.raises(autoshard.LayoutError, match=r"Shard\('0'\): a tensor dim is an int, such as 0"):
        Shard("0")  # type: ignore[arg-type]


def test_plan_without_example_inputs() -> None:
    assert message(Net(), lambda model: autoshard.plan(model, {"tp": 2}), autoshard.CaptureError) == (
        "autoshard.plan needs example inputs to capture the model: pass example_args=(…) or example_kwargs={…}"
    )


def test_plan_of_another_mesh() -> None:
    plan = autoshard.plan(Net(), {"tp": 4}, (X,))
    call = lambda model: autoshard.compile(model, {"tp": 2}, (X,), plan=plan)  # noqa: E731
    assert message(Net(), call, autoshard.PlanError) == "the plan was made for the mesh tp=4, not tp=2"


@torch.library.custom_op("test_errors::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_strict_names_the_op_and_the_rule_to_write() -> None:
    class Rare(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(twice(x))

    call = lambda model: autoshard.compile(model, {"tp": 2}, (X,), strict=True)  # noqa: E731
    where = line_of("return super().forward(twice(x))")
    assert message(Rare(), call, autoshard.RuleError) == (
        f"no sharding rule for test_errors.twice.default(f32[4, 8]) in module '(root)' at {where}. Add one: "
        'autoshard.register_rule(torch.ops.test_errors.twice.default, "...") with one letter per dim, or compile with '
        "strict=False to run it on full tensors."
    )


def test_malformed_meshes() -> None:
    def text(mesh: Any, **kwargs: Any) -> str:
        with pytest.raises(autoshard.MeshError) as caught:
            autoshard.Mesh(mesh, **kwargs)
        return str(caught.value)

    assert text({}) == 'a mesh needs at least one axis, for example {"tp": 2}'
    assert text({"tp": 0}) == "mesh axis 'tp' has size 0, but a size is an int of at least 1"
    assert text({"t p": 2}) == "mesh axis name 't p' is not an identifier such as 'dp' or 'tp'"
    assert text({"tp": 2}, hardware="h1000").startswith("unknown hardware 'h1000'. Known: a100, h100, ")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"example_args": X}, "example_args is a tuple of the arguments, got one Tensor: write (x,)"),
        (
            {"example_args": {"x": X}},
            "example_args is a tuple of the arguments, got one dict: write (x,); pass arguments by name in example_kwargs={…}",
        ),
        ({"example_args": (X,), "example_kwargs": [X]}, "example_kwargs is a dict of the arguments by name, got list"),
        ({"example_args": (X,), "memory_budget": "40GB"}, "memory_budget is bytes per rank, such as 40e9, got '40GB'"),
        ({"example_args": (X,), "memory_budget": -1}, "memory_budget is bytes per rank, such as 40e9, got -1"),
        (
            {"example_args": (X,), "schedule": "fifo"},
            "schedule='fifo' is not known. Known: 'gpipe', '1f1b', 'interleaved', 'zero_bubble'",
        ),
    ],
)
def test_arguments_of_another_kind(given: dict[str, Any], text: str) -> None:
    for make in (autoshard.compile, autoshard.plan):
        with pytest.raises(autoshard.AutoshardError) as raised:
            make(Net(), {"tp": 2}, **given)  # type: ignore[operator]
        assert str(raised.value) == text


@pytest.mark.parametrize("mesh", [{"tp": 2}, autoshard.Mesh({"tp": 2})])
def test_a_mesh_in_the_place_of_the_arguments(mesh: Any) -> None:
    for make in (autoshard.compile, autoshard.plan, autoshard.verify):
        with pytest.raises(autoshard.CaptureError, match=r"is a mesh, .*: the model comes first, then the mesh, then"):
            make(Net(), (X,), mesh)  # type: ignore[operator]


def test_a_module_that_is_sharded_already() -> None:
    sharded = autoshard.compile(Net(), {"tp": 2}, (X,))
    inside = nn.Sequential(nn.Identity(), sharded)
    for make in (autoshard.compile, autoshard.plan, autoshard.verify):
        for model, what in ((sharded, "the model"), (inside, "its module '1'")):
            with pytest.raises(autoshard.CaptureError, match=f"{what} is sharded already, by autoshard.compile"):
                make(model, {"tp": 2}, (X,))  # type: ignore[operator]


def test_all_ranks_in_each_of_several_processes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    api._warn_uninitialised.cache_clear()
    two, one = {"tp": 2}, {"tp": 1}
    for size, axes, told in (("1", two, False), ("2", one, False), ("2", two, True), ("2", two, False)):  # once
        monkeypatch.setenv("WORLD_SIZE", size)
        caplog.clear()
        autoshard.compile(Net(), axes, (X,))
        assert ("torch.distributed is not initialised: all 2 ranks run inside each" in caplog.text) == told


def test_a_look_up_that_scales_its_table() -> None:
    model, rows = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(autoshard.CaptureError, match=r"^0: an embedding with max_norm writes to its table"):
        autoshard.plan(model, {"tp": 2}, (rows,))
    with pytest.raises(autoshard.CaptureError, match=r"to parameter '0\.weight'.* max_norm"):
        autoshard.plan(model, {"tp": 2}, (rows,), training=False)


class Wild(nn.Module):
    """Makes NaN and infinities, as masks of padding do, in one of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.up(x)
        return y.square().mean(), y.detach().log().masked_fill(y > 1, torch.inf)


def test_what_is_not_finite_is_compared_as_it_is() -> None:
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    report = autoshard.verify(Wild(), autoshard.Mesh({"tp": 2}, "ideal_network"), (x,))
    assert report.ok
    assert "not finite in the unsharded model: output 1" in str(report)
    inf, nan, one = (torch.tensor([v, 2.0]) for v in (torch.inf, torch.nan, 1.0))
    assert largest_difference(inf, inf) == largest_difference(nan, nan) == 0
    assert not any(
        largest_difference(a, b) < 1e9 for a, b in ((inf, -inf), (inf, one), (nan, one), (one, nan), (nan, inf))
    )
    assert largest_difference(torch.tensor([3j]), torch.tensor([1j])) == 2


class Caching(nn.Module):
    """Fills a buffer in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(8, 4)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            self.register_buffer("bias", torch.arange(4.0), persistent=False)
        y: torch.Tensor = self.down(x) + self.bias
        return y


@pytest.mark.one_graph
def test_a_cache_that_the_first_call_fills() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Caching())
    with pytest.raises(
        autoshard.CaptureError,
        match=r"creates the buffer '1.bias' in its first call.*or call the model once before compiling it",
    ):
        autoshard.compile(model, {"tp": 2}, (X,))
    assert model[1].bias is None
    expected = model(X)
    assert torch.allclose(autoshard.compile(model, {"tp": 2}, (X,))(X), expected)


OF_NO_KIND = [
    ({"gather_outputs": "x"}, "gather_outputs='x': give True, False or None"),
    ({"training": 1}, "training=1: give True, False or None"),
    ({"strict": "no"}, "strict='no': give True or False"),
    ({"dynamic": "x"}, "dynamic='x': give True, False or {input: {dim: name}}, such as {'input_ids': {0: 'batch'}}"),
    ({"dynamic": {"x": 0}}, "dynamic: 'x' is 0: give {dim: name}, such as {0: 'batch'}"),
    ({"dynamic": {"x": {"a": "b"}}}, "dynamic: 'x' has 2 dims, so there is no dim 'a'"),
    ({"dynamic": {"x": {0: 3}}}, "dynamic: 'x', dim 0: 3 is neither a name nor a multiple such as '4*batch'"),
    (
        {"hints": ["up"]},
        "hints=['up']: give {pattern: Shard(d) | 'colwise' | 'rowwise' | 'replicate' | {axis: placement}}",
    ),
    ({"plan": "megatron"}, "plan='megatron': give a Plan, from autoshard.plan or Plan.from_json"),
]


@pytest.mark.parametrize(("asked", "text"), OF_NO_KIND, ids=str)
def test_an_argument_of_another_kind(asked: dict[str, Any], text: str) -> None:
    functions = [autoshard.compile, autoshard.plan][: 1 if {"gather_outputs", "plan"} & asked.keys() else 2]
    for function in functions:
        assert message(Net(), lambda m, f=function: f(m, {"tp": 2}, (X,), **asked), autoshard.AutoshardError) == text  # type: ignore[misc]


def test_what_is_no_model_and_no_example() -> None:
    for function in (autoshard.compile, autoshard.plan):
        with pytest.raises(autoshard.CaptureError, match=r"an nn.Module, got the class Net: make one, Net\(…\)"):
            function(Net, {"tp": 2}, (X,))
        with pytest.raises(autoshard.CaptureError, match=r"an nn\.Module, got 3"):
            function(3, {"tp": 2}, (X,))
        with pytest.raises(autoshard.CaptureError, match="a dict of the arguments by name, got Tensor"):
            function(Net(), {"tp": 2}, (), X)


def test_hardware_beside_a_mesh() -> None:
    assert autoshard.plan(Net(), {"tp": 2}, (X,), hardware="ideal_network").mesh.hardware.name == "ideal_network"
    with pytest.raises(autoshard.MeshError, match="has hardware h100, not the given 'ideal_network'"):
        autoshard.plan(Net(), autoshard.Mesh({"tp": 2}), (X,), hardware="ideal_network")
    with pytest.raises(autoshard.MeshError, match="unknown hardware 3"):
        autoshard.plan(Net(), None, (X,), devices=2, hardware=3)  # type: ignore[arg-type]

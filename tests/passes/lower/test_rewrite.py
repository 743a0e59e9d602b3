"""What a view of the whole graph saves: small graphs in, statements out; values and gradients stay equal."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import SPLIT_ALL, assert_equal_training
from torch import Tensor, nn

import autoshard
from autoshard import Replicate, Shard, runtime
from autoshard.hardware import PRESETS, Link
from autoshard.passes.lower import coalescing as rewrite

CALLS = re.compile(r"runtime\.(?!slice|size|offset|main|Block|RankModule|bind)(\w+)\(")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def forward_of(sharded: autoshard.ShardedModule) -> str:
    """The text of the root's forward."""
    return sharded.source.split("def forward(", 1)[1].split("\n\n", 1)[0]


def compiled(
    model: nn.Module,
    axes: dict[str, int],
    x: Tensor,
    hints: dict[str, Any],
    hardware: str | autoshard.Hardware = "ideal_network",
) -> autoshard.ShardedModule:
    return autoshard.compile(model, autoshard.Mesh(axes, hardware), (x,), hints=hints)


def calls(sharded: autoshard.ShardedModule) -> list[str]:
    """The runtime functions in forward, those that cost nothing left out."""
    return CALLS.findall(forward_of(sharded))


class Net(nn.Module):
    """Bias-free square linears ``a``, ``b``, … around a function of (self, x)."""

    def __init__(
        self, width: int, names: str, fn: Callable[[Any, Tensor], Any], dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(width, width, bias=False, dtype=dtype))
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x)


# ---- one redistribution for all uses --------------------------------------------------------------------------------


BY_BYTES = replace(PRESETS["h100"], node=Link(0.0, PRESETS["h100"].node.bandwidth), kernel_latency=0.0, overlap=0.0)
"""a machine on which small weights do not move instead of activations, as a bucket of them shares its latency"""


def qkv() -> Net:
    return Net(512, "eqkvo", lambda m, x: m.o(m.q(e := m.e(x).tanh()) * m.k(e) + m.v(e)))


QKV = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise", "e": "replicate"}


def test_separate_projections_share_one_conversion() -> None:
    """Three readers, one ``enter``: their partial gradients are added first and reduced once."""
    sharded = compiled(qkv(), {"tp": 4}, randn(8, 512), QKV, BY_BYTES)
    assert calls(sharded) == ["enter", "all_reduce"]
    assert "q = F.linear(tanh, self.q.weight)" in sharded.source
    assert "v = F.linear(tanh, self.v.weight)" in sharded.source
    backward = [c for c in sharded.collectives if c.phase == "backward"]
    assert [(c.kind, c.value) for c in backward] == [("all_reduce", "tanh")]
    assert_equal_training(qkv(), {"tp": 4}, (randn(8, 512),), hints=QKV, hardware=BY_BYTES)


def test_one_layout_is_made_once() -> None:
    def net() -> Net:
        return Net(512, "abc", lambda m, x: m.b(y := m.a(x)) * m.c(y))

    hints = {"a": "colwise", "b": "replicate", "c": "replicate"}
    assert calls(compiled(net(), {"tp": 4}, randn(8, 512), hints, BY_BYTES)) == ["all_gather"]
    assert_equal_training(net(), {"tp": 4}, (randn(8, 512),), hints=hints, hardware=BY_BYTES)


# ---- chains are fused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "between", [lambda y: y, lambda y: -y, lambda y: y.transpose(0, 1).transpose(0, 1), lambda y: y.view(2, 4, 16)]
)
def test_reduce_then_slice_is_a_reduce_scatter(between: Callable[[Tensor], Tensor]) -> None:
    """P → R → S, also across operations that only rename or are linear."""

    def net() -> Net:
        return Net(16, "abc", lambda m, x: m.c(between(m.b(m.a(x))).tanh()))

    hints = {"a": "colwise", "b": "rowwise", "c.weight": Shard(1)}
    sharded = compiled(net(), {"tp": 4}, randn(8, 16), hints)
    assert calls(sharded) == ["reduce_scatter", "all_reduce"]
    assert forward_of(sharded).index("all_reduce") > forward_of(sharded).index("self.c.weight")
    assert_equal_training(net(), {"tp": 4}, (randn(8, 16),), hints=hints)


def test_sums_are_added_before_they_are_reduced() -> None:
    """Two partial products and three partial means: one reduction each."""

    def net() -> Net:
        return Net(16, "abcd", lambda m, x: m.c(m.a(x)) + m.d(m.b(x)))

    hints = {"a": "colwise", "b": "colwise", "c": "rowwise", "d": "rowwise"}
    assert calls(compiled(net(), {"tp": 4}, randn(8, 16), hints, "h100")) == ["all_reduce"]
    assert_equal_training(net(), {"tp": 4}, (randn(8, 16),), hints=hints, hardware="h100")

    def means() -> Net:
        return Net(16, "a", lambda m, x: (y := m.a(x)).square().mean() + 2 * y.abs().mean() + y.exp().mean())

    assert calls(compiled(means(), {"dp": 4}, randn(8, 16), {"x": Shard(0)})).count("all_reduce") == 1
    assert_equal_training(means(), {"dp": 4}, (randn(8, 16),), hints={"x": Shard(0)})


# ---- conversions stand on the cheaper side --------------------------------------------------------------------------


class Mixed(nn.Module):
    """Float32 parameters, used in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.empty(4096, 4096)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        w, v = (p.to(torch.bfloat16) for p in (self.w, self.v))
        return F.linear(F.linear(x, w).relu(), v).float().square().mean()


class Autocast(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(F.linear(x, self.w).relu(), self.v).float().square().mean()


@pytest.mark.parametrize("model", [Mixed, Autocast])
def test_parameters_are_gathered_in_bfloat16(model: type[Mixed]) -> None:
    """FSDP: the cast is made on the shard; gathered weights and scattered gradients have two bytes an element."""
    hints = {"x": Shard(0), "w": Shard(0), "v": Shard(0)}
    with torch.device("meta"):
        plan = autoshard.plan(model(), {"dp": 4}, (torch.empty(1 << 17, 4096, dtype=torch.bfloat16),), hints=hints)
    moved: Counter[tuple[str, str]] = Counter()
    for c in plan.collectives:
        moved[c.kind, c.phase] += int(c.bytes) if c.bytes > 64 else 0
    half = 3 / 4 * 4096 * 4096 * 2
    assert +moved == {("all_gather", "forward"): 2 * half, ("reduce_scatter", "backward"): 2 * half}


def test_a_narrow_activation_is_gathered_before_its_wide_copy() -> None:
    net = Net(256, "a", lambda m, x: F.softplus(m.a(x).float().cumsum(-1)), torch.bfloat16)
    sharded = compiled(net, {"tp": 4}, randn(64, 256).bfloat16(), {"a": "colwise"}, "cpu")
    (gather,) = sharded.collectives
    assert (gather.kind, gather.value, gather.bytes) == ("all_gather", "linear", 3 / 4 * 64 * 256 * 2)


SIDES = {
    "a part is taken before": (lambda m, x: m.b(m.a(x)[:2]), "all_gather", 3 / 4 * 2 * 16 * 4),
    "copies are made after": (lambda m, x: m.b(m.a(x)[None].expand(8, -1, -1)), "all_gather", 3 / 4 * 8 * 16 * 4),
    "a sum over rows is made before": (lambda m, x: m.b(m.a(x).sum(0, keepdim=True)), "all_gather", 3 / 4 * 16 * 4),
}


@pytest.mark.parametrize("case", SIDES)
def test_conversions_move_to_the_cheaper_side(case: str) -> None:
    fn, kind, size = SIDES[case]
    hints = {"a": "colwise", "b.weight": "replicate", "b": Replicate()}
    sharded = compiled(Net(16, "ab", fn), {"tp": 4}, randn(8, 16), hints, "cpu")
    assert [(c.kind, c.bytes) for c in sharded.collectives if c.phase == "forward"] == [(kind, size)]
    assert_equal_training(Net(16, "ab", fn), {"tp": 4}, (randn(8, 16),), hints=hints, hardware="cpu")


@pytest.mark.parametrize(("to", "needed"), [((8, 4, 4), []), ((8, 2, 8), ["all_to_all"])])
def test_a_conversion_stands_before_a_view_that_cannot_keep_the_chunks(to: tuple[int, ...], needed: list[str]) -> None:
    """Columns cut in four are rows of [8, 4, 4]; of [8, 2, 8] they are half a row, so they are moved before."""

    def net() -> Net:
        return Net(16, "a", lambda m, x: m.a(x).view(to).softmax(-1))

    sharded = compiled(net(), {"tp": 4}, randn(8, 16), {"a": "colwise"})
    assert calls(sharded) == needed
    text = forward_of(sharded)
    assert all(text.index(name) < text.index("view" if "view" in text else "reshape") for name in needed)
    assert_equal_training(net(), {"tp": 4}, (randn(8, 16),), hints={"a": "colwise"})


# ---- small all-reduces together -------------------------------------------------------------------------------------


def losses() -> Net:
    return Net(
        16, "a", lambda m, x: {"loss": (y := m.a(x)).square().mean(), "norm": y.abs().mean(), "top": y.exp().sum(0)}
    )


def test_scalars_ready_together_are_one_all_reduce() -> None:
    sharded = compiled(losses(), {"dp": 4}, randn(8, 16), {"x": Shard(0), "a": Shard(0)}, SPLIT_ALL)
    assert "all_reduce_together" in calls(sharded)
    assert "all_reduce" not in calls(sharded)
    assert re.search(
        r"mean, mean_1 = runtime\.all_reduce_together\(\n? *\(mean, mean_1\), \"dp\", to=\"I\"\n? *\)", sharded.source
    )
    found = [c for c in sharded.collectives if c.kind == "all_reduce" and c.phase == "forward"]
    assert [c.bytes for c in found] == [2 * 3 / 4 * 2 * 4]
    assert found[0].reason == "mean: P@dp → R@dp; mean_1: P@dp → R@dp"


def test_together_is_equal_and_moves_what_is_predicted() -> None:
    hints = {"x": Shard(0), "a": Shard(0)}
    assert_equal_training(losses(), {"dp": 4}, (randn(8, 16),), hints=hints)
    sharded = compiled(losses(), {"dp": 2, "tp": 2}, randn(8, 16), {"x": {"dp": Shard(0)}, "a": {"dp": Shard(0)}})
    executed: list[Any] = []
    sharded.record(executed)
    out = sharded(randn(8, 16))
    (out["loss"] + out["norm"] + out["top"].sum()).backward()
    predicted = sorted((c.kind, c.axes, c.phase, c.bytes) for c in sharded.collectives)
    assert sorted((e.kind, e.axes, e.phase, e.bytes) for e in executed) == predicted


def test_a_sum_that_needs_another_waits() -> None:
    """The variance reads the mean, so the two cannot be one."""
    net = Net(16, "a", lambda m, x: ((y := m.a(x)) - y.mean()).square().mean())
    sharded = compiled(net, {"dp": 4}, randn(8, 16), {"x": Shard(0), "a": Shard(0)})
    assert [c for c in calls(sharded) if "all_reduce" in c] == ["all_reduce", "all_reduce"]


def test_large_ones_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "SMALL_BYTES", 3)
    assert "all_reduce_together" not in calls(
        compiled(losses(), {"dp": 4}, randn(8, 16), {"x": Shard(0), "a": Shard(0)})
    )


def test_a_loss_that_is_not_used_gives_no_gradients() -> None:
    """What shares a message shares no gradient: parameters of the other loss get None, not zeros."""
    net = Net(16, "ab", lambda m, x: (m.a(x).square().mean(), m.b(x).square().mean()))
    sharded = compiled(net, {"dp": 4}, randn(8, 16), {"x": Shard(0), "a": Shard(0), "b": Shard(0)})
    assert "all_reduce_together" in calls(sharded)
    sharded(randn(8, 16))[0].backward()
    named = dict(sharded.named_parameters())
    assert named["a.weight"].grad is not None
    assert named["b.weight"].grad is None


def test_the_runtime_sums_and_differentiates() -> None:
    """to="R": as P → I → R. Negative control: the gradient of to="I" is another one."""
    xs = [[randn(2, 3).double() * r, randn(4).double() + r] for r in (1, 2)]

    def run(to: str) -> tuple[Any, Any]:
        leaves = [[x.clone().requires_grad_() for x in rank] for rank in xs]
        world = runtime.World({"a": 2})
        outs = world.run(lambda *x: runtime.all_reduce_together(x, "a", to), leaves)
        torch.autograd.backward([y for out in outs for y in out], [torch.ones_like(y) for out in outs for y in out])
        return outs, [[x.grad for x in rank] for rank in leaves]

    for to, gradient in (("I", 1.0), ("R", 2.0)):
        outs, grads = run(to)
        for i in (0, 1):
            assert all(torch.equal(out[i], xs[0][i] + xs[1][i]) for out in outs)
            assert all(torch.equal(g[i], torch.full_like(g[i], gradient)) for g in grads)


def pairs() -> Net:
    """Two products, two more that read them."""

    def fn(m: Any, x: Tensor) -> Any:
        y, z = m.a(x), m.b(x).tanh()
        u, v = m.c(y), m.d(z)
        return (u.sin() * v).square().sum()

    return Net(16, "abcd", fn)


KINDS = {
    "all_gather": {"a.weight": Shard(0), "b.weight": Shard(0), "[ab]": Replicate(), "[cd].weight": "replicate"},
    "reduce_scatter": {"[ab]": "colwise", "[cd].weight": Shard(1), "[cd]": Shard(0)},
    "all_to_all": {"[ab].weight": Shard(0), "[ab]": Shard(0), "[cd].weight": "replicate"},
}


@pytest.mark.slow_cases("*-4")
@pytest.mark.parametrize("ranks", [4, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_goes_together(kind: str, ranks: int) -> None:
    """One message for two in the forward and in the backward; 3 ranks cut 8 and 16 unevenly."""
    sharded = compiled(pairs(), {"tp": ranks}, randn(8, 16), KINDS[kind])
    assert calls(sharded).count(f"{kind}_together") == 1
    assert kind not in calls(sharded)
    executed: list[Any] = []
    sharded.record(executed)
    sharded(randn(8, 16)).backward()
    assert _bytes(executed) == _bytes(sharded.collectives)
    assert [e.kind for e in executed if e.phase == "forward"] == [kind, "all_reduce"]
    (forward,) = [c for c in sharded.collectives if c.kind == kind and c.phase == "forward"]
    assert forward.reason.count(";") == 1
    assert_equal_training(pairs(), {"tp": ranks}, (randn(8, 16),), hints=KINDS[kind])


def test_one_value_goes_two_ways_in_one_message() -> None:
    """The results have names of their own, also where the value is read for the last time."""

    class Sorted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sort(2).values

    def net() -> nn.Module:
        model = Net(6, "", lambda m, x: (m.first(x) * m.scale, m.second(x) * m.scale))
        model.first, model.second = Sorted(), Sorted()
        model.scale = nn.Parameter(randn(6))
        return model

    hints = {"x": {"tp": Shard(2)}, "first": {"tp": Shard(0)}, "second": {"tp": Shard(1)}}
    sharded = compiled(net(), {"tp": 3}, randn(6, 6, 6), hints)
    assert calls(sharded).count("all_to_all_together") == 1
    assert_equal_training(net(), {"tp": 3}, (randn(6, 6, 6),), hints=hints)


def _bytes(collectives: Sequence[Any]) -> dict[tuple[str, str], int]:
    total: defaultdict[tuple[str, str], float] = defaultdict(float)
    for c in collectives:
        total[c.kind, c.phase] += c.bytes
    return {key: round(n) for key, n in total.items()}


def test_gradients_of_several_inputs_go_together() -> None:
    """Megatron's f for two activations: one all-reduce in the backward."""

    def net() -> Net:
        def fn(m: Any, x: Tensor) -> Tensor:
            y, z = m.e(x).tanh(), m.f(x).sin()
            return m.c(m.a(y)) + m.d(m.b(z))

        return Net(512, "abcdef", fn)

    hints = {"[ef]": "replicate", "[ab]": "colwise", "[cd]": "rowwise"}
    sharded = compiled(net(), {"tp": 4}, randn(8, 512), hints, BY_BYTES)
    assert "enter_together" in calls(sharded)
    assert [c.kind for c in sharded.collectives if c.phase == "backward"] == ["all_reduce"]
    assert_equal_training(net(), {"tp": 4}, (randn(8, 512),), hints=hints, hardware=BY_BYTES)


def test_values_of_different_outputs_stay_apart_where_the_backward_communicates() -> None:
    """Else an output that is not used would bring about zero gradients where one device has None."""
    net = Net(16, "abcd", lambda m, x: (y := m.a(x), z := m.b(x), m.c(y).sin().sum(), m.d(z).sin().sum())[2:])
    sharded = compiled(net, {"tp": 4}, randn(8, 16), KINDS["all_gather"])
    assert "all_gather_together" not in calls(sharded)
    sharded(randn(8, 16))[0].backward()
    named = dict(sharded.named_parameters())
    assert [n for n, p in named.items() if p.grad is None] == ["b.weight", "d.weight"]


def test_second_derivatives_of_a_bucket() -> None:
    def f(x: Tensor) -> Tensor:
        rows, squares = runtime.all_gather_together((x.pow(3), x.square()), (0, 0), "a", to="R")
        a, b = runtime.reduce_scatter_together((rows * (1.0 + runtime.current().rank), squares.sin()), (0, 1), "a")
        return a.sum() * b.sum()

    def one(x: Tensor) -> Tensor:
        return torch.stack(runtime.World({"a": 2}).run(f, [(x[:1],), (x[1:],)])).sum()

    assert torch.autograd.gradgradcheck(one, [randn(2, 2).double().requires_grad_()])

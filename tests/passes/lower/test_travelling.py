"""Products beside messages of their operands and sums: equal to one device, what they send, and when they are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import SLOW_LINK, collectives
from largest_error import error
from torch import nn

import autoshard
from autoshard import Hardware, runtime
from autoshard.errors import RuntimeMismatchError
from autoshard.hardware import PRESETS
from autoshard.models.llama import Llama, LlamaConfig
from autoshard.runtime.operations import collective_matmul
from autoshard.runtime.transport.window import chunks

Tensor = torch.Tensor
H100 = PRESETS["h100"]
SLOW = pytest.mark.slow
KEPT = {"dtype": torch.float64, "requires_grad": True}


def parts(x: Tensor, dim: int, ranks: int) -> list[Tensor]:
    """Those of ranks that cut ``x``."""
    cut = chunks(x.shape[dim], (ranks,))
    return [x.detach().narrow(dim, *c).clone().requires_grad_(x.requires_grad) for c in cut]


def gathered(
    ranks: int, shape: tuple[int, ...], dim: int, *, again: bool = False, bias: bool = True, frozen: str = ""
) -> tuple[list[Tensor], list[Tensor], list[runtime.Executed]]:
    """Two products of one operand, and gradients of one device; the same of ranks; what these sent."""
    torch.manual_seed(0)
    x = torch.randn(shape, **KEPT).requires_grad_("x" not in frozen)
    ws = [torch.randn(n, shape[-1], **KEPT).requires_grad_("w" not in frozen) for n in (2 * ranks, 3 * ranks)]
    bs = [torch.randn(2 * ranks, **KEPT) if bias else None, None]
    outs = [F.linear(x, w, b) for w, b in zip(ws, bs, strict=True)]
    cotangents = [torch.randn_like(y) for y in outs]
    trained = [t for t in (x, *ws, *bs) if t is not None and t.requires_grad]
    theirs = [*outs, *torch.autograd.grad(outs, trained, cotangents)]

    own = parts(x, dim, ranks), *([[None] * ranks if t is None else parts(t, 0, ranks) for t in (*ws, *bs)])
    world = runtime.World({"tp": ranks})
    log = world.log = list[runtime.Executed]()

    def one(x: Tensor, v: Tensor, w: Tensor, *biases: Tensor | None) -> Any:
        how = {"size": shape[dim], "biases": biases, "again": again}
        return runtime.gather_products(x, (v, w), dim, "tp", **how)

    made = world.run(one, list(zip(*own, strict=True)))
    given = [c.chunk(ranks, -1)[r] for r in range(ranks) for c in cotangents]
    leaves = [t for each in own if each[0] is not None and each[0].requires_grad for t in each]
    found = torch.autograd.grad([y for ys in made for y in ys], leaves, given)
    dims = [dim] * ("x" not in frozen) + [0] * len(found)
    joined = [torch.cat(found[i : i + ranks], d) for i, d in zip(range(0, len(found), ranks), dims, strict=False)]
    return theirs, [*(torch.cat(ys, -1) for ys in zip(*made, strict=True)), *joined], log


def scattered(
    ranks: int, shape: tuple[int, ...], dim: int, *, bias: bool = True, frozen: str = ""
) -> tuple[list[Tensor], list[Tensor], list[runtime.Executed]]:
    """A product of which every rank has a summand, as :func:`gathered`."""
    torch.manual_seed(0)
    x = torch.randn(shape, **KEPT).requires_grad_("x" not in frozen)
    w = torch.randn(5, shape[-1], **KEPT).requires_grad_("w" not in frozen)
    b = torch.randn(5, **KEPT) if bias else None
    y = F.linear(x, w, b)
    cotangent = torch.randn_like(y)
    theirs = [y, *torch.autograd.grad(y, [t for t in (x, w, b) if t is not None and t.requires_grad], cotangent)]

    own: Any = parts(x, -1, ranks), parts(w, 1, ranks)
    zeros = [torch.zeros(5, **KEPT) for _ in range(ranks - 1)]
    own = *own, [b.detach().clone().requires_grad_(), *zeros] if b is not None else [None] * ranks
    world = runtime.World({"tp": ranks})
    log = world.log = list[runtime.Executed]()
    made = world.run(lambda x, w, b: runtime.scatter_product(x, w, dim, "tp", bias=b), list(zip(*own, strict=True)))
    leaves = [t for each in own if each[0] is not None and each[0].requires_grad for t in each]
    found = torch.autograd.grad(made, leaves, parts(cotangent, dim, ranks))
    joined = [torch.cat(found[i : i + ranks], -1) for i in range(0, len(found), ranks)]
    if bias:  # every rank has the whole gradient of its summand
        joined[-1] = joined[-1][:5]
    return theirs, [torch.cat(made, dim), *joined], log


SHAPES = [((2, 12, 12), 1), ((12, 2, 12), 0), ((2, 7, 12), 1), ((2, 3, 2, 12), 1), ((1, 1, 12), 1), ((5, 12), 0)]
"""of what is multiplied, and the dim that is cut: even, uneven, and with ranks that have nothing"""


@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_as_one_device(ranks: int, shape: tuple[int, ...], dim: int) -> None:
    for run in (gathered, scattered):
        theirs, ours, _ = run(ranks, shape, dim)
        assert error(theirs, ours) < 1e-12, run
    theirs, ours, _ = gathered(ranks, shape, dim, again=True, bias=False)
    assert error(theirs, ours) < 1e-12


@pytest.mark.parametrize("frozen", ["x", "w"])
def test_what_wants_no_gradient(frozen: str) -> None:
    for again in (False, True):
        theirs, ours, log = gathered(3, (2, 7, 12), 1, again=again, frozen=frozen)
        assert error(theirs, ours) < 1e-12
        assert len([e for e in log if e.phase == "backward"]) == 2 * ((frozen != "x") + (again and frozen != "w"))
    theirs, ours, _ = scattered(3, (2, 7, 12), 1, frozen=frozen)
    assert error(theirs, ours) < 1e-12


@pytest.mark.parametrize(("length", "longest"), [(12, 4), (7, 3)])
def test_bytes(length: int, longest: int) -> None:
    """n - 1 messages of a chunk, there and back: as many bytes as gathers and reduce-scatters send."""
    sent = 2 * longest * 8  # of each feature
    for run, ahead, back in ((gathered, 12, 12), (scattered, 5, 5)):
        *_, log = run(3, (2, length, 12), 1)
        assert [(e.kind, e.axes) for e in log] == [("permute", ("tp",))] * 4
        for phase, features in (("forward", ahead), ("backward", back)):
            assert [e.bytes for e in log if e.phase == phase] == [sent * features] * 2
    *_, log = gathered(3, (2, length, 12), 1, again=True)
    assert [e.bytes for e in log if e.phase == "backward"] == [sent * 12] * 4


def test_parts_that_come_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above fail where a part is taken for that of another rank."""
    before = collective_matmul._RingAxis.before
    for run in (gathered, scattered):
        monkeypatch.setattr(
            collective_matmul._RingAxis,
            "before",
            lambda way, distance: before(way, -distance if abs(distance) > 1 else distance),
        )
        theirs, ours, _ = run(4, (2, 12, 12), 1)
        assert error(theirs, ours) > 1e-3
        monkeypatch.undo()


def test_without_gradients() -> None:
    world = runtime.World({"tp": 2})
    x, w = torch.randn(2, 6, 4), torch.randn(8, 4, requires_grad=True)
    pairs = list(zip(x.chunk(2, 1), w.detach().chunk(2), strict=True))
    (a,), (b,) = world.run(lambda x, w: runtime.gather_products(x, (w,), 1, "tp"), pairs)
    assert torch.allclose(torch.cat([a, b], -1), F.linear(x, w))
    assert not a.requires_grad


def test_no_second_derivative() -> None:
    x, w = torch.randn(2, 6, 4, requires_grad=True), torch.randn(8, 4)
    world = runtime.World({"tp": 2})
    pairs = list(zip(x.chunk(2, 1), w.chunk(2), strict=True))
    made = world.run(lambda x, w: runtime.gather_products(x, (w,), 1, "tp"), pairs)
    with pytest.raises(
        RuntimeMismatchError, match="products whose operand is gathered along tp has no second derivative"
    ):
        torch.autograd.grad(sum(y.sum() for (y,) in made), x, create_graph=True)


# --- programs ---


class Blocks(nn.Module):
    """Two products of one operand, biased, then one whose summands are summed: with a residual, in layers."""

    def __init__(self, layers: int = 2, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "gate": nn.Linear(width, 2 * width),
                    "up": nn.Linear(width, 2 * width, bias=False),
                    "down": nn.Linear(2 * width, width),
                }
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer["norm"](x)  # type: ignore[index]
            x = x + layer["down"](F.silu(layer["gate"](h)) * layer["up"](h))  # type: ignore[index]
        return x.square().mean()


@pytest.mark.slow_cases("{'tp': 2}-8")
@pytest.mark.parametrize(
    ("axes", "length"),
    [
        ({"tp": 2}, 8),
        ({"tp": 4}, 7),
        pytest.param({"tp": 3}, 8, marks=SLOW),
        pytest.param({"dp": 2, "tp": 2}, 5, marks=SLOW),
    ],
    ids=str,
)
def test_trains_and_sends_as_planned(axes: dict[str, int], length: int) -> None:
    """One journey for both products of a layer, one for the sums of the third: n - 1 messages of the longest chunk, there and
    back."""
    like = {"tp": "megatron-sp"} | ({"dp": "fsdp"} if "dp" in axes else {})
    x = torch.randn(4, length, 12)
    found = collectives(Blocks(), axes, None, (x,), SLOW_LINK, like=like)
    ranks, batch = axes["tp"], 4 // axes.get("dp", 1)
    part = batch * -(-length // ranks) * 12 * 8
    hops = {key: n for key, n in found.items() if key[:2] == ("permute", ("tp",))}
    # the gathered operand is gathered again in the backward
    assert hops == {
        ("permute", ("tp",), "forward", (ranks - 1) * part): 4,
        ("permute", ("tp",), "backward", (ranks - 1) * part): 6,
    }
    assert not [
        key for key in found if key[0] in ("all_gather", "reduce_scatter") and key[1] == ("tp",) and key[3] >= part
    ]


def planned(hardware: Hardware | str = SLOW_LINK, like: Any = "megatron-sp", **how: Any) -> autoshard.ShardedModule:
    torch.manual_seed(0)
    x = torch.randn(4, 8, 12, dtype=torch.float64)
    return autoshard.compile(Blocks().double(), autoshard.Mesh({"tp": 2}, hardware), (x,), like=like, **how)


def test_source() -> None:
    source = planned().source
    assert ", up = runtime.gather_products(" in source
    assert 'down = runtime.scatter_product(x, self.down.weight, 1, "tp", bias=down_bias)' in source
    assert "S(1)@tp → R@tp by collective matmul" in source
    assert "P@tp → S(1)@tp by collective matmul" in source


def test_only_where_something_overlaps_and_where_it_pays() -> None:
    for device in (
        replace(SLOW_LINK, overlap=0.0),
        replace(SLOW_LINK, part_by_part=False),
        replace(SLOW_LINK, kernel_latency=1.0),  # more launches than they are worth
        PRESETS["ideal_network"],
        PRESETS["cpu"],
    ):
        sharded = planned(device)
        assert "_product" not in sharded.source.replace("_products_", ""), device
        assert not [c for c in sharded.collectives if c.kind == "permute"]
        assert not any("collective matmul" in note for note in sharded.plan.notes)


@pytest.mark.parametrize(
    "recompute", ["blocks", pytest.param("none", marks=SLOW), pytest.param("selective", marks=SLOW)]
)
@pytest.mark.parametrize("like", ["megatron-sp", pytest.param(None, marks=SLOW)])
def test_what_is_made_again(like: Any, recompute: Any) -> None:
    """Whatever the backward makes again: all of a call, the operand alone, or what it was made from."""
    x = torch.randn(4, 8, 12, dtype=torch.float64)
    mesh = autoshard.Mesh({"tp": 2}, SLOW_LINK)
    report = autoshard.verify(Blocks().double(), mesh, (x,), steps=2, like=like, recompute=recompute)
    assert report.ok, str(report)
    assert any(c.kind == "permute" for c in report.plan.collectives) or like is None


def test_prices_are_those_of_the_search() -> None:
    """A plan costs what the search minimised, hidden or not, also given back; without it steps take longer."""
    sharded, waiting = planned(), planned(replace(SLOW_LINK, part_by_part=False))
    cost = sharded.plan.cost
    assert cost.total_s == pytest.approx(cost.lower_bound, rel=1e-9)
    assert cost.total_s < waiting.plan.cost.total_s
    assert cost.schedule_s < waiting.plan.cost.schedule_s
    assert abs(cost.merged_s) < 1e-6 * cost.comm_s
    hops = [c for c in sharded.collectives if "collective matmul" in c.reason]
    assert 0 < sum(c.hidden_s for c in hops) <= cost.hidden_s * (1 + 1e-9)
    assert any("collective matmul (asynchronous TP) hides" in note for note in sharded.plan.notes)
    x = torch.randn(4, 8, 12, dtype=torch.float64)
    again = autoshard.compile(Blocks().double(), sharded.plan.mesh, (x,), plan=sharded.plan)
    assert again.plan.cost.total_s == pytest.approx(cost.total_s, rel=1e-9)
    assert again.source == sharded.source


@SLOW
def test_blocks_of_llama_on_h100() -> None:
    """8 ranks of one node: operands and sums of the feed-forward travel, by a named strategy and in the free one."""
    with torch.device("meta"):
        model, tokens = (
            Llama(replace(LlamaConfig(), layers=2)).to(torch.bfloat16),
            torch.zeros(4, 4096, dtype=torch.long),
        )
    for like in ("megatron-sp", None):
        plans = [
            autoshard.plan(model, autoshard.Mesh({"tp": 8}, device), (tokens,), {"labels": tokens}, like=like)
            for device in (H100, replace(H100, part_by_part=False))
        ]
        assert plans[0].cost.total_s < plans[1].cost.total_s
        assert any(c.kind == "permute" and c.hidden_s > 0.4 * c.seconds for c in plans[0].collectives)
        assert not any(c.kind == "permute" for c in plans[1].collectives)


def test_micro_batches() -> None:
    x = torch.randn(4, 8, 12, dtype=torch.float64)
    report = autoshard.verify(
        Blocks().double(), autoshard.Mesh({"tp": 2}, SLOW_LINK), (x,), like="megatron-sp", micro_batches=2
    )
    assert report.ok, str(report)
    hops = [c for c in report.plan.collectives if "collective matmul" in c.reason]
    assert hops
    assert {c.times for c in hops} == {2}


def test_evaluation() -> None:
    sharded = planned()
    x = torch.randn(4, 8, 12, dtype=torch.float64)
    sharded.eval()
    with torch.no_grad():
        found = sharded(x)
    torch.manual_seed(0)
    torch.randn(4, 8, 12, dtype=torch.float64)
    assert torch.allclose(found, Blocks().double()(x), rtol=1e-12)
    assert "gather_products" in sharded.source

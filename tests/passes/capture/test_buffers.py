"""Routing into buffers of a capacity by one-hot products: rows go to their experts instead, where no two are in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training
from routing_models import COUNT, TOP, WIDTH, Routed
from torch import nn

import autoshard
from autoshard.compiler import capture_graph
from autoshard.passes.ir.graph import Graph
from autoshard.runtime.operations.experts import experts_op

X = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))
MANY = 2 * 6 * TOP
"""places enough for all rows"""


class Buffered(Routed):
    """``form`` gives what puts rows into places, what brings them back, and maybe a product for it; [t, e, c] each."""

    def __init__(self, form: Callable[..., Any], capacity: int = 3) -> None:
        super().__init__("loop")
        self.places, self.capacity = form, capacity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.last(x).flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        there, back = self.places(scores, self.capacity)
        filled = torch.einsum("tec,td->ecd", there, rows)
        hidden = self.activated(torch.einsum("ecd,edf->ecf", filled, self.first))
        y = torch.einsum("tec,ecd->td", back, torch.einsum("ecf,efd->ecd", hidden, self.second))
        return (x + y.view_as(x)).square().mean()


def one_hot(ids: torch.Tensor, count: int, like: torch.Tensor) -> torch.Tensor:
    return F.one_hot(ids, count).to(like.dtype)


def of_one(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert a row."""
    weights, ids = scores.max(-1)
    hot = F.one_hot(ids, COUNT)
    place = hot.cumsum(0) - 1
    hot = hot * (place < capacity)
    at = one_hot((place * hot).sum(-1), capacity, scores)
    there = torch.einsum("te,tc->tec", hot.to(scores.dtype), at)
    return there, there * weights[:, None, None]


def by_gates(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As DeepSpeed: the gates of all experts are masked, and a row is wherever its gate is not zero."""
    hot = F.one_hot(scores.argmax(-1), COUNT)
    place = hot.cumsum(0) - 1
    hot = hot * torch.lt(place, capacity)
    gates = scores * hot.to(scores.dtype)
    back = torch.einsum("se,sc->sec", gates, one_hot((place * hot).sum(1), capacity, scores))
    return back.bool().to(scores.dtype), back


def by_products(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As Mesh TensorFlow: rows before this one are counted, and dims are brought side by side."""
    weights, ids = scores.max(-1)
    hot = F.one_hot(ids, COUNT)
    place = (hot.cumsum(0) - hot) * hot
    hot = hot * (place < capacity).long()
    at = one_hot((place * hot).sum(-1), capacity, scores)
    back = (weights[:, None] * hot)[:, :, None] * at[:, None]
    return (hot[:, :, None] * at[:, None]).to(scores.dtype), back


def of_top(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As GShard: second choices after all first ones."""
    weights, ids = scores.topk(TOP, -1)
    hot = F.one_hot(ids, COUNT)
    place = hot.transpose(0, 1).reshape(-1, COUNT).cumsum(0).view(TOP, -1, COUNT).transpose(0, 1) - 1
    return two(hot, place, weights, capacity)


def of_top_by_row(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both choices of a row before those of the next."""
    weights, ids = scores.topk(TOP, -1)
    hot = F.one_hot(ids, COUNT)
    place = hot.view(-1, COUNT).float().cumsum(0).view_as(hot).long() - 1
    hot = hot * (place < capacity)
    at = one_hot((place * hot).sum(-1), capacity, scores)
    both = hot.to(scores.dtype)[..., None] * at[:, :, None]
    return both.sum(1), (both * weights[..., None, None]).sum(1)


def two(
    hot: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    hot = hot * (place < capacity)
    at, kept = one_hot((place * hot).sum(-1), capacity, weights), hot.to(weights.dtype)
    return torch.einsum("tke,tkc->tec", kept, at), torch.einsum("tke,tkc,tk->tec", kept, at, weights)


FORMS = (of_one, by_gates, by_products, of_top, of_top_by_row)


# --- what is none ---


def each_choice_for_itself(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A first and a second choice may be in one place."""
    weights, ids = scores.topk(TOP, -1)
    hot = F.one_hot(ids, COUNT)
    return two(hot, hot.cumsum(0) - 1, weights, capacity)


def in_another_order(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A row has the count of another one."""
    weights, ids = scores.topk(TOP, -1)
    hot = F.one_hot(ids, COUNT)
    place = hot.transpose(0, 1).reshape(-1, COUNT).cumsum(0).view(-1, TOP, COUNT) - 1
    return two(hot, place, weights, capacity)


def along_experts(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places are counts over experts, not over rows."""
    weights, ids = scores.max(-1)
    hot = F.one_hot(ids, COUNT)
    at = one_hot(((hot.cumsum(1) - 1) * hot).sum(-1), capacity, scores)
    there = torch.einsum("te,tc->tec", hot.to(scores.dtype), at)
    return there, there * weights[:, None, None]


def beyond_in_the_first(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What does not fit is added to the first place."""
    weights, ids = scores.max(-1)
    hot = F.one_hot(ids, COUNT)
    place = hot.cumsum(0) - 1
    at = one_hot((place * hot * (place < capacity)).sum(-1), capacity, scores)
    there = torch.einsum("te,tc->tec", hot.to(scores.dtype), at)
    return there, there * weights[:, None, None]


def back_to_others(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    there, back = of_one(scores, capacity)
    return there, back.flip(0)


def weighed_before(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows are weighed on their way to experts, whose activations are not linear."""
    back = of_one(scores, capacity)[1]
    return back, back


def counts_less(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One less for every row of another expert: counts of two rows may be equal."""
    weights, ids = scores.max(-1)
    hot = F.one_hot(ids, COUNT)
    place = (hot - 1).cumsum(0).clamp(0)
    hot = hot * (place < capacity)
    at = one_hot((place * hot).sum(-1), capacity, scores)
    there = torch.einsum("te,tc->tec", hot.to(scores.dtype), at)
    return there, there * weights[:, None, None]


OTHERS = (
    each_choice_for_itself, in_another_order, along_experts, beyond_in_the_first, back_to_others, weighed_before, counts_less,
)  # fmt: skip


def mixtures(graph: Graph) -> int:
    return [n.op for n in graph.nodes].count(experts_op._opoverload)


@pytest.mark.parametrize("form", [f if f is of_top else pytest.param(f, marks=pytest.mark.slow) for f in FORMS])
def test_rows_go_to_their_experts_and_no_buffers_do(form: Any) -> None:
    """All is equal, dropped rows included; sent are the chosen rows of a rank, and no places that are empty."""
    assert not torch.equal(Buffered(form)(X), Buffered(form, MANY)(X)), "no row is dropped"
    report = assert_equal_training(Buffered(form), {"ep": 2}, (X,), like="expert", steps=3)
    sent = [c.bytes for c in report.plan.collectives if c.kind == "all_to_all" and "numbers" not in c.reason]
    top = TOP if "top" in form.__name__ else 1
    assert sent == [6 * top * WIDTH * 8 / 2] * 4
    assert not any("first" in c.reason or "second" in c.reason for c in report.plan.collectives)
    assert not any("einsum" in c.op for c in report.plan.choices.values())


@pytest.mark.slow_cases("each_choice_for_itself", "in_another_order")
@pytest.mark.parametrize("form", [*OTHERS[:3], *(pytest.param(f, marks=pytest.mark.slow) for f in OTHERS[3:])])
def test_places_that_rows_may_share_stay(form: Any) -> None:
    assert mixtures(capture_graph(Buffered(form, MANY), (X,), {}, training=True)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"ep": 4}, {"ep": 2, "tp": 2}, {"dp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_on_several_axes(form: Any, axes: dict[str, int]) -> None:
    like = {"dp": "ddp", "ep": "expert", "tp": "megatron"}
    assert_equal_training(Buffered(form), axes, (X,), like={a: like[a] for a in axes}, steps=3)


@pytest.mark.slow
def test_what_a_gate_of_zero_has_chosen_gets_no_gradient() -> None:
    """Rows are where gates are not zero: of one that is, its expert has made nothing, which the gate's gradient says."""

    def zeroed(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        return by_gates(scores - scores.detach() * (torch.arange(12) % 2)[:, None], capacity)

    assert mixtures(capture_graph(Buffered(zeroed), (X,), {}, training=True)) == 1
    assert_equal_training(Buffered(zeroed), {"ep": 2}, (X,), like="expert", steps=1)


class Grouped(nn.Module):
    """Routing into buffers of a capacity, group by group of rows (Lepikhin et al. 2020); what does not fit is dropped.

    ``last``: the last rows come first.
    """

    def __init__(self, capacity: int, last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.capacity, self.last = capacity, last
        self.layer, self.router = nn.Linear(16, 16), nn.Linear(16, 4, bias=False)
        self.first = nn.Parameter(torch.randn(4, 16, 24) / 4)
        self.second = nn.Parameter(torch.randn(4, 24, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        groups, rows = x.shape[:2]
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        hot = F.one_hot(ids, 4)
        first = hot.transpose(1, 2).reshape(groups, 2 * rows, 4)
        place = first.flip(1).cumsum(1).flip(1) if self.last else first.cumsum(1)
        place = place.view(groups, 2, rows, 4).transpose(1, 2) - 1
        hot = hot * (place < self.capacity)
        at = F.one_hot((place * hot).sum(-1), self.capacity).to(x.dtype)
        there = torch.einsum("gtke,gtkc->gtec", hot.to(x.dtype), at)
        back = torch.einsum("gtke,gtkc,gtk->gtec", hot.to(x.dtype), at, weights)
        hidden = F.gelu(torch.einsum("gecd,edh->gech", torch.einsum("gtec,gtd->gecd", there, x), self.first))
        y = torch.einsum("gtec,gecd->gtd", back, torch.einsum("gech,ehd->gecd", hidden, self.second))
        return (x + y).square().mean()


@pytest.mark.slow_cases("{'hints'*")
@pytest.mark.parametrize(
    "how",
    [
        {"hints": dict.fromkeys(("first", "second", "x"), autoshard.Shard(0))},
        {"like": "expert"},
        pytest.param({"like": {"ep": "expert", "tp": "megatron"}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_routing_with_a_capacity(how: dict[str, Any]) -> None:
    """Buffers of all groups reach their experts, and come back, by an all-to-all; rows that do not fit are dropped.

    Of places that are not known to be apart: else rows go, as here with the first rows first.
    """
    x, axes = torch.randn(4, 8, 16), dict.fromkeys(how["like"], 2) if isinstance(how.get("like"), dict) else {"ep": 2}
    assert not torch.equal(Grouped(3, True)(x), Grouped(16, True)(x))
    report = assert_equal_training(Grouped(3, True), axes, (x,), steps=1, **how)
    sent = [c for c in report.plan.collectives if "einsum" in c.reason and "ep" in c.axes]
    features = 16 / (2 if "tp" in axes else 1)
    assert [(c.kind, c.bytes) for c in sent] == [("all_to_all", 4 * 4 * 3 * features * 8 / 2 / 2)] * 4
    assert not [c for c in report.plan.collectives if c.reason.startswith(("first", "second"))]


@pytest.mark.parametrize("axes", [{"ep": 2}, pytest.param({"ep": 2, "tp": 2}, marks=pytest.mark.slow)], ids=str)
def test_rows_of_groups_with_a_capacity_go_without_their_buffers(axes: dict[str, int]) -> None:
    like = {"ep": "expert", "tp": "megatron"}
    x = torch.randn(4, 8, 16)
    report = assert_equal_training(Grouped(3), axes, (x,), like={a: like[a] for a in axes}, steps=1)
    sent = [c.bytes for c in report.plan.collectives if c.kind == "all_to_all" and "numbers" not in c.reason]
    assert sent == [4 * 8 / 2 * 2 * 16 * 8 / 2] * 4
    assert not any("einsum" in c.op for c in report.plan.choices.values())

"""Labels and masks that the forward draws, or makes with the model, in micro-batches and stages: made once for all readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ideal
from microbatch_cases import IGNORED, Tagger, masked_as_bert, steps_alike
from torch import nn

import autoshard
from autoshard import runtime
from autoshard.errors import PlanError, RuleError
from autoshard.passes.microbatch import losses

Loss = Callable[[Tagger, torch.Tensor], torch.Tensor]


def masked(m: Tagger, ids: torch.Tensor) -> torch.Tensor:
    """The mask decides what comes in, and what counts."""
    hidden = torch.rand(ids.shape) < 0.5
    return m.average(torch.where(hidden, 9, ids), torch.where(hidden, ids, IGNORED))


def weighed(m: Tagger, ids: torch.Tensor) -> torch.Tensor:
    labels = torch.where(torch.rand_like(ids, dtype=torch.float64) < 0.5, ids, IGNORED)
    return m.average(ids, labels, weight=m.weight, label_smoothing=0.1)


def between_others(m: Tagger, ids: torch.Tensor) -> torch.Tensor:
    """A draw between others keeps its place, and two losses read it."""
    h = F.dropout(m.embed(ids), 0.3)
    hidden = torch.rand(ids.shape) < 0.5
    logits = m.head(F.dropout(h, 0.3))
    chosen, rest = torch.where(hidden, ids, IGNORED), torch.where(hidden, IGNORED, ids)
    return m.averaged(logits, chosen) + m.averaged(2 * logits, rest)


def of_all_samples(m: Tagger, ids: torch.Tensor) -> torch.Tensor:
    """A draw that is no sample's own."""
    return m.average(ids, torch.where(torch.rand(ids.shape[1]) < 0.5, ids, IGNORED))


def counted_by_hand(m: Tagger, ids: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(ids.shape).uniform_() < 0.5
    each = F.cross_entropy(m.logits(ids).flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
    return (each * mask).sum() / mask.sum()


def chosen_by_chance(m: Tagger, ids: torch.Tensor) -> torch.Tensor:
    logits = m.logits(ids)
    return m.averaged(logits, torch.multinomial(logits.detach().flatten(0, 1).softmax(-1), 1).view(ids.shape))


def in_a_buffer(m: Tagger, ids: torch.Tensor) -> torch.Tensor:
    m.mean.mul_(0.5).add_(torch.rand(6), alpha=0.5)
    return m.average(ids, torch.where(m.mean < m.mean.mean(), ids, IGNORED))


def added(m: Tagger, ids: torch.Tensor) -> torch.Tensor:
    return m.average(ids, ids) + torch.rand(()) * 0.5


def taught(m: Tagger, ids: torch.Tensor) -> torch.Tensor:
    """Classes that a teacher names are never ignored: their number is known."""
    with torch.no_grad():
        labels = m.logits(ids.flip(-1)).argmax(-1)
    return m.average(ids, labels)


LOSSES: dict[str, Loss] = {
    f.__name__: f
    for f in (masked, masked_as_bert, weighed, between_others, of_all_samples, counted_by_hand, chosen_by_chance)
} | {f.__name__: f for f in (in_a_buffer, added, taught)}
ALONE = {"in_a_buffer"}


def case(loss: Loss) -> tuple[Tagger, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Tagger(loss).double(), (torch.randint(0, 9, (8, 6)),)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [None, "pp"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_each(name: str, count: int, stages: str | None) -> None:
    if stages and name in ALONE:
        pytest.skip("a buffer that is written is read in one stage")
    model, args = case(LOSSES[name])
    steps_alike(model, ideal({stages or "tp": 2}), args, {}, 3, micro_batches=count, stages=stages)


@pytest.mark.slow_cases("None-recompute0")
@pytest.mark.parametrize(("stages", "recompute"), [(None, {"embed": True}), ("pp", "auto")])
def test_some_of_them_in_one_loss(stages: str | None, recompute: Any) -> None:
    """What one of them is computed in gets no name of the next one's."""
    some: tuple[Loss, ...] = (counted_by_hand, masked_as_bert, between_others, taught)
    model, args = case(lambda m, ids: torch.stack([loss(m, ids) for loss in some]).sum())
    mesh = ideal({stages or "tp": 2})
    steps_alike(model, mesh, args, {}, 2, micro_batches=2, stages=stages, recompute=recompute)


def test_a_draw_that_is_copied_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "duplicable_nodes", lambda graph: {n.name for n in graph.nodes})
    model, args = case(masked)
    with pytest.raises(AssertionError):
        steps_alike(model, ideal({"tp": 2}), args, {}, 1, micro_batches=2)


def test_a_part_is_the_micro_batchs_own() -> None:
    """The source draws once, whole, and takes parts of that."""
    model, args = case(masked)
    source = autoshard.compile(model, ideal({"tp": 2}), args, micro_batches=2).source
    assert source.count("runtime.draw(") == 1
    assert "lt_part = runtime.part_of_batch(lt, 0, 2)" in source


@torch.library.custom_op("autoshard_tests::drawn", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


drawn.register_fake(torch.empty_like)


def confident(m: Tagger, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        certainty, labels = m.logits(ids.flip(-1)).softmax(-1).max(-1)
    return m.average(ids, torch.where(certainty > 0.14, labels, IGNORED))


@pytest.mark.parametrize("stages", [None, "pp"])
def test_labels_that_only_the_model_can_count(stages: str | None) -> None:
    model, args = case(confident)
    text = r"cross_entropy_loss.* at .*:\d+ averages over the labels .*\(aten.where.* at .*:\d+\).* pass the labels as an input"
    with pytest.raises(PlanError, match=text):
        autoshard.plan(model, {stages or "tp": 2}, args, micro_batches=2, stages=stages)


def test_a_draw_without_a_rule_is_drawn_once() -> None:
    model, args = case(lambda m, ids: m.average(ids, torch.where(drawn(ids.double()) < 0.5, ids, IGNORED)))
    steps_alike(model, ideal({"tp": 2}), args, {}, 2, micro_batches=2)


def test_a_draw_without_a_rule_that_has_a_gradient_is_named() -> None:
    model, args = case(lambda m, ids: m.average(ids, ids) + drawn(m.logits(ids)).mean())
    with pytest.raises(
        RuleError, match=r"autoshard_tests.drawn.* draws random numbers and has a gradient but no sharding rule"
    ):
        autoshard.plan(model, {"tp": 2}, args, micro_batches=2)


class Lending(nn.Module):
    """Operands that lend their dtype or shape only, to casts, to fills, and to probabilities of draws."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, padded = self.up(x), x[..., 0].gt(0).unsqueeze(-1)
        h = h * (1 - padded.type_as(h)) * torch.bernoulli(torch.full_like(h, 0.5))
        h = h + torch.empty_like(h).normal_() + torch.ones_like(h).type_as(padded).to(h) + h.new_full(h.shape, 0.5)
        return self.down(h).square().mean()


def test_what_only_lends_its_shape_or_dtype() -> None:
    torch.manual_seed(0)
    steps_alike(Lending().double(), ideal({"tp": 2}), (torch.randn(8, 3, 8).double(),), {}, 2, micro_batches=4)


def test_verify_reports_where_labels_are_drawn_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong part of what is drawn is a report, and no error of torch's."""
    model, args = case(between_others)
    assert autoshard.verify(model, {"tp": 2}, args, micro_batches=2).ok
    monkeypatch.setattr(runtime, "part_of_batch", lambda x, dim, count: x.narrow(dim, 0, x.shape[dim] // count))
    report = autoshard.verify(model, {"tp": 2}, args, micro_batches=2)
    assert not report.ok
    assert "cross_entropy" in str(report.first_divergence)

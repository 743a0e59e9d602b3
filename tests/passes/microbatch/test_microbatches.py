"""Micro-batches in one process: a step's numbers are those of the whole batch, its memory that of one of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import ideal
from microbatch_cases import CASES, TOLERANCE, compare, far, farthest, loss_of, made
from torch import nn

import autoshard
from autoshard import Replicate, Shard
from autoshard.compiler import capture_graph
from autoshard.errors import HintError, PlanError
from autoshard.module import microbatches
from autoshard.passes.capture.export import capture
from autoshard.passes.microbatch import micro_batched
from autoshard.passes.microbatch.micro_batch import AUTO, micro_batch_counts
from autoshard.passes.propagate.hints import micro_batch_placements

pytestmark = pytest.mark.usefixtures("remembering")

MESHES = {"tp2": {"tp": 2}, "dp2tp2": {"dp": 2, "tp": 2}, "fsdp3": {"fsdp": 3}}


SLOW = {"llama_in_2", "llama_in_4", "gpt_in_4", "moe_in_4"}


@pytest.mark.slow_cases("dp2tp2-without_gradients", "dp2tp2-gpt_in_2", "dp2tp2-chosen")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES])
@pytest.mark.parametrize("mesh", ["dp2tp2"])
def test_case(mesh: str, name: str) -> None:
    CASES[name](ideal(MESHES[mesh]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", ["tp2", "fsdp3"])
def test_case_on_other_meshes(mesh: str, name: str) -> None:
    CASES[name](ideal(MESHES[mesh]))


def test_the_graph_of_one() -> None:
    model, args = made("weighted")
    graph, micro = micro_batched(capture_graph(model, args, {}, training=True), 4)
    lines = [line.partition("    #")[0].strip() for line in str(graph).splitlines()]
    assert lines == [
        "graph(p_head_weight: f64[7, 10], p_head_bias: f64[7], b_weight: f64[7], x: f64[2, 10], labels: i64[2], "
        "labels_whole: i64[8]):",
        "linear = aten.linear.default(x, p_head_weight, p_head_bias)",
        "cross_entropy_loss_sum = aten.cross_entropy_loss.default(linear, labels, b_weight, 2, 3)",
        "cross_entropy_loss_valid = aten.ne.Scalar(labels_whole, 3)",
        "cross_entropy_loss_classes = aten.mul.Tensor(labels_whole, cross_entropy_loss_valid)",
        "cross_entropy_loss_each = aten.index.Tensor(b_weight, [cross_entropy_loss_classes])",
        "cross_entropy_loss_counted = aten.mul.Tensor(cross_entropy_loss_each, cross_entropy_loss_valid)",
        "cross_entropy_loss_count = aten.sum.default(cross_entropy_loss_counted)",
        "cross_entropy_loss = aten.div.Tensor(cross_entropy_loss_sum, cross_entropy_loss_count)",
        "return cross_entropy_loss",
    ]
    assert micro.inputs == {"x": ("x", 0), "labels": ("labels", 0), "labels_whole": ("labels", None)}
    assert (micro.count, micro.outputs, micro.loss) == (4, ("sum",), 0)


def test_plans_are_of_the_whole_step() -> None:
    """Also where the mesh is searched; the work is that of the whole batch, in every figure."""
    model, args = made("regression")
    for where in ({"mesh": {"tp": 2}}, {"mesh": None, "devices": 2}):
        whole, parts = (autoshard.plan(model, example_args=args, micro_batches=n, **where) for n in (1, 4))
        assert (whole.micro_batches, parts.micro_batches) == (1, 4)
        assert parts.cost.flops == whole.cost.flops == sum(c.flops for c in parts.choices.values())
        assert parts.cost.optimizer_s == whole.cost.optimizer_s
        assert parts.cost.compute_s > whole.cost.compute_s  # more launches
        assert parts.cost.mfu == pytest.approx(whole.cost.mfu * whole.cost.total_s / parts.cost.total_s)
        assert parts.memory.activations < whole.memory.activations
        assert "in 4 micro-batches" in " ".join(str(parts).split())
        assert type(parts).from_json(parts.to_json()).micro_batches == 4


@pytest.mark.parametrize("like", ["ddp", "fsdp", "hsdp", "zero1", "zero2"])
def test_what_is_sent_in_a_step(like: str) -> None:
    """Sums over replicas once, and gathers of what is kept; all else once per micro-batch. What runs is as planned."""
    mesh = ideal({"replica": 2, "shard": 2} if like == "hsdp" else {"dp": 2})
    sent = []
    for count in (1, 4):
        model, args = made("regression")
        args = tuple(x.repeat(4, 1) for x in args)
        sharded = autoshard.compile(model, mesh, args, like=like, micro_batches=count)
        log: list[Any] = []
        loss_of(sharded(*args)).backward()
        sharded.record(log)
        loss_of(sharded(*args)).backward()
        ran, planned = (_by_kind(found) for found in (log, sharded.collectives))
        assert ran == pytest.approx(planned)
        sent.append(planned)
    once = {("all_reduce", "backward")}
    once |= {("all_gather", "forward")} if like in ("zero1", "zero2") else set()
    once |= {("reduce_scatter", "backward")} if like == "zero1" else set()
    for what, size in sent[1].items():
        assert size == pytest.approx(sent[0][what] * (1 if what in once else 4)), what


def _by_kind(found: Any) -> dict[tuple[str, str], float]:
    total: dict[tuple[str, str], float] = {}
    for c in found:
        total[c.kind, c.phase] = total.get((c.kind, c.phase), 0.0) + c.bytes
    return total


@pytest.mark.slow
def test_as_many_as_it_takes() -> None:
    """The fewest that fit; one where that fits. More take more time, for which the bound holds, too."""
    model, args = made("regression")
    args = tuple(x.repeat(512, 1) for x in args)
    asked: dict[str, Any] = {"mesh": {"dp": 2}, "example_args": args, "like": "ddp", "recompute": "none"}
    plans = {n: autoshard.plan(model, **asked, micro_batches=n) for n in (1, 2, 4, 8)}
    assert autoshard.plan(model, **asked, micro_batches="auto").micro_batches == 1
    for n in (2, 4, 8):
        assert plans[n].cost.total_s > plans[n // 2].cost.total_s
        assert plans[n].cost.total_s == pytest.approx(plans[n].lower_bound)
        assert plans[n].memory.peak < plans[n // 2].memory.peak
        found = autoshard.plan(model, **asked, micro_batches="auto", memory_budget=1.01 * plans[n].memory.peak)
        assert (found.micro_batches, found.cost) == (n, plans[n].cost)
    with pytest.raises(PlanError, match="no plan within"):
        autoshard.plan(model, **asked, micro_batches="auto", memory_budget=1000)
    with pytest.raises(PlanError, match="a number of at least 1, or \"auto\", got 'many'"):
        autoshard.plan(model, **asked, micro_batches="many")


def test_any_divisor_of_the_batch_is_tried() -> None:
    graph = capture(nn.Sequential(nn.Linear(4, 4), Mean()), (torch.zeros(34, 4),))
    assert micro_batch_counts(graph, AUTO) == [1, 2, 17, 34]
    graph = capture(nn.Sequential(nn.Linear(4, 4), Mean()), (torch.zeros(17, 4),))
    assert micro_batch_counts(graph, AUTO) == [1, 17]


def test_draws_by_value_are_refused() -> None:
    """``rrelu`` draws for negative elements alone: a part cannot know how many the others take."""
    graph = capture(nn.Sequential(nn.Linear(4, 4), nn.RReLU(), Mean()), (torch.zeros(4, 4),))
    with pytest.raises(
        PlanError, match="draws numbers, and values of the full batch decide how many each sample takes"
    ):
        micro_batched(graph, 2)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def test_what_is_kept_is_measured() -> None:
    """A quarter, as planned: what one part kept is gone when the next one runs."""
    model, args = made("regression")
    args = tuple(x.repeat(16, 1) for x in args)
    kept = []
    for count in (1, 4):
        sharded = autoshard.compile(copy.deepcopy(model), {"dp": 1}, args, micro_batches=count)
        found = autoshard.measure(sharded, args, steps=1)
        assert found.kept_bytes == pytest.approx(sharded.plan.memory.activations, rel=0.05)
        kept.append(found.kept_bytes)
    assert kept[1] == pytest.approx(kept[0] / 4, rel=0.05)


def test_one_that_counts_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    part = microbatches.micro_batch_slice
    monkeypatch.setattr(
        microbatches, "micro_batch_slice", lambda x, dim, index, count: part(x, dim, min(index, count - 2), count)
    )
    with pytest.raises(AssertionError):
        compare("regression", ideal({"tp": 2}), 4, steps=1)


def test_draws_of_a_part_alone_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatches.torch_state, "set_generator_states", lambda states: None)
    with pytest.raises(AssertionError):
        compare("gpt", ideal({"tp": 2}), 2, steps=1)


@pytest.mark.slow
def test_activations_of_one_are_kept() -> None:
    """Bytes that autograd keeps at a time with four micro-batches: those of a batch that is a quarter as large."""
    whole, quarter, four = _most_kept(8, 1), _most_kept(2, 1), _most_kept(8, 4)
    assert quarter <= four <= 1.01 * quarter < 0.4 * whole


def _most_kept(batch: int, count: int) -> int:
    model, args = made("llama")
    args = tuple(x[:batch] for x in args)
    sharded = autoshard.compile(model, ideal({"tp": 2}), args, like="megatron", micro_batches=count)
    loss_of(sharded(*args)).backward()
    alive: dict[int, int] = {}
    most = 0

    class Kept:
        def __init__(self, x: torch.Tensor) -> None:
            nonlocal most
            self.x = x
            alive[id(self)] = x.numel() * x.element_size()
            most = max(most, sum(alive.values()))

        def __del__(self) -> None:
            alive.pop(id(self), None)

    def unpack(kept: Any) -> torch.Tensor:
        return kept.x  # type: ignore[no-any-return]

    with torch.autograd.graph.saved_tensors_hooks(Kept, unpack):
        loss = loss_of(sharded(*args))
    loss.backward()
    return most


class PerToken(nn.Module):
    """Any dim but the last may be the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).relu()) - target).square().mean()


def test_hints_name_the_batch() -> None:
    torch.manual_seed(0)
    model, args = PerToken().double(), (torch.randn(4, 6, 8).double(), torch.randn(4, 6, 4).double())
    graph, mesh = capture_graph(model, args, {}, training=True), ideal({"tp": 2})
    for hints, dim in ({}, 0), ({"x": {"micro_batch": Shard(1), "tp": Replicate()}}, 1):
        _, micro = micro_batched(graph, 2, micro_batch_placements(hints, graph))
        assert micro.inputs == {"x": ("x", dim), "target": ("target", dim)}
        assert autoshard.verify(model, mesh, args, hints=hints, micro_batches=2).ok
    gone = {"gone": {"micro_batch": Shard(0)}}
    assert micro_batch_placements(gone, graph, known=True) == {}  # a later program need not have the input
    with pytest.raises(HintError, match="'gone' matches no"):
        micro_batch_placements(gone, graph)
    assert autoshard.plan(model, mesh, args, hints=hints, micro_batches="auto").micro_batches == 1
    for hint, error, text in (
        ({"x": Shard(2)}, PlanError, r"micro_batches=2: .* as the hints ask \('x': S\(2\)\)"),
        ({"x": Replicate(), "target": Shard(0)}, PlanError, r"'x': R, 'target': S\(0\)"),
        ({"x": Shard(-2)}, HintError, r"S\(-2\) on axis 'micro_batch' counts from the end. Give the dim as 0"),
        ({"x": Shard(3)}, HintError, r"input 'x' has 3 dims"),
        ({"up": Shard(1)}, HintError, r"'up' is not an input. Inputs: x, target"),
    ):
        hints = {name: {"micro_batch": p} for name, p in hint.items()}
        with pytest.raises(error, match=text):
            autoshard.compile(model, mesh, args, hints=hints, micro_batches=2)
    hints = {"x": {"micro_batch": Shard(1)}}
    with pytest.raises(
        PlanError,
        match=r"=4: .* dim 1 of 'x', of shape .*, the batch, but 6 rows do not divide into 4 micro-batches\. Choose",
    ):
        autoshard.compile(model, mesh, args, hints=hints, micro_batches=4)
    with pytest.raises(
        HintError, match="names axis 'micro_batch', which means micro-batches but is also an axis of the mesh"
    ):
        autoshard.compile(model, ideal({"micro_batch": 2}), args, hints=hints)


class Picked(nn.Module):
    """One token of every sequence, several of them, and the logit of the label: by the number of the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 7)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        scores, samples = self.head(self.embedding(ids)), torch.arange(len(ids))
        last = scores[samples, (torch.arange(ids.shape[1]) * (ids != 0).int()).argmax(-1)].log_softmax(-1)
        several = scores[torch.arange(0, len(ids))[:, None], where]
        return several.square().mean() - last[samples, labels].mean()


@pytest.mark.parametrize("stages", [None, "pp"])
def test_samples_pick_by_their_number(stages: str | None) -> None:
    """As in the whole batch, and none works on more than its part of it."""
    torch.manual_seed(0)
    model = Picked().double()
    where = torch.tensor([[0, -1, 2]]).repeat(8, 1).int()
    args = torch.randint(9, (8, 6)), torch.randint(7, (8,)), where
    mesh, asked = ideal({stages or "dp": 2}), {"micro_batches": 4, "stages": stages}
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, **asked)
    assert sharded.plan.cost.flops == autoshard.plan(model, mesh, args).cost.flops
    losses = [module(*args) for module in (model, sharded)]
    for loss in losses:
        loss.backward()
    assert far(losses[1].detach(), losses[0].detach()) <= TOLERANCE
    assert farthest(sharded.full_gradients(), {n: x.grad for n, x in model.named_parameters()}) <= TOLERANCE
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        sharded(*args[:2], where - 6)


class Shuffled(nn.Module):
    """Every sample is compared with another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, order: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layer(x)[order] - y).square().mean()


def test_the_whole_batch_is_not_run_in_every_micro_batch() -> None:
    """Unless an input is not of the batch: it has another length, or hints say so."""
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    with pytest.raises(PlanError, match=r"each micro-batch would run linear = .* on the full batch"):
        autoshard.plan(Shuffled(), {"dp": 2}, (x, torch.randperm(8), y), micro_batches=2)
    asked = {"x": {"micro_batch": Replicate()}}
    for given, hints in ((x, asked), (torch.randn(5, 6), {})):
        args = given, torch.randint(5, (8,)), y
        assert autoshard.plan(Shuffled(), {"dp": 2}, args, micro_batches=2, hints=hints).micro_batches == 2


class Matched(nn.Module):
    """A loss over all keys, whose numbers are made of the whole batch; beside it a parameter that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.unread = nn.Linear(6, 5), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.query(x) @ keys.T, torch.arange(len(x)))


@pytest.mark.parametrize("stages", [None, "pp"])
def test_unread_beside_what_is_made_beforehand(stages: str | None) -> None:
    torch.manual_seed(0)
    model, args = Matched().double(), (torch.randn(8, 6).double(), torch.randn(8, 5).double())
    sharded = autoshard.compile(copy.deepcopy(model), ideal({stages or "dp": 2}), args, micro_batches=4, stages=stages)
    for module in (model, sharded):
        module(*args).backward()
    assert far(sharded(*args).detach(), model(*args).detach()) <= TOLERANCE
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert farthest(sharded.full_gradients(), expected) <= TOLERANCE


class Classified(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("stages", [None, "pp"])
def test_losses_in_pieces(stages: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits so large that a rank's loss works on pieces of them: that is asked of a micro-batch's graph, not in making it."""
    monkeypatch.setattr("autoshard.passes.rules.families.loss.CHUNKED_LOSS_ELEMENTS", 1)
    torch.manual_seed(0)
    model, ids, labels = Classified().double(), torch.randint(16, (4, 3)), torch.randint(16, (4, 3))
    labels[0, 1:] = labels[3, 0] = -100
    loss = model(ids, labels)
    loss.backward()
    mesh = ideal({"pp": 2} if stages else {"dp": 2})
    sharded = autoshard.compile(
        model, mesh, (ids, labels), micro_batches=2, stages=stages, like=None if stages else "ddp"
    )
    assert "classes=16" in sharded.source
    mine = sharded(ids, labels)
    mine.backward()
    torch.testing.assert_close(mine.detach(), loss.detach(), rtol=1e-12, atol=0)
    found = sharded.full_gradients()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-9, atol=1e-12)

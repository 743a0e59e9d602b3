"""Losses with terms that no sample decides, in micro-batches and stages: numbers, zeros that sums start at, weighted terms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from harness import ideal
from microbatch_cases import TOLERANCE, far, farthest, steps_alike
from torch import nn

import autoshard
from autoshard.errors import PlanError, RuntimeMismatchError
from autoshard.passes.microbatch import micro_batch

Term = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def summed(start: Any, terms: list[torch.Tensor]) -> torch.Tensor:
    for term in terms:
        start = start + term
    return start  # type: ignore[no-any-return]


def filled(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = torch.zeros((), dtype=h.dtype)
    loss += F.mse_loss(h, y)
    loss -= torch.full((), 0.25, dtype=h.dtype) * 3
    return loss


LOSSES: dict[str, Term] = {
    "number": lambda h, y: F.mse_loss(h, y) + 1.5,
    "number_first": lambda h, y: 1.5 - F.mse_loss(h, y) * 2,
    "numbers": lambda h, y: torch.sub((F.cross_entropy(h, y.argmax(-1)) + 1) / 3, 7, alpha=2),
    "probabilities": lambda h, y: F.cross_entropy(h, y.softmax(-1)),
    "of_draws": lambda h, y: (h * torch.bernoulli(y.sigmoid())).mean(),
    "of_each_feature": lambda h, y: ((h - y).square().mean(0) + 1.5).sum(),
    "zeros": lambda h, y: summed(torch.zeros(()), [F.mse_loss(h, y), h.abs().mean()]),
    "new_zeros": lambda h, y: summed(h.new_zeros(()), [F.mse_loss(h, y)]),
    "zero": lambda h, y: summed(0.0, [F.mse_loss(h, y), 0.1 * h.abs().mean()]),
    "filled": filled,
    "weighted": lambda h, y: F.mse_loss(h, y) * 2 + 0.1 * h.square().mean(),
    "tensor": lambda h, y: F.mse_loss(h, y) + torch.tensor(1.5),
    "stacked": lambda h, y: torch.stack([F.mse_loss(h, y), h.mean() + 1, torch.ones((), dtype=h.dtype)]).mean(),
}


class Trained(nn.Module):
    def __init__(self, loss: Term) -> None:
        super().__init__()
        self.first, self.second, self.loss = nn.Linear(6, 8), nn.Linear(8, 5), loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.second(self.first(x).tanh()), y)


def case(loss: Term) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Trained(loss).double(), (torch.randn(8, 6).double(), torch.randn(8, 5).double())


@pytest.mark.slow
@pytest.mark.parametrize("stages", [None, "pp"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_terms_that_no_sample_decides(name: str, count: int, stages: str | None) -> None:
    model, args = case(LOSSES[name])
    steps_alike(model, ideal({stages or "tp": 2}), args, {}, 3, micro_batches=count, stages=stages)


@pytest.mark.slow_cases("4-None")
@pytest.mark.parametrize(("count", "stages"), [(4, None), (2, "pp")])
def test_all_these_terms(count: int, stages: str | None) -> None:
    model, args = case(lambda h, y: summed(h.new_zeros(()), [loss(h, y) for loss in LOSSES.values()]))
    steps_alike(model, ideal({stages or "tp": 2}), args, {}, 3, micro_batches=count, stages=stages)


def test_a_number_in_an_upcast_to_float32() -> None:
    """A norm that computes in float32 adds its epsilon to what is cut."""

    def normed(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean = h.float().square().mean(-1, keepdim=True)
        return F.mse_loss((h.float() * torch.rsqrt(mean + 1e-6)).to(h.dtype), y)

    model, args = case(normed)
    steps_alike(model, ideal({"tp": 2}), args, {}, 2, micro_batches=2)


def test_a_number_that_counts_in_each_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch, "with_constant_share", lambda node, count: node)
    model, args = case(LOSSES["number"])
    with pytest.raises(AssertionError):
        steps_alike(model, ideal({"tp": 2}), args, {}, 1, micro_batches=2)


class Two(nn.Module):
    """Two scalars that carry a gradient, in one of several forms."""

    def __init__(self, form: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.form = nn.Linear(6, 8), nn.Linear(8, 5), form

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        h = self.second(self.first(x).tanh())
        return self.form(F.mse_loss(h, y), h.abs().mean())


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "named": lambda a, b: {"aux": b, "loss": a + 0.1 * b},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stages", [None, "pp"])
def test_scalars_beside_the_loss(stages: str | None, form: str) -> None:
    """They are known; a gradient that is asked of one raises, and is none of zeros."""
    torch.manual_seed(0)
    model, x, y = Two(FORMS[form]).double(), torch.randn(8, 6).double(), torch.randn(8, 5).double()
    mesh, asked = ideal({stages or "tp": 2}), {"micro_batches": 2, "stages": stages}
    assert autoshard.verify(model, mesh, (x, y), steps=2, **asked).ok
    sharded = autoshard.compile(copy.deepcopy(model), mesh, (x, y), **asked)
    assert autoshard.measure(sharded, (x, y), steps=1).step_s > 0
    for module in (model, sharded):
        module.zero_grad()
    (loss, other), expected = (pytree.tree_leaves(module(x, y)) for module in (sharded, model))
    if form == "named":
        loss, other, expected = other, loss, expected[::-1]
    assert far(other.detach(), expected[1].detach()) <= TOLERANCE
    expected[0].backward()
    loss.backward(retain_graph=True)
    assert farthest(sharded.full_gradients(), {n: p.grad for n, p in model.named_parameters()}) <= TOLERANCE
    with pytest.raises(
        RuntimeMismatchError, match=r"a gradient of output ('aux'|number 1) is asked for.*called .loss."
    ):
        (loss + other).backward()


class Culprit(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second, self.norm, self.run = nn.Linear(6, 8), nn.Linear(8, 5), nn.BatchNorm1d(8), forward
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.run(self, x, y)


def written(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    m.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return F.mse_loss(m.second(h), y)


def centred(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return F.mse_loss(m.second((h - h.mean(0)).tanh()).relu(), y)


def balanced(m: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    h = m.second(m.first(x))
    aux = (h.softmax(-1).mean(0) * F.one_hot(h.argmax(-1), 5).to(h.dtype).mean(0)).sum()
    return {"loss": F.mse_loss(h, y) + aux, "aux": aux}


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "buffer": (written, "'mean' is written with a value of the full batch"),
    "centred": (centred, r"aten.sub.Tensor in .* needs mean\w* \(aten.mean.dim in .*\) of the full batch"),
    "root": (
        lambda m, x, y: F.mse_loss(m.second(m.first(x)), y).sqrt() + 1,
        r"aten.sqrt.default in .* needs mse_loss \(aten.mse_loss",
    ),
    "product": (
        lambda m, x, y: (lambda h: F.mse_loss(h, y) * h.mean() + 1)(m.second(m.first(x))),
        r"aten.mul.Tensor in .* needs mse_loss \(.*\), mean\w* \(",
    ),
    "norm": (
        lambda m, x, y: F.mse_loss(m.second(m.norm(m.first(x))), y),
        "batch_norm.* in norm .* needs linear of the",
    ),
    "balanced": (balanced, "aten.mul.Tensor in .* for output 'aux', needs .*A load-balancing loss of experts"),
    "greatest": (
        lambda m, x, y: F.mse_loss(m.second(m.first(x)), y, reduction="none").amax().log(),
        "aten.amax.default in .* needs mse_loss of",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_cause(name: str) -> None:
    forward, text = REFUSED[name]
    with pytest.raises(PlanError, match=text):
        autoshard.plan(Culprit(forward), {"tp": 2}, (torch.randn(8, 6), torch.randn(8, 5)), micro_batches=2)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(9, 4)

    def forward(self, rows: torch.Tensor, starts: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.table(rows, starts), y)


@pytest.mark.parametrize("bags", [4, 5])
def test_jagged_rows_are_no_batch(bags: int) -> None:
    """Where others divide the message says so; where none does the number is wrong for the batch, too."""
    args = torch.arange(7), torch.arange(bags), torch.randn(bags, 4)
    with pytest.raises(PlanError, match=r"shape \[7\], and its batch of 7 does not divide into 2") as error:
        autoshard.plan(Pooled(), {"tp": 2}, args, micro_batches=2)
    assert ("rows are jagged bags" in str(error.value)) == (bags == 4)


class Speech(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.up, self.head, self.reduction = nn.Linear(8, 8), nn.Linear(8, 6), reduction

    def forward(self, x: torch.Tensor, y: torch.Tensor, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        found = self.head(self.up(x).relu()).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(found, y, frames, lengths, reduction=self.reduction).mean() + 0.5


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("asked", [{"tp": 2}, {"dp": 3}], ids=["micro-batches", "a rank without a sample"])
def test_ctc_loss(reduction: str, asked: dict[str, int]) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([10, 9, 10, 8]), torch.tensor([3, 2, 0, 1])
    args = (torch.randn(4, 10, 8).double(), torch.randint(1, 6, (4, 3)), *lengths)
    cut = {key: {"dp": autoshard.Shard(0)} for key in ("[xy]", "frames", "lengths")}
    opts: dict[str, Any] = {"hints": cut} if "dp" in asked else {"micro_batches": 2}
    steps_alike(Speech(reduction).double(), ideal(asked), args, {}, 1, **opts)

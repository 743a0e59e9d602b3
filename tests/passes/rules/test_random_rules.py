"""Random ops on a mesh draw what eager draws on one device, from the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training
from sites import part, run, site
from special_samples import f
from torch import distributions as dist
from torch import nn

import autoshard
from autoshard import runtime
from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh
from autoshard.passes.rules.families import attention, factory
from autoshard.runtime import World
from autoshard.runtime.operations import random

aten = torch.ops.aten
SIZES = {"a": 2, "b": 3}
MESH = Mesh(SIZES)


def _on_every_rank(fn: Any) -> list[torch.Tensor]:
    return World(SIZES).run(fn, [(r,) for r in range(MESH.size)])


@pytest.mark.parametrize("cuts", [{}, {"a": 0}, {"b": 1}, {"a": 2, "b": 1}], ids=str)
def test_dropout_drops_what_eager_drops(cuts: dict[str, int]) -> None:
    x, layout = f(5, 7, 4), Layout(MESH, {a: Shard(d) for a, d in cuts.items()})
    torch.manual_seed(3)
    expected = F.dropout(x, 0.3)
    torch.manual_seed(3)
    dims = {d: a for a, d in cuts.items()}
    parts = _on_every_rank(lambda r: runtime.dropout(part(x, layout, r), 0.3, (5, 7, 4), dims))
    for r, found in enumerate(parts):
        assert torch.equal(found, part(expected, layout, r))


DRAWS: list[tuple[str, tuple[Any, ...], Any]] = [
    ("rand_like", (), torch.rand_like),
    ("randn_like", (), torch.randn_like),
    ("uniform", (-1.0, 2.0), lambda x: torch.empty_like(x).uniform_(-1, 2)),
    ("exponential", (2.0,), lambda x: torch.empty_like(x).exponential_(2.0)),
    ("normal_functional", (1.0, 2.0), lambda x: torch.empty_like(x).normal_(1.0, 2.0)),
    ("bernoulli", (0.3,), lambda x: torch.empty_like(x).bernoulli_(0.3)),
]


@pytest.mark.parametrize(("op", "rest", "eager"), DRAWS, ids=[name for name, _, _ in DRAWS])
@pytest.mark.parametrize("cuts", [{"a": 0}, {"a": 1, "b": 0}], ids=str)
def test_draws_are_those_of_eager(op: str, rest: tuple[Any, ...], eager: Any, cuts: dict[str, int]) -> None:
    x, layout = f(6, 7), Layout(MESH, {a: Shard(d) for a, d in cuts.items()})
    torch.manual_seed(4)
    expected = eager(x)
    torch.manual_seed(4)
    dims = {d: a for a, d in cuts.items()}
    parts = _on_every_rank(lambda r: runtime.draw_like(op, part(x, layout, r), (6, 7), dims, *rest))
    for r, found in enumerate(parts):
        assert torch.equal(found, part(expected, layout, r))


@pytest.mark.parametrize("labels", ["R", "d0", "d1"])
def test_samples_are_those_of_eager(labels: str) -> None:
    """From parts of the weights too: only candidates are sent. Weights that eager refuses are refused."""
    weights = f(5, 7).softmax(-1)
    (rule,) = (r for r in factory.RANDOM_RULES if r.op is aten.multinomial.default)
    for count in (1, 3):
        at = site(rule, [weights, count], (labels,), Mesh({"a": 3}))
        torch.manual_seed(5)
        expected = torch.multinomial(weights, count)
        torch.manual_seed(5)
        parts, _ = run(rule, at, [weights, count])
        for r, found in enumerate(parts):
            assert torch.equal(found, part(expected, at.outputs[0], r))
    for wrong in (-weights, weights * 0):
        with pytest.raises(RuntimeError, match=r"probability|sum of probabilities"):
            run(rule, at, [wrong, 3])


@pytest.mark.parametrize("grouped", [False, True], ids=["heads", "groups"])
@pytest.mark.parametrize("masked", ["", "causal", "mask"])
@pytest.mark.parametrize(
    "labels", [("R", "R"), ("batch0", "heads"), ("batch0", "queries"), ("heads", "keys")], ids=", ".join
)
def test_attention_drops_what_eager_drops(grouped: bool, masked: str, labels: tuple[str, str]) -> None:
    """Bit for bit, but where keys are cut: sums are then taken in another order."""
    groups = 2 if grouped else 4
    args: list[Any] = [f(4, 4, 5, 8), f(4, groups, 5, 8), f(4, groups, 5, 8)]
    args += [torch.rand(5, 5) < 0.7 if masked == "mask" else None, 0.3, masked == "causal"]
    rule = next(r for r in attention.RULES if r.op is torch.ops.aten.scaled_dot_product_attention.default)
    torch.manual_seed(5)
    expected = rule.op(*args, enable_gqa=grouped)
    at = site(rule, args, labels, Mesh({"a": 2, "b": 2}), enable_gqa=grouped)
    torch.manual_seed(5)
    parts, _ = run(rule, at, args)
    for r, found in enumerate(parts):
        wanted = part(expected, at.outputs[0], r)
        if "keys" in labels:
            assert torch.allclose(found + parts[r ^ 1], wanted, rtol=0, atol=1e-12)
        else:
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_random_slopes_are_those_of_eager(training: bool) -> None:
    """Drawn for whole tensors between divided products; torch's functional form has no gradient, ours has."""
    model = nn.Sequential(nn.Linear(8, 12), nn.RReLU(0.1, 0.5), nn.Linear(12, 6)).train(training)
    assert_equal_training(model, {"tp": 2}, (f(5, 8),), share=1)
    assert_equal_training(model, {"tp": 3}, (f(6, 8),), share=1)


def test_another_seed_is_noticed() -> None:
    """Negative control: equality above is not for want of dropping."""
    x = f(5, 7)
    torch.manual_seed(3)
    expected = F.dropout(x, 0.3)
    torch.manual_seed(4)
    parts = _on_every_rank(lambda r: runtime.dropout(x, 0.3, (5, 7), {}))
    assert not torch.equal(parts[0], expected)


class Permuted(nn.Module):
    """Random ops on tensors that lie permuted in memory, as images made from tokens do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 9)
        self.conv = nn.Conv2d(9, 7, 3, padding=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.linear(tokens).transpose(1, 2).reshape(tokens.shape[0], 9, 4, 4)
        x = F.dropout(self.conv(x), 0.4)
        x = x * torch.rand_like(x)
        return F.dropout(x.contiguous(), 0.3)


class Transposed(nn.Module):
    """Normal draws like a transposed tensor, which torch fills otherwise than a row-major one; ``some``: of open length."""

    def __init__(self, some: bool) -> None:
        super().__init__()
        self.linear, self.some = nn.Linear(8, 9), some

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.some:
            x = x[:, (x[0, :, 0] > -1).nonzero().squeeze(1)]
        x = x.transpose(1, 2)
        some = x[:, 2:7]  # with gaps in memory
        return F.pad(some + torch.randn_like(some), (0, 0, 2, 2)) + torch.randn_like(x) * torch.rand_like(x)


@pytest.mark.slow_cases("{'tp': 3}-open", "{'tp': 2}-open", "{'tp': 3}-fixed")
@pytest.mark.parametrize("some", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_draws_like_a_transposed_tensor(axes: dict[str, int], some: bool) -> None:
    assert_equal_training(Transposed(some), axes, (torch.randn(4, 7, 8),), steps=1)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}])
def test_draws_for_permuted_memory_are_those_of_one_device(axes: dict[str, int]) -> None:
    tokens = torch.randn(4, 16, 8)
    assert_equal_training(Permuted(), axes, (tokens,), steps=1)


class Masked(nn.Module):
    """``native_dropout`` for some ``p`` and ``train``, and a draw after it."""

    def __init__(self, p: float, train: bool | None, both: bool) -> None:
        super().__init__()
        self.linear, self.p, self.draws, self.both = nn.Linear(8, 6), p, train, both

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = torch.native_dropout(self.linear(x), self.p, self.draws)
        x = torch.where(kept, x, 2.0) if self.both else x
        return x * torch.rand_like(x)


@pytest.mark.slow_cases("1.0-*", "0.0-True-*")
@pytest.mark.parametrize("both", [True, False], ids=["mask", "values"])
@pytest.mark.parametrize(
    ("p", "train"),
    [(0.0, True), (0.4, True), (1.0, True), (0.4, None), (1.0, None), (0.4, False), (0.0, False)],
    ids=str,
)
def test_native_dropout_gives_its_mask_and_takes_its_numbers(p: float, train: bool | None, both: bool) -> None:
    """Eager's takes them even where nothing or all is dropped, and only in training; None trains with another gradient."""
    assert_equal_training(Masked(p, train, both), {"tp": 2}, (f(4, 8),), share=1)


def _like(x: torch.Tensor) -> torch.Tensor:
    """Of its shape, and transposed in memory."""
    return torch.empty_like(x.detach().mT, memory_format=torch.contiguous_format).mT


WHOLE: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "of the generator None": lambda h: [
        torch.randn(h.shape, generator=None),
        torch.rand(h.shape, generator=None),
        torch.randint(0, 5, h.shape, generator=None),
        torch.normal(0.5, h.detach().exp(), generator=None),
        h[torch.randperm(h.shape[0], generator=None)],
        _like(h).normal_(0, 1, generator=None),
        torch.bernoulli(h.sigmoid(), generator=None),
        torch.poisson(h.exp(), generator=None),
        torch.multinomial(h.exp(), 8, generator=None),
    ],
    "in place": lambda h: [
        torch.empty(h.shape, dtype=torch.long).random_(0, 4),
        torch.empty(h.shape, dtype=torch.int8).random_(),
        _like(h).random_(1, to=7, generator=None),
        _like(h).random_(9),
        _like(h).exponential_(2.0),
        _like(h).cauchy_(),
        _like(h).log_normal_(),
        _like(h).geometric_(0.3),
        torch.binomial(torch.full_like(h, 5.0), h.detach().sigmoid()),
    ],
    "with gradients": lambda h: [
        dist.Gamma(h.exp(), h.square() + 0.1).rsample(),
        dist.Gamma(h.exp() * 1e-4, 1.0).rsample(),
        dist.Beta(h.exp(), h.exp()).rsample(),
        dist.Dirichlet(h.exp()).rsample(torch.Size([3])).sum(0),
        dist.StudentT(h.exp() + 1).rsample(),
        torch._standard_gamma(h.exp()),
        dist.Binomial(5, logits=h).sample(),
        dist.Dirichlet(h.exp()).sample(),
    ],
}


class Drawing(nn.Module):
    """A sum of draws, between products that are divided."""

    def __init__(self, draws: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        super().__init__()
        self.up, self.down, self.draws = nn.Linear(8, 8), nn.Linear(8, 6), draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        drawn = [h, *self.draws(h), torch.rand_like(h)]
        return self.down(torch.stack([x.to(h.dtype).clamp(-5, 5) * (i + 1) for i, x in enumerate(drawn)]).mean(0))


@pytest.mark.slow_cases("in place", "of the generator None")
@pytest.mark.parametrize("what", WHOLE)
def test_draws_without_a_rule_are_drawn_once(what: str) -> None:
    """The generator is then where one device leaves it: a draw with a rule follows."""
    assert_equal_training(Drawing(WHOLE[what]), {"tp": 2}, (f(4, 8),), steps=2)


def test_a_draw_of_every_rank_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(random, "shared", lambda fn, *args, **kwargs: fn(*args, **kwargs))
    model = Drawing(lambda h: [torch.empty(h.shape).cauchy_()])
    assert not autoshard.verify(model.double(), Mesh({"tp": 2}, hardware="ideal_network"), (f(4, 8),), steps=1).ok

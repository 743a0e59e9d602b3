"""Loops over ``nonzero()``: traced for every place there can be, and nothing where the condition is false."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from capture_models import text
from harness import MESHES, assert_equal_training, ideal
from torch import Tensor, nn

import autoshard
from autoshard.errors import CaptureError
from autoshard.passes.capture.specialization import loops

pytestmark = pytest.mark.usefixtures("captures")

WIDTH, TOKENS, EXPERTS = 8, 12, 4


class Routed(nn.Module):
    """A router, experts in a loop over those that are hit, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.last = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 2 * WIDTH)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 3)
        self.single = nn.ModuleDict({f"expert_{i}": nn.Linear(WIDTH, WIDTH) for i in range(EXPERTS)})

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        return self.last(self.experts(x, weights, chosen)).square().mean()

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError

    def run(self, x: Tensor, expert: int) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.up[expert])), self.down[expert])


def masks(chosen: Tensor, classes: int = EXPERTS) -> Tensor:
    return F.one_hot(chosen, classes).permute(2, 1, 0)


class Tensors(Routed):
    """As most of transformers: the row's first entry is an index; a class that is no expert is left out."""

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = masks(chosen, EXPERTS + 1)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert in hit:
            expert = expert[0]
            if expert == EXPERTS:
                continue
            slot, token = torch.where(mask[expert])
            out.index_add_(0, token, self.run(x[token], expert) * weights[token, slot, None])
        return out


class Unguarded(Routed):
    """As dbrx: nothing keeps the class that is no expert from being run, which would raise an IndexError."""

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out, mask = torch.zeros_like(x), masks(chosen, EXPERTS + 1)
        for expert in mask.sum((-1, -2)).gt(0).nonzero():
            slot, token = torch.where(mask[expert[0]])
            out.index_add_(0, token, self.run(x[token], expert[0]) * weights[token, slot, None])
        return out


class Numbers(Routed):
    """As longcat_flash: numbers, and a question whether there is anything to do."""

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out, mask = torch.zeros_like(x), masks(chosen)
        for row in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero(as_tuple=False):
            number = int(row.item())
            slot, token = torch.where(mask[number])
            if token.numel() == 0:
                continue
            now = self.run(x[token], number) if number > 0 else x[token]
            out.index_add_(0, token, now * weights[token, slot, None])
        return out


class Names(Routed):
    """As switch_transformers: modules by name, a row as an index, in a flat loop as well."""

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out, mask = torch.zeros_like(x), masks(chosen)
        for row in mask.sum((-1, -2)).gt(0).nonzero():
            token = torch.where(mask[row].squeeze(0))[1]
            out.index_add_(0, token, self.single[f"expert_{row[0]}"](x[None, token].flatten(0, 1)))
        for number in mask.sum((-1, -2)).gt(0).nonzero().squeeze(-1):
            out += number * x * weights[:, :1]  # every expert that is hit counts once
            out[number] *= 2.0
        return out


class Listed(Routed):
    """Lists of numbers, flat and in rows, and other spellings of the same rows."""

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out, mask = torch.zeros_like(x), masks(chosen)
        hit = mask.sum((-1, -2)).gt(0)
        for number in hit.nonzero().flatten().tolist():
            slot, token = torch.where(mask[number])
            out.index_add_(0, token, self.run(x[token], number) * weights[token, slot, None])
        for number in torch.where(hit)[0].tolist():
            out[number] *= 2.0
        for number in hit.nonzero()[:, 0]:
            out[:, number] += x[:, 0]
        for place, number in mask[0].gt(0).nonzero().tolist():
            out[number, place] -= 1.0
        return out


MODELS = (Tensors, Unguarded, Numbers, Names, Listed)


@functools.cache
def model_of(kind: type[Routed]) -> Routed:
    """The same for all tests, which leave its weights alone."""
    torch.manual_seed(0)
    return kind().double()


def batch(seed: int, shift: float = 0.0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(TOKENS, WIDTH, dtype=torch.float64) + shift


@pytest.mark.slow_cases(
    "Numbers-tp3", "Tensors-*", "Names-*", "Listed-dp2tp2", "Numbers-dp2tp2", "Listed-tp3", "Unguarded-dp2tp2"
)
@pytest.mark.parametrize("mesh", ["dp2tp2", "tp3"])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_training_equals_eager(kind: type[Routed], mesh: str) -> None:
    axes = {**MESHES, "tp3": {"tp": 3}}[mesh]
    report = assert_equal_training(model_of(kind), axes, (batch(1),), steps=1)
    assert report.plan.cost.flops_per_rank < 0.6 * report.plan.cost.flops


@pytest.mark.slow_cases("Numbers", "Names", "Tensors", "Listed")
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_one_program_serves_batches_that_hit_other_experts(kind: type[Routed]) -> None:
    model = model_of(kind)
    sharded = autoshard.compile(model, ideal({"tp": 2}), (batch(1),))
    hits = set()
    for x in (batch(1), batch(2), batch(3, 5.0), batch(4, -20.0), torch.zeros(TOKENS, WIDTH).double()):
        hits.add(len(model.router(x).topk(2, -1).indices.unique()))
        want, got = model(x), sharded(x)
        assert torch.allclose(got, want, rtol=1e-10), kind
        model.zero_grad(), sharded.zero_grad()
        want.backward(), got.backward()
        for (name, p), q in zip(model.named_parameters(), sharded.parameters(), strict=True):
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            assert torch.allclose(torch.zeros_like(q) if q.grad is None else q.grad, expected, rtol=1e-9), name
    assert len(hits) > 1
    assert len(sharded._executables) == 1


@pytest.mark.slow
def test_what_is_not_taken_back_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the body's constant part counts for experts that are not hit."""
    monkeypatch.setattr(loops._UnrolledLoop, "before", lambda self, call: None)
    with pytest.raises(AssertionError, match="DIVERGES"):
        assert_equal_training(copy.deepcopy(model_of(Names)), {"tp": 2}, (batch(3, 5.0),), steps=1)


def counted(x: Tensor, hit: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, row in enumerate(hit):
        out.index_add_(0, row, number * x[:1])
    return out


def rebound(x: Tensor, hit: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for row in hit:
        out = out + x * row[0]
    return out


def collected(x: Tensor, hit: Tensor) -> Tensor:
    parts: list[Tensor] = []
    for row in hit:
        parts += [x * row[0]]
    return torch.stack(parts).sum(0)


def appended(x: Tensor, hit: Tensor) -> Tensor:
    out, seen = torch.zeros_like(x), []
    for row in hit:
        seen.append(int(row))
        out += x * row[0]
    return out * len(seen)


def in_a_dict(x: Tensor, hit: Tensor) -> Tensor:
    out, seen = torch.zeros_like(x), {0: 0}
    for row in hit:
        seen[int(row)] = 1
        out += x * row[0]
    return out * sum(seen.values())


def on_an_object(x: Tensor, hit: Tensor) -> Tensor:
    out, state = torch.zeros_like(x), types.SimpleNamespace(seen=0)
    for row in hit:
        state.seen += 1
        out += x * row[0]
    return out * state.seen


def left_early(x: Tensor, hit: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for row in hit:
        out += x * row[0]
        if row[0] == 2:
            break
    return out


def comprehended(x: Tensor, hit: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for row in [row for row in hit]:  # noqa: C416
        out.index_add_(0, row, x[:1])
    return out


def kept_list(x: Tensor, hit: Tensor) -> Tensor:
    numbers = hit.flatten().tolist()
    return sum((x * n for n in numbers), torch.zeros_like(x))


def number_of_hits(x: Tensor, hit: Tensor) -> Tensor:
    out, count = torch.zeros_like(x), 0
    for row in hit:
        count += 1
        out += x * row[0]
    return out / count


def drawn(x: Tensor, hit: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for row in hit:
        out += torch.rand_like(x) * row[0]
    return out


REFUSED: dict[Callable[[Tensor, Tensor], Tensor], str] = {
    counted: "neither `for row in tensor:`",
    rebound: "assigns 'out'",
    collected: "assigns 'parts'",
    appended: "assigns 'seen'",
    in_a_dict: r"assigns 'seen\[int\(row\)\]'",
    on_an_object: "assigns 'state.seen'",
    left_early: "ends early",
    number_of_hits: "assigns 'count'",
    comprehended: "neither `for row in tensor:`",
    kept_list: "nor `for row in tensor.tolist",
    drawn: "draws random numbers. Draw them before it",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_bodies_that_hand_on_otherwise_are_refused(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x, (x.sum(0) > 0).nonzero())

    with pytest.raises(CaptureError, match=REFUSED[function]):
        autoshard.plan(Model(), {"tp": 2}, (torch.randn(4, 6),))


def test_text_of_a_body_per_place() -> None:
    class Marked(nn.Module):
        def forward(self, x: Tensor, hit: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for place in hit.nonzero().flatten():
                out.add_(x[place])
            return out

    assert (
        text(Marked(), torch.randn(2), torch.tensor([True, False]))
        == """\
zeros_like = aten.zeros_like.default(x)
select = aten.select.int(x, 0, 0)
add = aten.add.Tensor(zeros_like, select)
select_1 = aten.select.int(hit, 0, 0)
ne = aten.ne.Scalar(select_1, 0)
where = aten.where.self(ne, add, zeros_like)
select_2 = aten.select.int(x, 0, 1)
add_1 = aten.add.Tensor(where, select_2)
select_3 = aten.select.int(hit, 0, 1)
ne_1 = aten.ne.Scalar(select_3, 0)
where_1 = aten.where.self(ne_1, add_1, where)
return where_1"""
    )


class Cast(nn.Module):
    """Numbers of rows that are cast are others: two hundred and sixty are four."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in (x.sum(-1) > 0).nonzero(as_tuple=True)[0].to(torch.uint8):
            out.add_(x * number)
        return out


@pytest.mark.one_graph
def test_numbers_of_rows_that_are_cast_are_no_places() -> None:
    with pytest.raises(CaptureError, match="the program depends on the values of a tensor"):
        autoshard.compile(Cast(), ideal({"tp": 2}), (torch.ones(262, 4),))

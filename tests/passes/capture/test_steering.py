"""Integers of the inputs that decide about the program: answers from the example, checks, programs for other answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_models import text
from harness import assert_equal_training, ideal
from torch import Tensor, nn

import autoshard


class Segments(nn.Module):
    """One weight per segment of the rows of x, as in heterogeneous graphs; the segments end at ``ends``."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(6, 8)) for _ in range(3))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 8)
        start = 0
        for weight, end in zip(self.weights, ends, strict=True):
            out[start:end] = x[start:end] @ weight
            start = end
        return out


class Masked(nn.Module):
    """Rows of a padded batch, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = self.first(x)[mask]
        rows = rows.view(2, -1, 8) if len(rows) > 5 else rows.view(1, -1, 8)
        return self.second(F.relu(rows))


class Symmetric(Masked):
    """A question about a graph's edges."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h.relu() if torch.equal(edges[0].sort()[0], edges[1].sort()[0]) else h.tanh())


class Counted(Masked):
    """A length decides, of a tensor that nobody reads."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h.relu() if len(h[mask]) > 5 else h.tanh())


class Scaled(Masked):
    """A write into a view as long as an integer says."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        h = self.first(x).relu()
        h.narrow(0, 0, n).mul_(3)
        return self.second(h)


class Places(Masked):
    """How many places a mask has, told by views of them."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        (places,) = mask.nonzero(as_tuple=True)
        rows = self.first(x)[places].view(len(places), 2, 4)
        return self.second(rows.flatten(1) + x.new_zeros(len(torch.where(mask)[0]), 8))


class Padded(Masked):
    """Pieces of lengths that a tensor says, padded: only what follows the trace compares their lengths."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        pieces = self.first(x).split(lengths.tolist())
        return self.second(nn.utils.rnn.pad_sequence(list(pieces), batch_first=True))


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, Tensor]] = {
    "counted": (Counted, torch.arange(9) % 3 > 0, torch.arange(9) % 3 == 0),
    "scaled": (Scaled, torch.tensor(4), torch.tensor(7)),
    "segments": (Segments, torch.tensor([2, 5, 9]), torch.tensor([3, 3, 9])),
    "places": (Places, torch.arange(9) % 3 > 0, torch.arange(9) % 3 == 0),
    "padded": (Padded, torch.tensor([2, 6, 1]), torch.tensor([4, 4, 1])),
    "masked": (Masked, torch.arange(9) % 3 > 0, torch.arange(9) % 3 == 0),
    "symmetric": (Symmetric, torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0, 1], [1, 1]])),
}


@pytest.mark.slow_cases("padded-axes5", "masked-axes[12]", "places-axes4", "segments-axes0")
@pytest.mark.parametrize(
    ("case", "axes"),
    [
        ("segments", {"tp": 3}),
        ("masked", {"tp": 3}),
        ("masked", {"dp": 2, "tp": 2}),
        ("symmetric", {"tp": 2}),
        ("places", {"dp": 2, "tp": 2}),
        ("padded", {"dp": 2, "tp": 2}),
    ],
)
def test_the_integers_of_the_example_decide(case: str, axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    make, given, _ = CASES[case]
    report = assert_equal_training(make(), axes, (torch.randn(9, 6), given), steps=1)
    assert report.plan.cost.flops_per_rank < 0.7 * report.plan.cost.flops


@pytest.mark.slow_cases("symmetric", "padded", "counted", "segments", "masked", "places")
@pytest.mark.parametrize("case", CASES)
def test_other_integers_get_a_program_of_their_own(case: str) -> None:
    torch.manual_seed(0)
    make, *inputs = CASES[case]
    model, x = make(), torch.randn(9, 6)
    expected = [model(x, given) for given in inputs]
    sharded = autoshard.compile(model, {"tp": 2}, (x, inputs[0]))
    for _ in range(2):
        for given, wanted in zip(inputs, expected, strict=True):
            torch.testing.assert_close(sharded(x, given), wanted)
    open_lengths = ("scaled", "padded") if torch.__version__ >= "2.14" else ("scaled",)
    assert len(sharded.programs) == (1 if case in open_lengths else 2)


class OfChosenRows(Masked):
    """The loss of a graph's nodes that are trained on, and of rows and columns that integers choose."""

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor, n: Tensor) -> Tensor:
        logits = self.second(self.first(x).relu())
        loss = F.cross_entropy(logits[mask], labels[mask]) + F.nll_loss(logits[~mask].log_softmax(-1), labels[~mask])
        return loss + self.first(x)[: int(n)].square().sum() + logits[0, labels[1]]


@pytest.mark.slow_cases("axes0")
@pytest.mark.parametrize("axes", [{"tp": 3}, {"dp": 2, "tp": 2}])
def test_losses_of_chosen_rows_serve_all_choices(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x, labels = OfChosenRows().double(), torch.randn(9, 6).double(), torch.arange(9) % 4
    sharded = autoshard.compile(model, ideal(axes), (x, torch.arange(9) % 3 > 0, labels, torch.tensor(4)))
    for mask, n in ((torch.arange(9) % 3 > 0, 4), (torch.arange(9) > 6, 7), (torch.arange(9) < 8, 1)):
        given = (x, mask, labels.roll(n), torch.tensor(n))
        model.zero_grad()
        sharded.zero_grad()
        expected, found = model(*given), sharded(*given)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
        expected.backward()
        found.backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(sharded.full_gradients()[name], p.grad, rtol=1e-9, atol=1e-12)
    assert len(sharded.programs) == 1


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ >= "2.14", reason="torch 2.14 pads open lengths without a question")
def test_a_question_after_the_trace_is_refused_with_what_asked_it() -> None:
    class Chosen(Masked):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x) if torch.compiler.is_compiling() else self.first(x).relu()
            return self.second(nn.utils.rnn.pad_sequence([h[x[:, 0] > 0], h[x[:, 1] > 0]]))

    with pytest.raises(autoshard.CaptureError, match="depends on the values of a tensor") as refused:
        autoshard.plan(Chosen(), {"tp": 2}, (torch.randn(9, 6),))
    error, causes = refused.value.__cause__, []
    while error is not None and len(causes) < 9:
        causes.append(type(error).__name__)
        error = error.__cause__
    assert "GuardOnDataDependentSymNode" in causes
    assert len(causes) < 9, "the chain of causes ends"


def test_draws_are_those_of_one_device_when_a_program_stops_after_them() -> None:
    class Dropped(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.5), mask)

    model, x, (_, *inputs) = Dropped(), torch.randn(9, 6), CASES["masked"]
    sharded = autoshard.compile(model, {"tp": 2}, (x, inputs[0]))
    torch.manual_seed(1)
    expected = model(x, inputs[1])
    torch.manual_seed(1)
    torch.testing.assert_close(sharded(x, inputs[1]), expected)


def of_floats(x: Tensor, n: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


def of_draws(x: Tensor, n: Tensor) -> Tensor:
    return x * 2 if torch.randint(0, 9, (3,)).sum() > 9 else x * 3


def of_a_view(x: Tensor, n: Tensor) -> Tensor:
    """The value that decides is read through a view that was made before a number with a fraction was written."""
    seen = torch.ones(6)
    first = seen[:1]
    seen[0] = x.sum().detach()
    return x * 2 if first.sum() > 0 else x * 3


def of_a_cast(x: Tensor, n: Tensor) -> Tensor:
    """A cast makes memory for its result before it is known what comes in."""
    for _ in range(int((x.sum() * 0 + 3).long().item())):
        x = x.tanh()
    return x


@pytest.mark.one_graph
@pytest.mark.slow_cases("of_a_view")
@pytest.mark.parametrize("decide", [of_floats, of_draws, of_a_view, of_a_cast], ids=lambda f: f.__name__)
def test_fractions_and_draws_do_not_steer(decide: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Deciding(nn.Linear):
        def forward(self, x: Tensor, n: Tensor) -> Any:  # type: ignore[override]
            return super().forward(decide(x, n))

    with pytest.raises(autoshard.AutoshardError, match=r"test_steering.*depends on the values of a tensor"):
        autoshard.compile(Deciding(6, 4), {"tp": 2}, (torch.randn(3, 6), torch.tensor(3)))


def test_a_log_says_why_another_program_is_compiled_and_for_what(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autoshard.programs")
    sharded = autoshard.compile(nn.Linear(8, 4), ideal({"tp": 2}), (torch.randn(4, 8),), dynamic=True)
    sharded(torch.randn(7, 8))
    assert [r for r in caplog.records if r.name == "autoshard.programs"] == []
    sharded(torch.randn(1, 8))
    why, another = [r.getMessage() for r in caplog.records if r.name == "autoshard.programs"]
    assert why == "a program does not fit this call: batch >= 2 does not hold for batch = 1"
    assert another == "another program is compiled, for other shapes, dtypes or constants of the arguments"


def test_text_of_a_length_that_the_example_fixes() -> None:
    assert (
        text(Masked(), torch.randn(9, 6), CASES["masked"][1])
        == """\
linear = aten.linear.default(x, p_first_weight, p_first_bias)
index = aten.index.Tensor(linear, [mask])
exactly = autoshard.exactly.default(index, [6, 8], 'test_steering.py')
view = aten.reshape.default(exactly, [2, -1, 8])
relu = aten.relu.default(view)
linear_1 = aten.linear.default(relu, p_second_weight, p_second_bias)
return linear_1"""
    )


def test_text_of_an_integer_that_decides() -> None:
    class Part(nn.Module):
        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            return x.relu() if n > 3 else x

    assert (
        text(Part(), torch.randn(9), torch.tensor(4))
        == """\
gt = aten.gt.Scalar(n, 3)
eq = aten.eq.Scalar(gt, True)
all_1 = aten.all.default(eq)
_ = aten._assert_async.msg(all_1, 'test_steering.py: the program was compiled for inputs with other integers')
relu = aten.relu.default(x)
return relu"""
    )

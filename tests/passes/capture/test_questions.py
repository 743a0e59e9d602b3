"""Questions about a tensor's values: answered where the answer does not matter, and refused where it does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from capture_models import text
from harness import MESHES, assert_equal_training
from torch import Tensor, nn

import autoshard
from autoshard.module.programs.executable import Executable
from autoshard.passes.capture.export import capture
from autoshard.passes.capture.translate import decompose


class Asking(nn.Module):
    """A linear layer between questions."""

    def __init__(self, ask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 12)
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.ask(x)).square().mean()


def kernel(x: Tensor) -> Tensor:
    """Which of two kernels, of which one is not installed; PyG asks so."""
    fast = bool(x.abs().sum() > 3)
    return x.neg() if fast and not hasattr(torch, "relu") else x.relu()


def checked(x: Tensor) -> Tensor:
    """Checks of the input: by a tensor, by a number, by an assertion."""
    if not torch.isfinite(x).all():
        raise ValueError("not finite")
    if int((x > 0).sum()) > 1000:
        raise ValueError("too many")
    assert (x < 100).all()
    return x.relu()


def equal_branches(x: Tensor) -> Tensor:
    """Both branches do the same."""
    return x.relu() if x.sum() > 0 else torch.relu(x)


HARMLESS = [kernel, checked, equal_branches]


@pytest.mark.slow_cases("checked")
@pytest.mark.parametrize("ask", HARMLESS, ids=lambda f: f.__name__)
def test_questions_whose_answer_does_not_matter(ask: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    assert_equal_training(Asking(ask), MESHES["tp2"], (torch.randn(6, 8),), share=1.0, steps=1)


def factor(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


def only_together(x: Tensor) -> Tensor:
    """One yes does nothing, two do."""
    first, second = bool(x.sum() > 0), bool(x.prod() > 0)
    return x * 2 if first and second else x


def constant(x: Tensor) -> Tensor:
    return x * torch.tensor([2.0 if x.sum() > 0 else 3.0])


def precision(x: Tensor) -> Tensor:
    return (x.float() if x.sum() > 0 else x.double()).to(x.dtype)


def loop(x: Tensor) -> Tensor:
    while not x.sum() > 3:
        x = x + 1
    return x


def many(x: Tensor) -> Tensor:
    """More sequences of answers than are traced."""
    for row in x.unbind(0):
        bool(row.sum() > 0)
    return x


def error_of_torch(x: Tensor) -> Tensor:
    """An error that the model does not raise itself might be the trace's own."""
    return x.view(7) if x.sum() > 0 else x


MATTERS = [factor, only_together, constant, precision, loop, many, error_of_torch]


@pytest.mark.slow_cases("many", "precision")
@pytest.mark.parametrize("ask", MATTERS, ids=lambda f: f.__name__)
def test_questions_whose_answer_matters_are_refused(ask: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(autoshard.CaptureError, match=r"test_questions.py:\d+\): the program depends on the values"):
        capture(Asking(ask), (torch.randn(6, 8),))


def test_pythons_own_answers_are_back_after_the_trace() -> None:
    before = torch.SymBool.__bool__
    capture(Asking(checked), (torch.randn(6, 8),))
    assert torch.SymBool.__bool__ is before


def test_a_program_with_sizes_of_the_data_is_traced_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a size, a number or the places of a mask has nothing to decompose: no rounds for it."""
    rounds = Mock(wraps=decompose.decompose_program)
    monkeypatch.setattr(decompose, "decompose_program", rounds)
    rows = Asking(lambda x: x[torch.where(x.sum(-1) > 0)[0]] * int((x > 0).sum()))
    capture(rows, (torch.randn(6, 8),))
    assert rounds.call_count == 1


@pytest.mark.slow
def test_a_tensor_made_of_open_numbers_is_not_known() -> None:
    def of_a_count(x: Tensor) -> Tensor:
        count = torch.tensor([int((x > 0).sum()), 3])
        fast = bool(count.sum() > 3)
        return x.neg() if fast and not hasattr(torch, "relu") else x.relu()

    torch.manual_seed(0)
    assert_equal_training(Asking(of_a_count), MESHES["tp2"], (torch.randn(6, 8),), share=1.0, steps=1)


def test_text_is_that_without_the_question() -> None:
    assert (
        text(Asking(kernel), torch.randn(6, 8))
        == """\
relu = aten.relu.default(x)
linear = aten.linear.default(relu, p_linear_weight, p_linear_bias)
square = aten.square.default(linear)
mean = aten.mean.default(square)
return mean"""
    )


class DrawsAndAsks(nn.Module):
    """Draws before it asks for an integer of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = torch.dropout(self.linear(x), 0.5, True)
        return (x * (2 if ids.max() > 1 else 3)).sum()


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("remembers", [True, False])
def test_a_program_that_stops_has_drawn_nothing(remembers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that takes its place draws what eager draws; not where the generators are left as they are (control)."""
    if not remembers:
        monkeypatch.setattr(Executable, "_stops", False)
    model, x, (low, high) = DrawsAndAsks().double(), torch.randn(4, 6).double(), torch.tensor([[0, 1], [1, 2]])
    sharded = autoshard.compile(copy.deepcopy(model), autoshard.Mesh({"dp": 2}), (x, low))
    found = []
    for m in (sharded, model):
        torch.manual_seed(1)
        found.append((float(m(x, high).detach()), torch.get_rng_state()))
    (ours, state), (wanted, after) = found
    assert len(sharded.programs) == 2
    assert (abs(ours - wanted) <= 1e-12 * abs(wanted) and torch.equal(state, after)) == remembers

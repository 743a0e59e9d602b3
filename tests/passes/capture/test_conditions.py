"""``if`` on a tensor that guards a raise or looks for overflow: the other branch is compiled, and checked at run time."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from capture_models import asserts, text
from harness import assert_equal_training, ideal
from torch import nn

import autoshard
from autoshard.errors import CaptureError
from autoshard.passes.capture.export import capture

X = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5)


class Checked(nn.Module):
    """A linear layer whose result goes through ``check``, a function of a tensor that may raise or replace it."""

    def __init__(self, check: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6, dtype=torch.float64)
        self.check = check

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        replaced = self.check(y)
        return (y if replaced is None else replaced) * 2


def raises(y: torch.Tensor) -> None:
    if y is not None and y.max() >= 100:
        raise ValueError(f"too large: {y.shape}")


def raises_unless(y: torch.Tensor) -> None:
    if y.requires_grad and not ((y < 100).all() and y.shape[0] > 1):
        message = "too large"
        raise ValueError(message)


def clamps(y: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(y).all():
        y = y.clamp(-1, 1)
    return y


def clamps_either(y: torch.Tensor) -> torch.Tensor:
    if torch.isinf(y).any() or torch.isnan(y).any():
        y = y.clamp(-1, 1)
    return y


def distribution(y: torch.Tensor) -> torch.Tensor:
    checked = torch.distributions.Normal(y, y.exp(), validate_args=True)  # dynamo turns the default off
    return checked.log_prob(torch.zeros(()).double())


FINITE = {"clamps": clamps, "clamps either": clamps_either, "distribution": distribution}
SMALL = {"raises": raises, "raises unless": raises_unless, "asserts": asserts}


@pytest.mark.slow_cases("raises", "clamps either", "distribution")
@pytest.mark.parametrize("name", FINITE | SMALL)
def test_equal_where_the_check_passes_and_an_error_where_not(name: str) -> None:
    model = Checked((FINITE | SMALL)[name])
    report = assert_equal_training(model, {"tp": 2}, (X,), steps=1, share=1.01)
    assert report.plan.notes == ()
    sharded = autoshard.compile(model, ideal({"tp": 3}), (X,), strict=True)
    assert torch.allclose(sharded(X), model(X))
    with pytest.raises(RuntimeError, match=r"\.py:\d+: .*(infinite or NaN|check of its values fails)"):
        sharded(X * (float("inf") if name in FINITE else 1e6))


def some_positive(y: torch.Tensor) -> torch.Tensor:
    rows = (y[:, 0] > -50).nonzero()
    return y + 1 if rows.size(0) > 0 else y


def checked_by_torch(y: torch.Tensor) -> None:
    torch._check_tensor_all(y > -50, lambda: "too negative")


def asserted_number(y: torch.Tensor) -> None:
    if not (y > -50).all().item():
        raise ValueError


@pytest.mark.slow_cases("some_positive")
@pytest.mark.parametrize("check", [some_positive, checked_by_torch, asserted_number])
def test_lengths_and_numbers(check: Any) -> None:
    model = Checked(check)
    assert_equal_training(model, {"tp": 3}, (X,), steps=1)
    sharded = autoshard.compile(model, ideal({"tp": 2}), (X,))
    with torch.no_grad():
        sharded.get_parameter("linear.bias").fill_(-1000)
    with pytest.raises(RuntimeError, match=r"too small|too negative|check of its values fails"):
        sharded(X)


def two_ways(y: torch.Tensor) -> torch.Tensor:
    if y.sum() > 0:
        return y
    return -y


def mixed(y: torch.Tensor) -> torch.Tensor:
    if torch.isfinite(y).all() and y.sum() > 0:
        return y
    return y * 2


@pytest.mark.slow_cases("mixed")
@pytest.mark.parametrize("check", [two_ways, mixed])
def test_other_conditions_are_refused(check: Any) -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Checked(check), (X,))


def test_requires_grad_of_an_intermediate_tensor_changes_nothing() -> None:
    class FirstLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x[:, None]
            x.requires_grad = True  # for checkpoints, in speech encoders
            return self.linear(x)

    assert_equal_training(FirstLayer(), {"tp": 3}, (X,), steps=1)


def test_a_draw_that_decides_nothing() -> None:
    def dropped(y: torch.Tensor) -> torch.Tensor:
        for rate, draw in ((0.0, random.uniform), (0.0, np.random.uniform), (1.0, random.uniform)):
            if draw(0, 1) < rate:
                y = y * 2
        return y + 1 if random.random() >= 0 else y

    state = random.getstate()
    assert_equal_training(Checked(dropped), {"tp": 2}, (X,), steps=1)
    random.setstate(state)
    with pytest.raises(CaptureError, match="Python's random generator"):
        capture(Checked(lambda y: y * 2 if random.random() < 0.5 else y), (X,))


class Strided(nn.Module):
    """A convolution whose padding is in buffers, and a mask that is made in the forward and looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(5, 6, 3)
        self.padding = nn.Buffer(torch.tensor(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(x)
        mask[mask == 2] = -1
        if (mask < 0).flatten().any().item() or self.padding // 2 <= 0:
            return x
        missing = torch.ceil(x.shape[-1] / self.padding).to(torch.int64) - 1
        x = self.conv(torch.nn.functional.pad(x, (self.padding, missing)))
        return x[..., self.padding // 2 : x.shape[-1] - self.padding // 2]


@pytest.mark.slow_cases("axes0")
@pytest.mark.parametrize("axes", [{"tp": 3}, {"dp": 2, "tp": 2}])
def test_values_that_do_not_depend_on_the_input(axes: dict[str, int]) -> None:
    model = Strided()
    report = assert_equal_training(model, axes, (torch.randn(4, 5, 9),), steps=1, share=1.6)
    assert not any("depends on the data" in note for note in report.plan.notes)
    sharded = autoshard.compile(copy.deepcopy(model), ideal(axes), (torch.randn(4, 5, 9).double(),))
    x = torch.randn(4, 5, 9).double()
    for padding in (1, 2):
        for module in (model, sharded):
            module.get_buffer("padding").fill_(padding)
        torch.testing.assert_close(sharded(x), model(x), rtol=1e-9, atol=1e-12)
    assert len(sharded.programs) == 2


def test_a_value_that_was_written_is_not_known() -> None:
    def written(y: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(6, dtype=torch.float64)
        mask[0] = y.sum().detach()
        return y * 2 if mask.sum() > 0 else y

    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Checked(written), (X,))


def test_text_of_a_test_for_infinities() -> None:
    assert (
        text(Checked(clamps), X)
        == """\
linear = aten.linear.default(x, p_linear_weight, p_linear_bias)
isfinite = aten.isfinite.default(linear)
all_1 = aten.all.default(isfinite)
_ = aten._assert_async.msg(all_1, 'test_conditions.py: a number is infinite or NaN, but the compiled program is for finite \
numbers: if not torch.isfinite(y).all():')
mul = aten.mul.Tensor(linear, 2)
return mul"""
    )


def test_text_of_a_length_that_is_asked_for() -> None:
    assert (
        text(Checked(some_positive), X)
        == """\
linear = aten.linear.default(x, p_linear_weight, p_linear_bias)
select = aten.select.int(linear, 1, 0)
gt = aten.gt.Scalar(select, -50)
nonzero = aten.nonzero.default(gt)
sym_size_int = aten.sym_size.int(nonzero, 0)
gt_2 = aten.gt.default(sym_size_int, 0)
sym_ite = aten.Int.Scalar(gt_2)
scalar_tensor = aten.scalar_tensor.default(sym_ite, dtype=int64)
_ = aten._assert_async.msg(scalar_tensor, 'test_conditions.py: a length that depends on the data is too small for the \
compiled program: return y + 1 if rows.size(0) > 0 else y')
add = aten.add.Tensor(linear, 1)
mul = aten.mul.Tensor(add, 2)
return mul"""
    )


def test_text_of_a_buffer_that_steers() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Buffer(torch.tensor(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[: self.part].relu() if torch.ones(3).sum() > self.part else x

    assert (
        text(Half(), X)
        == """\
ones = aten.ones.default([3])
sum_1 = aten.sum.default(ones)
gt = aten.gt.Tensor(sum_1, b_part)
eq = aten.eq.Scalar(gt, True)
all_1 = aten.all.default(eq)
_ = aten._assert_async.msg(all_1, 'test_conditions.py: a buffer of the model that controls the forward has changed')
eq_1 = aten.eq.Scalar(b_part, 2)
all_2 = aten.all.default(eq_1)
_ = aten._assert_async.msg(all_2, 'test_conditions.py: a buffer of the model that controls the forward has changed')
slice_1 = aten.slice.Tensor(x, 0, 0, 2)
relu = aten.relu.default(slice_1)
return relu"""
    )


def test_an_operator_that_writes_is_a_write() -> None:
    def written(y: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(6, dtype=torch.bool)
        mask |= y[0] > 0
        return y * 2 if mask.any() else y

    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Checked(written), (X,))

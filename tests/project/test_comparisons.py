"""What tests compare with sees what is no number, and what is not there."""

from __future__ import annotations

import math
from collections.abc import Callable

import again_cases
import capture_models
import largest_error
import microbatch_cases
import pytest
import ring_steps
import torch

ONE, NONE = torch.ones(2), torch.tensor([1.0, torch.nan])


@pytest.mark.parametrize("far", [microbatch_cases.far, again_cases.far, capture_models.distance])
def test_what_is_no_number_is_far(far: Callable[..., float]) -> None:
    assert max(0.0, far(NONE, ONE)) == math.inf  # whatever stands before it
    assert far(ONE, ONE) == 0


@pytest.mark.parametrize("error", [ring_steps.error, largest_error.error])
def test_errors_of_several_tensors(error: Callable[..., float]) -> None:
    assert not error([ONE, ONE, ONE], [ONE, NONE, ONE]) <= 1
    assert error([ONE, ONE], [ONE, ONE + 1]) == 1


def test_same_numbers_that_are_none() -> None:
    assert capture_models.distance(NONE, NONE.clone()) == 0


def test_tensors_of_other_names_or_shapes_are_told() -> None:
    assert microbatch_cases.farthest({"a": ONE}, {"a": ONE}) == 0
    for found in ({}, {"a": ONE, "b": ONE}, {"b": ONE}, {"a": ONE[:1]}):
        with pytest.raises(AssertionError):
            microbatch_cases.farthest(found, {"a": ONE})

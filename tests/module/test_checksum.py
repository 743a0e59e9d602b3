"""The checksum of a tensor sees one other number anywhere, an exchange, and signs; not how the tensor lies in memory."""

from __future__ import annotations

import copy

import pytest
import torch

from autoshard.module.ranks.rank_calls import (
    CALLS_BETWEEN_CHECKS,
    FIRST_CALLS,
    SAMPLED_ELEMENTS,
    InputComparisons,
    checksum,
)

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint32),
)
SIZES = (1, 2, 3, 7, 8, 4095, 4096, 4097, 3 * 4096 + 5, (1 << 20) + 3)


def number(x: torch.Tensor) -> int:
    return int(checksum(x))


def sample(dtype: torch.dtype, n: int) -> torch.Tensor:
    x = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(n))
    return x.to(torch.float32).to(dtype) if dtype.is_floating_point else x.to(dtype)


@pytest.mark.slow_cases("torch.complex128", "torch.float32")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_other_number_is_seen(dtype: torch.dtype) -> None:
    for n in SIZES:
        x = sample(dtype, n)
        for i in {0, n // 2, n - 1}:
            other = x.clone()
            other[i] = 0 if x[i].to(torch.complex64).real else 1
            assert number(other) != number(x), (n, i)
        assert number(x.clone()) == number(x)


def test_numbers_that_change_places_or_signs_are_seen() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        x = torch.arange(1, 8_193).to(dtype)
        for i, j in ((0, 1), (1, 4097), (17, 8191), (0, 4096)):
            swapped, signs = x.clone(), x.clone()
            swapped[[i, j]] = x[[j, i]]
            signs[[i, j]] *= -1
            if x[i] != x[j]:
                assert number(swapped) != number(x), (dtype, i, j)
            assert number(signs) != number(x), (dtype, i, j)
        for part in (slice(None), slice(0, 2), slice(0, 4096), slice(0, None, 2), slice(1, None, 4)):
            other = x.clone()
            other[part] *= -1
            assert number(other) != number(x), (dtype, part)


def test_memory_does_not_matter() -> None:
    x = torch.randn(33, 65, dtype=torch.float32)
    assert number(x.t()) == number(x.t().contiguous())
    assert number(x[1:, 3:]) == number(x[1:, 3:].clone())
    z = torch.randn(5, 7, dtype=torch.complex64)
    assert number(z.conj()) == number(z.conj().resolve_conj()) != number(z)
    assert number(torch.empty(0)) == number(torch.empty(3, device="meta")) == 0


def test_a_sample_sees_other_batches_where_they_are_evenly_other() -> None:
    """Also where rows begin alike, with a power of two of columns; it does not look at all numbers."""
    x = torch.randint(0, 100, (1024, 512), generator=torch.Generator().manual_seed(0))
    x[:, 0] = 1
    other = torch.cat([x[:, :1], x[:, 1:].roll(1, 0)], 1)
    assert number(x) != number(other)
    assert int(checksum(x, SAMPLED_ELEMENTS)) != int(checksum(other, SAMPLED_ELEMENTS))
    assert (
        int(checksum(x.t(), SAMPLED_ELEMENTS))
        == int(checksum(x.t().contiguous(), SAMPLED_ELEMENTS))
        != int(checksum(x, SAMPLED_ELEMENTS))
    )
    one = x.clone()
    one[3, 3] += 1
    assert int(checksum(x, SAMPLED_ELEMENTS)) == int(checksum(one, SAMPLED_ELEMENTS))
    assert int(checksum(x[:4], SAMPLED_ELEMENTS)) != int(checksum(one[:4], SAMPLED_ELEMENTS))


def test_inputs_are_compared_whole_at_first_and_sampled_for_ever() -> None:
    training, evaluation, calls = object(), object(), InputComparisons()
    assert calls.due(None, 0) is None
    assert [calls.due(training, 0) for _ in range(FIRST_CALLS)] == [None] * FIRST_CALLS
    later = [
        number
        for number in range(FIRST_CALLS + 1, 5 * CALLS_BETWEEN_CHECKS)
        if calls.due(training, 0) == SAMPLED_ELEMENTS
    ]
    assert later == [16, 32, 64, 128, 192, 256]
    assert [calls.due(evaluation, 0) for _ in range(FIRST_CALLS + 2)] == [None] * FIRST_CALLS + [0, 0]
    for program in (training, evaluation):  # neither is at a number of its own
        calls.due(program, 0)
        assert [calls.due(program, 0) for _ in range(2)] == [0, 0]
    assert calls.due(training, 0) == SAMPLED_ELEMENTS
    assert copy.deepcopy(calls).due(training, 0) is None
    assert calls.due(training, 1) is None  # a rank that failed may not have come so far

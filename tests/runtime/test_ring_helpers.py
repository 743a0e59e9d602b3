"""Rings with helpers: early ranks compute for late ones what these see of their keys."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from ring_steps import HEADS, WIDTH, B, error, run
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard import runtime
from autoshard.runtime.attention import balanced_ring, tile
from autoshard.runtime.attention.ring_geometry import balanced_pairs_per_rank, helper_shares, rank_spans


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_helpers_make_work_even(ranks: int) -> None:
    """In every step, too; and every pair that a query sees is computed once."""
    for length in (64 * ranks, 64 * ranks + 3):
        found, cut = balanced_pairs_per_rank(length, (ranks,)), rank_spans(length, (ranks,), False)
        assert sum(found) == length * (length + 1) / 2
        assert max(found) * ranks / sum(found) <= 1.05
        seen = torch.zeros(length, length, dtype=torch.int64)
        for ((start, size),) in cut:
            seen[start : start + size, start : start + size] += torch.ones(size, size, dtype=torch.int64).tril()
        for step in helper_shares(cut):
            pairs = [share.pairs for share in step]
            assert max(pairs) * ranks / sum(pairs) <= 1.05
            for (row, rows), (column, columns), _ in step:
                seen[row : row + rows, column : column + columns] += 1
        assert torch.equal(seen, torch.ones_like(seen).tril())


def test_a_helper_that_says_less_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: log-sum-exps of zero come back."""
    right = balanced_ring._log_sums_as_bits
    monkeypatch.setattr(balanced_ring, "_log_sums_as_bits", lambda sums, dtype: right(torch.zeros_like(sums), dtype))
    theirs, ours, _ = run(4, 16, 16, causal=True, helpers=True)
    assert error(theirs, ours) > 0.1


def test_half_precision_loses_as_much_as_one_device() -> None:
    """Of log-sum-exps no digit, though they travel among elements of the operands' type."""
    sums = torch.randn(2, 3, 5)
    assert torch.equal(
        balanced_ring._log_sums_from_bits(balanced_ring._log_sums_as_bits(sums, torch.bfloat16), torch.float32), sums
    )
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(1, 2, 64, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    given = [x.detach().bfloat16().requires_grad_() for x in exact]
    expected, theirs = (F.scaled_dot_product_attention(*xs, is_causal=True) for xs in (exact, given))
    parts = zip(*(x.chunk(4, -2) for x in given), strict=True)
    world = runtime.World({"cp": 4})

    def one(*xs: torch.Tensor) -> torch.Tensor:
        return runtime.ring_attention(*xs, runtime.AttentionSpec(64, 64, "cp", after=0, helpers=True))

    ours = torch.cat(world.run(one, list(parts)), -2)
    found = [(x, *torch.autograd.grad(x.sum(), of)) for x, of in ((expected, exact), (theirs, given), (ours, given))]
    for right, one_device, ring in zip(*found, strict=True):
        assert (ring - right).abs().max() < 1.5 * (one_device - right).abs().max()


def test_bytes_with_helpers() -> None:
    """The longest message of every step: keys and values there, a result back; backward they are three of queries and two."""
    sums = 1 / WIDTH
    for ranks, forward, backward in ((3, 3 + sums, 5 + sums), (4, 5.5 + 1.5 * sums, 9 + sums)):
        log, sent = run(ranks, 4 * ranks, 4 * ranks, causal=True, helpers=True)[2], Counter[str]()
        for e in log:
            assert (e.kind, e.axes) == ("permute", ("cp",))
            sent[e.phase] += e.bytes
        share = B * HEADS * 4 * WIDTH * 8
        assert sent == {"forward": forward * share, "backward": backward * share}


@pytest.mark.parametrize(
    ("queries", "keys", "width", "dtype", "causal", "fused"),
    [
        (8, 8, 64, torch.bfloat16, True, True),
        (8, 4, 64, torch.bfloat16, True, False),
        (8, 4, 64, torch.bfloat16, False, True),
        (8, 8, 20, torch.float16, False, False),
        (8, 8, 264, torch.float16, False, False),
        (8, 8, 64, torch.float32, False, False),
    ],
)
def test_tiles_that_the_kernel_of_gpus_takes(
    queries: int, keys: int, width: int, dtype: torch.dtype, causal: bool, fused: bool
) -> None:
    """Its causal mask counts from the last row, so that it is right for squares alone."""
    with FakeTensorMode():
        query = torch.empty(1, 4, queries, width, dtype=dtype, device="cuda")
        key = torch.empty(1, 2, keys, width, dtype=dtype, device="cuda")
        assert tile._is_fused(query, key, key, tile.Masking(causal)) == fused

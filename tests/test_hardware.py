"""What a device takes for products by dtype and by how rows lie in memory."""

from __future__ import annotations

import pytest
import torch

from autoshard.hardware import PRESETS


def test_rows_that_are_no_whole_loads_slow_products_of_16_bits() -> None:
    """GPT-2's 50257 classes; the gradients of such a product are slow, too. Decoding one row is not."""
    h = PRESETS["h100"]
    slow, fast = (h.is_aligned(2.0 * 1024 * 768 * n, (1024, n), torch.bfloat16) for n in (50257, 50304))
    assert (slow, fast) == (False, True)
    assert h.is_aligned(2.0 * 768 * 50304, (1, 50304), torch.bfloat16)
    assert h.is_aligned(2.0 * 1024 * 768 * 50257, (1024, 50257), torch.float32)
    taken = [h.product_seconds(1e12, (1024, 50304), torch.bfloat16, aligned=aligned) for aligned in (True, False)]
    assert taken[1] == pytest.approx(taken[0] / h.unaligned)


def test_float32_is_slow_unless_it_may_be_tf32() -> None:
    h = PRESETS["h100"]
    try:
        assert h.peak(torch.float32) == h.peak(torch.float64) == 66.9e12
        torch.set_float32_matmul_precision("high")
        assert h.peak(torch.float32) == 494.7e12
    finally:
        torch.set_float32_matmul_precision("highest")

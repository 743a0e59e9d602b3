"""Ring attention, and products that travel: worlds of 2, 3 and 4 gloo processes against the unsharded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import world


@pytest.mark.parametrize(
    ("ranks", "checks"),
    [
        (2, ("train_pieces", "products_travel", "collectives_overlap")),
        pytest.param(2, ("train_folded", "hops_overlap"), marks=pytest.mark.slow),
        pytest.param(2, ("train_llama", "train_hf_llama"), marks=pytest.mark.slow),
        pytest.param(
            3, ("train_llama", "products_travel"), marks=pytest.mark.slow
        ),  # uneven; the middle rank is its own mirror
        pytest.param(
            4,
            ("train_llama", "train_pieces", "train_folded", "products_travel", "hops_overlap", "collectives_overlap"),
            marks=pytest.mark.slow,
        ),
        pytest.param(2, ("train_gpt", "train_spelled"), marks=pytest.mark.slow),
    ],
)
def test_as_one_device(ranks: int, checks: tuple[str, ...], tmp_path: Path) -> None:
    outcome = json.loads(world.start("ring_worker.py", ranks, tmp_path, ",".join(checks), timeout=280))
    assert outcome == dict.fromkeys(checks, "")

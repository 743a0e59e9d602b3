"""Exported torch source under torch.distributed: gloo processes against the plan and one device, in float64."""

from __future__ import annotations

from pathlib import Path

import exports_worker
import pytest
import world


@pytest.mark.slow_cases("zero1", "recomputed", "selective", "megatron", "ddp", "fsdp_megatron", "fsdp_megatron_sp")
@pytest.mark.parametrize("name", exports_worker.CASES)
def test_source_trains_as_the_plan(name: str, tmp_path: Path) -> None:
    ranks = 2 ** len(exports_worker.CASES[name][0])
    found = world.outcomes("exports_worker.py", ranks, tmp_path, [name], timeout=280)[name]
    assert found == "", found

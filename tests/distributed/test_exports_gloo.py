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


@pytest.mark.slow
def test_transformers_runs_the_configuration(tmp_path: Path) -> None:
    """Its ``from_pretrained`` on two ranks, with the exported fields."""
    names = [*exports_worker.OF_TRANSFORMERS]
    exports_worker.tiny_llama().save_pretrained(tmp_path)
    found = world.outcomes("exports_worker.py", 2, tmp_path, names, timeout=280)
    assert found == dict.fromkeys(names, "")

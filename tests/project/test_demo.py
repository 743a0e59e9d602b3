"""``autoshard demo``: runs, shows what it says, and what it writes runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.cli import class_text, main


@pytest.mark.slow
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "4 ranks (mesh dp=2, tp=2)",
        "Collectives of a step",
        "class Block(runtime.Block):",
        "verify on mesh dp=2, tp=2: ok  (rtol 1e-09, atol 1e-09)",
        "torchrun --nproc-per-node 4",
    ):
        assert expected in printed
    assert {p.name for p in out.iterdir()} == {
        "rank_module.py",
        "plan.json",
        "plan.html",
        "inputs.json",
        "lines.json",
        *(f"rank{r}.safetensors" for r in range(4)),
    }
    done = subprocess.run([sys.executable, out / "rank_module.py"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("step 0: loss ")


def test_class_text() -> None:
    source = "class A:\n    x = 1\n\n\nclass B:\n    y = 2\n"
    assert class_text(source, "A") == "class A:\n    x = 1"
    with pytest.raises(StopIteration):
        class_text(source, "C")

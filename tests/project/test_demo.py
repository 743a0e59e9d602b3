"""``autoshard demo``: runs, shows what it says, and what it writes runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.demo import class_text


@pytest.mark.slow
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a smaller model in place of the 8B, which takes half a minute."""
    monkeypatch.setattr("autoshard.demo.LARGE", "llama:small")
    monkeypatch.setattr("autoshard.demo.LARGE_LENGTH", 256)
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "llama:small in bfloat16, 16 × 256 tokens",
        "h100, mesh dp=8: 8 ranks, bfloat16, training step",
        "compared       free ",
        "verify on mesh tp=2: ok  (rtol 1e-09, atol 1e-09)",
        "torchrun --nproc-per-node 2",
    ):
        assert expected in printed
    assert len(printed.splitlines()) <= 50  # a screen
    assert re.search(r"compared +free .* · .* · ", printed)
    assert "plan.compared plans" not in printed  # they are known
    two, one = re.findall(r"steps of AdamW: (.*)", printed)
    assert two == one
    assert {p.name for p in out.iterdir()} == {"plan.json", "plan.html", "block.py", "tiny"}
    ast.parse((out / "block.py").read_text("utf-8"))
    words = re.findall(r"torchrun --nproc-per-node 2 (.*)", printed)[0].split()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    losses = re.findall(r"loss ([\d.]+)", done.stdout)
    assert [f"{float(loss):.4f}" for loss in losses] == one.split()


def test_class_text() -> None:
    source = "class A:\n    x = 1\n\n\nclass B:\n    y = 2\n"
    assert class_text(source, "A") == "class A:\n    x = 1"
    with pytest.raises(StopIteration):
        class_text(source, "C")

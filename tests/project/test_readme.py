"""README and docs stay true: every ``python`` block runs and prints the ``text`` block after it; links lead somewhere.

After a change of output that is meant: ``pytest tests/project/test_readme.py --update-golden``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.hardware.presets import HARDWARE_VARIABLE
from autoshard.passes.rules import rule_for

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def run(code: str, namespace: dict[str, Any], where: str) -> str:
    """What ``code`` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, where, "exec"), namespace)
    return "".join(line.rstrip() + "\n" for line in printed.getvalue().splitlines())


def differences(text: str, where: str) -> tuple[list[str], str]:
    """What the blocks of a page get wrong, and the page with the outputs that they print now."""
    namespace: dict[str, Any] = {"__name__": "page"}
    wrong, renewed, end = [], [], 0
    for match in BLOCK.finditer(text):
        torch.manual_seed(0)
        printed = run(match[1], namespace, f"{where}:{text.count(chr(10), 0, match.start()) + 1}")
        if match[2] is not None and printed != match[2]:
            wrong.append(f"--- the page says\n{match[2]}--- the code prints\n{printed}")
        start, stop = match.span(2) if match[2] is not None else (match.end(), match.end())
        renewed += [text[end:start], printed if match[2] is not None else ""]
        end = stop
    return wrong, "".join(renewed) + text[end:]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_runs_and_prints_what_the_page_says(
    page: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(HARDWARE_VARIABLE, "cpu")  # as where a reader has no GPU
    wrong, renewed = differences(text, page.name)
    if request.config.getoption("--update-golden"):
        page.write_text(renewed, encoding="utf-8")
        return
    assert not wrong, "\n".join(wrong)


def test_a_wrong_output_is_seen() -> None:
    """Negative control."""
    page = "```python\nprint(1 + 1)\n```\n\n```text\n{}\n```\n"
    assert differences(page.format(2), "page") == ([], page.format(2))
    wrong, renewed = differences(page.format(3), "page")
    assert len(wrong) == 1
    assert renewed == page.format(2)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert (ROOT / test[0]).exists(), test[0]
        assert f"def {test[1]}" in (ROOT / test[0]).read_text(encoding="utf-8"), test


def test_every_operation_of_the_coverage_table_has_a_rule() -> None:
    table = (
        (ROOT / "README.md").read_text(encoding="utf-8").partition("## What can be sharded")[2].partition("\n## ")[0]
    )
    names = re.findall(r"`([a-z_0-9.]+)`", table)
    assert len(names) > 40
    for name in names:
        op, _, overload = name.partition(".")
        assert rule_for(getattr(getattr(torch.ops.aten, op), overload or "default")) is not None, name


def test_the_training_script_under_python_and_torchrun(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    code = re.findall(r"^```py\n(.*?)^```\n", text, re.MULTILINE | re.DOTALL)[0]
    script.write_text(code, encoding="utf-8")
    alone = run(code, {"__name__": "__main__"}, str(script))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    parallel = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(parallel, capture_output=True, text=True, check=True, timeout=240, env=env)
    assert done.stdout == alone
    assert alone in text

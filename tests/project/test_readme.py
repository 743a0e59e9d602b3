"""README and docs stay true: every ``python`` block runs and prints the ``text`` block after it; links lead somewhere.

After a change of output that is meant: ``pytest tests/project/test_readme.py --update-golden``.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ROOT, markdown

from autoshard.hardware.presets import HARDWARE_VARIABLE
from autoshard.passes.rules import rule_for

PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in markdown()]
SLOW = [f"docs/how-to/{name}.md" for name in ("checkpoints", "clusters", "memory", "rl", "serving")]
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


@pytest.mark.slow_cases(*SLOW)
@pytest.mark.parametrize("page", PAGES)
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


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert (ROOT / test[0]).exists(), test[0]
        assert f"def {test[1]}" in (ROOT / test[0]).read_text(encoding="utf-8"), test


def test_every_operation_of_the_coverage_table_has_a_rule() -> None:
    table = (ROOT / "docs" / "reference" / "operations.md").read_text(encoding="utf-8")
    names = re.findall(r"`([a-z_0-9.]+)`", table)
    assert len(names) > 40
    for name in names:
        op, _, overload = name.partition(".")
        assert rule_for(getattr(getattr(torch.ops.aten, op), overload or "default")) is not None, name

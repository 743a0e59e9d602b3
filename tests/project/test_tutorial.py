"""Commands on the pages: each ``console`` block runs on the page's files, and prints what the page says.

After a change of output that is meant: ``pytest tests/project/test_tutorial.py --run-slow --update-golden``.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from pages import ROOT, commands, console_differences, files, markdown, same

DOCS = ROOT / "docs"
TUTORIAL = sorted((DOCS / "tutorial").glob("[0-9]*.md"))
FAST = {"README.md", "1-one-process.md"}
PAGES = [
    pytest.param(page, id=str(page.relative_to(ROOT)), marks=() if page.name in FAST else pytest.mark.slow)
    for page in markdown()
    if "```console\n" in page.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_the_page_says(page: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A page of the tutorial goes on with the files of those before it; others run the examples that they link."""
    for earlier in TUTORIAL if page in TUTORIAL else ():
        if earlier.name < page.name:
            for name, content in files(earlier.read_text(encoding="utf-8")).items():
                (tmp_path / name).write_text(content, encoding="utf-8")
    for name in re.findall(r"\]\(\.\./examples/(\w+\.py)\)", page.read_text(encoding="utf-8")):
        shutil.copy(DOCS / "examples" / name, tmp_path)
    wrong, renewed = console_differences(page.read_text(encoding="utf-8"), tmp_path)
    if request.config.getoption("--update-golden"):
        page.write_text(renewed, encoding="utf-8")
        return
    assert not wrong, "\n".join(wrong)


def test_a_wrong_output_is_seen(tmp_path: Path) -> None:
    """Negative control: text, numbers, files that a command reads, commands that fail."""
    page = '```py title="a.py"\nprint(f"loss {1 / 3:.4f}")\n```\n\n```console\n$ python a.py\n{}\n```\n'
    page = page.replace("{1 / 3:.4f}", "0.3333")
    assert console_differences(page.replace("{}", "loss 0.3330"), tmp_path)[0] == []
    wrong, renewed = console_differences(page.replace("{}", "loss 0.4"), tmp_path)
    assert len(wrong) == 1
    assert renewed == page.replace("{}", "loss 0.3333")
    assert len(console_differences(page.replace("{}", "lost 0.3333"), tmp_path)[0]) == 1
    with pytest.raises(AssertionError):
        console_differences(page.replace("python a.py", "python b.py"), tmp_path)


def test_commands_go_on_over_lines() -> None:
    assert commands("$ a \\\n    b\nout\n$ c\n") == [("a \\\n    b\n", "out\n"), ("c\n", "")]
    assert same("a 1.00 2\n", "a 1.005 2\n")
    assert not same("a 1.00 2\n", "a 1.00 3\n")

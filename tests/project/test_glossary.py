"""docs/reference/glossary.md: a word of this code base, the field's word, one sentence, a file in which the former stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")

Row = tuple[str, ...]


def rows(page: str) -> list[Row]:
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| here |")]
    return [tuple(cell.strip() for cell in line.strip("| ").split(" | ")) for line in lines]


def faults(row: Row) -> list[str]:
    """What is wrong with a row; none of it in a good one."""
    if len(row) != 4 or not all(row):
        return ["a row has four cells"]
    here, _, meaning, file = row
    path = ROOT / file.strip("`")
    if not path.is_file():
        return [f"{file} is no file"]
    word = re.split(r" \(", here.replace("`", ""))[0]
    text = f"{path.relative_to(ROOT)} {path.read_text(encoding='utf-8')}".replace("_", " ").lower()
    found = [] if re.search(rf"\b{re.escape(word.replace('_', ' ').lower())}", text) else [f"{word} is not in {file}"]
    sentence = meaning.endswith(".") and len(meaning.split()) <= 25
    return [*found, *([] if sentence else [f"no sentence of at most 25 words: {meaning}"])]


ROWS = rows(PAGE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_word_is_where_the_page_says(row: Row) -> None:
    assert faults(row) == []


def test_the_page_has_each_word_once() -> None:
    words = [row[0] for row in ROWS]
    assert len(words) >= 60
    assert len(words) == len(set(words))


def test_a_wrong_row_is_seen() -> None:
    assert faults(("whole", "replicated", "All of it.", "`passes/rules/families/slicing.py`")) == []
    assert faults(("whole", "replicated", "All of it.", "`autoshard/gone.py`"))
    assert faults(("zigzagged", "zigzag", "All of it.", "`passes/rules/families/slicing.py`"))
    assert faults(("whole", "replicated", "word " * 26, "`passes/rules/families/slicing.py`"))
    assert faults(("whole", "replicated", "All of it."))


def test_contributing_names_what_there_is() -> None:
    """Folders and files of CONTRIBUTING.md, which is one page."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[\w.]+/)+[\w.]*|[\w/]+\.py)`", text)
    targets = re.findall(r"\]\(([^)#]+)", text)
    assert len(named) > 15
    assert [
        path for path in (*named, *targets) if not ((ROOT / path).exists() or list(ROOT.glob(f"passes/*/{path}")))
    ] == []
    assert len(text.splitlines()) <= 90

"""Texts that users read: sentences of at most 25 words, the field's words, docstrings that name their subject."""

from __future__ import annotations

from pathlib import Path

import english
import pytest

PAGES = [
    "CONTRIBUTING.md",
    "README.md",
    *(str(page.relative_to(english.ROOT)) for page in sorted((english.ROOT / "docs").rglob("*.md"))),
]

FILES = english.product_files()
NAMES = english.public_names()


@pytest.mark.parametrize("room", english.PRODUCT)
def test_messages_and_public_docstrings(room: str) -> None:
    files = [path for path in FILES if path.is_relative_to(english.ROOT / room)]
    assert [fault for path in files for text in english.texts(path, NAMES) for fault in english.faults(text)] == []


@pytest.mark.parametrize("name", PAGES)
def test_pages(name: str) -> None:
    assert [fault for text in english.page(english.ROOT / name) for fault in english.faults(text)] == []


def test_texts_are_found() -> None:
    """The lint is not vacuous: it reads messages of every kind, and docstrings of every public name."""
    messages = [text.text for path in FILES for text in english.messages(path)]
    assert len(messages) > 500
    for part in (
        "the ranks disagree on",
        "is replicated along it, because",
        "has waited {} s for",
        "the mesh is searched",
    ):
        assert any(part in text for text in messages), part
    documented = {text.file for path in FILES for text in english.public_docstrings(path, NAMES)}
    assert {Path(file).name for file in documented} >= {"api.py", "layout.py", "mesh.py", "plan.py", "record.py"}


LONG = " ".join(["the word of every"] * 7).rsplit(" ", 28 - english.MOST_WORDS)[0]
FAULTS = {
    "a sentence of {} parts is cut": "'cut' (write: shard",
    "the tensor is told to be replicated, {}": "'told'",
    "this tensor of the rank lies in {}": "'lies'",
    "{} is no op": "'is no'",
    f"it is {LONG}": f"{english.MOST_WORDS + 2} words",
    f"name of the place: {LONG}. It is {LONG}": f"{english.MOST_WORDS + 2} words",
}
GOOD = (
    "{} is not a mesh",
    "there is no axis {}; it is `cut`",
    f"the name of a place: {LONG}. And that is short",
    "add sub mul cut whole lies in parts",
    "(rows := index(whole, [0])) | slice(whole, of)",
)


@pytest.mark.parametrize("text", [*FAULTS, *GOOD])
def test_faults_are_found(text: str, tmp_path: Path) -> None:
    """Negative control: in a message and in a page, whose code blocks are no text."""
    source, filled = tmp_path / "source.py", text.replace("{}", "{x}")
    source.write_text(f'def f(x):\n    raise ValueError(f"{filled}")\n', encoding="utf-8")
    (tmp_path / "page.md").write_text(f"# Title\n\n```\ncut\n```\n\n- {text}\n\n| a | {text} |\n", encoding="utf-8")
    found = [fault for read in english.texts(source) for fault in english.faults(read)]
    if text in FAULTS:
        assert [fault for fault in found if FAULTS[text] in fault], found
        lines = [f.split(":")[1] for t in english.page(tmp_path / "page.md") for f in english.faults(t)]
        assert lines == ["7", "9"]
    else:
        assert found == []


def test_docstrings_name_their_subject(tmp_path: Path) -> None:
    for first, good in (("What it does.", False), ("This layout.", False), ("Layout of a tensor.", True)):
        source = tmp_path / f"{first[0]}.py"
        text = f'class Layout:\n    """Layout."""\n\n    def f(self):\n        """{first}"""\n'
        source.write_text(text + '\n    def _g(self):\n        """What is not public."""\n', encoding="utf-8")
        found = [f for t in english.public_docstrings(source, frozenset({"Layout"})) for f in english.faults(t)]
        assert (found == []) == good, found
    assert not list(english.public_docstrings(source, frozenset()))

"""The site of the docs: its navigation has every page, its API page every public name; figures and errors are true."""

from __future__ import annotations

import ast
import re
import runpy
from collections import Counter

from pages import ROOT, markdown

import autoshard
from autoshard import Mesh, Shard

DOCS = ROOT / "docs"
NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
API = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")


def listed(navigation: str) -> Counter[str]:
    return Counter(re.findall(r"([\w/.-]+\.md)$", navigation, re.MULTILINE))


def documented(page: str) -> set[str]:
    return {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)}


def test_every_page_is_in_the_navigation_once() -> None:
    pages = Counter(str(page.relative_to(DOCS)) for page in markdown() if DOCS in page.parents)
    assert listed(NAVIGATION) == pages
    assert len(pages) > 20
    assert listed(NAVIGATION + "  - Home: index.md\n") != pages


def test_every_public_name_is_on_the_api_page() -> None:
    errors = {name for name in autoshard.__all__ if isinstance(getattr(autoshard, name), type(Exception))}
    assert "::: autoshard.errors" in API
    assert set(autoshard.__all__) - errors - documented(API) == set()
    assert "compile" not in documented(API.replace("::: autoshard.compile", "autoshard.compile"))


def test_figures_show_the_layouts_of_the_library() -> None:
    """Drawn again they are the files; another layout is another picture."""
    drawn = runpy.run_path(str(DOCS / "figures" / "make.py"))
    for name, svg in drawn["figures"]().items():
        assert svg == (DOCS / "figures" / name).read_text(encoding="utf-8"), name
    rows = [("", Mesh({"tp": 4}), {"tp": Shard(dim)}) for dim in (0, 1)]
    first, second = (drawn["figure"]("", [row], gradient=False) for row in rows)
    assert first != second


def literals() -> list[str]:
    """Every text of the product's source; … stands for what is formatted into it."""
    found = []
    for path in (path for room in ("autoshard", "passes") for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
    return found


def unknown(page: str, texts: list[str]) -> list[str]:
    """First cells of the page's tables of our own errors that no text of the source has."""
    cells = re.findall(r"^\| (?!the message has |-)(.+?) \| ", page.partition("## Errors of torch")[0], re.MULTILINE)
    assert len(cells) > 30
    patterns = {cell: ".{0,200}?".join(re.escape(part.strip()) for part in cell.split("…")) for cell in cells}
    return [cell for cell, pattern in patterns.items() if not any(re.search(pattern, t, re.DOTALL) for t in texts)]


def test_errors_by_text_are_texts_of_errors() -> None:
    page, texts = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8"), literals()
    assert unknown(page, texts) == []
    assert unknown(page.replace("another rank ended", "another rank has gone"), texts) == ["another rank has gone"]

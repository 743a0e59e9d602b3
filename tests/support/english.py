"""Lint of the English that users read: messages, docstrings of the public API, and pages.

``python tests/support/english.py [FILES]`` prints the faults of ``.py`` and ``.md`` files, by default of the product.
CONTRIBUTING.md states the rules. ``INSTEAD`` is the one list of words that users do not read.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PRODUCT = ("autoshard", "passes", "models")

MOST_WORDS = 25
"""in a sentence, where a placeholder, a name in code or a path is one word"""

INSTEAD = {
    r"cuts?|cutting(?! plane)": "shard, split",
    r"wholes?": "replicated, full, entire",
    r"in parts|part by part|piece by piece": "sharded, in chunks",
    r"pieces?": "chunk, block",
    r"summands?": "partial sum",
    r"folded": "zigzag",
    r"made again|runs? again|ran again": "recomputed",
    r"told|tells?|tell apart": "reported, says",
    r"lies?|lying|lay in": "is, has the layout",
    r"wish(?:es)?|wished": "option, request",
    r"experts?'s? plans?": "named strategy",
    r"(?:go(?:es)?|going|went) (?:round|around|along)": "moves around the ring",
    r"travel\w*|flying": "is sent, is in flight",
    r"anew": "again, new",
    r"alike": "the same, equal",
    r"beside": "with, in addition to",
    r"otherwise than": "other than by",
    r"of which|so many|as it is": "(name the thing)",
    r"(?<!there )(?:is|are|was) no(?! longer)": "is not a",
}
"""pattern of words → what to write instead"""

_ANY = re.compile(rf"(?<![\w-])(?:{'|'.join(f'({p})' for p in INSTEAD)})(?![\w(=-])", re.IGNORECASE)

FILLERS = frozenset(
    "a an and are at be been but by can cannot does every for from had has have if is it its no nor not of on only or so than "
    "got all each per takes their two that the there they this was were where which with without would you your".split()
)
"""words that a sentence has and a list of names has not"""

NO_NAMES = frozenset("as he how it its of so such that these they this those to what where which with you".split())
"""words that do not name what a docstring is about"""


class Text(NamedTuple):
    file: str
    line: int
    text: str
    names: bool = False
    """whether the first word has to name something"""


def _joined(node: ast.expr) -> str | None:
    """The text of a string; a placeholder is ``{}``."""
    if isinstance(node, ast.Constant):
        return re.sub(r"%[-+.\d]*[srdgf]", "{}", node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join("{}" if isinstance(v, ast.FormattedValue) else str(_joined(v)) for v in node.values)
    return None


def _is_prose(text: str) -> bool:
    words = re.findall(r"(?<![\w./(])[a-z]{2,}(?![\w(=./])", text)
    code = re.search(r"\$\{|\w\.default\b|->|:=|\) \||^\W*import |^from \w+ import", text)
    fillers = sum(word in FILLERS for word in words)
    return len(words) >= 3 and not code and 10 * fillers >= len(words)


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def _documented(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, ast.Constant]]:
    """Docstrings with their owners; one under an assignment belongs to what it assigns."""
    for node in nodes:
        body = getattr(node, "body", None)
        for before, after in zip([node, *body], body, strict=False) if isinstance(body, list) else ():
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                yield before, after.value


def messages(path: Path) -> Iterator[Text]:
    """Strings of a module that read as sentences, docstrings aside."""
    nodes = _nodes(path)
    parts = {id(v) for n in nodes if isinstance(n, ast.JoinedStr) for v in n.values}
    parts |= {id(docstring) for _, docstring in _documented(nodes)}
    for node in nodes:
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in parts:
            text = _joined(node)
            if text and " " in text and _is_prose(text):
                yield Text(str(path), node.lineno, text)


def public_docstrings(path: Path, names: frozenset[str]) -> Iterator[Text]:
    """Docstrings of a module's functions and classes among ``names``, and of their public members."""
    (module, *_) = _nodes(path)
    assert isinstance(module, ast.Module)
    for top in module.body:
        if isinstance(top, (ast.ClassDef, ast.FunctionDef)) and top.name in names:
            for owner, docstring in _documented(ast.walk(top)):
                name = getattr(owner, "name", "")
                if not name.startswith("_") or name.startswith("__"):
                    yield Text(str(path), docstring.lineno, str(docstring.value), not isinstance(owner, ast.AnnAssign))


def page(path: Path) -> Iterator[Text]:
    """Paragraphs, list items and table cells of a Markdown file; code blocks aside."""
    fenced, start, lines = False, 0, list[str]()
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        fenced ^= line.lstrip().startswith("```")
        code = fenced or (line.startswith("    ") and not lines) or line.lstrip().startswith(("```", "<", "![", ":::"))
        if lines and (code or not line.strip() or re.match(r"\s*([-*|#>]|\d+\.) ?", line)):
            yield Text(str(path), start, " ".join(lines))
            lines = []
        if code or not line.strip():
            continue
        if line.startswith("|"):
            yield from (Text(str(path), number, cell) for cell in line.strip("|").split("|") if set(cell) - set("-: "))
            continue
        start = start if lines else number
        lines.append(re.sub(r"^\s*(#+|[-*>]|\d+\.) ", "", line))


def sentences(text: str) -> list[str]:
    """Sentences of a text, without the place or name that stands before a colon."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``[^`]*``|`[^`]*`", "{}", text)
    blocks = re.split(r"\n\s*\n|\n\s*(?=[-*>] |[\w, *]+: )|\n\s*>>>[^\n]*", text)
    found = [s for block in blocks for s in re.split(r"(?<=[.!?])\)?\s+(?=[A-Z{:\"'(])", block)]
    return [re.sub(r"^(?:\S+ ){0,5}\S*:\s", "", s.strip()) for s in found if s.strip()]


def faults(text: Text) -> list[str]:
    """Faults of a text, each as ``file:line: fault``."""
    found = []
    plain = re.sub(r"``[^`]*``|`[^`]*`|\{[^}]*\}", "{}", text.text)
    for sentence in sentences(text.text):
        words = [w for w in sentence.split() if re.search(r"\w|\{", w)]
        if len(words) > MOST_WORDS:
            found.append(f"{len(words)} words: {' '.join(words)}")
    for match in _ANY.finditer(plain):
        better = [*INSTEAD.values()][(match.lastindex or 0) - 1]
        found.append(f"{match[0]!r} (write: {better}): {' '.join(plain.split())[:120]}")
    if text.names and text.text.split()[0].strip("`\"'").lower() in NO_NAMES:
        found.append(f"the first word names nothing: {text.text.splitlines()[0]}")
    return [f"{text.file}:{text.line}: {fault}" for fault in found]


def texts(path: Path, names: frozenset[str] = frozenset()) -> Iterator[Text]:
    if path.suffix == ".py":
        yield from messages(path)
        yield from public_docstrings(path, names)
    else:
        yield from page(path)


def public_names() -> frozenset[str]:
    """``autoshard.__all__``, read without an import."""
    tree = ast.parse((ROOT / "autoshard" / "__init__.py").read_text(encoding="utf-8"))
    (names,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    return frozenset(ast.literal_eval(names))


def product_files() -> list[Path]:
    return [path for room in PRODUCT for path in sorted((ROOT / room).rglob("*.py"))]


def main(arguments: list[str]) -> int:
    files = [Path(a) for a in arguments] or [path.relative_to(Path.cwd()) for path in product_files()]
    found = [fault for path in files for text in texts(path, public_names()) for fault in faults(text)]
    print(*found, sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

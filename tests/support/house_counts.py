"""Counts of the library that may not grow: lines, files, names, constants, private paths of torch, parameters."""

from __future__ import annotations

import ast
import io
import itertools
import os
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("autoshard", "passes", "models")

WIDE = 100
"""columns"""
SMALL = 60
"""lines"""
MANY = 3
"""files that define the same module-level name"""
EVERYWHERE = ("log", "aten", "__all__")
"""names that mean the same in every file"""
PARAMETERS = 10

CODE = (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING)
PRIVATE = re.compile(r"\btorch(?:\.[A-Za-z]\w*)*\._(?!_|pytree)\w+(?:\.\w+)*")
"""a path as text; methods of Python's own protocols, such as ``torch.Tensor.__len__``, are public"""


def sources(root: Path = ROOT) -> dict[Path, str]:
    """Every file of the library; links, such as those of a checkout, are not followed."""
    walks = (os.walk(root / folder) for folder in FOLDERS)
    paths = (Path(folder, name) for folder, _, names in itertools.chain(*walks) for name in names)
    return {path: path.read_text(encoding="utf-8") for path in paths if path.suffix == ".py"}


def counts(files: dict[Path, str]) -> dict[str, int]:
    """What → how much of it there is in these files."""
    trees = {path: ast.parse(text) for path, text in files.items()}
    lines = [line for text in files.values() for line in text.splitlines()]
    bodies = [(path, node) for path, tree in trees.items() for node in tree.body]
    holders = defaultdict[str, set[Path]](set)
    for path, node in bodies:
        for name in _named(node):
            holders[name.lstrip("_")].add(path)
    private = {path: set(PRIVATE.findall(text)) for path, text in files.items()}
    names = set[str]().union(*map(private_names, trees.values()))
    lists = [_parameters(node) for tree in trees.values() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    small = [path for path, text in files.items() if path.name != "__init__.py" and text.count("\n") < SMALL]
    return {
        "lines": len(lines),
        "tokens": sum(_tokens(text) for text in files.values()),
        f"lines over {WIDE} columns": sum(len(line) > WIDE for line in lines),
        "files": len(files),
        f"files under {SMALL} lines": len(small),
        f"names at module level in {MANY} or more files": sum(
            len(paths) >= MANY for name, paths in holders.items() if name not in EVERYWHERE
        ),
        "numeric constants at module level": sum(_is_constant(node) for _, node in bodies),
        "private names of torch, however imported": len(names),
        "private paths of torch": len(set[str]().union(*private.values())),
        "files that name a private path of torch": sum(map(bool, private.values())),
        f"functions with more than {PARAMETERS} parameters": sum(n > PARAMETERS for n in lists),
        "parameters of the longest list": max(lists),
    }


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _named(node: ast.stmt) -> Iterator[str]:
    """The names that a statement at module level defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _is_constant(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


def private_names(tree: ast.Module) -> set[str]:
    """Full names of what a file reads of torch by a name that begins with one underscore, ``_pytree`` left out.

    Attributes of objects that are no module, class or function of torch by an import are not seen."""
    bound, found = dict[str, str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            bound |= names
            found |= {name for name in names.values() if _is_private(name)}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    found |= {alias.name} if _is_private(alias.name) else set()
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            root, path = _chain(node)
            if root in bound and _is_private(path):
                found.add(f"{bound[root]}.{path}")
    return found


def _chain(node: ast.Attribute) -> tuple[str, str]:
    """``("a", "b.c")`` of ``a.b.c``; the first is empty where that is no name."""
    parts, of = [node.attr], node.value
    while isinstance(of, ast.Attribute):
        parts, of = [of.attr, *parts], of.value
    return of.id if isinstance(of, ast.Name) else "", ".".join(parts)


def _is_private(path: str) -> bool:
    return any(re.fullmatch(r"_(?!_|pytree$)\w*", part) for part in path.split("."))


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Positional and keyword-only ones, without ``self``; ``*args`` and ``**kwargs`` are not counted."""
    positional = [a.arg for a in node.args.args]
    return len(positional) + len(node.args.kwonlyargs) - (positional[:1] in (["self"], ["cls"]))


def _tokens(text: str) -> int:
    return sum(token.type in CODE for token in tokenize.generate_tokens(io.StringIO(text).readline))


def table(found: dict[str, int], limits: dict[str, int]) -> Iterable[str]:
    """A line per count: what there is, the limit, and the difference to it."""
    for what, limit in limits.items():
        left = limit - found[what]
        side = "below" if left > 0 else "over"
        yield f"{what:<45} {found[what]:>7}  limit {limit:>7}  {f'{abs(left)} {side}' if left else 'at the limit'}"

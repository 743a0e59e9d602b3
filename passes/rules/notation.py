"""Factor notation: ``rule(aten.linear.default, "... k, n k, n -> ... n")`` is a sharding rule.

A letter or word is a factor. ``...`` stands for leading dims, which broadcast from the right. ``(h
d)`` is one dim made of several factors, outermost first. ``_`` is a dim that must be unsharded. A
factor missing from the results is summed over.

An operand with dim 1 where the factor is longer lacks the factor: it broadcasts. Operands stand in
schema order; optional ones may be absent from a call. A list of tensors has one term. Sources:
einops, Shardy's factor rules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.aten import MissingOp
from autoshard.errors import RuleError
from autoshard.passes.ir.graph import Graph, Node, tensor_arguments
from autoshard.passes.rules.base import DEFAULT_FACTS, Dims, Factors, Facts, LocalFormOf, Rule, unsharded_only

ELLIPSIS, UNSHARDED_DIM = "...", "_"
Dim = tuple[str, ...]
"""factors of one tensor dim, outermost first; ``("...",)`` and ``("_",)`` are special"""
Term = tuple[Dim, ...]
"""one operand or result"""
Groups = tuple[tuple[int, ...], ...]
Linear = Groups | Callable[[Node, Graph], Groups]

_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z][A-Za-z0-9]*|[_()])")


@dataclass(frozen=True)
class Notation:
    """A parsed rule text."""

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def parse(text: str) -> Notation:
    """Parse ``"b s k, n k -> b s n"``. Raises :class:`RuleError` naming the term and the fix."""
    sides = text.split("->")
    if len(sides) != 2:
        raise RuleError(f"rule {text!r}: write operands, one '->', results, for example 'm k, k n -> m n'")
    left, right = ([_term(t, text) for t in side.split(",")] if side.strip() else [()] for side in sides)
    known = {f for term in left for dim in term for f in dim}
    if (ELLIPSIS,) in [dim for term in right for dim in term] and ELLIPSIS not in known:
        raise RuleError(f"rule {text!r}: '...' stands in a result but in no operand. Write it in an operand too")
    return Notation(tuple(left), tuple(right), text)


def _term(text: str, rule: str) -> Term:
    """One operand or result, such as ``... (h d)``."""
    dims: list[Dim] = []
    compound: list[str] | None = None
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise RuleError(
                f"rule {rule!r}: cannot read {text[position:].strip()!r} in {text.strip()!r}. "
                "Use letters or words for factors, (a b) for a compound dim, '...' and '_'"
            )
        token, position = match.group(1), match.end()
        if token == "(":
            if compound is not None:
                raise RuleError(f"rule {rule!r}: nested parentheses in {text.strip()!r}. Write (a b c) flat")
            compound = []
        elif token == ")":
            if not compound:
                raise RuleError(f"rule {rule!r}: ')' without factors before it in {text.strip()!r}")
            dims.append(tuple(compound))
            compound = None
        elif compound is not None:
            if token in (ELLIPSIS, UNSHARDED_DIM):
                raise RuleError(f"rule {rule!r}: {token!r} inside parentheses in {text.strip()!r}. Use factor names")
            compound.append(token)
        else:
            dims.append((token,))
    if compound is not None:
        raise RuleError(f"rule {rule!r}: '(' is not closed in {text.strip()!r}")
    if dims.count((ELLIPSIS,)) > 1:
        raise RuleError(f"rule {rule!r}: two '...' in {text.strip()!r}. Use one")
    return tuple(dims)


def rule(
    op: Any,
    notation: str,
    *,
    linear: Linear = (),
    addends: Iterable[int] = (),
    local: LocalFormOf | None = None,
    flops: Callable[[Node, Graph], float] | None = None,
    facts: Facts = DEFAULT_FACTS,
) -> Rule:
    """A :class:`Rule` from notation. ``linear``: groups of operands (numbers in schema order) in
    which the op is jointly linear: ``((0,), (1,))`` for a product, ``((0, 1),)`` for a sum; or a
    function of the node. ``addends``: operands added to the result. Raises :class:`RuleError`
    where op and notation do not fit."""
    try:
        parsed = parse(notation)
    except RuleError as e:
        raise RuleError(f"{op}: {e}") from None
    if isinstance(op, MissingOp):
        return Rule(op, unsharded_only)  # type: ignore[arg-type]
    takes = tensor_arguments(op)
    if len(parsed.operands) != len(takes) and not (parsed.operands == ((),) and not takes):
        raise RuleError(
            f"{op}: rule {notation!r} has {len(parsed.operands)} operands, but the op takes {len(takes)} "
            f"tensors ({', '.join(takes)}). Write one term per tensor argument, optional ones included"
        )
    gives = len(op._schema.returns)
    if len(parsed.results) != gives and not (parsed.results == ((),) and not gives):
        raise RuleError(
            f"{op}: rule {notation!r} has {len(parsed.results)} results, the op gives {gives}; write one term per "
            "result (one for a list of tensors), and none behind '->' for an op without results"
        )

    def strategies(node: Node, graph: Graph) -> Factors:
        groups = linear(node, graph) if callable(linear) else linear
        return notation_factors(parsed, node, graph, groups, frozenset(addends))

    return Rule(op, strategies, local, flops, notation, facts=facts)


def notation_factors(
    notation: Notation, node: Node, graph: Graph, linear: Groups = (), addends: frozenset[int] = frozenset()
) -> Factors:
    """The factors of ``node`` under ``notation``, from global shapes."""
    slots, shapes = node.input_slots, [*graph.shapes(node.inputs), *graph.shapes(node.outputs)]
    terms, sizes = expanded_terms(notation, node, graph)
    dims, even = _leading_factors(terms, shapes, sizes)
    n = len(slots)
    return Factors(
        tuple(dims[:n]),
        tuple(dims[n:]),
        sizes,
        even,
        frozenset(i for i, s in enumerate(slots) if s in addends),
        _linear_positions(linear, slots, node),
    )


def expanded_terms(notation: Notation, node: Node, graph: Graph) -> tuple[list[Term], dict[str, int]]:
    """Terms of operands and results with ``...`` expanded, and the length of every factor."""
    listed = len(node.op._schema.returns) == 1  # one return with several outputs is a list of tensors
    results = [notation.results[0 if listed else s] for s in node.output_slots]
    terms = [*(notation.operands[s] for s in node.input_slots), *results]
    shapes = [*graph.shapes(node.inputs), *graph.shapes(node.outputs)]
    texts = [f"operand {s}" for s in node.input_slots] + [f"result {s}" for s in node.output_slots]
    where = f"{node.op}: rule {notation.text!r}"
    found = _expand_ellipsis(terms, shapes, texts, where)
    return found, _factor_sizes(found, shapes, where)


def _linear_positions(groups: Groups, slots: Sequence[int], node: Node) -> Groups:
    """Groups as positions in ``node.inputs``, without those with a nonzero constant."""
    names = tensor_arguments(node.op)
    constants = {
        names.index(a.name)
        for a, value in zip(node.op._schema.arguments, node.args, strict=False)
        if a.name in names and isinstance(value, int | float | complex) and value != 0
    }
    kept = [g for g in groups if not constants & set(g)]
    found = [tuple(i for i, s in enumerate(slots) if s in g) for g in kept]
    return tuple(dict.fromkeys(g for g in found if g))


def _expand_ellipsis(
    terms: Sequence[Term], shapes: Sequence[tuple[int, ...]], texts: Sequence[str], where: str
) -> list[Term]:
    """Terms with ``...`` expanded to factors ``...0, ...1``, aligned from the right."""
    extra = []
    for term, shape, text in zip(terms, shapes, texts, strict=True):
        spare = len(shape) - len(term) + ((ELLIPSIS,) in term)
        if spare < 0 or (spare > 0 and (ELLIPSIS,) not in term):
            shown = " ".join("(" + " ".join(d) + ")" if len(d) > 1 else d[0] for d in term)
            raise RuleError(
                f"{where}: {text} {shown!r} has {len(term)} dims, but its shape {list(shape)} "
                f"has {len(shape)}. Name every dim, or start the term with '...'"
            )
        extra.append(spare)
    most = max((e for e, t in zip(extra, terms, strict=True) if (ELLIPSIS,) in t), default=0)
    spelled = []
    for term, spare in zip(terms, extra, strict=True):
        out: list[Dim] = []
        for dim in term:
            out += [(f"{ELLIPSIS}{most - spare + i}",) for i in range(spare)] if dim == (ELLIPSIS,) else [dim]
        spelled.append(tuple(out))
    return spelled


def _factor_sizes(terms: Sequence[Term], shapes: Sequence[tuple[int, ...]], where: str) -> dict[str, int]:
    """Length of every factor; one factor of a compound dim is inferred from the others."""
    sizes: dict[str, int] = {}
    compound = []
    for term, shape in zip(terms, shapes, strict=True):
        for dim, n in zip(term, shape, strict=True):
            if len(dim) > 1:
                compound.append((dim, n))
            elif dim != (UNSHARDED_DIM,):
                known = sizes.get(dim[0], n)
                if n != known and 1 not in (n, known):
                    raise RuleError(
                        f"{where}: factor {dim[0]!r} is {known} long in one operand and {n} in another. "
                        "Give dims of different length different names, or '_' if the dim is not sharded"
                    )
                sizes[dim[0]] = known if n == 1 else n
    for dim, n in compound:
        missing = [f for f in dim if f not in sizes]
        rest = math.prod(sizes[f] for f in dim if f in sizes)
        if len(missing) == 1 and rest and n % rest == 0:
            sizes[missing[0]] = n // rest
    return sizes


def _leading_factors(
    terms: Sequence[Term], shapes: Sequence[tuple[int, ...]], sizes: Mapping[str, int]
) -> tuple[list[Dims], frozenset[str]]:
    """Per tensor dim the factor that may be sharded: the outermost, unless the dim broadcasts."""
    inner: set[str] = set()
    even: set[str] = set()
    found: list[list[str | None]] = []
    for term, shape in zip(terms, shapes, strict=True):
        row: list[str | None] = []
        for dim, n in zip(term, shape, strict=True):
            factors = [f for f in dim if sizes.get(f) != 1]
            first = factors[0] if factors and factors != [UNSHARDED_DIM] else None
            if len(factors) > 1:
                inner.update(factors[1:])
                even.update(factors[:1])
            elif first is not None and sizes[first] != n:
                first = None
            row.append(first)
        found.append(row)
    return [tuple(None if f in inner else f for f in row) for row in found], frozenset(even)

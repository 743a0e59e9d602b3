"""Pattern matching: subgraphs as text, and products of tensors in any spelling as one einsum.

A pattern is written in Python's grammar:

    op(a, k=b)                   the first result of an op of this name, of any overload. Arguments
                                 with a default that are not given have it; others are anything
    op(a)[1], op(a)[i]           its second result; any of its results, with its number
    einsum("ij,jk->ik", a, b)    a product, written as einsum, matmul, mm, bmm or linear
    name                         binds a value or another argument, such as a number; the same name
                                 once more: something equal, or computed alike
    _                            anything
    p | q, (o | q)(a)            either pattern, either op
    ~p, +p                       p behind casts; behind reshapes that keep the last dim
    (x := p), [p, q], -1, "sum"  p bound to x; a list; constants, where dims count from either end

Operands of sums and products match in both orders. Lines ``x = p`` hold together: the first name
is the value that is matched, later lines describe names bound before. Rules are names for patterns
with parameters; predicates are functions in Python that give the values of their parameters."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, Ref, argument_names
from autoshard.torch_private.ops import OpOverload

Bindings = dict[str, Any]
"""name in a pattern → what it matched; "": the results of ops that were matched"""
Predicate = Callable[[Any, Bindings], Iterable[Sequence[Any]]]
"""function of a value and known names → the values of its parameters, per way in which it holds"""

Lines = Sequence[tuple[str, ast.expr]]
"""(name or "", pattern) per line"""

_COMMUTATIVE = frozenset(("add", "mul", "bitwise_and", "logical_and", "__and__"))
_FIRST = ast.Constant(0)
_ADDS_A_DIM = frozenset((aten.unsqueeze.default, aten.stack.default))


class Product(NamedTuple):
    """A product of tensors, summed over all dims that are not in ``result``, as an einsum."""

    operands: tuple[Ref, ...]
    dims: tuple[str, ...]
    """per operand a letter for each dim"""
    result: str
    bias: Ref | None = None

    def named(self, *operands: Ref) -> tuple[str, ...]:
        """Dims of ``operands``, in this order, and of the result, as a, b, … by appearance."""
        of = dict(zip(self.operands, self.dims, strict=True))
        return rename_dims([*(of[x] for x in operands), self.result])


def rename_dims(terms: Iterable[str]) -> tuple[str, ...]:
    """Terms of an einsum, their dims renamed to a, b, … by appearance."""
    terms, names = list(terms), dict[str, str]()
    for letter in itertools.chain.from_iterable(terms):
        names.setdefault(letter, chr(ord("a") + len(names)))
    return tuple("".join(names[x] for x in term) for term in terms)


def product_of(value: Any, graph: Graph) -> Product | None:
    """The product that ``value`` is the result of, or the node itself; None: it is none."""
    node = graph.producers.get(value.name) if isinstance(value, Ref) else value
    if not isinstance(node, Node):
        return None
    if node.op is aten.einsum.default:
        left, _, right = node.args[0].replace(" ", "").partition("->")
        return Product(tuple(node.args[1]), tuple(left.split(",")), right) if "." not in left else None
    if node.op not in MATRIX_PRODUCTS:
        return None
    given, bias = [x for x in node.args if isinstance(x, Ref)], None
    if node.op in (aten.addmm.default, aten.baddbmm.default):
        bias, *given = given
    elif node.op is aten.linear.default:
        given, bias = given[:2], node.argument("bias")
    rows, matrices = given
    shapes = graph.shapes((rows.name, matrices.name))
    short, long = sorted((s[:-2] for s in shapes), key=len)
    if min(map(len, shapes)) < 2 or long[len(long) - len(short) :] != short:
        return None  # vectors, broadcast
    batch = "abcdefgh"[: len(long)]
    one, other = (batch[len(batch) + 2 - len(s) :] for s in shapes)
    turned = "nk" if node.op is aten.linear.default else "kn"
    return Product((rows, matrices), (f"{one}mk", f"{other}{turned}"), f"{batch}mn", bias)


MATRIX_PRODUCTS = frozenset(
    (
        aten.linear.default,
        aten.matmul.default,
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
    )
)


def permutation_of(node: Node | None, graph: Graph) -> tuple[int, ...] | None:
    """Dims of the operand in the order of the result, of ``permute``, ``transpose``, ``t``."""
    if node is None or node.op not in (aten.permute.default, aten.transpose.int, aten.t.default):
        return None
    order = list(range(len(graph.shape(node.inputs[0]))))
    if node.op is aten.permute.default:
        return tuple(d % len(order) for d in node.args[1])
    if order:
        a, b = node.args[1:3] if node.op is aten.transpose.int else (0, -1)
        order[a], order[b] = order[b], order[a]
    return tuple(order)


def behind(value: Ref, ops: Collection[OpOverload], graph: Graph) -> Ref:
    """The source of ``value`` before all ``ops``, such as casts and views."""
    node = graph.producers.get(value.name)
    while node is not None and node.op in ops:
        value = node.args[0]
        node = graph.producers.get(value.name)
    return value


class Matcher:
    """Matches patterns in a graph. ``rules``: head, such as ``f(x)`` → pattern."""

    def __init__(
        self, graph: Graph, rules: Mapping[str, str] | None = None, predicates: Mapping[str, Predicate] | None = None
    ) -> None:
        self.graph, self.rules, self.predicates = graph, dict(rules or {}), dict(predicates or {})
        self._known: dict[str, Lines] = {}

    def match(self, pattern: str, value: Any, **bound: Any) -> Bindings | None:
        """The first way in which ``value`` matches. ``bound``: names that are known."""
        return next(self.matches(pattern, value, **bound), None)

    def matches(self, pattern: str, value: Any, **bound: Any) -> Iterator[Bindings]:
        """All ways in which ``value`` matches."""
        if pattern not in self._known:
            self._known[pattern] = _parsed(pattern, tuple(self.rules.items()))
        (first, parsed), *others = self._known[pattern]
        for found in self._match(parsed, value, {"": (), **bound}):
            yield from self._match_lines(others, {**found, first: value} if first else found)

    def _match_lines(self, lines: Lines, bound: Bindings) -> Iterator[Bindings]:
        if not lines:
            yield bound
            return
        (name, parsed), *others = lines
        for found in self._match(parsed, bound[name], bound):
            yield from self._match_lines(others, found)

    def alike(self, a: Any, b: Any) -> bool:
        """Whether two arguments are equal, or computed alike (common subexpressions)."""
        if isinstance(a, tuple | list) and isinstance(b, tuple | list):
            return len(a) == len(b) and all(map(self.alike, a, b))
        if a == b or not isinstance(a, Ref) or not isinstance(b, Ref):
            return bool(a == b)
        one, other = (self.graph.producers.get(x.name) for x in (a, b))
        if one is None or other is None or one.op is not other.op or not is_function(one):
            return False
        same = one.outputs.index(a.name) == other.outputs.index(b.name) and one.kwargs == other.kwargs
        return same and self.alike(one.args, other.args)

    def is_closed(self, found: Bindings, result: Node) -> bool:
        """Whether only matched nodes and ``result`` read what they compute."""
        nodes = {node.name: node for node in (self.graph.producers[value] for value in found[""])}
        values = (o for name, node in nodes.items() if name != result.name for o in node.outputs)
        readers = {*nodes, result.name}
        return all(
            o not in self.graph.returned and all(use.name in readers for use in self.graph.uses[o]) for o in values
        )

    def _match(self, pattern: ast.expr, value: Any, bound: Bindings) -> Iterator[Bindings]:
        match pattern:
            case ast.Name(id="_"):
                yield bound
            case ast.Name(id=name):
                if name not in bound:
                    yield {**bound, name: value}
                elif self.alike(bound[name], value):
                    yield bound
            case ast.Constant(value=wanted):
                if type(value) is type(wanted) and value == wanted:
                    yield bound
            case ast.List(elts=items):
                if isinstance(value, tuple | list) and len(value) == len(items):
                    yield from self._match_all(list(zip(items, value, strict=True)), bound)
            case ast.BinOp(left=one, op=ast.BitOr(), right=other):
                yield from self._match(one, value, bound)
                yield from self._match(other, value, bound)
            case ast.NamedExpr(target=name, value=inner):
                for found in self._match(inner, value, bound):
                    yield from self._match(name, value, found)
            case ast.UnaryOp(op=through, operand=inner):
                yield from self._match(inner, value, bound)
                source_of = _behind_cast if isinstance(through, ast.Invert) else _behind_row_reshape
                if (source := source_of(value, self.graph)) is not None:
                    yield from self._match(pattern, source, bound)
            case ast.Subscript(value=ast.Call() as call, slice=slot):
                yield from self._match_call(call, value, bound, slot)
            case ast.Call():
                yield from self._match_call(pattern, value, bound, _FIRST)
            case _:
                raise ValueError(f"not a pattern: {ast.unparse(pattern)}")

    def _match_all(self, pairs: Sequence[tuple[ast.expr, Any]], bound: Bindings) -> Iterator[Bindings]:
        if not pairs:
            yield bound
            return
        (pattern, value), *others = pairs
        for found in self._match(pattern, value, bound):
            yield from self._match_all(others, found)

    def _match_call(self, call: ast.Call, value: Any, bound: Bindings, slot: ast.expr) -> Iterator[Bindings]:
        names = _names_of(call)
        for predicate in (self.predicates[name] for name in names & self.predicates.keys()):
            for values in predicate(value, bound):
                yield from self._match_all(list(zip(call.args, values, strict=True)), bound)
            return
        node = self.graph.producers.get(value.name) if isinstance(value, Ref) else None
        name = op_name(node.op) if node is not None else ""
        if node is None or not ("einsum" in names or name in names):
            return
        bound = {**bound, "": (*bound[""], value.name)}
        if "einsum" in names:
            yield from self._match_product(call, value, bound)
            return
        place = node.output_slots[node.outputs.index(value.name)]
        if (pairs := self._argument_pairs(node, call.args, call.keywords)) is None:
            return
        yield from self._match_all([(slot, place), *pairs], bound)
        if name in _COMMUTATIVE and len(call.args) == 2:
            (one, a), (other, b), *options = pairs
            yield from self._match_all([(slot, place), (one, b), (other, a), *options], bound)

    def _argument_pairs(
        self, node: Node, args: Sequence[ast.expr], keywords: Sequence[ast.keyword]
    ) -> list[tuple[ast.expr, Any]] | None:
        """(pattern, argument) of those that the pattern names; None if another is no default."""
        names = argument_names(node.op)
        if len(args) > len(names):
            return None
        wanted = dict(zip(names, args, strict=False)) | {str(k.arg): k.value for k in keywords}
        if any(name not in names and ast.unparse(p) != "_" for name, p in wanted.items()):
            return None
        if any(node.argument(name) != default for name, default in _defaults(node.op) if name not in wanted):
            return None
        return [self._by_dim(node, name, wanted[name]) for name in names if name in wanted]

    def _by_dim(self, node: Node, name: str, pattern: ast.expr) -> tuple[ast.expr, Any]:
        """``pattern`` and the argument; dims count from the front in both."""
        given = node.argument(name)
        if not name.startswith("dim") or not node.inputs or given is None:
            return pattern, given
        rank = max(1, len(self.graph.shape(node.inputs[0])) + (node.op in _ADDS_A_DIM))
        front = [d % rank for d in given] if isinstance(given, tuple | list) else given % rank
        return _from_front(pattern, rank), front

    def _match_product(self, call: ast.Call, value: Any, bound: Bindings) -> Iterator[Bindings]:
        product, (form, *wanted) = product_of(value, self.graph), call.args
        if product is None or product.bias is not None or len(product.operands) != len(wanted):
            return
        left, _, right = str(ast.literal_eval(form)).partition("->")
        terms = rename_dims((*left.split(","), right))
        for operands in itertools.permutations(product.operands):
            if product.named(*operands) == terms:
                yield from self._match_all(list(zip(wanted, operands, strict=True)), bound)


@cache
def op_name(op: OpOverload) -> str:
    """The op's name without namespace and overload."""
    return str(op._schema.name.rpartition(":")[2])


def is_function(node: Node) -> bool:
    """Whether equal arguments give equal results, as far as is known."""
    return node.op.namespace == "aten" and torch.Tag.nondeterministic_seeded not in node.op.tags


def _behind_cast(value: Any, graph: Graph) -> Ref | None:
    node = graph.producers.get(value.name) if isinstance(value, Ref) else None
    return node.args[0] if node is not None and node.op is aten._to_copy.default else None


def _behind_row_reshape(value: Any, graph: Graph) -> Ref | None:
    node = graph.producers.get(value.name) if isinstance(value, Ref) else None
    if node is None or node.op is not aten.reshape.default:
        return None
    source: Ref = node.args[0]
    return source if graph.shape(source)[-1:] == graph.shape(value)[-1:] else None


@cache
def _defaults(op: OpOverload) -> tuple[tuple[str, Any], ...]:
    """(name, default) of the op's arguments that have one."""
    return tuple((a.name, a.default_value) for a in op._schema.arguments if a.has_default_value())


def _from_front(pattern: ast.expr, rank: int) -> ast.expr:
    """The pattern of dims, counted from the front."""
    match pattern:
        case ast.Constant(value=int(dim)):
            return ast.Constant(dim % rank)
        case ast.List(elts=dims):
            return ast.List([_from_front(dim, rank) for dim in dims])
        case _:
            return pattern


@cache
def _names_of(call: ast.Call) -> frozenset[str]:
    """The names of the ops, rules or predicates of a call."""
    return frozenset(x.id for x in ast.walk(call.func) if isinstance(x, ast.Name))


@cache
def _parsed(pattern: str, rules: tuple[tuple[str, str], ...]) -> Lines:
    """(name, pattern) per line, with rules written out; a pattern without a name has ""."""
    expander, found = _RuleExpander(rules), list[tuple[str, ast.expr]]()
    for line in ast.parse("\n".join(line.strip() for line in pattern.strip().splitlines())).body:
        assert isinstance(line, ast.Assign | ast.Expr)
        name = ast.unparse(line.targets[0]) if isinstance(line, ast.Assign) else ""
        found.append((name, expander.visit(line.value)))
    return found


class _RuleExpander(ast.NodeTransformer):
    """Replaces calls of rules by their patterns, and negative numbers by constants."""

    def __init__(self, rules: Iterable[tuple[str, str]], known: Mapping[str, ast.expr] | None = None) -> None:
        self.rules, self.known = tuple(rules), known or {}
        self.heads = {head.partition("(")[0]: (head, body) for head, body in self.rules}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.known.get(node.id, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        negative = isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
        return ast.Constant(ast.literal_eval(node)) if negative else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id not in self.heads:
            return node
        head, body = (ast.parse(text.strip(), mode="eval").body for text in self.heads[node.func.id])
        assert isinstance(head, ast.Call)
        names = (x.id for x in head.args if isinstance(x, ast.Name))
        return _RuleExpander(self.rules, dict(zip(names, node.args, strict=True))).visit(body)

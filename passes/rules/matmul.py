"""Contractions: linear layers, matrix products, einsum."""

from __future__ import annotations

import math

import torch

from autoshard.errors import RuleError
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.rules.base import Rule
from autoshard.passes.rules.factors import Factors, argument, input_shapes, output_shapes, positive
from autoshard.passes.rules.named import ops
from autoshard.passes.rules.notation import Groups, bind, parse, rule

aten = torch.ops.aten

PRODUCT: Groups = ((0,), (1,))


def _contraction(op: torch._ops.OpOverload, notation: str, addend: int | None = None) -> Rule:
    """A product of two operands, with an optional addend; all of it is linear in each factor plus the addend."""
    factors = [i for i in range(len(parse(notation).operands)) if i != addend]
    linear = tuple((i,) if addend is None else tuple(sorted((i, addend))) for i in factors)
    parsed = parse(notation)

    def flops(node: Node, graph: Graph) -> float:
        return 2.0 * math.prod(bind(parsed, node, graph).sizes.values())

    return rule(op, notation, linear=linear, addends=() if addend is None else (addend,), flops=flops)


def _by_rank(node: Node, graph: Graph) -> str:
    """matmul's notation: 1-D operands are vectors, leading dims broadcast."""
    left, right = (len(shape) for shape in input_shapes(node, graph))
    a = "k" if left == 1 else "... m k"
    b = "k" if right == 1 else "... k n"
    batch = "..." if max(left, right) > 1 else ""
    return f"{a}, {b} -> {batch} {'m' if left > 1 else ''} {'n' if right > 1 else ''}"


def _matmul_factors(node: Node, graph: Graph) -> Factors:
    return bind(parse(_by_rank(node, graph)), node, graph, PRODUCT)


def _with_addend(op: torch._ops.OpOverload, product: str, result: str) -> Rule:
    """``addmm`` and its like, whose first operand broadcasts to the result."""

    def factors(node: Node, graph: Graph) -> Factors:
        rank = len(input_shapes(node, graph)[0])
        addend = " ".join(result.split()[len(result.split()) - rank :])
        text = f"{addend}, {product} -> {result}"
        return bind(parse(text), node, graph, ((0, 1), (0, 2)), frozenset({0}))

    def strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        return factors(node, graph).strategies(node, graph)

    def flops(node: Node, graph: Graph) -> float:
        return 2.0 * math.prod(factors(node, graph).sizes.values())

    return Rule(op, strategies, flops=flops, notation=f"(broadcast) {result}, {product} -> {result}")


def _equation_terms(node: Node, graph: Graph) -> tuple[list[list[str]], list[str]]:
    """Factors of each operand and of the result of an einsum equation, ``...`` spelled ``...0, ...1`` from the left."""
    equation = argument(node, "equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:  # implicit result: '...' and then the letters that occur once, sorted
        letters = left.replace(".", "").replace(",", "")
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    extra = [len(s) - len(t.replace("...", "")) for t, s in zip(terms, input_shapes(node, graph), strict=True)]
    if any(e and "..." not in t for e, t in zip(extra, terms, strict=True)):
        raise RuleError(f"einsum {equation!r} does not fit operands of shapes {input_shapes(node, graph)}")
    most = max(extra, default=0)

    def spell(term: str, ellipsis: int) -> list[str]:
        before, dots, after = term.partition("...")
        return [*before, *(f"...{most - ellipsis + i}" for i in range(ellipsis) if dots), *after]

    return [spell(t, e) for t, e in zip(terms, extra, strict=True)], spell(right, most)


def _einsum_factors(node: Node, graph: Graph) -> Factors:
    operands, result = _equation_terms(node, graph)
    sizes: dict[str, int] = {}
    for term, shape in zip(operands, input_shapes(node, graph), strict=True):
        for f, n in zip(term, shape, strict=True):
            sizes[f] = n if n != 1 else sizes.get(f, 1)

    def dims(term: list[str], shape: tuple[int, ...]) -> tuple[str | None, ...]:
        return tuple(f if n == sizes[f] else None for f, n in zip(term, shape, strict=True))

    return Factors(
        tuple(map(dims, operands, input_shapes(node, graph))),
        tuple(dims(result, shape) for shape in output_shapes(node, graph)),
        sizes,
        linear=tuple((i,) for i in range(len(operands))),
    )


def _einsum_flops(node: Node, graph: Graph) -> float:
    """2 · product of all factors for two operands; for more, as if contracted in one loop nest."""
    factors = _einsum_factors(node, graph)
    return 2.0 * math.prod(factors.sizes.values()) * max(1, len(factors.inputs) - 1)


def _tensordot_factors(node: Node, graph: Graph) -> Factors:
    left, right = input_shapes(node, graph)
    pairs = dict(
        zip(
            (positive(d, len(right)) for d in argument(node, "dims_other")),
            (positive(d, len(left)) for d in argument(node, "dims_self")),
            strict=True,
        )
    )
    a = [f"m{d}" for d in range(len(left))]
    b = [a[pairs[d]] if d in pairs else f"n{d}" for d in range(len(right))]
    kept = [f for d, f in enumerate(a) if d not in pairs.values()] + [f for d, f in enumerate(b) if d not in pairs]
    sizes: dict[str, int] = {}
    for f, n in zip(a + b, left + right, strict=True):
        sizes[f] = max(n, sizes.get(f, n)) if n != 0 else 0
    # A contracted dim of length 1 broadcasts: that operand lacks the factor.
    rows = (tuple(f if sizes[f] == n else None for f, n in zip(a, left, strict=True)),
            tuple(f if sizes[f] == n else None for f, n in zip(b, right, strict=True)))  # fmt: skip
    return Factors(rows, (tuple(kept),), sizes, linear=PRODUCT)


# Ops on batches of matrices, by what they make of each.
_TO_MATRIX = ops(
    "linalg_inv.default inverse.default matrix_exp.default linalg_cholesky.default cholesky.default "
    "cholesky_inverse.default linalg_matrix_power.default pinverse.default"
)
_TO_VECTOR = ops("linalg_svdvals.default linalg_eigvalsh.default linalg_eigvals.default")
_TO_NUMBER = ops("linalg_det.default logdet.default")

RULES: tuple[Rule, ...] = (
    _contraction(aten.linear.default, "... k, n k, n -> ... n", addend=2),
    _contraction(aten.mm.default, "m k, k n -> m n"),
    _contraction(aten.bmm.default, "b m k, b k n -> b m n"),
    _contraction(aten.mv.default, "m k, k -> m"),
    _contraction(aten.dot.default, "k, k -> "),
    _contraction(aten.vdot.default, "k, k -> "),
    rule(aten.outer.default, "m, n -> m n", linear=PRODUCT),
    rule(aten.ger.default, "m, n -> m n", linear=PRODUCT),
    _contraction(aten.bilinear.default, "... i, ... j, n i j, n -> ... n", addend=3),
    rule(aten.cdist.default, "... m _, ... n _ -> ... m n"),
    *(rule(op, "... _ _ -> ... _ _") for op in _TO_MATRIX),
    *(rule(op, "... _ _ -> ... _") for op in _TO_VECTOR),
    *(rule(op, "... _ _ -> ...") for op in _TO_NUMBER),
    rule(aten.linalg_slogdet.default, "... _ _ -> ..., ..."),
    *(rule(op, "... _ _ -> ... _ _, ...") for op in ops("linalg_cholesky_ex.default linalg_inv_ex.default")),
    *(rule(op, "... _ _ -> ... _, ... _ _") for op in ops("linalg_eigh.default linalg_eig.default")),
    rule(aten.linalg_qr.default, "... _ _ -> ... _ _, ... _ _"),
    rule(aten.linalg_svd.default, "... _ _ -> ... _ _, ... _, ... _ _"),
    rule(aten.linalg_solve_triangular.default, "... _ _, ... _ n -> ... _ n", linear=((1,),)),
    rule(aten.linalg_vecdot.default, "... _, ... _ -> ...", linear=PRODUCT),
    rule(aten.addr.default, "m n, m, n -> m n", linear=((0, 1), (0, 2))),
    rule(aten.trace.default, "_ _ -> ", linear=((0,),)),
    _with_addend(aten.addmm.default, "m k, k n", "m n"),
    _with_addend(aten.addmv.default, "m k, k", "m"),
    _with_addend(aten.baddbmm.default, "b m k, b k n", "b m n"),
    _with_addend(aten.addbmm.default, "b m k, b k n", "m n"),
    Rule(
        aten.matmul.default,
        lambda node, graph: _matmul_factors(node, graph).strategies(node, graph),
        flops=lambda node, graph: 2.0 * math.prod(_matmul_factors(node, graph).sizes.values()),
        notation="... m k, ... k n -> ... m n",
    ),
    Rule(
        aten.einsum.default,
        lambda node, graph: _einsum_factors(node, graph).strategies(node, graph),
        flops=_einsum_flops,
        notation="(its equation)",
    ),
    Rule(
        aten.tensordot.default,
        lambda node, graph: _tensordot_factors(node, graph).strategies(node, graph),
        flops=lambda node, graph: 2.0 * math.prod(_tensordot_factors(node, graph).sizes.values()),
        notation="(its dims)",
    ),
)

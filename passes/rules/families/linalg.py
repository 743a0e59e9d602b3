"""Linear algebra: contractions (linear, matmul, einsum), which shard every factor; factorisations
and solvers by batch, solvers also by right-hand sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autoshard.aten import aten
from autoshard.errors import RuleError
from autoshard.passes.ir.graph import Graph, Node, TensorType, tensor_arguments
from autoshard.passes.rules.base import (
    Dims,
    Factors,
    Facts,
    Rule,
    Types,
    broadcast_shape,
    numbered_factors,
    ops,
    positive,
    product_saves,
    rules,
    sizes_of,
    with_facts,
)
from autoshard.passes.rules.notation import Groups, notation_factors, parse, rule
from autoshard.torch_private.ops import OpOverload

PRODUCT: Groups = ((0,), (1,))


def _contraction_flops(factors: Callable[[Node, Graph], Factors]) -> Callable[[Node, Graph], float]:
    return lambda node, graph: 2.0 * math.prod(factors(node, graph).sizes.values())


def _contraction(op: OpOverload, notation: str, addend: int | None = None) -> Rule:
    """A product of two operands plus an optional addend: jointly linear in factor and addend."""
    parsed = parse(notation)
    factors = [i for i in range(len(parsed.operands)) if i != addend]
    linear = tuple((i,) if addend is None else tuple(sorted((i, addend))) for i in factors)
    flops = _contraction_flops(lambda node, graph: notation_factors(parsed, node, graph))
    found = rule(op, notation, linear=linear, addends=() if addend is None else (addend,), flops=flops)
    names = tensor_arguments(op)
    added = "" if addend is None else names[addend]
    return replace(found, facts=Facts(product_saves(*(names[i] for i in factors)), addend=added))


def _by_rank(node: Node, graph: Graph) -> str:
    """Notation of matmul: 1-D operands are vectors, leading dims broadcast."""
    left, right = (len(shape) for shape in graph.shapes(node.inputs))
    a = "k" if left == 1 else "... m k"
    b = "k" if right == 1 else "... k n"
    batch = "..." if max(left, right) > 1 else ""
    return f"{a}, {b} -> {batch} {'m' if left > 1 else ''} {'n' if right > 1 else ''}"


def _matmul(node: Node, graph: Graph) -> Factors:
    return notation_factors(parse(_by_rank(node, graph)), node, graph, PRODUCT)


def _with_addend(op: OpOverload, product: str, result: str) -> Rule:
    """``addmm`` and its kin: the first operand broadcasts to the result."""

    def factors(node: Node, graph: Graph) -> Factors:
        rank = len(graph.shapes(node.inputs)[0])
        addend = " ".join(result.split()[len(result.split()) - rank :])
        text = f"{addend}, {product} -> {result}"
        return notation_factors(parse(text), node, graph, ((0, 1), (0, 2)), frozenset({0}))

    addend, *operands = tensor_arguments(op)
    facts = Facts(product_saves(*operands), addend=addend)
    return Rule(
        op, factors, None, _contraction_flops(factors), f"(broadcast) {result}, {product} -> {result}", facts=facts
    )


def _equation_terms(node: Node, graph: Graph) -> tuple[list[list[str]], list[str]]:
    """Factors of einsum operands and result; ``...`` becomes ``...0, ...1`` from the left."""
    equation = node.argument("equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:  # implicit result: '...', then the letters that occur once, sorted
        letters = left.replace(".", "").replace(",", "")
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    extra = [len(s) - len(t.replace("...", "")) for t, s in zip(terms, graph.shapes(node.inputs), strict=True)]
    if any(e and "..." not in t for e, t in zip(extra, terms, strict=True)):
        raise RuleError(f"einsum {equation!r} does not fit operands of shapes {graph.shapes(node.inputs)}")
    most = max(extra, default=0)

    def spell(term: str, ellipsis: int) -> list[str]:
        before, dots, after = term.partition("...")
        return [*before, *(f"...{most - ellipsis + i}" for i in range(ellipsis) if dots), *after]

    return [spell(t, e) for t, e in zip(terms, extra, strict=True)], spell(right, most)


def _einsum(node: Node, graph: Graph) -> Factors:
    operands, result = _equation_terms(node, graph)
    sizes: dict[str, int] = {}
    for term, shape in zip(operands, graph.shapes(node.inputs), strict=True):
        for f, n in zip(term, shape, strict=True):
            sizes[f] = n if n != 1 else sizes.get(f, 1)

    def dims(term: list[str], shape: tuple[int, ...]) -> tuple[str | None, ...]:
        return tuple(f if n == sizes[f] else None for f, n in zip(term, shape, strict=True))

    return Factors(
        tuple(map(dims, operands, graph.shapes(node.inputs))),
        tuple(dims(result, shape) for shape in graph.shapes(node.outputs)),
        sizes,
        linear=tuple((i,) for i in range(len(operands))),
    )


def _einsum_flops(node: Node, graph: Graph) -> float:
    """FLOPs as of one loop nest over all operands."""
    factors = _einsum(node, graph)
    return 2.0 * math.prod(factors.sizes.values()) * max(1, len(factors.inputs) - 1)


def _tensordot(node: Node, graph: Graph) -> Factors:
    left, right = graph.shapes(node.inputs)
    contracted = zip(node.argument("dims_other"), node.argument("dims_self"), strict=True)
    pairs = {positive(theirs, len(right)): positive(ours, len(left)) for theirs, ours in contracted}
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


def _copied_operands(node: Node, types: Types) -> dict[str, TensorType]:
    """Operands of a batched product that torch copies: broadcast, or a batch right of a matrix."""
    given = dict(zip(("self", "other"), (types[name] for name in node.inputs), strict=True))
    left, right = (x.shape for x in given.values())
    if len(right) > 2 >= len(left):
        return {"other": given["other"]}
    batch = broadcast_shape(left[:-2], right[:-2])
    if min(len(left), len(right)) < 3 or len(batch) < 2:
        return {}
    return {n: TensorType((*batch, *x.shape[-2:]), x.dtype) for n, x in given.items() if x.shape[:-2] != batch}


def _matmul_saves(node: Node, types: Types) -> str:
    copied = _copied_operands(node, types)
    pairs = (("self", "other"), ("other", "self"))
    return "; ".join(f"{wants}: {kept}" for wants, kept in pairs if kept not in copied)


def _matmul_intermediates(node: Node, types: Types) -> tuple[TensorType, ...]:
    wants = {"self": types[node.inputs[1]].grad, "other": types[node.inputs[0]].grad}
    return tuple(type_ for name, type_ in _copied_operands(node, types).items() if wants[name])


def _einsum_saves(node: Node, types: Types) -> str:
    """An operand may be saved as a permuted copy of equal size."""
    return product_saves(*(f"tensors{i}" for i in range(len(node.inputs))))


# Ops on batches of matrices, by result and by what autograd saves.
_TO_MATRIX = {
    "result": "linalg_inv.default inverse.default linalg_cholesky.default cholesky.default",
    "self": "matrix_exp.default",
    "self result": "cholesky_inverse.default pinverse.default",
}
_TO_VECTOR = ops("linalg_svdvals.default linalg_eigvalsh.default linalg_eigvals.default")
_TO_NUMBER = ops("linalg_det.default logdet.default")
OUTER_FACTS = Facts(product_saves("self", "vec2"))
SAVES_RESULT = Facts(saves="result")
SAVES_BOTH_RESULTS = Facts(saves="result result1")
BMM_FACTS = Facts(product_saves("self", "mat2"))

MATMUL_RULES: tuple[Rule, ...] = (
    _contraction(aten.linear.default, "... k, n k, n -> ... n", addend=2),
    _contraction(aten.mm.default, "m k, k n -> m n"),
    replace(_contraction(aten.bmm.default, "b m k, b k n -> b m n"), facts=BMM_FACTS),
    _contraction(aten.mv.default, "m k, k -> m"),
    _contraction(aten.dot.default, "k, k -> "),
    _contraction(aten.vdot.default, "k, k -> "),
    rule(aten.outer.default, "m, n -> m n", linear=PRODUCT, facts=OUTER_FACTS),
    rule(aten.ger.default, "m, n -> m n", linear=PRODUCT, facts=OUTER_FACTS),
    _contraction(aten.bilinear.default, "... i, ... j, n i j, n -> ... n", addend=3),
    rule(aten.cdist.default, "... m _, ... n _ -> ... m n", facts=Facts("x1 x2 result")),
    *(rule(op, "... _ _ -> ... _ _", facts=Facts(kept)) for kept, names in _TO_MATRIX.items() for op in ops(names)),
    rule(aten.linalg_matrix_power.default, "... _ _ -> ... _ _"),
    *(rule(op, "... _ _ -> ... _") for op in _TO_VECTOR),
    *(rule(op, "... _ _ -> ...") for op in _TO_NUMBER),
    rule(aten.linalg_slogdet.default, "... _ _ -> ..., ..."),
    rule(aten.linalg_cholesky_ex.default, "... _ _ -> ... _ _, ...", facts=SAVES_RESULT),
    rule(aten.linalg_inv_ex.default, "... _ _ -> ... _ _, ...", facts=SAVES_RESULT),
    *(
        rule(op, "... _ _ -> ... _, ... _ _", facts=SAVES_BOTH_RESULTS)
        for op in ops("linalg_eigh.default linalg_eig.default")
    ),
    rule(aten.linalg_qr.default, "... _ _ -> ... _ _, ... _ _", facts=SAVES_BOTH_RESULTS),
    rule(aten.linalg_svd.default, "... _ _ -> ... _ _, ... _, ... _ _", facts=Facts("result result1 result2")),
    rule(
        aten.linalg_solve_triangular.default, "... _ _, ... _ n -> ... _ n", linear=((1,),), facts=Facts("self result")
    ),
    rule(aten.linalg_vecdot.default, "... _, ... _ -> ...", linear=PRODUCT, facts=Facts(product_saves("x", "y"))),
    rule(aten.addr.default, "m n, m, n -> m n", linear=((0, 1), (0, 2)), facts=Facts(product_saves("vec1", "vec2"))),
    rule(aten.trace.default, "_ _ -> ", linear=((0,),), facts=Facts(saves="")),
    _with_addend(aten.addmm.default, "m k, k n", "m n"),
    _with_addend(aten.addmv.default, "m k, k", "m"),
    _with_addend(aten.baddbmm.default, "b m k, b k n", "b m n"),
    _with_addend(aten.addbmm.default, "b m k, b k n", "m n"),
    Rule(
        aten.matmul.default,
        _matmul,
        None,
        _contraction_flops(_matmul),
        "... m k, ... k n -> ... m n",
        facts=Facts(_matmul_saves, _matmul_intermediates),
    ),
    Rule(
        aten.einsum.default,
        _einsum,
        None,
        _einsum_flops,
        "(its equation)",
        facts=Facts(_einsum_saves),
    ),
    Rule(
        aten.tensordot.default,
        _tensordot,
        None,
        _contraction_flops(_tensordot),
        "(its dims)",
        facts=Facts(product_saves("self", "other")),
    ),
)


def _batches(*kept: int) -> Callable[[Node, Graph], Factors]:
    """Leading dims (aligned from the right) are factors; ``kept``: trailing unsharded dims per
    operand, then per result slot. Results of another rank (not asked for) are unsharded."""

    def factors(node: Node, graph: Graph) -> Factors:
        shapes, results = graph.shapes(node.inputs), graph.shapes(node.outputs)
        whole = [*kept[: len(shapes)], *(kept[len(shapes) + slot] for slot in node.output_slots)]
        rows = list(zip([*shapes, *results], whole, strict=True))
        most = max((shape[: len(shape) - n] for shape, n in rows), key=len)
        longest = [
            max((s[len(s) - n - i] for s, n in rows if len(s) - n >= i), default=1) for i in range(len(most), 0, -1)
        ]
        names = numbered_factors(longest)

        def dims(shape: tuple[int, ...], n: int) -> Dims:
            free = len(shape) - n
            start = len(longest) - free
            if free < 0:
                return (None,) * len(shape)
            led = tuple(names[start + i] if shape[i] == longest[start + i] else None for i in range(free))
            return (*led, *((None,) * n))

        every = [dims(shape, n) for shape, n in rows]
        return _independent_factors(every[: len(shapes)], every[len(shapes) :], sizes_of(longest))

    return factors


def _independent_factors(inputs: Sequence[Dims], outputs: Sequence[Dims], sizes: Mapping[str, int]) -> Factors:
    """Only factors of every result: a result without one would be a sum, which is wrong here."""
    kept = {f: n for f, n in sizes.items() if all(f in dims for dims in outputs)}
    return Factors(tuple(inputs), tuple(outputs), kept)


def _solve_ex(node: Node, graph: Graph) -> Factors:
    """A X = B or X A = B; results X, (X, info) or (X, LU, pivots, info) by op. A right-hand side
    with one dim less than A is a batch of vectors."""
    a, b = graph.shapes(node.inputs)
    vectors = len(b) == 1 or (len(a) - 1 == len(b) and a[:-1] == b)
    rest = (2, 1, 0) if "_linalg" in str(node.op) else (0,)
    matrix = 1 if vectors else 2
    found = _batches(2, matrix, matrix, *rest)(node, graph)
    if vectors or 0 not in node.output_slots:
        return found
    from_end = 1 if node.argument("left") else 2
    at = node.output_slots.index(0)
    outputs = list(found.outputs)
    outputs[at] = _with_columns(outputs[at], from_end)
    columns = _with_columns(found.inputs[1], from_end)
    return _independent_factors((found.inputs[0], columns), outputs, {**found.sizes, "n": b[-from_end]})


def _with_columns(dims: Dims, from_end: int) -> Dims:
    at = len(dims) - from_end
    return tuple("n" if d == at else f for d, f in enumerate(dims))


def _index_reduce(node: Node, graph: Graph) -> Factors:
    """All dims but the indexed one are factors."""
    source, index, values = graph.shapes(node.inputs)
    whole = (positive(node.argument("dim"), len(source)),) if source else ()
    dims = numbered_factors(source, whole)
    given: Dims = dims if len(values) == len(source) else (None,) * len(values)
    return Factors((dims, (None,) * len(index), given), (dims,), sizes_of(source))


LINALG_RULES: tuple[Rule, ...] = (
    *rules(
        "_linalg_solve_ex.default",
        _solve_ex,
        None,
        "... _ _, ... _ n -> ... _ n, …",
        facts=Facts("A result result1 result2"),
    ),
    *rules("linalg_solve.default linalg_solve_ex.default", _solve_ex, None, "... _ _, ... _ n -> ... _ n, …"),
    *with_facts(
        Facts(saves="result result1"),
        (
            rule(aten.linalg_lu_factor_ex.default, "... _ _ -> ... _ _, ... _, ..."),
            rule(aten.linalg_lu_factor.default, "... _ _ -> ... _ _, ... _"),
            rule(aten._lu_with_info.default, "... _ _ -> ... _ _, ... _, ..."),
        ),
    ),
    rule(aten.linalg_lu.default, "... _ _ -> ... _ _, ... _ _, ... _ _"),
    *with_facts(
        Facts(saves=""),
        (
            rule(aten.linalg_ldl_factor.default, "... _ _ -> ... _ _, ... _"),
            rule(aten.linalg_ldl_factor_ex.default, "... _ _ -> ... _ _, ... _, ..."),
            rule(aten.linalg_ldl_solve.default, "... _ _, ... _, ... _ n -> ... _ n"),
            *rules("lu_unpack.default", _batches(2, 1, 2, 2, 2), None, "... _ _, ... _ -> ... _ _, ... _ _, ... _ _"),
            rule(aten.geqrf.default, "... _ _ -> ... _ _, ... _"),
        ),
    ),
    *rules("linalg_lu_solve.default", _batches(2, 1, 2, 2), None, "... _ _, ... _, ... _ _ -> ... _ _"),
    rule(aten.linalg_householder_product.default, "... _ _, ... _ -> ... _ _"),
    rule(aten.ormqr.default, "... _ _, ... _, ... _ _ -> ... _ _", linear=((2,),)),
    rule(aten.cholesky_solve.default, "... _ n, ... _ _ -> ... _ n", linear=((0,),)),
    rule(aten.triangular_solve.default, "... _ _, ... _ _ -> ... _ _, ... _ _", facts=Facts("self A result")),
    rule(aten.linalg_pinv.atol_rtol_tensor, "... _ _, ..., ... -> ... _ _", facts=Facts("self result")),
    *with_facts(
        Facts(saves="input grid"),
        (
            rule(aten.grid_sampler_2d.default, "n c _ _, n h w _ -> n c h w", linear=((0,),)),
            rule(aten.grid_sampler_3d.default, "n c _ _ _, n d h w _ -> n c d h w", linear=((0,),)),
        ),
    ),
    *rules("index_reduce.default", _index_reduce, None, "dim unsharded"),
)


RULES: tuple[Rule, ...] = (*MATMUL_RULES, *LINALG_RULES)

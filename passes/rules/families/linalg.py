"""Factorisations and solvers: sharded batches of matrices and right-hand sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.rules.base import Facts, Rule, rules, stating
from autoshard.passes.rules.factors import Dims, Factors, numbered, positive, sizes_of
from autoshard.passes.rules.notation import rule

MATRIX = 2
"""dims of one matrix"""


def _batches(*kept: int) -> Callable[[Node, Graph], Factors]:
    """Leading dims (aligned from the right) are factors; ``kept`` trailing dims are unsharded.

    ``kept`` has one number per operand, then one per result slot. Results of another rank (not
    asked for) are unsharded.
    """

    def factors(node: Node, graph: Graph) -> Factors:
        shapes, results = graph.shapes(node.inputs), graph.shapes(node.outputs)
        whole = [*kept[: len(shapes)], *(kept[len(shapes) + slot] for slot in node.output_slots)]
        rows = list(zip([*shapes, *results], whole, strict=True))
        most = max((shape[: len(shape) - n] for shape, n in rows), key=len)
        longest = [
            max((s[len(s) - n - i] for s, n in rows if len(s) - n >= i), default=1) for i in range(len(most), 0, -1)
        ]
        names = numbered(longest)

        def dims(shape: tuple[int, ...], n: int) -> Dims:
            free = len(shape) - n
            start = len(longest) - free
            if free < 0:
                return (None,) * len(shape)
            led = tuple(names[start + i] if shape[i] == longest[start + i] else None for i in range(free))
            return (*led, *((None,) * n))

        every = [dims(shape, n) for shape, n in rows]
        return _independent(every[: len(shapes)], every[len(shapes) :], sizes_of(longest))

    return factors


def _independent(inputs: Sequence[Dims], outputs: Sequence[Dims], sizes: Mapping[str, int]) -> Factors:
    """Only factors of every result: a result without one would be a sum, which is wrong here."""
    kept = {f: n for f, n in sizes.items() if all(f in dims for dims in outputs)}
    return Factors(tuple(inputs), tuple(outputs), kept)


def _solve_ex(node: Node, graph: Graph) -> Factors:
    """A X = B or X A = B; results X, (X, info) or (X, LU, pivots, info) by op.

    A right-hand side with one dim less than A is a batch of vectors.
    """
    a, b = graph.shapes(node.inputs)
    vectors = len(b) == 1 or (len(a) - 1 == len(b) and a[:-1] == b)
    rest = (MATRIX, 1, 0) if "_linalg" in str(node.op) else (0,)
    matrix = 1 if vectors else MATRIX
    found = _batches(MATRIX, matrix, matrix, *rest)(node, graph)
    if vectors or 0 not in node.output_slots:
        return found
    from_end = 1 if node.argument("left") else 2
    at = node.output_slots.index(0)
    outputs = list(found.outputs)
    outputs[at] = _with_columns(outputs[at], from_end)
    columns = _with_columns(found.inputs[1], from_end)
    return _independent((found.inputs[0], columns), outputs, {**found.sizes, "n": b[-from_end]})


def _with_columns(dims: Dims, from_end: int) -> Dims:
    at = len(dims) - from_end
    return tuple("n" if d == at else f for d, f in enumerate(dims))


def _index_reduce(node: Node, graph: Graph) -> Factors:
    """All dims but the indexed one are factors."""
    source, index, values = graph.shapes(node.inputs)
    whole = (positive(node.argument("dim"), len(source)),) if source else ()
    dims = numbered(source, whole)
    given: Dims = dims if len(values) == len(source) else (None,) * len(values)
    return Factors((dims, (None,) * len(index), given), (dims,), sizes_of(source))


RULES: tuple[Rule, ...] = (
    *rules(
        "_linalg_solve_ex.default",
        _solve_ex,
        None,
        "... _ _, ... _ n -> ... _ n, …",
        facts=Facts("A result result1 result2"),
    ),
    *rules("linalg_solve.default linalg_solve_ex.default", _solve_ex, None, "... _ _, ... _ n -> ... _ n, …"),
    *stating(
        Facts(saves="result result1"),
        (
            rule(aten.linalg_lu_factor_ex.default, "... _ _ -> ... _ _, ... _, ..."),
            rule(aten.linalg_lu_factor.default, "... _ _ -> ... _ _, ... _"),
            rule(aten._lu_with_info.default, "... _ _ -> ... _ _, ... _, ..."),
        ),
    ),
    rule(aten.linalg_lu.default, "... _ _ -> ... _ _, ... _ _, ... _ _"),
    *stating(
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
    *stating(
        Facts(saves="input grid"),
        (
            rule(aten.grid_sampler_2d.default, "n c _ _, n h w _ -> n c h w", linear=((0,),)),
            rule(aten.grid_sampler_3d.default, "n c _ _ _, n d h w _ -> n c d h w", linear=((0,),)),
        ),
    ),
    *rules("index_reduce.default", _index_reduce, None, "dim whole"),
)

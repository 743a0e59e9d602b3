"""Patterns of MoE routing in a graph: products by expert, gates, rows that chose an expert."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.positions import LinearIndex, PositionAnalysis
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.rules.facts import is_random
from autoshard.runtime.operations.grouped import grouped_mm


class ExpertProduct(NamedTuple):
    """A product of rows and matrices of experts."""

    rows: Ref
    matrices: Ref
    transposed: bool
    """whether matrices are [.., in, out]; else [.., out, in]"""
    bias: Ref | None = None


class OneHotIds(NamedTuple):
    """Expert ids as a one-hot mask, where zero rows stand for dropped choices."""

    mask: Ref


ExpertIds = Ref | OneHotIds
ProductMatcher = Callable[[Ref], ExpertProduct | None]
"""matcher: a value → its product, or None"""
_GROUPED_MATMULS = {grouped_mm._opoverload, aten._grouped_mm.default}
_UNUSED_RESHAPES = (
    aten.reshape.default,
    aten._to_copy.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.clone.default,
)


def einsum_dims(node: Node, operands: Sequence[Ref]) -> tuple[str, ...]:
    """Dims of einsum operands, in this order, and of the result, renamed a, b, … by appearance."""
    left, _, right = node.args[0].replace(" ", "").partition("->")
    by_operand = dict(zip((r.name for r in node.args[1]), left.split(","), strict=True))
    terms = [*(by_operand[r.name] for r in operands), right]
    names: dict[str, str] = {}
    for letter in itertools.chain.from_iterable(terms):
        names.setdefault(letter, chr(ord("a") + len(names)))
    return tuple("".join(names[x] for x in term) for term in terms)


class RoutingPatterns:
    """Matches patterns of MoE routing in a graph; each method returns None where none is found."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.positions = graph, PositionAnalysis(graph)
        self._alike: dict[Any, Ref] = {}

    def made(self, value: Any, *ops: Any) -> Node | None:
        """The producer of ``value``, if its op is one of ``ops``."""
        node = self.graph.producers.get(value.name) if isinstance(value, Ref) else None
        return node if node is not None and node.op in ops else None

    def same(self, a: Any, b: Any) -> bool:
        """Whether two arguments are equal, or computed alike (common subexpressions)."""
        if isinstance(a, tuple | list) and isinstance(b, tuple | list):
            return len(a) == len(b) and all(map(self.same, a, b))
        if a == b or not isinstance(a, Ref) or not isinstance(b, Ref):
            return bool(a == b)
        one, other = (self.graph.producers.get(x.name) for x in (a, b))
        if one is None or other is None or one.op is not other.op or is_random(one):
            return False
        alike = one.outputs.index(a.name) == other.outputs.index(b.name) and one.kwargs == other.kwargs
        return alike and self.same(one.args, other.args)

    def is_zero(self, value: Ref) -> bool:
        known = self.positions(value)
        return isinstance(known, LinearIndex) and known.is_constant and known.start == 0

    def times(self, value: Ref) -> Iterator[tuple[Ref, Ref]]:
        """The factors of a product, in both orders."""
        node = self.made(value, aten.mul.Tensor)
        if node is not None and len(node.inputs) == 2:
            yield node.args[0], node.args[1]
            yield node.args[1], node.args[0]

    # --- experts ---

    def activated(self, mid: Ref) -> Iterator[tuple[Ref | None, Ref, str]]:
        """(up projection or None, gate before its activation, activation): SwiGLU and the like."""
        sides = [(None, mid), *((up, gate) for gate, up in self.times(mid))]
        for up, gate in sides:
            node = self.made(gate, aten.silu.default, aten.gelu.default, aten.relu.default)
            if node is not None:
                name = node.op._schema.name.removeprefix("aten::")
                yield (
                    up,
                    node.args[0],
                    f"{name}_tanh" if name == "gelu" and node.argument("approximate") == "tanh" else name,
                )

    def first_equal_value(self, value: Ref) -> Ref:
        """The first value that is computed alike (common subexpression elimination)."""
        node = self.graph.producers.get(value.name)
        if node is None or is_random(node) or len(node.outputs) > 1:
            return value
        return self._alike.setdefault((node.op, repr(node.args), repr(node.kwargs)), value)

    def halves(self, gate: Ref, up: Ref) -> tuple[Ref] | None:
        """The value whose halves along the last dim are ``gate`` and ``up``."""
        node = self.made(gate, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
        if node is None or node.outputs != (gate.name, up.name) or node.output_slots != (0, 1):
            return None
        shapes = {self.graph.shape(name) for name in node.outputs}
        rank = len(self.graph.shape(gate))
        whole = self.graph.shape(node.args[0])[-1] == 2 * self.graph.shape(gate)[-1]
        return (node.args[0],) if len(shapes) == 1 and whole and node.argument("dim") % rank == rank - 1 else None

    def by_expert(self, value: Ref) -> ExpertProduct | None:
        """A batched product [e, t, n] of rows [t, k] or [e, t, k] with matrices of all experts."""
        if (node := self.made(value, aten.bmm.default, aten.matmul.default)) is not None:
            rows, matrices = node.args
            shapes = self.graph.shapes((rows.name, matrices.name))
            return ExpertProduct(rows, matrices, True) if len(shapes[1]) == 3 and len(shapes[0]) in (2, 3) else None
        node = self.made(value, aten.einsum.default)
        for rows, matrices in (node.args[1], node.args[1][::-1]) if node is not None and len(node.args[1]) == 2 else ():
            named = einsum_dims(node, (rows, matrices))  # type: ignore[arg-type]
            if named in (("ab", "cbd", "cad"), ("abc", "acd", "abd")):
                return ExpertProduct(rows, matrices, True)
            if named in (("ab", "cdb", "cad"), ("abc", "adc", "abd")):
                return ExpertProduct(rows, matrices, False)
        return None

    def grouped_products(self, ends: list[str]) -> ProductMatcher:
        """Matcher of grouped products (grouped GEMM); appends group ends to ``ends``."""

        def product(value: Ref) -> ExpertProduct | None:
            if (node := self.made(value, *_GROUPED_MATMULS)) is None or len(node.inputs) != 3:
                return None
            rows, matrices, at = (Ref(name) for name in node.inputs)
            ends.append(at.name)
            turned = self.made(matrices, aten.transpose.int)
            if turned is not None and {d % 3 for d in turned.args[1:3]} == {1, 2}:
                return ExpertProduct(rows, turned.args[0], False)
            return ExpertProduct(rows, matrices, True)

        return product

    def products_of_expert(self, number: int) -> ProductMatcher:
        """Matcher of products with the matrix of expert ``number``."""

        def product(value: Ref) -> ExpertProduct | None:
            node = self.made(self.without_row_reshape(value), aten.matmul.default, aten.mm.default, aten.linear.default)
            if node is None:
                return None
            rows, matrix, *bias = (node.args[i] for i in range(len(node.inputs)))
            transposed = node.op is not aten.linear.default
            turned = self.made(matrix, aten.t.default, aten.transpose.int, aten.permute.default)
            if turned is not None:
                matrix, transposed = turned.args[0], not transposed
            if len(self.graph.shape(matrix)) == 2 and matrix.name in self.graph.parameters:  # a module per expert
                return ExpertProduct(rows, matrix, transposed, *bias)
            one = self.made(matrix, aten.select.int)
            if bias or one is None or one.args[1:] != (0, number) or len(self.graph.shape(one.args[0])) != 3:
                return None
            return ExpertProduct(rows, self.first_equal_value(one.args[0]), transposed)

        return product

    def without_row_reshape(self, value: Ref) -> Ref:
        """``value`` without a reshape [t, n] → [t, n] of the same width."""
        node = self.made(value, aten.reshape.default)
        shapes = [] if node is None else [self.graph.shape(x) for x in (value, node.args[0])]
        same = node is not None and [len(s) for s in shapes] == [2, 2] and shapes[0][1] == shapes[1][1]
        return node.args[0] if node is not None and same else value

    # --- gates ---

    def gates(self, value: Ref) -> tuple[Ref, Ref] | None:
        """(ids, weights) [t, k] of dense gates [t, e], in the dims before a reshape of t."""
        if (shaped := self.made(value, aten.reshape.default)) is not None:
            alike = self.graph.shape(shaped.args[0])[-1:] == self.graph.shape(value)[-1:]
            return self.gates(shaped.args[0]) if alike else None
        if (node := self.made(value, aten.scatter.src)) is not None:
            zeros, dim, ids, weights = node.args
            rank = len(self.graph.shape(value))
            same = self.graph.shape(ids) == self.graph.shape(weights)
            last = dim % rank == rank - 1 > 0
            return (ids, weights) if self.is_zero(zeros) and last and same and self.is_distinct(ids) else None
        if (node := self.made(value, aten.sum.dim_IntList)) is not None and node.args[1:] == ([1],):
            for hot, weights in self.times(node.args[0]):
                one, last = (
                    self.made(self.without_casts(hot), aten.one_hot.default),
                    self.made(weights, aten.unsqueeze.default),
                )
                if one is not None and last is not None and last.args[1] in (2, -1):
                    return self._pair(one, last.args[0])
        if (node := self.made(value, aten.einsum.default)) is not None and len(node.args[1]) == 2:
            for hot, weights in (node.args[1], node.args[1][::-1]):
                one = self.made(self.without_casts(hot), aten.one_hot.default)
                if one is not None and einsum_dims(node, (hot, weights)) == ("abc", "ab", "ac"):
                    return self._pair(one, weights)
        return None

    def column(self, value: Ref) -> tuple[Ref, int] | None:
        """(gates, number) where ``value`` [.., 1] is column ``number`` of gates [.., e]."""
        rank = len(self.graph.shape(value))
        if (node := self.made(value, aten.slice.Tensor)) is not None:
            start = node.argument("start") or 0
            one = node.argument("dim") % rank == rank - 1 and self.graph.shape(value)[-1] == 1
            return (node.args[0], start) if one and isinstance(start, int) and start >= 0 else None
        wide = self.made(value, aten.unsqueeze.default)
        one_ = self.made(wide.args[0], aten.select.int) if wide is not None and wide.args[1] in (-1, rank - 1) else None
        if one_ is None or one_.args[1] not in (-1, rank - 1) or one_.args[2] < 0:
            return None
        return one_.args[0], int(one_.args[2])

    def _pair(self, one: Node, weights: Ref) -> tuple[Ref, Ref] | None:
        ids = one.args[0]
        shapes = self.graph.shapes((ids.name, weights.name))
        return (ids, weights) if shapes[0] == shapes[1] and len(shapes[0]) == 2 else None

    def without_casts(self, value: Ref) -> Ref:
        """``value`` before casts."""
        node = self.made(value, aten._to_copy.default)
        return value if node is None else self.without_casts(node.args[0])

    def is_distinct(self, ids: Ref) -> bool:
        """Whether the ids of a row are distinct: they come from ``topk``."""
        if (shaped := self.made(ids, aten.reshape.default)) is not None:
            same = self.graph.shape(shaped.args[0])[-1:] == self.graph.shape(ids)[-1:]
            return same and self.is_distinct(shaped.args[0])
        node = self.made(ids, aten.topk.default)
        rank = len(self.graph.shape(ids))
        return node is not None and node.outputs[-1] == ids.name and node.argument("dim") % rank == rank - 1

    # --- rows sorted by expert ---

    def divided(self, rows: Ref) -> tuple[Ref | None, int]:
        """(order, k) of ``rows`` = order // k; (None, 0) if it is something else."""
        node = self.made(rows, aten.floor_divide.default, aten.div.Tensor_mode)
        if node is None or not isinstance(node.args[1], int) or node.kwargs.get("rounding_mode", "floor") == "true":
            return None, 0
        return node.args[0], node.args[1]

    def sorted_ids(self, order: Ref) -> tuple[Ref, Ref] | None:
        """(ids [t, k], ids [t · k]) where ``order`` is the argsort of the latter."""
        node = self.made(order, aten.argsort.default, aten.argsort.stable, aten.sort.default, aten.sort.stable)
        if node is None or node.argument("descending") or (len(node.outputs) == 2 and node.outputs[1] != order.name):
            return None
        flat = Ref(node.inputs[0])
        shaped = self.made(flat, aten.reshape.default)
        whole = None if shaped is None else shaped.args[0]
        return (whole, flat) if whole is not None and len(self.graph.shape(whole)) == 2 else None

    def picks(self, node: Node) -> Ref | None:
        """The row indices of an ``index`` or ``index_select``."""
        if node.op is aten.index_select.default:
            return node.args[2] if node.args[1] == 0 else None
        return node.args[1][0] if len(node.args[1]) == 1 else None

    def ends_of(self, ends: Ref) -> tuple[Ref, Ref] | None:
        """(ids, ids flattened) where ``ends`` is the cumulative sum of their bincount."""
        sums = self.made(self.without_casts(ends), aten.cumsum.default)
        counts = self.made(self.without_casts(sums.args[0]), aten.bincount.default) if sums is not None else None
        if counts is None or len(counts.inputs) != 1:
            return None
        shaped = self.made(counts.args[0], aten.reshape.default)
        return (shaped.args[0], counts.args[0]) if shaped is not None else None

    def weights_in_order(self, factor: Ref, order: Ref, ids: tuple[Ref, Ref]) -> Ref | None:
        """The weights [t, k] that ``factor`` [t · k, 1] has in sorted ``order``."""
        last = self.made(factor, aten.unsqueeze.default)
        picked = self.made(last.args[0], aten.index.Tensor, aten.index_select.default) if last is not None else None
        if picked is None or not self.same(self.picks(picked), order):
            return None
        shaped = self.made(picked.args[0], aten.reshape.default)
        same = shaped is not None and self.graph.shape(shaped.args[0]) == self.graph.shape(ids[0])
        return shaped.args[0] if shaped is not None and same else None

    # --- a loop over experts ---

    def of_rows(self, value: Ref, rows: Ref) -> Ref | None:
        """The source x of ``value`` = x[rows]."""
        shaped = self.made(value, aten.reshape.default)
        picked = self.made(value if shaped is None else shaped.args[0], aten.index.Tensor)
        if picked is None:
            return None
        source: Ref = picked.args[0]
        if shaped is None and picked.args[1] == [rows]:
            return source
        wide = self.made(source, aten.unsqueeze.default)
        if shaped is None or wide is None or wide.args[1] != 0 or picked.args[1] != [None, rows]:
            return None
        base: Ref = wide.args[0]
        shapes = self.graph.shape(value), self.graph.shape(base)
        return base if [len(s) for s in shapes] == [2, 2] and shapes[0][1] == shapes[1][1] else None

    def added(self, node: Node) -> tuple[Ref, Ref, Ref] | None:
        """(total, rows, values) of ``total.index_add(0, rows, values)``, or of ``index_put``."""
        if node.op is aten.index_add.default and node.args[1] == 0 and not node.kwargs:
            return node.args[0], node.args[2], node.args[3]
        if node.op is not aten.index_put.default or len(node.args[1]) != 1:
            return None
        total, (rows,), value = node.args[:3]
        if node.argument("accumulate"):
            return total, rows, value
        sum_ = self.made(value, aten.add.Tensor)
        for old, new in (sum_.args, sum_.args[::-1]) if sum_ is not None and not sum_.kwargs else ():
            read = self.made(old, aten.index.Tensor)
            if read is not None and read.args[1] == [rows]:
                return (total, rows, new) if read.args[0] == total else None
        return None

    def chosen(self, rows: Ref) -> tuple[ExpertIds, int, Ref | None] | None:
        """(ids, expert, slots): ``rows``, ``slots`` are the indices where ids [t, k] == expert."""
        node = self.made(rows, aten.where.default)
        if node is None or len(node.outputs) != 2:
            return None
        first, second = node.outputs
        if (equal := self.made(node.args[0], aten.eq.Scalar)) is not None and rows.name == first:
            return (equal.args[0], equal.args[1], Ref(second)) if isinstance(equal.args[1], int) else None
        one = self.of_expert(node.args[0])  # of one_hot(ids) permuted to [experts, k, t]
        turned = self.made(one[0], aten.permute.default) if one is not None else None
        if one is None or turned is None or list(turned.args[1]) != [2, 1, 0] or rows.name != second:
            return None
        if (hot := self.made(turned.args[0], aten.one_hot.default)) is not None:
            return hot.args[0], one[1], Ref(first)
        return (OneHotIds(turned.args[0]), one[1], Ref(first)) if self.is_one_hot(turned.args[0]) else None

    def of_expert(self, value: Ref) -> tuple[Ref, int] | None:
        """(masks, number) where ``value`` is masks[number], the mask of one expert."""
        value = self.without_casts(value)
        while (node := self.made(value, aten.squeeze.dim)) is not None and node.args[1] == 0:
            value = node.args[0]
        if (node := self.made(value, aten.select.int)) is not None:
            return (node.args[0], int(node.args[2])) if node.args[1] == 0 else None
        node = self.made(value, aten.index.Tensor)
        if node is None or len(node.args[1]) != 1 or not isinstance(node.args[1][0], Ref):
            return None
        number = self.graph.constants.get(node.args[1][0].name)
        return (node.args[0], int(number)) if number is not None and number.numel() == 1 else None

    def is_one_hot(self, value: Ref) -> bool:
        """Whether ``value`` is one-hot along the last dim, or zero where a choice was dropped."""
        if (node := self.made(value, aten.reshape.default)) is not None:
            return self.graph.shape(node.args[0])[-1] == self.graph.shape(value)[-1] and self.is_one_hot(node.args[0])
        if self.made(value, aten.one_hot.default) is not None:
            return True
        pairs = [(a, self.without_casts(b)) for a, b in self.times(value)]
        return any(self.graph.types[b.name].dtype == torch.bool and self.is_one_hot(a) for a, b in pairs)

    def kept(self, node: Node) -> Node | None:
        """The node that adds the rows of one expert, where ``node`` ends a turn of a traced loop.

        Capture unrolls ``if rows: out = …`` as zero(result) + where(any rows, result, before).
        """
        zero, where = (self.made(x, aten.zero.default, aten.where.self) for x in (*node.args, None, None)[:2])
        if node.op is not aten.add.Tensor or zero is None or where is None or len(where.inputs) < 3:
            return None
        condition, result, before = where.args
        made = self.graph.producers.get(result.name)
        step = None if made is None or zero.args[0] != result else self.added(made)
        if step is None or step[0] != before or not self._says_rows(condition, step[1]):
            return None
        return made

    def _says_rows(self, condition: Ref, rows: Ref) -> bool:
        """Whether ``condition`` is true if the mask whose indices are ``rows`` is true anywhere."""
        if (one := self.made(condition, aten.ne.Scalar)) is None or one.args[1] != 0:
            return False
        picked, places = self.of_expert(one.args[0]), self.made(rows, aten.where.default)
        of_rows = self.of_expert(places.args[0]) if places is not None else None
        if picked is None or of_rows is None or picked[1] != of_rows[1]:
            return False
        more = self.made(picked[0], aten.greater.Scalar, aten.gt.Scalar, aten.ne.Scalar)
        total = self.made(more.args[0], aten.sum.dim_IntList) if more is not None and more.args[1] == 0 else None
        whole = (
            total is not None and {d % 3 for d in total.args[1]} == {1, 2} and len(self.graph.shape(total.args[0])) == 3
        )
        return total is not None and whole and total.args[0] == of_rows[0]

    def weights_of_slots(self, factor: Ref, rows: Ref, chosen: tuple[ExpertIds, int, Ref | None]) -> Ref | None:
        """The weights [t, k] of ``factor`` = weights[rows, slots], both of :meth:`chosen`."""
        last = self.made(factor, aten.unsqueeze.default)
        picked = self.made(factor if last is None else last.args[0], aten.index.Tensor)
        if picked is None or list(picked.args[1])[:2] != [rows, chosen[2]] or any(picked.args[1][2:]):
            return None
        wide = self.made(picked.args[0], aten.unsqueeze.default)
        if (wide is None) == (last is None):
            return None
        weights = picked.args[0] if wide is None else wide.args[0]
        ends = last if wide is None else wide
        return weights if ends is not None and ends.args[1] in (-1, len(self.graph.shape(ends.args[0]))) else None


class ExpertMaskPatterns(RoutingPatterns):
    """Patterns, and those of expert masks; a mask has no slots, which are None."""

    def chosen(self, rows: Ref) -> tuple[ExpertIds, int, Ref | None] | None:
        """See :meth:`Patterns.chosen`."""
        node = self.made(rows, aten.any.dim)
        equal = self.made(node.args[0], aten.eq.Scalar) if node is not None else None
        if node is None or equal is None or node.argument("keepdim") or not self._is_last(node.args[1], equal.args[0]):
            return super().chosen(rows)
        return (equal.args[0], int(equal.args[1]), None) if isinstance(equal.args[1], int) else None

    def weights_of_slots(self, factor: Ref, rows: Ref, chosen: tuple[ExpertIds, int, Ref | None]) -> Ref | None:
        """See :meth:`Patterns.weights_at`."""
        ids, number, slots = chosen
        if slots is not None or not isinstance(ids, Ref):
            return super().weights_of_slots(factor, rows, chosen)
        last = self.made(factor, aten.unsqueeze.default)
        picked = self.made(factor if last is None else last.args[0], aten.index.Tensor)
        if picked is None or list(picked.args[1]) != [rows] or (last is not None and last.args[1] not in (-1, 1)):
            return None
        each: Ref = picked.args[0]  # [..], or [.., 1]
        if last is None and (wide := self.made(each, aten.unsqueeze.default)) is not None:
            if wide.args[1] not in (-1, len(self.graph.shape(wide.args[0]))):
                return None
            each, last = wide.args[0], wide
        summed = self.made(each, aten.sum.dim_IntList)
        if summed is not None and bool(summed.argument("keepdim")) == (last is None) and not summed.argument("dtype"):
            return self._of_choices(summed.args[0], summed.args[1], ids, number)
        column = self.made(each, aten.select.int) if last is not None else None
        if column is None or column.args[2] != number or not self._is_last(column.args[1], column.args[0]):
            return None
        routed = self.gates(column.args[0])
        return routed[1] if routed is not None and routed[0] == ids else None

    def _of_choices(self, product: Ref, dims: list[int], ids: Ref, number: int) -> Ref | None:
        """The weights w of ``product`` = w · (ids == number), which is summed over the last dim."""
        for weights, hit in self.times(product):
            equal = self.made(self.without_casts(hit), aten.eq.Scalar)
            if equal is not None and equal.args[:2] == (ids, number):
                return weights if len(dims) == 1 and self._is_last(dims[0], ids) else None
        return None

    def _is_last(self, dim: int, value: Ref) -> bool:
        rank = len(self.graph.shape(value))
        return dim % rank == rank - 1

"""MoE routing by an expert mask ``(ids == e).any(-1)``, with weights summed over the choices."""

from __future__ import annotations

from autoshard.aten import aten
from autoshard.passes.capture.translate.patterns import Ids, Patterns
from autoshard.passes.ir.graph import Ref


class Hits(Patterns):
    """Patterns, and those of expert masks; a mask has no slots, which are None."""

    def chosen(self, rows: Ref) -> tuple[Ids, int, Ref | None] | None:
        """See :meth:`Patterns.chosen`."""
        node = self.made(rows, aten.any.dim)
        equal = self.made(node.args[0], aten.eq.Scalar) if node is not None else None
        if node is None or equal is None or node.argument("keepdim") or not self._is_last(node.args[1], equal.args[0]):
            return super().chosen(rows)
        return (equal.args[0], int(equal.args[1]), None) if isinstance(equal.args[1], int) else None

    def weights_at(self, factor: Ref, rows: Ref, chosen: tuple[Ids, int, Ref | None]) -> Ref | None:
        """See :meth:`Patterns.weights_at`."""
        ids, number, slots = chosen
        if slots is not None or not isinstance(ids, Ref):
            return super().weights_at(factor, rows, chosen)
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
            equal = self.made(self.bare(hit), aten.eq.Scalar)
            if equal is not None and equal.args[:2] == (ids, number):
                return weights if len(dims) == 1 and self._is_last(dims[0], ids) else None
        return None

    def _is_last(self, dim: int, value: Ref) -> bool:
        rank = len(self.graph.shape(value))
        return dim % rank == rank - 1

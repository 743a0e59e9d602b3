"""Mixed precision: casts of parameters from the stored dtype to the dtype of computation. A cast is
inside the redistribution that sums the gradient, so that the sum may have its own dtype; without
a sum it is a statement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from autoshard.aten import aten
from autoshard.passes.ir.graph import Ref, TensorType, map_refs
from autoshard.passes.ir.program import LocalCall, Program, RedistributionStep, Statement, reads

GRADIENT_SUMS = frozenset({"enter", "all_gather"})
"""redistributions of a trained parameter that sum its gradient"""


def cast_parameters(program: Program) -> Program:
    """``program`` with the casts of its parameters; unchanged without mixed precision."""
    graph = program.graph
    mixed = {n: t for n in graph.parameters if (t := graph.types[n]).stored is not None or t.summed is not None}
    return _Casts(program, mixed).run() if mixed else program


class _Casts:
    def __init__(self, program: Program, mixed: dict[str, TensorType]) -> None:
        self.program, self.mixed = program, mixed
        self.types, self.layouts = dict(program.types), dict(program.layouts)
        self.raw = set(mixed)
        """local names of values in the stored dtype"""
        self.cast: dict[str, str] = {}
        """local name in the stored dtype → in the dtype of computation"""
        self.readers: dict[str, list[Statement]] = defaultdict(list)
        for s in program.statements:
            for name in reads(s):
                self.readers[name].append(s)

    def run(self) -> Program:
        statements = tuple(s for old in self.program.statements for s in self._changed(old))
        self.types |= {name: self.types[name].kept for name in self.raw}
        return replace(self.program, statements=statements, types=self.types, layouts=self.layouts)

    def _changed(self, s: Statement) -> Iterator[Statement]:
        raw = [name for name in dict.fromkeys(reads(s)) if name in self.raw]
        if not raw:
            yield s
            return
        if s.parameter and s.step is not None and self._sums(s):
            yield self._summing(s, s.step)
            return
        if s.parameter and any(map(self._sums_later, s.outputs)):
            self.raw.update(s.outputs)
            yield s if s.step is None else replace(s, step=self._wide(s.step, self.mixed[s.value]))
            return
        for name in raw:
            if name not in self.cast and self.types[name].stored is not None:
                yield self._cast(name, s)
        yield replace(s, call=map_refs(s.call, lambda ref: Ref(self.cast.get(ref.name, ref.name))))

    def _sums(self, s: Statement) -> bool:
        return s.step is not None and s.step.kind in GRADIENT_SUMS and s.step.backward is not None

    def _sums_later(self, name: str) -> bool:
        """Whether a later redistribution of ``name`` sums the gradient."""
        found = (s for s in self.readers[name] if s.parameter)
        return any(self._sums(s) or any(map(self._sums_later, s.outputs)) for s in found)

    def _summing(self, s: Statement, step: RedistributionStep) -> Statement:
        """A gradient sum with the cast inside, unless another sum follows or rows are summed."""
        type_, kwargs = self.mixed[s.value], {**s.call.kwargs}
        if type_.sparse:
            self.raw.update(s.outputs)
            return replace(s, step=self._wide(step, type_))
        if any(map(self._sums_later, s.outputs)):
            self.raw.update(s.outputs)
            step = self._wide(step, type_)
        elif type_.stored is not None:
            kwargs["dtype"] = type_.dtype
        if type_.summed is not None:
            kwargs["reduce_dtype"] = type_.summed
        return replace(s, call=LocalCall(s.call.fn, s.call.args, kwargs), step=step)

    @staticmethod
    def _wide(step: RedistributionStep, type_: TensorType) -> RedistributionStep:
        """A step in bytes of the stored dtype; its seconds remain those of the read dtype."""
        return replace(step, forward_bytes=step.forward_bytes * type_.kept.dtype.itemsize / type_.dtype.itemsize)

    def _cast(self, name: str, reader: Statement) -> Statement:
        layout, value = self.layouts[name], self.program.values.get(name, name)
        self.cast[name] = made = f"{name}__read"
        self.layouts[made], self.types[made] = layout, self.types[name]
        step = RedistributionStep("cast", (), layout, layout, self.types[name].shape)
        dtype = self.types[name].dtype
        of_rows = self.types[name].sparse  # autograd casts no sparse gradient back
        call = (
            LocalCall("cast_table", (Ref(name), dtype), {})
            if of_rows
            else LocalCall(aten._to_copy.default, (Ref(name),), {"dtype": dtype})
        )
        return Statement((made,), call, (layout,), reader.node, reader.block, step, value, True)

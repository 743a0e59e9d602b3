"""Preferred names of values in emitted code, the best first."""

from __future__ import annotations

import re

from autoshard.layout import Partial, Shard
from autoshard.passes.codegen.source_text import op_name
from autoshard.passes.codegen.user_names import module_names, user_names
from autoshard.passes.ir.graph import TensorType
from autoshard.passes.ir.paths import block_path
from autoshard.passes.ir.program import Program, Statement
from autoshard.passes.lower.blocks import Segment

_SAME_VALUE = frozenset(
    "view _unsafe_view reshape permute transpose t expand contiguous clone unsqueeze squeeze _to_copy alias detach".split()
)
"""ops that change shape, memory layout or dtype of a value, so that its name stays"""
_MOVED = {
    "all_gather": "whole", "all_reduce": "sum", "slice": "shard", "reduce_scatter": "shard", "all_to_all": "moved",
    "permute": "moved", "partial": "summand", "pad": "summand",
}  # fmt: skip
"""redistribution → suffix of its result where the operand is still live"""
_MOVES = re.compile(rf"_({'|'.join(set(_MOVED.values()))})$")


class Wanted:
    """Names after the user's variables, else the module that returns the value, else the op."""

    def __init__(self, program: Program, segments: tuple[Segment, ...]) -> None:
        self.graph, self.types, self.layouts = program.graph, program.types, program.layouts
        self.inputs = {i.name: i for i in self.graph.inputs}
        self.user, self.module = user_names(self.graph), module_names(self.graph)
        parts = [part for s in program.statements for part in s.parts if part.step]
        self.moved = {o: part.value for part in parts for o in part.outputs}
        readers: dict[str, set[str]] = {}
        for segment in segments:
            for name in segment.inputs if segment.path else ():
                readers.setdefault(self._value(name), set()).add(segment.path)
        self.shared = {value for value, paths in readers.items() if len(paths) > 1}

    def of(self, s: Statement, out: str, operand: str) -> tuple[str, ...]:
        """Names of result ``out`` of ``s``. ``operand``: identifier of its first operand, or ""."""
        value = next((m.value for m in s.members if m.outputs[0] == out), s.value)
        if value in self.inputs and self.inputs[value].kind != "input":
            return ("_".join(self.inputs[value].fqn.split(".")[-2:]),)
        if s.node is None or s.step is not None:
            plain = operand or op_name(value or out)
            moved = _MOVED.get(s.step.kind) if s.step is not None else None
            return (f"{plain}_{moved}" if moved else plain,)
        plain = op_name(s.node.name)
        if operand and s.node.op._schema.name.rpartition("::")[2] in _SAME_VALUE:
            return (*self._known(out), operand, f"{operand}_{plain}")
        return (*self._known(value or out), plain)

    def argument(self, local: str, segment: Segment) -> tuple[str, ...]:
        """Names of an argument of a block, the same in all equal blocks.

        ``x`` if another such block may return it; its own name if several blocks read it.
        """
        value = self._value(local)
        producer = self.graph.producers.get(value)
        inside = producer is not None and bool(block_path(producer.fqn))
        own = value in self.shared and not inside
        if not own and any(is_next(self.types[local], self.types[out]) for out in segment.outputs):
            return "x", f"x_{self._form(local)}"
        if producer is None:
            return (self.inputs[value].fqn.replace(".", "_"),)
        return (*self._known(value), op_name(producer.name))

    def _form(self, local: str) -> str:
        """Its layout in a word, which tells locals of one value apart."""
        layout = self.layouts[local]
        return "shard" if layout.axes_with(Shard) else "summand" if layout.axes_with(Partial) else "whole"

    def _value(self, local: str) -> str:
        return self.moved.get(local, local)

    def _known(self, value: str) -> tuple[str, ...]:
        return tuple(names[value] for names in (self.user, self.module) if value in names)


def without_moves(name: str) -> str:
    """An identifier without the suffix of a redistribution."""
    return _MOVES.sub("", name)


def is_next(old: TensorType, new: TensorType) -> bool:
    """Whether ``new``, a block's result, may follow ``old``, its argument: ``x = block(x)``."""
    return old.grad or (old.shape, old.dtype) == (new.shape, new.dtype)

"""Locals that are freed before the function that they belong to returns: large ones that neither autograd nor a reader needs.

Emitted code deletes them, so that a block holds no more than what one written as nested calls would.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from autoshard.aten import aten
from autoshard.passes.ir.graph import refs
from autoshard.passes.ir.program import Program, Statement, reads
from autoshard.passes.ir.sizes import noting
from autoshard.passes.rules.facts import is_view, saved

LARGE = 1 / 8
"""of the largest value of a function: what is worth a line of its own"""

SMALL = 2**20
"""bytes. Not worth one: CUDA's caching allocator serves allocations up to this size from segments of 2 MiB that it keeps
(`kSmallSize` in c10/cuda/CUDACachingAllocator)."""


def freed(program: Program) -> Program:
    """``program`` with :attr:`Statement.frees`."""
    with noting():  # what is large in the example: no program depends on it
        frees = _frees(program)
    statements = (replace(s, frees=tuple(frees[i])) if i in frees else s for i, s in enumerate(program.statements))
    return replace(program, statements=tuple(statements))


@dataclass(frozen=True)
class _Frame:
    """The function of a statement. ``part``: of what runs again in the backward; ``block``: number of the block's turn."""

    block: int
    """0: the root"""
    part: int
    end: int
    """number of the last statement of the part, or of the block's turn"""
    block_end: int


def _frames(program: Program) -> list[_Frame]:
    frames: list[_Frame] = []
    for turn, (path, run) in enumerate(groupby(program.statements, key=lambda s: s.block), 1):
        statements = list(run)
        block_end = len(frames) + len(statements) - 1
        for part, group in groupby(statements, key=lambda s: s.again):
            size = len(list(group))
            frames += [_Frame(turn if path else 0, part, len(frames) + size - 1, block_end)] * size
    return frames


def _frees(program: Program) -> dict[int, list[str]]:
    """Number of a statement → what is freed after it."""
    frames, bytes_ = _frames(program), _Bytes(program)
    needed = {r.name for r in refs(program.outputs)} | set(program.mutations.values()) | _kept(program)
    makers = {o: i for i, s in enumerate(program.statements) for o in s.outputs if o != "_"}
    dies = dict(makers)
    for i, s in enumerate(program.statements):
        dies.update((name, _outside(frames[makers[name]], frames[i], i)) for name in reads(s) if name in makers)
    largest: dict[tuple[int, int], float] = defaultdict(float)
    for name, i in makers.items():
        key = frames[i].block, frames[i].part
        largest[key] = max(largest[key], bytes_[name])
    found: dict[int, list[str]] = defaultdict(list)
    for names in _memories(program, makers, needed):
        last = max(dies[name] for name in names)
        frame = frames[makers[names[0]]]
        large = max(bytes_[name] for name in names) >= max(SMALL, LARGE * largest[frame.block, frame.part])
        if large and last < len(frames) - 1:
            found[last] += names
    return found


def _outside(maker: _Frame, reader: _Frame, number: int) -> int:
    """The statement after which the function that holds a value is done with it, which statement ``number`` reads."""
    if reader.block and reader.block != maker.block:
        return reader.block_end
    return reader.end if reader.part and reader.part != maker.part else number


def _memories(program: Program, makers: Mapping[str, int], needed: Collection[str]) -> Iterator[Sequence[str]]:
    """Locals that lie in one memory, as far as operations say: memories that are not ``needed``, a parameter's or an input's.

    A reshape may be a copy: what it is of may be freed where it is needed itself, but not the other way round.
    """
    memory: dict[str, str] = {i.name: "" for i in program.graph.inputs}
    source: dict[str, str] = {}
    for s in program.statements:
        shown = _shown(s)
        if shown is not None and s.node is not None and s.node.op is aten.reshape.default:
            source[s.outputs[0]], shown = memory[shown], None
        memory.update((o, memory[shown] if shown is not None else o) for o in s.outputs)
    found: dict[str, list[str]] = defaultdict(list)
    for name in makers:
        found[memory[name]].append(name)
    held = {"", *(memory[name] for name in needed if name in memory)}
    for first, names in found.items():
        if first in held or source.get(first) in held:
            held.add(first)
        else:
            yield names


def _shown(s: Statement) -> str | None:
    """The local whose memory the results lie in, if they do."""
    if s.step is None:
        shows = s.node is not None and is_view(s.node.op)
    else:  # buckets of gathered parameters are freed by themselves
        shows = s.step.kind in ("enter", "leave") or bool(s.members)
    return reads(s)[0] if shows and reads(s) else None


def _kept(program: Program) -> set[str]:
    """Locals that autograd keeps, or what runs again in the backward; of those that this makes what it keeps for itself."""
    if not program.graph.training:
        return set()
    found: set[str] = set()
    made: dict[str, int] = {}
    leaves: set[str] = set()
    for s in program.statements:
        for part in s.parts:
            made.update(dict.fromkeys(part.outputs, s.again))
            leaves.update(name for name in reads(part) if made.get(name) not in (0, s.again))
            found.update(name for name in _saved(part, program) if made.get(name, 0) in (0, s.again))
            if s.again or part.again:
                found.update(name for name in reads(part) if not made.get(name))
    return found - leaves


def _saved(s: Statement, program: Program) -> Iterator[str]:
    """Locals that autograd keeps of a statement; of a local form that reads in another order, all that it reads."""
    if s.node is None or s.step is not None:
        return
    keeps, operands = saved(s.node, program.graph.types), reads(s)
    plain = len(operands) == len(s.node.inputs)
    yield from (operands[i] for i in keeps.operands) if plain else operands if keeps.operands else ()
    slots = s.node.output_slots
    yield from (s.outputs[slots[i]] for i in keeps.results if slots[i] < len(s.outputs))


class _Bytes(dict[str, float]):
    """Bytes of locals on the rank with the most."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def __missing__(self, name: str) -> float:
        type_ = self.program.types[name].example
        shape = self.program.layouts[name].max_local_shape(type_.shape)
        self[name] = float(math.prod(shape) * type_.dtype.itemsize)
        return self[name]

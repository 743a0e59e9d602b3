"""Liveness: large locals are deleted after their last use, unless autograd saves them.

So a block holds no more than one written as nested calls.
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
"""share of the function's largest value from which on a local is worth a ``del``"""

SMALL = 2**20
"""bytes below which a ``del`` frees nothing: CUDA's caching allocator keeps segments of 2 MiB for
them (`kSmallSize` in c10/cuda/CUDACachingAllocator)"""


def freed(program: Program) -> Program:
    """``program`` with :attr:`Statement.frees`."""
    with noting():  # sizes of the example: no program depends on them
        frees = _frees(program)
    statements = (replace(s, frees=tuple(frees[i])) if i in frees else s for i, s in enumerate(program.statements))
    return replace(program, statements=tuple(statements))


@dataclass(frozen=True)
class _Frame:
    """A statement's function. ``part``: its recomputed part; ``block``: the run of its block."""

    block: int
    """0: the root"""
    part: int
    end: int
    """number of the last statement of the part, or of the block's run"""
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
    """Statement number → locals to delete after it."""
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
    """The statement after which the function of ``maker`` has finished a read by ``number``."""
    if reader.block and reader.block != maker.block:
        return reader.block_end
    return reader.end if reader.part and reader.part != maker.part else number


def _memories(program: Program, makers: Mapping[str, int], needed: Collection[str]) -> Iterator[Sequence[str]]:
    """Groups of locals that share memory, except ``needed`` memory, parameters and inputs.

    A reshape may copy: its result stays if its operand is needed, but not the other way round.
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
    """The local that the results are views of, if any."""
    if s.step is None:
        shows = s.node is not None and is_view(s.node.op)
    else:  # gathered buckets are freed on their own
        shows = s.step.kind in ("enter", "leave") or bool(s.members)
    return reads(s)[0] if shows and reads(s) else None


def _kept(program: Program) -> set[str]:
    """Locals that autograd saves or a recomputed part reads, without results of other parts."""
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
    """Locals that autograd saves of a statement; all operands, if the local form reorders them."""
    if s.node is None or s.step is not None:
        return
    keeps, operands = saved(s.node, program.graph.types), reads(s)
    plain = len(operands) == len(s.node.inputs)
    yield from (operands[i] for i in keeps.operands) if plain else operands if keeps.operands else ()
    slots = s.node.output_slots
    yield from (s.outputs[slots[i]] for i in keeps.results if slots[i] < len(s.outputs))


class _Bytes(dict[str, float]):
    """Bytes of locals on the rank with the largest shard."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def __missing__(self, name: str) -> float:
        type_ = self.program.types[name].example
        shape = self.program.layouts[name].max_local_shape(type_.shape)
        self[name] = float(math.prod(shape) * type_.dtype.itemsize)
        return self[name]

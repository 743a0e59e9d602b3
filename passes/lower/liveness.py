"""Liveness: states (KV caches) written in place, large locals freed after the last use."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from autoshard.aten import aten
from autoshard.passes.ir.graph import Ref, refs
from autoshard.passes.ir.program import LocalCall, Program, Statement, reads
from autoshard.passes.ir.sizes import record_conditions
from autoshard.passes.rules.facts import is_view, saved_for_backward
from autoshard.runtime.operations.checks import is_specialization_check
from autoshard.torch_private.ops import OpOverload

IN_PLACE_OPS: dict[OpOverload, OpOverload | str] = {
    aten.copy.default: aten.copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.slice_scatter.default: "write_slice",
    aten.select_scatter.default: "write_select",
}
"""op that writes into a copy of its first operand → its in-place variant"""

_MAY_ALIAS = frozenset(
    {"clone", "_unsafe_view", "_to_copy", "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
)
"""ops that return a new tensor by schema, but whose generated code may return the operand"""


def write_states_in_place(program: Program) -> Program:
    """``program`` with states written in place where no reader can notice: not if the old value or
    a view of it is read after the write, returned or written, nor if inputs may be rejected
    after it."""
    if program.graph.training:
        return program
    found: dict[int, Statement] = {}
    written = set()
    last = max(
        (i for i, s in enumerate(program.statements) if is_specialization_check(s.call.fn, s.call.args)), default=-1
    )
    for fqn, old in program.graph.states.items():
        writes = _state_writes(program, old, program.mutations[fqn])
        if (
            writes
            and min(writes) > last
            and program.layouts[old] == program.assignment.written(fqn)
            and _is_write_invisible(program, old, writes)
        ):
            written.add(fqn)
            found |= {i: _in_place_statement(program.statements[i]) for i in writes}
    statements = tuple(found.get(i, s) for i, s in enumerate(program.statements))
    return replace(program, statements=statements, in_place=frozenset(written))


def _state_writes(program: Program, old: str, new: str) -> list[int]:
    """The statements from the old state to the new one, each a write into a copy; else []."""
    makers = {o: i for i, s in enumerate(program.statements) for o in s.outputs}
    found: list[int] = []
    while new != old:
        s = program.statements[makers[new]] if new in makers else None
        if s is None or s.call.fn not in IN_PLACE_OPS or s.again or not isinstance(s.call.args[0], Ref):
            return []
        found.append(makers[new])
        new = s.call.args[0].name
    return found[::-1]


def _is_write_invisible(program: Program, old: str, writes: Sequence[int]) -> bool:
    """Whether no statement reads a later value in place of an earlier one."""
    shared, stale = {old}, set[str]()
    for i, s in enumerate(program.statements):
        names = reads(s)
        if not stale.isdisjoint(names):
            return False
        if i in writes:
            if [n for n in names if n in shared] != [s.call.args[0].name]:
                return False
            stale |= shared
            shared = {s.outputs[0]}
        elif not shared.isdisjoint(names) and can_share_memory(s):
            shared.update(s.outputs)
    kept = {new for fqn, new in program.mutations.items() if program.graph.states.get(fqn) != old}
    returned = {o.name for o in program.outputs if isinstance(o, Ref)} | kept
    return returned.isdisjoint(shared | stale)


def can_share_memory(s: Statement) -> bool:
    """Whether a result may share memory with an operand."""
    fn = s.call.fn
    if isinstance(fn, str):
        return True
    return fn._schema.name.partition("::")[2] in _MAY_ALIAS or any(
        a.alias_info is not None for a in fn._schema.arguments
    )


def _in_place_statement(s: Statement) -> Statement:
    return replace(s, call=LocalCall(IN_PLACE_OPS[s.call.fn], s.call.args, s.call.kwargs))  # type: ignore[index]


MIN_FREED_SHARE = 1 / 8
"""share of the function's largest value from which on a local is worth a ``del``"""

MIN_FREED_BYTES = 2**20
"""bytes below which a ``del`` frees nothing: CUDA's caching allocator keeps segments of 2 MiB for
them (`kSmallSize` in c10/cuda/CUDACachingAllocator)"""


def free_after_last_use(program: Program) -> Program:
    """``program`` with :attr:`Statement.frees`."""
    with record_conditions():  # sizes of the example: no program depends on them
        dead_after = _frees_by_statement(program)
    statements = (
        replace(s, dead_after=tuple(dead_after[i])) if i in dead_after else s for i, s in enumerate(program.statements)
    )
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


def _statement_frames(program: Program) -> list[_Frame]:
    frames: list[_Frame] = []
    for turn, (path, run) in enumerate(groupby(program.statements, key=lambda s: s.block), 1):
        statements = list(run)
        block_end = len(frames) + len(statements) - 1
        for part, group in groupby(statements, key=lambda s: s.again):
            size = len(list(group))
            frames += [_Frame(turn if path else 0, part, len(frames) + size - 1, block_end)] * size
    return frames


def _frees_by_statement(program: Program) -> dict[int, list[str]]:
    """Statement number → locals to delete after it."""
    frames, bytes_ = _statement_frames(program), _LocalBytes(program)
    needed = {r.name for r in refs(program.outputs)} | set(program.mutations.values()) | _backward_locals(program)
    makers = {o: i for i, s in enumerate(program.statements) for o in s.outputs if o != "_"}
    dies = dict(makers)
    for i, s in enumerate(program.statements):
        dies.update((name, _last_reader(frames[makers[name]], frames[i], i)) for name in reads(s) if name in makers)
    largest: dict[tuple[int, int], float] = defaultdict(float)
    for name, i in makers.items():
        key = frames[i].block, frames[i].part
        largest[key] = max(largest[key], bytes_[name])
    found: dict[int, list[str]] = defaultdict(list)
    for names in _freeable_memories(program, makers, needed):
        last = max(dies[name] for name in names)
        frame = frames[makers[names[0]]]
        large = max(bytes_[name] for name in names) >= max(
            MIN_FREED_BYTES, MIN_FREED_SHARE * largest[frame.block, frame.part]
        )
        if large and last < len(frames) - 1:
            found[last] += names
    return found


def _last_reader(maker: _Frame, reader: _Frame, number: int) -> int:
    """The statement after which the function of ``maker`` has finished a read by ``number``."""
    if reader.block and reader.block != maker.block:
        return reader.block_end
    return reader.end if reader.part and reader.part != maker.part else number


def _freeable_memories(program: Program, makers: Mapping[str, int], needed: Collection[str]) -> Iterator[Sequence[str]]:
    """Groups of locals that share memory, except ``needed`` memory, parameters and inputs. A
    reshape may copy: its result stays if its operand is needed, not the other way round."""
    memory: dict[str, str] = {i.name: "" for i in program.graph.inputs}
    source: dict[str, str] = {}
    for s in program.statements:
        shown = _viewed_local(s)
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


def _viewed_local(s: Statement) -> str | None:
    """The local that the results are views of, if any."""
    if s.step is None:
        shows = s.node is not None and is_view(s.node.op)
    else:  # gathered buckets are freed on their own
        shows = s.step.kind in ("enter", "leave") or bool(s.members)
    return reads(s)[0] if shows and reads(s) else None


def _backward_locals(program: Program) -> set[str]:
    """Locals that autograd saves or a recomputed part reads, without results of other parts.

    What an offloaded block saves leaves the device, so its locals are worth to be freed."""
    if not program.graph.training:
        return set()
    found: set[str] = set()
    made: dict[str, int] = {}
    leaves: set[str] = set()
    for s in program.statements:
        for part in s.parts:
            made.update(dict.fromkeys(part.outputs, s.again))
            leaves.update(name for name in reads(part) if made.get(name) not in (0, s.again))
            if s.block in program.assignment.offloaded:
                continue
            found.update(name for name in _autograd_locals(part, program) if made.get(name, 0) in (0, s.again))
            if s.again or part.again:
                found.update(name for name in reads(part) if not made.get(name))
    return found - leaves


def _autograd_locals(s: Statement, program: Program) -> Iterator[str]:
    """Locals that autograd saves of a statement; all operands, if the local form reorders them."""
    if s.node is None or s.step is not None:
        return
    keeps, operands = saved_for_backward(s.node, program.graph.types), reads(s)
    plain = len(operands) == len(s.node.inputs)
    yield from (operands[i] for i in keeps.operands) if plain else operands if keeps.operands else ()
    slots = s.node.output_slots
    yield from (s.outputs[slots[i]] for i in keeps.results if slots[i] < len(s.outputs))


class _LocalBytes(dict[str, float]):
    """Bytes of locals on the rank with the largest shard."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def __missing__(self, name: str) -> float:
        type_ = self.program.types[name].example
        shape = self.program.layouts[name].max_local_shape(type_.shape)
        self[name] = float(math.prod(shape) * type_.dtype.itemsize)
        return self[name]

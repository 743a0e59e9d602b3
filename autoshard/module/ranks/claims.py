"""Claims that ranks compare before a call: descriptions with numbers."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

from autoshard.mesh import Mesh
from autoshard.module.inputs import Inputs
from autoshard.module.programs.executable import Call
from autoshard.module.ranks.arrivals import checksums, peers
from autoshard.runtime.transport.peers import Claim, Notes

_SHAPES = "the shapes and dtypes of the inputs"
_STATE = (
    "the state of the call: whether gradients are recorded, modules in train or eval mode, requires_grad and dtypes of "
    "parameters, forward hooks, autocast, or torch's defaults; or no_sync()"
)
_PARTS = f"{_SHAPES} (local inputs have one size on all ranks: pad them, or give the loader drop_last=True)"
_SAME_PARTS = "the parts of the inputs (ranks along a mesh axis that does not cut them bring the same)"
_VALUES = (
    "the values of the inputs (every rank takes the same global batch: give all ranks the whole one, from a loader with one "
    'seed and without DistributedSampler, or compile with inputs="local", where each rank brings its own part)'
)
_FAILED = "whether an earlier call failed (their collectives are out of step: start all processes again)"

FIRST_CALLS = 8
"""calls of a program that compare all elements of inputs; AUTOSHARD_CHECK=inputs: all calls"""

SAMPLED = 4096
"""elements of each input that later calls compare: 0.1 ms on a CPU, and as long for the message"""

APART = 64
"""calls between comparisons (powers of two at first); a change of program is compared, too"""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""in a default ``repr``; differs between ranks"""


class Comparisons:
    """How many input elements the ranks compare in a call; equal on ranks with equal calls."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, int], int] = {}
        self._last: object = None

    def __deepcopy__(self, memo: object) -> Comparisons:
        """A copied module starts anew."""
        return Comparisons()

    def due(self, program: object, failed: int) -> int | None:
        """Elements to compare per input (None: all). ``program``: None if compiled by this call."""
        kind = None if program is None else (id(program), failed)
        number, follows = self._calls.get(kind, 0) + 1 if kind else 1, self._last == kind
        self._last = kind
        if kind:
            self._calls[kind] = number
        if number <= FIRST_CALLS:
            return None
        return 0 if follows and number % APART and number & (number - 1) else SAMPLED


def of_call(notes: Notes, call: Call, number: int, inputs: Inputs, deferred: bool) -> tuple[Claim, ...]:
    """Claims of every call. ``number``: see :meth:`Call.key`; ``deferred``: inside no_sync()."""
    *shapes, state, number = call.key(number)
    text = _ADDRESS.sub("", repr((*shapes, number)))
    return (
        (_SHAPES if inputs == "global" else _PARTS, zlib.crc32(text.encode())),
        (_STATE, 2 * state.number + deferred),
        (_FAILED, 2 * notes.failed + notes.broken),
    )


def of_meeting(notes: Notes, what: str) -> tuple[Claim, ...]:
    """Claims before the ranks do ``what`` outside of calls."""
    return (("what they do", zlib.crc32(what.encode())), (_FAILED, 2 * notes.failed + notes.broken))


def of_values(
    leaves: Sequence[Any], mesh: Mesh, places: Sequence[Sequence[int]], most: int | None
) -> tuple[Claim, ...]:
    """Claims on the data of inputs. ``most``: see :meth:`Comparisons.due`.

    ``mesh``: of programs; ``places``: per stage its ranks, in the order of ``mesh``.
    """
    whole, parts = (0, 0) if most == 0 else checksums(leaves, most)
    first = peers(leaves, mesh) if parts else range(mesh.size)
    same = {rank: places[0][first[at]] for ranks in places for at, rank in enumerate(ranks)}
    return (_VALUES, whole), (_SAME_PARTS, parts, [same[rank] for rank in sorted(same)])

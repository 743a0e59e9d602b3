"""What a call is to the ranks: what they compare before it, in words and numbers."""

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
    "parameters, autocast, or torch's defaults; or no_sync()"
)
_PARTS = f"{_SHAPES} (local inputs have one size on all ranks: pad them, or give the loader drop_last=True)"
_SAME_PARTS = "the parts of the inputs (ranks along a mesh axis that does not cut them bring the same)"
_VALUES = "the values of the inputs (every rank takes the same global batch)"
_FAILED = "whether an earlier call failed (their collectives are out of step: start all processes again)"

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""in the ``repr`` of an argument without one of its own: other on every rank"""


def of_call(notes: Notes, call: Call, number: int, inputs: Inputs, deferred: bool) -> tuple[Claim, ...]:
    """What every call is. ``number``: see :meth:`Call.key`; ``deferred``: whether it is inside no_sync()."""
    *shapes, state, number = call.key(number)
    text = _ADDRESS.sub("", repr((*shapes, number)))
    return (
        (_SHAPES if inputs == "global" else _PARTS, zlib.crc32(text.encode())),
        (_STATE, 2 * state.number + deferred),
        (_FAILED, 2 * notes.failed + notes.broken),
    )


def of_meeting(notes: Notes, what: str) -> tuple[Claim, ...]:
    """What the ranks compare before they do ``what`` together, beside calls."""
    return (("what they do", zlib.crc32(what.encode())), (_FAILED, 2 * notes.failed + notes.broken))


def of_values(leaves: Sequence[Any], mesh: Mesh, places: Sequence[Sequence[int]], compared: bool) -> tuple[Claim, ...]:
    """The data of the inputs; 0 where they are not ``compared``.

    ``mesh``: what programs run on; ``places``: per stage the ranks that run it, in the order of ``mesh``.
    """
    whole, parts = checksums(leaves) if compared else (0, 0)
    first = peers(leaves, mesh) if parts else range(mesh.size)
    same = {rank: places[0][first[at]] for ranks in places for at, rank in enumerate(ranks)}
    return (_VALUES, whole), (_SAME_PARTS, parts, [same[rank] for rank in sorted(same)])

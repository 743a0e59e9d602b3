"""A call on one rank: its inputs as local shards, and what ranks compare."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard.errors import CaptureError, LayoutError
from autoshard.layout import Layout
from autoshard.layout import Shard as Cut
from autoshard.mesh import Mesh
from autoshard.module.dtensors.module_dtensor import dtensor_from_shard
from autoshard.module.dtensors.views import refresh_views
from autoshard.module.inputs import InputScope, global_input_shape
from autoshard.module.programs.executable import ModuleCall
from autoshard.module.programs.kv_cache import StageResidentOutput
from autoshard.runtime.transport.peers import Claim, FailureNotes

_HASH_ROW = 4096
"""words that are hashed together"""

_HASH_BLOCK = 1 << 20
"""words that are copied at once"""

_HASH_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
"""an odd number without a pattern: 2^64 / golden ratio"""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(x: Tensor, most: int | None = None) -> Tensor:
    """A multilinear hash: an int64 scalar on the device of ``x``; zero for tensors without strided
    data (meta, sparse, nested, empty). ``most``: number of sampled elements; None: all. Hashes
    sums of 64-bit words times random odd weights modulo 2^64: tensors of one shape collide with
    a chance of about 2^-33."""
    if x.is_meta or x.layout != torch.strided or x.is_nested or not x.numel():
        return torch.zeros((), dtype=torch.int64, device="cpu" if x.is_meta else x.device)
    if most is not None and x.numel() > most:
        x = x.detach().reshape(-1)[:: x.numel() // most | 1]  # odd: rows may have 2^n columns
    sums = _int64_words(x)
    while sums.numel() > 1:
        sums = torch.cat([_row_hashes(part) for part in sums.split(_HASH_BLOCK)])
    return sums.reshape(())


def _int64_words(x: Tensor) -> Tensor:
    """``x`` as int64 words if its bytes allow it, else one word per element."""
    x = x.detach().resolve_conj().resolve_neg()
    x = (torch.view_as_real(x) if x.is_complex() else x).contiguous().reshape(-1)
    size = x.element_size()
    if x.numel() * size % 8 or x.storage_offset() * size % 8:
        return x.view(_INTEGERS[size]).to(torch.int64)
    return x.view(torch.int64)


def _row_hashes(words: Tensor) -> Tensor:
    words = words * _HASH_MULTIPLIER
    words = words ^ ((words >> 32) & 0xFFFFFFFF)  # else changes of high bits (signs) would cancel
    weights = _hash_weights(words.device)
    if words.numel() <= _HASH_ROW:
        return (words * weights[: words.numel()]).sum().reshape(1)
    rows = F.pad(words, (0, -words.numel() % _HASH_ROW)).view(-1, _HASH_ROW)
    return (rows * weights).sum(1)


@functools.cache
def _hash_weights(device: torch.device) -> Tensor:
    """Random odd weights, equal on every rank."""
    generator = torch.Generator("cpu").manual_seed(0x5EED)
    limits = torch.iinfo(torch.int64)
    numbers = torch.randint(limits.min, limits.max, (_HASH_ROW,), generator=generator, dtype=torch.int64, device="cpu")
    return (numbers | 1).to(device)


def local_input(part: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """A local input as a DTensor; all ranks have shards of one size."""
    return dtensor_from_shard(part, mesh, layout, global_input_shape(part.shape, layout))


def shard_or_full(x: DTensor, mesh: DeviceMesh) -> Tensor:
    """A DTensor input with sharded and replicated placements only (others are gathered); plain if
    replicated. Raises :class:`CaptureError` for a DTensor on another mesh."""
    if x.device_mesh is not mesh and x.device_mesh.mesh.tolist() != mesh.mesh.tolist():
        raise CaptureError(
            f"an input of shape {list(x.shape)} is a DTensor on the mesh {x.device_mesh}, but "
            f"the module's mesh is {mesh}. Pass one on sharded.device_mesh, or its full_tensor()."
        )
    own = isinstance(x, StageResidentOutput)  # no rank may have all of it
    if (own or any(type(p) is Shard for p in x.placements)) and all(
        type(p) in (Shard, Replicate) for p in x.placements
    ):
        return x
    plain = [p if type(p) is Shard else Replicate() for p in x.placements]
    if isinstance(x, StageResidentOutput):
        return x.like(x.redistribute(mesh, plain))
    x = x if list(x.placements) == plain else x.redistribute(mesh, plain)
    return x if any(p.is_shard() for p in plain) else x.to_local()


def inputs_on_rank(
    leaves: Sequence[Any], layouts: Sequence[Layout | None], mesh: DeviceMesh, device: torch.device
) -> list[Any]:
    """The argument leaves as programs know them. ``layouts``: of local ones, by leaf; or empty."""
    found = list(leaves)
    for i, x in enumerate(leaves):
        if isinstance(x, DTensor):
            refresh_views([x])
            found[i] = shard_or_full(x, mesh)
        elif layouts and (layout := layouts[i]) is not None:
            found[i] = local_input(x.to(device), mesh, layout)
    return found


def stated_layout(x: Any, mesh: Mesh) -> Layout | None:
    """The layout of a DTensor input; None: global."""
    return Layout.from_torch(mesh, x.placements) if isinstance(x, DTensor) else None


def input_shard(x: Tensor, layout: Layout, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """This rank's shard of an input on ``device``, in the ``layout`` of the program."""
    if not isinstance(x, DTensor):
        return x.to(device)
    try:
        placements = layout.to_torch()
    except LayoutError:
        raise AssertionError(f"inputs must be in mesh order, not in {layout}") from None
    if list(x.placements) != placements:
        x = x.redistribute(mesh, placements)
    if not (x._local_tensor.requires_grad or (x.requires_grad and torch.is_grad_enabled())):
        return x._local_tensor
    return x.to_local()


def gather_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather sharded inputs but those of one stage; gradients return to the shards. Collective."""
    found = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, DTensor) and not isinstance(x, StageResidentOutput):
            whole = [Replicate()] * x.device_mesh.ndim
            found[name] = x.redistribute(x.device_mesh, whole).to_local()
    return found


def input_checksums(leaves: Sequence[Any], most: int | None) -> tuple[int, int]:
    """Two checksums of the inputs: of global ones, and of this rank's local shards. ``most``:
    sampled elements per input; None: all. Skips state on one stage, which others cannot
    compare."""
    numbers = [0, 0]
    for x in leaves:
        if isinstance(x, Tensor) and not isinstance(x, StageResidentOutput):
            parts, local = isinstance(x, DTensor), x.to_local() if isinstance(x, DTensor) else x
            numbers[parts] = zlib.crc32(int(checksum(local, most)).to_bytes(8, "little", signed=True), numbers[parts])
    return numbers[0], numbers[1]


def first_peers(leaves: Sequence[Any], mesh: Mesh) -> tuple[int, ...]:
    """Per rank the first rank with the same shards: other coordinates on unsharded axes only."""
    layouts = [x for x in (stated_layout(leaf, mesh) for leaf in leaves) if x is not None]
    cut = {mesh.index(a) for layout in layouts for a in layout.axes_with(Cut)}
    rows = (mesh.coordinates(rank) for rank in range(mesh.size))
    return tuple(mesh.rank([n if i in cut else 0 for i, n in enumerate(row)]) for row in rows)


_SHAPES_CLAIM = "the shapes and dtypes of the inputs"
_STATE_CLAIM = (
    "the state of the call: recorded gradients, train or eval mode, requires_grad and dtypes of "
    "parameters, forward hooks, autocast, torch's defaults, no_sync(), or attributes and fields set later"
)
_LOCAL_SHAPES_CLAIM = f"{_SHAPES_CLAIM} (local inputs need one size on all ranks: pad them, or use drop_last=True)"
_LOCAL_VALUES_CLAIM = "the local inputs (ranks along a mesh axis that does not shard them need the same)"
_VALUES_CLAIM = (
    "the values of the inputs (every rank needs the same global batch: seed the loader, use no "
    'DistributedSampler, or compile with inputs="local")'
)
_FAILED_CLAIM = "whether an earlier call failed (their collectives are out of step: restart all processes)"

FIRST_CALLS = 8
"""calls of a program that compare all elements of inputs; AUTOSHARD_CHECK=inputs: all calls"""

SAMPLED_ELEMENTS = 4096
"""elements of each input that later calls compare: 0.1 ms on a CPU, and as long for the message"""

CALLS_BETWEEN_CHECKS = 64
"""calls between comparisons (powers of two at first); a change of program is compared, too"""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""in a default ``repr``; differs between ranks"""


class InputComparisons:
    """How many input elements the ranks compare in a call; equal on ranks with equal calls."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, int], int] = {}
        self._last: object = None

    def __deepcopy__(self, memo: object) -> InputComparisons:
        """A copied module starts anew."""
        return InputComparisons()

    def due(self, program: object, failed: int) -> int | None:
        """Elements to compare per input (None: all). ``program``: None if compiled by this call."""
        kind = None if program is None else (id(program), failed)
        number, follows = self._calls.get(kind, 0) + 1 if kind else 1, self._last == kind
        self._last = kind
        if kind:
            self._calls[kind] = number
        if number <= FIRST_CALLS:
            return None
        return 0 if follows and number % CALLS_BETWEEN_CHECKS and number & (number - 1) else SAMPLED_ELEMENTS


def call_claims(
    notes: FailureNotes, call: ModuleCall, number: int, inputs: InputScope, deferred: bool
) -> tuple[Claim, ...]:
    """Claims of every call. ``number``: see :meth:`Call.key`; ``deferred``: inside no_sync()."""
    *shapes, state, number = call.key(number)
    text = _ADDRESS.sub("", repr((*shapes, number)))
    return (
        (_SHAPES_CLAIM if inputs == "global" else _LOCAL_SHAPES_CLAIM, zlib.crc32(text.encode())),
        (_STATE_CLAIM, 2 * state.number + deferred),
        (_FAILED_CLAIM, 2 * notes.failed + notes.broken),
    )


def meeting_claims(notes: FailureNotes, what: str) -> tuple[Claim, ...]:
    """Claims before the ranks do ``what`` outside of calls."""
    return (("the call they make", zlib.crc32(what.encode())), (_FAILED_CLAIM, 2 * notes.failed + notes.broken))


def value_claims(
    leaves: Sequence[Any], mesh: Mesh, places: Sequence[Sequence[int]], most: int | None
) -> tuple[Claim, ...]:
    """Claims on the data of inputs. ``most``: see :meth:`Comparisons.due`; ``mesh``: of programs;
    ``places``: per stage its ranks, in the order of ``mesh``."""
    whole, parts = (0, 0) if most == 0 else input_checksums(leaves, most)
    first = first_peers(leaves, mesh) if parts else range(mesh.size)
    same = {rank: places[0][first[at]] for ranks in places for at, rank in enumerate(ranks)}
    return (_VALUES_CLAIM, whole), (_LOCAL_VALUES_CLAIM, parts, [same[rank] for rank in sorted(same)])

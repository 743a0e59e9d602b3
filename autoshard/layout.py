"""The layout algebra: four placements (sharding specs), one per mesh axis.

A placement defines a rank's part of a value *and* of its gradient. So the backward follows from the
forward (after JAX's sharding-in-types with reduced/unreduced types):

    placement    value on rank r    gradient on rank r       the gradient's placement
    Shard(d)     chunk r along d    chunk r of dL/dT         Shard(d)
    Replicate    T                  a partial sum of dL/dT   Partial
    Invariant    T                  dL/dT on every rank      Invariant
    Partial      a partial sum of T dL/dT                    Replicate
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Union

from autoshard.errors import LayoutError
from autoshard.mesh import Mesh, MeshLike
from autoshard.torch_private.distributed import strided_shard


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank r holds chunk r along tensor dim ``dim`` (chunks of :func:`torch.chunk`)."""

    dim: int

    def __post_init__(self) -> None:
        if not hasattr(self.dim, "__index__"):
            raise LayoutError(f"Shard({self.dim!r}): a tensor dim is an int, such as 0")

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Owned(Shard):
    """Table-wise placement: rank ``owner`` holds the full tensor, the others no rows of it.
    For embedding tables and expert modules; other axes may shard the owner's tensor. It is a
    Shard(0) with chunks 0, …, n, …, 0. No redistribution along the axis leads to or from it."""

    dim: int = 0
    owner: int = 0

    def __str__(self) -> str:
        return f"O({self.owner})"


@dataclass(frozen=True, slots=True)
class Grouped(Shard):
    """Rank r holds chunk r of each segment of dim ``dim``, concatenated, in equal chunks.
    For fused projections, whose result is split into segments. ``parts``: the ratio of segment
    lengths in lowest terms, such as ``(4, 1, 1)`` for q, k, v (torch's ``_StridedShard`` if equal).
    No redistribution along the axis leads to or from it. Raises :class:`LayoutError` for an invalid
    ratio, or one that a DTensor cannot express."""

    dim: int = 0
    parts: tuple[int, ...] = (1, 1)

    def __post_init__(self) -> None:
        Shard.__post_init__(self)
        if len(self.parts) < 2 or min(self.parts) < 1 or not fits_split_factor(self.parts):
            raise LayoutError(f"Grouped({self.dim}, {self.parts}): parts must be a ratio that a DTensor can express")
        object.__setattr__(self, "parts", tuple(n // math.gcd(*self.parts) for n in self.parts))

    def __str__(self) -> str:
        equal = len(set(self.parts)) == 1
        return f"S({self.dim}/{len(self.parts) if equal else ':'.join(map(str, self.parts))})"


_SPLIT_FACTOR_BITS = 56
"""bits of a split factor, divided among its parts"""


def fits_split_factor(lengths: Sequence[int]) -> bool:
    """Whether the ratio of these lengths fits into a torch split factor (:func:`_split_factor`)."""
    return len(lengths) <= _SPLIT_FACTOR_BITS and max(lengths) // math.gcd(*lengths) < 2 ** (
        _SPLIT_FACTOR_BITS // len(lengths)
    )


def _split_factor(parts: tuple[int, ...]) -> int:
    """A ratio encoded as a negative split factor of a strided shard, which torch (equal parts on
    one axis only) passes on unread; :mod:`autoshard.module.dtensors.segments` lets it shard by
    :func:`parts_of_split_factor`."""
    bits = _SPLIT_FACTOR_BITS // len(parts)
    return -(sum(n << bits * i for i, n in enumerate(parts)) * 2 * _SPLIT_FACTOR_BITS + len(parts))


def parts_of_split_factor(split_factor: int) -> tuple[int, ...]:
    """The ratio of parts that a strided shard's split factor encodes."""
    if split_factor > 0:
        return (1,) * split_factor
    digits, count = divmod(-split_factor, 2 * _SPLIT_FACTOR_BITS)
    bits = _SPLIT_FACTOR_BITS // count
    return tuple(digits >> bits * i & 2**bits - 1 for i in range(count))


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the full value; its gradients are partial sums."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Invariant:
    """Every rank holds the full value and, in the backward, the full gradient."""

    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a partial sum. ``op`` "max" and "min" are for forward-only reductions."""

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in ("sum", "max", "min"):
            raise LayoutError(f"Partial op {self.op!r} is not one of 'sum', 'max', 'min'")

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


Placement = Union[Shard, Replicate, Invariant, Partial]
R, I, P = Replicate(), Invariant(), Partial()  # noqa: E741  the algebra's own letters


def chunk(size: int, ranks: int, index: int) -> tuple[int, int]:
    """``(start, length)`` of chunk ``index`` of ``size`` elements over ``ranks`` (torch.chunk)."""
    step = -(-size // ranks)
    start = min(index * step, size)
    return start, min(step, size - start)


def from_torch_placement(placement: Any) -> Any:
    """A torch.distributed placement converted to this algebra; anything else as it is."""
    if isinstance(placement, Shard | Replicate | Invariant | Partial) or not hasattr(placement, "is_partial"):
        return placement
    if placement.is_partial():
        return Partial(getattr(placement, "reduce_op", "sum"))
    if hasattr(placement, "split_factor"):
        return Grouped(placement.dim, parts_of_split_factor(placement.split_factor))
    return Shard(placement.dim) if placement.is_shard() else R


def gradient_placement(placement: Placement) -> Placement:
    return P if isinstance(placement, Replicate) else R if isinstance(placement, Partial) else placement


@dataclass(frozen=True, init=False)
class Layout:
    """The layout of a tensor on a mesh: a placement per axis, and the order of axes on one dim.

    ``Layout(mesh, {"tp": Shard(1)})`` or ``Layout(mesh, [Replicate(), Shard(1)])``, also with
    torch's placements; missing axes are Replicate. Axes on one tensor dim nest in mesh order, or in
    ``order`` (outer to inner). Raises :class:`LayoutError` for unknown axes, negative dims, or an
    invalid order.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[str, ...]
    """all axes; only the relative order of axes on one tensor dim may differ from mesh order"""

    def __init__(
        self,
        mesh: MeshLike,
        placements: Mapping[str, Placement] | Sequence[Placement] = (),
        order: Sequence[str] | None = None,
    ) -> None:
        mesh = Mesh.of(mesh)
        if isinstance(placements, Mapping):
            for axis in placements:
                mesh.index(axis)
            per_axis = tuple(placements.get(a, R) for a in mesh.axes)
        else:
            per_axis = tuple(placements) or (R,) * mesh.ndim
            if len(per_axis) != mesh.ndim:
                raise LayoutError(f"{len(per_axis)} placements for a mesh of {mesh.ndim} axes ({mesh})")
        per_axis = tuple(from_torch_placement(p) for p in per_axis)
        for axis, p in zip(mesh.axes, per_axis, strict=True):
            if not isinstance(p, Shard | Replicate | Invariant | Partial):
                raise LayoutError(f"axis {axis!r}: {p!r} is not Shard(d), Replicate(), Invariant() or Partial()")
            if isinstance(p, Shard) and p.dim < 0:
                raise LayoutError(f"axis {axis!r}: {p} counts from the end. Give the dim as 0 or more")
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "placements", per_axis)
        object.__setattr__(self, "order", _canonical_order(mesh, per_axis, order))

    def __getitem__(self, axis: str) -> Placement:
        return self.placements[self.mesh.index(axis)]

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """Axes that shard tensor dim ``dim``, outer to inner."""
        return self._cuts.get(dim, ())

    @cached_property
    def _cuts(self) -> dict[int, tuple[str, ...]]:
        """Tensor dim → axes that shard it, outer to inner."""
        found: dict[int, tuple[str, ...]] = {}
        for axis in self.order:
            if type(p := self[axis]) is Shard:
                found[p.dim] = (*found.get(p.dim, ()), axis)
        return found

    def cutting(self, dim: int) -> tuple[str, ...]:
        """Axes that shard tensor dim ``dim``, or each segment of it, outer to inner."""
        return self.axes_of(dim) or tuple(a for a, p in self.grouped.items() if p.dim == dim)

    @cached_property
    def owner(self) -> dict[str, int]:
        """Mesh axis → coordinate of the owner ranks, for table-wise placements."""
        pairs = zip(self.mesh.axes, self.placements, strict=True)
        return {a: p.owner for a, p in pairs if isinstance(p, Owned)}

    def axes_with(self, kind: type) -> tuple[str, ...]:
        """Axes whose placement is of ``kind`` (Shard, Replicate, …), in mesh order."""
        return tuple(a for a, p in zip(self.mesh.axes, self.placements, strict=True) if isinstance(p, kind))

    def replace(self, changes: Mapping[str, Placement], order: Sequence[str] | None = None) -> Layout:
        """A copy of the layout with other placements on some axes; the order is kept unless given."""
        new = {a: changes.get(a, p) for a, p in zip(self.mesh.axes, self.placements, strict=True)}
        return Layout(self.mesh, new, self.order if order is None else order)

    @cached_property
    def grouped(self) -> dict[str, Grouped]:
        """Mesh axis → its placement, where it shards each segment of a dim."""
        return {a: p for a, p in zip(self.mesh.axes, self.placements, strict=True) if isinstance(p, Grouped)}

    @property
    def fixed(self) -> dict[str, Shard]:
        """Mesh axis → its placement, where redistribution along the axis is impossible."""
        return {a: p for a, p in zip(self.mesh.axes, self.placements, strict=True) if isinstance(p, Owned | Grouped)}

    def chunks_of(self, dim: int, size: int, rank: int) -> tuple[tuple[int, int], ...]:
        """``(start, length)`` of the rank's chunks of tensor dim ``dim``, in local order."""
        grouped = {a: p for a, p in self.grouped.items() if p.dim == dim}
        if not grouped:
            return (self.chunk_of(dim, size, rank),)
        parts, number = next(iter(grouped.values())).parts, 0
        for axis in grouped:
            number = number * self.mesh.size_of(axis) + self.mesh.index_along(rank, axis)
        unit, ranks = size // sum(parts), self.mesh.size_of(tuple(grouped))
        starts = itertools.accumulate(parts, initial=0)
        chunks = ((start * unit, n * unit // ranks) for start, n in zip(starts, parts, strict=False))
        return tuple((start + number * length, length) for start, length in chunks)

    def chunk_of(self, dim: int, size: int, rank: int) -> tuple[int, int]:
        """``(start, length)`` of the rank's chunk of tensor dim ``dim`` of global length ``size``;
        :class:`LayoutError` if there are several: see :meth:`chunks_of`."""
        if any(p.dim == dim for p in self.grouped.values()):
            raise LayoutError(f"{self}: a rank holds several chunks of dim {dim}")
        start, length = 0, size
        for axis in self.axes_of(dim):
            s, length = chunk(length, self.mesh.size_of(axis), self.mesh.index_along(rank, axis))
            start += s
        if dim == 0 and any(self.mesh.index_along(rank, a) != o for a, o in self.owner.items()):
            length = 0
        return start, length

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The local shape on ``rank`` of a tensor of global ``shape``."""
        self.check(shape)
        if not self.grouped:
            return tuple(self.chunk_of(d, n, rank)[1] for d, n in enumerate(shape))
        return tuple(sum(n for _, n in self.chunks_of(d, size, rank)) for d, size in enumerate(shape))

    def max_local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Local shape of rank 0 (example's lengths): the largest, unless another rank owns it."""
        example = tuple(map(int, shape))
        if example not in self._largest:
            self._largest[example] = self.local_shape(example, 0)
        return self._largest[example]

    @cached_property
    def _largest(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Cache of :meth:`max_local_shape`."""
        return {}

    def check(self, shape: Sequence[int]) -> None:
        """Raise :class:`LayoutError` if a sharded dim does not exist in ``shape``."""
        for axis, p in zip(self.mesh.axes, self.placements, strict=True):
            if isinstance(p, Shard) and p.dim >= len(shape):
                raise LayoutError(f"{p}@{axis} on a tensor of {len(shape)} dims, shape {list(shape)}")

    def without_gradient(self) -> Layout:
        """The layout of the same value without gradient: Invariant becomes Replicate."""
        return Layout(self.mesh, [R if isinstance(p, Invariant) else p for p in self.placements], self.order)

    def gradient(self) -> Layout:
        """The layout of the gradient."""
        return Layout(self.mesh, [gradient_placement(p) for p in self.placements], self.order)

    def to_torch(self) -> list[Any]:
        """torch.distributed placements, one per mesh axis. Invariant becomes Replicate.

        :class:`Grouped` becomes a strided shard; torch understands unequal parts, and parts on two
        axes, once a sharded module exists. Raises :class:`LayoutError` for owned tensors, and for
        nested axes in another order than the mesh's.
        """
        return list(self._to_torch)

    @cached_property
    def _to_torch(self) -> tuple[Any, ...]:
        from torch.distributed.tensor import Partial as TorchPartial
        from torch.distributed.tensor import Replicate as TorchReplicate
        from torch.distributed.tensor import Shard as TorchShard

        if self.order != Layout(self.mesh, self.placements).order:
            raise LayoutError(f"{self}: torch placements nest in mesh order only. Redistribute to mesh order first")
        if self.owner:
            raise LayoutError(f"{self}: torch has no placement for a tensor that one rank owns")
        out: list[Any] = []
        for p in self.placements:
            if isinstance(p, Grouped):
                plain = len(set(p.parts)) == 1 and len(self.cutting(p.dim)) == 1
                out.append(strided_shard(p.dim, len(p.parts) if plain else _split_factor(p.parts), p.parts))
            elif isinstance(p, Shard):
                out.append(TorchShard(p.dim))
            else:
                out.append(TorchPartial(p.op) if isinstance(p, Partial) else TorchReplicate())
        return tuple(out)

    def on(self, mesh: Mesh) -> Layout:
        """The same layout on a mesh of equal shape with other axis names or hardware."""
        return Layout(mesh, self.placements, [mesh.axes[self.mesh.index(a)] for a in self.order])

    @staticmethod
    def from_torch(mesh: MeshLike, placements: Iterable[Any]) -> Layout:
        """A layout from torch.distributed placements, one per mesh axis."""
        return Layout(mesh, tuple(placements))

    def to_tensor_map(self, ndim: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """MindSpore's ``(device_matrix, tensor_map)``: per tensor dim the axes that shard it.

        Axes count from the right (the last mesh axis is 0), outer to inner; ``(-1,)`` is an
        unsharded dim. Raises :class:`LayoutError` for Partial, which MindSpore lacks.
        """
        if self.axes_with(Partial):
            raise LayoutError(f"{self}: a tensor map cannot express Partial. Reduce first")
        last = self.mesh.ndim - 1
        rows = (tuple(last - self.mesh.index(a) for a in self.axes_of(d)) for d in range(ndim))
        return self.mesh.shape, tuple(row or (-1,) for row in rows)

    @staticmethod
    def from_tensor_map(mesh: MeshLike, tensor_map: Sequence[int | Sequence[int]]) -> Layout:
        """The layout of MindSpore's ``tensor_map``, whose entries are axes (-1: none) or tuples."""
        mesh = Mesh.of(mesh)
        placements: dict[str, Placement] = {}
        order: list[str] = []
        for dim, entry in enumerate(tensor_map):
            for axis in (entry,) if isinstance(entry, int) else entry:
                if axis == -1:
                    continue
                if not 0 <= axis < mesh.ndim:
                    raise LayoutError(f"tensor map {tensor_map}: axis {axis} is not in a mesh of {mesh.ndim} axes")
                name = mesh.axes[mesh.ndim - 1 - axis]
                if name in placements:
                    raise LayoutError(f"tensor map {tensor_map}: axis {axis} ({name}) shards two dims")
                placements[name] = Shard(dim)
                order.append(name)
        return Layout(mesh, placements, order)

    def __str__(self) -> str:
        sharded = [f"{self[a]}@{a}" for a in self.order if isinstance(self[a], Shard)]
        return " ".join(sharded + [f"{self[a]}@{a}" for a in self.mesh.axes if not isinstance(self[a], Shard)])

    def __repr__(self) -> str:
        return f"<{self}>"


def _canonical_order(mesh: Mesh, placements: tuple[Placement, ...], order: Sequence[str] | None) -> tuple[str, ...]:
    """All axes in mesh order; axes on one dim are in the given ``order`` among their own slots."""
    if order is None:
        return mesh.axes
    if len(set(order)) != len(order) or not set(order) <= set(mesh.axes):
        raise LayoutError(f"order {list(order)} must name axes of the mesh ({mesh}), each at most once")
    rank = {a: i for i, a in enumerate([*order, *(a for a in mesh.axes if a not in order)])}
    result = list(mesh.axes)
    for dim in {p.dim for p in placements if isinstance(p, Shard)}:
        slots = [i for i, p in enumerate(placements) if p == Shard(dim)]
        for slot, axis in zip(slots, sorted((mesh.axes[i] for i in slots), key=rank.__getitem__), strict=True):
            result[slot] = axis
    return tuple(result)

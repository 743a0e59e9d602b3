"""The device mesh: named axes, their sizes, and the links along each."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Union

from autoshard.errors import MeshError
from autoshard.hardware import Hardware, Overlap, Route
from autoshard.hardware import hardware as resolve_hardware
from autoshard.hardware.schema import to_python_numbers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MeshLike = Union["Mesh", "DeviceMesh", Mapping[str, int]]


@dataclass(frozen=True, init=False)
class Mesh:
    """A named N-D grid of ranks, row-major: the last axis varies fastest.

    ``Mesh({"dp": 2, "tp": 4}, hardware="h100")``. ``hardware`` is a preset's name, a
    :class:`Hardware`, or the file of one (:meth:`Hardware.save`); default: that of this machine,
    its GPU by name, else ``"cpu"``.
    Raises :class:`MeshError` for an empty mesh, a bad name or a size below 1.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    hardware: Hardware

    def __init__(self, axes: Mapping[str, int], hardware: str | os.PathLike[str] | Hardware | None = None) -> None:
        if not axes:
            raise MeshError('a mesh needs at least one axis, for example {"tp": 2}')
        axes = {name: to_python_numbers(size) for name, size in axes.items()}
        for name, size in axes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"mesh axis name {name!r} is not an identifier such as 'dp' or 'tp'")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"mesh axis {name!r} has size {size!r}, but a size is an int of at least 1")
        object.__setattr__(self, "axes", tuple(axes))
        object.__setattr__(self, "shape", tuple(axes.values()))
        object.__setattr__(self, "hardware", resolve_hardware(hardware))
        outermost = self.hardware.levels[-1]
        if self.size > outermost.size:
            raise MeshError(
                f"the mesh ({self}) has {self.size} ranks, but level {outermost.name!r} of {self.hardware.name} joins "
                f"{outermost.size} devices. Use a smaller mesh, or add a level to the hardware"
            )

    def __hash__(self) -> int:
        return hash((self.axes, self.shape))  # hardware is slow to hash

    @staticmethod
    def of(mesh: MeshLike, hardware: str | os.PathLike[str] | Hardware | None = None) -> Mesh:
        """A ``Mesh`` from a ``Mesh``, a dict or a torch ``DeviceMesh`` (unnamed dims: ``axis0``…).

        ``hardware``: default that of this machine; :class:`MeshError` if a ``Mesh`` has another.
        """
        if isinstance(mesh, Mesh):
            if hardware is not None and resolve_hardware(hardware) != mesh.hardware:
                raise MeshError(f"the mesh ({mesh}) has hardware {mesh.hardware.name}, not the given {hardware!r}")
            return mesh
        if isinstance(mesh, Mapping):
            return Mesh(mesh, hardware)
        if hasattr(mesh, "mesh_dim_names"):
            sizes = tuple(mesh.mesh.shape)
            names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(len(sizes)))
            return Mesh(dict(zip(names, sizes, strict=True)), hardware)
        raise MeshError(f"expected autoshard.Mesh, DeviceMesh or a dict of axis sizes, got {type(mesh).__name__}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis → number of ranks along it."""
        return dict(zip(self.axes, self.shape, strict=True))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.axes)

    def index(self, axis: str) -> int:
        """Position of ``axis``. Raises :class:`MeshError` for an unknown axis."""
        try:
            return self.axes.index(axis)
        except ValueError:
            raise MeshError(f"mesh has no axis {axis!r}; its axes are {', '.join(self.axes)}") from None

    def size_of(self, axes: str | Sequence[str]) -> int:
        """Number of ranks along one axis, or along several."""
        if isinstance(axes, str):
            return self.shape[self.index(axes)]
        return math.prod(self.shape[self.index(a)] for a in axes)

    @cached_property
    def unnamed(self) -> Mesh:
        """A copy of the mesh with axes named by position: a cache key for results without names."""
        return Mesh({f"axis{i}": n for i, n in enumerate(self.shape)}, self.hardware)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The rank's index along every axis."""
        coordinates = []
        for size in reversed(self.shape):
            rank, i = divmod(rank, size)
            coordinates.append(i)
        return tuple(reversed(coordinates))

    def rank(self, coordinates: Sequence[int]) -> int:
        """The rank at ``coordinates``."""
        rank = 0
        for size, i in zip(self.shape, coordinates, strict=True):
            rank = rank * size + i
        return rank

    def index_along(self, rank: int, axes: str | Sequence[str]) -> int:
        """The rank's index in its group along ``axes`` (several: flattened, first axis outermost)."""
        index, coordinates = 0, self.coordinates(rank)
        for axis in (axes,) if isinstance(axes, str) else axes:
            index = index * self.size_of(axis) + coordinates[self.index(axis)]
        return index

    def group(self, rank: int, axes: str | Sequence[str]) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` only along ``axes``, in the order of :meth:`index_along`."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        base = list(self.coordinates(rank))
        ranks = []
        for combination in itertools.product(*(range(self.size_of(a)) for a in names)):
            for axis, i in zip(names, combination, strict=True):
                base[self.index(axis)] = i
            ranks.append(self.rank(base))
        return tuple(ranks)

    def groups(self, axes: str | Sequence[str]) -> Iterator[tuple[int, ...]]:
        """All groups along ``axes``, each once."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        for rank in range(self.size):
            if self.index_along(rank, names) == 0:
                yield self.group(rank, names)

    def link(self, axes: str | Sequence[str]) -> Route:
        """Links of a group along ``axes``; consecutive ranks share a node, and each level above."""
        key = axes if isinstance(axes, str) else tuple(axes)
        if key not in self._links:
            numbers = tuple(self.index(a) for a in ((key,) if isinstance(key, str) else key))
            sizes = tuple(level.size for level in self.hardware.levels[:-1])
            first, *above = _group_extent(self.shape, numbers, sizes)
            self._links[key] = self.hardware.route(*first, tuple(above))
        return self._links[key]

    @cached_property
    def _links(self) -> dict[str | tuple[str, ...], Route]:
        """Cache of :meth:`link`, which every operation and redistribution asks."""
        return {}

    def crosses(self, axes: str | Sequence[str]) -> bool:
        """Whether a group along ``axes`` spans several nodes."""
        return self.link(axes).nodes > 1

    def beside(self, axes: str | Sequence[str], kind: str = "all_gather") -> float:
        """Relative speed of compute during a collective along ``axes`` (:attr:`Hardware.overlap`).

        Collectives and compute share memory bandwidth. So a collective that is slower than an
        all-gather inside a node slows compute less, in proportion. Point-to-point messages are like
        ring steps: both pass through a buffer of the receiver (NVIDIA/nccl issue 544).
        """
        device, own = self.hardware, self.link(axes).rate(kind)[1]
        if not device.overlap or not own:
            return device.overlap
        return 1.0 - (1.0 - device.overlap) * min(1.0, self._node_gather_s_per_byte / own)

    @cached_property
    def _node_gather_s_per_byte(self) -> float:
        """Seconds per byte of an all-gather inside a node."""
        return self.hardware.route(self.hardware.devices_per_node, 1).rate("all_gather")[1]

    @property
    def overlap(self) -> Overlap:
        """:meth:`beside` all-gathers in a node, and on the axis across nodes that slows most."""
        crossing = (self.beside(axis) for axis in self.axes if self.crosses(axis))
        return Overlap(self.hardware.overlap, min(crossing, default=self.hardware.overlap))

    def text_of(self, axes: Sequence[str]) -> str:
        """``axes`` with their sizes: ``dp=2, tp=4``."""
        return ", ".join(f"{axis}={self.size_of(axis)}" for axis in axes)

    def __str__(self) -> str:
        return self.text_of(self.axes)


@lru_cache(maxsize=4096)
def _group_extent(shape: tuple[int, ...], axes: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Per unit of so many devices: (ranks in the fullest unit, units) of a group along ``axes`` of a
    row-major grid."""
    strides = [math.prod(shape[a + 1 :]) for a in axes]
    offsets = itertools.product(*(range(0, shape[a] * stride, stride) for a, stride in zip(axes, strides, strict=True)))
    ranks = list(map(sum, offsets))
    units = (Counter(rank // size for rank in ranks) for size in sizes)
    return [(max(unit.values()), len(unit)) for unit in units]

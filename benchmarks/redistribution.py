"""Redistribution against MindSpore's sequence and DTensor's planners: how often, and by how much, fewer bytes.

Prints one table per comparison; run with ``python benchmarks/redistribution.py``. Volume is what one rank receives:
all-gather (n-1)·L, reduce-scatter and all-to-all (n-1)/n·L, all-reduce 2(n-1)/n·L, a local step 0, with L the size of
the local tensor before the step. The table of times is for this machine.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.layout import Layout, P, Partial, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.redistribute import redistribution

MESHES = [((2, 4), 2), ((2, 2, 2), 3), ((2, 4, 8), 3), ((2, 3, 4), 3)]
TensorMap = tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """Volumes of another planner over those of a reference, pair by pair."""

    volumes: tuple[tuple[float, float], ...]
    """(other, reference)"""

    @property
    def above(self) -> float:
        """Share of pairs where the other planner moves more."""
        return sum(other > ours * (1 + 1e-9) for other, ours in self.volumes) / len(self.volumes)

    @property
    def below(self) -> int:
        """Pairs where the reference moves more; must be 0."""
        return sum(other < ours * (1 - 1e-9) for other, ours in self.volumes)

    @property
    def worst(self) -> float:
        """The largest ratio; pairs that the reference serves for nothing are left out."""
        return max((other / ours for other, ours in self.volumes if ours), default=1.0)

    @property
    def summed(self) -> float:
        """Ratio of the sums."""
        return sum(other for other, _ in self.volumes) / sum(ours for _, ours in self.volumes)


def step_volume(kind: str, ranks: int, local: float) -> float:
    """Volume of one step on a local tensor of ``local`` elements before it."""
    factors = {"all_gather": ranks - 1.0, "all_reduce": 2 * (ranks - 1) / ranks}
    factors |= dict.fromkeys(("reduce_scatter", "all_to_all"), (ranks - 1) / ranks)
    return factors.get(kind, 0.0) * local


def cube(mesh: Mesh, ndim: int) -> tuple[int, ...]:
    """A shape of ``ndim`` equal dims that every layout divides."""
    return (math.prod(mesh.shape),) * ndim


# ---- MindSpore ------------------------------------------------------------------------------------------------------


def tensor_maps(axes: int, ndim: int) -> list[TensorMap]:
    """All maps with at most one axis per dim; -1 is a whole dim."""
    maps = itertools.product(range(-1, axes), repeat=ndim)
    return [m for m in maps if len(used := [a for a in m if a >= 0]) == len(set(used))]


def mindspore(sizes: Sequence[int], src: TensorMap, dst: TensorMap) -> list[tuple[str, int]]:
    """MindSpore's sequence from ``src`` to ``dst`` as (kind, axis); after its tensor redistribution, in our own words.

    Splits and all-to-alls are repeated as long as any is possible; only then axes without a use in the target are
    gathered, and if that does nothing either, the first unfinished dim. Dims are visited in index order.
    """
    now, steps = list(src), []

    def whole(wanted_is_held: bool) -> Iterator[int]:
        for i, axis in enumerate(dst):
            if now[i] == -1 and axis != -1 and (axis in now) == wanted_is_held:
                yield i

    def split_and_move() -> bool:
        before = len(steps)
        for i in whole(False):
            now[i] = dst[i]
            steps.append(("slice", dst[i]))
        moved = True
        while moved:
            moved = False
            for i in whole(True):
                now[now.index(dst[i])], now[i], moved = -1, dst[i], True
                steps.append(("all_to_all", dst[i]))
        return len(steps) > before

    def gather(dims: list[int]) -> bool:
        for i in dims:
            steps.append(("all_gather", now[i]))
            now[i] = -1
        return bool(dims)

    while now != list(dst):
        while split_and_move():
            pass
        if not gather([i for i, axis in enumerate(now) if axis != -1 and axis not in dst]):
            gather([i for i, axis in enumerate(now) if axis not in (-1, dst[i])][:1])
    return steps


def sequence_volume(sizes: Sequence[int], src: TensorMap, steps: list[tuple[str, int]], numel: int) -> float:
    """Volume of MindSpore's sequence on a tensor of ``numel`` elements."""
    local, total = numel / math.prod(sizes[a] for a in src if a >= 0), 0.0
    for kind, axis in steps:
        total += step_volume(kind, sizes[axis], local)
        local *= {"all_gather": sizes[axis], "slice": 1 / sizes[axis]}.get(kind, 1)
    return total


def map_layout(mesh: Mesh, tensor_map: TensorMap) -> Layout:
    """The layout of a map whose axes count from the left."""
    return Layout(mesh, {mesh.axes[a]: Shard(d) for d, a in enumerate(tensor_map) if a >= 0})


def single_axis_optimum(mesh: Mesh, ndim: int) -> Callable[[Layout, Layout], float]:
    """The optimum over gathers, slices and all-to-alls of one axis each, as the published figures take it.

    Floyd-Warshall over layouts as nests per dim; it looks at no other planner of this project.
    """
    sizes, numel = mesh.shape, math.prod(cube(mesh, ndim))
    nests = [s for s in itertools.product(_orders(range(len(sizes))), repeat=ndim) if _disjoint(s)]
    index = {s: i for i, s in enumerate(nests)}
    best = [[math.inf] * len(nests) for _ in nests]
    for s, i in index.items():
        best[i][i] = 0.0
        local = numel / math.prod(sizes[a] for nest in s for a in nest)
        for d, nest in enumerate(s):
            for a in set(range(len(sizes))) - set(itertools.chain(*s)):
                best[i][index[_put(s, d, (*nest, a))]] = 0.0
            if nest:
                shorter = _put(s, d, nest[:-1])
                best[i][index[shorter]] = step_volume("all_gather", sizes[nest[-1]], local)
                for e in set(range(ndim)) - {d}:
                    target = index[_put(shorter, e, (*s[e], nest[-1]))]
                    best[i][target] = step_volume("all_to_all", sizes[nest[-1]], local)
    for k, row in enumerate(best):
        for r in best:
            if r[k] < math.inf:
                r[:] = [min(x, r[k] + y) for x, y in zip(r, row, strict=True)]
    axis = {a: i for i, a in enumerate(mesh.axes)}

    def state(layout: Layout) -> int:
        return index[tuple(tuple(axis[a] for a in layout.axes_of(d)) for d in range(ndim))]

    return lambda src, dst: best[state(src)][state(dst)]


def _orders(axes: Sequence[int]) -> list[tuple[int, ...]]:
    return [p for n in range(len(axes) + 1) for p in itertools.permutations(axes, n)]


def _disjoint(nests: tuple[tuple[int, ...], ...]) -> bool:
    axes = list(itertools.chain(*nests))
    return len(axes) == len(set(axes))


def _put(nests: tuple[Any, ...], dim: int, nest: tuple[int, ...]) -> tuple[Any, ...]:
    return (*nests[:dim], nest, *nests[dim + 1 :])


def against_mindspore(sizes: tuple[int, ...], ndim: int, *, published: bool = False) -> Comparison:
    """All pairs of layouts with at most one axis per dim. ``published``: against the single-axis optimum."""
    mesh = Mesh(dict(zip("abcd", sizes, strict=False)))
    shape, maps = cube(mesh, ndim), tensor_maps(len(sizes), ndim)
    layouts = {m: map_layout(mesh, m) for m in maps}
    optimum = single_axis_optimum(mesh, ndim) if published else None
    volumes = []
    for a, b in itertools.permutations(maps, 2):
        theirs = sequence_volume(sizes, a, mindspore(sizes, a, b), math.prod(shape))
        x, y = layouts[a], layouts[b]
        volumes.append((theirs, optimum(x, y) if optimum else redistribution(x, y, shape, mesh, torch.uint8).bytes))
    return Comparison(tuple(volumes))


# ---- DTensor --------------------------------------------------------------------------------------------------------


@contextmanager
def fake_device_mesh(sizes: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """A device mesh without devices, for planners that want one."""
    dist.init_process_group("fake", rank=0, world_size=math.prod(sizes), store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes)
    finally:
        dist.destroy_process_group()


def dtensor_volume(devices: DeviceMesh, src: Layout, dst: Layout, shape: tuple[int, ...], *, graph: bool) -> float:
    """Volume of torch's own plan: the greedy planner, or the graph-based one, which also does nesting orders."""
    infos = _gen_transform_infos_non_cached(_spec(devices, src, shape), _spec(devices, dst, shape), graph)
    sharded = src.mesh.size_of(src.axes_with(Shard))
    local, total = math.prod(shape) / sharded, 0.0
    for info in infos:
        n = src.mesh.shape[info.mesh_dim]
        before, after = ("S" if p.is_shard() else "P" if p.is_partial() else "R" for p in info.src_dst_placements)
        kinds = {"SR": "all_gather", "SS": "all_to_all", "PR": "all_reduce", "PS": "reduce_scatter"}
        total += step_volume(kinds.get(before + after, "local"), n, local)
        local *= n ** ((before == "S") - (after == "S"))
    return total


def _spec(devices: DeviceMesh, layout: Layout, shape: tuple[int, ...]) -> DTensorSpec:
    kinds = {Shard: lambda p: TorchShard(p.dim), Partial: lambda p: TorchPartial(p.op)}
    placements = tuple(kinds.get(type(p), lambda _: TorchReplicate())(p) for p in layout.placements)
    nests = {d: tuple(layout.mesh.index(a) for a in layout.axes_of(d)) for d in range(len(shape))}
    order = tuple(ShardOrderEntry(tensor_dim=d, mesh_dims=nest) for d, nest in nests.items() if nest)
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), strides, torch.float32)
    return DTensorSpec(devices, placements, meta, shard_order=order)


def layouts_of(mesh: Mesh, ndim: int, *, partial: bool, ordered: bool) -> list[Layout]:
    """All layouts, with Partial and with nesting orders other than the mesh's if wanted."""
    placements = [R, *([P] if partial else []), *map(Shard, range(ndim))]
    orders = list(itertools.permutations(mesh.axes)) if ordered else [mesh.axes]
    every = (Layout(mesh, c, o) for c in itertools.product(placements, repeat=mesh.ndim) for o in orders)
    return list(dict.fromkeys(every))


def against_dtensor(
    sizes: tuple[int, ...], ndim: int, *, graph: bool, partial: bool, ordered: bool = False, pairs: int = 1000
) -> Comparison:
    """Random pairs (all, where there are not more than ``pairs``); ``partial``: only from layouts with Partial."""
    mesh = Mesh(dict(zip("abcd", sizes, strict=False)))
    targets, shape = layouts_of(mesh, ndim, partial=False, ordered=ordered), cube(mesh, ndim)
    sources = layouts_of(mesh, ndim, partial=partial, ordered=ordered)
    if partial:
        sources = [x for x in sources if x.axes_with(Partial)]
    every = [(a, b) for a in sources for b in targets if a != b]
    chosen = random.Random(0).sample(every, min(pairs, len(every)))
    with fake_device_mesh(sizes) as devices:
        volumes = [
            (dtensor_volume(devices, a, b, shape, graph=graph), redistribution(a, b, shape, mesh, torch.uint8).bytes)
            for a, b in chosen
        ]
    return Comparison(tuple(volumes))


# ---- time -----------------------------------------------------------------------------------------------------------


def query_times(sizes: tuple[int, ...] = (2, 4, 8), ndim: int = 3) -> dict[str, float]:
    """Seconds: the first query on a mesh, a new query (median), the same query again, all single-axis pairs."""
    mesh = Mesh(dict(zip("abcd", sizes, strict=False)))
    layouts, rng = layouts_of(mesh, ndim, partial=True, ordered=True), random.Random(0)

    def timed(src: Layout, dst: Layout, shape: tuple[int, ...]) -> float:
        start = time.perf_counter()
        redistribution(src, dst, shape, mesh)
        return time.perf_counter() - start

    first = timed(layouts[0], layouts[1], (8,) * ndim)
    cold = [timed(*rng.sample(layouts, 2), (64 * (i + 1),) * ndim) for i in range(500)]
    again = rng.sample(layouts, 2)
    cached = [timed(*again, (64,) * ndim) for _ in range(501)][1:]
    single = [map_layout(mesh, m) for m in tensor_maps(len(sizes), ndim)]
    pairs = sum(timed(a, b, (96,) * ndim) for a, b in itertools.permutations(single, 2))
    return {
        "first query on a mesh": first,
        "new query, median": statistics.median(cold),
        "cached query, median": statistics.median(cached),
        f"{len(single) * (len(single) - 1)} single-axis pairs": pairs,
    }


def main() -> None:
    """Print all tables."""
    console = Console(width=110)
    times = Table(title="Planning time, mesh (2, 4, 8), rank 3")
    times.add_column("what")
    times.add_column("ms", justify="right")
    for what, seconds in query_times().items():
        times.add_row(what, f"{seconds * 1e3:.4g}")
    table = Table(title="Volume per rank: other planner over autoshard")
    for column in ("planner", "layouts", "mesh", "rank", "pairs", "above", "worst", "summed", "below"):
        table.add_column(column, justify="left" if column in ("planner", "layouts", "mesh") else "right")

    def row(planner: str, layouts: str, sizes: tuple[int, ...], ndim: int, c: Comparison) -> None:
        figures = f"{c.above:.1%}", f"{c.worst:.2f}", f"{c.summed:.3f}", str(c.below)
        table.add_row(planner, layouts, "×".join(map(str, sizes)), str(ndim), str(len(c.volumes)), *figures)

    for sizes, ndim in MESHES:
        row("MindSpore *", "one axis per dim", sizes, ndim, against_mindspore(sizes, ndim, published=True))
        row("MindSpore", "one axis per dim", sizes, ndim, against_mindspore(sizes, ndim))
    for (sizes, ndim), partial in itertools.product(MESHES, (False, True)):
        name = "from Partial" if partial else "no Partial"
        greedy = against_dtensor(sizes, ndim, graph=False, partial=partial, pairs=20000)
        row("DTensor greedy", f"{name}, mesh order", sizes, ndim, greedy)
        graph = against_dtensor(sizes, ndim, graph=True, partial=partial, ordered=True, pairs=200)
        row("DTensor graph", f"{name}, any order", sizes, ndim, graph)
    console.print(table)
    console.print("* over the optimum of single-axis gathers, slices and all-to-alls: the figures known from elsewhere")
    console.print(times)


if __name__ == "__main__":
    main()

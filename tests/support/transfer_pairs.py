"""Random pairs of layouts on ranks, a transfer's run without processes, and its optimum by elements."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import networkx as nx
import torch
from hypothesis import strategies as st

from autoshard.hardware import Hardware, hardware
from autoshard.layout import Grouped, Layout, Owned, Placement, Replicate, Shard
from autoshard.mesh import Mesh
from autoshard.module.dtensors.segments import shard_of
from autoshard.transfers.holdings import Held, Replica
from autoshard.transfers.names import links_of
from autoshard.transfers.schedule import Piece, Schedule, make_schedule

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Pair:
    source: dict[str, Held]
    target: dict[str, Held]
    machine: Hardware

    def schedule(self) -> Schedule:
        return make_schedule(self.source, self.target, links_of(self.source, self.target), self.machine)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        sizes.append(draw(st.integers(1, 16 // math.prod(sizes))))
    return Mesh({f"a{i}": n for i, n in enumerate(sizes)}, hardware="h100")


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    kind = draw(st.sampled_from(["plain"] * 4 + ["grouped", "owned"]))
    dims = st.integers(0, len(shape) - 1)
    placements: list[Placement] = [Shard(draw(dims)) if draw(st.booleans()) else Replicate() for _ in mesh.axes]
    at = draw(st.integers(0, mesh.ndim - 1))
    if kind == "owned":
        placements[at] = Owned(owner=draw(st.integers(0, mesh.shape[at] - 1)))
    if kind == "grouped":
        fit = [d for d, n in enumerate(shape) if n % (4 * mesh.shape[at]) == 0]
        if fit:
            dim = draw(st.sampled_from(fit))
            placements = [Replicate() if p == Shard(dim) else p for p in placements]
            placements[at] = Grouped(dim, draw(st.sampled_from([(1, 1), (2, 1, 1), (1, 3)])))
    return Layout(mesh, placements, draw(st.permutations(mesh.axes)))


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    count = draw(st.integers(1, 3))
    sizes = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 16])
    shapes = {f"t{i}": tuple(draw(st.lists(sizes, min_size=1, max_size=4))) for i in range(count)}
    mixed = draw(st.sampled_from([False, False, False, True]))
    dtypes = {n: draw(st.sampled_from([torch.float64, torch.int16])) if mixed else torch.float64 for n in shapes}
    sides = []
    for _ in range(2):
        mesh = draw(meshes())
        where = draw(st.sampled_from(["same", "overlapping", "others", "any"]))
        first = {"same": 0, "overlapping": mesh.size // 2, "others": 16, "any": 0}[where] if sides else 0
        ranks = tuple(range(first, first + mesh.size))
        if where == "any":
            ranks = tuple(draw(st.permutations(range(20)))[: mesh.size])
        sides.append({n: Held(s, dtypes[n], (Replica(draw(layouts(mesh, s)), ranks),)) for n, s in shapes.items()})
    machine = replace(hardware("h100"), devices_per_node=draw(st.sampled_from([2, 4, 8])))
    return Pair(sides[0], sides[1], machine)


def values(side: dict[str, Held]) -> dict[str, torch.Tensor]:
    found, at = {}, 0
    for name, held in side.items():
        n = math.prod(held.shape)
        found[name] = torch.arange(at, at + n).view(held.shape).to(held.dtype)
        at += n
    return found


def problems(pair: Pair, schedule: Schedule, change: Callable[[Piece], Iterable[Piece]] = lambda p: [p]) -> list[str]:
    """What is wrong with ``schedule``: run on every rank, each with what its rank alone computes."""
    return [*_problems(pair, schedule, change)]


def _problems(pair: Pair, schedule: Schedule, change: Callable[[Piece], Iterable[Piece]]) -> Iterator[str]:
    full = values(pair.source)
    of_rank = {rank: [*schedule.pieces(rank)] for rank in schedule.ranks}
    received, sent = Counter(dict.fromkeys(schedule.ranks, 0)), Counter(dict.fromkeys(schedule.ranks, 0))
    for rank, own in of_rank.items():
        for other in schedule.ranks:
            if [p for p in own if p[:2] == (rank, other)] != [p for p in of_rank[other] if p[:2] == (rank, other)]:
                yield f"ranks {rank} and {other} disagree on their message"
        made = {n: shard_of(full[n], r.layout, r.positions[rank]).clone() for n, r in _parts(pair.target, rank)}
        new = {n: torch.zeros_like(x) for n, x in made.items()}
        times = {n: torch.zeros(x.shape, dtype=torch.int64) for n, x in made.items()}
        there = dict(_parts(pair.source, rank))
        for piece in (q for p in own if p.receiver == rank for q in change(p)):
            source, target = pair.source[piece.source], pair.target[piece.target]
            held, want = source.on(piece.sender), target.on(rank)
            assert held is not None
            assert want is not None
            local = shard_of(full[piece.source], held.layout, held.positions[piece.sender])
            at = want.local(rank, target.shape, piece.target_box)
            new[piece.target][at] = local[held.local(piece.sender, source.shape, piece.source_box)]
            times[piece.target][at] += 1
            if piece.sender != rank:
                received[rank] += piece.nbytes
                sent[piece.sender] += piece.nbytes
                if piece.source in there and _overlaps(there[piece.source], rank, source, piece):
                    yield f"rank {rank} receives what it has: {piece}"
        yield from (f"rank {rank}: {n} has wrong values" for n in made if not torch.equal(made[n], new[n]))
        yield from (f"rank {rank}: {n} comes {t.unique().tolist()} times" for n, t in times.items() if (t != 1).any())
    if dict(received) != schedule.received or dict(received) != schedule.bound:
        yield f"received {dict(received)}, told {schedule.received}, bound {schedule.bound}"
    if dict(sent) != schedule.sent:
        yield f"sent {dict(sent)}, told {schedule.sent}"
    least, most = optimum(pair), max(sent.values(), default=0)
    sizes = {held.dtype.itemsize for held in pair.source.values()}
    slack = 8 * len(schedule.messages) if len(sizes) > 1 else 0  # an element is not divided
    if most > 1.1 * least + slack or schedule.least_most_sent != least:
        yield f"a rank sends {most}, {least} is possible, told {schedule.least_most_sent}"


def _parts(side: dict[str, Held], rank: int) -> Iterator[tuple[str, Replica]]:
    yield from ((n, r) for n, held in side.items() for r in held.replicas if rank in r.positions)


def _overlaps(part: Replica, rank: int, held: Held, piece: Piece) -> bool:
    chunks = part.local_chunks(rank, held.shape)
    pairs = zip(piece.source_box, chunks, strict=True)
    return all(any(s < at + n and at < s + length for s, _, length in each) for (at, n), each in pairs)


def optimum(pair: Pair) -> int:
    """Least bytes of the most-loaded sender: a search with maximum flows over sets of elements."""
    demands: Counter[tuple[frozenset[int], int]] = Counter()
    for name, held in pair.source.items():
        numbers = torch.arange(math.prod(held.shape)).view(held.shape)
        has, needs = _by_element(held, numbers), _by_element(pair.target[name], numbers)
        for n in range(numbers.numel()):
            for needer in needs[n] - has[n]:
                demands[frozenset(has[n]), needer] += held.dtype.itemsize
    total, ranks = sum(demands.values()), {r for holders, _ in demands for r in holders}
    low, high = 0, total
    while low < high:
        limit = (low + high) // 2
        graph: nx.DiGraph = nx.DiGraph()
        graph.add_nodes_from(["begin", "end"])
        for key, size in demands.items():
            graph.add_edge("begin", key, capacity=size)
            graph.add_edges_from((key, rank) for rank in key[0])
        graph.add_edges_from((rank, "end", {"capacity": limit}) for rank in ranks)
        if nx.maximum_flow_value(graph, "begin", "end") == total:
            high = limit
        else:
            low = limit + 1
    unit = math.gcd(*(held.dtype.itemsize for held in pair.source.values()))
    return -(-low // unit) * unit


def _by_element(held: Held, numbers: torch.Tensor) -> dict[int, set[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    for replica in held.replicas:
        for rank, at in replica.positions.items():
            for n in shard_of(numbers, replica.layout, at).reshape(-1).tolist():
                found[n].add(rank)
    return found


def decoder(layers: int, width: int, inner: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, width), "head": (vocabulary, width), "norm": (width,)}
    for i in range(layers):
        square = {"q": (width, width), "o": (width, width), "k": (width // 8, width), "v": (width // 8, width)}
        mlp = {"gate": (inner, width), "up": (inner, width), "down": (width, inner), "norm": (width,)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in (square | mlp).items()}
    return shapes


def megatron(shapes: dict[str, tuple[int, ...]], mesh: Mesh, stages: int = 1, fsdp: bool = False) -> dict[str, Held]:
    """Column- and row-parallel weights along tp, FSDP along dp, equal stages of the layers."""
    found, last = {}, max(int(n.split(".")[1]) for n in shapes if "." in n)
    for name, shape in shapes.items():
        dim = {"norm": None, "o": 1, "down": 1}.get(name.rsplit(".", 1)[-1], 0)
        cut = {"tp": Shard(dim)} if dim is not None else {}
        layout = Layout(mesh, cut | ({"dp": Shard(0)} if fsdp else {}), ("tp", "dp") if fsdp else None)
        stage = int(name.split(".")[1]) * stages // (last + 1) if "." in name else 0 if name == "embed" else stages - 1
        found[name] = Held(
            shape, torch.bfloat16, (Replica(layout, tuple(range(stage * mesh.size, (stage + 1) * mesh.size))),)
        )
    return found

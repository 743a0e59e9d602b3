"""Who sends: the assignment of demanded bytes to the ranks that hold them, balanced and near.
The least load of the fullest sender follows from maximum flows; a minimum-cost flow within a margin
of it prefers senders on the receiver's node. Ranks that hold the same, as far from every receiver,
are one node of the network, so that its size does not grow with the number of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import networkx as nx
from networkx.algorithms.flow import shortest_augmenting_path

BALANCE_MARGIN = 20
"""a sender may send 1/20 more than the least possible load of the fullest, if that saves distance"""

MOST_NEAR_EDGES = 6000
"""edges up to which distance is minimised: a network simplex of 6000 takes about two seconds on one core"""


class Demand(NamedTuple):
    """What ``needer`` lacks of the boxes that ``holders`` hold; elements of ``size`` bytes."""

    holders: tuple[int, ...]
    needer: int
    size: int


Shares = list[tuple[int, int]]
"""(sender, bytes), in order"""


class _Senders(NamedTuple):
    """Ranks of equal holdings, load and distance."""

    ranks: tuple[int, ...]
    holds: tuple[tuple[int, ...], ...]
    """groups of holders that they belong to"""
    load: int
    """bytes that each sends in any case, since nobody else holds them"""
    node: int
    """their node if a needer is on it, else -1"""


def choose_senders(
    demands: Mapping[Demand, int], node_of: Callable[[int], int], unit: int
) -> tuple[dict[Demand, Shares], int]:
    """Senders and bytes of each demand, and the least bytes of the most-loaded sender. ``demands``:
    bytes, multiples of ``unit``. Deterministic in their order."""
    load: dict[int, int] = defaultdict(int)
    wanted: dict[tuple[int, ...], int] = defaultdict(int)
    found: dict[Demand, Shares] = {}
    for demand, size in demands.items():
        if len(demand.holders) == 1:
            load[demand.holders[0]] += size // unit
            found[demand] = [(demand.holders[0], size)]
        else:
            wanted[demand.holders] += size // unit
    least = max(load.values(), default=0)
    if not wanted:
        return found, least * unit
    open_ = {d: n // unit for d, n in demands.items() if len(d.holders) > 1}
    nodes = {node_of(d.needer) for d in open_}
    senders = _alike(wanted, load, node_of, nodes)
    least, flow = _least_load(wanted, senders, least)
    near = _near_flow(open_, senders, least + least // BALANCE_MARGIN, node_of)
    anyhow: FlowToNodes = {(h, None): row for h, row in flow.items()}
    shares = anyhow if near is None else near
    for demand, row in _by_demand(open_, shares, senders, node_of):
        found[demand] = _in_elements(row, unit, demand.size)
    return {d: found[d] for d in demands}, least * unit


def _alike(
    wanted: Iterable[tuple[int, ...]], load: Mapping[int, int], node_of: Callable[[int], int], nodes: set[int]
) -> list[_Senders]:
    holds: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for holders in wanted:
        for rank in holders:
            holds[rank].append(holders)
    number = {holders: n for n, holders in enumerate(wanted)}
    groups: dict[tuple[tuple[int, ...], int, int], list[int]] = defaultdict(list)
    for rank in sorted(holds):
        node = node_of(rank)
        key = tuple(number[h] for h in holds[rank]), load.get(rank, 0), node if node in nodes else -1
        groups[key].append(rank)
    return [_Senders(tuple(r), tuple(holds[r[0]]), own, node) for (_, own, node), r in groups.items()]


Flow = dict[tuple[int, ...], dict[int, int]]
"""group of holders → number of the senders → units"""

FlowToNodes = dict[tuple[tuple[int, ...], int | None], dict[int, int]]
"""(group of holders, node of the needers or None: all) → number of the senders → units"""


def _least_load(wanted: Mapping[tuple[int, ...], int], senders: Sequence[_Senders], least: int) -> tuple[int, Flow]:
    """The least units of the most-loaded sender, and a flow that reaches it, by Newton's method:
    the ranks on the wrong side of a minimum cut must send all that only they hold."""
    total = sum(wanted.values())
    everyone = sum(len(s.ranks) for s in senders)
    limit = max(least, -(-(total + sum(len(s.ranks) * s.load for s in senders)) // everyone))
    while True:
        network: nx.DiGraph = nx.DiGraph()
        for holders, units in wanted.items():
            network.add_edge("begin", holders, capacity=units)
        for n, s in enumerate(senders):
            network.add_edge(n, "end", capacity=len(s.ranks) * (limit - s.load))
            network.add_edges_from((holders, n) for holders in s.holds)
        residual = shortest_augmenting_path(network, "begin", "end")
        if residual.graph["flow_value"] == total:
            rows = {h: {n: e["flow"] for n, e in residual[h].items() if n != "begin" and e["flow"] > 0} for h in wanted}
            return limit, rows
        reached = _reached(residual)
        full = [senders[n] for n in reached if isinstance(n, int)]
        must = sum(wanted[h] for h in reached if isinstance(h, tuple)) + sum(len(s.ranks) * s.load for s in full)
        limit = -(-must // sum(len(s.ranks) for s in full))


def _reached(residual: nx.DiGraph) -> set[object]:
    seen: set[object] = {"begin"}
    level: list[object] = ["begin"]
    while level:
        level = [
            v for u in level for v, e in residual[u].items() if e["flow"] < e["capacity"] and v not in seen
            if not seen.add(v)  # type: ignore[func-returns-value]
        ]  # fmt: skip
    return seen


def _near_flow(
    demands: Mapping[Demand, int], senders: Sequence[_Senders], limit: int, node_of: Callable[[int], int]
) -> FlowToNodes | None:
    """(holders, node of needers) → senders → units, least from other nodes; None: too many."""
    wanted: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)
    for demand, units in demands.items():
        wanted[demand.holders, node_of(demand.needer)] += units
    able: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for n, s in enumerate(senders):
        for holders in s.holds:
            able[holders].append(n)
    network: nx.DiGraph = nx.DiGraph()
    for key, units in wanted.items():
        network.add_node(key, demand=-units)
        network.add_edges_from((key, n, {"weight": int(senders[n].node != key[1])}) for n in able[key[0]])
    flow: FlowToNodes = {}
    for nodes in nx.weakly_connected_components(network):  # apart, since a network simplex is not linear
        part = network.subgraph(nodes).copy()
        if part.number_of_edges() > MOST_NEAR_EDGES:
            return None
        part.add_node("end", demand=sum(wanted[v] for v in nodes if v in wanted))
        for n in [v for v in part if isinstance(v, int)]:
            part.add_edge(n, "end", capacity=len(senders[n].ranks) * (limit - senders[n].load), weight=0)
        flow |= nx.network_simplex(part)[1]
    return {key: {n: units for n, units in flow[key].items() if units} for key in wanted}


def _by_demand(
    demands: Mapping[Demand, int],
    flow: FlowToNodes,
    senders: Sequence[_Senders],
    node_of: Callable[[int], int],
) -> Iterator[tuple[Demand, Shares]]:
    """Senders of every demand: the load of equal senders is divided equally among their ranks."""
    totals: dict[int, int] = defaultdict(int)
    for row in flow.values():
        for n, units in row.items():
            totals[n] += units
    given: dict[int, int] = defaultdict(int)
    rows: dict[tuple[tuple[int, ...], int | None], list[tuple[int, int]]] = {}
    for key, row in flow.items():
        rows[key] = []
        for n, units in sorted(row.items()):
            rows[key] += _split(senders[n].ranks, totals[n], given[n], given[n] + units)
            given[n] += units
    by_node = not any(node is None for _, node in flow)
    for demand, units in demands.items():
        queue, shares = rows[demand.holders, node_of(demand.needer) if by_node else None], []
        while units:
            rank, left = queue[0]
            taken = min(left, units)
            shares.append((rank, taken))
            units -= taken
            if taken == left:
                queue.pop(0)
            else:
                queue[0] = rank, left - taken
        yield demand, shares


def _split(ranks: Sequence[int], total: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranks that send units ``begin`` to ``end`` of ``total``, which they send in equal parts."""
    for at, rank in enumerate(ranks):
        low, high = max(begin, at * total // len(ranks)), min(end, (at + 1) * total // len(ranks))
        if low < high:
            yield rank, high - low


def _in_elements(row: Shares, unit: int, size: int) -> Shares:
    """Units as bytes; a share ends where an element ends."""
    found, done, at = [], 0, 0
    for rank, units in row:
        at += units * unit
        end = at // size * size
        if end > done:
            found.append((rank, end - done))
            done = end
    return found

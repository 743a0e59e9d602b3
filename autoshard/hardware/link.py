"""Links between devices, and routes of groups over them, in the α-β model.
A collective takes latency + ring bytes / bandwidth. Ring bytes are sent by one rank: (n-1)/n of the
full tensor for an all-gather or reduce-scatter, twice that for an all-reduce, n-1 chunks for an
all-to-all, one message for a permute."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeGuard

from autoshard.errors import MeshError
from autoshard.hardware.schema import to_python_numbers

SMALL_ALL_REDUCE = "few"
"""an all-reduce of few numbers (losses): on gloo ranks exchange them directly, without a ring"""

_FALLBACK_KINDS = {
    SMALL_ALL_REDUCE: "all_reduce",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_gather",
    "permute": "all_gather",
    "all_reduce": "all_gather",
}

_ALL_REDUCE_KINDS = ("all_reduce", SMALL_ALL_REDUCE)


class Rate(NamedTuple):
    """Measured latency and bandwidth of one kind of collective among ``ranks`` ranks."""

    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, permute or :data:`SMALL_ALL_REDUCE`"""
    ranks: int
    latency: float
    """seconds"""
    bandwidth: float
    """ring bytes per second and rank"""


class Overlap(NamedTuple):
    """Speed of compute while collectives overlap with it, relative to compute alone; 0: none."""

    node: float
    """during collectives inside a node"""
    network: float
    """during collectives between nodes"""


def is_amount(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number of at least 0."""
    return type(value) is not bool and isinstance(value, int | float) and value >= 0


@dataclass(frozen=True, slots=True)
class Link:
    """``latency`` (seconds per ring step), ``bandwidth`` (bytes/s per rank), and measured rates.

    Raises :class:`MeshError` for a negative latency, or a bandwidth that is not above 0.
    """

    latency: float
    bandwidth: float
    rates: tuple[Rate, ...] = ()
    """by kind and ranks; unmeasured kinds take the all-gather's, few numbers the all-reduce's"""

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth", "rates"):
            object.__setattr__(self, name, to_python_numbers(getattr(self, name)))
        if not isinstance(self.rates, tuple) or not all(isinstance(rate, Rate) for rate in self.rates):
            raise MeshError(f"the rates of a link must be a tuple of Rate, got {self.rates!r}")
        pairs: tuple[tuple[object, object], ...] = ((self.latency, self.bandwidth), *(r[2:] for r in self.rates))
        for latency, bandwidth in pairs:
            if not (is_amount(latency) and is_amount(bandwidth) and bandwidth > 0):
                raise MeshError(
                    "a link needs a latency in seconds and a bandwidth above 0 in B/s, got "
                    f"{latency!r} and {bandwidth!r}"
                )

    def rate(self, kind: str, ranks: int) -> tuple[float, float]:
        """(seconds, seconds per ring byte) of a collective among ``ranks`` ranks, interpolated
        between measured group sizes (an all-reduce: their logarithms, as in trees). Beyond them
        latency is extrapolated."""
        if ranks <= 1:
            return 0.0, 0.0
        known = sorted((r for r in self.rates if r.kind == kind), key=lambda r: r.ranks)
        if not known and kind != "all_gather" and self.rates:
            return self.rate(_FALLBACK_KINDS[kind], 2 if kind == "permute" else ranks)
        if not known:
            return self.latency * (1 + 0.25 * (ranks - 1)), 1.0 / self.bandwidth
        at = (lambda n: math.log2(n)) if kind in _ALL_REDUCE_KINDS else float
        if len(known) == 1 or ranks <= known[0].ranks:
            return known[0].latency, 1.0 / known[0].bandwidth
        below, above = next((p for p in itertools.pairwise(known) if ranks <= p[1].ranks), (known[-2], known[-1]))
        part = (at(ranks) - at(below.ranks)) / (at(above.ranks) - at(below.ranks))
        latency = below.latency + part * (above.latency - below.latency)
        inside = min(part, 1.0)
        return latency, (1 - inside) / below.bandwidth + inside / above.bandwidth


UNBOUNDED = 1 << 30
"""devices of a level without a limit"""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a cluster: ``size`` devices that ``link`` joins, all levels below included.

    ``link.bandwidth`` is the share of one device (bytes/s) if all devices send at once, so that an
    oversubscribed level has less than the network card. Raises :class:`MeshError` for a bad size.
    """

    name: str
    """such as server, rack, pod or cluster"""
    size: int
    link: Link

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1 or not isinstance(self.link, Link):
            raise MeshError(f"level {self.name!r} needs a size of at least 1 device and a Link, got {self.size!r}")


def check_levels(levels: object, name: str) -> None:
    """:class:`MeshError` unless ``levels`` are several, each a multiple of the one below."""
    if not isinstance(levels, tuple) or len(levels) < 2 or not all(isinstance(x, Level) for x in levels):
        raise MeshError(f"hardware {name!r}: levels is a tuple of two or more Level, innermost first, got {levels!r}")
    for below, above in itertools.pairwise(levels):
        if above.size % below.size:
            raise MeshError(
                f"hardware {name!r}: level {above.name!r} has {above.size} devices, which is not a multiple of the "
                f"{below.size} of level {below.name!r}. List levels from the innermost to the outermost"
            )


class Crossing(NamedTuple):
    """The part of a group that a level above the second joins."""

    link: Link
    members: int
    """most ranks of the group in one unit of the level below"""
    units: int
    """units of the level below that the group spans"""


@dataclass(frozen=True)
class Route:
    """The links of a group with ``inside`` ranks on each of ``nodes`` nodes.
    Across nodes every rank has its own network card. Rings and trees send from node to node through
    the cards of all ``inside`` ranks; most of an all-to-all passes through the rank's own card.
    So it is at every level: ranks of one unit share what their devices may send out of it, and the
    slowest level that the group spans counts. A ring that nearly fills both NVLink and the cards
    fills neither: the fourth powers of its seconds per byte add up, which is within 16 % of most
    measured rates of 2 to 32 nodes with 2 to 8 ranks each (:mod:`autoshard.hardware.presets`)."""

    node: Link
    network: Link
    inside: int
    nodes: int
    launch: float = 0.0
    """seconds to issue a collective, added to the links' latency"""
    beyond: tuple[Crossing, ...] = ()
    """levels above the nodes' network that the group spans"""

    @property
    def ranks(self) -> int:
        return self.inside * self.nodes

    def rate(self, kind: str) -> tuple[float, float]:
        """(seconds, seconds per ring byte) of a collective of this kind."""
        if kind not in self._rates:
            self._rates[kind] = self._fastest(kind)
        return self._rates[kind]

    @cached_property
    def _rates(self) -> dict[str, tuple[float, float]]:
        """Cache of :meth:`rate`."""
        return {}

    def _fastest(self, kind: str) -> tuple[float, float]:
        latency, per_byte = self._rate(kind)
        if kind in _ALL_REDUCE_KINDS:  # at most reduce-scatter + all-gather
            (a, b), (c, d) = self._rate("reduce_scatter"), self._rate("all_gather")
            latency, per_byte = min(latency, a + c), min(per_byte, (b + d) / 2)
        if kind == SMALL_ALL_REDUCE:
            latency = min(latency, self._rate("all_reduce")[0])
        # small messages go by a tree (NCCL's PAT), but on several ranks per node only by rings
        if kind in ("all_gather", "reduce_scatter") and 1 in (self.inside, self.nodes):
            latency = min(latency, self._rate("all_reduce")[0])
        return (latency + self.launch if self.ranks > 1 else 0.0), per_byte

    def seconds(self, ring_bytes: float, kind: str = "all_gather") -> float:
        """Seconds of one collective that sends ``ring_bytes`` per rank."""
        latency, per_byte = self.rate(kind)
        return latency + per_byte * ring_bytes

    def _rate(self, kind: str) -> tuple[float, float]:
        ranks, inside, nodes = self.ranks, self.inside, self.nodes
        if ranks <= 1:
            return 0.0, 0.0
        if nodes == 1:
            return self.node.rate(kind, 2 if kind == "permute" else inside)
        crossings = (Crossing(self.network, inside, nodes), *self.beyond)
        rates = [c.link.rate(kind, c.units) for c in crossings]
        (near, beside), far = self.node.rate(kind, max(2, inside)), max(latency for latency, _ in rates)
        each = [(c, per_byte) for c, (_, per_byte) in zip(crossings, rates, strict=True)]
        if kind == "permute":
            return near + far, max(rates[0][1], *(per_byte / c.members for c, per_byte in each))
        if kind == "all_to_all":
            staying = 1 - (ranks - inside) / (ranks - 1)
            across = max((ranks - c.members) / (ranks - 1) * per_byte for c, per_byte in each)
            return near + far, max(across, staying * beside)
        steps = 1 if kind in _ALL_REDUCE_KINDS else inside  # a ring visits all ranks, a tree's depth is by node
        across = max(per_byte / c.members for c, per_byte in each)  # a ring takes all its bytes over each boundary
        if kind in _ALL_REDUCE_KINDS and nodes == 2 and not self.beyond:  # a tree of two nodes half of them
            across *= ranks / (2 * (ranks - 1))
        return near + far * steps, math.hypot(across**2, beside**2 if inside > 1 else 0.0) ** 0.5

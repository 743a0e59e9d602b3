"""Links between devices, and the route of a group over them. Times are α-β: latency plus ring bytes over bandwidth.

Ring bytes are what one rank puts on the wire: (n-1)/n of the whole for an all-gather or a reduce-scatter, twice that for
an all-reduce, (n-1) pieces for an all-to-all, one message for a permute.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeGuard

from autoshard.errors import MeshError
from autoshard.hardware.schema import plain

FEW = "few"
"""the kind of an all-reduce of few numbers, such as losses: on gloo more than two ranks send each other all of them and meet
once, where a ring takes a turn for each segment (a single number has one segment in gloo/allreduce.cc)"""

_SAME_AS = {
    FEW: "all_reduce",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_gather",
    "permute": "all_gather",
    "all_reduce": "all_gather",
}

_SUMS = ("all_reduce", FEW)


class Rate(NamedTuple):
    """What was measured of one kind of collective among ``ranks`` ranks."""

    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, permute or :data:`FEW`"""
    ranks: int
    latency: float
    """seconds"""
    bandwidth: float
    """ring bytes per second and rank"""


class Overlap(NamedTuple):
    """How fast compute runs while collectives run beside it, relative to compute alone; 0: nothing can run beside it."""

    node: float
    """beside those inside a node"""
    network: float
    """beside those between nodes"""


def is_amount(value: object) -> TypeGuard[float]:
    """Whether it is a number of at least 0."""
    return type(value) is not bool and isinstance(value, int | float) and value >= 0


@dataclass(frozen=True, slots=True)
class Link:
    """``latency`` seconds per ring step and ``bandwidth`` bytes per second per rank, where no rate was measured.

    Raises :class:`MeshError` for a negative latency, or a bandwidth that is not above 0.
    """

    latency: float
    bandwidth: float
    rates: tuple[Rate, ...] = ()
    """by kind and number of ranks; a kind that was not measured goes as an all-gather, few numbers as any all-reduce"""

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth", "rates"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        if not isinstance(self.rates, tuple) or not all(isinstance(rate, Rate) for rate in self.rates):
            raise MeshError(f"the rates of a link are a tuple of Rate, got {self.rates!r}")
        pairs: tuple[tuple[object, object], ...] = ((self.latency, self.bandwidth), *(r[2:] for r in self.rates))
        for latency, bandwidth in pairs:
            if not (is_amount(latency) and is_amount(bandwidth) and bandwidth > 0):
                raise MeshError(
                    f"a link has a latency in seconds, and a bandwidth in B/s above 0, got {latency!r} and {bandwidth!r}"
                )

    def rate(self, kind: str, ranks: int) -> tuple[float, float]:
        """(seconds, seconds per ring byte) of a collective among ``ranks`` ranks.

        Between two measured sizes of the group both are interpolated: along the number of ranks, of an all-reduce along
        its logarithm (rings and trees). Beyond the largest, latency goes on along the same line.
        """
        if ranks <= 1:
            return 0.0, 0.0
        known = sorted((r for r in self.rates if r.kind == kind), key=lambda r: r.ranks)
        if not known and kind != "all_gather" and self.rates:
            return self.rate(_SAME_AS[kind], 2 if kind == "permute" else ranks)
        if not known:
            return self.latency * (1 + 0.25 * (ranks - 1)), 1.0 / self.bandwidth
        at = (lambda n: math.log2(n)) if kind in _SUMS else float
        if len(known) == 1 or ranks <= known[0].ranks:
            return known[0].latency, 1.0 / known[0].bandwidth
        below, above = next((p for p in itertools.pairwise(known) if ranks <= p[1].ranks), (known[-2], known[-1]))
        part = (at(ranks) - at(below.ranks)) / (at(above.ranks) - at(below.ranks))
        latency = below.latency + part * (above.latency - below.latency)
        inside = min(part, 1.0)
        return latency, (1 - inside) / below.bandwidth + inside / above.bandwidth


@dataclass(frozen=True)
class Route:
    """Of a group with ``inside`` ranks on each of ``nodes`` nodes: the links it uses.

    Where it spans nodes, every rank has its own network card: what a ring or a tree sends from node to node leaves
    through as many cards as the group has ranks there. An all-to-all sends to every rank by itself, so that most of it
    goes through the rank's own card.
    """

    node: Link
    network: Link
    inside: int
    nodes: int
    launch: float = 0.0
    """seconds that issuing a collective holds up the rank, on top of what the links take"""

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
        """Those that were asked for."""
        return {}

    def _fastest(self, kind: str) -> tuple[float, float]:
        latency, per_byte = self._rate(kind)
        if kind in _SUMS:  # never slower than in two steps
            (a, b), (c, d) = self._rate("reduce_scatter"), self._rate("all_gather")
            latency, per_byte = min(latency, a + c), min(per_byte, (b + d) / 2)
        if kind == FEW:
            latency = min(latency, self._rate("all_reduce")[0])
        if kind in ("all_gather", "reduce_scatter"):  # by a tree, too, where messages are small (NCCL's PAT)
            latency = min(latency, self._rate("all_reduce")[0])
        return (latency + self.launch if self.ranks > 1 else 0.0), per_byte

    def seconds(self, ring_bytes: float, kind: str = "all_gather") -> float:
        """Time of one collective that puts ``ring_bytes`` on the wire per rank."""
        latency, per_byte = self.rate(kind)
        return latency + per_byte * ring_bytes

    def _rate(self, kind: str) -> tuple[float, float]:
        ranks, inside, nodes = self.ranks, self.inside, self.nodes
        if ranks <= 1:
            return 0.0, 0.0
        if nodes == 1:
            return self.node.rate(kind, 2 if kind == "permute" else inside)
        (near, beside), (far, across) = self.node.rate(kind, max(2, inside)), self.network.rate(kind, nodes)
        if kind == "permute":
            return near + far, across
        if kind == "all_to_all":
            crossing = (ranks - inside) / (ranks - 1)
            return near + far, max(crossing * across, (1 - crossing) * beside)
        crossing = (nodes - 1) / nodes * ranks / (ranks - 1)
        steps = 1 if kind in _SUMS else inside  # a ring goes through all ranks, a tree's depth is that of nodes
        return near + far * steps, max(beside if inside > 1 else 0.0, crossing * across / inside)

"""Memory of a step: the result of the simulation, and bytes of optimizer states."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from autoshard.errors import PlanError
from autoshard.passes.ir.text import show_bytes

OPTIMIZERS: Mapping[str, tuple[float, float]] = {
    "adamw": (2, 0),
    "adam": (2, 0),
    "sparse_adam": (2, 0),
    "adagrad": (1, 0),
    "rmsprop": (1, 0),
    "lion": (1, 0),
    "momentum": (1, 0),
    "muon": (1, 0),
    "sgd": (0, 0),
    "adafactor": (0, 1),
    "none": (0, 0),
}
"""optimizer → numbers kept per element, and per row and column of a matrix (at least float32)"""

ON_HOST = "@host"
"""end of the name of an optimizer whose states are in host memory between steps"""


def optimizer_bytes(optimizer: str, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Bytes of optimizer state for a parameter or shard on the device: none of one :data:`ON_HOST`."""
    found = state_bytes(optimizer, shape, dtype)
    return 0.0 if optimizer.endswith(ON_HOST) else found


def state_bytes(optimizer: str, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Bytes of optimizer state for a parameter or shard, wherever it is. Raises :class:`PlanError` on others."""
    optimizer = optimizer.removesuffix(ON_HOST)
    if optimizer not in OPTIMIZERS:
        raise PlanError(f"optimizer={optimizer!r} is not known. Known: {', '.join(OPTIMIZERS)}.")
    each, factored = OPTIMIZERS[optimizer]
    numel, sides = 1.0, 0.0
    for n in shape:
        numel *= int(n)
    if factored:  # a vector has no rows to sum over: all its elements are kept
        *outer, rows, columns = (1, *shape) if len(shape) > 1 else (0, 0, 0)
        for n in outer:
            rows, columns = rows * n, columns * n
        sides = rows + columns if len(shape) > 1 else numel
    return (each * numel + factored * sides) * max(4, dtype.itemsize)


def host_buckets(sizes: Sequence[float]) -> list[int]:
    """Parameters per bucket whose states come from the host together. ``sizes``: bytes of the states of each.

    A bucket has a share of at most 1 / :data:`BUCKETS_ON_HOST` of all states, or is one parameter."""
    most, counts, filled = sum(sizes) / BUCKETS_ON_HOST, list[int](), math.inf
    for size in sizes:
        if filled + size > most:
            counts, filled = [*counts, 0], 0.0
        counts[-1] += 1
        filled += size
    return counts


BUCKETS_ON_HOST = 16
"""least number of buckets: few kernels in each would leave the link idle, few buckets take memory"""


def host_bytes_in_flight(sizes: Sequence[float]) -> float:
    """Most bytes of states on the device at once: of three buckets, that come, are updated, and go."""
    ends = list(itertools.accumulate(host_buckets(sizes)))
    each = [sum(sizes[a:b]) for a, b in itertools.pairwise((0, *ends))]
    return max((sum(each[i : i + 3]) for i in range(len(each))), default=0.0)


def orthogonalization_flops(shape: tuple[int, ...]) -> float:
    """FLOPs of Muon's update of [m, n], m ≤ n: 5 times two products of m·m·n, one of m·m·m."""
    if len(shape) != 2:
        return 0.0
    m, n = sorted(map(float, shape))
    return 5 * (4 * m * m * n + 2 * m**3)


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank with the highest peak; each part at its own maximum, so ``peak`` ≤ sum."""

    parameters: float = 0.0
    gradients: float = 0.0
    """gradients of all parameters, as at the end of the backward"""
    optimizer: float = 0.0
    """state of the optimizer that the plan was made for"""
    buffers: float = 0.0
    """buffers and constants"""
    activations: float = 0.0
    """tensors that autograd saves, except parameters, buffers, inputs; at the end of the forward"""
    temporaries: float = 0.0
    """the rest: inputs, outputs, activation gradients, gathered parameters, workspaces"""
    peak: float = 0.0
    """maximum over the step"""
    at_peak: Mapping[str, float] = field(default_factory=dict)
    """part → bytes at the peak; they sum to ``peak``"""
    moment: str = ""
    """where the peak is: phase of an operation, and its module"""
    curve: tuple[tuple[str, str, float], ...] = field(default=(), repr=False)
    """(operation, phase, bytes): maximum while each operation runs, in order"""
    spared: Mapping[str, float] = field(default_factory=dict, repr=False)
    """recomputed operation, or value whose redistribution is repeated → bytes saved, net of the
    tensors kept for the recomputation"""
    gathered: float = 0.0
    """part of the activations: parameters that ZeRO keeps gathered; all micro-batches share them"""
    on_host: float = 0.0
    """states of the optimizer in host memory"""
    offloaded: Mapping[str, float] = field(default_factory=dict)
    """block → bytes of its saved activations in host memory"""
    limited: bool = False
    """whether the budget excludes the fastest plan, which needs more"""

    def in_flight(self, count: int) -> Memory:
        """Memory of a stage: activations of ``count`` micro-batches, gradients of earlier ones."""
        more = (count - 1) * (self.activations - self.gathered)
        left = max(0.0, self.gradients - self.at_peak.get("gradients", 0.0))
        at_peak = dict(self.at_peak)
        for part, size in (("activations", more), ("gradients", left)):
            at_peak[part] = at_peak.get(part, 0.0) + size
        curve = tuple((op, phase, size + more) for op, phase, size in self.curve)
        return replace(
            self, activations=self.activations + more, peak=self.peak + more + left, at_peak=at_peak, curve=curve
        )

    def live(self) -> dict[str, float]:
        """Moment (operation; "": the optimizer's step) → most bytes then, forward or backward."""
        found: dict[str, float] = {}
        for name, phase, size in self.curve:
            moment = "" if phase == "step" else name
            found[moment] = max(found.get(moment, 0.0), size)
        return found

    def dominant(self) -> str:
        """The parts at the peak, largest first, as text."""
        parts = sorted(((n, name) for name, n in self.at_peak.items() if n), reverse=True)
        return ", ".join(f"{name} {show_bytes(n)}" for n, name in parts)


@dataclass(frozen=True)
class Recomputed:
    """An operation or redistribution that the backward recomputes (rematerializes)."""

    name: str
    """the operation, a key of ``plan.choices``, or the value that is redistributed again"""
    fqn: str
    what: str
    """"computed", "converted", or "drawn" """
    bytes: float
    """bytes saved per rank"""
    seconds: float
    """seconds of recomputation per rank and step"""


@dataclass(frozen=True)
class Offloaded:
    """What a step keeps in host memory and copies to the device and back."""

    what: str
    """"optimizer states" or "activations" """
    bytes: float
    """bytes in host memory per rank"""
    seconds: float
    """seconds of the copies per rank and step; in both directions at a time"""
    exposed_s: float
    """seconds of them that the step waits for"""
    blocks: tuple[str, ...] = ()
    """repeated modules whose saved activations these are"""

"""What a step holds in memory: the result of simulating a program, and what optimizers keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from autoshard.errors import PlanError
from autoshard.passes.ir.units import show_bytes

OPTIMIZERS: Mapping[str, tuple[float, float]] = {
    "adamw": (2, 0),
    "adam": (2, 0),
    "sparse_adam": (2, 0),
    "adagrad": (1, 0),
    "rmsprop": (1, 0),
    "lion": (1, 0),
    "momentum": (1, 0),
    "sgd": (0, 0),
    "adafactor": (0, 1),
    "none": (0, 0),
}
"""optimizer → numbers that it keeps per element of a parameter, and per row and column of a matrix (in float32 at least)"""


def optimizer_bytes(optimizer: str, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Bytes of state for a trained parameter, or a shard, of this shape. Raises :class:`PlanError` for an unknown name."""
    if optimizer not in OPTIMIZERS:
        raise PlanError(f"optimizer={optimizer!r} is not known. Known: {', '.join(OPTIMIZERS)}.")
    each, factored = OPTIMIZERS[optimizer]
    numel, sides = 1.0, 0.0
    for n in shape:
        numel *= int(n)
    if factored:  # a vector has no rows to sum over: it is kept whole
        *outer, rows, columns = (1, *shape) if len(shape) > 1 else (0, 0, 0)
        for n in outer:
            rows, columns = rows * n, columns * n
        sides = rows + columns if len(shape) > 1 else numel
    return (each * numel + factored * sides) * max(4, dtype.itemsize)


@dataclass(frozen=True)
class Memory:
    """Bytes on the busiest rank. Each part at its largest; they need not be largest at once, so ``peak`` ≤ their sum."""

    parameters: float = 0.0
    gradients: float = 0.0
    """of parameters: all of them, as at the end of the backward"""
    optimizer: float = 0.0
    """state of the optimizer that the plan was made for"""
    buffers: float = 0.0
    """buffers and constants"""
    activations: float = 0.0
    """what autograd keeps at the end of the forward beside parameters, buffers and inputs"""
    temporaries: float = 0.0
    """all else: inputs, outputs, gradients of activations, gathered parameters, an operation's own workspace"""
    peak: float = 0.0
    """the most at any moment of the step"""
    at_peak: Mapping[str, float] = field(default_factory=dict)
    """part → bytes at that moment; their sum is ``peak``"""
    moment: str = ""
    """when that is: an operation's phase and module"""
    curve: tuple[tuple[str, str, float], ...] = field(default=(), repr=False)
    """(operation, phase, bytes): the most while each operation of the graph ran, in order"""
    spared: Mapping[str, float] = field(default_factory=dict, repr=False)
    """operation that is made again in the backward, or value whose conversion is → bytes that are not kept therefore, less
    what is kept to make it from"""
    gathered: float = 0.0
    """of the activations: parameters that ZeRO keeps gathered, which all micro-batches of a step share"""

    def in_flight(self, count: int) -> Memory:
        """The same where ``count`` micro-batches keep what they need for the backward at once, as in a pipeline, and
        earlier ones have left their gradients."""
        more = (count - 1) * (self.activations - self.gathered)
        left = max(0.0, self.gradients - self.at_peak.get("gradients", 0.0))
        at_peak = dict(self.at_peak)
        for part, size in (("activations", more), ("gradients", left)):
            at_peak[part] = at_peak.get(part, 0.0) + size
        curve = tuple((op, phase, size + more) for op, phase, size in self.curve)
        return replace(
            self, activations=self.activations + more, peak=self.peak + more + left, at_peak=at_peak, curve=curve
        )

    def dominant(self) -> str:
        """The parts of the peak, largest first, as text."""
        parts = sorted(((n, name) for name, n in self.at_peak.items() if n), reverse=True)
        return ", ".join(f"{name} {show_bytes(n)}" for n, name in parts)


@dataclass(frozen=True)
class Recomputed:
    """Something that is made again in the backward instead of being kept."""

    name: str
    """the operation, a key of ``plan.choices``, or the value that is converted again"""
    fqn: str
    """the module it stands in"""
    what: str
    """"computed", "converted", or "drawn" """
    bytes: float
    """per rank, that are not kept"""
    seconds: float
    """per rank and step, for making it again"""

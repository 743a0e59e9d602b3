"""A move: the conversion of one tensor from one placement to another along one group of mesh axes.

The table of the layout algebra in code. Where a gradient flows, the gradient of ``X → Y`` is ``dual(Y) → dual(X)``,
with ``dual``: S ↔ S, I ↔ I, R ↔ P. So the backward of every move is a move again, and nothing else has to be known.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

DUAL = {"S": "S", "I": "I", "R": "P", "P": "R"}

VERB = {
    "IR": "keep",
    "RI": "keep",
    "PI": "all_reduce",
    "PR": "all_reduce",
    "PS": "reduce_scatter",
    "SI": "all_gather",
    "SR": "all_gather",
    "IS": "slice",
    "RS": "slice",
    "SP": "pad",
    "IP": "first",
    "RP": "first",
    "SS": "all_to_all",
}
"""What the forward of ``source + target`` does to the values."""

LOCAL = frozenset({"keep", "slice", "pad", "first"})
"""Verbs that look at this rank's tensor only."""


class Move(NamedTuple):
    """``source → target`` over the flattened group ``axes`` (first axis outermost).

    ``dim`` is the sharded tensor dim and ``size`` its length before the cut. An all-to-all goes from a cut of ``dim``
    to a cut of ``to_dim`` (length ``to_size``). ``order`` makes it a permute: the same chunks, numbered along
    ``order`` afterwards.
    """

    source: str
    target: str
    axes: tuple[str, ...]
    dim: int = -1
    size: int = -1
    to_dim: int = -1
    to_size: int = -1
    order: tuple[str, ...] = ()
    op: str = "sum"
    module: str = "?"
    """what it is made for, in profiles; "?" where none was running"""

    @property
    def verb(self) -> str:
        """What happens to the values: a collective's kind, or one of :data:`LOCAL`."""
        return "permute" if self.order else VERB[self.source + self.target]

    @property
    def key(self) -> Move:
        """What every rank must agree on. Lengths may differ between groups, where other axes cut unevenly."""
        return Move(self.source, self.target, self.axes, self.dim, -1, self.to_dim, -1, self.order, self.op)

    def backward(self) -> Move:
        """The move of the gradient."""
        source, target = DUAL[self.target], DUAL[self.source]
        if self.order:
            return self._replace(axes=self.order, order=self.axes)
        if self.to_dim >= 0:
            return self._replace(dim=self.to_dim, size=self.to_size, to_dim=self.dim, to_size=self.size)
        return Move(source, target, self.axes, self.dim, self.size, module=self.module)

    def ring_bytes(self, x: torch.Tensor, ranks: int) -> float:
        """Bytes on the wire per rank, ring algorithm, for this rank's input ``x`` in a group of ``ranks``.

        Chunks that differ in length all count as the longest, as in the plan. That is what is sent by an all-gather and
        a reduce-scatter, which pad; an all-to-all and a permute send no more than that.
        """
        shape = list(x.shape)
        for dim, size in ((self.dim, self.size), (self.to_dim, self.to_size)):
            if dim >= 0:
                shape[dim] = -(-size // ranks)
        piece = math.prod(shape) * x.element_size()
        match self.verb:
            case "all_reduce":
                return 2 * (ranks - 1) * piece / ranks
            case "all_gather" | "reduce_scatter" | "all_to_all":
                return (ranks - 1) * piece
            case "permute":
                return piece
        return 0.0

    def __str__(self) -> str:
        detail = f" of dim {self.dim}" if self.dim >= 0 else ""
        detail += f" to dim {self.to_dim}" if self.to_dim >= 0 else ""
        detail += f" ({self.op})" if self.op != "sum" else ""
        return f"{self.verb} {self.source} → {self.target}{detail} over {', '.join(self.axes)}"

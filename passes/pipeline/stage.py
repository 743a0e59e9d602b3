"""What cutting a graph gives: the stages, each with an ordinary graph of its own, and what goes from one to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.passes.ir.gradients import outputs_reached
from autoshard.passes.ir.graph import Graph


@dataclass(frozen=True)
class Stage:
    """A contiguous part of a graph, as a graph.

    Its inputs are the parameters, buffers and constants that it reads, the user's inputs that it reads, and
    ``received``; its outputs are ``sent``, then the model's outputs at ``results``.
    """

    number: int
    graph: Graph
    received: tuple[str, ...]
    """values that the stage before sends, in its order; inputs of ``graph`` of these names"""
    sent: tuple[str, ...]
    """values that the next stage receives; some may only pass through"""
    results: tuple[int, ...]
    """positions among the whole graph's flat outputs of those that it returns"""

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the user's inputs that it reads."""
        received = frozenset(self.received)
        return tuple(i.name for i in self.graph.inputs if i.kind == "input" and i.name not in received)

    def reads(self, name: str) -> bool:
        """Whether it reads the data of an input: some are given for their shapes, which open lengths are read from."""
        return bool(self.graph.uses[name]) or name in self.graph.returned

    @property
    def held(self) -> tuple[str, ...]:
        """Original names of the parameters and buffers that it reads or writes."""
        return tuple(i.fqn for i in self.graph.inputs if i.kind in ("parameter", "buffer"))

    @property
    def message_bytes(self) -> int:
        """Bytes that it sends forward, whole; of those that carry a gradient as many come back."""
        return sum(self.graph.types[name].nbytes for name in self.sent)


@dataclass(frozen=True)
class Stages:
    """``whole``, the graph of one micro-batch, cut before the operations at ``boundaries``."""

    whole: Graph
    boundaries: tuple[int, ...]
    """positions in ``whole.nodes``, ascending; one fewer than there are stages"""
    each: tuple[Stage, ...]

    def __len__(self) -> int:
        return len(self.each)

    @cached_property
    def homes(self) -> Mapping[str, tuple[int, ...]]:
        """Original name of a parameter or buffer → the stages that hold it.

        What none reads, such as counters in evaluation, goes to its module's: another call reads it there.
        """
        found: dict[str, tuple[int, ...]] = {i.fqn: () for i in self.whole.inputs if i.kind in ("parameter", "buffer")}
        for stage in self.each:
            for fqn in stage.held:
                found[fqn] = (*found[fqn], stage.number)
        read = [fqn for fqn, stages in found.items() if stages]
        return {fqn: stages or (_beside(fqn, read, found),) for fqn, stages in found.items()}

    def reached(self, loss: int | None) -> frozenset[str]:
        """The values that a gradient reaches from the model's output ``loss``; without one, none."""
        if loss is None:
            return frozenset()
        return frozenset(name for name, outputs in outputs_reached(self.whole).items() if outputs >> loss & 1)

    @property
    def tied(self) -> Mapping[str, tuple[int, ...]]:
        """Parameters that several stages hold: their gradients are summed over these."""
        names = {i.fqn for i in self.whole.inputs if i.kind == "parameter"}
        return {fqn: stages for fqn, stages in self.homes.items() if fqn in names and len(stages) > 1}

    def __str__(self) -> str:
        lines = []
        for stage in self.each:
            lines.append(f"stage {stage.number}:")
            if stage.received:
                lines.append(f"  receives {', '.join(stage.received)}")
            lines += [f"  {line}" for line in str(stage.graph).splitlines()]
        return "\n".join(lines)


def _beside(fqn: str, read: Sequence[str], stages: Mapping[str, tuple[int, ...]]) -> int:
    """The last stage that reads a tensor of the innermost module that holds ``fqn`` and one that is read."""
    path = fqn.split(".")[:-1]
    for depth in range(len(path), 0, -1):
        module = ".".join(path[:depth]) + "."
        if near := [max(stages[other]) for other in read if other.startswith(module)]:
            return max(near)
    return 0

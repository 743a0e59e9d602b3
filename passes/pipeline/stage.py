"""Pipeline stages of a graph, each with a graph of its own, and what they send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.passes.ir.gradients import outputs_reached
from autoshard.passes.ir.graph import Graph


@dataclass(frozen=True)
class Stage:
    """A contiguous part of a graph, as a graph.

    Inputs: the parameters, buffers, constants and user inputs that it reads, then ``received``.
    Outputs: ``sent``, then the model's outputs at ``results``.
    """

    number: int
    graph: Graph
    received: tuple[str, ...]
    """values from the stage before, in its order: inputs of ``graph`` with these names"""
    sent: tuple[str, ...]
    """values for the next stage; some only pass through"""
    results: tuple[int, ...]
    """its positions among the model's flat outputs"""

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the user's inputs that the stage reads."""
        received = frozenset(self.received)
        return tuple(i.name for i in self.graph.inputs if i.kind == "input" and i.name not in received)

    def reads(self, name: str) -> bool:
        """Whether the data of an input are read, not only its dynamic shape."""
        return bool(self.graph.uses[name]) or name in self.graph.returned

    @property
    def held(self) -> tuple[str, ...]:
        """Original names of the parameters and buffers that the stage reads or writes."""
        return tuple(i.fqn for i in self.graph.inputs if i.kind in ("parameter", "buffer"))

    @property
    def message_bytes(self) -> int:
        """Bytes that it sends forward, unsharded; as many return for values with a gradient."""
        return sum(self.graph.types[name].nbytes for name in self.sent)


@dataclass(frozen=True)
class Stages:
    """``whole``, the graph of one micro-batch, cut before the nodes at ``boundaries``."""

    whole: Graph
    boundaries: tuple[int, ...]
    """positions in ``whole.nodes``, ascending, one fewer than stages"""
    each: tuple[Stage, ...]

    def __len__(self) -> int:
        return len(self.each)

    @cached_property
    def homes(self) -> Mapping[str, tuple[int, ...]]:
        """Original name of a parameter or buffer → the stages that hold it.

        One that no stage reads (counters in evaluation) stays with its module, where other calls
        read it.
        """
        found: dict[str, tuple[int, ...]] = {i.fqn: () for i in self.whole.inputs if i.kind in ("parameter", "buffer")}
        for stage in self.each:
            for fqn in stage.held:
                found[fqn] = (*found[fqn], stage.number)
        read = [fqn for fqn, stages in found.items() if stages]
        return {fqn: stages or (_beside(fqn, read, found),) for fqn, stages in found.items()}

    def reached(self, loss: int | None) -> frozenset[str]:
        """Values that a gradient reaches from output ``loss``; none without one."""
        if loss is None:
            return frozenset()
        return frozenset(name for name, outputs in outputs_reached(self.whole).items() if outputs >> loss & 1)

    @property
    def tied(self) -> Mapping[str, tuple[int, ...]]:
        """Parameters of several stages, whose gradients are summed over them."""
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
    """The last stage that reads a tensor of the innermost module around ``fqn``."""
    path = fqn.split(".")[:-1]
    for depth in range(len(path), 0, -1):
        module = ".".join(path[:depth]) + "."
        if near := [max(stages[other]) for other in read if other.startswith(module)]:
            return max(near)
    return 0

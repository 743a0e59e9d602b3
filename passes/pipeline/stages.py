"""Pipeline stages: a graph cut into contiguous parts in topological order. Values pass through the
stages between maker and reader; those of inputs alone (masks, rotary tables) are recomputed
where faster."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.errors import PlanError
from autoshard.passes.ir.analyses import outputs_reached
from autoshard.passes.ir.graph import Graph, Input, Node, Ref, TensorType
from autoshard.passes.pipeline.segments import SegmentedGraph


@dataclass(frozen=True)
class Stage:
    """A contiguous part of a graph, as a graph. Inputs: what it reads of the full graph's, then
    ``received``; outputs: ``sent``, then the model's outputs at ``results``."""

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
        return tuple(i.name for i in self.graph.of_kind("input") if i.name not in received)

    def reads(self, name: str) -> bool:
        """Whether the data of an input are read, not only its dynamic shape."""
        return bool(self.graph.uses[name]) or name in self.graph.returned

    @property
    def held(self) -> tuple[str, ...]:
        """Original names of the parameters and buffers that the stage reads or writes."""
        return tuple(i.fqn for i in self.graph.of_kind("parameter", "buffer"))

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
        """Original name of a parameter or buffer → the stages that hold it. One that no stage reads
        (counters in evaluation) stays with its module."""
        found: dict[str, tuple[int, ...]] = {i.fqn: () for i in self.whole.of_kind("parameter", "buffer")}
        for stage in self.each:
            for fqn in stage.held:
                found[fqn] = (*found[fqn], stage.number)
        read = [fqn for fqn, stages in found.items() if stages]
        return {fqn: stages or (_module_stage(fqn, read, found),) for fqn, stages in found.items()}

    def reached(self, loss: int | None) -> frozenset[str]:
        """Values that a gradient reaches from output ``loss``; none without one."""
        if loss is None:
            return frozenset()
        return frozenset(name for name, outputs in outputs_reached(self.whole).items() if outputs >> loss & 1)

    @property
    def tied(self) -> Mapping[str, tuple[int, ...]]:
        """Parameters of several stages, whose gradients are summed over them."""
        names = {i.fqn for i in self.whole.of_kind("parameter")}
        return {fqn: stages for fqn, stages in self.homes.items() if fqn in names and len(stages) > 1}

    def __str__(self) -> str:
        lines = []
        for stage in self.each:
            lines.append(f"stage {stage.number}:")
            if stage.received:
                lines.append(f"  receives {', '.join(stage.received)}")
            lines += [f"  {line}" for line in str(stage.graph).splitlines()]
        return "\n".join(lines)


def _module_stage(fqn: str, read: Sequence[str], stages: Mapping[str, tuple[int, ...]]) -> int:
    """The last stage that reads a tensor of the innermost module around ``fqn``."""
    path = fqn.split(".")[:-1]
    for depth in range(len(path), 0, -1):
        module = ".".join(path[:depth]) + "."
        if near := [max(stages[other]) for other in read if other.startswith(module)]:
            return max(near)
    return 0


def cut_into_stages(
    pieces: SegmentedGraph, boundaries: Sequence[int], loss: int | None = None, idle: bool = False
) -> Stages:
    """The graph of ``pieces`` cut before the nodes at ``boundaries`` (ascending). ``loss``: flat
    output of the last stage. Raises :class:`PlanError` for an empty stage unless ``idle``, and
    for a value that cannot be sent."""
    return _StageCutter(pieces, boundaries, loss, idle).run()


class _StageCutter:
    def __init__(self, pieces: SegmentedGraph, boundaries: Sequence[int], loss: int | None, idle: bool) -> None:
        graph = pieces.graph
        self.graph, self.boundaries, self.idle = graph, tuple(boundaries), idle
        ends = (0, *self.boundaries, len(graph.nodes))
        if list(ends) != sorted(ends if idle else set(ends)):
            raise PlanError(f"{len(ends) - 1} stages of {len(graph.nodes)} operations cannot be split at {boundaries}")
        self.last = len(ends) - 2
        self.home = {n.name: k for k in range(len(ends) - 1) for n in graph.nodes[ends[k] : ends[k + 1]]}
        self.duplicated = pieces.duplicable - self._sent_to_readers(pieces)
        self.inputs = {i.name: i for i in graph.inputs}
        self.place = {n.name: i for i, n in enumerate(graph.nodes)}
        self.results: list[list[int]] = [[] for _ in range(self.last + 1)]
        for position, out in enumerate(graph.outputs):
            if isinstance(out, Ref):
                self.results[self.last if position == loss else self._made_in(out.name)].append(position)
        self.mutations: list[dict[str, str]] = [{} for _ in range(self.last + 1)]
        for fqn, name in graph.mutations.items():
            self.mutations[self._written_in(name)][fqn] = name

    def _sent_to_readers(self, pieces: SegmentedGraph) -> set[str]:
        """Ops of inputs alone that their first reading stage runs, and sends to the others."""
        found, stages, types = set[str](), dict[str, set[int]](), self.graph.types
        for node in reversed(self.graph.nodes):
            if node.name not in pieces.duplicable:
                continue
            readers = [reader.name for name in node.outputs for reader in self.graph.uses[name]]
            own = set[int]().union(*(stages.get(n, {self.home[n]}) for n in readers))
            if self.graph.returned.intersection(node.outputs):
                own.add(self.last)
            crosses = len(own) > 1 and not any(types[n].unknown or types[n].number is not None for n in node.outputs)
            if crosses and not pieces.is_cheaper_duplicated(node, len(own) - 1, max(own) - min(own)):
                found.add(node.name)
                self.home[node.name] = min(own)
                own = {min(own)}
            stages[node.name] = own
        return found

    def run(self) -> Stages:
        for k in range(self.last + 1):
            if not self.idle and all(n in self.duplicated for n, home in self.home.items() if home == k):
                raise PlanError(
                    f"{self.last + 1} stages: stage {k} would have no operation of its own. Ask for fewer stages."
                )
        own = [self._own(k) for k in range(self.last + 1)]
        crossing = self._crossing(own)
        stages = Stages(
            self.graph,
            self.boundaries,
            tuple(self._stage(k, own[k], crossing) for k in range(self.last + 1)),
        )
        self._check_buffers(stages)
        return stages

    def _made_in(self, value: str) -> int:
        """The stage that returns a value: its producer, the first to read an input, or the last."""
        node = self.graph.producers.get(value)
        if node is not None:
            return self.last if node.name in self.duplicated else self.home[node.name]
        return min(self._readers(value), default=self.last)

    def _readers(self, value: str) -> set[int]:
        """The stages that compute with a value, directly or with ops they duplicate."""
        found, wanted = set[int](), [value]
        while wanted:
            for node in self.graph.uses[wanted.pop()]:
                if node.name in self.duplicated:
                    wanted += node.outputs
                else:
                    found.add(self.home[node.name])
        return found

    def _written_in(self, value: str) -> int:
        node = self.graph.producers.get(value)
        return 0 if node is None else self.home[node.name]

    def _own(self, k: int) -> tuple[Node, ...]:
        """Nodes of stage ``k`` with those it duplicates, in program order."""
        mine = [n for n in self.graph.nodes if self.home[n.name] == k and n.name not in self.duplicated]
        wanted = [*(name for n in mine for name in n.inputs), *self._returned(k)]
        made: dict[str, Node] = {}
        while wanted:
            node = self.graph.producers.get(wanted.pop())
            if node is not None and node.name in self.duplicated and node.name not in made:
                made[node.name] = node
                wanted += node.inputs
        return tuple(sorted((*mine, *made.values()), key=lambda n: self.place[n.name]))

    def _returned(self, k: int) -> list[str]:
        """Values that stage ``k`` returns or writes back."""
        outputs = (self.graph.outputs[position] for position in self.results[k])
        return [*(o.name for o in outputs if isinstance(o, Ref)), *self.mutations[k].values()]

    def _crossing(self, own: Sequence[tuple[Node, ...]]) -> list[tuple[str, ...]]:
        """Per boundary the values sent over it, in program order."""
        last_read: dict[str, int] = {}
        for k, nodes in enumerate(own):
            last_read.update(dict.fromkeys((name for n in nodes for name in n.inputs), k))
            for name in self._returned(k):
                last_read[name] = max(last_read.get(name, 0), k)
        found: list[list[str]] = [[] for _ in range(self.last)]
        for node in self.graph.nodes:
            for name in node.outputs if node.name not in self.duplicated else ():
                for k in range(self.home[node.name], last_read.get(name, 0)):
                    found[k].append(name)
        for name in {name for names in found for name in names}:
            self._check_crosses(name)
        return [tuple(names) for names in found]

    def _check_crosses(self, name: str) -> None:
        type_ = self.graph.types[name]
        if type_.unknown or type_.number is not None:
            node = self.graph.producers[name]
            raise PlanError(
                f"stages: the length of {name}, {type_}, made by {node.op} in {node.fqn or '(root)'} at "
                f"{node.source}, depends on the data, so it cannot be sent to the next stage. Ask for fewer stages."
            )

    def _stage(self, k: int, nodes: tuple[Node, ...], crossing: Sequence[tuple[str, ...]]) -> Stage:
        graph = self.graph
        received = crossing[k - 1] if k else ()
        sent = crossing[k] if k < self.last else ()
        read = {name for n in nodes for name in n.inputs} | set(self._returned(k))
        read |= {s.value for s in graph.symbols.read}  # which give dynamic lengths
        kept = [i for i in graph.inputs if i.name in read or i.fqn in self.mutations[k]]
        inputs = (*kept, *(Input(name, "input", _received_fqn(name, kept)) for name in received))
        names = [*(i.name for i in inputs), *(o for n in nodes for o in n.outputs)]
        return Stage(
            k,
            replace(
                graph,
                inputs=inputs,
                nodes=nodes,
                types=_restricted(graph.types, names),
                outputs=(*(Ref(name) for name in sent), *(graph.outputs[p] for p in self.results[k])),
                out_spec=None,
                in_spec=None,
                mutations=self.mutations[k],
                constants={n: x for n, x in graph.constants.items() if n in read},
                flat_inputs=tuple(i.name for i in inputs if i.kind == "input"),
            ),
            received,
            sent,
            tuple(self.results[k]),
        )

    def _check_buffers(self, stages: Stages) -> None:
        """Raise :class:`PlanError` if a written buffer or input is read in several stages."""
        for fqn in self.graph.mutations:
            homes = [s.number for s in stages.each if any(i.fqn == fqn and s.reads(i.name) for i in s.graph.inputs)]
            if len(homes) > 1:
                raise PlanError(
                    f"stages: the forward writes {fqn!r}, which stages {', '.join(map(str, homes))} "
                    "read. Ask for fewer stages, or return the new value instead."
                )


def _received_fqn(name: str, inputs: Collection[Input]) -> str:
    return f"{name}_received" if any(i.fqn == name for i in inputs) else name


def _restricted(types: dict[str, TensorType] | object, names: Iterable[str]) -> dict[str, TensorType]:
    assert isinstance(types, dict)
    return {name: types[name] for name in names}

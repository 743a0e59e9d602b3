"""The graph of one micro-batch: every op in its local form along the micro-batch axis."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import sympy  # type: ignore[import-untyped,unused-ignore]
import torch
import torch.utils._pytree as pytree

from autoshard.aten import aten
from autoshard.errors import PlanError
from autoshard.layout import P, Placement, R, Shard
from autoshard.passes.ir.analyses import values_reached
from autoshard.passes.ir.assignment import normalize_placement
from autoshard.passes.ir.graph import Graph, Input, Node, Ref, TensorType, map_tree
from autoshard.passes.ir.program import Local, LocalCall
from autoshard.passes.ir.rewrite import result_type, run_on_meta
from autoshard.passes.microbatch.losses import (
    averaged_loss,
    loss_output,
    node_location,
    own_labels_reason,
    separable_means,
)
from autoshard.passes.microbatch.per_sample import fills_by_size, indexing_as_gather
from autoshard.passes.microbatch.separate import Separation, local_call, separation
from autoshard.passes.microbatch.strategies import partial_with_constant, slices_as_splits, with_constant_share
from autoshard.passes.propagate.prices.roofline import node_flops
from autoshard.passes.propagate.recompute import duplicable_nodes
from autoshard.passes.rules.facts import is_random
from autoshard.runtime.operations.indexing import PART_OF_BATCH

log = logging.getLogger("autoshard.plan")

AUTO = 0
"""micro_batches="auto"."""
REPEATED_WORK_LIMIT = 0.1
"""without a backward: share of the FLOPs that every micro-batch may repeat for the full batch"""


@dataclass(frozen=True)
class MicroBatches:
    """A step of several micro-batches: how inputs are divided and outputs combined."""

    count: int
    inputs: Mapping[str, tuple[str, int | None]]
    """input of one micro-batch → (input of the step, the dim that is divided); None: not divided"""
    outputs: tuple[int | str | None, ...]
    """per flat output: dim of concatenation, "sum", or None where all micro-batches agree"""
    loss: int | None
    """position of the loss among the flat outputs; None without a backward"""
    others: Mapping[int, str] = field(default_factory=dict)
    """position → name, of other scalars that carry a gradient on one device"""
    before: Graph | None = None
    """loop-invariant part: runs once on the full inputs; its outputs are inputs of the step"""


def micro_batched(graph: Graph, count: int, asked: Mapping[str, Placement] | None = None) -> tuple[Graph, MicroBatches]:
    """The exact graph of one of ``count`` micro-batches: the losses sum to the full batch's.
    ``asked``: placement per input from hints, else the rules find the batch dim. Raises
    :class:`PlanError` for an op that needs the full batch (batch norm), training without a
    scalar loss, and inference in which every micro-batch would repeat the work."""
    _check_separable(graph, count)
    loss, others = loss_output(graph, _request_text(count)) if graph.training else (None, {})
    if count == 1:
        inputs = {i.name: (i.name, None) for i in graph.of_kind("input")}
        return graph, MicroBatches(1, inputs, (None,) * len(graph.outputs), loss, others)
    graph, before = slices_as_splits(separable_means(indexing_as_gather(fills_by_size(graph)))), None
    try:
        found = _checked_separation(graph, count, asked or {})
    except PlanError as error:
        graph, before = hoist_loop_invariant(graph)
        if before is None:
            raise
        try:
            found = _checked_separation(graph, count, asked or {})
        except PlanError:
            raise error from None
    body = _MicroBatchBuilder(graph, found)
    outputs = tuple(map(_output_combination, found.outputs))
    return body.run(), MicroBatches(count, body.inputs, outputs, loss, others, before)


def hoist_loop_invariant(graph: Graph) -> tuple[Graph, Graph | None]:
    """Hoist ops of inputs alone, such as masks, out of the micro-batches: ``graph`` with their
    results as inputs, and their graph or None, which runs once on the full batch."""
    # A constant scalar stays: each micro-batch adds its share to the loss.
    numbers = {n.name for n in graph.nodes if not n.inputs and all(not graph.types[o].shape for o in n.outputs)}
    free = duplicable_nodes(graph) - numbers
    nodes = tuple(n for n in graph.nodes if n.name not in free)
    read = {name for n in nodes for name in n.inputs} | graph.returned
    made = [o for n in graph.nodes if n.name in free for o in n.outputs if o in read]
    made = [o for o in made if not graph.types[o].unknown and graph.types[o].number is None]
    if not made or len(made) < len(read & {o for n in graph.nodes if n.name in free for o in n.outputs}):
        return graph, None
    needed = {name for n in graph.nodes if n.name in free for name in n.inputs}
    first = tuple(n for n in graph.nodes if n.name in free or (n.name in numbers and not needed.isdisjoint(n.outputs)))
    own = {name for n in first for name in n.inputs}
    before = replace(
        graph,
        inputs=tuple(i for i in graph.inputs if i.name in own),
        nodes=first,
        outputs=tuple(map(Ref, made)),
        mutations={},
    )
    kept = tuple(i for i in graph.inputs if i.name in read or i.kind == "parameter")  # unused ones too
    inputs = (*kept, *(Input(name, "input", name) for name in made))
    types = {n: t for n, t in graph.types.items() if n not in graph.producers or graph.producers[n].name not in free}
    return replace(graph, inputs=inputs, nodes=nodes, types={**types, **{n: graph.types[n] for n in made}}), before


def parse_micro_batches(asked: Any, option: str = "micro_batches") -> int:
    """Parse ``option``: a number, or "auto" as AUTO. Raises :class:`PlanError` otherwise."""
    if asked == "auto":
        return AUTO
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise PlanError(f'{option} is a number of at least 1, or "auto", got {asked!r}')
    return asked


def one_micro_batch(
    graph: Graph, count: int, always: bool = False, cuts: Mapping[str, Placement] | None = None
) -> tuple[Graph, MicroBatches | None]:
    """The graph of one of ``count`` micro-batches; ``graph`` itself if it is not divided.
    ``always``: also for one, and without a backward where possible. ``cuts``: ``asked`` of
    :func:`micro_batched`."""
    several = count > 1 or always if graph.training else count > 1 and always
    if not several:
        return graph, None
    try:
        return micro_batched(graph, count, cuts)
    except PlanError as error:
        if graph.training:
            raise
        log.info("without a backward, the full batch runs at once: %s", error)
        return graph, None


def micro_batch_counts(
    graph: Graph, asked: int, always: bool = False, cuts: Mapping[str, Placement] | None = None
) -> list[int]:
    """``asked``; for AUTO the divisors of the batch, or [1] if it cannot be divided."""
    if asked != AUTO:
        return [asked]
    if not (graph.training or always) or graph.symbols.read:
        return [1]
    lengths = [n for i in graph.of_kind("input") for n in graph.types[i.name].shape]
    for prime in sorted({prime for n in lengths if n for prime in sympy.primefactors(n)}):
        try:
            _, micro = micro_batched(graph, prime, cuts)
        except PlanError as error:
            log.info("not in %d micro-batches: %s", prime, error)
            continue
        batch = math.gcd(*(graph.types[name].shape[d] for name, d in micro.inputs.values() if d is not None))
        return [n for n in range(1, batch + 1) if batch % n == 0]
    return [1]


def check_lengths(count: int, are_open: bool) -> None:
    """Raise :class:`PlanError` for several micro-batches with dynamic lengths."""
    if are_open and count > 1:
        raise PlanError(
            f"micro_batches={count} with open lengths (dynamic) and a backward is not supported. "
            "Leave out dynamic: other lengths are then compiled at their first call"
        )


def _check_separable(graph: Graph, count: int) -> None:
    check_lengths(count, bool(graph.symbols.read))
    if written := [i.fqn for i in graph.of_kind("input") if i.fqn in graph.mutations]:
        raise PlanError(
            f"{_request_text(count)}: the forward writes to its input {written[0]!r} in "
            "place. Return the new value instead"
        )
    if not graph.training and graph.mutations:  # they may be written in place, once
        raise PlanError(f"micro_batches={count}: the forward writes {', '.join(graph.mutations)} for the full batch")


def _checked_separation(graph: Graph, count: int, asked: Mapping[str, Placement]) -> Separation:
    """The separation, checked: micro-batches may not each run the model on the full batch. With a
    backward, work on inputs of other lengths (class names) may be repeated."""
    found = separation(graph, count, asked)
    work = {n.name: node_flops(n, graph) for n in graph.nodes}
    of_batch = _batch_operations(graph, found, asked) if graph.training else work.keys()
    again = [n for n in graph.nodes if work[n.name] and n.name in of_batch and not found.choices[n.name].divides]
    if sum(work[n.name] for n in again) > REPEATED_WORK_LIMIT * sum(work.values()):
        _refuse_repeated_work(graph, again, found.count)
    return found


def _refuse_repeated_work(graph: Graph, again: Sequence[Node], count: int) -> NoReturn:
    """Raise :class:`PlanError`: every micro-batch would run ``again`` on the full batch."""
    made = {name for node in again for name in node.outputs}
    for node in graph.nodes:
        if made.isdisjoint(node.inputs):
            continue
        made.update(node.outputs)
        if (loss := averaged_loss(node, graph)) is not None and node.inputs[1] in made:
            raise PlanError(f"micro_batches={count}: {own_labels_reason(loss, graph)}")
    raise PlanError(
        f"micro_batches={count}: each micro-batch would run {again[0]} on the full batch ({node_location(again[0])}). "
        "Use micro_batches=1 or an operation that works on each sample alone, or pass its result as an input."
    )


def _batch_operations(graph: Graph, found: Separation, asked: Mapping[str, Placement]) -> set[str]:
    """Ops on inputs as long as the divided ones, except inputs that hints keep undivided."""
    uses = [(n, p) for node in graph.nodes for n, p in zip(node.inputs, found.choices[node.name].inputs, strict=True)]
    lengths = {
        (p.dim, graph.types[n].shape[p.dim]) for n, p in uses if n not in graph.producers and isinstance(p, Shard)
    }
    reached = {
        i.name
        for i in graph.inputs
        if i.kind == "input" and i.name not in asked and not lengths.isdisjoint(enumerate(graph.types[i.name].shape))
    }
    moved = values_reached(graph, reached)
    return {node.name for node in graph.nodes if not moved.isdisjoint(node.inputs)}


def _request_text(count: int) -> str:
    """The option to name in an error: stages use micro-batches too, even a single one."""
    return f"micro_batches={count}" if count > 1 else "stages"


def _output_combination(placement: Placement | None) -> int | str | None:
    if isinstance(placement, Shard):
        return placement.dim
    return "sum" if placement is not None and str(placement) == "P" else None


class _MicroBatchBuilder:
    def __init__(self, graph: Graph, found: Separation) -> None:
        self.graph, self.found = graph, found
        self.held = [i for i in graph.inputs if i.kind != "input"]
        self.types: dict[str, TensorType] = {i.name: graph.types[i.name] for i in self.held}
        self.inputs: dict[str, tuple[str, int | None]] = {}
        self.read: dict[tuple[str, int | None], str] = {}
        """(input, divided dim or None) → its name"""
        self.kinds = {i.name: i for i in graph.inputs}
        self.shares: dict[str, str] = {}
        """value that depends on no input → a micro-batch's share of it"""
        self.taken = {*graph.types, *(n.name for n in graph.nodes)}
        self.parts: dict[tuple[str, int], str] = {}
        """(undivided value, dim) → a micro-batch's chunk of it"""

    def run(self) -> Graph:
        graph = self.graph
        nodes = [made for node in graph.nodes for made in self._local(node)]
        outputs = tuple(
            Ref(self._input(o.name, None)) if isinstance(o, Ref) and self._is_input(o.name) else o
            for o in graph.outputs
        )
        for o, placement in zip(graph.outputs, self.found.outputs, strict=True):
            if isinstance(o, Ref) and o.name in graph.producers and placement is not None:
                nodes += self._share(o.name, placement, graph.producers[o.name])
        outputs = tuple(Ref(self.shares.get(o.name, o.name)) if isinstance(o, Ref) else o for o in outputs)
        given = [self._as_input(name, source) for name, (source, _) in self.inputs.items()]
        inputs, count = (*self.held, *given), self.found.count
        return replace(graph, inputs=inputs, nodes=tuple(nodes), types=self.types, outputs=outputs, passes=count)

    def _is_input(self, name: str) -> bool:
        return name in self.kinds and self.kinds[name].kind == "input"

    def _as_input(self, name: str, source: str) -> Input:
        value = self.kinds[source]
        return value if name == source else replace(value, name=name, fqn=f"{value.fqn} (full batch)")

    def _input(self, name: str, dim: int | None) -> str:
        """The name of an input, divided along ``dim`` or not."""
        key = (name, dim)
        if key not in self.read:
            taken = any(source == name for source, _ in self.inputs.values())
            local = self._fresh(f"{name}_{'whole' if dim is None else f'by_{dim}'}") if taken else name
            self.read[key] = local
            self.inputs[local] = key
            self.types[local] = self._cut(self.graph.types[name], dim)
        return self.read[key]

    def _cut(self, type_: TensorType, dim: int | None) -> TensorType:
        if dim is None:
            return type_
        shape = tuple(n // self.found.count if d == dim else n for d, n in enumerate(type_.shape))
        return replace(type_, shape=shape)

    def _local(self, node: Node) -> Iterator[Node]:
        """The nodes that compute ``node`` in one micro-batch."""
        graph, strategy = self.graph, self.found.choices[node.name]
        uses = [normalize_placement(p, graph.types[n].grad) for n, p in zip(node.inputs, strategy.inputs, strict=True)]
        for name, use in zip(node.inputs, uses, strict=True):
            yield from self._share(name, use, node)
            yield from self._part(name, use, node)
        names = [self._read_as(n, p) for n, p in zip(node.inputs, uses, strict=True)]
        for name in node.outputs:
            placement = self.found.placed[name]
            self.types[name] = self._cut(graph.types[name], placement.dim if isinstance(placement, Shard) else None)
        renamed = _with_operand_names(node, names)
        if not strategy.divides:
            yield (
                with_constant_share(renamed, self.found.count)
                if strategy in partial_with_constant(node, graph)
                else renamed
            )
        elif is_random(node):
            cut = self.found.placed[node.outputs[0]]
            yield replace(renamed, batch=cut.dim if isinstance(cut, Shard) else None)
        else:
            call = local_call(node, graph, self.found.mesh, strategy)
            yield from self._flat(replace(node, args=(), kwargs={}), _with_names(call, node, names))

    def _fresh(self, stem: str) -> str:
        """A name that no value and no node has."""
        names = itertools.chain((stem,), (f"{stem}_{number}" for number in itertools.count(1)))
        found = next(name for name in names if name not in self.taken)
        self.taken.add(found)
        return found

    def _read_as(self, name: str, use: Placement) -> str:
        """The name under which a reader gets a value."""
        if self._is_input(name):
            return self._input(name, use.dim if isinstance(use, Shard) else None)
        if use == P and self._is_whole(name):
            return self.shares[name]
        return self.parts[name, use.dim] if isinstance(use, Shard) and self._is_whole(name) else name

    def _is_whole(self, name: str) -> bool:
        return not self._is_input(name) and self.found.placed.get(name, R) == R

    def _part(self, name: str, use: Placement, reader: Node) -> Iterator[Node]:
        """Slice a micro-batch's chunk from an undivided value."""
        if not isinstance(use, Shard) or not self._is_whole(name) or (name, use.dim) in self.parts:
            return
        made = self.parts[name, use.dim] = self._fresh(f"{name}_part")
        self.types[made] = self._cut(self.graph.types[name], use.dim)
        args = (Ref(name), use.dim, self.found.count)
        node = replace(reader, name=made, op=PART_OF_BATCH, args=args, kwargs={})
        yield replace(node, outputs=(made,), output_slots=(0,))

    def _share(self, name: str, use: Placement, reader: Node) -> Iterator[Node]:
        """Divide a value that depends on no input by the count: the shares sum to it."""
        if not (use == P and self._is_whole(name)) or name in self.shares:
            return
        self.shares[name] = self._fresh(f"{name}_share")
        self.types[self.shares[name]] = self.graph.types[name]
        args = Ref(name), self.found.count
        made = replace(reader, name=self.shares[name], op=aten.div.Scalar, args=args, kwargs={})
        yield replace(made, outputs=(self.shares[name],), output_slots=(0,))

    def _flat(self, node: Node, call: LocalCall) -> Iterator[Node]:
        """Nested calls as nodes, innermost first; the last node defines the results of ``node``."""
        made: list[Node] = []

        def plain(item: Any) -> Any:
            if isinstance(item, Local):
                return item.size // self.found.count
            if not isinstance(item, LocalCall) or isinstance(item.fn, str):
                return item
            name = self._fresh(f"{node.outputs[0]}_{len(made)}")
            inner = replace(node, name=name, op=item.fn, args=item.args, kwargs=item.kwargs)
            inner = replace(inner, outputs=(name,), output_slots=(0,))
            self.types[name] = result_type(inner.op, inner.args, inner.kwargs, self.types)
            made.append(inner)
            return Ref(name)

        args, kwargs = map_tree(call.args, plain), map_tree(call.kwargs, plain)
        assert not isinstance(call.fn, str)  # strategies with other forms are not offered
        last = replace(node, op=call.fn, args=args, kwargs=kwargs)
        self._check(last)
        yield from (*made, last)

    def _check(self, node: Node) -> None:
        """Raise :class:`PlanError` if a local form gives results of wrong shape."""
        leaves = pytree.tree_leaves(run_on_meta(node.op, node.args, node.kwargs, self.types))
        results = [x for x in leaves if isinstance(x, torch.Tensor)]
        for slot, name in zip(node.output_slots, node.outputs, strict=True):
            if slot < len(results) and tuple(results[slot].shape) != self.types[name].shape:
                raise PlanError(
                    f"micro-batches: {node} makes {name} of shape {list(results[slot].shape)}, not "
                    f"{list(self.types[name].shape)}"
                )


def _with_operand_names(node: Node, names: Sequence[str]) -> Node:
    supply = iter(names)
    return map_tree(node, lambda item: Ref(next(supply)) if isinstance(item, Ref) else item)


def _with_names(call: LocalCall, node: Node, names: Sequence[str]) -> LocalCall:
    """The local form with the micro-batch's names of its operands."""
    local = dict(zip(node.inputs, names, strict=True))
    return map_tree(call, lambda item: Ref(local.get(item.name, item.name)) if isinstance(item, Ref) else item)

"""First divergence of a sharded model from the unsharded one: operation, module, line, phase. From
the same weights the graph runs on one device, and the program of every micro-batch and stage on
the in-process mesh. Values and gradients, assembled from shards, replicas and partial sums, are
compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autoshard import runtime
from autoshard.aten import result_list
from autoshard.check.reference import copied_model, fresh_inputs, largest_difference, largest_magnitude, loss_of
from autoshard.check.rule_check import evaluate
from autoshard.compiler import capture_graph
from autoshard.errors import RuntimeMismatchError
from autoshard.layout import Layout
from autoshard.module.dtensors.segments import shard_of
from autoshard.module.microbatches import micro_batch_slice, whole_batch_values
from autoshard.module.programs.executable import Executable
from autoshard.module.programs.simulated_ranks import join_shards
from autoshard.module.sharded_module import ShardedModule
from autoshard.passes.capture.exported.snapshots import parameters_of
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.program import Program
from autoshard.passes.rules.interpreters import interpret, model_outputs
from autoshard.plans.plan import Compiled
from autoshard.runtime.transport import torch_state

NamedTensors = dict[str, Tensor]


def first_divergence(
    reference: nn.Module, sharded: ShardedModule, args: tuple[Any, ...], kwargs: dict[str, Any], rtol: float
) -> str | None:
    """First operation whose value, else gradient (from the loss back), differs by more than
    ``rtol`` of its maximum, with ``reference``'s weights; else a wrongly captured module; else
    None."""
    executable = sharded.specialise(args, kwargs)
    compiled = executable.compiled
    graph = compiled.graph if compiled.pipeline is None else compiled.pipeline.whole
    if compiled.micro_batches is not None and compiled.micro_batches.count > 1:
        precision = sharded._settings.opts.mixed_precision
        graph = capture_graph(reference, args, kwargs, training=graph.training, precision=precision)
    one = _reference_values(graph, reference, args, kwargs)
    parts = _run_on_ranks(executable, reference, args, kwargs, one)
    found = _first_wrong_value(graph, one, parts, rtol) or _first_wrong_gradient(graph, one, parts, rtol)
    return found or _capture_mismatch(reference, graph, one.values, args, kwargs, rtol)


@dataclass(frozen=True)
class _ReferenceValues:
    """Unsharded values of a graph by name, and their gradients."""

    values: Mapping[str, Any]
    gradients: NamedTensors


@dataclass(frozen=True)
class _RankGradient:
    """Local gradients per rank, in ``layout``; None stands for zeros."""

    parts: Sequence[Tensor | None]
    layout: Layout


@dataclass
class _RankValues:
    """Local values and gradients of every micro-batch and rank."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """name → global shape within one of several micro-batches"""
    values: dict[str, list[list[Tensor]]] = field(default_factory=dict)
    """name → [micro-batch][rank]"""
    ends: dict[str, list[Tensor]] = field(default_factory=dict)
    """name of an output → [micro-batch], assembled from its output layout"""
    gradients: dict[str, list[list[_RankGradient]]] = field(default_factory=dict)
    """name → [micro-batch][stage that reads it]"""

    def joined(self, name: str, parts: Sequence[Tensor | None], want: Tensor, layout: Layout) -> Tensor:
        """The global tensor from local ``parts`` (None: zeros); ``want``: the unsharded one."""
        shape = self.shapes.get(name, tuple(want.shape))
        dtype = next((x.dtype for x in parts if x is not None), want.dtype)
        empty = (want.new_zeros(layout.local_shape(shape, rank), dtype=dtype) for rank in range(len(parts)))
        held = [
            zeros if x is None else x.to_dense() if x.is_sparse else x for x, zeros in zip(parts, empty, strict=True)
        ]
        return join_shards(held, layout, shape, name)


def _reference_values(
    graph: Graph, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _ReferenceValues:
    given = fresh_inputs(graph_inputs(graph, model, args, kwargs))
    with torch.set_grad_enabled(graph.training):
        torch.manual_seed(0)
        values = interpret(graph, given)
        loss = _output_loss(model_outputs(graph, values)) if graph.training else None
    tensors = {n: x for n, x in values.items() if isinstance(x, Tensor) and x.requires_grad}
    if loss is None or not loss.requires_grad:
        return _ReferenceValues(values, {})
    gradients = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    return _ReferenceValues(values, {n: g for n, g in zip(tensors, gradients, strict=True) if g is not None})


def _output_loss(output: Any) -> Tensor | None:
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
    return loss_of(output, leaves) if any(x.requires_grad for x in leaves) else None


def _run_on_ranks(
    executable: Executable, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], one: _ReferenceValues
) -> _RankValues:
    compiled, parts = executable.compiled, _RankValues()
    micro, graph = compiled.micro_batches, compiled.graph
    if compiled.pipeline is not None:
        graph = compiled.pipeline.whole
    count = 1 if micro is None else micro.count
    held = graph_inputs(graph, model, args, kwargs, inputs=micro is None)
    torch.manual_seed(0)
    if micro is not None:
        given = executable.named(pytree.tree_leaves((args, kwargs)))
        given = {**given, **whole_batch_values(micro, given, model.get_buffer)}
    states = torch_state.generator_states()
    for index in range(count):
        torch_state.set_generator_states(states)  # micro-batches take slices of the batch's random numbers
        values = dict(held)
        if micro is not None:
            values |= {n: micro_batch_slice(given[name], dim, index, count) for n, (name, dim) in micro.inputs.items()}
        _MicroBatch(compiled, graph, values, (index, count), parts).run(one)
    return parts


class _MicroBatch:
    """Forward and backward of one micro-batch through all stages."""

    def __init__(
        self, compiled: Compiled, graph: Graph, values: NamedTensors, number: tuple[int, int], parts: _RankValues
    ) -> None:
        self.stages, self.graph, self.number, self.parts = compiled.parts or (compiled,), graph, number, parts
        self.loss = None if compiled.micro_batches is None else compiled.micro_batches.loss
        self.values = values
        """global values by name: inputs, and outputs of stages"""

    def run(self, one: _ReferenceValues) -> None:
        """``one`` gives shapes known at run time only. Stops where replicas differ."""
        with contextlib.suppress(RuntimeMismatchError):
            runs = [self._forward(stage, one) for stage in self.stages]
            loss, ends = self._loss()
            if loss is None or not loss.requires_grad:
                return
            found = dict(zip(ends, torch.autograd.grad(loss, list(ends.values()), allow_unused=True), strict=True))
            known = {n: g for n, g in found.items() if g is not None}
            for stage, local in zip(reversed(self.stages), reversed(runs), strict=True):
                self._backward(stage, local, known)

    def _forward(self, stage: Compiled, one: _ReferenceValues) -> list[dict[str, Any]]:
        program = stage.program
        with torch.set_grad_enabled(self.graph.training):
            local = run_program(program, {i.name: self.values[i.name] for i in stage.graph.inputs}, *self.number)
        for name in (o for node in stage.graph.nodes for o in node.outputs):
            self._note(name, program)
            self.parts.values.setdefault(name, []).append([torch.as_tensor(rank[name]).detach() for rank in local])
        for name, end in _stage_outputs(stage):
            self._note(name, program)
            held = [torch.as_tensor(rank[end]).detach() for rank in local]
            made = self.parts.joined(name, held, torch.as_tensor(one.values[name]), program.layouts[end])
            self.parts.ends.setdefault(name, []).append(made)
            self.values[name] = made.detach().requires_grad_(self.graph.types[name].grad)
        return local

    def _note(self, name: str, program: Program) -> None:
        self.parts.layouts[name] = program.layouts[name]
        if self.number[1] > 1 and not program.types[name].unknown:
            self.parts.shapes[name] = tuple(program.types[name].shape)

    def _loss(self) -> tuple[Tensor | None, NamedTensors]:
        """The loss, and the stage outputs that it depends on."""
        names = {o.name for o in self.graph.outputs if isinstance(o, Ref)}
        ends = {n: self.values[n].detach().requires_grad_(self.graph.types[n].grad) for n in names}
        ends = {n: x for n, x in ends.items() if x.requires_grad}
        if self.loss is not None:
            end = self.graph.outputs[self.loss]
            return ends[end.name] * 1.0, ends
        return _output_loss(model_outputs(self.graph, {**self.values, **ends})), ends

    def _backward(self, stage: Compiled, local: list[dict[str, Any]], known: NamedTensors) -> None:
        """Gradients of a stage's values; ``known``: of its outputs, extended by its inputs."""
        program, roots, given = stage.program, [], []
        for name, end in _stage_outputs(stage):
            layout = program.layouts[end].gradient()
            for rank, values in enumerate(local):
                if name in known and values[end].requires_grad:
                    roots.append(values[end])
                    given.append(shard_of(known[name], layout, rank))
        names = [*(i.name for i in stage.graph.inputs), *(o for node in stage.graph.nodes for o in node.outputs)]
        places = [(n, r) for n in names for r, v in enumerate(local) if getattr(v[n], "requires_grad", False)]
        if not roots or not places:
            return
        tensors = [local[rank][name] for name, rank in places]
        found = dict(zip(places, torch.autograd.grad(roots, tensors, given, allow_unused=True), strict=True))
        for name in dict.fromkeys(name for name, _ in places):
            gradient = _RankGradient(
                [found.get((name, r)) for r in range(len(local))], program.layouts[name].gradient()
            )
            if name not in self.graph.producers or name in stage.graph.producers:
                self._note(name, program)
                made = self.parts.gradients.setdefault(name, [])
                made += [[] for _ in range(self.number[0] + 1 - len(made))]
                made[self.number[0]].append(gradient)
            else:  # an input that another stage computed
                whole = self.parts.joined(name, gradient.parts, self.values[name], gradient.layout)
                known[name] = known[name] + whole if name in known else whole


def _stage_outputs(stage: Compiled) -> list[tuple[str, str]]:
    """Outputs of a stage: (name in the graph, local name in the output layout)."""
    pairs = zip(stage.graph.outputs, stage.program.outputs, strict=True)
    return [(value.name, local.name) for value, local in pairs if isinstance(value, Ref)]


def _first_wrong_value(graph: Graph, one: _ReferenceValues, parts: _RankValues, rtol: float) -> str | None:
    for node in graph.nodes:
        for name in node.outputs:
            if name not in parts.values:  # micro-batches compute it in another form
                continue
            want = torch.as_tensor(one.values[name])  # a number that depends on the data is compared as a scalar
            layout = parts.layouts[name]
            try:
                wrong = _micro_batch_mismatch(
                    [parts.joined(name, held, want, layout) for held in parts.values[name]], want, rtol
                )
            except Exception as problem:  # shapes that do not fit, or replicas that differ
                wrong = str(problem)
            if wrong:
                return f"{_operation_location(node)}, forward: {wrong}, layout {layout.without_gradient()}"
        for name in node.outputs:
            want = torch.as_tensor(one.values[name])
            if name in parts.ends and (wrong := _micro_batch_mismatch(parts.ends[name], want, rtol)):
                return f"output {name} of {_operation_location(node)}, forward: {wrong}"
    return None


def _first_wrong_gradient(graph: Graph, one: _ReferenceValues, parts: _RankValues, rtol: float) -> str | None:
    """The first value, in backward order, whose gradient differs: gradients of its users agree."""
    rounding = max((largest_magnitude(g) * torch.finfo(g.dtype).eps for g in one.gradients.values()), default=0.0)
    fqns = graph.fqns
    for name in _backward_order(graph):
        if name not in parts.gradients or not isinstance(one.values.get(name), Tensor):
            continue
        want = one.gradients.get(name)
        want = torch.zeros_like(one.values[name]) if want is None else want.to_dense() if want.is_sparse else want
        try:
            held = [
                torch.stack([parts.joined(name, g.parts, want, g.layout) for g in stages]).sum(0)
                for stages in parts.gradients[name]
            ]
            wrong = _micro_batch_mismatch(held, want, rtol, 100 * rounding)
        except Exception as problem:
            wrong = str(problem)
        if wrong:
            readers = [_operation_location(node) for node in graph.nodes if name in node.inputs]
            layout = parts.layouts[name].without_gradient()
            where = " or ".join(readers) or f"output {name}"
            return f"{where}, backward: gradient of {fqns.get(name, name)}: {wrong}, layout {layout}"
    return None


def _backward_order(graph: Graph) -> Iterator[str]:
    """Value names in backward order; a graph input comes after its earliest reader."""
    for number in reversed(range(len(graph.nodes))):
        node = graph.nodes[number]
        yield from node.outputs
        earlier = {name for before in graph.nodes[:number] for name in before.values}
        yield from (name for name in dict.fromkeys(node.inputs) if name not in earlier)


def _micro_batch_mismatch(held: Sequence[Tensor], want: Tensor, rtol: float, floor: float = 0.0) -> str | None:
    """Error text unless micro-batch values form ``want`` as slices, replicas or summands."""
    shapes = {tuple(x.shape) for x in held}
    if shapes == {tuple(want.shape)}:
        ways = [max(_absolute_error(x, want) for x in held)]
        ways += [_absolute_error(torch.stack([*held]).sum(0), want)] * (len(held) > 1 and want.dtype != torch.bool)
    else:
        dims = [d for d, n in enumerate(want.shape) if len(held[0].shape) == want.ndim and held[0].shape[d] != n]
        if len(dims) != 1:
            return f"shape {[*held[0].shape]} in each of {len(held)} micro-batches, not {[*want.shape]}"
        ways = [_absolute_error(torch.cat([*held], dims[0]), want)]
    error, largest = min(ways), largest_magnitude(want)
    if error <= max(rtol * largest, floor):
        return None
    return f"error {error / (largest or 1.0):.2e}"


def _absolute_error(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        raise ValueError(f"shape {[*got.shape]}, not {[*want.shape]}")
    if want.is_floating_point() or want.is_complex():
        return largest_difference(got.detach(), want.detach())
    return 0.0 if torch.equal(got, want) else float("inf")


def _operation_location(node: Node) -> str:
    return f"{node.op} in {node.fqn or '(root)'} at {node.source}"


def _capture_mismatch(
    model: nn.Module,
    graph: Graph,
    values: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rtol: float,
) -> str | None:
    """The first wrongly captured module: its inputs are values of the graph, its result is none."""
    tensors = [x for x in values.values() if isinstance(x, Tensor)]
    made: list[tuple[str, bool, bool]] = []

    def is_known(x: Tensor) -> bool:
        alike = (v for v in tensors if v.shape == x.shape and v.dtype == x.dtype)
        return any(_absolute_error(v, x) <= rtol * largest_magnitude(x) for v in alike)

    def all_known(tree: Any) -> bool:
        return all(is_known(x) for x in pytree.tree_leaves(tree) if isinstance(x, Tensor))

    def note(name: str, given: Any, output: Any) -> None:
        made.append((name, all_known(given), all_known(output)))

    model = copied_model(model)  # its forward may write buffers
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, i, k, o, name=name: note(name, (i, k), o), with_kwargs=True)
    given, named = fresh_inputs((args, kwargs))
    torch.manual_seed(0)
    with torch.set_grad_enabled(graph.training):
        model(*given, **named)
    wrong = {name for name, _, known in made if not known}
    for name, begins_known, _ in made:
        around = ["", *(".".join(name.split(".")[:n]) for n in range(1, name.count(".") + 2))] if name else [""]
        if begins_known and wrong.issuperset(around):
            return f"the graph of {name or '(root)'} gives another result than the module: it was captured wrongly"
    return None


def graph_inputs(
    graph: Graph, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: bool = True
) -> NamedTensors:
    """Full tensors for inputs of ``graph``: from ``model`` and, if ``inputs``, from arguments."""
    tensors = parameters_of(model) | dict(model.named_buffers(remove_duplicate=False))
    found = {i.name: tensors[i.fqn] for i in graph.of_kind("parameter", "buffer")}
    if inputs:
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        found |= {n: x for n, x in zip(graph.flat_inputs, leaves, strict=True) if n is not None}
    device = next((x.device for x in tensors.values()), None)
    return found | {name: x.to(device) for name, x in graph.constants.items()}


def run_program(program: Program, inputs: Mapping[str, Tensor], index: int, count: int) -> list[dict[str, Tensor]]:
    """Run ``program`` on simulated ranks for one micro-batch: [rank] → local values by name."""
    mesh = program.mesh
    world = runtime.World(mesh.sizes)

    def rank(number: int) -> dict[str, Tensor]:
        held = {n: shard_of(x, program.layouts[n], number).detach().clone() for n, x in inputs.items()}
        values = {n: x.requires_grad_(inputs[n].requires_grad) for n, x in held.items()}
        world.ranks[number].enter(index, count)
        for s in program.statements:
            results = result_list(evaluate(s.call, values, mesh, number))
            values.update({o: r for o, r in zip(s.outputs, results, strict=False) if o != "_"})
        return values

    return world.run(rank, [(r,) for r in range(world.size)])

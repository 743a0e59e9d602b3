"""Run a program statement by statement on the in-process mesh and find the first operation that differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autoshard import runtime
from autoshard.check.closeness import difference, scale
from autoshard.check.local_forms import evaluate, flat
from autoshard.module.base import ShardedModule
from autoshard.module.microbatches import beforehand, part_of
from autoshard.module.programs.simulate import join, shard_of
from autoshard.passes.capture.exported.attributes import parameters_of
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.program import Program
from autoshard.passes.microbatch import MicroBatches
from autoshard.passes.rules.interpret import interpret
from autoshard.plans.compiled import Compiled


def first_divergence(
    reference: nn.Module, sharded: ShardedModule, args: tuple[Any, ...], kwargs: dict[str, Any], rtol: float
) -> str | None:
    """The first operation whose result differs by more than ``rtol`` of its largest value, with module and line.

    Both run forward from ``reference``'s weights; of several micro-batches the first one. None where every operation
    agrees: then a backward differs.
    """
    executable = sharded.specialise(args, kwargs)
    compiled = executable.compiled
    graph = compiled.graph if compiled.pipeline is None else compiled.pipeline.whole
    inputs = graph_inputs(graph, reference, args, kwargs)
    if compiled.micro_batches is not None:
        inputs |= _of_first(compiled.micro_batches, executable.named(pytree.tree_leaves((args, kwargs))), reference)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = interpret(graph, inputs)
        torch.manual_seed(0)
        for part in compiled.parts or (compiled,):
            given = run(part.program, {i.name: inputs[i.name] for i in part.graph.inputs})
            if found := _first(part, given, expected, rtol):
                return found
            inputs |= {name: torch.as_tensor(x) for name, x in expected.items()}  # what the next stage receives
    return None


def _of_first(micro: MicroBatches, given: Mapping[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """What the first micro-batch takes of the inputs."""
    given = {**given, **beforehand(micro, given, model.get_buffer)}
    return {name: part_of(given[source], dim, 0, micro.count) for name, (source, dim) in micro.inputs.items()}


def _first(
    part: Compiled, given: list[dict[str, torch.Tensor]], expected: Mapping[str, Any], rtol: float
) -> str | None:
    """The first operation of a program whose result differs."""
    program = part.program
    for node in part.graph.nodes:
        for name in node.outputs:
            want = torch.as_tensor(expected[name])  # a number that depends on the data is compared as a scalar
            try:
                got = join([torch.as_tensor(v[name]) for v in given], program.layouts[name], want.shape, name)
                error = difference(got, want) if want.is_floating_point() else 0.0
                differs = not error <= rtol * max(scale(want), 1e-30) if error else False
                differs = differs or (not want.is_floating_point() and not torch.equal(got, want))
            except Exception as problem:  # shapes that do not fit, or ranks that disagree
                return f"{node.op} in {node.fqn or '(root)'} at {node.source}: {problem}"
            if differs:
                layout = program.layouts[name]
                return f"{node.op} in {node.fqn or '(root)'} at {node.source}: error {error:.2e}, layout {layout}"
    return None


def graph_inputs(
    graph: Graph, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """A full tensor for every input of ``graph``, from ``model`` and the arguments."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    found = {n: x for n, x in zip(graph.flat_inputs, leaves, strict=True) if n is not None}
    tensors = parameters_of(model) | dict(model.named_buffers(remove_duplicate=False))
    found |= {i.name: tensors[i.fqn] for i in graph.inputs if i.kind in ("parameter", "buffer")}
    device = next((x.device for x in tensors.values()), None)
    return found | {name: x.to(device) for name, x in graph.constants.items()}


def run(program: Program, inputs: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Every local value by name, per rank."""
    mesh = program.mesh
    world = runtime.World(dict(zip(mesh.axes, mesh.shape, strict=True)))

    def rank(number: int) -> dict[str, torch.Tensor]:
        values = {n: shard_of(x, program.layouts[n], number).clone() for n, x in inputs.items()}
        for s in program.statements:
            results = flat(evaluate(s.call, values, mesh, number))
            values.update({o: r for o, r in zip(s.outputs, results, strict=False) if o != "_"})
        return values

    return world.run(rank, [(r,) for r in range(world.size)])

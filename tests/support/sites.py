"""One op with chosen strategies on the in-process mesh: its site, its local form, and what it communicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard.check import rule_check
from autoshard.check.rule_check import _strategy_error, evaluate
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
from autoshard.passes.propagate.op_space import internal_collectives
from autoshard.passes.propagate.prices.roofline import internal_cost
from autoshard.passes.rules.base import Rule, Site
from autoshard.runtime import Executed, World


def site(rule: Rule, args: Sequence[Any], labels: Sequence[str], mesh: Mesh, **kwargs: Any) -> Site:
    """The site of ``rule.op(*args, **kwargs)``, its first result read; ``labels``: a strategy per mesh axis."""
    names = [f"x{k}" if isinstance(a, torch.Tensor) else None for k, a in enumerate(args)]
    result = rule.op(*args, **kwargs)
    result = result[0] if isinstance(result, tuple) else result
    tensors = {n: a for n, a in zip(names, args, strict=True) if n is not None}
    types = {n: TensorType(tuple(a.shape), a.dtype, a.is_floating_point()) for n, a in tensors.items()}
    types["y"] = TensorType(tuple(result.shape), result.dtype, result.is_floating_point())
    refs = tuple(a if n is None else Ref(n) for n, a in zip(names, args, strict=True))
    node = Node("y", rule.op, refs, kwargs, ("y",), (0,))
    graph = Graph((), (node,), types, (Ref("y"),), None, None)
    by_label = {s.label: s for s in rule.strategies(node, graph)}
    choice = tuple(by_label[label] for label in labels)
    inputs = tuple(Layout(mesh, [s.inputs[k] for s in choice]) for k in range(len(tensors)))
    return Site(node, graph, mesh, inputs, (Layout(mesh, [s.outputs[0] for s in choice]),), choice)


def part(x: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The rank's part of ``x``."""
    for d, n in enumerate(x.shape):
        x = x.narrow(d, *layout.chunk_of(d, n, rank))
    return x.clone()


def recorded(at: Site) -> list[tuple[str, tuple[str, ...], str, float]]:
    """(kind, axes, phase, ring bytes) of what an abstract run of the local form sends, sorted."""
    placed = tuple(layout.placements for layout in (*at.inputs, *at.outputs))
    found = internal_collectives(at.node, at.graph, at.mesh, at.choice, placed)
    return sorted((c.kind, c.axes, c.phase, round(internal_cost(c, at.mesh)[0], 6)) for c in found)


def strategy_error(
    rule: Rule, example: Any, graph: Graph, mesh: Mesh, world: World, choice: tuple[Strategy, ...], tolerance: float
) -> str | None:
    """In place of ``rule_check._strategy_error``: ranks send what an abstract run records, too.

    Where an all-to-all sends rows, their number depends on the data.
    """
    world.log = log = []
    if error := _strategy_error(rule, example, graph, mesh, world, choice, tolerance):
        return error
    executed = sorted((e.kind, e.axes, e.phase, round(e.bytes, 6)) for e in log)
    found = recorded(rule_check._site_of_choice(example.node, graph, mesh, choice))
    if any(kind == "all_to_all" for kind, *_ in executed):
        executed, found = ([(*c[:3], 0.0) for c in of] for of in (executed, found))
    return None if executed == found else f"ranks send {executed}, and {found} was recorded"


def run(rule: Rule, at: Site, args: Sequence[Any]) -> tuple[list[torch.Tensor], list[Executed]]:
    """The first result on every rank, after a backward through all of them; and the collectives that ran."""
    assert rule.local is not None
    call = rule.local(at)
    tensors = dict(zip(at.node.inputs, (a for a in args if isinstance(a, torch.Tensor)), strict=True))
    sizes: Mapping[str, int] = dict(zip(at.mesh.axes, at.mesh.shape, strict=True))
    world = World(sizes)
    world.log = []

    def one(rank: int) -> torch.Tensor:
        held = {n: part(x, layout, rank) for (n, x), layout in zip(tensors.items(), at.inputs, strict=True)}
        for x in held.values():
            x.requires_grad_(x.is_floating_point())
        out = evaluate(call, held, at.mesh, rank)
        return out[0] if isinstance(out, tuple) else out

    results = world.run(one, [(r,) for r in range(at.mesh.size)])
    if results[0].requires_grad:
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    return [y.detach() for y in results], world.log

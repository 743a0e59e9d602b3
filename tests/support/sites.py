"""One op with chosen strategies on the in-process mesh: its site, its local form, and what it communicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard.check.rule_check import evaluate
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
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

"""Evaluation of local forms and of program statements on all ranks inside this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoshard import runtime
from autoshard.check.shards import Tensors
from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import Call, Local, Offset
from autoshard.passes.ir.walk import map_tree, walk
from autoshard.passes.rules.base import Rule, Site


def run(rule: Rule, site: Site, held: list[Tensors], world: runtime.World) -> list[Tensors]:
    """Results [rank][slot] of the rule's local form on ``held``; ``world``: of the site's mesh."""
    call = rule.local(site) if rule.local else Call(rule.op, site.node.args, site.node.kwargs)

    def one(rank: int) -> Tensors:
        names = dict(zip(site.node.inputs, held[rank], strict=True))
        results = flat(evaluate(call, names, site.mesh, rank))
        return [results[slot] for slot in site.node.output_slots]

    if not any(isinstance(item, Call) and isinstance(item.fn, str) for item in walk(call)):  # no runtime calls
        return [one(rank) for rank in range(site.mesh.size)]
    return world.run(one, [(rank,) for rank in range(site.mesh.size)])


def evaluate(tree: Any, names: Mapping[str, torch.Tensor], mesh: Mesh, rank: int) -> Any:
    """The value of a call, or of any argument of one, on ``rank``; ``names``: its local values."""

    def at(item: Any) -> Any:
        if isinstance(item, Ref):
            return names[item.name]
        if isinstance(item, Call):
            return (getattr(runtime, item.fn) if isinstance(item.fn, str) else item.fn)(*item.args, **item.kwargs)
        if isinstance(item, Local | Offset):
            start, length = Layout(mesh, {a: Shard(0) for a in item.axes}, item.axes).chunk_of(0, item.size, rank)
            return length if isinstance(item, Local) else start
        return item

    return map_tree(tree, at)


def flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]

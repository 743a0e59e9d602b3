"""A rule's local form, run on every rank inside this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoshard.check.shards import Tensors
from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import map_refs
from autoshard.passes.ir.program import Call, Local, Offset
from autoshard.passes.rules.base import Rule, Site


def run(rule: Rule, site: Site, held: list[Tensors]) -> list[Tensors]:
    """The results of the local form on every rank's operands."""
    call = rule.local(site) if rule.local else Call(rule.op, site.node.args, site.node.kwargs)

    def one(rank: int) -> Tensors:
        names = dict(zip(site.node.inputs, held[rank], strict=True))
        results = flat(evaluate(call, names, site.mesh, rank))
        return [results[slot] for slot in site.node.output_slots]

    if not _communicates(call):
        return [one(rank) for rank in range(site.mesh.size)]
    from autoshard.runtime.in_process import World

    world = World(dict(zip(site.mesh.axes, site.mesh.shape, strict=True)))
    return world.run(one, [(rank,) for rank in range(site.mesh.size)])


def _communicates(value: Any) -> bool:
    """Whether a call uses the runtime anywhere."""
    if isinstance(value, Call):
        return isinstance(value.fn, str) or _communicates((value.args, value.kwargs))
    if isinstance(value, Mapping):
        return any(map(_communicates, value.values()))
    return isinstance(value, tuple | list) and any(map(_communicates, value))


def evaluate(value: Any, names: Mapping[str, torch.Tensor], mesh: Mesh, rank: int) -> Any:
    """A call, a reference or a length as this rank sees it."""
    if isinstance(value, Call):
        args = evaluate(tuple(value.args), names, mesh, rank)
        kwargs = evaluate(dict(value.kwargs), names, mesh, rank)
        if isinstance(value.fn, str):
            from autoshard import runtime

            return getattr(runtime, value.fn)(*args, **kwargs)
        return value.fn(*args, **kwargs)
    if isinstance(value, Local | Offset):
        start, length = Layout(mesh, {a: Shard(0) for a in value.axes}, value.axes).chunk_of(0, value.size, rank)
        return length if isinstance(value, Local) else start
    if isinstance(value, tuple | list):
        return type(value)(evaluate(v, names, mesh, rank) for v in value)
    if isinstance(value, Mapping):
        return {k: evaluate(v, names, mesh, rank) for k, v in value.items()}
    return map_refs(value, lambda ref: names[ref.name])


def flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]

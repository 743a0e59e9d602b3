"""Experts' plans that a search is compared with where memory binds and its bound leaves room for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate.experts.experts import NAMES, Expert, asked_by

DATA, TENSOR = ("ddp", "fsdp"), ("megatron", "megatron-sp", "ulysses")
"""along all axes but the last, and along that"""


def usual(graph: Graph, mesh: Mesh, asked: Expert) -> Iterator[Expert]:
    """Every name for all axes, and data with tensor or sequence parallelism inside, of what this graph has; none where an
    expert's plan is ``asked`` for."""
    if asked.text:
        return
    each: list[Any] = [name for name in NAMES if name != "hsdp" or mesh.ndim > 1]
    if mesh.ndim > 1:
        *outer, inner = mesh.axes
        each += [{**dict.fromkeys(outer, data), inner: tensor} for data in DATA for tensor in TENSOR]
    for like in each:
        try:
            expert = asked_by(like, graph, mesh)
        except PlanError:
            continue
        if not expert.notes:  # else it is another's plan, under this name
            yield expert

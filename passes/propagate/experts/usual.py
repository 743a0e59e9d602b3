"""Baseline strategies: searched too if memory binds and the bound leaves room for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate.experts.experts import NAMES, Expert, asked_by

DATA, TENSOR = ("ddp", "fsdp"), ("megatron", "megatron-sp", "ulysses")
"""along all axes but the last; along the last"""


def usual(graph: Graph, mesh: Mesh, asked: Expert) -> Iterator[Expert]:
    """Baselines: every name on all axes, and data with tensor or sequence parallelism inside. None
    if a strategy was ``asked`` for, or the graph lacks what a strategy needs."""
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
        if not expert.notes:  # else it is another strategy under this name
            yield expert

"""Graph rewrites: what models write as several operations becomes the one that has a rule."""

from __future__ import annotations

from autoshard.passes.capture.translate.canonical import remove_dead
from autoshard.passes.capture.translate.fan_out import fan_out
from autoshard.passes.capture.translate.fused import fused
from autoshard.passes.capture.translate.masks import by_position
from autoshard.passes.capture.translate.mixtures import as_mixtures
from autoshard.passes.capture.translate.places import by_dim
from autoshard.passes.capture.translate.products import unflattened
from autoshard.passes.capture.translate.rows import in_their_dims
from autoshard.passes.capture.translate.spelled import put_together
from autoshard.passes.capture.translate.tiles import tiled
from autoshard.passes.capture.translate.views import apart
from autoshard.passes.capture.translate.widths import one_width
from autoshard.passes.ir.graph import Graph


def in_forms(graph: Graph) -> Graph:
    """``graph`` after all rewrites, in order; each expects the results of those before it."""
    for form in (
        remove_dead,
        apart,
        put_together,
        by_position,
        by_dim,
        unflattened,
        remove_dead,
        as_mixtures,
        in_their_dims,
        tiled,
        fused,
        one_width,
        fan_out,
    ):
        graph = form(graph)
    return graph

"""Pipeline stages: a graph cut along a mesh axis into graphs that run one after another."""

from autoshard.passes.pipeline.boundaries import boundaries, following, stages_per_rank, with_parameters
from autoshard.passes.pipeline.cut import cut
from autoshard.passes.pipeline.later import in_two_parts
from autoshard.passes.pipeline.pieces import Pieces
from autoshard.passes.pipeline.stage import Stage, Stages

__all__ = [
    "Pieces",
    "Stage",
    "Stages",
    "boundaries",
    "cut",
    "following",
    "in_two_parts",
    "stages_per_rank",
    "with_parameters",
]

"""Pipeline stages: a graph cut along a mesh axis into graphs that run one after another."""

from autoshard.passes.pipeline.schedules import split_backward
from autoshard.passes.pipeline.segments import (
    SegmentedGraph,
    boundaries_from_homes,
    stage_boundaries,
    stages_per_rank,
    with_trained_parameters,
)
from autoshard.passes.pipeline.stages import Stage, Stages, cut_into_stages

__all__ = [
    "SegmentedGraph",
    "Stage",
    "Stages",
    "boundaries_from_homes",
    "cut_into_stages",
    "split_backward",
    "stage_boundaries",
    "stages_per_rank",
    "with_trained_parameters",
]

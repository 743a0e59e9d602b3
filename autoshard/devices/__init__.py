"""Mesh search: for a number of devices the best mesh and the best pipeline that they can form."""

from autoshard.devices.meshes import divided_mesh_shape, mesh_shapes, planned_for, served_for
from autoshard.devices.pipelines import STAGE_AXIS, pipelined_for

__all__ = ["STAGE_AXIS", "divided_mesh_shape", "mesh_shapes", "pipelined_for", "planned_for", "served_for"]

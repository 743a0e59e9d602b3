"""Mesh search: for a number of devices the best mesh and the best pipeline that they can form."""

from autoshard.devices.bounds import AXIS
from autoshard.devices.meshes import divided, planned_for, shapes
from autoshard.devices.pipelines import pipelined_for
from autoshard.devices.requests import served_for

__all__ = ["AXIS", "divided", "pipelined_for", "planned_for", "served_for", "shapes"]

"""The mesh as part of the plan: a number of devices, and the best of the meshes, and of the pipelines, they can form."""

from autoshard.devices.bounds import AXIS
from autoshard.devices.meshes import divided, planned_for, shapes
from autoshard.devices.pipelines import pipelined_for
from autoshard.devices.requests import served_for

__all__ = ["AXIS", "divided", "pipelined_for", "planned_for", "served_for", "shapes"]

"""autoshard: the auto-sharding compiler for PyTorch. ``autoshard.compile(model, mesh)``."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from typing import TYPE_CHECKING, Any

from autoshard.errors import (
    AutoshardError,
    CaptureError,
    CommunicationError,
    HintError,
    LayoutError,
    MeshError,
    PlanError,
    RuleError,
    RuntimeMismatchError,
)
from autoshard.hardware import Hardware, Level, Link
from autoshard.layout import Invariant, Layout, Partial, Replicate, Shard
from autoshard.mesh import Mesh

if TYPE_CHECKING:
    from autoshard.api import compile, plan, project, score  # noqa: A004  the public name
    from autoshard.check.bug_report import bug_report
    from autoshard.check.calibration import calibrate
    from autoshard.check.coverage import CoverageReport, coverage
    from autoshard.check.measurement import Measured, measure
    from autoshard.check.verification import VerifyReport, verify
    from autoshard.initialise.deferred import deferred_init, materialise
    from autoshard.module.checkpoints import (
        full_optimizer_state_dict,
        load_full_optimizer_state_dict,
    )
    from autoshard.module.offloaded import offloaded
    from autoshard.module.optimizers import clip_grad_norm_, whole
    from autoshard.module.parts.between import eager
    from autoshard.module.sharded_module import ShardedModule
    from autoshard.passes.redistribute import Redistribution, redistribution
    from autoshard.plans.plan import Plan
    from autoshard.report.record import Collective, Cost
    from autoshard.testing import register_rule
    from autoshard.transfers.dealt import dealt
    from autoshard.transfers.running import TransferHandle, TransferReport, load_safetensors, transfer
    from autoshard.transfers.schedule import Schedule, transfer_schedule
    from autoshard.transfers.states import keep
    from autoshard.viz import visualize_layout

__version__ = "0.1.0"

_PACKAGE_FOLDER = os.path.dirname(os.path.abspath(__file__))
_CHECKOUT_FOLDER = os.path.dirname(_PACKAGE_FOLDER)
_CHECKOUT_PACKAGES = {
    f"autoshard.{room}": os.path.join(_CHECKOUT_FOLDER, room, "__init__.py") for room in ("passes", "models")
}


class _InCheckout:
    """Finder of ``passes`` and ``models``: beside this folder in a checkout, in it in a wheel."""

    @staticmethod
    def find_spec(name: str, path: object, target: object = None) -> ModuleSpec | None:
        here = name in _CHECKOUT_PACKAGES and path == __path__  # not for another autoshard
        return spec_from_file_location(name, _CHECKOUT_PACKAGES[name]) if here else None


# First in line: an editable install's finder would answer with its own checkout.
if not os.path.isdir(os.path.join(_PACKAGE_FOLDER, "passes")):
    sys.meta_path.insert(0, _InCheckout)

# Loaded on first use, so that generated code, which imports the runtime only, starts fast.
_LAZY_MODULES = {
    "compile": "autoshard.api",
    "plan": "autoshard.api",
    "project": "autoshard.api",
    "score": "autoshard.api",
    "eager": "autoshard.module.parts.between",
    "ShardedModule": "autoshard.module.sharded_module",
    "clip_grad_norm_": "autoshard.module.optimizers",
    "load_safetensors": "autoshard.transfers.running",
    "whole": "autoshard.module.optimizers",
    "full_optimizer_state_dict": "autoshard.module.checkpoints",
    "load_full_optimizer_state_dict": "autoshard.module.checkpoints",
    "verify": "autoshard.check.verification",
    "VerifyReport": "autoshard.check.verification",
    "deferred_init": "autoshard.initialise.deferred",
    "materialise": "autoshard.initialise.deferred",
    "register_rule": "autoshard.testing",
    "bug_report": "autoshard.check.bug_report",
    "calibrate": "autoshard.check.calibration",
    "measure": "autoshard.check.measurement",
    "Measured": "autoshard.check.measurement",
    "coverage": "autoshard.check.coverage",
    "CoverageReport": "autoshard.check.coverage",
    "Projection": "autoshard.devices.projection",
    "redistribution": "autoshard.passes.redistribute",
    "Redistribution": "autoshard.passes.redistribute",
    "visualize_layout": "autoshard.viz",
    "Plan": "autoshard.plans.plan",
    "Cost": "autoshard.report.record",
    "dealt": "autoshard.transfers.dealt",
    "offloaded": "autoshard.module.offloaded",
    "transfer": "autoshard.transfers.running",
    "keep": "autoshard.transfers.states",
    "TransferHandle": "autoshard.transfers.running",
    "TransferReport": "autoshard.transfers.running",
    "transfer_schedule": "autoshard.transfers.schedule",
    "Schedule": "autoshard.transfers.schedule",
    "Collective": "autoshard.report.record",
}

__all__ = [
    "AutoshardError",
    "CaptureError",
    "Collective",
    "CommunicationError",
    "Cost",
    "CoverageReport",
    "Hardware",
    "HintError",
    "Invariant",
    "Layout",
    "LayoutError",
    "Level",
    "Link",
    "Measured",
    "Mesh",
    "MeshError",
    "Partial",
    "Plan",
    "PlanError",
    "Projection",
    "Redistribution",
    "Replicate",
    "RuleError",
    "RuntimeMismatchError",
    "Schedule",
    "Shard",
    "ShardedModule",
    "TransferHandle",
    "TransferReport",
    "VerifyReport",
    "bug_report",
    "calibrate",
    "clip_grad_norm_",
    "compile",
    "coverage",
    "dealt",
    "deferred_init",
    "eager",
    "full_optimizer_state_dict",
    "keep",
    "load_full_optimizer_state_dict",
    "load_safetensors",
    "materialise",
    "measure",
    "offloaded",
    "plan",
    "project",
    "redistribution",
    "register_rule",
    "score",
    "transfer",
    "transfer_schedule",
    "verify",
    "visualize_layout",
    "whole",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        value = getattr(importlib.import_module(_LAZY_MODULES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'autoshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

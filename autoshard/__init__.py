"""autoshard: the auto-sharding compiler for PyTorch. ``autoshard.compile(model, mesh)``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autoshard.errors import (
    AutoshardError,
    CaptureError,
    HintError,
    LayoutError,
    MeshError,
    PlanError,
    RuleError,
    RuntimeMismatchError,
)
from autoshard.hardware import Hardware, Link
from autoshard.layout import Invariant, Layout, Partial, Replicate, Shard
from autoshard.mesh import Mesh

if TYPE_CHECKING:
    from autoshard.api import compile, plan  # noqa: A004  the public name
    from autoshard.coverage_report import CoverageReport, coverage
    from autoshard.module import ShardedModule
    from autoshard.passes.redistribute import Redistribution, redistribution
    from autoshard.plans import Collective, Cost, Plan
    from autoshard.testing import register_rule
    from autoshard.verification import VerifyReport, verify
    from autoshard.viz.layout_picture import visualize_layout

__version__ = "0.1.0"

# Loaded on first use, so that generated code that imports the runtime alone starts fast.
_LAZY = {
    "compile": "autoshard.api",
    "plan": "autoshard.api",
    "ShardedModule": "autoshard.module",
    "verify": "autoshard.verification",
    "VerifyReport": "autoshard.verification",
    "deferred_init": "autoshard.initialise",
    "materialise": "autoshard.initialise",
    "register_rule": "autoshard.testing",
    "coverage": "autoshard.coverage_report",
    "CoverageReport": "autoshard.coverage_report",
    "redistribution": "autoshard.passes.redistribute",
    "Redistribution": "autoshard.passes.redistribute",
    "visualize_layout": "autoshard.viz.layout_picture",
    "Plan": "autoshard.plans",
    "Cost": "autoshard.plans",
    "Collective": "autoshard.plans",
}

__all__ = [
    "AutoshardError",
    "CaptureError",
    "Collective",
    "Cost",
    "CoverageReport",
    "Hardware",
    "HintError",
    "Invariant",
    "Layout",
    "LayoutError",
    "Link",
    "Mesh",
    "MeshError",
    "Partial",
    "Plan",
    "PlanError",
    "Redistribution",
    "Replicate",
    "RuleError",
    "RuntimeMismatchError",
    "Shard",
    "ShardedModule",
    "VerifyReport",
    "compile",
    "coverage",
    "deferred_init",
    "materialise",
    "plan",
    "redistribution",
    "register_rule",
    "verify",
    "visualize_layout",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'autoshard' has no attribute {name!r}")

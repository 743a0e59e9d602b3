"""Text for an issue: versions, machine, environment and plan in one paste."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

import autoshard
from autoshard.hardware import hardware as resolve_hardware
from autoshard.module.sharded_module import ShardedModule
from autoshard.plans.plan import Plan

PACKAGES = ("torch", "numpy", "highspy", "networkx", "safetensors", "sympy", "transformers", "accelerate")

PREFIXES = ("AUTOSHARD_", "CUDA_VISIBLE", "NCCL_", "OMP_NUM", "PYTORCH_", "TORCH_", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""first letters of the environment variables that are printed"""


def bug_report(of: Plan | ShardedModule | None = None) -> str:
    """Text for an issue: versions, machine and environment; with a plan or sharded module, its full report.

    >>> print(autoshard.bug_report(sharded))
    """
    plan = of.plan if isinstance(of, ShardedModule) else of
    lines = [f"{label:13}{text}" for label, text in _environment_rows()]
    return "\n".join([*lines, *(() if plan is None else ("", plan.report("full")))])


def _environment_rows() -> Iterator[tuple[str, str]]:
    yield "autoshard", autoshard.__version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    yield "machine", f"{os.cpu_count()} cores, {_accelerators()}; default hardware: {resolve_hardware(None).name}"
    yield "distributed", _process_group()
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    yield "variables", ", ".join(f"{name}={value}" for name, value in found.items()) or "none"
    yield "command", " ".join(sys.argv)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _accelerators() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    return f"{kinds}, CUDA {torch.version.cuda}"


def _process_group() -> str:
    if not (dist.is_available() and dist.is_initialized()):
        return "not initialised"
    return f"{dist.get_backend()}, rank {dist.get_rank()} of {dist.get_world_size()}"

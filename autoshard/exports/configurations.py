"""Configurations of other engines, read back as mesh, named strategies and options."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomllib

from autoshard.errors import PlanError
from autoshard.mesh import Mesh

AXIS_NAMES = {
    "pp": ("pp", "pipe", "stage", "pipeline"),
    "replica": ("replica", "replicate", "dp_replicate"),
    "dp": ("dp", "data", "ddp", "fsdp", "shard", "dp_shard"),
    "cp": ("cp", "sp", "context", "seq", "sequence"),
    "ep": ("ep", "expert", "experts"),
    "tp": ("tp", "tensor", "model", "mp"),
}
"""role → usual names of its mesh axis, from slow links to fast ones"""

_ZERO_STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


@dataclass(frozen=True)
class Configuration:
    """How another engine is configured. Sizes are ranks per role; 0: the rest of the mesh."""

    kind: str
    source: str
    """where it was read, for messages"""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """role (keys of :data:`AXIS_NAMES`) → ranks; dp may be 0: what other axes leave"""
    zero: int = 0
    tensor: Any = "megatron"
    """strategy of the tensor-parallel axis: a name, or styles by module"""
    context: str = "ring"
    options: Mapping[str, Any] = field(default_factory=dict)
    """arguments of :func:`autoshard.plan`: recompute, schedule, …"""
    rows_per_rank: int = 0
    """micro-batch of one data-parallel rank, in rows; 0 if not given"""
    accumulation: int = 0
    """micro-batches per step; 0 if not given"""
    rows: int = 0
    """global batch in rows; 0 if not given"""

    def mesh(self, devices: int, hardware: Any = None) -> Mesh:
        """The engine's mesh of ``devices`` ranks; :class:`PlanError` if they do not divide."""
        sizes = {role: n for role in AXIS_NAMES if (n := self.sizes.get(role, 1)) > 1}
        left, rest = divmod(devices, math.prod(sizes.values()))
        if rest or (left > 1 and self.sizes.get("dp", 0)):
            asked = ", ".join(f"{role} {n}" for role, n in sizes.items())
            raise PlanError(
                f"{self.source} divides work over {asked or 'one rank'}, which does not make {devices} devices"
            )
        sizes = {
            role: left if role == "dp" and not self.sizes.get("dp", 0) else sizes.get(role, 1) for role in AXIS_NAMES
        }
        return Mesh({role: n for role, n in sizes.items() if n > 1} or {"dp": 1}, hardware)

    def like(self, mesh: Mesh) -> dict[str, Any]:
        """Mesh axis → strategy; :class:`PlanError` if the mesh's axes do not fit the roles."""
        strategies = {
            "replica": "ddp",
            "dp": _ZERO_STRATEGIES[self.zero],
            "cp": self.context,
            "ep": "expert",
            "tp": self.tensor,
        }
        found: dict[str, Any] = {}
        for role, strategy in strategies.items():
            axis, size = _axis_of(role, mesh), self.sizes.get(role, 0 if role == "dp" else 1)
            if axis is not None and (size == 0 or mesh.size_of(axis) == size):
                found[axis] = strategy
            elif size > 1 or (axis is not None and mesh.size_of(axis) > 1):
                has = (
                    f"axis {axis!r} has {mesh.size_of(axis)} ranks" if axis else f"no axis has a name such as {role!r}"
                )
                raise PlanError(
                    f"{self.source}: {role} has {max(size, 1)} ranks, but in the mesh ({mesh}) {has}. Give {_axes_text(self)}"
                )
        if (stages := self.sizes.get("pp", 1)) > 1 and _axis_of("pp", mesh) is None:
            raise PlanError(f"{self.source} has {stages} pipeline stages: give the mesh an axis 'pp' of that size")
        return found

    def arguments(self, mesh: Mesh, rows: int) -> dict[str, Any]:
        """Arguments of :func:`autoshard.plan` for a batch of ``rows``, with :meth:`like`."""
        asked: dict[str, Any] = {**self.options, "like": self.like(mesh)}
        if self.sizes.get("pp", 1) > 1:
            asked["stages"] = _axis_of("pp", mesh)
        else:
            asked = {n: x for n, x in asked.items() if n not in ("schedule", "stages_per_rank")}
        ranks = math.prod(mesh.size_of(a) for r in ("replica", "dp", "ep") if (a := _axis_of(r, mesh)))
        counted = max(1, rows // (self.rows_per_rank * ranks)) if self.rows_per_rank else 1
        if (count := self.accumulation or counted) > 1:
            asked["micro_batches"] = count
        return asked


def _axis_of(role: str, mesh: Mesh) -> str | None:
    return next((a for a in mesh.axes if a in AXIS_NAMES[role]), None)


def _axes_text(found: Configuration) -> str:
    sizes = {role: n for role in AXIS_NAMES if (n := found.sizes.get(role, 1)) > 1}
    return f"a mesh such as {sizes or {'dp': 2}}"


def read_configuration(given: Any) -> Configuration | None:
    """The configuration in a dict, a text, or a file of that path; None if ``given`` is none.
    Raises :class:`PlanError` if a file cannot be read, or a field has another type."""
    source, data = "the configuration", given
    if isinstance(given, os.PathLike) or (isinstance(given, str) and Path(given).suffix in _SUFFIXES):
        source, path = str(given), Path(given)
        try:
            data = path.read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"like={source!r}: {error.strerror or error}") from error
    if isinstance(data, str):
        data = _parsed(data, source)
    if not isinstance(data, Mapping):
        if source != "the configuration":
            raise PlanError(f"{source} is not a configuration of {', '.join(_READERS)}")
        return None
    for kind, (keys, reader) in _READERS.items():
        if keys & data.keys():
            try:
                return replace(reader(data), kind=kind, source=kind if source == "the configuration" else source)
            except (TypeError, ValueError, AttributeError, IndexError) as error:
                raise PlanError(f"{source} is not a configuration of {kind}: {error}") from error
    if source != "the configuration":
        known = "; ".join(f"{kind}: {sorted(keys)[0]}" for kind, (keys, _) in _READERS.items())
        raise PlanError(f"{source} has no field of a known configuration ({known})")
    return None


_SUFFIXES = (".json", ".toml", ".yaml", ".yml", ".txt", ".sh")


def _parsed(text: str, source: str) -> Any:
    """Data of a text: JSON, Megatron-LM flags, TOML or ``key: value`` lines; None for a name."""
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text)
        if "--tensor-model-parallel-size" in text or text.lstrip().startswith("--"):
            return {"megatron": text}
        if "[parallelism]" in text:
            return tomllib.loads(text)
        if "tensor-parallel-size:" in text:
            pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
            return {key.strip(): json.loads(value) for key, _, value in pairs}
    except ValueError as error:
        raise PlanError(f"{source} cannot be read: {error}") from error
    return None


def _megatron(data: Mapping[str, Any]) -> Configuration:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("tensor-model", "pipeline-model", "context", "expert-model"):
        last = "parallel-size"
        parser.add_argument(f"--{name}-{last}", type=int, default=1)
    for name in (
        "micro-batch-size",
        "global-batch-size",
        "num-virtual-stages-per-pipeline-rank",
        "num-distributed-optimizer-instances",
    ):
        parser.add_argument(f"--{name}", type=int, default=0)
    for name in (
        "sequence-parallel",
        "use-distributed-optimizer",
        "use-megatron-fsdp",
        "use-torch-fsdp2",
        "recompute-activations",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--data-parallel-sharding-strategy", default="no_shard")
    parser.add_argument("--pipeline-model-parallel-layout", default="")
    parser.add_argument("--cp-comm-type", nargs="+", default=["p2p"])
    parser.add_argument("--recompute-granularity", default="")
    try:
        flags, _ = parser.parse_known_args(shlex.split(str(data["megatron"]).replace("\\\n", " "), comments=True))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    zero = int(flags.use_distributed_optimizer)
    if flags.use_megatron_fsdp:
        zero = {"no_shard": 0, "optim": 1, "optim_grads": 2}.get(flags.data_parallel_sharding_strategy, 3)
    virtual = flags.num_virtual_stages_per_pipeline_rank
    if flags.pipeline_model_parallel_layout:
        virtual = _stage_count(flags.pipeline_model_parallel_layout) // flags.pipeline_model_parallel_size
    granularity = "selective" if flags.recompute_activations else flags.recompute_granularity
    sizes = {"tp": flags.tensor_model_parallel_size, "pp": flags.pipeline_model_parallel_size}
    sizes |= {"cp": flags.context_parallel_size, "ep": flags.expert_model_parallel_size}
    if flags.num_distributed_optimizer_instances > 1:
        sizes["replica"] = flags.num_distributed_optimizer_instances
    return Configuration(
        kind="",
        source="",
        sizes=sizes,
        zero=3 if flags.use_torch_fsdp2 else zero,
        tensor="megatron-sp" if flags.sequence_parallel else "megatron",
        context="ulysses" if flags.cp_comm_type[0].startswith("a2a") else "ring",
        options={**_recompute_of(granularity), **_schedule(virtual)},
        rows_per_rank=flags.micro_batch_size,
        rows=flags.global_batch_size,
    )


def _stage_count(layout: str) -> int:
    """Stages of a Megatron layout such as ``Et*3|(tt|)*2L``: groups in parentheses are repeated."""
    text = layout.strip("'\"").replace(" ", "")
    while (start := text.rfind("(")) >= 0:
        end = text.index(")", start)
        digits = len(text) - len(text[end + 2 :].lstrip("0123456789")) if text[end + 1 : end + 2] == "*" else end + 1
        times = int(text[end + 2 : digits]) if digits > end + 1 else 1
        text = text[:start] + text[start + 1 : end] * times + text[digits:]
    return text.count("|") + 1


def _recompute_of(mode: str) -> dict[str, str]:
    return {"full": {"recompute": "blocks"}, "selective": {"recompute": "selective"}}.get(mode, {"recompute": "none"})


def _schedule(virtual: int) -> dict[str, Any]:
    return {"schedule": "interleaved", "stages_per_rank": virtual} if virtual > 1 else {}


def _deepspeed(data: Mapping[str, Any]) -> Configuration:
    stage = data.get("zero_optimization", {}).get("stage", 0)
    if stage not in range(4):
        raise ValueError(f"zero_optimization.stage is 0 to 3, got {stage!r}")
    return Configuration(
        kind="",
        source="",
        sizes={"tp": _number(data.get("tensor_parallel", {}).get("autotp_size", 1)) or 1},
        zero=stage,
        rows_per_rank=_number(data.get("train_micro_batch_size_per_gpu", 0)),
        accumulation=_number(data.get("gradient_accumulation_steps", 0)),
        rows=_number(data.get("train_batch_size", 0)),
    )


def _number(given: Any) -> int:
    """A count; "auto", as transformers' Trainer fills it in, is none."""
    return 0 if given == "auto" else int(given)


def _transformers(data: Mapping[str, Any]) -> Configuration:
    styles = data.get("tp_plan")
    names = {"tp": "tp_size", "pp": "pp_size", "ep": "ep_size", "dp": "fsdp_size", "replica": "dp_replicate_size"}
    sizes = {role: int(data.get(name) or 1) for role, name in names.items()}
    kept = "keep_full_weight" in (data.get("fsdp_plan") or {}).values()
    tensor = dict(styles) if isinstance(styles, Mapping) else "tp_plan"
    if sizes["dp"] == 1 and sizes["replica"] > 1:
        sizes |= {"dp": sizes["replica"], "replica": 1}
        return Configuration("", "", sizes, 0, tensor)
    return Configuration("", "", sizes, 2 if kept else 3, tensor)


def _torchtitan(data: Mapping[str, Any]) -> Configuration:
    part, training = data["parallelism"], data.get("training", {})
    shard, replica = int(part.get("data_parallel_shard_degree", -1)), int(part.get("data_parallel_replicate_degree", 1))
    sizes = {role: int(part.get(f"{name}_degree", 1)) for role, name in _TITAN_DEGREES.items()}
    is_sharded = shard != 1
    sizes |= {"dp": max(shard, 0), "replica": replica} if is_sharded else {"dp": replica}
    names = {"GPipe": "gpipe", "Interleaved1F1B": "interleaved", "ZBVZeroBubble": "zero_bubble"}
    schedule = names.get(part.get("pipeline_parallel_schedule", "1F1B"), "1f1b")
    stages = len(part.get("module_fqns_per_model_part") or ()) // sizes["pp"]
    return Configuration(
        kind="",
        source="",
        sizes=sizes,
        zero=(2 if part.get("fsdp_reshard_after_forward") == "never" else 3) if is_sharded else 0,
        tensor="megatron-sp" if part.get("enable_sequence_parallel", True) else "megatron",
        options={
            **_recompute_of(data.get("activation_checkpoint", {}).get("mode", "none")),
            "schedule": schedule,
            **({"stages_per_rank": stages} if stages > 1 else {}),
        },
        rows_per_rank=int(part.get("pipeline_parallel_microbatch_size", training.get("local_batch_size", 0))),
        rows=max(0, int(training.get("global_batch_size", 0))),
    )


_TITAN_DEGREES = {"tp": "tensor_parallel", "cp": "context_parallel", "ep": "expert_parallel", "pp": "pipeline_parallel"}


def _vllm(data: Mapping[str, Any]) -> Configuration:
    plain = {name.replace("-", "_"): value for name, value in data.items()}
    names = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}
    sizes = {role: int(plain.get(name, 1)) for role, name in names.items()}
    sizes["ep" if plain.get("enable_expert_parallel") else "dp"] = int(plain.get("data_parallel_size", 1))
    return Configuration("", "", {"dp": 1, **sizes}, 0)


_READERS: dict[str, tuple[frozenset[str], Callable[[Mapping[str, Any]], Configuration]]] = {
    "megatron": (frozenset({"megatron"}), _megatron),
    "torchtitan": (frozenset({"parallelism"}), _torchtitan),
    "deepspeed": (
        frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}),
        _deepspeed,
    ),
    "transformers": (frozenset({"tp_size", "tp_plan", "fsdp_size", "pp_size", "dp_replicate_size"}), _transformers),
    "vllm": (frozenset({"tensor_parallel_size", "tensor-parallel-size"}), _vllm),
}
"""kind → fields that only it has, and its reader"""

"""Targets of :func:`export`: the words that each knows, and its writer of files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.errors import PlanError
from autoshard.exports.compilers import jax_files, mindspore_files, partial_gaps
from autoshard.exports.description import Description, ModuleStyle, is_whole, modules_of
from autoshard.exports.torch_source import torch_files, torch_gaps
from autoshard.layout import Shard
from autoshard.report.record import Record
from autoshard.report.tp_plan import module_patterns


@dataclass(frozen=True)
class Exported:
    """A plan as configuration of another engine."""

    kind: str
    files: Mapping[str, str]
    """file name → text"""
    unsaid: tuple[str, ...]
    """sentences: what the plan says and the target cannot"""

    def write(self, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Write :attr:`files` into ``folder``, which is made if it does not exist; returns their paths."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (place / name).write_text(text, encoding="utf-8")
        return tuple(place / name for name in self.files)

    def __str__(self) -> str:
        parts = [f"# {name}\n{text}" for name, text in self.files.items()]
        return "\n".join([*parts, *(f"unsaid: {sentence}" for sentence in self.unsaid)])


Files = dict[str, str]
Gaps = Callable[[Description], Iterator[str]]


def _no_gaps(found: Description) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True)
class Target:
    """An engine: the words that it knows (:attr:`Feature.word`), its files, and further gaps."""

    words: tuple[str, ...]
    files: Callable[[Description], Files]
    gaps: Gaps = _no_gaps


def export(plan: Record, kind: str) -> Exported:
    """``plan`` as configuration of ``kind``. Raises :class:`PlanError` for an unknown kind."""
    target = TARGETS.get(kind)
    if target is None:
        raise PlanError(f"export({kind!r}) is not a kind of configuration. Known: {', '.join(TARGETS)}")
    found = Description(plan)
    sentences = [f.sentence for f in found.features if f.word not in target.words]
    return Exported(kind, target.files(found), tuple(dict.fromkeys((*sentences, *target.gaps(found)))))


def _json(data: Any) -> str:
    return json.dumps(data, indent=2) + "\n"


# --- transformers ---


def _transformers_style(style: ModuleStyle) -> str:
    """The style of ``tp_plan``, as of transformers 5.23."""
    if style.kind == "sequence" and style.takes != Shard(1):
        return "replicated_with_grad_allreduce"  # norms of heads: the input is local, the gradient a partial sum
    if style.kind not in ("colwise", "rowwise"):
        return "replicate"
    if style.is_table:
        return f"embedding_{style.kind}"
    gathered = style.kind == "colwise" and (style.in_loss or style.is_returned or is_whole(style.wanted))
    split = style.kind == "rowwise" and not isinstance(style.takes, Shard)
    return "colwise_gather_output" if gathered else "rowwise_split_input" if split else style.kind


def _transformers_files(found: Description) -> Files:
    modules = modules_of(found.plan)
    config: dict[str, Any] = {"tp_size": found.size("tp"), "fsdp_size": found.shards, "pp_size": found.size("pp")}
    config["dp_replicate_size"] = found.replicas
    if found.tp_axis is not None:
        config["tp_plan"] = module_patterns({m: _transformers_style(s) for m, s in found.styles.items() if m}, modules)
    if found.size("dp") > 1:
        style = "free_full_weight" if found.zero in (0, 3) else "keep_full_weight"
        config["fsdp_plan"] = module_patterns(dict.fromkeys(found.blocks, style), set(found.blocks))
    if found.size("ep") > 1:
        config["ep_size"] = found.size("ep")
    if found.precision.get("param_dtype") == "bfloat16":
        config["fsdp_mixed_precision"] = True
    return {"distributed_config.json": _json(config)}


def _transformers_gaps(found: Description) -> Iterator[str]:
    if found.size("pp") > 1 and found.size("dp") > 1:
        yield "transformers refuses data parallelism together with pipeline stages"
    if found.size("pp") > 1:
        yield "transformers runs pipeline stages one after another and divides layers evenly"
    if found.precision and found.precision != {"param_dtype": "bfloat16", "reduce_dtype": "float32"}:
        yield "fsdp_mixed_precision is bfloat16 with sums in float32"


# --- torchtitan ---

_TORCHTITAN_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "ZBVZeroBubble",
}


def _torchtitan_files(found: Description) -> Files:
    parallel: dict[str, Any] = {
        "data_parallel_replicate_degree": found.replicas,
        "data_parallel_shard_degree": found.shards,
        "fsdp_reshard_after_forward": "always" if found.zero in (0, 3) else "never",
        "tensor_parallel_degree": found.size("tp"),
        "enable_sequence_parallel": found.is_sequence_parallel,
        "context_parallel_degree": found.size("cp"),
        "expert_parallel_degree": found.size("ep"),
        "pipeline_parallel_degree": found.size("pp"),
    }
    if found.plan.staged is not None:
        parallel["pipeline_parallel_schedule"] = _TORCHTITAN_SCHEDULES[found.plan.staged.schedule]
        parallel["pipeline_parallel_microbatch_size"] = found.rows_per_rank
        parallel["module_fqns_per_model_part"] = [list(m) for m in stage_modules(found)]
    mode = found.recompute_mode
    parts: dict[str, dict[str, Any]] = {
        "training": {
            "local_batch_size": found.rows_per_rank * (found.micro_batches if found.plan.staged else 1),
            "global_batch_size": found.rows * found.micro_batches,
            "seq_len": found.length,
            "mixed_precision_param": found.dtype if found.dtype in ("bfloat16", "float32") else "float32",
        },
        "parallelism": parallel,
        "activation_checkpoint": {"mode": mode, **({"selective_ac_option": "op"} if mode == "selective" else {})},
    }
    lines = (
        f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in part.items()) for name, part in parts.items()
    )
    return {"torchtitan.toml": "\n".join([_TORCHTITAN_HEADER, *lines])}


_TORCHTITAN_HEADER = "# Since torchtitan 0.3 these are options: --parallelism.tensor_parallel_degree 2"


def stage_modules(found: Description) -> list[tuple[str, ...]]:
    """Per stage its layers, and the modules outside layers that it runs first."""
    plan, seen, stages = found.plan, set[str](), list[tuple[str, ...]]()
    for number, stage in enumerate(plan.staged.plans if plan.staged else (plan,)):
        outside = [c.fqn.partition(".")[0] for c in stage.choices.values() if c.fqn and not _block_of(c.fqn, found)]
        names = dict.fromkeys(m for m in outside if not any(b.startswith(f"{m}.") for b in found.blocks))
        stages.append((*(m for m in names if m not in seen), *(b for b, s in found.stage_of.items() if s == number)))
        seen |= names.keys()
    return stages


def _block_of(fqn: str, found: Description) -> bool:
    return any(fqn == b or fqn.startswith(f"{b}.") for b in found.blocks)


def _torchtitan_gaps(found: Description) -> Iterator[str]:
    if found.context_word == "ring" and found.size("cp") > 1:
        yield "torchtitan chooses how keys and values are exchanged (context_parallel_rotate_method)"


# --- Megatron-LM ---


def _megatron_files(found: Description) -> Files:
    flags: list[str] = [f"--tensor-model-parallel-size {found.size('tp')}"]
    if found.is_sequence_parallel:
        flags.append("--sequence-parallel")
    if (context := found.size("cp")) > 1:
        flags += [f"--context-parallel-size {context}", f"--cp-comm-type {_CONTEXT_TYPES[found.context_word]}"]
    if found.plan.staged is not None:
        flags += [f"--pipeline-model-parallel-size {found.size('pp')}"]
        flags += [f'--pipeline-model-parallel-layout "{pipeline_layout(found.layers_per_stage)}"']
    if found.size("ep") > 1:
        flags.append(f"--expert-model-parallel-size {found.size('ep')}")
    flags += _MEGATRON_ZERO[found.zero]
    if found.zero and found.replicas > 1:
        flags.append(f"--num-distributed-optimizer-instances {found.replicas}")
    flags += [f"--micro-batch-size {found.rows_per_rank}", f"--global-batch-size {found.rows * found.micro_batches}"]
    if found.length:
        flags.append(f"--seq-length {found.length}")
    if found.recompute_mode == "selective":
        flags.append("--recompute-granularity selective")
    elif found.recompute_mode == "full":
        flags += ["--recompute-granularity full", *_megatron_recompute(found)]
    if found.dtype in ("bfloat16", "float16"):
        flags.append("--bf16" if found.dtype == "bfloat16" else "--fp16")
    return {"megatron-flags.txt": "\n".join(flags) + "\n"}


_CONTEXT_TYPES = {"ring": "p2p", "ulysses": "a2a"}
_MEGATRON_ZERO: tuple[list[str], ...] = (
    [],
    ["--use-distributed-optimizer"],
    ["--use-megatron-fsdp", "--use-distributed-optimizer", "--data-parallel-sharding-strategy optim_grads"],
    ["--use-megatron-fsdp", "--use-distributed-optimizer", "--data-parallel-sharding-strategy optim_grads_params"],
)
"""by ZeRO stage"""


def _megatron_recompute(found: Description) -> list[str]:
    full = [b for b, mode in found.recompute.items() if mode == "full"]
    if len(full) == len(found.blocks):
        return ["--recompute-method uniform", "--recompute-num-layers 1"]
    most = max(sum(found.stage_of[b] == s for b in full) for s in range(len(found.layers_per_stage)))
    return ["--recompute-method block", f"--recompute-num-layers {most}"]


def pipeline_layout(layers: tuple[int, ...]) -> str:
    """Megatron's layout of stages, such as ``Et*3|t*2|t*3L``: embedding, decoder layers, loss."""
    parts = ["t" if n == 1 else f"t*{n}" if n else "" for n in layers]
    return "|".join(("E" if i == 0 else "") + p + ("L" if i == len(parts) - 1 else "") for i, p in enumerate(parts))


def _megatron_gaps(found: Description) -> Iterator[str]:
    yield "Megatron-LM has its own model classes: layers of its GPTModel take the place of this model's modules"


# --- DeepSpeed ---


def _deepspeed_files(found: Description) -> Files:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": found.rows_per_rank,
        "gradient_accumulation_steps": found.micro_batches,
        "train_batch_size": found.rows * found.micro_batches,
        "zero_optimization": {"stage": found.zero},
    }
    if found.size("tp") > 1:
        config["tensor_parallel"] = {"autotp_size": found.size("tp")}
    if found.dtype in ("bfloat16", "float16"):
        config["bf16" if found.dtype == "bfloat16" else "fp16"] = {"enabled": True}
    return {"deepspeed.json": _json(config)}


def _deepspeed_gaps(found: Description) -> Iterator[str]:
    if found.zero == 3 and found.size("tp") > 1:
        yield "DeepSpeed's AutoTP runs with ZeRO stages 0 to 2 only"


# --- vLLM ---


def _vllm_files(found: Description) -> Files:
    config: dict[str, Any] = {
        "tensor-parallel-size": found.size("tp"),
        "pipeline-parallel-size": found.size("pp"),
        "data-parallel-size": found.size("dp") * found.size("ep"),
    }
    if found.size("ep") > 1:
        config["enable-expert-parallel"] = True
    if found.dtype in ("bfloat16", "float16", "float32"):
        config["dtype"] = found.dtype
    if (serving := found.plan.serving) is not None:
        config["max-num-seqs"] = serving.decode.requests
    files = {"vllm.yaml": "".join(f"{k}: {json.dumps(v)}\n" for k, v in config.items())}
    if found.plan.staged is not None:
        files["vllm.env"] = f"VLLM_PP_LAYER_PARTITION={','.join(map(str, found.layers_per_stage))}\n"
    return files


def _vllm_gaps(found: Description) -> Iterator[str]:
    if found.plan.training:
        yield "vLLM serves only: backward, optimizer, and what they need are left out"


_DATA = ("ddp", "zero2", "zero3", "hsdp", "precision")
_STEP = ("pp", "1f1b", "interleaved", "pp layout", "micro-batches", "recompute full", "recompute selective")
_ANY_LAYOUT = (
    *(
        "tp",
        "tp2",
        "ddp",
        "zero3",
        "hsdp",
        "sequence",
        "loss",
        "ulysses",
        "ep",
        "idle",
        "cp fsdp",
        "order",
        "fsdp dims",
    ),
    *("replicated on dp", "sharded on dp", "replicated on tp", "divided on tp", "other on tp", "stored on tp"),
)
"""words of compilers, whose layouts are of tensors"""

TARGETS = {
    "torch": Target(
        (
            *(*_DATA, *_STEP, "zero1", "tp", "sequence", "loss", "replicated on dp", "replicated on tp", "fsdp dims"),
            *("gpipe", "zero_bubble", "recompute some"),
        ),
        torch_files,
        torch_gaps,
    ),
    "transformers": Target((*_DATA, "tp", "replicated on tp", "pp", "ep"), _transformers_files, _transformers_gaps),
    "torchtitan": Target(
        (*_DATA, *_STEP, "tp", "sequence", "loss", "ring", "cp fsdp", "ep", "gpipe", "zero_bubble"),
        _torchtitan_files,
        _torchtitan_gaps,
    ),
    "megatron": Target(
        (*_DATA, *_STEP, "zero1", "tp", "sequence", "loss", "ring", "ulysses", "zigzag", "cp fsdp", "ep"),
        _megatron_files,
        _megatron_gaps,
    ),
    "deepspeed": Target(
        ("tp", "ddp", "zero1", "zero2", "zero3", "micro-batches", "precision"), _deepspeed_files, _deepspeed_gaps
    ),
    "vllm": Target(("tp", "ddp", "ep", "pp", "pp layout"), _vllm_files, _vllm_gaps),
    "mindspore": Target(_ANY_LAYOUT, mindspore_files, partial_gaps),
    "jax": Target(_ANY_LAYOUT, jax_files, partial_gaps),
}
KINDS = tuple(TARGETS)

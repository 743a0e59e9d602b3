"""Plans as configurations of other engines, checked against the fields that those engines document."""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import shlex
import sys
import types
from typing import Any

import pytest
import tomllib
import torch

import autoshard
from autoshard import Layout
from autoshard.errors import PlanError
from autoshard.exports import KINDS
from autoshard.models import Llama, LlamaConfig
from autoshard.plans.plan import Plan

IDS = torch.zeros(8, 32, dtype=torch.long)


@functools.cache
def planned(axes: str, like: str | None = None, **options: Any) -> Plan:
    """A tiny Llama on a mesh such as ``dp=2,tp=2``, with a named strategy per axis."""
    mesh = {a: int(n) for a, _, n in (part.partition("=") for part in axes.split(","))}
    strategies = like and dict(part.split("=") for part in like.split(","))
    with torch.device("meta"):
        model = Llama(LlamaConfig.tiny())
    return autoshard.plan(model, autoshard.Mesh(mesh, "h100"), (IDS, IDS), like=strategies, **options)


def usual() -> Plan:
    return planned("dp=2,tp=2", "dp=zero1,tp=megatron-sp")


def staged() -> Plan:
    return planned("pp=2,dp=2", "dp=zero1", stages="pp", micro_batches=2, recompute="blocks")


DOCUMENTED = {
    # https://github.com/pytorch/torchtitan/blob/main/torchtitan/config/configs.py, job_config.py before 0.3
    "torchtitan": """local_batch_size global_batch_size seq_len mixed_precision_param data_parallel_replicate_degree
        data_parallel_shard_degree fsdp_reshard_after_forward tensor_parallel_degree enable_sequence_parallel
        pipeline_parallel_degree pipeline_parallel_schedule pipeline_parallel_microbatch_size module_fqns_per_model_part
        context_parallel_degree expert_parallel_degree mode selective_ac_option""",
    # https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py
    "megatron": """tensor-model-parallel-size sequence-parallel context-parallel-size cp-comm-type pipeline-model-parallel-size
        pipeline-model-parallel-layout expert-model-parallel-size use-distributed-optimizer use-megatron-fsdp
        data-parallel-sharding-strategy num-distributed-optimizer-instances micro-batch-size global-batch-size seq-length
        recompute-granularity recompute-method recompute-num-layers bf16 fp16""",
    # https://www.deepspeed.ai/docs/config-json/ and https://www.deepspeed.ai/tutorials/autotp-training/
    "deepspeed": """train_micro_batch_size_per_gpu gradient_accumulation_steps train_batch_size zero_optimization stage
        tensor_parallel autotp_size bf16 fp16 enabled""",
    # https://docs.vllm.ai/en/stable/cli/serve.html
    "vllm": "tensor-parallel-size pipeline-parallel-size data-parallel-size enable-expert-parallel dtype max-num-seqs",
}
"""kind → the fields that its documentation names, of those that we write"""


def fields(kind: str, text: str) -> set[str]:
    if kind == "megatron":
        return {word[2:] for word in shlex.split(text) if word.startswith("--")}
    if kind == "vllm":
        return {line.partition(":")[0] for line in text.splitlines()}
    data = tomllib.loads(text) if kind == "torchtitan" else json.loads(text)
    inner = {name for part in data.values() if isinstance(part, dict) for name in part}
    return inner | (set() if kind == "torchtitan" else set(data))


@pytest.mark.slow_cases("tensor parallel-torchtitan", "stages-torchtitan")
@pytest.mark.parametrize("kind", DOCUMENTED)
@pytest.mark.parametrize("plan", [usual, staged], ids=["tensor parallel", "stages"])
def test_only_documented_fields_are_written(kind: str, plan: Any) -> None:
    text = next(iter(plan().export(kind).files.values()))
    assert fields(kind, text) <= set(DOCUMENTED[kind].split())


def test_transformers_takes_the_fields() -> None:
    from transformers.distributed import DistributedConfig
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    config = json.loads(usual().export("transformers").files["distributed_config.json"])
    made = DistributedConfig(**config)
    assert (made.tp_size, made.dp_size, made.pp_size) == (2, 2, 1)
    assert set(config["tp_plan"].values()) <= set(ALL_PARALLEL_STYLES.keys())


def test_megatron_flags_of_stages() -> None:
    flags = staged().export("megatron").files["megatron-flags.txt"]
    assert '--pipeline-model-parallel-layout "Et|tL"' in flags
    assert "--use-distributed-optimizer" in flags
    assert "--recompute-granularity full\n--recompute-method uniform\n--recompute-num-layers 1" in flags
    assert "--micro-batch-size 2\n--global-batch-size 8" in flags


def test_mindspore_maps_are_the_layouts() -> None:
    plan = usual()
    data = json.loads(plan.export("mindspore").files["mindspore_strategies.json"])
    assert data["device_matrix"] == [2, 2]
    for name, rows in data["parameters"].items():
        assert Layout.from_tensor_map(plan.mesh, rows) == plan.layouts[name].without_gradient()
    down = next(o for o in data["operators"].values() if o["cell"] == "blocks.0.feed_forward.down")
    assert down["in_strategy"] == [[[1], [-1], [0]], [[-1], [0]]]
    assert down["out_strategy"] == [None]  # a partial sum


def test_jax_specs_are_the_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = usual()
    text = plan.export("jax").files["shardings.py"]
    sharding = types.SimpleNamespace(AxisType=None, NamedSharding=None, PartitionSpec=lambda *dims: dims)
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(sharding=sharding))
    monkeypatch.setitem(sys.modules, "jax.sharding", sharding)
    made: dict[str, Any] = {}
    exec(compile(text, "shardings.py", "exec"), made)
    assert made["PARAMETERS"]["blocks.0.feed_forward.up.weight"] == ("tp", "dp")
    assert made["PARAMETERS"]["norm.weight"] == ("dp",)
    assert made["ACTIVATIONS"]["blocks.0.attention_norm"] == ("dp", "tp")
    assert "blocks.0.feed_forward.down" not in made["ACTIVATIONS"]  # a partial sum
    assert made["AXES"] == {"dp": 2, "tp": 2}


# --- what a target cannot say ---


def test_the_unsaid_is_listed_by_name() -> None:
    ring = planned("cp=2", "cp=ring").export("deepspeed").unsaid
    assert any("'cp' (2 ranks) shards the sequence, ring attention" in s for s in ring)
    assert not any("ring" in s for s in planned("cp=2", "cp=ring").export("megatron").unsaid)
    split = staged().export("megatron").unsaid
    assert any(s.startswith("stage 0 has operations of blocks") for s in split)
    assert any("partial sums" in s and "blocks.*.feed_forward.down" in s for s in usual().export("jax").unsaid)


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_axis_is_never_dropped(kind: str) -> None:
    said = planned("tp=2", "tp=replicate").export(kind)
    assert any("'tp'" in s and "divides no product" in s for s in said.unsaid) or kind in ("jax", "mindspore")


def test_parameters_that_a_zero_stage_would_shard_are_listed() -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig.tiny())
    hints = {"norm.weight": "replicate"}
    plan = autoshard.plan(model, autoshard.Mesh({"dp": 2}, "h100"), (IDS, IDS), like="fsdp", hints=hints)
    assert "these parameters are replicated along dp: norm.weight" in plan.export("deepspeed").unsaid
    torch_kind = plan.export("torch")
    assert torch_kind.unsaid == ()
    assert 'REPLICATED = ["norm"]' in torch_kind.files["parallelize.py"]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(PlanError, match=r"export\('jaxx'\) is not a kind .* Known: torch, transformers"):
        usual().export("jaxx")


def test_torch_needs_a_layer_per_stage() -> None:
    plan = planned("pp=2", stages="pp", micro_batches=2, schedule="interleaved", stages_per_rank=2)
    with pytest.raises(PlanError, match="holds no layer of its own"):
        plan.export("torch")


def test_files_are_written(tmp_path: Any) -> None:
    (path,) = usual().export("torch").write(tmp_path / "new")
    tree = ast.parse(path.read_text("utf-8"))
    assert [n.name for n in tree.body if isinstance(n, ast.FunctionDef)] == ["make_mesh", "parallelize"]


# --- and back ---


@pytest.mark.slow_cases(
    "tp=2-tp=megatron-vllm",
    "dp=2,tp=2-dp=fsdp,tp=megatron-transformers",
    "cp=2-cp=ulysses-megatron",
    "dp=2,tp=2-dp=zero1,tp=megatron-deepspeed",
    "dp=2,tp=2-dp=fsdp,tp=megatron-sp-torchtitan",
)
@pytest.mark.parametrize(
    ("axes", "like", "kind"),
    [
        ("dp=2,tp=2", "dp=zero1,tp=megatron-sp", "megatron"),
        ("dp=2,tp=2", "dp=fsdp,tp=megatron-sp", "torchtitan"),
        ("dp=2,tp=2", "dp=zero1,tp=megatron", "deepspeed"),
        ("cp=2", "cp=ulysses", "megatron"),
        ("dp=2,tp=2", "dp=fsdp,tp=megatron", "transformers"),
        ("tp=2", "tp=megatron", "vllm"),
    ],
)
def test_what_is_written_is_read(axes: str, like: str, kind: str, tmp_path: Any) -> None:
    """The files lead to the same layouts of parameters; devices= alone leads to the same mesh."""
    plan = planned(axes, like)
    path = plan.export(kind).write(tmp_path)[0]
    with torch.device("meta"):
        model = Llama(LlamaConfig.tiny())
    again = autoshard.plan(model, None, (IDS, IDS), devices=plan.mesh.size, hardware="h100", like=path)
    assert again.mesh == plan.mesh
    for name, kind_of in plan.kinds.items():
        if kind_of == "parameter":
            assert again.layouts[name] == plan.layouts[name], name
    assert again.zero == plan.zero


@pytest.mark.slow
def test_stages_and_micro_batches_are_read(tmp_path: Any) -> None:
    path = str(staged().export("megatron").write(tmp_path)[0])
    with torch.device("meta"):
        model = Llama(LlamaConfig.tiny())
    again = autoshard.plan(model, {"pp": 2, "dp": 2}, (IDS, IDS), hardware="h100", like=path)
    assert again.staged is not None
    assert again.staged.micro_batches == 2
    assert again.recomputed
    ours = autoshard.plan(model, {"pp": 2, "dp": 2}, (IDS, IDS), hardware="h100", like=path, micro_batches=4)
    assert ours.staged is not None
    assert ours.staged.micro_batches == 4  # what the call says comes first


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nothing.json", r"like='nothing.json': No such file"),
        (
            {"zero_optimization": {"stage": 7}},
            r"not a configuration of deepspeed: zero_optimization.stage is 0 to 3, got 7",
        ),
        ("--tensor-model-parallel-size x", r"not a configuration of megatron: .*invalid int value: 'x'"),
        ("--tensor-model-parallel-size 8", r"megatron: tp has 8 ranks, but .* axis 'tp' has 2 ranks"),
        (
            "--tensor-model-parallel-size 2 --context-parallel-size 2",
            r"cp has 2 ranks, but .* no axis has a name such as 'cp'",
        ),
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            r"2 pipeline stages: give the mesh an axis 'pp'",
        ),
    ],
)
def test_bad_configurations_are_refused(given: Any, message: str) -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig.tiny())
    with pytest.raises(PlanError, match=message):
        autoshard.plan(model, {"dp": 2, "tp": 2}, (IDS, IDS), hardware="h100", like=given)


def test_devices_that_a_configuration_does_not_divide() -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig.tiny())
    with pytest.raises(PlanError, match="divides work over tp 3, which does not make 4 devices"):
        autoshard.plan(model, None, (IDS, IDS), devices=4, hardware="h100", like="--tensor-model-parallel-size 3")


def test_layouts_of_megatron() -> None:
    """Written as Megatron reads them; nested groups are counted."""
    from autoshard.exports.configurations import _stage_count
    from autoshard.exports.targets import pipeline_layout

    assert pipeline_layout((3, 2, 0)) == "Et*3|t*2|L"
    assert _stage_count("Et*3|(tt|)*29,m|L") == 32
    assert _stage_count("E(t|)*3L") == 4


def test_flags_of_a_shell_script() -> None:
    """Other flags, comments and continued lines are passed over."""
    text = "--num-layers 32 \\\n  --tensor-model-parallel-size 2 --sequence-parallel  # as before\n--lr 3e-4"
    found = autoshard.exports.read_configuration(text)
    assert found is not None
    assert found.like(autoshard.Mesh({"dp": 4, "tp": 2})) == {"dp": "ddp", "tp": "megatron-sp"}
    assert autoshard.exports.read_configuration("megatron") is None
    assert autoshard.exports.read_configuration({"blocks.*.up": "colwise"}) is None


def test_words_of_targets_are_words_of_features() -> None:
    """A word that no feature needs would hide a typing error."""
    from pathlib import Path

    from autoshard.exports.targets import TARGETS

    source = Path(autoshard.exports.__file__).with_name("description.py").read_text("utf-8")
    dynamic = {"gpipe", "1f1b", "interleaved", "zero_bubble", "ddp", "zero1", "zero2", "zero3", "ring", "ulysses"}
    yielded = (
        set(re.findall(r'yield\s*\(?\s*"([\w -]+)"', source)) | dynamic | {"recompute full", "recompute selective"}
    )
    assert {word for target in TARGETS.values() for word in target.words} <= yielded


@pytest.mark.slow
def test_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from autoshard.cli import main

    small = ["llama", "--batch", "8", "--hardware", "h100"]
    folder = tmp_path / "out"
    assert (
        main(
            [
                "plan",
                *small,
                "--mesh",
                "tp=2",
                "--like",
                "megatron",
                "--export",
                f"megatron={folder}",
                "--export",
                "vllm",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "tensor-parallel-size: 2" in printed
    assert "unsaid: vLLM serves only" in printed
    flags = folder / "megatron-flags.txt"
    assert main(["compare", *small, "--devices", "4", "--like", str(flags)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row[57:].split()[-1] for row in rows[2:]] == ["search", "search"]
    assert "dp=2,tp=2" in rows[1]
    assert main(["compare", *small, "--devices", "4", "--like", "megatron"]) == 2
    assert "Give --mesh" in capsys.readouterr().err


def test_peers_flags_parse_as_argparse_does() -> None:
    """Each flag and its value is one option of a parser that knows the documented names."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    switches = {"sequence-parallel", "use-distributed-optimizer", "use-megatron-fsdp", "bf16", "fp16"}
    for name in DOCUMENTED["megatron"].split():
        parser.add_argument(f"--{name}", **({"action": "store_true"} if name in switches else {}))
    found = parser.parse_args(shlex.split(staged().export("megatron").files["megatron-flags.txt"]))
    assert found.pipeline_model_parallel_layout == "Et|tL"

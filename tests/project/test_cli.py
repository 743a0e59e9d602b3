"""``autoshard plan|compile|verify|show|demo`` as a user calls them; mistakes give one clear line and status 2."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import autoshard.runtime
from autoshard import models
from autoshard.cli import EXAMPLES, main

pytestmark = pytest.mark.usefixtures("remembering")

MLP = ("mlp", "--mesh", "tp=2")


def test_plan_prints_the_table_and_writes_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", *MLP, "--hardware", "ideal_network", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Mlp on ideal_network, mesh tp=2: 2 ranks, float32, training step")
    assert "blocks.0.up.weight" in printed or "blocks.*.up.weight" in printed
    assert autoshard.Plan.from_json(path.read_text(encoding="utf-8")).mesh.axes == ("tp",)


@pytest.mark.slow
def test_plan_of_a_large_mesh_needs_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mlp:base", "--mesh", "dp=64,tp=8", "--batch", "512", "--inference"]) == 0
    assert "512 ranks, bfloat16, inference" in capsys.readouterr().out


@pytest.mark.slow
def test_plan_takes_what_the_function_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    asked = ["--optimizer", "sgd", "--mixed-precision", "bfloat16", "--strict", "--batch", "8", "--json", str(path)]
    staged = ["--mesh", "pp=2,tp=2", "--stages", "pp", "--schedule", "gpipe", "--micro-batches", "2"]
    assert main(["plan", "gpt", *staged, *asked]) == 0
    plan = autoshard.Plan.from_json(path.read_text(encoding="utf-8"))
    assert plan.staged is not None
    assert (plan.staged.schedule, plan.staged.micro_batches) == ("gpipe", 2)
    assert "bfloat16" in plan.mixed_precision


def test_a_budget_within_which_there_is_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mlp", "--devices", "2", "--recompute", "none", "--memory-budget", "10"]) == 2
    assert "no plan within" in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """``autoshard show … | head``."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["show", *MLP]) == 141
        print("what is flushed at the end")


def test_plan_takes_hints(capsys: pytest.CaptureFixture[str]) -> None:
    hints = ["--hint", "*.up.weight=S(0)", "--hint", "*.down.weight=rowwise"]
    assert main(["plan", *MLP, *hints]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("blocks.*.up.weight"))
    assert "S(0)@tp" in row


def test_a_hint_on_bags_cuts_their_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "dlrm", "--mesh", "x=2", "--hint", "tables.*.weight=rowwise"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("tables.")]
    assert [line[3] for line in lines[:3]] == ["S(0)@x"] * 3


def test_compile_writes_a_directory_that_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["compile", "gpt", "--mesh", "tp=2", "--hardware", "ideal_network", "--out", str(tmp_path)]) == 0
    names = {p.name for p in tmp_path.iterdir()}
    shards = {"rank0.safetensors", "rank1.safetensors"}
    assert names == {"rank_module.py", "plan.json", "inputs.json", "lines.json"} | shards
    assert f"torchrun --nproc-per-node 2 {tmp_path}/rank_module.py" in capsys.readouterr().out
    command = [sys.executable, str(tmp_path / "rank_module.py"), "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["step 0", "step 1"]


@pytest.mark.slow_cases("hf:llama", "hf:mixtral", "stages")
@pytest.mark.parametrize(
    ("model", "mesh", "asked"),
    [
        ("mlp", "tp=2", []),
        ("hf:llama", "tp=2", []),
        ("hf:mixtral", "ep=2", ["--like", "expert"]),
        ("gpt", "pp=2", ["--stages", "pp", "--micro-batches", "2", "--recompute", "blocks"]),
    ],
    ids=["mlp", "hf:llama", "hf:mixtral", "stages"],
)
def test_verify(model: str, mesh: str, asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", model, "--mesh", mesh, "--hardware", "ideal_network", "--seq", "8", "--batch", "2"]
    assert main([*arguments, *asked]) == 0
    assert capsys.readouterr().out.startswith(f"verify on mesh {mesh}: ok  (rtol 1e-09, atol 1e-09)")


def test_a_saved_plan_is_followed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By every command that takes one, on its mesh; what it says is not searched again."""
    path = tmp_path / "plan.json"
    small = ["gpt", "--batch", "2", "--seq", "8"]
    asked = ["--mesh", "pp=2,tp=2", "--stages", "pp", "--micro-batches", "2", "--like", "tp=megatron"]
    assert main(["plan", *small, *asked, "--json", str(path)]) == 0
    plan = autoshard.Plan.from_json(path.read_text(encoding="utf-8"))
    capsys.readouterr()
    assert main(["verify", *small, "--plan", str(path)]) == 0
    assert capsys.readouterr().out.startswith("verify on mesh pp=2, tp=2: ok")
    assert main(["compile", *small, "--plan", str(path), "--out", str(tmp_path / "out")]) == 0
    kept = autoshard.Plan.from_json((tmp_path / "out" / "plan.json").read_text(encoding="utf-8"))
    assert (kept.mesh, kept.layouts, kept.micro_batches) == (plan.mesh, plan.layouts, plan.micro_batches)
    capsys.readouterr()
    assert main(["explain", *small, "blocks.0", "--plan", str(path)]) == 0
    assert capsys.readouterr().out == plan.explain("blocks.0") + "\n"
    for command, more in (("verify", ["--like", "ddp"]), ("explain", ["head", "--hint", "head=colwise"])):
        assert main([command, *small, "--plan", str(path), *more]) == 2
        assert "--plan FILE fixes all layouts. Leave --like and --hint out" in capsys.readouterr().err
    assert main(["explain", *small, "blocks.0", "--plan", str(path), "--memory-budget", "1GB"]) == 2
    assert "--plan FILE is a finished plan: --memory-budget cannot change it" in capsys.readouterr().err


def test_a_plan_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for path, text in ((tmp_path / "gone.json", "No such file"), (Path(__file__), "plan")):
        with pytest.raises(SystemExit):
            main(["verify", "mlp", "--plan", str(path)])
        assert text in capsys.readouterr().err


@pytest.mark.slow_cases("file", "mixtral", "qwen3_moe")
@pytest.mark.parametrize(
    "model",
    ["hf:{}", "hf:{}/config.json", "hf:mixtral", "hf:qwen3_moe"],
    ids=["folder", "file", "mixtral", "qwen3_moe"],
)
def test_a_config_of_transformers(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config.save_pretrained(tmp_path)
    assert main(["plan", model.format(tmp_path), "--mesh", "tp=2", "--hardware", "ideal_network"]) == 0
    assert "ForCausalLM on ideal_network, mesh tp=2" in capsys.readouterr().out


def test_what_is_no_config_of_transformers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert main(["plan", f"hf:{tmp_path}", "--mesh", "tp=2"]) == 2
    assert "is not a config of transformers" in capsys.readouterr().err


def test_verify_that_fails_has_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Negative control: an all-reduce that forgets the other rank."""
    monkeypatch.setattr(autoshard.runtime, "all_reduce", lambda x, axes, to="I", op="sum": x)
    assert main(["verify", *MLP, "--hint", "*.up.*=colwise", "--hint", "*.down.weight=rowwise"]) == 1
    assert "DIVERGES" in capsys.readouterr().out


def test_show_prints_source_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["show", *MLP]) == 0
    assert "class RankModule(runtime.RankModule):" in capsys.readouterr().out
    path = tmp_path / "plan.json"
    assert main(["show", *MLP, "--out", str(path)]) == 0
    assert json.loads(path.read_text(encoding="utf-8"))


def _dtype(asked: list[str], tmp_path: Path) -> tuple[set[str], str]:
    """(dtypes of the parameters, dtype of the products) of a plan by the command line."""
    path = tmp_path / "plan.json"
    assert main(["plan", *asked, "--json", str(path)]) == 0
    plan = autoshard.Plan.from_json(path.read_text(encoding="utf-8"))
    products = {plan.dtypes[c.outputs[0]] for c in plan.choices.values() if "linear" in c.op}
    return {plan.dtypes[n] for n, kind in plan.kinds.items() if kind == "parameter"}, products.pop()


@pytest.mark.slow_cases(
    "cpu-llama",
    "cpu-moe",
    "dtype-llama",
    "cpu-hf:llama",
    "dtype-moe",
    "gpu-llama",
    "gpu-moe",
    "mixed-llama",
    "mixed-hf:llama",
    "dtype-hf:llama",
    "gpu-hf:llama",
)
@pytest.mark.parametrize("model", ["llama", "moe", "hf:llama"])
@pytest.mark.parametrize(
    ("asked", "kept", "computed"),
    [
        (["--hardware", "h100"], "bfloat16", "bfloat16"),
        (["--hardware", "cpu"], "float32", "float32"),
        (["--hardware", "cpu", "--dtype", "float16"], "float16", "float16"),
        (["--hardware", "h100", "--mixed-precision", "bfloat16"], "float32", "bfloat16"),
    ],
    ids=["gpu", "cpu", "dtype", "mixed"],
)
def test_the_dtype_of_a_model(model: str, asked: list[str], kept: str, computed: str, tmp_path: Path) -> None:
    assert _dtype([model, "--mesh", "tp=2", *asked], tmp_path) == ({kept}, computed)


@pytest.mark.usefixtures("module")
def test_a_users_model_keeps_its_dtype_unless_asked(tmp_path: Path) -> None:
    asked = ["my_models.nets:with_inputs", "--mesh", "tp=2", "--hardware", "h100"]
    assert _dtype(asked, tmp_path) == ({"float32"}, "float32")
    assert _dtype([*asked, "--dtype", "bfloat16"], tmp_path) == ({"bfloat16"}, "bfloat16")


@pytest.mark.slow
def test_a_plan_in_16_bits_is_verified_in_16_bits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, small = tmp_path / "plan.json", ["llama", "--batch", "2", "--seq", "8"]
    like = ["--like", "megatron", "--mesh", "tp=2", "--hardware", "h100"]
    assert main(["plan", *small, *like, "--json", str(path)]) == 0
    capsys.readouterr()
    assert main(["verify", *small, "--plan", str(path)]) == 0
    assert capsys.readouterr().out.startswith("verify on mesh tp=2: ok")


def test_plan_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.html"
    assert main(["plan", *MLP, "--out", str(out)]) == 0
    assert f"plan drawn to {out}" in capsys.readouterr().out
    assert "<html" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("size", "least"), [("40GB", 40e9), ("512 MiB", 2**29), ("4e10", 4e10), ("1.5kb", 1500.0), ("12", 12.0)]
)
def test_sizes_have_units(size: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr("autoshard.cli._plan_command", lambda options: given.append(options.memory_budget) or 0)
    assert main(["plan", *MLP, "--memory-budget", size]) == 0
    assert given == [least]


@pytest.mark.parametrize("size", ["40XB", "GB", "1.2.3GB", "-4GB"])
def test_what_is_no_size(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *MLP, f"--memory-budget={size}"])
    assert f"{size!r} is not a size, such as 40GB" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(rf"autoshard {autoshard.__version__}, torch [\w.+]+\n", capsys.readouterr().out)


def test_an_unknown_model_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "lama", "--mesh", "tp=2"]) == 2
    told = capsys.readouterr().err
    assert all(name in told for name in models.names())


COMMANDS = [line.strip() for text in EXAMPLES.values() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_the_help_are_in_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(name for name, text in EXAMPLES.items() if command in text)
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert command in capsys.readouterr().out


LARGE = ("llama:8b", "--devices", "gpt:small")


@pytest.mark.slow_cases(
    "autoshard explain gpt head.weight --mesh dp=2,tp=2 --hardware ideal_network",
    "autoshard show gpt --mesh dp=2,tp=2 --out plan.html",
    "autoshard verify moe --mesh ep=2 --like expert",
)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, marks=[pytest.mark.slow] if any(x in c for x in (*LARGE, "demo", "hf:")) else [])
        for c in COMMANDS
        if c.startswith("autoshard") and "completion" not in c
    ],
)
def test_examples_of_the_help_run(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deepspeed.json").write_text('{"zero_optimization": {"stage": 3}}', encoding="utf-8")
    Path("megatron-flags.txt").write_text("--tensor-model-parallel-size 2 --sequence-parallel", encoding="utf-8")
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def _completed(script: Path, *words: str) -> list[str]:
    asked = f"source {script}; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _autoshard"
    done = subprocess.run(
        ["bash", "-c", f"{asked}; echo ${{COMPREPLY[@]}}"], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_bash_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "completion"
    assert main(["completion", "bash"]) == 0
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    assert _completed(script, "autoshard", "exp") == ["explain"]
    assert _completed(script, "autoshard", "plan", "llama:") == [n for n in models.names() if n.startswith("llama:")]
    assert _completed(script, "autoshard", "verify", "gpt", "--st") == ["--stages", "--stages-per-rank", "--steps"]
    assert _completed(script, "autoshard", "plan", "gpt", "--recompute", "") == ["auto", "none", "blocks", "selective"]
    assert _completed(script, "autoshard", "plan", "gpt", "--hardware", "h100_t") == ["h100_torch2.11"]
    assert _completed(script, "autoshard", "plan", "gpt", "--batch", "") == []


def test_the_other_shells_have_every_option(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "fish"]) == 0
    fish = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    options = set(re.findall(r"^  --([a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert {"mesh", "dtype", "out"} <= options
    for option in options:
        assert re.search(rf"seen_subcommand_from plan' -l {option} ", fish), option
    if shutil.which("fish"):
        (tmp_path / "a.fish").write_text(fish, encoding="utf-8")
        subprocess.run(["fish", "--no-execute", str(tmp_path / "a.fish")], check=True)


MODULE = """
import torch
from torch import nn

def with_inputs():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), (torch.ones(4, 8),)

def alone():
    return nn.Linear(8, 8)

def number():
    return 3

def one_tensor():
    return nn.Linear(8, 8), torch.ones(4, 8)

def by_name():
    return nn.Linear(8, 8), [], {"input": torch.ones(4, 8)}

def of_its_own():
    return torch.no_such_name

def of_a_batch(batch=6):
    return nn.Linear(8, 8), (torch.ones(batch, 8),)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``my_models.nets`` in the working directory, as a user has it."""
    package = tmp_path / "my_models"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "nets.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_models", "my_models.nets"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.slow
def test_show_a_program_for_all_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gpt", "--mesh", "tp=2", "--dynamic"]) == 0
    assert "batch, seq = tokens.shape" in capsys.readouterr().out


@pytest.mark.usefixtures("module")
def test_a_users_own_function(capsys: pytest.CaptureFixture[str]) -> None:
    for function in ("with_inputs", "by_name"):
        assert main(["verify", f"my_models.nets:{function}", "--mesh", "tp=2"]) == 0
        assert ": ok" in capsys.readouterr().out


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(("asked", "rows"), [([], 6), (["--batch", "2"], 2)], ids=str)
def test_a_users_own_function_has_the_batch(asked: list[str], rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "my_models.nets:of_a_batch", "--mesh", "tp=2", *asked]) == 0
    assert f"[{rows}, 4/8] S(1)@tp" in capsys.readouterr().out


MISTAKES = [
    (["plan", "mlp", "--mesh", "tp"], "--mesh 'tp': write axes and sizes as dp=2,tp=4"),
    (["plan", "mlp", "--mesh", "tp=0"], "mesh axis 'tp' has size 0, but a size is an int of at least 1"),
    (["plan", "mlp", "--mesh", "tp=2,tp=4"], "--mesh 'tp=2,tp=4': axis 'tp' is given twice"),
    (
        ["plan", "mlp", "--mesh", "tp=2", "--like", "tp=fsdp,tp=ddp"],
        "--like 'tp=fsdp,tp=ddp': axis 'tp' is given twice",
    ),
    (["show", "mlp", "--mesh", "tp=2", "--out", "/no/plan.txt"], "/no/plan.txt: No such file or directory"),
    (["plan", "mlq", "--mesh", "tp=2"], "there is no reference model 'mlq'. Nearest: mlp:tiny"),
    (["plan", "mlp", "--mesh", "tp=2", "--hardware", "gpu"], "unknown hardware 'gpu'. Known: a100, h100, "),
    (
        ["plan", "hf:lama", "--mesh", "tp=2"],
        "hf:lama is not known here, nor a config.json or a folder with one. Known: hf:llama, hf:mistral, ",
    ),
    (["plan", "mlp", "--mesh", "tp=2", "--hint", "rowwise"], "--hint 'rowwise': write PATTERN=HINT, for example "),
    (["plan", "mlp", "--mesh", "tp=2", "--hint", "nowhere=rowwise"], "hint 'nowhere' matches no parameter, buffer, "),
    (["plan", "no_such.module:f", "--mesh", "tp=2"], "MODEL no_such.module:f cannot be loaded: No module named "),
    (["plan", "my_models.nets:missing", "--mesh", "tp=2"], "MODEL my_models.nets:missing cannot be loaded: module "),
    (["plan", "my_models.nets:alone", "--mesh", "tp=2"], "my_models.nets:alone returns no example inputs"),
    (
        ["plan", "my_models.nets:number", "--mesh", "tp=2"],
        "my_models.nets:number returns int, not (model, args) or ",
    ),
    (
        ["plan", "my_models.nets:with_inputs", "--mesh", "tp=2", "--batch", "8"],
        "MODEL my_models.nets:with_inputs cannot be called with (batch=8): got an unexpected keyword argument 'batch'",
    ),
    (["plan", "my_models.nets:of_its_own", "--mesh", "tp=2"], "my_models.nets:of_its_own fails at "),
    (["plan", "my_models.nets:one_tensor", "--mesh", "tp=2"], "my_models.nets:one_tensor returns tuple, not "),
]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(("arguments", "text"), MISTAKES, ids=lambda x: x[:20] if isinstance(x, str) else x[1])
def test_mistakes(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"autoshard: {text}")
    assert printed.err.count("\n") == 1
    if "of_its_own" in arguments[1]:
        assert "nets.py:21 (`return torch.no_such_name`): AttributeError: module 'torch' has no" in printed.err


@pytest.mark.parametrize("arguments", [[], ["plan"], ["plan", "mlp"], ["plan", "mlp", "--mesh"], ["draw", *MLP]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: autoshard" in capsys.readouterr().err


def test_micro_batches_that_are_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *MLP, "--micro-batches", "x"])
    assert "argument --micro-batches: 'x' is neither a number nor auto" in capsys.readouterr().err


def test_drawing_needs_no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not even where there is no memory at all."""
    monkeypatch.setattr("autoshard.cli.free_memory", lambda: 0)
    small = ("--batch", "2", "--seq", "16")
    assert main(["show", "mlp:base", "--mesh", "dp=2,tp=8", *small, "--out", str(tmp_path / "plan.html")]) == 0
    assert (tmp_path / "plan.html").stat().st_size > 10_000


@pytest.mark.parametrize("command", ["compile", "verify"])
def test_what_needs_weights_is_refused_before_it_makes_them(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autoshard.cli.free_memory", lambda: 10_000_000_000)
    out = ["--out", str(tmp_path / "out")] if command == "compile" else []
    assert main([command, "llama:8b", "--mesh", "dp=2,tp=4", *out]) == 2
    printed = capsys.readouterr().err
    assert "the weights need about" in printed
    assert "this machine has 10 GB free" in printed
    assert "`autoshard show` need no weights" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_package_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "autoshard", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: autoshard")

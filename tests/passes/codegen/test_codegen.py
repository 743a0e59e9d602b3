"""The emitted Python: golden files, one class per distinct block, formatted, plain tensors, odd names."""

from __future__ import annotations

import ast
import copy
import json
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from golden_models import Deep, Sequence, Smooth
from harness import double, ideal
from torch import nn

import autoshard
from autoshard import Invariant, Shard, models, runtime
from autoshard.compiler import compile_graph
from autoshard.models.llama import Llama, LlamaConfig
from autoshard.passes.capture.export import capture
from autoshard.plans.options import CompileOptions

pytestmark = pytest.mark.usefixtures("remembering")

IDEAL = autoshard.Mesh({"tp": 2}, hardware="ideal_network")


def emitted(name: str, mesh: autoshard.Mesh = IDEAL) -> str:
    reference = models.get(name)
    args, kwargs = reference.inputs()
    return autoshard.compile(reference.model(), mesh, args, kwargs).source


def classes(source: str) -> list[str]:
    return [n.name for n in ast.parse(source).body if isinstance(n, ast.ClassDef)]


class Golden(NamedTuple):
    """A model of the library, or a class; its sizes of inputs, or its inputs; the mesh, and options of ``compile``."""

    model: str | type[nn.Module]
    inputs: dict[str, int] | tuple[torch.Tensor, ...]
    mesh: dict[str, int]
    options: dict[str, Any] = {}  # noqa: RUF012


ROWS, HELD = {"dp": Shard(0), "fsdp": Shard(0)}, {"dp": Invariant(), "fsdp": Shard(0)}
FSDP = {"x": Shard(0), "blocks.*.weight": Shard(0), "blocks.*.bias": Shard(0)}
HYBRID = {"x": ROWS, "blocks.*.weight": HELD, "blocks.*.bias": HELD}
BY_HEIGHT = {"images": Shard(2), "first": Shard(2), "second": Shard(2)}
GOLDEN = {
    "mlp_tp2": Golden("mlp", {}, {"tp": 2}),
    "llama_tp2": Golden("llama", {}, {"tp": 2}),
    "mlp_fsdp2": Golden("mlp", {"batch": 64, "seq": 64}, {"fsdp": 2}, {"hints": FSDP}),
    "mlp_dp2fsdp2": Golden("mlp", {"batch": 64, "seq": 64}, {"dp": 2, "fsdp": 2}, {"hints": HYBRID}),
    "convolution_sp2": Golden(Smooth, (torch.ones(2, 3, 8, 6).cumsum(2),), {"sp": 2}, {"hints": BY_HEIGHT}),
    "moe_ep2": Golden("moe", {}, {"ep": 2}),
    "gpt_dropout_tp2": Golden("gpt", {}, {"tp": 2}),
    "gpt_again_tp2": Golden("gpt", {}, {"tp": 2}, {"recompute": "blocks"}),
    "attention_ring_cp2": Golden(Sequence, (torch.ones(2, 8, 8).cumsum(1).sin(),), {"cp": 2}, {"like": "ring"}),
    "layers_pp2tp2": Golden(
        Deep, (torch.eye(6)[:4], torch.eye(6)[2:]), {"pp": 2, "tp": 2}, {"stages": "pp", "micro_batches": 2}
    ),
}
SIGNS = {  # what a file is there to show
    "mlp_tp2": "runtime.all_reduce(",
    "llama_tp2": "for block in self.blocks:",
    "mlp_fsdp2": "runtime.gather_parameters(",
    "mlp_dp2fsdp2": 'replicas=("dp",)',
    "convolution_sp2": "runtime.halo(",
    "moe_ep2": "experts",
    "gpt_dropout_tp2": "runtime.dropout(",
    "gpt_again_tp2": "runtime.recompute(",
    "attention_ring_cp2": "runtime.ring_attention(",
    "layers_pp2tp2": "class Stage1(",
}


@pytest.mark.slow_cases("llama_tp2", "gpt_again_tp2", "gpt_dropout_tp2", "moe_ep2")
@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, golden: Callable[[str, str], None], close: Callable[..., None]) -> None:
    """The source is as agreed, and it is what computes the unsharded model's outputs and gradients."""
    case = GOLDEN[name]
    if isinstance(case.model, str):
        assert isinstance(case.inputs, dict)
        reference = models.get(case.model)
        model, (args, kwargs) = reference.model().double(), double(reference.inputs(**case.inputs))
    else:
        model, args, kwargs = case.model().double(), double(case.inputs), {}
    sharded = autoshard.compile(copy.deepcopy(model), ideal(case.mesh), args, kwargs, **case.options)
    golden(f"{name}.py", sharded.source)
    assert SIGNS[name] in sharded.source
    outputs = []
    for module in (sharded, model):
        torch.manual_seed(1)
        outputs.append(module(*args, **kwargs))
        losses = [x for x in pytree.tree_leaves(outputs[-1]) if isinstance(x, torch.Tensor)]
        losses[-1].square().mean().backward()
    close(*outputs)
    close(sharded.full_gradients(), {name: p.grad for name, p in model.named_parameters()})


def test_golden_sees_a_change(golden: Callable[[str, str], None], request: pytest.FixtureRequest) -> None:
    """Negative control."""
    if request.config.getoption("--update-golden"):
        pytest.skip("would overwrite the file")
    text = (Path(__file__).parents[2] / "golden" / "mlp_tp2.py").read_text(encoding="utf-8")
    with pytest.raises(AssertionError, match=r"mlp_tp2\.py differs"):
        golden("mlp_tp2.py", text + "\n")


def test_equal_layers_are_one_class() -> None:
    """8 layers, tiny widths, on the meta device: one decoder-layer class, called in one loop."""
    config = replace(LlamaConfig.tiny(), layers=8)
    with torch.device("meta"):
        model = Llama(config)
    args, kwargs = models.llama.example_inputs(config)
    graph = capture(model, args, kwargs)
    source = compile_graph(graph, IDEAL, CompileOptions("Llama")).source.text
    assert classes(source) == ["Block", "RankModule"]
    assert '{f"blocks.{i}": Block for i in range(8)}' in source
    assert source.count("for block in self.blocks:\n            x = block(x, cos, sin)\n") == 1
    assert "self.blocks[" not in source


@pytest.mark.slow_cases("dlrm", "llama", "gpt", "*moe", "vit")
@pytest.mark.parametrize("name", ["mlp", "gpt", "llama", "moe", "dlrm", "vit"])
def test_the_file_compiles_and_is_formatted(name: str, tmp_path: Path) -> None:
    mesh = autoshard.Mesh({"dp": 2, "tp": 2}, hardware="ideal_network")
    path = tmp_path / "rank_module.py"
    path.write_text(emitted(name, mesh), encoding="utf-8")
    py_compile.compile(str(path), doraise=True)
    assert format_difference(path) == ""


def format_difference(path: Path) -> str:
    ruff = shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff (extra: dev) is not installed")
    done = subprocess.run([ruff, "format", "--isolated", "--diff", path], capture_output=True, text=True)
    return done.stdout


def test_a_badly_formatted_file_is_seen(tmp_path: Path) -> None:
    """Negative control."""
    path = tmp_path / "rank_module.py"
    path.write_text(emitted("mlp").replace(", ", ","), encoding="utf-8")
    assert format_difference(path) != ""


def test_the_forward_runs_on_plain_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type] = []

    def watched(name: str) -> Callable[..., Any]:
        original = getattr(runtime, name)

        def call(x: Any, *args: Any, **kwargs: Any) -> Any:
            seen.extend(type(t) for t in (x if isinstance(x, tuple | list) else [x]))
            made = original(x, *args, **kwargs)
            seen.extend(type(t) for t in (made if isinstance(made, tuple | list) else [made]))
            return made

        return call

    names = "enter_parameters gather_parameters all_reduce all_gather reduce_scatter enter slice partial attention"
    for name in names.split():
        monkeypatch.setattr(runtime, name, watched(name))
    reference = models.get("llama")
    args, kwargs = reference.inputs()
    sharded = autoshard.compile(reference.model(), IDEAL, args, kwargs)
    sharded(*args, **kwargs).loss.backward()
    assert len(seen) > 20
    assert set(seen) <= {torch.Tensor, nn.Parameter}


class Odd(nn.Module):
    """Names that Python, the emitted file or its base classes have taken, and names that are no identifiers."""

    NAMES = ("a-b", "runtime", "torch", "self_", "scope", "3", "F", "_x", "ünï", "plan", "mesh", "source", "TENSORS")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            self.add_module(name, nn.Linear(8, 8))
        self.register_parameter("c-d", nn.Parameter(torch.ones(8)))
        self.register_parameter("save", nn.Parameter(torch.ones(8)))
        self.register_buffer("e f", torch.ones(8))

    def forward(self, x: torch.Tensor, runtime: torch.Tensor) -> torch.Tensor:
        for name in self.NAMES:
            x = torch.tanh(getattr(self, name)(x))
        return x * getattr(self, "c-d") * runtime + self.save * getattr(self, "e f")


def test_odd_names() -> None:
    model, args = Odd().double(), (torch.randn(4, 8).double(), torch.randn(8).double())
    report = autoshard.verify(model, IDEAL, args)
    assert report.ok, str(report)


@pytest.mark.parametrize("depth", [1, 2])
def test_numbered_children_of_the_root(depth: int) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    for _ in range(depth - 1):
        model = nn.Sequential(model, nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    report = autoshard.verify(model.double(), IDEAL, (torch.randn(4, 8).double(),))
    assert report.ok, str(report)


def test_a_class_name_that_the_file_uses_itself() -> None:
    """A block of the user's that is called RankModule is not the root class."""

    class RankModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x

    report = autoshard.verify(nn.Sequential(RankModule(), RankModule()).double(), IDEAL, (torch.randn(4, 8).double(),))
    assert report.ok, str(report)


def test_a_bucket_stands_after_the_slices_it_is_made_from() -> None:
    """Weight and bias are sliced over one axis, then enter the other one together."""
    model, x = nn.Conv2d(3, 6, 3, padding=1), torch.randn(2, 3, 26, 18)
    mesh = autoshard.Mesh({"a": 2, "b": 2}, hardware="ideal_network")
    hints = {"weight": "replicate", "bias": "replicate"}
    sharded = autoshard.compile(model, mesh, (x,), hints=hints)
    lines = sharded.source.splitlines()
    slices = [i for i, line in enumerate(lines) if "runtime.slice(self." in line]
    (bucket,) = (i for i, line in enumerate(lines) if "runtime.enter_parameters((" in line)
    assert len(slices) == 2
    assert max(slices) < bucket
    assert autoshard.verify(model.double(), mesh, (x.double(),), hints=hints).ok


@pytest.mark.slow
def test_a_saved_module_of_bags_runs_with_offsets_of_its_own(tmp_path: Path) -> None:
    """Those that it makes up begin at 0 and ascend, as the example's do."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(40, 4, mode="sum")

        def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return self.table(rows, offsets).square().mean()

    given = torch.arange(30).flip(0), torch.tensor([0, 3, 3, 9, 12, 29])
    autoshard.compile(Bags(), autoshard.Mesh({"x": 2}), given).save(tmp_path)
    inputs = json.loads((tmp_path / "inputs.json").read_text())
    assert {name: entry.get("ascending", False) for name, entry in inputs.items()} == {"rows": False, "offsets": True}
    done = subprocess.run([sys.executable, tmp_path / "rank_module.py"], capture_output=True, text=True)
    assert "step 0: loss" in done.stdout, done.stderr

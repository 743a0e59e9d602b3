"""Profiles of a run name every collective as the predicted timeline does."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ideal
from profiles import assert_as_predicted, names_of
from torch import nn

import autoshard
from autoshard import Invariant, Mesh, Shard, models, runtime
from autoshard.module.programs.executable import load_source
from autoshard.runtime.transport import profiling

X = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
BOTH = {"dp": Shard(0), "fsdp": Shard(0)}
SHARDED = {"x": BOTH, "layers.?.?": BOTH, "layers.*.weight": {"dp": Invariant(), "fsdp": Shard(0)}}

HYBRID = """
from autoshard import runtime


class RankModule(runtime.RankModule):
    MESH = {"dp": 2, "fsdp": 2}
    TENSORS = {"a": "", "b": ""}

    def forward(self):
        a, b = runtime.gather_parameters((self.a, self.b), (0, 0), "fsdp", replicas="dp")
        return (a * b).sum()
"""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def sharded(name: str, **axes: int) -> tuple[autoshard.ShardedModule, Callable[[], Any]]:
    """A reference model on a fast network, and a step of it."""
    reference = models.get(name)
    args, kwargs = reference.inputs()
    torch.manual_seed(0)
    found = autoshard.compile(reference.model(), ideal(axes), args, kwargs)
    return found, lambda: found(*args, **kwargs).loss.backward()


@pytest.mark.slow_cases("tp2")
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=["tp2", "dp2tp2"])
def test_names_are_those_of_the_prediction(axes: dict[str, int]) -> None:
    found, step = sharded("llama", **axes)
    seen = names_of(step)
    assert_as_predicted(seen, found.plan)
    assert any(" blocks.0." in name and name.endswith(" forward") for name in seen)
    assert any(" blocks.1." in name and name.endswith(" backward") for name in seen)
    with pytest.raises(AssertionError):  # negative control
        assert_as_predicted(seen - type(seen)([next(iter(seen))]), found.plan)


@pytest.mark.slow_cases("vit", "dlrm")
@pytest.mark.parametrize("name", ["moe", "vit", "dlrm"])
def test_other_models(name: str) -> None:
    found, step = sharded(name, dp=2)
    assert_as_predicted(names_of(step), found.plan)


def test_buckets_of_a_plan() -> None:
    found = autoshard.compile(Layers(), Mesh({"dp": 2, "fsdp": 2}, hardware="h100"), (X,), hints=SHARDED)
    seen = names_of(lambda: found(X).backward())
    assert_as_predicted(seen, found.plan)
    assert seen["all_gather@fsdp layers.1.0 forward (+1)"] == 1
    assert seen["all_gather@fsdp layers.1.0 backward (+1)"] == 1


def test_buckets_of_a_hybrid_bear_the_name_of_their_line() -> None:
    line = HYBRID.split("\n").index(next(x for x in HYBRID.split("\n") if "gather_parameters" in x)) + 1
    rank_module = load_source(HYBRID, {line: "layers.0"})
    world = runtime.World(rank_module.MESH)
    modules = [rank_module() for _ in range(world.size)]
    for module in modules:
        module.bind_tensors({"a": torch.ones(2, requires_grad=True), "b": torch.ones(2, requires_grad=True)})
    seen = names_of(lambda: sum(world.run(lambda module: module(), [(m,) for m in modules])).backward())
    assert seen == {
        "all_gather@fsdp layers.0 forward (+1)": 1,
        "reduce_scatter@fsdp layers.0 backward (+1)": 1,
        "all_reduce@dp layers.0 backward (+1)": 1,
    }


def test_nothing_is_looked_up_without_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step = sharded("llama", tp=2)

    def looked_up() -> str:
        raise AssertionError("looked up")

    monkeypatch.setattr(profiling, "_running_module", looked_up)
    step()
    with pytest.raises(AssertionError, match="looked up"):
        names_of(step)


def test_a_profile_that_begins_after_the_forward_does_not_know_the_modules() -> None:
    reference = models.get("llama")
    args, kwargs = reference.inputs()
    found = autoshard.compile(reference.model(), ideal({"tp": 2}), args, kwargs)
    loss = found(*args, **kwargs).loss
    seen = names_of(loss.backward)
    assert seen
    assert all(name.split(" ", 1)[1] == "? backward" for name in seen)


def test_lines_of_the_source() -> None:
    found, _ = sharded("llama", tp=2)
    source = found._latest_executable().compiled.source
    lines = source.text.split("\n")
    assert "\0" not in source.text
    of = {lines[n - 1].split("  #")[0].strip(): module for n, module in source.modules.items()}
    assert of["loss = runtime.cross_entropy("] == ""
    assert "feed_forward.gate" in source.modules.values()


def test_a_line_in_a_loop_speaks_for_the_block_of_its_turn() -> None:
    model = models.Mlp(models.MlpConfig(width=16, hidden=64, layers=4))
    args, kwargs = models.get("mlp").inputs()
    found = autoshard.compile(model, ideal({"tp": 2}), args, kwargs)
    assert "for block in self.blocks[:3]:\n            x = block(x)\n            # P@tp" in found.source
    assert "@block.down" in found._latest_executable().compiled.source.modules.values()
    seen = names_of(lambda: found(*args, **kwargs).sum().backward())
    assert_as_predicted(seen, found.plan)
    assert {f"all_reduce@tp blocks.{i}.down forward" for i in range(4)} <= set(seen)


def test_a_saved_directory_names_its_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = sharded("llama", tp=2)
    found.save(tmp_path)
    path = tmp_path / "rank_module.py"
    monkeypatch.setattr(sys, "argv", [str(path)])
    assert_as_predicted(names_of(lambda: runtime.main(rank_module(path), str(path))), found.plan)
    path.write_text(f"# edited\n{path.read_text()}")
    edited = names_of(lambda: runtime.main(rank_module(path), str(path)))
    assert {name.split(" ")[1] for name in edited} == {"?"}


def rank_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("saved_rank_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RankModule

"""What a newcomer meets: the hardware that is here, a warning where nothing is divided, names, short texts, axes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.devices import meshes
from autoshard.hardware import presets
from autoshard.module.programs import compiling

X = torch.ones(8, 16)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


# --- hardware ---


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No default by the environment, and no memory of this machine."""
    monkeypatch.delenv(presets.HARDWARE_VARIABLE, raising=False)
    presets._hardware_here.cache_clear()
    yield monkeypatch
    presets._hardware_here.cache_clear()


def _pretend(here: pytest.MonkeyPatch, name: str, gigabytes: float) -> None:
    here.setattr(torch.cuda, "is_available", lambda: True)
    found = SimpleNamespace(name=name, total_memory=int(gigabytes * 1e9))
    here.setattr(torch.cuda, "get_device_properties", lambda device: found)


def test_the_default_hardware_is_the_processor_without_a_gpu(here: pytest.MonkeyPatch) -> None:
    here.setattr(torch.cuda, "is_available", lambda: False)
    for mesh in (autoshard.Mesh({"tp": 2}), autoshard.Mesh.of({"tp": 2})):
        assert mesh.hardware == presets.PRESETS["cpu"]
    assert autoshard.plan(net(), {"tp": 2}, (X,)).mesh.hardware.name == "cpu"
    here.setenv(presets.HARDWARE_VARIABLE, "a100")
    assert autoshard.Mesh({"tp": 2}).hardware.name == "a100"


@pytest.mark.parametrize(
    ("name", "gigabytes", "preset", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", 85.0, "h100", 80e9),
        ("NVIDIA H200", 150.1, "h200", 141e9),
        ("NVIDIA A100-SXM4-40GB", 42.4, "a100", 42.4e9),
        ("AMD Instinct MI325X", 274.0, "mi325x", 256e9),
    ],
)
def test_the_default_hardware_is_the_gpu_by_name(
    name: str, gigabytes: float, preset: str, memory: float, here: pytest.MonkeyPatch
) -> None:
    _pretend(here, name, gigabytes)
    found = autoshard.Mesh({"tp": 2}).hardware
    assert (found.name, found.memory_bytes) == (preset, memory)
    assert found.flops == presets.PRESETS[preset].flops


def test_a_gpu_without_a_preset_is_warned_of(here: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _pretend(here, "NVIDIA GH200 480GB", 24.0)  # the H200 in it is another word
    with caplog.at_level(logging.WARNING, "autoshard"):
        found = autoshard.Mesh({"tp": 2}).hardware
    assert (found.name, found.memory_bytes) == ("h100", 24e9)
    assert "no hardware preset for NVIDIA GH200 480GB" in caplog.text


# --- where nothing is divided ---


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    compiling._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "autoshard"):
        yield caplog
    compiling._warn_once.cache_clear()


def test_idle_axes_are_warned_of_once(warned: pytest.LogCaptureFixture) -> None:
    mesh = autoshard.Mesh({"dp": 2, "tp": 2}, hardware="cpu")
    for _ in range(2):
        sharded = autoshard.compile(net(), mesh, (X,))
    assert sharded.plan.idle_axes == ("dp", "tp")
    told = [record.getMessage() for record in warned.records]
    assert len(told) == 1
    assert "\n" not in told[0]
    assert told[0].startswith("Sequential: no work is divided: all 4 ranks compute the same (mesh dp=2, tp=2")
    warned.clear()
    sharded = autoshard.compile(net(), mesh, (X,), like={"dp": "fsdp"})  # the way out
    assert sharded.plan.idle_axes == ("tp",)
    assert ["no work is divided along tp=2 (" in record.getMessage() for record in warned.records] == [True]


def test_weights_that_are_only_stored_in_shards_divide_no_work() -> None:
    """A batch of one under FSDP."""
    plan = autoshard.plan(net(), autoshard.Mesh({"tp": 2}, "cpu"), (torch.ones(1, 16),), like="fsdp")
    assert str(plan.layouts["0.weight"]) == "S(0)@tp"
    assert plan.idle_axes == ("tp",)
    assert any(note.startswith("axis tp divides no work: tensors are sharded along it") for note in plan.notes)


@pytest.mark.parametrize("asked", [{"like": "replicate"}, {"like": "ddp"}, {"hints": {"0": "colwise", "2": "rowwise"}}])
def test_no_warning_where_work_is_divided_or_none_was_wanted(
    asked: dict[str, Any], warned: pytest.LogCaptureFixture
) -> None:
    autoshard.compile(net(), autoshard.Mesh({"tp": 2}, "cpu"), (X,), **asked)
    autoshard.compile(net(), {"tp": 1}, (X,))
    assert warned.records == []


# --- names and texts ---


def test_dir_has_the_public_names() -> None:
    code = "import autoshard; print(' '.join(dir(autoshard)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert set(done.stdout.split()) == {*autoshard.__all__, "__version__"}
    assert all(hasattr(autoshard, name) for name in dir(autoshard))


def test_texts_are_short_and_notebooks_show_the_table() -> None:
    sharded = autoshard.compile(net(), autoshard.Mesh({"tp": 2}, "ideal_network"))
    assert repr(sharded) == str(sharded) == "<ShardedModule: Sequential, not compiled yet>"
    assert sharded._repr_html_() is None
    sharded(X)
    plan = sharded.plan
    assert repr(plan).startswith("<Plan: Sequential on ideal_network, mesh tp=2: ")
    assert repr(sharded) == repr(plan).replace("Plan", "ShardedModule", 1)
    assert repr(nn.Sequential(sharded)).count("\n") == 2
    html = plan._repr_html_()
    assert html == sharded._repr_html_()
    assert html.startswith("<pre")
    assert "S(0)@tp" in html
    assert (
        "<script"
        not in autoshard.plan(type("<script>", (nn.Linear,), {})(4, 4), {"tp": 2}, (torch.ones(2, 4),))._repr_html_()
    )


def test_reports_have_one_letter_for_replicated_tensors() -> None:
    like = {"dp": "ddp", "tp": "megatron"}
    plan = autoshard.plan(net(), autoshard.Mesh({"dp": 2, "tp": 2}, "h100"), (X,), like=like)
    assert any("I@" in str(layout) for layout in plan.layouts.values())
    texts = [str(plan), plan.explain("0.weight"), plan.explain("2"), *(c.reason for c in plan.collectives)]
    texts += [use for choice in plan.choices.values() for use in choice.uses]
    assert not [text for text in texts if "I@" in text]
    with pytest.raises(autoshard.PlanError, match=r"has layout S\(0\)@tp R@dp\. Leave the hint out"):
        autoshard.compile(net(), plan.mesh, (X,), plan=plan, hints={"0.weight": {"dp": autoshard.Shard(0)}})
    assert {c.reason for c in plan.collectives if c.axes == ("dp",)} == {
        f"{i}.{name}: add its gradients" for i in (0, 2) for name in ("weight", "bias")
    }


# --- one group, one axis ---


@pytest.mark.parametrize("like", ["fsdp", "ddp", None])
def test_axes_that_are_one_group_are_one_axis(like: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"example_args": (torch.ones(64, 256),), "hardware": "h100", "like": like or "fsdp"}
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    alone = autoshard.plan(model, devices=8, **asked)
    monkeypatch.setattr(meshes, "mesh_shapes", lambda devices: [(4, 2)])
    monkeypatch.setattr(meshes, "divided_mesh_shape", lambda shape, per_node: (2, 2, 2))
    if like is None:  # negative control
        monkeypatch.setattr(meshes, "_is_one_group", lambda *_: False)
    plan = autoshard.plan(model, devices=8, **asked)
    if like is None:
        assert plan.mesh.ndim > 1
        return
    assert plan.mesh == alone.mesh
    assert plan.cost.total_s == pytest.approx(alone.cost.total_s)
    assert {str(plan.layouts[name]) for name in ("0.weight", "1.weight")} == {
        str(alone.layouts[name]) for name in ("0.weight", "1.weight")
    }
    assert {c.axes for c in plan.collectives} == {c.axes for c in alone.collectives} == {alone.mesh.axes}

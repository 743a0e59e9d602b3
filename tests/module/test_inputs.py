"""Inputs that come in parts: what plans, saved modules and programs with open lengths make of them; what these write."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ideal
from safetensors.torch import save_file
from state_cases_inputs import Tied, ids
from state_harness import close, pair, same_gradients
from torch import nn

import autoshard
from autoshard.errors import CaptureError
from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh
from autoshard.module.inputs import local_layouts
from autoshard.module.programs.executable import load_source
from autoshard.runtime.programs import launch

AXES = {"dp": 2, "tp": 2}
Saved = Callable[..., list[str]]
"""(a sharded module, its inputs, steps) → what its saved folder prints"""


@pytest.fixture
def saved(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Saved:
    def printed(sharded: Any, inputs: dict[str, torch.Tensor], steps: int = 1) -> list[str]:
        sharded.save(tmp_path)
        save_file(inputs, tmp_path / "inputs.safetensors")
        monkeypatch.setattr(sys, "argv", ["", "--steps", str(steps), "--inputs", str(tmp_path / "inputs.safetensors")])
        module = tmp_path / "rank_module.py"
        launch.main(load_source(module.read_text("utf-8")), str(module))
        return capsys.readouterr().out.splitlines()

    return printed


def test_a_saved_module_cuts_its_inputs(saved: Saved) -> None:
    """The saved folder takes global inputs; without the cut the ranks would come with twice the batch."""
    model, sharded = pair(ideal(AXES), Tied, ids(), inputs="local")
    assert str(sharded.plan.layouts["ids"]) == "S(0)@dp R@tp"
    assert saved(sharded, {"ids": ids(seed=3)}) == [f"step 0: loss {model(ids(seed=3))[0].item():.6f}"]


class Mean(nn.Module):
    """A buffer takes what depends on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.mean.copy_(0.5 * self.mean + y.mean(0))  # type: ignore[operator]
        return (y - self.mean).square().mean()  # type: ignore[operator]


def test_a_saved_module_goes_on_from_what_it_wrote(saved: Saved) -> None:
    """From the value alone: the backward of a step ends there."""
    x = torch.randn(8, 4)
    sharded = autoshard.compile(Mean(), ideal({"dp": 2}), (x,))
    printed = saved(sharded, {"x": x}, 3)
    optimizer, expected = torch.optim.AdamW(sharded.parameters(), 1e-3), []
    for step in range(3):
        optimizer.zero_grad()
        loss = sharded(x)
        loss.backward()
        optimizer.step()
        expected.append(f"step {step}: loss {loss.item():.6f}")
    assert printed == expected


class Bags(nn.Module):
    """Tables whose gradients are sparse, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, 4, mode="sum", sparse=True) for rows in (30, 20))
        self.head = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pooled = [bag(column) for bag, column in zip(self.bags, ids.unbind(), strict=True)]
        return self.head(torch.cat(pooled, 1)).square().mean()


@pytest.mark.parametrize("like", ["table-wise", "row-wise", "ddp"])
def test_a_saved_module_trains_sparse_tables(saved: Saved, like: str) -> None:
    rows = torch.randint(0, 20, (2, 8, 3))
    model = Bags()
    printed = saved(autoshard.compile(copy.deepcopy(model), ideal({"x": 2}), (rows,), like=like), {"ids": rows}, 3)
    optimizers = torch.optim.SparseAdam(model.bags.parameters()), torch.optim.AdamW(model.head.parameters())
    expected = []
    for step in range(3):
        loss = model(rows)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        expected.append(f"step {step}: loss {loss.item():.6f}")
    assert printed == expected


@pytest.mark.parametrize(("planned", "given"), [("local", "global"), ("global", "local")])
def test_a_plan_is_followed_whatever_the_inputs_are(planned: str, given: str) -> None:
    parts = ids(rows=2) if planned == "local" else ids()
    plan = autoshard.plan(Tied().double(), ideal(AXES), (parts,), inputs=planned)
    model, sharded = pair(ideal(AXES), Tied, ids(), inputs=given, plan=plan)
    assert str(sharded.plan.layouts["ids"]) == ("S(0)@dp R@tp" if given == "local" else "R@dp R@tp")
    assert {n: c.labels for n, c in sharded.plan.choices.items()} == {n: c.labels for n, c in plan.choices.items()}
    for module in (model, sharded):
        module(ids())[0].backward()
    same_gradients(sharded, model)


def test_programs_with_open_lengths_take_whole_inputs() -> None:
    model, sharded = pair(ideal(AXES), Tied, ids(), inputs="local", dynamic=True)
    for rows in (4, 3, 6):
        close(sharded(ids(rows=rows))[0], model(ids(rows=rows))[0])
    assert len(sharded.programs) == 1
    assert str(sharded.plan.layouts["ids"]) == "R@dp R@tp"


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    x_scale: torch.Tensor


class Scaled(torch.nn.Linear):
    def forward(self, batch: Batch) -> torch.Tensor:
        y = super().forward(batch.x)
        y.mul_(batch.x_scale)
        return y


class Times(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale


def test_numbers_come_whole_and_axes_of_one_rank_cut_nothing() -> None:
    """The one axis that has ranks is that of the batch, whatever it is called."""
    mesh = Mesh({"a": 2, "b": 1})
    x, scale = local_layouts(Times(), mesh, (torch.ones(4), torch.tensor(2.0)), {}, "local", None)
    assert scale is None
    assert x == Layout(mesh, {"a": Shard(0)})


def test_what_is_said_of_a_part() -> None:
    """Lengths of dim 0 are compared where it is cut; a hint that cuts nothing says how a plan holds it, not how it comes."""

    class Both(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.sum() + y.sum()

    mesh, args = Mesh({"dp": 2}), (torch.zeros(4, 6), torch.zeros(3, 6))
    of_x = {"x": {"dp": autoshard.Shard(1)}}
    assert local_layouts(Both(), mesh, args, {}, "local", of_x) == tuple(
        Layout(mesh, {"dp": Shard(dim)}) for dim in (1, 0)
    )
    with pytest.raises(autoshard.HintError, match="'x' has 4 rows and 'y' 3"):
        local_layouts(Both(), mesh, args, {}, "local", {"x": {"dp": autoshard.Replicate()}})
    kept = local_layouts(Both(), mesh, args, {}, {"x": "local"}, {"x": "replicate"})
    assert kept == (Layout(mesh, {"dp": Shard(0)}), None)


def test_fields_whose_names_begin_alike() -> None:
    """torch writes guards of such arguments that are no Python."""
    batch = Batch(torch.randn(4, 8).double(), torch.rand(4, 1).double())
    model, sharded = pair(ideal({"tp": 2}), lambda: Scaled(8, 8), batch)
    close(sharded(batch), model(batch))


def test_where_an_input_starts_is_priced() -> None:
    """Parts that the plan needs whole are gathered, and the plan says so."""
    hints = {"*": "replicate", "norm": autoshard.Replicate(), "ids": {"dp": autoshard.Shard(0)}}
    mesh = {"dp": 2}
    local = autoshard.plan(Tied(), mesh, (ids(rows=2),), hints=hints, inputs="local")
    whole = autoshard.plan(copy.deepcopy(Tied()), mesh, (ids(),), inputs="global")
    assert any(c.kind == "all_gather" for c in local.collectives)
    assert not any(c.kind == "all_gather" for c in whole.collectives)
    assert local.cost.total_s > whole.cost.total_s
    assert torch.Size(local.shapes["ids"]) == whole.shapes["ids"]


def test_large_parts_take_no_memory_for_a_plan() -> None:
    """64 ranks bring 128 MiB each; the whole would be 8 GiB."""
    plan = autoshard.plan(torch.nn.Linear(1 << 12, 4), {"dp": 64}, (torch.zeros(1 << 13, 1 << 12),), inputs="local")
    assert plan.shapes["input"] == (1 << 19, 1 << 12)


class Kinds(nn.Module):
    """What Python takes for equal decides, of an argument, of an object's attribute and of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.side = nn.Linear(4, 4), 0.0

    def forward(self, x: Any, number: Any = 0.0) -> torch.Tensor:
        x, number = (x.x, x.number[0]) if isinstance(x, Numbered) else (x, number)
        y = self.layer(x) * math.copysign(1.0, self.side) * {bool: 2, int: 3, float: 4}[type(number)]
        return y if math.isnan(number) else y * math.copysign(1.0, number)


@dataclasses.dataclass
class Numbered:
    x: torch.Tensor
    number: list[Any]


@pytest.mark.parametrize(
    "given", [lambda x, n: (x, n), lambda x, n: (Numbered(x, [n]),)], ids=["plain", "in an object"]
)
def test_a_constant_is_no_other_that_python_takes_for_it(given: Callable[..., tuple[Any, ...]]) -> None:
    """0.0 is not -0.0, True is not 1, and one NaN is as good as another: a program each."""
    model, x = Kinds().double(), torch.randn(8, 4, dtype=torch.float64)
    sharded = autoshard.compile(model, ideal({"dp": 2}), given(x, 0.0))
    for number in (0.0, -0.0, 0, False, 0.0, float("nan"), -0.0, -float("nan")):
        close(sharded(*given(x, number)), model(*given(x, number)))
    assert len(sharded.programs) == 5
    for side in (0.0, -0.0):
        model.side = sharded.side = side
        close(sharded(*given(x, 0.0)), model(*given(x, 0.0)))
    assert len(sharded.programs) == 6


def test_an_input_without_data_is_refused_after_one_with_data() -> None:
    """A call is compared with the last one: that it comes from another device is seen."""
    x = torch.randn(8, 4)
    sharded = autoshard.compile(nn.Linear(4, 4), ideal({"dp": 2}), (x,))
    sharded(x)
    with pytest.raises(CaptureError, match="is on device meta"):
        sharded(x.to("meta"))

"""A saved folder that is run without the model's code: what it lacks, what it makes up, and what has no backward."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

import autoshard
from autoshard.errors import PlanError
from autoshard.module.programs.executable import load_source
from autoshard.runtime.programs import launch


class Error(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def saved(folder: Path, model: nn.Module, x: torch.Tensor, **asked: object) -> None:
    autoshard.compile(model, autoshard.Mesh({"dp": 2}), (x,), **asked).save(folder)
    save_file({"x": x}, folder / "inputs.safetensors")


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rank_module.py", "--inputs", str(folder / "inputs.safetensors")])
    file = folder / "rank_module.py"
    launch.main(load_source(file.read_text("utf-8")), str(file))


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, Error(), torch.randn(8, 4))
    save_file({"y": torch.randn(8, 4)}, tmp_path / "inputs.safetensors")
    with pytest.raises(PlanError, match=r"inputs\.safetensors has no input 'x'. It needs x"):
        run(tmp_path, monkeypatch)
    (tmp_path / "rank1.safetensors").unlink()
    with pytest.raises(PlanError, match=r"rank1\.safetensors is missing: save the module again"):
        run(tmp_path, monkeypatch)


def test_a_loss_that_nothing_is_trained_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = Error().requires_grad_(False), torch.randn(8, 4)
    saved(tmp_path, model, x)
    run(tmp_path, monkeypatch)
    assert capsys.readouterr().out == f"step 0: loss {model(x).item():.6f}\n"


class Tempered(nn.Module):
    """Gives a number that micro-batches do not add up to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(x), self.temperature.exp()  # type: ignore[operator]


def test_numbers_of_micro_batches_are_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Tempered().requires_grad_(False)
    saved(tmp_path, model, torch.randn(8, 4), stages="dp", micro_batches=2, training=False)
    file = tmp_path / "rank_module.py"
    monkeypatch.setattr(sys, "argv", [str(file)])
    runpy.run_path(str(file), run_name="__main__")
    assert capsys.readouterr().out == "step 0: outputs (local) [4, 4], []\n"


@pytest.mark.parametrize("ascending", [False, True])
def test_integers_that_are_made_up_are_of_the_whole_range(ascending: bool) -> None:
    described = {"dtype": "int32", "shape": [500], "low": 2, "high": 9, "ascending": ascending}
    made = launch._random_input(described, torch.Generator().manual_seed(0))
    assert made.dtype == torch.int32
    assert made.unique().tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert bool((made.diff() >= 0).all()) is ascending


def test_ascending_integers_begin_at_the_least() -> None:
    described = {"dtype": "int64", "shape": [3], "low": 2, "high": 900, "ascending": True}
    assert launch._random_input(described, torch.Generator().manual_seed(0))[0] == 2


@pytest.mark.parametrize("safe", [True, False])
def test_states_by_accelerate(safe: bool, tmp_path: Path) -> None:
    """In one process it writes all that was prepared, and training goes on as it did; dropout, too."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 8)).double()
    sharded = autoshard.compile(model, {"tp": 2}, (torch.zeros(4, 8).double(),), hints={"0": "colwise"})
    accelerator, optimizer = Accelerator(cpu=True), torch.optim.AdamW(sharded.parameters(), lr=0.1)
    prepared, optimizer, scheduler = accelerator.prepare(
        sharded, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    )

    def trained() -> list[float]:
        losses = []
        for seed in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            loss = prepared(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first = trained()
    accelerator.save_state(str(tmp_path), safe_serialization=safe)
    second = trained()
    accelerator.load_state(str(tmp_path))
    assert trained() == pytest.approx(second, rel=1e-9)
    assert second != pytest.approx(first, rel=1e-3)
    after = sharded.full_state_dict()
    accelerator.load_state(str(tmp_path))
    assert not torch.equal(sharded.full_state_dict()["0.weight"], after["0.weight"])

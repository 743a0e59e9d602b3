"""Captures that are remembered: found again where nothing differs that a trace can see, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from remembered import remembered, signature
from state_harness import Net, Of, ids
from torch import nn

from autoshard.passes.capture import export
from autoshard.passes.capture.export import capture

FACTOR = 2.0


def scaled(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x) * FACTOR


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that are captured in the end."""
    made: list[nn.Module] = []
    right = export._capture_once

    def noted(model: nn.Module, *args: Any) -> Any:
        made.append(model)
        return right(model, *args)

    monkeypatch.setattr(export, "_capture_once", noted)
    return made


class ReadsOutside(Net):
    """It reads a tensor that it does not register."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.full((2,), 2.0)]

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, logits = super().forward(ids)
        return loss * self.held[0].sum(), logits


@pytest.mark.slow
def test_an_equal_model_is_captured_once(tmp_path: Path, made: list[nn.Module]) -> None:
    with remembered(tmp_path):
        first, second = capture(Net(), (ids(),)), capture(Net(), (ids(),))
        assert len(made) == 1
        assert first == second
        capture(Net().eval(), (ids(),))
        capture(Net(), (ids(6),))
        assert len(made) == 3


def test_what_reads_a_tensor_of_nobody_is_captured_each_time(tmp_path: Path, made: list[nn.Module]) -> None:
    with remembered(tmp_path):
        other = ReadsOutside()
        first, second = capture(ReadsOutside(), (ids(),)), capture(other, (ids(),))
        assert len(made) == 2
        assert [id(x) for x, _ in second.outside] == [id(other.held[0])]
        other.bn.running_mean.add_(1)
        assert not second.is_outdated
        other.held[0].add_(1)
        assert second.is_outdated
        assert not first.is_outdated


def frozen(model: Net) -> None:
    model.emb.weight.requires_grad_(False)


def other_buffer(model: Net) -> None:
    model.bn.running_mean.add_(1)


def untied(model: Net) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def hooked(model: Net) -> None:
    model.head.register_forward_hook(lambda module, args, output: output * 2)


def in_double(model: Net) -> None:
    model.double()


@pytest.mark.parametrize("change", [frozen, other_buffer, untied, hooked, in_double])
def test_changed_models_differ(change: Callable[[Net], None]) -> None:
    model = Net()
    before = signature(model, ())
    assert before == signature(Net(), ())
    change(model)
    assert signature(model, ()) != before


def test_functions_differ_by_code_closures_and_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    def by(factor: float) -> nn.Module:
        return Of(lambda layer, x: layer(x) * factor)

    assert signature(by(2.0), ()) == signature(by(2.0), ())
    assert signature(by(2.0), ()) != signature(by(3.0), ())
    assert (
        len({signature(Of(f), ()) for f in (lambda m, x: m(x) + 1, lambda m, x: m(x) + 2, lambda m, x: m(x).exp())})
        == 3
    )
    before = signature(Of(scaled), ())
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert signature(Of(scaled), ()) != before


def test_what_is_not_known_has_no_signature() -> None:
    assert signature(Of(torch.ones(2).to_sparse()), ()) is None


def test_flags_of_torch_count() -> None:
    before = signature(Net(), ())
    with torch.no_grad():
        assert signature(Net(), ()) != before
    with torch.autocast("cpu"):
        assert signature(Net(), ()) != before


class Doubled(nn.Module):
    def __init__(self) -> None:
        class Local(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                return gradient * 2

        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), Local

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function.apply(self.layer(x))
        return result


def test_a_function_that_no_other_process_finds_is_not_written(tmp_path: Path) -> None:
    with remembered(tmp_path):
        capture(Doubled(), (torch.ones(2, 4),))
        assert not any(path.read_bytes() for path in tmp_path.iterdir())
        capture(nn.Linear(4, 4), (torch.ones(2, 4),))
        assert any(path.read_bytes() for path in tmp_path.iterdir())

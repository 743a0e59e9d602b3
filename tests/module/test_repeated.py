"""A call that repeats the last one is not checked anew: what differs in anything that decides is not taken for one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import CaptureError
from autoshard.module.sharded_module import ShardedModule


class Asking(nn.Module):
    """What it computes depends on all that a program is compiled for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, times: float = 1.0) -> torch.Tensor:
        y = self.second(self.first(x)) * times
        if self.second.training:
            y = y * 3
        if torch.is_grad_enabled():
            y = y + 1
        if torch.is_inference_mode_enabled():
            y = y + 2
        if self.first.weight.requires_grad:
            y = y + 4
        if x.requires_grad:
            y = y + 8
        return y + torch.ones((), dtype=torch.get_default_dtype()) / 3


Change = Callable[[Any, dict[str, Any]], Any]


def _default(model: Any, given: dict[str, Any]) -> AbstractContextManager[Any]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    stack = ExitStack()
    stack.callback(torch.set_default_dtype, before)
    return stack


def _put(model: Any, given: dict[str, Any]) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach() * 2)


CHANGES: dict[str, Change] = {
    "mode of a module": lambda model, given: model.second.train(False),
    "mode": lambda model, given: model.eval(),
    "requires_grad of a parameter": lambda model, given: model.first.weight.requires_grad_(False),
    "another parameter": _put,
    "no_grad": lambda model, given: torch.no_grad(),
    "inference": lambda model, given: torch.inference_mode(),
    "autocast": lambda model, given: torch.autocast("cpu", torch.bfloat16),
    "constant": lambda model, given: given.update(times=2.0),
    "kind of a constant": lambda model, given: given.update(times=True),
    "requires_grad": lambda model, given: given.update(x=given["x"].clone().requires_grad_()),
    "rows": lambda model, given: given.update(x=given["x"][:4]),
    "default dtype": _default,
}


def _outputs(model: Any, change: Change) -> list[torch.Tensor]:
    """Of a call three times, and then after the change."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"x": torch.randn(8, 4), "times": 1.0}
    found = [model(**given) for _ in range(3)]
    changed = change(model, given)
    with changed if isinstance(changed, AbstractContextManager) else nullcontext():
        found.append(model(**given))
    return [getattr(y, "full_tensor", lambda y=y: y)().detach().double() for y in found]


def _pair() -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = Asking()
    copy = Asking()
    copy.load_state_dict(model.state_dict())
    return model, autoshard.compile(copy, autoshard.Mesh({"dp": 2}, hardware="cpu"), like="ddp")


@pytest.mark.slow_cases("mode of a module", "default dtype", "kind of a constant")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_repeated_calls_is_seen(change: str) -> None:
    model, sharded = _pair()
    expected, found = _outputs(model, CHANGES[change]), _outputs(sharded, CHANGES[change])
    for e, f in zip(expected, found, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-5)


def test_a_repeated_call_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    _, sharded = _pair()
    x = torch.randn(8, 4)
    sharded(x), sharded(x)

    def fail(*args: Any) -> None:
        raise AssertionError("it was looked into again")

    monkeypatch.setattr(type(sharded), "_state", fail)
    sharded(torch.randn(8, 4))
    with pytest.raises(AssertionError, match="looked into"):
        sharded(x[:4])


def test_what_takes_every_call_for_the_last_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test of changes."""
    model, sharded = _pair()
    monkeypatch.setattr(ShardedModule, "_call_guard", lambda self, leaves, spec: ())
    expected, found = _outputs(model, CHANGES["mode"]), _outputs(sharded, CHANGES["mode"])
    assert (expected[-1] - found[-1]).abs().max() > 0.1


@pytest.mark.one_graph
def test_what_is_refused_is_refused_after_repeated_calls() -> None:
    _, sharded = _pair()
    x = torch.randn(8, 4)
    for _ in range(3):
        sharded(x)
    for other in (x.to_sparse(), x.to("meta"), torch.nested.nested_tensor([x, x])):
        with pytest.raises(CaptureError):
            sharded(other)
    with pytest.raises(CaptureError, match=r"torch\.func"):
        torch.func.vmap(sharded)(x[None])
    with torch.device("meta"), pytest.raises(CaptureError, match="default device"):
        sharded(x)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    with pytest.raises(CaptureError, match="global module hook"):
        sharded(x)
    handle.remove()
    sharded(x)

"""Quantised weights: frozen tensor subclasses are taken apart into their inner tensors, and those are sharded."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ideal
from torch import Tensor, nn

import autoshard
from autoshard.errors import CaptureError

AXES = {"tp": 2}


class Int8(Tensor):
    """Integers and a scale per row, as torchao's."""

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype, device=q.device)

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale

    @classmethod
    def of(cls, x: Tensor) -> Int8:
        scale = x.detach().abs().amax(1, keepdim=True) / 127
        return cls((x.detach() / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, shape: Any, stride: Any) -> Int8:
        return cls(inner["q"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.q * weight.scale, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default), func
        return cls(*(func(x) for x in (args[0].q, args[0].scale)))


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down = base, nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 4) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return found


def _quantised() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Lora(nn.Linear(8, 16)), nn.Tanh(), Lora(nn.Linear(16, 8))).double()
    for layer in (model[0].base, model[2].base):
        layer.weight = nn.Parameter(Int8.of(layer.weight), requires_grad=False)  # type: ignore[operator,union-attr]
    return model, torch.randn(6, 8, dtype=torch.float64)


def test_adapters_of_quantised_weights_train() -> None:
    model, x = _quantised()
    before = {n: type(p) for n, p in model.named_parameters()}
    inner = "0.base.parametrizations.weight.original"
    hints = {f"{inner}0": autoshard.Shard(0)}
    sharded = autoshard.compile(copy.deepcopy(model), ideal(AXES), (x,), hints=hints)
    assert sharded.parts == ("",)
    assert sharded.plan.cost.flops_per_rank * 2 == sharded.plan.cost.flops
    assert sharded.plan.layouts[f"{inner}0"].axes_with(autoshard.Shard)  # the integers, not a product of them
    assert sharded.state_dict()[f"{inner}0"].dtype == torch.int8
    each = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 0.01) for m in (model, sharded)]
    for _ in range(3):
        for optimizer, module in zip(each, (model, sharded), strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
        gradients = sharded.full_gradients()
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        assert {*gradients} == {*trained}
        for name in trained:
            torch.testing.assert_close(gradients[name], model.get_parameter(name).grad, rtol=1e-9, atol=1e-12)
        for optimizer in each:
            optimizer.step()
    for name in trained:
        torch.testing.assert_close(
            sharded.full_state_dict()[name], model.get_parameter(name).data, rtol=1e-9, atol=1e-12
        )
    assert {n: type(p) for n, p in model.named_parameters()} == before  # the model itself is as it was
    twin = copy.deepcopy(sharded)
    torch.testing.assert_close(twin.eval()(x), model(x), rtol=1e-9, atol=1e-12)


def test_verify_compares_inner_tensors() -> None:
    model, x = _quantised()
    assert autoshard.verify(model[0], ideal(AXES), (x,)).ok
    assert type(model[0].base.weight.data) is Int8  # type: ignore[operator,union-attr]


def test_subclasses_that_train_are_refused() -> None:
    """A step on inner tensors is another step."""
    model, x = nn.Linear(8, 8).double(), torch.randn(4, 8).double()
    model.weight = nn.Parameter(Int8.of(model.weight))
    with pytest.raises(CaptureError, match=r"parameter 'weight' is a Int8 of layout"):
        autoshard.compile(model, ideal(AXES), (x,), parts=None)


def test_tied_weights_stay_tied() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False).double() for _ in range(2)]
    model, x = nn.Sequential(*layers), torch.randn(4, 8, dtype=torch.float64)
    model[0].weight = model[1].weight = nn.Parameter(Int8.of(model[0].weight), requires_grad=False)
    sharded = autoshard.compile(model, ideal(AXES), (x,))
    assert torch.allclose(sharded(x), model(x), rtol=1e-12)
    names = [dict(m.named_parameters()) for m in (sharded[0], sharded[1])]
    assert all(names[0][n] is names[1][n] for n in names[0])


def test_what_cannot_be_taken_apart_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).double()
    model[0].weight = nn.Parameter(Int8.of(model[0].weight), requires_grad=False)
    model.lock = threading.Lock()
    with pytest.raises(
        CaptureError, match=r"cannot be taken apart, as of '0.weight'.*before its weights are quantised"
    ):
        autoshard.compile(model, ideal(AXES), (torch.randn(4, 8, dtype=torch.float64),))

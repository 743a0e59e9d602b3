"""What capture refuses, with the reason and without touching the model."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from capture_models import Model, X, check, ops
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.errors import CaptureError
from autoshard.passes.capture.export import capture

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("float64")


# --- refused


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 7


class Noisy(Double):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


double, noisy = Double.apply, Noisy.apply  # bound at import, as many libraries do


def activation_hook(self: Model, x: torch.Tensor) -> torch.Tensor:
    y = x * self.w
    y.register_hook(lambda g: g * 2)
    return y


def clamp_behind_autograd(self: Model, x: torch.Tensor) -> torch.Tensor:
    y = x * self.w
    with torch.no_grad():
        y.clamp_(-0.1, 0.1)
    return y


def branch(self: Model, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x * self.w
    return x


def own_gradient(self: Model, x: torch.Tensor) -> torch.Tensor:
    y = x * self.w
    return torch.autograd.grad(y.sum(), self.w, create_graph=True)[0]


def seeds(self: Model, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return F.dropout(x * self.w)


def swallowed(self: Model, x: torch.Tensor) -> torch.Tensor:
    try:
        return noisy(x * self.w)  # type: ignore[no-any-return]
    except Exception:
        return x * self.w


def expanded(write: Callable[[torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
    """A forward with ``write``, of a tensor whose rows lie in one place."""

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(4)
        write(y.expand(3, 4))
        return x * self.w + y

    return forward


def overlapping(self: Model, x: torch.Tensor) -> torch.Tensor:
    y = self.lin(x).detach().clone()
    y.unfold(1, 3, 1).add_(1)
    return x * self.w + y


def data_and_buffer(self: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        written = self.buf.data.add_(self.w)
    return x * written + self.buf


def set_by_mask(y: torch.Tensor) -> None:
    y[torch.eye(3, 4, dtype=torch.bool)] = 1.0


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "function": (lambda s, x: noisy(x * s.w), r"custom autograd.Function 'Noisy'.*draws random.*drop its backward"),
    "swallowed": (swallowed, "custom autograd.Function 'Noisy'"),
    "activation hook": (activation_hook, r"test_capture_refused.py:\d+.*a tensor hook \(register_hook\)"),
    "reentrant": (lambda s, x: checkpoint(s.lin, x, use_reentrant=True), "gets no input that requires a gradient"),
    "branch": (branch, r"test_capture_refused.py:\d+.*depends on the values of a tensor \(`if x.sum\(\) > 0:`\)"),
    "range": (lambda s, x: sum(s.w * i for i in range(int(x.sum()))), "depends on the values of a tensor"),
    "list": (lambda s, x: sum(s.w * i for i in x.long().flatten().tolist()[: int(x.sum())]), "values of a tensor"),
    "rounding": (
        lambda s, x: x * s.w * round(x.sum().item()),
        r"capture_models.py:\d+.*round\(\) of a number.*tensor",
    ),
    "loop": (lambda s, x: sum(s.w * i for i in x.nonzero()), "a loop over a tensor of unknown length"),
    "input": (lambda s, x: x.mul_(s.w), r"a value with a gradient in place to its input 'args\[0\]'"),
    "parameter": (lambda s, x: x * s.w.data.mul_(2), "while autograd does not record"),
    "activation": (clamp_behind_autograd, "while autograd does not record"),
    "autograd.grad": (own_gradient, r"torch.autograd.grad\(\) is called in the forward"),
    "written_after_detach": (
        lambda s, x: [y := x * 2, y.detach().add_(s.w), y * s.w][1:],
        "read later without a gradient",
    ),
    "written_in_a_region": (data_and_buffer, "read later without a gradient"),
    "requires_grad": (lambda s, x: (x * s.w).detach().requires_grad_() * 2, "turns requires_grad on"),
    "requires_grad of the input": (lambda s, x: x.requires_grad_() * s.w, "turns requires_grad on for its input"),
    "python random": (lambda s, x: x * s.w * random.random(), "Python's random generator"),
    "numpy random": (lambda s, x: x * s.w * np.random.rand(), "numpy's generator"),
    "seed": (seeds, "torch's generator"),
    "generator": (lambda s, x: x * s.w + torch.rand(4, generator=torch.Generator()), "an object that is not a tensor"),
    "cond": (lambda s, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x * s.w,)), "higher.order op"),
    "filled": (expanded(lambda y: y.fill_(1.0)), r"writes by fill_\(\) to an expanded tensor"),
    "set by a mask": (expanded(set_by_mask), r"writes by __setitem__\(\) to an expanded tensor"),
    "windows": (lambda s, x: overlapping(s, x), r"writes by add_\(\) to an expanded tensor, or to windows"),
    "set to None": (lambda s, x: (s.lin(x), setattr(s, "buf", None))[0], "removes a buffer of the model"),
    "set_ of a buffer": (
        lambda s, x: x * s.buf.set_(s.lin(x).detach()),
        r"calls set_\(\) .* on an input or a tensor of the",
    ),
    "set_ of a storage": (
        lambda s, x: s.lin(x) + torch.empty(4).set_(x.untyped_storage()),
        r"calls set_\(\) with a storage",
    ),
    "initialised": (expanded(lambda y: nn.init.constant_(y[1:], 1.0)), r"writes by constant_\(\) to an expanded"),
    "shape": (lambda s, x: s.lin(x[:, :3]), r"lin \(test_capture_refused.py:\d+\).*RuntimeError"),
}


def set_one(y: torch.Tensor) -> None:
    y[0] = 1.0


CHANGED: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "popped": (lambda given: given.pop(), [X.clone(), X.clone()]),
    "turned round": (lambda given: given.reverse(), [X.clone(), X.exp()]),
    "no result of a program": (lambda given: given.update(n=len), {"n": 1, "x": X.clone()}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_changes_of_an_argument_that_is_not_returned_are_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    change, given = CHANGED[name]

    class Changes(nn.Module):
        def __init__(self, change: Callable[[Any], Any]) -> None:
            super().__init__()
            self.lin, self.change = nn.Linear(4, 4), change

        def forward(self, x: torch.Tensor, given: Any) -> Any:
            self.change(given)
            return self.lin(x)

    with caplog.at_level("WARNING", "autoshard"):
        capture(Changes(lambda given: None), (X, given))
        assert not caplog.text
        capture(Changes(change), (X, given))
    assert "which it does not return: the caller's object stays unchanged" in caplog.text


def test_new_tensors_in_a_new_list_of_an_argument_are_refused() -> None:
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor, given: list[Any]) -> torch.Tensor:
            given[0] = [x.exp()]
            return x * 2

    with pytest.raises(CaptureError, match="puts a new tensor into 0 of its argument 'given'"):
        capture(Nested(), (X,), {"given": [[X.clone()]]})


@pytest.mark.parametrize(
    "write", [lambda y: y[2].fill_(1.0), set_one, lambda y: y[:1].add_(1), lambda y: y[:, :0].add_(1)]
)
def test_writes_into_one_of_an_expanded_tensor_are_followed(write: Callable[[torch.Tensor], Any]) -> None:
    model = Model(expanded(write))
    assert "mul" in str(capture(model, (X.clone(),)))
    torch.testing.assert_close(autoshard.compile(model, {"tp": 2}, (X,))(X), model(X))


@pytest.mark.parametrize(
    "copied",
    [
        lambda w: w[None].expand(2, 4).detach().to(torch.float32),
        lambda w: w.detach().to(w.dtype, copy=True),
        lambda w: w[None].expand(2, 4).detach().contiguous(),
        lambda w: w.detach()[None].expand(2, 4).reshape(8),
        lambda w: torch.zeros(4, dtype=w.dtype).set_(w.detach().clone()),
    ],
)
def test_writes_into_a_copy_of_a_parameter_are_followed(copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def written(self: Model, x: torch.Tensor) -> torch.Tensor:
        mask = copied(self.w)
        mask[0] = 3.0
        return self.lin(x) * mask.sum()

    model = Model(written).double()
    x = X.double()
    torch.testing.assert_close(autoshard.compile(copy.deepcopy(model), {"tp": 2}, (x,))(x), model(x), rtol=1e-9, atol=0)


def test_writes_into_what_may_be_a_parameter_are_refused() -> None:
    def written(self: Model, x: torch.Tensor) -> torch.Tensor:
        mask = self.w.detach().to(self.w.dtype)
        mask[0] = 3.0
        return self.lin(x) * self.w

    with pytest.raises(CaptureError, match="while autograd does not record"):
        capture(Model(written), (X,))


@pytest.mark.slow_cases("list", "range")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason_and_nothing_changed(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    function, message = REFUSED[name]
    model = Model(function)
    state, attributes = copy.deepcopy(model.state_dict()), set(vars(model))
    generator = torch.get_rng_state()
    with pytest.raises(CaptureError, match=message):
        capture(model, (X.clone(),))
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert set(vars(model)) == attributes
    assert not model._forward_hooks
    assert torch.equal(generator, torch.get_rng_state())
    assert Double.forward.__name__ == "forward"
    assert double(X).equal(X * 2)
    assert capfd.readouterr() == ("", "")


def test_refused_hooks_and_tensors_on_the_model() -> None:
    model = Model(lambda s, x: s.lin(x) * s.w)
    handle = model.lin.weight.register_hook(lambda g: g * 2)
    with pytest.raises(CaptureError, match=r"parameter 'lin.weight': it has a tensor hook"):
        capture(model, (X,))
    handle.remove()
    backward = model.lin.register_full_backward_hook(lambda m, i, o: None)
    with pytest.raises(CaptureError, match="lin: it has a module backward hook"):
        capture(model, (X,))
    backward.remove()
    check(model, X)
    model.extra = torch.ones(4, requires_grad=True)
    model.function = lambda s, x: s.lin(x) * s.extra
    with pytest.raises(
        CaptureError, match=r"reads 'extra' of a \w+ .4., which requires a gradient but is not a parameter"
    ):
        capture(model, (X,))
    with pytest.raises(CaptureError, match="has no shape yet"):
        capture(nn.LazyLinear(3), (X,))


def test_hazards_of_the_backward_do_not_matter_in_inference() -> None:
    graph = capture(Model(lambda s, x: double(x * s.w)), (X,), training=False)
    assert ops(graph) == [aten.mul.Tensor, aten.mul.Tensor]


def test_forward_hooks_are_traced() -> None:
    model = Model(lambda s, x: s.lin(x))
    model.lin.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    model.lin.register_forward_hook(lambda m, args, output: output * 2)
    model.register_forward_hook(lambda m, args, output: {"out": output})
    graph = check(model, X)
    assert len(graph.nodes) == 3


def test_a_counter_in_the_forward() -> None:
    """Refused where the next call reads it, in attributes and what lies in them; else it does no harm."""

    def counting(factor: Callable[[int], int]) -> Callable[[Model, torch.Tensor], torch.Tensor]:
        def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
            self.count["calls"] += 1  # type: ignore[index, operator]
            self.last = y = x * self.w  # type: ignore[assignment]
            return y * factor(self.count["calls"])  # type: ignore[index]

        return forward

    model = Model(counting(lambda count: count))
    model.count = {"calls": 0}  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"leaves 'count', 'last' behind in the model.*call the model once before"):
        capture(model, (X,))
    quiet = Model(counting(lambda count: 2 if count < 100 else 3))
    quiet.count = {"calls": 0}  # type: ignore[assignment]
    capture(quiet, (X,))
    assert model.count == quiet.count == {"calls": 0}


def test_control_flow_as_an_operation() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = x * self.w
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"control flow as an operation.*`return torch.cond.*use torch.where"):
        capture(Model(forward), (X,))


def test_layers_that_keep_their_weights_in_cpp() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no kernels for quantised layers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)).eval(), {nn.Linear})
    with pytest.raises(
        CaptureError, match=r"LinearPackedParams '0._packed_params' holds a C\+\+ object.* before it is quantised"
    ):
        capture(model, (torch.randn(2, 4),))

"""float32 parts of float64 models; hand-written derivatives are traced through."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training, double, ideal
from torch import nn

import autoshard
from autoshard.check.verification import UPCAST_RTOL
from autoshard.errors import CaptureError
from autoshard.passes.capture.export import capture
from autoshard.passes.capture.polyfills import autograd_functions


class Island(nn.Module):
    """A norm, a gate and a loss in float32, as many libraries compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 7)
        self.scale = nn.Parameter(torch.rand(32))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.up(x).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.scale.float())
        h = h * torch.sigmoid(h.exp())
        return nn.functional.cross_entropy(self.down(h.to(x.dtype)).float().flatten(0, 1), y.flatten())


def example() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 11, 32), torch.randint(0, 7, (5, 11))


class Rotary(nn.Module):
    """Rotation by complex numbers of heads that lie transposed in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(*x.shape[:2], 4, 8).transpose(1, 2)
        turns = torch.polar(torch.ones(x.shape[1], 4), torch.outer(torch.arange(x.shape[1]), torch.rand(4)))
        pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
        turned = torch.view_as_real(pairs * turns).flatten(3).type_as(x)
        return F.scaled_dot_product_attention(turned, turned, heads).transpose(1, 2).flatten(2)


class Columns(nn.Module):
    """Sums over dims that are not the last, in memory or by name, forward and backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.transpose(0, 2).float()
        h = h * h.sum(0, keepdim=True) + h.mean((0, 1)) + h.contiguous().sum(-1, keepdim=True)
        return (h * (h[:1] + h[:, :1])).transpose(0, 2).to(x.dtype)


class Readers(nn.Module):
    """A value with many readers, of which some can be cut and some cannot."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        for _ in range(3):
            h = h / 3 + h.var(-1, keepdim=True) + (h / 9).exp() * h.mean(-1, keepdim=True) + h.sigmoid() * h.abs()
        return h.to(x.dtype)


class Chunks(nn.Module):
    """Products of batches of matrices, as linear attention computes them, and a power that is no product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.float().view(*x.shape[:2], 4, 8).transpose(1, 2).contiguous() * s for s in (0.3, 0.5, 0.7))
        out = (q @ k.mT).softmax(-1) @ v + (k @ k.mT @ v).abs().add(1).pow(-0.5)
        return out.transpose(1, 2).flatten(2).to(x.dtype)


class Pairs(nn.Module):
    """Two heads that lie transposed in memory: in a chunk of one head nothing says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.view(*x.shape[:2], 2, 16).transpose(1, 2).float()
        h = h * h + h.abs() * h
        h = h * h.mean(-1, keepdim=True).rsqrt()
        h = h + h.sum((0, 2), keepdim=True) / 99 + h.sum((1, 2), keepdim=True) / 99
        return h.transpose(1, 2).reshape(x.shape).to(x.dtype)


class Casts(nn.Module):
    """Values that lie transposed in memory: one cast keeps that, after float64 ops on them, the other does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(*x.shape[:2], 2, 16).transpose(1, 2)
        kept, changed = (heads * heads.abs()).float(), heads.to(torch.float32, memory_format=torch.contiguous_format)
        h = sum(h + h.sum((0, 2), keepdim=True) / 99 + h.sum((1, 2), keepdim=True) / 99 for h in (kept, changed))
        return h.transpose(1, 2).reshape(x.shape).to(x.dtype)  # type: ignore[union-attr]


class Traced(nn.Module):
    """Another algorithm for tracers, as libraries have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h.exp().sum(-1, keepdim=True).log() if torch.compiler.is_exporting() else h.logsumexp(-1, keepdim=True)
        return x * h.to(x.dtype)


class Between(nn.Module):
    """An island between float64 layers."""

    def __init__(self, island: nn.Module) -> None:
        super().__init__()
        self.up, self.island, self.down = nn.Linear(32, 32), island, nn.Linear(32, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h + self.island(h)).square().mean()


ISLANDS = (Rotary, Columns, Readers, Chunks, Pairs, Casts, Traced)


def between(island: type[nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    return Between(island()).double(), torch.randn(6, 11, 32, dtype=torch.float64)


@pytest.mark.parametrize("island", ISLANDS, ids=lambda island: island.__name__)
def test_kinds_of_islands_agree_in_float64(island: type[nn.Module]) -> None:
    model, x = between(island)
    report = assert_equal_training(model, {"dp": 2, "tp": 2}, (x,), steps=1)
    assert report.plan.cost.flops_per_rank < 0.4 * report.plan.cost.flops
    assert not {"float32", "complex64"}.intersection(report.plan.dtypes.values())


@pytest.mark.slow_cases("{'tp': 3}")
@pytest.mark.parametrize("axes", [{"tp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_a_model_as_it_is_agrees_to_single_precision(axes: dict[str, int]) -> None:
    """With a plan, which names its casts. Negative control: it does not agree to double precision."""
    model, args = Island().double(), double(example())
    plan = autoshard.plan(model, ideal(axes), args)
    report = autoshard.verify(model, ideal(axes), args, plan=plan)
    assert report.ok, str(report)
    assert report.rtol == UPCAST_RTOL == 1e-6
    assert not autoshard.verify(model, ideal(axes), args, plan=plan, rtol=1e-9).ok
    assert assert_equal_training(model, axes, args, steps=1).rtol == 1e-9


class Fixed(nn.Module):
    """Multiplies by a table that stays float32, which no float64 operand fits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.table = nn.Linear(32, 32), [torch.randn(32, 32)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.up(x).float() @ self.table[0]).to(x.dtype)


def test_a_model_that_does_not_run_in_float64_is_verified_as_it_is() -> None:
    report = autoshard.verify(Fixed().double(), ideal({"tp": 2}), (torch.randn(6, 32, dtype=torch.float64),))
    assert report.ok, str(report)
    assert report.rtol == UPCAST_RTOL


def test_eagers_program_is_traced() -> None:
    model, x = between(Traced)
    assert torch.ops.aten.logsumexp.default in {node.op for node in capture(model, (x,)).nodes}


def test_what_only_the_tracers_program_can_do_is_traced_with_it() -> None:
    class Checked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling() and bool((x > 1e9).any()):
                raise ValueError("too large")
            return x.square().mean()

    assert_equal_training(Checked(), {"tp": 2}, (torch.randn(6, 4, requires_grad=True),))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class Activated(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.up, self.down = function, nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.function.apply(self.up(x))).square().mean()
        return y


def test_a_librarys_backward_that_is_the_derivative_is_traced_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd_functions, "_is_library_function", lambda function: True)
    assert_equal_training(Activated(Cube), {"tp": 2}, (torch.randn(4, 8),), share=1.05)
    # operands that are too large are tried out smaller
    monkeypatch.setattr(autograd_functions, "MAX_TRIAL_ELEMENTS", 1)
    monkeypatch.setattr(autograd_functions, "MAX_KEPT_LENGTH", 2)
    for function, whole in ((Cube, False), (StraightThrough, True)):
        plan = autoshard.plan(Activated(function), {"tp": 2}, (torch.randn(4, 8),))
        assert whole == any(choice.op == "autoshard.function.default" for choice in plan.choices.values())


class Halves(torch.autograd.Function):
    """Two results, arguments that are no tensors, and a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, options: dict[str, float], flip: bool) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.scale = options["scale"]
        ctx.save_for_backward(x)
        return x.clamp(-1, 1), -x if flip else x * 1

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return ctx.scale * first + x * second, None, None


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


class Twice(Activated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.function.apply(self.up(x), {"scale": 0.5}, True)
        y: torch.Tensor = self.down(first * second).square().mean()
        return y


@pytest.mark.parametrize("model", [Activated(StraightThrough), Twice(Halves)], ids=["one", "two"])
@pytest.mark.parametrize("axes", [{"tp": 3}, {"dp": 2, "tp": 2}])
def test_a_librarys_other_backward_runs_as_an_op(
    model: nn.Module, axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd_functions, "_is_library_function", lambda function: True)
    report = assert_equal_training(model, axes, (torch.randn(4, 8),))
    assert any(choice.op == "autoshard.function.default" for choice in report.plan.choices.values())


class FusedHead(torch.autograd.Function):
    """A head and its loss in chunks of rows, whose gradients the forward takes itself and keeps, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        of_x, of_weight, loss = torch.empty_like(x), torch.zeros_like(weight), x.new_zeros(())
        count = (labels != -100).sum()
        for rows in torch.arange(len(x)).split(3):
            with torch.enable_grad():
                h, w = x[rows].detach().requires_grad_(), weight.detach().requires_grad_()
                part = F.cross_entropy(F.linear(h, w), labels[rows], reduction="sum") / count
                of_x[rows], step = torch.autograd.grad(part, (h, w))
            of_weight += step
            loss += part.detach()
        ctx.save_for_backward(of_x, of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return *(grad * x for x in ctx.saved_tensors), None


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 12), nn.Linear(12, 7, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 2 * FusedHead.apply(self.up(x).relu(), self.head.weight, labels)  # type: ignore[no-any-return]


@pytest.mark.parametrize("library", [True, False])
def test_a_forward_that_takes_gradients_itself(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd_functions, "_is_library_function", lambda function: library)
    labels = torch.tensor([0, 3, -100, 6, 1, -100, 2, 2])
    x = torch.randn(8, 8)
    report = assert_equal_training(Headed(), {"dp": 2, "tp": 2}, (x, labels))
    assert any(choice.op == "autoshard.function.default" for choice in report.plan.choices.values())
    model = Headed()
    with torch.no_grad():
        found = autoshard.compile(copy.deepcopy(model), {"tp": 2}, (x, labels))(x, labels)
        torch.testing.assert_close(found, model(x, labels))


@pytest.mark.parametrize("library", [True, False])
def test_any_other_backward_is_refused(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    function = Noise
    monkeypatch.setattr(autograd_functions, "_is_library_function", lambda function: library)
    with pytest.raises(CaptureError, match=rf"'{function.__name__}'.*drop its backward"):
        autoshard.plan(Activated(function), {"tp": 2}, (torch.randn(4, 8),))
    Activated(function)(torch.randn(4, 8)).backward()  # the function is as it was
    assert function.apply.__self__ is function

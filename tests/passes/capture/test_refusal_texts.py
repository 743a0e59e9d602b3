"""What a refusal of a trace says: the reason and the way out, not what PyTorch says of its own tracing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.ao.quantization as quantization
from harness import assert_equal_training
from torch import Tensor, nn

import autoshard
from autoshard import CaptureError

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Calls(nn.Module):
    """A linear layer, and what a forward does with its output."""

    def __init__(self, then: Callable[[nn.Linear, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.then = nn.Linear(8, 4), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.up, self.up(x), x)


def compiled(model: nn.Module) -> autoshard.ShardedModule:
    return autoshard.compile(model, {"tp": 2}, (X,))


def loss(layer: nn.Linear, x: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda weight: nn.functional.linear(x, weight).square().sum()


def saved(y: Tensor) -> Tensor:
    torch.save(y.detach(), io.BytesIO())
    return y.sum()


VALUES = "passes the values of a tensor to NumPy, SciPy, another library or a file .*outside the compiled module"
NUMBER = "returns a number that it reads from a tensor .*Return the tensor"
TRANSFORM = "tensors of the model with torch.func .*Compute the gradient outside"
TEXTS: dict[str, tuple[Callable[[nn.Linear, Tensor, Tensor], Any], str]] = {
    "numpy": (lambda _, y, x: y[torch.as_tensor(y.detach().numpy().argmin(0))].sum(), VALUES),
    "asarray": (lambda _, y, x: y[torch.as_tensor(np.asarray(y.detach()).argmin(0))].sum(), VALUES),
    "dlpack": (lambda _, y, x: y.sum() + torch.from_dlpack(y.detach()).sum(), VALUES),
    "pickle": (lambda _, y, x: y.sum() * len(pickle.dumps(y.detach())), VALUES),
    "save": (lambda _, y, x: saved(y), VALUES),
    "item in a dictionary": (lambda _, y, x: (y.sum(), {"loss": y.sum().item()}), NUMBER),
    "float": (lambda _, y, x: {"all": y.sum(), "of": [float(y.sum())]}, f"{NUMBER}|depends on the values"),
    "tolist": (lambda _, y, x: (y.sum(), y.argmax(-1).tolist()), NUMBER),
    "text": (lambda _, y, x: (y.sum(), f"{y.sum().item():.3f}"), "formats the value of a tensor as text"),
    "grad": (lambda up, y, x: y.sum() + torch.func.grad(loss(up, x))(up.weight).sum(), TRANSFORM),
    "jvp": (lambda up, y, x: y.sum() + torch.func.jvp(loss(up, x), (up.weight,), (up.weight,))[1], TRANSFORM),
    "vjp": (lambda up, y, x: y.sum() + torch.func.vjp(loss(up, x), up.weight)[1](y.sum())[0].sum(), TRANSFORM),
}


@pytest.mark.one_graph
@pytest.mark.slow_cases("float")
@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str) -> None:
    then, told = TEXTS[name]
    with pytest.raises(CaptureError, match=told) as caught:
        compiled(Calls(then))
    assert "test_refusal_texts.py:" in str(caught.value)
    assert caught.value.__cause__ is not caught.value
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0  # else every later call would be refused
    assert torch.func.jvp(torch.sin, (X,), (X,))[1].equal(X.cos() * X)  # of a later call nothing is left open, either
    with torch.autograd.forward_ad.dual_level():
        pass


class Fused(torch.autograd.Function):
    """Computes its gradient in the forward, by an operation that needs values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(2 * x / x.numel() * (1 if x.detach().sum().item() > -1e9 else 2))
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.saved_tensors[0] * grad  # type: ignore[no-any-return]


@pytest.mark.one_graph
def test_why_a_function_cannot_be_kept() -> None:
    with pytest.raises(
        CaptureError, match=r"does not run on tensors without values \(test_refusal_texts.py:\d+: RuntimeError"
    ):
        compiled(Calls(lambda _, y, x: Fused.apply(y)))


@pytest.mark.one_graph
@pytest.mark.parametrize("how", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
@pytest.mark.parametrize("place", ["buffer", "attribute", "closure"])
def test_sparse(how: str, place: str) -> None:
    sparse = getattr(torch.eye(4), how)()
    model = Calls(lambda _, y, x: torch.sparse.mm(getattr(model, "a", sparse), y).sum())
    if place == "buffer":
        model.register_buffer("a", sparse)
    elif place == "attribute":
        model.a = sparse
    with pytest.raises(
        CaptureError, match="reads (it|a sparse tensor).*Convert it first" if place == "closure" else "'a'"
    ):
        compiled(model)


def observed() -> nn.Module:
    model = nn.Sequential(quantization.QuantStub(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    return quantization.prepare_qat(model)  # type: ignore[no-any-return]


class Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_observers_of_rows() -> None:
    """Their first call resizes buffers; the control has had that call."""
    model = Mean(observed())
    with pytest.raises(CaptureError, match=r"inner\.1\.weight_fake_quant.*call the model once before compiling"):
        compiled(copy.deepcopy(model))
    model(X)
    sharded, plain = compiled(copy.deepcopy(model)), model
    for step in range(2):
        for each in (plain, sharded):
            each.zero_grad()
            each(X * (step + 1)).backward()
    gradients = sharded.full_gradients()
    assert all(torch.allclose(gradients[n], p.grad) for n, p in plain.named_parameters())  # type: ignore[arg-type]
    state = sharded.full_state_dict()
    assert all(torch.allclose(state[n].float(), x.float()) for n, x in plain.state_dict().items())


def test_what_is_not_refused() -> None:
    """The control: a transform of no tensor of the model, and numbers that stay inside."""
    assert_equal_training(
        Calls(lambda up, y, x: y.square().mean() + torch.vmap(lambda row: up(row).square().sum())(x).mean()),
        {"tp": 2},
        (X,),
        share=1.5,
    )

"""Tensors that a module holds as plain attributes: constants of every program that is compiled from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import ideal
from torch import nn

import autoshard
from autoshard import CaptureError
from autoshard.passes.capture.refusals.aliasing import check_apart
from autoshard.passes.capture.specialization.model_state import state_before_call


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mask = torch.arange(8.0)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x) * self.mask)


def test_every_program_knows_them(float64: None, close: Any) -> None:
    model = Masked()
    sharded = autoshard.compile(model, ideal({"tp": 2}), (torch.randn(4, 8),))
    for rows, training in ((4, True), (6, True), (4, False), (5, False)):  # new shapes, and the other mode
        x = torch.randn(rows, 8)
        for module in (model, sharded):
            module.train(training)
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        found = sharded(x)
        close(found.detach(), expected.detach())
        for output, module in ((expected, model), (found, sharded)):
            module.zero_grad()
            output.square().sum().backward()
        close(sharded.full_gradients()["linear.weight"], model.linear.weight.grad)
    assert len(sharded.programs) >= 4


def test_of_a_tensor_parallel_program_they_are_cut(float64: None, close: Any) -> None:
    model, x = Masked().eval(), torch.randn(4, 8)
    sharded = autoshard.compile(model, ideal({"tp": 2}), (x,), hints={"linear": "colwise"})
    close(sharded(x).detach(), model(x).detach())
    assert sharded.plan.cost.flops_per_rank == sharded.plan.cost.flops / 2


POSITIONS: dict[int, torch.Tensor] = {}
LAST: torch.Tensor | None = None
LINES: dict[str, list[object]] = {}


class Proxy:
    """As those of web frameworks outside of a request."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("there is no request")


PROXY = Proxy()


class Cached(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global LAST
        length = x.shape[-1]
        if length not in POSITIONS:
            POSITIONS[length] = torch.arange(length).to(x.dtype)
        LAST = POSITIONS[length]
        return super().forward(x) + POSITIONS[length]


@pytest.mark.one_graph
def test_tensors_of_a_trace_do_not_stay_in_globals(float64: None, close: Any) -> None:
    """As is said in the refusal: after a call of the model there is a cache, and the model is compiled."""
    model, x = Cached(8, 8), torch.randn(4, 8)
    with pytest.raises(CaptureError, match=r"leaves '\w+\.POSITIONS', '\w+\.LAST' behind .*call the model once before"):
        autoshard.compile(model, ideal({"tp": 2}), (x,))
    assert not POSITIONS
    assert LAST is None
    expected = model(x)
    close(autoshard.compile(model, ideal({"tp": 2}), (x,))(x), expected)


def test_large_globals_are_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set in lists of lists would take seconds; proxies that have no attributes now are left alone."""
    monkeypatch.setitem(LINES, "words", [list(range(20_000)) for _ in range(100)])
    monkeypatch.setitem(LINES, "ends", list(range(100)))
    found = next(contents for _, place, _, contents in state_before_call(Cached(8, 8)) if "LINES" in vars(place))
    words, ends = (dict(found["LINES"])[name] for name in LINES)
    assert len(words) == len(ends) == 100
    assert not any(isinstance(line, tuple) for line in words)
    assert ends[99] == (int, "99")
    assert "PROXY" in found


@pytest.mark.slow_cases("spectral_norm")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_a_hook_makes_of_parameters(norm: Any, close: Any) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(norm(nn.Linear(8, 8)), nn.ReLU()).double()  # the attribute stays in float32

    model, x = made(), torch.randn(4, 8, dtype=torch.float64)
    sharded = autoshard.compile(made(), ideal({"tp": 2}), (x,))
    for training in (True, True, False):
        for module in (model, sharded):
            module.zero_grad()
            module.train(training)
        expected, found = model(x), sharded(x)
        close(found.detach(), expected.detach())
        for output in (expected, found):
            output.square().sum().backward()
        close(sharded.full_gradients(), {n: p.grad for n, p in model.named_parameters()})
    close(sharded.full_state_dict(), model.state_dict())


class Shared(nn.Module):
    """A tensor in the memory of the weight, or of a buffer, and what the forward does with it."""

    def __init__(self, where: str, does: str) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(8, 8), does
        self.register_buffer("sums", torch.zeros(8))
        of = self.sums if does == "writes" else self.linear.weight
        if where == "attribute":
            self.part = of[:4].detach()
        else:
            self.register_buffer("part", of.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.does == "writes":
            self.sums.add_(1.0)
        y = self.linear(x)
        return y if self.does == "nothing" else y + self.part.sum()


@pytest.mark.one_graph
@pytest.mark.parametrize("where", ["attribute", "buffer"])
@pytest.mark.parametrize(
    ("does", "text"),
    [
        (
            "reads",
            r"reads (buffer|constant) 'part', which shares memory with parameter 'linear.weight'.* clone\(\)",
        ),
        ("writes", r"writes to tensors of the model that share memory, 'sums' and 'part'"),
    ],
)
def test_shared_memory_is_refused(where: str, does: str, text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        autoshard.compile(Shared(where, does), ideal({"tp": 2}), (torch.randn(4, 8),))


def test_parameters_in_one_memory_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9, bias=False))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(CaptureError, match=r"parameter '1.weight' shares memory with parameter '0.weight'"):
        autoshard.compile(model, ideal({"tp": 2}), (torch.arange(4),))
    model[1].weight = model[0].weight
    autoshard.compile(model, ideal({"tp": 2}), (torch.arange(4),))


def test_columns_of_one_matrix_are_parameters_apart() -> None:
    model, whole = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)), torch.randn(8, 8)
    for layer, part in zip(model, (whole[:, :4], whole[:, 4:]), strict=True):
        layer.weight = nn.Parameter(part)  # type: ignore[assignment]
    check_apart(model)
    model[1].weight = nn.Parameter(whole.flatten()[16:48].view(8, 4))  # type: ignore[assignment]
    model[0].weight = nn.Parameter(whole.flatten()[:32].view(8, 4))  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"parameter '1.weight' shares memory with parameter '0.weight'"):
        check_apart(model)


def test_shared_memory_that_nobody_reads_does_no_harm(close: Any) -> None:
    model, x = Shared("buffer", "nothing"), torch.randn(4, 8)
    close(autoshard.compile(model, ideal({"tp": 2}), (x,))(x).detach(), model(x).detach(), 1e-6)


def test_a_buffer_beside_a_parameter_in_one_storage_is_read(close: Any) -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(16)
            self.weight = nn.Parameter(flat[:8])
            self.register_buffer("scale", flat[8:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight * self.scale

    model, x = Beside(), torch.randn(4, 8)
    close(autoshard.compile(model, ideal({"tp": 2}), (x,))(x).detach(), model(x).detach(), 1e-6)


class Leaving(nn.Module):
    """Its first call takes a module away that holds such a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.once = nn.Linear(8, 8), Masked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.once.mask
        del self.once
        return y


def test_a_module_that_the_forward_takes_away() -> None:
    model, x = Leaving(), torch.randn(4, 8)
    sharded = autoshard.compile(model, ideal({"tp": 2}), (x,))
    assert hasattr(model, "once")
    torch.testing.assert_close(sharded(x), model(x))

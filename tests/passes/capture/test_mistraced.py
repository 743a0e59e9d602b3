"""Functions of which a trace of torch loses something: captured whole, and equal to one device."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from capture_models import text
from harness import assert_equal_training, double, ideal
from sample_makers import f
from torch import nn

import autoshard
from autoshard.passes.capture.export import capture
from autoshard.passes.capture.polyfills.torch_functions import POLYFILLS


class First(nn.Module):
    """The sequence that a recurrent network gives, and its last states."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, state = self.network(x)
        return y, state if isinstance(state, torch.Tensor) else state[0] + state[1].sum(-1, keepdim=True)


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 5, 3, dropout=0.3, bidirectional=True, batch_first=True),
    "lstm with a projection": lambda: nn.LSTM(4, 5, 2, dropout=0.3, proj_size=3),
    "gru without biases": lambda: nn.GRU(4, 5, 2, dropout=0.3, bias=False),
    "rnn": lambda: nn.RNN(4, 5, 2, dropout=0.3, nonlinearity="relu", bidirectional=True),
    "one layer": lambda: nn.GRU(4, 5),
}


@functools.cache
def recurrent(name: str) -> nn.Module:
    return First(RECURRENT[name]())


@pytest.mark.slow_cases(
    "lstm-{'x': 3}", "lstm with a projection-*", "gru without biases-*", "lstm-{'x': 2}", "rnn-{'x': 3}", "one layer-*"
)
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 3}], ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_dropout_between_recurrent_layers(name: str, axes: dict[str, int]) -> None:
    assert_equal_training(recurrent(name), axes, (f(3, 4, 4),))


@pytest.mark.slow
def test_of_one_sequence_without_a_batch() -> None:
    assert_equal_training(First(RECURRENT["lstm"]()), {"x": 2}, (f(3, 4),))


class Counting(nn.GRU):
    calls = 0

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        return super().forward(x, state)


@pytest.mark.parametrize(("kind", "traces"), [(nn.GRU, 1), (Counting, 2)])
def test_lists_of_their_own_parameters_are_nothing_that_a_call_leaves(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.GRU], traces: int
) -> None:
    found = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: found.append(1) or export(*args, **kwargs))
    capture(First(kind(4, 5)).double(), (f(3, 4, 4),))
    assert len(found) == traces


def test_verify_sees_dropout_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(POLYFILLS, torch.gru)
    model = First(RECURRENT["gru without biases"]()).double()
    assert not autoshard.verify(model, ideal({"x": 2}), double((f(3, 4, 4),))).ok


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (3, 4, 5, 6)),
    "instance norm of one sample": (lambda: nn.InstanceNorm1d(5, track_running_stats=True, momentum=0.3), (5, 6)),
    "no running statistics": (lambda: nn.InstanceNorm1d(5, affine=True), (2, 5, 6)),
    "cumulative batch norm": (lambda: nn.BatchNorm1d(4, momentum=None), (6, 4)),
    "batch norm": (lambda: nn.BatchNorm2d(4), (3, 4, 2, 2)),
}


@functools.cache
def normed(name: str, train: bool) -> nn.Module:
    make, (*_, width) = NORMS[name]
    # no bias in front and no plain squares behind: their gradients through a norm are noise, which AdamW magnifies
    return nn.Sequential(nn.Linear(width, width, bias=False), make(), nn.Softplus()).train(train)


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 3}, {"a": 2, "b": 2}], ids=str)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics(name: str, axes: dict[str, int], train: bool) -> None:
    assert_equal_training(normed(name, train), axes, (f(*NORMS[name][1]),))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_computed_in_hooks() -> None:
    """The old weight norms leave an attribute that has a gradient."""
    old = nn.utils.weight_norm(nn.Linear(6, 7)), nn.Tanh(), nn.utils.weight_norm(nn.Linear(7, 6), dim=None)
    model = nn.Sequential(*old, nn.Tanh(), nn.utils.spectral_norm(nn.Linear(6, 5)), nn.Tanh()).double()
    model(f(4, 6))
    assert_equal_training(model, {"x": 3}, (f(4, 6),))


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.linear(z.real) * self.linear(z.imag).tanh() + z.abs().sum()


def test_complex_inputs() -> None:
    assert_equal_training(Parts(), {"x": 3}, (torch.complex(f(4, 6), f(4, 6).flip(0)),))


def test_text_of_running_statistics() -> None:
    assert (
        text(nn.InstanceNorm1d(3, track_running_stats=True), torch.randn(2, 3, 4))
        == """\
instance_norm = aten.instance_norm.default(input, None, None, None, None, True, 0.1, 1e-05, False)
var_mean_0, var_mean_1 = aten.var_mean.dim(input, [2])
mul = aten.mul.Tensor(b_running_mean, 0.9)
mean = aten.mean.dim(var_mean_1, [0])
mul_1 = aten.mul.Tensor(mean, 0.1)
add = aten.add.Tensor(mul, mul_1)
mul_2 = aten.mul.Tensor(b_running_var, 0.9)
mean_1 = aten.mean.dim(var_mean_0, [0])
mul_3 = aten.mul.Tensor(mean_1, 0.1)
add_1 = aten.add.Tensor(mul_2, mul_3)
return instance_norm
running_mean ← add
running_var ← add_1"""
    )


@pytest.mark.slow
def test_a_frozen_collector_hides_nothing() -> None:
    """``gc.freeze()`` takes torch's functions out of the collector's sight; scripts call it before they fork workers."""
    gc.collect()
    gc.freeze()  # and so it stays: see freeze_imports
    assert_equal_training(copy.deepcopy(normed("cumulative batch norm", True)), {"x": 2}, (f(6, 4),))


class Dropped(nn.Module):
    """Writes into what a dropout gave: in evaluation that is its operand."""

    def __init__(self, kind: type[nn.Module], p: float) -> None:
        super().__init__()
        self.drop = kind(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        self.drop(h).add_(x)
        return h


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout])
@pytest.mark.parametrize(("p", "train"), [(0.4, False), (0.0, True), (0.4, True)])
def test_a_dropout_that_drops_nothing_gives_its_operand(kind: type[nn.Module], p: float, train: bool) -> None:
    model, x = Dropped(kind, p).train(train), torch.randn(2, 4, 6, dtype=torch.float64)
    sharded = autoshard.compile(model, ideal({"tp": 2}), (x,))
    expected, found = seeded(lambda: model(x)), seeded(lambda: sharded(x))
    assert torch.equal(found, expected)
    assert torch.equal(found, x * (2 if train and p else 3))


DROPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "alpha": lambda x: F.alpha_dropout(x, 0.4, True),
    "in place": lambda x: F.dropout(x, 0.4, True, True),
    "alpha in place": lambda x: F.alpha_dropout(x, 0.4, True, True),
    "features in place": lambda x: F.dropout2d(x, 0.4, True, True),
    "torch's in place": lambda x: torch.dropout_(x, 0.4, True),
    "of a view": lambda x: (F.dropout(x[:, 1:3], 0.4, True, True), x)[1],
    "drawn in place": lambda x: x * torch.empty_like(x).bernoulli_(0.4),
    "drawn": lambda x: x * torch.bernoulli(x.detach(), 0.4),
}


class Drawing(nn.Module):
    """A draw for each element of a convolution's result with the channels last in memory, and one after it."""

    def __init__(self, drop: str) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(4, 6, 3), drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = DROPS[self.drop](self.conv(x) * 2)
        return y * torch.rand_like(y)


@pytest.mark.parametrize("drop", DROPS)
def test_draws_in_place_take_the_numbers_of_eager(drop: str) -> None:
    """One for each element, in the order of the elements in memory."""
    model = Drawing(drop).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = f(4, 4, 6, 6).to(memory_format=torch.channels_last)
    assert_equal_training(model, {"tp": 2}, (x,), share=1)


LAID: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch norm in evaluation": lambda x: F.batch_norm(x, x.new_zeros(4), x.new_ones(4)),
    "logsigmoid": lambda x: nn.LogSigmoid()(x),
    "rrelu": lambda x: F.rrelu(x),
    "one-hot": lambda x: F.one_hot((x[0] > 0).long(), 2) * x.sum(),
    "rolled": lambda x: torch.roll(x, 1, 1),
    "rolled by its method": lambda x: x.roll(1, 1),
    "shuffled": lambda x: F.channel_shuffle(x, 2),
}
LYING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "turned": lambda x: x.transpose(2, 3),
}


class Laid(nn.Module):
    """Draws like the result of a function, whose memory order is its own."""

    def __init__(self, laid: str, lying: str) -> None:
        super().__init__()
        self.linear, self.laid, self.lying = nn.Linear(6, 6), laid, lying

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = LAID[self.laid](LYING[self.lying](self.linear(x)))
        return F.dropout(y, 0.4) * torch.rand_like(y)


@pytest.mark.parametrize("lying", LYING)
@pytest.mark.parametrize("laid", LAID)
def test_draws_follow_the_memory_order_of_eager_results(laid: str, lying: str) -> None:
    model, x = Laid(laid, lying).double(), f(4, 4, 6, 6)
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"tp": 2}), (x,))
    assert torch.allclose(seeded(lambda: sharded(x)), seeded(lambda: model(x)), rtol=1e-12, atol=1e-12)


def test_dropout_in_place_is_dropout() -> None:
    """A byte is kept for each element, and its mask can be drawn again."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4, inplace=True), nn.Linear(6, 4))
    sharded = autoshard.compile(model, ideal({"tp": 2}), (torch.randn(2, 4),))
    assert [c.op for c in sharded.plan.choices.values()].count("aten.dropout.default") == 1


def seeded(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(0)
    return call()


class Into(nn.Module):
    """A reduction into a tensor of another dtype: fresh, and a view of a buffer."""

    def __init__(self, reduce: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.reduce, self.linear = reduce, nn.Linear(4, 4)
        self.register_buffer("kept", torch.zeros(4, 3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fresh = torch.empty(4, dtype=self.kept.dtype)  # type: ignore[arg-type]
        self.reduce(x.detach(), 0, out=fresh)
        self.reduce(x.detach(), 0, out=self.kept[:, 1])  # type: ignore[index]
        return self.linear(x) * fresh + self.kept.sum(1)  # type: ignore[operator]


INTO: dict[str, tuple[Callable[..., torch.Tensor], torch.dtype, torch.Tensor]] = {
    "sum of fractions": (torch.sum, torch.int64, 3 * f(6, 4)),
    "product of fractions": (torch.prod, torch.int64, 3 * f(6, 4)),
    "sum of half": (torch.nansum, torch.float64, (9e3 * f(6, 4)).half()),
    "mean of half": (torch.nanmean, torch.float64, (9e3 * f(6, 4)).half()),
    "variance of half": (torch.var, torch.float64, (9e2 * f(6, 4)).half()),
    "deviation of half": (torch.std, torch.float64, (9e2 * f(6, 4)).half()),
}


def into(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Given, expected."""
    reduce, dtype, x = INTO[name]
    model = Into(reduce, dtype).double()
    model.kept = model.kept.to(dtype)  # type: ignore[operator]
    model.linear = nn.Linear(4, 4).to(x.dtype)
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"x": 2}), (x,))
    return sharded(x), model(x)


@pytest.mark.parametrize("name", INTO)
def test_reductions_into_another_dtype(name: str) -> None:
    torch.testing.assert_close(*into(name), rtol=1e-9, atol=0)


def test_reductions_into_another_dtype_as_torch_traces_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(POLYFILLS, torch.sum)
    given, expected = into("sum of fractions")
    assert not torch.allclose(given, expected)

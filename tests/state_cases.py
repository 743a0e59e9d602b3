"""What users change between calls of a sharded module, each against the unsharded model: in one process and under gloo.

Every case takes a mesh of two ranks and raises where the two differ. Run by test_states.py and training_worker.py.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard import CaptureError

Case = Callable[[autoshard.Mesh], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Block(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A tied head, dropout, and a batch norm: modes, flags and written buffers all count."""

    def __init__(self, p: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Block(8, p) for _ in range(2))
        self.bn = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.bn(x.flatten(0, 1)))
        return F.cross_entropy(logits, ids.flatten().roll(1)), logits


def ids(rows: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 12, (rows, 3), generator=torch.Generator().manual_seed(seed))


def pair(
    mesh: autoshard.Mesh, make: Callable[[], nn.Module], *args: Any, train: bool = True, **options: Any
) -> tuple[nn.Module, Any]:
    """The unsharded model in float64 and the same sharded, compiled for ``args``."""
    torch.manual_seed(0)
    model = make().double().train(train)
    return model, autoshard.compile(copy.deepcopy(model), mesh, args, **options)


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def close(given: Any, expected: Any, what: str = "", rtol: float = 1e-9) -> None:
    given, expected = full(given).detach(), full(expected).detach()
    assert given.dtype == expected.dtype, f"{what}: {given.dtype}, not {expected.dtype}"
    torch.testing.assert_close(given, expected, rtol=rtol, atol=rtol * float(expected.abs().max()) + 1e-300, msg=None)


def same_gradients(sharded: Any, model: nn.Module, rtol: float = 1e-9) -> None:
    """Of the same parameters, and the same on every rank: each rank compares with the unsharded model's."""
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    given = sharded.full_gradients()
    assert given.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, g in expected.items():
        assert given[name].dtype == g.dtype
        torch.testing.assert_close(given[name], g, rtol=rtol, atol=rtol * largest, msg=lambda m, n=name: f"{n}: {m}")


def same_state(sharded: Any, model: nn.Module, rtol: float = 1e-9) -> None:
    given = sharded.full_state_dict()
    for name, t in model.state_dict().items():
        torch.testing.assert_close(given[name], t, rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def steps(model: nn.Module, sharded: Any, *batches: Any, seed: int = 0) -> None:
    """A step of SGD with momentum on every batch: loss, gradients, weights and buffers agree."""
    pairs = (model, torch.optim.SGD(model.parameters(), 0.1, 0.9)), (sharded, torch.optim.SGD(sharded.parameters(), 0.1, 0.9))
    for batch in batches:
        losses = []
        for module, optimizer in pairs:
            torch.manual_seed(seed)
            optimizer.zero_grad()
            losses.append(full(module(batch)[0]))
            losses[-1].backward()
        close(losses[1], losses[0], "loss")
        same_gradients(sharded, model)
        for _, optimizer in pairs:
            optimizer.step()
        same_state(sharded, model)


def both(model: nn.Module, sharded: Any, change: Callable[[Any], Any]) -> None:
    for module in (model, sharded):
        change(module)


@contextlib.contextmanager
def refused(text: str, error: type[Exception] = CaptureError) -> Iterator[None]:
    with pytest.raises(error, match=text):
        yield


# --- requires_grad ---


def only_the_head(module: Any) -> None:
    for name, p in module.named_parameters():
        p.requires_grad_(name.startswith("head.bias") or name.startswith("bn"))


@case
def frozen_but_for_the_head_and_unfrozen(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids())
    layouts = {n: sharded.plan.layouts[n] for n, _ in model.named_parameters()}
    steps(model, sharded, ids())
    both(model, sharded, only_the_head)
    both(model, sharded, lambda m: m.zero_grad())
    steps(model, sharded, ids(seed=1), ids(rows=5, seed=2))  # a shape that is first seen frozen
    both(model, sharded, lambda m: m.requires_grad_(True))
    steps(model, sharded, ids(seed=3), ids(rows=5, seed=4), ids(rows=3, seed=5))
    for name, layout in layouts.items():  # R and I hold the same
        assert sharded.plan.layouts[name].to_torch() == layout.to_torch(), name
    programs = len(sharded.programs)
    both(model, sharded, only_the_head)
    both(model, sharded, lambda m: m.zero_grad())
    steps(model, sharded, ids(seed=6))
    assert len(sharded.programs) == programs, "a state that was seen is compiled for again"


@case
def frozen_from_the_beginning(mesh: autoshard.Mesh) -> None:
    def make() -> nn.Module:
        net = Net(tied=False)
        only_the_head(net)
        return net

    model, sharded = pair(mesh, make, ids())
    steps(model, sharded, ids())
    both(model, sharded, lambda m: m.requires_grad_(True))
    steps(model, sharded, ids(seed=1), ids(rows=3))


@case
def all_frozen_records_nothing(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids())
    sharded.requires_grad_(False)
    loss, logits = sharded(ids())
    assert not loss.requires_grad
    assert type(logits) is torch.Tensor  # nothing is recorded, so it is gathered
    assert not sharded.plan.training
    close(loss, model(ids())[0])


@case
def frozen_between_forward_and_backward(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids())
    for module in (model, sharded):
        loss = full(module(ids())[0])
        dict(module.named_parameters())["layers.0.up.weight"].requires_grad_(False)
        loss.backward()
    same_gradients(sharded, model)


# --- modes ---


@case
def modes_of_parts(mesh: autoshard.Mesh) -> None:
    """Dropout in half of the layers, a batch norm that keeps its statistics."""
    model, sharded = pair(mesh, lambda: Net(p=0.5), ids())
    steps(model, sharded, ids())
    both(model, sharded, lambda m: m.layers[0].eval())
    steps(model, sharded, ids(seed=1))
    both(model, sharded, lambda m: [x.eval() for x in m.modules() if isinstance(x, nn.BatchNorm1d)])
    steps(model, sharded, ids(seed=2))
    both(model, sharded, lambda m: m.layers[1].drop.eval())
    steps(model, sharded, ids(seed=3))
    both(model, sharded, lambda m: m.eval())
    steps(model, sharded, ids(seed=4))
    both(model, sharded, lambda m: m.train())
    steps(model, sharded, ids(seed=5))


class Stays(nn.Module):
    """As backbones do whose batch norms stay in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn, self.lin = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.bn.eval()
        return self

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.lin(F.dropout(self.bn(self.stem(x)).relu(), 0.3, self.training)).square().mean(),)


@case
def a_train_of_the_models_own(mesh: autoshard.Mesh) -> None:
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, sharded = pair(mesh, Stays, x)
    steps(model, sharded, x)
    both(model, sharded, lambda m: m.eval())
    both(model, sharded, lambda m: m.train())
    steps(model, sharded, x, seed=1)
    assert not sharded.bn.training


@case
def an_eval_forward_then_train_then_backward(mesh: autoshard.Mesh) -> None:
    """The mode of the forward counts, in whichever the module is when the backward runs."""
    model, sharded = pair(mesh, lambda: Net(p=0.5), ids(), train=False)
    for module in (model, sharded):
        loss = full(module(ids())[0])
        module.train()
        loss.backward()
    same_gradients(sharded, model)


# --- gradients that are recorded, or not ---


@case
def an_eval_model_has_gradients(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids(), train=False)
    assert not sharded.plan.training
    with torch.no_grad():
        logits = sharded(ids())[1]
        assert type(logits) is torch.Tensor
        close(logits, model(ids())[1])
    assert len(sharded.programs) == 1
    steps(model, sharded, ids())
    assert sharded.plan.training
    assert len(sharded.programs) == 2


@case
def training_false_records_nothing(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids(), training=False)
    loss, logits = sharded(ids())
    assert not loss.requires_grad
    assert not logits.requires_grad
    close(loss, model(ids())[0])
    assert len(sharded.programs) == 1
    with refused("does not require grad", RuntimeError):
        loss.backward()


class Kinds(nn.Module):
    """Outputs of all kinds: complex, detached, of frozen weights, of inputs alone, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = self.a(x), self.b(x)
        return torch.complex(a, b), torch.fft.fft(a), a.detach() * 2, b, x * 2, a.argmax(-1), a.square().mean()


@case
def outputs_require_what_eagers_do(mesh: autoshard.Mesh) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, sharded = pair(mesh, Kinds, x)
    for train in (True, False):
        outputs = [m.train(train)(x) for m in (model, sharded)]
        for theirs, ours in zip(*outputs, strict=True):
            assert ours.requires_grad == theirs.requires_grad
            close(ours, theirs)
        both(model, sharded, lambda m: m.zero_grad())
        for out in outputs:
            sum(full(y).abs().square().sum() for y in out[:2]).backward()  # type: ignore[union-attr]
        same_gradients(sharded, model)


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 12), nn.Linear(12, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        y = self.norm(self.b(torch.tanh(self.a(x))))
        return (F.cross_entropy(y, torch.arange(4) % 3) + y.softmax(-1).pow(3).sum(),)


@case
def gradients_of_gradients(mesh: autoshard.Mesh) -> None:
    """A penalty on the gradients of inputs and of parameters, in train and in eval mode."""
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rows = {"x": autoshard.Shard(0)}  # parameters enter together; and cut ones are gathered together, and once more
    cut = {"*.weight": autoshard.Shard(0), **rows}
    for hints in ({}, {"a": "colwise", "b": "rowwise"}, rows, cut):
        model, sharded = pair(mesh, Smooth, x, hints=hints)
        for train in (True, False):
            for module in (model, sharded):
                module.train(train).zero_grad()
                own = list(module.parameters())
                first = torch.autograd.grad(full(module(x)[0]), [x, *own], create_graph=True)
                (sum(full(g.square().sum()) for g in first)).backward()  # type: ignore[union-attr]
            same_gradients(sharded, model, 1e-8)


class Counts(nn.Module):
    """Writes a buffer that its output was computed from, as models do that count calls."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 9)
        self.register_buffer("scale", torch.ones(9))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        y = self.lin(x + torch.randn_like(x)) * self.scale.clone()
        self.scale.mul_(2)
        return (F.dropout(y, 0.3).square().mean(),)


@case
def draws_and_buffers_are_those_of_the_forward(mesh: autoshard.Mesh) -> None:
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, sharded = pair(mesh, Counts, x, train=False)
    for module in (model, sharded):
        torch.manual_seed(1)
        losses = [full(module(x)[0]), full(module(-x)[0])]
        torch.rand(7)
        state = torch.get_rng_state()
        sum(losses).backward()  # type: ignore[union-attr]
        assert torch.equal(torch.get_rng_state(), state)
    close(sharded.tensor("scale"), torch.full((9,), 4.0, dtype=torch.float64))
    same_gradients(sharded, model)


@case
def a_buffer_written_before_the_backward(mesh: autoshard.Mesh) -> None:
    """Eager raises; programs that hold copies give the forward's gradients."""
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 9)
            self.register_buffer("scale", torch.ones(9))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return ((self.lin(x) * self.scale).square().mean(),)

    model, sharded = pair(mesh, Scales, x)
    full(model(x)[0]).backward()
    loss = full(sharded(x)[0])
    sharded.scale.mul_(3)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    same_gradients(sharded, model)


@case
def checkpointed(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, lambda: Net(p=0.2), ids())
    for reentrant in (False, True):
        both(model, sharded, lambda m: m.zero_grad())
        for module in (model, sharded):
            torch.manual_seed(3)
            ones = torch.ones((), dtype=torch.float64, requires_grad=True)

            def loss(scale: torch.Tensor, module: Any = module) -> torch.Tensor:
                return full(module(ids())[0]) * scale

            checkpoint(loss, ones, use_reentrant=reentrant).backward()
        same_gradients(sharded, model)
        same_state(sharded, model)
    both(model, sharded, lambda m: m.zero_grad())
    for module in (model, sharded):
        torch.manual_seed(3)
        full(checkpoint(module, ids(), use_reentrant=False)[0]).backward()
    same_gradients(sharded, model)


@case
def inference_mode_first(mesh: autoshard.Mesh) -> None:
    """What is compiled and adopted inside inference_mode can be trained afterwards."""
    torch.manual_seed(0)
    model = Net().double()
    sharded = autoshard.compile(copy.deepcopy(model), mesh)
    with torch.inference_mode():
        close(sharded.eval()(ids())[1], model.eval()(ids())[1])
        assert sharded(ids())[0].is_inference()
    both(model, sharded, lambda m: m.train())
    steps(model, sharded, ids(), ids(rows=3))

"""Cases of states: requires_grad, modes, and whether gradients are recorded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from state_harness import (
    Net,
    Of,
    Smooth,
    both,
    case,
    close,
    full,
    ids,
    once,
    pair,
    refused,
    rows,
    same_gradients,
    same_state,
    steps,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import autoshard

# --- requires_grad ---


def only_the_head(module: Any) -> None:
    for name, p in module.named_parameters():
        p.requires_grad_(name.startswith(("head.bias", "bn")))


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


@case
def a_parameter_written_before_the_backward(mesh: autoshard.Mesh) -> None:
    def function(lin: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return lin(torch.tanh(lin(x))).square().mean()

    for asked in ({}, {"like": "fsdp"}, {"micro_batches": 2}):
        model, sharded = pair(mesh, lambda: Of(function), rows(), **asked)
        loss = full(sharded(rows()))
        with torch.no_grad():
            sharded.lin.weight.mul_(2)
        if dist.is_initialized() and "micro_batches" not in asked:
            with refused("modified by an inplace operation|changed in place between forward", RuntimeError):
                loss.backward()
            continue
        loss.backward()
        model(rows()).backward()
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
    if isinstance(next(sharded.parameters()), DTensor):
        with refused("modified by an inplace operation", RuntimeError):
            loss.backward()
    else:
        loss.backward()
        same_gradients(sharded, model)


class Moves(nn.Module):
    """Writes into its input, and returns what that was."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 9)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before, y = x.clone(), self.lin(x.clone())
        x -= x.mean(0)
        return (y * self.lin(x)).square().mean(), before


@case
def an_input_written_in_the_forward(mesh: autoshard.Mesh) -> None:
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, sharded = pair(mesh, Moves, x.clone())
    given = [x.clone(), x.clone()]
    for module, mine in zip((model, sharded), given, strict=True):
        loss, before = module(mine)
        assert torch.equal(full(before), x)
        full(loss).backward()
    close(given[1], given[0])
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
    for count in (4, 6):  # the latter is compiled for inside of it
        both(model, sharded, lambda m: m.zero_grad())
        for module in (model, sharded):
            torch.manual_seed(3)
            full(checkpoint(module, ids(count), use_reentrant=False)[0]).backward()
        same_gradients(sharded, model)


@case
def a_checkpointed_output_in_parts(mesh: autoshard.Mesh) -> None:
    """Reentrant: the gradient that comes back is a plain tensor, and meets parts under no_grad."""
    model, sharded = pair(mesh, lambda: Of(lambda lin, x: lin(x).tanh()), rows())
    for module in (model, sharded):
        checkpoint(module, rows().requires_grad_(), use_reentrant=True).square().mean().backward()
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


class Looks(nn.Module):
    """It counts and normalises before it looks up what may not be there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table = nn.BatchNorm1d(8), nn.Embedding(5, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        self.count.add_(1)
        return (y + self.table(ids)).square().mean()


@case
def a_call_that_fails(mesh: autoshard.Mesh) -> None:
    """Its buffers are what they were before, and later calls are eager's from there."""
    model, sharded = pair(mesh, Looks, rows(), torch.arange(4))
    for module in (model, sharded):
        module(rows(), torch.arange(4))
        before = {n: t.clone() for n, t in model.state_dict().items()}
        with pytest.raises(IndexError):
            module(rows(seed=5), torch.tensor([0, 1, 2, 9]))
        if module is model:
            assert not torch.equal(model.count, before["count"]), "eager keeps what was written until then"
            model.load_state_dict(before)
    same_state(sharded, model)
    once(model, sharded, rows(seed=3), torch.arange(4))
    same_state(sharded, model)


# --- random streams per shard ---


@case
def dropout_per_shard(mesh: autoshard.Mesh) -> None:
    """Ranks with the same rows drop the same, those with other rows do not; all generators go on alike."""
    x = torch.ones(64, 8, dtype=torch.float64)
    model = Of(lambda lin, x: F.dropout(lin(x), 0.5, True)).double()
    axes = dict(zip(mesh.axes, mesh.shape, strict=True))
    for like, axis in (("replicate", None), ("ddp", next(iter(axes)))):
        sharded = autoshard.compile(
            copy.deepcopy(model), autoshard.Mesh(axes), (x,), like=like, exact_dropout=False, gather_outputs=True
        )
        assert "exact=False" in sharded.source
        assert (f'{{0: "{axis}"}}' in sharded.source) == (axis is not None)
        torch.manual_seed(5)
        found = sharded(x).detach()
        state, rows_of_masks = torch.get_rng_state(), found[:32].ne(found[32:]).any(1)
        if dist.is_initialized():
            every = [torch.empty_like(found) for _ in range(dist.get_world_size())]
            dist.all_gather(every, found)
            assert all(torch.equal(found, other) for other in every)
            states = [torch.empty_like(state) for _ in every]
            dist.all_gather(states, state)
            assert all(torch.equal(state, other) for other in states)
        assert float(rows_of_masks.double().mean()) > 0.9, "both halves have the same masks"
        torch.manual_seed(5)
        assert torch.equal(sharded(x).detach(), found)

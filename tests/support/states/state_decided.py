"""Cases of states: buffers that decide which way the forward goes, and that change from call to call."""

from __future__ import annotations

import copy
from typing import Any

import torch
from state_harness import both, case, close, full, pair, refused, rows, same_gradients, same_state
from torch import nn

import autoshard
from autoshard import RuntimeMismatchError
from autoshard.module.programs import executable
from autoshard.passes.capture.observer import patched


class Normed(nn.Module):
    """Its statistics are those of the first batch (ActNorm of flows, k-means of codebooks)."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.loc = nn.Linear(8, 16), nn.Parameter(torch.zeros(16))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("initted", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        h = self.lin(x)
        if not self.initted:
            with torch.no_grad():
                self.mean.copy_(h.mean(0))
                self.initted.fill_(True)
        return ((h - self.mean + self.loc).square().mean(),)


class Warmed(nn.Module):
    """A count of the calls decides, before it is written and afterwards; so does a flag that users set."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 16)
        self.register_buffer("step", torch.tensor(0))
        self.register_buffer("enabled", torch.tensor([1], dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        h = self.lin(x)
        if self.step >= 2:
            h = h.tanh()
        self.step += 1
        if self.step > 3:
            h = nn.functional.dropout(h, 0.5)
        if self.enabled[0] == 1:
            h = h * 2
        return (h.square().mean(),)


def _step(model: nn.Module, sharded: Any, batch: torch.Tensor) -> None:
    """The loss, the gradients, the weights after a step and the buffers agree, and so do the generators' states."""
    losses, states = [], []
    for module in (model, sharded):
        torch.manual_seed(3)
        module.zero_grad()
        losses.append(full(module(batch)[0]))
        losses[-1].backward()
        states.append(torch.get_rng_state())
    close(losses[1], losses[0], "loss")
    assert torch.equal(*states)
    same_gradients(sharded, model)
    for module in (model, sharded):
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.1 * p.grad
    same_state(sharded, model)


@case
def a_buffer_that_decides_and_is_set(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Normed, rows(4))
    for seed in range(3):
        _step(model, sharded, rows(4, seed=seed))
    assert len(sharded.programs) == 2
    both(model, sharded, lambda m: m.initted is None or m.initted.fill_(False))  # of another stage
    _step(model, sharded, rows(4, seed=5))
    again = copy.deepcopy(sharded)
    both(copy.deepcopy(model), again, lambda m: m(rows(4)))
    assert len(sharded.programs) == 2


@case
def a_count_that_decides(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Warmed, rows(4))
    for seed in range(5):
        _step(model, sharded, rows(4, seed=seed))
    both(model, sharded, lambda m: m.enabled is None or m.enabled.zero_())
    _step(model, sharded, rows(4))
    assert len(sharded.programs) == 4


@case
def a_number_read_from_a_buffer_that_counts(mesh: autoshard.Mesh) -> None:
    class Read(Warmed):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            scale = 1 if self.step.item() < 20 else 2
            self.step += 1
            return ((self.lin(x) * scale).square().mean(),)

    model, sharded = pair(mesh, Read, rows(4))
    with (
        patched([(executable, "_MAX_PROGRAMS", 3)]),
        refused("Compare the buffer itself, as in `if self.count < 10`", RuntimeMismatchError),
    ):
        for _ in range(4):
            _step(model, sharded, rows(4))
    assert model.step == 4


@case
def a_state_written_before_a_buffer_decides(mesh: autoshard.Mesh) -> None:
    """A program that turns out to be the wrong one has written nothing."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.register_buffer("sums", torch.zeros(4, 8))
            self.register_buffer("doubles", torch.tensor(False))

        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            self.sums.index_add_(0, n, self.lin(x))
            return x * 2 if self.doubles else x * 3

    torch.manual_seed(0)
    model = Sums().double().eval()
    sharded = autoshard.compile(copy.deepcopy(model), mesh, (rows(2), torch.arange(2)))
    with torch.no_grad():
        for _ in range(2):
            close(sharded(rows(2), torch.arange(2)), model(rows(2), torch.arange(2)))
            both(model, sharded, lambda m: m.doubles is None or m.doubles.fill_(True))
    same_state(sharded, model)

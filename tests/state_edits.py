"""Cases of states: parameters and gradients that scripts write to between backward and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from state_harness import Smooth, both, case, close, full, pair, rows, same_gradients, same_state
from torch import nn

import autoshard


def _edited(x: Any) -> None:
    """As in eager, whichever dim is cut."""
    x[1] = 0
    x[:, 2] = 1.5
    x[2:4] = torch.arange(2.0 * x.shape[1], dtype=x.dtype).view(2, -1)
    x[:, 2:4] *= 2
    x[3, 1:3] += 1
    x[-1] = x[0] * 2
    x[x > 6.5] = 1
    x[1::3] -= 1
    x[torch.tensor([0, 2])] = 5


VIEWS: tuple[Callable[[Any], Any], ...] = (
    lambda x: x[1].fill_(3),
    lambda x: x[:, 2:4].mul_(2),
    lambda x: x[1:3].t()[1:].add_(4),
    lambda x: x[4][1:3].zero_(),
)


@case
def weights_and_gradients_set_by_index(mesh: autoshard.Mesh) -> None:
    for like in ("fsdp", None):
        model, sharded = pair(mesh, Smooth, rows(4, 6), like=like)
        for m in (model, sharded):
            full(m(rows(4, 6))[0]).backward()
            for p in (m.a.weight, m.b.weight):
                for x in (p.grad, p.data):
                    _edited(x)
                with torch.no_grad():
                    p[0, 1] = 7
                for write in VIEWS:
                    write(p.grad)
                    write(p.data)
            m.a.weight.grad = m.a.weight.grad.clamp(-3, 3)
        same_gradients(sharded, model)
        same_state(sharded, model)
        close(sharded(rows(4, 6))[0], model(rows(4, 6))[0])


@case
def the_data_of_a_parameter_set(mesh: autoshard.Mesh) -> None:
    """By another parameter's, by a computed value, by a plain tensor; the backward is that of the new value."""
    model, sharded = pair(mesh, Smooth, rows(4, 6), like="fsdp")
    whole = torch.randn(12, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def change(m: nn.Module) -> None:
        m.a.weight.data = whole.clone()
        m.b.weight.data = m.b.weight.data * 2
        m.norm.bias.data = m.norm.weight.data + 1

    both(model, sharded, change)
    same_state(sharded, model)
    for m in (model, sharded):
        full(m(rows(4, 6))[0]).backward()
    same_gradients(sharded, model)

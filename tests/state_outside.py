"""What a forward reads and the model does not hold: globals, closures, modules hidden in lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from state_harness import Of, case, close, full, once, pair, refused, rows
from torch import nn

import autoshard


class Hidden(nn.Module):
    """A teacher in a list, where parameters() does not see it."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.lin, self.teacher = nn.Linear(8, 8), [nn.Linear(8, 8).double().requires_grad_(trained)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) - self.teacher[0](x)


@case
def parameters_of_others_are_trained(mesh: autoshard.Mesh) -> None:
    scale = nn.Parameter(rows(1)[0])
    for model, named in (
        (Of(lambda lin, x: lin(x) * scale), "'scale' of an enclosing function"),
        (Of(lambda lin, x: lin(x) * OUTSIDE), "the global 'OUTSIDE'"),
        (Hidden(True), "'weight' of a Linear"),
    ):
        model.double()
        sharded = autoshard.compile(model, mesh)
        with refused(f"the forward reads {named} .* requires a gradient and is no parameter of the model"):
            sharded(rows())
        with torch.no_grad():
            close(sharded(rows()), model(rows()))
        sharded.requires_grad_(False)
        with refused("requires a gradient and is no parameter of the model"):  # eager records it
            sharded(rows())
    model, sharded = pair(mesh, lambda: Of(lambda lin, x: lin(x) * scale.detach() + lin(x).to(scale.dtype)), rows())
    once(model, sharded, rows())


OUTSIDE = nn.Parameter(rows(1, seed=5)[0])


@case
def tensors_of_others_are_written(mesh: autoshard.Mesh) -> None:
    """Values that a forward reads outside are those of the call, whether they are computed with or decide a branch."""
    own = SimpleNamespace(scale=rows(1)[0], on=torch.tensor(True))

    def function(lin: nn.Module, x: torch.Tensor) -> Any:
        y = lin(x) * own.scale
        return y.tanh() if own.on.item() else y

    model, sharded = pair(mesh, lambda: Of(function), rows())
    with torch.no_grad():
        own.scale.mul_(2)
    once(model, sharded, rows())
    own.on.fill_(False)
    once(model, sharded, rows())
    once(model, sharded, rows(6))  # of the program before nothing is kept
    count = len(sharded.programs)
    once(model, sharded, rows(6))
    assert len(sharded.programs) == count

    torch.manual_seed(0)
    model = Hidden(False).double()
    teacher = model.teacher[0]
    sharded = autoshard.compile(model, mesh, (rows(),))
    weights = sharded.full_state_dict()
    for _ in range(2):
        expected = nn.functional.linear(rows(), weights["lin.weight"], weights["lin.bias"]) - teacher(rows())
        close(full(sharded(rows())), expected)
        with torch.no_grad():
            teacher.weight.add_(1)

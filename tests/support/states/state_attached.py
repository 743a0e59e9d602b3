"""What users attach to parameters and buffers: attributes and classes of their own; see state_cases.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from state_harness import both, case, close, once, one_graph, refused, rows, same_gradients, same_state
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard


class Manifold(nn.Parameter):
    """As geoopt's: an optimizer asks for the class, and for what is on it."""

    def project(self) -> torch.Tensor:
        return self.detach().clamp(-0.1, 0.1)


class Marked(nn.Module):
    """Flags for optimizers, groups, a class, a mask, and two that know of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = Manifold(self.last.weight.detach())
        self.register_buffer("scale", torch.ones(8, dtype=torch.float64))
        self.scale.tag = "seen"  # type: ignore[attr-defined]
        p, q = self.first.weight, self.last.weight
        p._no_weight_decay = True  # type: ignore[attr-defined]
        p._optim = {"lr": 0.5, "with": [q]}  # type: ignore[attr-defined]
        p.mask = (torch.arange(64) % 3 > 0).view(8, 8).double()  # type: ignore[attr-defined]
        p.of, p.twice = self.first, lambda: self.first.weight * 2  # type: ignore[attr-defined]
        self.first.bias.is_sparse_grad = False  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.last(self.first(x).tanh() * self.scale), torch.arange(len(x)) % 8)


class Grouped(torch.optim.SGD):
    """An optimizer that asks parameters what to do with them."""

    def __init__(self, model: nn.Module) -> None:
        groups: dict[Any, Any] = {}
        for p in model.parameters():
            decay = 0.0 if getattr(p, "_no_weight_decay", False) else 0.3
            groups.setdefault((decay, getattr(p, "_optim", {}).get("lr", 0.1)), []).append(p)
        super().__init__([{"params": ps, "weight_decay": d, "lr": lr} for (d, lr), ps in groups.items()], lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p, Manifold):
                    p.copy_(p.project())
                if hasattr(p, "mask"):
                    p.mul_(p.mask)


def marks(module: Any) -> Any:
    p, q = module.first.weight, module.last.weight
    assert p._optim["with"][0] is q
    assert p.of is module.first
    assert isinstance(q, nn.Parameter)
    return [
        (
            name,
            type(x).__name__ == "Manifold",
            isinstance(x, Manifold),
            sorted({*vars(x)} - {"_is_param", "_written", "_of"}),
        )
        for name, x in (*module.named_parameters(), *module.named_buffers())
    ]


def together(model: Any, sharded: Any) -> None:
    """Steps of an optimizer that groups by attributes and classes."""
    optimizers = Grouped(model), Grouped(sharded)
    assert [len(g["params"]) for g in optimizers[0].param_groups] == [
        len(g["params"]) for g in optimizers[1].param_groups
    ]
    for step in range(3):
        losses = []
        for module, optimizer in zip((model, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(module(rows(seed=step)))
            losses[-1].backward()
        close(losses[1], losses[0])
        same_gradients(sharded, model)
        for optimizer in optimizers:
            optimizer.step()
        same_state(sharded, model)


def marked(mesh: autoshard.Mesh) -> tuple[Any, Any]:
    """Made twice: ``copy.deepcopy`` loses what is on a parameter."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Marked().double())
    return models[0], autoshard.compile(models[1], mesh, (rows(),))


@case
def attributes_and_classes_of_parameters(mesh: autoshard.Mesh) -> None:
    model, sharded = marked(mesh)
    assert marks(sharded) == marks(model)
    assert sharded.scale.tag == "seen"
    close(sharded.first.weight.twice(), model.first.weight.twice())
    assert not hasattr(sharded.first.bias, "_no_weight_decay")
    together(model, sharded)


@case
def attributes_after_conversions_and_copies(mesh: autoshard.Mesh) -> None:
    """As eager: what ``to()`` and loading keep, and what ``copy.deepcopy`` loses of parameters."""
    model, sharded = marked(mesh)
    both(model, sharded, lambda m: m.float().double())
    assert marks(sharded) == marks(model)
    both(model, sharded, lambda m: setattr(m.scale, "tag", "seen"))  # lost in eager, too
    state = {n: x + 1 for n, x in model.state_dict().items()}
    both(model, sharded, lambda m: m.load_state_dict(state))
    assert marks(sharded) == marks(model)
    together(model, sharded)
    copies = copy.deepcopy(model), copy.deepcopy(sharded)
    for name, p in copies[0].named_parameters():
        other = copies[1].get_parameter(name)
        assert isinstance(other, Manifold) == isinstance(p, Manifold)
        assert hasattr(other, "_optim") == hasattr(p, "_optim") is False
    assert copies[1].scale.tag == copies[0].scale.tag == "seen"
    assert not isinstance(copies[1].scale, nn.Parameter)
    together(*copies)


class Reading(nn.Module):
    """A forward that reads what is on its parameters, as that of mup's read-out does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = Manifold(self.b.weight.detach())
        self.a.weight.width = 2.0  # type: ignore[attr-defined]
        self.a.weight.other = self.b.weight  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(self.a(x).tanh() / self.a.weight.width, self.a.weight.other)  # type: ignore[arg-type, operator]
        y = y * 3 if isinstance(self.b.weight, Manifold) and type(self.b.weight) is Manifold else y
        return F.cross_entropy(y * 2 if getattr(self.b.bias, "shifted", False) else y, torch.arange(len(x)) % 8)


@case
def attributes_that_a_forward_reads(mesh: autoshard.Mesh) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Reading().double())
    model, sharded = models[0], autoshard.compile(models[1], mesh, (rows(),))
    once(model, sharded, rows())
    once(model, sharded, rows(6))
    for change in ({"width": 4.0}, {"width": 2.0}):
        both(model, sharded, lambda m, c=change: vars(m.a.weight).update(c))
        once(model, sharded, rows())
    both(model, sharded, lambda m: setattr(m.b.bias, "shifted", True))
    once(model, sharded, rows())
    programs = len(sharded.programs)
    both(model, sharded, lambda m: setattr(m.b.bias, "step", 1))  # nobody reads it
    once(model, sharded, rows())
    assert len(sharded.programs) == programs


class Doubled(nn.Parameter):
    def __mul__(self, other: Any) -> Any:
        return super().__mul__(other) * 2


@case
@one_graph
def parameters_that_compute_otherwise_are_refused(mesh: autoshard.Mesh) -> None:
    model = Reading().double()
    model.b.bias = Doubled(model.b.bias.detach())
    with refused("parameter 'b.bias' is a Doubled, whose class overrides __mul__"):
        autoshard.compile(model, mesh, (rows(),))
    model = Reading().double()
    model.b.weight.flat = model.b.weight.detach().view(-1)  # type: ignore[attr-defined]
    with refused("attribute 'flat' of 'b.weight' is a view of the model's tensors"):
        autoshard.compile(model, mesh, (rows(),))
    model = Reading().double().eval()
    model.b.bias.register_hook(lambda g: g * 2)
    sharded = autoshard.compile(model, mesh, (rows(),))
    with torch.no_grad():
        close(sharded(rows()), model(rows()))
    with refused("parameter 'b.bias': it has a tensor hook"):  # not when nothing was recorded, but here
        sharded(rows())


@case
def a_flag_that_is_set_later(mesh: autoshard.Mesh) -> None:
    """``requires_grad``, and an attribute, of a parameter that has been through calls."""
    model, sharded = marked(mesh)
    together(model, sharded)
    both(model, sharded, lambda m: m.first.bias.requires_grad_(False))
    both(model, sharded, lambda m: setattr(m.last.bias, "_no_weight_decay", True))
    together(model, sharded)
    assert isinstance(sharded.first.bias, DTensor) == isinstance(sharded.last.bias, DTensor)

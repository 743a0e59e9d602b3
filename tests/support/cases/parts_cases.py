"""Models that are not one graph, and their training in parts against one device, in one process and on gloo ranks."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from families import Family, outcome
from torch import nn
from torch.autograd import forward_ad

import autoshard


def _mlp(*widths: int) -> nn.Sequential:
    a, b, c = widths
    return nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c))


class Matching(nn.Module):
    """A loss whose pairs come from numpy, as DETR's."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = []
        for row, wanted in zip(logits, labels, strict=True):
            cost = -row.softmax(-1)[:, wanted].detach().numpy()
            found = itertools.permutations(range(len(row)), len(wanted))
            best = min(found, key=lambda p: sum(cost[i, j] for j, i in enumerate(p)))
            losses.append(F.cross_entropy(row[torch.as_tensor(best)], wanted))
        return torch.stack(losses).mean()


class Detection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.queries = _mlp(8, 32, 16), nn.Parameter(torch.randn(4, 16))
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head, self.criterion = nn.Linear(16, 5), Matching()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        found = self.decoder(self.queries.expand(len(x), -1, -1), self.backbone(x))
        loss = self.criterion(self.head(found), labels)
        return {"loss": loss, "value": loss.item()}


class Equilibrium(nn.Module):
    """A solver that stops when it has converged; it calls one part again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.f, self.out = nn.Linear(8, 16), _mlp(16, 32, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.into(x)
        z = torch.zeros_like(u)
        with torch.no_grad():
            for _ in range(30):
                before, z = z, torch.tanh(0.3 * self.f(z) + u)
                if (z - before).norm() < 1e-2:
                    break
        return self.out(torch.tanh(0.3 * self.f(z) + u)).square().mean()


class LayerDrop(nn.Module):
    """Python's and numpy's draws decide which layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if random.random() < 0.7:
                x = x + layer(x)
        return x.square().mean() * float(np.random.rand())


class Momentum(nn.Module):
    """A momentum encoder, in place or through ``.data``, and a queue."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.query, self.in_place = _mlp(8, 32, 8), in_place
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", torch.randn(12, 8))
        self.start = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for p, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                if self.in_place:
                    k.mul_(0.9).add_(p, alpha=0.1)
                else:
                    k.data = k.data * 0.9 + p.data * 0.1
            keys = self.key(x + 0.1)
        found = self.query(x)
        logits = torch.cat([(found * keys).sum(1, keepdim=True), found @ self.queue.clone().T], 1)
        self.queue[self.start : self.start + len(keys)] = keys
        self.start = (self.start + len(keys)) % 12
        if logits.isnan().any():
            raise ValueError
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class Force(nn.Module):
    """Energies, and forces as their gradient: the loss has a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.net = nn.Embedding(5, 8), _mlp(9, 32, 1)

    def forward(self, kinds: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        places = places.detach().requires_grad_()
        far = (places[:, None] - places[None]).square().sum(-1).sum(1, keepdim=True).sqrt()
        energy = self.net(torch.cat([self.embed(kinds), far], -1)).sum()
        (force,) = torch.autograd.grad(energy, places, create_graph=True)
        return force.square().mean() + 0.01 * energy.square()


class AdaptiveWeight(nn.Module):
    """The weight of a loss is a ratio of gradients, as in VQGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last, self.judge = _mlp(8, 32, 8), nn.Linear(8, 8), _mlp(8, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.last(self.body(x))
        near, far = (made - x).abs().mean(), -self.judge(made).mean()
        a, b = (torch.autograd.grad(y, self.last.weight, retain_graph=True)[0].norm() for y in (near, far))
        return near + (a / (b + 1e-4)).detach() * far


class InnerStep(nn.Module):
    """MAML: a step on the parameters inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.net = nn.Linear(8, 4), _mlp(4, 32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, named = self.into(x), dict(self.net.named_parameters())
        loss = torch.func.functional_call(self.net, named, (x,)).square().mean()
        steps = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        after = {n: p - 0.1 * g for (n, p), g in zip(named.items(), steps, strict=True)}
        return torch.func.functional_call(self.net, after, (x,)).square().mean()


class PerSample(nn.Module):
    """Gradients of each sample, by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.net = nn.Linear(8, 4), _mlp(4, 32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, named = self.into(x), dict(self.net.named_parameters())

        def loss(named: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(self.net, named, (row,)).square().mean()

        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(named, x)
        norms = sum(g.flatten(1).square().sum(1) for g in found.values())
        return (norms.detach() * self.net(x).square().mean(1)).mean() + 0.01 * norms.mean()


class Triplets(nn.Module):
    """Pairs are mined from distances, so their number varies; the table is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.net, self.head = nn.Embedding(9, 8), _mlp(8, 32, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = F.normalize(self.net(self.table(ids)), dim=1)
        apart = torch.cdist(found, found)
        near = [(i, j) for i, j in itertools.permutations(range(len(ids)), 2) if apart[i, j] < apart[i].mean()]
        pulled = [apart[i, j] for i, j in near]
        return torch.stack(pulled).mean() + F.cross_entropy(self.head(found), ids)


class SparseInputs(nn.Module):
    """A sparse adjacency goes into a module."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = _Propagation(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return self.head(self.step(x, adjacency))


class _Propagation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp(8, 32, 8)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return adjacency @ self.net(x)


class Reversal(nn.Module):
    """A gradient reversal whose ``autograd.Function`` is defined in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.judge = _mlp(8, 32, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = float(x.abs().mean())

        class Reverse(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
                return y.view_as(y)

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
                return -weight * gradients[0]

        return self.judge(Reverse.apply(self.body(x)))  # type: ignore[no-untyped-call]


class Pickled(nn.Module):
    """Its copies take a submodule from bytes, as generated code of e3nn; forces are gradients in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.generated = _mlp(3, 32, 4), _mlp(4, 32, 1)

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "_modules": {**self._modules}}
        return {**state, "bytes": pickle.dumps(state["_modules"].pop("generated"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        made = pickle.loads(state.pop("bytes"))
        super().__setstate__(state)
        self.generated = made

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        places = places.detach().requires_grad_()
        energy = self.generated(self.into(places)).sum()
        (force,) = torch.autograd.grad(energy, places, create_graph=True)
        return force.square().mean() + energy.square()


class Duals(nn.Module):
    """A directional derivative in forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = _mlp(8, 32, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            found = self.body(forward_ad.make_dual(x, torch.ones_like(x)))
            slope = forward_ad.unpack_dual(found).tangent
        return self.head(self.body(x)) * slope.norm().item()


class Referring(nn.Module):
    """Attributes hold parameters: a list, their averages, and an optimizer that steps in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.body, self.head = nn.Linear(8, 8), _mlp(8, 32, 8), nn.Linear(8, 3)
        self.held = list(self.body.parameters())
        self.averages = [(p, p.detach().clone()) for p in self.held]
        self.optimizer = torch.optim.SGD(self.inner.parameters(), 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        F.mse_loss(self.inner(x), x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        apart = sum((p - old).square().sum() for p, old in self.averages)
        with torch.no_grad():
            for p, old in self.averages:
                old.lerp_(p, 0.1)
        sizes = sum(p.abs().sum() for p in self.held)
        return self.head(self.body(self.inner(x).detach())).square().mean() + apart + 0.1 * sizes


class Growing(nn.Module):
    """Makes a layer in its first call, and a frozen copy of its body in every second one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.calls = _mlp(8, 32, 8), nn.Linear(8, 3), 0
        self.twin: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls == 0:
            self.add_module("scale", nn.Linear(8, 8, dtype=x.dtype))
            self.register_parameter("shift", nn.Parameter(x.new_zeros(8)))
        if self.calls % 2 == 0:
            self.twin = copy.deepcopy(self.body).requires_grad_(False)
        self.calls += 1
        found = self.body(x) + self.shift
        return self.head(self.scale(found)).square().mean() + F.mse_loss(found, self.twin(x + 0.1))


class Codebook(nn.Module):
    """Every call puts another parameter in the place of its codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = _mlp(8, 32, 4), nn.Linear(4, 8)
        self.codes = nn.Embedding(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.into(x)
        chosen = F.one_hot(torch.cdist(found, self.codes.weight).argmin(1), 6).to(x.dtype)
        coded = chosen @ self.codes.weight
        means = chosen.T @ found / chosen.sum(0).clamp(min=1)[:, None]
        self.codes.weight = nn.Parameter(0.9 * self.codes.weight + 0.1 * means)
        return F.mse_loss(self.out(found + (coded - found).detach()), x) + F.mse_loss(found, coded.detach())


class Annealed(nn.Module):
    """A counter decides in every second call about a weight that the next call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.calls, self.weight = _mlp(8, 32, 8), nn.Linear(8, 3), 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.head(self.body(x)).square().mean() * self.weight
        self.calls += 1
        if self.calls % 2 == 0:
            self.weight = max(self.weight * 0.5, 0.1)
        return found


class Shift:
    """A transform of its own class: what it is computed from, and a method of the module that made it."""

    def __init__(self, context: torch.Tensor, by: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.context, self.by = context, by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by(self.context)


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.context, self.net = _mlp(8, 32, 4), _mlp(4, 32, 8)

    def shift(self, context: torch.Tensor) -> torch.Tensor:
        return self.net(context)

    def forward(self, x: torch.Tensor) -> Shift:
        return Shift(self.context(x), self.shift)


class Flow(nn.Module):
    """Its submodule returns an object that computes with weights later, as lazy transforms of flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.coupling, self.head = Coupling(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = self.coupling(x)(x)
        return self.head(shifted) * (2.0 if float(shifted.detach().norm()) > 0 else 1.0)


def _clone(module: nn.Module) -> nn.Module:
    """A module with the attributes of ``module`` and copies of its parameters on the tape, as learn2learn's."""
    made = object.__new__(type(module))
    made.__dict__ = vars(module).copy()
    made._parameters = {n: None if p is None else p.clone() for n, p in module._parameters.copy().items()}  # type: ignore[misc]
    made._modules = {name: _clone(m) for name, m in module._modules.items() if m is not None}
    return made


class Cloning(nn.Module):
    """A step of a clone of its head, whose gradient flows into the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = _mlp(8, 32, 8), _mlp(8, 32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, clone = self.body(x), _clone(self.head)
        weights = [(m, n, p) for m in clone.modules() for n, p in m._parameters.items() if p is not None]
        slopes = torch.autograd.grad(clone(found).square().mean(), [p for *_, p in weights], create_graph=True)
        for (module, name, p), slope in zip(weights, slopes, strict=True):
            module._parameters[name] = p - 0.1 * slope  # type: ignore[assignment]
        return clone(found).square().mean() + self.head(found).mean()


def _rows() -> tuple[torch.Tensor]:
    return (torch.randn(4, 8),)


CASES: dict[str, Family] = {
    "matching": Family(Detection, lambda: (torch.randn(2, 5, 8), torch.randint(5, (2, 3)))),
    "a_solver": Family(Equilibrium, _rows),
    "layerdrop": Family(LayerDrop, _rows),
    "momentum_in_place": Family(lambda: Momentum(True), _rows),
    "momentum_by_data": Family(lambda: Momentum(False), _rows),
    "forces": Family(Force, lambda: (torch.randint(5, (6,)), torch.randn(6, 3))),
    "an_adaptive_weight": Family(AdaptiveWeight, _rows),
    "an_inner_step": Family(InnerStep, _rows),
    "gradients_per_sample": Family(PerSample, _rows),
    "triplets": Family(Triplets, lambda: (torch.randint(9, (6,)),)),
    "sparse_inputs": Family(SparseInputs, lambda: (torch.randn(4, 8), torch.eye(4).to_sparse())),
    "a_function_in_the_forward": Family(Reversal, _rows),
    "duals": Family(Duals, _rows),
    "references_to_parameters": Family(Referring, _rows),
    "modules_made_in_the_forward": Family(Growing, _rows),
    "parameters_put_in_place": Family(Codebook, _rows),
    "a_part_that_returns_a_method": Family(Flow, _rows),
    "clones_that_share_attributes": Family(Cloning, _rows),
    "a_counter_that_decides": Family(Annealed, _rows),
}


def made(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model of a case in float64, and its arguments."""
    model, args, _ = CASES[name].made()
    return model, args


def check(name: str, **options: Any) -> autoshard.ShardedModule:
    """Train a case on two ranks and on one device; both must agree."""
    found = outcome(CASES[name], {"tp": 2}, **options)
    assert found.verdict == "equal", f"{name}: {found.verdict}: {found.said}"
    sharded: autoshard.ShardedModule = found.sharded
    return sharded

"""Cases of states: parameters and gradients that scripts write to between backward and step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from state_experts import AsTuple
from state_harness import Smooth, both, case, close, full, pair, rows, same_gradients, same_state, steps
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
    lambda x: x.chunk(2)[1].mul_(3),
    lambda x: x.split([1, 2, x.shape[0] - 3])[1][0].fill_(2),
    lambda x: x.split(2, dim=1)[1].add_(1),
    lambda x: x.diagonal().zero_(),
)


@case
def weights_and_gradients_set_by_index(mesh: autoshard.Mesh) -> None:
    fused = rows(20).unflatten(0, (4, 5))
    for make, x, names, like in (
        (Smooth, rows(4, 6), ("a.weight", "b.weight"), "fsdp"),
        (Smooth, rows(4, 6), ("a.weight", "b.weight"), None),
        (AsTuple, fused, ("qkv.weight", "gate_up.weight"), "megatron"),  # cut in every one of their parts
    ):
        model, sharded = pair(mesh, make, x, like=like)
        for m in (model, sharded):
            full(m(x)[0]).backward()
            for p in map(m.get_parameter, names):
                for t in (p.grad, p.data):
                    _edited(t)
                with torch.no_grad():
                    p[0, 1] = 7
                for write in VIEWS:
                    write(p.grad)
                    write(p.data)
            p.grad = p.grad.clamp(-3, 3)
        same_gradients(sharded, model)
        same_state(sharded, model)
        close(sharded(x)[0], model(x)[0])


@case
def the_data_of_a_parameter_set(mesh: autoshard.Mesh) -> None:
    """By another parameter's, by a computed value, by a plain tensor; the backward is that of the new value."""
    model, sharded = pair(mesh, Smooth, rows(4, 6), like="fsdp")
    whole = torch.randn(12, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def change(m: nn.Module) -> None:
        m.a.weight.data = whole.clone()
        m.b.weight.data = m.b.weight.data * 2
        m.norm.bias.data = m.norm.weight.data + 1
        with torch.no_grad():
            m.b.bias.set_(m.norm.weight.detach() * 3)

    both(model, sharded, change)
    same_state(sharded, model)
    for m in (model, sharded):
        full(m(rows(4, 6))[0]).backward()
    same_gradients(sharded, model)


class Tables(nn.Module):
    """Look-ups in two tables, whose gradients may be sparse."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 8, sparse=sparse) for n in (12, 7))
        self.up = nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        found = [table(i) for table, i in zip(self.tables, ids.unbind(1), strict=True)]
        return (self.up(torch.cat(found, 1)).pow(3).mean(),)


@case
def tables_under_a_scaler(mesh: autoshard.Mesh) -> None:
    """Sparse rows with an inf in one step, also in ``no_sync``; whole tables of one rank, clipped and set by an index."""
    number = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 7, (6, 2), generator=number) for _ in range(3)]
    for sparse, like in ((True, "row-wise"), (False, "table-wise")):
        model, sharded = pair(mesh, lambda sparse=sparse: Tables(sparse), batches[0], like=like)
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, sharded)]
        for step, batch in enumerate(batches):
            for m, optimizer, scaler in zip((model, sharded), optimizers, scalers, strict=True):
                optimizer.zero_grad()
                with getattr(m, "no_sync", contextlib.nullcontext)():
                    scaler.scale(full(m(batches[0])[0])).backward()
                scaler.scale(full(m(batch)[0]) * (1e308 * 1e10 if step == 1 else 1)).backward()
                scaler.unscale_(optimizer)
                if not sparse:
                    clip = torch.nn.utils.clip_grad_norm_
                    norm = autoshard.clip_grad_norm_(m, 0.01) if m is sharded else clip(m.parameters(), 0.01)
                    m.__dict__["norm"] = norm
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale() == (8 if step < 1 else 4)
            if not sparse and step != 1:
                close(sharded.__dict__["norm"], model.__dict__["norm"])
            with torch.no_grad():
                both(model, sharded, lambda m: m.tables[1].weight.__setitem__(1, 0.5))
            same_state(sharded, model)


class Transposed(nn.Module):
    """Its weights' gradients do not lie in memory as the weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 10, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(10, 6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        y = torch.einsum("td,edf->etf", x, self.up).sum(0)
        return ((y @ self.down * x).square().mean(),)


@case
def fused_steps_on_gradients_that_lie_otherwise(mesh: autoshard.Mesh) -> None:
    """A fused optimizer goes through a weight and its gradient side by side, whatever their strides."""
    for like in ("replicate", "ddp", None):
        model, sharded = pair(mesh, Transposed, rows(4, 6), like=like)
        optimizers = [torch.optim.AdamW(m.parameters(), 0.01, eps=1e-4, fused=True) for m in (model, sharded)]
        for _ in range(2):
            for m, optimizer in zip((model, sharded), optimizers, strict=True):
                optimizer.zero_grad()
                full(m(rows(4, 6))[0]).backward()
                optimizer.step()
        same_gradients(sharded, model)
        same_state(sharded, model)


class Read(nn.Module):
    """A buffer that a product reads, of which a backward wants what it was, and that is written then."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8, dtype=torch.float64)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        y = self.lin(x) * self.scale
        self.scale = self.scale * 1.5 + x.detach().mean(0)
        return (y.square().mean(),)


@case
def a_buffer_that_is_read_before_it_is_written(mesh: autoshard.Mesh) -> None:
    for hints in (None, {"scale": autoshard.Shard(0)}):
        model, sharded = pair(mesh, Read, rows(), hints=hints)
        steps(model, sharded, (rows()), (rows(seed=2)))

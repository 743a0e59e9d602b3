"""A mixture of experts in the forms in which users write its routing; all compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

COUNT, TOP, WIDTH, HIDDEN = 4, 2, 16, 24


class Routed(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = FORMS[form]
        self.router = nn.Linear(WIDTH, COUNT, bias=False)
        self.first = nn.Parameter(torch.randn(COUNT, WIDTH, 2 * HIDDEN) / 4)
        self.second = nn.Parameter(torch.randn(COUNT, HIDDEN, WIDTH) / 4)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.router(rows).softmax(-1).topk(TOP, -1)
        y = self.form(self, rows, weights / weights.sum(-1, keepdim=True), ids)
        return self.last(x + y.view_as(x)).square().mean()

    def activated(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = hidden.chunk(2, -1)
        return F.silu(gate) * up


def dense(model: Routed, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Every expert gets every row."""
    gates = (F.one_hot(ids, COUNT).to(x.dtype) * weights[..., None]).sum(1)
    hidden = model.activated(torch.einsum("td,edf->etf", x, model.first))
    return torch.einsum("etd,te->td", torch.einsum("etf,efd->etd", hidden, model.second), gates)


def in_order(model: Routed, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows sorted by expert, multiplied in groups."""
    order = ids.reshape(-1).argsort(stable=True)
    ends = torch.bincount(ids.reshape(-1), minlength=COUNT).cumsum(0).to(torch.int32)
    hidden = torch._grouped_mm(x[order // TOP], model.first, offs=ends)
    y = torch._grouped_mm(model.activated(hidden), model.second, offs=ends) * weights.reshape(-1)[order][:, None]
    return torch.zeros_like(x).index_add(0, order // TOP, y)


def loop(model: Routed, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of every expert the rows that chose it."""
    out = torch.zeros_like(x)
    for e in range(COUNT):
        rows, slots = torch.where(ids == e)
        y = model.activated(x[rows] @ model.first[e]) @ model.second[e]
        out.index_add_(0, rows, y * weights[rows, slots, None])
    return out


def mask_loop(model: Routed, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same, out of masks of experts."""
    out, chosen = torch.zeros_like(x), F.one_hot(ids, COUNT).permute(2, 1, 0)
    for e in range(COUNT):
        slots, rows = chosen[e].nonzero(as_tuple=True)
        out[rows] += model.activated(x[rows] @ model.first[e]) @ model.second[e] * weights[rows, slots, None]
    return out


class Expert(nn.Module):
    """Parameters of its own."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, HIDDEN, bias=gated), nn.Linear(WIDTH, HIDDEN) if gated else None
        self.down = nn.Linear(HIDDEN, WIDTH, bias=gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))
        return y


class Modules(Routed):
    """Experts in an ``nn.ModuleList``; with gates they have biases."""

    def __init__(self, form: str, gated: bool) -> None:
        super().__init__(form)
        del self.first, self.second
        self.experts = nn.ModuleList(Expert(gated) for _ in range(COUNT))


def modules(model: Modules, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As Mistral's own code."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(model.experts):
        rows, slots = torch.where(ids == e)
        out[rows] += weights[rows, slots, None] * expert(x[rows])
    return out


def mask_modules(model: Modules, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As transformers before its experts were tensors."""
    out, chosen = torch.zeros_like(x), F.one_hot(ids, COUNT).permute(2, 1, 0)
    for e in range(COUNT):
        found = chosen[e].nonzero()
        rows = found[:, 1]
        y = model.experts[e](x[None, rows].reshape(-1, WIDTH)) * weights[found[:, 1], found[:, 0], None]
        out.index_add_(0, rows, y.to(x.dtype))
    return out


def hit_modules(model: Modules, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As transformers: of the experts that have rows."""
    return _of_hit(model, x, weights, F.one_hot(ids, COUNT), 0)


def dropping_modules(model: Modules, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As Switch: each row has one expert, and later rows than its third, in their order, none."""
    hot = F.one_hot(ids[:, 0], COUNT)
    kept = hot * (hot.cumsum(0) <= 3)
    return _of_hit(model, x, weights[:, :1], kept.view(-1, 1, COUNT), 0)


def crowded_modules(model: Modules, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Experts with one row alone are left out: none of the forms."""
    return _of_hit(model, x, weights, F.one_hot(ids, COUNT), 1)


def _of_hit(model: Modules, x: torch.Tensor, weights: torch.Tensor, hot: torch.Tensor, more: int) -> torch.Tensor:
    out, chosen = torch.zeros_like(x), hot.permute(2, 1, 0)
    for hit in torch.greater(chosen.sum(dim=(-1, -2)), more).nonzero():
        slots, rows = torch.where(chosen[hit].squeeze(0))
        y = model.experts[int(hit[0])](x[None, rows].reshape(-1, WIDTH)) * weights[rows, slots, None]
        out.index_add_(0, rows, y.to(x.dtype))
    return out


def half_turned(model: Routed, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As DBRX: the matrices are views of parameters, and those of the second products lie otherwise than the first."""
    out, chosen = torch.zeros_like(x), F.one_hot(ids, COUNT + 1).permute(2, 1, 0)
    for hit in torch.greater(chosen.sum(dim=(-1, -2)), 0).nonzero():
        slots, rows = torch.where(chosen[hit[0]])
        first = model.first.view(COUNT, 2 * HIDDEN, WIDTH)[hit[0]]
        second = model.second.view(-1, HIDDEN, WIDTH)[hit[0]]
        y = model.activated(x[rows].matmul(first.T)).matmul(second)
        out.index_add_(0, rows, y.view(-1, WIDTH) * weights[rows, slots, None])
    return out


def weighed_modules(model: Modules, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Every expert gets every row, sample by sample."""
    x, weights, ids = (t.unflatten(0, (2, -1)) for t in (x, weights, ids))
    gates = x.new_zeros(*x.shape[:-1], COUNT).scatter(-1, ids, weights)
    out = gates[..., :1] * model.experts[0](x)
    for e in range(1, COUNT):
        out = out + gates[..., e, None] * model.experts[e](x)
    return out.flatten(0, 1)


def twice_weighed_modules(model: Modules, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The first expert counts twice: none of the forms."""
    gates = x.new_zeros(len(x), COUNT).scatter(-1, ids, weights)
    ys = [gates[:, e, None] * expert(x) for e, expert in enumerate(model.experts)]
    return ys[0] + ys[1] + ys[2] + ys[3] + ys[0]


def uneven_modules(model: Modules, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Experts of two kinds: none of the forms."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(model.experts):
        rows, slots = torch.where(ids == e)
        y = expert(x[rows]) if e else expert.down(F.relu(expert.up(x[rows])))
        out = out.index_add(0, rows, y * weights[rows, slots, None])
    return out


def masked_modules(model: Modules, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows as a mask, and the sum of the weights that name the expert."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(model.experts):
        hit = ids == e
        rows = hit.any(-1)
        out[rows] += expert(x[rows]) * (weights * hit).sum(-1)[rows].unsqueeze(-1)
    return out


def masked_gates(model: Routed, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows as a mask, and a column of the gates."""
    out, gates = torch.zeros_like(x), x.new_zeros(len(x), COUNT).scatter(-1, ids, weights)
    for e in range(COUNT):
        rows = (ids == e).any(dim=-1)
        out[rows] += model.activated(x[rows] @ model.first[e]) @ model.second[e] * gates[rows, e].unsqueeze(1)
    return out


def masked_otherwise_modules(model: Modules, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The weights are those of the next expert: none of the forms."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(model.experts):
        rows = (ids == e).any(-1)
        out[rows] += expert(x[rows]) * (weights * (ids == (e + 1) % COUNT)).sum(-1, keepdim=True)[rows]
    return out


def between_two(model: Routed, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """No id is between two numbers: nobody chose any expert."""
    out, gates = torch.zeros_like(x), x.new_zeros(len(x), COUNT).scatter(-1, ids, weights)
    for e in range(COUNT):
        rows = (ids == e + 0.5).any(-1)
        out[rows] += model.activated(x[rows] @ model.first[e]) @ model.second[e] * gates[rows, e].unsqueeze(-1)
    return out


def more_weights_modules(model: Modules, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """There are more weights than choices: none of the forms."""
    return modules(model, x, weights.repeat(1, 2), ids)


def fewer_ids_modules(model: Modules, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Some rows choose no expert: none of the forms."""
    return modules(model, torch.cat([x, x[:3]]), weights, ids)[: len(x)]


def wider_modules(model: Modules, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Results have another dtype than rows: none of the forms."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for e, expert in enumerate(model.experts):
        rows, slots = torch.where(ids == e)
        out[rows] += weights.double()[rows, slots, None] * expert(x[rows])
    return out.to(x.dtype)


def with_a_rest(model: Routed, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A loop that leaves out an expert: it is none of the forms."""
    out = torch.zeros_like(x)
    for e in range(COUNT - 1):
        rows, slots = torch.where(ids == e)
        y = model.activated(x[rows] @ model.first[e]) @ model.second[e]
        out = out.index_add(0, rows, y * weights[rows, slots, None])
    return out


def reshaped_gates(model: Routed, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Every expert gets every row; gates are made sample by sample."""
    weights, ids = (t.unflatten(0, (2, -1)) for t in (weights, ids))
    gates, out = x.new_zeros(*ids.shape[:-1], COUNT).scatter(-1, ids, weights).reshape(-1, COUNT), torch.zeros_like(x)
    for e in range(COUNT):
        out = out + gates[:, e : e + 1] * (model.activated(x @ model.first[e]) @ model.second[e])
    return out


Form = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
FORMS: dict[str, Form] = {
    f.__name__: f
    for f in (
        dense,
        in_order,
        loop,
        mask_loop,
        with_a_rest,
        modules,
        mask_modules,
        hit_modules,
        dropping_modules,
        crowded_modules,
        half_turned,
        weighed_modules,
        reshaped_gates,
        uneven_modules,
        twice_weighed_modules,
        masked_modules,
        masked_gates,
        masked_otherwise_modules,
        between_two,
        more_weights_modules,
        fewer_ids_modules,
        wider_modules,
    )
}

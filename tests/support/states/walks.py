"""Random walks over what training scripts do between calls: after every step all is as in the unsharded model."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import ideal
from state_harness import full
from torch import nn

import autoshard
from autoshard import full_optimizer_state_dict, load_full_optimizer_state_dict


class Attention(nn.Module):
    """Fused projections of parts of unequal sizes: four heads of queries, two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 16), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in self.qkv(x).split([8, 4, 4], -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.drop = nn.LayerNorm(8), Attention(), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm(x)))
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Net(nn.Module):
    """Fused projections, dropout, a batch norm, a buffer that the forward counts in, and a head that can be tied."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.bn = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.emb(ids)
        if scale is not None:
            x = x * scale
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.calls += 1
        logits = self.head(self.bn(x.flatten(0, 1)))
        return F.cross_entropy(logits, ids.flatten().roll(1)), logits


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, eps=1.0, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, eps=1.0, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, eps=1.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, eps=1.0, momentum=0.9),
}
"""with an eps that does not amplify the rounding of small gradients"""
LIKE = (None, "megatron", "fsdp", "ddp", "zero1")


class Walk:
    """The unsharded model and the same sharded; ``draw`` decides alike on every rank."""

    def __init__(self, axes: dict[str, int], seed: int, **options: Any) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.model: Any = Net().double()
        self.axes, self.rows, self.length, self.scaled = axes, 4, 3, False
        like = self.draw.choice(LIKE)
        self.options = {"dynamic": self.draw.random() < 0.3, "recompute": self.draw.choice(("auto", "auto", "blocks"))}
        if like:
            self.options["like"] = like if len(axes) == 1 else dict.fromkeys(axes, "ddp") | {[*axes][-1]: like}
        self.options |= options
        self.sharded: Any = self.compiled(copy.deepcopy(self.model))
        self.averages: list[Any] | None = None
        self.tolerance = 1e-9
        self.autocast = self.recording = False
        self.handles: list[Any] = []
        self.optimize()

    def compiled(self, model: nn.Module) -> Any:
        return autoshard.compile(model, ideal(self.axes), (self.ids(),), **self.options)

    def ids(self) -> torch.Tensor:
        number = torch.Generator().manual_seed(self.draw.randrange(1000))
        return torch.randint(0, 12, (self.rows, self.length), generator=number)

    def optimize(self) -> None:
        make = OPTIMIZERS[self.draw.choice([*OPTIMIZERS])]
        self.optimizers = [make(m.parameters()) for m in self.modules]

    @property
    def modules(self) -> tuple[Any, Any]:
        return self.model, self.sharded

    def both(self, change: Callable[[Any], Any]) -> list[Any]:
        return [change(m) for m in self.modules]

    # --- comparisons ---

    def same(self, what: str, given: Any, expected: Any, scale: float = 0.0) -> None:
        given, expected = full(given).detach(), full(expected).detach()
        assert (given.dtype, given.shape) == (expected.dtype, expected.shape), f"{what}: {given.dtype}{given.shape}"
        bound = self.tolerance * max(float(expected.abs().max()), scale, 1e-3)
        error = float((given.double() - expected.double()).abs().max())
        assert error <= bound, f"{what}: {error / bound * self.tolerance:.3g}"

    def check(self) -> None:
        """Flags, modes, parameters, buffers, gradients and optimizers' states."""
        model, sharded = self.modules
        for kind in ("named_parameters", "named_buffers"):
            ours, theirs = (dict(getattr(m, kind)()) for m in (sharded, model))
            assert ours.keys() == theirs.keys(), kind
            for name, t in theirs.items():
                assert ours[name].requires_grad == t.requires_grad, f"{name} requires a gradient: {t.requires_grad}"
        modes = [{n: p.training for n, p in m.named_modules()} for m in (model, sharded)]
        assert {n: t for n, t in modes[1].items() if n in modes[0]} == modes[0]
        state = sharded.full_state_dict()
        assert state.keys() == model.state_dict().keys()
        for name, t in model.state_dict().items():
            self.same(name, state[name], t)
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        given = sharded.full_gradients()
        assert given.keys() == expected.keys(), f"gradients of {given.keys() ^ expected.keys()}"
        largest = max((float(g.abs().max()) for g in expected.values()), default=0.0)
        for name, g in expected.items():
            self.same(f"gradient of {name}", given[name], g, largest)
        known = full_optimizer_state_dict(sharded, self.optimizers[1])["state"]
        wanted = self.optimizers[0].state_dict()["state"]
        assert known.keys() == wanted.keys(), f"states of {known.keys() ^ wanted.keys()}"
        for number, entries in wanted.items():
            for name, t in entries.items():
                if isinstance(t, torch.Tensor):
                    self.same(f"{name} of {number}", known[number][name], t)

    def call(self, *, recorded: bool = True, count: int = 1) -> list[torch.Tensor]:
        """The losses; outputs agree, and so does what is drawn next."""
        losses, seed, given = [], self.draw.randrange(1000), self.ids()
        scale = (torch.arange(8.0).cos()).to(self.model.emb.weight.dtype) if self.scaled else None
        outputs = []
        for module in self.modules:
            torch.manual_seed(seed)
            with torch.set_grad_enabled(recorded), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                found = [module(given, scale) for _ in range(count)]
            losses.append(sum((loss for loss, _ in found[1:]), found[0][0]))
            outputs.append((found, torch.rand(())))
        (theirs, drawn), (ours, mine) = outputs
        assert torch.equal(drawn, mine), "the generator"
        for (a, b), (c, d) in zip(theirs, ours, strict=True):
            assert (a.requires_grad, b.requires_grad) == (c.requires_grad, d.requires_grad), "requires a gradient"
            self.same("loss", c, a)
            self.same("logits", d, b)
        return losses

    def backward(self, losses: list[torch.Tensor]) -> None:
        if losses[0].requires_grad:
            for loss in losses:
                loss.backward()

    def resync(self) -> None:
        """After rounding in another order: from the same weights again."""
        self.both(lambda m: m.zero_grad())
        self.sharded.load_full_state_dict(self.model.state_dict())
        load_full_optimizer_state_dict(self.sharded, self.optimizers[1], self.optimizers[0].state_dict())

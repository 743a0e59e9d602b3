"""Models for pipeline stages, and their steps against one device, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from microbatch_cases import TOLERANCE, far, loss_of
from torch import nn

import autoshard
from autoshard.errors import RuntimeMismatchError
from autoshard.models import Gpt, GptConfig, Llama, LlamaConfig, Moe, MoeConfig

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Skips(nn.Module):
    """A U-Net in small: what comes first is read last, and goes through all stages between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(12, 24), nn.Linear(24, 16)])
        self.up = nn.ModuleList([nn.Linear(16, 24), nn.Linear(24, 12)])
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        scale = torch.arange(x.shape[1], dtype=x.dtype) / x.shape[1]  # every stage makes it for itself
        first = F.gelu(self.down[0](x * scale))
        second = F.gelu(self.down[1](first))
        third = F.gelu(self.up[0](second)) + first
        found = self.up[1](third) * scale + x
        return {"loss": F.mse_loss(found, y), "found": found, "middle": second, "name": "u"}


class Uneven(Skips):
    """The first stage has a parameter of another dtype than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(12))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return super().forward(x * self.factor.to(x.dtype), y)


class Normed(nn.Module):
    """Batch norm needs the whole batch: one micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), labels)


class Detached(nn.Module):
    """The first layer's weight is read again at the end, where it has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12, bias=False)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return F.mse_loss(x @ self.first.weight.detach(), y)


class Aside(nn.Module):
    """What crosses stages and does not lead to the loss: a branch to an output, a target that is detached at the end, and a
    layer that the first and the last stage read for outputs. None of their parameters has a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.branch = (nn.ModuleList(nn.Linear(12, 12) for _ in range(4)) for _ in range(2))
        self.target, self.outside = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        target, early, found, branch = self.target(x), self.outside(y), x, y
        for layer, beside in zip(self.layers, self.branch, strict=True):
            found, branch = F.gelu(layer(found)), F.gelu(beside(branch))
        late = self.outside(found.detach())
        return {"loss": F.mse_loss(found, target.detach()), "branch": branch, "sums": (early.sum(-1), late.sum(-1))}


class Counted(nn.Module):
    """Samples weigh by how many are above a bound so far: that is known before the first micro-batch, of a buffer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.register_buffer("bound", torch.linspace(-1, 1, 12))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return F.mse_loss(x * (y > self.bound).cumsum(0), y)


class Short(nn.Module):
    """One operation: there is nothing to cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.square()


class Positive(nn.Module):
    """How many values there are after the first layer depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.first(x))
        return self.last(x[x.sum(-1) > 0]).sum()


class Shared(nn.Module):
    """Of the layers' parameters each is read by some of the others, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.layers[1].bias = self.layers[0].bias
        self.layers[2].weight = self.layers[1].weight = self.layers[0].weight
        self.layers[3].bias = self.layers[2].bias

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return F.mse_loss(x, y)


class ReadTwice(nn.Module):
    """A table with sparse gradients, looked up in the first stage and in the last; or the head's weight there."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.head, self.table = head, nn.Embedding(20, 12, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return ((x @ self.table.weight.T).logsumexp(-1) if self.head else x * self.table(ids.flip(0))).mean()


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 50, (8, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[:3, 4:] = -100  # uneven
    return ids, labels


def made(name: str) -> Made:
    torch.manual_seed(0)
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if name == "skips":
        return Skips().double(), (x, x.flip(0))
    if name == "detached":
        return Detached().double(), (x, x.flip(0))
    if name == "aside":
        return Aside().double(), (x, x.flip(0))
    if name == "counted":
        return Counted().double(), (x, x.flip(0))
    if name == "shared":
        return Shared().double(), (x, x.flip(0))
    if name == "normed":
        return Normed().double(), (x.new_ones(8, 3, 6, 6) * x[:, :6, None].unsqueeze(1), torch.arange(8) % 5)
    if name == "llama":
        config = LlamaConfig(vocab=50, width=32, hidden=48, heads=4, kv_heads=2, layers=4)
        return Llama(config).double(), tokens()
    if name == "moe":
        return Moe(
            MoeConfig(vocab=50, width=32, hidden=48, heads=4, kv_heads=2, layers=4, experts=4)
        ).double(), tokens()
    return Gpt(GptConfig(vocab=50, positions=12, width=32, heads=4, layers=4)).double(), tokens()


def compare(name: str, mesh: autoshard.Mesh, count: int, steps: int = 3, **asked: Any) -> autoshard.ShardedModule:
    """``steps`` AdamW steps with clipping: losses, outputs, gradients, the norm and weights are those of one device."""
    model, args = made(name)
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, stages="pp", micro_batches=count, **asked)
    ours, theirs = (torch.optim.AdamW(m.parameters(), 1e-2, eps=1e-6) for m in (sharded, model))
    for step in range(steps):
        torch.manual_seed(step)
        expected = loss_of(model(*args))
        state = torch.get_rng_state()
        first = not dist.is_initialized() or dist.get_rank() == 0
        torch.manual_seed(step if first else 1000 + dist.get_rank())
        found = loss_of(sharded(*args))
        assert not first or torch.equal(torch.get_rng_state(), state)
        (2 * expected).backward()
        (2 * found).backward()
        assert far(found.detach(), expected.detach()) <= TOLERANCE
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        mine = sharded.full_gradients()
        assert mine.keys() == gradients.keys()
        for n, gradient in gradients.items():
            assert far(mine[n], gradient) <= TOLERANCE, f"step {step}, gradient of {n}"
        # a rank sees its stages' parameters alone
        if dist.is_initialized() and mesh.size_of("pp") > 1 and sharded.unduplicated_gradients():
            with pytest.raises(RuntimeMismatchError, match=r"Use autoshard\.clip_grad_norm_"):
                torch.nn.utils.clip_grad_norm_(sharded.parameters(), 0.5)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert far(autoshard.clip_grad_norm_(sharded, 0.5), norm) <= TOLERANCE
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    weights = model.state_dict()
    state_dict = sharded.full_state_dict()
    assert state_dict.keys() == weights.keys()
    assert max(far(x, weights[n]) for n, x in state_dict.items() if x.is_floating_point()) <= TOLERANCE
    return sharded

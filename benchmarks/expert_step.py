"""A step of a layer of experts on gloo ranks: the compiled module beside an all-to-all written by hand, taken in turns.

    python benchmarks/expert_step.py --worlds 5
    python benchmarks/expert_step.py --ranks 4 --rows 1024 --width 256 --hidden 512 --steps 150

All cut rows and experts along one axis, begin with a rank's own rows, and give the same loss. By hand in two ways: with the
parameters that the model has and torch's grouped products (``by hand``), and with parameters of each expert, whose gradients
need no place in a tensor of all (``expert by expert``). Prints medians and least of the slowest rank's wall seconds and of
the busiest one's processor seconds, and their ratios; steps in which a virtual machine did not have its cores do not count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import worlds
from torch import nn
from torch.distributed.nn.functional import all_to_all_single

import autoshard
from autoshard.runtime.operations.experts import experts_op

TOP = 2
"""experts of a row"""


class Layer(nn.Module):
    """A router and its experts, as autoshard sees them."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.first = nn.Parameter(torch.randn(experts, 2 * hidden, width) / width**0.5)
        self.second = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP)
        return (experts_op(x, ids, weights, self.first, self.second, "silu", True, False) + x).square().mean()


class ByHand(nn.Module):
    """The same for this rank's rows, with its part of the experts; what the host has to know it asks for once."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.rank, self.ranks, self.experts = dist.get_rank(), dist.get_world_size(), layer.first.shape[0]
        self.router = nn.Parameter(layer.router.weight.detach().clone())
        self.hold(*(w.detach().chunk(self.ranks)[self.rank].clone() for w in (layer.first, layer.second)))

    def hold(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Parameters of these values."""
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = F.linear(x, self.router).softmax(-1).topk(TOP)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.experts).view(self.ranks, -1)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, by_rank = counts.sum(1).tolist(), arriving.tolist()
        received = [sum(of_rank) for of_rank in by_rank]
        rows = x.index_select(0, order // TOP)
        got = all_to_all_single(rows.new_empty(sum(received), x.shape[1]), rows, received, sent)
        pieces = [of_rank.split(lengths) for of_rank, lengths in zip(got.split(received), by_rank, strict=True)]
        made = self.computed([torch.cat(of_expert) for of_expert in zip(*pieces, strict=True)])
        split = [y.split(lengths) for y, lengths in zip(made, zip(*by_rank, strict=True), strict=True)]
        y = torch.cat([of_expert[r] for r in range(self.ranks) for of_expert in split])
        y = all_to_all_single(y.new_empty(sum(sent), x.shape[1]), y, sent, received)
        y = torch.empty_like(y).index_copy(0, order, y).view(*ids.shape, -1)
        y = torch.bmm(weights.unsqueeze(1), y).squeeze(1)
        return (y + x).square().mean() / self.ranks

    def computed(self, of_experts: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What each expert of this rank makes of its rows."""
        lengths = [len(rows) for rows in of_experts]
        ends = torch.tensor(lengths).cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(torch.cat(of_experts), self.first.mT, offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.second.mT, offs=ends).split(lengths)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.zero_grad()
        loss = self(x)
        loss.backward()
        assert self.router.grad is not None
        dist.all_reduce(self.router.grad)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total


class ExpertByExpert(ByHand):
    """With parameters of each expert."""

    def hold(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.firsts, self.seconds = (nn.ParameterList(w.clone() for w in of_all) for of_all in (first, second))

    def computed(self, of_experts: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        made = []
        for rows, first, second in zip(of_experts, self.firsts, self.seconds, strict=True):
            gate, up = F.linear(rows, first).chunk(2, -1)
            made.append(F.linear(F.silu(gate) * up, second))
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--worlds", type=int, default=1, help="so many times, and medians of the ratios")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        raise SystemExit(worlds.launch(__file__, sys.argv[1:], options.ranks, count=options.worlds))
    worlds.join(options.rank, options.ranks, options.rendezvous)
    torch.manual_seed(0)
    layer = Layer(options.experts, options.width, options.hidden)
    x = torch.randn(options.rows, options.width)
    part = x.chunk(dist.get_world_size())[dist.get_rank()]
    by_hand = {"by hand": ByHand(layer), "expert by expert": ExpertByExpert(layer)}
    sharded = autoshard.compile(layer, {"ep": dist.get_world_size()}, (part,), like="expert", inputs="local")
    steps = {name: partial(form.step, part) for name, form in by_hand.items()}
    worlds.beside(sharded, part, steps, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A step over embedding tables on gloo ranks: the compiled module beside a table-wise layout written by hand, taken in turns.

    python benchmarks/table_step.py
    python benchmarks/table_step.py --ranks 4 --batch 4096 --tables 16
    python benchmarks/table_step.py --ranks 4 --overlap

Both put whole tables on ranks, as torchrec does, look up for all, exchange what is pooled, and cut the batch of the
layers above; they give the same loss. The form by hand sums the gradients of these layers at the end, or under
``--overlap`` as soon as they are there, as DDP does, while those of the tables are exchanged and added up. Freed memory
stays with the processes: else the page faults of a table's gradient (20 MB; 8 of 11 ms of its zeros) fall to one of the
forms by chance. Prints medians and least of wall seconds and of rank 0's processor seconds, and their ratios.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import worlds
from torch import nn
from torch.distributed.nn.functional import all_to_all_single

import autoshard


class Model(nn.Module):
    """Sums of bags out of several tables, and two layers, as autoshard sees them."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = torch.cat([table(ids[:, i]).sum(1) for i, table in enumerate(self.tables)], 1)
        return self.top(found).square().mean()


class ByHand(nn.Module):
    """The same on this rank: its tables as one, of which one call looks up, and its part of the batch."""

    def __init__(self, model: Model, overlap: bool) -> None:
        super().__init__()
        self.overlap = overlap
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.each = len(model.tables) // self.ranks
        mine = range(self.rank * self.each, (self.rank + 1) * self.each)
        self.rows = model.tables[0].weight.shape[0]
        self.mine = mine
        self.table = nn.Parameter(torch.cat([model.tables[i].weight.detach() for i in mine]))
        self.top = nn.Sequential(nn.Linear(*model.top[0].weight.shape[::-1]), nn.ReLU(), nn.Linear(64, 1))
        self.top.load_state_dict(model.top.state_dict())
        self.missing = 0
        for p in self.top.parameters():
            p.register_post_accumulate_grad_hook(self.arrived)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        batch, _, bag = ids.shape
        shift = torch.arange(self.each).unsqueeze(1) * self.rows
        flat = (ids[:, self.mine.start : self.mine.stop] + shift).reshape(-1, bag)
        found = F.embedding_bag(flat, self.table, mode="sum")
        width, here = found.shape[1], batch // self.ranks
        sent = found.reshape(-1)
        got = all_to_all_single(torch.empty_like(sent), sent).view(self.ranks, here, -1)
        x = got.transpose(0, 1).reshape(here, self.ranks * self.each * width)
        return self.top(x).square().sum() / batch

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        self.zero_grad()
        self.missing = len(list(self.top.parameters()))
        loss = self(ids)
        loss.backward()
        if not self.overlap:
            self.begin()
        self.work.wait()
        for g, part in zip(self.gradients, self.bucket.split([g.numel() for g in self.gradients]), strict=True):
            g.copy_(part.view_as(g))
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total

    def arrived(self, _: torch.Tensor) -> None:
        self.missing -= 1
        if self.overlap and not self.missing:
            self.begin()

    def begin(self) -> None:
        self.gradients = [p.grad for p in self.top.parameters() if p.grad is not None]
        self.bucket = torch.cat([g.reshape(-1) for g in self.gradients])
        self.work: Any = dist.all_reduce(self.bucket, async_op=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--bag", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--overlap", action="store_true", help="by hand, too, sums go beside the tables' gradients")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--worlds", type=int, default=1, help="so many times, and medians of the ratios")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        raise SystemExit(worlds.launch(__file__, sys.argv[1:], options.ranks, count=options.worlds))
    worlds.join(options.rank, options.ranks, options.rendezvous)
    torch.manual_seed(0)
    model = Model(options.tables, options.rows, options.width)
    ids = torch.randint(options.rows, (options.batch, options.tables, options.bag))
    by_hand = ByHand(model, options.overlap)
    sharded = autoshard.compile(model, {"x": dist.get_world_size()}, (ids,), like="table-wise")
    worlds.beside(sharded, ids, {"by hand": lambda: by_hand.step(ids)}, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

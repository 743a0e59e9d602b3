"""Layouts of embedding tables: DLRM on Criteo Terabyte, and narrow tables of very different sizes, on 8 H100.

    python benchmarks/tables.py

Prints predicted steps, peaks and bytes sent per way (forward), free and by each named strategy.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
from torch import nn

import autoshard
from autoshard.models.dlrm import Dlrm, DlrmConfig

BATCH = 65536
LIKE = (None, "table-wise", "row-wise", "column-wise")


class Narrow(nn.Module):
    """One table of 400 M rows of 16 columns, sixteen of 4 M, four of 100, ten look-ups in each, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        rows = [400_000_000, *[4_000_000] * 16, *[100] * 4]
        self.tables = nn.ModuleList(nn.Embedding(n, 16) for n in rows)
        self.top = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise((16 * len(rows), 512, 512, 1)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.cat([table(ids[:, i]).sum(1) for i, table in enumerate(self.tables)], 1)
        for layer in self.top:
            x = layer(x.relu())
        return x.square().mean()


def row(model: nn.Module, args: tuple[Any, ...], like: str | None) -> str:
    try:
        plan = autoshard.plan(model, {"x": 8}, args, like=like)
    except autoshard.PlanError as error:
        return f"| {like or '(free)'} | {str(error).split(',')[0]} |"
    sent = sum(c.bytes for c in plan.collectives if c.phase == "forward")
    kinds = Counter(str(plan.layouts[n])[:4] for n in plan.layouts if n.startswith("tables"))
    cost, peak = plan.cost.total_s, plan.memory.peak
    return f"| {like or '(free)'} | {1e3 * cost:.1f} ms | {peak / 1e9:.1f} GB | {sent / 1e6:.0f} MB | {dict(kinds)} |"


def main() -> None:
    for sparse in (False, True):
        with torch.device("meta"):
            dlrm = Dlrm(DlrmConfig.terabyte()), (torch.zeros(BATCH, 13), torch.zeros(BATCH, 26, 1, dtype=torch.int64))
            cases = {
                "DLRM": (dlrm[0], (*dlrm[1], torch.zeros(BATCH))),
                "narrow": (Narrow(), (torch.zeros(BATCH, 21, 10, dtype=torch.int64),)),
            }
        for name, (model, args) in cases.items():
            for table in model.tables:
                table.sparse = sparse
            print(f"{name}, {'sparse' if sparse else 'dense'} gradients")
            print("| like | step | peak | sent | tables |\n|---|---|---|---|---|")
            for like in LIKE:
                print(row(model, args, like), flush=True)


if __name__ == "__main__":
    main()

"""Scans (cumsum, cummax): over a sharded dim the ranks gather their totals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from autoshard.passes.ir.program import Internal
from autoshard.passes.rules.base import Facts, Rule, Site, SpaceOf, along_cut, indices, over_cut, rules
from autoshard.passes.rules.factors import alike, wide_bytes


def _collectives(positions: bool) -> Callable[[Site], tuple[Internal, ...]]:
    def collectives(site: Site) -> tuple[Internal, ...]:
        dim, axes = site.cut_dim
        dtype = site.out_type().dtype
        rows = math.prod(n for d, n in enumerate(site.local_shape("self")) if d != dim)
        if not positions:
            return site.gathered(axes, rows * wide_bytes(dtype), "totals", "R")
        found = site.gathered(axes, rows * site.in_type(0).dtype.itemsize, "last values", "R")
        indices = site.gathered(axes, rows * torch.int64.itemsize, "their indices", "R")
        return (*found[:1], *indices[:1], *found[1:])

    return collectives


def _rule(function: str, space: SpaceOf = alike, saves: str = "self result", positions: bool = False) -> list[Rule]:
    return rules(
        f"{function}.default",
        space,
        (along_cut if positions else over_cut)(function),
        "... -> ...",
        _collectives(positions),
        sized=False,
        facts=Facts(saves, indices if positions else None),
    )


RULES: tuple[Rule, ...] = (
    *_rule("cumsum", lambda node, graph: replace(alike(node, graph), linear=((0,),)), saves=""),
    *_rule("cumprod"),
    *_rule("logcumsumexp"),
    *_rule("cummax", saves="self result1", positions=True),
    *_rule("cummin", saves="self result1", positions=True),
)

"""A model that returns the loss of a linear layer's logits alone, its inputs, and a rule that gathers rows in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.rules import add_rule, rule_for
from autoshard.passes.rules.families.loss import OF_LINEAR


class NextToken(nn.Module):
    """Tokens → loss of the next one. ``options``: of the cross entropy; "none": a mean of squares."""

    def __init__(self, vocab: int = 51, width: int = 12, layers: int = 0, bias: bool = True, **options: Any) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(vocab, width), nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head, self.options = nn.Linear(width, vocab, bias=bias), options

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = torch.tanh(self.inner(self.table(tokens)))
        for layer in self.layers:
            h = torch.tanh(layer(h))
        logits = self.head(h)[..., :-1, :].contiguous()
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels[..., 1:].reshape(-1), **self.options)
        return loss if not loss.dim() else loss.square().mean()


def tokens_and_labels(rows: int = 4, length: int = 9, vocab: int = 51) -> tuple[Tensor, Tensor]:
    """Labels are ignored unevenly: a full row of them, and parts of another."""
    tokens, labels = torch.randint(vocab, (2, rows, length), generator=torch.Generator().manual_seed(0))
    labels[0, 3:6] = labels[-2] = -100
    return tokens, labels


@contextmanager
def gathering_rows(*others: str) -> Iterator[None]:
    """Inside, chunked losses gather rows in chunks; ``others``: labels of strategies that other axes may have."""
    rule = rule_for(OF_LINEAR)
    assert rule is not None

    def only_gathered(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        return tuple(s for s in rule.strategies(node, graph) if s.label.startswith("vocab/") or s.label in others)

    add_rule(replace(rule, space=only_gathered))
    try:
        yield
    finally:
        add_rule(rule)

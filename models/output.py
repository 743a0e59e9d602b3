"""The output type of models with a loss; token batches and their loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Output(NamedTuple):
    """``logits``, and the scalar ``loss`` if labels were given."""

    logits: Tensor
    loss: Tensor | None = None


def token_loss(logits: Tensor, labels: Tensor | None) -> Output:
    """Mean cross entropy of ``logits [batch, seq, vocab]`` against ``labels [batch, seq]``.

    ``labels[b, t]`` is the token that follows position t (already shifted); -100 is not counted.
    """
    if labels is None:
        return Output(logits)
    return Output(logits, F.cross_entropy(logits.flatten(0, -2), labels.flatten()))


def token_batch(vocab: int, batch: int, seq: int) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    """Random tokens ``[batch, seq]`` and the tokens that follow as labels; deterministic."""
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(vocab, (batch, seq + 1), generator=generator, device="cpu")
    return (tokens[:, :-1].contiguous(),), {"labels": tokens[:, 1:].contiguous()}

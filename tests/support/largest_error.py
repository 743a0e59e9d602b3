"""How far tensors of equal shapes are from each other."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def error(theirs: list[Tensor], ours: list[Tensor]) -> float:
    assert [x.shape for x in theirs] == [x.shape for x in ours]
    found = [(a - b).detach().abs().max() for a, b in zip(theirs, ours, strict=True)]
    return float(torch.stack(found).max().nan_to_num(torch.inf))  # what is no number is far

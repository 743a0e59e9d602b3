"""How far tensors of equal shapes, or results in JSON, are from each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

Tensor = torch.Tensor


def error(theirs: list[Tensor], ours: list[Tensor]) -> float:
    assert [x.shape for x in theirs] == [x.shape for x in ours]
    found = [(a - b).detach().abs().max() for a, b in zip(theirs, ours, strict=True)]
    return float(torch.stack(found).max().nan_to_num(torch.inf))  # what is no number is far


def differences(found: Any, expected: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(place, found, expected) of what differs by more than 1e-9."""
    if isinstance(expected, dict) and found.keys() == expected.keys():
        return [d for key in expected for d in differences(found[key], expected[key], f"{path}/{key}")]
    if isinstance(expected, list) and len(found) == len(expected):
        return [
            d for i, pair in enumerate(zip(found, expected, strict=True)) for d in differences(*pair, f"{path}/{i}")
        ]
    same = not isinstance(expected, dict | list) and found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    return [] if same else [(path, found, expected)]

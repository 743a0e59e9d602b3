"""Random operands of samples: float64, from one fixed generator."""

from __future__ import annotations

from typing import Any

import torch

Sample = tuple[tuple[Any, ...], dict[str, Any]]

_random = torch.Generator().manual_seed(7)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_random, dtype=torch.float64)


def unit(*shape: int) -> torch.Tensor:
    """In (0.2, 0.9), where most functions are defined."""
    return torch.rand(shape, generator=_random, dtype=torch.float64) * 0.7 + 0.2


def z(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_random, dtype=torch.complex128)


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_random)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_random) < 0.5


def distinct(*shape: int) -> torch.Tensor:
    """No two elements equal, so that order and extremes are unique."""
    n = int(torch.tensor(shape).prod())
    return (torch.randperm(n, generator=_random).double() - n / 2).view(shape) / 3


def call(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs

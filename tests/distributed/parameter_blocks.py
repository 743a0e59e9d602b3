"""Two blocks of weight, bias, a frozen scale, and a parameter that nothing uses, trained on ranks and on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import runtime_cases as rc
import torch
from torch.nn import functional as F

from autoshard import runtime

Params = list[list[torch.Tensor]]


def blocks() -> Params:
    g = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(4, 4), (4,), (4,), (3,)]
    return [
        [torch.randn(s, dtype=torch.float64, generator=g).requires_grad_(i != 2) for i, s in enumerate(shapes)]
        for _ in range(2)
    ]


def forward(x: torch.Tensor, params: Params, arrive: Callable[..., Any]) -> torch.Tensor:
    for block in params:
        with runtime.regather():
            w, b, scale, _ = arrive(block)
            x = torch.tanh(F.linear(x, w, b)) * scale
    return x.pow(2).sum()


def batch() -> torch.Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train(comm: runtime.Communicator, params: Params, arrive: Callable[..., Any], waiting: bool) -> None:
    """Two forwards and backwards, the gradients accumulated."""
    axes = tuple(comm.mesh)
    with runtime.bind(comm):
        for _ in range(2):
            flat = [p for b in params for p in b]
            if waiting:
                flat = list(runtime.wait_gradients(*flat))
            local = runtime.slice(batch(), 0, axes, of="R")
            loss = forward(local, [flat[:4], flat[4:]], arrive)
            runtime.all_reduce(loss, axes).backward()


def compare(params: Params, dims: tuple[int, ...] = (), ranks: int = 1, index: int = 0) -> None:
    expected = blocks()
    for _ in range(2):
        forward(batch(), expected, lambda b: b).backward()
    for b, e in zip(params, expected, strict=True):
        for j, (p, q) in enumerate(zip(b, e, strict=True)):
            whole = q.grad
            if whole is not None and dims:
                whole = rc.cut(whole, dims[j], [ranks])[index]
            torch.testing.assert_close(p.grad, whole, rtol=1e-12, atol=1e-12)

"""Random forwards, called as in a training script: outputs, gradients, buffers, written inputs and generators are eager's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from fuzz_calls import inputs, module, program
from harness import ideal
from torch import nn

import autoshard

MESHES = ({"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 3})
TOLERANCE = 1e-9


def outcome(model: Any, rows: int, seed: int, train: bool, recorded: bool) -> dict[str, Any]:
    """All that a call leaves, by name."""
    args, kwargs = inputs(rows, seed)
    model.train(train)
    model.zero_grad()
    torch.manual_seed(seed)
    with torch.set_grad_enabled(recorded):
        leaves, spec = pytree.tree_flatten(model(*args, **kwargs))
    found: dict[str, Any] = {"structure": spec, "generator": torch.get_rng_state(), "y": args[1], "written": args[3]}
    total = torch.zeros((), dtype=torch.float64)
    for i, x in enumerate(leaves):
        found[f"output {i}"] = x.detach().clone() if isinstance(x, torch.Tensor) else x
        if recorded and isinstance(x, torch.Tensor) and x.is_floating_point():
            found[f"output {i} requires a gradient"] = x.requires_grad
            if x.requires_grad:
                total = total + (x * torch.arange(x.numel(), dtype=x.dtype).view(x.shape).cos()).sum()
    if recorded:
        total.backward()
        found["gradient of x"] = args[0].grad
        found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    return found | {n: b.clone() for n, b in model.named_buffers()}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """What differs; "" where nothing does. A gradient that is zero may be none."""
    for name, right in expected.items():
        mine = found[name]
        if not isinstance(right, torch.Tensor) or not isinstance(mine, torch.Tensor):
            zero = next((t for t in (mine, right) if isinstance(t, torch.Tensor)), None)
            if zero is None and mine != right:
                return f"{name}: {mine}, not {right}"
            if zero is not None and bool(zero.any()):
                return f"{name}: {mine}, not {right}"
            continue
        if (mine.dtype, mine.shape) != (right.dtype, right.shape):
            return f"{name}: {mine.dtype}{list(mine.shape)}, not {right.dtype}{list(right.shape)}"
        scale = max(float(right.double().abs().max()), 1.0) if right.numel() else 1.0
        alike = (mine == right) | (mine.isnan() & right.isnan())
        error = float((mine.double() - right.double()).where(~alike, 0).abs().max()) / scale if right.numel() else 0.0
        if not error <= TOLERANCE:
            return f"{name}: relative error {error:.3g}"
    return ""


CALLS = ((4, True, True), (4, False, False), (4, True, True))
"""rows, whether in training mode, whether gradients are recorded"""


def compared(kind: type[nn.Module], axes: dict[str, int], seed: int) -> str | None:
    """What differs between the module and its sharded form; None where eager itself fails."""
    torch.manual_seed(seed)
    model = kind()
    try:
        for call in CALLS:
            outcome(copy.deepcopy(model), call[0], seed, *call[1:])
    except (RuntimeError, IndexError):
        return None
    sharded = autoshard.compile(copy.deepcopy(model), ideal(axes), *inputs(seed=seed))
    for call in CALLS:
        expected = outcome(model, call[0], seed, *call[1:])
        if found := difference(outcome(sharded, call[0], seed, *call[1:]), expected):
            return f"call {call}, {found}"
    return ""


def check(seed: int) -> None:
    text, kind = program(seed)
    found = compared(kind, MESHES[seed % 3], seed)
    assert not found, f"seed {seed} on {MESHES[seed % 3]}: {found}\n{text}"


@pytest.mark.parametrize("seed", range(6))
def test_random_calls(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 150))
def test_many_random_calls(seed: int) -> None:
    check(seed)


def test_a_difference_is_seen() -> None:
    """Negative control: a forward that draws once more."""
    text, kind = program(1)
    other = module(text.replace("    return", "    torch.rand(1)\n    return"))
    model, changed = kind(), other()
    changed.load_state_dict(model.state_dict())
    assert "generator" in difference(outcome(changed, 4, 0, True, True), outcome(model, 4, 0, True, True))

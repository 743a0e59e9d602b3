"""Random forwards, called as in a training script: outputs, gradients, buffers, written inputs and generators are eager's."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from fuzz_calls import inputs, module, program
from harness import ideal
from torch import nn

import autoshard
from autoshard import CaptureError

MESHES = ({"tp": 2}, {"dp": 2, "tp": 2}, {"fsdp": 3})
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Situation:
    """What a call is made in."""

    rows: int = 4
    training: bool = True
    recorded: bool = True
    frozen: str = "none"
    """the beginning of the names of parameters that are frozen"""
    evaluating: str = "none"
    """the module in eval mode while others train"""
    autocast: bool = False
    """then values are rounded in another order, and only forms are compared"""


def situations(seed: int) -> list[Situation]:
    """The calls of a script: training first, then as drawn."""
    draw = random.Random(seed)
    drawn = (
        Situation(
            draw.choice((3, 4, 4, 5)),
            draw.random() < 0.6,
            draw.random() < 0.7,
            draw.choice(("none", "none", "lin", "norm", "table", "")),
            draw.choice(("none", "drop", "bn")),
            draw.random() < 0.15,
        )
        for _ in range(3)
    )
    return [Situation(), *drawn, Situation()]


def outcome(model: Any, seed: int, now: Situation) -> dict[str, Any]:
    """All that a call leaves, by name."""
    args, kwargs = inputs(now.rows, seed)
    model.train(now.training)
    for name, part in model.named_children():
        part.train(now.training and name != now.evaluating)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(now.frozen))
    model.zero_grad()
    torch.manual_seed(seed)
    recorded = now.recorded
    with torch.set_grad_enabled(recorded), torch.autocast("cpu", torch.bfloat16, enabled=now.autocast):
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


def difference(found: dict[str, Any], expected: dict[str, Any], values: bool = True) -> str:
    """What differs; "" where nothing does. A gradient that is zero may be none. ``values``: whether they count."""
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
        if not values:
            continue
        scale = max(float(right.double().abs().max()), 1.0) if right.numel() else 1.0
        alike = (mine == right) | (mine.isnan() & right.isnan())
        error = float((mine.double() - right.double()).where(~alike, 0).abs().max()) / scale if right.numel() else 0.0
        if not error <= TOLERANCE:
            return f"{name}: relative error {error:.3g}"
    return ""


def compared(kind: type[nn.Module], axes: dict[str, int], seed: int) -> str | None:
    """What differs between the module and its sharded form; None where eager itself fails, or it is refused."""
    torch.manual_seed(seed)
    model = kind()
    try:
        for now in situations(seed):
            outcome(copy.deepcopy(model), seed, now)
    except (RuntimeError, IndexError):
        return None
    try:
        sharded = autoshard.compile(copy.deepcopy(model), ideal(axes), *inputs(seed=seed))
    except CaptureError as error:
        if "to an expanded tensor" in str(error):
            return None
        raise
    for now in situations(seed):
        expected = outcome(model, seed, now)
        if found := difference(outcome(sharded, seed, now), expected, not now.autocast):
            return f"{now}: {found}"
        if now.autocast:  # what it wrote was rounded, too
            sharded.load_full_state_dict(model.state_dict())
    return ""


def check(seed: int) -> None:
    text, kind = program(seed)
    found = compared(kind, MESHES[seed % 3], seed)
    assert not found, f"seed {seed} on {MESHES[seed % 3]}: {found}\n{text}"


@pytest.mark.slow_cases("[1-5]")
@pytest.mark.parametrize("seed", range(6))
def test_random_calls(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 200))
def test_many_random_calls(seed: int) -> None:
    check(seed)


def test_a_difference_is_seen() -> None:
    """Negative control: a forward that draws once more."""
    text, kind = program(1)
    other = module(text.replace("    return", "    torch.rand(1)\n    return"))
    model, changed = kind(), other()
    changed.load_state_dict(model.state_dict())
    assert "generator" in difference(outcome(changed, 0, Situation()), outcome(model, 0, Situation()))

"""Random programs on random meshes, with layouts forced by random hints: values and gradients equal eager's."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fuzz import Program
from harness import examples, ideal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autoshard
from autoshard import HintError, Replicate, Shard

MESHES = ({"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 4})
SHAPES = ((4, 6), (5, 4), (1, 6, 4), (3, 4, 5), (4, 1), (2, 3, 7), (6, 4, 2))
TOLERANCE = 1e-9

programs = st.tuples(
    st.lists(st.integers(0, 1 << 20), min_size=10, max_size=25),
    st.sampled_from(SHAPES),
    st.sampled_from(MESHES),
    st.integers(0, 1 << 16),
)


def hints(program: Program, axes: dict[str, int], seed: int) -> dict[str, Any]:
    """A placement on one axis for about a third of the inputs, parameters and steps."""
    draw = random.Random(seed)
    shapes = {"x": program.example["x"].shape, "y": program.example["y"].shape}
    shapes |= {name: p.shape for name, p in program.named_parameters()}
    shapes |= {f"steps.{i}": torch.Size(s) for i, s in enumerate(program.shapes)}
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        if shape and draw.random() < 0.35:
            placement = Shard(draw.randrange(len(shape))) if draw.random() < 0.85 else Replicate()
            found[name] = {draw.choice(list(axes)): placement}
    return found


def results(module: torch.nn.Module, program: Program) -> list[torch.Tensor]:
    """The outputs, then the gradients of the inputs and of every parameter (zeros where there is none)."""
    given = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in program.example.items()}
    module.zero_grad()
    last, total = module(**given)
    (total + (last * torch.arange(last.numel(), dtype=torch.float64).view(last.shape).cos()).sum()).backward()
    leaves = [given["x"], given["y"], *(p for _, p in sorted(module.named_parameters()))]
    return [last.detach(), total.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def compiled(program: Program, axes: dict[str, int], asked: dict[str, Any]) -> autoshard.ShardedModule:
    """A step that does nothing (a slice of everything) is not in the graph; hints on such steps are dropped."""
    while True:
        try:
            return autoshard.compile(program, ideal(axes), (), program.example, hints=asked)
        except HintError as error:
            missing = re.match(r"hint '(steps\.\d+)' matches no", str(error))
            if missing is None:
                raise
            del asked[missing[1]]


def check(numbers: Sequence[int], shape: tuple[int, ...], axes: dict[str, int], seed: int) -> autoshard.ShardedModule:
    program = Program(numbers, shape)
    expected = results(program, program)
    sharded = compiled(program, axes, hints(program, axes, seed))
    for i, (found, right) in enumerate(zip(results(sharded, program), expected, strict=True)):
        error = float((found - right).abs().max()) / max(float(right.abs().max()), 1e-6)
        assert error <= TOLERANCE, f"result {i}: relative error {error:.3g}\n{sharded.source}"
    return sharded


@settings(max_examples=examples(8), suppress_health_check=list(HealthCheck))
@given(programs)
def test_random_programs(case: tuple[list[int], tuple[int, ...], dict[str, int], int]) -> None:
    check(*case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(programs)
def test_many_random_programs(case: tuple[list[int], tuple[int, ...], dict[str, int], int]) -> None:
    check(*case)


def check_all() -> None:
    for seed in range(5):
        check(list(range(18)), (4, 6), {"a": 2}, seed)


def test_the_programs_are_really_sharded() -> None:
    sharded = check(list(range(0, 37 * 25, 37)) + list(range(18)), (4, 6), {"a": 2}, 0)
    divided = [c for c in sharded.plan.choices.values() if c.labels[0] not in ("I", "R") and "P" not in c.labels[0]]
    assert len(divided) >= 5


def test_a_wrong_collective_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a gather that is a little off."""
    real = autoshard.runtime.all_gather

    def wrong(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return real(x * 1.001 if x.is_floating_point() else x, *args, **kwargs)

    monkeypatch.setattr(autoshard.runtime, "all_gather", wrong)
    with pytest.raises(AssertionError, match="relative error"):
        check_all()

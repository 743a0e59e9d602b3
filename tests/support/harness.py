"""Train a model sharded and unsharded, and insist that everything agrees and that the work is really divided."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest
import torch
import torch._dynamo  # the first export would import it
import torch.utils._pytree as pytree
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import autoshard
from autoshard import compiler
from autoshard.check.coverage import SPLIT_ALL
from autoshard.hardware import PRESETS, Link
from autoshard.passes.capture.export import capture
from autoshard.passes.ir.graph import Graph
from autoshard.runtime.transport.torch_state import autocast_state
from autoshard.torch_private.dispatch import count_function_modes

SLOW_LINK = replace(
    PRESETS["ideal_network"], name="slow", flops=1e10, memory_bandwidth=1e15, node=Link(1e-9, 1e7), network=Link(1e-9, 1e7),
    kernel_latency=1e-9, overlap=0.9,
)  # fmt: skip
"""what messages take compares with what products take, small ones, too, and both go side by side"""

MESHES = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "dp4": {"dp": 4},
    "dp2tp2": {"dp": 2, "tp": 2},
    "dp2tp2sp2": {"dp": 2, "tp": 2, "sp": 2},
    "tp1": {"tp": 1},
}

RUN_SLOW = "AUTOSHARD_TEST_SLOW"
"""variable that is set where ``--run-slow`` is given"""

Signature = tuple[str, tuple[str, ...], str, float]
"""a collective: kind, axes, phase, bytes"""


def examples(most: int) -> int:
    """Random examples of a test: ``most`` with ``--run-slow``, else a quarter of them."""
    return most if RUN_SLOW in os.environ else max(1, most // 4)


def ideal(axes: dict[str, int]) -> autoshard.Mesh:
    """A mesh on which everything that can be split is split."""
    return autoshard.Mesh(axes, SPLIT_ALL)


def freeze_imports() -> None:
    """Keep what torch's import has left, and never frees, from being walked over thousands of times.

    The collector does that, and a capture, where it looks for new caches of functions among the collector's objects.
    It looks there for functions, too; of torch's own it needs one, which is made anew to stay visible.
    """
    gc.collect()
    gc.freeze()
    f = _BatchNorm.forward
    _BatchNorm.forward = FunctionType(  # type: ignore[method-assign]
        f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__
    )


def use_device(device: str) -> None:
    """Make tensors and random generators there, where nothing else is said, from now on."""

    class Generator(torch.Generator):
        def __new__(cls, device: Any = device) -> Any:
            return super().__new__(cls, device)

    torch.set_default_device(device)
    torch.Generator = Generator  # type: ignore[misc]


class Captures:
    """``capture`` that remembers its results, and the models, so that their ids stay theirs.

    ``of``: what tells one model from another.
    """

    def __init__(self, of: Callable[[nn.Module], object] = id) -> None:
        self.of = of
        self.known: dict[Any, tuple[nn.Module, Graph]] = {}

    def __call__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any) -> Graph:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        known = [(x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves]
        held = [(tuple(x.shape), x.dtype, x.requires_grad) for x in (*model.parameters(), *model.buffers())]
        state = [m.training for m in model.modules()], held, autocast_state(), count_function_modes()
        key = (self.of(model), str(known), str(spec), str(options), str(state))
        if key not in self.known:
            self.known[key] = model, capture(model, args, kwargs, **options)
        return self.known[key][1]


@contextlib.contextmanager
def captured_once() -> Iterator[Captures]:
    """While inside, a model that is compiled for several meshes is captured once: no mesh matters to a capture."""
    with pytest.MonkeyPatch.context() as patch:
        found = Captures()
        patch.setattr(compiler, "capture", found)
        yield found


def double(tree: Any) -> Any:
    """Floating point tensors as float64."""
    return pytree.tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, tree)


def assert_equal_training(
    model: nn.Module,
    axes: dict[str, int],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    share: float | None = None,
    steps: int = 3,
    hints: dict[str, Any] | None = None,
    like: Any = None,
    hardware: str | autoshard.Hardware = "ideal_network",
) -> autoshard.VerifyReport:
    """float64, relative error ≤ 1e-9 (100 times that for weights after AdamW). ``share``: flops_per_rank · ranks / flops."""
    args, kwargs = double((args, kwargs or {}))
    mesh = autoshard.Mesh(axes, hardware=hardware)
    report = autoshard.verify(model.double(), mesh, args, kwargs, steps=steps, hints=hints, like=like)
    assert report.ok, str(report)
    cost, ranks = report.plan.cost, math.prod(axes.values())
    if share is not None:
        assert cost.flops_per_rank <= share * cost.flops / ranks, f"work is not divided: {cost}"
    return report


def collectives(
    model: nn.Module,
    axes: dict[str, int],
    hints: dict[str, Any] | None,
    args: tuple[torch.Tensor, ...],
    hardware: str | autoshard.Hardware = "ideal_network",
    kwargs: dict[str, torch.Tensor] | None = None,
    like: Any = None,
) -> Counter[Signature]:
    """The plan's collectives as a multiset; what is really executed must be the same bytes per kind, axis and phase."""
    torch.manual_seed(0)
    assert_equal_training(model, axes, args, kwargs, hints=hints, like=like, hardware=hardware)
    args, kwargs = double((args, kwargs or {}))
    sharded = autoshard.compile(model, autoshard.Mesh(axes, hardware), args, kwargs, hints=hints, like=like)
    executed: list[Any] = []
    sharded.record(executed)
    getattr(out := sharded(*args, **kwargs), "loss", out).backward()
    predicted_bytes: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    executed_bytes: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    for c in sharded.collectives:
        predicted_bytes[c.kind, c.axes, c.phase] += c.bytes
    for e in executed:
        executed_bytes[e.kind, e.axes, e.phase] += e.bytes
    assert predicted_bytes == pytest.approx(executed_bytes)
    return Counter((c.kind, c.axes, c.phase, c.bytes) for c in sharded.collectives)

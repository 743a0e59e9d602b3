"""Trains any model on a mesh and on one device, and says what came of it: equal, refused by name, wrong, or a raw error."""

from __future__ import annotations

import copy
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from harness import ideal
from torch import nn

import autoshard
from autoshard.errors import AutoshardError

Record = dict[str, torch.Tensor]
"""what a step left, by name"""

TOLERANCE = 1e-9
"""relative error of float64"""


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model returns, or the mean square of all floating-point outputs."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        return found.sum()
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        return output
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
    return torch.stack([x.square().mean().to(x.real.dtype) for x in leaves if x.requires_grad and x.numel()]).sum()


@dataclass(frozen=True)
class Family:
    """A model to be made and its arguments, both after seeding; everything is float64."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    """positional arguments as a tuple, or keyword arguments as a dict"""
    loss: Callable[[Any], torch.Tensor] = loss_of
    train: bool = True
    seed: Callable[[], Any] = lambda: None
    """further generators to be seeded before a training"""

    def made(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """Model and arguments in float64."""
        _seed(1)
        model = self.model().double().train(self.train)
        given = pytree.tree_map(_doubled, self.inputs())
        return (model, (), given) if isinstance(given, dict) else (model, given, {})


@dataclass(frozen=True)
class Outcome:
    """What came of a family."""

    verdict: str
    """equal, refused, wrong, raw, eager fails, or eager differs (from one run to the next)"""
    said: str = ""
    parts: tuple[str, ...] = ()
    divided: float = 0.0
    """share of the FLOPs that is divided among the ranks"""
    sharded: Any = None


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _doubled(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x


def _full(x: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole.detach().clone()


def trained(
    model: nn.Module, family: Family, args: tuple[Any, ...], kwargs: dict[str, Any], steps: int
) -> list[Record]:
    """Per step outputs, loss and gradients; last the state, and what each generator draws next."""
    _seed(0)
    family.seed()
    optimizer, found = None, []
    for _ in range(steps):
        out = model(*args, **kwargs)
        loss = family.loss(out)
        record = {f"output {i}": _full(x) for i, x in enumerate(pytree.tree_leaves(out)) if isinstance(x, torch.Tensor)}
        if any(p.requires_grad for p in model.parameters()):
            optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.01)
            optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
        record |= {f"gradient {n}": _full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        found.append(record | {"loss": _full(loss)})
        if optimizer is not None:
            optimizer.step()
    found.append({n: _full(x) for n, x in model.state_dict().items()})
    found.append({"next draws": torch.tensor([float(torch.rand(())), random.random(), np.random.rand()])})
    return found


def difference(ours: list[Record], theirs: list[Record]) -> str:
    """The first difference of two trainings; "" if there is none."""
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        # Classes of outputs are registered when a model is captured: only then do they have leaves.
        if only := [name for name in sorted(a.keys() ^ b.keys()) if not name.startswith("output ")]:
            return f"step {step}: only in one of both: {only[:5]}"
        for what in a.keys() & b.keys():
            x, y = a[what], b[what]
            if x.shape != y.shape or x.dtype != y.dtype:
                return f"step {step}, {what}: {x.dtype} {list(x.shape)} for {y.dtype} {list(y.shape)}"
            if not x.dtype.is_floating_point and not x.is_complex():
                if not torch.equal(x, y):
                    return f"step {step}, {what}: other values"
            elif x.numel():
                scale = max(1e-3, float(y.abs().nan_to_num().max()))
                if not torch.allclose(x, y, rtol=0, atol=TOLERANCE * scale, equal_nan=True):
                    return f"step {step}, {what}: {float((x - y).abs().max()) / scale:.1e}"
    return ""


def outcome(family: Family, axes: dict[str, int], steps: int = 3, **options: Any) -> Outcome:
    """What comes of training ``family`` on a mesh with these axes, against one device."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _outcome(family, axes, steps, options)
    finally:
        torch.set_default_dtype(default)


def _with_causes(error: BaseException | None) -> str:
    """The errors of a chain, each with its last line of code."""
    said = []
    while error is not None and len(said) < 4:
        frames = traceback.extract_tb(error.__traceback__)
        at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        said.append(f"{type(error).__name__}: {error}{at}")
        error = error.__cause__ or error.__context__
    return " <- ".join(said)


def _outcome(family: Family, axes: dict[str, int], steps: int, options: dict[str, Any]) -> Outcome:
    try:
        model, args, kwargs = family.made()
        runs = [trained(copy.deepcopy(model), family, *copy.deepcopy((args, kwargs)), steps) for _ in range(2)]
    except Exception as error:  # whatever the model does
        return Outcome("eager fails", f"{type(error).__name__}: {error}")
    if said := difference(*runs):
        return Outcome("eager differs", said)
    try:
        sharded = autoshard.compile(model, ideal(axes), **options)
        said = difference(trained(sharded, family, args, kwargs, steps), runs[0])
    except Exception as error:  # the verdict
        return Outcome("refused" if isinstance(error, AutoshardError) else "raw", _with_causes(error))
    if said:
        return Outcome("wrong", said, sharded=sharded)
    ranks, divided = ideal(axes).size, 0.0
    if sharded.parts and (cost := sharded.plan.cost).flops:
        divided = (cost.flops - cost.flops_per_rank) / cost.flops * ranks / (ranks - 1)
    return Outcome(
        "equal", str(sharded.plan.notes[:1]) if sharded.parts else "no part", sharded.parts, divided, sharded
    )

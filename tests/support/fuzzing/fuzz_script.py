"""Runs random trainings: what of a model and its sharded form is compared, step by step."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import fuzz_training
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from fuzz_settings import INPUTS, Case
from harness import SLOW_LINK, Captures
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import AutoshardError, HintError, Plan, Replicate, Shard, compiler
from autoshard.check.coverage import SPLIT_ALL
from autoshard.errors import RuntimeMismatchError
from autoshard.passes.propagate import planner
from autoshard.passes.propagate.network import BuiltNetwork, LayoutNetwork

TOLERANCE = 1e-9
LARGEST = 1e4
"""values, so that their rounding is small"""
ROUNDED = 2e-5
"""after steps of parameters in float32, each rounded"""
Kind = Literal["equal", "refused", "different", "error", "no model"]


@dataclass(frozen=True)
class Found:
    """What a case came to."""

    kind: Kind
    text: str = ""


class DifferentError(AssertionError):
    """The sharded form did otherwise."""


class Emulated:
    """A model whose parameters are read in float64, in eager mode."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        read = {n: p.double() for n, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, read, args, kwargs)


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


@contextlib.contextmanager
def at_random(seed: int) -> Iterator[None]:
    """Plans are drawn at random among those that are allowed: every choice costs what the seed says."""
    build = LayoutNetwork.build

    def drawn(self: LayoutNetwork, tables: Any) -> BuiltNetwork:
        built = build(self, tables)
        numbers = np.random.default_rng(seed)
        nodes = tuple(np.where(np.isfinite(x), numbers.random(x.shape), x) for x in built.network.nodes)
        return replace(built, network=replace(built.network, nodes=nodes), alike=(None,) * len(nodes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner.LayoutNetwork, "build", drawn)
        yield


class Script:
    """Runs the events of a case on the model and its sharded form, and raises where they differ."""

    last: Script | None = None
    """the one that ran before, and was equal; None where nothing is kept"""
    keeps = False

    def __init__(self, case: Case) -> None:
        self.case, self.setting = case, case.setting
        self.tolerance = TOLERANCE
        model = case.source.model()
        self.model = model.float() if self.setting.wide else model
        self.initial = copy.deepcopy(self.model.state_dict())
        self.calls = 0
        uneven = case.source.seed % 3 == 0 and not (self.setting.micro_batches > 1 or self.setting.local)
        self.rows = 6 if uneven else 8

    def inputs(self, shape: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rows, length = ((self.rows, 5), (self.rows // 2 if self.setting.micro_batches < 4 else 4, 4))[shape]
        return fuzz_training.inputs(self.case.source.width, rows, length, self.case.source.seed + shape, self.case.grad)

    def brought(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What this rank brings of the batch."""
        if not self.setting.local:
            return args
        parts = (
            self.part(n, x.detach()).clone().requires_grad_(x.requires_grad) for n, x in zip(INPUTS, args, strict=True)
        )
        return tuple(parts)

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Of an input that comes in parts: rows, unless a hint cuts it otherwise."""
        asked = self.hints().get(name, {}) if self.setting.chosen == "hints" else {}
        dim = next((p.dim for p in asked.values() if isinstance(p, Shard)), 0)
        return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]

    def compiled(self) -> Any:
        s = self.setting
        hardware = {"split": SPLIT_ALL, "slow": SLOW_LINK, "cpu": "cpu"}[s.hardware]
        mesh = autoshard.Mesh(s.axes, hardware)
        options: dict[str, Any] = {
            "micro_batches": s.micro_batches,
            "recompute": s.recompute,
            "gather_outputs": s.gather_outputs,
            "dynamic": s.dynamic,
        }
        if s.schedule:
            options |= {"stages": "pp", "schedule": s.schedule, "stages_per_rank": s.stages_per_rank}
        if s.wide:
            options["mixed_precision"] = MixedPrecisionPolicy(torch.float64, torch.float64)
        if s.local:
            options["inputs"] = dict.fromkeys(INPUTS, "local")
        if "=" in s.chosen:
            options["like"] = dict(x.split("=") for x in s.chosen.split(","))
        if s.chosen == "hints":
            options["hints"] = self.hints()
        args, kwargs = self.inputs(0)
        args = self.brought(args)
        model = copy.deepcopy(self.model)
        if s.chosen == "given":
            with at_random(s.seed):
                plan = autoshard.plan(model, mesh, args, kwargs, **_planned(options))
            options["plan"] = Plan.from_json(plan.to_json())
            options["recompute"] = "auto"
        while True:
            try:
                return autoshard.compile(model, mesh, *((args, kwargs) if s.example else ()), **options)
            except HintError as error:  # what the forward does not read has no name in the graph
                missing = re.match(r"hint '([\w.]+)' matches no", str(error))
                if missing is None:
                    raise
                del options["hints"][missing[1]]

    def hints(self) -> dict[str, Any]:
        """A placement along one axis for about a third of the parameters and inputs."""
        draw = random.Random(self.setting.seed)
        args, _ = self.inputs(0)
        shapes = {n: p.shape for n, p in self.model.named_parameters()} | {"x": args[0].shape, "ids": args[1].shape}
        axes = [a for a in self.setting.axes if not (a == "pp" and self.setting.schedule)]
        found: dict[str, Any] = {}
        for name, shape in shapes.items():
            if shape and axes and draw.random() < 0.35:
                even = [d for d, n in enumerate(shape) if n % math.prod(self.setting.axes.values()) == 0]
                dims = even if self.setting.local and name in INPUTS else range(len(shape))
                place = Shard(draw.choice(dims)) if draw.random() < 0.85 else Replicate()
                found[name] = {draw.choice(axes): place}
        return found

    def run(self) -> None:
        with at_random(self.setting.seed) if self.setting.chosen == "random" else contextlib.nullcontext():
            self.sharded = self.kept() or self.compiled()
            self.optimizers: list[Any] = []
            for i, (name, *arguments) in enumerate(self.case.script):
                self.now = f"event {i} {name} {arguments}"
                getattr(self, name)(*arguments)

    def kept(self) -> Any:
        """A copy of the module that the last case left, if it was compiled as this one is, with initial weights."""
        if not isinstance(self.last, Script) or self.last.case.compiled_as != self.case.compiled_as:
            return None
        found = copy.deepcopy(self.last.sharded)
        found.load_full_state_dict(self.initial)
        found.zero_grad()
        return found.requires_grad_()

    def both(self) -> tuple[Any, ...]:
        return self.model, self.sharded

    # --- events ---

    def call(self, mode: str, shape: int) -> None:
        self.calls += 1
        theirs = self.outcome(self.model, mode, shape)
        mine = self.outcome(self.sharded, mode, shape)
        self.compare(mine, theirs)
        if not self.optimizers:
            self.optimizers = [self.optimizer(m) for m in self.both()]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        if self.setting.wide:
            self.tolerance = ROUNDED
        self.tolerance = max(self.tolerance, min(10 * self.tolerance, 1e-7))
        self.compare_weights()

    def zero(self, to_none: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    def edit(self) -> None:
        with torch.no_grad():
            for model in self.both():
                for _, p in model.named_parameters():
                    p.mul_(0.9)

    def load(self) -> None:
        self.model.load_state_dict(self.initial)
        self.sharded.load_full_state_dict(self.initial)

    def copy(self) -> None:
        """Goes on with a copy, whose optimizer is new."""
        self.sharded = copy.deepcopy(self.sharded)
        self.model = copy.deepcopy(self.model)
        self.optimizers = [self.optimizer(m) for m in self.both()]

    def freeze(self, name: str) -> None:
        for model in self.both():
            for n, p in model.named_parameters():
                if n.startswith(name):
                    p.requires_grad_(False)

    def thaw(self) -> None:
        for model in self.both():
            for _, p in model.named_parameters():
                p.requires_grad_(True)

    def clip(self) -> None:
        if any(p.grad is not None for p in self.model.parameters()):
            theirs = nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            mine = autoshard.clip_grad_norm_(self.sharded, 0.1)
            self.close("norm", full(mine), theirs)

    def state(self) -> None:
        """What a checkpoint holds goes out and in again."""
        self.sharded.load_state_dict(self.sharded.state_dict())
        self.compare_weights()

    def rate(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

    # --- comparisons ---

    def optimizer(self, model: nn.Module) -> Any:
        groups = [{"params": list(model.parameters())}]
        if self.setting.optimizer == "sgd":
            return torch.optim.SGD(groups, 0.05, 0.9)
        return torch.optim.AdamW(groups, 1e-2, eps=1e-2)  # less would make the rounding of small gradients large

    def outcome(self, model: Any, mode: str, shape: int) -> dict[str, Any]:
        """All that a call leaves, by name."""
        args, kwargs = self.inputs(shape)
        if model is not self.model:
            args = self.brought(args)
        model.train(mode == "train")
        torch.manual_seed(self.case.source.seed + self.calls)
        run = Emulated(model) if self.setting.wide and model is self.model else model
        recorded = mode != "quiet"
        with torch.set_grad_enabled(recorded):
            leaves, spec = pytree.tree_flatten(run(*args, **kwargs))
        found: dict[str, Any] = {"structure": spec}
        if not (self.setting.schedule and dist.is_initialized() and dist.get_rank()):
            found["generator"] = torch.get_rng_state()
        total = torch.zeros((), dtype=torch.float64)
        scalars = []
        for i, x in enumerate(leaves):
            found[f"output {i}"] = full(x).detach().clone() if isinstance(x, torch.Tensor) else x
            if not (recorded and isinstance(x, torch.Tensor) and x.is_floating_point()):
                continue
            if not self.setting.parts:
                found[f"output {i} requires a gradient"] = x.requires_grad
                if x.requires_grad:
                    total = total + (x * torch.arange(x.numel(), dtype=x.dtype).view(x.shape).cos()).sum()
            elif not x.ndim and x.requires_grad:
                scalars.append(x)
        if scalars:
            total = scalars[0] * 1.5
        if recorded and total.requires_grad:
            total.backward()
            if self.case.grad:
                x = args[0].grad
                if self.setting.local and model is self.model and x is not None:
                    x = self.part("x", x)
                found["gradient of x"] = full(x)
        gradients = (
            model.full_gradients() if model is not self.model else {n: p.grad for n, p in model.named_parameters()}
        )
        found |= {f"gradient of {n}": gradients.get(n) for n, _ in self.model.named_parameters()}
        state = model.full_state_dict() if model is not self.model else model.state_dict()
        return found | {n: state[n].clone() for n, _ in self.model.named_buffers()}

    def compare(self, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        """One that sums up to nothing is as exact as the largest is."""
        gradients = [x for n, x in theirs.items() if n.startswith("gradient") and isinstance(x, torch.Tensor)]
        least = max((1e-3 * float(x.abs().max()) for x in gradients if x.numel()), default=0.0)
        for name, right in theirs.items():
            self.close(name, mine[name], right, least if name.startswith("gradient") else 0.0)

    def compare_weights(self) -> None:
        mine, theirs = self.sharded.full_state_dict(), self.model.state_dict()
        if mine.keys() != theirs.keys():
            raise DifferentError(f"{self.now}: the state has {sorted(mine)}, not {sorted(theirs)}")
        self.compare(mine, theirs)

    def close(self, name: str, found: Any, right: Any, least: float = 0.0) -> None:
        """A gradient that is zero may be none."""
        if not isinstance(right, torch.Tensor) or not isinstance(found, torch.Tensor):
            zero = next((t for t in (found, right) if isinstance(t, torch.Tensor)), None)
            if (zero is None and found != right) or (zero is not None and bool(zero.any())):
                raise DifferentError(f"{self.now}: {name}: {found}, not {right}")
            return
        if (found.dtype, found.shape) != (right.dtype, right.shape):
            raise DifferentError(
                f"{self.now}: {name}: {found.dtype}{list(found.shape)}, not {right.dtype}{list(right.shape)}"
            )
        if not right.numel():
            return
        least = max(least, 1e-3 if right.is_floating_point() else 1.0)
        scale = max(float(right.double().abs().max()), least)
        tolerance = self.tolerance
        if self.setting.wide and right.dtype == torch.float32:
            tolerance = max(tolerance, 1e-6)
        alike = (found == right) | (found.isnan() & right.isnan())
        error = float((found.double() - right.double()).where(~alike, 0).abs().max()) / scale
        if not error <= tolerance:
            raise DifferentError(f"{self.now}: {name}: relative error {error:.3g}")


def _planned(options: Mapping[str, Any]) -> dict[str, Any]:
    return {n: x for n, x in options.items() if n != "gather_outputs"}


class Alone(Script):
    """The events on the unsharded model alone: whether they can be run at all, and are finite."""

    def compiled(self) -> Any:
        return None

    def both(self) -> tuple[Any, ...]:
        return (self.model,)

    def call(self, mode: str, shape: int) -> None:
        self.calls += 1
        found = self.outcome(self.model, mode, shape)
        for x in found.values():
            if (
                isinstance(x, torch.Tensor)
                and x.is_floating_point()
                and x.numel()
                and not float(x.abs().max()) < LARGEST
            ):
                raise ValueError("values too large, or not finite")
        if not self.optimizers:
            self.optimizers = [self.optimizer(self.model)]

    def load(self) -> None:
        self.model.load_state_dict(self.initial)

    def copy(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.optimizers = [self.optimizer(self.model)]

    def clip(self) -> None:
        if any(p.grad is not None for p in self.model.parameters()):
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)

    def state(self) -> None:
        pass

    def compare_weights(self) -> None:
        pass


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Inside, a case that follows one of the same model and setting goes on with a copy of what that one compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Script, "keeps", True)
        yield
    Script.last = None


@contextlib.contextmanager
def captured_once() -> Iterator[dict[Any, Any]]:
    """Inside, models of one text, in one dtype, are captured once for each form of a call."""
    found = Captures(lambda model: type(model).text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "capture", found)
        yield found.known


def ran(case: Case) -> Found:
    """The case in this process, or on this rank."""
    try:
        Alone(case).run()
    except Exception as error:
        return Found("no model", f"{type(error).__name__}: {error}")
    run = Script(case)
    try:
        run.run()
        Script.last = run if Script.keeps else None
        return Found("equal")
    except RuntimeMismatchError as error:  # all of them bring the same
        return Found("different", f"{run.now}: {error}")
    except AutoshardError as error:
        return Found("refused", f"{getattr(run, 'now', 'compile')}: {type(error).__name__}: {error}")
    except DifferentError as error:
        return Found("different", str(error))
    except Exception as error:
        trace = "".join(traceback.format_tb(error.__traceback__)[-6:])
        return Found("error", f"{getattr(run, 'now', 'compile')}: {type(error).__name__}: {error}\n{trace}")


def kind_of(found: Found) -> str:
    """A refusal or failure without its names and numbers."""
    text = found.text.split("\n")[0]
    text = re.sub(r"^event \d+ (\w+) \[.*?\]: ", r"\1: ", text)
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", text)
    return re.sub(r"<model \d+>:\d+|\d+", "N", text)[:160]


def shrunk(case: Case, found: Found, run: Any = ran, tries: int = 60) -> tuple[Case, Found]:
    """A smaller case that comes to the same kind."""
    best, text = case, found
    more = True
    while more:
        more = False
        for smaller in best.smaller():
            if not tries:
                return best, text
            tries -= 1
            now = run(smaller)
            if now.kind == found.kind and (found.kind != "refused" or kind_of(now) == kind_of(found)):
                best, text, more = smaller, now, True
                break
    return best, text

"""``autoshard.verify``: the sharded model against the unsharded one, step by step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import nn

from autoshard import api
from autoshard.check.closeness import difference, scale
from autoshard.check.divergence import first_divergence
from autoshard.check.exact import SameDraws, in_float64
from autoshard.check.loss import copied, fresh, full, loss_of
from autoshard.errors import AutoshardError, RuntimeMismatchError
from autoshard.mesh import MeshLike
from autoshard.module.arguments import check_arguments
from autoshard.module.base import ShardedModule
from autoshard.passes.propagate.recompute import Recompute
from autoshard.plans.plan import Plan

SPARSE = " (sparse)"
"""after the names of gradients that are sparse"""
LEARNING_RATE = 1e-3
ROUNDINGS = 4.0
"""times the rounding error of one device that the sharded model may have: its sums run in another order"""


def default_rtol(dtype: torch.dtype) -> float:
    """1e-9 for float64, 1e-4 for float32, 2e-2 for lower precision; integers must be equal."""
    if not dtype.is_floating_point or dtype == torch.float64:
        return 1e-9
    return 1e-4 if dtype == torch.float32 else 2e-2


@dataclass(frozen=True)
class Comparison:
    """One tensor's largest deviation. ``error``: max |a - b| over the scale of its kind; ``limit``: what is allowed."""

    what: str
    kind: str
    """output, input (a forward may write to it), gradient, buffer, parameter"""
    step: int
    error: float
    limit: float
    finite: bool = True
    """whether the unsharded model's is; otherwise the same elements must be infinite or NaN"""
    exact: float | None = None
    """in lower precision: the sharded model's error against the same model in float64"""
    rounding: float | None = None
    """in lower precision: the unsharded model's error against the same model in float64"""

    @property
    def ok(self) -> bool:
        return self.error <= self.limit or self.rounds_alike

    @property
    def rounds_alike(self) -> bool:
        """Whether the sharded model is as near to float64 as one device is, up to :data:`ROUNDINGS` times its error."""
        if self.exact is None or self.rounding is None:
            return False
        return self.exact <= min(ROUNDINGS * self.rounding, math.sqrt(self.limit))

    def __str__(self) -> str:
        mark = "ok  " if self.ok else "DIFF"
        text = f"{mark} step {self.step}  {self.kind:<9} {self.what:<48} error {self.error:.2e}  limit {self.limit:.0e}"
        if self.exact is None or self.rounding is None:
            return text
        return f"{text}  against float64: {self.exact:.2e}, one device {self.rounding:.2e}"


@dataclass(frozen=True)
class VerifyReport:
    """What was compared. ``first_divergence``: the first operation (or tensor) that differs, None where all agree."""

    ok: bool
    comparisons: tuple[Comparison, ...]
    first_divergence: str | None
    rtol: float
    atol: float
    plan: Plan = field(repr=False)

    @property
    def worst(self) -> Comparison:
        """The comparison nearest to, or furthest over, its limit."""
        return max(self.comparisons, key=lambda c: c.error / c.limit if c.limit else c.error)

    def __str__(self) -> str:
        by_kind: dict[str, list[Comparison]] = {}
        for c in self.comparisons:
            by_kind.setdefault(c.kind, []).append(c)
        lines = [
            f"verify on mesh {self.plan.mesh}: {'ok' if self.ok else 'DIVERGES'}  (rtol {self.rtol:.0e}, atol {self.atol:.0e})"
        ]
        for kind, found in by_kind.items():
            worst = max(found, key=lambda c: c.error)
            text = f"  {len(found):>4} {kind + 's':<11} largest error {worst.error:.2e}  {worst.what}"
            if worst.exact is not None and worst.rounding is not None:
                text += f"  (against float64: {worst.exact:.2e}, one device {worst.rounding:.2e})"
            lines.append(text)
        lines += [f"  {c}" for c in self.comparisons if not c.ok][:10]
        if wild := [c.what for c in self.comparisons if not c.finite]:
            lines.append(f"  not finite in the unsharded model: {', '.join(wild[:5])}{', …' if len(wild) > 5 else ''}")
        if self.first_divergence:
            lines.append(f"  first divergence: {self.first_divergence}")
        return "\n".join(lines)


def verify(
    model: nn.Module,
    mesh: MeshLike,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    steps: int = 1,
    plan: Plan | None = None,
    hints: Mapping[str, Any] | None = None,
    like: api.Like = None,
    stages: str | None = None,
    micro_batches: int | Literal["auto"] = 1,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    recompute: Recompute = "auto",
) -> VerifyReport:
    """Train copies of ``model`` sharded and unsharded for ``steps`` AdamW steps and compare everything.

    Outputs, every gradient, buffers, and the weights after every step, from the same seed. ``error`` is the largest
    absolute difference relative to the largest absolute value of the tensor (infinities and NaN must be those of the
    unsharded model); it may be ``rtol`` (default: that of :func:`default_rtol` for the tensor's dtype), plus ``atol``
    (default: ``rtol`` of the largest value of that kind) in absolute terms, so that gradients that are zero but for
    rounding do not count. Weights are allowed 100 times that, since Adam divides by the root of squared gradients. Runs
    on the in-process mesh, and under torch.distributed on every rank (a collective call).
    ``stages``, ``micro_batches``, ``schedule``, ``stages_per_rank``, ``recompute``: as of :func:`autoshard.compile`.
    The loss is the model's first scalar output, or the mean square of its outputs. Raises as :func:`autoshard.compile`
    does, and :class:`AutoshardError` for ``steps`` below 1.
    """
    check_arguments(model, example_args, example_kwargs)
    if steps < 1:
        raise AutoshardError(f"steps is {steps!r}: at least one step is needed to compare anything")
    kwargs = dict(example_kwargs or {})
    reference = copied(model)
    dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.get_default_dtype())
    if dtype == torch.float64:
        _without_grouped_products(reference)
    asked, rtol = rtol, default_rtol(dtype) if rtol is None else rtol
    parts: dict[str, Any] = {"stages": stages, "micro_batches": micro_batches}
    parts |= {"schedule": schedule, "stages_per_rank": stages_per_rank}
    sharded = api.compile(
        model, mesh, example_args, kwargs, plan=plan, hints=hints, like=like, recompute=recompute, **parts
    )
    exact = None
    if asked is None and dtype.is_floating_point and dtype != torch.float64:
        with contextlib.suppress(Exception):
            exact = copied(model).double()
            _without_grouped_products(exact)
    floor = rtol if atol is None else atol
    runner = _Runner(reference, sharded, tuple(example_args), kwargs, rtol, floor, asked is not None, exact, dtype)
    for step in range(steps):
        try:
            runner.step(step)
        except RuntimeMismatchError as error:  # simulated ranks that should hold the same data do not
            runner.found.append(Comparison(str(error), "replica", step, math.inf, rtol))
            break
    found = tuple(runner.found)
    ok = all(c.ok for c in found)
    first = None if ok else _where(runner, next(c for c in found if not c.ok))
    return VerifyReport(ok, found, first, rtol, floor, sharded.plan)


def _where(runner: _Runner, first: Comparison) -> str:
    """The operation that differs first; the first comparison that failed where none does, or the search for it fails."""
    try:
        found = first_divergence(runner.reference, runner.sharded, runner.args, runner.kwargs, runner.rtol)
    except Exception as error:  # a report is wanted all the same
        return f"{first}; no operation could be found: {type(error).__name__}: {error}"
    return found or f"{first}; every operation agrees by itself"


def _without_grouped_products(model: nn.Module) -> None:
    """Have transformers' experts run one by one, which gives the same: torch's grouped products take no float64."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "_experts_implementation", None) == "grouped_mm":
            getattr(module, "set_experts_implementation", lambda form: None)("eager")


@dataclass
class _Runner:
    reference: nn.Module
    sharded: ShardedModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rtol: float
    atol: float
    fixed: bool
    """whether the user chose rtol; otherwise a tensor of lower precision than the model gets its own"""
    exact: nn.Module | None
    """the model in float64, where its precision is lower and it runs in float64"""
    dtype: torch.dtype
    found: list[Comparison] = field(default_factory=list)
    vanishing: set[str] = field(default_factory=set)
    """parameters whose gradient is zero but for rounding: Adam turns its sign into a full step"""

    optimizers: dict[nn.Module, list[torch.optim.Optimizer]] = field(default_factory=dict)
    """made when it is known which gradients are sparse"""

    def _optimizers(self, module: nn.Module, sparse: set[str]) -> Iterator[torch.optim.Optimizer]:
        """For the parameters whose gradient is dense, and for those whose is ``sparse``."""
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if dense := [p for n, p in trained.items() if n not in sparse]:
            yield torch.optim.AdamW(dense, lr=LEARNING_RATE)
        if sparse:
            yield torch.optim.SparseAdam([p for n, p in trained.items() if n in sparse], lr=LEARNING_RATE)

    def step(self, number: int) -> None:
        """One forward, backward and optimizer step of both, compared; and of the model in float64, if there is one."""
        training = self.sharded.training and any(p.requires_grad for p in self.reference.parameters())
        expected = self._passes(self.reference, number, training, (self.args, self.kwargs))
        given = self._passes(self.sharded, number, training, (self.args, self.kwargs))
        exact: dict[str, dict[str, torch.Tensor]] = {}
        if self.exact is not None:
            try:
                with SameDraws(self.dtype):
                    exact = self._passes(self.exact, number, training, in_float64((self.args, self.kwargs)))
            except Exception:  # a dtype that is written down in the model, say
                self.exact = None
        # An expert that eager did not run has no gradient there, and zeros in a program for all inputs.
        both = [given["gradient"], expected["gradient"]]
        for gradients, others in (both, both[::-1]):
            for name in [n for n in others if n not in gradients]:
                gradients[name] = torch.zeros_like(others[name])
        if training:
            self._optimize(expected["gradient"])
        self._states(self.sharded.full_state_dict(), given)
        self._states(self.reference.state_dict(), expected)
        if exact and self.exact is not None:
            self._states(self.exact.state_dict(), exact)
        for kind, want in expected.items():
            if kind == "gradient":
                want, found = _dense(want), _dense(given[kind])
            else:
                found = given[kind]
            if training or kind not in ("gradient", "parameter"):
                slack = 100.0 if kind == "parameter" else 1.0
                self._compare(kind, number, found, want, _dense(exact.get(kind, {})), slack)

    def _passes(
        self, module: nn.Module, number: int, training: bool, arguments: tuple[Any, Any]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Forward and backward of ``module``: by kind of tensor, by name."""
        torch.manual_seed(number)
        module.zero_grad()
        args, kwargs = fresh(arguments)
        with torch.set_grad_enabled(training):
            out = module(*args, **kwargs)
            leaves = [full(x) for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
            loss = loss_of(out, leaves) if training else None
        left = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if loss is not None:
            loss.backward()
        if isinstance(module, ShardedModule):
            gradients = module.full_gradients() if training else {}
        else:
            gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None and training}
        return {
            "output": {f"output {i}": x.detach() for i, x in enumerate(leaves)},
            "input": {f"input {i}": x.detach() for i, x in enumerate(left)},
            "gradient": gradients,
        }

    def _optimize(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """A step of all modules. ``gradients``: of the unsharded one."""
        sparse = {n for n, g in gradients.items() if g.is_sparse}
        for module in (self.reference, self.sharded, self.exact):
            if module is None:
                continue
            if module not in self.optimizers:
                self.optimizers[module] = list(self._optimizers(module, sparse))
            for optimizer in self.optimizers[module]:
                optimizer.step()

    def _states(self, state: Mapping[str, torch.Tensor], found: dict[str, dict[str, torch.Tensor]]) -> None:
        """Add buffers and parameters to what was found."""
        parameters = {n for n, _ in self.reference.named_parameters(remove_duplicate=False)}
        found["buffer"] = {n: t for n, t in state.items() if n not in parameters}
        found["parameter"] = {n: t for n, t in state.items() if n in parameters}

    def _compare(
        self,
        kind: str,
        step: int,
        given: Mapping[str, torch.Tensor],
        expected: Mapping[str, torch.Tensor],
        exact: Mapping[str, torch.Tensor],
        slack: float,
    ) -> None:
        largest = max((scale(t) for t in expected.values()), default=0.0)
        for name, want in expected.items():
            rtol = self.rtol if self.fixed else max(self.rtol, default_rtol(want.dtype))
            floor = self.atol * slack * largest
            if kind == "gradient" and scale(want) <= floor:
                self.vanishing.add(name.removesuffix(SPARSE))
            if kind == "parameter" and name in self.vanishing:
                floor = 2 * LEARNING_RATE * (step + 1)
            if name not in given:
                self.found.append(
                    Comparison(f"{name}: it is missing, or dense where it is sparse", kind, step, math.inf, rtol)
                )
                continue
            made = compare(name, kind, step, given[name], want, rtol * slack, floor)
            truth = exact.get(name)
            if truth is not None and truth.shape == want.shape == given[name].shape and want.is_floating_point():
                sharded, one = (distance(x, truth) for x in (given[name], want))
                made = replace(made, exact=sharded, rounding=one)
            self.found.append(made)


def _dense(gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under names that say which are sparse: those must be so in both."""
    return {f"{n}{SPARSE}" if g.is_sparse else n: g.to_dense() for n, g in gradients.items()}


def compare(
    what: str, kind: str, step: int, given: torch.Tensor, want: torch.Tensor, rtol: float, floor: float
) -> Comparison:
    """Largest deviation of ``given`` from ``want`` relative to the latter's largest value; below ``floor`` it is 0."""
    given, want = given.detach().cpu(), want.detach().cpu()
    if kind in ("gradient", "parameter") and want.is_floating_point():
        given = given.to(want.dtype)  # eager may convert a parameter in its forward, for good
    if given.shape != want.shape or given.dtype != want.dtype:
        what = f"{what} ({given.dtype}{list(given.shape)}, not {want.dtype}{list(want.shape)})"
        error = math.inf
    elif not want.is_floating_point() and not want.is_complex():
        error = 0.0 if torch.equal(given, want) else math.inf
    else:
        largest = difference(given, want)
        error = largest / (scale(want) or 1.0) if math.isfinite(largest) else math.inf
        error = min(error, rtol) if largest <= floor else error
    return Comparison(what, kind, step, error, rtol, bool(want.isfinite().all()))


def distance(x: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest difference of ``x`` from its value in float64, relative to the latter's largest value."""
    largest = difference(x.detach().cpu().double(), truth.detach().cpu())
    return largest / (scale(truth) or 1.0) if math.isfinite(largest) else math.inf

"""``autoshard.verify``: train the sharded and the unsharded model and compare all tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autoshard import api
from autoshard.check.divergence import first_divergence
from autoshard.check.reference import (
    SameRandomNumbers,
    copied_model,
    fresh_inputs,
    full_tensor_of,
    in_float64,
    largest_difference,
    largest_magnitude,
    loss_of,
    upcasts_in_float64,
)
from autoshard.errors import AutoshardError, RuntimeMismatchError
from autoshard.mesh import MeshLike
from autoshard.module.arguments import check_arguments
from autoshard.module.model.inner_tensors import with_inner_tensors
from autoshard.module.sharded_module import ShardedModule
from autoshard.plans.plan import Plan

SPARSE_SUFFIX = " (sparse)"
"""suffix of the names of sparse gradients"""
LEARNING_RATE = 1e-3
UPCAST_RTOL = 1e-6
"""relative tolerance of a float64 model that computes in float32 here and there"""
ROUNDING_RATIO = 4.0
"""allowed rounding error as a multiple of one device's: sums of ranks run in another order"""


def default_rtol(dtype: torch.dtype) -> float:
    """Relative tolerance: float64 1e-9, float32 1e-4, below 2e-2; integers must be equal."""
    if not dtype.is_floating_point or dtype == torch.float64:
        return 1e-9
    return 1e-4 if dtype == torch.float32 else 2e-2


@dataclass(frozen=True)
class Comparison:
    """One tensor's deviation. ``error``: max |a - b| / max |b|; ``limit``: allowed error."""

    what: str
    kind: str
    """output, input (a forward may write to inputs), gradient, buffer, parameter or replica"""
    step: int
    error: float
    limit: float
    finite: bool = True
    """whether the unsharded tensor is finite; else the same elements must be infinite or NaN"""
    exact: float | None = None
    """in low precision: error of the sharded model against the model in float64"""
    rounding: float | None = None
    """in low precision: error of the unsharded model against the model in float64"""

    @property
    def ok(self) -> bool:
        return self.error <= self.limit or self.rounds_alike

    @property
    def rounds_alike(self) -> bool:
        """Whether its error against float64 is at most :data:`ROUNDING_RATIO` times eager's."""
        if self.exact is None or self.rounding is None:
            return False
        return self.exact <= min(ROUNDING_RATIO * self.rounding, math.sqrt(self.limit))

    def __str__(self) -> str:
        mark = "ok  " if self.ok else "DIFF"
        text = f"{mark} step {self.step}  {self.kind:<9} {self.what:<48} error {self.error:.2e}  limit {self.limit:.0e}"
        if self.exact is None or self.rounding is None:
            return text
        return f"{text}  against float64: {self.exact:.2e}, one device {self.rounding:.2e}"


@dataclass(frozen=True)
class VerifyReport:
    """Result of :func:`verify`. ``first_divergence``: first operation that differs, or None."""

    ok: bool
    comparisons: tuple[Comparison, ...]
    first_divergence: str | None
    rtol: float
    atol: float
    plan: Plan = field(repr=False)
    unchecked: str = ""
    """in low precision: why nothing was compared with the model in float64; "" if it was"""

    @property
    def worst(self) -> Comparison:
        """The comparison with the largest ratio of error to limit."""
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
        if self.unchecked:
            lines.append(f"  not compared with float64, where the model does not run: {self.unchecked}")
        if self.first_divergence:
            lines.append(f"  first divergence: {self.first_divergence}")
        return "\n".join(lines)


VERIFY_OPTIONS = frozenset(
    "plan hints like stages micro_batches schedule stages_per_rank recompute loss_chunks offload".split()
)
"""options of compile that verify takes"""


def verify(
    model: nn.Module,
    mesh: MeshLike,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    steps: int = 1,
    **options: Any,
) -> VerifyReport:
    """Train copies of ``model``, sharded and unsharded, for ``steps`` AdamW steps and compare them.

    Compares outputs, gradients, buffers, and weights after every step, from equal seeds. The loss
    is the first scalar output, or the mean square of the outputs. A tensor's error is its largest
    absolute difference over its largest absolute value; infinities and NaN must be equal. Runs on
    the in-process mesh; under torch.distributed a collective call. Where a float64 model upcasts to
    float32, both compute in float64, unless ``plan`` is given.

    Args:
        rtol: allowed error; weights may have 100 times as much, as Adam divides by the root of squared
            gradients. Default: :func:`default_rtol` of the dtype, :data:`UPCAST_RTOL` for a float64
            model that computes in float32.
        atol: differences that do not count, as a share of the largest value of that kind. Default:
            ``rtol``, so that zero gradients are not compared with rounding errors.

        options: plan, hints, like, stages, micro_batches, schedule, stages_per_rank, recompute, loss_chunks, offload.

    Other arguments and errors: :func:`autoshard.compile`. :class:`AutoshardError` for ``steps`` <
    1.
    """
    if unknown := options.keys() - VERIFY_OPTIONS:
        raise TypeError(f"verify() got unexpected keyword arguments: {', '.join(sorted(unknown))}")
    check_arguments(model, example_args, example_kwargs)
    if steps < 1:
        raise AutoshardError(f"steps is {steps!r}: at least one step is needed to compare anything")
    example, model = (tuple(example_args), dict(example_kwargs or {})), with_inner_tensors(model)
    if options.get("plan") is None and _dtype_of(model) == torch.float64 and _runs_in_float64(model, example):
        with upcasts_in_float64():
            return _verified(model, mesh, example, rtol, atol, steps, options)
    return _verified(model, mesh, example, rtol, atol, steps, options)


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.get_default_dtype())


def _runs_in_float64(model: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether ``model`` runs with its upcasts in float64: some of its tensors may stay float32."""
    (args, kwargs), own = fresh_inputs(example), copied_model(model)
    _disable_grouped_mm(own)
    try:
        with upcasts_in_float64():
            own(*args, **kwargs)
    except Exception:
        return False
    return True


def _verified(
    model: nn.Module,
    mesh: MeshLike,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    asked: float | None,
    atol: float | None,
    steps: int,
    options: dict[str, Any],
) -> VerifyReport:
    """:func:`verify` with ``options`` of :func:`autoshard.compile`; ``asked``: the user's rtol."""
    (args, kwargs), dtype, reference = example, _dtype_of(model), copied_model(model)
    if dtype == torch.float64:
        _disable_grouped_mm(reference)
    sharded = api.compile(model, mesh, args, kwargs, exact_dropout=True, **options)
    rtol = default_rtol(dtype) if asked is None else asked
    if asked is None and dtype == torch.float64 and "float32" in sharded.plan.dtypes.values():
        rtol = UPCAST_RTOL
    exact, unchecked = None, ""
    if asked is None and dtype.is_floating_point and dtype != torch.float64:
        try:
            exact = copied_model(model).double()
            _disable_grouped_mm(exact)
        except Exception as error:  # of a module's own method
            exact, unchecked = None, _described(error)
    floor = rtol if atol is None else atol
    runner = _VerifyRun(reference, sharded, args, kwargs, rtol, floor, asked is not None, exact, dtype)
    runner.unchecked = unchecked
    for step in range(steps):
        try:
            runner.step(step)
        except RuntimeMismatchError as error:  # replicas of simulated ranks differ
            runner.found.append(Comparison(str(error), "replica", step, math.inf, rtol))
            break
    found = tuple(runner.found)
    ok = all(c.ok for c in found)
    first = None if ok else _first_divergence_text(runner, next(c for c in found if not c.ok))
    return VerifyReport(ok, found, first, rtol, floor, sharded.plan, runner.unchecked)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _first_divergence_text(runner: _VerifyRun, first: Comparison) -> str:
    """The first operation that differs, else (none found, or the search failed) ``first``."""
    try:
        found = first_divergence(runner.reference, runner.sharded, runner.args, runner.kwargs, runner.rtol)
    except Exception as error:  # the report is still useful
        return f"{first}; no operation could be found: {type(error).__name__}: {error}"
    return found or f"{first}; every operation agrees by itself"


def _disable_grouped_mm(model: nn.Module) -> None:
    """Run transformers' experts one by one (eager): torch's grouped GEMM takes no float64."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "_experts_implementation", None) == "grouped_mm":
            getattr(module, "set_experts_implementation", lambda form: None)("eager")


@dataclass
class _VerifyRun:
    reference: nn.Module
    sharded: ShardedModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rtol: float
    atol: float
    fixed: bool
    """whether the user chose rtol; else each tensor's dtype may raise it"""
    exact: nn.Module | None
    """the model in float64, if its own precision is lower and it can run in float64"""
    dtype: torch.dtype
    unchecked: str = ""
    """see :class:`VerifyReport`"""
    found: list[Comparison] = field(default_factory=list)
    vanishing: set[str] = field(default_factory=set)
    """parameters whose gradient is rounding noise: Adam turns its sign into a full step"""

    optimizers: dict[nn.Module, list[torch.optim.Optimizer]] = field(default_factory=dict)
    """per module; created once it is known which gradients are sparse"""

    def _optimizers(self, module: nn.Module, sparse: set[str]) -> Iterator[torch.optim.Optimizer]:
        """AdamW for parameters with dense gradients, SparseAdam for those in ``sparse``."""
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if dense := [p for n, p in trained.items() if n not in sparse]:
            yield torch.optim.AdamW(dense, lr=LEARNING_RATE)
        if sparse:
            yield torch.optim.SparseAdam([p for n, p in trained.items() if n in sparse], lr=LEARNING_RATE)

    def step(self, number: int) -> None:
        """One training step of both models, and of the float64 model if there is one; compared."""
        training = self.sharded.training and any(p.requires_grad for p in self.reference.parameters())
        expected = self._passes(self.reference, number, training, (self.args, self.kwargs))
        given = self._passes(self.sharded, number, training, (self.args, self.kwargs))
        exact: dict[str, dict[str, Tensor]] = {}
        if self.exact is not None:
            try:
                with SameRandomNumbers(self.dtype):
                    exact = self._passes(self.exact, number, training, in_float64((self.args, self.kwargs)))
            except Exception as error:  # for example a dtype that is hard-coded in the model
                self.exact, self.unchecked = None, _described(error)
        # An expert without rows has no gradient in eager, and zeros in a program for all inputs.
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
                want, found = _dense_by_name(want), _dense_by_name(given[kind])
            else:
                found = given[kind]
            if training or kind not in ("gradient", "parameter"):
                slack = 100.0 if kind == "parameter" else 1.0
                self._compare(kind, number, found, want, _dense_by_name(exact.get(kind, {})), slack)

    def _passes(
        self, module: nn.Module, number: int, training: bool, arguments: tuple[Any, Any]
    ) -> dict[str, dict[str, Tensor]]:
        """Forward and backward of ``module``: kind of tensor → name → tensor."""
        torch.manual_seed(number)
        module.zero_grad()
        args, kwargs = fresh_inputs(arguments)
        with torch.set_grad_enabled(training):
            out = module(*args, **kwargs)
            leaves = [full_tensor_of(x) for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
            loss = loss_of(out, leaves) if training else None
        left = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
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

    def _optimize(self, gradients: Mapping[str, Tensor]) -> None:
        """An optimizer step of all modules; ``gradients``: of the unsharded one."""
        sparse = {n for n, g in gradients.items() if g.is_sparse}
        for module in (self.reference, self.sharded, self.exact):
            if module is None:
                continue
            if module not in self.optimizers:
                self.optimizers[module] = list(self._optimizers(module, sparse))
            for optimizer in self.optimizers[module]:
                optimizer.step()

    def _states(self, state: Mapping[str, Tensor], found: dict[str, dict[str, Tensor]]) -> None:
        """Add buffers and parameters of ``state`` to ``found``."""
        parameters = {n for n, _ in self.reference.named_parameters(remove_duplicate=False)}
        found["buffer"] = {n: t for n, t in state.items() if n not in parameters}
        found["parameter"] = {n: t for n, t in state.items() if n in parameters}

    def _compare(
        self,
        kind: str,
        step: int,
        given: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
        slack: float,
    ) -> None:
        largest = max((largest_magnitude(t) for t in expected.values()), default=0.0)
        for name, want in expected.items():
            rtol = self.rtol if self.fixed else max(self.rtol, default_rtol(want.dtype))
            floor = self.atol * slack * largest
            if kind == "gradient" and largest_magnitude(want) <= floor:
                self.vanishing.add(name.removesuffix(SPARSE_SUFFIX))
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
                sharded, one = (relative_error(x, truth) for x in (given[name], want))
                made = replace(made, exact=sharded, rounding=one)
            self.found.append(made)


def _dense_by_name(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients made dense; names of sparse ones get a suffix, so both models must agree on it."""
    return {f"{n}{SPARSE_SUFFIX}" if g.is_sparse else n: g.to_dense() for n, g in gradients.items()}


def compare(what: str, kind: str, step: int, given: Tensor, want: Tensor, rtol: float, floor: float) -> Comparison:
    """Deviation of ``given`` over ``want``'s largest value; at most ``rtol`` below ``floor``."""
    given, want = given.detach().cpu(), want.detach().cpu()
    if kind in ("gradient", "parameter") and want.is_floating_point():
        given = given.to(want.dtype)  # an eager forward may convert a parameter permanently
    if given.shape != want.shape or given.dtype != want.dtype:
        what = f"{what} ({given.dtype}{list(given.shape)}, not {want.dtype}{list(want.shape)})"
        error = math.inf
    elif not want.is_floating_point() and not want.is_complex():
        error = 0.0 if torch.equal(given, want) else math.inf
    else:
        largest = largest_difference(given, want)
        error = largest / (largest_magnitude(want) or 1.0) if math.isfinite(largest) else math.inf
        error = min(error, rtol) if largest <= floor else error
    return Comparison(what, kind, step, error, rtol, bool(want.isfinite().all()))


def relative_error(x: Tensor, truth: Tensor) -> float:
    """Largest difference of ``x`` from its float64 value, relative to the largest value."""
    largest = largest_difference(x.detach().cpu().double(), truth.detach().cpu())
    return largest / (largest_magnitude(truth) or 1.0) if math.isfinite(largest) else math.inf

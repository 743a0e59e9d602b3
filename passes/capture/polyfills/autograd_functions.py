"""Custom ``autograd.Function`` in a trace, which would keep the forward and drop the backward. It
becomes an op that runs both on unsharded tensors. Library functions are mostly plain
derivatives: they are traced through where a test on random numbers agrees. For a user's own
function that is no proof."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from autoshard import frames
from autoshard.aten import result_list
from autoshard.passes.capture.observer import Observer, Patch, RefusalLog, patched
from autoshard.runtime.operations import autograd_ops
from autoshard.runtime.operations.autograd_ops import ForwardOnlyContext
from autoshard.torch_private.autograd import set_grad_enabled
from autoshard.torch_private.dispatch import TorchDispatchMode, above_autograd
from autoshard.torch_private.fake import unset_fake_temporarily

_APPLY = inspect.getattr_static(torch.autograd.Function, "apply")
MAX_TRIAL_ELEMENTS = 1 << 22
"""largest operand (elements) that is tested at full size; larger ones are shrunk"""
MAX_KEPT_LENGTH = 16
"""shrunk operands keep lengths up to this; larger ones become a little larger, equal ones alike"""


class CustomAutogradFunctions(Observer):
    """With ``training``, turns functions into ops or traces through them; refuses others."""

    def __init__(self, training: bool, refuse: RefusalLog) -> None:
        self.training, self.refuse = training, refuse

    def patches(self) -> Iterable[Patch]:
        if self.training:
            yield torch.autograd.Function, "apply", classmethod(functools.partial(self._of_new_class))
        for function in _subclasses(torch.autograd.Function):
            if _is_replaceable(function) and not self.training:
                yield function, "apply", staticmethod(_apply_without_grad(function))
            elif _is_replaceable(function):
                instead = self._instead(function)
                yield function, "apply", classmethod(functools.partial(self._of_class, function, instead))
                yield function, "forward", staticmethod(_forward_calling(function, instead))

    def _of_class(self, function: Any, instead: Callable[..., Any], cls: Any, *args: Any) -> Any:
        return instead(*args) if cls is function else self._of_new_class(cls, *args)

    def _of_new_class(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        """``apply`` of a class made in the trace: it may hold values of the trace."""
        if not _is_replaceable(cls):
            return _APPLY.__get__(None, cls)(*args, **kwargs)
        raise self.refuse(
            f"custom autograd.Function {cls.__qualname__!r} ({cls.__module__}): it is defined inside the forward, and a "
            "trace would drop its backward. Define it at the top of a module."
        )

    def _instead(self, function: Any) -> Callable[..., Any]:
        """Replacement of ``function.apply``."""
        forward = function.forward

        def apply(*args: Any) -> Any:
            if _is_library_function(function) and has_derived_backward(function, forward, args):
                return apply_inline(function, forward, args)
            made = apply_as_op(function, forward, args)
            if isinstance(made, str):
                raise self.refuse(
                    f"custom autograd.Function {function.__qualname__!r} ({function.__module__}): it {made}, and a trace "
                    "of its forward would drop its backward. Write it with differentiable torch ops, or make it an op "
                    "with torch.library.custom_op and register_autograd."
                )
            return made

        return apply


def _apply_without_grad(function: Any) -> Callable[..., Any]:
    """Replacement of ``apply`` without gradients: an op if the forward calls autograd."""
    forward = function.forward

    def apply(*args: Any) -> Any:
        if _calls_autograd_grad(function, forward, args) and not isinstance(
            made := apply_as_op(function, forward, args), str
        ):
            return made
        return _torch_apply(function, args)

    return apply


def _calls_autograd_grad(function: Any, forward: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether the forward calls ``torch.autograd.grad``, which needs gradients."""
    taken, grad = [], torch.autograd.grad

    def noted(*args: Any, **kwargs: Any) -> Any:
        taken.append(True)
        return grad(*args, **kwargs)

    with _untraced_trial(function, forward), patched([(torch.autograd, "grad", noted)]):
        _torch_apply(function, [_meta_tensor_like(a) if isinstance(a, Tensor) else a for a in args])
    return bool(taken)


def _forward_calling(function: Any, instead: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that calls ``instead``: for an ``apply`` bound to a name before the trace."""

    def forward(*args: Any) -> Any:
        with torch.DisableTorchFunction():
            set_grad_enabled(True)  # hidden from the trace: eager records here, too
        try:
            return instead(*(args if autograd_ops.has_setup_context(function) else args[1:]))
        finally:
            with torch.DisableTorchFunction():
                set_grad_enabled(False)

    return forward


def _subclasses(cls: type) -> Iterator[type]:
    sub: type
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _is_replaceable(function: type) -> bool:
    """Whether to replace a function. Most of torch's are behind ops, which a trace keeps."""
    module = function.__module__
    if module == "torch.utils.checkpoint":  # handled by Checkpoints
        return False
    return not module.startswith("torch.") or module.startswith(("torch.nn.", "torch.utils.", "torch.distributed."))


def _is_library_function(function: type) -> bool:
    """Whether ``function`` is of an installed package other than torch."""
    file = getattr(sys.modules.get(function.__module__), "__file__", None) or ""
    return frames.is_installed(file) and not function.__module__.startswith("torch.")


def apply_inline(function: Any, forward: Callable[..., Any], args: Sequence[Any]) -> Any:
    """``function.apply(*args)`` by differentiable ops. ``forward``: the function's own."""
    if autograd_ops.has_setup_context(function):
        return forward(*args)
    return forward(ForwardOnlyContext(args), *args)


def has_derived_backward(function: Any, forward: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether autograd through ``forward`` gives ``function``'s gradients (random float64)."""
    same = False
    with _untraced_trial(function, forward):
        numbers = _random_arguments(args)
        theirs = _results_and_gradients(_torch_apply(function, numbers), numbers)
        ours = _results_and_gradients(apply_inline(function, forward, numbers), numbers)
        same = len(ours) == len(theirs) and all(map(_are_close_or_zero, ours, theirs))
    return same  # noqa: RET504  the block may end early


def apply_as_op(function: Any, forward: Callable[..., Any], args: Sequence[Any]) -> Any:
    """``function.apply(*args)`` as one op with its backward; a str explains why there is none."""
    tensors, others = autograd_ops.pack_arguments(args)
    if not autograd_ops.is_literal(others):
        return "has arguments that are neither tensors nor Python literals"
    before = torch.get_rng_state()
    single, problem = False, ""
    with _untraced_trial(function, forward) as failed, _DrawDetector() as draws:
        given = [_meta_tensor_like(t) for t in tensors]
        operands = [g.clone() if g.requires_grad else g for g in given]  # leaves cannot be written
        versions = [t._version for t in operands]
        results = _torch_apply(function, autograd_ops.unpack_arguments(operands, others))
        single = isinstance(results, Tensor)
        found = (results,) if single else results
        if not isinstance(found, tuple | list) or not all(isinstance(r, Tensor) for r in found):
            problem = "returns a value that is not a tensor"
        elif draws.any or not torch.equal(before, torch.get_rng_state()):
            problem = "draws random numbers"
        elif versions != [t._version for t in operands]:
            problem = "writes to its arguments"
    if failed:
        first = str(failed[0]).strip().split("\n")[0]
        problem = f"does not run on tensors without values ({_user_line_prefix(failed[0])}{type(failed[0]).__name__}: {first})"
    if problem:
        return problem
    with patched([(function, "forward", staticmethod(forward))]):
        made = autograd_ops.function_op(
            autograd_ops.function_path(function), tensors, others, autograd_ops.autocast_as_text()
        )
    return made[0] if single else tuple(made)


def _meta_tensor_like(t: Tensor) -> Tensor:
    return torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device="meta", requires_grad=t.requires_grad)


class _DrawDetector(TorchDispatchMode):
    """``any``: whether an op inside drew random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any = self.any or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _untraced_trial(function: Any, forward: Callable[..., Any]) -> Iterator[list[Exception]]:
    """Run ``function`` untraced inside. An error ends the block, and is appended to the list."""
    failed: list[Exception] = []
    with (
        unset_fake_temporarily(), disable_proxy_modes_tracing(), torch.DisableTorchFunction(), above_autograd(),
        torch.enable_grad(), patched([(function, "forward", staticmethod(forward))]),
    ):  # fmt: skip
        try:
            yield failed
        except Exception as error:
            failed.append(error)


def _user_line_prefix(error: Exception) -> str:
    """Prefix of an error text: the user's line that raised ``error``, or ""."""
    lines = [(f.f_code.co_filename, n) for f, n in frames.traceback_frames(error.__traceback__)]
    own = [frames.location_text(file, n) for file, n in lines if frames.is_users_file(file)]
    return f"{own[-1]}: " if own else ""


def _torch_apply(function: Any, args: Sequence[Any]) -> Any:
    return _APPLY.__get__(None, function)(*args)


def _random_arguments(args: Sequence[Any]) -> list[Any]:
    """``args`` with random tensors for traced ones, shrunk if too large; keeps the generator."""
    generator, lengths = torch.Generator().manual_seed(0), dict[int, int]()

    def shape_of(a: Tensor) -> tuple[int, ...]:
        if not large:
            return tuple(a.shape)
        return tuple(
            n if n <= MAX_KEPT_LENGTH else lengths.setdefault(n, MAX_KEPT_LENGTH + 1 + len(lengths)) for n in a.shape
        )

    def number(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        if not a.is_floating_point():
            return torch.zeros(shape_of(a), dtype=a.dtype)
        x = torch.randn(shape_of(a), dtype=torch.float64, generator=generator)
        return x.requires_grad_(a.requires_grad)

    large = any(isinstance(a, Tensor) and a.numel() > MAX_TRIAL_ELEMENTS for a in args)
    return [number(a) for a in args]


def _results_and_gradients(results: Any, operands: Sequence[Any]) -> list[Tensor | None]:
    """Results, and gradients of a random linear combination of them."""
    results = result_list(results)
    generator = torch.Generator().manual_seed(1)
    wanted = [a for a in operands if isinstance(a, Tensor) and a.requires_grad]
    ends = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    seeds = [torch.randn(tuple(r.shape), dtype=r.dtype, generator=generator) for r in ends]
    found = torch.autograd.grad(ends, wanted, seeds, allow_unused=True) if ends and wanted else ()
    return [*(r.detach() for r in results if isinstance(r, Tensor)), *found]


def _are_close_or_zero(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return (a is None or not a.any()) and (b is None or not b.any())
    # Hand-written derivatives have rounded constants, such as 0.79788456 for sqrt(2/π).
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-8)

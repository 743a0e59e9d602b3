"""Checks around a call: inputs, one thread at a time, the same collective call on every rank."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.errors import CaptureError, RuntimeMismatchError
from autoshard.module.model.original import default_device
from autoshard.module.programs.executable import Executable
from autoshard.module.programs.kv_cache import is_kept_state
from autoshard.passes.capture.export import TRACE_LOCK
from autoshard.passes.capture.exported.example_inputs import argument_paths
from autoshard.passes.capture.refusals.checks import check_dense
from autoshard.runtime.transport.groups import once_per_initialisation
from autoshard.torch_private.capture import parametrization_cache


class HasMeeting(Protocol):
    """A sharded module."""

    def meeting(self, what: str) -> AbstractContextManager[None]:
        """Inside, all ranks do ``what``; see :func:`collective_method`."""


P = ParamSpec("P")
MethodResult = TypeVar("MethodResult")
MeetingModule = TypeVar("MeetingModule", bound=HasMeeting)


def collective_method(
    do: Callable[Concatenate[MeetingModule, P], MethodResult],
) -> Callable[Concatenate[MeetingModule, P], MethodResult]:
    """Decorator of a method that every rank calls. Ranks compare its name first: if one calls
    another, all raise, not hang."""

    @functools.wraps(do)
    def together(sharded: MeetingModule, /, *args: P.args, **kwargs: P.kwargs) -> MethodResult:
        with sharded.meeting(f"{do.__name__}()"):
            return do(sharded, *args, **kwargs)

    return together


class CallLock:
    """A reentrant lock. ``waits``: other threads wait, also for other modules and traces. Ranks
    that are processes refuse instead: they would see two threads' calls in different orders."""

    def __init__(self, waits: bool = True) -> None:
        self.waits, self._lock = waits, TRACE_LOCK if waits else once_per_initialisation("turns", threading.RLock)

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=self.waits):
            raise RuntimeMismatchError(
                "two threads call sharded modules at once, so ranks could make their calls in different "
                "orders. Call them from one thread, or hold a lock that gives all ranks the same order."
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return CallLock, (self.waits,)  # locks are not copied


def check_call_leaves(model: nn.Module, leaves: Sequence[Any], spec: Any, device: str | None) -> None:
    """Raise :class:`CaptureError` for inputs without data, on another device, or not dense.
    ``leaves``, ``spec``: of the arguments; ``device``: type of the module's, None if inputs are
    moved."""
    if default_device().type == "meta":
        raise CaptureError("the default device is meta, which has no data: call it outside torch.device('meta')")

    def name(i: int) -> str:
        return argument_paths(model, pytree.tree_unflatten(leaves, spec))[i]

    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or is_kept_state(leaf):
            continue
        x = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
        kind = x.device.type
        if kind == "meta" or (device not in (None, kind) and (x.dim() or kind != "cpu")):
            what = "it has no data" if kind == "meta" else f"the module's tensors are on {device}"
            raise CaptureError(
                f"input {name(i)!r} of {type(model).__name__} is on device {kind}, and {what}. "
                "Move it to the device of the module."
            )
        try:
            check_dense(x, partial(name, i))
        except CaptureError as error:
            error.untraceable = True
            raise


def check_parametrizations(before: Any, executable: Executable, title: str) -> Any:
    """Refuse a second call in one ``parametrize.cached()`` that updates parametrizations (spectral
    norm): eager takes the first's value. ``before``: what the last call returned from here."""
    cache = parametrization_cache()
    if cache is not None and cache is before and (written := executable.written_parametrizations):
        raise CaptureError(
            f"{title} is called twice in one torch.nn.utils.parametrize.cached(). Each call of its program "
            f"updates {written[0]!r}, which eager updates once. Use one cached() per call, or eval()."
        )
    return cache


def check_outside_tensors(outside: Iterable[Tensor]) -> None:
    """Raise :class:`CaptureError` if a tensor read ``outside`` of the model requires a gradient,
    which eager would record: for calls that record none although grad mode is on."""
    for x in outside:
        if x.requires_grad:
            raise CaptureError(
                f"the forward reads a tensor of shape {list(x.shape)}, which requires a gradient "
                "but is not a parameter of the model, so would get none. Make it an nn.Parameter "
                "of the model, read its .detach(), or call under torch.no_grad()."
            )


def with_changed_dtypes(error: CaptureError, programs: Sequence[Executable], leaves: Sequence[Any]) -> CaptureError:
    """``error``, extended by inputs whose dtype differs from earlier compilations."""
    if not programs or len(programs[0].graph.flat_inputs) != len(leaves):
        return error
    graph, before = programs[0].graph, programs[0].inputs
    fqns = graph.fqns
    changed = []
    for name, leaf in zip(graph.flat_inputs, leaves, strict=True):
        if name is not None and isinstance(leaf, Tensor):
            dtype = str(leaf.dtype).removeprefix("torch.")
            if dtype != before[name]["dtype"]:
                changed.append(f"{fqns[name]!r} with {before[name]['dtype']}, and got {dtype}")
    if not changed:
        return error
    return type(error)(f"{str(error).rstrip('.')}. The module was compiled for input {', '.join(changed)}.")

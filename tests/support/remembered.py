"""A capture is made once: the ranks of a world, and the cases that it runs, compile the same small models over and over.

A graph is found again by everything that a capture can see: see :class:`_Signature`. What cannot be told is captured.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from autoshard.module.model.original import is_plain_context, torch_defaults
from autoshard.passes.capture import export
from autoshard.passes.capture.specialization import eager_semantics
from autoshard.passes.ir.graph import Graph
from autoshard.runtime.operations import autograd_ops
from autoshard.runtime.transport.torch_state import autocast_state
from autoshard.torch_private import capture
from autoshard.torch_private.dispatch import count_function_modes

TESTS = Path(__file__).parents[1]
OF_RUN = "AUTOSHARD_TEST_CAPTURES_OF_RUN"
"""where all processes of a run have their captures: a variable of the environment"""
WAIT = 60
"""seconds that another process may take for its capture"""


class UntoldError(Exception):
    """What an object is made of cannot be said."""


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _text(code: CodeType) -> Any:
    """Several lambdas may stand in one line."""
    inner = tuple(_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
    return code.co_filename, code.co_firstlineno, code.co_code, code.co_names, code.co_varnames, inner


class _Signature(pickle.Pickler):
    """Equal for models that are traced alike, in all processes: structure and attributes; shapes, strides, dtypes, flags and
    sharing of tensors, the values of those that are no parameters; code, closures and globals of the tests' functions."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []  # an id is an object's as long as it lives
        self.values = True

    def number(self, x: Any) -> int:
        self.kept.append(x)
        return self.numbers.setdefault(id(x), len(self.numbers))

    def persistent_id(self, x: Any) -> Any:
        known = id(x) in self.numbers
        if isinstance(x, torch.Tensor):
            return ("tensor", self.number(x), None if known else self.tensor(x))
        if isinstance(x, ModuleType):
            return "module", x.__name__
        if isinstance(x, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return "op", str(x)
        if isinstance(x, FunctionType):
            return ("function", self.number(x), None if known else self.function(x))
        if isinstance(x, type):
            return ("class", self.number(x), None if known else self.of_class(x))
        return None

    def tensor(self, x: torch.Tensor) -> Any:
        if x.layout != torch.strided or x._backward_hooks or type(x) not in (torch.Tensor, torch.nn.Parameter):
            raise UntoldError
        lies = self.number(x.untyped_storage()._cdata), x.storage_offset(), str(x.device)
        flags = type(x).__name__, x.requires_grad, x.is_leaf, x.is_inference(), x.is_conj(), x.is_neg()
        values = None
        if self.values and type(x) is torch.Tensor and not x.is_meta:
            values = hashlib.sha1(
                x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            ).hexdigest()
        return tuple(x.shape), x.stride(), str(x.dtype), lies, flags, values, vars(x)

    def function(self, x: FunctionType) -> Any:
        code = x.__code__
        closure = [cell.cell_contents for cell in x.__closure__ or ()]  # ValueError: an empty one
        read = {}
        if Path(code.co_filename).is_relative_to(TESTS):
            read = {name: x.__globals__[name] for name in sorted({*_names(code)} & x.__globals__.keys())}
        return x.__module__, x.__qualname__, _text(code), x.__defaults__, x.__kwdefaults__, closure, read, vars(x)

    def of_class(self, x: type) -> Any:
        where = x.__module__, x.__qualname__
        found = getattr(sys.modules.get(x.__module__), "__file__", None)
        if found is None or not Path(found).is_relative_to(TESTS):
            return where
        own = {n: v for n, v in vars(x).items() if n not in ("__dict__", "__weakref__", "__doc__", "__annotations__")}
        for name, value in own.items():
            if isinstance(value, staticmethod | classmethod):
                own[name] = value.__func__
            if isinstance(value, property):
                own[name] = (value.fget, value.fset)
        return where, x.__bases__, own


def signature(model: torch.nn.Module, example: Any, *options: Any) -> str | None:
    """Of a capture; None where it cannot be told."""
    if not is_plain_context():
        return None
    cuda = torch.backends.cuda
    kernels = cuda.math_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
    called = (
        eager_semantics.eager_inference_mode.get(),
        eager_semantics.grad_off_at_start.get(),
        eager_semantics._caller_autograd_modes.get(),
    )
    modes = [
        torch.is_grad_enabled(),
        torch.is_anomaly_enabled(),
        *(getattr(of, name)() for _, of, name in capture.BACKEND_MODES),
    ]
    # of which capture makes some of transformers' known
    registered = [f"{kind.__module__}.{kind.__qualname__}" for kind in pytree.SUPPORTED_NODES]
    defaults = torch_defaults(), count_function_modes(), torch.get_float32_matmul_precision()
    state = defaults, autocast_state(), called, modes, kernels, registered
    file = io.BytesIO()
    signed = _Signature(file)
    try:
        signed.dump((model, options, state))
        signed.values = False
        signed.dump(example)
    except (UntoldError, pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError, RecursionError):
        return None
    return hashlib.sha1(file.getvalue()).hexdigest()


class _Writer(pickle.Pickler):
    def persistent_id(self, x: Any) -> Any:
        return str(x) if isinstance(x, torch._ops.OpOverload) else None


class _Reader(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        namespace, name, overload = pid.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _written(graph: Graph) -> bytes:
    """Nothing of what holds on to other objects or read some, nor what names a function that only this process finds."""
    if graph.outside or graph.constants:
        return b""
    file = io.BytesIO()
    try:
        _Writer(file).dump(graph)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return b""
    text = file.getvalue()
    return b"" if any(name.encode() in text for name in autograd_ops._unimportable) else text


def _read(text: bytes) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # pickle asks about specs as torch does no more
        return _Reader(io.BytesIO(text)).load()  # type: ignore[no-any-return]


@contextlib.contextmanager
def remembered(folder: Path) -> Iterator[None]:
    """Inside, captures are those in ``folder``, where they are there; they are shared with others who are inside.

    Of two who want the same at once, one waits. What is refused is captured by all.
    """
    capture = export._capture_once

    def captured(model: torch.nn.Module, example: Any, *options: Any) -> Graph:
        key = signature(model, example, *options)
        if key is None:
            return capture(model, example, *options)
        path = folder / key
        if _is_first(path):
            text = b""
            try:
                graph = capture(model, example, *options)
                if signature(model, example, *options) == key:  # it has left nothing in the model, such as a cache
                    text = _written(graph)
            finally:
                _put(path, text)
            return graph
        end = time.monotonic() + WAIT
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.002)
        text = path.read_bytes() if path.exists() else b""
        return _read(text) if text else capture(model, example, *options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_capture_once", captured)
        yield


def _is_first(path: Path) -> bool:
    try:
        os.close(os.open(path.with_suffix(".begun"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _put(path: Path, text: bytes) -> None:
    """… at once, for those who wait."""
    part = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    part.write_bytes(text)
    part.rename(path)

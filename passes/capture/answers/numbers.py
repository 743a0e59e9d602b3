"""``int(tensor)`` and ``float(tensor)`` in a forward: symbolic numbers, as from ``tensor.item()``.

Python's ``int`` must return a plain number, which a trace does not know. So the trace is repeated
with an ``int`` and a ``float`` in the calling function that read tensors with ``item()``.
"""

from __future__ import annotations

import contextlib
import dis
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from autoshard.frames import is_users, of_traceback
from autoshard.passes.capture.observer import Observer
from autoshard.passes.capture.refusals.explain import is_data_dependent


class _Type(type):
    """Stand-in for ``int`` or ``float``; symbolic numbers are instances, too."""

    original: type
    symbol: type
    read: Callable[[Any], Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], torch.Tensor | torch.SymInt | torch.SymFloat):
            return cls.read(args[0].item() if isinstance(args[0], torch.Tensor) else args[0])
        return cls.original(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.original | cls.symbol)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.original)

    def __eq__(cls, other: object) -> bool:
        return other is cls.original or other is cls

    def __hash__(cls) -> int:
        return hash(cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)


class _Int(metaclass=_Type):
    original, symbol, read = int, torch.SymInt, staticmethod(torch.sym_int)


class _Float(metaclass=_Type):
    original, symbol, read = float, torch.SymFloat, staticmethod(torch.sym_float)


_PREFIX = "_autoshard_"
STAND_INS: dict[str, _Type] = {"int": _Int, "float": _Float}


@dataclass
class Numbers(Observer):
    """Functions in which a trace needed a tensor as an ``int`` or ``float``."""

    met: dict[CodeType, tuple[dict[str, Any], list[FunctionType]]] = field(default_factory=dict)
    """code → (its globals, functions that run it)"""

    def learn(self, error: BaseException | None) -> bool:
        """Whether ``error`` revealed a new function, so that another trace may avoid it."""
        known = len(self.met)
        while error is not None:
            frames = [f for f, _ in of_traceback(error.__traceback__) if _may_read(f.f_code.co_filename)]
            if frames and is_data_dependent(error) and not STAND_INS.keys().isdisjoint(frames[-1].f_code.co_names):
                self.met[frames[-1].f_code] = frames[-1].f_globals, _functions(frames[-1])
            error = error.__context__
        return len(self.met) > known

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """While inside, ``int`` and ``float`` read tensors in the known functions."""
        with contextlib.ExitStack() as stack:
            for code, (names, functions) in self.met.items():
                if _has_method_of_that_name(code):  # x.float(): names share one table
                    for name, stand_in in STAND_INS.items():
                        if name not in names:
                            names[name] = stand_in
                            stack.callback(names.pop, name, None)
                    continue
                renamed = tuple(_PREFIX + n if n in STAND_INS else n for n in code.co_names)
                for function in functions:
                    function.__code__ = code.replace(co_names=renamed)
                    stack.callback(setattr, function, "__code__", code)
                for name, stand_in in STAND_INS.items():
                    names[_PREFIX + name] = stand_in
                    stack.callback(names.pop, _PREFIX + name, None)
            yield


def _may_read(filename: str) -> bool:
    """Whether ``int(tensor)`` in this file counts as the model's, also in torch's batch norm."""
    return is_users(filename) or filename == torch.nn.modules.batchnorm.__file__


def _has_method_of_that_name(code: CodeType) -> bool:
    reads = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
    return any(i.opname in reads and i.argval in STAND_INS for i in dis.get_instructions(code))


def _functions(frame: FrameType) -> list[FunctionType]:
    """Functions that run the frame's code, by gc and by name: ``gc.freeze()`` hides objects."""
    code, owner = frame.f_code, frame.f_locals.get("self")
    looked_up = [vars(cls).get(code.co_name) for cls in type(owner).__mro__] + [frame.f_globals.get(code.co_name)]
    found = {id(f): f for f in (*gc.get_referrers(code), *looked_up) if isinstance(f, FunctionType)}
    return [f for f in found.values() if f.__code__ is code]

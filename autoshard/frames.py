"""Stack frames and source locations: which are the user's, torch's, Python's or autoshard's.

Errors, reports and generated comments name the user's ``file:line``. Models in ``autoshard.models``
count as user code.
"""

from __future__ import annotations

import functools
import importlib.util
import linecache
import operator
import os
import re
import sys
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType, TracebackType
from typing import Any

import torch


def _folder(*parts: str) -> tuple[str, ...]:
    """The folder with a trailing separator, as named and with links resolved."""
    path = os.path.join(*parts)
    return tuple(dict.fromkeys(p + os.sep for p in (path, os.path.realpath(path))))


def _package(name: str) -> tuple[str, ...]:
    """The folder of a package, without importing it; packages of a checkout have two parents."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return _folder(os.path.dirname(spec.origin))


_MODELS = _package("autoshard.models")
_OURS = (*_package("autoshard"), *_package("autoshard.passes"))
_TORCHS = _folder(os.path.dirname(torch.__file__))
_PYTHONS = _folder(os.path.dirname(os.__file__))
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def is_ours(file: str) -> bool:
    """Whether ``file`` belongs to autoshard, its models excluded."""
    return file.startswith(_OURS) and not file.startswith(_MODELS)


@functools.cache
def is_users(file: str) -> bool:
    """Whether ``file`` is user code: not of torch, Python or autoshard; installed packages are."""
    return not (file.startswith(("<", *_TORCHS)) or is_ours(file) or is_pythons(file))


def is_pythons(file: str) -> bool:
    """Whether ``file`` is of Python's standard library."""
    return file.startswith(_PYTHONS) and not is_installed(file)


def users_modules() -> Sequence[ModuleType]:
    """Loaded modules of user code (:func:`is_users`), including ``__main__``."""
    global _loaded, _users
    loaded = list(sys.modules.values())
    if len(loaded) != len(_loaded) or not all(map(operator.is_, loaded, _loaded)):
        _users, _loaded = tuple(m for name, m in list(sys.modules.items()) if _is_users_module(name, m)), loaded
    return _users


_loaded: list[Any] = []
"""the thousands of modules that :func:`users_modules` classified last"""
_users: tuple[ModuleType, ...] = ()


def _is_users_module(name: str, module: Any) -> bool:
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None  # loads no lazy modules
    return name == "__main__" or (isinstance(file, str) and is_users(file))


def is_torchs(frame: FrameType) -> bool:
    """Whether ``frame`` runs torch's code."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def is_installed(file: str) -> bool:
    """Whether ``file`` belongs to an installed package."""
    return any(f"{os.sep}{name}{os.sep}" in file for name in ("site-packages", "dist-packages"))


def stack() -> Iterator[FrameType]:
    """The caller's frame and its callers, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def users_frame() -> FrameType | None:
    """The innermost frame of user code."""
    return next((f for f in stack() if is_users(f.f_code.co_filename)), None)


def asker() -> FrameType | None:
    """The innermost frame outside autoshard and torch's ``__torch_function__`` dispatch."""
    found = (f for f in stack() if f.f_code.co_name != "__torch_function__" and not is_ours(f.f_code.co_filename))
    return next(found, None)


def of_traceback(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """(frame, line number) of a traceback, outermost first."""
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def printable(text: str) -> str:
    """``text`` on one line: newlines, control characters and surrogates are escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def place(file: str, line: int | str) -> str:
    """``file:line`` for users, without folders."""
    return printable(f"{os.path.basename(file)}:{line}")


def place_of(frame: FrameType | None) -> str:
    """:func:`place` of a frame; "the model" without one."""
    return place(frame.f_code.co_filename, frame.f_lineno) if frame else "the model"


def users_lines(stack_trace: str) -> tuple[tuple[str, int], ...]:
    """(file, line number) of user frames in torch's textual stack trace, outermost first."""
    return tuple((file, int(line)) for file, line in _FRAME.findall(stack_trace) if is_users(file))


def text_of(frame: FrameType) -> str:
    """The source line of a frame."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()

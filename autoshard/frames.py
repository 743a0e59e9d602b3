"""Whose code it is: the user's, torch's, Python's or autoshard's; and its ``file:line``.

Errors, reports and comments of generated code name the user's line. What that is, is defined here and nowhere else.
The models in ``autoshard.models`` count as a user's.
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
    """The folder with a separator at its end, as it is named and as it is without links."""
    path = os.path.join(*parts)
    return tuple(dict.fromkeys(p + os.sep for p in (path, os.path.realpath(path))))


def _package(name: str) -> tuple[str, ...]:
    """The folder of a package, which is not imported: in a checkout not all lie in one."""
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
    """Whether ``file`` is autoshard's: the library's, not one of its models."""
    return file.startswith(_OURS) and not file.startswith(_MODELS)


@functools.cache
def is_users(file: str) -> bool:
    """Whether ``file`` is neither torch's, nor Python's, nor autoshard's. Installed packages are a user's."""
    return not (file.startswith(("<", *_TORCHS)) or is_ours(file) or is_pythons(file))


def is_pythons(file: str) -> bool:
    """Whether ``file`` is of Python's own library."""
    return file.startswith(_PYTHONS) and not is_installed(file)


def users_modules() -> Sequence[ModuleType]:
    """The modules that are loaded and :func:`is_users`, the program that runs among them."""
    global _loaded, _users
    loaded = list(sys.modules.values())
    if len(loaded) != len(_loaded) or not all(map(operator.is_, loaded, _loaded)):
        _users, _loaded = tuple(m for name, m in list(sys.modules.items()) if _is_users_module(name, m)), loaded
    return _users


_loaded: list[Any] = []
"""the modules that :func:`users_modules` has judged last: thousands"""
_users: tuple[ModuleType, ...] = ()


def _is_users_module(name: str, module: Any) -> bool:
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None  # not asked of lazy modules
    return name == "__main__" or (isinstance(file, str) and is_users(file))


def is_torchs(frame: FrameType) -> bool:
    """Whether the code that runs there is torch's."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def is_installed(file: str) -> bool:
    """Whether ``file`` comes with an installed package."""
    return any(f"{os.sep}{name}{os.sep}" in file for name in ("site-packages", "dist-packages"))


def stack() -> Iterator[FrameType]:
    """The caller's frame and those that called it, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def users_frame() -> FrameType | None:
    """The innermost frame of the user's code that runs."""
    return next((f for f in stack() if is_users(f.f_code.co_filename)), None)


def asker() -> FrameType | None:
    """The innermost frame outside of autoshard, and outside of torch's way of handing calls over to it."""
    found = (f for f in stack() if f.f_code.co_name != "__torch_function__" and not is_ours(f.f_code.co_filename))
    return next(found, None)


def of_traceback(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """(frame, line number) of a traceback, outermost first."""
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def printable(text: str) -> str:
    """``text`` on one line: newlines, control characters and surrogates, as names may have them, as escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def place(file: str, line: int | str) -> str:
    """``file:line`` as users are shown it, without folders."""
    return printable(f"{os.path.basename(file)}:{line}")


def place_of(frame: FrameType | None) -> str:
    """:func:`place` of a frame; "the model" where there is none."""
    return place(frame.f_code.co_filename, frame.f_lineno) if frame else "the model"


def users_lines(stack_trace: str) -> tuple[tuple[str, int], ...]:
    """(file, line number) of the user's frames in a stack trace that torch wrote as text, outermost first."""
    return tuple((file, int(line)) for file, line in _FRAME.findall(stack_trace) if is_users(file))


def text_of(frame: FrameType) -> str:
    """The source line that a frame stands at."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()

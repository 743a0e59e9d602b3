"""Stack frames and source locations: the user's (``autoshard.models`` included), torch's, Python's
or autoshard's. Errors, reports and generated comments name the user's ``file:line``."""

from __future__ import annotations

import functools
import importlib.util
import inspect
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


_MODELS_FOLDERS = _package("autoshard.models")
_LIBRARY_FOLDERS = (*_package("autoshard"), *_package("autoshard.passes"))
_TORCH_FOLDERS = _folder(os.path.dirname(inspect.getfile(torch)))
_PYTHON_FOLDERS = _folder(os.path.dirname(os.__file__))
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def is_autoshard_file(file: str) -> bool:
    """Whether ``file`` belongs to autoshard, its models excluded."""
    return file.startswith(_LIBRARY_FOLDERS) and not file.startswith(_MODELS_FOLDERS)


@functools.cache
def is_users_file(file: str) -> bool:
    """Whether ``file`` is user code: not of torch, Python or autoshard; installed packages are."""
    return not (file.startswith(("<", *_TORCH_FOLDERS)) or is_autoshard_file(file) or is_standard_library_file(file))


def is_standard_library_file(file: str) -> bool:
    """Whether ``file`` is of Python's standard library."""
    return file.startswith(_PYTHON_FOLDERS) and not is_installed(file)


def users_modules() -> Sequence[ModuleType]:
    """Loaded modules of user code (:func:`is_users_file`), including ``__main__``."""
    global _judged_modules, _cached_users_modules
    loaded = list(sys.modules.values())
    if len(loaded) != len(_judged_modules) or not all(map(operator.is_, loaded, _judged_modules)):
        _cached_users_modules, _judged_modules = (
            tuple(m for name, m in list(sys.modules.items()) if _is_users_module(name, m)),
            loaded,
        )
    return _cached_users_modules


_judged_modules: list[Any] = []
"""the thousands of modules that :func:`users_modules` classified last"""
_cached_users_modules: tuple[ModuleType, ...] = ()


def _is_users_module(name: str, module: Any) -> bool:
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None  # loads no lazy modules
    return name == "__main__" or (isinstance(file, str) and is_users_file(file))


def is_torch_frame(frame: FrameType) -> bool:
    """Whether ``frame`` runs torch's code."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def is_installed(file: str) -> bool:
    """Whether ``file`` belongs to an installed package."""
    return any(f"{os.sep}{name}{os.sep}" in file for name in ("site-packages", "dist-packages"))


def frames_outwards() -> Iterator[FrameType]:
    """The caller's frame and its callers, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def users_frame() -> FrameType | None:
    """The innermost frame of user code."""
    return next((f for f in frames_outwards() if is_users_file(f.f_code.co_filename)), None)


def calling_frame() -> FrameType | None:
    """The innermost frame outside autoshard and torch's ``__torch_function__`` dispatch."""
    found = (
        f
        for f in frames_outwards()
        if f.f_code.co_name != "__torch_function__" and not is_autoshard_file(f.f_code.co_filename)
    )
    return next(found, None)


def traceback_frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """(frame, line number) of a traceback, outermost first."""
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def printable(text: str) -> str:
    """``text`` on one line: newlines, control characters and surrogates are escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def location_text(file: str, line: int | str) -> str:
    """``file:line`` for users, without folders."""
    return printable(f"{os.path.basename(file)}:{line}")


def frame_location_text(frame: FrameType | None) -> str:
    """:func:`location_text` of a frame; "the model" without one."""
    return location_text(frame.f_code.co_filename, frame.f_lineno) if frame else "the model"


def users_lines(stack_trace: str) -> tuple[tuple[str, int], ...]:
    """(file, line number) of user frames in torch's textual stack trace, outermost first."""
    return tuple((file, int(line)) for file, line in _FRAME.findall(stack_trace) if is_users_file(file))


def source_line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()

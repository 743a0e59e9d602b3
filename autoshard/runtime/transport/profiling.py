"""Names of collectives in profiles, as in the predicted timeline: ``all_gather@tp mlp forward``.
While a profiler runs, and always under torch.distributed (for errors), a collective finds its
name, also its backward's, by the line of generated code that calls it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.autograd.profiler as profiler

from autoshard.runtime.transport.move import LOCAL, Move

if TYPE_CHECKING:
    from autoshard.runtime.transport.communicator import Communicator

_LINE_TABLE = "__modules_of_lines__"
"""the global of a generated file that holds its table"""

_NO_RECORD = contextlib.nullcontext()


def name_lines(rank_module: type[Any], modules: Mapping[int, str]) -> None:
    """Register the module for which each line of the file of ``rank_module`` communicates.
    ``modules``: line number → path, relative to the method's block; ``@block.mlp``: to the block
    in loop variable ``block``."""
    rank_module.forward.__globals__[_LINE_TABLE] = modules


def collective_name(kind: str, axes: Sequence[str], module: str, phase: str) -> str:
    """``all_gather@tp blocks.0.attention.q forward``; the root module is ``(root)``."""
    return f"{kind}@{','.join(axes)} {module or '(root)'} {phase}"


def with_module(move: Move, always: bool = False) -> Move:
    """``move`` with the module of the running generated line, if a profiler runs or ``always``."""
    return move._replace(module=_running_module()) if always or profiler._is_profiler_enabled else move


def profiled(comm: Communicator, move: Move, phase: str, members: int = 1) -> contextlib.AbstractContextManager[Any]:
    """Show what runs inside, but local moves, in the profile as this collective. A bucket of
    several ``members`` has the name of its first and how many follow."""
    if not profiler._is_profiler_enabled or move.verb in LOCAL:
        return _NO_RECORD
    name = collective_name(move.kind, comm.named(move.kind, move.axes), move.module, phase)
    return profiler.record_function(f"{name} (+{members - 1})" if members > 1 else name)


def _running_module() -> str:
    """The module of the innermost generated line on the stack; "?" without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _LINE_TABLE not in frame.f_globals:
        frame = frame.f_back
    if frame is None:
        return "?"
    owner, module = frame.f_locals.get("self"), frame.f_globals[_LINE_TABLE].get(frame.f_lineno, "")
    if module.startswith("@"):
        variable, _, module = module[1:].partition(".")
        owner = frame.f_locals.get(variable)
    return ".".join(filter(None, (getattr(owner, "block_path", ""), module)))

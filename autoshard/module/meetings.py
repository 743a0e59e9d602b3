"""Collective methods other than calls: the ranks compare which one they run, before they run it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class Meets(Protocol):
    """A sharded module."""

    def meeting(self, what: str) -> AbstractContextManager[None]:
        """Inside, all ranks do ``what``; see :func:`collective`."""


P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Meets)


def collective(do: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], T]:
    """Decorator of a method that every rank calls; if a rank calls another, all raise.

    The ranks compare the method's name first: collectives of different calls would hang.
    """

    @functools.wraps(do)
    def together(sharded: M, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with sharded.meeting(f"{do.__name__}()"):
            return do(sharded, *args, **kwargs)

    return together

"""What all ranks have to do together beside calls: noticed where one of them does something else."""

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
    """A function of a sharded module that every rank calls. Where a rank does not, all raise instead of waiting for it.

    Before its collectives the ranks compare what they do: those of other calls would meet them, and hang.
    """

    @functools.wraps(do)
    def together(sharded: M, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with sharded.meeting(f"{do.__name__}()"):
            return do(sharded, *args, **kwargs)

    return together

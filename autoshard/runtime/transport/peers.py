"""What a rank learns of the others while it waits for them: that one failed and why, or that one is gone.

A rank that fails alone leaves a note in the store of torch.distributed. A rank that waits for a collective looks there
once a second, so that it raises soon and says why instead of waiting for the timeout of its process group. There it also
finds out that it waits in another call than the others.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from autoshard.errors import CommunicationError

log = logging.getLogger("autoshard")

PATIENCE = datetime.timedelta(seconds=1)
"""how long a rank waits before it looks whether another one failed, and between looks"""

LONG = 30
"""looks after which a rank says that it still waits"""

_numbers = itertools.count()

Claim = tuple[str, int] | tuple[str, int, Sequence[int]]
"""what must be the same on every rank, and a number for it; the rank with which each agrees, where not with rank 0"""


class Notes:
    """The failures of one module's calls, by call. Every rank makes as many of these, in the same order.

    As a context: what fails inside is told to the others.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.call = 0
        """calls that began; 0: it is being compiled"""
        self.meetings = 0
        """how many of them were no calls of the model, but something else that all ranks do together"""
        self.doing = "a call"
        self._presented = 0, 0
        """the call, and how many times it was presented before: several compilations are no call"""
        self.failed = 0
        """how many calls failed on this rank"""
        self.broken = False
        """whether a collective was given up: those that follow would meet the wrong ones of other ranks"""
        self._failed_in: set[int] = set()
        self.claims: Callable[[], tuple[Claim, ...]] = tuple
        """what this rank's present call is, for the others to compare with theirs"""
        self.settle: Callable[[], None] = lambda: None
        """called before every collective: what the ranks must agree on before they begin one"""

    def present(self, doing: str, claims: Callable[[], tuple[Claim, ...]]) -> None:
        """Say what this rank does now. ``claims``: see :attr:`claims`."""
        self.doing, self.claims = doing, claims
        at, number = self._presented
        self._presented = self.call, number + 1 if at == self.call else 0

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks that this call fails here. The first rank's note stays."""
        if self.call in self._failed_in:
            return
        self.failed += 1
        self._failed_in.add(self.call)
        with contextlib.suppress(Exception):  # the store may be gone with its rank
            text = f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}"
            _store().compare_set(self._key(self.call), "", text)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            self.leave(error)

    def look(self) -> str:
        """What another rank that failed in this call, or alone in the one before, left, or in what its call is another.

        "" where there is nothing to tell: the others are late.
        """
        with contextlib.suppress(Exception):
            for call in {self.call, self.call - 1} - self._failed_in:
                if _store().check([self._key(call)]):
                    return str(_store().get(self._key(call)).decode())
            return self._other_call()
        return ""

    def _other_call(self) -> str:
        """In what this rank's call differs from that of the rank which waited in it first; "" where it is not known yet."""
        mine = {what: number for what, number, *peers in self.claims() if not peers}
        if not mine:
            return ""
        said = json.dumps([dist.get_rank(), self.doing, mine])
        first, doing, theirs = json.loads(
            _store().compare_set(f"{self._key(self.call)}/{self._presented[1]}", "", said)
        )
        if doing != self.doing:
            return (
                f"rank {first} is in {doing}, and rank {dist.get_rank()} in {self.doing}: every rank has to do the same"
            )
        differing = [what for what in mine.keys() | theirs.keys() if mine.get(what) != theirs.get(what)]
        return f"the ranks disagree on {sorted(differing)[0]}: rank {first} comes with another" if differing else ""

    def _key(self, call: int) -> str:
        return f"autoshard/{self.number}/{call}"


def wait(work: Any, notes: Notes, what: Callable[[], str]) -> None:
    """Wait for a collective of gloo. Raises :class:`CommunicationError` where it cannot end.

    ``what``: its name, for messages.
    """
    for looks in itertools.count(1):
        try:
            work.wait(PATIENCE)
            return
        except RuntimeError as error:
            late = not work.is_completed()
            if not late:
                if _succeeds(work):
                    return
                raise lost(error, notes, what()) from error
        if told := notes.look():
            notes.broken = True
            raise CommunicationError(f"{what()}: {told}")
        if looks == LONG:
            log.warning("rank %d has waited %d s for %s", dist.get_rank(), LONG * PATIENCE.seconds, what())


def lost(error: Exception, notes: Notes, what: str) -> CommunicationError:
    """The error of a collective that the backend gave up."""
    told = notes.look()
    notes.broken = True  # it is among what ranks compare, so the look comes first
    if not told:
        told = f"another rank is gone (ended, killed, or out of reach), or did not come in time: {error}"
    return CommunicationError(f"{what}: {told}")


def _succeeds(work: Any) -> bool:
    """Whether a collective that ended just after the wait for it has its result."""
    try:
        work.wait()
    except RuntimeError:
        return False
    return True


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()

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
from autoshard.runtime.transport.groups import once

log = logging.getLogger("autoshard")

PATIENCE = datetime.timedelta(seconds=1)
"""how long a rank waits before it looks whether another one failed, and between looks"""

LONG = 30
"""looks after which a rank says that it still waits"""

_numbers = itertools.count()

Claim = tuple[str, int] | tuple[str, int, Sequence[int]]
"""what must be the same on every rank, and a number for it; the rank with which each agrees, where not with rank 0"""


class Common:
    """What the modules on the groups of one initialisation of torch.distributed have in common."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        """of the initialisation, which its store may outlive"""
        self.modules = 0
        self.calls = 0
        """calls that began, of all modules; one for the making of each"""
        self.latest = 0
        """the number of the module that was called last"""
        self.failed_in: set[int] = set()
        """the calls that failed on this rank"""
        self.broken = False
        """whether a collective was given up: those that follow would meet the wrong ones of other ranks"""
        self.lost = False
        """whether that was an agreement"""


class Notes:
    """The calls of one module, and their failures. Every rank makes as many of these, in the same order.

    As a context: what fails inside is told to the others.
    """

    def __init__(self) -> None:
        self.common = once("common", Common)
        self.common.modules += 1
        self.common.calls += 1
        self.number = self.common.modules
        self.at = self.common.calls
        """which of all modules' calls is this one's latest"""
        self._presented = 0, 0
        """that call, and how many times it was presented before: several compilations are no call"""
        self.call = 0
        """calls that began; 0: it is being compiled"""
        self.meetings = 0
        """how many of them were no calls of the model, but something else that all ranks do together"""
        self.doing = "a call"
        self.claims: Callable[[], tuple[Claim, ...]] = tuple
        """what this rank's present call is, for the others to compare with theirs"""
        self.settle: Callable[[], None] = lambda: None
        """called before every collective: what the ranks must agree on before they begin one"""

    @property
    def failed(self) -> int:
        """How many calls failed on this rank, of any module."""
        return len(self.common.failed_in)

    @property
    def broken(self) -> bool:
        """Whether a collective was given up, of any module."""
        return self.common.broken

    def give_up(self) -> None:
        """Let this rank begin no collective any longer."""
        self.common.broken = True

    def begin(self, meeting: bool = False) -> None:
        """A call, or a ``meeting``, begins."""
        self.common.calls += 1
        self.at, self.call, self.meetings = self.common.calls, self.call + 1, self.meetings + meeting

    def calls_again(self) -> bool:
        """Whether this module was called last; from now on it is."""
        before, self.common.latest = self.common.latest, self.number
        return before == self.number

    def present(self, doing: str, claims: Callable[[], tuple[Claim, ...]]) -> None:
        """Say what this rank does now. ``claims``: see :attr:`claims`."""
        self.doing, self.claims = doing, claims
        at, number = self._presented
        self._presented = self.at, number + 1 if at == self.at else 0

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks that this call fails here. The first rank's note stays."""
        if self.at in self.common.failed_in:
            return
        self.common.failed_in.add(self.at)
        with contextlib.suppress(Exception):  # the store may be gone with its rank
            text = f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}"
            _store().compare_set(self._key(self.at), "", text)

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
            for call in {self.at, self.at - 1} - self.common.failed_in:
                if _store().check([self._key(call)]):
                    return str(_store().get(self._key(call)).decode())
            return self._other_call()
        return ""

    def _other_call(self) -> str:
        """In what this rank's call differs from that of the rank which waited in it first; "" where it is not known yet."""
        mine = {what: number for what, number, *peers in self.claims() if not peers}
        if not mine:
            return ""
        said = json.dumps([dist.get_rank(), self.number, self.doing, mine])
        key = f"{self._key(self.at)}/{self._presented[1]}"
        first, number, doing, theirs = json.loads(_store().compare_set(key, "", said))
        if number != self.number:
            return f"rank {first} calls another module than rank {dist.get_rank()}: every rank has to do the same"
        if doing != self.doing:
            return (
                f"rank {first} is in {doing}, and rank {dist.get_rank()} in {self.doing}: every rank has to do the same"
            )
        differing = [what for what in mine.keys() | theirs.keys() if mine.get(what) != theirs.get(what)]
        return f"the ranks disagree on {sorted(differing)[0]}: rank {first} comes with another" if differing else ""

    def _key(self, call: int) -> str:
        return f"autoshard/{self.common.number}/{call}"


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
            notes.give_up()
            raise CommunicationError(f"{what()}: {told}")
        if looks == LONG:
            log.warning("rank %d has waited %d s for %s", dist.get_rank(), LONG * PATIENCE.seconds, what())


def lost(error: Exception, notes: Notes, what: str) -> CommunicationError:
    """The error of a collective that the backend gave up."""
    told = notes.look()
    notes.give_up()  # it is among what ranks compare, so the look comes first
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

"""Failure detection: a waiting rank learns that another one failed and why, or is gone. A failing
rank leaves a note in torch.distributed's store, where waiting ranks look once a second: no
timeout. They also notice if they wait in another call than the others."""

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
from autoshard.runtime.transport.groups import once_per_initialisation
from autoshard.torch_private.distributed import default_store

log = logging.getLogger("autoshard")

POLL_INTERVAL = datetime.timedelta(seconds=1)
"""how long a rank waits before its first look at the others' notes, and between looks"""

POLLS_BEFORE_WARNING = 30
"""looks after which a rank logs that it still waits"""

_initialisations = itertools.count()

Claim = tuple[str, int] | tuple[str, int, Sequence[int]]
"""(what must be equal on all ranks, its number[, per rank the rank to agree with, else 0])"""


class ModulesState:
    """State shared by modules on the same ranks since one initialisation of torch.distributed."""

    def __init__(self, scope: tuple[Any, ...] = ()) -> None:
        number = once_per_initialisation("initialisation", lambda: next(_initialisations))
        self.prefix = "/".join(map(str, ("autoshard", number, *scope)))
        """of keys in the store, which may outlive the initialisation"""
        self.modules = 0
        self.calls = 0
        """calls begun, of all modules, and one per module created"""
        self.latest = 0
        """number of the module called last"""
        self.failed_in: set[int] = set()
        """calls that failed on this rank"""
        self.broken = False
        """whether a collective was given up; later ones would meet wrong ones of other ranks"""
        self.lost = False
        """whether that collective was an agreement"""


class FailureNotes:
    """Calls of one module, and their failures; ranks create as many, in the same order. As a
    context manager it reports errors inside. ``scope``: the ranks that create it, if not all, or
    another purpose."""

    def __init__(self, scope: tuple[Any, ...] = ()) -> None:
        self.common = once_per_initialisation(("common", scope), lambda: ModulesState(scope))
        self.common.modules += 1
        self.common.calls += 1
        self.number = self.common.modules
        self.at = self.common.calls
        """number of the module's latest call among all modules' calls"""
        self._presented = 0, 0
        """(call, times it was presented before): compilations are no calls"""
        self.call = 0
        """calls begun; 0: compiling"""
        self.meetings = 0
        """calls that were no model calls, but other joint work of all ranks"""
        self.doing = "a call"
        self.claims: Callable[[], tuple[Claim, ...]] = tuple
        """identity of this rank's current call, for comparison"""
        self.settle: Callable[[], None] = lambda: None
        """called before every collective: agreement that must come first"""

    @property
    def failed(self) -> int:
        """Number of failed calls on this rank, of any module."""
        return len(self.common.failed_in)

    @property
    def broken(self) -> bool:
        """Whether a collective of any module was given up."""
        return self.common.broken

    def give_up(self) -> None:
        """Let this rank begin no more collectives."""
        self.common.broken = True

    def begin(self, meeting: bool = False) -> None:
        """Begin a call, or a ``meeting``."""
        self.common.calls += 1
        self.at, self.call, self.meetings = self.common.calls, self.call + 1, self.meetings + meeting

    def calls_again(self) -> bool:
        """Whether this module was also the last one called; from now on it is."""
        before, self.common.latest = self.common.latest, self.number
        return before == self.number

    def present(self, doing: str, claims: Callable[[], tuple[Claim, ...]]) -> None:
        """State what this rank does now. ``claims``: see :attr:`claims`."""
        self.doing, self.claims = doing, claims
        at, number = self._presented
        self._presented = self.at, number + 1 if at == self.at else 0

    def leave(self, error: BaseException) -> None:
        """Report to the other ranks that this call fails here. The first rank's note stays."""
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
        """Why to stop waiting: another rank's failure in this or the last call, or a mismatch; "":
        others are just late."""
        with contextlib.suppress(Exception):
            for call in {self.at, self.at - 1} - self.common.failed_in:
                if _store().check([self._key(call)]):
                    return str(_store().get(self._key(call)).decode())
            return self._other_call()
        return ""

    def _other_call(self) -> str:
        """How this rank's call differs from that of the rank that waited in it first; else ""."""
        mine = {what: number for what, number, *peers in self.claims() if not peers}
        if not mine:
            return ""
        said = json.dumps([dist.get_rank(), self.number, self.doing, mine])
        key = f"{self._key(self.at)}/{self._presented[1]}"
        first, number, doing, theirs = json.loads(_store().compare_set(key, "", said))
        if number != self.number:
            return f"rank {first} calls another module than rank {dist.get_rank()}: every rank must make the same calls"
        if doing != self.doing:
            return (
                f"rank {first} is in {doing}, and rank {dist.get_rank()} in {self.doing}: "
                "every rank must make the same calls"
            )
        differing = [what for what in mine.keys() | theirs.keys() if mine.get(what) != theirs.get(what)]
        return f"the ranks disagree on {sorted(differing)[0]}: rank {first} has another" if differing else ""

    def _key(self, call: int) -> str:
        return f"{self.common.prefix}/{call}"


def wait(work: Any, notes: FailureNotes, what: Callable[[], str]) -> None:
    """Wait for a gloo collective; :class:`CommunicationError` if it cannot end. ``what``: its name,
    for messages."""
    for looks in itertools.count(1):
        try:
            work.wait(POLL_INTERVAL)
            return
        except RuntimeError as error:
            late = not work.is_completed()
            if not late:
                if _succeeds(work):
                    return
                raise collective_error(error, notes, what()) from error
        if reason := notes.look():
            notes.give_up()
            raise CommunicationError(f"{what()}: {reason}")
        if looks == POLLS_BEFORE_WARNING:
            log.warning(
                "rank %d has waited %d s for %s", dist.get_rank(), POLLS_BEFORE_WARNING * POLL_INTERVAL.seconds, what()
            )


def collective_error(error: Exception, notes: FailureNotes, what: str) -> CommunicationError:
    """The error of a collective that the backend gave up."""
    reason = notes.look()
    notes.give_up()  # after the look, since ranks compare it
    if not reason:
        reason = f"another rank ended, was killed, is unreachable, or did not arrive in time: {error}"
    return CommunicationError(f"{what}: {reason}")


def _succeeds(work: Any) -> bool:
    """Whether a collective that ended right after the wait has its result."""
    try:
        work.wait()
    except RuntimeError:
        return False
    return True


def _store() -> Any:
    return default_store()

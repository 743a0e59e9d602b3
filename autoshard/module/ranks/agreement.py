"""Agreement of ranks on a gloo group of its own on the CPU, so that no device waits.

Numbers are gathered in the background while a call begins. Before its first collective all ranks
must have the same: a backend may hang or abort on different collectives. If ranks cannot go on
together, every rank raises.
"""

from __future__ import annotations

import builtins
import json
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autoshard import errors
from autoshard.errors import AutoshardError, CommunicationError, PlanError, RuntimeMismatchError
from autoshard.module.ranks.checksum import checksum
from autoshard.runtime.transport.groups import once
from autoshard.runtime.transport.peers import Claim, Notes, lost, wait
from autoshard.runtime.transport.wire import raw
from autoshard.runtime.transport.work import all_gather_single

T = TypeVar("T")
_WIDTH = 6
"""numbers in an agreement: a kind and up to five claims"""

_POSITIVE = (1 << 62) - 1

AFTERWARDS = "an earlier call was left between its collectives: start all processes again"

CHECKS = ("inputs", "replicas")
"""names for AUTOSHARD_CHECK"""


def _cpu(numbers: object) -> torch.Tensor:
    """A tensor on the CPU, whatever the default device."""
    return torch.tensor(numbers, device="cpu")


class Agreement:
    """The agreements of one module; every rank creates it and calls it in the same order."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        fake = dist.get_backend() == "fake"
        self.rank, self.ranks = (0, 1) if fake else (dist.get_rank(), dist.get_world_size())
        self._group = None if self.ranks == 1 else _group()
        self._open: tuple[Any, torch.Tensor, tuple[Claim, ...]] | None = None
        notes.settle = self.finish

    # --- numbers ---

    def begin(self, *claims: Claim) -> None:
        """Begin the comparison; :meth:`finish` has the result."""
        self.finish()
        kind = zlib.crc32(repr((self.notes.number, self.notes.at, [what for what, *_ in claims])).encode())
        numbers = [kind, *(n & _POSITIVE for _, n, *_ in claims)]
        self._open = (*self._numbers(_cpu(numbers + [0] * (_WIDTH - len(numbers)))), claims)

    def finish(self) -> None:
        """Raise :class:`RuntimeMismatchError` on every rank unless all have equal numbers."""
        if self._open is None:
            return
        (work, found, claims), self._open = self._open, None
        self._wait(work, "an agreement of all ranks" if not claims else f"the agreement on {claims[0][0]}")
        rows = found.tolist()
        for i, (what, _, *peers) in enumerate((("which call they make", 0), *claims)):
            if others := differing(rows, i, *peers):
                why = self.notes.look()
                first = peers[0][others[0]] if peers else 0
                said = f"the ranks disagree on {what}"
                more = f"; {why}" if why and said not in why else ""  # else said twice
                raise RuntimeMismatchError(f"{said}: {listed(others)} from rank {first}{more}")

    def agree(self, *claims: Claim) -> None:
        """:meth:`begin` and :meth:`finish`."""
        self.begin(*claims)
        self.finish()

    def numbers_of(self, tensors: Sequence[torch.Tensor]) -> list[list[int]]:
        """Checksums of ``tensors`` by rank; -1 on the meta device."""
        numbers = [-1 if x.is_meta else int(checksum(x)) & _POSITIVE for x in tensors]
        return self._rows(numbers, "the comparison of tensors")

    def known(self, mine: Sequence[int]) -> list[int]:
        """Merge bytes that some ranks know (others pass 0): the first known value of each."""
        self.finish()
        self.notes.claims = tuple  # not known yet
        words = [int.from_bytes(mine[at : at + 7], "little") for at in range(0, len(mine), 7)]
        rows = self._rows(words, "what ranks know of their tensors")
        each = [b"".join(n.to_bytes(7, "little") for n in row) for row in rows]
        return [next(filter(None, told), 0) for told in zip(*each, strict=True)][: len(mine)]

    def _rows(self, mine: Sequence[int], what: str) -> list[list[int]]:
        if not mine:
            return [[] for _ in range(self.ranks)]
        work, found = self._numbers(_cpu(mine))
        self._wait(work, what)
        rows: list[list[int]] = found.tolist()
        return rows

    def _numbers(self, mine: torch.Tensor) -> tuple[Any, torch.Tensor]:
        if self.ranks == 1:
            return None, mine.view(1, -1)
        found = torch.empty(self.ranks * len(mine), dtype=torch.int64, device="cpu")
        return self._begin("an agreement", all_gather_single, found, mine), found.view(self.ranks, -1)

    # --- results and failures ---

    def everywhere(self, do: Callable[[], T]) -> T:
        """``do()`` on every rank; if it fails on some, every rank raises its or the first error."""
        result, error = _tried(do)
        told = self._texts("" if error is None else _told(error))
        if error is not None:
            raise error
        for text in filter(None, told):
            raise _error(text)
        return result  # type: ignore[return-value]

    def from_first(self, do: Callable[[], str]) -> str:
        """``do()`` of rank 0, on every rank; its error is raised on every rank."""
        result, error = _tried(do) if self.rank == 0 else (None, None)
        sent = "" if self.rank else json.dumps([result, "" if error is None else _told(error)])
        text, told = json.loads(self._text_of_first(sent))
        if error is not None:
            raise error
        if told:
            raise _error(told)
        return str(text)

    def tensor_of_first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``x`` on the CPU; other ranks pass a tensor of its shape and dtype."""
        full = (
            x.detach().cpu().contiguous().clone()
            if self.rank == 0
            else torch.empty(x.shape, dtype=x.dtype, device="cpu")
        )
        if full.numel() and self.ranks > 1:
            on_wire = torch.view_as_real(full) if full.is_complex() else raw(full)
            self._wait(self._begin("a tensor of rank 0", dist.broadcast, on_wire, 0), "a tensor of rank 0")
        return full

    def _texts(self, mine: str) -> list[str]:
        """The texts of all ranks."""
        if self.ranks == 1:
            return [mine]
        data = mine.encode()
        work, found = self._numbers(_cpu([len(data)]))
        self._wait(work, "what the ranks report")
        longest = int(found.max())
        if not longest:
            return [""] * self.ranks
        out = torch.empty(self.ranks * longest, dtype=torch.uint8, device="cpu")
        own = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        self._wait(self._begin("reports", all_gather_single, out, own), "what the ranks report")
        return [bytes(row.tolist()).decode().rstrip() for row in out.view(self.ranks, -1)]

    def _text_of_first(self, mine: str) -> str:
        data = torch.frombuffer(bytearray(mine.encode()), dtype=torch.uint8) if mine else torch.empty(0, device="cpu")
        length = self.tensor_of_first(_cpu(len(data)))
        data = self.tensor_of_first(data if mine else torch.empty(int(length), dtype=torch.uint8, device="cpu"))
        return data.numpy().tobytes().decode()

    # --- the group ---

    def _begin(self, what: str, collective: Callable[..., Any], *args: Any) -> Any:
        if self.notes.common.lost:
            raise CommunicationError(AFTERWARDS)
        try:
            return collective(*args, group=self._group, async_op=True)
        except RuntimeError as error:
            raise lost(error, self.notes, what) from error

    def _wait(self, work: Any, what: str) -> None:
        if work is None:
            return
        try:
            wait(work, self.notes, lambda: f"{what} (call {self.notes.call})")
        except CommunicationError:
            self.notes.common.lost = True
            raise


def differing(rows: Sequence[Sequence[int]], i: int, peers: Sequence[int] | None = None) -> list[int]:
    """Ranks whose number ``i`` differs from that of their rank in ``peers`` (default: rank 0)."""
    return [rank for rank, row in enumerate(rows) if row[i] != rows[peers[rank] if peers else 0][i]]


def listed(ranks: Sequence[int], most: int = 8) -> str:
    """``rank 1 differs``, ``ranks 1, 2 and 5 more differ``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} differs"
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"ranks {', '.join(map(str, ranks[:most]))}{more} differ"


def asked_checks() -> dict[str, int]:
    """Parse AUTOSHARD_CHECK (``inputs,replicas=100``): name → check every n-th call.

    Raises :class:`PlanError` for an unknown name.
    """
    found = {}
    for part in filter(None, (p.strip() for p in os.environ.get("AUTOSHARD_CHECK", "").split(","))):
        name, _, every = part.partition("=")
        if name not in CHECKS or not (every or "1").isdigit() or every == "0":
            raise PlanError(f"AUTOSHARD_CHECK={part}: known are {', '.join(CHECKS)}, and with a number, replicas=100")
        found[name] = int(every or 1)
    return found


def _group() -> Any:
    """A gloo group of all ranks."""
    return once("agreement", lambda: dist.new_group(backend="gloo"))


def _tried(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return do(), None
    except Exception as error:
        return None, error


def _told(error: Exception) -> str:
    return json.dumps([type(error).__name__, str(error)])


def _error(told: str) -> Exception:
    """The error of another rank, of the same class if that is ours or a builtin."""
    name, text = json.loads(told)
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return AutoshardError(f"{name}: {text}")
    try:
        error: Exception = kind(text)
    except TypeError:
        error = AutoshardError(f"{name}: {text}")
    return error

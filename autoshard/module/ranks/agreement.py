"""What ranks agree on over a gloo group of their own, and the comparison of replicas by checksum.
Numbers are gathered in the background while a call begins. They must be equal before the first
collective, as backends may hang where ranks begin different ones. Where ranks cannot go on
together, every rank raises."""

from __future__ import annotations

import builtins
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard import errors
from autoshard.errors import AutoshardError, CommunicationError, RuntimeMismatchError
from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh
from autoshard.module.dtensors.module_dtensor import is_owned
from autoshard.module.ranks.rank_calls import checksum
from autoshard.runtime.transport.buffer_pool import raw
from autoshard.runtime.transport.groups import once_per_initialisation
from autoshard.runtime.transport.peers import Claim, FailureNotes, collective_error, wait
from autoshard.runtime.transport.process_group import all_gather_single

AgreedT = TypeVar("AgreedT")
_AGREEMENT_WIDTH = 6
"""numbers in an agreement: a kind and up to five claims"""

_POSITIVE_MASK = (1 << 62) - 1

RESTART_ADVICE = "an earlier call stopped between its collectives: restart all processes"


def _cpu_tensor(numbers: object) -> Tensor:
    """A tensor on the CPU, whatever the default device."""
    return torch.tensor(numbers, device="cpu")


class Agreement:
    """The agreements of one module; every rank creates it and calls it in the same order.
    ``group``: a gloo group, by default of all ranks."""

    def __init__(self, notes: FailureNotes, group: Any = None) -> None:
        self.notes = notes
        fake = dist.get_backend() == "fake"
        self.rank, self.ranks = (0, 1) if fake else (dist.get_rank(group), dist.get_world_size(group))
        self._group = None if self.ranks == 1 else group or _gloo_group()
        self._open: tuple[Any, Tensor, tuple[Claim, ...]] | None = None
        notes.settle = self.finish

    # --- numbers ---

    def begin(self, *claims: Claim) -> None:
        """Begin the comparison; :meth:`finish` has the result."""
        self.finish()
        kind = zlib.crc32(repr((self.notes.number, self.notes.at, [what for what, *_ in claims])).encode())
        numbers = [kind, *(n & _POSITIVE_MASK for _, n, *_ in claims)]
        self._open = (*self._numbers(_cpu_tensor(numbers + [0] * (_AGREEMENT_WIDTH - len(numbers)))), claims)

    def finish(self) -> None:
        """Raise :class:`RuntimeMismatchError` on every rank unless all have equal numbers."""
        if self._open is None:
            return
        (work, found, claims), self._open = self._open, None
        self._wait(work, "an agreement of all ranks" if not claims else f"the agreement on {claims[0][0]}")
        rows = found.tolist()
        for i, (what, _, *peers) in enumerate((("which call they make", 0), *claims)):
            if others := differing_ranks(rows, i, *peers):
                why = self.notes.look()
                first = peers[0][others[0]] if peers else 0
                said = f"the ranks disagree on {what}"
                more = f"; {why}" if why and said not in why else ""  # else said twice
                raise RuntimeMismatchError(f"{said}: {ranks_in_words(others)} from rank {first}{more}")

    def agree(self, *claims: Claim) -> None:
        """:meth:`begin` and :meth:`finish`."""
        self.begin(*claims)
        self.finish()

    def numbers_of(self, tensors: Sequence[Tensor]) -> list[list[int]]:
        """Checksums of ``tensors`` by rank; -1 on the meta device."""
        numbers = [-1 if x.is_meta else int(checksum(x)) & _POSITIVE_MASK for x in tensors]
        return self.rows(numbers, "the comparison of tensors")

    def known(self, mine: Sequence[int]) -> list[int]:
        """Merge bytes that some ranks know (others pass 0): the first known value of each."""
        self.finish()
        self.notes.claims = tuple  # not known yet
        words = [int.from_bytes(mine[at : at + 7], "little") for at in range(0, len(mine), 7)]
        rows = self.rows(words, "what ranks know of their tensors")
        each = [b"".join(n.to_bytes(7, "little") for n in row) for row in rows]
        return [next(filter(None, reported), 0) for reported in zip(*each, strict=True)][: len(mine)]

    def rows(self, mine: Sequence[int], what: str) -> list[list[int]]:
        """The numbers of all ranks; ``what``: for messages."""
        if not mine:
            return [[] for _ in range(self.ranks)]
        work, found = self._numbers(_cpu_tensor(mine))
        self._wait(work, what)
        return found.tolist()

    def _numbers(self, mine: Tensor) -> tuple[Any, Tensor]:
        if self.ranks == 1:
            return None, mine.view(1, -1)
        found = torch.empty(self.ranks * len(mine), dtype=torch.int64, device="cpu")
        return self._begin("an agreement", all_gather_single, found, mine), found.view(self.ranks, -1)

    # --- results and failures ---

    def everywhere(self, do: Callable[[], AgreedT]) -> AgreedT:
        """``do()`` on every rank; if it fails on some, every rank raises its or the first error."""
        result, error = _result_or_error(do)
        reported = self.texts("" if error is None else _error_as_json(error))
        if error is not None:
            raise error
        for text in filter(None, reported):
            raise _error_from_json(text)
        return result  # type: ignore[return-value]

    def from_first(self, do: Callable[[], str]) -> str:
        """``do()`` of rank 0, on every rank; its error is raised on every rank."""
        result, error = _result_or_error(do) if self.rank == 0 else (None, None)
        sent = "" if self.rank else json.dumps([result, "" if error is None else _error_as_json(error)])
        text, reported = json.loads(self.text_of(sent))
        if error is not None:
            raise error
        if reported:
            raise _error_from_json(reported)
        return str(text)

    def tensor_of_first(self, x: Tensor, first: int = 0) -> Tensor:
        """Rank ``first``'s ``x`` on the CPU; other ranks pass a tensor of its shape and dtype."""
        full = (
            x.detach().cpu().contiguous().clone()
            if self.rank == first
            else torch.empty(x.shape, dtype=x.dtype, device="cpu")
        )
        if full.numel() and self.ranks > 1:
            on_wire = torch.view_as_real(full) if full.is_complex() else raw(full)
            sender = dist.get_process_group_ranks(self._group)[first]
            self._wait(self._begin("a tensor of rank 0", dist.broadcast, on_wire, sender), "a tensor of rank 0")
        return full

    def texts(self, mine: str) -> list[str]:
        if self.ranks == 1:
            return [mine]
        data = mine.encode()
        work, found = self._numbers(_cpu_tensor([len(data)]))
        self._wait(work, "what the ranks report")
        longest = int(found.max())
        if not longest:
            return [""] * self.ranks
        out = torch.empty(self.ranks * longest, dtype=torch.uint8, device="cpu")
        own = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        self._wait(self._begin("reports", all_gather_single, out, own), "what the ranks report")
        return [bytes(row.tolist()).decode().rstrip() for row in out.view(self.ranks, -1)]

    def text_of(self, mine: str, first: int = 0) -> str:
        """The text of rank ``first``; other ranks pass an empty one."""
        data = torch.frombuffer(bytearray(mine.encode()), dtype=torch.uint8) if mine else torch.empty(0, device="cpu")
        length = self.tensor_of_first(_cpu_tensor(len(data)), first)
        data = self.tensor_of_first(data if mine else torch.empty(int(length), dtype=torch.uint8, device="cpu"), first)
        return data.numpy().tobytes().decode()

    # --- the group ---

    def _begin(self, what: str, collective: Callable[..., Any], *args: Any) -> Any:
        if self.notes.common.lost:
            raise CommunicationError(RESTART_ADVICE)
        try:
            return collective(*args, group=self._group, async_op=True)
        except RuntimeError as error:
            raise collective_error(error, self.notes, what) from error

    def _wait(self, work: Any, what: str) -> None:
        if work is None:
            return
        try:
            wait(work, self.notes, lambda: f"{what} (call {self.notes.call})")
        except CommunicationError:
            self.notes.common.lost = True
            raise


def differing_ranks(rows: Sequence[Sequence[int]], i: int, peers: Sequence[int] | None = None) -> list[int]:
    """Ranks whose number ``i`` differs from that of their rank in ``peers`` (default: rank 0)."""
    return [rank for rank, row in enumerate(rows) if row[i] != rows[peers[rank] if peers else 0][i]]


def ranks_in_words(ranks: Sequence[int], most: int = 8) -> str:
    """``rank 1 differs``, ``ranks 1, 2 and 5 more differ``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} differs"
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"ranks {', '.join(map(str, ranks[:most]))}{more} differ"


def _gloo_group() -> Any:
    return once_per_initialisation("agreement", lambda: dist.new_group(backend="gloo"))


def _result_or_error(do: Callable[[], AgreedT]) -> tuple[AgreedT | None, Exception | None]:
    try:
        return do(), None
    except Exception as error:
        return None, error


def _error_as_json(error: Exception) -> str:
    more = {name: x for name, x in vars(error).items() if isinstance(x, bool | int | float)}
    return json.dumps([type(error).__name__, str(error), more])


def _error_from_json(reported: str) -> Exception:
    """The error of another rank, of the same class if that is ours or a builtin."""
    name, text, more = json.loads(reported)
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return AutoshardError(f"{name}: {text}")
    try:
        error: Exception = kind.__new__(kind, text) if issubclass(kind, AutoshardError) else kind(text)
    except TypeError:
        error = AutoshardError(f"{name}: {text}")
    vars(error).update(more)
    return error


log = logging.getLogger("autoshard")

_META_CHECKSUM = -1
"""checksum of a tensor without data"""

_MOST_SHOWN = 5


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by their first names."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def rank0_values(agreement: Agreement, tensors: Mapping[str, Tensor], title: str) -> Iterator[tuple[str, Tensor]]:
    """Rank 0's values (on the CPU) of tensors that differ or lack data on another rank; names,
    shapes and dtypes are equal. It warns of different data. Raises :class:`RuntimeMismatchError`
    on every rank if only rank 0 has none. Collective."""
    rows = agreement.numbers_of(list(tensors.values()))
    found = [(n, i) for i, n in enumerate(tensors) if differing_ranks(rows, i)]
    lost = [n for n, i in found if rows[0][i] == _META_CHECKSUM]
    if lost:
        raise RuntimeMismatchError(
            f"rank 0 has {title} on the meta device, but other ranks have its data "
            f"({', '.join(lost[:_MOST_SHOWN])}). Give rank 0 the data, or load it into the sharded module"
        )
    other = [(n, i) for n, i in found if any(rows[r][i] != _META_CHECKSUM for r in differing_ranks(rows, i))]
    if other and agreement.rank == 0:
        names = ", ".join(f"{n} ({ranks_in_words(differing_ranks(rows, i))})" for n, i in other[:_MOST_SHOWN])
        log.warning(
            "the ranks have different values of %d of %d tensors of %s. Those of rank 0 are used: %s%s",
            len(other),
            len(tensors),
            title,
            names,
            ", …" if len(other) > _MOST_SHOWN else "",
        )
    return ((n, agreement.tensor_of_first(tensors[n])) for n, _ in found)


def check_replicas(
    agreement: Agreement, mesh: Mesh, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> None:
    """Raise :class:`RuntimeMismatchError` on every rank if replicas differ."""
    tensors = {**parameters, **buffers}
    whole = Layout(mesh)
    tensors = {name: x for name, x in tensors.items() if not is_owned(x)}
    layouts = [Layout.from_torch(mesh, x.placements) if isinstance(x, DTensor) else whole for x in tensors.values()]
    rows = agreement.numbers_of([x.to_local() if isinstance(x, DTensor) else x for x in tensors.values()])
    wrong = []
    for i, (name, layout) in enumerate(zip(tensors, layouts, strict=True)):
        for ranks in _replica_groups(layout):
            others = [r for r in ranks if rows[r][i] != rows[ranks[0]][i]]
            if others:
                wrong.append(f"{name} ({ranks_in_words(others)} from rank {ranks[0]})")
    if wrong:
        more = f" and {len(wrong) - _MOST_SHOWN} more" if len(wrong) > _MOST_SHOWN else ""
        raise RuntimeMismatchError(
            f"replicas have drifted apart: {', '.join(wrong[:_MOST_SHOWN])}{more}. Some "
            "ranks changed them and others did not"
        )


def _replica_groups(layout: Layout) -> list[Sequence[int]]:
    """Groups of ranks that hold the same shard."""
    mesh = layout.mesh
    cut = [mesh.index(a) for a in layout.axes_with(Shard)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        coordinates = mesh.coordinates(rank)
        groups.setdefault(tuple(coordinates[i] for i in cut), []).append(rank)
    return list(groups.values())

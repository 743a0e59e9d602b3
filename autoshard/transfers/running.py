"""``autoshard.transfer``: weights of one sharded module into another, on any ranks."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autoshard.errors import CommunicationError, PlanError
from autoshard.hardware import hardware
from autoshard.layout import Layout
from autoshard.module.ranks.agreement import RESTART_ADVICE, Agreement
from autoshard.module.sharded_module import ShardedModule
from autoshard.passes.ir.text import show_seconds
from autoshard.runtime.transport.groups import once_per_initialisation
from autoshard.runtime.transport.peers import FailureNotes
from autoshard.transfers.files import open_folder
from autoshard.transfers.folder_target import FolderTarget
from autoshard.transfers.holdings import Held, Link, Replica, renumbered
from autoshard.transfers.messages import Exchange, RankMessages
from autoshard.transfers.names import STATE_SEPARATOR, Names, links_of
from autoshard.transfers.schedule import Schedule, make_schedule
from autoshard.transfers.states import ModuleState, in_one_process, merged

BUFFER = 256 * 10**6
"""bytes of messages, or of a file, in memory at a time; a few hundred messages fill a fast network"""

MOST_KEPT_SCHEDULES = 8
"""schedules that are kept for later transfers between the same modules, a few MB each"""


@dataclass(frozen=True)
class TransferReport:
    """Result of a transfer; ``print()`` shows it with the schedule."""

    schedule: Schedule = field(repr=False)
    tensors: int
    """target tensors that were written, optimizer states included"""
    unused: tuple[str, ...]
    """source tensors that no target tensor takes"""
    rounds: int
    seconds: float
    """from the call to the switch, on this rank"""

    def __str__(self) -> str:
        unused = f", {len(self.unused)} source tensors unused" if self.unused else ""
        return f"{self.schedule}\n{self.tensors} tensors in {self.rounds} rounds, {show_seconds(self.seconds)}{unused}"


class TransferHandle:
    """A transfer that runs while training goes on; :meth:`wait` ends it."""

    def __init__(self, work: Callable[[], None], end: Callable[[], TransferReport]) -> None:
        self._end = end
        self._error: Exception | None = None
        self._report: TransferReport | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="autoshard transfer", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # raised by wait()
            self._error = error

    def done(self) -> bool:
        """Whether this rank has received all of its weights. The target still has the old ones."""
        return not self._thread.is_alive()

    def wait(self) -> TransferReport:
        """Wait for all ranks, and switch the target to the new weights. Collective.

        Raises as :func:`autoshard.transfer`; the target then keeps its old weights.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._report is None:
            self._report = self._end()
        return self._report


def transfer(
    source: ShardedModule | ModuleState | str | os.PathLike[str] | None,
    target: ShardedModule | str | os.PathLike[str] | None,
    *,
    dtype: torch.dtype | None = None,
    names: Names = None,
    optimizer: tuple[torch.optim.Optimizer | None, torch.optim.Optimizer | None] | None = None,
    buffer: int = BUFFER,
    asynchronous: bool = False,
) -> Any:
    """Copy the weights of ``source`` into ``target``: any layouts, meshes and groups of ranks.

    Every rank receives exactly the part of its new shard that it does not hold, once. The target
    switches to the new weights at the end, on all ranks, or keeps the old ones if a rank fails.
    Under torch.distributed it is collective over all ranks.

    Args:
        source: a result of :func:`autoshard.compile`. A rank without the module passes None:
            compile each for a ``DeviceMesh`` of some ranks. If ranks hold modules on several
            groups of ranks, all of them send, or receive.
            Or the result of :func:`autoshard.keep`.
            Or a path: a folder of safetensors files, one file, or a folder of torch.distributed.checkpoint.
            Each rank then reads the byte ranges of its shards, without messages, in place.
        target: a result of :func:`autoshard.compile`, or None.
            Or a folder: each rank writes safetensors files, which appear when all are written.
        dtype: dtype on the wire for floating-point tensors; default: the smaller of the source's
            and the target's. The sender converts.
        names: how source names become target names: a function (None: not taken), or a table
            ``{target: source}``. ``{target: (source, …)}`` joins sources along dim 0, and
            ``{(target, …): source}`` divides a source. Other names stay equal.
        optimizer: the optimizers of source and target. The target's takes over state and options.
        buffer: bytes per rank of messages under way at a time, in addition to what it receives, which it
            keeps until the end.
        asynchronous: return a :class:`TransferHandle` after this rank has copied what it sends.
            Training may go on; ``handle.wait()`` switches the target.

    Returns a :class:`TransferReport`. Raises :class:`PlanError` for names and shapes that do not
    fit, :class:`CommunicationError` if another rank fails or is gone.
    """
    began = time.perf_counter()
    if not isinstance(buffer, int) or buffer < 1:
        raise PlanError(f"buffer={buffer!r} must be a number of bytes, such as 256_000_000")
    into = FolderTarget(Path(target)) if isinstance(target, str | os.PathLike) else target
    ours = _Modules(source, into, *(optimizer or (None, None)))
    if isinstance(source, str | os.PathLike):
        if dtype is not None:
            raise PlanError("dtype= is for what ranks send: files are read in their own dtype, and converted")
        job = _reading(source, ours, names, buffer)
    elif not dist.is_initialized() or dist.get_world_size() == 1:
        job = _simulated(ours, names, dtype, asynchronous)
    else:
        job = _joint(ours, names, dtype, buffer, asynchronous)
    if not asynchronous:
        job.work()
        return job.end(began)
    return TransferHandle(job.work, lambda: job.end(began))


class _Modules(NamedTuple):
    """The modules and optimizers of this rank."""

    source: Any
    target: Any
    source_optimizer: torch.optim.Optimizer | None
    target_optimizer: torch.optim.Optimizer | None

    def states(self) -> tuple[ModuleState | None, ModuleState | FolderTarget | None]:
        source = None if self.source is None else ModuleState.of(self.source, self.source_optimizer)
        if isinstance(self.target, FolderTarget):
            if self.source_optimizer is not None or self.target_optimizer is not None:
                raise PlanError("a folder takes no optimizer state: save it with torch.distributed.checkpoint")
            in_one_process(source)
            return source, self.target
        target = None if self.target is None else ModuleState.of(self.target, self.target_optimizer)
        if in_one_process(source, target) and dist.is_initialized() and dist.get_world_size() > 1:
            raise PlanError("the modules were compiled before torch.distributed was initialised: compile them after it")
        return source, target


@dataclass
class _Job:
    """A transfer in steps."""

    work: Callable[[], None]
    """sends and receives"""
    switch: Callable[[], None]
    """all ranks agree and write them"""
    schedule: Schedule
    links: Sequence[Link]
    rounds: int

    def end(self, began: float) -> TransferReport:
        self.switch()
        used = {link.source for link in self.links}
        have = self.schedule.source
        taken = {id(have[n]) for n in used if n in have}  # tied tensors are sent once
        unused = tuple(n for n, x in have.items() if id(x) not in taken and n not in used and STATE_SEPARATOR not in n)
        targets = len({link.target for link in self.links})
        return TransferReport(self.schedule, targets, unused, self.rounds, time.perf_counter() - began)


def _simulated(ours: _Modules, names: Names, dtype: torch.dtype | None, copies: bool) -> _Job:
    """A transfer between modules of simulated ranks: from full tensor to full tensor."""
    source, target = ours.states()
    if source is None or target is None:
        raise PlanError("autoshard.transfer needs a source and a target: None is for ranks without the module")
    if isinstance(target, FolderTarget):
        target.take(source.held, names, dtype, range(source.module.mesh.size))
    want = dict(target.held)
    links = links_of(source.held, want, names, ours.target_optimizer is not None)
    schedule = make_schedule(source.held, want, links, source.module.mesh.hardware, dtype)
    targets: Any = target.targets(want, dict.fromkeys(link.target for link in links))
    numbers = _renamed(source.numbers, links)
    sent = [source.local[link.source][_slices(link.source_start, link)].to(schedule.dtype_of(link)) for link in links]
    if copies:
        sent = [x.clone() for x in sent]

    @torch.no_grad()
    def switch() -> None:
        for link, x in zip(links, sent, strict=True):
            targets[link.target][_slices(link.target_start, link)].copy_(x)
        target.switch(targets, numbers, source.groups)
        if isinstance(target, FolderTarget):
            target.finish()

    return _Job(lambda: None, switch, schedule, links, 0)


def _reading(path: str | os.PathLike[str], ours: _Modules, names: Names, buffer: int) -> _Job:
    """A transfer from files: this rank reads its boxes, or all if it simulates others."""
    target = ModuleState.of(ours.target, ours.target_optimizer)
    folder = open_folder(path, target.held)
    have, want, machine = folder.held, dict(target.held), target.module.mesh.hardware
    links = links_of(have, want, names, ours.target_optimizer is not None)
    for link in links:
        a, b = have[link.source].dtype, want[link.target].dtype
        if (a.is_floating_point, a.is_complex) != (b.is_floating_point, b.is_complex):
            raise PlanError(
                f"entry {link.source!r} in {path} has dtype {a}, but the model has {b}, and loading "
                "does not convert between them. Convert the entry first, for example by dequantising it."
            )
    schedule = shown = make_schedule(have, want, links, machine)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if in_one_process(target):
        one = (Replica(Layout({"whole": 1}), (rank,)),)
        schedule = make_schedule(have, {n: replace(h, replicas=one) for n, h in want.items()}, links, machine)
    messages = RankMessages.of(schedule, rank, buffer)
    wanted = [n for n in dict.fromkeys(link.target for link in links) if schedule.target[n].on(rank) is not None]

    @torch.no_grad()
    def switch() -> None:
        targets = target.targets(want, wanted)
        messages.write(folder.tensors, (), targets)
        target.switch(targets, _renamed(folder.numbers, links), folder.groups)

    return _Job(lambda: None, switch, shown, links, 0)


def load_safetensors(sharded: ShardedModule, folder: str | os.PathLike[str], *, names: Names = None) -> TransferReport:
    """Load the safetensors files that ``save_pretrained`` wrote into ``folder``, by original name.

    Each rank reads the byte ranges of its own shards; see :func:`autoshard.transfer`, also for ``names``.
    One name of tied tensors is enough. ``folder`` may be a file. Raises :class:`PlanError` for
    missing, unknown or misshapen entries, before any tensor is loaded.
    """
    began = time.perf_counter()
    job = _reading(folder, _Modules(None, sharded, None, None), names, BUFFER)
    known = {link.source for link in job.links} | job.schedule.target.keys()
    target_of = names if callable(names) else str
    if unknown := sorted(n for n in job.schedule.source if n not in known and target_of(n) not in (None, *known)):
        raise PlanError(f"the model has no tensors for {len(unknown)} entries in {folder}: unknown {unknown[:5]}")
    return job.end(began)


def _slices(start: Sequence[int], link: Link) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, link.shape, strict=True))


class TransferWorld:
    """What all transfers share: groups for agreements and weights, kept schedules."""

    def __init__(self) -> None:
        self.notes = FailureNotes(("transfers",))
        control = dist.new_group(backend="gloo")
        self.weights = control if dist.get_backend() == "gloo" else dist.new_group()
        self.agreement = Agreement(self.notes, control)
        self.described: OrderedDict[Any, tuple[dict[str, Held], dict[str, Held]]] = OrderedDict()
        self.scheduled: OrderedDict[Any, tuple[Schedule, RankMessages]] = OrderedDict()

    @contextlib.contextmanager
    def meeting(self, doing: str) -> Iterator[None]:
        """Inside, all ranks do ``doing``; the others learn of a failure."""
        if self.notes.broken:
            raise CommunicationError(RESTART_ADVICE)
        with self.notes:
            self.notes.begin()
            self.notes.present(doing, tuple)
            yield


def _kept(cache: OrderedDict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """The cached result for ``key``; equal calls leave equal caches on all ranks."""
    found = cache.pop(key) if key in cache else make()
    cache[key] = found
    while len(cache) > MOST_KEPT_SCHEDULES:
        cache.popitem(last=False)
    return found


def _joint(ours: _Modules, names: Names, dtype: torch.dtype | None, buffer: int, copies: bool) -> _Job:
    """A transfer among the ranks of torch.distributed."""
    world = once_per_initialisation("transfers", TransferWorld)
    agreement, rank = world.agreement, dist.get_rank()
    with world.meeting("autoshard.transfer"):
        source, target = agreement.everywhere(ours.states)
        numbers = [0 if s is None else s.number() + 1 for s in (source, target)]
        before = -1 if source is None or source.rank is None else source.rank
        rows = agreement.rows([*numbers, ours.target_optimizer is not None, before], "what each rank transfers")
        trained = any(row[2] for row in rows)
        key = tuple(tuple(row) for row in rows)
        have, want = _kept(world.described, key, lambda: _descriptions(agreement, rows, (source, target)))
        if any(row[3] >= 0 for row in rows):
            have = renumbered(have, {row[3]: now for now, row in enumerate(rows) if row[3] >= 0})
        if isinstance(target, FolderTarget):
            target.take(have, names, dtype, range(dist.get_world_size()))
            want = target.held
        want = dict(want)
        links = agreement.everywhere(lambda: links_of(have, want, names, trained))
        asked = zlib.crc32(repr((links, dtype, buffer, copies)).encode())
        agreement.agree(("the names, dtype, buffer or asynchronous of a transfer", asked))
        machine = _hardware(agreement, source)

        def scheduled() -> tuple[Schedule, RankMessages]:
            schedule = make_schedule(have, want, links, machine, dtype)
            return schedule, RankMessages.of(schedule, rank, buffer)

        def prepared() -> tuple[Schedule, RankMessages, Any]:
            found = _kept(world.scheduled, (key, asked), scheduled)
            wanted = [n for n in dict.fromkeys(link.target for link in links) if want[n].on(rank) is not None]
            return *found, {} if target is None else target.targets(want, wanted)

        schedule, messages, targets = agreement.everywhere(prepared)
        options = _options(agreement, source, links) if trained else ({}, [])
        device = _device_of(source, target)
        sent = {} if source is None else source.local
        if copies:
            sent = _snapshot(messages, sent)
    exchange, arrived = Exchange(world.weights, world.notes, device), list[torch.Tensor]()

    def work() -> None:
        with world.notes, torch.no_grad():
            rounds = exchange.run(messages, sent)
            if isinstance(target, FolderTarget):
                messages.write(sent, rounds, targets)
            else:
                arrived.extend(rounds)

    def switch() -> None:
        with world.notes, torch.no_grad():
            agreement.rows([1], "the end of a transfer")  # all have received: from here on nothing can fail
            if not isinstance(target, FolderTarget):
                messages.write(sent, arrived, targets)
            if target is not None:
                target.switch(targets, *options)
            if isinstance(target, FolderTarget):
                agreement.rows([1], "the files of a transfer")
                if rank == 0:
                    target.finish()
                agreement.rows([1], "the index of a transfer")

    return _Job(work, switch, schedule, links, len(messages.sends))


def _descriptions(
    agreement: Agreement, rows: Sequence[Sequence[int]], states: Sequence[ModuleState | FolderTarget | None]
) -> tuple[dict[str, Held], dict[str, Held]]:
    """What all ranks hold, of source and target: each different description is sent once."""
    found: list[dict[str, Held]] = []
    for side, state in enumerate(states):
        parts = []
        for number in dict.fromkeys(row[side] for row in rows if row[side]):
            first = next(r for r, row in enumerate(rows) if row[side] == number)
            mine = "" if agreement.rank != first or state is None else as_text(dict(state.held))
            parts.append(from_text(agreement.text_of(mine, first)))
        if not parts:
            raise PlanError(f"no rank has a {('source', 'target')[side]}: all pass None to autoshard.transfer")
        found.append(merged(parts))
    return found[0], found[1]


def as_text(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def from_text(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def _hardware(agreement: Agreement, source: ModuleState | None) -> Any:
    """The machine of the source, alike on all ranks."""
    name = "" if source is None else source.module.mesh.hardware.name
    try:
        return hardware(max(agreement.texts(name)))
    except Exception:  # the user's own
        return hardware(None)


def _options(
    agreement: Agreement, source: ModuleState | None, links: Sequence[Link]
) -> tuple[dict[str, Any], list[Any]]:
    """The source optimizer's numbers by target name, and options of its groups."""
    mine = ({}, []) if source is None else (source.numbers, source.groups)
    every = [from_text(text) for text in agreement.texts(as_text(mine))]
    numbers = {name: value for known, _ in reversed(every) for name, value in known.items()}
    return _renamed(numbers, links), next((groups for _, groups in every if groups), [])


def _renamed(numbers: Mapping[str, Any], links: Sequence[Link]) -> dict[str, Any]:
    """Optimizer state by target parameter; the first of several sources decides."""
    keys: dict[str, list[tuple[str, Any]]] = {}
    for name, value in numbers.items():
        parameter, _, key = name.partition(STATE_SEPARATOR)
        keys.setdefault(parameter, []).append((key, value))
    found: dict[str, Any] = {}
    for link in links:
        for key, value in keys.get(link.source, ()):
            found.setdefault(f"{link.target}{STATE_SEPARATOR}{key}", value)
    return found


def _snapshot(messages: RankMessages, source: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of the tensors that this rank sends or keeps, so that training may go on."""
    names = {p.name for sends in messages.sends for parts in sends.values() for p in parts}
    names |= {mine.name for mine, _ in messages.kept}
    return {name: source[name].clone() for name in sorted(names)}


def _device_of(*states: Any) -> torch.device:
    tensors = (t for s in states if isinstance(s, ModuleState) for t in s.local.values())
    return next((t.device for t in tensors), torch.device("cpu"))

"""``autoshard.transfer``: weights of one sharded module into another, of any layout on any ranks."""

from __future__ import annotations

import base64
import contextlib
import pickle
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autoshard.errors import CommunicationError, PlanError
from autoshard.hardware import hardware
from autoshard.module.ranks.agreement import RESTART_ADVICE, Agreement
from autoshard.module.sharded_module import ShardedModule
from autoshard.passes.ir.text import show_seconds
from autoshard.runtime.transport.groups import once_per_initialisation
from autoshard.runtime.transport.peers import FailureNotes
from autoshard.transfers.holdings import Held, Link
from autoshard.transfers.messages import Exchange, RankMessages
from autoshard.transfers.schedule import Schedule, make_schedule
from autoshard.transfers.states import STATE_SEPARATOR, ModuleState, Names, in_one_process, links_of, merged

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
    source: ShardedModule | None,
    target: ShardedModule | None,
    *,
    dtype: torch.dtype | None = None,
    names: Names = None,
    optimizer: tuple[torch.optim.Optimizer | None, torch.optim.Optimizer | None] | None = None,
    buffer: int = 256 * 10**6,
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
        target: the same, of the module that receives.
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
    ours = _Modules(source, target, *(optimizer or (None, None)))
    local = not dist.is_initialized() or dist.get_world_size() == 1
    job = _simulated(ours, names, dtype, asynchronous) if local else _joint(ours, names, dtype, buffer, asynchronous)
    if not asynchronous:
        job.work()
        return job.end(began)
    return TransferHandle(job.work, lambda: job.end(began))


class _Modules(NamedTuple):
    """The modules and optimizers of this rank."""

    source: ShardedModule | None
    target: ShardedModule | None
    source_optimizer: torch.optim.Optimizer | None
    target_optimizer: torch.optim.Optimizer | None

    def states(self) -> tuple[ModuleState | None, ModuleState | None]:
        source = None if self.source is None else ModuleState.of(self.source, self.source_optimizer)
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
        unused = tuple(n for n in self.schedule.source if n not in used and STATE_SEPARATOR not in n)
        targets = len({link.target for link in self.links})
        return TransferReport(self.schedule, targets, unused, self.rounds, time.perf_counter() - began)


def _simulated(ours: _Modules, names: Names, dtype: torch.dtype | None, copies: bool) -> _Job:
    """A transfer between modules whose ranks are simulated in this process, from full tensor to full tensor."""
    source, target = ours.states()
    if source is None or target is None:
        raise PlanError("autoshard.transfer needs a source and a target: None is for ranks without the module")
    want = dict(target.held)
    links = links_of(source.held, want, names, ours.target_optimizer is not None)
    schedule = make_schedule(source.held, want, links, source.module.mesh.hardware, dtype)
    targets = target.targets(want, dict.fromkeys(link.target for link in links))
    numbers = _renamed(source.numbers, links)
    sent = [source.local[link.source][_slices(link.source_start, link)].to(schedule.dtype_of(link)) for link in links]
    if copies:
        sent = [x.clone() for x in sent]

    @torch.no_grad()
    def switch() -> None:
        for link, x in zip(links, sent, strict=True):
            targets[link.target][_slices(link.target_start, link)].copy_(x)
        target.switch(targets, numbers, source.groups)

    return _Job(lambda: None, switch, schedule, links, 0)


def _slices(start: Sequence[int], link: Link) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, link.shape, strict=True))


class _World:
    """What all transfers of all ranks share: a group for agreements, a group for weights, kept schedules."""

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
    world = once_per_initialisation("transfers", _World)
    agreement, rank = world.agreement, dist.get_rank()
    with world.meeting("autoshard.transfer"):
        source, target = agreement.everywhere(ours.states)
        numbers = [0 if s is None else s.number() + 1 for s in (source, target)]
        rows = agreement.rows([*numbers, ours.target_optimizer is not None], "what each rank transfers")
        trained = any(row[2] for row in rows)
        key = tuple(tuple(row) for row in rows)
        have, want = _kept(world.described, key, lambda: _descriptions(agreement, rows, (source, target)))
        want = dict(want)
        links = agreement.everywhere(lambda: links_of(have, want, names, trained))
        asked = zlib.crc32(repr((links, dtype, buffer, copies)).encode())
        agreement.agree(("the names, dtype, buffer or asynchronous of a transfer", asked))
        machine = _hardware(agreement, source)

        def scheduled() -> tuple[Schedule, RankMessages]:
            schedule = make_schedule(have, want, links, machine, dtype)
            return schedule, RankMessages.of(schedule, rank, buffer)

        schedule, messages = _kept(world.scheduled, (key, asked), scheduled)
        options = _options(agreement, source, links) if trained else ({}, [])
        device = _device_of(source, target)
        sent = {} if source is None else source.local
        wanted = [n for n in dict.fromkeys(link.target for link in links) if want[n].on(rank) is not None]
        targets = {} if target is None else target.targets(want, wanted)
        if copies:
            sent = _snapshot(messages, sent)
    exchange, arrived = Exchange(world.weights, world.notes, device), list[torch.Tensor]()

    def work() -> None:
        with world.notes, torch.no_grad():
            arrived.extend(exchange.run(messages, sent))

    def switch() -> None:
        with world.notes, torch.no_grad():
            agreement.rows([1], "the end of a transfer")  # all have received: from here on nothing can fail
            messages.write(sent, arrived, targets)
            if target is not None:
                target.switch(targets, options[0], options[1])

    return _Job(work, switch, schedule, links, len(messages.sends))


def _descriptions(
    agreement: Agreement, rows: Sequence[Sequence[int]], states: Sequence[ModuleState | None]
) -> tuple[dict[str, Held], dict[str, Held]]:
    """What all ranks hold, of source and target: each different description is sent once."""
    found: list[dict[str, Held]] = []
    for side, state in enumerate(states):
        parts = []
        for number in dict.fromkeys(row[side] for row in rows if row[side]):
            first = next(r for r, row in enumerate(rows) if row[side] == number)
            mine = "" if agreement.rank != first or state is None else _as_text(dict(state.held))
            parts.append(_from_text(agreement.text_of(mine, first)))
        if not parts:
            raise PlanError(f"no rank has a {('source', 'target')[side]}: all pass None to autoshard.transfer")
        found.append(merged(parts))
    return found[0], found[1]


def _as_text(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _from_text(text: str) -> Any:
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
    every = [_from_text(text) for text in agreement.texts(_as_text(mine))]
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


def _device_of(*states: ModuleState | None) -> torch.device:
    tensors = (t for s in states if s is not None for t in s.local.values())
    return next((t.device for t in tensors), torch.device("cpu"))

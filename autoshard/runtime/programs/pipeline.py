"""Pipeline stages on this rank, run by torch.distributed.pipelining's schedules. Stages pass local
tensors in the plan's layouts, so that every shape is known, and the generator state where the
model draws. ``StageRanks`` is the group of ranks along the axis of stages."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard.runtime.operations.checks import is_specialization_error
from autoshard.runtime.transport import sparse_gradients, torch_state
from autoshard.runtime.transport.buffer_pool import raw
from autoshard.runtime.transport.communicator import current
from autoshard.runtime.transport.peers import FailureNotes, collective_error, wait


class StageRanks:
    """This rank in ``group``, whose ranks have its coordinates along all other axes."""

    def __init__(self, group: Any, notes: FailureNotes) -> None:
        self.group, self.notes = group, notes
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def runs(self, stage: int) -> int:
        return stage % self.ranks

    def is_mine(self, stage: int) -> bool:
        return self.runs(stage) == self.rank

    def tell(self, stage: int, x: Tensor, what: str) -> None:
        """Broadcast ``x`` in place from the rank that runs ``stage``. Collective."""
        if x.numel() and self.ranks > 1:
            src = dist.get_global_rank(self.group, self.runs(stage))
            self._run(what, lambda: dist.broadcast(raw(x), src, group=self.group, async_op=True))

    def add_up(self, x: Tensor, stages: Sequence[int], what: str) -> None:
        """Sum ``x`` in place over the ranks that run ``stages``, by messages; each calls it, in the
        same order. Groups of subsets could deadlock: torch names a group by how many its members
        have."""
        ranks = sorted({self.runs(stage) for stage in stages})
        if self.rank not in ranks or len(ranks) == 1:
            return
        if x.is_sparse:
            numbers, rows = sparse_gradients.rows_of(x)
            counts = [int(n) for n in self._of_each(ranks, torch.tensor([len(numbers)], device=x.device), what)]
            every = [self._of_each(ranks, part, what, counts) for part in (numbers, rows)]
            total = sparse_gradients.sum_sparse(
                [sparse_gradients.from_rows(n, r, x.shape[0]) for n, r in zip(*every, strict=True)]
            )
        elif len(ranks) == self.ranks:
            total = x.contiguous()
            self._run(what, lambda: dist.all_reduce(total, group=self.group, async_op=True))
        else:  # the same order on all ranks: bitwise equal sums
            total = functools.reduce(torch.add, self._of_each(ranks, x.contiguous(), what))
        if total is not x:
            x.copy_(total)

    def _of_each(
        self, ranks: Sequence[int], x: Tensor, what: str, lengths: Sequence[int] | None = None
    ) -> list[Tensor]:
        """``x`` of each of ``ranks``, in point-to-point messages, in which all take part; of one
        shape, or ``lengths`` along dim 0."""
        parts, ops = [], []
        for place, r in enumerate(ranks):
            if r == self.rank:
                parts.append(x)
                continue
            parts.append(x.new_empty(x.shape if lengths is None else (lengths[place], *x.shape[1:])))
            peer = dist.get_global_rank(self.group, r)
            ops += [dist.P2POp(dist.isend, raw(x), peer, self.group)] if x.numel() else []
            ops += [dist.P2POp(dist.irecv, raw(parts[-1]), peer, self.group)] if parts[-1].numel() else []
        self._run(what, lambda: dist.batch_isend_irecv(ops) if ops else [])
        return parts

    def gathered(self, mine: Any) -> list[Any]:
        """``mine``, any object, of every rank. Collective."""
        every: list[Any] = [None] * self.ranks
        dist.all_gather_object(every, mine, group=self.group)
        return every

    def _run(self, what: str, begin: Callable[[], Any]) -> None:
        """Begin and wait. Raises :class:`CommunicationError` if a rank failed or is gone."""
        self.notes.settle()
        what = f"{what}, among stages"
        try:
            work = begin()
            if isinstance(work, list):  # gloo ends the connection if a wait for a message times out
                for message in work:
                    message.wait()
                return
        except RuntimeError as error:
            raise collective_error(error, self.notes, what) from error
        if dist.get_backend(self.group) == "gloo":
            wait(work, self.notes, lambda: what)
        else:
            work.wait()


LocalTensors = list[Tensor]
RunStage = Callable[[int, int, LocalTensors], Sequence[Tensor]]
"""(stage, micro-batch, received tensors) → outputs of its rank module"""


@dataclass(frozen=True)
class Message:
    """A value that a stage sends, as a rank holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    """whether its gradient comes back, since the loss depends on it"""


@dataclass(frozen=True)
class StageForm:
    """What ranks along the stage axis have to know of one another."""

    schedule: str
    count: int
    """number of micro-batches"""
    messages: tuple[tuple[Message, ...], ...]
    """messages of each stage; for the last one its loss in training"""
    loss: int | None
    """which output of the last stage is the loss; None: no backward"""
    draws: bool
    """whether any stage draws random numbers"""


class Pipeline:
    """The stages that this rank runs."""

    def __init__(self, form: StageForm, along: StageRanks, device: torch.device, run: RunStage) -> None:
        self.form, self.device, self.run = form, device, run
        self.count, self.draws, self.training = form.count, form.draws, form.loss is not None
        self.last = len(form.messages) - 1
        self.made: dict[int, list[Sequence[Any]]] = {}
        """stage → per micro-batch the outputs of its rank module, without what it sent"""
        self.state: Tensor | None = None
        """generator state where the first stage begins every micro-batch"""
        self.end: Tensor | None = None
        """generator state where the last stage ended"""
        self.notes = along.notes
        self.failed: Exception | None = None
        """this rank's failure; it sends zeros from then on, so that no other rank waits for it"""
        self.later: list[Tensor] | None = [] if form.schedule == "zero_bubble" and self.training else None
        """scalars whose backward gives the weight gradients of the latest backward"""
        self.mine = [*filter(along.is_mine, range(self.last + 1))]
        self.modules = [_StageModule(partial(self._forward, number)) for number in self.mine]
        from autoshard.runtime.programs.schedules import Stage, pipeline_schedule  # its import is slow

        made = [
            Stage(
                self._fail,
                module,
                number,
                self.last + 1,
                device,
                input_args=self._message(number - 1),
                output_args=self._message(number),
                group=along.group,
                dw_builder=None if self.later is None else self._weights,
            )
            for number, module in zip(self.mine, self.modules, strict=True)
        ]
        self.schedule = pipeline_schedule(form.schedule, made, self.count, along.ranks, training=self.training)

    def step(self, notes: FailureNotes, leaves: LocalTensors, state: Tensor | None) -> None:
        """Forward (and in training backward) of all micro-batches; ``made`` has the outputs.
        ``leaves``: trained parameters; ``state``: of the generators, in the first stage."""
        self.made, self.state, self.end = {number: [] for number in self.mine}, state, None
        for module in self.modules:
            module.leaves = leaves
        given: dict[str, Any] = {"index": torch.arange(self.count)}
        if self.training and self.last in self.mine:
            given["target"] = torch.zeros(self.count)
        self.failed, current().later = None, self.later
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                self.schedule.step(**given, return_outputs=False)
        except RuntimeError as error:  # of a message: errors of a stage itself go to _fail
            raise collective_error(error, notes, "the messages between stages") from error
        finally:
            current().later = None
            for module in self.modules:
                module.leaves = []

    def _weights(self) -> Callable[[], None]:
        """Weight gradients of the latest backward, as torch calls it for W."""
        assert self.later is not None
        found = self.later[:]
        self.later.clear()
        return partial(_weight_backward, found)

    def _fail(self, error: Exception) -> None:
        """Remember a stage's error, without the wrappers that torch adds."""
        while error.__cause__ is not None and str(error).strip().startswith(("[Stage", "Failed to run")):
            error = error.__cause__  # type: ignore[assignment]
        self.failed = self.failed or error
        if self.later is not None:
            self.later.clear()
        if not is_specialization_error(error):  # else the call is repeated, with another program
            self.notes.leave(error)  # ranks of the same stage may wait for this one

    def _forward(self, number: int, received: Sequence[Tensor], index: int) -> Any:
        """The messages of a stage; for the last one its loss."""
        if self.failed is None:
            try:
                return self._sent_by(number, received, index)
            except Exception as error:
                self._fail(error)
        empty = self._message(number)
        zeros = [torch.zeros(x.shape, dtype=x.dtype, device=self.device).requires_grad_(x.requires_grad) for x in empty]
        if number == self.last:
            return zeros[0] if self.training else ()
        return (*zeros[:-1], packed_generator_states(self.device)) if self.draws else tuple(zeros)

    def _sent_by(self, number: int, received: Sequence[Tensor], index: int) -> Any:
        if self.draws:
            if number:
                *received, state = received
            else:
                assert self.state is not None
                state = self.state
            torch_state.set_generator_states(unpacked_generator_states(state, self.device))
        results = self.run(number, index, self._taken(number, received))
        count = self.sent(number)  # what is sent lives only as long as its backward needs it
        kept = (x.detach() if isinstance(x, Tensor) else x for x in results[count:])
        self.made[number].append([*[None] * count, *kept])
        end = packed_generator_states(self.device) if self.draws else None
        if number == self.last:
            self.end = end
            return results[self.form.loss] if self.form.loss is not None else ()
        messages = self.form.messages[number][:count]
        sent = [raw((x if m.grad else x.detach()).contiguous()) for x, m in zip(results, messages, strict=False)]
        return (*sent, end) if end is not None else tuple(sent)

    def sent(self, number: int) -> int:
        """Number of outputs, the first ones, that stage ``number`` sends."""
        return len(self.form.messages[number]) if number < self.last else 0

    def _message(self, number: int) -> tuple[Tensor, ...]:
        """Meta tensors like the messages of stage ``number``; the last one "sends" the loss."""
        if number < 0:
            return ()
        found = []
        for message in self.form.messages[number]:
            empty = raw(torch.empty(message.shape, dtype=message.dtype, device="meta"))
            found.append(empty.requires_grad_(message.grad and self.training))
        if self.draws and number < self.last:
            found.append(packed_generator_states(self.device).to("meta"))
        return tuple(found)

    def _taken(self, number: int, received: Sequence[Tensor]) -> LocalTensors:
        """Received messages in the dtypes of their values."""
        pairs = zip(self.form.messages[number - 1] if number else (), received, strict=True)
        return [x if x.requires_grad else x.view(message.dtype) for message, x in pairs]


class _StageModule(nn.Module):
    """The stage module for torch: ``run(received, micro-batch)``, and trained leaves."""

    def __init__(self, run: Callable[[Sequence[Tensor], int], Any]) -> None:
        super().__init__()
        self.run = run
        self.leaves: LocalTensors = []

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """See :meth:`torch.nn.Module.parameters`."""
        return iter(self.leaves)

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        return self.run(received, int(index))


def _weight_backward(scalars: list[Tensor]) -> None:
    if scalars:  # a stage may train no weight
        torch.autograd.backward(scalars)
        scalars.clear()


def packed_generator_states(device: torch.device) -> Tensor:
    """Generator states as one message."""
    return torch.cat(torch_state.generator_states(cuda=device.type == "cuda")).to(device)


def unpacked_generator_states(state: Tensor, device: torch.device) -> list[Tensor]:
    """The inverse of :func:`packed_generator_states`."""
    sizes = [x.numel() for x in torch_state.generator_states(cuda=device.type == "cuda")]
    return [x.clone() for x in state.cpu().split(sizes)]

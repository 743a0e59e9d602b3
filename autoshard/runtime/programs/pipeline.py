"""Pipeline stages of a program on this rank, run by torch.distributed.pipelining's schedules.

A stage takes and gives local tensors in the layouts of the plan, so every shape is known and no
rank asks another. If the model draws, generator state goes along: a stage begins where the one
before ended."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard.runtime.operations.exactly import is_of_other_values
from autoshard.runtime.programs.along import Along
from autoshard.runtime.transport import generators
from autoshard.runtime.transport.communicator import current
from autoshard.runtime.transport.peers import Notes, lost
from autoshard.runtime.transport.wire import raw

Locals = list[torch.Tensor]
Run = Callable[[int, int, Locals], Sequence[torch.Tensor]]
"""(stage, micro-batch, received tensors) → outputs of its rank module"""


@dataclass(frozen=True)
class Message:
    """A value that a stage sends, as a rank holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    """whether its gradient comes back, since the loss depends on it"""


@dataclass(frozen=True)
class Form:
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

    def __init__(self, form: Form, along: Along, device: torch.device, run: Run) -> None:
        self.form, self.device, self.run = form, device, run
        self.count, self.draws, self.training = form.count, form.draws, form.loss is not None
        self.last = len(form.messages) - 1
        self.made: dict[int, list[Sequence[Any]]] = {}
        """stage → per micro-batch the outputs of its rank module, without what it sent"""
        self.state: torch.Tensor | None = None
        """generator state where the first stage begins every micro-batch"""
        self.end: torch.Tensor | None = None
        """generator state where the last stage ended"""
        self.notes = along.notes
        self.failed: Exception | None = None
        """this rank's failure; it sends zeros from then on, so that no other rank waits for it"""
        self.later: list[torch.Tensor] | None = [] if form.schedule == "zero_bubble" and self.training else None
        """scalars whose backward gives the weight gradients of the latest backward"""
        self.mine = [*filter(along.is_mine, range(self.last + 1))]
        self.modules = [_StageModule(partial(self._forward, number)) for number in self.mine]
        from autoshard.runtime.programs.schedules import Stage, scheduled  # its import is slow

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
        self.schedule = scheduled(form.schedule, made, self.count, along.ranks, training=self.training)

    def step(self, notes: Notes, leaves: Locals, state: torch.Tensor | None) -> None:
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
            raise lost(error, notes, "the messages between stages") from error
        finally:
            current().later = None
            for module in self.modules:
                module.leaves = []

    def _weights(self) -> Callable[[], None]:
        """Weight gradients of the latest backward, as torch calls it for W."""
        assert self.later is not None
        found = self.later[:]
        self.later.clear()
        return partial(_backward, found)

    def _fail(self, error: Exception) -> None:
        """Remember a stage's error, without the wrappers that torch adds."""
        while error.__cause__ is not None and str(error).strip().startswith(("[Stage", "Failed to run")):
            error = error.__cause__  # type: ignore[assignment]
        self.failed = self.failed or error
        if self.later is not None:
            self.later.clear()
        if not is_of_other_values(error):  # else the call is repeated, with another program
            self.notes.leave(error)  # ranks of the same stage may wait for this one

    def _forward(self, number: int, received: Sequence[torch.Tensor], index: int) -> Any:
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
        return (*zeros[:-1], packed(self.device)) if self.draws else tuple(zeros)

    def _sent_by(self, number: int, received: Sequence[torch.Tensor], index: int) -> Any:
        if self.draws:
            if number:
                *received, state = received
            else:
                assert self.state is not None
                state = self.state
            generators.set_states(unpacked(state, self.device))
        results = self.run(number, index, self._taken(number, received))
        count = self.sent(number)  # what is sent lives only as long as its backward needs it
        kept = (x.detach() if isinstance(x, torch.Tensor) else x for x in results[count:])
        self.made[number].append([*[None] * count, *kept])
        end = packed(self.device) if self.draws else None
        if number == self.last:
            self.end = end
            return results[self.form.loss] if self.form.loss is not None else ()
        messages = self.form.messages[number][:count]
        sent = [raw((x if m.grad else x.detach()).contiguous()) for x, m in zip(results, messages, strict=False)]
        return (*sent, end) if end is not None else tuple(sent)

    def sent(self, number: int) -> int:
        """Number of outputs, the first ones, that stage ``number`` sends."""
        return len(self.form.messages[number]) if number < self.last else 0

    def _message(self, number: int) -> tuple[torch.Tensor, ...]:
        """Meta tensors like the messages of stage ``number``; the last one "sends" the loss."""
        if number < 0:
            return ()
        found = []
        for message in self.form.messages[number]:
            empty = raw(torch.empty(message.shape, dtype=message.dtype, device="meta"))
            found.append(empty.requires_grad_(message.grad and self.training))
        if self.draws and number < self.last:
            found.append(packed(self.device).to("meta"))
        return tuple(found)

    def _taken(self, number: int, received: Sequence[torch.Tensor]) -> Locals:
        """Received messages in the dtypes of their values."""
        pairs = zip(self.form.messages[number - 1] if number else (), received, strict=True)
        return [x if x.requires_grad else x.view(message.dtype) for message, x in pairs]


class _StageModule(nn.Module):
    """The stage module for torch: ``run(received, micro-batch)``, and trained leaves."""

    def __init__(self, run: Callable[[Sequence[torch.Tensor], int], Any]) -> None:
        super().__init__()
        self.run = run
        self.leaves: Locals = []

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """See :meth:`torch.nn.Module.parameters`."""
        return iter(self.leaves)

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> Any:
        return self.run(received, int(index))


def _backward(scalars: list[torch.Tensor]) -> None:
    if scalars:  # a stage may train no weight
        torch.autograd.backward(scalars)
        scalars.clear()


def packed(device: torch.device) -> torch.Tensor:
    """Generator states as one message."""
    return torch.cat(generators.states(cuda=device.type == "cuda")).to(device)


def unpacked(state: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """The inverse of :func:`packed`."""
    sizes = [x.numel() for x in generators.states(cuda=device.type == "cuda")]
    return [x.clone() for x in state.cpu().split(sizes)]

"""Gradients of a program without a backward: the forward runs again, from the state that it found, with one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from autoshard.errors import RuntimeMismatchError
from autoshard.passes.ir.graph import Graph


class Holder(Protocol):
    """A module whose tensors are known by their original names."""

    def tensor(self, fqn: str) -> Any: ...

    def put_buffer(self, fqn: str, tensor: torch.Tensor) -> None: ...


class OnDemand(torch.autograd.Function):
    """Outputs computed without a graph; their backward computes them again, with one."""

    @staticmethod
    def forward(ctx: Any, again: Any, places: list[int], outputs: list[torch.Tensor], *wanted: torch.Tensor) -> Any:
        ctx.again, ctx.places = again, places
        ctx.save_for_backward(*wanted)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        with torch.enable_grad():
            leaves = ctx.again()
        pairs = [(leaves[i], g) for i, g in zip(ctx.places, gradients, strict=True) if leaves[i].requires_grad]
        found = torch.autograd.grad([x for x, _ in pairs], ctx.saved_tensors, [g for _, g in pairs], allow_unused=True)
        return None, None, None, *found


class Before:
    """What a forward finds beside parameters: the buffers that it writes to, random generators, and inputs as they are."""

    def __init__(self, module: Holder, graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
        self.inputs = [(x, x._version) for x in inputs if not x.is_inference()]
        written = [i.fqn for i in graph.inputs if i.kind == "buffer" and i.fqn in graph.mutations]
        self.module = module
        self.buffers = {name: module.tensor(name).clone() for name in written}
        self.devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        self.states = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in self.devices]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """While inside, the module and the generators are as they were. Raises where an input is not."""
        if any(x._version != version for x, version in self.inputs):
            raise RuntimeMismatchError(
                "an input was changed in place between a forward and its backward, which computes the forward again. "
                "Pass a clone, or compile with training=True."
            )
        now = {name: self.module.tensor(name) for name in self.buffers}
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.states[0])
            for device, state in zip(self.devices, self.states[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            self._put(self.buffers)
            try:
                yield
            finally:
                self._put(now)

    def _put(self, buffers: dict[str, torch.Tensor]) -> None:
        for name, tensor in buffers.items():
            self.module.put_buffer(name, tensor)

"""State of torch that calls save and restore: autocast, and random generators.
Programs are captured under :class:`torch.autocast`, contain its casts, and run without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

AUTOCAST_DEVICE_TYPES = ("cpu", "cuda")
"""device types whose autocast state is saved and restored"""


def autocast_state() -> tuple[tuple[str, torch.dtype, bool], ...]:
    """(device type, dtype, whether casts of parameters are cached) where autocast is on."""
    kinds = [kind for kind in AUTOCAST_DEVICE_TYPES if torch.is_autocast_enabled(kind)]
    return tuple([(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) for kind in kinds])


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Disable autocast inside: the program contains the casts already."""
    if not (on := autocast_state()):
        yield
        return
    with contextlib.ExitStack() as stack:
        for kind, _, _ in on:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def generator_states(cuda: bool | None = None) -> list[Tensor]:
    """States (CPU tensors) of the CPU generator and, if ``cuda`` (None: if initialised), the
    current GPU's. No sync."""
    cuda = torch.cuda.is_initialized() if cuda is None else cuda
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]


def set_generator_states(found: Sequence[Tensor]) -> None:
    """Restore generators to the result of :func:`generator_states`."""
    torch.set_rng_state(found[0])
    for state in found[1:]:
        torch.cuda.set_rng_state(state)


class SynchronisedGenerators:
    """Generators of one forward, synchronised at its first draw: without draws nothing is sent."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.own: list[Tensor] | None = None
        """this rank's states before the first draw"""
        self.alike = True
        """whether they equalled rank 0's"""

    def __enter__(self) -> None:
        self.comm.generators = self

    def __exit__(self, *error: object) -> None:
        self.restore()
        self.comm.generators = None

    def agree(self) -> None:
        """Take rank 0's states, once."""
        if self.own is not None:
            return
        comm = self.comm
        self.own = generator_states(cuda=comm.device is not None and comm.device.type == "cuda")
        comm.during(None, "broadcast of the random state")
        message = torch.cat(self.own)
        comm.run(comm.host_group(), dist.broadcast, message, comm.ranks[0])
        taken = [state.clone() for state in message.split([len(state) for state in self.own])]
        self.alike = all(map(torch.equal, self.own, taken))
        if not self.alike:
            set_generator_states(taken)

    def restore(self) -> None:
        """Ranks seeded as rank 0 keep the advanced states, others get their own back."""
        if self.own is not None and not self.alike:
            set_generator_states(self.own)


def synchronised_generators(comm: Any) -> AbstractContextManager[Any]:
    """See :func:`autoshard.runtime.synchronised_rng`. A nested one has no effect."""
    return nullcontext() if comm.generators is not None else SynchronisedGenerators(comm)

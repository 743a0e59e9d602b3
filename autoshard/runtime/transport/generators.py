"""The states of torch's random generators, and how the ranks' come to be equal for one forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist


def states(cuda: bool | None = None) -> list[torch.Tensor]:
    """Of the CPU's default generator and, if ``cuda``, the current GPU's; None: where one is in use. All are on the CPU: no
    device is waited for."""
    cuda = torch.cuda.is_initialized() if cuda is None else cuda
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]


def set_states(found: Sequence[torch.Tensor]) -> None:
    """Put the generators back to what :func:`states` was."""
    torch.set_rng_state(found[0])
    for state in found[1:]:
        torch.cuda.set_rng_state(state)


class Generators:
    """The generators of one forward. They agree from its first draw on: a forward that draws nothing sends nothing."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.own: list[torch.Tensor] | None = None
        """this rank's states before the first draw"""
        self.alike = True
        """whether they were rank 0's"""

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
        self.own = states(cuda=comm.device is not None and comm.device.type == "cuda")
        comm.during(None, "broadcast of the random state")
        message = torch.cat(self.own)
        comm.run(comm.host_group(), dist.broadcast, message, comm.ranks[0])
        taken = [state.clone() for state in message.split([len(state) for state in self.own])]
        self.alike = all(map(torch.equal, self.own, taken))
        if not self.alike:
            set_states(taken)

    def restore(self) -> None:
        """Ranks seeded as rank 0 keep their advanced states, as it does; others get their own back."""
        if self.own is not None and not self.alike:
            set_states(self.own)


def synchronised_generators(comm: Any) -> AbstractContextManager[Any]:
    """See :func:`autoshard.runtime.synchronised_rng`. Inside another one the generators are that one's."""
    return nullcontext() if comm.generators is not None else Generators(comm)

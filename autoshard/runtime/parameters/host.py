"""Copies between a device and host memory, beside its computation.

On accelerators host memory is pinned, and copies run on one stream per direction. Whoever copies
keeps both tensors until the stream of computation has waited for the copy, so that their memory is
not reused before. On a CPU a copy is a copy."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor


class HostCopy(NamedTuple):
    """A copy that has begun."""

    source: Tensor
    """kept until the copy is done"""
    made: Tensor
    done: Any
    """its event; None: it is done"""

    def wait(self) -> Tensor:
        """What was copied, for all that follows on the stream of computation."""
        if self.done is not None:
            on = self.source if self.source.device.type != "cpu" else self.made
            torch.get_device_module(on.device).current_stream(on.device).wait_event(self.done)
        return self.made


def to_host(x: Tensor, into: Tensor | None = None) -> HostCopy:
    """Begin to copy ``x`` to host memory, to tensor ``into`` if it is pinned where that matters."""
    away = x.device.type != "cpu"
    if into is None or (away and not into.is_pinned()):
        into = torch.empty_like(x, device="cpu", pin_memory=away, requires_grad=False)
    return _copy(x, into, x.device, "out")


def to_device(host: Tensor, device: torch.device) -> HostCopy:
    """Begin to copy ``host`` to ``device``."""
    return _copy(host, torch.empty_like(host, device=device), device, "in")


@torch.no_grad()
def _copy(source: Tensor, target: Tensor, device: torch.device, way: str) -> HostCopy:
    if device.type == "cpu":
        return HostCopy(source, target.copy_(source), None)
    of, side = torch.get_device_module(device), _stream(device, way)
    side.wait_stream(of.current_stream(device))  # both were made, or freed by their last owner, there
    with of.stream(side):
        target.copy_(source, non_blocking=True)
    if target.device.type != "cpu":
        target.record_stream(side)  # a backward that fails may drop it before the copy ends
    return HostCopy(source, target, side.record_event())


@functools.cache
def _stream(device: torch.device, way: str) -> Any:
    """The stream of copies in one direction."""
    return torch.get_device_module(device).Stream(device)

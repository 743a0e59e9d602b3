"""In-place clamps of parameters by the forward: every rank clamps its shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.passes.capture.substitutes.clamps import Bounds


def clamp(parameters: Iterable[tuple[Any, Bounds]]) -> None:
    """Clamp parameters or shards to their bounds; as for ``.data``, autograd does not see it."""
    for parameter, (low, high) in parameters:
        held = parameter.detach()
        own: torch.Tensor = held.to_local() if isinstance(held, DTensor) else held
        own.data.clamp_(low, high)

"""Parameters that a forward clamps in place before it reads them: every rank clamps what it holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.passes.capture.substitutes.clamps import Bounds


def clamp(parameters: Iterable[tuple[Any, Bounds]]) -> None:
    """Bring parameters, or parts of them, between their bounds; as for ``.data``, autograd does not see it."""
    for parameter, (low, high) in parameters:
        held = parameter.detach()
        own: torch.Tensor = held.to_local() if isinstance(held, DTensor) else held
        own.data.clamp_(low, high)

"""Base class of autograd nodes that are created in every step."""

from __future__ import annotations

from typing import Any

import torch


class Node(torch.autograd.Function):
    """``autograd.Function`` whose ``apply`` skips the search for dead functorch wrappers.

    The search takes three Python calls per argument, and nodes of many parameters have many."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """See :meth:`torch.autograd.Function.apply`."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

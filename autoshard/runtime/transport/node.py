"""Nodes of the autograd graph that are made in every step."""

from __future__ import annotations

from typing import Any

import torch


class Node(torch.autograd.Function):
    """An autograd function without what torch looks for in each of its arguments: what a transform of torch.func that has
    ended left there. It takes as many calls of Python as a node of many parameters has arguments, thrice.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As :meth:`torch.autograd.Function.apply`."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

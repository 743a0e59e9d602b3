"""How many products run."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

FORWARD = ("mm", "addmm", "bmm", "mv", "addmv", "convolution")


class Counted(TorchDispatchMode):
    """How many products run, and how many gradients the backward of a convolution makes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += sum(args[-1][:2]) if name == "convolution_backward" else name in FORWARD
        return func(*args, **(kwargs or {}))

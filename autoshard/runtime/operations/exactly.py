"""The check that a length which depends on the data is the one that a program was compiled for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.runtime.transport.handed_on import register

OTHER_VALUES = "the program was compiled for inputs with other integers"
"""part of the message of an error that another program would not raise"""


@torch.library.custom_op("autoshard::exactly", mutates_args=())
def exactly(x: torch.Tensor, shape: Sequence[int], where: str) -> torch.Tensor:
    """``x``, which has that shape. Raises RuntimeError where it has another one; ``where``: what to name then."""
    if list(x.shape) != list(shape):
        raise RuntimeError(f"{where}: {OTHER_VALUES}: a result has shape {list(x.shape)}, not {list(shape)}")
    return x.clone()


@exactly.register_fake
def _(x: torch.Tensor, shape: Sequence[int], where: str) -> torch.Tensor:
    return x.new_empty(shape)


register(exactly, lambda ctx, grad: (grad, None, None), lambda ctx, inputs, output: None)
EXACTLY = torch.ops.autoshard.exactly.default


def is_of_other_values(error: BaseException) -> bool:
    """Whether the program that raised ``error`` was compiled for other integers."""
    return isinstance(error, RuntimeError) and OTHER_VALUES in str(error)

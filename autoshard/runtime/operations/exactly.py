"""Checks that data-dependent shapes and values are those a program was specialized for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.aten import aten
from autoshard.runtime.transport.handed_on import register

OTHER_VALUES = "the program was compiled for inputs with other integers"
OTHER_BUFFERS = "a buffer of the model that steers the forward changed"
"""messages of errors for which another program is compiled instead"""


@torch.library.custom_op("autoshard::exactly", mutates_args=())
def exactly(x: torch.Tensor, shape: Sequence[int], where: str) -> torch.Tensor:
    """``x`` if it has ``shape``. Raises RuntimeError otherwise; ``where``: named in the message."""
    if list(x.shape) != list(shape):
        raise RuntimeError(f"{where}: {OTHER_VALUES}: a result has shape {list(x.shape)}, not {list(shape)}")
    return x.clone()


@exactly.register_fake
def _(x: torch.Tensor, shape: Sequence[int], where: str) -> torch.Tensor:
    return x.new_empty(shape)


register(exactly, lambda ctx, grad: (grad, None, None), lambda ctx, inputs, output: None)
EXACTLY = torch.ops.autoshard.exactly.default


def is_of_other_values(error: BaseException) -> bool:
    """Whether ``error`` says that the program is specialized for other values."""
    return isinstance(error, RuntimeError) and says_other_values(str(error))


def may_stop(fn: object, args: Sequence[object]) -> bool:
    """Whether a call is a check that can end a specialized program."""
    return fn is EXACTLY or (fn is aten._assert_async.msg and says_other_values(str(args[1])))


def says_other_values(text: str) -> bool:
    """Whether ``text`` contains the message of a specialization check."""
    return OTHER_VALUES in text or OTHER_BUFFERS in text

"""The check that a length which depends on the data is the one that a program was compiled for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.aten import aten
from autoshard.runtime.transport.handed_on import register

OTHER_VALUES = "the program was compiled for inputs with other integers"
OTHER_BUFFERS = "a buffer of the model that steers the forward changed"
"""parts of the message of an error that another program would not raise"""


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
    """Whether the program that raised ``error`` was compiled for other integers, or for other values of buffers."""
    return isinstance(error, RuntimeError) and says_other_values(str(error))


def may_stop(fn: object, args: Sequence[object]) -> bool:
    """Whether a call ends a program that is for other values than there are."""
    return fn is EXACTLY or (fn is aten._assert_async.msg and says_other_values(str(args[1])))


def says_other_values(text: str) -> bool:
    """Whether ``text`` has the message of a check for which another program is compiled."""
    return OTHER_VALUES in text or OTHER_BUFFERS in text

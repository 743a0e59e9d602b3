"""Run-time checks: indices in range of a sharded dim, shapes of a specialized program."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.aten import aten
from autoshard.runtime.transport.autograd import register_backward
from autoshard.torch_private.ops import assert_async


def check_range(index: Tensor, size: int | Tensor, *, least: int = 0, ignored: int | None = None) -> None:
    """Raise unless ``least`` ≤ ``index`` < ``size`` (broadcast) or ``ignored``: RuntimeError on
    CPUs, else torch's assertion."""
    inside = (index >= least) & (index < size)
    if ignored is not None:
        inside = inside | (index == ignored)
    assert_async(inside.all(), "index out of range" if isinstance(size, Tensor) else f"index out of range of {size}")


OTHER_VALUES = "the program was compiled for inputs with other integers"
OTHER_BUFFERS = "a buffer of the model that controls the forward has changed"
TOO_SHORT = "a length that depends on the data is too small for the compiled program"
"""messages of errors for which another program, or the code between parts, takes the call"""


@torch.library.custom_op("autoshard::exactly", mutates_args=())
def exactly(x: Tensor, shape: Sequence[int], where: str) -> Tensor:
    """``x`` if it has ``shape``. Raises RuntimeError otherwise; ``where``: named in the message."""
    if list(x.shape) != list(shape):
        raise RuntimeError(f"{where}: {OTHER_VALUES}: a result has shape {list(x.shape)}, not {list(shape)}")
    return x.clone()


@exactly.register_fake
def _fake_exactly(x: Tensor, shape: Sequence[int], where: str) -> Tensor:
    return x.new_empty(shape)


register_backward(exactly, lambda ctx, grad: (grad, None, None), lambda ctx, inputs, output: None)
EXACTLY = torch.ops.autoshard.exactly.default
"""the op of :func:`exactly`, as graphs name it"""


def is_specialization_error(error: BaseException) -> bool:
    """Whether ``error`` says that the program is specialized for other values."""
    return isinstance(error, RuntimeError) and is_specialization_message(str(error))


def is_specialization_check(fn: object, args: Sequence[object]) -> bool:
    """Whether a call is a check that can end a specialized program."""
    return fn is EXACTLY or (fn is aten._assert_async.msg and is_specialization_message(str(args[1])))


def is_specialization_message(text: str) -> bool:
    """Whether ``text`` contains the message of a specialization check."""
    return any(message in text for message in (OTHER_VALUES, OTHER_BUFFERS, TOO_SHORT))

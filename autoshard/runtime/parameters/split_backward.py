"""Split backward (zero bubble, Qi et al., arXiv:2401.10241): the operand's gradient at once, the
weight's gradient where the schedule would wait. While :attr:`Communicator.later` is a list, a
product is an autograd node without the weight; its backward gives dX and appends a second node,
whose backward gives dW. Else these are torch's ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from autoshard.aten import aten
from autoshard.runtime.transport.autograd import NoneGradFunction
from autoshard.runtime.transport.communicator import current

Tensor = torch.Tensor


class _SplitProduct(NamedTuple):
    """``of(x, w)`` is linear in both; a bias is added along ``channel`` of the result."""

    of: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    operand: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(dY, x, w) → dX"""
    weight: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(dY, x, w without data) → dW"""
    channel: int = -1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of x [..., k] with weight [n, k] and bias [n] → [..., n]."""
    return _split_product(_LINEAR, x, weight, bias)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight``: x [..., k] with weight [k, n], or x [b, m, k] with weight [b, k, n]."""
    return _split_product(_MATMUL, x, weight)


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] | int = 1,
    padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1,
    groups: int = 1,
) -> Tensor:
    """``F.conv1d`` to ``conv3d`` of x [batch, c, ...], weight [n, c / groups, ...] and bias [n]."""
    dims = weight.dim() - 2
    each = [[n] * dims if isinstance(n, int) else list(n) for n in (stride, padding, dilation)]
    rest = *each, False, [0] * dims, groups

    def gradient(number: int, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
        wanted = [number == 0, number == 1, False]
        return aten.convolution_backward.default(dy, x, w, None, *rest, wanted)[number]

    product = _SplitProduct(
        lambda x, w, b: aten.convolution.default(x, w, b, *rest),
        lambda dy, x, w: gradient(0, dy, x, w),
        lambda dy, x, w: gradient(1, dy, x, w),
        channel=1,
    )
    return _split_product(product, x, weight, bias)


def _as_matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


_LINEAR = _SplitProduct(F.linear, lambda dy, x, w: dy @ w, lambda dy, x, w: _as_matrix(dy).mT @ _as_matrix(x))
_MATMUL = _SplitProduct(
    lambda x, w, b: x @ w,
    lambda dy, x, w: dy @ w.mT,
    lambda dy, x, w: _as_matrix(x).mT @ _as_matrix(dy) if w.dim() == 2 else x.mT @ dy,
)


def _split_product(product: _SplitProduct, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    later = current().later
    if later is None or not weight.requires_grad or not torch.is_grad_enabled():
        return product.of(x, weight, bias)
    operands: list[Tensor] = []
    weights = _WeightGradient.apply(product, operands, weight, bias)  # type: ignore[no-untyped-call]

    def put(x: Tensor, dy: Tensor) -> None:
        operands.extend((x, dy))
        later.append(weights)

    # If the operand needs no gradient, the result needs one for the weight.
    reached = None if x.requires_grad else torch.empty(0, requires_grad=True)
    values = weight.detach(), None if bias is None else bias.detach()
    return _OperandGradient.apply(product, put, reached, x, *values)


class _OperandGradient(NoneGradFunction):
    """The product; its backward gives dX."""

    @staticmethod
    def forward(
        ctx: Any,
        product: _SplitProduct,
        put: Callable[..., None],
        reached: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.product, ctx.put = product, put
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[3] else None)
        return product.of(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.put(x, dy)
        dx = None if weight is None else ctx.product.operand(dy, x, weight)
        return None, None, None, dx, None, None


class _WeightGradient(torch.autograd.Function):
    """A scalar in front of the weight and bias of a product; its backward gives dW and db."""

    @staticmethod
    def forward(
        ctx: Any, product: _SplitProduct, operands: list[Tensor], weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.product, ctx.operands = product, operands
        ctx.like = weight.new_empty(()).expand(weight.shape)  # its shape, without its memory
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        x, dy = ctx.operands
        ctx.operands.clear()
        product, db = ctx.product, None
        if ctx.needs_input_grad[3]:
            others = [d for d in range(dy.dim()) if d != product.channel % dy.dim()]
            db = dy.sum(others) if others else dy
        return None, None, product.weight(dy, x, ctx.like), db

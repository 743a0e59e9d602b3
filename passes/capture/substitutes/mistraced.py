"""Polyfills of torch functions of which a trace loses something.

Dropout between recurrent layers; running statistics of instance norm; a computed momentum of batch
norm; dropout in evaluation returning its operand; memory order of in-place draws; reductions in the
dtype of ``out``; memory order of ``_ROW_MAJOR`` and ``_CHANNELS_LAST``, which later draws follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm as order_in_memory
from torch._prims_common import suggest_memory_format

Stack = Callable[..., tuple[torch.Tensor, ...]]
_INSTANCE_NORM, _BATCH_NORM, _ALPHA_DROPOUT = torch.instance_norm, torch.batch_norm, torch.alpha_dropout
_ROW_MAJOR = torch._C._nn.log_sigmoid, torch._C._nn.one_hot
_CHANNELS_LAST = torch.roll, torch.Tensor.roll, torch.channel_shuffle
"""results are channels-last if the operand is, else row-major"""


def _recurrent(function: Stack) -> Stack:
    """``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``; layer by layer if there is dropout."""

    def stack(x: torch.Tensor, hx: Any, params: Any, *options: Any) -> tuple[torch.Tensor, ...]:
        packed = isinstance(params, torch.Tensor)
        if packed:
            return function(x, hx, params, *options)
        has_biases, num_layers, dropout, train, bidirectional, batch_first = options
        states = (hx,) if isinstance(hx, torch.Tensor) else hx
        if not (dropout and train and num_layers > 1):
            out, *last = function(x, hx, params, *options)
            # Decomposed LSTMs of torch 2.11 and 2.12 return states with an extra dim.
            return out, *(y if y.dim() == s.dim() else y.reshape(s.shape) for y, s in zip(last, states, strict=True))
        x = x.transpose(0, 1) if batch_first else x
        ends, each = [], len(params) // num_layers
        for i in range(num_layers):
            x = torch.dropout(x, dropout, True) if i else x
            part = tuple(s.unflatten(0, (num_layers, -1))[i] for s in states)  # [layers · directions, batch, features]
            given = part[0] if isinstance(hx, torch.Tensor) else part
            x, *end = stack(x, given, params[each * i :][:each], has_biases, 1, 0.0, train, bidirectional, False)
            ends.append(end)
        return (x.transpose(0, 1) if batch_first else x, *(torch.cat(of) for of in zip(*ends, strict=True)))

    return stack


Vector = torch.Tensor | None


def _instance_norm(
    x: torch.Tensor, weight: Vector, bias: Vector, running_mean: Vector, running_var: Vector, use_input_stats: bool,
    momentum: float, *options: Any,
) -> torch.Tensor:  # fmt: skip
    """``torch.instance_norm``, whose schema hides that it writes running statistics."""
    if not use_input_stats:
        return _INSTANCE_NORM(x, weight, bias, running_mean, running_var, False, momentum, *options)
    out = _INSTANCE_NORM(x, weight, bias, None, None, True, momentum, *options)
    with torch.no_grad():
        var, mean = torch.var_mean(x, tuple(range(2, x.dim())))
        for running, new in ((running_mean, mean), (running_var, var)):
            if running is not None:
                running.mul_(1 - momentum).add_(momentum * new.mean(0).to(running.dtype))
    return out


def _batch_norm(
    x: torch.Tensor, weight: Vector, bias: Vector, running_mean: Vector, running_var: Vector, training: bool,
    momentum: Any, *options: Any,
) -> torch.Tensor:  # fmt: skip
    """``torch.batch_norm`` with a computed momentum, and its operand in the result's format."""
    x = x.contiguous(memory_format=suggest_memory_format(x))
    if not (training and isinstance(momentum, torch.SymFloat)):
        return _BATCH_NORM(x, weight, bias, running_mean, running_var, training, momentum, *options)
    new_mean, new_var = (None if r is None else r.clone() for r in (running_mean, running_var))
    out = _BATCH_NORM(x, weight, bias, new_mean, new_var, True, 1.0, *options)
    part: Any = momentum
    for running, new in ((running_mean, new_mean), (running_var, new_var)):
        if running is not None and new is not None:
            running.mul_(1 - part).add_(new * part)
    return out


def _laid(function: Callable[..., torch.Tensor], channels_last: bool) -> Callable[..., torch.Tensor]:
    """``function`` with eager's memory format: row-major, or channels-last like the operand."""

    def laid(input: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:  # noqa: A002
        form = suggest_memory_format(input) if channels_last else torch.contiguous_format
        return function(input, *args, **options).contiguous(memory_format=form)

    return laid


def _dropout(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A dropout that returns the operand itself, not a copy, if nothing is dropped."""

    def dropped(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: A002
        return function(input, p, train) if train and p else input

    return dropped


def _dropout_(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An in-place dropout by the functional one: decomposed, it would save more than the mask."""

    def dropped(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: A002
        return input.copy_(function(input, p, train)) if train and p else input

    return dropped


def _alpha_dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: A002
    """``torch.alpha_dropout``, which draws in memory order: permuted to row-major first."""
    order = order_in_memory(input)[0]
    return _ALPHA_DROPOUT(input.permute(order), p, train).permute(sorted(range(len(order)), key=order.__getitem__))


def _bernoulli_(self: torch.Tensor, p: Any = 0.5, **options: Any) -> torch.Tensor:
    """``bernoulli_`` in memory order, as in eager; its functional form draws in order of dims."""
    if isinstance(p, torch.Tensor):
        return self.bernoulli_(p, **options)
    self.permute(order_in_memory(self)[0]).bernoulli_(p, **options)
    return self


def _random_(self: torch.Tensor, *bounds: Any, **options: Any) -> torch.Tensor:
    """``random_(low, high)``: export would generate Python with an argument named ``from``."""
    given = (*bounds, *([options["to"]] if "to" in options else []))
    if len(given) != 2 or None in given or options.keys() - {"to"}:
        return self.random_(*bounds, **options)
    return self.copy_(torch.randint_like(self, *given))


def _standard_gamma(self: torch.Tensor) -> torch.Tensor:
    """``torch._standard_gamma``: a draw, plus an explicit gradient term of value 0."""
    if not self.requires_grad:
        return torch._standard_gamma(self)
    fixed = self.detach()
    drawn = torch._standard_gamma(fixed)
    return drawn + (self - fixed) * torch._standard_gamma_grad(fixed, drawn)


class _Dirichlet:
    """Replaces torch's ``_Dirichlet``: a draw, plus explicit gradient terms of value 0."""

    @staticmethod
    def apply(concentration: torch.Tensor) -> torch.Tensor:
        fixed = concentration.detach()
        drawn = torch._sample_dirichlet(fixed)
        if not concentration.requires_grad:
            return drawn
        slope = torch._dirichlet_grad(drawn, fixed, fixed.sum(-1, True).expand_as(fixed))
        moved = (concentration - fixed) * slope
        return drawn + moved - drawn * moved.sum(-1, True)


def _gamma_sample(self: Any, sample_shape: Any = ()) -> torch.Tensor:
    """``Gamma.rsample``, which clamps past autograd: the gradient ignores it."""
    shape = self._extended_shape(sample_shape)
    value: torch.Tensor = torch._standard_gamma(self.concentration.expand(shape)) / self.rate.expand(shape)
    fixed, least = value.detach(), torch.finfo(value.dtype).tiny
    return torch.where(fixed < least, least + (value - fixed), value)


def _copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``copy_`` with a zero gradient for the old value; its functional form gives none."""
    if self.is_leaf or self._is_view() or not torch.is_grad_enabled():
        return self.copy_(src, non_blocking)
    new = src.to(self.dtype).clone()  # it may be the same tensor
    return self.zero_().add_(new)


def _into(function: Callable[..., torch.Tensor], takes_dtype: bool) -> Callable[..., torch.Tensor]:
    """A reduction with ``out=`` of another dtype: converts the operand first, not the result."""

    def reduced(input: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:  # noqa: A002
        out = options.get("out")
        if out is None or out.dtype == input.dtype or options.get("dtype") is not None:
            return function(input, *args, **options)
        if takes_dtype:
            return function(input, *args, **options | {"dtype": out.dtype})
        complex_too = input.is_complex() and out.is_floating_point()
        return function(input.to(out.dtype.to_complex() if complex_too else out.dtype), *args, **options)

    return reduced


_DROPOUTS = {
    "dropout": torch.dropout,
    "feature_dropout": torch.feature_dropout,
    "alpha_dropout": _alpha_dropout,
    "feature_alpha_dropout": torch.feature_alpha_dropout,
}
_STANDING_IN = {
    **{name: _dropout(f) for name, f in _DROPOUTS.items()},
    **{f"{name}_": _dropout_(f) for name, f in _DROPOUTS.items()},
}

MISTRACED: dict[Any, Callable[..., Any]] = {
    **{f: _recurrent(f) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    **{getattr(torch, name): f for name, f in _STANDING_IN.items()},
    **{f: _laid(f, False) for f in _ROW_MAJOR},
    **{f: _laid(f, True) for f in _CHANNELS_LAST},
    torch.Tensor.bernoulli_: _bernoulli_,
    torch.Tensor.copy_: _copy_,
    torch.Tensor.random_: _random_,
    torch._standard_gamma: _standard_gamma,
    **{f: _into(f, True) for f in (torch.sum, torch.prod, torch.nansum, torch.nanmean)},
    **{f: _into(f, False) for f in (torch.var, torch.std)},
}
PATCHES = (
    (torch, "instance_norm", _instance_norm),
    (torch, "batch_norm", _batch_norm),
    (torch, "rrelu", _laid(torch.rrelu, False)),
    *((torch._VF, name, f) for name, f in _STANDING_IN.items()),
    (torch.distributions.gamma.Gamma, "rsample", _gamma_sample),
    (torch.distributions.dirichlet, "_Dirichlet", _Dirichlet),
)
"""functions that ``torch.nn.functional`` calls unseen by function modes"""

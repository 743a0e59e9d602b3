"""Polyfills of torch functions that export mistraces. ``UNCHECKED_POLYFILLS`` leave out checks of
values: what torch refuses becomes NaN. ``MISTRACED_POLYFILLS`` keep what a trace loses, such as
dropout between recurrent layers, running statistics, the dtype of ``out`` or the memory order of
draws. ``flex_attention`` becomes plain ops, which have sharding rules and a backward on CPUs."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.passes.capture.observer import ObservedCall, Observer, Patch
from autoshard.passes.capture.polyfills.trailing_slices import index_trailing, is_trailing_index
from autoshard.runtime.operations.grouped import grouped_mm
from autoshard.runtime.operations.losses import ctc_loss
from autoshard.torch_private.capture import TransformGetItemToIndex
from autoshard.torch_private.fake import order_in_memory, suggest_memory_format
from autoshard.torch_private.ops import (
    VF,
    dirichlet_grad,
    grouped_matmul,
    is_all_true,
    is_any_true,
    safe_softmax,
    sample_dirichlet,
    standard_gamma,
    standard_gamma_grad,
)


def _gaussian_nll_loss_polyfill(
    input: Tensor,  # noqa: A002
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """``F.gaussian_nll_loss``: ``var`` is clamped to ``eps`` in the value, not in the gradient."""
    if isinstance(var, float):
        var = torch.full_like(input, var)
    if input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    shared = [b for a, b in zip(input.shape, var.shape, strict=False) if a != b]
    if input.dim() != var.dim() or shared not in ([], [1]) or reduction not in ("none", "mean", "sum"):
        raise ValueError(f"gaussian_nll_loss: var {list(var.shape)} for {list(input.shape)}, reduction {reduction!r}")
    clamped = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (clamped.log() + (input - target).square() / clamped)
    loss = (loss + 0.5 * math.log(2 * math.pi) if full else loss).masked_fill(var < 0, torch.nan)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _cov_polyfill(
    input: Tensor,  # noqa: A002
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """``torch.cov`` of [variables, observations], or one variable; inf or NaN if ill-defined."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    given = [w for w in (fweights, aweights) if w is not None]
    if not given:
        centred = x - x.sum(1, keepdim=True) / x.shape[1]
        return (torch.mm(centred, centred.t().conj()) / max(0, x.shape[1] - correction)).squeeze()
    weights = given[0] * given[1] if len(given) == 2 else given[0]
    total = weights.sum()
    centred = x - (x * weights).sum(1, keepdim=True) / total
    free = total - (correction * (weights * aweights).sum() / total if aweights is not None else correction)
    return (torch.mm(centred, (centred * weights).t().conj()) / free.clamp(min=0)).squeeze()


def _corrcoef_polyfill(input: Tensor) -> Tensor:  # noqa: A002
    """``torch.corrcoef``: covariances over the standard deviations, in [-1, 1]."""
    cov = _cov_polyfill(input)
    if cov.dim() == 0:
        return cov / cov
    deviations = cov.diagonal().real.sqrt() if cov.is_complex() else cov.diagonal().sqrt()
    found = cov / deviations[:, None] / deviations
    return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1)) if cov.is_complex() else found.clamp(-1, 1)


def _ctc_loss_polyfill(
    log_probs: Tensor,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """``F.ctc_loss``; if lengths are tensors, an op of our own per sample, then mean or sum."""
    if not (isinstance(input_lengths, Tensor) and isinstance(target_lengths, Tensor)):
        return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    each: Tensor = ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    if reduction == "mean":
        return (each / target_lengths.clamp(min=1).to(each.device)).mean()
    return each.sum() if reduction == "sum" else each


def _grouped_mm_polyfill(mat_a: Tensor, mat_b: Tensor, *given: Any, **options: Any) -> Tensor:
    """Torch's ``_grouped_mm``; in float32 and float16 an op of our own: traces refuse these."""
    options = dict(zip(("offs", "bias", "out_dtype"), given, strict=False)) | options
    ends = options.get("offs")
    plain = options.get("bias") is None and options.get("out_dtype") in (None, mat_a.dtype)
    wide = mat_a.dtype == mat_b.dtype and mat_a.dtype in (torch.float32, torch.float16)
    dims = (mat_a.dim(), mat_b.dim())
    if wide and plain and ends is not None and dims == (2, 3):
        return grouped_mm(mat_a, mat_b, ends)
    if wide and plain and ends is None and dims == (3, 3):
        return torch.bmm(mat_a, mat_b)
    return grouped_matmul(mat_a, mat_b, **options)


def _masked_select_polyfill(input: Tensor, mask: Tensor) -> Tensor:  # noqa: A002
    """``torch.masked_select`` as an index: indices by one mask share a symbolic length."""
    if input.shape != mask.shape:
        input, mask = torch.broadcast_tensors(input, mask)  # noqa: A001
    return input[mask]


UNCHECKED_POLYFILLS: dict[Any, Callable[..., Tensor]] = {
    F.ctc_loss: _ctc_loss_polyfill,
    is_all_true: torch.all,  # what torch.distributions calls
    is_any_true: torch.any,
    grouped_matmul: _grouped_mm_polyfill,
    F.gaussian_nll_loss: _gaussian_nll_loss_polyfill,
    torch.cov: _cov_polyfill,
    Tensor.cov: _cov_polyfill,
    torch.masked_select: _masked_select_polyfill,
    Tensor.masked_select: _masked_select_polyfill,
    torch.corrcoef: _corrcoef_polyfill,
    Tensor.corrcoef: _corrcoef_polyfill,
}


RecurrentFunction = Callable[..., tuple[Tensor, ...]]
_INSTANCE_NORM, _BATCH_NORM, _ALPHA_DROPOUT = torch.instance_norm, torch.batch_norm, torch.alpha_dropout
_ROW_MAJOR = F.logsigmoid, F.one_hot
_CHANNELS_LAST = torch.roll, Tensor.roll, torch.channel_shuffle
"""results are channels-last if the operand is, else row-major"""


def _recurrent_by_layer(function: RecurrentFunction) -> RecurrentFunction:
    """``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``; layer by layer if there is dropout."""

    def stack(x: Tensor, hx: Any, params: Any, *options: Any) -> tuple[Tensor, ...]:
        packed = isinstance(params, Tensor)
        if packed:
            return function(x, hx, params, *options)
        has_biases, num_layers, dropout, train, bidirectional, batch_first = options
        states = (hx,) if isinstance(hx, Tensor) else hx
        if not (dropout and train and num_layers > 1):
            out, *last = function(x, hx, params, *options)
            # Decomposed LSTMs of torch 2.11 and 2.12 return states with an extra dim.
            return out, *(y if y.dim() == s.dim() else y.reshape(s.shape) for y, s in zip(last, states, strict=True))
        x = x.transpose(0, 1) if batch_first else x
        ends, each = [], len(params) // num_layers
        for i in range(num_layers):
            x = torch.dropout(x, dropout, True) if i else x
            part = tuple(s.unflatten(0, (num_layers, -1))[i] for s in states)  # [layers · directions, batch, features]
            given = part[0] if isinstance(hx, Tensor) else part
            x, *end = stack(x, given, params[each * i :][:each], has_biases, 1, 0.0, train, bidirectional, False)
            ends.append(end)
        return (x.transpose(0, 1) if batch_first else x, *(torch.cat(of) for of in zip(*ends, strict=True)))

    return stack


Vector = Tensor | None


def _instance_norm_polyfill(
    x: Tensor, weight: Vector, bias: Vector, running_mean: Vector, running_var: Vector, use_input_stats: bool,
    momentum: float, *options: Any,
) -> Tensor:  # fmt: skip
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


def _batch_norm_polyfill(
    x: Tensor, weight: Vector, bias: Vector, running_mean: Vector, running_var: Vector, training: bool,
    momentum: Any, *options: Any,
) -> Tensor:  # fmt: skip
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


def _with_eager_layout(function: Callable[..., Tensor], channels_last: bool) -> Callable[..., Tensor]:
    """``function`` with eager's memory format: row-major, or channels-last like the operand."""

    def laid(input: Tensor, *args: Any, **options: Any) -> Tensor:  # noqa: A002
        form = suggest_memory_format(input) if channels_last else torch.contiguous_format
        return function(input, *args, **options).contiguous(memory_format=form)

    return laid


def _dropout_polyfill(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A dropout that returns the operand itself, not a copy, if nothing is dropped."""

    def dropped(input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002
        return function(input, p, train) if train and p else input

    return dropped


def _dropout_in_place_polyfill(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An in-place dropout by the functional one: decomposed, it would save more than the mask."""

    def dropped(input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002
        return input.copy_(function(input, p, train)) if train and p else input

    return dropped


def _alpha_dropout_polyfill(input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002
    """``torch.alpha_dropout``, which draws in memory order: permuted to row-major first."""
    order = order_in_memory(input)[0]
    return _ALPHA_DROPOUT(input.permute(order), p, train).permute(sorted(range(len(order)), key=order.__getitem__))


def _bernoulli_(self: Tensor, p: Any = 0.5, **options: Any) -> Tensor:
    """``bernoulli_`` in memory order, as in eager; its functional form draws in order of dims."""
    if isinstance(p, Tensor):
        return self.bernoulli_(p, **options)
    self.permute(order_in_memory(self)[0]).bernoulli_(p, **options)
    return self


def _random_(self: Tensor, *bounds: Any, **options: Any) -> Tensor:
    """``random_(low, high)``: export would generate Python with an argument named ``from``."""
    given = (*bounds, *([options["to"]] if "to" in options else []))
    if len(given) != 2 or None in given or options.keys() - {"to"}:
        return self.random_(*bounds, **options)
    return self.copy_(torch.randint_like(self, *given))


def _standard_gamma(self: Tensor) -> Tensor:
    """Torch's ``_standard_gamma``: a draw, plus an explicit gradient term of value 0."""
    if not self.requires_grad:
        return standard_gamma(self)
    fixed = self.detach()
    drawn = standard_gamma(fixed)
    return drawn + (self - fixed) * standard_gamma_grad(fixed, drawn)


class _Dirichlet:
    """Replaces torch's ``_Dirichlet``: a draw, plus explicit gradient terms of value 0."""

    @staticmethod
    def apply(concentration: Tensor) -> Tensor:
        fixed = concentration.detach()
        drawn = sample_dirichlet(fixed)
        if not concentration.requires_grad:
            return drawn
        slope = dirichlet_grad(drawn, fixed, fixed.sum(-1, True).expand_as(fixed))
        moved = (concentration - fixed) * slope
        return drawn + moved - drawn * moved.sum(-1, True)


def _gamma_sample(self: Any, sample_shape: Any = ()) -> Tensor:
    """``Gamma.rsample``, which clamps past autograd: the gradient ignores it."""
    shape = self._extended_shape(sample_shape)
    value: Tensor = standard_gamma(self.concentration.expand(shape)) / self.rate.expand(shape)
    fixed, least = value.detach(), torch.finfo(value.dtype).tiny
    return torch.where(fixed < least, least + (value - fixed), value)


def _copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """``copy_`` with a zero gradient for the old value; its functional form gives none."""
    if self.is_leaf or self._is_view() or not torch.is_grad_enabled():
        return self.copy_(src, non_blocking)
    new = src.to(self.dtype).clone()  # it may be the same tensor
    return self.zero_().add_(new)


def _reduction_with_out(function: Callable[..., Tensor], takes_dtype: bool) -> Callable[..., Tensor]:
    """A reduction with ``out=`` of another dtype: converts the operand first, not the result."""

    def reduced(input: Tensor, *args: Any, **options: Any) -> Tensor:  # noqa: A002
        out = options.get("out")
        if out is None or out.dtype == input.dtype or options.get("dtype") is not None:
            return function(input, *args, **options)
        if takes_dtype:
            return function(input, *args, **options | {"dtype": out.dtype})
        complex_too = input.is_complex() and out.is_floating_point()
        return function(input.to(out.dtype.to_complex() if complex_too else out.dtype), *args, **options)

    return reduced


_DROPOUT_FUNCTIONS = {
    "dropout": torch.dropout,
    "feature_dropout": torch.feature_dropout,
    "alpha_dropout": _alpha_dropout_polyfill,
    "feature_alpha_dropout": torch.feature_alpha_dropout,
}
_DROPOUT_POLYFILLS = {
    **{name: _dropout_polyfill(f) for name, f in _DROPOUT_FUNCTIONS.items()},
    **{f"{name}_": _dropout_in_place_polyfill(f) for name, f in _DROPOUT_FUNCTIONS.items()},
}

MISTRACED_POLYFILLS: dict[Any, Callable[..., Any]] = {
    **{f: _recurrent_by_layer(f) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    **{getattr(torch, name): f for name, f in _DROPOUT_POLYFILLS.items()},
    **{f: _with_eager_layout(f, False) for f in _ROW_MAJOR},
    **{f: _with_eager_layout(f, True) for f in _CHANNELS_LAST},
    Tensor.bernoulli_: _bernoulli_,
    Tensor.copy_: _copy_,
    Tensor.random_: _random_,
    standard_gamma: _standard_gamma,
    **{f: _reduction_with_out(f, True) for f in (torch.sum, torch.prod, torch.nansum, torch.nanmean)},
    **{f: _reduction_with_out(f, False) for f in (torch.var, torch.std)},
}
ATTRIBUTE_POLYFILLS = (
    (torch, "instance_norm", _instance_norm_polyfill),
    (torch, "batch_norm", _batch_norm_polyfill),
    (torch, "rrelu", _with_eager_layout(torch.rrelu, False)),
    *((VF, name, f) for name, f in _DROPOUT_POLYFILLS.items()),
    (torch.distributions.gamma.Gamma, "rsample", _gamma_sample),
    (torch.distributions.dirichlet, "_Dirichlet", _Dirichlet),
)
"""functions that ``torch.nn.functional`` calls unseen by function modes"""


_FLEX_MODULE = "torch.nn.attention.flex_attention"


def _flex_attention_plain(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(result [b, h, q, e]; per query: log2 of the sum of exp(scores), maximum score · log2(e))."""
    flex, groups = sys.modules[_FLEX_MODULE], query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    working = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(working) @ key.to(working).transpose(-2, -1) * scale
    places = [torch.arange(n, device=scores.device) for n in scores.shape]
    with TransformGetItemToIndex():  # x[head] with a batched head becomes an index
        seen = flex._vmap_for_bhqkv(block_mask[-1], prefix=())(*places)
        scores = flex._vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *places)
    scores = scores.masked_fill(~seen, -math.inf)
    weights = safe_softmax(scores, -1)  # zeros for queries that see no key
    log_sum, largest = scores.logsumexp(-1), scores.amax(-1)
    return weights.to(query.dtype) @ value.to(query.dtype), log_sum / math.log(2), largest / math.log(2)


class FlexAttention(Observer):
    """Makes ``flex_attention`` call :func:`_flex_attention_plain`, under any name, uncompiled."""

    def patches(self) -> Iterable[Patch]:
        if (module := sys.modules.get(_FLEX_MODULE)) is not None:  # else it is not imported
            yield module, "flex_attention_hop", _flex_attention_plain
            yield module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True
            yield module, "_validate_device", lambda query, key, value: None
            yield module, "setup_compilation_env", contextlib.nullcontext  # keeps modes


def _equal_polyfill(input: Tensor, other: Tensor) -> bool:  # noqa: A002
    return input.shape == other.shape and bool((input == other).all())


POLYFILLS: dict[Any, Any] = UNCHECKED_POLYFILLS | MISTRACED_POLYFILLS
_ASKING_POLYFILLS = {torch.equal: _equal_polyfill, Tensor.equal: _equal_polyfill}
"""polyfills that ask for a truth value, which an observer answers"""


class Polyfills(Observer):
    """Replaces calls by their polyfills."""

    def patches(self) -> Iterable[Patch]:
        return ATTRIBUTE_POLYFILLS

    def before(self, call: ObservedCall) -> ObservedCall | None:
        if (asking := _ASKING_POLYFILLS.get(call.func)) is not None:
            return replace(call, func=asking, observes_inner=True)
        other = index_trailing if is_trailing_index(call.func, call.args) else POLYFILLS.get(call.func)
        return None if other is None else replace(call, func=other)

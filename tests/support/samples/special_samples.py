"""Concrete calls for the rules with local forms of their own; dims uneven for 2 and for 3 ranks where that may be."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.aten import aten
from autoshard.runtime.attention.masked_attention import banded_op
from autoshard.runtime.attention.zigzag import from_zigzag_op, to_zigzag_op
from autoshard.runtime.operations.autograd_ops import function_op
from autoshard.runtime.operations.checks import exactly
from autoshard.runtime.operations.embedding import pooled_op
from autoshard.runtime.operations.losses import cross_entropy_op, ctc_loss, linear_cross_entropy_op
from autoshard.runtime.operations.stacked import stacked_op

Sample = tuple[tuple[Any, ...], dict[str, Any]]

_random = torch.Generator().manual_seed(11)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_random, dtype=torch.float64)


def unit(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_random, dtype=torch.float64) * 0.7 + 0.2


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_random)


def sign(*shape: int) -> torch.Tensor:
    return (i(2, *shape) * 2 - 1).double()


def call(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


def probabilities(*shape: int) -> torch.Tensor:
    return f(*shape).softmax(1)


NONE, MEAN, SUM = 0, 1, 2
TARGET, CLASSES = torch.tensor([3, -100, 0, 6, 2]), torch.tensor([3, 1, 2, 6, 2])
GRID = torch.tensor([[3, 1, 0], [6, 255, 2], [4, 4, 255], [255, 5, 5]])

EMBEDDINGS: dict[Any, list[Sample]] = {
    aten.embedding.default: [
        call(f(7, 5), i(7, 4, 3)),
        call(f(7, 4), torch.tensor([6, 0, 2, 6, 6]), 6),
        call(f(5, 4), i(5, 3, 2), -1, True),
        call(f(4, 3), torch.tensor(2)),
    ],
    stacked_op._opoverload: [call([f(4, 3), f(4, 3)], 1), call([f(6, 4), f(6, 4), f(6, 4), f(6, 4)], 2)],
    pooled_op._opoverload: [
        call(f(7, 5), i(7, 4, 3), "sum"),
        call(f(7, 4), i(7, 3, 2, 5), "mean", 6),
    ],
    aten.embedding_bag.default: [
        call(f(7, 5), i(7, 6), torch.tensor([0, 2, 2, 5]), False, mode, False, weights, False)
        for mode, weights in ((0, None), (0, f(6)), (1, None), (2, None))
    ],
    aten.embedding_bag.padding_idx: [
        call(f(7, 5), i(7, 6), torch.tensor([0, 2, 2, 5]), False, 0, False, None, False, None),
        call(f(7, 4), torch.tensor([3, 1, 3, 6, 0]), torch.tensor([0, 3, 5]), False, 0, False, f(5), True, 3),
        call(f(7, 4), torch.tensor([3, 1, 3, 6, 0]), torch.tensor([0, 3]), True, 0, False, None, False, -4),
        call(f(7, 4), torch.tensor([3, 3, 1, 3, 6, 0]), torch.tensor([0, 1, 3, 3]), False, 1, False, None, False, 3),
        # Of equal elements the first of a bag; a bag of padding alone, an empty one, the end of the last one.
        call(
            f(7, 4).sign(),
            torch.tensor([6, 0, 3, 2, 3, 5, 1]),
            torch.tensor([0, 4, 5, 5]),
            False,
            2,
            False,
            None,
            False,
            3,
        ),
        call(
            f(5, 3).sign(), torch.tensor([4, 1, 1, 0, 2]), torch.tensor([0, 0, 3, 5]), False, 2, False, None, True, -1
        ),
    ],
}

_NLL = [
    call(f(5, 7), TARGET),
    call(f(5, 7), TARGET, unit(7), SUM),
    call(f(5, 7), CLASSES, unit(7), MEAN, 2),
    call(f(5, 7), TARGET, None, NONE),
]
_NLL_GRID = [call(f(4, 7, 3), GRID, unit(7), reduction, 255) for reduction in (NONE, MEAN, SUM)]
CLASSIFICATION: dict[Any, list[Sample]] = {
    aten.cross_entropy_loss.default: [
        *_NLL,
        *_NLL_GRID,
        call(f(5, 7), CLASSES, unit(7), MEAN, 2, 0.2),
        call(f(5, 7), TARGET, None, MEAN, -100, 0.3),
        call(f(4, 7, 3), GRID, unit(7), NONE, 255, 0.1),
        call(f(7), torch.tensor(4)),
        call(f(7), torch.tensor(4), unit(7), MEAN, -100, 0.1),
        call(f(5, 7), probabilities(5, 7)),
        call(f(4, 7, 3), probabilities(4, 7, 3), unit(7), MEAN, -100, 0.1),
        call(f(4, 7), probabilities(4, 7), unit(7), NONE),
        call(f(7), f(7).softmax(0), None, SUM),
        call(f(5, 7) * 400, TARGET),
    ],
    cross_entropy_op: [
        *(call(f(4, 3, 7), GRID, unit(7), reduction, 255) for reduction in (NONE, MEAN, SUM)),
        call(f(4, 3, 7), GRID, unit(7), MEAN, 255, 0.1),
        call(f(4, 3, 7), f(4, 3, 7).softmax(-1)),
        call(f(4, 3, 7), f(4, 3, 7).softmax(-1), unit(7), NONE),
    ],
    linear_cross_entropy_op: [
        *(call(f(4, 3, 6), GRID, f(7, 6), None, torch.float64, 2, unit(7), how, 255) for how in (NONE, MEAN, SUM)),
        call(f(4, 3, 6), GRID, f(7, 6), f(7), torch.float64, 5, None, MEAN, 255, 0.1),
        call(f(5, 6), TARGET, f(7, 6) * 400, f(7), torch.float64, 3, unit(7), MEAN, -100, 0.3),
    ],
    aten.nll_loss_nd.default: [*_NLL, *_NLL_GRID, call(f(7), torch.tensor(4)), call(f(7), torch.tensor(2), unit(7))],
    aten.nll_loss.default: _NLL,
    aten.nll_loss2d.default: [call(f(2, 5, 3, 4), i(5, 2, 3, 4), unit(5), r, 1) for r in (NONE, MEAN, SUM)],
}

_SOFTMAX = [call(f(4, 5, 3), d) for d in (0, 1, -1)] + [call(f(5) * 300, 0)]
SOFTMAX: dict[Any, list[Sample]] = {
    aten.softmax.int: [*_SOFTMAX, call(f(4, 5).bfloat16(), 1, torch.float32), call(f(4, 5).half(), 1)],
    aten.log_softmax.int: [*_SOFTMAX, call(f(4, 5).bfloat16(), 1, torch.float32)],
    aten._softmax.default: [call(*args, False) for args, _ in _SOFTMAX],
    aten._log_softmax.default: [call(*args, False) for args, _ in _SOFTMAX],
    aten._safe_softmax.default: [
        *_SOFTMAX,
        call(torch.tensor([[0.5, -1, 2, 0], [-torch.inf] * 4, [-torch.inf, 1, 2, -torch.inf]]).double(), 1),
    ],
}


def _reduced(*args: Any, **kwargs: Any) -> list[Sample]:
    return [call(*args, reduction=r, **kwargs) for r in (NONE, MEAN, SUM)]


LOSSES: dict[Any, list[Sample]] = {
    **{
        op: _reduced(f(4, 3), f(4, 3))
        for op in (aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
    },
    aten.kl_div.default: _reduced(f(4, 3), unit(4, 3)) + _reduced(f(4, 3), f(4, 3), log_target=True),
    aten.binary_cross_entropy.default: _reduced(unit(4, 3), unit(4, 3)) + _reduced(unit(4, 3), unit(4, 3), unit(3)),
    aten.binary_cross_entropy_with_logits.default: _reduced(f(4, 3), unit(4, 3))
    + _reduced(f(4, 3), unit(4, 3), unit(4, 1), unit(3)),
    aten.poisson_nll_loss.default: [call(f(4, 3), unit(4, 3), True, False, 1e-8, r) for r in (NONE, MEAN, SUM)],
    aten.margin_ranking_loss.default: _reduced(f(5), f(5), sign(5), 0.3),
    aten.hinge_embedding_loss.default: _reduced(f(4, 3), sign(4, 3)),
    aten.soft_margin_loss.default: _reduced(f(4, 3), sign(4, 3)),
    aten.cosine_embedding_loss.default: _reduced(f(4, 3), f(4, 3), sign(4)) + _reduced(f(3), f(3), sign()),
    aten.triplet_margin_loss.default: _reduced(f(4, 3), f(4, 3), f(4, 3)),
    aten.multi_margin_loss.default: _reduced(f(4, 5), i(5, 4)) + _reduced(f(4, 4), i(4, 4), 1, 1, unit(4)),
}

_HEADS = (f(2, 3, 5, 4), f(2, 3, 6, 4), f(2, 3, 6, 3))
_GROUPS = (f(2, 6, 5, 4), f(2, 2, 4, 4), f(2, 2, 4, 3))
_UNEVEN_GROUPS = (f(1, 6, 4, 2), f(1, 3, 4, 2), f(1, 3, 4, 2))
_MASK = torch.rand(5, 6, generator=_random) < 0.7
_MASK[0] = True
ATTENTION: dict[Any, list[Sample]] = {
    aten.scaled_dot_product_attention.default: [
        call(*_HEADS),
        call(*_HEADS, None, 0.0, True),
        call(*_HEADS, _MASK),
        call(*_HEADS, f(2, 1, 5, 6), scale=0.3),
        call(*_HEADS, scale=-0.3),
        call(*_HEADS, f(1, 3, 1, 6)),
        call(*_GROUPS, None, 0.0, True, enable_gqa=True),
        call(*_UNEVEN_GROUPS, f(1, 6, 4, 4), enable_gqa=True),
        call(f(1, 6, 4, 2), f(1, 3, 4, 2), f(1, 6, 4, 2), enable_gqa=True),  # a head of its own for each value
        call(f(1, 6, 4, 2), f(1, 6, 4, 2), f(1, 2, 4, 2), None, 0.0, True, enable_gqa=True),
        call(f(4, 5, 3), f(4, 5, 3), f(4, 5, 3), is_causal=True),
        call(f(3, 4, 5), f(3, 4, 5), f(2, 3, 4, 5)),
        call(f(4, 3), f(4, 3), f(4, 2), is_causal=True),  # of no batch and no heads
        call(f(5, 3), f(6, 3), f(6, 2), _MASK),
        call(*_HEADS, None, 0.4, True),
        call(*_HEADS, _MASK, 0.4),
        call(*_GROUPS, None, 0.4, True, enable_gqa=True),
    ],
    banded_op._opoverload: [
        call(*_HEADS, _MASK, after=0),
        call(*_HEADS, f(1, 3, 1, 6), before=2, after=1),
        call(*_GROUPS, before=1, after=0, enable_gqa=True),
        call(*_UNEVEN_GROUPS, torch.ones(1, 1, 1, 4) > 0, after=0, scale=0.3, enable_gqa=True),
        call(*_UNEVEN_GROUPS, torch.tensor([[[[0, 0, 1, 2]]]]), before=2, after=0, enable_gqa=True),
        call(*_HEADS, f(1, 3, 1, 1), after=0, sloped=True),
        call(*_GROUPS, f(1, 6, 1, 1), enable_gqa=True, sloped=True),
        call(*_HEADS, f(1, 3, 1, 6), f(3), before=2, after=1),
        call(*_GROUPS, None, f(6), after=0, enable_gqa=True, soft_cap=0.7),
        call(*_UNEVEN_GROUPS, after=0, enable_gqa=True, folded=2),
        call(*_UNEVEN_GROUPS, torch.tensor([[[[0, 0, 1, 2]]]]), f(6), after=0, enable_gqa=True, folded=2),
        call(f(2, 3, 6, 2), f(2, 3, 6, 2), f(2, 3, 6, 2), f(1, 3, 1, 1), after=0, sloped=True, folded=3),
        call(f(3, 6, 2), f(3, 6, 2), f(3, 6, 2), after=0, soft_cap=0.7, folded=3),
        call(f(6, 2), f(6, 2), f(6, 2), before=1, after=0),
        call(f(6, 2), f(6, 2), f(6, 2), after=0, folded=3),
    ],
}

ORDERS: dict[Any, list[Sample]] = {
    op._opoverload: [call(f(2, 6, 4), 1, 2), call(f(3, 6), 1, 3), call(f(6), 0, 3), call(f(4, 2, 3), 0, 2)]
    for op in (to_zigzag_op, from_zigzag_op)
}

_IMAGE = f(4, 6, 5)
NORMS: dict[Any, list[Sample]] = {
    aten.layer_norm.default: [
        call(f(4, 3, 5), [5], f(5), f(5)),
        call(f(4, 3, 5), [3, 5], f(3, 5), None, 1e-3),
        call(f(4, 5), [5]),
    ],
    aten.native_layer_norm.default: [
        call(f(4, 3, 5), [5], f(5), f(5), 1e-5),
        call(f(4, 3, 5), [3, 5], None, None, 1e-5),
    ],
    aten.rms_norm.default: [call(f(4, 3, 5), [5], f(5)), call(f(4, 3, 5), [3, 5], None, 1e-3)],
    aten._fused_rms_norm.default: [call(f(4, 3, 5), [5], f(5), 1e-6)],
    aten.group_norm.default: [
        call(f(4, 6, 5), 3, f(6), f(6)),
        call(f(3, 4, 3, 5), 2),
        call(f(2, 4, 3), 4, f(4), None, 1e-3),
    ],
    aten._native_batch_norm_legit_functional.default: [
        call(f(5, 4, 3) + 7, f(4), f(4), f(4), unit(4), True, 0.1, 1e-5),
        call(f(3, 5, 2, 4), None, None, f(5), unit(5), True, 0.3, 1e-3),
        call(f(6, 4), f(4), f(4), f(4), unit(4), True, 0.1, 1e-5),
        call(f(6, 4), f(4), f(4), f(4), unit(4), False, 0.1, 1e-5),
    ],
    aten._native_batch_norm_legit.no_stats: [call(f(5, 4, 3), f(4), f(4), True, 0.1, 1e-5)],
    aten._native_batch_norm_legit_no_training.default: [call(f(5, 4, 3), f(4), f(4), f(4), unit(4), 0.1, 1e-5)],
    aten._weight_norm.default: [call(f(4, 3, 2), unit(4, 1, 1)), call(f(4, 3), unit(1, 3), 1), call(f(4, 3), f(), -1)],
    aten.instance_norm.default: [
        call(_IMAGE, f(6), f(6), None, None, True, 0.1, 1e-5, False),
        call(_IMAGE, None, None, f(6), unit(6), False, 0.1, 1e-5, False),
    ],
}


RANDOM: dict[Any, list[Sample]] = {
    aten.dropout.default: [call(f(4, 3, 5), 0.4, True), call(f(4, 3), 0.4, False)],
    aten.native_dropout.default: [
        call(f(4, 3, 5), 0.4, True),
        call(f(4, 3), 0.4, False),
        call(f(4, 3), 0.0, True),
        call(f(4, 3), 1.0, True),
    ],
    aten.rand_like.default: [call(f(4, 5)), call(f(4, 5), dtype=torch.float32)],
    aten.randn_like.default: [call(f(4, 5))],
    aten.randint_like.default: [call(f(4, 5), 9)],
    aten.randint_like.low_dtype: [call(f(4, 5), 3, 9, dtype=torch.int64)],
    aten.bernoulli.p: [call(f(4, 5), 0.3)],
    aten.uniform.default: [call(f(4, 5), -1.0, 2.0), call(f(4, 5), **{"from": 0.5})],
    aten.exponential.default: [call(f(4, 5), 2.0)],
    aten.normal_functional.default: [call(f(4, 5), 1.0, 2.0)],
    aten.geometric.default: [call(f(4, 5), 0.3)],
    aten.cauchy.default: [call(f(4, 5))],
    aten.log_normal.default: [call(f(4, 5))],
    aten.random.default: [call(f(4, 5))],
    aten.random.to: [call(f(4, 5), 7)],
    getattr(aten.random, "from"): [call(f(4, 5), 3, 7)],
    aten.rand.default: [call([4, 5], dtype=torch.float64)],
    aten.randn.default: [call([4, 5])],
    aten.randint.default: [call(9, [4, 5])],
    aten.randint.low: [call(3, 9, [4, 5])],
    aten.randperm.default: [call(7)],
    aten.normal.float_float: [call(1.0, 2.0, [4, 5])],
    aten.bernoulli.default: [call(unit(4, 5))],
    aten.multinomial.default: [call(unit(4, 5), 3, True), call(unit(4, 5), 1), call(unit(4, 5), 3), call(unit(5), 2)],
    aten.normal.Tensor_float: [call(f(4, 5), 2.0)],
    aten.normal.Tensor_Tensor: [call(f(4, 5), unit(4, 5))],
    aten.normal.float_Tensor: [call(0.5, unit(4, 5))],
    aten.poisson.default: [call(unit(4, 5))],
    aten.rrelu_with_noise_functional.default: [
        call(f(4, 5), torch.zeros(4, 5, dtype=torch.float64), 0.1, 0.4, train) for train in (True, False)
    ],
    aten.binomial.default: [call(torch.full((4, 5), 6.0), torch.full((4, 5), 0.4))],
}


COPIES: dict[Any, list[Sample]] = {
    torch.ops.autoshard.part_of_batch.default: [call(f(4, 5), 0, 2), call(f(7, 6, 5), 1, 3)],
}


class Straight(torch.autograd.Function):
    """Rounds, and hands the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, digits: int) -> torch.Tensor:
        return x.round(decimals=digits)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None


WHOLE = {
    exactly._opoverload: [call(f(4, 5), [4, 5], "model.py:1")],
    function_op._opoverload: [call("special_samples:Straight", [f(4, 5)], "[(True, None), (False, 1)]", "")],
    ctc_loss._opoverload: [
        call(
            unit(6, 3, 5).log(),
            torch.tensor([[1, 2], [3, 3], [4, 0]]),
            torch.tensor([6, 6, 5]),
            torch.tensor([2, 2, 1]),
        ),
        call(unit(6, 2, 5).log(), torch.tensor([1, 2, 4]), torch.tensor([6, 6]), torch.tensor([2, 1]), 0, True),
    ],
}


SAMPLES = {
    op: calls
    for table in (EMBEDDINGS, CLASSIFICATION, SOFTMAX, LOSSES, ATTENTION, ORDERS, NORMS, RANDOM, COPIES, WHOLE)
    for op, calls in table.items()
}

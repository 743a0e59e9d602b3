"""Samples of reductions, scans and ops that order a dim.

On 2 and 3 ranks lengths of 4 to 7 give parts that are even, uneven, and empty (4 on 3 ranks are 2, 2 and 0). Equal
elements stand on several ranks, special values on one.
"""

from __future__ import annotations

import math

import torch
from sample_makers import Sample, b, call, distinct, f, i, unit, z

d = distinct(3, 4, 6)
row = distinct(7)
equal = i(3, 4, 7).double()
"""ties in every row, across all ranks"""
odd = torch.tensor([[1, math.nan, 2, 0, 3, math.nan], [-math.inf, 0, 1, 1, -1, 0], [math.inf, 1, 1, 2, 0, 1]]).double()
holes = torch.where(b(4, 7), f(4, 7), 0)
"""zeros, on which products and norms have gradients of their own"""
level = torch.tensor([[2.0] * 5, [0.0] * 5, [1, 2, 1, 2, 2]]).double()
"""rows of no deviation"""

_ORDERS = (2, 1, 3.5, 0, 0.5, math.inf, -math.inf, -1, -2.5)
_norms = [call(f(4, 5), p, [1]) for p in _ORDERS] + [
    call(f(4, 3, 5), 2, [0, -1], True),
    call(f(4, 5), 2),
    call(f(4, 3), 2, []),
    call(f(4), 2, [0]),
    call(holes, 2, [1]),
    call(holes * 0, 2, [1]),
    call(equal, math.inf, [1]),
    call(equal, -math.inf),
    call(z(4, 5), 2, [1]),
    call(z(4, 5), math.inf, [0], True),
]
_extremes = [
    call(d, [1]),
    call(d, []),
    call(d, [0, 2], True),
    call(equal, [1]),
    call(equal),
    call(odd, [-1]),
    call(i(9, 4, 5), [0]),
]
_flags = [call(b(4, 5), 1), call(i(2, 4, 5), 0, True), call(unit(4, 3) > 2, -1), call(i(2, 4).to(torch.uint8), 0)]
_moments = [call(f(3, 4)), call(f(3, 4), False)]
_along = [
    call(f(3, 4, 2), [1]),
    call(level, [-1]),
    call(f(7) + 1e4, [0], False),
    call(f(4, 3), [0, 1], True, True),
]
_corrected = [
    call(f(3, 4, 2), [1], correction=0, keepdim=True),
    call(f(3, 4)),
    call(level, [1], correction=2.5),
    call(f(4, 5, 3), [0, -1], correction=1),
]

REDUCE: dict[str, list[Sample]] = {
    "sum.default": [call(f(3, 4)), call(b(3, 4)), call(f())],
    "sum.dim_IntList": [call(f(3, 4, 2), [1]), call(f(3, 4, 2), [-1, 0], True), call(f(3, 4), []), call(b(3, 4), [0])],
    "nansum.default": [call(f(3, 4), [1])],
    "mean.default": [call(f(3, 4)), call(f(3, 4), dtype=torch.float64)],
    "mean.dim": [call(f(3, 4, 2), [1]), call(f(5, 4, 2), [-1, 0], True), call(f(3, 4), None)],
    **{f"{op}.default": _extremes for op in ("amax", "amin")},
    **{f"{op}.default": [call(distinct(4, 6)), call(equal), call(f())] for op in ("max", "min")},
    "aminmax.default": [call(d, dim=1), call(d), call(equal, dim=-1, keepdim=True)],
    **{f"{op}.dim": [call(d, 1), call(d, -1, True), *_flags] for op in ("any", "all")},
    **{f"{op}.default": [call(b(4, 3)), call(holes), call(i(2, 5)), call(b())] for op in ("any", "all")},
    **{
        f"{op}.dims": [call(b(3, 4, 2), [0, 2]), call(i(2, 3, 4), [-1], True), call(b(4, 3), [])]
        for op in ("any", "all")
    },
    **{f"{op}.default": [call(distinct(4, 3))] for op in ("median", "nanmedian")},
    "prod.default": [call(distinct(4, 3)), call(holes), call(i(3, 5) + 1), call(f())],
    "prod.dim_int": [
        call(f(3, 4, 2), 1),
        call(f(3, 4), 0, True),
        call(holes, -1),
        call(b(4, 5), 1),
        call(f(4, 5).float(), 1, dtype=torch.float64),
    ],
    **{f"{op}.default": _moments for op in ("var", "std", "var_mean", "std_mean")},
    **{f"{op}.dim": _along for op in ("var", "std", "var_mean", "std_mean")},
    **{f"{op}.correction": _corrected for op in ("var", "std", "var_mean", "std_mean")},
    "logsumexp.default": [
        call(f(3, 4, 2), [1]),
        call(f(3, 4, 2), [0, 1], True),
        call(f(4, 5) * 300, [-1]),
        call(torch.where(b(3, 7), f(3, 7), -math.inf), [1]),
        call(i(4, 3, 5), [1]),
    ],
    "linalg_vector_norm.default": [*_norms, call(f(3, 4).float(), 2, [1], dtype=torch.float64), call(f(2, 3, 4), 3)],
    "norm.Scalar": [call(f(3, 4), 2), call(f(5, 3), 1), call(equal, math.inf)],
    "norm.ScalarOpt_dim": [call(f(3, 4), None, [0], True), *_norms[:9]],
    "norm.ScalarOpt_dim_dtype": [call(f(3, 4), 2, [1], False, dtype=torch.float64)],
    "norm.ScalarOpt_dtype": [call(f(3, 4), None, dtype=torch.float64)],
    "linalg_norm.default": [call(f(3, 4), None, [1]), call(f(3, 4))],
    "frobenius_norm.dim": [call(f(3, 4, 2), [1, 2]), call(f(4, 3), [0], True)],
    "count_nonzero.dim_IntList": [call(i(2, 3, 4), [1]), call(holes, [0, 1])],
    "count_nonzero.default": [call(i(2, 3, 4)), call(i(2, 3, 4), 0)],
    "nanmean.default": [call(f(3, 4), [1])],
    "cosine_similarity.default": [call(f(4, 3), f(4, 3)), call(f(2, 3, 4), f(3, 1), 1)],
    "linalg_cross.default": [call(f(4, 3), f(4, 3)), call(f(3, 5), f(3, 5), dim=0)],
    "histc.default": [call(unit(4, 5), 4, 0, 1), call(unit(7), 3)],
    "bincount.default": [call(i(6, 7)), call(i(5, 4), f(4), 3), call(i(3, 5), None, 9)],
    "quantile.scalar": [call(d, 0.3, 1), call(distinct(4, 5), 0.4)],
    "nanquantile.scalar": [call(d, 0.3, 1, True)],
}

_scans = [call(unit(3, 4), 1), call(unit(3, 4, 2), 0), call(unit(2, 7, 3), -2), call(f(5), 0), call(f(4), -1)]
_counted = [call(i(3, 4, 5), 1), call(b(5, 3), 0), call(i(3, 7).to(torch.int32), 0, dtype=torch.float64), call(f(), 0)]
SCAN: dict[str, list[Sample]] = {
    "cumsum.default": [*_scans, *_counted, call(odd, 1)],
    "cumprod.default": [*_scans, *_counted, call(holes, 1), call(holes, 0)],
    "logcumsumexp.default": [*_scans, call(f(3, 7) * 300, 1), call(odd[:2], 1), call(f(), 0)],
    **{
        f"{op}.default": [call(d, 1), call(row, 0), call(equal, -1), call(equal, 0), call(odd, 1), call(i(3, 2, 7), 1)]
        for op in ("cummax", "cummin")
    },
}

_best = [call(d, 1), call(d, -1, True), call(equal, 1), call(equal, 0, True), call(odd, 1), call(i(4, 4, 5), 1)]
_few = [call(b(4, 5), 1), call(row, 0), call(f(), 0)]
RANK: dict[str, list[Sample]] = {
    **{f"{op}.dim": [*_best, *_few] for op in ("max", "min")},
    **{f"{op}.dim": [call(d, 1), call(d, -1, True)] for op in ("median", "nanmedian")},
    **{
        f"{op}.default": [*_best, call(row, 0), call(equal), call(equal.t()), call(odd, None, True), call(i(4, 3, 5))]
        for op in ("argmax", "argmin")
    },
    "topk.default": [
        call(d, 2),
        call(d, 2, 1),
        call(d, 4, -2, False),
        call(row, 1),
        call(row, 3, 0, False),
        call(row, 7),
        call(distinct(5, 4), 3, 0),
        call(distinct(4, 3).long(), 0),
        call(torch.tensor([[1, math.nan, 2, -math.inf, 0], [math.inf, 3, -math.inf, 1, 2]]).double(), 4),
    ],
    "sort.default": [call(d), call(d, 0, True)],
    "sort.stable": [call(d, stable=True, dim=1)],
    "argsort.default": [call(d, 1)],
    "argsort.stable": [call(d, stable=True, dim=1)],
    "kthvalue.default": [call(d, 2), call(d, 2, 1, True)],
    "mode.default": [call(d), call(d, 0)],
}

"""Samples of ops that slide windows over positions. Lengths that no ranks divide, windows longer than a chunk."""

from __future__ import annotations

from typing import Any

import torch
from sample_makers import Sample, call, distinct, f

from autoshard.passes.rules.families import windows

aten = torch.ops.aten


def _conv(spatial: int) -> list[Sample]:
    x = (5, 4, 3)[:spatial]
    return [
        call(f(3, 6, *x), f(4, 6, *(2,) * spatial), f(4), [2] * spatial, [1] * spatial),
        call(f(2, 4, *x), f(6, 4, *(3,) * spatial)),
        call(f(4, *x), f(6, 4, *(2,) * spatial), f(6)),
        call(f(2, 6, *x), f(12, 1, *(2,) * spatial), f(12), groups=6),
        call(f(2, 12, *x), f(6, 4, *(2,) * spatial), None, groups=3),
    ]


def _windows(kernel: int, stride: int, padding: int, dilation: int, lengths: tuple[int, ...]) -> list[Sample]:
    """conv1d with these windows over operands of these lengths."""
    return [call(f(1, 1, n), f(1, 1, kernel), f(1), [stride], [padding], [dilation]) for n in lengths]


_LINES = [
    *_windows(3, 1, 1, 1, (7, 8, 3)),
    *_windows(3, 2, 1, 1, (11, 13, 6)),
    *_windows(4, 4, 0, 1, (16, 23, 25)),  # patches: no halo, or none but for the cut's unevenness
    *_windows(2, 5, 0, 1, (31, 14)),  # positions that nobody reads
    *_windows(3, 1, 6, 4, (9, 4)),  # windows longer than chunks, and wholly outside
    *_windows(7, 3, 3, 2, (17, 20)),
    *_windows(4, 1, 3, 1, (10,)),  # causal, with a tail
    *_windows(2, 1, 3, 1, (2,)),  # more results than positions: a rank may hold none
]
_PLANES = [
    call(f(1, 2, 7, 8), f(2, 2, 3, 3), f(2), [2, 1], [1, 2], [1, 2]),
    call(f(1, 2, 9, 5), f(2, 1, 3, 2), None, [1, 2], [2, 0], [2, 1], 2),
]


def _transposed(spatial: int) -> list[Sample]:
    x = (4, 3, 2)[:spatial]
    return [
        call(f(3, 6, *x), f(6, 4, *(2,) * spatial), f(4), [2] * spatial),
        call(f(2, 6, *x), f(6, 2, *(2,) * spatial), f(12), groups=6),
    ]


def _spread(
    kernel: int, stride: int, padding: int, extra: int, dilation: int, lengths: tuple[int, ...]
) -> list[Sample]:
    """conv_transpose1d with these windows over operands of these lengths."""
    windows = ([stride], [padding], [extra], 1, [dilation])
    return [call(f(1, 1, n), f(1, 1, kernel), f(1), *windows) for n in lengths]


_SPREAD_LINES = [
    *_spread(3, 1, 0, 0, 1, (5, 6)),
    *_spread(4, 2, 1, 0, 1, (5, 7)),
    *_spread(3, 2, 1, 1, 1, (4, 7)),
    *_spread(2, 4, 0, 3, 1, (5, 3)),  # results that only the bias makes
    *_spread(3, 2, 3, 0, 3, (6, 4)),
    *_spread(5, 3, 2, 2, 2, (5,)),
]

_ONE = ([1, 1], [0, 0], [1, 1])
CONVOLUTIONS: dict[Any, list[Sample]] = {
    aten.conv1d.default: [*_conv(1), *_LINES],
    aten.conv2d.default: [*_conv(2), *_PLANES],
    aten.conv3d.default: _conv(3),
    aten.conv1d.padding: [
        call(f(2, 4, 5), f(6, 4, 3), f(6), [1], "same"),
        call(f(1, 2, 7), f(2, 2, 4), f(2), [1], "same", [3]),
        call(f(1, 2, 11), f(2, 2, 3), f(2), [2], "valid", [2]),
    ],
    aten.conv2d.padding: [
        call(f(2, 4, 5, 4), f(6, 4, 3, 3), f(6), [1, 1], "same"),
        call(f(1, 2, 5, 6), f(2, 2, 2, 4), None, [1, 1], "same"),
    ],
    aten.conv3d.padding: [call(f(2, 4, 3, 3, 3), f(6, 2, 3, 3, 3), f(6), [1, 1, 1], "same", groups=2)],
    aten.conv_transpose1d.default: [*_transposed(1), *_SPREAD_LINES],
    aten.conv_transpose2d.input: [
        *_transposed(2),
        call(f(1, 2, 5, 4), f(2, 2, 3, 4), f(2), [2, 3], [1, 0], [1, 2], 1, [1, 1]),
    ],
    aten.conv_transpose3d.input: _transposed(3),
    aten.convolution.default: [
        call(f(3, 6, 5, 4), f(4, 6, 2, 2), f(4), *_ONE, False, [0, 0], 1),
        call(f(3, 6, 4, 3), f(6, 4, 2, 2), f(4), *_ONE, True, [0, 0], 1),
        call(f(3, 6, 4, 3), f(6, 4, 2, 2), None, *_ONE, True, [0, 0], 3),
        call(f(1, 2, 7, 6), f(2, 2, 3, 3), f(2), [2, 1], [1, 2], [2, 1], True, [1, 0], 1),
    ],
}

_LINE, _PLANE, _SOLID = f(3, 6, 8), f(3, 6, 4, 6), f(2, 3, 4, 4, 6)
_LONG, _ODD = distinct(1, 2, 19), distinct(1, 2, 7, 10)


def _shaped(name: str) -> torch.Tensor:
    """An operand with as many position dims as the op's name tells."""
    return next(x for d, x in (("1d", _LINE), ("2d", _PLANE), ("3d", _SOLID)) if d in name)


def _pooled(name: str) -> list[Sample]:
    x = _shaped(name)
    window = [2] * (x.dim() - 2)
    samples = [call(x, window), call(x[0], window)]
    if "adaptive" in name:
        return [*samples, call(x, [1] * len(window)), call(x, list(x.shape[2:]))]
    return samples + (_slid_averages(name) if "avg" in name else _slid_maxima(name))


def _slid_maxima(name: str) -> list[Sample]:
    if "1d" in name:
        return [
            call(_LONG, [3], [2], [1]),
            call(_LONG, [4], [3], [2], [2]),
            call(_LONG, [3], [4], [0], [1], True),
            call(_LONG, [5], [2], [2], [1], True),
        ]
    if "3d" in name:
        return [call(_SOLID, [3, 2, 3], [2, 2, 1], [1, 0, 1])]
    return [
        call(_ODD, [3, 2], [2, 3], [1, 1]),
        call(_ODD, [2, 3], [2, 2], [0, 1], [1, 2], True),
        call(_ODD.int(), [3], [1], [1]),
    ]


def _slid_averages(name: str) -> list[Sample]:
    """ceil_mode and count_include_pad change what the windows at the ends are divided by."""
    modes = [(ceil, counted) for ceil in (False, True) for counted in (False, True)]
    if "1d" in name:
        return [call(_LONG, [k], [s], [p], *m) for k, s, p in ((3, 2, 1), (4, 3, 2), (5, 5, 0)) for m in modes]
    if "3d" in name:
        return [call(_SOLID, [3, 2, 3], [2, 2, 1], [1, 0, 1], True, False), call(_SOLID, 3, 2, 1, True, True, 7)]
    return [call(_ODD, [3, 4], [2, 3], [1, 2], *m) for m in modes] + [call(_ODD, 3, 2, 1, True, False, 5)]


def _resized(name: str) -> list[Sample]:
    x = _shaped(name)
    spatial, vec = x.dim() - 2, name.endswith(".vec")
    corners = [False] if "linear" in name or "cubic" in name else []
    samples = [call(x, [n + 3 for n in x.shape[2:]], *corners, *([None] if vec else []))]
    if "nearest" not in name:
        return samples
    odd = f(2, 2, *(5, 3, 2)[:spatial])
    samples += [call(odd, [2 * n for n in odd.shape[2:]], *([None] if vec else []))]
    samples += (
        [call(odd, None, [float(n) for n in (4, 2, 1)[:spatial]]), call(odd, None, [1.7] * spatial)] if vec else []
    )
    return samples


def _padded(name: str) -> list[Sample]:
    x = _shaped(name)
    return [call(x, [1] * (2 * (x.dim() - 2))), call(x[0], [1] * (2 * (x.dim() - 2)))]


def _of(name: str) -> list[Sample]:
    return (_pooled if "pool" in name else _resized if "upsample" in name else _padded)(name)


SAMPLES = CONVOLUTIONS | {rule.op: _of(str(rule.op).removeprefix("aten.")) for rule in windows.POOL_RULES}

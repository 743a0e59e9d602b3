"""Concrete calls for every rule: dims of 2 to 6, some of them uneven for 2 and for 3 ranks, some of length 1."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.passes.rules import pointwise

aten = torch.ops.aten
Sample = tuple[tuple[Any, ...], dict[str, Any]]

_random = torch.Generator().manual_seed(7)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_random, dtype=torch.float64)


def unit(*shape: int) -> torch.Tensor:
    """In (0.2, 0.9), where most functions are defined."""
    return torch.rand(shape, generator=_random, dtype=torch.float64) * 0.7 + 0.2


def z(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_random, dtype=torch.complex128)


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_random)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_random) < 0.5


def distinct(*shape: int) -> torch.Tensor:
    """No two elements equal, so that order and extremes are unique."""
    n = int(torch.tensor(shape).prod())
    return (torch.randperm(n, generator=_random).double() - n / 2).view(shape) / 3


def call(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


# Elementwise ops: samples from the schema.

NO_DERIVATIVE = {
    *("nextafter", "heaviside", "gcd", "lcm", "igamma", "igammac", "special_zeta", "isclose", "floor_divide"),
    *("frexp", "log_sigmoid_forward", "special_ndtri", "special_log_ndtr", "special_erfcx", "special_i1e"),
    *("copy", "remainder.Scalar_Tensor", "view.dtype"),
}
_INTEGER = ("bitwise", "__", "gcd", "lcm")
_FIRST_BOOL = {"where"}
_SECOND_BOOL = {"masked_fill"}
SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (((4, 3),) * 3, ((2, 3, 4), (3, 1), (2, 1, 4)), ((3, 1), (5,), ()))


def _operand(name: str, position: int, shape: tuple[int, ...]) -> torch.Tensor:
    if (name in _FIRST_BOOL and position == 0) or (name in _SECOND_BOOL and position == 1):
        return b(*shape)
    if name.startswith(_INTEGER):
        return i(4, *shape) + 1
    return unit(*shape)


_SCALARS = {"polygamma": 1, "mvlgamma": 1, "round": 1}


def elementwise_samples(op: torch._ops.OpOverload) -> list[Sample]:
    """Equal shapes, and shapes that broadcast, for every tensor argument; a constant for every required number."""
    name = op._schema.name.removeprefix("aten::")
    found = []
    for shapes in SHAPES:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        count = 0
        for a in op._schema.arguments:
            if "Tensor" in str(a.type):
                value: Any = _operand(name, count, shapes[count])
                count += 1
            elif a.has_default_value() or str(a.type).startswith("Optional"):
                continue
            else:
                value = _SCALARS.get(name, 2 if name.startswith(_INTEGER) or str(a.type) == "int" else 0.4)
            if a.kwarg_only:
                kwargs[a.name] = value
            else:
                args.append(value)
        found.append((tuple(args), kwargs))
    return found


_OWN: dict[torch._ops.OpOverload, list[Sample]] = {
    aten.to.dtype: [call(f(4, 3), torch.float32), call(i(9, 4, 3), torch.float64), call(f(4, 3), torch.int64)],
    aten.to.device: [call(f(4, 3), torch.device("cpu"), torch.float64)],
    aten.to.dtype_layout: [call(f(4, 3), dtype=torch.float64)],
    aten._to_copy.default: [call(f(4, 3), dtype=torch.float64), call(f(4, 3), dtype=torch.int32)],
    aten.div.Tensor_mode: [call(unit(4, 3), unit(3), rounding_mode=m) for m in (None, "floor", "trunc")],
    aten.div.Scalar_mode: [call(unit(4, 3), 0.3, rounding_mode=m) for m in (None, "floor")],
    aten.divide.Tensor_mode: [call(unit(4, 3), unit(3), rounding_mode="floor")],
    aten.divide.Scalar_mode: [call(unit(4, 3), 0.3, rounding_mode="floor")],
    aten.add.Tensor: [call(f(4, 3), f(4, 3), alpha=2), call(f(2, 4, 3), f(4, 1)), call(f(4, 3), 1.5), call(f(3), f())],
    aten.sub.Tensor: [call(f(4, 3), f(4, 3), alpha=2), call(f(2, 4, 3), f(4, 1)), call(i(9, 4, 3), 1)],
    aten.mul.Tensor: [call(f(4, 3), f(4, 3)), call(f(2, 4, 1), f(4, 3)), call(f(4, 3), 1.5), call(i(5, 4), b(4))],
    aten.div.Tensor: [call(f(4, 3), unit(4, 3)), call(i(9, 4, 3), 3), call(f(4, 3), unit(3))],
    aten.where.ScalarOther: [call(b(4, 3), f(4, 3), s) for s in (0, 1.5)],
    aten.where.ScalarSelf: [call(b(4, 3), s, f(3)) for s in (0, 1.5)],
    aten.where.Scalar: [call(b(4, 3), 0.5, 1.5)],
    aten.masked_fill.Scalar: [call(f(4, 3), b(4, 3), 0), call(f(2, 4, 3), b(4, 1), -1e4)],
    aten.masked_fill.Tensor: [call(f(4, 3), b(3), f())],
    aten.copy.default: [call(f(4, 3), f(4, 3)), call(f(2, 4, 3), f(4, 1))],
    aten.fill.Tensor: [call(f(4, 3), f())],
    aten.clamp.Tensor: [call(f(4, 3), unit(3)), call(f(4, 3), None, unit(4, 1))],
    aten.clip.Tensor: [call(f(4, 3), unit(3)), call(f(4, 3), None, unit(4, 1))],
    aten.clamp.default: [call(f(4, 3), -0.5, 0.5), call(f(4, 3), max=0.1)],
    aten.clip.default: [call(f(4, 3), -0.5, 0.5)],
    aten.logical_and.default: [call(b(4, 3), b(3))],
    aten.eq.Tensor: [call(i(3, 4, 3), i(3, 3))],
    aten.bitwise_not.default: [call(b(4, 3)), call(i(4, 4, 3))],
    aten.complex.default: [call(f(4, 3), f(4, 3))],
    aten.view_as_real.default: [call(z(4, 3))],
    aten.view_as_complex.default: [call(f(4, 3, 2))],
    aten._conj.default: [call(z(4, 3))],
    aten.real.default: [call(z(4, 3))],
    aten.imag.default: [call(z(4, 3))],
    aten.prelu.default: [call(f(4, 3, 2), f(3)), call(f(4, 3), f(1))],
    aten.special_zeta.other_scalar: [call(unit(4, 3) + 1.5, 2.0)],
}

ELEMENTWISE = {
    rule.op: _OWN.get(rule.op, elementwise_samples(rule.op)) for rule in pointwise.RULES if rule.op not in _OWN
}

MATMUL: dict[torch._ops.OpOverload, list[Sample]] = {
    aten.linear.default: [
        call(f(2, 5, 4), f(6, 4), f(6)),
        call(f(3, 4), f(5, 4)),
        call(f(4), f(6, 4), f(6)),
    ],
    aten.mm.default: [call(f(4, 5), f(5, 3))],
    aten.bmm.default: [call(f(3, 4, 5), f(3, 5, 2))],
    aten.mv.default: [call(f(4, 5), f(5))],
    aten.dot.default: [call(f(5), f(5))],
    aten.vdot.default: [call(f(5), f(5))],
    aten.outer.default: [call(f(5), f(4))],
    aten.ger.default: [call(f(5), f(4))],
    aten.addmm.default: [call(f(4, 3), f(4, 5), f(5, 3)), call(f(3), f(4, 5), f(5, 3), beta=2, alpha=3)],
    aten.addmv.default: [call(f(4), f(4, 5), f(5))],
    aten.baddbmm.default: [call(f(2, 4, 3), f(2, 4, 5), f(2, 5, 3)), call(f(2, 1, 3), f(2, 4, 5), f(2, 5, 3), beta=2)],
    aten.addbmm.default: [call(f(4, 3), f(2, 4, 5), f(2, 5, 3), alpha=2)],
    aten.matmul.default: [
        call(f(4, 5), f(5, 3)),
        call(f(5), f(5)),
        call(f(5), f(5, 4)),
        call(f(4, 5), f(5)),
        call(f(2, 3, 4, 5), f(5, 3)),
        call(f(2, 3, 4, 5), f(3, 5, 2)),
        call(f(2, 1, 4, 5), f(2, 3, 5, 2)),
        call(f(2, 4, 5), f(5)),
        call(f(5), f(3, 5, 4)),
        call(f(4, 3), f(2, 3, 5)),
    ],
    aten.einsum.default: [
        call("bij,bjk->bik", [f(2, 3, 4), f(2, 4, 5)]),
        call("bij,bjk", [f(2, 3, 4), f(2, 4, 5)]),
        call("...ij,...jk->...ik", [f(2, 3, 4, 5), f(3, 5, 2)]),
        call("ii->i", [f(4, 4)]),
        call("bhqd,bhkd->bhqk", [f(2, 3, 4, 2), f(2, 3, 5, 2)]),
        call("ij->", [f(4, 5)]),
        call("i,j,k->ijk", [f(2), f(3), f(4)]),
        call("bi,oij,bj->bo", [f(3, 2), f(4, 2, 5), f(3, 5)]),
    ],
    aten.bilinear.default: [call(f(4, 2), f(4, 3), f(5, 2, 3), f(5)), call(f(3, 2), f(3, 3), f(4, 2, 3))],
    aten.cdist.default: [call(f(2, 4, 3), f(2, 5, 3)), call(f(4, 3), f(5, 3))],
    aten.linalg_inv.default: [call(f(3, 2, 2) + 3 * torch.eye(2))],
    aten.inverse.default: [call(f(3, 2, 2) + 3 * torch.eye(2))],
    aten.matrix_exp.default: [call(f(3, 2, 2))],
    aten.linalg_det.default: [call(f(3, 2, 2))],
    aten.logdet.default: [call(f(3, 2, 2) + 3 * torch.eye(2))],
    aten.linalg_slogdet.default: [call(f(3, 2, 2))],
    aten.linalg_cholesky.default: [call(f(3, 2, 2) * 0.1 + 3 * torch.eye(2))],
    aten._grouped_mm.default: [
        call(f(7, 16).bfloat16(), f(5, 16, 24).bfloat16(), torch.tensor([2, 2, 5, 6, 7], dtype=torch.int32)),
    ],
    aten.tensordot.default: [call(f(2, 3, 4), f(4, 3, 5), [2, 1], [0, 1]), call(f(2, 3), f(3, 4), [1], [0])],
}

d = distinct(3, 4, 6)
REDUCE: dict[str, list[Sample]] = {
    "sum.default": [call(f(3, 4)), call(b(3, 4)), call(f())],
    "sum.dim_IntList": [call(f(3, 4, 2), [1]), call(f(3, 4, 2), [-1, 0], True), call(f(3, 4), []), call(b(3, 4), [0])],
    "nansum.default": [call(f(3, 4), [1])],
    "mean.default": [call(f(3, 4)), call(f(3, 4), dtype=torch.float64)],
    "mean.dim": [call(f(3, 4, 2), [1]), call(f(5, 4, 2), [-1, 0], True), call(f(3, 4), None)],
    "amax.default": [call(d, [1]), call(d, [0, 2], True)],
    "amin.default": [call(d, [1]), call(d, [0, 2], True)],
    "max.default": [call(distinct(4, 6))],
    "min.default": [call(distinct(4, 6))],
    **{f"{op}.dim": [call(d, 1), call(d, -1, True)] for op in ("max", "min", "median", "nanmedian", "any", "all")},
    **{f"{op}.default": [call(d), call(d, 1), call(d, 0, True)] for op in ("argmax", "argmin")},
    **{f"{op}.default": [call(distinct(4, 3))] for op in ("any", "all", "prod", "median", "nanmedian")},
    **{f"{op}.dims": [call(b(3, 4, 2), [0, 2])] for op in ("any", "all")},
    "prod.dim_int": [call(f(3, 4, 2), 1), call(f(3, 4), 0, True)],
    **{f"{op}.default": [call(f(3, 4)), call(f(3, 4), False)] for op in ("var", "std", "var_mean", "std_mean")},
    **{f"{op}.dim": [call(f(3, 4, 2), [1])] for op in ("var", "std", "var_mean", "std_mean")},
    **{
        f"{op}.correction": [call(f(3, 4, 2), [1], correction=0, keepdim=True), call(f(3, 4))]
        for op in ("var", "std", "var_mean", "std_mean")
    },
    "logsumexp.default": [call(f(3, 4, 2), [1]), call(f(3, 4, 2), [0, 1], True)],
    "norm.Scalar": [call(f(3, 4), 2)],
    "norm.ScalarOpt_dim": [call(f(3, 4), 2, [1]), call(f(3, 4), None, [0], True)],
    "linalg_vector_norm.default": [call(f(3, 4)), call(f(3, 4), 2, [1], True)],
    "aminmax.default": [call(d, dim=1), call(d)],
    "count_nonzero.dim_IntList": [call(i(2, 3, 4), [1])],
    "count_nonzero.default": [call(i(2, 3, 4)), call(i(2, 3, 4), 0)],
    "nanmean.default": [call(f(3, 4), [1])],
    **{f"{op}.default": [call(unit(3, 4), 1), call(unit(3, 4, 2), 0)] for op in ("cumsum", "cumprod", "logcumsumexp")},
    **{f"{op}.default": [call(d, 1)] for op in ("cummax", "cummin")},
    "sort.default": [call(d), call(d, 0, True)],
    "sort.stable": [call(d, stable=True, dim=1)],
    "argsort.default": [call(d, 1)],
    "argsort.stable": [call(d, stable=True, dim=1)],
    "topk.default": [call(d, 2), call(d, 2, 1)],
    "kthvalue.default": [call(d, 2), call(d, 2, 1, True)],
    "mode.default": [call(d), call(d, 0)],
    "histc.default": [call(unit(4, 5), 4, 0, 1), call(unit(7), 3)],
    "norm.ScalarOpt_dim_dtype": [call(f(3, 4), 2, [1], False, dtype=torch.float64)],
    "linalg_norm.default": [call(f(3, 4), None, [1]), call(f(3, 4))],
    "frobenius_norm.dim": [call(f(3, 4, 2), [1, 2])],
    "quantile.scalar": [call(d, 0.3, 1), call(distinct(4, 5), 0.4)],
    "nanquantile.scalar": [call(d, 0.3, 1, True)],
}

SHAPE: dict[str, list[Sample]] = {
    **{
        f"{op}.default": [
            call(f(2, 6, 4), [2, -1]),
            call(f(4, 6, 4), [-1, 4]),
            call(f(2, 3, 12), [2, 3, 4, 3]),
            call(f(6, 4), [4, 6]),
            call(f(1, 5, 4), [5, 1, 4]),
            call(f(4, 2, 3, 5), [4, 6, 5]),
            call(f(3, 4), [1, 3, 2, 2, 1]),
        ]
        for op in ("view", "reshape", "_unsafe_view", "view_copy")
    },
    "view_as.default": [call(f(6, 4), f(6, 2, 2))],
    "reshape_as.default": [call(f(6, 4), f(3, 2, 4))],
    "flatten.using_ints": [call(f(2, 6, 4), 1), call(f(4, 3, 2))],
    "ravel.default": [call(f(4, 3))],
    "unsqueeze.default": [call(f(4, 3), 1), call(f(3, 5), -1)],
    "unflatten.int": [call(f(2, 6, 4), 1, [2, -1]), call(f(6, 3), 0, [3, 2])],
    "squeeze.default": [call(f(2, 1, 3, 1)), call(f(3, 4))],
    "squeeze.dim": [call(f(2, 1, 3), 1), call(f(2, 3), 0)],
    "squeeze.dims": [call(f(2, 1, 3, 1), [0, 1])],
    "expand.default": [call(f(2, 1, 3), [2, 4, -1]), call(f(1, 3), [5, 2, 3])],
    "expand_as.default": [call(f(2, 1, 3), f(2, 4, 3))],
    "broadcast_to.default": [call(f(1, 3), [4, 3])],
    "repeat.default": [call(f(2, 1, 3), [1, 4, 2]), call(f(3), [5, 1]), call(f(1, 4), [6, 1])],
    "repeat_interleave.self_int": [call(f(4, 3), 2, 0), call(f(2, 6), 3, 1, output_size=18), call(f(4, 3), 2)],
    "transpose.int": [call(f(2, 3, 4), 1, 2), call(f(2, 3, 4), 0, -1)],
    "swapdims.default": [call(f(2, 3, 4), 0, 1)],
    "swapaxes.default": [call(f(2, 3, 4), 0, 1)],
    "t.default": [call(f(4, 3)), call(f(4))],
    "numpy_T.default": [call(f(2, 3, 4))],
    "mT.default": [call(f(2, 3, 4))],
    "permute.default": [call(f(2, 3, 4), [2, 0, -2])],
    "movedim.int": [call(f(2, 3, 4), 0, -1), call(f(2, 3, 4), 2, 0)],
    "movedim.intlist": [call(f(2, 3, 4), [0, 1], [2, 0])],
    "slice.Tensor": [call(f(4, 6), 1, 1, 5, 2), call(f(4, 3), 0, 0, 2**63 - 1), call(f(4, 3), -1, 1)],
    "narrow.default": [call(f(4, 3), 1, 0, 2)],
    "flip.default": [call(f(4, 3), [0])],
    "roll.default": [call(f(4, 3), [1], [0]), call(f(4, 3), [2])],
    "tril.default": [call(f(2, 4, 3)), call(f(2, 4, 3), 1)],
    "triu.default": [call(f(2, 4, 3)), call(f(2, 4, 3), -1)],
    "diff.default": [call(f(4, 3)), call(f(4, 3), 1, 0), call(f(4, 3), 1, -1, f(4, 1))],
    "glu.default": [call(f(4, 6)), call(f(4, 3), 0)],
    "constant_pad_nd.default": [call(f(4, 3), [1, 2]), call(f(4, 3, 2), [0, 0, 1, 0], 1.5)],
    "pad.default": [call(f(4, 3), [1, 2]), call(f(4, 3), [0, 1], "constant", 2.0), call(f(2, 3, 4), [1, 1], "reflect")],
    **{
        f"{op}.default": [call([f(4, 3), f(4, 2)], 1), call([f(2, 3), f(1, 3), f(3, 3)]), call([f(4, 3), f(0)], -1)]
        for op in ("cat", "concat", "concatenate")
    },
    "stack.default": [call([f(4, 3), f(4, 3)]), call([f(4, 3), f(4, 3)], -1)],
    "split.Tensor": [call(f(4, 6), 4, 1), call(f(4, 3), 2)],
    "split.sizes": [call(f(4, 6), [1, 5], 1)],
    "split_with_sizes.default": [call(f(4, 6), [1, 5], 1)],
    "chunk.default": [call(f(4, 6), 3, -1)],
    "tensor_split.sections": [call(f(4, 5), 2, 1)],
    "tensor_split.indices": [call(f(4, 5), [2, 3], 1)],
    "unsafe_chunk.default": [call(f(4, 6), 3, -1)],
    "unsafe_split.Tensor": [call(f(4, 6), 4, 1)],
    "unsafe_split_with_sizes.default": [call(f(4, 6), [1, 5], 1)],
    "select.int": [call(f(4, 3, 2), 1, 2), call(f(4, 3), -1, -1)],
    "unbind.int": [call(f(4, 3)), call(f(4, 3), 1)],
    "diagonal.default": [call(f(2, 4, 4), 0, 1, 2), call(f(3, 4))],
    "tile.default": [call(f(2, 1, 3), [1, 4, 2]), call(f(3), [5, 1])],
    "slice_scatter.default": [call(f(4, 6), f(4, 2), 1, 1, 5, 2), call(f(4, 3), f(4, 3), 0)],
    "select_scatter.default": [call(f(4, 6), f(4), 1, 2)],
    **{f"{n}.default": [call(f(4, 3, 2), unit(4, 1, 1))] for n in ("_weight_norm", "_weight_norm_interface")},
    "view.dtype": [call(f(4, 3), torch.int64), call(f(4, 3), torch.int32)],
    "fliplr.default": [call(f(4, 3))],
    "flipud.default": [call(f(4, 3))],
    "meshgrid.default": [call([f(4), f(3)])],
    "meshgrid.indexing": [call([f(4), f(3), f(2)], indexing="xy"), call([f(4), f(5)], indexing="ij")],
    "broadcast_tensors.default": [call([f(4, 1), f(3)])],
    "pixel_shuffle.default": [call(f(2, 12, 4, 3), 2)],
    "pixel_unshuffle.default": [call(f(2, 4, 4, 6), 2)],
    "im2col.default": [
        call(f(3, 4, 5, 5), [2, 2], [1, 1], [0, 0], [1, 1]),
        call(f(4, 5, 5), [2, 2], [1, 1], [1, 0], [1, 1]),
    ],
    "col2im.default": [call(f(3, 16, 16), [5, 5], [2, 2], [1, 1], [0, 0], [1, 1])],
    **{f"fft_{n}.default": [call(z(4, 6)), call(z(4, 3), None, 0)] for n in ("fft", "ifft", "irfft", "hfft")},
    **{f"fft_{n}.default": [call(f(4, 6)), call(f(4, 3), None, 0)] for n in ("rfft", "ihfft")},
    **{f"fft_{n}.default": [call(z(4, 3, 2), None, [0])] for n in ("fftn", "ifftn", "irfftn")},
    "fft_rfftn.default": [call(f(4, 3, 2), None, [0, 1])],
    **{f"fft_{n}.default": [call(z(3, 4, 6))] for n in ("fft2", "ifft2", "irfft2")},
    "fft_rfft2.default": [call(f(3, 4, 6))],
    **{f"fft_{n}.default": [call(f(4, 3), [1])] for n in ("fftshift", "ifftshift")},
    "unfold.default": [call(f(4, 6), 1, 3, 2)],
}

INDEX: dict[str, list[Sample]] = {
    "index.Tensor": [
        call(f(5, 3), [i(5, 4)]),
        call(f(5, 3, 2), [None, i(3, 4)]),
        call(f(5, 3, 4), [i(5, 2, 1), None, i(4, 3)]),
        call(f(5, 3, 4), [None, i(3, 2, 1), i(4, 3)]),
        call(f(4, 3), [b(4), None]),
    ],
    "_unsafe_index.Tensor": [call(f(5, 3), [i(5, 4)])],
    "index_put.default": [
        call(f(5, 3), [torch.tensor([1, 4, 2])], f(3, 3)),
        call(f(5, 3), [i(5, 4)], f(4, 3), True),
        call(f(5, 3, 2), [i(5, 4), None, i(2, 4)], f(3), True),
        call(f(5, 3), [None, torch.tensor([0, 2])], f(1, 2)),
        call(f(5, 3), [i(5, 2, 3)], f(), True),
        call(f(4, 3), [torch.tensor([True, False, True, True])], f(3, 3)),
    ],
    "_unsafe_index_put.default": [call(f(5, 3), [i(5, 4)], f(4, 3), True)],
    "scatter_reduce.two": [
        call(f(4, 5), 1, i(5, 4, 3), f(4, 3), "sum"),
        call(f(4, 5), 1, i(5, 4, 3), f(4, 3), "mean"),
        call(f(4, 5), 1, i(5, 4, 3), f(4, 3), "amax", include_self=False),
        call(f(4, 5), 0, i(4, 3, 5), f(3, 5), "sum", include_self=False),
    ],
    "searchsorted.Tensor": [
        call(torch.tensor([0.3, 0.6], dtype=torch.float64), unit(4, 3)),
        call(unit(3, 4).sort(1).values, unit(3, 5)),
    ],
    "isin.Tensor_Tensor": [call(i(5, 4, 3), torch.tensor([1, 2]))],
    "isin.Tensor_Scalar": [call(i(5, 4, 3), 2)],
    "index_select.default": [call(f(4, 5), 1, i(5, 3)), call(f(4, 5), 0, i(4, 6))],
    "gather.default": [call(f(4, 5), 1, i(5, 4, 3)), call(f(4, 5, 2), 0, i(4, 6, 5, 1))],
    "scatter.src": [
        call(f(4, 5), 1, torch.tensor([[0, 2, 4], [1, 0, 2], [3, 4, 0], [1, 2, 3]]), f(4, 3)),
    ],
    "scatter.value": [call(f(4, 5), 1, i(5, 4, 3), 0.0), call(f(4, 5), 0, i(4, 2, 5), 1.5)],
    "scatter_add.default": [call(f(4, 5), 1, i(5, 4, 3), f(4, 3)), call(f(4, 5), 0, i(4, 6, 5), f(6, 5))],
    "index_add.default": [call(f(5, 3), 0, i(5, 4), f(4, 3)), call(f(3, 5), 1, i(5, 6), f(3, 6), alpha=2)],
    "index_copy.default": [call(f(5, 3), 0, torch.tensor([4, 0, 2]), f(3, 3))],
    "index_fill.int_Scalar": [call(f(5, 3), 0, i(5, 4), 0.0), call(f(5, 3), 1, i(3, 2), 1.5)],
    "index_fill.int_Tensor": [call(f(5, 3), 0, i(5, 4), f())],
    "take.default": [call(f(4, 5), i(20, 3, 2))],
    "one_hot.default": [call(i(5, 4, 3), 5)],
    "bucketize.Tensor": [call(unit(4, 3), torch.tensor([0.3, 0.6], dtype=torch.float64))],
}

_options = {"dtype": torch.float64}
FACTORY: dict[str, list[Sample]] = {
    **{f"{op}.default": [call([4, 3], **_options)] for op in ("zeros", "ones")},
    "empty.memory_format": [call([4, 3])],
    "full.default": [call([4, 3], 1.5), call([5], True)],
    **{f"new_{op}.default": [call(f(2, 5), [4, 3]), call(f(3), [])] for op in ("zeros", "ones", "empty")},
    "new_full.default": [call(f(2, 5), [4, 3], 2.5)],
    "arange.default": [call(5), call(6, dtype=torch.float64)],
    "arange.start": [call(2, 7)],
    "arange.start_step": [call(1, 12, 2), call(0.0, 1.0, 0.15)],
    "linspace.default": [call(0.0, 1.0, 5)],
    "logspace.default": [call(0.0, 1.0, 5)],
    "eye.default": [call(4)],
    "eye.m": [call(4, 3)],
    **{f"{op}_like.default": [call(f(4, 3))] for op in ("zeros", "ones", "empty")},
    "full_like.default": [call(f(4, 3), 2.5)],
    "tril_indices.default": [call(4, 4)],
    "triu_indices.default": [call(4, 3, 1)],
    "range.default": [call(0, 5)],
    "range.step": [call(0, 9, 2)],
    "scalar_tensor.default": [call(1.5)],
}

SHAPES_ONLY = {aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default}


def _op(name: str) -> torch._ops.OpOverload:
    packet, overload = name.split(".")
    found: torch._ops.OpOverload = getattr(getattr(aten, packet), overload)
    return found


SAMPLES: dict[torch._ops.OpOverload, list[Sample]] = {
    **ELEMENTWISE,
    **_OWN,
    **MATMUL,
    **{_op(name): samples for table in (REDUCE, SHAPE, INDEX, FACTORY) for name, samples in table.items()},
}

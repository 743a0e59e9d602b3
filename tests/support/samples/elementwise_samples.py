"""Samples of elementwise ops, made from their schemas: equal shapes, broadcast shapes, constants."""

from __future__ import annotations

from typing import Any

import torch
from sample_makers import Sample, b, call, f, i, unit, z

from autoshard.aten import aten
from autoshard.passes.rules.families import pointwise

NO_DERIVATIVE = {
    *("nextafter", "heaviside", "gcd", "lcm", "igamma", "igammac", "special_zeta", "isclose", "floor_divide"),
    *("frexp", "log_sigmoid_forward", "special_ndtri", "special_log_ndtr", "special_erfcx", "special_i1e"),
    *("copy", "remainder.Scalar_Tensor", "view.dtype", "linalg_eig", "linalg_svd", "bincount"),
    *(f"special_{kind}" for kind in ("airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1")),
    *(f"special_modified_bessel_{kind}" for kind in ("i0", "i1", "k0", "k1")),
    *(f"special_{s}chebyshev_polynomial_{kind}" for s in ("", "shifted_") for kind in "tuvw"),
    *(f"special_{kind}" for kind in ("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l")),
    "special_legendre_polynomial_p",
    *("special_spherical_bessel_j0", "special_scaled_modified_bessel_k0", "special_scaled_modified_bessel_k1"),
    *(("aminmax", "narrow_copy") if torch.__version__ < "2.12" else ()),
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


_SCALARS = {"polygamma": 1, "special_polygamma": 1, "mvlgamma": 1, "round": 1}


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


OWN: dict[torch._ops.OpOverload, list[Sample]] = {
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
    rule.op: OWN.get(rule.op, elementwise_samples(rule.op)) for rule in pointwise.RULES if rule.op not in OWN
}

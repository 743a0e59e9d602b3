"""Elementwise ops: every dim of the broadcast result is a factor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, TensorType, tensor_arguments
from autoshard.passes.rules.base import Factors, Facts, Rule, Types, numbered_factors, sizes_of
from autoshard.passes.rules.notation import Groups, rule
from autoshard.torch_private.ops import OpOverload

UNARY = {
    "": """
        bitwise_not ceil deg2rad fill fix floor frac isfinite isinf isnan isneginf isposinf isreal logical_not rad2deg round
        sign signbit special_ndtr trunc zero
        special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
        special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
        special_spherical_bessel_j0 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    """,
    "self": """
        abs acos acosh angle asin asinh atan atanh celu cos cosh digamma elu erf erfc erfinv gelu hardshrink
        hardsigmoid hardswish hardtanh i0 leaky_relu lgamma log log10 log1p log2 logit mish mvlgamma nan_to_num
        log_sigmoid polygamma relu6 selu silu sin sinc sinh softplus softshrink special_entr special_polygamma square threshold
    """,
    "result": """
        exp exp2 expm1 reciprocal relu rsqrt sigmoid special_expit special_ndtri sqrt tan tanh
    """,
    "self result": """
        sgn special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
    """,
}
"""elementwise functions by what autograd saves"""

BINARY = {
    "": """
        rsub subtract floor_divide heaviside bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift
        __and__ __or__ __xor__ __lshift__ __rshift__ logical_and logical_or logical_xor eq ne lt le gt ge greater
        greater_equal less less_equal not_equal isclose gcd lcm
        special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
        special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
        special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t
        special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
        special_shifted_chebyshev_polynomial_w
    """,
    "self other": """
        maximum minimum fmax fmin atan2 arctan2 logaddexp logaddexp2 xlogy special_xlog1py
    """,
    "self min max": "clamp clamp_min clamp_max clip",
    "self: other; other: self": "multiply",
    "self: other; other: self other": "divide true_divide",
    "other: self other": "fmod remainder special_zeta igamma igammac",
    "self: self other": "nextafter",
    "result; self: self; other: other": "hypot",
    "result; self: self": "copysign",
    "result; self: other": "ldexp",
    "result": "polar",
    "self exponent result": "pow float_power",
}

TERNARY = {
    "tensor1: tensor2; tensor2: tensor1": "addcmul",
    "tensor2; tensor2: tensor1": "addcdiv",
    "weight; weight: self end": "lerp",
    "condition": "where",
    "mask": "masked_fill",
}

OTHER_SAVES = {
    "self: other; other: self": "mul",
    "self: other; other: self other": "div",
    "real: real; imag: imag": "complex",
    "self result1": "log_sigmoid_forward",
    "self weight": "prelu",
    "result1": "frexp",
    "self other": "max min",
}

SAVES_BY_NAME = {
    n: saves for table in (UNARY, BINARY, TERNARY) for saves, names in table.items() for n in names.split()
}
SAVES = {
    **SAVES_BY_NAME,
    **{n: saves for saves, names in OTHER_SAVES.items() for n in names.split()},
    "pow.Tensor_Scalar": "self",
    "float_power.Tensor_Scalar": "self",
    "remainder.Scalar_Tensor": "",
}
"""by op name; ops that are missing (sums, copies) save nothing"""

TRANSCENDENTAL = frozenset(
    "exp log log1p expm1 sin cos tanh sigmoid erf gelu silu mish softplus elu selu pow rsqrt sqrt".split()
)
"""computed by series or tables"""


def _like_operand(node: Node, types: Types) -> tuple[TensorType, ...]:
    return (replace(types[node.inputs[0]], grad=False),)


def elementwise_facts(op: OpOverload) -> Facts:
    name = op._opname
    saves = SAVES.get(str(op).removeprefix("aten."), SAVES.get(name, ""))
    inside = _like_operand if name in ("log_sigmoid", "special_ndtr") else None
    view = False if name in ("contiguous", "to") else None
    chains, function = name in ("to", "_to_copy"), name in TRANSCENDENTAL
    return Facts(saves, inside, view, chains=chains, function=function)


def _overloads(name: str) -> list[OpOverload]:
    """Overloads that take and return single tensors and write to none."""
    packet = getattr(aten, name)
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return [op for op in found if not op._schema.is_mutable and _takes_tensors(op)]


def _takes_tensors(op: OpOverload) -> bool:
    kinds = [str(a.type) for a in op._schema.arguments if "Tensor" in str(a.type)]
    results = [str(r.type) for r in op._schema.returns]
    return bool(kinds) and set(results) == {"Tensor"} and not any("List" in k for k in kinds)


def elementwise(op: OpOverload, linear: Groups | Callable[[Node, Graph], Groups] = ()) -> Rule:
    operands = ", ".join(["..."] * len(tensor_arguments(op)))
    return rule(
        op, f"{operands} -> {', '.join(['...'] * len(op._schema.returns))}", linear=linear, facts=elementwise_facts(op)
    )


def _quotient(node: Node, graph: Graph) -> Groups:
    return () if node.argument("rounding_mode") else LINEAR_FIRST


def _linear_if_zero(name: str, group: tuple[int, ...]) -> Callable[[Node, Graph], Groups]:
    return lambda node, graph: (group,) if node.argument(name) == 0 else ()


LINEAR_FIRST: Groups = ((0,),)
LINEAR_SUM: Groups = ((0, 1),)
PRODUCT: Groups = ((0,), (1,))

LINEAR: dict[OpOverload, Groups | Callable[[Node, Graph], Groups]] = {
    **{
        op: LINEAR_FIRST
        for n in ("neg", "negative", "positive", "clone", "alias", "alias_copy", "detach")
        for op in _overloads(n)
    },
    **{op: LINEAR_FIRST for n in ("contiguous", "lift_fresh", "lift_fresh_copy", "_to_copy") for op in _overloads(n)},
    **{
        op: LINEAR_FIRST
        for n in ("real", "imag", "conj", "conj_physical", "_conj", "resolve_conj")
        for op in _overloads(n)
    },
    aten.resolve_neg.default: LINEAR_FIRST,
    aten.to.dtype: LINEAR_FIRST,
    aten.to.device: LINEAR_FIRST,
    aten.to.dtype_layout: LINEAR_FIRST,
    aten.add.Tensor: LINEAR_SUM,
    aten.add.Scalar: (),
    aten.sub.Tensor: LINEAR_SUM,
    aten.sub.Scalar: (),
    aten.subtract.Tensor: LINEAR_SUM,
    aten.rsub.Tensor: LINEAR_SUM,
    aten.complex.default: LINEAR_SUM,
    aten.mul.Tensor: PRODUCT,
    aten.mul.Scalar: LINEAR_FIRST,
    aten.multiply.Tensor: PRODUCT,
    aten.div.Tensor: LINEAR_FIRST,
    aten.div.Scalar: LINEAR_FIRST,
    aten.div.Tensor_mode: _quotient,
    aten.div.Scalar_mode: _quotient,
    aten.true_divide.Tensor: LINEAR_FIRST,
    aten.addcmul.default: ((0, 1), (0, 2)),
    aten.addcdiv.default: LINEAR_SUM,
    aten.lerp.Scalar: LINEAR_SUM,
    aten.lerp.Tensor: LINEAR_SUM,
    aten.where.self: ((1, 2),),
    aten.where.ScalarOther: _linear_if_zero("other", (1,)),
    aten.where.ScalarSelf: _linear_if_zero("self", (1,)),
    aten.masked_fill.Scalar: _linear_if_zero("value", (0,)),
    aten.masked_fill.Tensor: ((0, 2),),
    aten.copy.default: ((0, 1),),
    aten.fill.Tensor: ((0, 1),),
}

_OTHER_OVERLOADS = [aten.max.other, aten.min.other, aten.fill.Scalar]


def _prelu(node: Node, graph: Graph) -> Factors:
    """One slope for all elements, or one per channel (dim 1)."""
    shape, slopes = graph.shapes(node.inputs)
    dims = numbered_factors(shape)
    slope = ("d1",) if len(shape) > 1 and len(slopes) == 1 and slopes[0] == shape[1] else (None,) * len(slopes)
    return Factors((dims, slope), (dims,), sizes_of(shape))


def _log_sigmoid(node: Node, graph: Graph) -> Factors:
    """The saved buffer is empty on a GPU."""
    (shape,) = graph.shapes(node.inputs)
    kept = graph.types[node.outputs[-1]].shape
    dims = numbered_factors(shape)
    return Factors((dims,), (dims, dims if kept == shape else (None,) * len(kept)), sizes_of(shape))


RULES: tuple[Rule, ...] = (
    *(elementwise(op, linear) for op, linear in LINEAR.items()),
    *(elementwise(op) for n in SAVES_BY_NAME for op in _overloads(n) if op not in LINEAR),
    *(elementwise(op) for op in _OTHER_OVERLOADS),
    Rule(
        aten.log_sigmoid_forward.default,
        _log_sigmoid,
        notation="... -> ..., ...",
        facts=elementwise_facts(aten.log_sigmoid_forward.default),
    ),
    Rule(aten.prelu.default, _prelu, notation="b c ..., c -> b c ...", facts=elementwise_facts(aten.prelu.default)),
    rule(
        aten.view_as_real.default,
        "... -> ... _",
        linear=LINEAR_FIRST,
        facts=elementwise_facts(aten.view_as_real.default),
    ),
    rule(
        aten.view_as_complex.default,
        "... _ -> ...",
        linear=LINEAR_FIRST,
        facts=elementwise_facts(aten.view_as_complex.default),
    ),
    rule(aten.frexp.Tensor, "... -> ..., ...", facts=elementwise_facts(aten.frexp.Tensor)),
)

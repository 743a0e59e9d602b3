"""Symbolic shapes: dynamic lengths of inputs, data-dependent sizes and numbers. Dynamic lengths
(export's backed symbols) get names of our own, by argument and dim. Length 1 broadcasts, so the
graph of a longer example serves it only if both graphs agree at 1.
Dims of data-dependent length (unbacked symbols) are never sharded. Numbers read from tensors are
plain Python numbers between nodes: generated code reads them at run time, cost models use an
estimate. All ranks agree on them, since they come from replicated values."""

from __future__ import annotations

import itertools
import logging
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import sympy  # type: ignore[import-untyped,unused-ignore]
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.export import Dim, ShapesCollection
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autoshard.aten import aten
from autoshard.errors import CaptureError, HintError, PlanError, RuleError
from autoshard.passes.capture.exported.example_inputs import Example
from autoshard.passes.ir.graph import Graph, Node, Ref, Symbol, Symbols, TensorType, map_tree
from autoshard.passes.ir.sizes import Size, condition_texts, is_always_at_least, is_checkable, length_symbol, make_size
from autoshard.passes.ir.text import RESERVED_NAMES, identifier
from autoshard.passes.ir.text import is_attribute_name as is_plain_name
from autoshard.torch_private.ops import OpOverload

PlainNumber = int | float | bool
_SYMBOLIC_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)

prim = torch.ops.prim

NUMBER_OPS: dict[Any, OpOverload] = {
    operator.add: aten.add.default,
    operator.sub: aten.sub.default,
    operator.mul: aten.mul.default,
    operator.truediv: aten.div.default,
    operator.neg: aten.neg.Scalar,
    operator.eq: aten.eq.default,
    operator.ne: aten.ne.default,
    operator.lt: aten.lt.default,
    operator.le: aten.le.default,
    operator.gt: aten.gt.default,
    operator.ge: aten.ge.default,
    operator.and_: aten.__and__.bool,
    operator.or_: aten.__or__.bool,
    torch.sym_not: aten.__not__.default,
    torch.sym_float: aten.Float.Scalar,
    torch.sym_int: aten.Int.Scalar,
    math.trunc: aten.Int.Scalar,
    math.ceil: aten.ceil.Scalar,
    math.floor: aten.floor.Scalar,
}
"""Python arithmetic on numbers → torch op, so that it becomes an ordinary node"""

_NUMBER_OPS_BY_TYPE: dict[Any, tuple[OpOverload, OpOverload]] = {
    operator.abs: (prim.abs.int, prim.abs.float),
    operator.floordiv: (aten.floordiv.int, aten.floordiv.default),
    operator.mod: (aten.remainder.int, aten.remainder.default),
    operator.pow: (aten.pow.int_to_int, aten.pow.Scalar_Scalar),
    torch.sym_max: (prim.max.int, prim.max.float),
    torch.sym_min: (prim.min.int, prim.min.float),
}
"""Python function → (op on ints, op on other numbers)"""


def is_data_dependent_number(value: Any) -> bool:
    """Whether ``value`` is a number known at run time only: data-dependent, or not an int."""
    return isinstance(value, _SYMBOLIC_TYPES) and constant_number(value) is None and not is_input_length(value)


def is_input_length(value: Any) -> bool:
    """Whether ``value`` is a symbolic int computed from input lengths."""
    if not isinstance(value, torch.SymInt) or not value.node.expr.free_symbols:
        return False
    return not free_unbacked_symbols(value.node.expr)


def constant_number(value: Any) -> PlainNumber | None:
    """``value`` as a plain number if it is one in every call, else None."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, _SYMBOLIC_TYPES):
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
        expression = value.node.expr
        return kind(expression) if not expression.free_symbols else None
    return None


def number_op(target: Any, result: Any) -> OpOverload | None:
    """The torch op for Python function ``target`` on numbers, or None. ``result``: its result."""
    if target in _NUMBER_OPS_BY_TYPE:
        return _NUMBER_OPS_BY_TYPE[target][0 if isinstance(result, torch.SymInt | int) else 1]
    return NUMBER_OPS.get(target)


def estimated_number(value: Any) -> PlainNumber:
    """Estimate of a number: each unknown at half of its upper bound. At least 2 for an int."""
    if isinstance(value, torch.SymBool | bool):
        return True
    if isinstance(value, torch.SymFloat | float):
        return 1.0
    if isinstance(value, int):
        return value
    expression, ranges = value.node.expr, value.node.shape_env.var_to_range
    guesses = dict(value.node.shape_env.backed_var_to_val)
    for free_symbol in free_unbacked_symbols(expression):
        upper: Any = ranges[free_symbol].upper if free_symbol in ranges else None
        bounded = upper is not None and upper.is_Integer and upper < 2**40
        guesses[free_symbol] = max(2, int(upper) // 2) if bounded else 64  # no bound is known
    return max(2, int(expression.xreplace(guesses)))


def fake_value_type(value: Any, grad: bool, length: Callable[[Any], int] = int) -> TensorType:
    """The type of a fake tensor or symbolic number. ``length``: export's dynamic length → ours."""
    if isinstance(value, Tensor):
        unknown = tuple(d for d, n in enumerate(value.shape) if is_data_dependent_number(n))
        shape = tuple(int(estimated_number(n)) if d in unknown else length(n) for d, n in enumerate(value.shape))
        return TensorType(shape, value.dtype, grad, unknown)
    kinds = {torch.SymBool: torch.bool, torch.SymFloat: torch.float64}
    return TensorType((), kinds.get(type(value), torch.int64), number=estimated_number(value))


Dynamic = bool | Mapping[str, Mapping[int, str]]
"""True: all lengths of all inputs; or input → dim → name, or a multiple such as ``"4*batch"``"""

ResultT = TypeVar("ResultT")

_DIM_PATTERN = re.compile(r"\s*(?:(\d+)\s*\*\s*)?(\w+)\s*")


_DEFAULT_DIM_NAMES = ("batch", "seq")
"""default names of the first dims"""


@dataclass(frozen=True)
class DynamicInput:
    """A tensor of the example and its dynamic dims."""

    path: str
    """argument name, such as ``labels`` or ``args[0]``"""
    tensor: Tensor
    dims: Mapping[int, tuple[int, str]]
    """dim → (multiple, name); the name is "" if the user gave none"""


def with_static_fallback(dynamic: Dynamic, do: Callable[[Dynamic], ResultT]) -> ResultT:
    """``do(dynamic)``; if that is refused, ``do(False)`` (the example's lengths) and a warning."""
    if dynamic:
        try:
            return do(dynamic)
        except (CaptureError, PlanError, RuleError) as error:
            logging.getLogger("autoshard").warning(
                "no program with symbolic lengths is possible, so these shapes alone are compiled: %s", error
            )
    return do(False)


def dynamic_inputs(tensors: Mapping[str, Tensor], dynamic: Dynamic) -> dict[str, DynamicInput]:
    """Argument → tensor of the example and its dynamic dims. Raises :class:`HintError`."""
    if not isinstance(dynamic, Mapping):
        return {path: DynamicInput(path, x, dict.fromkeys(range(x.ndim), (1, ""))) for path, x in tensors.items()}
    for path, dims in dynamic.items():
        if path not in tensors:
            raise HintError(f"dynamic: there is no tensor argument {path!r}. Known: {', '.join(tensors)}")
        if not isinstance(dims, Mapping):
            raise HintError(f"dynamic: {path!r} is {dims!r}: give {{dim: name}}, such as {{0: 'batch'}}")
        if wrong := [d for d in dims if not isinstance(d, int) or not 0 <= d < tensors[path].ndim]:
            raise HintError(f"dynamic: {path!r} has {tensors[path].ndim} dims, so there is no dim {wrong[0]!r}")
    return {
        path: DynamicInput(path, x, {d: _parsed_dim(path, d, text) for d, text in dynamic.get(path, {}).items()})
        for path, x in tensors.items()
    }


def _parsed_dim(path: str, dim: int, text: str) -> tuple[int, str]:
    found = _DIM_PATTERN.fullmatch(str(text))
    if found is None or not is_plain_name(found[2]) or found[2] in RESERVED_NAMES or found[1] == "0":
        raise HintError(f"dynamic: {path!r}, dim {dim}: {text!r} is neither a name nor a multiple such as '4*batch'")
    return int(found[1] or 1), found[2]


def shapes_for_export(inputs: Iterable[DynamicInput]) -> ShapesCollection:
    """``dynamic_shapes`` for ``torch.export``: dims that it may keep dynamic."""
    shapes = ShapesCollection()
    for x in inputs:
        shapes[x.tensor] = {d: Dim.AUTO if d in x.dims else Dim.STATIC for d in range(x.tensor.ndim)}
    return shapes


class ExportedLengths:
    """Export's symbols as expressions of our own symbols. Equal lengths at the same dim of two
    inputs share one unless the user names them; a call where they differ is compiled
    separately."""

    def __init__(self, inputs: Mapping[str, tuple[DynamicInput, Tensor]]) -> None:
        """``inputs``: name in the graph → (the example's tensor, export's fake tensor)."""
        self.meaning: dict[sympy.Symbol, sympy.Expr] = {}
        self.example: dict[sympy.Symbol, int] = {}
        self.read: list[Symbol] = []
        self.fixed: list[str] = []
        self._by_place: dict[Any, sympy.Symbol] = {}
        self._arguments = {re.match(r"\w*", x.path)[0] for x, _ in inputs.values()}  # type: ignore[index]
        lengths: list[Any] = [n for _, fake in inputs.values() for n in fake.shape]
        self._environment = next((n.node.shape_env for n in lengths if _symbolic_expr(n) is not None), None)
        for theirs, ours in _fixed_symbols(self._environment):
            self.meaning[theirs] = ours
        for name, (x, fake) in inputs.items():
            for dim, n in enumerate(fake.shape):
                self._meet(name, x, dim, n)
        for name, (_, fake) in inputs.items():
            for dim, n in enumerate(fake.shape):
                self._solve(name, dim, n)
        self._simpler = dict(self._equalities())

    def _meet(self, name: str, x: DynamicInput, dim: int, n: Any) -> None:
        """Name the symbol of a dim's length."""
        expr = _symbolic_expr(n)
        if expr is None or not self._known(expr).free_symbols:
            if dim in x.dims:
                why = (
                    "no other length follows from an example of 0 or 1"
                    if x.tensor.shape[dim] < 2
                    else "fixed by the model"
                )
                self.fixed.append(f"{x.path} dim {dim} = {x.tensor.shape[dim]} ({why})")
            return
        if expr in self.meaning or not expr.is_Symbol:
            return
        multiple, wanted = x.dims[dim]
        length = x.tensor.shape[dim]
        if length % multiple:  # the example breaks the promise: allow any length
            multiple = 1
        place = wanted or (dim, length)
        if place not in self._by_place:
            own = length_symbol(wanted or self._fresh(_DEFAULT_DIM_NAMES[dim] if dim < 2 else f"{x.path}_{dim}"))
            self._by_place[place] = own
            self.example[own] = length // multiple
            self.read.append(Symbol(str(own), name, dim, multiple))
        own = self._by_place[place]
        if self.example[own] * multiple != length:
            raise CaptureError(
                f"dynamic: {x.path!r}, dim {dim} is {length} in the example, but {own} is "
                f"{self.example[own]} elsewhere")  # fmt: skip
        self.meaning[expr] = multiple * own

    def _equalities(self) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
        """(replaced, replacement): lengths that guards make equal, the simpler one second."""
        for guard in self._environment.guards if self._environment is not None else ():
            if isinstance(guard.expr, sympy.Eq) and guard.expr.free_symbols <= self.meaning.keys():
                sides = sorted(map(self._ours, guard.expr.args), key=sympy.count_ops)
                if sides[0] != sides[1] and not sides[1].is_Integer:
                    yield sides[1], sides[0]

    def _known(self, expr: Any) -> Any:
        return expr.xreplace(self.meaning)

    def _fresh(self, wanted: str) -> str:
        stem, number = identifier(wanted), 1
        name = stem
        while name in self._arguments or any(str(s) == name for s in self.example):
            number += 1
            name = f"{stem}_{number}"
        return name

    def _solve(self, name: str, dim: int, n: Any) -> None:
        """Solve for export's s: if the model requires an even length, export writes it as 2·s."""
        expr = _symbolic_expr(n)
        unknown = [s for s in expr.free_symbols if s not in self.meaning] if expr is not None else []
        if expr is None or not unknown:
            return
        factor, offset = expr.coeff(unknown[0]), expr.subs(unknown[0], 0)
        if len(expr.free_symbols) != 1 or not (factor.is_Integer and factor > 0 and offset.is_Integer):
            raise CaptureError(f"dynamic: dim {dim} of an input is {expr}, from which no length can be computed")
        own = length_symbol(self._fresh(f"{_DEFAULT_DIM_NAMES[dim] if dim < 2 else f'size_{dim}'}_part"))
        hint = int(n.node.shape_env.backed_var_to_val[unknown[0]])
        self.meaning[unknown[0]], self.example[own] = own, hint
        self.read.append(Symbol(str(own), name, dim, int(factor), int(offset)))

    def of(self, n: Any) -> int:
        """A length of a traced tensor or graph number as an int or a :class:`Size`."""
        expr = _symbolic_expr(n)
        if expr is None:
            return int(n)
        ours = self._ours(expr)
        found = make_size(self._simpler.get(ours, ours), self.example)
        if isinstance(found, Size) and not is_checkable(str(found), self.read):
            raise CaptureError(f"dynamic: the length {expr} needs more than integer arithmetic on lengths")
        return found

    def _ours(self, expr: Any) -> Any:
        if missing := [s for s in expr.free_symbols if s not in self.meaning]:
            raise CaptureError(f"dynamic: the length {expr} depends on {missing[0]}, which is not a length of an input")
        return expr.xreplace(self.meaning)

    def symbols(self) -> Symbols:
        """The symbols, and the conditions under which the graph is valid."""
        return Symbols(tuple(self.read), condition_texts(self._demanded(), self.read), tuple(self.fixed))

    def _demanded(self) -> Iterator[sympy.Basic]:
        if self._environment is None:
            return
        ranges = self._environment.var_to_range
        for theirs, ours in self.meaning.items():
            if ours.is_Integer:
                continue
            low, high = ranges[theirs].lower, ranges[theirs].upper
            if low.is_Integer and not is_always_at_least(ours, low):
                yield sympy.Ge(ours, low)
            if high.is_Integer:
                yield sympy.Le(ours, high)
        asserted = [a for many in self._environment.deferred_runtime_asserts.values() for a in many]
        for guard in (*self._environment.guards, *asserted):
            expr = self._environment.simplify(guard.expr)
            if expr.free_symbols <= self.meaning.keys():
                yield self._ours(expr)


def _fixed_symbols(environment: Any) -> Iterator[tuple[sympy.Symbol, sympy.Integer]]:
    """(symbol, value) of export's symbols that guards fix and export did not substitute."""
    for guard in environment.guards if environment is not None else ():
        if isinstance(guard.expr, sympy.Eq) and guard.expr.lhs.is_Symbol and guard.expr.rhs.is_Integer:
            yield guard.expr.lhs, guard.expr.rhs


def _symbolic_expr(n: Any) -> Any:
    """The expression of a dynamic length, else None."""
    if not isinstance(n, torch.SymInt):
        return None
    return n.node.expr if n.node.expr.free_symbols else None


def lengthened_example(graph: Graph, example: Example) -> Example | None:
    """The example with inputs extended along a dim of 1 that an output extends, or None."""
    leaves, spec = pytree.tree_flatten(example)
    results = [graph.types[out.name] for out in graph.outputs if isinstance(out, Ref)]
    grown = {(tuple(t.shape[:d]), tuple(t.shape[d + 1 :]), t.dtype) for t in results for d in range(len(t.shape))
             if int(t.shape[d]) > 1}  # fmt: skip
    lengths = {int(n) for x in leaves if isinstance(x, Tensor) for n in x.shape}
    other = next(n for n in itertools.count(2) if n not in lengths)
    found = False
    for number, (name, leaf) in enumerate(zip(graph.flat_inputs, leaves, strict=True)):
        if name is None:
            continue
        shape, dtype = graph.types[name].shape, graph.types[name].dtype
        for dim, n in enumerate(shape):
            if n == 1 and (shape[:dim], shape[dim + 1 :], dtype) in grown:
                leaves[number] = leaf.new_zeros((*leaf.shape[:dim], other, *leaf.shape[dim + 1 :]))
                found = True
    return pytree.tree_unflatten(leaves, spec) if found else None


def covering_length_one(one: Graph, longer_graph: Graph) -> Graph | None:
    """``longer_graph`` (:func:`lengthened_example`) if it equals ``one`` at length 1, else None."""
    ones = {x.name for x in longer_graph.symbols.read} - {x.name for x in one.symbols.read}
    least = {f"{name} >= 2" for name in ones}
    conditions = tuple(c for c in longer_graph.symbols.conditions if c not in least)
    at_one = {length_symbol(name): sympy.Integer(1) for name in ones}
    if not ones or not {*one.symbols.conditions} <= {*conditions} or not _is_same_graph(one, longer_graph, at_one):
        return None
    return replace(longer_graph, symbols=replace(longer_graph.symbols, conditions=conditions))


def _is_same_graph(one: Graph, longer_graph: Graph, values: Mapping[sympy.Symbol, sympy.Integer]) -> bool:
    """Whether ``longer_graph`` with symbols as ``values`` equals ``one``, but for names."""
    theirs, ours = ([out for node in g.nodes for out in node.outputs] for g in (longer_graph, one))
    names = {i.name: i.name for i in longer_graph.inputs} | dict(zip(theirs, ours, strict=False))

    def at(item: Any) -> Any:
        if isinstance(item, Ref):
            return Ref(names[item.name])
        return make_size(item.expr.xreplace(values), item.example) if isinstance(item, Size) else item

    def node(x: Node, name: str) -> Node:
        outputs = tuple(names[out] for out in x.outputs)
        return replace(x, name=name, args=map_tree(x.args, at), kwargs=map_tree(x.kwargs, at), outputs=outputs)

    return (
        (len(one.nodes), len(ours), one.inputs) == (len(longer_graph.nodes), len(theirs), longer_graph.inputs)
        and one.nodes == tuple(node(b, a.name) for a, b in zip(one.nodes, longer_graph.nodes, strict=True))
        and all(
            one.types[n] == replace(longer_graph.types[m], shape=map_tree(longer_graph.types[m].shape, at))
            for m, n in names.items()
        )
        and (one.outputs, one.out_spec, one.changed)
        == (map_tree(longer_graph.outputs, at), longer_graph.out_spec, longer_graph.changed)
        and one.mutations == {fqn: names[n] for fqn, n in longer_graph.mutations.items()}
        and all(torch.equal(x, longer_graph.constants[n]) for n, x in one.constants.items())
    )

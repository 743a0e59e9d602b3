"""Sharding rules of users: register them, and check them against the op itself."""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autoshard.check.rule_check import (
    SEED,
    Op,
    RuleCheck,
    Sample,
    call_text,
    check_rule,
    checked_case,
    overload,
    with_clean_op_state,
)
from autoshard.errors import RuleError
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType, argument_names, map_tree, refs, tensor_arguments
from autoshard.passes.ir.sizes import Size
from autoshard.passes.rules import add_rule
from autoshard.passes.rules.base import Rule
from autoshard.passes.rules.notation import Dim, Linear, Term, expanded_terms, parse, rule
from autoshard.torch_private.ops import OpOverload

__all__ = ["RuleCheck", "Sample", "check_rule", "register_rule"]

log = logging.getLogger("autoshard")
MOST_CHECKED_ELEMENTS = 1 << 16
"""most elements of a call that is checked with its own shapes; larger ones are shortened"""


def register_rule(
    op: Op,
    notation: str | Rule,
    samples: Iterable[Sample] | None = None,
    *,
    linear: Linear = (),
    addends: Iterable[int] = (),
    flops: Callable[[Node, Graph], float] | None = None,
) -> RuleCheck | None:
    """Add a sharding rule for ``op``, an ATen or ``torch.library`` op (its default overload).

    ``notation``: such as ``"... k, n k -> ... n"``, a term per tensor argument and result (see
    :mod:`autoshard.passes.rules.notation`), or a :class:`~autoshard.passes.rules.base.Rule`.
    ``samples``: calls ``(args, kwargs)`` to check it on; default: random float64 tensors that fit
    the notation. If the op refuses these (it needs ints), the result is None. Other arguments and
    factors are checked when a compiled model uses them; unchecked strategies are left out.
    ``linear``, ``addends``, ``flops``: see :func:`autoshard.passes.rules.notation.rule`.
    Raises :class:`RuleError` if the rule is malformed or wrong; an older rule then stays.
    """
    op = overload(op)
    new = notation if isinstance(notation, Rule) else rule(op, notation, linear=linear, addends=addends, flops=flops)
    if new.op is not op:
        raise RuleError(f"register_rule for {op}: the given rule is for {new.op}")
    samples = _random_samples(new) if samples is None else list(samples)
    check = None if samples is None else check_rule(new, samples)
    add_rule(_rule_checked_on_use(new, samples or (), check.ran if check else ()))
    return check


def _random_samples(new: Rule) -> list[Sample] | None:
    """A random call that fits the notation (float64, dims of 4 to 7); None if the op refuses it."""
    if not new.notation:
        return None
    terms = dict(zip(tensor_arguments(new.op), parse(new.notation).operands, strict=True))
    lengths: dict[str, int] = {"...": 4, "_": 3}
    random = torch.Generator("cpu").manual_seed(SEED)

    def length(dim: Dim) -> int:
        return math.prod(lengths.setdefault(factor, 4 + len(lengths) % 4) for factor in dim)

    def tensor(term: Term) -> Tensor:
        return torch.randn([length(dim) for dim in term], generator=random, dtype=torch.float64, device="cpu")

    args, kwargs = list[Any](), dict[str, Any]()
    for argument in new.op._schema.arguments:
        kind = str(argument.type)
        if argument.name in terms:
            term = terms[argument.name]
            value = [tensor(term), tensor(term)] if "List" in kind else tensor(term)
        elif argument.has_default_value():
            continue
        elif kind not in _PLAIN_DEFAULTS:
            return None
        else:
            value = _PLAIN_DEFAULTS[kind]
        if argument.kwarg_only:
            kwargs[argument.name] = value
        elif len(args) == [a.name for a in new.op._schema.arguments].index(argument.name):
            args.append(value)
        else:
            kwargs[argument.name] = value
    return [(args, kwargs)] if _op_accepts(new.op, args, kwargs) else None


@with_clean_op_state()
def _op_accepts(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        op(*args, **kwargs)
    except Exception as error:  # a user's op may raise anything
        log.debug("%s rejects generated operands: %s", op, error)
        return False
    return True


_PLAIN_DEFAULTS: Mapping[str, Any] = {"float": 0.5, "bool": False}
"""values of arguments that do not determine shapes"""


def _rule_checked_on_use(new: Rule, samples: Sequence[Sample], done: Iterable[Hashable]) -> Rule:
    """``new`` with unchecked strategies left out, which are checked when a call needs them.
    ``done``: keys checked on samples."""
    checked, hopeless = set(done), set[Hashable]()

    def strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        has_gradient = graph.is_differentiable(node)
        every = new.strategies(node, graph)
        found = {s: checked_case(node, graph, s, has_gradient) for s in every if s.label not in ("I", "R")}
        if not checked.union(hopeless).issuperset(found.values()):
            for sample in _samples_like_call(node, graph, new, samples):
                try:
                    checked.update(check_rule(new, [sample], results=node.output_slots).ran)
                except RuleError as error:
                    raise RuleError(f"{error}\n  on such a call in module {node.fqn or '(root)'!r} at {node.source}; "
                                    "'_' means that a dim is not sharded") from None  # fmt: skip
                if checked.issuperset(found.values()):
                    break
            if left := {s.label: name for s, name in found.items() if name not in checked}:
                hopeless.update(left.values())
                log.warning(
                    "the rule of %s is not checked for %s where %s is sharded, so that strategy "
                    "is not used. Give register_rule samples=[(args, kwargs), …] of such a call",
                    new.op, call_text(node, graph), " or ".join(left),
                )  # fmt: skip
        return tuple(s for s in every if s not in found or found[s] in checked)

    return replace(new, space=strategies)


def _samples_like_call(node: Node, graph: Graph, new: Rule, samples: Sequence[Sample]) -> Iterator[Sample]:
    """Calls like ``node`` that its op takes: of its shapes, of short dims, or of samples."""
    types = [graph.types[name].example for name in node.inputs]
    lengths = [[t.shape for t in types]] if sum(t.numel for t in types) <= MOST_CHECKED_ELEMENTS else []
    lengths += [_shortened_shapes(node, graph, new, free) for free in (range(8, 999), range(6, 6000, 6))]
    drawn = (_random_operands(types, shapes, wide) for shapes, wide in itertools.product(lengths, (True, False)))
    for operands in itertools.chain(drawn, (_sample_operands(node, *sample) for sample in samples)):
        left = iter(operands)

        def plain(item: Any, left: Iterator[Any] = left) -> Any:
            return next(left) if isinstance(item, Ref) else int(item) if isinstance(item, Size) else item

        if len(operands) == len(types):
            args, kwargs = map_tree((node.args, dict(node.kwargs)), plain)
            if _op_accepts(node.op, args, kwargs):
                yield args, kwargs


def _shortened_shapes(node: Node, graph: Graph, new: Rule, free: Sequence[int]) -> list[tuple[int, ...]]:
    """Operand shapes with long dims replaced by ``free`` lengths, equal dims by equal lengths."""
    unused = iter(free)
    short = defaultdict[int, int](unused.__next__, {n: n for n in range(free[0] if free[0] == 8 else 2)})
    try:
        terms, sizes = expanded_terms(parse(new.notation), node, graph)
    except RuleError:  # written by hand: a notation is only informative
        terms, sizes = [], {}

    def dim(n: int, factors: Dim) -> int:
        parts = [short[sizes[f]] for f in factors if f in sizes] if len(factors) > 1 else []
        return math.prod(parts) if len(parts) == len(factors) else short[n]

    shapes = [graph.types[name].example.shape for name in node.inputs]
    terms = terms or [((),) * len(shape) for shape in shapes]
    return [tuple(map(dim, shape, term)) for shape, term in zip(shapes, terms, strict=False)]


def _random_operands(types: Sequence[TensorType], shapes: Sequence[tuple[int, ...]], wide: bool) -> list[Tensor]:
    """Random tensors, floats in float64 if ``wide``; integers may serve as indices of any dim."""
    random = torch.Generator("cpu").manual_seed(SEED)
    least = min((n for shape in shapes for n in shape if n > 1), default=2)

    def tensor(t: TensorType, shape: tuple[int, ...]) -> Tensor:
        if t.dtype.is_floating_point or t.dtype.is_complex:
            dtype = torch.complex128 if t.dtype.is_complex else torch.float64
            return torch.randn(shape, generator=random, dtype=dtype, device="cpu").to(dtype if wide else t.dtype)
        return torch.randint(0, 2 if t.dtype == torch.bool else least, shape, generator=random, device="cpu").to(
            t.dtype
        )

    return [] if any(t.number is not None for t in types) else list(map(tensor, types, shapes))


def _sample_operands(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Tensors of a sample in the argument positions where ``node`` has tensors."""
    given = {**dict(zip(argument_names(node.op), args, strict=False)), **kwargs}
    pairs = [(list(refs(value)), given.get(name)) for name, value in node.given]
    found = [x for there, x in pairs for _, x in zip(there, x if isinstance(x, list | tuple) else [x], strict=False)]
    return [x for x in found if isinstance(x, Tensor)]

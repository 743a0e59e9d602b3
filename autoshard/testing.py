"""Rules of users: add them, and check them against the op itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autoshard.check.rule_check import SEED, Op, RuleCheck, Sample, check_rule, overload
from autoshard.errors import RuleError
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, Ref, map_refs
from autoshard.passes.ir.schema import tensor_arguments
from autoshard.passes.rules import register
from autoshard.passes.rules.base import Rule
from autoshard.passes.rules.notation import Dim, Linear, Term, parse, rule

__all__ = ["RuleCheck", "Sample", "check_rule", "register_rule"]

log = logging.getLogger("autoshard")
LARGEST = 1 << 16
"""elements of a call that is still checked when a model is compiled"""


def register_rule(
    op: Op,
    notation: str | Rule,
    samples: Iterable[Sample] | None = None,
    *,
    linear: Linear = (),
    addends: Iterable[int] = (),
    flops: Callable[[Node, Graph], float] | None = None,
) -> RuleCheck | None:
    """Add a sharding rule for ``op``, an ATen op or one of ``torch.library``; of a packet the default overload is meant.

    ``notation``: for example ``"... k, n k -> ... n"``, a term per tensor argument and result (see
    :mod:`autoshard.passes.rules.notation`), or a :class:`~autoshard.passes.rules.base.Rule` written by hand. ``samples``:
    calls ``(args, kwargs)`` to check it on; without them, random float64 tensors that fit the notation. Where the op
    cannot be called on those (it takes ints, or integer tensors), the rule is checked on the first call that is
    compiled, and the result is None. ``linear``, ``addends``, ``flops``: see :func:`autoshard.passes.rules.notation.rule`.
    Raises :class:`RuleError` where the rule is malformed or wrong; the op then has no rule or keeps the one it had.
    """
    op = overload(op)
    new = notation if isinstance(notation, Rule) else rule(op, notation, linear=linear, addends=addends, flops=flops)
    if new.op is not op:
        raise RuleError(f"register_rule for {op}: the rule given is one of {new.op}")
    if samples is None and (samples := _invented(new)) is None:
        register(_checked_when_used(new))
        return None
    check = check_rule(new, samples)
    register(new)
    return check


def _invented(new: Rule) -> list[Sample] | None:
    """One call of the op from its rule's notation: float64 tensors, with dims of 4 to 7. None where that is no call."""
    if not new.notation:
        return None
    terms = dict(zip(tensor_arguments(new.op), parse(new.notation).operands, strict=True))
    lengths: dict[str, int] = {"...": 4, "_": 3}
    random = torch.Generator("cpu").manual_seed(SEED)

    def length(dim: Dim) -> int:
        return math.prod(lengths.setdefault(factor, 4 + len(lengths) % 4) for factor in dim)

    def tensor(term: Term) -> torch.Tensor:
        return torch.randn([length(dim) for dim in term], generator=random, dtype=torch.float64, device="cpu")

    args, kwargs = list[Any](), dict[str, Any]()
    for argument in new.op._schema.arguments:
        kind = str(argument.type)
        if argument.name in terms:
            term = terms[argument.name]
            value = [tensor(term), tensor(term)] if "List" in kind else tensor(term)
        elif argument.has_default_value():
            continue
        elif kind not in _PLAIN:
            return None
        else:
            value = _PLAIN[kind]
        if argument.kwarg_only:
            kwargs[argument.name] = value
        elif len(args) == [a.name for a in new.op._schema.arguments].index(argument.name):
            args.append(value)
        else:
            kwargs[argument.name] = value
    try:
        new.op(*args, **kwargs)
    except Exception as error:  # whatever a user's op raises for operands it does not take
        log.debug("%s does not take invented operands: %s", new.op, error)
        return None
    return [(args, kwargs)]


_PLAIN: Mapping[str, Any] = {"float": 0.5, "bool": False}
"""values for arguments that say nothing about shapes"""


def _checked_when_used(new: Rule) -> Rule:
    """``new``, checked on the shapes of the first call that asks for its strategies."""
    pending = [new]

    def strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        if pending:
            sample = _sample_of(node, graph)
            if sample is None:
                log.warning("the rule of %s is not checked: give register_rule samples=[(args, kwargs), …]", new.op)
            else:
                check_rule(new, [sample])
            pending.clear()
        return new.strategies(node, graph)

    return replace(new, space=strategies)


def _sample_of(node: Node, graph: Graph) -> Sample | None:
    """A call like ``node`` on random operands; None where it is too large or needs particular integers."""
    types = [graph.types[name] for name in node.inputs]
    if sum(t.numel for t in types) > LARGEST or not all(t.dtype.is_floating_point for t in types):
        return None
    random = torch.Generator("cpu").manual_seed(SEED)

    def tensor(ref: Ref) -> torch.Tensor:
        return torch.randn(graph.types[ref.name].shape, generator=random, dtype=torch.float64, device="cpu")

    args, kwargs = map_refs((node.args, dict(node.kwargs)), tensor)
    try:
        node.op(*args, **kwargs)
    except Exception as error:
        log.debug("%s does not take float64 operands: %s", node.op, error)
        return None
    return args, kwargs

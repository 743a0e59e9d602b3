"""Facts about ops, from their rules or schemas: views, randomness, saved tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from autoshard.passes.ir.analyses import cached_per_node
from autoshard.passes.ir.graph import Node, TensorType, argument_defaults, refs
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.base import DEFAULT_FACTS, Facts, Types
from autoshard.torch_private.ops import OpOverload


def facts_of(op: OpOverload) -> Facts:
    """The facts of the op's rule, or the safe defaults."""
    rule = rule_for(op)
    return DEFAULT_FACTS if rule is None else rule.facts


def is_view(op: OpOverload) -> bool:
    """Whether ``op`` returns a view of its operand at no cost."""
    stated = facts_of(op).view
    if stated is not None:
        return stated
    return _is_alias(op)


@cache
def _is_alias(op: OpOverload) -> bool:
    return any(a.alias_info is not None and not a.alias_info.is_write for a in op._schema.arguments)


def is_view_named(name: str) -> bool:
    """:func:`is_view` by full name such as ``aten.view.default``; False if it is not loaded."""
    op: Any = torch.ops
    for part in name.split("."):
        op = getattr(op, part, None)
    return isinstance(op, OpOverload) and is_view(op)


def is_random(node: Node | fx.Node) -> bool:
    """Whether ``node`` uses the random generator."""
    op = _op(node)
    if op is None:
        return False
    draws = facts_of(op).draws
    return torch.Tag.nondeterministic_seeded in op.tags if draws is None else draws(_arguments(op, node))


def can_redraw(node: Node) -> bool:
    """Whether recomputation may redraw the random intermediates that autograd saves."""
    return facts_of(node.op).redrawn and is_random(node)


def has_effect(node: Node | fx.Node) -> bool:
    """Whether dead-code elimination keeps ``node``: random, no result, or a check."""
    op = _op(node)
    return op is not None and (is_random(node) or not op._schema.returns or facts_of(op).effect)


def _op(node: Node | fx.Node) -> OpOverload | None:
    op: Any = node.target if isinstance(node, fx.Node) else node.op
    return op if isinstance(op, OpOverload) else None


def makes_tensor(node: Node) -> bool:
    """Whether the op is a factory (arange, zeros, …), so that it needs a device argument."""
    kinds = {a.name: str(a.type) for a in node.op._schema.arguments}
    return "device" in kinds and not any("Tensor" in kind for kind in kinds.values())


def _arguments(op: OpOverload, node: Node | fx.Node) -> dict[str, Any]:
    """The node's arguments by name, with the op's defaults."""
    known = argument_defaults(op)
    defaults = {name: default for name, (_, default) in known.items()}
    return {**defaults, **dict(zip(known, node.args, strict=False)), **node.kwargs}


@dataclass(frozen=True)
class Saved:
    """Tensors of one op that autograd saves for the backward."""

    operands: frozenset[int] = frozenset()
    """positions in ``node.inputs``"""
    results: frozenset[int] = frozenset()
    """positions in ``node.outputs``"""
    intermediates: tuple[TensorType, ...] = ()
    """tensors that are neither operands nor results"""


@cached_per_node
def saved_for_backward(node: Node, types: Types) -> Saved:
    """What autograd saves of ``node``; ``types`` may be local. A view keeps all of its base."""
    if not any(types[name].grad for name in node.outputs):
        return Saved()
    facts, operands = facts_of(node.op), _operand_names(node)
    results = [("result", f"result{slot}") if slot == 0 else (f"result{slot}",) for slot in node.output_slots]
    stated = facts.saves(node, types) if callable(facts.saves) else facts.saves
    if stated is None:
        kept = {name for names in (*operands, *results) for name in names}
    else:
        wanting = {n for value, names in zip(node.inputs, operands, strict=True) if types[value].grad for n in names}
        kept = _saved_names(stated, wanting)
    return Saved(
        frozenset(i for i, names in enumerate(operands) if not kept.isdisjoint(names)),
        frozenset(i for i, names in enumerate(results) if not kept.isdisjoint(names)),
        tuple(facts.intermediates(node, types)) if facts.intermediates else (),
    )


def saves_operand(node: Node, types: Mapping[str, TensorType], position: int) -> bool:
    """Whether autograd saves operand ``position`` of ``node`` for the backward."""
    return position in saved_for_backward(node, types).operands


def _saved_names(stated: str, wanting: set[str]) -> set[str]:
    """Saved names of a :attr:`Facts.saves` text, if the operands ``wanting`` require gradients."""
    kept: set[str] = set()
    for part in stated.split(";"):
        operand, colon, names = part.rpartition(":")
        if not colon or operand.strip() in wanting:
            kept.update(names.split())
    return kept


def _operand_names(node: Node) -> list[tuple[str, str]]:
    """Names of each of ``node.inputs``: its argument, and that with its index in a list."""
    return [(name, f"{name}{i}") for name, value in node.given for i, _ in enumerate(refs(value))]

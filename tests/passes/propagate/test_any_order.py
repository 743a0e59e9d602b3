"""What carries any order of a sequence: every operation that is taken for such, on the samples of its rule, permuted."""

from __future__ import annotations

import pytest
import torch
from every_sample import SAMPLES
from rule_samples import SHAPES_ONLY

from autoshard.check import rule_check
from autoshard.passes.ir.graph import Node, map_refs
from autoshard.passes.propagate import zigzag
from autoshard.passes.propagate.zigzag import ORDER_FREE_OPS, SequenceLink, order_free_links
from autoshard.passes.rules import all_rules, rule_for

aten = torch.ops.aten
OPS = [rule.op for rule in all_rules() if rule.op in SAMPLES]


def evaluated(node: Node, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    values = {f"x{i}": x for i, x in enumerate(operands)}
    args, kwargs = map_refs((node.args, dict(node.kwargs)), lambda ref: values[ref.name])
    found = node.op(*args, **kwargs)
    results = found if isinstance(found, tuple | list) else (found,)
    return [results[slot] for slot in node.output_slots]


def permuted(xs: list[torch.Tensor], dims: tuple[int | None, ...], order: torch.Tensor) -> list[torch.Tensor]:
    return [x if d is None else x.index_select(d, order) for x, d in zip(xs, dims, strict=True)]


def differs(node: Node, operands: list[torch.Tensor], link: SequenceLink) -> bool:
    """Whether the results of permuted operands are others than permuted results, beyond rounding."""
    named = dict(zip((*node.inputs, *node.outputs), (*link.inputs, *link.outputs), strict=True))
    dims = tuple(named.get(f"x{i}") for i in range(len(operands)))
    expected = evaluated(node, operands)
    length = next(
        x.shape[d] for x, d in zip((*operands, *expected), (*dims, *link.outputs), strict=True) if d is not None
    )
    order = torch.arange(length).roll(1)
    order[0], order[1] = order[1].item(), order[0].item()
    theirs = permuted(expected, link.outputs, order)
    ours = evaluated(node, permuted(operands, dims, order))
    return not all(map(_alike, theirs, ours))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (x if x.is_complex() else x.double() for x in (a, b))
    return torch.allclose(a, b, rtol=1e-5, atol=1e-9, equal_nan=True)


def tried(op: torch._ops.OpOverload) -> tuple[int, list[str]]:
    """How many links the samples of an operation have, and those that are wrong."""
    rule, found, wrong = rule_for(op), 0, []
    assert rule is not None
    for sample in SAMPLES[op]:
        example = rule_check._run_sample(rule, sample, False, None)
        for link in order_free_links(example.node, example.graph):
            found += 1
            if differs(example.node, [x.detach() for x in example.operands], link):
                wrong.append(f"{op}{example.graph.shapes(example.node.inputs)} {link}")
    return found, wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("step", "most"), [(5, 80), pytest.param(1, 500, marks=pytest.mark.slow)], ids=["some", "all"])
def test_what_is_carried_is_so_in_any_order(step: int, most: int) -> None:
    found = {op: tried(op) for op in [op for op in OPS if op not in SHAPES_ONLY][::step]}
    assert not [line for _, wrong in found.values() for line in wrong]
    assert not [str(op) for op in ORDER_FREE_OPS if op in found and not found[op][0]]
    assert step > 1 or found.keys() >= ORDER_FREE_OPS
    assert sum(bool(links) for links, _ in found.values()) > most


@pytest.mark.parametrize("op", [aten.cumsum.default, aten.cummax.default, aten.slice.Tensor], ids=str)
def test_what_is_not_is_noticed(op: torch._ops.OpOverload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: taken for what carries any order, it is found to be wrong."""
    monkeypatch.setattr(zigzag, "ORDER_FREE_OPS", ORDER_FREE_OPS | {op})
    monkeypatch.setattr(zigzag, "POSITION_REDUCTIONS", zigzag.POSITION_REDUCTIONS | {op})
    assert tried(op)[1]

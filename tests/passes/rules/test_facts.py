"""What rules say of their ops beside strategies, against autograd and the generator themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import linalg_samples
import pytest
import special_samples
import torch
import torch.nn.functional as F
import window_samples
from rule_samples import SAMPLES as GENERAL
from sample_makers import Sample, call, f
from special_samples import aten

from autoshard.models import Gpt, GptConfig
from autoshard.passes.capture.export import capture
from autoshard.passes.ir.graph import Node, Ref, TensorType
from autoshard.passes.rules import all_rules
from autoshard.passes.rules.facts import Saved, facts_of, is_random, is_view, is_view_named, saved_for_backward
from autoshard.passes.rules.families.loss import OF_LINEAR
from autoshard.runtime.attention.masked_attention import banded_op
from autoshard.runtime.operations.experts import experts_op

SAMPLES = {**GENERAL, **special_samples.SAMPLES, **linalg_samples.SAMPLES, **window_samples.SAMPLES}
SAMPLES[aten.scaled_dot_product_attention.default] = [
    *SAMPLES[aten.scaled_dot_product_attention.default],
    call(f(2, 3, 5, 4), f(2, 3, 6, 4), f(2, 3, 6, 4)),
    call(f(2, 3, 5, 4).float(), f(2, 3, 5, 4).float(), f(2, 3, 5, 4).float(), None, 0.0, True),
]
COPIED = {aten.einsum.default, aten.tensordot.default, experts_op._opoverload, banded_op._opoverload, OF_LINEAR}
"""keep a permuted copy in place of an operand where its dims lie in another order: as large, but not the same memory

Experts keep rows in the order of experts, a loss in chunks its rows in one dim, attention by position its result, where they
run by themselves: in local forms."""
MAY_BE_OPERAND = {"contiguous", "to", "type_as", "conj_physical", "dropout", "einsum", "tensordot", "_to_copy"}
"""return their operand as it is, or one of its views, where there is nothing to do"""

pytestmark = pytest.mark.filterwarnings(
    "ignore:The use of `x.T`", "ignore:at::frobenius_norm", "ignore:torch.meshgrid", "ignore:torch.cholesky"
)


class Run:
    """One call, what autograd kept of it, and the node that stands for it."""

    def __init__(self, op: torch._ops.OpOverload, sample: Sample, wanted: int | None) -> None:
        """``wanted``: the operand that wants a gradient; None: all that can."""
        self.operands: list[torch.Tensor] = []
        args = [self._lift(v, wanted) for v in sample[0]]
        kwargs = {k: self._lift(v, wanted) for k, v in sample[1].items()}
        kept: list[torch.Tensor] = []
        torch.manual_seed(0)
        before = torch.get_rng_state()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
            made = op(*self._given(args), **{k: self._given(v) for k, v in kwargs.items()})
        self.drew = not torch.equal(before, torch.get_rng_state())
        results = [*made] if isinstance(made, tuple | list) else [made]
        slots = tuple(i for i, x in enumerate(results) if isinstance(x, torch.Tensor))
        self.results = [results[i] for i in slots]
        self.storages = {_storage(x): x for x in kept}
        names = tuple(f"y{i}" for i in slots)
        self.node = Node("node", op, tuple(args), kwargs, names, slots)
        self.types = {f"x{i}": _type(x) for i, x in enumerate(self.operands)}
        self.types |= dict(zip(names, map(_type, self.results), strict=True))

    def _lift(self, value: Any, wanted: int | None) -> Any:
        if isinstance(value, torch.Tensor):
            i = len(self.operands)
            moves = (value.is_floating_point() or value.is_complex()) and wanted in (None, i)
            self.operands.append(value.detach().clone().requires_grad_(moves))
            return Ref(f"x{i}")
        return [self._lift(v, wanted) for v in value] if isinstance(value, tuple | list) else value

    def _given(self, tree: Any) -> Any:
        if isinstance(tree, Ref):
            return self.operands[int(tree.name[1:])]
        return [self._given(v) for v in tree] if isinstance(tree, tuple | list) else tree

    def kept(self, tensors: Sequence[torch.Tensor]) -> set[int]:
        """Positions of ``tensors`` that autograd keeps, other than as a view of an operand."""
        return {i for i, x in enumerate(tensors) if _storage(x) in self.storages}

    def intermediates(self, beside: Sequence[torch.Tensor]) -> Counter[tuple[torch.dtype, int]]:
        """(dtype, elements) of what it keeps beside these; numbers do not count."""
        known = {_storage(x) for x in beside}
        found = [x for storage, x in self.storages.items() if storage not in known]
        return Counter((x.dtype, _elements(x)) for x in found if _elements(x) > 1)


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _elements(x: torch.Tensor) -> int:
    return x.untyped_storage().nbytes() // x.itemsize


def _type(x: torch.Tensor) -> TensorType:
    return TensorType(tuple(x.shape), x.dtype, x.requires_grad)


def _runs(op: torch._ops.OpOverload) -> Iterator[Run]:
    """Every sample, with gradients for all operands and for each alone; none where the op has no such derivative."""
    for sample in SAMPLES[op]:
        count = len(Run(op, sample, -1).operands)
        for wanted in (None, *range(count), -1):
            try:
                yield Run(op, sample, wanted)
            except RuntimeError as error:
                if "not differentiable" not in str(error) and "not implemented" not in str(error):
                    raise


RULES = [rule.op for rule in all_rules()]


@pytest.mark.parametrize("op", RULES, ids=str)
def test_facts_are_those_of_torch(op: torch._ops.OpOverload) -> None:
    """What autograd keeps, operand by operand and result by result; what shares memory; what draws."""
    for run in _runs(op):
        shown = f"{run.node}: {', '.join(map(str, run.types.values()))}"
        _check_kept(run, shown)
        assert run.drew == is_random(run.node), shown
        memory = {_storage(x) for x in run.operands}
        shares = [_storage(x) in memory for x in run.results]
        if op._opname not in MAY_BE_OPERAND:
            assert all(shares) if is_view(op) else not any(shares), shown


def _check_kept(run: Run, shown: str) -> None:
    facts, stated = facts_of(run.node.op), saved_for_backward(run.node, run.types)
    if not any(x.requires_grad for x in run.results):
        assert stated == Saved(), shown
        return
    said = facts.saves(run.node, run.types) if callable(facts.saves) else facts.saves
    kept = run.kept(run.operands)
    if said is None or run.node.op in COPIED:
        assert kept <= stated.operands, shown
        return
    assert kept == stated.operands, shown
    if not is_view(run.node.op):
        assert run.kept(run.results) == stated.results, shown
    assert run.intermediates([*run.operands, *run.results]) == _sizes(stated.intermediates), shown
    if facts.intermediates and len(run.results) > 1:  # the others are kept although nobody reads them
        first = replace(run.node, outputs=run.node.outputs[:1], output_slots=(0,))
        found = run.intermediates([*run.operands, run.results[0]])
        assert found == _sizes(saved_for_backward(first, run.types).intermediates), shown


def _sizes(types: Sequence[TensorType]) -> Counter[tuple[torch.dtype, int]]:
    return Counter((t.dtype, t.numel) for t in types if t.numel > 1)


def test_an_op_without_a_rule_may_keep_all() -> None:
    """Also one with a rule that states nothing; without a gradient nothing is kept."""
    op = aten.special_multigammaln.default
    node = Node("node", op, (Ref("x"), 2), {}, ("y",), (0,))
    types = {n: TensorType((4,), torch.float32, grad=True) for n in "xy"}
    assert saved_for_backward(node, types) == Saved(frozenset({0}), frozenset({0}))
    assert saved_for_backward(node, {n: replace(t, grad=False) for n, t in types.items()}) == Saved()


@pytest.mark.parametrize(("dropout", "training"), [(0.1, True), (0.0, True), (0.1, False)])
def test_only_a_model_that_drops_is_random(dropout: float, training: bool) -> None:
    """Attention draws where its dropout is not 0: a forward without any need not agree on generators."""
    model = Gpt(replace(GptConfig.tiny(), dropout=dropout)).train(training)
    graph = capture(model, (torch.zeros(2, 4, dtype=torch.int64),), training=training)
    attentions = [n for n in graph.nodes if n.op is aten.scaled_dot_product_attention.default]
    draws = dropout > 0 and training
    assert attentions
    assert all(is_random(n) == draws for n in attentions)
    assert any(map(is_random, graph.nodes)) == draws


class Unread(torch.nn.Module):
    """Attention and dropout whose results nobody reads."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        F.scaled_dot_product_attention(x, x, x, dropout_p=self.p)
        F.dropout(x, self.p, training=True)
        return x + 1


@pytest.mark.parametrize(("p", "kept"), [(0.3, 2), (0.0, 0)])
def test_what_draws_stays_though_nobody_reads_it(p: float, kept: int) -> None:
    """It advances the generator; without a draw it goes."""
    graph = capture(Unread(p), (f(2, 3, 5, 4),), training=True)
    assert sum(node.op is not aten.add.Tensor for node in graph.nodes) == kept


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("aten.view.default", True),
        ("aten.mul.Tensor", False),
        ("aten.none_such.default", False),
        ("nobody.op.x", False),
    ],
)
def test_views_by_name(name: str, view: bool) -> None:
    assert is_view_named(name) == view

"""The factor notation: parsing, binding to shapes, errors."""

from __future__ import annotations

import pytest
import torch

from autoshard.errors import RuleError
from autoshard.layout import I, P, R, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
from autoshard.passes.rules.base import Rule
from autoshard.passes.rules.notation import parse, rule

aten = torch.ops.aten


def strategies(rule: Rule, *shapes: tuple[int, ...], result: tuple[int, ...], **kwargs: object) -> dict[str, Strategy]:
    """Strategies by label of one call on operands of ``shapes`` (None: the operand is absent)."""
    types = {f"x{k}": TensorType(s, torch.float64, True) for k, s in enumerate(shapes) if s is not None}
    args = tuple(None if s is None else Ref(f"x{k}") for k, s in enumerate(shapes))
    node = Node("node", rule.op, args, kwargs, ("y",), (0,))
    graph = Graph((), (node,), types | {"y": TensorType(result, torch.float64, True)}, (Ref("y"),), None, None)
    return {s.label: s for s in rule.strategies(node, graph)}


def test_parse_reads_terms() -> None:
    parsed = parse("b ... (h d), n _ -> b n")
    assert parsed.operands == ((("b",), ("...",), ("h", "d")), (("n",), ("_",)))
    assert parsed.results == ((("b",), ("n",)),)
    assert parse("k, k ->").results == ((),)
    assert parse("... -> ..., ...").results == ((("...",),), (("...",),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k, k n", "write operands, one '->', results"),
        ("a -> b -> c", "one '->'"),
        ("(a b -> a", "'(' is not closed in '(a b'"),
        ("((a) -> a", "nested parentheses"),
        ("() -> a", "')' without factors before it"),
        ("(a ...) -> a", "'...' inside parentheses"),
        ("... a ... -> a", "two '...'"),
        ("a -> ... a", "'...' stands in a result but in no operand"),
        ("a+b -> a", "cannot read '+b'"),
    ],
)
def test_parse_errors_name_the_term(text: str, message: str) -> None:
    with pytest.raises(RuleError) as error:
        parse(text)
    assert message in str(error.value)
    assert repr(text) in str(error.value)


def test_rule_error_names_the_op_and_its_tensors() -> None:
    with pytest.raises(
        RuleError, match=r"aten\.mm\.default: .* has 1 operands, but the op takes 2 tensors \(self, mat2\)"
    ):
        rule(aten.mm.default, "m k -> m")


def test_binding_errors_name_operand_and_fix() -> None:
    with pytest.raises(RuleError, match=r"operand 1 'k n' has 2 dims, but its shape \[2, 3, 4\] has 3. Name every dim"):
        strategies(rule(aten.mm.default, "m k, k n -> m n"), (5, 3), (2, 3, 4), result=(5, 4))
    with pytest.raises(RuleError, match="factor 'k' is 3 long in one operand and 7 in another"):
        strategies(rule(aten.mm.default, "m k, k n -> m n"), (5, 3), (7, 4), result=(5, 4))


def test_the_sentence() -> None:
    """Operands with the factor are sharded, others replicated; results without it are partial."""
    found = strategies(rule(aten.mm.default, "m k, k n -> m n"), (5, 3), (3, 4), result=(5, 4))
    assert found["I"] == Strategy("I", (I, I), (I,))
    assert found["R"] == Strategy("R", (R, R), (R,))
    assert found["m"] == Strategy("m", (Shard(0), R), (Shard(0),), 5, divides=True)
    assert found["k"] == Strategy("k", (Shard(1), Shard(0)), (P,), 3, divides=True)
    assert found["n"] == Strategy("n", (R, Shard(1)), (Shard(1),), 4, divides=True)
    assert set(found) == {"I", "R", "m", "k", "n"}


def test_bias_is_added_once() -> None:
    linear = rule(aten.linear.default, "... k, n k, n -> ... n", linear=((0, 2), (1, 2)), addends=(2,))
    found = strategies(linear, (2, 5, 3), (4, 3), (4,), result=(2, 5, 4))
    assert found["k"].inputs == (Shard(2), Shard(1), P)
    assert found["n"].inputs == (R, Shard(0), Shard(0))
    assert found["...0"].inputs == (Shard(0), R, R)
    assert found["P(0,2)"].inputs == (P, R, P)
    without = strategies(linear, (2, 5, 3), (4, 3), result=(2, 5, 4))
    assert without["k"] == Strategy("k", (Shard(2), Shard(1)), (P,), 3, divides=True)
    assert without["P(0)"].inputs == (P, R)


def test_broadcast_operands_lack_the_factor() -> None:
    found = strategies(rule(aten.mul.Tensor, "..., ... -> ..."), (2, 1, 4), (3, 1), result=(2, 3, 4))
    assert found["...0"].inputs == (Shard(0), R)
    assert found["...1"].inputs == (R, Shard(0))
    assert found["...2"].inputs == (Shard(2), R)


def test_factors_of_length_one_are_not_sharded() -> None:
    assert set(strategies(rule(aten.neg.default, "... -> ..."), (1, 4), result=(1, 4))) == {"I", "R", "...1"}


def test_a_constant_beside_a_sum_is_not_linear() -> None:
    add = rule(aten.add.Tensor, "..., ... -> ...", linear=((0, 1),))
    types = {"x": TensorType((4,), torch.float64), "y": TensorType((4,), torch.float64)}

    def labels(other: object) -> set[str]:
        node = Node("node", aten.add.Tensor, (Ref("x"), other), {}, ("y",), (0,))
        return {s.label for s in add.strategies(node, Graph((), (node,), types, (), None, None))}

    assert "P(0,1)" in labels(Ref("x"))
    assert labels(1.0) == {"I", "R", "...0"}
    assert "P(0)" in labels(0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.uint16, torch.float8_e5m2], ids=str)
def test_what_collectives_do_not_add_up_has_no_summands(dtype: torch.dtype) -> None:
    clone = rule(aten.clone.default, "... -> ...", linear=((0,),))
    types = {"x": TensorType((4,), dtype), "y": TensorType((4,), dtype)}
    node = Node("node", aten.clone.default, (Ref("x"),), {}, ("y",), (0,))
    assert {s.label for s in clone.strategies(node, Graph((), (node,), types, (), None, None))} == {"I", "R", "...0"}


def test_compound_dims_shard_their_outermost_factor_evenly() -> None:
    heads = rule(aten.clone.default, "b (h d) -> b h d")
    found = strategies(heads, (2, 12), result=(2, 3, 4))
    assert found["h"] == Strategy("h", (Shard(1),), (Shard(1),), 3, even=True, divides=True)
    assert "d" not in found
    assert set(strategies(heads, (2, 4), result=(2, 1, 4))) == {"I", "R", "b", "d"}


def test_whole_dims_and_repeated_factors_are_not_sharded() -> None:
    assert set(strategies(rule(aten.clone.default, "a _ -> a _"), (4, 3), result=(4, 3))) == {"I", "R", "a"}
    assert set(strategies(rule(aten.clone.default, "a a -> a a"), (4, 4), result=(4, 4))) == {"I", "R"}

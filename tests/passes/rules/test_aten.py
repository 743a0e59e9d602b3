"""An op that this version of torch lacks costs its rule, and nothing else."""

from __future__ import annotations

import pytest
import torch

from autoshard.aten import MissingOp, aten
from autoshard.errors import AutoshardError
from autoshard.passes.rules import all_rules
from autoshard.passes.rules.base import ops
from autoshard.passes.rules.notation import rule


def test_an_op_that_is_there_is_that_of_torch() -> None:
    assert aten.add.Tensor is torch.ops.aten.add.Tensor
    assert set(aten.add.overloads()) == set(torch.ops.aten.add.overloads())


@pytest.mark.parametrize("op", [aten.no_such_op.default, aten.add.no_such_overload], ids=str)
def test_an_op_that_is_missing_has_no_rule_and_is_refused_by_name(op: MissingOp) -> None:
    assert op not in {r.op for r in all_rules()}
    assert isinstance(rule(op, "m -> m").op, MissingOp)
    with pytest.raises(AutoshardError, match=f"has no op {op}: see docs/compatibility.md"):
        op(torch.ones(2))


def test_lists_of_ops_leave_out_what_is_missing() -> None:
    assert ops("add.Tensor no_such_op.default") == (torch.ops.aten.add.Tensor,)


def test_no_rule_is_of_an_op_that_is_missing() -> None:
    assert not [r for r in all_rules() if isinstance(r.op, MissingOp)]
    assert len(all_rules()) > 500

"""Labels that lie whole on every rank are counted there: the mean over them needs no collective of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn_models import changed
from harness import ideal
from lowering_steps import change
from torch import Tensor, nn

import autoshard
from autoshard.compiler import capture_graph
from autoshard.errors import PlanError
from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import LocalCall, Program
from autoshard.passes.ir.verify import check_program
from autoshard.passes.lower.lowering import count_labels_locally
from autoshard.passes.propagate.objective import alternatives, objective
from autoshard.plans.options import CompileOptions
from autoshard.plans.planning import plan_graph

LABELS = torch.tensor([1, -100, 2, 0, -100, -100, -100, -100, 3, 1, 0, 2])
"""rows of ranks that ignore some, most and none of theirs"""


class Classifier(nn.Module):
    def __init__(self, log: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.log = nn.Linear(6, 4), log
        self.register_buffer("weight", torch.rand(4) + 0.5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x)
        if self.log:
            return F.nll_loss(logits.log_softmax(-1), labels, self.weight)
        return F.cross_entropy(logits, labels, self.weight, label_smoothing=0.1)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64), LABELS


def counts(sharded: Any) -> list[str]:
    return [c.reason for c in sharded.plan.collectives if c.reason.endswith("count")]


def test_a_loss_over_rows_reads_all_labels() -> None:
    """Negative control: not where every rank has all rows."""
    given = torch.zeros(12, 6), LABELS
    call = "runtime.cross_entropy(linear, labels__1, weight=b_weight, label_smoothing=0.1, batch_axes='tp'"
    assert change(count_labels_locally, Classifier(), *given, like="ddp") == [
        f"- cross_entropy_loss: f32[] P@tp = {call})",
        f"+ cross_entropy_loss: f32[] P@tp = {call}, counted=labels)",
    ]
    assert change(count_labels_locally, Classifier(), *given, like="replicate") == []


@pytest.mark.slow_cases("*-nll_loss")
@pytest.mark.parametrize("log", [False, True], ids=["cross_entropy", "nll_loss"])
@pytest.mark.parametrize("local", [False, True], ids=["whole", "in parts"])
def test_of_whole_labels_every_rank_counts_all(log: bool, local: bool) -> None:
    """Ranks ignore differently many; labels that come in parts are counted together, as before."""
    model = Classifier(log).double()
    wanted = model(*inputs())
    expected = torch.autograd.grad(wanted, list(model.parameters()))
    come = "local" if local else "global"
    sharded = autoshard.compile(model, ideal({"dp": 3}), inputs(), like="ddp", inputs=come, training=True)
    assert ("counted=labels" in sharded.source, bool(counts(sharded))) == (not local, local)
    loss = sharded(*inputs())
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    for name, gradient in zip(("head.weight", "head.bias"), expected, strict=True):
        torch.testing.assert_close(sharded.full_gradients()[name], gradient, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("recompute", ["none", {"head": True}], ids=["kept", "made again"])
@pytest.mark.parametrize("come", ["global", "local"])
def test_the_price_of_a_count_is_that_of_what_runs(come: str, recompute: Any) -> None:
    """Of whole labels none is sent, and none is paid for: by the search, in the plan, and of alternatives."""
    mesh = autoshard.Mesh({"dp": 3}, "cpu")
    options = {"like": "ddp", "inputs": come, "recompute": recompute, "training": True}
    plan = autoshard.plan(Classifier().double(), mesh, inputs(), **options)
    assert any(c.reason.endswith("count") for c in plan.collectives) == (come == "local")
    assert plan.cost.comm_s == pytest.approx(sum(c.seconds for c in plan.collectives) + plan.cost.local_s, abs=1e-5)
    assert plan.cost.total_s == pytest.approx(plan.cost.lower_bound)


@pytest.mark.parametrize("come", ["global", "local"])
def test_alternatives_of_a_loss_pay_for_its_count(come: str) -> None:
    graph = capture_graph(Classifier().double(), inputs(), {}, training=True)
    local = {} if come == "global" else {"labels": autoshard.Shard(0)}
    assignment = plan_graph(graph, autoshard.Mesh({"dp": 3}, "cpu"), CompileOptions(hints=local))[0].assignment
    (loss,) = (n for n in graph.nodes if "cross_entropy" in str(n.op))
    found, total = alternatives(assignment, limit=100)[loss.name], objective(assignment).total_s
    assert found
    for labels, more in found:
        other = objective(changed(assignment, loss, labels)).total_s
        assert other - total == pytest.approx(more, abs=1e-9 * total)


def test_a_run_sends_the_loss_and_the_gradients_and_nothing_else() -> None:
    sharded = autoshard.compile(Classifier().double(), ideal({"dp": 3}), inputs(), like="ddp", training=True)
    sharded.record(executed := [])
    sharded(*inputs()).backward()
    assert [(e.kind, e.phase) for e in executed] == [("all_reduce", "forward"), ("all_reduce", "backward")]


def program() -> Program:
    graph = capture_graph(Classifier().double(), inputs(), {}, training=True)
    return plan_graph(graph, ideal({"dp": 3}), CompileOptions(like="ddp"))[0]


def test_labels_in_parts_are_no_count_of_all() -> None:
    """The check of programs refuses labels that are cut, and values that are no labels."""
    right = program()
    check_program(right)
    (at,) = [i for i, s in enumerate(right.statements) if "counted" in s.call.kwargs]
    s = right.statements[at]
    for wrong in (s.call.args[1], Ref("x")):
        call = LocalCall(s.call.fn, s.call.args, {**s.call.kwargs, "counted": wrong})
        statements = (*right.statements[:at], replace(s, call=call), *right.statements[at + 1 :])
        with pytest.raises(PlanError, match="not as the full tensor of its labels"):
            check_program(replace(right, statements=statements))

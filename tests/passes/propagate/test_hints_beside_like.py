"""A hint beside a named strategy: it wins over what the plan says of that parameter, and all else stays as the plan has it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import routing_models
import torch
from expert_models import Averaged
from harness import assert_equal_training, ideal
from table_models import DCN, AsManyAsGiven, Regular, fields, owners, towers, trains_alike
from torch import nn

import autoshard
from autoshard import Replicate, Shard
from autoshard.passes.capture.export import capture
from autoshard.passes.propagate.hints import resolve_hints
from autoshard.passes.propagate.named_strategies import InfeasibleStrategyError, resolve_like
from autoshard.passes.propagate.planner import Planner

X, BOTH = {"x": 2}, {"dp": 2, "x": 2}
WHOLE, ROWS, COLUMNS = "I", "S(0)", "S(1)"


def tables_of(plan: autoshard.Plan) -> dict[str, str]:
    """How every table lies along x."""
    tables = ("tables.", "seen", "liked", "tags", "items")
    return {
        n: str(plan.layouts[n]["x"]) for n, kind in plan.kinds.items() if kind == "parameter" and n.startswith(tables)
    }


@pytest.mark.slow_cases("column-wise-*", "row-wise-*-rows-*")
@pytest.mark.parametrize("mesh", [X, pytest.param(BOTH, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    ("hint", "lies"),
    [
        ("rowwise", ROWS),
        ("colwise", COLUMNS),
        ("replicate", WHOLE),
        (Shard(1), COLUMNS),
        ({"x": Shard(0)}, ROWS),
        ({"x": Replicate()}, WHOLE),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bags", "rows"])
@pytest.mark.parametrize(("like", "others"), [("table-wise", "O("), ("row-wise", ROWS), ("column-wise", COLUMNS)])
def test_a_hint_on_one_table(kind: str, like: str, others: str, hint: Any, lies: str, mesh: dict[str, int]) -> None:
    if kind == "bags":
        model, args = Regular(), (torch.randint(5, (8, 3)), torch.randn(8, 12, dtype=torch.float64))
    else:
        model, args = fields(DCN, False, 8)
    asked = like if mesh == X else {"dp": "ddp", "x": like}
    plan = autoshard.plan(model, ideal(mesh), args, like=asked, hints={"tables.1.weight": hint})
    found = tables_of(plan)
    assert found.pop("tables.1.weight") == lies
    assert all(x.startswith(others) for x in found.values()), found


@pytest.mark.parametrize(
    ("hints", "mesh"),
    [
        ({"seen.weight": "rowwise", "items": "replicate"}, X),
        ({"tags": "colwise"}, BOTH),
        pytest.param({"tags.weight": {"dp": Shard(0)}}, BOTH, marks=pytest.mark.slow),
        pytest.param(
            {"seen.weight": "colwise", "tags": "rowwise", "items": "replicate"}, {"x": 4}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_it_trains_as_without_a_mesh(hints: dict[str, Any], mesh: dict[str, int]) -> None:
    like = {a: "table-wise" if a == "x" else "ddp" for a in mesh}
    sharded = trains_alike(towers(sparse=True), mesh, "SGD", like=like, hints=hints)
    hinted = {p.removesuffix(".weight") for p in hints}
    assert {n.partition(".")[0] for n in owners(sharded)} == {"seen", "liked", "tags", "items"} - hinted


def test_a_hint_that_says_nothing_of_the_axis_of_tables_leaves_them_their_owners() -> None:
    like, hints = {"dp": "ddp", "x": "table-wise"}, {"tables.1.weight": {"dp": Replicate()}}
    plan = autoshard.plan(*_dcn(BOTH), like=like, hints=hints)
    assert all(x.startswith("O(") for x in tables_of(plan).values())


def _dcn(mesh: dict[str, int]) -> tuple[nn.Module, autoshard.Mesh, Any]:
    model, args = fields(DCN, False, 8)
    return model, ideal(mesh), args


def test_a_tp_plan_has_no_word_for_a_table_on_one_rank() -> None:
    """One that is cut by row is said, the others are named as left unsaid."""
    model, mesh, args = _dcn(X)
    found = autoshard.plan(model, mesh, args, like="table-wise", hints={"tables.1.weight": "rowwise"}).to_tp_plan()
    assert found["tables.1"] == "embedding_rowwise"
    assert not {"tables.0", "tables.*"} & found.keys()
    assert any(text.startswith("parameter tables.0.weight has layout O(") for text in found.unsaid)


def test_what_an_error_advises_for_a_table_works() -> None:
    """A call that reads one table alone is refused; with the hint that the error names it is not."""
    model, x, ids = AsManyAsGiven().double(), torch.randn(8, 4, dtype=torch.float64), torch.randint(7, (8, 2))
    sharded = autoshard.compile(copy.deepcopy(model), ideal(X), (x, ids), like="table-wise")
    with pytest.raises(autoshard.PlanError) as raised:
        sharded(x, ids[:, :1])
    advised = {"tables.0.weight": "replicate"}
    assert f'hints={{{next(iter(advised))!r}: "replicate"}}' in str(raised.value)
    sharded = autoshard.compile(copy.deepcopy(model), ideal(X), (x, ids), like="table-wise", hints=advised)
    assert tables_of(sharded.plan) == {"tables.0.weight": "I", "tables.1.weight": "O(0)"}
    for given in ((x, ids), (x, ids[:, :1])):
        torch.testing.assert_close(sharded(*given), model(*given), rtol=1e-9, atol=0)


@pytest.mark.slow
def test_what_an_error_advises_for_experts_works() -> None:
    x, model = torch.randn(8, 6, routing_models.WIDTH), Averaged("modules", True)
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"ep": 2}), (x,), like="expert")
    with pytest.raises(autoshard.PlanError) as raised:
        sharded.eval()(x)
    assert '{"experts.*": "replicate"} for all experts of a list' in str(raised.value)
    sharded = autoshard.compile(
        copy.deepcopy(model), ideal({"ep": 2}), (x,), like="expert", hints={"experts.*": "replicate"}
    )
    for training in (True, False):
        torch.testing.assert_close(sharded.train(training)(x), model.train(training)(x))


@pytest.mark.slow_cases("rowwise", "{'ep': Replicate()}")
@pytest.mark.slow
@pytest.mark.parametrize("hint", ["replicate", "rowwise", {"ep": Replicate()}], ids=str)
def test_a_hint_on_one_of_several_experts_is_refused_by_name(hint: Any) -> None:
    """They are computed together: the error names the hint, the parameter and what to do, and that works."""
    x, model = torch.randn(8, 6, routing_models.WIDTH), routing_models.Modules("modules", True)
    name = next(n for n, _ in model.named_parameters() if n.startswith("experts.2.") and n.endswith("weight"))
    pattern = "experts.*.*.weight"  # gates, and what they gate, are computed together, too
    with pytest.raises(autoshard.PlanError) as raised:
        autoshard.plan(model, {"ep": 2}, (x,), like="expert", hints={name: hint})
    told = str(raised.value)
    assert told.startswith(f"hint {name!r} moves parameter {name!r} away from its rank along 'ep'")
    assert told.endswith(f"Hint all of them, by {pattern!r}, or none")
    assert_equal_training(model, {"ep": 2}, (x,), like="expert", hints={pattern: hint}, steps=1, share=2.0)


@pytest.mark.slow
def test_a_hint_along_another_axis_than_that_of_experts() -> None:
    x, model = torch.randn(8, 6, routing_models.WIDTH), routing_models.Modules("modules", True)
    name = next(n for n, _ in model.named_parameters() if n.startswith("experts.2.") and n.endswith("weight"))
    like = {"dp": "fsdp", "ep": "expert"}
    plan = autoshard.plan(model, {"dp": 2, "ep": 2}, (x,), like=like, hints={name: {"dp": Replicate()}})
    assert str(plan.layouts[name]["dp"]) == "I"
    assert plan.layouts[name].owner


@pytest.mark.parametrize("axes", [X, BOTH], ids=str)
def test_what_cannot_be_met_names_hints_and_axes_that_there_are(axes: dict[str, int]) -> None:
    """Where nothing gives way: of a look-up that is asked for table-wise, and its table by row."""
    model, args = fields(DCN, False, 8)
    graph, mesh = capture(model, args, {}, training=True), ideal(axes)
    expert = resolve_like("table-wise", graph, mesh)
    for hints, told, advice in (
        ({"tables.1": "rowwise"}, "Hints: 'tables.1' (on tables.1.weight).", "fewer hints."),
        ({"tables.*": "rowwise"}, "'tables.*' (on tables.2.weight) and 2 more.", "fewer hints."),
    ):
        constraints = resolve_hints(hints, graph, mesh)
        with pytest.raises(InfeasibleStrategyError) as raised:
            Planner(graph, mesh, constraints, replace(expert, limits={})).cheapest()
        assert told in str(raised.value)
        assert str(raised.value).endswith(advice)
        assert ("like={'x': 'megatron-sp'}" in str(raised.value)) == (axes == BOTH)
        assert "'tp'" not in str(raised.value)

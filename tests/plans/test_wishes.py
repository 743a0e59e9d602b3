"""What is asked of micro-batches, stages, schedules, devices, open lengths and a plan that is given, beside each other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import ideal
from microbatch_cases import far, loss_of, made
from state_harness import same_gradients

import autoshard
from autoshard import Mesh, Plan, Shard
from autoshard.errors import AutoshardError, PlanError

pytestmark = pytest.mark.usefixtures("remembering")


def planned(axes: dict[str, int], **asked: Any) -> Plan:
    """As it comes back from a file."""
    model, args = made("regression")
    return Plan.from_json(autoshard.plan(model, ideal(axes), args, **asked).to_json())


STAGED = {"stages": "pp", "micro_batches": 4}


@pytest.mark.slow_cases("{'stages': 'pp', 'micro_batches': 4, 'schedule': 'gpipe'}")
@pytest.mark.parametrize(
    "asked",
    [
        STAGED | {"schedule": "gpipe"},
        pytest.param(STAGED | {"schedule": "zero_bubble"}, marks=pytest.mark.slow),
        {"micro_batches": 2},
    ],
    ids=str,
)
def test_a_plan_brings_what_it_was_made_for(asked: dict[str, Any]) -> None:
    """Alone, and beside what it says itself, or "auto"; programs of other shapes have it, too."""
    axes = {"pp": 2} if "stages" in asked else {"dp": 2}
    plan, (model, args) = planned(axes, **asked), made("regression")
    several = [{}, asked, {"micro_batches": "auto"}]
    for given in several:
        sharded = autoshard.compile(copy.deepcopy(model), ideal(axes), args, plan=plan, **given)  # type: ignore[arg-type]
        assert len(sharded.source) > 1000
        found = sharded.plan.staged
        assert (found is not None) == ("stages" in asked)
        if found is not None:
            assert (found.axis, found.schedule, found.micro_batches) == ("pp", asked["schedule"], 4)
        else:
            assert sharded.plan.micro_batches == 2
        for rows in (8, 16) if not given else (8,):
            batch = tuple(x.repeat(rows // 8, 1) for x in args)
            losses = [m(*batch)["loss"] for m in (model, sharded)]
            assert far(losses[1], losses[0]) <= 1e-9
            for m, loss in zip((model, sharded), losses, strict=True):
                m.zero_grad()
                loss.backward()
            same_gradients(sharded, model)
    assert autoshard.verify(model, ideal(axes), args, plan=plan).ok


def test_what_a_plan_was_not_made_for_is_refused() -> None:
    gpipe, parts, whole = (
        planned({"pp": 2}, **STAGED, schedule="gpipe"),
        planned({"pp": 2}, micro_batches=4),
        planned({"pp": 2}),
    )
    model, args = made("regression")
    for plan, asked, text in (
        (
            gpipe,
            {"schedule": "zero_bubble"},
            "schedule='zero_bubble': the given plan was made for schedule='gpipe'. Leave",
        ),
        (gpipe, {"micro_batches": 2}, "micro_batches=2: the given plan was made for micro_batches=4"),
        (gpipe, {"stages": "dp"}, "stages='dp': the given plan was made for stages='pp'"),
        (parts, {"micro_batches": 2}, "micro_batches=2: the given plan was made for micro_batches=4"),
        (whole, {"micro_batches": 4}, "micro_batches=4: the given plan was made for micro_batches=1"),
        (whole, {"stages": "pp"}, "the given plan has no stages"),
    ):
        with pytest.raises(PlanError) as raised:
            autoshard.compile(model, ideal({"pp": 2}), args, plan=plan, **asked)  # type: ignore[arg-type]
        assert text in str(raised.value)


def test_a_plan_is_refused_beside_what_it_was_not_made_for() -> None:
    """Of a named strategy and hints; the same ones are for later calls of other shapes, and go with it."""
    model, args = made("regression")
    weight = next(n for n, p in model.named_parameters() if p.ndim == 2)
    hints = {weight: {"x": Shard(1)}, "x": {"micro_batch": Shard(0)}}
    axes = {"dp": 2, "x": 2}
    like = {"dp": "fsdp", "x": "megatron"}
    free, plan = planned(axes), planned(axes, like=like, hints=hints, micro_batches=2)
    for given, asked, text in (
        (
            free,
            {"like": "ulysses"},
            "like='ulysses': the given plan was made without like=. Leave like= out, or",
        ),
        (plan, {"like": "ddp"}, f"like='ddp': the given plan was made for like={like!r}. Leave like= out, or"),
        (plan, {"hints": {weight: {"x": Shard(0)}}}, f"hint {weight!r}: in the given plan {weight!r} has layout"),
        (plan, {"hints": {weight: "replicate"}}, f"hint {weight!r}: in the given plan {weight!r} has layout"),
        (plan, {"hints": {"nowhere": "replicate"}}, "hint 'nowhere' matches no parameter, buffer, input or module"),
    ):
        for does in (autoshard.compile, autoshard.verify):
            with pytest.raises(AutoshardError) as raised:
                does(model, ideal(axes), args, plan=given, **asked)  # type: ignore[operator]
            assert str(raised.value).startswith(text)
    flat = planned({"x": 2}, like="megatron")
    for one in ("megatron", {"x": "megatron"}):
        assert (
            autoshard.compile(copy.deepcopy(model), ideal({"x": 2}), args, plan=flat, like=one).plan.like
            == "'megatron'"
        )
    alike = {"x": "megatron", "dp": "fsdp"}
    sharded = autoshard.compile(copy.deepcopy(model), ideal(axes), args, plan=plan, like=alike, hints=hints)
    assert sharded.plan.layouts[weight] == plan.layouts[weight]
    for rows in (8, 16):
        batch = tuple(x.repeat(rows // 8, 1) for x in args)
        assert far(sharded(*batch)["loss"], model(*batch)["loss"]) <= 1e-9
        assert sharded.plan.like in (repr(like), repr(alike)), "of the other shape, too"


def test_a_plan_of_inference_leaves_training_its_micro_batches() -> None:
    model, args = made("regression")
    plan = planned({"dp": 2}, training=False)
    sharded = autoshard.compile(
        copy.deepcopy(model), ideal({"dp": 2}), args, plan=plan, training=False, micro_batches=4
    )
    assert torch.equal(sharded(*args)["hits"], model(*args)["hits"])


@pytest.mark.parametrize(
    ("where", "asked", "text"),
    [
        ({"mesh": {"dp": 2}}, {"schedule": "gpipe"}, "schedule='gpipe' needs stages"),
        ({"devices": 2}, {"schedule": "gpipe"}, "schedule='gpipe' needs stages"),
        ({"mesh": {"dp": 2}}, {"schedule": "gpipe", "training": False, "objective": "latency"}, "needs stages"),
        ({"devices": 2}, {"schedule": "fifo", "stages": "pp"}, "schedule='fifo' is not known. Known: 'gpipe', '1f1b'"),
        ({"devices": 2}, {"stages": "depth"}, "stages='depth': with devices= the axis of stages is 'pp'"),
        (
            {"devices": 1},
            {"stages": "pp"},
            "no pipeline of these h100 has a plan: 1 devices cannot form 2 or more stages",
        ),
        ({"devices": 2}, {"stages": "pp", "micro_batches": 3}, "a batch of 8 does not divide into 3 micro-batches"),
        (
            {"devices": 2},
            {"stages": "pp", "memory_budget": 1},
            "spread over all ranks, but a rank may hold",
        ),
        ({"devices": 2}, {"stages": "pp", "dynamic": True}, "a batch of open length (dynamic) is one micro-batch"),
        ({"devices": 2}, {"micro_batches": 2, "dynamic": True}, "micro_batches=2 with open lengths (dynamic)"),
        ({"mesh": {"dp": 2}}, {"micro_batches": 2, "dynamic": True}, "micro_batches=2 with open lengths (dynamic)"),
        ({"mesh": {"pp": 2}}, {**STAGED, "dynamic": True}, "micro_batches=4 with open lengths (dynamic)"),
    ],
)
def test_what_does_not_go_together(where: dict[str, Any], asked: dict[str, Any], text: str) -> None:
    """An error that says why, where something was left out in silence, or the reason was."""
    model, args = made("regression")
    with pytest.raises(AutoshardError) as raised:
        autoshard.plan(model, example_args=args, **where, **asked)
    assert text in str(raised.value)
    if "mesh" in where and "objective" not in asked:
        with pytest.raises(AutoshardError) as raised:
            autoshard.compile(model, **where, example_args=args, **asked)
        assert text in str(raised.value)


def test_open_lengths_without_a_backward() -> None:
    """The batch goes as one, whatever micro-batches are asked for; a call with a backward is refused when it comes."""
    model, args = made("regression")
    sharded = autoshard.compile(copy.deepcopy(model).eval(), ideal({"dp": 2}), args, micro_batches=4, dynamic=True)
    with torch.no_grad():
        for rows in (6, 8):
            given = tuple(x[:rows] for x in args)
            assert far(sharded(*given)["found"], model.eval()(*given)["found"]) <= 1e-12
    assert len(sharded.programs) == 1
    with pytest.raises(PlanError, match="micro_batches=4 with open lengths"):
        sharded(*args)


@pytest.mark.slow_cases("mesh0-megatron")
@pytest.mark.parametrize(
    ("mesh", "like"),
    [
        (ideal({"tp": 2}), "megatron"),
        *(pytest.param(ideal({"tp": 2}), like, marks=pytest.mark.slow) for like in (None, "ddp")),
        (Mesh({"dp": 2}), None),  # whole, and of what is whole the gradient decides where it is summed
    ],
)
def test_a_plan_serves_a_model_that_trains_other_parameters(mesh: Mesh, like: Any) -> None:
    """Planned with all of them and compiled with one frozen, and the other way round."""
    model, args = made("gpt")
    for name in ("token_embedding.weight", "blocks.0.norm_1.weight", "blocks.0.up.weight"):
        frozen = copy.deepcopy(model)
        frozen.get_parameter(name).requires_grad_(False)
        for planned, trained in (model, frozen), (frozen, model):
            plan = autoshard.plan(planned, mesh, args, like=like)
            reference = copy.deepcopy(trained)
            sharded = autoshard.compile(copy.deepcopy(trained), mesh, args, plan=plan)
            for module in (reference, sharded):
                torch.manual_seed(0)
                loss_of(module(*args)).backward()
            for n, p in reference.named_parameters():
                found = sharded.get_parameter(n).grad
                assert (found is None) == (p.grad is None) == (n == name and trained is frozen)
                assert p.grad is None or far(found, p.grad) <= 1e-9

"""Mixtures of experts: every model's routing is one operation, whose rows travel to their experts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import routing_models
import torch
import torch.nn.functional as F
from expert_models import Loss, model_of, routed, text
from harness import assert_equal_training, collectives, ideal
from state_experts import EVEN, Routed, batch
from torch import nn
from transformers_models import EXPERTS

import autoshard
import autoshard.models
from autoshard.compiler import capture_graph
from autoshard.runtime.operations.experts import experts_op
from autoshard.runtime.transport import in_process

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")


def exchanging(plan: autoshard.Plan) -> list[Any]:
    return [c for c in plan.collectives if "experts" in c.reason and c.kind == "all_to_all"]


EQUAL = [
    ("mixtral", {"ep": 2}, True), ("deepseek-v3", {"ep": 4}, False), ("mixtral", {"ep": 2, "tp": 2}, False),
    ("llama4", {"ep": 2}, False), ("llama4", {"ep": 2, "tp": 2}, False),
    ("qwen3", {"dp": 2, "ep": 2}, False), ("qwen3", {"ep": 2}, False), ("olmoe", {"ep": 2}, False),
    ("olmoe", {"dp": 2, "ep": 2}, False), ("deepseek-v3", {"ep": 2, "tp": 2}, False),
    ("gpt-oss", {"ep": 2, "tp": 2}, False), ("gpt-oss", {"dp": 2, "ep": 2}, False), ("lfm2", {"ep": 2}, False),
    ("dbrx", {"ep": 2}, False), ("dbrx", {"ep": 2, "tp": 2}, False), ("switch", {"ep": 2}, False),
    ("switch", {"ep": 2, "tp": 2}, False), ("longcat", {"ep": 2}, False), ("longcat", {"ep": 2, "tp": 2}, False),
    ("jetmoe", {"ep": 2}, False), ("jetmoe", {"ep": 2, "tp": 2}, False), ("minimax", {"dp": 2, "ep": 2}, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        pytest.param(
            n, a, id=f"{n}-{'-'.join(f'{x}{r}' for x, r in a.items())}", marks=[] if fast else pytest.mark.slow
        )
        for n, a, fast in EQUAL
    ],
)
def test_rows_travel_and_all_is_equal(name: str, axes: dict[str, int]) -> None:
    """Outputs, gradients and weights after 3 steps; no weight of an expert moves."""
    like = {a: "expert" if a == "ep" else None for a in axes}
    steps = 1 if name in ("switch", "longcat") else 3  # routers and norms in float32 enlarge the last bit of a weight
    report = assert_equal_training(model_of(name), axes, (), text(), steps=steps, like=like, share=1.5)
    assert exchanging(report.plan)
    assert not any(c.kind == "permute" and "experts" in (c.fqn or "") for c in report.plan.collectives)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXPERTS][:6])
@pytest.mark.parametrize("axes", [{"ep": 2, "tp": 2}, {"dp": 2, "ep": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_with_dropout_on(name: str, axes: dict[str, int]) -> None:
    """What attention drops is what it drops on one device, also where keys and values go round."""
    like: dict[str, Any] = {"ep": "expert", "cp": "ring", "tp": "megatron" if "cp" in axes else None}
    model = model_of(name, attention_dropout=0.2)
    report = assert_equal_training(model, axes, (), text(), steps=3, like={a: like.get(a) for a in axes})
    assert exchanging(report.plan) or "ep" not in axes
    rings = {label for c in report.plan.choices.values() if "attention" in c.op for label in c.labels}
    assert rings & {"ring", "zigzag ring", "ring with helpers"} or "cp" not in axes


@pytest.mark.slow
def test_every_form_is_one_operation() -> None:
    """The loop over experts, their matrices per row and the grouped product are captured as the same graph."""
    forms = ("eager", "batched_mm", "grouped_mm")
    graphs = [capture_graph(model_of("mixtral", f, 1), (), text(), training=True) for f in forms]
    ops = [[n.op for n in g.nodes] for g in graphs]
    assert ops[0] == ops[1] == ops[2]
    assert ops[0].count(experts_op._opoverload) == 1


FORMS = ("batched_mm", "grouped_mm")


@pytest.mark.slow
@pytest.mark.parametrize(
    "like", [{"ep": "expert"}, {"ep": "expert", "tp": "megatron"}, {"dp": "ddp", "ep": "expert"}], ids=str
)
@pytest.mark.parametrize(
    ("name", "form"),
    [*((n, f) for n in ("mixtral", "deepseek-v3", "qwen2", "qwen3", "olmoe") for f in FORMS), ("llama4", "eager")],
)
def test_forms_of_transformers_send_what_the_formula_says(
    name: str, form: str, like: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """(ep - 1)/ep of a rank's rows times k, four times a layer. Llama 4 has one form alone.

    torch's grouped product knows no float64: transformers' own one stands in for it where nothing is sharded.
    """
    monkeypatch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *_: False)
    axes, model = {"ep": 4} if len(like) == 1 else dict.fromkeys(like, 2), model_of(name, form)
    report = assert_equal_training(model, axes, (), text(), steps=3, like=like)
    rows, k = 24 / axes["ep"] / axes.get("dp", 1), model.config.num_experts_per_tok
    layers = sum("experts" in c.op for c in report.plan.choices.values())
    sent = [c.bytes for c in report.plan.collectives if c.kind == "all_to_all" and "numbers" not in c.reason]
    assert layers == (1 if name == "deepseek-v3" else 2)
    assert sent == [rows * k * model.config.hidden_size * 8 * (axes["ep"] - 1) / axes["ep"]] * 4 * layers
    weights = [
        c for c in report.plan.collectives if ".mlp.experts." in c.reason or ".feed_forward.experts." in c.reason
    ]
    assert {(c.kind, c.phase) for c in weights} <= {("all_reduce", "backward")}


def test_gates_are_asked_what_they_compute() -> None:
    """Limits, slopes and alternating gates are found by their numbers."""
    model = model_of("gpt-oss", "batched_mm", 1)
    (node,) = (n for n in capture_graph(model, (), text(), training=True).nodes if n.op is experts_op._opoverload)
    names = ("activation", "limit", "shift", "interleaved")
    assert [node.argument(name) for name in names] == ["swish 1.702", 7.0, 1.0, True]
    experts = model.model.layers[0].mlp.experts
    experts.limit = 100.0
    (node,) = (n for n in capture_graph(model, (), text(), training=True).nodes if n.op is experts_op._opoverload)
    assert node.argument("limit") == 100.0


@pytest.mark.slow_cases("weighed", "reshaped")
@pytest.mark.parametrize(
    "gate",
    [
        lambda self, x: x[..., ::2].sin(),
        lambda self, x: F.silu(x[..., ::2]) * x[..., 1::2] * self.learnt,
        lambda self, x: F.silu(x[..., ::2]) * x[..., 1::2].unflatten(-1, (1, self.intermediate_size)).squeeze(-2),
    ],
    ids=["alone", "weighed", "reshaped"],
)
def test_a_gate_that_gives_other_numbers_is_left_as_it_is(gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gpt-oss", "batched_mm", 1)
    experts = model.model.layers[0].mlp.experts
    monkeypatch.setattr(type(experts), "_apply_gate", gate)
    experts.learnt = nn.Parameter(torch.ones(())) if "learnt" in gate.__code__.co_names else None
    assert experts_op._opoverload not in [n.op for n in capture_graph(model, (), text(), training=True).nodes]


def test_what_is_more_than_two_products_is_left_as_it_is() -> None:
    model = model_of("mixtral", "batched_mm", 1)
    model.model.layers[0].mlp.experts.act_fn = nn.Tanh()
    graph = capture_graph(model, (), text(), training=True)
    assert experts_op._opoverload not in [n.op for n in graph.nodes]


@pytest.mark.slow_cases("many")
@pytest.mark.parametrize(("rows", "sent"), [(2, 2 * 2), (24, 4 * 8)], ids=["few", "many"])
def test_gates_meet_what_they_gate_as_rows_or_as_weights(rows: int, sent: int) -> None:
    """Features cut as one dim: a rank has all gates, the other none. What is less is sent: of rows, or of weights.

    Where gates are cut, and what they gate, nothing is.
    """
    ids = tuple((a % 4, (a + 2) % 4) for a in range(rows))
    for hints, expected in (
        ({"first": autoshard.Shard(1)}, {3 * 8 * sent}),
        (None, set()),
    ):  # half of 6 features, float64
        found = collectives(Loss(4), {"tp": 2}, hints, (batch(*ids),), like="megatron")
        halos = {size for (kind, _, phase, size) in found if kind == "permute" and phase == "forward"}
        assert halos == expected


def test_bytes_are_those_of_the_formula_and_those_sent() -> None:
    """Of an even routing: (n-1)/n of the chosen rows there and back, forward and backward."""
    ids = tuple((a % 4, (a + 2) % 4) for a in range(8))

    model = Loss(4)
    found = collectives(model, {"ep": 2}, None, (batch(*ids),), like="expert")
    rows = 8 / 2 * 2 * 8 * 8
    sent = Counter({(phase, size): n for (kind, _, phase, size), n in found.items() if kind == "all_to_all"})
    assert sent == Counter({("forward", rows / 2): 2, ("backward", rows / 2): 2, ("forward", 8 * 2 * 2 / 2): 1})


def test_an_exchange_that_mixes_up_ranks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    right = in_process._simulated_splits
    monkeypatch.setattr(in_process, "_simulated_splits", lambda moves, xs: [x.flip(0) for x in right(moves, xs)])
    report = autoshard.verify(Routed().double(), ideal({"ep": 2}), (batch(*EVEN),), like="expert")
    assert not report.ok


def test_a_rank_without_rows_serves_its_expert() -> None:
    """Four rows over three ranks are two, two and none."""
    report = autoshard.verify(Routed().double(), ideal({"ep": 3}), (batch(*EVEN[:4]),), like="expert")
    assert report.ok, report


def test_without_experts_it_is_fsdp() -> None:
    plan = autoshard.plan(nn.Linear(8, 8), ideal({"ep": 2}), (torch.randn(4, 8),), like="expert")
    assert any("no operation runs experts" in note and "docs/how-to/experts.md" in note for note in plan.notes)


@pytest.mark.slow
def test_experts_beside_the_plan_are_found_without_a_hint() -> None:
    """Mixtral at its size: rows travel, and no weight of an expert does."""
    config = transformers.MixtralConfig(num_hidden_layers=1, vocab_size=1024, use_cache=False)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config).bfloat16()
    tokens = torch.zeros(8, 4096, dtype=torch.long)
    plan = autoshard.plan(model, autoshard.Mesh({"x": 8}), (), {"input_ids": tokens, "labels": tokens})
    moved = [c for c in plan.collectives if "experts" in c.fqn]
    rows = 4096 * 2 * config.hidden_size * 2
    assert {c.kind for c in moved} == {"all_to_all"}
    assert sorted(c.bytes for c in moved)[-4:] == pytest.approx([rows * 7 / 8] * 4)
    assert all(
        plan.layouts[f"model.layers.0.mlp.experts.{w}"]["x"] == autoshard.Shard(0)
        for w in ("gate_up_proj", "down_proj")
    )


def test_what_goes_to_no_expert_adds_nothing() -> None:
    """As where a capacity drops rows: the others are what they are without them."""
    model = Routed().double()
    given = batch(*EVEN)
    dropped = {**given, "ids": given["ids"].clone()}
    dropped["ids"][1, 0], dropped["ids"][4, 1] = -2, len(model.first) + 1
    zeroed = {**given, "weights": given["weights"].clone()}
    zeroed["weights"][1, 0] = zeroed["weights"][4, 1] = 0
    torch.testing.assert_close(model(dropped)[0], model(zeroed)[0], rtol=1e-12, atol=0)
    assert not torch.equal(model(given)[0], model(zeroed)[0])
    for like in ("expert", "ddp"):
        report = autoshard.verify(model, ideal({"ep": 2}), (dropped,), like=like)
        assert report.ok, report


@pytest.mark.slow_cases("masked_modules", "half_turned", "modules", "masked_gates")
@pytest.mark.parametrize(
    "form",
    [
        "dense",
        "modules",
        "half_turned",
        "reshaped_gates",
        "masked_modules",
        "masked_gates",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("loop", "mask_loop", "mask_modules", "weighed_modules")),
        pytest.param("hit_modules", marks=pytest.mark.slow),
    ],
)
def test_routing_as_users_write_it(form: str) -> None:
    """Rows travel, weights do not; as many bytes as the operation sends where it is called."""
    x, sent = torch.randn(2, 6, routing_models.WIDTH), Counter[str]()
    report = assert_equal_training(routed(form), {"ep": 2}, (x,), like="expert", steps=1)
    for c in report.plan.collectives:
        sent[c.kind] += c.bytes * (c.phase == "forward")
    there = 12 * routing_models.TOP / 2 * routing_models.WIDTH * 8 / 2  # half of a rank's chosen rows, float64
    assert sent["all_to_all"] == 2 * there + 8.0 * 2 * 2 / 2  # and the numbers of rows
    assert sent["all_gather"] < routing_models.COUNT * routing_models.WIDTH * routing_models.HIDDEN * 8


@pytest.mark.slow
def test_rows_beyond_a_capacity_are_dropped() -> None:
    """They go to no expert, without a group of rows that each rank has for itself."""
    x = torch.randn(2, 6, routing_models.WIDTH)
    model = routing_models.Modules("dropping_modules", False)
    everything = routing_models.Modules("hit_modules", False)
    everything.load_state_dict(model.state_dict())
    assert not torch.equal(model(x), everything(x))
    assert exchanging(assert_equal_training(model, {"ep": 2}, (x,), like="expert", steps=1).plan)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["modules", "mask_modules"])
@pytest.mark.parametrize(
    ("axes", "like"),
    [
        ({"ep": 2, "tp": 2}, {"ep": "expert", "tp": "megatron"}),
        ({"dp": 2, "ep": 2}, {"dp": "fsdp", "ep": "expert"}),
        ({"ep": 4}, "expert"), ({"ep": 3}, "expert"), ({"dp": 2, "ep": 2}, "expert"), ({"ep": 2, "tp": 2}, None),
    ],
    ids=str,
)  # fmt: skip
def test_experts_that_are_modules(form: str, axes: dict[str, int], like: Any) -> None:
    """Each belongs to one rank along an axis; no weight of one moves, but for shards along another."""
    x = torch.randn(2, 6, routing_models.WIDTH)
    report = assert_equal_training(routed(form), axes, (x,), like=like, steps=3)
    owners = {str(x) for n, x in report.plan.layouts.items() if "experts" in n and n.endswith("weight")}
    assert len(owners) > 1, owners
    gathered = [c for c in report.plan.collectives if "experts" in c.reason and c.kind == "all_gather"]
    assert all(c.axes == ("dp",) for c in gathered), gathered


def test_matrices_of_gates_beside_those_that_they_gate() -> None:
    """They are joined where they lie: no weights of experts are sent."""
    reference = autoshard.models.get("moe")
    args, kwargs = reference.inputs(batch=4)
    plan = autoshard.plan(reference.model(), ideal({"ep": 2}), args, kwargs, like="expert")
    assert not [c for c in plan.collectives if "experts" in c.reason and c.kind in ("all_gather", "reduce_scatter")]


def test_routing_by_sorted_rows() -> None:
    """torch's grouped product knows no float64."""
    model, x = routing_models.Routed("in_order"), torch.randn(2, 6, routing_models.WIDTH)
    sharded = autoshard.compile(model, ideal({"ep": 2}), (x,), like="expert")
    assert ("exchange",) in {c.labels for c in sharded.plan.choices.values() if "experts" in c.op}
    sharded(x).backward()
    model(x).backward()
    found = sharded.full_gradients()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.slow_cases(
    "fewer_ids_modules",
    "more_weights_modules",
    "crowded_modules",
    "wider_modules",
    "masked_otherwise_modules",
    "between_two",
)
@pytest.mark.parametrize(
    "form",
    [
        *("twice_weighed_modules", "more_weights_modules", "fewer_ids_modules", "wider_modules", "crowded_modules"),
        *("masked_otherwise_modules", "between_two"),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("with_a_rest", "uneven_modules")),
    ],
)
def test_what_is_no_mixture_stays(form: str) -> None:
    model, x = routed(form), torch.randn(2, 6, routing_models.WIDTH)
    graph = capture_graph(model, (x,), {})
    assert not any(n.op is experts_op._opoverload for n in graph.nodes)

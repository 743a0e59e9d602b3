"""Plans for serving: one layout of the weights for prompts and tokens, and what a token takes."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from state_generate import llama
from torch import nn

import autoshard
from autoshard import Layout, Mesh, Replicate, Shard
from autoshard.cli import main
from autoshard.compiler import capture_graph
from autoshard.devices import meshes
from autoshard.errors import AutoshardError, CaptureError, MeshError, PlanError
from autoshard.passes.capture.export import capture
from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate.hints import resolve_hints
from autoshard.passes.propagate.planner import Planner
from autoshard.plans.plan import Plan
from autoshard.serving import search_jointly
from autoshard.serving.calls import capture_calls

TOKENS = torch.randint(3, 64, (4, 6), generator=torch.Generator().manual_seed(0))


def mlp() -> tuple[nn.Module, Any, Any]:
    """Many rows are cheapest where each rank takes some and has all weights, one row where each has some of the weights."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)).to(torch.bfloat16).eval()
        rows = [(torch.empty(n, 2048, dtype=torch.bfloat16),) for n in (16384, 1)]
    return model, *rows


def test_weights_lie_as_is_cheapest_for_all_calls() -> None:
    """The search over both is as good as trying every layout of the weights on each; what comes more often decides."""
    model, prompt, token = mlp()
    mesh, names, whole = Mesh({"x": 4}), ("0.weight", "2.weight"), {"*.bias": Replicate()}
    graphs = [capture_graph(model, rows, {}, training=False) for rows in (prompt, token)]

    def cost(graph: Graph, hints: dict[str, Any]) -> float:
        return Planner(graph, mesh, resolve_hints({**whole, **hints}, graph, mesh)).cheapest().solution.cost

    layouts = itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2)
    each = [[cost(graph, dict(zip(names, placed, strict=True))) for graph in graphs] for placed in layouts]
    found = {}
    for times in (1, 1000):
        profile = {"prompt": (1, prompt), "token": (times, token)}
        plan = autoshard.plan(model, mesh, prompt, profile=profile, training=False, hints=whole)
        serving = plan.serving
        assert serving is not None
        assert serving.total_s == pytest.approx(min(a + times * b for a, b in each), rel=1e-9)
        assert serving.lower_bound == pytest.approx(serving.total_s, rel=1e-9)
        found[times] = [str(plan.layouts[n]) for n in names]
    assert found == {1: ["R@x", "R@x"], 1000: ["R@x", "S(0)@x"]}


@pytest.mark.slow
def test_what_a_token_takes() -> None:
    model, mesh = llama(), Mesh({"tp": 2})
    profile, given = {"prefill": 1, "decode": 11}, {"training": False, "like": "megatron"}
    plan = autoshard.plan(model, mesh, (TOKENS,), profile=profile, **given)
    serving = plan.serving
    assert serving is not None
    prefill, decode = serving.phases
    assert (prefill.tokens, decode.tokens, decode.requests, serving.decode) == (6, 1, 4, decode)
    assert plan.shapes["past_key_values.layers[0].keys"] == (4, 2, 6 + 10, 8)  # at its longest
    assert decode.caches == 2 * 2 * (4 * 2 * 16 * 8) * 8 / 2  # layers, keys and values, float64, half of it here
    assert serving.total_s == pytest.approx(prefill.seconds + 11 * decode.seconds)
    assert serving.tokens_per_second == pytest.approx(11 * 4 / serving.total_s)
    assert serving.bytes_per_token["caches"] == decode.caches / 4
    assert decode.sent == sum(c.bytes for c in plan.collectives) > 0
    assert decode.seconds == plan.cost.total_s >= decode.least_s > 0
    assert serving.lower_bound == pytest.approx(serving.total_s)
    assert Plan.from_json(plan.to_json()).serving == serving
    assert "prefill ×1: 4 requests of 6 tokens" in plan.report()
    in_tuples = {"prefill": (1,), "decode": (11,)}  # how often alone: the same calls
    assert autoshard.plan(model, mesh, (TOKENS,), profile=in_tuples, **given).serving == serving
    (call,) = capture_calls(model, (TOKENS,), {}, "step", {"decode": 11}, _in_inference)
    longest = {n: x for n, x in model(TOKENS.new_zeros(4, 16), use_cache=True).items() if n == "past_key_values"}
    own = {"input_ids": TOKENS[:, :1], "use_cache": True, **longest}
    (by_hand,) = capture_calls(model, (TOKENS,), {}, "step", {"decode": (11, (), own)}, _in_inference)
    assert by_hand.carried == call.carried != (), "the cache of a call by hand is prefill's, too"


def _in_inference(model: nn.Module, args: Any, kwargs: Any) -> Graph:
    return capture(model, args, kwargs, training=False)


@pytest.mark.slow
def test_what_a_token_of_one_request_takes() -> None:
    given = {"training": False, "like": "megatron"}
    alone = autoshard.plan(llama(), Mesh({"tp": 2}), (TOKENS,), objective="latency", **given).serving
    assert alone is not None
    assert [(p.name, p.requests) for p in alone.phases] == [("decode", 1)]
    assert alone.decode.caches == 2 * 2 * (2 * 6 * 8) * 8 / 2


@pytest.mark.slow
def test_a_mesh_for_requests() -> None:
    """Many requests are dealt to replicas where one request has the ranks share its heads; all within the memory."""
    config = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 1, "vocab_size": 256}
    transformers = pytest.importorskip("transformers")
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, **heads)).bfloat16().eval()
        ids = torch.zeros(512, 256, dtype=torch.long)
    asked = {"devices": 4, "training": False}
    latency = autoshard.plan(model, None, (ids,), objective="latency", **asked)
    throughput = autoshard.plan(
        model, None, (ids,), objective="throughput", profile={"prefill": 1, "decode": 1}, **asked
    )
    assert latency.serving is not None
    assert throughput.serving is not None
    assert latency.mesh.axes == ("tp",)
    assert "dp" in throughput.mesh.axes
    assert latency.candidates
    assert all(c.cost.total_s >= latency.cost.total_s * (1 - 1e-6) for c in latency.candidates)
    assert throughput.serving.tokens_per_second > latency.serving.tokens_per_second
    with pytest.raises(PlanError, match="no plan within"):
        autoshard.plan(model, {"tp": 4}, (ids,), training=False, objective="throughput", memory_budget=1e6)


@pytest.mark.slow
def test_a_mesh_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its axes are used for names them, and is not searched again: the plan is that of a search with these names."""
    searched: list[tuple[int, ...]] = []

    def counting(calls: Any, mesh: Mesh, opts: Any) -> Any:
        searched.append(mesh.shape)
        return search_jointly(calls, mesh, opts)

    monkeypatch.setattr(meshes, "search_jointly", counting)
    asked = {"training": False, "profile": {"prefill": 1, "decode": 11}, "hardware": "ideal_network"}
    found = autoshard.plan(llama(layers=1), None, (TOKENS,), devices=2, **asked)
    assert searched == [(2,)]
    given = found.mesh
    del asked["hardware"]
    plan = autoshard.plan(llama(layers=1), given, (TOKENS,), **asked)
    assert plan.layouts == found.layouts
    assert plan.serving == found.serving
    assert found.serving is not None
    assert found.serving.total_s == pytest.approx(found.serving.lower_bound)


def test_a_number_of_devices_that_is_none() -> None:
    with pytest.raises(MeshError, match="a number of devices is an int"):
        autoshard.plan(
            llama(), None, (torch.zeros(2, 4, dtype=torch.int64),), devices=0, training=False, objective="latency"
        )


@pytest.mark.slow
def test_compiled_for_a_profile() -> None:
    """The weights lie as in the plan for both, and tokens are those of the unsharded model."""
    model, asked = llama(layers=1), {"profile": {"prefill": 1, "decode": 20}, "objective": "latency"}
    mesh = Mesh({"tp": 2}, "ideal_network")
    plan = autoshard.plan(model, mesh, (TOKENS,), training=False, **asked)
    weights = {n: plan.layouts[n] for n, kind in plan.kinds.items() if kind == "parameter"}
    assert sum(bool(x.axes_with(Shard)) for x in weights.values()) >= 3
    sharded = autoshard.compile(copy.deepcopy(model), mesh, (TOKENS,), training=False, **asked)
    assert {n: sharded.plan.layouts[n] for n in weights} == weights
    names = [n for n in plan.layouts if n.startswith("past_key_values")]
    assert {str(plan.layouts[n]) for n in names} == {"S(1)@tp"}
    by_requests = dict.fromkeys(names, Layout(mesh, {"tp": Shard(0)}))  # the prompt's program would not choose it
    plan = replace(plan, layouts={**plan.layouts, **by_requests})
    sharded = autoshard.compile(copy.deepcopy(model), mesh, training=False, dynamic=True, plan=plan)
    options = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    assert torch.equal(sharded.generate(TOKENS, **options), model.generate(TOKENS, **options))
    assert len(sharded.programs) == 2
    for program in (p.compiled.program for p in sharded.programs):  # it gives caches back as a token's takes them
        assert [str(program.layouts[out.name]) for out in program.outputs[1:]] == ["S(0)@tp"] * 2
    assert {n: sharded.plan.layouts[n] for n in weights} == weights


ASKED = "plan hf:llama --mesh tp=2 --inference --objective latency --profile".split()


@pytest.mark.slow
def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "prefill=1,decode=5", "--full"]) == 0
    assert "decode ×5: 1 request of 1 token" in capsys.readouterr().out


def test_a_profile_on_the_command_line_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "prefill"]) == 2
    assert "prefill=1,decode=200" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"objective": "speed"}, "objective='speed' is not known"),
        ({"objective": "latency", "training": True}, "is for inference"),
        ({"profile": ["prefill"]}, "profile is {call: frequency}"),
        ({"profile": {"prefill": -1}}, "is a number"),
        ({"profile": {"verify": 1}}, "'verify' needs its arguments"),
        ({"profile": {"verify": (1,)}}, "'verify' needs its arguments"),
        ({"profile": {"prefill": 0}}, "every frequency is zero"),
        ({"profile": {"decode": (3, 5)}}, "or \\(frequency, args tuple, kwargs dict\\): \\(3, 5\\)"),
        ({"profile": {"prefill": 1}, "stages": "tp"}, "cannot be combined with stages"),
        ({"profile": {"prefill": 1}, "micro_batches": 2}, "cannot be combined with micro_batches"),
    ],
    ids=lambda x: str(x),
)
def test_what_is_refused(asked: dict[str, Any], text: str) -> None:
    model, given = nn.Linear(4, 4), {"training": False, **asked}
    for do in (autoshard.plan, autoshard.compile):
        with pytest.raises(AutoshardError, match=text):
            do(model, {"tp": 2}, (torch.zeros(4, 4),), **given)


def test_a_token_of_a_model_that_has_none() -> None:
    """An objective alone is about the call itself; a profile has to say what a step is."""
    model, x = nn.Linear(4, 4).eval(), torch.zeros(4, 4)
    plan = autoshard.plan(model, {"tp": 2}, (x,), training=False, objective="throughput")
    assert plan.serving is not None
    assert [p.name for p in plan.serving.phases] == ["call"]
    with pytest.raises(CaptureError, match="not known for this model"):
        autoshard.plan(model, {"tp": 2}, (x,), training=False, profile={"decode": 2})


def test_a_token_of_a_model_with_two_inputs() -> None:
    """What a decoder is given beside its encoder's tokens is not known of a step: told, not an error of the model's code."""

    class Two(nn.Linear):
        def forward(self, ids: torch.Tensor, others: torch.Tensor | None = None) -> torch.Tensor:
            if others is None:
                raise ValueError("no others")
            return super().forward((ids + others).float())

    model, ids = Two(4, 4).eval(), torch.zeros(4, 4, dtype=torch.long)
    plan = autoshard.plan(model, {"tp": 2}, (ids, ids), training=False, objective="latency")
    assert plan.serving is not None
    assert [p.name for p in plan.serving.phases] == ["call"]
    with pytest.raises(CaptureError, match=r"with ids alone it fails .*no others.* Give an example"):
        autoshard.plan(model, {"tp": 2}, (ids, ids), training=False, profile={"decode": 2})

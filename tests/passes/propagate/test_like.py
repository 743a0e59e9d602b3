"""Plans by an expert's name: what they send to the byte, predicted and executed, and equal numbers (float64)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from harness import assert_equal_training, captured_once, collectives, double
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import autoshard
import autoshard.models
from autoshard import Mesh, Shard
from autoshard.check.coverage import SPLIT_ALL
from autoshard.compiler import capture_graph
from autoshard.hardware import PRESETS
from autoshard.models.llama import Llama, LlamaConfig
from autoshard.plans.options import CompileOptions
from autoshard.plans.planning import plan_graph as planned_on

BATCH, SEQ, LAYERS, VOCAB, WIDTH, HIDDEN = 8, 16, 2, 64, 32, 64
ACTIVATION = BATCH * SEQ * WIDTH * 8
"""bytes of one activation in float64"""
NAMES = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "megatron-sp", "ulysses", "replicate")


@cache
def llama() -> Llama:
    return Llama(LlamaConfig(VOCAB, WIDTH, HIDDEN, heads=4, kv_heads=4, layers=LAYERS)).double()


def tokens() -> tuple[tuple[torch.Tensor], dict[str, torch.Tensor]]:
    return autoshard.models.llama.example_inputs(llama().config, BATCH, SEQ)


def numel(where: Any = lambda name: True) -> int:
    return sum(p.numel() for n, p in llama().named_parameters() if where(n))


def is_matrix(name: str) -> bool:
    return "norm" not in name


@pytest.fixture(autouse=True, scope="module")
def once() -> Iterator[None]:
    """No mesh matters to a capture."""
    with captured_once():
        yield


def sent(
    axes: dict[str, int], like: Any, hardware: str | autoshard.Hardware = "h100"
) -> Counter[tuple[str, tuple[str, ...], str]]:
    """Bytes per kind, axes and phase, without scalars; the counters of a run say the same, and training is equal."""
    args, kwargs = tokens()
    assert_equal_training(llama(), axes, args, kwargs, like=like, hardware=hardware, steps=1)
    sharded = autoshard.compile(llama(), autoshard.Mesh(axes, hardware), args, kwargs, like=like)
    executed: list[Any] = []
    sharded.record(executed)
    sharded(*args, **kwargs).loss.backward()
    found = _bytes(sharded.collectives)
    assert found == pytest.approx(_bytes(executed))
    return found


def _bytes(collectives: Iterable[Any]) -> Counter[tuple[str, tuple[str, ...], str]]:
    found: Counter[Any] = Counter()
    for c in collectives:
        if c.bytes > 64:
            found[c.kind, c.axes, c.phase] += c.bytes
    return found


def ring(ranks: int) -> float:
    return (ranks - 1) / ranks


@pytest.mark.slow
def test_ddp_reduces_every_gradient_once() -> None:
    assert sent({"dp": 4}, "ddp") == {("all_reduce", ("dp",), "backward"): 2 * ring(4) * numel() * 8}


def test_fsdp_gathers_twice_and_scatters_once() -> None:
    """3(s-1)/s·Ψe, less the table: looking rows up, its backward does not read it."""
    assert sent({"fsdp": 4}, "fsdp") == {
        ("all_gather", ("fsdp",), "forward"): ring(4) * numel() * 8,
        ("all_gather", ("fsdp",), "backward"): ring(4) * numel(lambda n: "embedding" not in n) * 8,
        ("reduce_scatter", ("fsdp",), "backward"): ring(4) * numel() * 8,
    }


def test_hsdp_reduces_the_shard_over_the_replicas() -> None:
    bytes_count = replace(PRESETS["h100"], node=autoshard.Link(0.0, 1e9))  # latencies decide at these sizes
    assert sent({"replica": 2, "shard": 2}, "hsdp", bytes_count) == {
        ("all_gather", ("shard",), "forward"): ring(2) * numel() * 8,
        ("all_gather", ("shard",), "backward"): ring(2) * numel(lambda n: "embedding" not in n) * 8,
        ("reduce_scatter", ("shard",), "backward"): ring(2) * numel() * 8,
        ("all_reduce", ("replica",), "backward"): 2 * ring(2) * numel() / 2 * 8,
    }


def test_megatron_reduces_four_activations_per_layer() -> None:
    """And one of the embedding, one in front of the head, three numbers per token in the loss."""
    forward, backward = 2 * LAYERS + 1, 2 * LAYERS + 1
    loss = 3 * BATCH * SEQ * 8
    assert sent({"tp": 4}, "megatron") == {
        ("all_reduce", ("tp",), "forward"): 2 * ring(4) * (forward * ACTIVATION + loss),
        ("all_reduce", ("tp",), "backward"): 2 * ring(4) * backward * ACTIVATION,
    }


@pytest.mark.slow
def test_megatron_with_sequence_parallelism_gathers_and_scatters_instead() -> None:
    """The backward gathers twice per pair: the gradient of what was scattered, and again what was gathered but not kept."""
    norms = numel(lambda n: "norm" in n) * 8
    assert sent({"tp": 4}, "megatron-sp") == {
        ("all_gather", ("tp",), "forward"): ring(4) * (2 * LAYERS + 1) * ACTIVATION,
        ("reduce_scatter", ("tp",), "forward"): ring(4) * (2 * LAYERS + 1) * ACTIVATION,
        ("all_reduce", ("tp",), "forward"): 2 * ring(4) * 3 * BATCH * SEQ * 8,
        ("all_gather", ("tp",), "backward"): 2 * ring(4) * (2 * LAYERS + 1) * ACTIVATION,
        ("reduce_scatter", ("tp",), "backward"): ring(4) * (2 * LAYERS + 1) * ACTIVATION,
        ("all_reduce", ("tp",), "backward"): 2 * ring(4) * norms,  # each rank has a part of the sequence
    }
    args, kwargs = tokens()
    plan = autoshard.plan(llama(), Mesh({"tp": 4}, "h100"), args, kwargs, like="megatron-sp")
    again = [c.seconds for c in plan.collectives if c.reason.endswith("(recomputed)")]
    assert len(again) == 2 * LAYERS + 1
    assert sum(again) == pytest.approx(sum(r.seconds for r in plan.recomputed))  # the search pays for them


@pytest.mark.slow
def test_the_sequence_of_a_single_sample_is_scattered_too() -> None:
    """Nothing can cut its batch, so most work is independent along the sequence: that is no batch, all the same."""
    args, kwargs = autoshard.models.llama.example_inputs(llama().config, 1, SEQ)
    plan = assert_equal_training(llama(), {"tp": 2}, args, kwargs, like="megatron-sp", steps=1).plan
    found = Counter(c.kind for c in plan.collectives if c.phase == "forward" and c.bytes > 64 * SEQ)
    assert found == {"all_gather": 2 * LAYERS + 1, "reduce_scatter": 2 * LAYERS + 1}


@pytest.mark.slow
def test_data_and_tensor_parallel_together() -> None:
    """Per axis: gradients of a rank's part of the weights over dp, activations of its part of the batch over tp."""
    found = sent({"dp": 2, "tp": 2}, {"dp": "ddp", "tp": "megatron"})
    whole = numel(lambda n: "norm" in n)
    assert found["all_reduce", ("dp",), "backward"] == 2 * ring(2) * (numel(is_matrix) / 2 + whole) * 8
    assert found["all_reduce", ("tp",), "backward"] == 2 * ring(2) * (2 * LAYERS + 1) * ACTIVATION / 2


@pytest.mark.slow
def test_two_axes_cut_fewer_heads_than_they_have_ranks() -> None:
    """Three key heads over four ranks: their products are cut on both axes, and gathered for the heads."""
    model = Llama(LlamaConfig(VOCAB, 48, HIDDEN, heads=6, kv_heads=3, layers=1))
    for like in ("megatron", "megatron-sp"):
        report = assert_equal_training(model, {"dp": 2, "tp": 2}, *tokens(), like=like, steps=1, share=1.1)
        (keys,) = (x for name, x in report.plan.layouts.items() if name.endswith(".k.weight"))
        assert keys.cutting(0) == ("dp", "tp")


class Attentions(nn.Module):
    """The residual stream [batch, seq, width] with attention alone; the mean of squares needs no flattened logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for query, key, value, out in self.layers:
            q, k, v = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (query, key, value))
            x = x + out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x.square().mean()


@pytest.mark.slow_cases("GptOss")
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_megatron_cuts_the_heads_of_attention_beside_experts(kind: str) -> None:
    """Also where the residual stream would send less: then every rank would do all of the attention."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    tokens = torch.zeros(1, 32, dtype=torch.long)
    plan = autoshard.plan(model, {"tp": 2}, (), {"input_ids": tokens, "labels": tokens}, like="megatron")
    labels = {c.labels for c in plan.choices.values() if "attention" in c.op}
    assert labels == {("heads",)}, labels


def test_ulysses_turns_the_sequence_into_heads_and_back() -> None:
    x = torch.randn(BATCH, SEQ, WIDTH, generator=torch.Generator().manual_seed(0))
    found = collectives(Attentions(), {"sp": 4}, None, (x,), "h100", like="ulysses")
    turned = Counter({k: n * k[3] for k, n in found.items() if k[0] == "all_to_all"})
    assert sum(turned.values()) == 8 * ring(4) / 4 * ACTIVATION * LAYERS
    assert {k[0] for k in found} == {"all_to_all", "all_reduce"}  # the gradients' and the loss's


@cache
def others() -> tuple[tuple[nn.Module, Any, Any], ...]:
    found = [autoshard.models.get(name) for name in ("gpt", "dlrm")]
    return tuple((r.model().double(), *double(r.inputs(batch=4))) for r in found)


@pytest.mark.slow_cases("ddp")
@pytest.mark.parametrize("like", NAMES)
def test_names_are_heard_everywhere(like: str) -> None:
    """On models of other kinds: equal numbers, and what the name promises of the parameters."""
    for model, args, kwargs in others():
        report = assert_equal_training(model, {"x": 2}, args, kwargs, like=like, hardware="h100", steps=1)
        plan = report.plan
        trained = [n for n, kind in plan.kinds.items() if kind == "parameter"]
        whole = [n for n in trained if "S" not in str(plan.layouts[n])]
        if like in ("ddp", "replicate", "ulysses"):
            assert whole == trained
        elif like in ("zero1", "zero2", "fsdp", "hsdp"):
            assert all(plan.shapes[n] == (1,) for n in whole)
        else:
            assert 0 < len(whole) < len(trained)


class Remembering(nn.Module):
    """Attention as transformers writes it: keys and values join a cache, which is empty in training."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (y(x).unflatten(-1, (4, -1)).transpose(1, 2) for y in (self.q, self.k, self.v))
        k, v = (torch.cat([torch.tensor([], dtype=x.dtype), y], -2) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean(), k, v


def test_the_batch_beside_an_empty_cache() -> None:
    """Joined with nothing, keys have the positions of the queries: these are no batch, as attention mixes them."""
    model, x = Remembering().double(), torch.randn(BATCH, SEQ, WIDTH, dtype=torch.float64)
    plan = assert_equal_training(model, {"x": 2}, (x,), like="ddp", hardware="h100", steps=1).plan
    assert {c.labels for c in plan.choices.values() if "linear" in c.op} == {("...0",)}
    assert "constant" not in plan.kinds.values()


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 2).permute(2, 0, 3, 1, 4)
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)).square().mean()


def test_a_later_call_has_a_program_beside_the_layouts_that_parameters_have() -> None:
    """Of one position there is no sequence, so all is searched: parts of a weight are cut, which Ulysses reads whole."""
    model, x = Fused().double(), torch.randn(2, 6, 8, dtype=torch.float64)
    sharded = autoshard.compile(model, Mesh({"sp": 2}, SPLIT_ALL), (x[:, :1],), like="ulysses")
    assert str(sharded.plan.layouts["qkv.weight"]) == "S(0/3)@sp"
    torch.testing.assert_close(sharded(x), model(x), rtol=1e-9, atol=0)
    assert any("it does not fit the present layouts" in note for note in sharded.plan.notes)


# --- styles by module ---

STYLES = {
    "embedding": "embedding_rowwise",
    "blocks.*.attention.q": "colwise", "blocks.*.attention.k": "colwise", "blocks.*.attention.v": "colwise",
    "blocks.*.attention.out": "rowwise", "blocks.*.feed_forward.gate": "colwise", "blocks.*.feed_forward.up": "colwise",
    "blocks.*.feed_forward.down": "rowwise",
}  # fmt: skip
"""a plan as transformers writes it"""


def planned(like: Any, axes: dict[str, int] | None = None) -> autoshard.Plan:
    args, kwargs = tokens()
    return autoshard.plan(llama(), axes or {"tp": 4}, args, kwargs, like=like)


def of_blocks(plan: autoshard.Plan) -> Counter[Any]:
    """Bytes that blocks send along tp."""
    return _bytes(c for c in plan.collectives if c.fqn.startswith("blocks") and c.axes == ("tp",))


def test_styles_of_all_projections_are_megatron() -> None:
    styled, megatron = planned(STYLES), planned("megatron")
    weights = [n for n in styled.layouts if n.endswith("weight") and "norm" not in n and n != "head.weight"]
    assert [str(styled.layouts[n]) for n in weights] == [str(megatron.layouts[n]) for n in weights]
    assert of_blocks(styled) == of_blocks(megatron)
    assert styled.like == repr(STYLES)


def test_styles_are_for_the_axis_tp() -> None:
    plan = planned({"dp": "ddp", "tp": STYLES}, {"tp": 2, "dp": 2})
    assert str(plan.layouts["blocks.0.attention.out.weight"]) == "S(1)@tp I@dp"
    alone = planned(STYLES, {"tp": 2, "dp": 2})
    assert alone.layouts["blocks.0.attention.out.weight"]["tp"] == Shard(1)


def test_the_head_is_gathered_where_its_style_says_so() -> None:
    logits = BATCH * SEQ * VOCAB * 8
    plan = planned({"head": "colwise_gather_output"})
    assert plan.layouts["head.weight"]["tp"] == Shard(0)
    gathered = [c.bytes for c in plan.collectives if c.kind == "all_gather" and c.phase == "forward"]
    assert ring(4) * logits in gathered


def test_the_end_of_a_name_is_enough() -> None:
    """Plans of base models leave the beginning out."""
    plan = planned({"*.attention.q": "colwise", "feed_forward.down": "rowwise"})
    assert plan.layouts["blocks.1.attention.q.weight"]["tp"] == Shard(0)
    assert plan.layouts["blocks.1.feed_forward.down.weight"]["tp"] == Shard(1)


def test_sequence_parallel_modules_work_on_a_part_of_the_sequence() -> None:
    plan = planned({"blocks.*.attention_norm": "sequence_parallel"})
    inside = [c for c in plan.choices.values() if c.fqn == "blocks.1.attention_norm"]
    assert inside
    assert all(c.uses[0].startswith("S(1)@tp") for c in inside)


def test_styles_of_parallelize_module() -> None:
    given = {
        "blocks.*.feed_forward.up": ColwiseParallel(),
        "blocks.*.feed_forward.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate()),
    }
    named = {
        "blocks.*.feed_forward.up": "colwise",
        "blocks.*.feed_forward.down": "rowwise",
        "head": "colwise_rep",
    }
    assert planned(given).layouts == planned(named).layouts


def test_a_plan_that_the_model_brings() -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    inputs = {"input_ids": tokens()[0][0], "labels": tokens()[1]["labels"]}
    report = assert_equal_training(model, {"tp": 2}, (), inputs, like="tp_plan", hardware="h100", steps=1)
    layouts = report.plan.layouts
    assert layouts["model.layers.0.self_attn.k_proj.weight"]["tp"] == Shard(0)
    assert layouts["model.layers.0.mlp.down_proj.weight"]["tp"] == Shard(1)
    assert layouts["model.embed_tokens.weight"]["tp"] == Shard(0)


# --- errors ---


@pytest.mark.parametrize(
    ("like", "error"),
    [
        (
            "megatorn",
            "like='megatorn' is not a strategy: do you mean 'megatron'? give a name, {mesh axis: name},",
        ),
        ({"dp": "ddp"}, "like names axis 'dp', but the mesh has tp"),
        ({"head": "collwise"}, "like: 'head' is 'collwise', not a style; do you mean 'colwise'?"),
        ({"heads": "colwise"}, "like: 'heads' matches no module and no parameter. Nearest: head"),
        (
            {"head": "grouped_gemm"},
            "like: 'head' is 'grouped_gemm', but expert parallelism by module is not supported yet",
        ),
        ({}, "like={}: give a name, {mesh axis: name}, or {pattern of modules: style}"),
        ("tp_plan", "like='tp_plan': Llama has no tp_plan. Name one, such as 'megatron'"),
    ],
)
def test_errors(like: Any, error: str) -> None:
    with pytest.raises(autoshard.PlanError) as caught:
        planned(like)
    assert str(caught.value).startswith(error)


# --- never above an expert ---


def never_above(model: nn.Module, axes: dict[str, int], names: Iterable[Any], *inputs: Any) -> None:
    graph = capture_graph(model, *inputs, training=True)
    free = planned_on(graph, Mesh(axes), CompileOptions())[1].cost.total_s
    for like in names:
        assert free <= planned_on(graph, Mesh(axes), CompileOptions(like=like))[1].cost.total_s * (1 + 1e-9), like


def reference(family: str) -> tuple[nn.Module, Any, Any]:
    found = autoshard.models.get(family)
    with torch.device("meta"):
        return found.model(), *found.inputs(batch=16)


@pytest.mark.slow_cases("dlrm")
@pytest.mark.parametrize("family", ["gpt", "dlrm"])
def test_the_free_plan_is_never_above_an_expert(family: str) -> None:
    never_above(*reference(family)[:1], {"x": 4}, NAMES, *reference(family)[1:])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"x": 4}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}], ids=["1", "2", "3"])
@pytest.mark.parametrize("family", ["llama", "gpt", "moe", "dlrm", "vit", "mlp"])
def test_on_every_model_and_up_to_three_axes(family: str, axes: dict[str, int]) -> None:
    model, args, kwargs = reference(family)
    mixed = dict(zip(axes, ("fsdp", "megatron-sp", "ulysses"), strict=False))
    never_above(model, axes, (*NAMES, mixed), args, kwargs)

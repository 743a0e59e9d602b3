"""Generation by models of transformers, each as the unsharded model; Llama's is in the cases of states."""

from __future__ import annotations

import copy
import importlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generating_models import MESHES, MODELS, TOKENS, as_one_device, every_way, made
from stage_caches import caches_stay
from state_generate import WAYS, Heads, llama, same_tokens, static_cache
from torch import nn

import autoshard
from autoshard.errors import CaptureError, PlanError

transformers = pytest.importorskip("transformers")


def serving(model: Any, mesh: dict[str, int], **options: Any) -> Any:
    given = {"like": "megatron", "training": False, "dynamic": True, **options}
    return autoshard.compile(copy.deepcopy(model), mesh, **given)


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).double().eval()


@pytest.mark.slow
def test_encoder_and_decoder() -> None:
    """The encoder is called alone, on the tensors of the whole."""
    model = t5()
    sharded = serving(model, {"tp": 2})
    same_tokens(model, sharded, TOKENS, {w: WAYS[w] for w in ("greedy", "beams")})
    encoder = sharded.get_encoder()
    assert encoder is sharded.get_encoder()
    assert len(encoder.programs) == 1
    assert len(sharded.programs) == 2  # a prompt and a token; no call of the whole
    with torch.no_grad():
        for module in (model, sharded):
            module.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(2)
    same_tokens(model, sharded, TOKENS, {"changed": {"do_sample": False}})


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_as_one_device(name: str, mesh: str) -> None:
    """Every kind of cache on every mesh: tokens and the logits of 64 steps, on the first of 200."""
    as_one_device(name, mesh, 200 if mesh == "tp2" else 64)


@pytest.mark.slow
def test_every_way() -> None:
    every_way()


def test_a_cache_that_quantizes_by_groups_is_refused() -> None:
    class Layer:
        q_group_size, residual_length = 64, 128

    sharded = serving(llama(layers=1), {"tp": 2})
    with pytest.raises(CaptureError, match=r'a cache of Layer keeps tensors .* cache_config=\{"backend": "fp8"\}'):
        sharded(TOKENS, past_key_values=Layer())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_meshes(mesh: dict[str, int]) -> None:
    """More ranks than key-value heads, and a batch that is cut as well; left padding."""
    model = llama(layers=1)
    sharded = serving(model, mesh, like={"dp": "ddp", "tp": "megatron"} if "dp" in mesh else "megatron")
    mask = torch.ones_like(TOKENS)
    mask[0, :2] = 0
    same_tokens(
        model, sharded, TOKENS, {"padded": {"do_sample": False, "attention_mask": mask}, "beams": WAYS["beams"]}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_a_step_sends(name: str) -> None:
    """Counted as it runs: two sums a layer and one for the embedding; nothing for caches, nor between parts of what one matrix
    makes, as GPT-2's queries, keys and values."""
    model = made(name).double()
    sharded = serving(model, {"tp": 2})
    with torch.no_grad():
        found = sharded(input_ids=TOKENS, use_cache=True)
        for _ in range(2):  # the first takes the prompt's cache
            sharded._world.log = log = []
            found = sharded(input_ids=TOKENS[:, :1], past_key_values=found.past_key_values, use_cache=True)
            sharded._world.log = None
            token = len(TOKENS) * 32 * (4 if name == "llama" else 8)  # Llama's norm casts to float32 before the sum
            assert [(e.kind, e.bytes) for e in log] == [("all_reduce", token)] * (2 * 2 + 1)


@pytest.mark.slow_cases(
    "(slice(None, None, None), -1)",
    "(slice(None, None, None), slice(-1, None, None))",
    "(slice(None, None, None), slice(1, 3, None))",
)
@pytest.mark.parametrize("where", [np.s_[:, -1], np.s_[:, -1:], np.s_[:, 1:3], np.s_[:, [-1]]], ids=str)
def test_positions_of_a_cut_sequence_travel_alone(where: Any) -> None:
    """The last one of a prompt that is cut along its sequence: no rank gathers the others."""

    class Last(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.sin()[where])

    model, x = Last(4, 8).double().eval(), torch.randn(2, 9, 4).double()
    hints = {"x": autoshard.Shard(1), "weight": autoshard.Replicate()}
    for dynamic in (False, True):
        sharded = autoshard.compile(copy.deepcopy(model), {"tp": 2}, training=False, hints=hints, dynamic=dynamic)
        with torch.no_grad():
            torch.testing.assert_close(sharded(x), model(x), rtol=1e-9, atol=1e-12)
        assert sum(c.bytes for c in sharded.collectives) <= x[where].nbytes


@pytest.mark.slow
def test_caches_stay_in_their_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    caches_stay({"pp": 2, "tp": 2}, monkeypatch)


def test_what_loops_ask_before_the_first_call() -> None:
    sharded = serving(llama(layers=1), {"tp": 2})
    assert (sharded.dtype, sharded.device) == (torch.float64, torch.device("cpu"))


@pytest.mark.slow
def test_a_static_cache_and_a_criterion_to_stop() -> None:
    class Stop(transformers.StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 8)

    model = llama(layers=1)
    sharded = serving(model, {"tp": 2})
    ways: dict[str, dict[str, Any]] = {"static": {"cache_implementation": "static", "disable_compile": True}}
    ways["static"] |= {"do_sample": False, "stopping_criteria": transformers.StoppingCriteriaList([Stop()])}
    same_tokens(model, sharded, TOKENS, ways)
    assert len(sharded.programs) == 2
    for batch in (2, 1):
        made = []
        for module in (sharded, model):
            cache = transformers.StaticCache(config=model.config, max_cache_len=16)
            made.append(module.generate(TOKENS[:batch], past_key_values=cache, max_new_tokens=8, disable_compile=True))
        assert torch.equal(*made)


@pytest.mark.slow
def test_in_bfloat16() -> None:
    """More ranks than key-value heads, one request that is sampled: sums round as they may, tokens are those of one device."""
    model, asked = llama(layers=1).bfloat16(), {"do_sample": True, "top_k": 20, "max_new_tokens": 8}
    found = []
    for module in (serving(model, {"tp": 4}), model):
        torch.manual_seed(3)
        kept = {"return_dict_in_generate": True, "output_logits": True}
        found.append(module.generate(TOKENS[:1], **asked, **kept))
    assert torch.equal(*(x.sequences for x in found))
    for own, other in zip(*(x.logits for x in found), strict=True):
        torch.testing.assert_close(own + 0, other, rtol=0, atol=1e-2)


@pytest.mark.slow
def test_a_pipeline_of_transformers() -> None:
    """Text in and out, two requests of unequal length at once."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {**{f"w{i}": i for i in range(62)}, "<pad>": 62, "<unk>": 63}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "padding_side": "left"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **names)
    model, made = llama(layers=1), []
    for module in (model, serving(model, {"tp": 2})):
        write = transformers.pipeline("text-generation", model=module, tokenizer=tokenizer)
        made.append(write(["w5 w6 w7", "w9 w10"], batch_size=2, max_new_tokens=6, do_sample=False))
    assert made[0] == made[1]
    assert len(made[0][0][0]["generated_text"].split("w")) > 6


@pytest.mark.slow
def test_requests_that_come_and_are_taken_away_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of docs/examples/serving.py makes the tokens of one device, by two programs."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs" / "examples")
    example = importlib.import_module("serving")
    torch.manual_seed(0)
    model = example.Decoder().eval()
    sharded = autoshard.compile(copy.deepcopy(model), {"tp": 2}, like="megatron", training=False)

    def served(module: Any) -> dict[str, list[int]]:
        draw, batcher, done = random.Random(0), example.Batcher(module), []
        for number in range(40):
            if draw.random() < 0.5:
                prompt = [draw.randrange(example.VOCABULARY) for _ in range(draw.randrange(1, 24))]
                batcher.add(example.Request(str(number), prompt, new=draw.randrange(1, 12)))
            if draw.random() < 0.15:
                batcher.slots[draw.randrange(example.SLOTS)] = None
            done += batcher.step()
        return {request.name: request.made for request in done}

    assert len(found := served(sharded)) > 8
    assert found == served(model)
    assert len(sharded.programs) == 2


@pytest.mark.slow
def test_a_plan_as_transformers_says_it() -> None:
    model = llama()
    plan = autoshard.plan(model, {"tp": 2}, (TOKENS,), training=False, like="megatron")
    found = plan.to_tp_plan()
    assert found == {
        "model.embed_tokens": "embedding_rowwise",
        **{f"model.layers.*.self_attn.{n}_proj": "colwise" for n in "qkv"},
        "model.layers.*.self_attn.o_proj": "rowwise",
        **{f"model.layers.*.mlp.{n}_proj": "colwise" for n in ("gate", "up")},
        "model.layers.*.mlp.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }
    assert not found.unsaid
    again = autoshard.plan(model, {"tp": 2}, (TOKENS,), training=False, like=dict(found))
    parameters = [n for n, kind in plan.kinds.items() if kind == "parameter"]
    assert {n: plan.layouts[n] for n in parameters} == {n: again.layouts[n] for n in parameters}


def test_what_a_tp_plan_cannot_say() -> None:
    hints = {
        "0.weight": {"tp": autoshard.Shard(0)},
        "1.weight": {"tp": autoshard.Shard(0)},
        "2.weight": {"dp": autoshard.Shard(1)},
    }
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    plan = autoshard.plan(model, {"dp": 2, "tp": 2}, (torch.randn(4, 8),), training=False, hints=hints)
    found = plan.to_tp_plan()
    assert found["0"] == "colwise"
    assert any("1.weight" in text for text in found.unsaid)
    assert any("'dp'" in text for text in found.unsaid)
    with pytest.raises(PlanError, match="no axis 'pp'"):
        plan.to_tp_plan("pp")


@pytest.mark.slow
def test_a_sliding_window_compiles_no_program_for_each_length() -> None:
    """Its count, a Python number, is an open length: a prompt, one program below the window, and one where it is full."""
    caches = pytest.importorskip("transformers.cache_utils")
    torch.manual_seed(0)
    model, x = Heads("sliding_window").double().eval(), torch.randn(2, 24, 16).double()
    sharded = autoshard.compile(copy.deepcopy(model), {"tp": 2}, like="megatron", training=False, dynamic=True)
    made: list[Any] = [caches.DynamicSlidingWindowLayer(8) for _ in range(2)]
    for start, end in ((0, 3), *((n, n + 1) for n in range(3, 24))):
        with torch.no_grad():
            (found, made[0]), (wanted, made[1]) = (
                m(x[:, start:end], c) for m, c in zip((sharded, model), made, strict=True)
            )
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        assert made[0].cumulative_length == made[1].cumulative_length == end
        assert made[0].keys.shape == made[1].keys.shape
    assert len(sharded.programs) == 3


@pytest.mark.slow
def test_a_static_window_that_has_no_tensors_yet() -> None:
    """It counts its tokens in a Python number: one program more, where it is full."""
    caches = pytest.importorskip("transformers.cache_utils")
    static_cache(autoshard.Mesh({"tp": 2}), lambda: caches.StaticSlidingWindowLayer(12, 6), 3)


class Counting(nn.Module):
    """A state that grows by what comes; ``ones``: whether one of length 1 is a special case."""

    def __init__(self, ones: bool) -> None:
        super().__init__()
        self.up, self.down, self.ones = nn.Linear(4, 8), nn.Linear(8, 4), ones

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, ...] = ()) -> tuple[torch.Tensor, Any]:
        y = torch.cat([*state, self.up(x)], 1)
        if self.ones and state and state[0].shape[1] == 1:
            y = y * 2
        return self.down(y).sum(1), (y,)


@pytest.mark.slow
@pytest.mark.parametrize(("ones", "programs"), [(False, 2), pytest.param(True, 3, marks=pytest.mark.slow)])
def test_a_state_that_grows_from_a_length_of_one(ones: bool, programs: int) -> None:
    """It is one of all lengths, where the model treats it so."""
    torch.manual_seed(0)
    model, x = Counting(ones).double().eval(), torch.randn(3, 6, 4).double()
    sharded = autoshard.compile(copy.deepcopy(model), {"tp": 2}, like="replicate", training=False, dynamic=True)
    made: list[Any] = [(), ()]
    with torch.no_grad():
        for at in range(6):
            found, made[0] = sharded(x[:, at : at + 1], *([made[0]] if at else []))
            wanted, made[1] = model(x[:, at : at + 1], *([made[1]] if at else []))
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert len(sharded.programs) == programs


def test_weights_that_lie_otherwise_in_the_same_memory_are_seen() -> None:
    """Programs without a backward keep the parts of what they read: a weight transposed in place starts where it did."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).double().eval()
    sharded = autoshard.compile(
        copy.deepcopy(model), {"tp": 2}, (x := torch.randn(4, 8).double(),), hints={"0": "colwise"}
    )
    with torch.no_grad():
        for module in (model, sharded):
            module(x)
            weight = module.get_parameter("0.weight")
            weight.data = weight.data.t()
        torch.testing.assert_close(sharded(x), model(x), rtol=1e-9, atol=1e-12)

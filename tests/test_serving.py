"""Generation by models of transformers, each as the unsharded model; Llama's is in the cases of states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from state_serving import WAYS, llama, same_tokens

import autoshard
from autoshard.errors import PlanError

transformers = pytest.importorskip("transformers")
TOKENS = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(0))


def serving(model: Any, mesh: dict[str, int], **options: Any) -> Any:
    given = {"like": "megatron", "training": False, "dynamic": True, **options}
    return autoshard.compile(copy.deepcopy(model), mesh, **given)


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config).double().eval()


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
    assert len(sharded.programs) <= 4
    with torch.no_grad():
        for module in (model, sharded):
            module.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(2)
    same_tokens(model, sharded, TOKENS, {"changed": {"do_sample": False}})


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2], ids=["gpt2"])
def test_models(make: Any) -> None:
    model = make()
    sharded = serving(model, {"tp": 2})
    same_tokens(model, sharded, TOKENS, {w: WAYS[w] for w in ("greedy", "beams")})
    assert len(sharded.programs) == 2


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

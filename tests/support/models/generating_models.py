"""Small models that make tokens, one of each kind of state between steps, and what they make, beside the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from state_harness import close, full
from torch import nn

import autoshard
from autoshard.check.reference import upcasts_in_float64

VOCABULARY, LONGEST = 64, 256
TOKENS = torch.randint(3, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LONGEST,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", DECODER),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST,
         "bos_token_id": 1, "eos_token_id": 2},
    ),
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2ForCausalLM", {**DECODER, "head_dim": 8, "sliding_window": 8}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {**DECODER, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
         "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
         "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
    "mamba": (
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "num_mel_bins": 8,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
         "max_source_positions": 20, "max_target_positions": LONGEST, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
}  # fmt: skip
PROGRAMS = {"gemma2": 3, "t5": 3, "whisper": 3, "mamba": 3}
"""how many are compiled for all lengths where it is not two: a window that is full; a state that comes in another layout
from a token than from a prompt; an encoder, called alone"""
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp2": ({"tp": 2}, {"like": "megatron"}),
    "tp4": ({"tp": 4}, {"like": "megatron"}),
    "dp2tp2": ({"dp": 2, "tp": 2}, {"like": {"dp": "ddp", "tp": "megatron"}}),
    "pp2": ({"pp": 2}, {"stages": "pp"}),
}


class OwnCache(nn.Module):
    """A decoder that keeps keys and values in buffers, as gpt-fast does: tokens [batch, n] at positions [n] → logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 32), nn.Embedding(LONGEST, 32)
        self.layers = nn.ModuleList(_Attention() for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(at)
        for layer in self.layers:
            x = x + layer(x, at)
        return self.head(x)  # type: ignore[no-any-return]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.k, self.v = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(len(TOKENS), 2, LONGEST, 8))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, 8)).transpose(1, 2) for m in (self.q, self.k, self.v))
        self.keys[:, :, at], self.values[:, :, at] = k, v
        mask = torch.arange(LONGEST) <= at[:, None]
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


MODELS = (*HUGGING_FACE, "own_cache")


def made(name: str, **sizes: Any) -> Any:
    """The model, in float32; ``sizes``: other ones of its configuration."""
    torch.manual_seed(0)
    if name == "own_cache":
        return OwnCache().eval()
    transformers = pytest.importorskip("transformers")
    kind, own = HUGGING_FACE[name]
    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**own | sizes)).eval()


def given(name: str, model: Any) -> dict[str, Any]:
    if name == "whisper":
        x = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
        return {"input_features": x.to(model.dtype)}
    return {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}


def loop(model: Any, new: int, choose: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
    """The tokens and logits of :class:`OwnCache`."""
    tokens, at, seen, logits = TOKENS, torch.arange(TOKENS.shape[1]), [TOKENS], []
    with torch.no_grad():
        for _ in range(new):
            logits.append(full(model(tokens, at))[:, -1])
            tokens, at = choose(logits[-1]), at[-1:] + 1
            seen.append(tokens)
    return torch.cat(seen, 1), logits


def generated(name: str, model: Any, new: int, sampled: bool = False) -> tuple[torch.Tensor, list[Any]]:
    """Tokens, and the logits of every step."""
    torch.manual_seed(3)
    if name == "own_cache":
        draw = torch.multinomial
        return loop(model, new, lambda x: draw(x.softmax(-1), 1) if sampled else x.argmax(-1, keepdim=True))
    way = {"do_sample": True, "top_k": 20, "temperature": 0.8} if sampled else {"do_sample": False}
    asked = {**way, "max_new_tokens": new, "min_new_tokens": new, "output_logits": True, "pad_token_id": 0}
    found = model.generate(**given(name, model), **asked, return_dict_in_generate=True)
    return found.sequences, list(found.logits)


def as_one_device(name: str, mesh: str, steps: int = 64) -> None:
    """Tokens in float32, greedy and sampled from a seed; logits in float64; by few programs."""
    model, axes = made(name), MESHES[mesh][0]
    options = {"training": False, "dynamic": True, **MESHES[mesh][1]}
    sharded = autoshard.compile(copy.deepcopy(model), axes, **options)
    for sampled in (False, True):
        (found, _), (wanted, _) = (generated(name, m, 16, sampled) for m in (sharded, model))
        assert torch.equal(found, wanted), sampled
    model = model.double()
    if name in ("mixtral", "deepseek_v3"):  # torch has no grouped products in float64
        model.config._experts_implementation = "eager"
    with upcasts_in_float64():
        sharded = autoshard.compile(copy.deepcopy(model), axes, **options)
        (found, logits), (wanted, expected) = (generated(name, m, steps) for m in (sharded, model))
    assert torch.equal(found, wanted)
    assert len(logits) == len(expected) == steps
    for step, (own, other) in enumerate(zip(logits, expected, strict=True)):
        close(own, other, f"step {step}")
    inside = [program for part in sharded._inner_modules.values() for program in part.programs]
    stages = name in ("t5", "whisper") and "pp" in axes  # the whole call says which tensors a stage has
    assert len(sharded.programs) + len(inside) <= PROGRAMS.get(name, 2) + stages


def every_way() -> None:
    """Ways to choose tokens and to keep caches, on two ranks: the tokens of one device, by few programs.

    A mask with holes has its own, as transformers asks; so have a batch of 1, and several tokens after a cache.
    """
    copied = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    padded, ends = torch.ones_like(TOKENS), {"eos_token_id": [*range(0, VOCABULARY, 5)]}
    padded[0, :2] = 0
    ways: list[tuple[str, torch.Tensor, dict[str, Any], int]] = [
        ("gpt2", TOKENS, {"num_beams": 3}, 2),
        ("gpt2", TOKENS, {"num_beams": 3, "do_sample": True}, 2),
        ("llama", TOKENS, {"num_beams": 4, "length_penalty": 0.5, "num_return_sequences": 2}, 2),
        ("llama", TOKENS, {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.2}, 2),
        ("llama", TOKENS, {"attention_mask": padded, **ends}, 4),
        ("llama", TOKENS, {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}, 6),
        ("llama", copied, {"prompt_lookup_num_tokens": 3}, 10),
        ("llama", TOKENS[:1], {"assistant_model": (True, False)}, 12),
        ("llama", TOKENS[:1], {"assistant_model": (False, True)}, 12),
        ("llama", TOKENS[:1], {"assistant_model": (True, True)}, 12),
    ]
    options = {"training": False, "dynamic": True, "like": "megatron"}
    models = {name: made(name) for name in ("gpt2", "llama")} | {"assistant": made("llama", num_hidden_layers=1)}
    sharded = {n: autoshard.compile(copy.deepcopy(m), {"tp": 2}, **options) for n, m in models.items()}
    for name, tokens, way, programs in ways:
        found = []
        for ours in (True, False):
            torch.manual_seed(3)
            given = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0, **way}
            if "assistant_model" in way:
                given["assistant_model"] = (sharded if ours and way["assistant_model"][1] else models)["assistant"]
            whole = ours and way.get("assistant_model", (True,))[0]
            found.append((sharded if whole else models)[name].generate(tokens, max_new_tokens=12, **given))
        assert torch.equal(*found), (name, way)
        assert len(sharded[name].programs) <= programs, (name, way, len(sharded[name].programs))

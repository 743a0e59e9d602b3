"""Small random models of transformers: classes, configurations and inputs that tests and benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import autoshard.models

VOCABULARY = 128
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, **TOKENS,
}  # fmt: skip
ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = {"image_size": 32, "num_labels": 5}


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _ids(length: int = 16) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (4, length), generator=_random())


def text() -> dict[str, Any]:
    labels = _ids().roll(-1, 1)
    labels[0, :3] = -100
    return {"input_ids": _ids(), "labels": labels}


def short_text() -> dict[str, Any]:
    """Of 32 different tokens."""
    return {"input_ids": _ids() % 32, "labels": _ids() % 32}


def padded_text() -> dict[str, Any]:
    mask = torch.ones(4, 16, dtype=torch.long)
    mask[1, 12:] = 0
    return {**text(), "attention_mask": mask}


def pairs() -> dict[str, Any]:
    return {"input_ids": _ids(), "labels": _ids(12)}


def images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(4, 3, 32, 32, generator=_random()), "labels": torch.arange(4)}


def speech() -> dict[str, Any]:
    return {"input_features": torch.randn(4, 16, 64, generator=_random()), "labels": _ids(12)}


def captions() -> dict[str, Any]:
    pixels = images()["pixel_values"]
    return {"input_ids": _ids(), "pixel_values": pixels, "attention_mask": torch.ones_like(_ids()), "return_loss": True}


@dataclass(frozen=True)
class Case:
    """A model class of transformers, its configuration and its inputs."""

    model: str
    config: dict[str, Any]
    inputs: Callable[[], dict[str, Any]] = text


CASES = {
    "llama": Case("LlamaForCausalLM", DECODER),
    "gpt2": Case(
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False,
         "bos_token_id": 0, "eos_token_id": 1},
    ),
    "gemma2": Case("Gemma2ForCausalLM", {**DECODER, "head_dim": 8, "sliding_window": 8}),
    "phi3": Case("Phi3ForCausalLM", DECODER),
    "mixtral": Case("MixtralForCausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": Case(
        "DeepseekV3ForCausalLM",
        {**DECODER, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
         "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
         "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
    "mamba": Case(
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4,
         "use_cache": False, **TOKENS},
    ),
    "bert": Case("BertForMaskedLM", {"vocab_size": VOCABULARY, "max_position_embeddings": 64, **ENCODER}, padded_text),
    "t5": Case(
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0, "use_cache": False},
        pairs,
    ),
    "whisper": Case(
        "WhisperForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 16,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
         "max_source_positions": 32, "max_target_positions": 64, "decoder_start_token_id": 0, "use_cache": False,
         **TOKENS},
        speech,
    ),
    "vit": Case("ViTForImageClassification", {"patch_size": 8, **IMAGE, **ENCODER}, images),
    "swin": Case(
        "SwinForImageClassification",
        {"patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, **IMAGE},
        images,
    ),
    "resnet": Case(
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [32, 64], "depths": [1, 2], "num_labels": 5},
        images,
    ),
    "clip": Case(
        "CLIPModel",
        {"projection_dim": 32,
         "text_config": {"vocab_size": VOCABULARY, "max_position_embeddings": 64, **ENCODER, **TOKENS},
         "vision_config": {"image_size": 32, "patch_size": 8, **ENCODER}},
        captions,
    ),
}  # fmt: skip


_ROUTED = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "use_cache": False}
_ROUTED_GROUPED = {**_ROUTED, "num_key_value_heads": 1, "intermediate_size": 24}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {**_ROUTED_GROUPED, "num_local_experts": 4}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {**_ROUTED, "num_key_value_heads": 2, "intermediate_size": 24, "q_lora_rank": 8, "kv_lora_rank": 8,
         "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
         "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 1},
    ),
    "qwen3": (
        "Qwen3MoeForCausalLM",
        {**_ROUTED_GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
         "decoder_sparse_step": 1, "output_router_logits": True},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {**_ROUTED_GROUPED, "intermediate_size_mlp": 24, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
         "interleave_moe_layer_step": 1, "attention_chunk_size": 32},
    ),
    "olmoe": ("OlmoeForCausalLM", {**_ROUTED_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {**_ROUTED_GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    "qwen2": (
        "Qwen2MoeForCausalLM",
        {**_ROUTED_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1,
         "shared_expert_intermediate_size": 12},
    ),
    "lfm2": (
        "Lfm2MoeForCausalLM",
        {**_ROUTED_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_dense_layers": 1,
         "layer_types": ["full_attention", "conv"]},
    ),
    "dbrx": (
        "DbrxForCausalLM",
        {"vocab_size": 32, "d_model": 16, "n_heads": 2, "max_seq_len": 32, "use_cache": False, "tie_word_embeddings": False,
         "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4},
         "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16}},
    ),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_decoder_layers": 2, "use_cache": False,
         "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "expert_capacity": 2,
         "dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0},
    ),
    "longcat": (
        "LongcatFlashForCausalLM",
        {**_ROUTED, "num_layers": 1, "ffn_hidden_size": 24, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
         "qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 8, "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2,
         "expert_ffn_hidden_size": 12, "max_position_embeddings": 32},
    ),
    "jetmoe": (
        "JetMoeForCausalLM",
        {**_ROUTED, "num_key_value_heads": 2, "kv_channels": 4, "intermediate_size": 24, "num_local_experts": 4,
         "num_experts_per_tok": 2, "max_position_embeddings": 32},
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        {**_ROUTED_GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4,
         "layer_types": ["linear_attention", "full_attention"]},
    ),
}  # fmt: skip
"""mixtures of experts, each with a routing of its own"""


_HEADS = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False}
_HEADS_GROUPED = {**_HEADS, "num_key_value_heads": 2, "intermediate_size": 24}
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _HEADS_GROUPED),
    "mistral": ("MistralForCausalLM", {**_HEADS_GROUPED, "sliding_window": 5}),
    "gemma3": ("Gemma3ForCausalLM", {**_HEADS_GROUPED, "sliding_window": 3, "head_dim": 4,
                                     "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "use_cache": False}),
}  # fmt: skip
"""decoders whose masks have windows, or none"""

ALIBI: dict[str, dict[str, Any]] = {
    "BloomForCausalLM": {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "MptForCausalLM": {"vocab_size": 32, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
}
"""decoders with linear biases, which spell their attention out"""

GEMMA3N: dict[str, Any] = {
    "vocab_size": 128, "vocab_size_per_layer_input": 128, "hidden_size": 32, "hidden_size_per_layer_input": 8,
    "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "sliding_window": 8, "altup_coef_clip": 0.01, "laurel_rank": 8,
    "num_kv_shared_layers": 0, "use_cache": False, "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0],
}  # fmt: skip
"""a decoder that clamps parameters in its forward"""


def build(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model in training mode with its arguments."""
    torch.manual_seed(0)
    if name == "dlrm":
        reference = autoshard.models.get(name)
        args, kwargs = reference.inputs(batch=6)
        return reference.model().train(), tuple(args), dict(kwargs)
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    # torch's grouped product has no float64 kernel; transformers' own has one.
    monkeypatch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *args: False)
    case = CASES[name]
    kind = getattr(transformers, case.model)
    model: nn.Module = kind(kind.config_class(**case.config))
    return model.train(), (), case.inputs()


def families() -> dict[str, Case]:
    """Family → a small model of each class of models above."""
    found = dict(CASES)
    routed = {name: (model, {**config, "num_hidden_layers": 2}) for name, (model, config) in EXPERTS.items()}
    biased = {name.removesuffix("ForCausalLM").lower(): (name, {**c, "use_cache": False}) for name, c in ALIBI.items()}
    for name, (model, config) in {**WINDOWS, **routed, **biased}.items():
        if all(case.model != model for case in found.values()):
            found[name] = Case(model, config, short_text)
    return {**found, "gemma3n": Case("Gemma3nForCausalLM", GEMMA3N)}


def hugging_face(name: str, vocabulary: int) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 1}
    config = {
        "llama": lambda: transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, use_cache=False, **common,
        ),
        "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False, **common),
        "bert": lambda: transformers.BertConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, **common,
        ),
        "t5": lambda: transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, use_cache=False, **common,
        ),
    }[name]()  # fmt: skip
    kind = {
        "llama": "LlamaForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "bert": "BertForMaskedLM",
        "t5": "T5ForConditionalGeneration",
    }[name]
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, kind)(config)
    return model.train()


def tokens(batch: int, vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (batch, 16), generator=generator)
    labels = torch.randint(0, vocabulary, (batch, 16), generator=generator)
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}

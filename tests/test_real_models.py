"""Fifteen models of public libraries, trained with a loss in float64: equal to one device, and really divided.

The configurations are tiny and random; sizes do not divide three ranks, so ``{"tp": 3}`` cuts heads, widths, channels
and vocabulary unevenly. Every test prints the share of FLOPs that is divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import assert_equal_training
from torch import nn

import autoshard
import autoshard.models

MESHES = {"tp2": {"tp": 2}, "dp2tp2": {"dp": 2, "tp": 2}, "tp3": {"tp": 3}}
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
NAMES = (*CASES, "dlrm")
FAST = {"resnet", "dlrm"}
"""what runs without --run-slow, too; test_compile_models.py has text models of transformers"""


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


def cases() -> list[Any]:
    """The fast ones by default on two ranks; everything with --run-slow."""
    return [
        pytest.param(n, m, marks=[] if n in FAST and m == "tp2" else [pytest.mark.slow], id=f"{n}-{m}")
        for n in NAMES
        for m in MESHES
    ]


@pytest.mark.parametrize(("name", "mesh"), cases())
def test_real_models(name: str, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = build(name, monkeypatch)
    axes = MESHES[mesh]
    report = assert_equal_training(model, axes, args, kwargs, steps=1)
    cost, ranks = report.plan.cost, math.prod(axes.values())
    share = cost.flops / (cost.flops_per_rank * ranks)
    print(f"{name} on {mesh}: {share:.1%} of the FLOPs divided, largest error {report.worst}")
    assert share > (0.75 if ranks == 3 else 0.9), f"{share:.1%} of the work is divided"


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the all-reduce of gradients the comparison fails."""
    model, args, kwargs = build("gpt2", monkeypatch)
    model.double()
    monkeypatch.setattr("autoshard.runtime.enter", lambda x, axes: x)
    monkeypatch.setattr("autoshard.runtime.enter_parameters", lambda x, axes: x)
    report = autoshard.verify(model, autoshard.Mesh({"tp": 2}, hardware="ideal_network"), args, kwargs)
    assert not report.ok

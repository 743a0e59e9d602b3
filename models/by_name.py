"""Models by name for the command line: reference models, transformers, user functions."""

from __future__ import annotations

import importlib
import inspect
import linecache
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autoshard import frames, models
from autoshard.errors import CaptureError

LoadedModel = tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]


def load(
    name: str, batch: int | None, seq: int | None, dtype: torch.dtype = torch.float32, *, convert: bool = True
) -> LoadedModel:
    """A model factory and example inputs for a MODEL argument, both in ``dtype``.

    ``package.module:function`` returns ``(model, args)`` or ``(model, args, kwargs)``; ``batch``
    and ``seq`` are passed as keywords if given. Unless ``convert``, these models, and configs of
    transformers with a dtype, keep their own. Raises :class:`CaptureError` for an unknown model.
    """
    module, colon, function = name.partition(":")
    if not name.startswith("hf:") and ((colon and "." in module) or _importable(module, function)):
        make, args, kwargs = _user_function(module, function, {"batch": batch, "seq": seq})
        if not convert:
            return make, args, kwargs
        return (lambda: make().to(dtype)), *_in_dtype((args, kwargs), dtype)
    batch, seq = 4 if batch is None else batch, 32 if seq is None else seq
    if name.startswith("hf:"):
        make, args, kwargs = _hugging_face(name.removeprefix("hf:"), batch, seq, dtype, convert)
    else:
        reference = models.get(name)
        make, (args, kwargs) = reference.model, reference.inputs(batch=batch, seq=seq)
    return partial(_made_in, dtype, make), *_in_dtype((tuple(args), dict(kwargs)), dtype)


def _made_in(dtype: torch.dtype, make: Callable[[], nn.Module]) -> nn.Module:
    """The model with ``dtype`` as default, so that what must be more precise (rotary tables) is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def _in_dtype(inputs: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)


def _importable(module: str, function: str) -> bool:
    known = {n.partition(":")[0] for n in models.names()}
    return bool(function) and module not in known


def _user_function(module: str, function: str, sizes: dict[str, int | None]) -> LoadedModel:
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise CaptureError(f"MODEL {module}:{function} cannot be loaded: {error}") from error
    asked = {name: size for name, size in sizes.items() if size is not None}
    try:
        inspect.signature(make).bind(**asked)
    except TypeError as error:
        raise CaptureError(
            f"MODEL {module}:{function} cannot be called with ({_keywords_in_words(asked)}): {error}"
        ) from error
    try:
        made = make(**asked)
    except Exception as error:
        raise CaptureError(f"{module}:{function} fails{_raised_at(error)}: {type(error).__name__}: {error}") from error
    if isinstance(made, nn.Module):
        raise CaptureError(f"{module}:{function} returns no example inputs. Return (model, args, kwargs)")
    match made:
        case (nn.Module() as model, tuple() | list() as args, *rest) if len(rest) < 2 and all(
            isinstance(x, dict) for x in rest
        ):
            return (lambda: model), tuple(args), dict(*rest)
    raise CaptureError(f"{module}:{function} returns {type(made).__name__}, not (model, args) or (model, args, kwargs)")


def _keywords_in_words(keywords: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in keywords.items())


def _raised_at(error: Exception) -> str:
    """Text "at file:line" of the innermost line in user code; "" if there is none."""
    of_users = [
        (f, n) for f, n in frames.traceback_frames(error.__traceback__) if frames.is_users_file(f.f_code.co_filename)
    ]
    if not of_users:
        return ""
    frame, number = of_users[-1]
    file = frame.f_code.co_filename
    return f" at {file}:{number} (`{linecache.getline(file, number).strip()}`)"


_HF_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"num_key_value_heads": 2}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "moe_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "bert": ("BertConfig", "BertForMaskedLM", {}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {"d_kv": 16, "decoder_start_token_id": 0}),
}
"""family → transformers classes, and settings of its small config"""


def _hugging_face(name: str, batch: int, seq: int, dtype: torch.dtype, convert: bool) -> LoadedModel:
    """A random transformers model: a small one of a family, or of a local config. No download."""
    try:
        import transformers
    except ImportError as error:
        raise CaptureError("hf: models need the transformers package: pip install transformers") from error
    if name in _HF_FAMILIES:
        config_name, model_name, extra = _HF_FAMILIES[name]
        sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        if name != "gpt2":
            sizes["intermediate_size"] = 128
        config = getattr(transformers, config_name)(**sizes, **extra, bos_token_id=0, eos_token_id=1)
        make = partial(getattr(transformers, model_name), config)
    elif Path(name).exists():
        try:
            config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CaptureError(f"hf:{name} is not a config of transformers: {error}") from error
        make = partial(transformers.AutoModelForCausalLM.from_config, config)
    else:
        known = ", ".join(f"hf:{family}" for family in _HF_FAMILIES)
        raise CaptureError(f"hf:{name} is not known here, nor a config.json or a folder with one. Known: {known}")
    config.use_cache = False
    if convert or config.dtype is None:
        config.dtype = dtype
    most = config.get_text_config().vocab_size
    tokens = torch.randint(0, most, (batch, seq), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return make, (), {"input_ids": tokens, "labels": tokens.clone()}

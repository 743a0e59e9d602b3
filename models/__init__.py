"""Small, readable reference models: single-device PyTorch, with tiny and real sizes.

``get("llama:8b")`` names a model and a size; ``names()`` lists all. Every file has a frozen config
with a class method per size, the module, and ``example_inputs(config, batch, seq)``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from autoshard.errors import AutoshardError
from autoshard.models import dlrm, gpt, llama, mlp, moe, vit
from autoshard.models.dlrm import Dlrm, DlrmConfig
from autoshard.models.gpt import Gpt, GptConfig
from autoshard.models.llama import Llama, LlamaConfig
from autoshard.models.mlp import Mlp, MlpConfig
from autoshard.models.moe import Moe, MoeConfig
from autoshard.models.output import Output
from autoshard.models.vit import Vit, VitConfig

if __name__ != "autoshard.models":  # else its classes exist twice
    raise ImportError(f"{__file__} is autoshard.models: import it by this name")

__all__ = [
    "Dlrm", "DlrmConfig", "Gpt", "GptConfig", "Llama", "LlamaConfig", "Mlp", "MlpConfig", "Moe", "MoeConfig", "Output",
    "Reference", "Vit", "VitConfig", "get", "names",
]  # fmt: skip

ExampleInputs = tuple[tuple[Tensor, ...], dict[str, Tensor]]


class Reference(NamedTuple):
    """``model()`` makes the module; ``inputs(batch=2, seq=16)`` its ``(args, kwargs)``."""

    model: Callable[[], nn.Module]
    inputs: Callable[..., ExampleInputs]


@dataclass(frozen=True, slots=True)
class _Family:
    module: Callable[[Any], nn.Module]
    sizes: Mapping[str, Callable[[], Any]]
    example_inputs: Callable[..., ExampleInputs]


_FAMILIES: dict[str, _Family] = {
    "mlp": _Family(Mlp, mlp.SIZES, mlp.example_inputs),
    "gpt": _Family(Gpt, gpt.SIZES, gpt.example_inputs),
    "llama": _Family(Llama, llama.SIZES, llama.example_inputs),
    "moe": _Family(Moe, moe.SIZES, moe.example_inputs),
    "dlrm": _Family(Dlrm, dlrm.SIZES, dlrm.example_inputs),
    "vit": _Family(Vit, vit.SIZES, vit.example_inputs),
}


def names() -> tuple[str, ...]:
    """Every ``family:size`` that :func:`get` knows."""
    return tuple(f"{family}:{size}" for family, entry in _FAMILIES.items() for size in entry.sizes)


def get(name: str) -> Reference:
    """The model ``family`` or ``family:size`` (default "tiny"): its factory and example inputs.

    Raises :class:`AutoshardError` for a name that is not in :func:`names`.
    """
    family, _, size = name.partition(":")
    full = f"{family}:{size or 'tiny'}"
    if full not in names():
        near = difflib.get_close_matches(full, names(), n=3)
        hint = f"Nearest: {', '.join(near)}. " if near else ""
        raise AutoshardError(f"there is no reference model {name!r}. {hint}Known: {', '.join(names())}.")
    entry = _FAMILIES[family]
    config = entry.sizes[size or "tiny"]()
    return Reference(
        model=lambda: entry.module(config),
        inputs=lambda **sizes: _to_default_device(entry.example_inputs(config, **sizes)),
    )


def _to_default_device(inputs: ExampleInputs) -> ExampleInputs:
    """The inputs on torch's default device, unless that is meta."""
    device = torch.get_default_device()
    if device.type in ("cpu", "meta"):
        return inputs
    return tree_map_only(Tensor, lambda x: x.to(device), inputs)

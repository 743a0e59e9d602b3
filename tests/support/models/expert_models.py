"""Mixtures of experts: those of transformers, and of every way to write a routing."""

from __future__ import annotations

from typing import Any

import pytest
import routing_models
import torch
from state_experts import Routed
from torch import nn
from transformers_models import EXPERTS

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")


def model_of(name: str, form: str = "eager", layers: int = 2, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    kind, sizes = EXPERTS[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**sizes | {"num_hidden_layers": layers} | changes)
    config._experts_implementation = None if name == "llama4" else form
    model: nn.Module = model_class(config)
    return model.train()


def text(batch: int = 4, length: int = 6) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 32, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


class Loss(Routed):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch)[0]


def routed(form: str) -> nn.Module:
    return routing_models.Modules(form, form == "modules") if "modules" in form else routing_models.Routed(form)


class Averaged(routing_models.Modules):
    """In evaluation the mean of all experts, which no routing is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return super().forward(x)
        return torch.stack([expert(x) for expert in self.experts]).mean(0).square().mean()

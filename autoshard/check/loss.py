"""Calls of a model beside another's: copies of what they take, and the number that a training loop differentiates."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autoshard.module.model.original import computed


def copied(model: nn.Module) -> nn.Module:
    """A copy, also of a model that holds tensors which are computed from others."""
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in computed(model)})


def fresh(tree: Any) -> Any:
    """``tree`` with copies of its tensors: leaves that require a gradient where these do."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), tree)


def full(x: torch.Tensor) -> torch.Tensor:
    """A plain full tensor, of a DTensor as well."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def loss_of(output: Any, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """:func:`scalar_of` what the model returns, else the sum of its tensors' mean squares."""
    scalar = scalar_of(output)
    if scalar is not None:
        return scalar
    return torch.stack([x.square().mean() for x in leaves if x.is_floating_point() and x.requires_grad]).sum()


def scalar_of(output: Any) -> torch.Tensor | None:
    """What a training loop differentiates: the scalar with a gradient that is called "loss", else the first."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    ends = [x for x in (named, *pytree.tree_leaves(output)) if isinstance(x, torch.Tensor)]
    return next((x for x in ends if x.requires_grad and not x.shape), None)

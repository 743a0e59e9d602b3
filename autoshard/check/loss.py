"""Copies of models and inputs for reference runs, and the loss that a training loop uses."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autoshard.module.model.original import computed


def copied(model: nn.Module) -> nn.Module:
    """A deep copy of ``model``; its non-leaf tensors are copied as leaves."""
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in computed(model)})


def fresh(tree: Any) -> Any:
    """``tree`` with its tensors copied as leaves that keep ``requires_grad``."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), tree)


def full(x: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor; a plain tensor as it is."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def loss_of(output: Any, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """:func:`scalar_of` the output, else the sum of mean squares of its tensors with gradients."""
    scalar = scalar_of(output)
    if scalar is not None:
        return scalar
    return torch.stack([x.square().mean() for x in leaves if x.is_floating_point() and x.requires_grad]).sum()


def scalar_of(output: Any) -> torch.Tensor | None:
    """The loss of an output: the scalar with gradient named "loss", else the first scalar."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    ends = [x for x in (named, *pytree.tree_leaves(output)) if isinstance(x, torch.Tensor)]
    return next((x for x in ends if x.requires_grad and not x.shape), None)

"""Inputs of an exported program: names of arguments, source tensors, order."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.export.graph_signature import InputKind, InputSpec

from autoshard.passes.capture.exported.provenance import argument_path

Example = tuple[tuple[Any, ...], dict[str, Any]]


def argument_paths(model: nn.Module, example: Example) -> list[str]:
    """Per leaf of ``example``: the forward's name of it, "" if it is no tensor."""
    leaves, _ = pytree.tree_flatten_with_path(example)
    return [argument_path(model, path) if isinstance(leaf, torch.Tensor) else "" for path, leaf in leaves]


def gradient_sources(program: torch.export.ExportedProgram, model: nn.Module, example: Example) -> set[str]:
    """Names of the program's placeholders whose tensor requires a gradient."""
    leaves, order = pytree.tree_leaves(example), iter(export_order(program, example))
    names = set()
    for spec in program.graph_signature.input_specs:
        tensor = leaves[next(order)] if spec.kind is InputKind.USER_INPUT else own_tensor(model, spec)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            names.add(spec.arg.name)
    return names


def own_tensor(model: nn.Module, spec: InputSpec) -> torch.Tensor | None:
    if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
        return None
    path, _, leaf = (spec.target or "").rpartition(".")
    tensor = getattr(model.get_submodule(path), leaf)
    return tensor if isinstance(tensor, torch.Tensor) else None


def export_order(program: torch.export.ExportedProgram, example: Example) -> list[int]:
    """Per user input of the program: index of its leaf in the example. Export reorders kwargs."""
    positional, keywords = program.call_spec.in_spec.children()
    positions, start = list(range(positional.num_leaves)), positional.num_leaves
    of_key: dict[str, range] = {}
    for key, child in zip(keywords.context, keywords.children(), strict=True):
        of_key[key] = range(start, start + child.num_leaves)
        start += child.num_leaves
    positions += [position for key in example[1] for position in of_key[key]]
    order = [0] * len(positions)
    for leaf, position in enumerate(positions):
        order[position] = leaf
    return order


def with_keywords(signature: inspect.Signature, keywords: Iterable[str]) -> inspect.Signature:
    """``signature`` with explicit parameters for ``keywords`` that its ``**kwargs`` take.

    With dynamic lengths torch.export counts entries of ``**kwargs`` twice and rejects their shapes.
    """
    parameters = signature.parameters.values()
    rest = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    extra = [n for n in keywords if n not in signature.parameters]
    if not rest or not extra:
        return signature
    named = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in extra]
    return signature.replace(parameters=[*(p for p in parameters if p is not rest[0]), *named])


def tensors_of(model: nn.Module, example: Example) -> dict[str, torch.Tensor]:
    """Argument name → tensor of the example."""
    return {p: x for p, x in zip(argument_paths(model, example), pytree.tree_leaves(example), strict=True) if p}

"""Mixed precision in a trace: parameters in another dtype, floating inputs and outputs cast."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from autoshard.errors import CaptureError
from autoshard.passes.capture.exported.trees import register_types
from autoshard.passes.ir.graph import Graph
from autoshard.precision import Precision


@contextlib.contextmanager
def reading_in(model: nn.Module, precision: Precision | None) -> Iterator[Mapping[str, torch.dtype]]:
    """Inside, ``model`` computes in ``precision``. Yields name → stored dtype of a parameter.

    Parameters are copied meanwhile. The caller removes the casting forward.
    """
    if precision is None:
        yield {}
        return
    named = dict(model.named_parameters(remove_duplicate=False))
    kept = {name: p.dtype for name, p in named.items()}
    floating = [(p, p.data) for p in dict.fromkeys(named.values()) if p.is_floating_point()]
    _cast_around(model, precision)
    try:
        for p, data in floating:
            if precision.param is not None:
                p.data = data.to(precision.param)
        yield kept
    finally:
        for p, data in floating:
            p.data = data


def _cast_around(model: nn.Module, precision: Precision) -> None:
    """Wrap the forward to cast floating inputs and outputs."""
    given = precision.param if precision.cast_inputs else None
    if given is None and precision.output is None:
        return
    if isinstance(model, fx.GraphModule):
        raise CaptureError(
            f"mixed_precision ({precision}) casts inputs and outputs in the model's forward, and an fx.GraphModule has "
            "none but its graph. Give cast_forward_inputs=False and no output_dtype, and cast outside; or the Python module."
        )
    forward = model.forward

    @functools.wraps(forward)
    def casting(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _as((args, kwargs), given)
        output = forward(*args, **kwargs)
        register_types(output)
        return _as(output, precision.output)

    model.__dict__["forward"] = casting


def _as(tree: Any, dtype: torch.dtype | None) -> Any:
    """``tree`` with floating tensors cast to ``dtype``."""
    if dtype is None:
        return tree
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def with_precision(graph: Graph, kept: Mapping[str, torch.dtype], precision: Precision | None) -> Graph:
    """``graph`` with parameter types that tell the dtypes of storage and of gradient reduction."""
    if precision is None:
        return graph
    types = dict(graph.types)
    for value in (i for i in graph.inputs if i.kind == "parameter" and types[i.name].dtype.is_floating_point):
        type_ = types[value.name]
        stored, summed = kept[value.fqn], precision.reduce
        types[value.name] = replace(
            type_,
            stored=stored if stored != type_.dtype else None,
            summed=summed if type_.grad and summed != type_.dtype else None,
        )
    return replace(graph, types=types)

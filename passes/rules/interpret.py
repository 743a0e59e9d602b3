"""Interpreter: runs a :class:`~autoshard.passes.ir.graph.Graph` op by op on full tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoshard.passes.ir.graph import Graph, Node, map_refs
from autoshard.passes.rules.facts import makes_tensor

Observer = Callable[[Node, tuple[torch.Tensor, ...]], None]


def interpret(
    graph: Graph,
    inputs: Mapping[str, torch.Tensor],
    observe: Observer | None = None,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """All values of ``graph`` by name, computed with the real ops and recorded by autograd.

    ``inputs``: one tensor per entry of ``graph.inputs`` (constants are optional); set
    ``requires_grad`` yourself. ``observe(node, results)`` is called after each node. Buffers are
    not written back: new values are in ``graph.mutations``. Raises KeyError for a missing input.
    """
    values: dict[str, Any] = dict(graph.constants)
    values.update({i.name: inputs[i.name] for i in graph.inputs if i.kind != "constant" or i.name in inputs})
    if device is None:
        device = next((values[i.name].device for i in graph.inputs if i.kind != "constant"), torch.device("cpu"))
    values.update({name: t.to(device) for name, t in graph.constants.items() if name not in inputs})
    for node in graph.nodes:
        args = map_refs(node.args, lambda ref: values[ref.name])
        kwargs = map_refs(dict(node.kwargs), lambda ref: values[ref.name])
        if makes_tensor(node):
            kwargs.setdefault("device", device)
        result = node.op(*args, **kwargs)
        results = result if isinstance(result, tuple | list) else (result,)
        values.update({name: results[slot] for name, slot in zip(node.outputs, node.output_slots, strict=True)})
        if observe is not None:
            observe(node, tuple(values[name] for name in node.outputs))
    return values


def outputs(graph: Graph, values: Mapping[str, Any]) -> Any:
    """The model's output object, rebuilt from the values of :func:`interpret`."""
    import torch.utils._pytree as pytree

    flat = [map_refs(out, lambda ref: values[ref.name]) for out in graph.outputs]
    return pytree.tree_unflatten(flat[: graph.out_spec.num_leaves], graph.out_spec)

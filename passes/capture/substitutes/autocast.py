"""Autocast in a trace: composite ops whose parts autocast casts are decomposed while it is on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from autoshard.aten import aten
from autoshard.errors import CaptureError
from autoshard.passes.capture.observer import Observer, Patch
from autoshard.passes.ir.graph import Graph
from autoshard.runtime.autocast import autocast_state

COMPOSED = frozenset(
    {
        aten.chain_matmul.default,
        aten.corrcoef.default,
        aten.cov.default,
        aten.einsum.default,
        aten.gru.input,
        aten.gru_cell.default,
        aten.inner.default,
        aten.linalg_matrix_power.default,
        aten.linalg_multi_dot.default,
        aten.lstm_cell.default,
        aten.matrix_power.default,
        aten.rnn_relu.input,
        aten.rnn_relu_cell.default,
        aten.rnn_tanh.input,
        aten.rnn_tanh_cell.default,
        aten.tensordot.default,
    }
)
NARROW = frozenset({aten.lstm.input})
"""ops of which autocast casts all float operands: their CPU kernels are autocast's own"""
REFUSED = frozenset({aten.bilinear.default})
"""ops that cast inside a kernel"""
_HANDLE = proxy_tensor.maybe_handle_decomp


def handled(mode: Any, op: Any, args: Any, kwargs: Any) -> Any:
    """Replaces ``maybe_handle_decomp``: result by ``op``'s parts, or NotImplemented."""
    state = autocast_state()
    if state and op in REFUSED:
        raise CaptureError(
            f"{op} under torch.autocast is not supported: what it casts inside is not known. Call it inside "
            "torch.autocast(device, enabled=False)."
        )
    if state and op in NARROW and any(x.dtype == torch.float for x in tree_leaves(args) if torch.is_tensor(x)):
        narrow = state[0][1]
        with mode:
            return op(
                *tree_map_only(torch.Tensor, lambda x: x.to(narrow) if x.dtype == torch.float else x, args), **kwargs
            )
    if state and op in COMPOSED:
        with mode:
            return op.decompose(*args, **kwargs)
    return _HANDLE(mode, op, args, kwargs)


def with_kept_casts(graph: Graph) -> Graph:
    """One cast per parameter, like autocast's cache: its gradients sum in low precision."""
    if not any(kept for _, _, kept in autocast_state()):
        return graph
    parameters = {i.name for i in graph.inputs if i.kind == "parameter" and graph.types[i.name].dtype == torch.float}
    first: dict[tuple[str, str], str] = {}
    instead: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == aten._to_copy.default and node.inputs[0] in parameters and node.kwargs.keys() == {"dtype"}:
            (name,) = node.outputs
            instead[name] = first.setdefault((node.inputs[0], str(node.kwargs["dtype"])), name)
    types = {name: t for name, t in graph.types.items() if instead.get(name, name) == name}
    nodes = tuple(n for n in graph.nodes if all(o in types for o in n.outputs))
    return replace(graph, nodes=nodes, types=types).renamed(instead)


class Autocast(Observer):
    """Decomposes ops under autocast."""

    def patches(self) -> Iterable[Patch]:
        yield proxy_tensor, "maybe_handle_decomp", handled

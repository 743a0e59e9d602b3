"""Mixed precision: ``torch.autocast``, and parameters stored in another dtype than read. Ops that
autocast casts only inside are decomposed while it is on; export would keep them as one op."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental import proxy_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from autoshard.aten import aten
from autoshard.errors import CaptureError
from autoshard.passes.capture.exported.pytrees import register_types
from autoshard.passes.capture.observer import Observer, Patch
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.rewrite import NodeBuilder, rewrite
from autoshard.precision import Precision
from autoshard.runtime.transport.torch_state import autocast_state

AUTOCAST_DECOMPOSED = frozenset(
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
AUTOCAST_LOW_PRECISION = frozenset({aten.lstm.input})
"""ops of which autocast casts all float operands: their CPU kernels are autocast's own"""
AUTOCAST_REFUSED = frozenset({aten.bilinear.default})
"""ops that cast inside a kernel"""
_HANDLE_DECOMP = proxy_tensor.maybe_handle_decomp


def decompose_under_autocast(mode: Any, op: Any, args: Any, kwargs: Any) -> Any:
    """Replaces ``maybe_handle_decomp``: result by ``op``'s parts, or NotImplemented."""
    state = autocast_state()
    if state and op in AUTOCAST_REFUSED:
        raise CaptureError(
            f"{op} under torch.autocast is not supported, because its inner casts are not known. "
            "Call it inside torch.autocast(device, enabled=False)."
        )
    if (
        state
        and op in AUTOCAST_LOW_PRECISION
        and any(x.dtype == torch.float for x in tree_leaves(args) if torch.is_tensor(x))
    ):
        narrow = state[0][1]
        with mode:
            return op(*tree_map_only(Tensor, lambda x: x.to(narrow) if x.dtype == torch.float else x, args), **kwargs)
    if state and op in AUTOCAST_DECOMPOSED:
        with mode:
            return op.decompose(*args, **kwargs)
    return _HANDLE_DECOMP(mode, op, args, kwargs)


def with_shared_casts(graph: Graph) -> Graph:
    """One cast per parameter, like autocast's cache: its gradients sum in low precision."""
    if not any(kept for _, _, kept in autocast_state()):
        return graph
    parameters = {i.name for i in graph.of_kind("parameter") if graph.types[i.name].dtype == torch.float}
    first: dict[tuple[str, str], str] = {}

    def shared(build: NodeBuilder, node: Node) -> bool:
        if node.op is not aten._to_copy.default or node.inputs[0] not in parameters or node.kwargs.keys() != {"dtype"}:
            return False
        (name,) = node.outputs
        build.renamed[name] = first.setdefault((node.inputs[0], str(node.kwargs["dtype"])), name)
        return build.renamed[name] != name

    return rewrite(graph, shared)


class AutocastDecompositions(Observer):
    """Decomposes ops under autocast."""

    def patches(self) -> Iterable[Patch]:
        yield proxy_tensor, "maybe_handle_decomp", decompose_under_autocast


@contextlib.contextmanager
def with_parameter_dtype(model: nn.Module, precision: Precision | None) -> Iterator[Mapping[str, torch.dtype]]:
    """Inside, ``model`` computes in ``precision`` with copied parameters. Yields name → stored
    dtype. The caller removes the casting forward."""
    if precision is None:
        yield {}
        return
    named = dict(model.named_parameters(remove_duplicate=False))
    stored_dtypes = {name: p.dtype for name, p in named.items()}
    floating = [(p, p.data) for p in dict.fromkeys(named.values()) if p.is_floating_point()]
    _cast_inputs_and_outputs(model, precision)
    try:
        for p, data in floating:
            if precision.param is not None:
                p.data = data.to(precision.param)
        yield stored_dtypes
    finally:
        for p, data in floating:
            p.data = data


def _cast_inputs_and_outputs(model: nn.Module, precision: Precision) -> None:
    """Wrap the forward to cast floating inputs and outputs."""
    given = precision.param if precision.cast_inputs else None
    if given is None and precision.output is None:
        return
    if isinstance(model, fx.GraphModule):
        raise CaptureError(
            f"mixed_precision ({precision}) casts inputs and outputs in the model's forward, but "
            "an fx.GraphModule has only its graph. Pass cast_forward_inputs=False and no "
            "output_dtype, and cast outside; or compile the Python module."
        )
    forward = model.forward

    @functools.wraps(forward)
    def casting(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast_floating((args, kwargs), given)
        output = forward(*args, **kwargs)
        register_types(output)
        return _cast_floating(output, precision.output)

    model.__dict__["forward"] = casting


def _cast_floating(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def annotate_stored_dtypes(
    graph: Graph, stored_dtypes: Mapping[str, torch.dtype], precision: Precision | None
) -> Graph:
    """``graph`` with parameter types that tell the dtypes of storage and of gradient reduction."""
    if precision is None:
        return graph
    types = dict(graph.types)
    for value in (i for i in graph.of_kind("parameter") if types[i.name].dtype.is_floating_point):
        type_ = types[value.name]
        stored, summed = stored_dtypes[value.fqn], precision.reduce
        types[value.name] = replace(
            type_,
            stored=stored if stored != type_.dtype else None,
            summed=summed if type_.grad and summed != type_.dtype else None,
        )
    return replace(graph, types=types)

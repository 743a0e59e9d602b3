"""Composite operations written as others where they stand, such as ``flatten`` as a view: without another trace."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.export.graph_signature import SymIntArgument, TensorArgument
from torch.utils._python_dispatch import TorchDispatchMode

Calls = list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]
"""operation, arguments and result, one after another"""


class _Recorder(TorchDispatchMode):
    """Operations as they come to the backend: PyTorch has written composite ones as others before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Calls = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.device):  # of a fake tensor, which is asked as one
            self.calls.append((func, args, kwargs or {}, result))
        return result


def spliced(
    program: torch.export.ExportedProgram, stays: Callable[[fx.Node], bool], plain: Callable[[Any], bool]
) -> bool:
    """Whether every node of ``program`` that does not stay is written there as the operations that PyTorch makes of it.

    ``plain``: which operations these may be. Nothing has changed where one of them is another, a length is open, or what
    the program calls has a graph of its own. Names are those that another trace would give, but for
    their numbers in some programs with values that nobody reads.
    """
    module, old = program.graph_module, program.graph_module.graph
    values = [leaf for node in old.nodes for leaf in pytree.tree_leaves(node.meta.get("val"))]
    if any(node.op == "get_attr" for node in old.nodes) or any(map(_is_open, values)):
        return False
    written: dict[fx.Node, tuple[Calls, Any]] = {}
    for node in old.nodes:
        if not stays(node):
            recorded = _recorded(node)
            if not all(plain(func) and isinstance(out, torch.Tensor | list) for func, _, _, out in recorded[0]):
                return False
            written[node] = recorded
    graph, new = fx.Graph(module), dict[fx.Node, Any]()
    for node in old.nodes:
        if node in written:
            new[node] = _write(graph, node, *written[node], new)
            if new[node] is None:
                return False
        else:
            new[node] = _copied(graph, node, new)
    _rename_outputs(program, {node.name: made.name for node, made in new.items() if isinstance(made, fx.Node)})
    module.graph = graph
    module.recompile()
    return True


def _is_open(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(n, torch.SymInt) for n in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _recorded(node: fx.Node) -> tuple[Calls, Any]:
    """What runs in place of ``node``, and the result: on tensors without data."""
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs))
    mode = detect_fake_mode(pytree.tree_leaves((args, kwargs)))
    assert mode is not None
    with mode, _Recorder() as recorder:
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    return recorder.calls, result


def _write(graph: fx.Graph, node: fx.Node, calls: Calls, result: Any, new: dict[fx.Node, Any]) -> fx.Node | None:
    """The last of the nodes that stand for ``node``; None where its results are not those of one of them."""
    known = {id(arg.meta["val"]): new[arg] for arg in node.all_input_nodes}
    for func, args, kwargs, out in calls:
        if any(id(x) not in known for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)):
            return None
        operands, options = pytree.tree_map_only(torch.Tensor, lambda x: known[id(x)], (args, kwargs))
        made = graph.create_node("call_function", func, operands, options, _named(graph, func))
        made.meta = {**node.meta, "val": out}
        known[id(out)] = made
        if isinstance(out, list):  # as long as both hold the same tensors, the one is the other
            known[id(result)] = made if _are(out, result) else known.get(id(result))
    return known.get(id(result))


def _are(these: list[Any], those: Any) -> bool:
    return isinstance(those, list | tuple) and len(these) == len(those) and all(map(operator.is_, these, those))


def _copied(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, Any]) -> fx.Node:
    """The same node, named after its operation and its place."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: new[n])
    name = _named(graph, node.target) if node.op == "call_function" else node.name
    made = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
    made.meta = node.meta
    if node.op == "placeholder":
        made.name = node.name  # a new graph calls none like a function of Python, such as ``input``
    return made


def _named(graph: fx.Graph, target: Any) -> str | None:
    """The name that a trace gives, but for a number."""
    return graph._target_to_str(target.overloadpacket.__name__) if isinstance(target, OpOverload) else None


def _rename_outputs(program: torch.export.ExportedProgram, names: dict[str, str]) -> None:
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, TensorArgument | SymIntArgument):
            spec.arg = dataclasses.replace(spec.arg, name=names[spec.arg.name])

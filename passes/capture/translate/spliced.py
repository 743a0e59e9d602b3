"""Expand composite ops in place, such as ``flatten`` into a view, without another trace.

Regions of ``no_grad`` are inlined, as their ops read detached values already. In-place writes into
values without views become functional: later readers read the new value.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.export.graph_signature import SymIntArgument, TensorArgument
from torch.utils._python_dispatch import TorchDispatchMode

REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
"""calls a subgraph under ``no_grad`` or ``enable_grad``"""
Calls = list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]
"""recorded calls in order: (op, args, kwargs, result)"""


class _Recorder(TorchDispatchMode):
    """Records ops as the backend sees them, after PyTorch decomposed composite ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Calls = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.device):  # a query of a fake tensor's device
            self.calls.append((func, args, kwargs or {}, result))
        return result


def spliced(
    program: torch.export.ExportedProgram, stays: Callable[[fx.Node], bool], plain: Callable[[Any], bool]
) -> bool:
    """Expand in place all nodes of ``program`` that do not stay; whether that was possible.

    ``plain``: whether an op may result. On False ``program`` is unchanged: another op resulted, a
    length is symbolic, or a subgraph is no :data:`REGION`. Nodes get the names of a new trace; only
    their numbers may differ in programs with unread values.
    """
    module, old = program.graph_module, program.graph_module.graph
    same: dict[fx.Node, Any] = {}
    nodes = list(_in_place(module, same))
    values = [leaf for node in nodes for leaf in pytree.tree_leaves(node.meta.get("val"))]
    if any(node.op == "get_attr" for node in nodes) or any(map(_is_open, values)):
        return False
    written: dict[fx.Node, tuple[Calls, Any]] = {}
    for node in nodes:
        if not stays(node) and node not in same:
            recorded = _recorded(node, functional(node.target) or node.target)
            if not all(plain(func) and isinstance(out, torch.Tensor | list | tuple) for func, _, _, out in recorded[0]):
                return False
            written[node] = recorded
    graph, new, named = fx.Graph(module), dict[fx.Node, Any](), _Names()
    for node in nodes:
        names = named.before(node)
        if functional(node.target) is not None and not _is_whole(names, node, written[node][1]):
            return False
        if node in same:
            new[node] = fx.map_arg(same[node], lambda n: new[n])
        elif node in written:
            new[node] = _write(graph, node, *written[node], new)
            if new[node] is None:
                return False
        else:
            new[node] = _copied(graph, node, new)
        if functional(node.target) is not None:
            new.update(dict.fromkeys(names, new[node]))
    _rename_outputs(program, {node.name: new[node].name for node in old.nodes if isinstance(new.get(node), fx.Node)})
    module.graph = graph
    module.delete_all_unused_submodules()
    module.recompile()
    return True


def _in_place(module: fx.GraphModule, same: dict[fx.Node, Any]) -> Iterator[fx.Node]:
    """The nodes of ``module``, regions inlined; adds aliases across borders to ``same``."""
    regions = [node for node in module.graph.nodes if node.target is REGION]
    bodies = {region.args[1] for region in regions}
    for node in module.graph.nodes:
        if node.target is REGION:
            body: Any = getattr(module, node.args[1].target)
            *inner, output = _in_place(body, same)
            same.update(zip(body.graph.find_nodes(op="placeholder"), node.args[2:], strict=True))
            results: Any = output.args[0]
            same.update((get, results[get.args[1]]) for get in node.users)
            yield from inner
        elif node not in bodies:
            yield node


def functional(op: Any) -> OpOverload | None:
    """The functional variant of in-place ``op``; None for any other op, and for random ones."""
    if not isinstance(op, OpOverload) or op.namespace != "aten" or not op._schema.is_mutable:
        return None
    first, *others = op._schema.arguments
    packet = getattr(torch.ops.aten, op.overloadpacket.__name__.removesuffix("_"), None)
    if any(a.is_write for a in others) or not first.is_write or op.overloadpacket is packet:
        return None
    return getattr(packet, op._overloadname, None) if torch.Tag.nondeterministic_seeded not in op.tags else None


class _Names:
    """Memory → nodes that alias it; none for memory of inputs, or with views."""

    def __init__(self) -> None:
        self.of: dict[int, list[fx.Node]] = {}

    def before(self, node: fx.Node) -> list[fx.Node]:
        """The aliases of the memory of ``node`` so far; adds ``node``."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):  # of several results each has a node
            return []
        memory = value.untyped_storage()._cdata
        names = self.of.get(memory, [])
        if memory not in self.of and node.op == "call_function":
            self.of[memory] = [node]
        else:
            self.of[memory] = [*names, node] if names and functional(node.target) else []
        return names


def _is_whole(names: list[fx.Node], node: fx.Node, result: Any) -> bool:
    """Whether ``node`` writes a ``result`` of its own type into one of ``names``."""
    target = node.args[0]
    return target in names and (result.shape, result.dtype) == (node.meta["val"].shape, node.meta["val"].dtype)


def _is_open(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(n, torch.SymInt) for n in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _recorded(node: fx.Node, op: Any) -> tuple[Calls, Any]:
    """(recorded calls, result) of ``op`` on the fake arguments of ``node``."""
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs))
    mode = detect_fake_mode(pytree.tree_leaves((args, kwargs)))
    assert mode is not None
    # As in a trace, the Python dispatcher keeps dropout one op.
    with mode, enable_python_dispatcher(), _Recorder() as recorder:
        result = op(*args, **kwargs)
    return recorder.calls, result


def _write(graph: fx.Graph, node: fx.Node, calls: Calls, result: Any, new: dict[fx.Node, Any]) -> fx.Node | None:
    """Write ``calls`` in place of ``node``; the node with its result, or None if there is none."""
    known = {id(arg.meta["val"]): new[arg] for arg in node.all_input_nodes}
    read = {id(x) for x in pytree.tree_leaves([result, *((args, kwargs) for _, args, kwargs, _ in calls)])}
    for func, args, kwargs, out in calls:
        if any(id(x) not in known for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)):
            return None
        operands, options = pytree.tree_map_only(torch.Tensor, lambda x: known[id(x)], (args, kwargs))
        made = graph.create_node("call_function", func, operands, options, _named(graph, func))
        made.meta = {**node.meta, "val": out}
        known[id(out)] = made
        if isinstance(out, list):  # lists are equal if they hold the same tensors
            known[id(result)] = made if _are(out, result) else known.get(id(result))
        for slot, value in enumerate(out) if isinstance(out, tuple) else ():
            if id(value) in read:
                known[id(value)] = graph.create_node("call_function", operator.getitem, (made, slot))
                known[id(value)].meta = {**node.meta, "val": value}
    return known.get(id(result))


def _are(these: list[Any], those: Any) -> bool:
    return isinstance(those, list | tuple) and len(these) == len(those) and all(map(operator.is_, these, those))


def _copied(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, Any]) -> fx.Node:
    """A copy of ``node``, named after its op as a trace names it."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: new[n])
    name = _named(graph, node.target) if node.op == "call_function" else node.name
    made = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
    made.meta = node.meta
    if node.op == "placeholder":
        made.name = node.name  # a new graph would rename ``input``, which shadows a builtin
    return made


def _named(graph: fx.Graph, target: Any) -> str | None:
    """The name that a trace gives, without a number."""
    return graph._target_to_str(target.overloadpacket.__name__) if isinstance(target, OpOverload) else None


def _rename_outputs(program: torch.export.ExportedProgram, names: dict[str, str]) -> None:
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, TensorArgument | SymIntArgument):
            spec.arg = dataclasses.replace(spec.arg, name=names[spec.arg.name])

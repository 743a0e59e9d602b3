"""Provenance of fx nodes: module path, classes, source line; names of tensors and arguments."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import fx, nn

from autoshard.frames import frames_outwards, location_text, users_lines
from autoshard.passes.ir.text import is_attribute_name

NO_GRAD_KEY = "autoshard_no_grad"
"""key in a node's meta: traced with gradients off (export misses no_grad inside autocast)"""

ENABLES_GRAD_KEY = "autoshard_enables_grad"
"""key in a program's meta: whether the forward turns gradients on in a call that has them off"""

CHECKPOINT_KEY = "autoshard_checkpoint"
"""key in a node's custom meta: number of its activation checkpoint"""


def marking_nodes(key: str, when: Callable[[], bool]) -> Callable[[Any], Any]:
    """Wrapper of ``fx.Graph.create_node``: nodes made while ``when()`` get ``key`` in meta."""

    def around(original: Callable[..., fx.Node]) -> Callable[..., fx.Node]:
        def create_node(self: fx.Graph, *args: Any, **kwargs: Any) -> fx.Node:
            node = original(self, *args, **kwargs)
            if when():
                node.meta[key] = True
            return node

        return create_node

    return around


class ForwardFrames:
    """Replaces fx's ``CapturedTraceback``, which reads the full stack's source for every node."""

    def __init__(self, found: list[traceback.FrameSummary]) -> None:
        self.found = found

    @classmethod
    def extract(cls) -> ForwardFrames:
        forwards = [frame for frame in frames_outwards() if frame.f_code.co_name == "forward"]
        found = [(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in reversed(forwards)]
        return cls([traceback.FrameSummary(*frame, lookup_line=False) for frame in found])

    def summary(self) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(self.found)


def module_stack_of(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """The module stack, outermost first: (path, class name)."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple((path, str(getattr(kind, "__name__", kind)).rpartition(".")[2]) for path, kind in stack.values())


def module_path_of(node: fx.Node) -> str:
    """Path of the innermost module, "" for the model itself."""
    stack = module_stack_of(node)
    return stack[-1][0] if stack else ""


def source_frames(node: fx.Node) -> tuple[tuple[str, int], ...]:
    """(file, line number) of the user's stack frames, outermost first."""
    return users_lines(node.meta.get("stack_trace") or "")


def node_loc(node: fx.Node) -> str:
    """Module path and source line, for errors."""
    found = source_frames(node)
    return (module_path_of(node) or "the model") + (f" ({location_text(*found[-1])})" if found else "")


def names_by_tensor(model: nn.Module) -> dict[str, list[str]]:
    """Name of a parameter or buffer → all names of that tensor, in order of registration."""
    by_id: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        by_id.setdefault(id(tensor), []).append(name)
    return {name: names for names in by_id.values() for name in names}


def rename_clashing_results(program: torch.export.ExportedProgram, names: Container[str]) -> None:
    """Rename results with one of ``names`` (parameters, …): plans refer to values by name."""
    for node in program.graph.nodes:
        if node.op == "call_function" and (old := node.name) in names:
            node._rename(f"{old}_result")
            program.graph_signature.replace_all_uses(old, node.name)


def rename_unreadable_inputs(program: torch.export.ExportedProgram) -> None:
    """Rename inputs whose names are no identifiers in generated Python: ``class``, ``00``."""
    for node in program.graph.nodes:
        if node.op == "placeholder" and not is_attribute_name(old := node.name):
            node._rename(f"x_{old}")
            node.target = node.name
            program.graph_signature.replace_all_uses(old, node.name)


def argument_path(model: nn.Module, path: Sequence[Any]) -> str:
    """The forward's name of an argument: ``x``, ``batch['x'][1]``, ``inputs[0]`` of ``*inputs``."""
    root, first, *rest = path
    if root.idx == 1:
        return str(first.key) + "".join(map(str, rest))
    positional = [
        p
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if first.idx < len(positional) and positional[first.idx].kind != inspect.Parameter.VAR_POSITIONAL:
        return str(positional[first.idx].name) + "".join(map(str, rest))
    spread = positional[-1].name if positional else "args"
    return f"{spread}[{first.idx - max(len(positional) - 1, 0)}]" + "".join(map(str, rest))

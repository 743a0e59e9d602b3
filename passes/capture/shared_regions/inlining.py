"""Inlining of shared regions: each repeat marker is replaced by a copy of the traced region."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from autoshard.passes.capture.exported.provenance import CHECKPOINT_KEY
from autoshard.passes.capture.shared_regions.recording import (
    REGION_KEY,
    REPEATED_REGION,
    TRACED_REGION,
    RegionMismatchError,
)
from autoshard.torch_private.capture import Namespace


def inline_regions(program: torch.export.ExportedProgram) -> None:
    """Inline regions in place and renumber; :class:`RegionMismatchError` if others leave."""
    graph = program.graph
    nodes = list(graph.nodes)
    called = {node.args[2]: node for node in nodes if node.target is TRACED_REGION}
    inside: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        # Constants of a region are placeholders, which all copies share.
        if node.op != "placeholder" and (number := _custom_meta(node).get(REGION_KEY)) in called:
            inside[number].append(node)
    constants = {s.arg.name for s in program.graph_signature.input_specs if s.kind is InputKind.CONSTANT_TENSOR}
    for number in {node.args[1] for node in nodes if node.target is REPEATED_REGION}:
        _check_region(called[number], inside[number], constants)
    for node in nodes:
        if node.target is REPEATED_REGION:
            number = node.args[1]
            _insert_region_copy(graph, node, called[number], inside[number])
    for node in called.values():
        results: Any = node.args[1]
        _replace_marker(graph, node, results)
    _renumber_results(program)


def _custom_meta(node: fx.Node) -> dict[str, Any]:
    return node.meta.get("custom") or {}


def _check_region(called: fx.Node, inside: list[fx.Node], constants: set[str]) -> None:
    """Raise :class:`RegionMismatchError` if unknown values enter or leave the region."""
    operands: Any = called.args[0]
    results: Any = called.args[1]
    known = {*inside, *operands}
    for node in inside:
        if any(user not in known and user is not called for user in node.users) and node not in results:
            raise RegionMismatchError(f"{node} leaves the call")
        if any(x not in known and x.name not in constants for x in node.all_input_nodes):
            raise RegionMismatchError(f"{node} reads a value that is not known as an argument")


def _insert_region_copy(graph: fx.Graph, repeated_node: fx.Node, called: fx.Node, inside: Iterable[fx.Node]) -> None:
    """Replace marker ``repeated_node`` by a copy of ``inside``."""
    theirs: Any = called.args[0]
    ours: Any = repeated_node.args[0]
    copies: dict[fx.Node, fx.Node] = {}
    for their, our in zip(theirs, ours, strict=True):
        if copies.setdefault(their, our) is not our:
            raise RegionMismatchError(f"{their} is passed twice")
    where = _CopiedNodeMeta(called, repeated_node)
    with graph.inserting_before(repeated_node):
        for node in inside:
            new = graph.node_copy(node, lambda x: copies.get(x, x))
            new.meta = where.meta(node)
            copies[node] = new
    results: Any = called.args[1]
    _replace_marker(graph, repeated_node, [copies.get(x, x) for x in results])


def _replace_marker(graph: fx.Graph, node: fx.Node, results: list[fx.Node]) -> None:
    for get in list(node.users):
        if get.target is not operator.getitem:
            raise RegionMismatchError(f"{get} reads a marker")
        slot: Any = get.args[1]
        get.replace_all_uses_with(results[slot])
        graph.erase_node(get)
    graph.erase_node(node)


class _CopiedNodeMeta:
    """Meta of copied nodes: module stack, checkpoint and stack trace of ``repeated_node``."""

    def __init__(self, called: fx.Node, repeated_node: fx.Node) -> None:
        self.repeated_node = repeated_node
        self.outer = len(called.meta.get("nn_module_stack") or {})
        self.stack = dict(repeated_node.meta["nn_module_stack"])
        (_, (self.old, _)), (_, (self.new, _)) = (
            list(n.meta["nn_module_stack"].items())[-1] for n in (called, repeated_node)
        )
        self.checkpoint, self.our_checkpoint = (_custom_meta(n).get(CHECKPOINT_KEY, 0) for n in (called, repeated_node))
        self.lines = (called.meta.get("stack_trace") or "").splitlines()

    def meta(self, node: fx.Node) -> dict[str, Any]:
        meta = dict(node.meta)
        below = list((meta.get("nn_module_stack") or {}).items())[self.outer :]
        moved = {f"{key} of {self.new}": (self._path(path), kind) for key, (path, kind) in below}
        meta["nn_module_stack"] = {**self.stack, **moved}
        meta["custom"] = {k: v for k, v in _custom_meta(node).items() if k != REGION_KEY}
        if CHECKPOINT_KEY in meta["custom"]:
            inner = meta["custom"][CHECKPOINT_KEY] != self.checkpoint
            meta["custom"][CHECKPOINT_KEY] = (
                (self.new, meta["custom"][CHECKPOINT_KEY]) if inner else self.our_checkpoint
            )
        meta["stack_trace"] = self._trace(meta.get("stack_trace"))
        return meta

    def _path(self, path: str) -> str:
        inside = path == self.old or path.startswith(f"{self.old}.")
        return self.new + path[len(self.old) :] if inside else path

    def _trace(self, trace: str | None) -> str | None:
        """Stack trace of ``repeated_node``, followed by the frames inside the region."""
        repeated_node = self.repeated_node.meta.get("stack_trace")
        if not trace or not repeated_node:
            return trace
        lines = trace.splitlines()
        same = next((i for i, (a, b) in enumerate(zip(self.lines, lines, strict=False)) if a != b), len(self.lines))
        ours = repeated_node.splitlines()
        return "\n".join([*ours[: len(ours) - (len(self.lines) - same)], *lines[same:]])


def _renumber_results(program: torch.export.ExportedProgram) -> None:
    """Rename results and renumber checkpoints in program order, as a trace does."""
    graph, checkpoints = program.graph, dict[Any, int]()
    names = graph._graph_namespace = Namespace()
    for node in graph.nodes:
        if node.op == "call_function":
            node.name = names.create_name(re.sub(r"_\d+$", "", node.name), node)
        else:
            names.create_name(node.name, node)
        if CHECKPOINT_KEY in (custom := _custom_meta(node)):
            number = checkpoints.setdefault(custom[CHECKPOINT_KEY], len(checkpoints) + 1)
            node.meta["custom"] = {**custom, CHECKPOINT_KEY: number}
    outputs: Any = graph.output_node().args[0]
    for spec, value in zip(program.graph_signature.output_specs, outputs, strict=True):
        if isinstance(value, fx.Node):
            spec.arg.name = value.name

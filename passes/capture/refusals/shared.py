"""Tensors of a model that share memory, as ``self.copy = self.linear.weight.data`` does: a program keeps each by itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.errors import CaptureError
from autoshard.passes.capture.exported.attributes import held
from autoshard.passes.ir.graph import Graph


def memory_of(tensors: Iterable[torch.Tensor]) -> set[StorageWeakRef]:
    """The storages that they lie in."""
    return {StorageWeakRef(x.untyped_storage()) for x in tensors if x.layout == torch.strided}


def check_shared(model: nn.Module, graph: Graph) -> None:
    """Refuse a graph that reads a buffer or constant in a parameter's memory: it would not follow what an optimizer writes."""
    parameters = {name: memory_of([p]) for name, p in model.named_parameters()}
    read = {name for node in graph.nodes for name in node.inputs} | graph.returned
    for i in graph.inputs:
        if i.kind not in ("buffer", "constant") or i.name not in read:
            continue
        memory = memory_of([model.get_buffer(i.fqn) if i.kind == "buffer" else graph.constants[i.name]])
        if of := next((name for name, own in parameters.items() if own & memory), None):
            raise CaptureError(
                f"the forward reads {i.kind} {_named(model, i.fqn, memory)!r}, which shares its memory with parameter {of!r}, "
                f"and would not follow its steps in a program. Read {of}.detach() in the forward, or keep a clone()."
            )


def _named(model: nn.Module, name: str, memory: set[StorageWeakRef]) -> str:
    """``name``, or that of the plain attribute that lies in ``memory``: a trace names constants itself."""
    return next((n for n, (x, _) in held(model).items() if memory_of([x]) & memory), name)


def sharing(model: nn.Module) -> str:
    """Names of a buffer or plain attribute and of what shares its memory, as part of a sentence; "" where none do."""
    found: dict[StorageWeakRef, str] = {}
    tensors = [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]
    for name, x in [*tensors, *((name, x) for name, (x, _) in held(model).items())]:
        for memory in memory_of([x]):
            if memory in found:
                return f"{found[memory]!r} and {name!r}"
            found[memory] = name
    return ""

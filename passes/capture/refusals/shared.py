"""Tensors of a model that share storage (``self.copy = self.linear.weight.data``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.errors import CaptureError
from autoshard.passes.capture.exported.attributes import held
from autoshard.passes.ir.graph import Graph


def memory_of(tensors: Iterable[torch.Tensor]) -> set[StorageWeakRef]:
    """The storages of dense tensors."""
    return {StorageWeakRef(x.untyped_storage()) for x in tensors if x.layout == torch.strided}


def check_shared(model: nn.Module, graph: Graph) -> None:
    """Refuse a read buffer or constant in a parameter's memory: it would miss optimizer steps."""
    owners: dict[StorageWeakRef, list[tuple[str, torch.Tensor]]] = {}
    for name, p in model.named_parameters():
        for memory in memory_of([p]):
            owners.setdefault(memory, []).append((name, p))
    read = {name for node in graph.nodes for name in node.inputs} | graph.returned
    for i in graph.inputs:
        if i.kind not in ("buffer", "constant") or i.name not in read:
            continue
        tensor = model.get_buffer(i.fqn) if i.kind == "buffer" else graph.constants[i.name]
        memories = memory_of([tensor])
        of = next((name for memory in memories for name, p in owners.get(memory, ()) if _meet(tensor, p)), None)
        if of is not None:
            raise CaptureError(
                f"the forward reads {i.kind} {_named(model, i.fqn, memories)!r}, which shares its memory with parameter "
                f"{of!r}, and would not follow its steps in a program. Read {of}.detach() in the forward, or keep a clone()."
            )


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the byte ranges of ``a`` and ``b`` in one storage overlap."""
    one, other = _bytes(a), _bytes(b)
    return max(one.start, other.start) < min(one.stop, other.stop)


def _bytes(x: torch.Tensor) -> range:
    begin = int(x.storage_offset())
    last = sum((int(n) - 1) * int(stride) for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return range(begin * x.itemsize, (begin + last + 1) * x.itemsize)


def _named(model: nn.Module, name: str, memory: set[StorageWeakRef]) -> str:
    """The plain attribute in ``memory``, else ``name``: traces invent names for constants."""
    return next((n for n, (x, _) in held(model).items() if memory_of([x]) & memory), name)


def sharing(model: nn.Module) -> str:
    """Names of two tensors that share storage, as text for an error; "" if none do."""
    found: dict[StorageWeakRef, str] = {}
    tensors = [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]
    for name, x in [*tensors, *((name, x) for name, (x, _) in held(model).items())]:
        for memory in memory_of([x]):
            if memory in found:
                return f"{found[memory]!r} and {name!r}"
            found[memory] = name
    return ""

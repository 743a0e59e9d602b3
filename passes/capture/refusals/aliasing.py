"""Aliased memory: tensors that share storage, and writes into overlapping elements.

A program keeps every parameter and buffer in memory of its own (unlike ``self.copy =
self.linear.weight.data``). A trace loses writes into ``expand`` and ``unfold`` results, where
several elements share one address.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.errors import SharedStateError
from autoshard.passes.capture.exported.snapshots import plain_tensors
from autoshard.passes.capture.observer import ObservedCall, Observer, RefusalLog
from autoshard.passes.ir.graph import Graph


def storages_of(tensors: Iterable[Tensor]) -> set[StorageWeakRef]:
    """The storages of dense tensors."""
    return {StorageWeakRef(x.untyped_storage()) for x in tensors if x.layout == torch.strided}


def check_parameter_aliases(model: nn.Module, graph: Graph) -> None:
    """Refuse a read buffer or constant in a parameter's memory: it would miss optimizer steps."""
    owners: dict[StorageWeakRef, list[tuple[str, Tensor]]] = {}
    for name, p in model.named_parameters():
        for memory in storages_of([p]):
            owners.setdefault(memory, []).append((name, p))
    read = {name for node in graph.nodes for name in node.inputs} | graph.returned
    for i in graph.inputs:
        if i.kind not in ("buffer", "constant") or i.name not in read:
            continue
        tensor = model.get_buffer(i.fqn) if i.kind == "buffer" else graph.constants[i.name]
        memories = storages_of([tensor])
        of = next(
            (name for memory in memories for name, p in owners.get(memory, ()) if _overlap_in_bytes(tensor, p)), None
        )
        if of is not None:
            raise SharedStateError(
                f"the forward reads {i.kind} {_alias_of(model, i.fqn, memories)!r}, which shares "
                f"memory with parameter {of!r}, but in a program it would not follow the steps "
                f"of that parameter. Read {of}.detach() in the forward, or keep a clone()."
            )


def check_apart(model: nn.Module) -> None:
    """Refuse parameters in each other's memory (``a.data = b.data``): steps of one would miss the other."""
    held: dict[StorageWeakRef, list[tuple[int, int, str]]] = {}
    for name, p in model.named_parameters():
        for memory in storages_of([p]) if p.is_contiguous() and p.numel() else ():  # columns of one matrix interleave
            held.setdefault(memory, []).append((_byte_range(p).start, _byte_range(p).stop, name))
    for spans in held.values():
        for (_, stop, of), (start, _, name) in itertools.pairwise(sorted(spans)):
            if start < stop:
                raise SharedStateError(
                    f"parameter {name!r} shares memory with parameter {of!r}. Assign one parameter to both "
                    "modules to tie them, or keep a clone()."
                )


def _overlap_in_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether the byte ranges of ``a`` and ``b`` in one storage overlap."""
    one, other = _byte_range(a), _byte_range(b)
    return max(one.start, other.start) < min(one.stop, other.stop)


def _byte_range(x: Tensor) -> range:
    begin = int(x.storage_offset())
    last = sum((int(n) - 1) * int(stride) for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return range(begin * x.itemsize, (begin + last + 1) * x.itemsize)


def _alias_of(model: nn.Module, name: str, memory: set[StorageWeakRef]) -> str:
    """The plain attribute in ``memory``, else ``name``: traces invent names for constants."""
    return next((n for n, (x, _) in plain_tensors(model).items() if storages_of([x]) & memory), name)


def names_sharing_memory(model: nn.Module) -> str:
    """Names of two tensors that share storage, as text for an error; "" if none do."""
    found: dict[StorageWeakRef, str] = {}
    tensors = [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]
    for name, x in [*tensors, *((name, x) for name, (x, _) in plain_tensors(model).items())]:
        for memory in storages_of([x]):
            if memory in found:
                return f"{found[memory]!r} and {name!r}"
            found[memory] = name
    return ""


class OverlappingWrites(Observer):
    """Refuses them. Eager allows fills, and only warns about writes by index or mask."""

    def __init__(self, refuse: RefusalLog) -> None:
        self.refuse = refuse

    def before(self, call: ObservedCall) -> None:
        if any(_has_overlapping_memory(x) and _has_overlapping_memory(_written_part(call, x)) for x in call.written):
            name = getattr(call.func, "__name__", call.func)
            raise self.refuse(
                f"the forward writes by {name}() to an expanded tensor, or to windows (unfold), "
                "whose elements share memory. Write before it is expanded, or into a clone()."
            )


def _has_overlapping_memory(x: Tensor) -> bool:
    """Whether elements of ``x`` overlap in memory; symbolic lengths count only at stride 0."""
    if x.layout != torch.strided or x.is_nested:
        return False
    steps = [(s, n) for s, n in zip(x.stride(), x.shape, strict=True) if not (type(n) is int and n == 1)]
    if any(type(n) is int and n == 0 for n in x.shape):
        return False
    known = sorted((s, n) for s, n in steps if type(s) is int and type(n) is int)
    reached = 0
    for stride, length in known:
        if stride <= reached:
            return True
        reached += stride * (length - 1)
    return any(type(s) is int and s == 0 for s, _ in steps)


def _written_part(call: ObservedCall, x: Tensor) -> Tensor:
    """The part of ``x`` that ``call`` writes."""
    if call.func is not Tensor.__setitem__:
        return x
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    basic = all(isinstance(i, int | slice | torch.SymInt | None) or i is ... for i in index)
    return x[call.args[1]] if basic else x

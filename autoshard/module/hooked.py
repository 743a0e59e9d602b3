"""Tensor hooks on outputs that feed other outputs, such as logits beside a loss.

In eager the hook sees the gradient through both. Here an output ends the program and has its
outside gradient only, so a backward that would differ is refused.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from autoshard.errors import RuntimeMismatchError
from autoshard.passes.ir.graph import Graph, Ref

Feeding = Mapping[int, tuple[int, ...]]
"""output number → numbers of the outputs that it is computed from"""


def feeding(graph: Graph) -> Feeding:
    """Which outputs feed which, through values with gradients; a duplicate by the first."""
    returned = [x.name if isinstance(x, Ref) and graph.types[x.name].grad else None for x in graph.outputs]
    first = {name: returned.index(name) for name in returned if name is not None}
    sources: dict[str, frozenset[int]] = {}

    def of(name: str) -> frozenset[int]:
        return sources.get(name, frozenset()) | ({first[name]} if name in first else frozenset())

    for node in graph.nodes:
        read = frozenset().union(*(of(name) for name in node.inputs if graph.types[name].grad))
        sources.update((name, read) for name in node.outputs if read and graph.types[name].grad)
    found: dict[int, tuple[int, ...]] = {}
    for number, name in enumerate(returned):
        if name is not None:
            read = frozenset(i for i, other in enumerate(returned) if other is not None and first[other] in of(name))
            if others := tuple(sorted(read - {number})):
                found[number] = others
    return found


def refuse_hooks(leaves: Sequence[Any], of: Feeding) -> None:
    """Make the backward of an output raise :class:`RuntimeMismatchError` if a source has a hook."""
    if not of:
        return
    with torch._C.DisableTorchFunctionSubclass():  # the subclass route of sharded outputs is slow
        kept: dict[int, _Hooks] = {}
        for x in (leaves[i] for others in of.values() for i in others):
            if x.requires_grad and id(x) not in kept:
                kept[id(x)] = _Hooks(x)
        for number, others in of.items():
            x = leaves[number]
            sources = {i: kept[id(leaves[i])] for i in others if id(leaves[i]) in kept and leaves[i] is not x}
            if sources and x.requires_grad:
                handle = x.register_hook(_check(number, sources))
                if id(x) in kept:
                    kept[id(x)].own.add(handle.id)


class _Hooks:
    """The hooks of a tensor, without keeping it alive."""

    def __init__(self, x: torch.Tensor) -> None:
        if x._backward_hooks is None:  # created here as by its first hook
            x._backward_hooks = OrderedDict()
            if x.grad_fn is not None:
                x.grad_fn._register_hook_dict(x)
        self.own: set[int] = set()
        self.all, self.tensor = x._backward_hooks, weakref.ref(x)

    @property
    def there(self) -> bool:
        if self.all.keys() - self.own:
            return True
        x = self.tensor()
        return x is not None and x.retains_grad


def _check(number: int, sources: Mapping[int, _Hooks]) -> Any:
    @unserializable_hook  # type: ignore[untyped-decorator]
    def check(gradient: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            found = next((i for i, hooks in sources.items() if hooks.there), None)
        if found is not None:
            raise RuntimeMismatchError(
                f"output {found} of the module has a hook or retain_grad(), and output {number}, which the forward computes "
                f"from it, has a gradient: what comes back through {number} would not reach the hook. Compute {number} from "
                f"{found} outside of the module, or register no hook on {found}."
            )

    return check

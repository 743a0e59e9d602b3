"""State passed between calls, such as KV caches: which outputs, and their shards in one process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.module.dtensors.of_stage import OfStage
from autoshard.module.dtensors.outputs import ABOUT, chosen_dim
from autoshard.module.programs.simulate import cut, join, views
from autoshard.passes.ir.graph import Graph


def carried(graph: Graph, parameters: Collection[str]) -> tuple[bool, ...]:
    """Per output whether it is state for the next call. ``parameters``: names of the forward's.

    State: fields named as an argument, objects of the model's classes (caches), nested tuples,
    tensors put into dict arguments. Other fields (logits, hidden states) are results.
    """
    own = _of_output(graph.out_spec, parameters)
    return (*own, *[True] * (len(graph.outputs) - len(own)))


def _of_output(spec: Any, parameters: Collection[str]) -> tuple[bool, ...]:
    if spec.is_leaf():
        return (False,)
    found: list[bool] = []
    for key, child in zip(_keys(spec), spec.children(), strict=True):
        container = not child.is_leaf() and (key is None or child.type not in (tuple, list, dict))
        found += [container or key in parameters] * child.num_leaves
    return tuple(found)


def _keys(spec: Any) -> Sequence[str | None]:
    """Field names of a container; None if it has none."""
    count, context = len(spec.children()), spec.context
    names = getattr(context, "names", None) or getattr(context, "_fields", context)
    fields = isinstance(names, list | tuple) and len(names) == count and all(isinstance(n, str) for n in names)
    return list(names) if fields else [None] * count


def is_left(x: Any) -> bool:
    """Whether an argument is state that an earlier call left in its layout."""
    return isinstance(x, Carried | OfStage)


class Carried(torch.Tensor):
    """A tensor held as shards by simulated ranks; programs read shards, others the full tensor.

    The full tensor is joined on first use; then the shards are views of it.
    """

    placements: tuple[Any, ...]
    _layout: Layout
    _parts: tuple[torch.Tensor, ...]
    _whole: torch.Tensor | None

    @staticmethod
    def of(parts: Sequence[torch.Tensor], layout: Layout, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of this shape with these shards by rank."""
        made = torch.Tensor._make_wrapper_subclass(Carried, tuple(shape), dtype=parts[0].dtype, device=parts[0].device)
        made._layout, made._parts, made._whole = layout, tuple(x.detach() for x in parts), None
        made.placements = layout.placements
        return made

    @property
    def carried_in(self) -> Layout:
        """The layout of the shards."""
        return self._layout

    def lies_on(self, mesh: Mesh) -> bool:
        """Whether ``mesh`` has the ranks of the shards."""
        return mesh.shape == self._layout.mesh.shape

    def parts_in(self, layout: Layout) -> tuple[torch.Tensor, ...]:
        """Shards by rank in ``layout``."""
        if not self.lies_on(layout.mesh) or layout.placements != self._layout.placements:
            return cut(self.whole(), layout, "an input")
        return self._parts if self._whole is None else views(self._whole, layout)

    def whole(self) -> torch.Tensor:
        """The plain tensor; raises :class:`RuntimeMismatchError` if replicas differ."""
        if self._whole is None:
            with torch.no_grad():
                self._whole = join(self._parts, self._layout, self.shape, "a state")
            self._parts = ()
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in ABOUT:
                return func(*args, **(kwargs or {}))
            dim = chosen_dim(func, args, kwargs or {})
            if dim is not None and (x := args[0])._whole is None and not x._layout.axes_of(dim):
                made = [func(part, *args[1:], **(kwargs or {})) for part in x._parts]
                shape = [*x.shape[:dim], made[0].shape[dim], *x.shape[dim + 1 :]]
                return Carried.of(made, x._layout, shape)
            own, named = pytree.tree_map_only(Carried, Carried.whole, (tuple(args), dict(kwargs or {})))
            return func(*own, **named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own, named = pytree.tree_map_only(Carried, Carried.whole, (tuple(args), dict(kwargs or {})))
        return func(*own, **named)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.whole())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.whole().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

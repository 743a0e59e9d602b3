"""State passed between calls (KV caches): which outputs are, and where shards stay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.module.dtensors.module_dtensor import from_local_shard
from autoshard.module.dtensors.outputs import METADATA_GETTERS, GatheredOnUse, ShardedOutput, selection_dim
from autoshard.module.dtensors.segments import shards_dim
from autoshard.module.dtensors.views import first_by_position, is_in_place, may_be_view
from autoshard.module.programs.simulated_ranks import join_shards, shard_for_ranks, writable_shards
from autoshard.passes.ir.graph import Graph
from autoshard.runtime.programs.pipeline import StageRanks
from autoshard.torch_private.dispatch import make_wrapper_subclass

_SHARDWISE_METHODS = frozenset(
    "clone contiguous cat to __deepcopy__ zero_ fill_ narrow index_select repeat_interleave".split()
)
"""functions, besides views, that act on each shard alike"""

_DEVICE_GETTERS: dict[Any, Callable[[Any], Any]] = {
    Tensor.device.__get__: lambda x: torch.device(x.device_mesh.device_type),
    Tensor.is_meta.__get__: lambda x: False,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda x: x.device_mesh.device_type == "cuda",  # type: ignore[attr-defined]
}
"""getters whose answer would differ on a rank without data"""


@dataclass(frozen=True)
class StageHome:
    """The rank along the pipeline axis that holds the data."""

    along: StageRanks
    rank: int

    @property
    def is_mine(self) -> bool:
        """Whether this rank holds the data."""
        return self.along.rank == self.rank


class StageResidentOutput(ShardedOutput):
    """An output with shards on one stage's ranks. In-place writes reach these; most operations
    gather it, collectively."""

    home: StageHome

    @staticmethod
    def at(x: DTensor, home: StageHome) -> StageResidentOutput:
        """``x``, whose shard has data on the ranks of ``home`` only, as such an output."""
        x.__class__ = StageResidentOutput
        x.__dict__["home"] = home
        return x  # type: ignore[return-value]

    def like(self, made: DTensor) -> StageResidentOutput:
        """See :meth:`Output.like`."""
        return StageResidentOutput.at(made, self.home)

    def everywhere(self) -> ShardedOutput:
        """The same tensor and layout, with data on the ranks of all stages. Collective."""
        local, spec = self._local_tensor.detach().contiguous(), self._spec
        if not self.home.is_mine:
            local = torch.empty(local.shape, dtype=local.dtype, device=spec.mesh.device_type)
        self.home.along.tell(self.home.rank, local, "an output that one stage keeps")
        return ShardedOutput.of(from_local_shard(local, spec))  # type: ignore[return-value]

    def full_tensor(self, **kwargs: Any) -> Tensor:
        """The full tensor on every rank. Collective."""
        return self.everywhere().full_tensor(**kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = first_by_position(args, kwargs or {})
        if func in _DEVICE_GETTERS:
            return _DEVICE_GETTERS[func](args[0])
        if func in METADATA_GETTERS:
            return super().__torch_function__(func, types, args, kwargs)
        given = [x for x in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(x, Tensor)]
        first = next(x for x in given if isinstance(x, StageResidentOutput))
        if _is_shardwise(func, args, kwargs, given, first):
            if func is Tensor.__deepcopy__:
                func, args = Tensor.clone, args[:1]
            if first.home.is_mine or selection_dim(func, args, kwargs) is None:
                own = args, kwargs
            else:  # without data the row numbers do not matter
                own = pytree.tree_map_only(Tensor, _plain_to_meta, (tuple(args), dict(kwargs)))
            made = super().__torch_function__(func, types, *own)
            return pytree.tree_map_only(DTensor, first.like, made)
        seen = {id(x): x.everywhere() for x in given if isinstance(x, StageResidentOutput)}
        own, named = pytree.tree_map_only(StageResidentOutput, lambda x: seen[id(x)], (tuple(args), dict(kwargs)))
        made = func(*own, **named)
        if not is_in_place(func) or not isinstance(args[0], StageResidentOutput):
            return made
        if args[0].home.is_mine:
            args[0]._local_tensor.copy_(own[0]._local_tensor)
        return args[0] if made is own[0] else made


def _is_shardwise(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor], first: StageResidentOutput
) -> bool:
    """Whether ``func`` can run per shard. The answer is the same on ranks with and without data."""
    dim = selection_dim(func, args, kwargs)
    if dim is not None:
        return not any(p.is_partial() or shards_dim(p, dim) for p in first.placements)
    ours = all(isinstance(x, StageResidentOutput) and x.home == first.home for x in given)
    name, rest = getattr(func, "__name__", ""), (*args[1:], *kwargs.values())
    if name == "to" and not all(isinstance(x, torch.dtype | bool) for x in rest):  # another device
        return False
    return ours and (may_be_view(func) or name in _SHARDWISE_METHODS)


def _plain_to_meta(x: Tensor) -> Tensor:
    return x if isinstance(x, DTensor) else x.to("meta")


def is_state_output(graph: Graph, parameters: Collection[str]) -> tuple[bool, ...]:
    """Per output whether it is state for the next call: fields named as an argument, objects of the
    model's classes (caches), nested tuples, tensors put into dict arguments; not logits or
    hidden states. ``parameters``: names of the forward's."""
    own = _are_states(graph.out_spec, parameters)
    return (*own, *[True] * (len(graph.outputs) - len(own)))


def _are_states(spec: Any, parameters: Collection[str]) -> tuple[bool, ...]:
    if spec.is_leaf():
        return (False,)
    found: list[bool] = []
    for key, child in zip(_field_names(spec), spec.children(), strict=True):
        container = not child.is_leaf() and (key is None or child.type not in (tuple, list, dict))
        found += [container or key in parameters] * child.num_leaves
    return tuple(found)


def _field_names(spec: Any) -> Sequence[str | None]:
    """Field names of a container; None if it has none."""
    count, context = len(spec.children()), spec.context
    names = getattr(context, "names", None) or getattr(context, "_fields", context)
    fields = isinstance(names, list | tuple) and len(names) == count and all(isinstance(n, str) for n in names)
    return list(names) if fields else [None] * count


def is_kept_state(x: Any) -> bool:
    """Whether an argument is state that an earlier call left in its layout."""
    return isinstance(x, CachedShards | StageResidentOutput)


class CachedShards(GatheredOnUse):
    """A tensor held as shards by simulated ranks, which programs read; others join the full tensor,
    of which the shards then are views."""

    placements: tuple[Any, ...]
    _layout: Layout
    _parts: tuple[Tensor, ...]
    _whole: Tensor | None

    @staticmethod
    def of(parts: Sequence[Tensor], layout: Layout, shape: Sequence[int]) -> Tensor:
        """The tensor of this shape with these shards by rank."""
        made = make_wrapper_subclass(CachedShards, tuple(shape), dtype=parts[0].dtype, device=parts[0].device)
        made._layout, made._parts, made._whole = layout, tuple(x.detach() for x in parts), None
        made.placements = layout.placements
        return made

    @property
    def carried_in(self) -> Layout:
        return self._layout

    def lies_on(self, mesh: Mesh) -> bool:
        """Whether ``mesh`` has the ranks of the shards."""
        return mesh.shape == self._layout.mesh.shape

    def parts_in(self, layout: Layout) -> tuple[Tensor, ...]:
        """Shards by rank in ``layout``."""
        if not self.lies_on(layout.mesh) or layout.placements != self._layout.placements:
            return shard_for_ranks(self.whole(), layout, "an input")
        return self._parts if self._whole is None else writable_shards(self._whole, layout)

    def whole(self) -> Tensor:
        """The plain tensor; raises :class:`RuntimeMismatchError` if replicas differ."""
        if self._whole is None:
            with torch.no_grad():
                self._whole = join_shards(self._parts, self._layout, self.shape, "a state")
            self._parts = ()
        return self._whole

    @staticmethod
    def on_parts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See :meth:`GatheredOnUse.on_parts`."""
        dim = selection_dim(func, args, kwargs)
        if dim is None or (x := args[0])._whole is not None or x._layout.axes_of(dim):
            return None
        made = [func(part, *args[1:], **kwargs) for part in x._parts]
        return CachedShards.of(made, x._layout, [*x.shape[:dim], made[0].shape[dim], *x.shape[dim + 1 :]])

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.whole())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.whole().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

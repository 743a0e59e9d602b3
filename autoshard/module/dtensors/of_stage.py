"""Outputs that stay on one pipeline stage for the next call, such as KV caches of its layers.

On other ranks the shard has a shape and no data (meta device). The next call reads it where it was
made; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor

from autoshard.module.dtensors.outputs import ABOUT, Output, chosen_dim
from autoshard.module.dtensors.strided import cuts
from autoshard.module.dtensors.views import in_order, is_view, writes
from autoshard.runtime.programs.along import Along

_STAYS = frozenset("clone contiguous cat to __deepcopy__ zero_ fill_ narrow index_select repeat_interleave".split())
"""functions, besides views, that act on each shard alike"""

_WHERE: dict[Any, Callable[[Any], Any]] = {
    torch.Tensor.device.__get__: lambda x: torch.device(x.device_mesh.device_type),
    torch.Tensor.is_meta.__get__: lambda x: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda x: x.device_mesh.device_type == "cuda",  # type: ignore[attr-defined]
}
"""getters whose answer would differ on a rank without data"""


@dataclass(frozen=True)
class Home:
    """The rank along the pipeline axis that holds the data."""

    along: Along
    rank: int

    @property
    def is_mine(self) -> bool:
        """Whether this rank holds the data."""
        return self.along.rank == self.rank


class OfStage(Output):
    """An output with shards on the ranks of one stage; most operations gather it first.

    Gathering is collective over the ranks of all stages. In-place writes reach the shards.
    """

    __slots__ = ()
    home: Home

    @staticmethod
    def at(x: DTensor, home: Home) -> OfStage:
        """``x``, whose shard has data on the ranks of ``home`` only, as such an output."""
        x.__class__ = OfStage
        x.__dict__["home"] = home
        return x  # type: ignore[return-value]

    def like(self, made: DTensor) -> OfStage:
        """See :meth:`Output.like`."""
        return OfStage.at(made, self.home)

    def everywhere(self) -> Output:
        """The same tensor and layout, with data on the ranks of all stages. Collective."""
        local, spec = self._local_tensor.detach().contiguous(), self._spec
        if not self.home.is_mine:
            local = torch.empty(local.shape, dtype=local.dtype, device=spec.mesh.device_type)
        self.home.along.tell(self.home.rank, local, "an output that one stage keeps")
        shape, stride, _ = spec.tensor_meta  # type: ignore[misc]
        made = DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)
        return Output.of(made)  # type: ignore[return-value]

    def full_tensor(self, **kwargs: Any) -> torch.Tensor:
        """The full tensor on every rank. Collective."""
        whole: torch.Tensor = self.everywhere().full_tensor(**kwargs)
        return whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = in_order(args, kwargs or {})
        if func in _WHERE:
            return _WHERE[func](args[0])
        if func in ABOUT:
            return super().__torch_function__(func, types, args, kwargs)
        given = [x for x in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(x, torch.Tensor)]
        first = next(x for x in given if isinstance(x, OfStage))
        if _stays(func, args, kwargs, given, first):
            if func is torch.Tensor.__deepcopy__:
                func, args = torch.Tensor.clone, args[:1]
            if first.home.is_mine or chosen_dim(func, args, kwargs) is None:
                own = args, kwargs
            else:  # without data the row numbers do not matter
                own = pytree.tree_map_only(torch.Tensor, _without_data, (tuple(args), dict(kwargs)))
            made = super().__torch_function__(func, types, *own)
            return pytree.tree_map_only(DTensor, first.like, made)
        seen = {id(x): x.everywhere() for x in given if isinstance(x, OfStage)}
        own, named = pytree.tree_map_only(OfStage, lambda x: seen[id(x)], (tuple(args), dict(kwargs)))
        made = func(*own, **named)
        if not writes(func) or not isinstance(args[0], OfStage):
            return made
        if args[0].home.is_mine:
            args[0]._local_tensor.copy_(own[0]._local_tensor)
        return args[0] if made is own[0] else made


def _stays(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[torch.Tensor], first: OfStage
) -> bool:
    """Whether ``func`` can run per shard. The answer is the same on ranks with and without data."""
    dim = chosen_dim(func, args, kwargs)
    if dim is not None:
        return not any(p.is_partial() or cuts(p, dim) for p in first.placements)
    ours = all(isinstance(x, OfStage) and x.home == first.home for x in given)
    name, rest = getattr(func, "__name__", ""), (*args[1:], *kwargs.values())
    if name == "to" and not all(isinstance(x, torch.dtype | bool) for x in rest):  # another device
        return False
    return ours and (is_view(func) or name in _STAYS)


def _without_data(x: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, DTensor) else x.to("meta")

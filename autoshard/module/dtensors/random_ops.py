"""Random operations on DTensors: noise on weights and gradients, re-initialisation, dropout.

On CPUs DTensor draws per shard: replicas may differ, and shards may repeat. Here the full tensor is
drawn, as on one device, with the generator state of the first rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autoshard.aten import aten
from autoshard.torch_private.dtensor import random_ops

_MORE_RANDOM_OPS = (aten.exponential_, aten.geometric_, aten.log_normal_)
RANDOM_OPS = (*random_ops, *(packet.default for packet in _MORE_RANDOM_OPS))
"""ops that torch classifies as random, and three that it classifies as pointwise"""


def draw_on_full(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a random ``op`` on full tensors; results have the layout of the first operand."""
    like: DTensor = args[0]
    writes = op._schema.name.endswith("_")
    own, named = pytree.tree_map_only(
        DTensor, _uninitialised_full if writes or "_like" in op._schema.name else _full_operand, (args, kwargs)
    )
    with first_rank_generator(like, named.get("generator")):
        made = op(*own, **named)
    placements = [Replicate() if p.is_partial() else p for p in like.placements]
    parts = pytree.tree_map_only(
        torch.Tensor, lambda x: distribute_tensor(x, like.device_mesh, placements, src_data_rank=None), made
    )
    if not writes:
        return parts
    if placements != list(like.placements):
        like._spec = parts._spec
    like._local_tensor.copy_(parts._local_tensor)
    return like


@contextlib.contextmanager
def first_rank_generator(x: DTensor, generator: torch.Generator | None) -> Iterator[None]:
    """Inside, the generator has the state of the first rank of the mesh of ``x``. Collective.

    A rank with another seed resumes its own state afterwards.
    """
    generator = generator or _generator_on_device(x.device_mesh.device_type)
    before = generator.get_state()
    first = _first_rank_state(before, x.device_mesh)
    alike = torch.equal(first, before)
    if not alike:
        generator.set_state(first)
    try:
        yield
    finally:
        if not alike:
            generator.set_state(before)


def _full_operand(x: DTensor) -> torch.Tensor:
    return x.full_tensor()


def _uninitialised_full(x: DTensor) -> torch.Tensor:
    """An uninitialised full tensor; strides matter, as they decide the order of draws."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.to_local().device)


def _generator_on_device(kind: str) -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()] if kind == "cuda" else torch.default_generator


def _first_rank_state(state: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The generator state of the first rank of the mesh. Collective."""
    found = state.clone().to(mesh.device_type)
    for axis in reversed(range(mesh.ndim)):
        dist.broadcast(found, group=mesh.get_group(axis), group_src=0)
    return found.to(state.device)

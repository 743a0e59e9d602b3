"""Full state dicts (``full_state_dict=True``) of DTensors in table-wise placement.

torch gathers and scatters each DTensor on its own mesh: ranks outside would get nothing, or hang.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor


@functools.cache
def mend_full_states(
    is_owned: Callable[[Any], bool],
    part_of: Callable[[torch.Tensor, Any], DTensor],
    placed: Callable[[DTensor], DTensor],
) -> None:
    """Include every rank in gathers and scatters of DTensors with ``is_owned``.
    ``part_of(full, like)``: this rank's shard; ``placed(x)``: on the owners' device type."""
    states: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")  # few programs need it
    inner, of_optimizer = states._gather_state_dict, states._get_optim_state_dict

    def owned(change: Callable[[Any], torch.Tensor], tree: Any) -> Any:
        return pytree.tree_map_only(DTensor, lambda x: change(x) if is_owned(x) else x, tree)

    @functools.wraps(inner)
    def gathered(found: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(owned(lambda x: x.detach().full_tensor(), found), *args, **kwargs)

    @functools.wraps(of_optimizer)
    def on_one_device(*args: Any, **kwargs: Any) -> Any:
        return owned(placed, of_optimizer(*args, **kwargs))

    def cut(inner: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(inner)
        def by_rank(full: Any, local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            of_others = {key: x for key, x in local.items() if is_owned(x)}
            local |= {
                k: torch.empty(x.shape, dtype=x.dtype, device=x.device_mesh.device_type) for k, x in of_others.items()
            }
            inner(full, local, *args, **kwargs)
            local |= {key: part_of(local[key], x) for key, x in of_others.items() if key in local}

        return by_rank

    states._gather_state_dict, states._get_optim_state_dict = gathered, on_one_device
    states._distribute_state_dict = cut(states._distribute_state_dict)
    states._broadcast_state_dict = cut(states._broadcast_state_dict)

"""State loading of torch optimizers on sharded parameters."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.module.dtensors.ops import is_ours
from autoshard.module.model.parts import part_of


@functools.cache
def load_whole_states() -> None:
    """Have ``optimizer.load_state_dict`` take full tensors; each rank keeps its shards."""
    of: Any = torch.optim.Optimizer
    loaded = of._process_value_according_to_param_policy

    def process(param: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_ours(param) and value.ndim and not isinstance(value, DTensor):
            value = part_of(value, param)
            if not isinstance(value, DTensor) and all(p.is_replicate() for p in param.placements):
                value = DTensor.from_local(value, param.device_mesh, param.placements, run_check=False)
        return loaded(param, value, *args, **kwargs)

    of._process_value_according_to_param_policy = staticmethod(process)

"""What DTensors are made of: specs, redistribution, dispatch; and the modules of state dicts."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from autoshard.torch_private import by_name

with by_name:
    from torch.distributed import _state_dict_utils as state_dict_utils
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX as CHECKPOINT_PREFIX
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._redistribute import DTensorRedistributePlanner
    from torch.distributed.tensor._redistribute import _TransformInfo as TransformInfo
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

    op_dispatcher: Any = DTensor._op_dispatcher
    """runs ops on DTensors; torch replaces its table of handlers, so read that each time"""
    random_ops = tuple(op_dispatcher._random_ops)
    """ops that DTensor runs with one generator state for all ranks"""

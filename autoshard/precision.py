"""Mixed precision: dtypes of gathered parameters, gradient reduction and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autoshard.errors import PlanError


@dataclass(frozen=True)
class Precision:
    """A :class:`torch.distributed.fsdp.MixedPrecisionPolicy` for the model as one unit."""

    param: torch.dtype | None = None
    """dtype of gathered parameters; None: as stored"""
    reduce: torch.dtype | None = None
    """dtype of gradient reduction over ranks; None: as computed"""
    output: torch.dtype | None = None
    """dtype of the model's floating outputs; None: as computed"""
    cast_inputs: bool = True
    """whether the model's floating inputs are cast to ``param``"""

    def __str__(self) -> str:
        names = ("param_dtype", self.param), ("reduce_dtype", self.reduce), ("output_dtype", self.output)
        shown = [f"{name}={str(x).removeprefix('torch.')}" for name, x in names if x is not None]
        return ", ".join(shown if self.cast_inputs or self.param is None else [*shown, "cast_forward_inputs=False"])


POLICY_FIELDS = {"param_dtype": "param", "reduce_dtype": "reduce", "output_dtype": "output"}


def precision_of(policy: Any) -> Precision | None:
    """The Precision of a torch MixedPrecisionPolicy; None if it changes nothing.
    Raises :class:`PlanError` for another type, and for dtypes that are not floating."""
    if policy is None or isinstance(policy, Precision):
        return policy
    if not all(hasattr(policy, name) for name in (*POLICY_FIELDS, "cast_forward_inputs")):
        raise PlanError(
            f"mixed_precision={policy!r} is not a torch.distributed.fsdp.MixedPrecisionPolicy. "
            "Give MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        )
    for name in POLICY_FIELDS:
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise PlanError(f"mixed_precision has {name}={dtype}, but needs a floating dtype")
    types = {field: getattr(policy, name) for name, field in POLICY_FIELDS.items()}
    found = Precision(**types, cast_inputs=bool(policy.cast_forward_inputs))
    return found if any(types.values()) else None

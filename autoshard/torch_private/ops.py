"""Ops as objects, and torch's functions with an underscore. Light: generated code imports it."""

from __future__ import annotations

from autoshard.torch_private import by_name

with by_name:
    from torch import _VF as VF
    from torch import _assert_async as assert_async
    from torch import _check as check
    from torch import _dirichlet_grad as dirichlet_grad
    from torch import _foreach_norm as foreach_norm
    from torch import _grouped_mm as grouped_matmul
    from torch import _is_all_true as is_all_true
    from torch import _is_any_true as is_any_true
    from torch import _safe_softmax as safe_softmax
    from torch import _sample_dirichlet as sample_dirichlet
    from torch import _standard_gamma as standard_gamma
    from torch import _standard_gamma_grad as standard_gamma_grad
    from torch._C import _nn as nn_functions
    from torch._C._nn import flatten_dense_tensors, unflatten_dense_tensors
    from torch._library.custom_ops import CustomOpDef
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

"""What tracing and export are made of: decompositions, transforms, dynamo, script, modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils import checkpoint

from autoshard.torch_private import by_name

with by_name:
    import torch._decomp as decompositions
    from torch._C import _create_function_from_graph as create_function_from_graph
    from torch._decomp import core_aten_decompositions, decomposition_table
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo import external_utils
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._dynamo.trace_rules import add as skip_package
    from torch._export.utils import _collect_all_valid_cia_ops as composite_ops
    from torch._export.utils import _is_preservable_cia_op as is_preservable
    from torch._export.utils import _special_op_to_preserve_cia as preserved_op
    from torch._functorch import config as functorch_config
    from torch._functorch import eager_transforms
    from torch._guards import detect_fake_mode
    from torch.export.exported_program import _decompose_exported_program as decompose_program
    from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module
    from torch.fx.graph import _Namespace as Namespace
    from torch.jit._fuser import optimized_execution
    from torch.jit._state import _try_get_jit_cached_function as cached_script
    from torch.nn.modules.module import _global_buffer_registration_hooks as buffer_hooks

TRACER_LOGS = (
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.export",
    "torch._export",
)
"""loggers that a failed trace writes to"""

CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"
"""name of the function that runs a checkpoint, in ``torch.utils.checkpoint``"""
if f"{CHECKPOINT_GENERATOR}_impl" in vars(checkpoint):  # torch >= 2.14
    CHECKPOINT_GENERATOR += "_impl"

COMPILING_QUERIES = (
    *((torch.compiler, name) for name in ("is_compiling", "is_exporting", "is_dynamo_compiling")),
    *((owner, "is_compiling") for owner in (torch._utils, torch._dynamo, external_utils)),
)
"""(owner, name) of functions that say whether a trace runs"""

INFERENCE_QUERIES = tuple((owner, "is_inference_mode_enabled") for owner in (torch, torch._C))
"""(owner, name) of the function that says whether inference mode is on"""

BACKEND_MODES = (
    (torch.backends.cudnn, torch._C, "_get_cudnn_enabled"),
    (torch.backends.mkldnn, torch._C, "_get_mkldnn_enabled"),
    (None, torch._C, "_get_nnpack_enabled"),
    *((None, owner, "is_autocast_cache_enabled") for owner in (torch, torch._C)),
)
"""modes that export turns off: (module with a flag ``enabled`` or None, owner, query function)"""

AUTOGRAD_MODES = (
    ((torch._C, "_is_fwd_grad_enabled"), (forward_ad, "_is_fwd_grad_enabled")),
    ((torch._C, "_is_multithreading_enabled"), (torch.autograd, "is_multithreading_enabled")),
)
"""(owner, name) of the functions that :func:`autograd_modes` asks, each with its aliases"""


def autograd_modes() -> tuple[bool, bool]:
    """(forward-mode AD enabled, multithreaded backward enabled)"""
    return torch._C._is_fwd_grad_enabled(), torch._C._is_multithreading_enabled()


@contextlib.contextmanager
def trace_leftovers_removed() -> Iterator[None]:
    """Undo on exit what a failed trace leaves: transforms, buffer hooks (torch < 2.13)."""
    depth, nesting = torch._C._functorch.get_dynamic_layer_stack_depth(), eager_transforms.JVP_NESTING
    level = forward_ad._current_level
    hooks = set(buffer_hooks)
    try:
        yield
    finally:
        for hook in buffer_hooks.keys() - hooks:
            del buffer_hooks[hook]
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        eager_transforms.JVP_NESTING = nesting
        if level < 0:  # the trace entered a dual level and only recorded its exit
            with contextlib.suppress(RuntimeError):
                torch._C._exit_dual_level(level=0)
            forward_ad._current_level = level


def parametrization_cache() -> dict[tuple[int, str], torch.Tensor | None] | None:
    """What ``parametrize.cached()`` of torch keeps, one object within; None outside."""
    return parametrize._cache if parametrize._cache_enabled else None


@contextlib.contextmanager
def empty_parametrization_cache() -> Iterator[None]:
    """Inside, it is empty: a trace takes no values from it, and leaves none."""
    before, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = before

"""Static checks: of a model and its inputs before the trace, of nodes and results after it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.export.graph_signature import OutputKind

from autoshard.errors import CaptureError, SharedStateError
from autoshard.passes.capture.exported.example_inputs import Example, argument_paths
from autoshard.passes.capture.exported.provenance import node_loc
from autoshard.passes.capture.exported.snapshots import NO_ATTRIBUTE, own_attribute
from autoshard.passes.capture.exported.symbolic_shapes import is_data_dependent_number
from autoshard.passes.capture.exported.tensor_attributes import check_tensor_class
from autoshard.passes.capture.refusals.aliasing import check_apart
from autoshard.passes.capture.refusals.errors import DATA_DEPENDENT_MESSAGE
from autoshard.passes.ir.graph import Graph
from autoshard.torch_private.fake import FakeTensor

_SAME_DTYPE_PRODUCTS = frozenset(
    "linear matmul mm bmm addmm addmv mv dot baddbmm addbmm bilinear convolution conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d".split()
)
"""product ops whose operands must have one dtype"""


def check_module_classes(model: nn.Module) -> None:
    """Refuse untraceable module classes: ScriptModule, DDP, uninitialised, without forward."""
    for path, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or 'the model'}: a ScriptModule cannot be traced. Pass the Python "
                "module that torch.jit scripted"
            )
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise CaptureError(f"{path or 'the model'}: {kind} is distributed already. Pass its .module")
        if "_modules" not in vars(module):
            raise CaptureError(f"{path or 'the model'}: {kind} was not initialised. Its __init__ must call super's")
    forward = vars(model).get("forward", type(model).forward)
    if forward is None or forward is nn.Module.forward:
        raise CaptureError(f"the model: {type(model).__name__} has no forward. Pass the module that is called")


def check_model(model: nn.Module, training: bool) -> None:
    """Refuse wrappers, non-dense parameters, and hooks of the backward if ``training``."""
    check_module_classes(model)
    for path, module in model.named_modules():
        if training and (module._backward_hooks or module._backward_pre_hooks):
            raise CaptureError(
                f"{path or 'the model'}: it has a module backward hook, which the compiled module would not call. "
                "Remove it before compiling."
            )
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            _check_tensor(kind, name, tensor, training)
    check_apart(model)


def check_example(model: nn.Module, example: Example) -> None:
    """Refuse inputs that are not plain dense tensors, and group-quantized KV caches."""

    def name(i: int) -> str:
        return argument_paths(model, example)[i]

    for i, leaf in enumerate(pytree.tree_leaves(example)):
        if isinstance(leaf, Tensor):
            check_dense(leaf, partial(name, i))
    by_groups = [
        x for x in pytree.tree_leaves(example, is_leaf=_is_group_quantized_layer) if _is_group_quantized_layer(x)
    ]
    if by_groups:
        raise CaptureError(
            f"a cache of {type(by_groups[0]).__name__} keeps tensors of a class of its own, and "
            "these cannot be traced. Use the quantized cache in 8 bits: "
            'cache_implementation="quantized", cache_config={"backend": "fp8"}.'
        )


def _is_group_quantized_layer(x: Any) -> bool:
    """Whether ``x`` is a KV cache layer of transformers for quanto or HQQ."""
    return all(own_attribute(x, name) is not NO_ATTRIBUTE for name in ("q_group_size", "residual_length"))


def check_dense(x: Tensor, name: Callable[[], str]) -> None:
    """Refuse input ``x``, called ``name()``, if it is not a plain dense tensor."""
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else f"of layout {x.layout}"
        raise CaptureError(
            f"input {name()!r} is a tensor that is {kind}, but autoshard shards plain dense "
            "tensors. Convert it first (to_dense(), to_padded_tensor(), dequantize())."
        )


def check_dtypes(graph: Graph) -> None:
    """Refuse products of mixed dtypes: they trace, but their kernels fail at run time."""
    for node in graph.nodes:
        if node.op._opname not in _SAME_DTYPE_PRODUCTS:
            continue
        dtypes = dict.fromkeys(graph.types[name].dtype for name in node.inputs)
        if len(dtypes) > 1 and any(d.is_floating_point for d in dtypes):
            given = [f"{i.fqn!r} {graph.types[i.name].dtype}" for i in graph.of_kind("input")]
            raise CaptureError(
                f"{node.fqn or 'the model'} ({node.source}): {node.op} needs operands of one dtype and gets "
                f"{' and '.join(map(str, dtypes))}; the inputs are {', '.join(given)}. Convert one of them."
            )


def _check_tensor(kind: str, name: str, tensor: Tensor, training: bool) -> None:
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        raise SharedStateError(f"{kind} {name!r} has no shape yet: run the model once before compiling it")
    if kind == "buffer" and tensor.layout != torch.strided:
        return  # harmless if unread, as in openai-whisper
    wrapped = hasattr(type(tensor), "__tensor_flatten__")  # DTensor and other subclasses made of plain tensors
    if wrapped or tensor.layout != torch.strided:
        raise CaptureError(
            f"{kind} {name!r} is a {type(tensor).__name__} of layout {tensor.layout}, but autoshard "
            "shards plain dense tensors. Convert it first (full_tensor(), to_dense(), dequantize())."
        )
    check_tensor_class(f"{kind} {name!r}", tensor)
    if training and (tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)):
        raise SharedStateError(
            f"{kind} {name!r}: it has a tensor hook, which the compiled module would not call. Remove it before "
            "compiling, and register it on the compiled module's parameter, or change .grad after backward()."
        )


def is_unread_sparse_buffer(name: str, buffer: fx.Node) -> bool:
    """Whether a buffer is sparse and unread. Refuses sparse buffers that the forward reads."""
    layout = buffer.meta["val"].layout
    if layout != torch.strided and buffer.users:
        raise CaptureError(
            f"the forward reads buffer {name!r}, a tensor of layout {layout}, but autoshard "
            "shards plain dense tensors. Convert it first (to_dense())."
        )
    return bool(layout != torch.strided)


def check_quantization_observer(node: fx.Node) -> None:
    """Refuse a fresh per-row quantization observer: its kernel resizes buffers unseen."""
    if not str(node.target).startswith("aten._fused_moving_avg_obs_fq_helper"):
        return
    x, low, scale = (node.args[i].meta["val"] for i in (0, 3, 5))  # type: ignore[union-attr]
    by_row = len(node.args) > 11 and node.args[11]
    if by_row and (low.shape != x.shape[node.args[10] :][:1] or scale.shape != low.shape):
        raise CaptureError(
            f"{node_loc(node)}: the observer has buffers of shape {list(low.shape)} and "
            f"{list(scale.shape)}, and its first call resizes them to the rows of "
            f"{list(x.shape)}. A program keeps shapes: call the model once before compiling it."
        )


def has_no_data(constant: Any) -> bool:
    """Whether a program's constant is no tensor, or one without data."""
    return not isinstance(constant, Tensor) or constant.is_meta or isinstance(constant, FakeTensor)


def dense_constant(name: str, tensor: Any) -> Tensor:
    """A constant of the program, detached. Refuses one without data."""
    if has_no_data(tensor):
        raise CaptureError(
            f"the model's tensor {name!r} has no data and is not a parameter or buffer. Register "
            "it with register_buffer() or as nn.Parameter."
        )
    return tensor.detach()


def check_result(node: fx.Node, value: Any) -> None:
    """Refuse a result that is neither a dense tensor nor a symbolic number."""
    check_quantization_observer(node)
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise CaptureError(f"{node_loc(node)}: {node.target} makes a {value.layout} tensor. Use dense tensors.")
    if value is not None and not isinstance(value, Tensor) and not is_data_dependent_number(value):
        raise CaptureError(f"{node_loc(node)}: {DATA_DEPENDENT_MESSAGE.format(what=f'a result of {node.target}')}")


def check_as_strided_operand(node: fx.Node, operand: Tensor, order: tuple[int, ...], offset: int) -> None:
    """Refuse an operand of as_strided with gaps in memory, or a negative ``offset``.

    ``order``: the operand's dims by descending stride; () if in order.
    """
    known = all(isinstance(n, int) for n in (*operand.shape, *operand.stride()))
    if known and (offset < 0 or not operand.permute(order or tuple(range(operand.ndim))).is_contiguous()):
        raise CaptureError(
            f"{node_loc(node)}: as_strided indexes the memory of a tensor that does not fill its "
            "memory (sliced or expanded). Make the tensor contiguous first."
        )


def unsupported_target_message(node: fx.Node) -> str:
    """Error text for a node whose target is no op."""
    if is_data_dependent_number(node.meta.get("val")):
        name = getattr(node.target, "__name__", str(node.target))
        return (
            f"{name}() of a number that depends on the data is not supported. Compute it on the tensor, before item()."
        )
    advice = " Hugging Face: attn_implementation='sdpa'." if "flex_attention" in str(node.target) else ""
    return f"the higher-order op {node.target} is not supported. Use plain torch ops instead.{advice}"


def unsupported_effect_message(kind: OutputKind, target: str) -> str:
    """Error text for an unsupported side effect of the forward."""
    if kind is OutputKind.USER_INPUT_MUTATION:
        return (
            f"the forward writes a value with a gradient in place to its input {target!r}. Write "
            "to a clone and return it."
        )
    if kind is OutputKind.PARAMETER_MUTATION:
        return (
            f"the forward writes in place to parameter {target!r}. Make it a buffer, or compute "
            "a new tensor. For an embedding leave out max_norm."
        )
    return f"the forward has an effect on {target!r} that a graph cannot express ({kind.name.lower()})."

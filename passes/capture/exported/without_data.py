"""Example inputs as tensors without data: empty, or fake if anything is on the meta device."""

from __future__ import annotations

import functools

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from autoshard.passes.capture.exported.arguments import Example
from autoshard.passes.capture.exported.attributes import LEFT


def without_data(model: nn.Module, example: Example) -> Example:
    """The example as distinct tensors: export would merge a tensor that is passed twice.

    If any tensor is on the meta device, fake tensors on a real device replace the model's, too
    (the caller restores them), so the trace is the real model's. Constants keep their data.
    """
    tensors = [*model.parameters(), *model.buffers(), *filter(torch.is_tensor, pytree.tree_leaves(example))]
    if not any(t.is_meta for t in tensors):
        return pytree.tree_map_only(torch.Tensor, _empty, example)  # type: ignore[no-any-return]
    device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode:
        replaced: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
                constant = name in vars(module) and isinstance(tensor, torch.Tensor) and tensor.is_leaf
                if isinstance(tensor, torch.Tensor) and (tensor.is_meta or not constant):
                    if id(tensor) not in replaced:
                        replaced[id(tensor)] = _empty(tensor, device, mode)
                        if hasattr(tensor, LEFT):
                            setattr(replaced[id(tensor)], LEFT, True)
                    setattr(module, name, replaced[id(tensor)])
        fake = functools.partial(_empty, device=device, mode=mode)
        return pytree.tree_map_only(torch.Tensor, fake, example)  # type: ignore[no-any-return]


def _empty(
    tensor: torch.Tensor, device: torch.device | None = None, mode: FakeTensorMode | None = None
) -> torch.Tensor:
    device = device or tensor.device
    if mode is not None and type(tensor) is nn.Parameter and _is_filled(tensor):
        return _fake_parameter(tensor, device, mode)
    if type(tensor) in (torch.Tensor, nn.Parameter) and _is_filled(tensor):
        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    else:  # slower: a fake mode first fakes the tensor
        new = torch.empty_like(tensor.detach(), device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new.requires_grad_(tensor.requires_grad)


def _fake_parameter(tensor: nn.Parameter, device: torch.device, mode: FakeTensorMode) -> torch.Tensor:
    """``nn.Parameter`` of a fake tensor, without the dispatch of each step, its largest cost."""
    with _disable_current_modes():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        fake = FakeTensor(mode, meta, device).requires_grad_(tensor.requires_grad)
    fake._is_param = True
    return fake


def _is_filled(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense, strided and row-major (contiguous)."""
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.is_contiguous()

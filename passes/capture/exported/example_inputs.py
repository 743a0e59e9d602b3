"""Example inputs of a trace: argument names, order in the program, copies without data."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autoshard.passes.capture.exported.provenance import argument_path
from autoshard.passes.capture.exported.snapshots import LEFT_BY_TRACE
from autoshard.torch_private.dispatch import without_dispatch_modes
from autoshard.torch_private.fake import FakeTensor, FakeTensorMode

Example = tuple[tuple[Any, ...], dict[str, Any]]


def argument_paths(model: nn.Module, example: Example) -> list[str]:
    """Per leaf of ``example``: the forward's name of it, "" if it is no tensor."""
    leaves, _ = pytree.tree_flatten_with_path(example)
    return [argument_path(model, path) if isinstance(leaf, Tensor) else "" for path, leaf in leaves]


def gradient_sources(program: torch.export.ExportedProgram, model: nn.Module, example: Example) -> set[str]:
    """Names of the program's placeholders whose tensor requires a gradient."""
    leaves, order = pytree.tree_leaves(example), iter(export_order(program, example))
    names = set()
    for spec in program.graph_signature.input_specs:
        tensor = leaves[next(order)] if spec.kind is InputKind.USER_INPUT else model_tensor(model, spec)
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            names.add(spec.arg.name)
    return names


def model_tensor(model: nn.Module, spec: InputSpec) -> Tensor | None:
    if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
        return None
    path, _, leaf = (spec.target or "").rpartition(".")
    tensor = getattr(model.get_submodule(path), leaf)
    return tensor if isinstance(tensor, Tensor) else None


def export_order(program: torch.export.ExportedProgram, example: Example) -> list[int]:
    """Per user input of the program: index of its leaf in the example. Export reorders kwargs."""
    positional, keywords = program.call_spec.in_spec.children()
    positions, start = list(range(positional.num_leaves)), positional.num_leaves
    of_key: dict[str, range] = {}
    for key, child in zip(keywords.context, keywords.children(), strict=True):
        of_key[key] = range(start, start + child.num_leaves)
        start += child.num_leaves
    positions += [position for key in example[1] for position in of_key[key]]
    order = [0] * len(positions)
    for leaf, position in enumerate(positions):
        order[position] = leaf
    return order


def with_explicit_keywords(signature: inspect.Signature, keywords: Iterable[str]) -> inspect.Signature:
    """``signature`` with parameters for ``keywords``, which torch.export counts twice in
    ``**kwargs``."""
    parameters = signature.parameters.values()
    rest = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    extra = [n for n in keywords if n not in signature.parameters]
    if not rest or not extra:
        return signature
    named = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in extra]
    return signature.replace(parameters=[*(p for p in parameters if p is not rest[0]), *named])


def tensors_by_argument(model: nn.Module, example: Example) -> dict[str, Tensor]:
    """Argument name → tensor of the example."""
    return {p: x for p, x in zip(argument_paths(model, example), pytree.tree_leaves(example), strict=True) if p}


def example_without_data(model: nn.Module, example: Example) -> Example:
    """The example as distinct tensors, since export would merge a tensor that is passed twice. If
    any is on the meta device, fake tensors replace the model's, too, except constants; the
    caller restores them."""
    tensors = [*model.parameters(), *model.buffers(), *filter(torch.is_tensor, pytree.tree_leaves(example))]
    if not any(t.is_meta for t in tensors):
        return pytree.tree_map_only(Tensor, _empty_copy, example)
    device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode:
        replaced: dict[int, Tensor] = {}
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
                constant = name in vars(module) and isinstance(tensor, Tensor) and tensor.is_leaf
                if isinstance(tensor, Tensor) and (tensor.is_meta or not constant):
                    if id(tensor) not in replaced:
                        replaced[id(tensor)] = _empty_copy(tensor, device, mode)
                        if hasattr(tensor, LEFT_BY_TRACE):
                            setattr(replaced[id(tensor)], LEFT_BY_TRACE, True)
                    setattr(module, name, replaced[id(tensor)])
        fake = functools.partial(_empty_copy, device=device, mode=mode)
        return pytree.tree_map_only(Tensor, fake, example)


def _empty_copy(tensor: Tensor, device: torch.device | None = None, mode: FakeTensorMode | None = None) -> Tensor:
    device = device or tensor.device
    if mode is not None and type(tensor) is nn.Parameter and _is_row_major(tensor):
        return _fake_parameter(tensor, device, mode)
    if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and _is_row_major(tensor):
        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    else:  # slower: a fake mode first fakes the tensor
        new = torch.empty_like(tensor.detach(), device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new.requires_grad_(tensor.requires_grad)


def _fake_parameter(tensor: nn.Parameter, device: torch.device, mode: FakeTensorMode) -> Tensor:
    """``nn.Parameter`` of a fake tensor, without the dispatch of each step, its largest cost."""
    with without_dispatch_modes():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        fake = FakeTensor(mode, meta, device).requires_grad_(tensor.requires_grad)
    fake._is_param = True
    return fake


def _is_row_major(tensor: Tensor) -> bool:
    """Whether a tensor is dense, strided and row-major (contiguous)."""
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.is_contiguous()

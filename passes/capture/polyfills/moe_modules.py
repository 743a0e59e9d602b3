"""Mixture-of-experts modules of transformers as one op, for every experts implementation."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.passes.capture.observer import Observer, Patch, replacement_patch
from autoshard.runtime.operations.experts import ExpertForm, experts_op
from autoshard.runtime.operations.grouped import grouped_mm
from autoshard.torch_private.dispatch import without_dispatch_modes

_MOE_INTEGRATION, _LLAMA4 = "transformers.integrations.moe", "transformers.models.llama4.modeling_llama4"
_LONGCAT = "transformers.models.longcat_flash.modeling_longcat_flash"
_JETMOE = "transformers.models.jetmoe.modeling_jetmoe"
_ACTIVATION_CLASSES = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu_squared",
}
"""activation class → its name in ``autoshard.runtime.operations.experts``"""
_EXPERT_WEIGHT_NAMES = {f"{name}_proj{bias}" for name in ("gate_up", "up", "down") for bias in ("", "_bias")}
_ACTIVATION_FUNCTIONS = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu"}


class TransformersExperts(Observer):
    """Makes expert modules call the op if it computes the same; others run as configured."""

    def patches(self) -> Iterable[Patch]:
        if (module := sys.modules.get(_MOE_INTEGRATION)) is not None:  # else it is not imported
            yield replacement_patch(module.ExpertsInterface, "get_interface", _expert_interface)
        if (module := sys.modules.get(_LLAMA4)) is not None:
            yield replacement_patch(module.Llama4TextMoe, "forward", _llama4_moe)
            yield replacement_patch(module.Llama4TextExperts, "forward", _llama4_experts)
        if (module := sys.modules.get(_LONGCAT)) is not None:
            yield replacement_patch(module.LongcatFlashExperts, "forward", _longcat_experts)
        if (module := sys.modules.get(_JETMOE)) is not None:
            yield replacement_patch(module.JetMoeTopKGating, "forward", _jetmoe_gating)
            yield replacement_patch(module.JetMoeParallelExperts, "forward", _jetmoe_experts)


def _expert_interface(get: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(self: Any, name: Any, default: Callable[..., Any]) -> Callable[..., Any]:
        found = get(self, name, default)

        def forward(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Any:
            form = None if torch.is_autocast_enabled(x.device.type) else _gated_form(module)
            if form is None:
                return found(module, x, ids, weights)
            return _call_experts_op(module, form, x, ids, weights)

        return forward

    return get_interface


def _gated_form(module: Any) -> ExpertForm | None:
    """The form of a module that is two products and an activation; None for others."""
    if module.has_post_expert_norm or module._is_expert_parallel:
        return None
    if module.has_gate and module._apply_gate.__func__ is not sys.modules[_MOE_INTEGRATION]._default_apply_gate:
        return _probed_gated_form(module)
    if getattr(module.act_fn, "use_gelu_python", False) or (activation := _activation_name(module.act_fn)) is None:
        return None
    interleaved = module.has_gate and not module.is_concatenated
    return ExpertForm(activation, module.has_gate, module.is_transposed, interleaved=interleaved)


def _probed_gated_form(module: Any) -> ExpertForm | None:
    """The form that equals a custom gate on test inputs, with numbers from the module's attributes.
    None if the gate may read other tensors than the weights, which may change."""
    if any(
        name not in _EXPERT_WEIGHT_NAMES
        for name, _ in itertools.chain(module.named_parameters(), module.named_buffers())
    ):
        return None
    numbers = {float(x) for x in vars(module).values() if isinstance(x, int | float) and not isinstance(x, bool)}
    own = _activation_name(getattr(module, "act_fn", None))
    names = [own] if own is not None else ["silu", *(f"swish {x}" for x in sorted(numbers))]
    with torch.DisableTorchFunction(), without_dispatch_modes(), torch.no_grad():
        far = torch.logspace(1, 6, 40, dtype=torch.float64, device="cpu")
        gate = torch.cat([-far, torch.linspace(-40.0, 40.0, 321, dtype=torch.float64, device="cpu"), far])
        up = gate.roll(125) * 1.25
        made = torch.stack([gate, up], -1).flatten() if not module.is_concatenated else torch.cat([gate, up])
        made = made.unsqueeze(0)
        try:
            answer = module._apply_gate(made)
        except RuntimeError:  # it requires its own width
            return None
        for name, limit, shift in itertools.product(names, (None, *sorted(n for n in numbers if n > 0)), (0.0, 1.0)):
            form = ExpertForm(name, True, module.is_transposed, limit, shift, not module.is_concatenated)
            mid = form.activated([made])
            if mid.shape == answer.shape and bool(((mid - answer).abs() <= 1e-12 * (1 + answer.abs())).all()):
                return form
    return None


def _activation_name(function: Any) -> str | None:
    return _ACTIVATION_CLASSES.get(type(function).__name__) or _ACTIVATION_FUNCTIONS.get(function)


def _call_experts_op(module: Any, form: ExpertForm, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    first, second = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
    weights = weights.to(torch.promote_types(weights.dtype, first.dtype))  # product's dtype
    biases: dict[str, Tensor] = {}
    if module.has_bias:
        biases["first_bias"] = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        biases["second_bias"] = module.down_proj_bias
    y: Tensor = experts_op(x.to(first.dtype), ids, weights, first, second, **asdict(form), **biases)
    return y.to(x.dtype)


def _llama4_moe(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Llama 4: every expert gets every token, times zero if not chosen; here only chosen tokens."""

    def routed(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if _activation_name(self.experts.act_fn) is None or torch.is_autocast_enabled(hidden_states.device.type):
            return forward(self, hidden_states)
        x = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(x)
        ids = logits.topk(self.top_k, dim=1).indices
        rows = x.unsqueeze(1) * scores.gather(1, ids).unsqueeze(2)
        y = self.experts(rows, ids.unsqueeze(-1))
        return self.shared_expert(x) + y.sum(1), logits

    return routed


def _llama4_experts(forward: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(self: Any, x: Tensor, ids: Tensor | None = None) -> Tensor:
        if ids is None:
            return forward(self, x)
        ones = torch.ones_like(ids, dtype=x.dtype)
        form = _activation_name(self.act_fn), True, True
        return experts_op(x, ids, ones, self.gate_up_proj, self.down_proj, *form)

    return chosen


def _longcat_experts(forward: Callable[..., Any]) -> Callable[..., Any]:
    """LongCat: identity experts without weights follow the others."""

    def routed(self: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        activation, count = _activation_name(self.act_fn), self.num_routed_experts
        if activation is None or not count or torch.is_autocast_enabled(x.device.type):
            return forward(self, x, ids, weights)
        first = self.gate_up_proj
        if self.zero_expert_num:  # parts of a split shard separately; a slice needs exchanges
            first = first.split([count, self.zero_expert_num])[0]
        form = activation, True, False
        weights = weights.to(torch.promote_types(weights.dtype, x.dtype))
        y: Tensor = experts_op(x, ids, weights, first, self.down_proj, *form)
        if not self.zero_expert_num:
            return y
        return y + (x * weights.where(ids >= count, 0).sum(-1, keepdim=True)).to(x.dtype)

    return routed


def _jetmoe_gating(forward: Callable[..., Any]) -> Callable[..., Any]:
    """JetMoE's routing, with group sizes as a tensor instead of Python numbers."""

    def counted(self: Any, x: Tensor) -> Any:
        if torch.is_autocast_enabled(x.device.type):
            return forward(self, x)
        logits = self.layer(x).float()
        chosen, ids = logits.topk(self.top_k, dim=1)
        weights, flat = torch.softmax(chosen, dim=1).type_as(x), ids.flatten()
        order = flat.sort(0).indices
        sizes = torch.bincount(flat, minlength=self.num_experts)
        return order, order.div(self.top_k, rounding_mode="trunc"), weights.flatten()[order], sizes, logits

    return counted


def _jetmoe_experts(forward: Callable[..., Any]) -> Callable[..., Any]:
    """JetMoE's expert products of sorted rows, as a grouped GEMM."""

    def multiplied(self: Any, rows: Tensor, sizes: Any) -> Any:
        if not isinstance(sizes, Tensor):
            return forward(self, rows, sizes)
        return grouped_mm(rows, self.weight.mT, sizes.cumsum(0).to(torch.int32), True)

    return multiplied

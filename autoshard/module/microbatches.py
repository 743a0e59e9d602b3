"""Gradient accumulation over micro-batches: one loss whose backward delivers the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from autoshard.errors import RuntimeMismatchError
from autoshard.module.dtensors.accumulate_grad import SparseGradient, accumulate_sparse, silence_without_gradient
from autoshard.module.dtensors.module_dtensor import contiguous_spec, dtensor_like, from_local_shard, full_if_dtensor
from autoshard.module.dtensors.outputs import ShardedOutput
from autoshard.passes.capture.specialization.eager_semantics import without_saved_hooks
from autoshard.passes.microbatch import MicroBatches
from autoshard.passes.rules.interpreters import interpret
from autoshard.runtime.transport import torch_state
from autoshard.runtime.transport.autograd import NoneGradFunction
from autoshard.torch_private.autograd import top_saved_tensors_hooks

OutputLeaves = list[Any]
RunMicroBatch = Callable[[list[Tensor]], tuple[OutputLeaves, dict[str, Tensor]]]


@dataclass(frozen=True)
class MicroBatchRun:
    """Runs one micro-batch on all ranks of this process."""

    run: RunMicroBatch
    """the forward, with inputs in program order"""
    enter: Callable[[int, int], None]
    """tells the ranks (index, count) of the micro-batch"""
    defer: Callable[[bool], bool]
    """sets whether gradients stay summands, as in ``no_sync()``; returns the previous setting"""
    leaves: Callable[[], AbstractContextManager[list[tuple[Tensor, Tensor]]]]
    """pairs (trained parameter, stand-in leaf): the user's ``.grad`` and hooks see nothing"""
    tensor: Callable[[str], Tensor]
    """original name → buffer"""

    def __call__(
        self, micro: MicroBatches, inputs: Mapping[str, Tensor], names: Sequence[str]
    ) -> tuple[OutputLeaves, dict[str, Tensor]]:
        """Outputs and mutated states. ``inputs``: global batch; ``names``: of the program. The
        loss's backward scales and delivers the gradients; other outputs are detached, and other
        scalars' backward raises."""
        given = {n: x.detach().requires_grad_() if x.requires_grad else x for n, x in inputs.items()}
        given |= whole_batch_values(micro, given, self.tensor)
        sources = [micro.inputs[name] for name in names]
        made: list[OutputLeaves] = []
        written: dict[str, Tensor] = {}
        states, before = torch_state.generator_states(), self.defer(True)
        with self.leaves() if micro.loss is not None else nullcontext([]) as pairs, without_checkpoint_hooks():
            wanted = [*pairs, *((x, given[n]) for n, x in inputs.items() if x.requires_grad)]
            try:
                for index in range(micro.count):
                    self.enter(index, micro.count)
                    self.defer(index < micro.count - 1)  # the last backward reduces over replicas
                    torch_state.set_generator_states(states)  # each draws its share of the batch's numbers
                    parts = [micro_batch_slice(given[source], dim, index, micro.count) for source, dim in sources]
                    leaves, written = self.run(parts)
                    if micro.loss is not None:
                        leaves[micro.loss].backward(inputs=[leaf for _, leaf in wanted])
                    made.append([x.detach() if isinstance(x, Tensor) else x for x in leaves])
            finally:
                self.enter(0, 1)
                self.defer(before)
        return step_outputs(micro, made, wanted), written


def without_checkpoint_hooks() -> AbstractContextManager[Any]:
    """Inside, hooks of an enclosing activation checkpoint, which would recompute the step in each
    micro-batch's backward, are off; ``save_on_cpu`` hooks stay."""
    hooks = top_saved_tensors_hooks(True)
    return nullcontext() if hooks is None or hooks[0].__module__ != checkpoint.__module__ else without_saved_hooks()


def whole_batch_values(
    micro: MicroBatches, inputs: Mapping[str, Tensor], tensor: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Values of the full batch before the first micro-batch. ``tensor``: name → buffer."""
    graph = micro.before
    if graph is None:
        return {}
    device = next((x.device for x in inputs.values()), torch.device("cpu"))
    read = (i for i in graph.inputs if i.kind != "constant")
    given = {i.name: (inputs[i.name] if i.kind == "input" else tensor(i.fqn)).to(device) for i in read}
    with torch.no_grad():
        values = interpret(graph, given, device=device)
    return {o.name: values[o.name] for o in graph.outputs}


def step_outputs(
    micro: MicroBatches, made: Sequence[OutputLeaves], wanted: Sequence[tuple[Tensor, Tensor]]
) -> OutputLeaves:
    """The outputs of the step from those of its micro-batches; the loss delivers the gradients.
    ``wanted``: pairs (tensor that gets a gradient, leaf that has it)."""
    outputs = [
        _combine_micro_batches(parts, how) for parts, how in zip(zip(*made, strict=True), micro.outputs, strict=True)
    ]
    if micro.loss is None:
        return outputs
    gradients, tensors = [leaf.grad for _, leaf in wanted], [x for x, _ in wanted]
    with without_saved_hooks():
        outputs[micro.loss] = _LossWithGradients.apply(outputs[micro.loss], gradients, *tensors)
        for position, name in micro.others.items():
            outputs[position] = _ScalarWithoutGradient.apply(outputs[position], name, *tensors)
    return outputs


def micro_batch_slice(x: Tensor, dim: int | None, index: int, count: int) -> Tensor:
    """Slice ``index`` of ``count`` of an input along ``dim``; None: all of it."""
    if dim is None:
        return x
    length = x.shape[dim] // count
    return x.narrow(dim, index * length, length)


def _combine_micro_batches(parts: Sequence[Any], how: int | str | None) -> Any:
    if how is None or not isinstance(parts[0], Tensor):
        return parts[-1]
    if how == "sum":
        return torch.stack([*parts]).sum(0) if not isinstance(parts[0], DTensor) else sum(parts[1:], parts[0])
    assert isinstance(how, int)
    if not isinstance(parts[0], DTensor):
        return torch.cat([*parts], how)
    # Rows of one micro-batch lie on several ranks: concatenated shards would reorder the batch.
    placements = [Replicate() if p == Shard(how) else p for p in parts[0].placements]
    whole = [p.redistribute(p.device_mesh, placements).to_local() for p in parts]
    shape = [sum(p.shape[d] for p in parts) if d == how else n for d, n in enumerate(parts[0].shape)]
    local = torch.cat(whole, how)
    spec = contiguous_spec(parts[0].device_mesh, tuple(placements), torch.Size(shape), local.dtype)
    made = from_local_shard(local, spec)
    return parts[0].like(made) if isinstance(parts[0], ShardedOutput) else ShardedOutput.of(made)


class _LossWithGradients(NoneGradFunction):
    """A loss with known gradients; its backward scales them, and frees them unless retained."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Any], *tensors: Any) -> Tensor:
        ctx.tensors = tensors
        # The loss is saved so that a second backward raises even without gradients.
        ctx.save_for_backward(loss, *gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeMismatchError(
                "create_graph=True: with micro-batches or stages, gradients have no derivative, because each "
                "micro-batch has already run its forward and backward. Compile with micro_batches=1 and without stages."
            )
        _, *gradients = ctx.saved_tensors
        scale = full_if_dtensor(scale)
        return None, None, *(_gradient_for(x, g, scale) for x, g in zip(ctx.tensors, gradients, strict=True))


class _ScalarWithoutGradient(NoneGradFunction):
    """A scalar other than the loss: its backward raises."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, name: str, *tensors: Any) -> Tensor:
        ctx.name = name
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise RuntimeMismatchError(
            f"a gradient of {ctx.name} is asked for, but each micro-batch runs its forward and backward for "
            'one loss. The loss is the output called "loss", else the first scalar. Return the value to '
            "differentiate there, such as a weighted sum, or compile with micro_batches=1 and without stages."
        )


def _gradient_for(x: Any, gradient: Any, scale: Tensor) -> Any:
    """What autograd adds to ``x.grad``."""
    if isinstance(gradient, SparseGradient):
        accumulate_sparse(x, gradient.to_local() * scale, gradient._spec)
        return None
    if gradient is None:
        silence_without_gradient(x)
        return None
    return _scale_gradient(gradient, scale)


def _scale_gradient(gradient: Any, scale: Tensor) -> Any:
    if isinstance(gradient, DTensor):
        return dtensor_like(gradient.to_local() * scale, gradient)
    return gradient * scale

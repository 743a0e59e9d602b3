"""``autoshard.measure``: step time and memory of a sharded model, beside its plan's predictions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.check.reference import scalar_loss
from autoshard.errors import AutoshardError
from autoshard.module.sharded_module import ShardedModule
from autoshard.passes.ir.text import show_bytes, show_seconds
from autoshard.runtime.parameters.recompute import observing_saved_tensors
from autoshard.runtime.programs.module import RankModule
from autoshard.torch_private.dispatch import TorchDispatchMode, storage_id


@dataclass(frozen=True)
class Measured:
    """Time and memory of a forward and backward without optimizer, largest over ranks."""

    step_s: float
    """median seconds"""
    kept_bytes: int
    """activation memory: bytes saved for the backward, without parameters, buffers and inputs"""
    peak_bytes: int
    """peak memory with parameters, gradients, buffers and inputs; without optimizer state"""
    predicted_s: float
    predicted_kept_bytes: float
    predicted_peak_bytes: float
    ranks: int
    simulated: bool
    """whether all ranks ran in this process: seconds and peak are then those of all ranks together,
    ``kept_bytes`` that of rank 0"""

    def __str__(self) -> str:
        rows = (
            ("step without optimizer", show_seconds, self.step_s, self.predicted_s),
            ("kept for the backward", show_bytes, self.kept_bytes, self.predicted_kept_bytes),
            ("peak", show_bytes, self.peak_bytes, self.predicted_peak_bytes),
        )
        lines = [f"{'':24}{'measured':>12}{'predicted':>12}{'ratio':>8}"]
        for what, shown, got, expected in rows:
            ratio = f"{got / expected:.2f}" if expected else ""
            lines.append(f"{what:24}{shown(got):>12}{shown(expected):>12}{ratio:>8}")
        if self.simulated:
            lines.append(
                f"all {self.ranks} ranks ran in this process, so its time and peak are those "
                "of all ranks; kept bytes are those of rank 0"
            )
        return "\n".join(lines)


def measure(
    sharded: ShardedModule, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, steps: int = 5
) -> Measured:
    """Time ``steps`` steps of ``sharded`` and measure their memory, next to its plan's predictions.

    A step is a forward and, with gradients, the backward of the loss. The loss is the first scalar
    output, or the sum of the first tensor. Gradients of the parameters are restored. A collective
    call under torch.distributed. Raises :class:`AutoshardError` for ``steps`` below 1 or another
    kind of module.
    """
    if not isinstance(sharded, ShardedModule):
        raise AutoshardError(f"measure takes the result of autoshard.compile, got {type(sharded).__name__}")
    if steps < 1:
        raise AutoshardError(f"steps is {steps!r}: at least one step is needed to measure")
    given = dict(kwargs or {})
    if not sharded.programs:
        sharded.specialise(args, given)
    before = [(p, p.grad) for p in sharded.parameters()]
    distributed = dist.is_available() and dist.is_initialized()
    try:
        _run_one_step(sharded, args, given)  # compiles, where these inputs have no program yet
        times = []
        for _ in range(steps):
            if distributed:
                dist.barrier()
            _synchronise()
            begin = time.perf_counter()
            _run_one_step(sharded, args, given)
            _synchronise()
            times.append(time.perf_counter() - begin)
        kept, peak = _measured_memory(sharded, args, given)
    finally:
        for p, gradient in before:
            p.grad = gradient
    plan = sharded.plan
    step_s, kept, peak = _largest_over_ranks((statistics.median(times), kept, peak))
    held = plan.memory
    return Measured(
        step_s=step_s,
        kept_bytes=int(kept),
        peak_bytes=int(peak),
        predicted_s=plan.cost.total_s - plan.cost.optimizer_s,
        predicted_kept_bytes=held.activations,
        predicted_peak_bytes=held.peak - held.optimizer,
        ranks=plan.mesh.size,
        simulated=plan.mesh.size > 1 and not (distributed and dist.get_world_size() == plan.mesh.size),
    )


def _largest_over_ranks(found: tuple[float, float, float]) -> tuple[float, float, float]:
    """Elementwise maximum over all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return found
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    step_s, kept, peak = (max(column) for column in zip(*every, strict=True))
    return step_s, kept, peak


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _run_one_step(sharded: ShardedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for p in sharded.parameters():
        p.grad = None
    loss = _differentiated_scalar(sharded(*args, **kwargs))
    if loss is not None:
        loss.backward()


def _differentiated_scalar(output: Any) -> Tensor | None:
    ends = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    scalar = scalar_loss(output)
    return ends[0].sum() if scalar is None and ends else scalar


def _measured_memory(sharded: ShardedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, float]:
    """(saved bytes, peak bytes) of the rank that runs in this thread."""
    for p in sharded.parameters():
        p.grad = None
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    given = {storage_id(_to_local_tensor(x)): x.untyped_storage().nbytes() for x in inputs}
    kept = _SavedBytes(given)

    def bound(module: RankModule, _: Any) -> None:
        for x in module.tensors():
            given[storage_id(_to_local_tensor(x))] = _to_local_tensor(x).untyped_storage().nbytes()

    hooks = [module.register_forward_pre_hook(bound) for module in sharded.rank_modules()]
    try:
        with _LiveBytes(given) as alive:
            with observing_saved_tensors(kept.pack), torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda x: x):
                loss = _differentiated_scalar(sharded(*args, **kwargs))
            if loss is not None:
                loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return float(kept.most), float(alive.peak + sum(given.values()))


def _to_local_tensor(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


class _SavedBytes:
    """Most bytes saved for the backward at once, without the ``given`` storages."""

    def __init__(self, given: Mapping[int, int]) -> None:
        self.given, self.most = given, 0
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}

    def pack(self, x: Tensor) -> Tensor:
        """Pack hook of ``saved_tensors_hooks``."""
        storage = x.untyped_storage()
        self.found[storage_id(_to_local_tensor(x))] = StorageWeakRef(storage), storage.nbytes()
        alive = [(key, size) for key, (ref, size) in self.found.items() if not ref.expired()]
        self.most = max(self.most, sum(size for key, size in alive if key not in self.given))
        return x


class _LiveBytes(TorchDispatchMode):
    """Most bytes of live storages at once, without the ``given`` ones."""

    def __init__(self, given: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given, self.peak = given, 0
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for key in [k for k, (ref, _) in self.found.items() if ref.expired() or k in self.given]:
            del self.found[key]
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and storage_id(_to_local_tensor(x)) not in self.given:
                storage = _to_local_tensor(x).untyped_storage()
                alive = StorageWeakRef(storage)
                self.found[storage_id(_to_local_tensor(x))] = alive, storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.found.values()))
        return out

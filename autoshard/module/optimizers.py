"""Optimizers on sharded parameters: clipping, GradScaler, state loading, stage gradients."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.aten import aten
from autoshard.errors import AutoshardError, LayoutError, RuntimeMismatchError
from autoshard.module.dtensors.dispatch import first_rank_generator
from autoshard.module.dtensors.module_dtensor import (
    PART_MESHES,
    ModuleDTensor,
    is_view_op,
    local_shard,
    replicated_dtensor,
    tensors_of,
)
from autoshard.module.model.submodules import shard_like
from autoshard.module.sharded_module import ShardedModule
from autoshard.runtime.transport.groups import group_of
from autoshard.runtime.transport.process_group import all_gather_single
from autoshard.torch_private.ops import foreach_norm

NOT_SUMMED = "gradients are not summed over the ranks yet, because the last backward pass was inside no_sync()"

NonFiniteByDevice = dict[torch.device, Tensor]
"""device → 1 if a gradient there is not finite"""


def clip_grad_norm_(
    sharded: ShardedModule, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients in place to a norm of at most ``max_norm``; returns the prior norm (scalar).

    It is the unsharded model's norm, by one collective of one number;
    :func:`torch.nn.utils.clip_grad_norm_` needs one per layout. Raises RuntimeError for a
    non-finite norm if ``error_if_nonfinite``, :class:`AutoshardError` for another module.
    """
    if not isinstance(sharded, ShardedModule):
        raise AutoshardError(
            "autoshard.clip_grad_norm_ takes the result of autoshard.compile, got "
            f"{type(sharded).__name__}. For other parameters use torch.nn.utils.clip_grad_norm_"
        )
    gradients: list[Any] = [p.grad for p in sharded.parameters() if p.grad is not None]
    partial = [g for g in gradients if isinstance(g, DTensor) and any(p.is_partial() for p in g.placements)]
    if partial:
        raise RuntimeMismatchError(f"{len(partial)} {NOT_SUMMED}")
    if not sharded.is_staged and (not gradients or not isinstance(gradients[0], DTensor)):
        norm, held = torch.nn.utils.get_total_norm([_gradient_values(g) for g in gradients], norm_type), gradients
    else:
        # a stage's mesh may equal that of another module, on these ranks alone
        like = next(sharded.all_stages_parameters())
        group = None if sharded.is_staged else _group_of_model(sharded.device_mesh)
        norm = _total_norm(sharded.unduplicated_gradients(), float(norm_type), like, group)
        held = [g.to_local() for g in gradients]
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the gradient norm of order {norm_type} is {float(norm)}; no gradient was clipped")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in held:
        g.mul_(scale)
    return norm


def _group_of_model(mesh: Any) -> Any:
    """The process group of a model's ranks; None: all. ``mesh``: the model's, or a table's."""
    mesh = getattr(mesh, "_of", mesh)
    return group_of(mesh.mesh.flatten().tolist(), "axes") if mesh in PART_MESHES else None


def _total_norm(gradients: Sequence[Any], order: float, like: Tensor, group: Any) -> Tensor:
    """The norm of all DTensors in the dtype of ``like``; of replicas only the first counts."""
    mine = []
    for g in gradients:
        place = g.device_mesh.get_coordinate()
        if place is None:  # another rank owns it
            continue
        # is_shard() is False for torch's strided shards
        first = all(n == 0 or not p.is_replicate() for p, n in zip(g.placements, place, strict=True))
        if first and g.to_local().numel():
            mine.append(_gradient_values(g.to_local()))
    device = mine[0].device if mine else torch.device("cuda" if "nccl" in str(dist.get_backend()) else "cpu")
    norms = torch.stack([n.to(device, like.dtype) for n in foreach_norm(mine, order)]) if mine else None
    total = (
        torch.zeros((), device=device, dtype=like.dtype) if norms is None else torch.linalg.vector_norm(norms, order)
    )
    everyone = total.new_empty(dist.get_world_size(group))
    all_gather_single(everyone, total.reshape(1), group=group)  # no all-reduce: the maximum of gloo loses NaN
    return torch.linalg.vector_norm(everyone, order)


def _gradient_values(x: Tensor) -> Tensor:
    """The stored values: of a sparse gradient those of its rows."""
    return x.coalesce().values() if x.is_sparse else x


@functools.cache
def patch_grad_scaler() -> None:
    """Make :class:`torch.amp.GradScaler` find the same overflow on every rank. DTensor reduces over
    the axes that shard the *first* gradient, and ranks of other stages or tables may have other
    gradients: they would decide alone. So local findings are combined once per optimizer."""
    torch.amp.GradScaler._unscale_grads_ = _agree_on_nonfinite(torch.amp.GradScaler._unscale_grads_)  # type: ignore[method-assign]


def _agree_on_nonfinite(unscale: Callable[..., NonFiniteByDevice]) -> Callable[..., NonFiniteByDevice]:
    @functools.wraps(unscale)
    def together(
        scaler: Any, optimizer: torch.optim.Optimizer, inverse: Tensor, found: Tensor, fp16: bool
    ) -> NonFiniteByDevice:
        by_device = unscale(scaler, optimizer, inverse, found, fp16)
        ours = (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ModuleDTensor))
        if (first := next(ours, None)) is not None:
            by_device = by_device or {found.device: found}
            group = None if is_of_stage(first) else _group_of_model(first.device_mesh)
            for x in by_device.values():
                dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
        return by_device

    return together


@functools.cache
def patch_load_state_dict() -> None:
    """Have ``optimizer.load_state_dict`` take full tensors; each rank keeps its shards."""
    of: Any = torch.optim.Optimizer
    loaded = of._process_value_according_to_param_policy

    def process(param: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(param, ModuleDTensor) and isinstance(value, DTensor):
            value = ModuleDTensor.of(value)
        elif isinstance(param, ModuleDTensor) and value.ndim:
            value = shard_like(value, param)
            if not isinstance(value, DTensor) and all(p.is_replicate() for p in param.placements):
                value = replicated_dtensor(param.device_mesh, value)
        return loaded(param, value, *args, **kwargs)

    of._process_value_according_to_param_policy = staticmethod(process)


@functools.cache
def patch_steps() -> None:
    """Have errors of DTensor in ``optimizer.step`` name the optimizer, and the ways out."""
    of: Any = torch.optim.Optimizer
    prepare = of._patch_step_function

    def prepare_class(self: Any) -> None:
        prepare(self)
        kind = type(self)
        if not kind.__module__.startswith("torch.") and not hasattr(kind.step, _EXPLAINED):
            kind.step = _explained(kind.step)

    of._patch_step_function = prepare_class


_EXPLAINED = "_autoshard_explained"
"""marks steps whose errors are explained"""


def _explained(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def explained(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(self, *args, **kwargs)
        except Exception as error:
            modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
            of = next((p for group in self.param_groups for p in group["params"] if _is_sharded(p)), None)
            theirs = "DTensor" in str(error) or any(name.startswith("torch.distributed.tensor") for name in modules)
            if of is None or not theirs or isinstance(error, AutoshardError):
                raise
            raise LayoutError(
                f"{type(self).__name__}.step() does what DTensor refuses of sharded parameters, such as one of shape "
                f"{list(of.shape)} in {of.placements}: {str(error).strip().splitlines()[0]}. Step on full tensors: "
                "optimizer = autoshard.whole(optimizer). Or choose another optimizer"
            ) from error

    setattr(explained, _EXPLAINED, True)
    return explained


ModuleT = TypeVar("ModuleT", bound=nn.Module)


def trained_module(optimizer: torch.optim.Optimizer, modules: Iterable[ModuleT]) -> ModuleT | None:
    """The first of ``modules`` with a parameter of the optimizer."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return next((m for m in modules if any(id(p) in held for p in m.parameters())), None)


OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def whole(optimizer: OptimizerT) -> OptimizerT:
    """``optimizer``, whose steps see full parameters, gradients and states as plain tensors; returns it.

    For optimizers that need full matrices or norms of them, or that stop with an error of DTensor. Every
    rank makes one device's update, with rank 0's random numbers, and keeps its shards of parameters and of
    states with their shape. The full tensors of all its parameters are held during the step. It is unchanged
    in one process. Raises :class:`AutoshardError` for parameters of pipeline stages. Collective.
    """
    of = [p for group in optimizer.param_groups for p in group["params"] if _is_sharded(p)]
    if any(map(is_of_stage, of)):
        raise AutoshardError(
            "pipeline stages cannot be stepped on full tensors: a rank has parameters of its own stages only"
        )
    if of and hasattr(optimizer, "alone_on_host"):
        raise AutoshardError(
            "the states of this optimizer are offloaded, so they cannot be gathered for a step on full tensors"
        )
    own = optimizer.step

    @functools.wraps(own)
    def step(_: Any, closure: Callable[[], Any] | None = None) -> Any:
        groups = [(group["params"], [*group["params"]]) for group in optimizer.param_groups]
        pairs = {p: nn.Parameter(_whole_tensor(p), p.requires_grad) for _, ps in groups for p in ps if _is_sharded(p)}

        def load() -> None:
            for p, plain in pairs.items():
                plain.grad = _whole_tensor(p.grad)

        @torch.no_grad()
        def store() -> None:
            for p, plain in pairs.items():
                local_shard(p).copy_(local_shard(shard_like(plain.detach(), p)))

        def evaluated() -> Any:
            store()
            show(plain=False)  # to zero_grad() of the closure
            with torch.enable_grad():
                loss = closure()  # type: ignore[misc]
            show(plain=True)
            load()
            return loss

        def show(plain: bool) -> None:
            for params, before in groups:
                params[:] = [pairs.get(p, p) for p in before] if plain else before

        load()
        for p, plain in pairs.items():
            if p in optimizer.state:
                optimizer.state[plain] = pytree.tree_map_only(DTensor, _whole_tensor, optimizer.state.pop(p))
        show(plain=True)
        first = next(iter(pairs), None)
        try:
            with contextlib.nullcontext() if first is None else first_rank_generator(first, None):
                return own() if closure is None else own(evaluated)
        finally:
            show(plain=False)
            store()
            for p, plain in pairs.items():
                if plain in optimizer.state:
                    keep = functools.partial(shard_like, like=p)
                    optimizer.state[p] = pytree.tree_map_only(Tensor, keep, optimizer.state.pop(plain))

    if of:
        kind = type(optimizer)
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # schedulers rebind it
        optimizer.steps_whole = True  # type: ignore[attr-defined]
        optimizer.__reduce_ex__ = lambda _: (_whole_again, (kind, optimizer.__getstate__()))  # type: ignore[method-assign]
    return optimizer


def _whole_again(kind: type[OptimizerT], state: dict[str, Any]) -> OptimizerT:
    """A copy of an optimizer that steps on full tensors."""
    made = kind.__new__(kind)
    made.__setstate__(state)
    return whole(made)


def _is_sharded(p: Tensor) -> bool:
    return isinstance(p, ModuleDTensor)


def _whole_tensor(x: Any) -> Any:
    """The full tensor of a DTensor, without history; anything else unchanged. Collective."""
    if not isinstance(x, DTensor):
        return x
    if any(p.is_partial() for p in x.placements):
        raise RuntimeMismatchError(NOT_SUMMED)
    with torch.no_grad():
        return x.full_tensor().detach().clone()


def is_of_stage(p: Tensor) -> bool:
    """Whether ``p`` is a trained parameter of a pipeline stage; its mesh does not tell."""
    return mark_stage_gradient in (p._post_accumulate_grad_hooks or {}).values()


def mark_stage_gradient(p: Tensor) -> None:
    """Mark ``p.grad`` as a stage's gradient; a post-accumulate hook."""
    if type(p.grad) is ModuleDTensor:
        p.grad.__class__ = StageGradient


class StageGradient(ModuleDTensor):
    """A gradient whose norm must not be combined (``clip_grad_norm_``), nor its elements
    concatenated (LBFGS)."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        ndim = max((x.ndim for x in tensors_of(args[:1], {})), default=0)
        if op is aten.stack.default and ndim == 0:
            raise RuntimeMismatchError(
                "the norm of these gradients covers this rank's pipeline stages only, not the model. Use "
                "autoshard.clip_grad_norm_(sharded, max_norm) instead of torch.nn.utils.clip_grad_norm_"
            )
        if op is aten.cat.default and ndim == 1:
            raise RuntimeMismatchError(
                "these gradients belong to this rank's pipeline stages only, not to the model. "
                "Optimizers that take all parameters as one vector, such as LBFGS, cannot train "
                "stages. sharded.full_gradients() has all gradients"
            )
        made = super().__torch_dispatch__(op, types, args, kwargs)
        if is_view_op(op) or "norm" in op._schema.name or op is aten._to_copy.default:
            for x in tensors_of([made], {}):
                if type(x) is ModuleDTensor:
                    x.__class__ = StageGradient
        return made

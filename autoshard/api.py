"""The public functions: compile, plan."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.compiler import captured, compiled
from autoshard.devices import AXIS, pipelined_for, planned_for, served_for
from autoshard.errors import CaptureError, MeshError, PlanError
from autoshard.hardware import Hardware
from autoshard.hardware import hardware as resolve_hardware
from autoshard.mesh import Mesh, MeshLike
from autoshard.module.arguments import check_arguments, own
from autoshard.module.base import ShardedModule
from autoshard.module.in_process import InProcessModule
from autoshard.module.inputs import Inputs, check_inputs, local_layouts, telling_wholes, wholes, with_rows
from autoshard.module.model.state import requires_grad
from autoshard.module.programs.compiling import Settings
from autoshard.module.ranks.distributed import DistributedModule
from autoshard.module.staged.pipelined import PipelinedModule
from autoshard.passes.capture.exported.lengths import Dynamic, fixed_if_refused
from autoshard.passes.ir.graph import Graph
from autoshard.passes.microbatch import check_lengths, count_of
from autoshard.passes.propagate.experts import like_of
from autoshard.passes.propagate.recompute import Recompute
from autoshard.plans.compiled import Compiled
from autoshard.plans.plan import Plan
from autoshard.plans.stages import check_schedule, check_stages
from autoshard.plans.stages_together import rest
from autoshard.plans.wishes import Wishes
from autoshard.precision import precision_of
from autoshard.progress import seldom_collected
from autoshard.report.record import Cost
from autoshard.serving import calls_for, check_asked, laid_out, served, together
from autoshard.stages import set_up_logs

set_up_logs()
log = logging.getLogger("autoshard")

Like = str | Mapping[str, Any] | None


def compile(  # noqa: A001  the public name
    model: nn.Module,
    mesh: MeshLike,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | None = None,
    like: Like = None,
    hints: Mapping[str, Any] | None = None,
    memory_budget: float | None = None,
    optimizer: str = "adamw",
    recompute: Recompute = "auto",
    training: bool | None = None,
    gather_outputs: bool | None = None,
    strict: bool = False,
    dynamic: Dynamic = False,
    micro_batches: int | Literal["auto"] = 1,
    stages: str | None = None,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    inputs: Inputs = "global",
    mixed_precision: Any = None,
    objective: str = "step",
    profile: Mapping[str, Any] | None = None,
) -> ShardedModule:
    """``model`` sharded over ``mesh``: a module that computes the same outputs, loss and gradients.

    Args:
        model: a single-device module; it is not changed. On the meta device it takes no memory.
        mesh: an :class:`autoshard.Mesh`, a ``{axis: size}`` dict or a torch ``DeviceMesh``. All ranks run in this
            process, unless torch.distributed is initialised with that many ranks, or the mesh is a ``DeviceMesh``.
        example_args, example_kwargs: example inputs (global shapes). Without them the first call compiles.
        plan: choices to use instead of a search, from :func:`autoshard.plan` or ``Plan.from_json``. ``like`` and ``hints``
            beside it are for programs of other shapes and states, as are ``memory_budget`` and ``recompute``: it must have
            been made for ``like``, and meet ``hints``; others are refused. Micro-batches, stages and schedule are the plan's
            where they are left to their defaults; others are refused, too.
        like: an expert's plan instead of a search: ``"ddp" "zero1" "zero2" "fsdp" "hsdp" "megatron" "megatron-sp"
            "ulysses" "ring" "expert" "table-wise" "row-wise" "column-wise" "replicate"``, one for all axes or one per
            axis (``{"dp": "fsdp", "tp": "megatron-sp"}``), or styles by module as of ``parallelize_module`` and
            transformers (``{"layers.*.mlp.up_proj": "colwise", …}``; ``"tp_plan"``: the model's own), along the axis tp,
            else the last. What it leaves open is searched.
        hints: ``{fnmatch pattern: Shard(d) | "colwise" | "rowwise" | "replicate" | {axis: placement}}``.
        memory_budget: bytes per rank that the step may hold at its peak, everything included; default: 90 % of the
            hardware's memory. Where no plan is found that stays within it: :class:`PlanError`.
        optimizer: whose state the memory model counts, such as "adamw", "sgd" or "adafactor".
        recompute: what the backward makes again instead of having it kept: ``"auto"`` (as memory needs), ``"none"``,
            ``"blocks"``, ``"selective"`` or ``{pattern of modules: True | False}``.
        training: whether the example inputs are compiled for with a backward; default: ``model.training``. A later call
            has a backward exactly where eager records gradients: with grad mode on and a parameter or input that
            requires one. ``False``: no call ever records gradients. Dropout and batch norm follow the modules' own
            modes. A call in another state (modes, requires_grad, autocast) compiles another program, once.
        gather_outputs: whether outputs come back as full tensors; default: where gradients are recorded they keep
            their layout (under torch.distributed a DTensor, gathered where it meets a plain tensor), else yes. Scalars
            are always plain tensors.
        strict: raise for an op without a sharding rule instead of running it on full tensors.
        dynamic: compile one program for all lengths of the inputs' dims that the model leaves open (True), or of those
            named: ``{"input_ids": {0: "batch", 1: "seq"}}``. Dims of one name are equal; ``"4*batch"`` promises a
            multiple of 4, so that a dim made of several may be cut. Local sizes become expressions of these lengths.
            An example length of 0 or 1 stays fixed. A call that the program does not hold for compiles another one. Several
            micro-batches of a call with a backward are refused.
        micro_batches: parts of the batch that a call with a backward runs one after another, forward and backward, so
            that activations of one of them are kept at a time. Loss, gradients and dropout are exactly those of the
            whole batch. The model returns a loss (of several scalars with a gradient the output called "loss", else the
            first); its ``backward()`` hands the gradients over, other outputs come detached. An operation that needs the
            whole batch, such as batch norm in training, is refused. ``"auto"``: the
            divisor of the batch with which the step fits and is cheapest, the smallest of equals. The batch dim of
            every input is found, or named by a hint: ``{"x": {"micro_batch": Shard(1)}}``.
        stages: the mesh axis along which the graph is cut into pipeline stages; the rest of the mesh shards each of them.
            A call with a backward runs forward and backward of all micro-batches, as above; under torch.distributed a
            process holds the parameters of its stages alone, and ``torch.distributed.pipelining`` runs the schedule.
        schedule: of stages: ``"1f1b"``, ``"gpipe"``, ``"interleaved"`` or ``"zero_bubble"``; without stages it is refused.
        stages_per_rank: of ``"interleaved"``, or ``"zero_bubble"``; left out, one of the latter, and of the former as many as
            make the step shortest: more of them shorten the bubble and send more messages.
        inputs: ``"global"``: every process brings the whole batch; ``"local"``: each brings its own part of it, all of
            one size, as from a DistributedSampler, and the results are those of the parts put together (in one process
            the part is the whole). Or ``{pattern on names of inputs: "local"}``. Dim 0 is cut by the mesh axes of the
            batch: by the only one, by those that hints for the input name (``{"x": {"dp": Shard(0)}}``), or by those
            with usual names (dp, data, fsdp, replica, …); along others ranks bring the same. Inputs that are DTensors
            state their layout themselves. With ``dynamic``, one that an open length is read
            off is gathered first where it is cut along that dim.
        mixed_precision: a :class:`torch.distributed.fsdp.MixedPrecisionPolicy`, with the model as its one unit: parameters
            are cast to ``param_dtype`` before they are gathered and read, gradients summed over the ranks in
            ``reduce_dtype``; parameters, their gradients and the optimizer's state stay in the parameters' own dtype.
            Floating inputs of the model are cast to ``param_dtype`` (``cast_forward_inputs``) and its floating outputs to
            ``output_dtype``. Buffers are not cast.
        objective: of inference, what the layout of the weights is chosen for: ``"step"``, the call that comes first;
            ``"latency"``, the next token of one request; ``"throughput"``, the tokens of the whole batch.
        profile: which calls the weights serve and how often each comes, such as ``{"prefill": 1, "decode": 200}``: the
            first call is a prompt, and a token after it is read with the cache that 199 others have left. Calls of which
            that is not known: ``{"decode": (200, args, kwargs)}``. Default, with an objective: tokens alone.

    Raises: subclasses of :class:`autoshard.AutoshardError`, before anything is changed.
    """
    kinds = {"plan": plan, "training": training, "gather_outputs": gather_outputs, "strict": strict, "dynamic": dynamic}
    check_arguments(model, example_args, example_kwargs, hints=hints, **kinds)
    check_inputs(inputs)
    asked = own((like, hints, recompute, dynamic, inputs, profile))  # later calls compile by them, too
    like, hints, recompute, dynamic, inputs, profile = asked
    resolved = Mesh.of(mesh)
    wishes = _wishes(
        micro_batches,
        mixed_precision,
        hints=hints,
        memory_budget=memory_budget,
        optimizer=optimizer,
        recompute=recompute,
        strict=strict,
        plan=plan,
        like=like,
        stages=stages,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        objective=objective,
        profile=profile,
    )
    others = {"plan": plan, "stages": stages, "micro_batches": micro_batches != 1}
    check_asked(objective, profile, model.training if training is None else training, others)
    check_stages(resolved, wishes)
    settings = Settings(wishes, training, gather_outputs, dynamic, inputs)
    sharded = _module(model, mesh, resolved, settings)
    if example_args or example_kwargs:
        sharded.specialise(example_args, example_kwargs or {})
    return sharded


def _wishes(micro_batches: int | str, mixed_precision: Any, **asked: Any) -> Wishes:
    wishes = Wishes(micro_batches=count_of(micro_batches), mixed_precision=precision_of(mixed_precision), **asked)
    return wishes.as_planned()


def _module(model: nn.Module, mesh: MeshLike, resolved: Mesh, settings: Settings) -> ShardedModule:
    """This rank's module where torch.distributed runs with as many ranks, else all ranks in this process."""
    running = dist.is_available() and dist.is_initialized()
    if hasattr(mesh, "mesh_dim_names") or (running and dist.get_world_size() > 1):
        ranks = dist.get_world_size() if running else 1
        if resolved.size != ranks:
            raise MeshError(
                f"the mesh ({resolved}) has {resolved.size} ranks, but torch.distributed runs {ranks}. "
                f"Start {resolved.size} processes (torchrun --nproc-per-node {resolved.size}) or use a mesh of {ranks}."
            )
        kind = DistributedModule if settings.wishes.stages is None else PipelinedModule
        return kind(model, resolved, settings, mesh if isinstance(mesh, DeviceMesh) else None)
    if not running and resolved.size > 1:
        _tell_of_processes(os.environ.get("WORLD_SIZE", "1"), resolved.size)
    return InProcessModule(model, resolved, settings)


@cache
def _tell_of_processes(started: str, ranks: int) -> None:
    """Warn, once, where a launcher started several processes, each of which would run all ranks."""
    if started != "1":
        log.warning(
            "this process is one of WORLD_SIZE=%s, but torch.distributed is not initialised: all %d ranks run inside each of "
            "them. Call torch.distributed.init_process_group() before autoshard.compile",
            started,
            ranks,
        )


@seldom_collected()
def plan(
    model: nn.Module,
    mesh: MeshLike | None = None,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    devices: int | None = None,
    hardware: str | Hardware | None = None,
    batch: int | None = None,
    like: Like = None,
    hints: Mapping[str, Any] | None = None,
    memory_budget: float | None = None,
    optimizer: str = "adamw",
    recompute: Recompute = "auto",
    training: bool | None = None,
    dynamic: Dynamic = False,
    micro_batches: int | Literal["auto"] = 1,
    stages: str | None = None,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    inputs: Inputs = "global",
    mixed_precision: Any = None,
    strict: bool = False,
    objective: str = "step",
    profile: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan :func:`compile` would follow, without weights or processes, for a mesh of any size.

    Arguments as of :func:`compile`; example inputs are needed. Those that are local are what one rank brings: the plan
    is for a batch of as many parts as there are. ``batch``: how many rows to plan for, in place of the examples' own;
    dim 0 of every tensor that has as many there as the first one is the batch. ``hardware``: of a mesh that does not say
    it (default: h100). With ``devices=64, hardware="h100"`` and no mesh the mesh is searched, too, and
    ``plan.candidates`` lists those that were tried; with ``micro_batches="auto"``, or ``stages="pp"``, so are the number
    of stages, micro-batches and the schedule. With an objective or a profile the plan is that of a token, and
    ``plan.serving`` says what prompts and tokens take; ``compile(plan=…)`` lays out the weights as it does. Raises as
    :func:`compile` does.
    """
    kinds = {"hints": hints, "training": training, "strict": strict, "dynamic": dynamic}
    check_arguments(model, example_args, example_kwargs, **kinds)
    check_inputs(inputs)
    if not example_args and not example_kwargs:
        raise CaptureError(
            "autoshard.plan needs example inputs to capture the model: pass example_args=(…) or example_kwargs={…}"
        )
    if (mesh is None) == (devices is None):
        raise MeshError("autoshard.plan needs a mesh, or devices=64 to search one: give one of them")
    example = with_rows(batch, tuple(example_args), dict(example_kwargs or {}))
    others = {"stages": stages, "micro_batches": micro_batches != 1, "dynamic": dynamic, "inputs": inputs != "global"}
    check_asked(objective, profile, model.training if training is None else training, others)
    asked = {
        "objective": objective,
        "profile": profile,
        "hints": hints,
        "memory_budget": memory_budget,
        "optimizer": optimizer,
        "recompute": recompute,
        "like": like,
        "mixed_precision": mixed_precision,
        "schedule": schedule,
        "stages_per_rank": stages_per_rank,
        "strict": strict,
    }
    if objective != "step" or profile is not None:
        wishes = replace(_wishes(1, **asked), like=like_of(model, like))
        check_schedule(wishes, searched=False)
        calls, title = calls_for(model, *example, wishes), type(model).__name__
        if mesh is not None:
            return served(calls, together(calls, Mesh.of(mesh, hardware), wishes), wishes, title)
        assert devices is not None
        return served_for(calls, devices, resolve_hardware(hardware or "h100"), wishes, title)
    if mesh is not None:
        asked |= {"micro_batches": micro_batches, "stages": stages, "inputs": inputs}
        return compiled_for(model, Mesh.of(mesh, hardware), *example, training=training, dynamic=dynamic, **asked).plan
    if inputs != "global":
        raise MeshError("inputs that a rank brings need a mesh: give mesh= instead of devices=")
    assert devices is not None
    wishes = _wishes(1 if micro_batches == "auto" else micro_batches, **asked)
    wishes = replace(wishes, like=like_of(model, like))
    recorded = _records(model, example, training)
    check_schedule(wishes, searched=stages is not None or micro_batches == "auto")
    check_lengths(wishes.micro_batches, bool(recorded and dynamic))

    def capture(lengths: Dynamic) -> Graph:
        return captured(model, *example, training=recorded, dynamic=lengths, precision=wishes.mixed_precision)

    graph = fixed_if_refused(dynamic, capture)
    found = graph, devices, resolve_hardware(hardware or "h100"), wishes, type(model).__name__
    if stages is None and micro_batches != "auto":
        return planned_for(*found)
    if stages not in (None, AXIS):
        raise PlanError(f"stages={stages!r}: with devices= the axis of stages is {AXIS!r}")
    batches = None if micro_batches == "auto" or micro_batches == 1 else micro_batches
    return pipelined_for(*found, batches, least=1 if stages is None else 2)


def compiled_for(
    model: nn.Module,
    mesh: MeshLike,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    training: bool | None = None,
    dynamic: Dynamic = False,
    inputs: Inputs = "global",
    micro_batches: int | Literal["auto"] = 1,
    mixed_precision: Any = None,
    stages: str | None = None,
    **asked: Any,
) -> Compiled:
    """All stages of a compilation, without weights or processes. Arguments as of :func:`plan`."""
    resolved = Mesh.of(mesh)
    wishes = _wishes(micro_batches, mixed_precision, stages=stages, **asked)
    check_stages(resolved, wishes)
    running = resolved if stages is None else rest(resolved, stages)
    layouts = local_layouts(model, running, args, kwargs, inputs, wishes.hints)
    example = wholes(args, kwargs, layouts)
    wishes = replace(wishes, inputs=() if dynamic or micro_batches != 1 or stages is not None else layouts)
    others = {"stages": stages, "micro_batches": micro_batches != 1}
    check_asked(wishes.objective, wishes.profile, model.training if training is None else training, others)
    wishes = laid_out(model, resolved, *example, wishes, type(model).__name__)
    recorded = _records(model, example, training)
    check_lengths(wishes.micro_batches, bool(recorded and dynamic))
    with telling_wholes(model, *example, layouts):
        return fixed_if_refused(
            dynamic, lambda lengths: compiled(model, resolved, *example, wishes, training=recorded, dynamic=lengths)
        )


def _records(model: nn.Module, example: tuple[Any, ...], training: bool | None) -> bool:
    """Whether a call with these arguments has a backward."""
    wanted = model.training if training is None else training
    return wanted and requires_grad(pytree.tree_leaves(example), model.parameters(), model.buffers())


def score(
    model: nn.Module,
    mesh: MeshLike,
    expert: Like,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    **asked: Any,
) -> Cost:
    """What an expert's plan (``like=``) would cost: ``plan(…, like=expert).cost``. ``asked``: as of :func:`plan`."""
    if "like" in asked:
        raise PlanError(f"score takes the expert's plan as its third argument, and like={asked['like']!r} beside it")
    return plan(model, mesh, example_args, example_kwargs, like=expert, **asked).cost

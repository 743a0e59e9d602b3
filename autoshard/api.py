"""The public functions: compile, plan, score."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.compiler import capture_graph, compile_model
from autoshard.devices import STAGE_AXIS, pipelined_for, planned_for, served_for
from autoshard.devices.meshes import check_devices
from autoshard.devices.projection import Projection, checked_anchor, on_cluster, projected
from autoshard.dumps import set_up_logs
from autoshard.errors import CaptureError, MeshError, PlanError
from autoshard.exports import read_configuration
from autoshard.hardware import Hardware
from autoshard.hardware import hardware as resolve_hardware
from autoshard.hardware.link import is_amount
from autoshard.mesh import Mesh, MeshLike
from autoshard.module.arguments import check_arguments, check_parts, copy_containers
from autoshard.module.in_process import InProcessModule
from autoshard.module.inputs import (
    InputScope,
    check_inputs,
    global_examples,
    local_layouts,
    report_global_inputs,
    with_batch_size,
)
from autoshard.module.model.inner_tensors import with_inner_tensors
from autoshard.module.model.original import any_requires_grad
from autoshard.module.parts.between import kept_out
from autoshard.module.parts.split import prepare_parts
from autoshard.module.programs.compiling import CompileSettings, Parts
from autoshard.module.ranks.distributed import DistributedModule
from autoshard.module.ranks.pipelined import PipelinedModule
from autoshard.module.sharded_module import ShardedModule
from autoshard.passes.capture.exported.symbolic_shapes import Dynamic, with_static_fallback
from autoshard.passes.microbatch import AUTO, check_lengths, parse_micro_batches
from autoshard.passes.propagate.named_strategies import expand_tp_plan
from autoshard.passes.propagate.recompute import Recompute
from autoshard.plans.options import CompileOptions, KnownLayouts
from autoshard.plans.plan import Compiled, Plan
from autoshard.plans.stages import check_schedule, check_stages, mesh_without_axis
from autoshard.precision import precision_of
from autoshard.progress import infrequent_gc, limited_time
from autoshard.report.record import Cost
from autoshard.serving import (
    check_asked,
    is_serving_asked,
    profile_calls,
    search_jointly,
    serving_plan,
    with_serving_layouts,
)

set_up_logs()
log = logging.getLogger("autoshard")

Like = str | os.PathLike[str] | Mapping[str, Any] | None


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
    inputs: InputScope = "global",
    mixed_precision: Any = None,
    objective: str = "step",
    profile: Mapping[str, Any] | None = None,
    parts: Parts = "auto",
    exact_dropout: bool | None = None,
    loss_chunks: int | Literal["auto"] = "auto",
    offload: str | None = None,
) -> ShardedModule:
    """``model`` sharded over ``mesh``: a module with the same outputs, loss and gradients.

    Args:
        model: a single-device module; it is not changed. On the meta device it takes no memory.
        mesh: an :class:`autoshard.Mesh`, a ``{axis: size}`` dict or a torch ``DeviceMesh``;
            dict and ``DeviceMesh`` have this machine's hardware. Ranks are simulated in this
            process, unless torch.distributed runs with that many ranks or the mesh is a
            ``DeviceMesh``. A ``DeviceMesh`` of some ranks is for modules that only these compile.
        example_args: example inputs (global shapes); by default the first call's.
        example_kwargs: example inputs that are passed by name.
        plan: a saved plan to follow instead of a search, from :func:`autoshard.plan` or
            ``Plan.from_json``. It must agree with ``like`` and ``hints``, which, like
            ``memory_budget`` and ``recompute``, are for programs of other shapes and modes.
            Micro-batches, stages and schedule default to the plan's; others are refused.
        like: a named strategy instead of a search: ``"ddp" "zero1" "zero2" "fsdp" "hsdp" "megatron"
            "megatron-sp" "ulysses" "ring" "expert" "table-wise" "row-wise" "column-wise"
            "replicate"``. One for all axes, or one per axis (``{"dp": "fsdp", "tp": "megatron-sp"}``).
            Or styles by module, as for ``parallelize_module`` and transformers
            (``{"layers.*.mlp.up_proj": "colwise", …}``; ``"tp_plan"``: the model's own). They hold
            along the axis tp, else the last. All other layouts are searched. Or the configuration
            of another engine (a dict, or the path of a file): DeepSpeed, Megatron-LM flags,
            torchtitan, transformers' DistributedConfig, vLLM. Its micro-batches, stages and
            recomputation replace defaults.
        hints: ``{fnmatch pattern: hint}``: {axis: placement}, Shard(d), "colwise", "rowwise" or
            "replicate".
        memory_budget: peak bytes per rank of a step, everything included; default: 90 % of the
            hardware's memory. :class:`PlanError` if no plan within it is found.
        optimizer: whose state the memory model counts, such as "adamw", "sgd" or "adafactor"; "muon": as
            :func:`autoshard.dealt` steps it.
        recompute: activation checkpointing: ``"auto"`` (as memory requires), ``"none"``,
            ``"blocks"``, ``"selective"`` or ``{pattern of modules: True | False}``.
        training: whether to compile a backward for the example inputs; default: ``model.training``.
            Later calls have one exactly where eager records gradients (grad mode, and a parameter
            or input that requires one). ``False``: never. Dropout and batch norm follow the
            modules' modes. A call in another state (modes, requires_grad, autocast) compiles
            another program, once.
        gather_outputs: whether outputs are full tensors; default: unless gradients are recorded.
            Else they keep their layout (under torch.distributed as DTensors, gathered where they
            meet plain tensors). Scalars are always plain tensors.
        strict: raise for an op without a sharding rule instead of running it on full tensors.
        dynamic: one program for all lengths of input dims that the model leaves open (True), or of
            those named: ``{"input_ids": {0: "batch", 1: "seq"}}``. Dims of one name are equal.
            ``"4*batch"`` promises a multiple of 4, so that merged dims may be sharded. Local sizes
            become expressions of these lengths. An example length of 0 or 1 stays fixed. Calls
            outside the program's conditions compile another one. Not with several micro-batches.
        micro_batches: gradient accumulation within a call that has a backward: micro-batches run
            one after another, forward and backward, with activations of one at a time. Loss,
            gradients and dropout are exactly those of the full batch. The loss is the output
            "loss", else the first scalar with a gradient. Its ``backward()`` delivers the
            gradients; other outputs are detached. Operations across the batch, such as
            batch norm in training, are refused. ``"auto"``: the cheapest divisor of the batch that
            fits. Batch dims are detected, or given by a hint: ``{"x": {"micro_batch": Shard(1)}}``.
        stages: the mesh axis of pipeline stages; the rest of the mesh shards each stage. A call
            with a backward runs all micro-batches. Under torch.distributed a process holds its
            stages' parameters only, and ``torch.distributed.pipelining`` runs the schedule.
        schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved"`` or ``"zero_bubble"``, only with stages.
        stages_per_rank: virtual stages; more shorten the bubble and send more messages. Default: 1
            for ``"zero_bubble"``, for ``"interleaved"`` the number with the shortest step.
        inputs: ``"global"``: every process brings the full batch; ``"local"``: each brings its own
            part, all of equal size, as from a DistributedSampler. Results are those of the
            concatenation (in one process the part is the batch). Or
            ``{pattern on names of inputs: "local"}``. Dim 0 is sharded along the mesh axes of the
            batch: the only axis, those of hints for the input (``{"x": {"dp": Shard(0)}}``), or
            those with usual names (dp, data, fsdp, replica, …). Along other axes ranks bring equal
            values. DTensors state their own layout. With ``dynamic``, an input is gathered if an
            open length is read from its sharded dim.
        mixed_precision: a :class:`torch.distributed.fsdp.MixedPrecisionPolicy` for the model as one
            unit. Parameters are cast to ``param_dtype`` before they are gathered and read, and
            gradients are summed over ranks in ``reduce_dtype``. Parameters, gradients and optimizer
            state keep the parameters' dtype. Floating inputs are cast to ``param_dtype``
            (``cast_forward_inputs``), floating outputs to ``output_dtype``. Buffers are not cast.
        objective: the inference call that layouts are chosen for: ``"step"``, the first;
            ``"latency"``, the next token of one request; ``"throughput"``, the tokens of a batch.
        profile: calls that use the weights, and their frequency: ``{"prefill": 1, "decode": 200}``.
            The first call is a prompt; a token is decoded with the KV cache of 199 others. Other
            calls: ``{"decode": (200, args, kwargs)}``. Default, with an objective: tokens only.

        parts: what to do with a model that is not one graph. ``"auto"``: compile the largest modules
            that are, and run the code between them eagerly. Or patterns of the modules to
            compile (``["backbone", "head.*"]``). ``None``: refuse the model. ``sharded.plans`` has the
            plan of each part.
        exact_dropout: whether dropout drops what one device drops, on every mesh (True). False: each
            shard draws from a random stream of its own, and attention with dropout stays a fused kernel.
            Replicas are equal, shards independent, and a seed gives the same masks again. Default: exact
            except for models on GPUs, and in plans for GPUs. :func:`verify` compares exact ones.
        loss_chunks: chunks of a rank's rows in which a linear layer and its cross entropy run, one after
            another. Only one chunk's logits exist at a time; the backward computes them once more. The
            results are exact, and the vocabulary may be sharded. The loss may be returned, the logits
            not. ``"auto"``: all rows at once, unless the memory budget makes chunks faster.
        offload: what a training step may keep in host memory.
            ``"optimizer"``: the optimizer's states, which come to the device for its step alone; make the
            optimizer with :func:`autoshard.offloaded`. ``"activations"``: what the first blocks save for the
            backward, of as many blocks as the memory budget requires; not with stages. ``"all"``: both.
            ``"auto"``: what the budget requires. ``plan.offloaded`` has bytes and seconds. Default: nothing.

    Raises: subclasses of :class:`autoshard.AutoshardError`, before anything is changed.
    """
    kinds = {"plan": plan, "training": training, "gather_outputs": gather_outputs, "strict": strict, "dynamic": dynamic}
    check_arguments(model, example_args, example_kwargs, hints=hints, **kinds)
    check_inputs(inputs)
    model = with_inner_tensors(model)
    # kept for later calls, which compile with them
    asked = copy_containers((like, hints, recompute, dynamic, inputs, profile))
    like, hints, recompute, dynamic, inputs, profile = asked
    resolved = Mesh.of(mesh)
    named: dict[str, Any] = {"plan": plan, "hints": hints, "memory_budget": memory_budget, "optimizer": optimizer}
    named |= {"recompute": recompute, "strict": strict, "objective": objective, "profile": profile, "like": like}
    named |= {"stages": stages, "schedule": schedule, "stages_per_rank": stages_per_rank}
    named |= {"exact_dropout": _runs_on_cpu(model) or None if exact_dropout is None else exact_dropout}
    named |= {"loss_chunks": loss_chunks, "offload": offload}
    opts = _make_compile_options(
        model, mixed_precision, micro_batches, mesh=resolved, example=(example_args, example_kwargs), **named
    )
    others = {"plan": plan, "stages": opts.stages, "micro_batches": opts.micro_batches != 1}
    check_asked(objective, profile, model.training if training is None else training, others)
    check_stages(resolved, opts)
    parts = check_parts(model, parts)
    settings = CompileSettings(opts, training, gather_outputs, dynamic, inputs, parts, kept_out(model))
    sharded = _make_module(model, mesh, resolved, settings)
    if example_args or example_kwargs:
        if settings.parts is None:
            sharded.specialise(example_args, example_kwargs or {})
        else:
            prepare_parts(sharded, tuple(example_args), dict(example_kwargs or {}))
    return sharded


def _runs_on_cpu(model: nn.Module) -> bool:
    devices = {x.device.type for x in (*model.parameters(), *model.buffers())} - {"meta"}
    return devices == {"cpu"} if devices else not torch.accelerator.is_available()


def _make_compile_options(
    model: nn.Module,
    mixed_precision: Any = None,
    micro_batches: int | str = 1,
    *,
    mesh: Mesh | None = None,
    example: Any = (),
    **asked: Any,
) -> CompileOptions:
    """The options, on ``mesh`` with what a configuration given as ``like`` says of an ``example``."""
    asked |= {"micro_batches": micro_batches}
    if mesh is not None:
        asked = _as_configured(asked, mesh, example)
    asked |= {"micro_batches": parse_micro_batches(asked["micro_batches"])}
    asked |= {"loss_chunks": parse_micro_batches(asked.get("loss_chunks", "auto"), "loss_chunks")}
    asked |= {"mixed_precision": precision_of(mixed_precision)}
    return CompileOptions(type(model).__name__, **asked).as_planned()


def _as_configured(asked: dict[str, Any], mesh: Mesh, example: Any) -> dict[str, Any]:
    """``asked`` with what a configuration given as ``like`` says, in place of defaults."""
    like = asked["like"]
    if like is None or (isinstance(like, Mapping) and any(axis in like for axis in mesh.axes)):
        return asked
    if (found := read_configuration(like)) is None:
        return asked
    shapes = [x.shape for x in pytree.tree_leaves(example) if isinstance(x, Tensor) and x.ndim]
    told = found.arguments(mesh, shapes[0][0] if shapes else found.rows)
    return {n: told.get(n, x) if n == "like" or x in (None, _DEFAULTS.get(n)) else x for n, x in asked.items()}


_DEFAULTS = {"micro_batches": 1, "recompute": "auto", "schedule": "1f1b"}


_INTEGRATIONS = {"transformers.trainer": "autoshard.hugging_face", "peft.peft_model": "autoshard.module.adapters"}
"""modules of others → those of ours that prepare their classes for sharded modules"""


class _IntegrationFinder(importlib.abc.MetaPathFinder):
    """Prepares classes of others for sharded modules when they are imported."""

    def __init__(self) -> None:
        self.waiting = {*_INTEGRATIONS}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.waiting:
            return None
        self.waiting.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def then_prepare(module: Any) -> None:
                load(module)
                _prepare_others()

            spec.loader.exec_module = then_prepare  # type: ignore[method-assign]
        return spec


def _prepare_others() -> None:
    """Have transformers' Trainer and PEFT take sharded modules: now if they are imported, else when they are."""
    for name, ours in _INTEGRATIONS.items():
        if name in sys.modules:
            with contextlib.suppress(ImportError):  # no accelerate, so no Trainer
                importlib.import_module(ours)
    if not any(isinstance(finder, _IntegrationFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _IntegrationFinder())


def _make_module(model: nn.Module, mesh: MeshLike, resolved: Mesh, settings: CompileSettings) -> ShardedModule:
    """A module for this rank under torch.distributed, else one for all ranks in this process."""
    _prepare_others()
    running = dist.is_available() and dist.is_initialized()
    if hasattr(mesh, "mesh_dim_names") or (running and dist.get_world_size() > 1):
        ranks = dist.get_world_size() if running else 1
        if running and isinstance(mesh, DeviceMesh) and resolved.size < ranks:
            _check_part(mesh, settings.opts.stages)
        elif resolved.size != ranks:
            raise MeshError(
                f"the mesh ({resolved}) has {resolved.size} ranks, but torch.distributed runs {ranks}. "
                f"Start {resolved.size} processes (torchrun --nproc-per-node {resolved.size}) or use a mesh of {ranks}."
            )
        kind = DistributedModule if settings.opts.stages is None else PipelinedModule
        return kind(model, resolved, settings, mesh if isinstance(mesh, DeviceMesh) else None)
    if not running and resolved.size > 1:
        _warn_uninitialised(os.environ.get("WORLD_SIZE", "1"), resolved.size)
    return InProcessModule(model, resolved, settings)


def _check_part(mesh: DeviceMesh, stages: str | None) -> None:
    """Refuse a mesh of some ranks only that lacks this rank, or has stages."""
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"rank {dist.get_rank()} is not in the DeviceMesh of ranks {mesh.mesh.flatten().tolist()}. "
            "Only ranks of a mesh compile the model; the others pass None to autoshard.transfer"
        )
    if stages is not None:
        raise MeshError(
            f"stages need all {dist.get_world_size()} ranks, but the DeviceMesh has {mesh.size()}. "
            "Use a mesh of all ranks, or no stages"
        )


@cache
def _warn_uninitialised(started: str, ranks: int) -> None:
    """Warn once if a launcher started several processes, each of which would run all ranks."""
    if started != "1":
        log.warning(
            "this process is one of WORLD_SIZE=%s, but torch.distributed is not initialised: all %d ranks run inside each of "
            "them. Call torch.distributed.init_process_group() before autoshard.compile",
            started,
            ranks,
        )


@infrequent_gc()
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
    inputs: InputScope = "global",
    mixed_precision: Any = None,
    strict: bool = False,
    objective: str = "step",
    profile: Mapping[str, Any] | None = None,
    time_limit: float | None = None,
    exact_dropout: bool | None = None,
    loss_chunks: int | Literal["auto"] = "auto",
    offload: str | None = None,
) -> Plan:
    """The plan that :func:`compile` would follow, on any mesh, without weights or processes.

    Arguments as in :func:`compile`; example inputs are required. Local inputs are those of one
    rank, and the plan is for the concatenated batch. ``batch``: rows to plan for instead of the
    examples'. Dim 0 of each tensor is the batch if it has as many rows as the first tensor.
    ``hardware``: for a mesh without its own (default: this machine's). With ``devices=64,
    hardware="h100"`` and no mesh, the mesh is searched, too; ``plan.candidates`` lists those tried.
    With ``micro_batches="auto"`` or ``stages="pp"``, so are stages, micro-batches and schedule. With an
    objective or a profile the plan is for one token, and ``plan.serving`` reports prompts and
    tokens; ``compile(plan=…)`` uses its weight layouts. ``time_limit``: seconds after which the search
    ends with its best plan so far. The part under way ends first, and a first plan is always found.
    Raises as :func:`compile`.
    """
    if time_limit is not None and not (is_amount(time_limit) and time_limit > 0):
        raise PlanError(f"time_limit={time_limit!r}: give seconds above 0, such as 60")
    kinds = {"hints": hints, "training": training, "strict": strict, "dynamic": dynamic}
    check_arguments(model, example_args, example_kwargs, **kinds)
    check_inputs(inputs)
    model = with_inner_tensors(model)
    if not example_args and not example_kwargs:
        raise CaptureError(
            "autoshard.plan needs example inputs to capture the model: pass example_args=(…) or example_kwargs={…}"
        )
    if (mesh is None) == (devices is None):
        raise MeshError("autoshard.plan needs a mesh, or devices=64 to search one. Give one of them")
    example = with_batch_size(batch, tuple(example_args), dict(example_kwargs or {}))
    if devices is not None and (found := read_configuration(like)) is not None:
        mesh, devices = found.mesh(devices, hardware), None
    named: dict[str, Any] = {"hints": hints, "memory_budget": memory_budget, "optimizer": optimizer, "strict": strict}
    named |= {"recompute": recompute, "objective": objective, "profile": profile, "like": like}
    named |= {"stages": stages, "schedule": schedule, "stages_per_rank": stages_per_rank}
    named |= {"exact_dropout": exact_dropout, "loss_chunks": loss_chunks, "offload": offload}
    known = None if mesh is None else Mesh.of(mesh, hardware)
    opts = _make_compile_options(model, mixed_precision, micro_batches, mesh=known, example=example, **named)
    stages, count = opts.stages, opts.micro_batches
    others = {"stages": stages, "micro_batches": count != 1, "dynamic": dynamic, "inputs": inputs != "global"}
    check_asked(objective, profile, model.training if training is None else training, others)
    with limited_time(time_limit):
        if known is not None and not is_serving_asked(opts):
            return compile_for_mesh(
                model, known, *example, opts, training=training, dynamic=dynamic, inputs=inputs
            ).plan
        if inputs != "global":
            raise MeshError("local inputs need a mesh: give mesh= instead of devices=")
        opts, kind = replace(opts, like=expand_tp_plan(model, opts.like)), resolve_hardware(hardware)
        check_schedule(opts, searched=stages is not None or count == AUTO)
        if is_serving_asked(opts):
            calls = profile_calls(model, *example, opts)
            if known is not None:
                return serving_plan(calls, search_jointly(calls, known, opts), opts)
            assert devices is not None
            return served_for(calls, devices, kind, opts)
        assert devices is not None
        recorded = _has_backward(model, example, training)
        check_lengths(max(1, count), bool(recorded and dynamic))
        graph = with_static_fallback(
            dynamic,
            lambda lengths: capture_graph(
                model, *example, training=recorded, dynamic=lengths, precision=opts.mixed_precision
            ),
        )
        if stages not in (None, STAGE_AXIS):
            raise PlanError(f"stages={stages!r}: with devices= the axis of stages is {STAGE_AXIS!r}")
        batches = count if count > 1 else None
        opts = replace(opts, stages=None, micro_batches=max(1, count))
        if stages is None and count != AUTO:
            return planned_for(graph, devices, kind, opts)
        least = 1 if stages is None else 2
        return pipelined_for(graph, devices, kind, opts, batches, least)


def project(
    model: nn.Module,
    devices: Sequence[int] = (512, 2048, 8192),
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: MeshLike | None = None,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    anchor: Any = None,
    **asked: Any,
) -> Projection:
    """A table over numbers of ``devices``: memory, step, tokens/s, MFU, device hours, next lever.

    The plan is that of the first number, on ``mesh`` or searched; example inputs are its batch. For
    others its data-parallel axis grows, and the batch with it. Nothing is searched again.

    Args:
        anchor: what was measured: seconds of a step on the first number, ``(devices, seconds)``, or the
            hardware of one node, as a file of :func:`autoshard.calibrate`. Compute is scaled to the
            step; a node brings its rates, and ``hardware`` the links between nodes.
        asked: as of :func:`plan`.

    Raises: as :func:`plan`; :class:`MeshError` for numbers that are not multiples of the first.
    """
    for size in devices:
        check_devices(size)
    if not devices:
        raise MeshError("autoshard.project needs numbers of devices, such as devices=(512, 2048, 8192)")
    kind = resolve_hardware(mesh.hardware if isinstance(mesh, Mesh) and hardware is None else hardware)
    measured = None
    if isinstance(anchor, str | os.PathLike | Hardware):
        kind = on_cluster(resolve_hardware(anchor), kind)
    elif anchor is not None:
        measured = checked_anchor(anchor, devices[0])
    first = min(devices)
    if mesh is None:
        found = plan(model, None, example_args, example_kwargs, devices=first, hardware=kind, **asked)
    else:
        axes = Mesh.of(mesh)
        if axes.size != first:
            raise MeshError(f"the mesh ({axes}) has {axes.size} ranks, but the smallest number of devices is {first}")
        sizes = Mesh(dict(zip(axes.axes, axes.shape, strict=True)), kind)
        found = plan(model, sizes, example_args, example_kwargs, **asked)
    return projected(found, devices, measured)


def compile_for_mesh(
    model: nn.Module,
    mesh: MeshLike,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    opts: CompileOptions | None = None,
    *,
    training: bool | None = None,
    dynamic: Dynamic = False,
    inputs: InputScope = "global",
    **asked: Any,
) -> Compiled:
    """All steps, without weights or processes. ``asked``: as of :func:`plan`, in place of ``opts``."""
    mesh, opts = Mesh.of(mesh), opts or _make_compile_options(model, **asked)
    check_stages(mesh, opts)
    running = mesh if opts.stages is None else mesh_without_axis(mesh, opts.stages)
    layouts = local_layouts(model, running, args, kwargs, inputs, opts.hints)
    example = global_examples(args, kwargs, layouts)
    others = {"stages": opts.stages, "micro_batches": opts.micro_batches != 1}
    check_asked(opts.objective, opts.profile, model.training if training is None else training, others)
    known = KnownLayouts(inputs=() if dynamic or any(others.values()) else layouts)
    recorded = _has_backward(model, example, training)
    opts, known = with_serving_layouts(model, mesh, example, opts, known, recorded)
    check_lengths(opts.micro_batches, bool(recorded and dynamic))
    with report_global_inputs(model, *example, layouts):
        return with_static_fallback(
            dynamic,
            lambda lengths: compile_model(model, mesh, *example, opts, known, training=recorded, dynamic=lengths),
        )


def _has_backward(model: nn.Module, example: tuple[Any, ...], training: bool | None) -> bool:
    """Whether a call with these arguments has a backward."""
    wanted = model.training if training is None else training
    return wanted and any_requires_grad(pytree.tree_leaves(example), model.parameters(), model.buffers())


def score(
    model: nn.Module,
    mesh: MeshLike,
    expert: Like,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    **asked: Any,
) -> Cost:
    """Cost of a named strategy: ``plan(…, like=expert).cost``. ``asked``: as of :func:`plan`."""
    if "like" in asked:
        raise PlanError(
            "score takes the named strategy as its third argument and got "
            f"like={asked['like']!r} as well. Give one of them"
        )
    return plan(model, mesh, example_args, example_kwargs, like=expert, **asked).cost

"""The module a user gets back: global inputs and outputs, parameters under their original names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autoshard.errors import CaptureError, PlanError
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.module.microbatches import MicroBatchRun
from autoshard.module.model.hooks import refuse_output_hooks, set_later
from autoshard.module.model.original import OriginalModel, is_plain_context, torch_defaults
from autoshard.module.model.parameters import clamp_parameters
from autoshard.module.model.submodules import is_followed, sharded_class
from autoshard.module.parts.plans import plans_of, summary, whole_plan
from autoshard.module.parts.split import run_in_parts
from autoshard.module.programs.call_checks import (
    check_call_leaves,
    check_outside_tensors,
    check_parametrizations,
    collective_method,
)
from autoshard.module.programs.compiling import CompileSettings, CompilingModule
from autoshard.module.programs.executable import Executable, ModuleCall, run_first_match
from autoshard.module.programs.pipeline import run_stages_in_order
from autoshard.module.saving import save_rank_modules
from autoshard.passes.capture.exported.mutated_arguments import update_caller_objects
from autoshard.passes.capture.exported.plain_objects import AttributeGuards
from autoshard.passes.capture.exported.pytrees import (
    LEAF_ARGUMENT_TYPES,
    constant_key,
    flatten_call,
    in_signature_order,
)
from autoshard.passes.ir.graph import Graph
from autoshard.plans.plan import Plan
from autoshard.report.record import Collective
from autoshard.report.text import short_text
from autoshard.runtime.programs.module import RankModule
from autoshard.runtime.transport.torch_state import autocast_state, without_autocast
from autoshard.serving import is_serving_asked


def submodule_alone(sharded: CompilingModule, part: nn.Module, base: type[CompilingModule]) -> Any:
    """``part`` of ``sharded`` as an instance of ``base`` that compiles it, on the same tensors.
    The tensors keep their layouts. If ``sharded`` is not compiled yet (:func:`can_compile_first`), the
    call of ``part`` decides them. Hints and styles by name are those of the model."""
    path = next(path for path, other in sharded._original_model.parts.items() if other is part)
    inner = sharded._inner_modules
    if path not in inner:
        around = [] if sharded._original_model.adopted else [m for p, m in inner.items() if path.startswith(f"{p}.")]
        inner[path] = submodule_alone(around[0], part, base) if around else _compiling_submodule(sharded, path, base)
    return inner[path]


def _compiling_submodule(sharded: CompilingModule, path: str, base: type[CompilingModule]) -> CompilingModule:
    of, below = sharded._original_model, f"{path}."

    def within(named: dict[str, Any]) -> dict[str, Any]:
        return {name[len(below) :]: x for name, x in named.items() if name.startswith(below)}

    model = of.model.get_submodule(path)
    original = OriginalModel(model)
    original.own_hooks = False  # the part's own call runs them
    original.parts = {"": of.parts[path], **within(of.parts)}
    original.guards = AttributeGuards(original.parts, of.guards.read)
    layouts: dict[str, Layout] | None = None
    inner = {} if of.adopted else within(sharded._inner_modules)
    if not of.adopted:
        tensors = {id(x) for x in (*model.parameters(), *model.buffers())}
        for other, part in sharded._inner_modules.items():
            if not other.startswith(below) and not tensors.isdisjoint(
                i for i, _ in part._original_model.origins.values()
            ):
                raise CaptureError(
                    f"{path!r} and {other!r} share tensors, and both are called alone before the full model. Call the "
                    "full model first, or give its example_args to autoshard.compile"
                )
    else:
        original.slots = within(of.slots)
        original.parameters = [name[len(below) :] for name in of.parameters if name.startswith(below)]
        original.elsewhere, original.taken_from = within(of.elsewhere), within(of.taken_from)
        original.adopted = True
        layouts = within({name: sharded._layout_of.get(name, Layout(sharded._program_mesh)) for name in of.slots})
    settings, like = sharded._settings, sharded._settings.opts.like
    opts = replace(settings.opts, hints=None, plan=None, like=None if _strategy_names_modules(sharded) else like)
    made: CompilingModule = object.__new__(base)
    made.__dict__.update((n, x) for n, x in sharded.__dict__.items() if n != "forward")  # a wrapper of the model's
    made.__dict__.update(
        _original_model=original,
        _title=type(model).__name__,
        _settings=replace(settings, opts=opts, gather_outputs=True),  # plain code reads them
        _executables={},
        _latest=None,
        _programs=[],
        _inner_modules=inner,
        _stage_homes=sharded._stage_homes and within(dict(sharded._stage_homes)),
        _parameter_layouts=layouts,
        _layout_of=within(sharded._layout_of) if of.adopted else {},
    )
    made._alone()
    object.__setattr__(made, "__class__", sharded_class(base, type(model), CompilingModule))
    made._show()
    return made


def _strategy_names_modules(sharded: CompilingModule) -> bool:
    """Whether the named strategy names modules of the full model."""
    like = sharded._settings.opts.like
    by_axis = like if isinstance(like, Mapping) else dict.fromkeys(sharded.mesh.axes, like)
    plain = all(x is None or (isinstance(x, str) and x != "tp_plan") for x in by_axis.values())
    return not (plain and by_axis.keys() <= {*sharded.mesh.axes})


def can_compile_first(sharded: CompilingModule) -> bool:
    """Whether a submodule may be compiled before the model: not if layouts depend on names,
    recorded calls or scarce memory of the model, nor without data."""
    opts, tensors = sharded._settings.opts, {id(t): t for t in sharded._original_model.tensors()}.values()
    of_whole = opts.hints or opts.plan or opts.stages or is_serving_asked(opts) or _strategy_names_modules(sharded)
    scarce = 2 * sum(t.nbytes for t in tensors) > opts.budget(sharded.mesh.hardware)
    return not (of_whole or scarce or any(t.is_meta for t in tensors))


def compile_encoder_decoder(sharded: Any, inputs: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Compile an encoder–decoder model first, if only the model decides its layouts."""
    config, name = sharded.config, sharded.main_input_name
    given = kwargs.get(name) if inputs is None else inputs
    if (
        sharded._original_model.adopted
        or not getattr(config, "is_encoder_decoder", False)
        or given is None
        or can_compile_first(sharded)
    ):
        return
    starts = (getattr(sharded.generation_config, n, None) for n in ("decoder_start_token_id", "bos_token_id"))
    start = torch.full((len(given), 1), next((n for n in starts if isinstance(n, int)), 0), device=given.device)
    mask = {n: x for n, x in kwargs.items() if n == "attention_mask"}
    sharded.specialise((), {name: given, **mask, "decoder_input_ids": start, "use_cache": True})


class ShardedModule(CompilingModule):
    """A model compiled for a mesh by :func:`autoshard.compile`; an instance of its class.

    It takes the model's arguments (global tensors, equal on every rank) and returns its output
    type. ``named_parameters()`` has the original names; ``plan``, ``source``, ``collectives`` show
    the result.
    """

    _deferred: bool
    """whether forwards leave gradients as partial sums: inside :meth:`no_sync`"""
    _parametrizations: Any = None
    """the cache of ``parametrize.cached()`` in which the last call updated parametrizations"""

    def __init__(self, model: nn.Module, mesh: Mesh, settings: CompileSettings) -> None:
        super().__init__(model, mesh, settings)
        object.__setattr__(self, "_deferred", False)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":  # accelerate wraps our forward
            object.__setattr__(self, name, value)
        elif (between := self.__dict__.get("_between")) is not None and name in between.attributes:
            setattr(between.model, name, value)
            if is_followed(value):  # copies take it, too
                set_later(self._original_model.root, name, value)
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """See :meth:`FixedModule.__getattr__`; a model of several parts has all attributes of the code between them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            between = self.__dict__.get("_between")
            if between is None or name not in between.attributes:
                raise
            return between.attributes[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """See :meth:`Compiling.__deepcopy__`. The copy is outside of ``no_sync``."""
        made = super().__deepcopy__(memo)
        object.__setattr__(made, "_deferred", False)
        if self._between is not None:
            object.__setattr__(made, "_between", self._between.copied(made, memo))
        return made

    def train(self, mode: bool = True) -> Self:
        """Same as :meth:`torch.nn.Module.train`, or as the model's class overrides it."""
        self._original_model.root.train(mode)
        self.training = self._original_model.root.training
        return self

    # --- what was decided ---

    def _latest_executable(self) -> Executable:
        if self._runs_in_parts:
            raise PlanError(f"{self._title} ran as several parts, and this needs one graph. {summary(self)}")
        if self._latest is None:
            raise PlanError("nothing is compiled yet: call the module once, or give example_args to autoshard.compile")
        return self._latest

    def _check_compiled(self) -> None:
        if not self._original_model.adopted:
            self._latest_executable()

    @property
    def plan(self) -> Plan:
        """The plan of the most recent call: of its program, or of all its parts."""
        return whole_plan(self)

    @property
    def plans(self) -> dict[str, Plan]:
        """Part (module path; "" for a model that is one graph) → plan, of the most recent call."""
        return plans_of(self)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that the most recent call ran: paths of modules; "" for the full model."""
        return tuple(self.plans)

    @property
    def source(self) -> str:
        """The generated Python source that every rank runs."""
        if self._runs_in_parts:
            used = self._between.used.items()
            return "\n\n".join(f"# {path}\n{part._latest_executable().compiled.source.text}" for path, part in used)
        return self._latest_executable().compiled.source.text

    @property
    def collectives(self) -> list[Collective]:
        """Every collective of one step: forward in program order, then backward."""
        return list(self.plan.collectives)

    def visualize(self, path: str | os.PathLike[str]) -> None:
        """Draw the plan into ``path``: .html, .dot, .svg, .json, .txt or .trace.json."""
        self.plan.visualize(path)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Same as :meth:`torch.nn.Module.named_parameters`. :class:`PlanError` before compilation."""
        self._check_compiled()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Same as :meth:`torch.nn.Module.state_dict`. :class:`PlanError` before compilation."""
        self._check_compiled()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Same as :meth:`torch.nn.Module.load_state_dict`. :class:`PlanError` before compilation."""
        self._check_compiled()
        return super().load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        """See :meth:`FixedModule._load_from_state_dict`. :class:`PlanError` before compilation."""
        self._check_compiled()
        super()._load_from_state_dict(*args)

    def __str__(self) -> str:
        return str(self.plan) if self._original_model.adopted and self.plans else repr(self)

    def __repr__(self) -> str:
        if self._runs_in_parts and not self.plans:
            return f"<ShardedModule: {self._title}: {summary(self)}>"
        compiled = short_text(self.plan) if self._original_model.adopted else f"{self._title}, not compiled yet"
        return f"<ShardedModule: {compiled}>"

    def _repr_html_(self) -> str | None:
        return self.plan._repr_html_() if self._original_model.adopted and self.plans else None

    # --- running ---

    def rank_modules(self) -> list[RankModule]:
        """Loaded rank modules, one per program, of this thread's rank (in one process: rank 0)."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on the mesh."""
        with self._call_lock:
            return self._called(args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._settings.parts is None or self._part_of is not None:
            return self._run_one_graph(args, kwargs)
        return run_in_parts(self, args, kwargs)

    def run_as_part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call by the code between parts; an error is that code's to handle."""
        return self._run_one_graph(args, kwargs)

    def _run_one_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = in_signature_order(self._original_model.model.forward, kwargs)
        given, spec = flatten_call(args, kwargs)
        call = self._incoming_call(given, spec)

        def serve(number: int) -> tuple[list[Any], dict[str, Tensor], dict[str, Tensor], Graph]:
            executable, recorded = self._serving(call, number), call.state.recorded
            if self._enables(call, executable):
                recorded = True
                executable = self._serving(self._call(given, spec, recorded, self._wants_gradients), number)
            if self._wants_gradients and not call.state.recorded:
                check_outside_tensors(x for x, _ in executable.graph.outside)
            if executable.written_parametrizations:
                cached = check_parametrizations(self._parametrizations, executable, self._title)
                object.__setattr__(self, "_parametrizations", cached)
            own, written = executable.apart(call.leaves)
            if self._original_model.absent:
                self._original_model.check_present(i.fqn for i in executable.graph.of_kind("buffer"))
            autocast = without_autocast() if call.state.autocast else contextlib.nullcontext()
            with executable.tried(self.tensor, written), autocast, torch.set_grad_enabled(recorded):
                if executable.graph.clamped:
                    clamp_parameters((self.tensor(fqn), bounds) for fqn, bounds in executable.graph.clamped.items())
                leaves, mutated = self._step(executable, executable.named(own))
            with torch.set_grad_enabled(recorded):
                is_part = self._part_of is not None  # plain code may view its outputs
                typed = executable.sharing_memory(executable.as_typed(leaves), given, call.leaves, ordered=is_part)
            call.programs.pop(number, None)
            if recorded == call.state.recorded:
                call.programs[number] = executable
            if recorded:
                refuse_output_hooks(typed, executable.feeding)
            return typed, mutated, written, executable.graph

        leaves, mutated, written, graph = run_first_match(serve, call.programs)
        if mutated:
            self._write_back(mutated, written)
        own = graph.out_spec.num_leaves
        output = pytree.tree_unflatten(leaves[:own], graph.out_spec)
        return update_caller_objects(graph.handed, graph.changed, (args, kwargs), output, leaves[own:])

    def _incoming_call(self, leaves: Sequence[Any], spec: Any) -> ModuleCall:
        """The call with these leaves; :class:`CaptureError` if no program can serve it.

        Fast path: most calls repeat the guards of the last one, which are compared as one tuple.
        """
        present = self._call_guard(leaves, spec)
        if present is not None and self._last is not None and self._last[0] == present:
            last = self._last[1]
            return last.with_leaves(self._inputs_as_called(leaves, spec, last.cuts)[0])
        check_call_leaves(self._original_model.model, leaves, spec, self._device_type())
        call = self._call(leaves, spec, self._recorded(leaves), self._wants_gradients)
        object.__setattr__(self, "_last", None if present is None else (present, call.with_leaves(())))
        return call

    def _call_guard(self, leaves: Sequence[Any], spec: Any) -> Any:
        """The guards of a call with plain tensors and constants; None if more decides."""
        if not (
            self._original_model.adopted and LEAF_ARGUMENT_TYPES.issuperset(map(type, leaves)) and is_plain_context()
        ):
            return None
        if any(isinstance(x, Tensor) and x.is_nested for x in leaves):  # without a shape
            return None
        given = [
            (x.shape, x.dtype, x.requires_grad, x.device, x.layout) if isinstance(x, Tensor) else constant_key(x)
            for x in leaves
        ]
        modes = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            self.training,
            self._original_model.modes,
            self._original_model.hooks,
        )
        return spec, given, self._original_model.seen(self._form), modes, autocast_state(), torch_defaults()

    @torch.no_grad()
    def _write_back(self, mutated: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> None:
        """Write mutated states back in place. ``written``: states that are inputs."""
        for fqn, new in mutated.items():
            old = written[fqn] if fqn in written else self.tensor(fqn)
            if fqn in written or (old.shape, old.dtype) == (new.shape, new.dtype):
                self._load(old, new)
            else:  # the forward assigned a new tensor
                self._original_model.replace(fqn, new.clone())

    def callable_submodule(self, part: nn.Module) -> Any:
        """A submodule that can be called alone: :func:`~autoshard.module.sharded_module.submodule_alone`."""
        if not (self._original_model.adopted or can_compile_first(self)):
            return part
        base = next(c for c in type(self).__mro__ if c.__module__.startswith("autoshard.module."))
        return submodule_alone(self, part, base)

    def call_submodule(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a submodule alone: of its own program; :class:`CaptureError` if the model must be compiled first."""
        path = next(path for path, other in self._original_model.parts.items() if other is part)
        if self._settings.inputs != "global":
            raise CaptureError(f"{path!r} is called alone, which needs inputs='global'. Call the full model")
        if self._between is not None:
            return self._between(args, kwargs, path)
        found = self.callable_submodule(part)
        if found is part:
            raise CaptureError(
                f"{path!r} is called alone, but what was asked of the full model (hints, like, plan, stages, objective, "
                "memory) decides its layouts. Call the full model first, or give its example_args to autoshard.compile"
            )
        found.training = part.training
        return found.forward(*args, **kwargs)

    def compile_for_generation(self, inputs: Tensor | None, kwargs: dict[str, Any]) -> None:
        """See :func:`~autoshard.module.sharded_module.compile_encoder_decoder`."""
        compile_encoder_decoder(self, inputs, kwargs)

    def _device_type(self) -> str | None:
        """Device type that inputs must have; None if inputs are moved there."""
        return (
            next((t.device.type for t in self._original_model.tensors()), None)
            if self._original_model.adopted
            else None
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradient accumulation: the backward of forwards inside skips the gradient reduction.

        The next backward of a forward outside reduces the accumulated ``.grad``, as with
        DistributedDataParallel. Until then gradients are Partial DTensors: ``full_gradients()``
        returns sums; optimizers and ``autoshard.clip_grad_norm_`` refuse them. Gradients of FSDP
        parameters are reduced by every backward. In one process gradients are full, and sums inside
        are not counted.
        """
        before = self._defer_reduction(True)
        try:
            yield
        finally:
            self._defer_reduction(before)

    def _defer_reduction(self, deferred: bool) -> bool:
        """Set whether forwards leave gradients as summands; returns the previous setting."""
        before = self._deferred
        object.__setattr__(self, "_deferred", deferred)
        return before

    def _step(self, executable: Executable, inputs: Mapping[str, Tensor]) -> tuple[list[Any], dict[str, Tensor]]:
        """Outputs of one step, and the mutated states."""
        names, micro = executable.compiled.source.inputs, executable.compiled.micro_batches
        run = partial(self._run if not executable.parts else self._run_all_stages, executable)
        if micro is None:
            return run([inputs[name] for name in names])
        inputs = self._gather_local_inputs(inputs)
        steps = MicroBatchRun(run, self._enter, self._defer_reduction, self._original_model.leaf_stand_ins, self.tensor)
        return steps(micro, inputs, names)

    def _gather_local_inputs(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gathered local inputs, for slicing into micro-batches; gradients are resharded."""
        return self._whole((), inputs)[1]

    def _enter(self, index: int, count: int) -> None:
        """Tell all ranks of this process which of ``count`` micro-batches runs."""
        raise NotImplementedError

    def _run(self, executable: Executable, inputs: list[Tensor]) -> tuple[list[Any], dict[str, Tensor]]:
        raise NotImplementedError

    def _run_all_stages(self, executable: Executable, inputs: list[Tensor]) -> tuple[list[Any], dict[str, Tensor]]:
        """As :meth:`_run`, for pipeline stages one after another."""
        return run_stages_in_order(executable, inputs, self._run)

    @collective_method
    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write ``rank_module.py``, ``{plan,inputs,lines}.json`` and ``rank<r>.safetensors``.

        The program is that of the latest call, as in :attr:`plan`: without a backward after an
        evaluation. With micro-batches or stages ``step.json`` is written, too. Run it without the
        model's code: ``torchrun --nproc-per-node N directory/rank_module.py``. Every rank calls
        ``save_rank_modules`` and writes its shard. Raises :class:`PlanError` if micro-batches need values of the
        full batch.
        """
        save_rank_modules(
            self._latest_executable(), self.local_tensors, Path(directory), alone="device_mesh" not in self.__dict__
        )

    def local_tensors(self, executable: Executable, rank: int) -> dict[str, Tensor]:
        """Detached local tensors that the rank module of ``rank`` reads, by original name."""
        raise NotImplementedError

    # --- state ---

    def meeting(self, what: str) -> AbstractContextManager[None]:
        """Inside, all ranks do ``what``: see :func:`~autoshard.module.programs.call_checks.collective_method`."""
        return contextlib.nullcontext()

    @collective_method
    def full_state_dict(self) -> dict[str, Tensor]:
        """Original name → full tensor (a copy), of all stages, for the original state dict. Collective."""
        return dict(self._full_entries())

    @collective_method
    def _cpu_state_dict(self, kept: bool) -> dict[str, Tensor]:
        """:meth:`full_state_dict` on the CPU, tied tensors once, or none unless ``kept``. Collective."""
        own, known, found = self.all_stages_state_dict(), dict[int, Tensor](), dict[str, Tensor]()
        for name, full in self._full_entries():  # one at a time
            if kept:
                found[name] = known.setdefault(id(own[name]), full.cpu())
        return found

    def _full_entries(self) -> Iterator[tuple[str, Tensor]]:
        return ((n, self._full(t.detach())) for n, t in self.state_dict(keep_vars=True).items())

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load full tensors by name. :class:`PlanError` if missing, unknown or misshapen."""
        own = self.state_dict(keep_vars=True)
        self._check_state(own, state)
        with torch.no_grad():
            for name, tensor in own.items():
                self._load(tensor, state[name])

    @staticmethod
    def _check_state(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Raise :class:`PlanError` for entries that are missing, unknown or misshapen."""
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unknown:
            raise PlanError(f"state dict does not fit: missing {missing[:5]}, unknown {unknown[:5]}")
        for name, tensor in own.items():
            if tuple(state[name].shape) != tuple(tensor.shape):
                raise PlanError(
                    f"state dict entry {name!r} has shape {list(state[name].shape)}, but the "
                    f"model has {list(tensor.shape)}"
                )

    @collective_method
    def full_gradients(self) -> dict[str, Tensor]:
        """Original parameter name → full gradient, where there is one. Collective."""
        return {n: self._full(p.grad) for n, p in self.named_parameters() if p.grad is not None}

    @property
    def is_staged(self) -> bool:
        """Whether this process holds the parameters of some pipeline stages only."""
        return False

    def unduplicated_gradients(self) -> list[Any]:
        """Gradients of this process; those of tied stages on one rank only."""
        return [p.grad for p in self.parameters() if p.grad is not None]

    def all_stages_state_dict(self) -> dict[str, Tensor]:
        """The state dict of all stages; entries of other processes have shape and dtype only."""
        return self.state_dict(keep_vars=True)

    def all_stages_parameters(self) -> Iterator[Tensor]:
        """All parameters of the model; those of other processes have shape and dtype only."""
        return map(self._original_model.tensor, self._original_model.parameters)

    def _full(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def _whole_buffer(self, name: str) -> Tensor:
        """See :meth:`Compiling._whole_buffer`."""
        return self._full(self.tensor(name).detach())

    def _load(self, tensor: Tensor, full: Tensor) -> None:
        tensor.copy_(full)

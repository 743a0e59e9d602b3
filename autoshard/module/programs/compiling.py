"""Compilation on demand: the programs of a module, and the tensors that they share."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.compiler import capture_graph, compile_graph
from autoshard.errors import CaptureError, PlanError, SharedStateError
from autoshard.initialise.deferred import materialise, recomputed_buffers, recording_of
from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh
from autoshard.module.inputs import InputLayouts, InputScope, local_layouts, report_global_inputs
from autoshard.module.model.original import (
    CallState,
    OriginalModel,
    any_requires_grad,
    check_call_context,
    meta_buffers,
    non_persistent_buffers,
)
from autoshard.module.model.parameters import carry_attributes, mark_moved_from, meta_parameter
from autoshard.module.model.submodules import (
    FixedModule,
    kept_attributes,
    sharded_class,
    share_wrapper_names,
    skip_in_dynamo,
)
from autoshard.module.programs.call_checks import CallLock, with_changed_dtypes
from autoshard.module.programs.executable import (
    Executable,
    ModuleCall,
    input_descriptions,
    key_difference,
    note_inference_layouts,
)
from autoshard.module.programs.kv_cache import is_state_output
from autoshard.passes.capture.exported.plain_objects import plain_containers
from autoshard.passes.capture.exported.pytrees import flatten_registered, in_signature_order
from autoshard.passes.capture.exported.snapshots import parameters_of
from autoshard.passes.capture.exported.symbolic_shapes import Dynamic, with_static_fallback
from autoshard.passes.capture.exported.tensor_attributes import (
    are_attributes_changed,
    attribute_values,
    parameters_and_buffers,
    with_user_class,
)
from autoshard.passes.capture.refusals.checks import check_example
from autoshard.passes.capture.specialization.eager_semantics import with_caller_modes
from autoshard.passes.ir.graph import Graph, Input
from autoshard.passes.microbatch import check_lengths
from autoshard.passes.propagate.named_strategies import expand_tp_plan
from autoshard.plans.options import CallArguments, CompileOptions, KnownLayouts
from autoshard.plans.plan import Compiled, Plan
from autoshard.plans.stages import mesh_without_axis
from autoshard.runtime.transport.torch_state import without_autocast
from autoshard.serving import with_serving_layouts

log = logging.getLogger("autoshard")
program_log = logging.getLogger("autoshard.programs")


Parts = str | Sequence[str] | None
"""``"auto"``: the largest modules that can be captured; patterns of modules; or None: one graph or an error"""


MAX_PART_PROGRAMS = 8
"""most programs of a part in one state: if each call needs another, compiling takes longer than running eagerly"""


@dataclass(frozen=True)
class CompileSettings:
    """Options of :func:`autoshard.compile`."""

    opts: CompileOptions = field(default_factory=CompileOptions)
    training: bool | None = None
    gather_outputs: bool | None = None
    dynamic: Dynamic = False
    inputs: InputScope = "global"
    parts: Parts = "auto"
    kept_out: tuple[str, ...] = ()
    """paths of modules that :func:`autoshard.eager` marks"""


def _warn_of_idle_axes(title: str, plan: Plan) -> None:
    """Warn, in one line with the way out, of mesh axes along which no work is divided."""
    idle, mesh = plan.idle_axes, plan.mesh
    if not idle:
        return
    all_idle = math.prod(map(mesh.size_of, idle)) == mesh.size
    what = f": all {mesh.size} ranks compute the same" if all_idle else f" along {mesh.text_of(idle)}"
    elsewhere = ", or plan for the machine that will run it: Mesh({…}, hardware='h100')" if mesh.hardware.cpu else ""
    _warn_once(
        f"{title}: no work is divided{what} (mesh {mesh}, planned for {mesh.hardware.name}; plan.notes says why). "
        f"Use a larger batch, ask for it with like={{{idle[0]!r}: 'fsdp'}}{elsewhere}"
    )


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


class CompilingModule(FixedModule):
    """A module that compiles a program per kind of call; the first adopts the model's tensors."""

    mesh: Mesh
    _settings: CompileSettings
    _original_model: OriginalModel
    _title: str
    _call_lock: CallLock
    _executables: dict[Any, Executable]
    _latest: Executable | None
    _programs: list[tuple[Any, Graph, Compiled]]
    """guards and program of each graph"""
    _program_mesh: Mesh
    """the mesh that programs run on: ``mesh`` without the pipeline axis"""
    _parameter_layouts: dict[str, Layout] | None
    _state_layouts: Mapping[str, Layout] | None
    """layouts of KV caches from a joint search over prompt and token calls"""
    _stage_homes: Mapping[str, tuple[int, ...]] | None
    """pipeline stages that hold each parameter and buffer"""
    _last: tuple[Any, ModuleCall] | None
    """guards of the last call, and that call without data"""
    _inner_modules: dict[str, Any]
    """submodules that were called alone, by path"""
    _between: Any
    """the code between the parts; None while the model was always one graph"""
    _runs_in_parts: bool
    """whether the last call ran in parts"""
    _part_of: Any
    """of a part: the code that calls it, and its path; else None"""
    has_local_tensors = False
    """whether this process holds the tensors of one rank"""
    _layout_of: dict[str, Layout]
    """by each name of a parameter, and of a sharded buffer"""

    def __init__(self, model: nn.Module, mesh: Mesh, settings: CompileSettings) -> None:
        super().__init__()
        skip_in_dynamo()
        self.__dict__.update(kept_attributes(model))
        share_wrapper_names(self, model)
        set_ = object.__setattr__
        set_(self, "mesh", mesh)
        set_(
            self,
            "_program_mesh",
            mesh if settings.opts.stages is None else mesh_without_axis(mesh, settings.opts.stages),
        )
        set_(self, "_settings", settings)
        set_(self, "_original_model", OriginalModel(model))
        set_(self, "_title", type(model).__name__)
        set_(self, "_call_lock", CallLock())
        set_(self, "_executables", {})
        set_(self, "_latest", None)
        set_(self, "_programs", [])
        set_(self, "_parameter_layouts", None)
        set_(self, "_inner_modules", {})
        set_(self, "_stage_homes", None)
        set_(self, "_state_layouts", None)
        set_(self, "_last", None)
        set_(self, "_between", None)
        set_(self, "_runs_in_parts", False)
        set_(self, "_part_of", None)
        set_(self, "__class__", sharded_class(type(self), type(model), CompilingModule))
        self._show()

    def _show(self) -> None:
        """Take over modules, tensors and mode of the root part."""
        tensors = "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"
        for name in (*tensors, "_original", "_known", "training"):
            self.__dict__[name] = self._original_model.root.__dict__[name]
        for part in self._original_model.parts.values():
            vars(part).setdefault("_owner", weakref.ref(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with its own tensors; programs are shared."""
        memo |= {id(x): x for x in self._shared()}
        memo[id(self._executables)] = dict(self._executables)
        memo |= {id(self._inner_modules): {}, id(self._last): None}
        made = super().__deepcopy__(memo)
        for part in made._original_model.parts.values():
            vars(part)["_owner"] = weakref.ref(made)
        return made

    def _alone(self) -> None:
        """Forget loaded programs: this becomes a submodule called alone."""

    def _shared(self) -> list[Any]:
        """What copies share with this module."""
        return [
            self.mesh,
            self._program_mesh,
            self._settings,
            self._latest,
            self._programs,
            self._between,
            self._layout_of if self._original_model.adopted else None,
        ]

    # --- calls and their programs ---

    def specialise(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], number: int = 0, recorded: bool | None = None
    ) -> Executable:
        """Compile for these arguments and the present :class:`CallState`, unless a program serves
        them. ``number``: programs that were for other integers in tensors. ``recorded``: record
        gradients; default: ``training`` of :func:`autoshard.compile`."""
        with self._call_lock:
            args, kwargs = tuple(args), in_signature_order(self._original_model.model.forward, dict(kwargs))
            leaves, spec = flatten_registered((args, kwargs))
            check_example(self._original_model.model, (args, kwargs))
            training = self.training if self._settings.training is None else self._settings.training
            wanted = training if recorded is None else recorded
            recorded = (
                wanted and any_requires_grad(leaves, self._original_model.tensors()) if recorded is None else recorded
            )
            return self._serving(self._call(leaves, spec, recorded, wanted), number)

    def _call(self, leaves: Sequence[Any], spec: Any, recorded: bool, grad: bool) -> ModuleCall:
        """The call with these leaves in the present :class:`CallState`; ``grad``: its grad mode."""
        leaves, cuts = self._inputs_as_called(leaves, spec)
        self._renew()
        return ModuleCall(leaves, spec, self._state(leaves, recorded, grad), cuts)

    def _renew(self) -> None:
        """Adopt modules that the user added to the model before its first call."""
        if self._original_model.renewed():
            self._inner_modules.clear()
            self._show()

    def _recorded(self, leaves: Sequence[Any]) -> bool:
        """Whether a call records gradients; only then its program has a backward."""
        return self._wants_gradients and any_requires_grad(leaves, self._original_model.tensors())

    @property
    def _wants_gradients(self) -> bool:
        return torch.is_grad_enabled() and self._settings.training is not False

    def _state(self, leaves: Sequence[Any], recorded: bool, grad: bool) -> CallState:
        original = self._original_model
        if original.root.training != self.training:
            original.root.training = self.training
        check_call_context(leaves, original.tensors)
        return original.state(recorded, grad, self._form)

    def _form(self, tensor: Tensor) -> tuple[Any, ...]:
        """The guards of a parameter or buffer."""
        return tuple(tensor.shape), tensor.dtype, tensor.device.type

    def _serving(self, call: ModuleCall, number: int) -> Executable:
        """The program for this call, compiled if missing."""
        found = self._program_for(call, number)
        if found is None:
            if known := [key for key in self._executables if isinstance(key[-2], CallState)]:
                others = key_difference(call.key(number), known[-1])
                if self._part_of is not None and sum(key[-2] == call.state for key in known) >= MAX_PART_PROGRAMS:
                    said = CaptureError(
                        f"{self._title} has {MAX_PART_PROGRAMS} programs, and this call needs one for other {others}"
                    )
                    said.untraceable = True
                    raise said
                program_log.info("another program is compiled, for other %s", others)
            try:
                # Tensors made here outlive the call.
                with with_caller_modes(call.state.grad, call.state.inference):
                    found = self._build(call, call.key(exactly=False))
            except CaptureError as error:
                said = with_changed_dtypes(error, self.programs, call.leaves)
                said.untraceable, said.is_internal = not isinstance(error, SharedStateError), error.is_internal
                raise said from (error.__cause__ if said is error else error)  # never its own cause
            adopted = replace(call, state=self._state(call.leaves, call.state.recorded, call.state.grad))
            if found.structure is not None:
                found.structure = adopted.key(exactly=False)
            key = adopted.key(number)
            if key in self._executables:  # outdated; kept, as its loaded state is keyed by id
                self._executables[key, len(self._executables)] = self._executables.pop(key)
            self._executables[key] = found
        object.__setattr__(self, "_latest", found)
        return found

    def _enables(self, call: ModuleCall, executable: Executable) -> bool:
        """Whether the forward itself enables gradients in a no-grad call, as in eager."""
        off = call.state.recorded or call.state.inference or self._settings.training is False
        return (
            executable.graph.enables_grad and not off and any_requires_grad(call.leaves, self._original_model.tensors())
        )

    def _program_for(self, call: ModuleCall, number: int) -> Executable | None:
        """The current program for this call, or None; those with symbolic lengths come first."""
        if number in call.programs and not self._is_outdated(call.programs[number]):
            return call.programs[number]
        for program in self._executables.values() if not number else ():
            if program.structure is None or self._is_outdated(program):
                continue
            why = program.refuses(call.key(exactly=False), call.leaves)
            if not why:
                return program
            program_log.info("a program does not fit this call: %s", why)
        found = self._executables.get(call.key(number))
        return None if found is None or self._is_outdated(found) else found

    def _is_outdated(self, program: Executable) -> bool:
        """Whether outside tensors or parameter attributes that it read have changed since."""
        return program.graph.is_outdated or are_attributes_changed(program.attached, self.tensor)

    @property
    def programs(self) -> list[Executable]:
        """All programs, in order of compilation."""
        return list({id(x): x for x in self._executables.values()}.values())

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it is ours to trace the model
    def _build(self, call: ModuleCall, structure: Any) -> Executable:
        """Compile with symbolic lengths if asked to; if refused, for the shapes of this call."""
        if call.state.recorded:
            check_lengths(self._settings.opts.micro_batches, bool(self._settings.dynamic))
        return with_static_fallback(
            self._settings.dynamic, lambda lengths: self._built(call, structure if lengths else None)
        )

    def _built(self, call: ModuleCall, structure: Any) -> Executable:
        settings, first = self._settings, self._parameter_layouts is None
        dynamic = settings.dynamic if structure is not None else False
        stages, parts = settings.opts.stages is not None, settings.opts.micro_batches != 1
        # Micro-batches slice the global batch; so do stages in training.
        of_whole = (parts and stages) or (call.state.recorded and (parts or stages))
        args, kwargs = call.arguments
        inputs = self._input_layouts(args, kwargs)
        opts = settings.opts if first else replace(settings.opts, plan=None)
        inputs_known = () if of_whole else inputs
        known = KnownLayouts(self._parameter_layouts, self._state_layouts, inputs_known, self._stage_homes)
        if first and self._inner_modules:
            known = replace(known, parameters={name: layout for name, (_, layout) in self._inside().items()})
        if first and self._part_of is not None:
            between, path = self._part_of
            known = replace(known, parameters=between.fixed_layouts(path, self) or None)
        if self._part_of is not None:
            between, path = self._part_of
            opts = between.limits.applied(opts, path, call.state.recorded)
        args, kwargs = self._whole(args, kwargs)
        with self._original_model.as_it_is(self._check, self._whole_buffer) as model:
            if first:
                example = args, kwargs
                opts, known = with_serving_layouts(model, self._program_mesh, example, opts, known, call.state.recorded)
            with report_global_inputs(model, args, kwargs, inputs):
                found = self._compiled(
                    model, (args, kwargs), opts, known, training=call.state.recorded, dynamic=dynamic
                )
        kept = dict(self._parameter_layouts or found.parameter_layouts)
        if first:
            object.__setattr__(self, "_state_layouts", known.states)
            object.__setattr__(self, "_stage_homes", None if found.pipeline is None else found.pipeline.homes)
            with without_autocast():
                if self._part_of is not None:
                    self._part_of[0].laid_out(self._part_of[1], kept)
                    self._layout_of.update(kept)
                else:
                    self._adopt(self._original_model.model, found.graph.inputs, kept)
        self._adopt_attributes(found.graph, found.parameter_layouts)
        others = {name: self._layout_of.get(name, Layout(self._program_mesh)) for name in self._original_model.slots}
        object.__setattr__(self, "_parameter_layouts", {**others, **kept})
        outputs = is_state_output(found.graph, inspect.signature(self._original_model.model.forward).parameters)
        executable = Executable.of(found, input_descriptions(found.graph, args, kwargs), outputs, structure)
        self._original_model.guards.note(found.graph.fields)
        object.__setattr__(self, "_last", None)  # its key does not know these fields
        executable.attached = attribute_values(found.graph.attached, self.tensor)
        if structure is not None and (why := executable.refuses(structure, call.leaves)):
            raise PlanError(f"the program does not fit the call that it was compiled for: {why}")
        return executable

    def _stays_sharded(self, executable: Executable, number: int) -> bool:
        """Whether an output stays sharded: ``gather_outputs``, else state in inference."""
        asked, training = self._settings.gather_outputs, executable.graph.training
        if asked is not None or training:
            return not asked
        return bool(executable.carried) and executable.carried[number]

    def _compiled(
        self, model: nn.Module, example: CallArguments, opts: CompileOptions, known: KnownLayouts, **options: Any
    ) -> Compiled:
        """Compile for these arguments. ``options``: see :func:`capture`."""
        is_part = self._part_of is not None
        graph = capture_graph(model, *example, precision=opts.mixed_precision, is_part=is_part, **options)
        opts = replace(opts, like=expand_tp_plan(model, opts.like))
        found = self._shared_program(graph, known, lambda: compile_graph(graph, self.mesh, opts, known))
        first = self._parameter_layouts is None and self._part_of is None
        if first and opts.like != "replicate" and os.environ.get("RANK", "0") == "0":
            _warn_of_idle_axes(self._title, found.plan)
        return note_inference_layouts(self._executables, found)

    def _shared_program(self, graph: Graph, known: KnownLayouts, make: Callable[[], Compiled]) -> Compiled:
        """``make()``, or the program there is: of an equal graph, or with unread attributes set."""
        if graph.outside or graph.attached:
            return make()
        of_part, programs = self._part_of is not None, self._programs
        if of_part:
            programs = self._part_of[0].programs.setdefault(str(graph), [])
        gradients = tuple(t.grad for t in graph.types.values())  # not in the text
        key = gradients, repr(known if of_part else known.inputs)
        for of, captured, found in programs if of_part or self._original_model.guards.changes() else ():
            own, others = graph.constants, captured.constants
            equal = of == key and (of_part or str(graph) == str(captured)) and own.keys() == others.keys()
            if equal and all(torch.equal(own[n], others[n]) for n in own):
                return replace(found, graph=graph) if of_part else found
        programs.append((key, graph, make()))
        return programs[-1][-1]

    def _whole_buffer(self, name: str) -> Tensor:
        """The full buffer of this original name. Collective if it is sharded."""
        raise NotImplementedError

    # --- inputs ---

    def _inputs_as_called(
        self, leaves: Sequence[Any], spec: Any, cuts: InputLayouts | None = None
    ) -> tuple[Sequence[Any], InputLayouts]:
        """(argument leaves with global shapes, local ones as DTensors; their layouts)."""
        return leaves, ()

    def _input_layouts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> InputLayouts:
        """Per argument leaf the layout it comes in; None, or an empty tuple: global."""
        s = self._settings
        return local_layouts(self._original_model.model, self._program_mesh, args, kwargs, s.inputs, s.opts.hints)

    def _whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as plain tensors, for capture."""
        return tuple(args), dict(kwargs)

    # --- tensors ---

    def _check(self, name: str, tensor: Tensor) -> None:
        """Raise :class:`CaptureError` for a parameter or buffer that programs cannot take."""

    def relay(self, layouts: Mapping[str, Layout], kept: Mapping[str, Tensor] | None = None) -> None:
        """Bring adopted tensors, which are replicated, into these layouts, for all modules that
        hold them. ``kept``: full tensors, of sharded ones."""
        self._layout_of.update(layouts)
        object.__setattr__(self, "_parameter_layouts", {**(self._parameter_layouts or {}), **layouts})

    def gathered_inputs(self, leaves: Sequence[Any], spec: Any) -> Sequence[Any]:
        """Argument leaves as plain code reads them: global and plain."""
        return leaves

    def same_draws(self) -> AbstractContextManager[None]:
        """Inside, plain code draws the same random numbers on all ranks: those of rank 0."""
        return contextlib.nullcontext()

    def _adopt(self, model: nn.Module, inputs: Sequence[Input], layouts: Mapping[str, Layout]) -> None:
        """Take over the model's tensors by name; only a meta skeleton stays for captures."""
        taken: dict[int, Tensor] = {}
        inside = {name: held for name, (held, _) in self._inside().items()}
        buffers = {i.fqn for i in inputs if i.kind == "buffer"}
        layouts = {n: x for n, x in layouts.items() if n not in buffers or x.axes_with(Shard)}
        names = {alias: i.fqn for i in inputs for alias in i.aliases}
        layouts |= {alias: layouts[name] for alias, name in names.items() if name in layouts}
        object.__setattr__(self, "_layout_of", layouts)
        initial = self._initial(model, layouts)
        self._original_model.note_origins()
        for name, p in parameters_of(model).items():
            if not self._holds(names.get(name, name)):
                if id(p) not in taken:
                    taken[id(p)] = meta_parameter(p)
                self._original_model.put_elsewhere(name, taken[id(p)], parameter=True)
                continue
            if id(p) not in taken:
                made = inside[name] if name in inside else self._parameter(p, layouts[name], initial.get(name))
                taken[id(p)] = with_user_class(made, p)
            self._original_model.put(name, taken[id(p)], parameter=True)
        transient = non_persistent_buffers(model)
        found = recomputed_buffers(model, absent := meta_buffers(model, transient - initial.keys()))
        initial |= {n: self._initial_shard(full, layouts.get(n)) for n, full in found.items()}
        for name, b in model.named_buffers(remove_duplicate=False):
            if not self._holds(names.get(name, name)):
                if id(b) not in taken:
                    taken[id(b)] = with_user_class(b.detach().to("meta"), b)
                self._original_model.put_elsewhere(name, taken[id(b)], parameter=False)
                continue
            if id(b) not in taken:
                made = inside[name] if name in inside else self._buffer(b, layouts.get(name), initial.get(name))
                taken[id(b)] = with_user_class(made, b)
            self._original_model.put(name, taken[id(b)], parameter=False, persistent=name not in transient)
        carry_attributes(parameters_and_buffers(model), taken, {**self._original_model.by_original(), id(model): self})
        mark_moved_from(model, inside, self)
        self._original_model.adopt(
            [name for name in absent if name not in initial and self._holds(names.get(name, name))]
        )
        own, root = self.__dict__, self._original_model.root
        own.update({n: x for n, x in plain_containers(root).items() if n in own})

    def _inside(self) -> dict[str, tuple[Tensor, Layout]]:
        """Tensors and layouts of submodules that were compiled first, by each name here."""
        model = self._original_model.model
        named = {**parameters_of(model), **dict(model.named_buffers(remove_duplicate=False))}
        held = {}
        for path, part in self._inner_modules.items():
            for own in part._original_model.slots:
                if (name := f"{path}.{own}") in named:
                    part._original_model.check_unchanged(own, named[name], name)
                    held[id(named[name])] = part._original_model.tensor(own), part._parameter_layouts[own]
        return {name: held[id(t)] for name, t in named.items() if id(t) in held}

    def _adopt_attributes(self, graph: Graph, layouts: Mapping[str, Layout]) -> None:
        """Adopt plain attributes that the forward writes; they are no constants any more."""
        buffers = (i.fqn for i in graph.of_kind("buffer"))
        found = self._original_model.released(
            fqn
            for fqn in buffers
            if fqn not in self._original_model.slots and fqn not in self._original_model.elsewhere
        )
        for name, tensor in self._agree_on_tensors(found).items():
            if not self._holds(name):
                self._original_model.put_elsewhere(name, tensor.detach().to("meta"), parameter=False)
                continue
            layout = layouts.get(name)
            if layout is not None and layout.axes_with(Shard):
                self._layout_of[name] = layout
            self._original_model.put(
                name, self._buffer(tensor, self._layout_of.get(name), None), parameter=False, persistent=False
            )

    def _agree_on_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of rank 0 on every rank."""
        return tensors

    def _initial(self, model: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, Tensor]:
        """Initial values of a ``deferred_init`` model (local shards of parameters); else none."""
        if recording_of(model) is None:
            if any(p.is_meta for p in model.parameters()):
                log.warning("%s is on the meta device: its weights are zeros until they are loaded", self._title)
            return {}

        def kept(name: str, full: Tensor) -> Tensor:
            return self._initial_shard(full, layouts.get(name)) if self._holds(name) else full.new_empty(0)

        return materialise(model, self._seed(), kept)

    def _holds(self, name: str) -> bool:
        """Whether this process holds this parameter or buffer: not those of other stages."""
        return True

    def _seed(self) -> int:
        """The seed of the default generator, equal on every rank."""
        return torch.initial_seed()

    def _initial_shard(self, full: Tensor, layout: Layout | None) -> Tensor:
        """This process's part of an initial value; ``layout`` is None for replicated buffers."""
        return full

    def _parameter(self, p: nn.Parameter, layout: Layout, initial: Tensor | None) -> nn.Parameter:
        raise NotImplementedError

    def _buffer(self, b: Tensor, layout: Layout | None, initial: Tensor | None) -> Tensor:
        """``layout``: of a sharded buffer."""
        raise NotImplementedError

    def tensor(self, fqn: str) -> Any:
        """The parameter or buffer of this name, even if the class has such an attribute."""
        return self._original_model.tensor(fqn)

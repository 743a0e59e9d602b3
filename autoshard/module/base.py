"""The module a user gets back: global inputs, global outputs, parameters under their original names."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import nn

from autoshard.compiler import Compiled, compiled
from autoshard.errors import CaptureError, PlanError, RuleError, RuntimeMismatchError
from autoshard.initialise.deferred import materialise, recording_of
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.module.executable import Executable, described, load_source, signature_of
from autoshard.module.original import Original
from autoshard.module.parts import Fixed
from autoshard.module.saving import save
from autoshard.module.state import State, check_call, requires_grad, state_of
from autoshard.passes.capture.exported.lengths import Dynamic
from autoshard.passes.ir.graph import Graph
from autoshard.plans.plan import Plan
from autoshard.plans.record import Collective
from autoshard.runtime.autocast import without_autocast
from autoshard.runtime.exactly import is_of_other_values
from autoshard.runtime.module import RankModule
from autoshard.wishes import Wishes

log = logging.getLogger("autoshard")


@dataclass(frozen=True)
class Settings:
    """What the user asked of :func:`autoshard.compile`."""

    wishes: Wishes = field(default_factory=Wishes)
    training: bool | None = None
    gather_outputs: bool | None = None
    dynamic: Dynamic = False


class ShardedModule(Fixed):
    """A model compiled for a mesh; made by :func:`autoshard.compile`.

    Takes the model's own arguments (global tensors, the same on every rank) and returns its own output type.
    ``named_parameters()`` bear the original names. ``plan``, ``source`` and ``collectives`` say what was decided.
    """

    mesh: Mesh
    _settings: Settings
    _of: Original
    _title: str
    _executables: dict[Any, Executable]
    _latest: Executable | None
    _parameter_layouts: dict[str, Layout] | None
    _layout_of: dict[str, Layout]
    """by each name of a parameter"""

    def __init__(self, model: nn.Module, mesh: Mesh, settings: Settings) -> None:
        super().__init__()
        set_ = object.__setattr__
        set_(self, "mesh", mesh)
        set_(self, "_settings", settings)
        set_(self, "_of", Original(model))
        set_(self, "_title", type(model).__name__)
        set_(self, "_executables", {})
        set_(self, "_latest", None)
        set_(self, "_parameter_layouts", None)
        self._show()

    def _show(self) -> None:
        """Have the modules and tensors of the root part, and its mode."""
        for name in (
            "_parameters",
            "_buffers",
            "_modules",
            "_non_persistent_buffers_set",
            "_original",
            "_known",
            "training",
        ):
            self.__dict__[name] = self._of.root.__dict__[name]

    def train(self, mode: bool = True) -> Self:
        """As :meth:`torch.nn.Module.train`, or as the model's own class has it."""
        self._of.root.train(mode)
        self.training = self._of.root.training
        return self

    # --- what was decided ---

    def _decided(self) -> Executable:
        if self._latest is None:
            raise PlanError("nothing is compiled yet: call the module once, or give example_args to autoshard.compile")
        return self._latest

    @property
    def plan(self) -> Plan:
        """The plan of the latest compiled input shapes."""
        return self._decided().compiled.plan

    @property
    def source(self) -> str:
        """The generated Python source that every rank runs."""
        return self._decided().compiled.source.text

    @property
    def collectives(self) -> list[Collective]:
        """Every collective of one step: forward in program order, then backward."""
        return list(self.plan.collectives)

    def visualize(self, path: str | os.PathLike[str]) -> None:
        """Draw the plan into ``path``: .html, .dot, .svg, .json, .txt or .trace.json."""
        self.plan.visualize(path)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As :meth:`torch.nn.Module.named_parameters`, original names. Raises :class:`PlanError` before compilation."""
        self._decided()
        return super().named_parameters(*args, **kwargs)

    def __str__(self) -> str:
        return str(self.plan) if self._latest is not None else f"ShardedModule({self._title}, not compiled yet)"

    __repr__ = __str__

    # --- compiling ---

    def specialise(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], number: int = 0, recorded: bool | None = None
    ) -> Executable:
        """Compile for these arguments and the present :class:`State`, unless a program serves them.

        ``number``: of the programs for these that were tried and are for other integers in tensors. ``recorded``:
        whether gradients are recorded (default: as the ``training`` of :func:`autoshard.compile` says).
        """
        found = self._specialised(args, kwargs, number, recorded)
        object.__setattr__(self, "_latest", found)
        return found

    def _recorded(self, leaves: Sequence[Any]) -> bool:
        """Whether a call with these arguments records gradients; only then its program has a backward."""
        wanted = torch.is_grad_enabled() and self._settings.training is not False
        return wanted and requires_grad(leaves, self._of.held().values())

    def _state(self, leaves: Sequence[Any], recorded: bool | None) -> State:
        original = self._of
        original.root.training = self.training
        held = original.held()
        if recorded is None:
            wanted = self.training if self._settings.training is None else self._settings.training
            recorded = wanted and requires_grad(leaves, held.values())
        check_call([x for x in (*leaves, *held.values()) if isinstance(x, torch.Tensor)])
        if not original.adopted:  # its weights may be elsewhere, or nowhere
            return state_of(recorded, original.modes, (), ())
        trained = tuple(held[name].requires_grad for name in original.parameters)
        return state_of(recorded, original.modes, trained, tuple(self._form(t) for t in held.values()))

    def _form(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """What programs depend on of a parameter or buffer."""
        return tuple(tensor.shape), tensor.dtype, tensor.device.type

    def _specialised(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], number: int, recorded: bool | None
    ) -> Executable:
        if self._of.renewed():
            self._show()
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        state = self._state(leaves, recorded)
        key = self._key(leaves, spec, state, number)
        if key not in self._executables:
            structure = self._key(leaves, spec, state, exactly=False)
            found = self._serving(structure, leaves)
            if found is None:
                with torch.inference_mode(False):  # what is made here outlives the call
                    found = self._build(args, kwargs, state.recorded, structure)
                adopted = self._state(leaves, state.recorded)
                key = self._key(leaves, spec, adopted, number)
                if found.structure is not None:
                    found.structure = self._key(leaves, spec, adopted, exactly=False)
            self._executables[key] = found
        return self._executables[key]

    def _key(self, leaves: Sequence[Any], spec: Any, state: State, number: int = 0, exactly: bool = True) -> Any:
        """What a program is compiled for; the ranks compare it in every call."""
        return (*(signature_of(leaf, state.recorded, exactly) for leaf in leaves), spec, state, number)

    @property
    def programs(self) -> list[Executable]:
        """Every program compiled so far, in order."""
        return list({id(x): x for x in self._executables.values()}.values())

    def _serving(self, structure: Any, leaves: Sequence[Any]) -> Executable | None:
        """A program with symbolic lengths that holds for these leaves."""
        for found in self.programs:
            why = found.refuses(structure, leaves)
            if not why:
                return found
            logging.getLogger("autoshard.programs").info("a program does not serve this call: %s", why)
        return None

    def _build(self, args: Sequence[Any], kwargs: Mapping[str, Any], recorded: bool, structure: Any) -> Executable:
        """Compile with symbolic lengths where asked to; if that is refused, for the shapes of these arguments."""
        if self._settings.dynamic:
            try:
                return self._built(args, kwargs, recorded, structure)
            except (CaptureError, PlanError, RuleError) as error:
                log.warning("no program with symbolic lengths, compiling for these shapes alone: %s", error)
        return self._built(args, kwargs, recorded, None)

    def _built(self, args: Sequence[Any], kwargs: Mapping[str, Any], recorded: bool, structure: Any) -> Executable:
        settings = self._settings
        dynamic = settings.dynamic if structure is not None else False
        first = self._parameter_layouts is None
        wishes = settings.wishes if first else replace(settings.wishes, plan=None, parameters=self._parameter_layouts)
        with self._of.as_it_is(self._check) as model:
            found = self._compiled(model, args, kwargs, wishes, training=recorded, dynamic=dynamic)
        if first:
            parameters = {i.fqn: found.plan.layouts[i.fqn] for i in found.graph.inputs if i.kind == "parameter"}
            with without_autocast():
                self._adopt(self._of.model, found.graph, parameters)
            object.__setattr__(self, "_parameter_layouts", parameters)
        rank_module = load_source(found.source.text, found.source.modules)
        return Executable(found, rank_module, described(found.graph, args, kwargs), structure)

    def _compiled(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], wishes: Wishes, **options: Any
    ) -> Compiled:
        """All stages for these arguments. ``options``: see :func:`capture`."""
        return compiled(model, self.mesh, args, kwargs, wishes, title=self._title, **options)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise :class:`CaptureError` for a parameter or buffer that programs cannot take."""

    def _adopt(self, model: nn.Module, graph: Graph, layouts: Mapping[str, Layout]) -> None:
        """Take the model's tensors over under their names, then keep only a meta skeleton for later captures."""
        taken: dict[int, torch.Tensor] = {}
        layouts = dict(layouts)
        names = {alias: i.fqn for i in graph.inputs for alias in i.aliases}
        layouts |= {alias: layouts[name] for alias, name in names.items() if name in layouts}
        object.__setattr__(self, "_layout_of", layouts)
        initial = self._initial(model, layouts)
        for name, p in model.named_parameters(remove_duplicate=False):
            if id(p) not in taken:
                taken[id(p)] = self._parameter(p, layouts[name], initial.get(name))
            self._of.put(name, taken[id(p)], parameter=True)
        transient = {
            f"{prefix}.{n}" if prefix else n
            for prefix, module in model.named_modules()
            for n in module._non_persistent_buffers_set
        }
        for name, b in model.named_buffers(remove_duplicate=False):
            if id(b) not in taken:
                taken[id(b)] = self._buffer(b, initial.get(name))
            self._of.put(name, taken[id(b)], parameter=False, persistent=name not in transient)
        self._of.adopt()

    def _initial(self, model: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, torch.Tensor]:
        """Initial values (this rank's shards of parameters) of a model from ``deferred_init``; else nothing."""
        if recording_of(model) is None:
            if any(p.is_meta for p in model.parameters()):
                log.warning("%s is on the meta device: its weights are zeros until they are loaded", self._title)
            return {}
        return materialise(model, self._seed(), lambda name, full: self._kept(full, layouts.get(name)))

    def _seed(self) -> int:
        """The seed of the default generator, the same on every rank."""
        return torch.initial_seed()

    def _kept(self, full: torch.Tensor, layout: Layout | None) -> torch.Tensor:
        """What this process keeps of a full initial value; ``layout`` is None for buffers."""
        return full

    def tensor(self, fqn: str) -> Any:
        """The parameter or buffer of this original name, also where an attribute of this class has that name."""
        return self._of.tensor(fqn)

    # --- running ---

    def rank_modules(self) -> list[RankModule]:
        """What the rank runs that runs in this thread, of every compilation that ran: its own rank, or rank 0."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on the mesh."""

        if torch.get_default_device().type == "meta":
            raise CaptureError(
                "the default device is meta, which has no data: call the module outside of torch.device('meta')"
            )
        recorded = self._recorded(pytree.tree_leaves((args, kwargs)))

        def serve(number: int) -> tuple[list[Any], dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
            executable = self.specialise(args, kwargs, number, recorded)
            own, named, written = executable.apart(args, kwargs)
            with without_autocast(), contextlib.nullcontext() if recorded else torch.no_grad():
                leaves, mutated = self._run(executable, self._flat_inputs(executable, own, named))
            return executable.as_typed(leaves), mutated, written, executable.graph.out_spec

        leaves, mutated, written, out_spec = _first_that_serves(serve)
        with torch.no_grad():
            for fqn, new in mutated.items():
                (written[fqn] if fqn in written else self.tensor(fqn)).copy_(new)
        return pytree.tree_unflatten(leaves, out_spec)

    def _flat_inputs(
        self, executable: Executable, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """Tensors in the order the rank module takes them."""
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        by_name = {n: leaf for n, leaf in zip(executable.graph.flat_inputs, leaves, strict=True) if n is not None}
        return [by_name[name] for name in executable.compiled.source.inputs]

    def _run(self, executable: Executable, inputs: list[torch.Tensor]) -> tuple[list[Any], dict[str, torch.Tensor]]:
        raise NotImplementedError

    def _parameter(self, p: nn.Parameter, layout: Layout, initial: torch.Tensor | None) -> nn.Parameter:
        raise NotImplementedError

    def _buffer(self, b: torch.Tensor, initial: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write ``rank_module.py``, ``plan.json``, ``inputs.json``, ``lines.json`` and ``rank<r>.safetensors``.

        ``torchrun --nproc-per-node N directory/rank_module.py`` runs it without the original model's code.
        Under torch.distributed every rank calls it and writes its own shard.
        """
        save(self._decided(), self.local_tensors, Path(directory), alone=not hasattr(self, "device_mesh"))

    def local_tensors(self, executable: Executable, rank: int) -> dict[str, torch.Tensor]:
        """Every tensor that the rank module of ``rank`` reads, by original name, detached."""
        raise NotImplementedError

    # --- state ---

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Original name → full tensor (a copy), for every entry of the original state dict. Collective."""
        return {n: self._full(t.detach()) for n, t in self.state_dict(keep_vars=True).items()}

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load full tensors by original name. Raises :class:`PlanError` for missing, unknown or misshapen entries."""
        own = self.state_dict(keep_vars=True)
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unknown:
            raise PlanError(f"state dict does not fit: missing {missing[:5]}, unknown {unknown[:5]}")
        for name, tensor in own.items():
            if tuple(state[name].shape) != tuple(tensor.shape):
                raise PlanError(
                    f"state dict entry {name!r} has shape {list(state[name].shape)}, the model {list(tensor.shape)}"
                )
        with torch.no_grad():
            for name, tensor in own.items():
                self._load(tensor, state[name])

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Original parameter name → full gradient (parameters without one are left out). Collective."""
        return {n: self._full(p.grad) for n, p in self.named_parameters() if p.grad is not None}

    def _full(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def _load(self, tensor: torch.Tensor, full: torch.Tensor) -> None:
        tensor.copy_(full)


_PROGRAMS = 16
"""programs for one signature, of inputs whose integers decide otherwise; more would hide that every call compiles one"""

Served = TypeVar("Served")


def _first_that_serves(serve: Callable[[int], Served]) -> Served:
    """``serve(number)`` of the first number whose program is for the integers in the inputs."""
    state = torch.get_rng_state()
    for number in range(_PROGRAMS):
        try:
            return serve(number)
        except RuntimeError as error:
            if not is_of_other_values(error):
                raise
            if number == _PROGRAMS - 1:
                raise RuntimeMismatchError(
                    f"{error}. {_PROGRAMS} programs for inputs of these shapes serve others. Pad to fixed lengths, or mask."
                ) from error
            log.info("a program does not serve this call: %s", error)
        torch.set_rng_state(state)  # a program that stopped may have drawn
    raise AssertionError

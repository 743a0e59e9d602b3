"""The module a user gets back: global inputs and outputs, parameters under their original names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.utils._pytree as pytree
from torch import nn

from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.module.hooked import refuse_hooks
from autoshard.module.inner import compiled_for_generation, inner, may_come_first
from autoshard.module.meetings import collective
from autoshard.module.microbatches import MicroBatchRun
from autoshard.module.model.clamped import clamp
from autoshard.module.model.state import defaults, is_usual
from autoshard.module.programs.compiling import Compiling, Settings
from autoshard.module.programs.entrance import check_leaves, check_trained
from autoshard.module.programs.executable import Call, Executable, first_that_serves
from autoshard.module.saving import save
from autoshard.module.staged.stages import one_after_another
from autoshard.passes.capture.exported.handed import give_back
from autoshard.passes.capture.exported.trees import PLAIN, constant, flattened_call, in_order
from autoshard.passes.ir.graph import Graph
from autoshard.plans.plan import Plan
from autoshard.report.record import Collective
from autoshard.runtime.autocast import autocast_state, without_autocast
from autoshard.runtime.programs.module import RankModule


class ShardedModule(Compiling):
    """A model compiled for a mesh by :func:`autoshard.compile`; an instance of its class.

    It takes the model's arguments (global tensors, equal on every rank) and returns its output
    type. ``named_parameters()`` has the original names; ``plan``, ``source``, ``collectives`` show
    the result.
    """

    _deferred: bool
    """whether forwards leave gradients as unreduced summands: inside :meth:`no_sync`"""

    def __init__(self, model: nn.Module, mesh: Mesh, settings: Settings) -> None:
        super().__init__(model, mesh, settings)
        object.__setattr__(self, "_deferred", False)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":  # accelerate wraps our forward
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """See :meth:`Compiling.__deepcopy__`. The copy is outside of ``no_sync``."""
        made = super().__deepcopy__(memo)
        object.__setattr__(made, "_deferred", False)
        return made

    def train(self, mode: bool = True) -> Self:
        """As :meth:`torch.nn.Module.train`, or as the model's class overrides it."""
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
        """The plan of the most recently used program."""
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
        """As :meth:`torch.nn.Module.named_parameters`. :class:`PlanError` before compilation."""
        self._decided()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`torch.nn.Module.state_dict`. :class:`PlanError` before compilation."""
        self._decided()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`torch.nn.Module.load_state_dict`. :class:`PlanError` before compilation."""
        self._decided()
        return super().load_state_dict(*args, **kwargs)

    def __str__(self) -> str:
        return str(self.plan) if self._latest is not None else f"ShardedModule({self._title}, not compiled yet)"

    __repr__ = __str__

    # --- running ---

    def rank_modules(self) -> list[RankModule]:
        """Loaded rank modules, one per program, of this thread's rank (in one process: rank 0)."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on the mesh."""
        with self._turns:
            return self._called(args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = in_order(self._of.model.forward, kwargs)
        given, spec = flattened_call(args, kwargs)
        call = self._comes(given, spec)

        def serve(number: int) -> tuple[list[Any], dict[str, torch.Tensor], dict[str, torch.Tensor], Graph]:
            executable, recorded = self._serving(call, number), call.state.recorded
            if self._enables(call, executable):
                recorded = True
                executable = self._serving(self._call(given, spec, recorded, self._wanted), number)
            if self._wanted and not call.state.recorded:
                check_trained(x for x, _ in executable.graph.outside)
            own, written = executable.apart(call.leaves)
            if self._of.absent:
                self._of.check_present(i.fqn for i in executable.graph.inputs if i.kind == "buffer")
            autocast = without_autocast() if call.state.autocast else contextlib.nullcontext()
            with executable.tried(self.tensor, written), autocast, torch.set_grad_enabled(recorded):
                if executable.graph.clamped:
                    clamp((self.tensor(fqn), bounds) for fqn, bounds in executable.graph.clamped.items())
                leaves, mutated = self._step(executable, executable.named(own))
            typed = executable.as_typed(leaves)
            call.programs.pop(number, None)
            if recorded == call.state.recorded:
                call.programs[number] = executable
            if recorded:
                refuse_hooks(typed, executable.feeding)
            return typed, mutated, written, executable.graph

        leaves, mutated, written, graph = first_that_serves(serve, call.programs)
        if mutated:
            self._write_back(mutated, written)
        own = graph.out_spec.num_leaves
        output = pytree.tree_unflatten(leaves[:own], graph.out_spec)
        return give_back(graph.handed, graph.changed, (args, kwargs), output, leaves[own:])

    def _comes(self, leaves: Sequence[Any], spec: Any) -> Call:
        """The call with these leaves; :class:`CaptureError` if no program can serve it.

        Fast path: most calls repeat the guards of the last one, which are compared as one tuple.
        """
        present = self._present(leaves, spec)
        if present is not None and self._last is not None and self._last[0] == present:
            last = self._last[1]
            return last.again(self._arrived(leaves, spec, last.cuts)[0])
        check_leaves(self._of.model, leaves, spec, self._device_type())
        call = self._call(leaves, spec, self._recorded(leaves), self._wanted)
        object.__setattr__(self, "_last", None if present is None else (present, call.again(())))
        return call

    def _present(self, leaves: Sequence[Any], spec: Any) -> Any:
        """The guards of a call with plain tensors and constants; None if more decides."""
        if not (self._of.adopted and PLAIN.issuperset(map(type, leaves)) and is_usual()):
            return None
        if any(isinstance(x, torch.Tensor) and x.is_nested for x in leaves):  # without a shape
            return None
        given = [
            (x.shape, x.dtype, x.requires_grad, x.device, x.layout) if isinstance(x, torch.Tensor) else constant(x)
            for x in leaves
        ]
        modes = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            self.training,
            self._of.modes,
            self._of.hooks,
        )
        return spec, given, self._of.seen(self._form), modes, autocast_state(), defaults()

    @torch.no_grad()
    def _write_back(self, mutated: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor]) -> None:
        """Write mutated states back in place. ``written``: states that are inputs."""
        for fqn, new in mutated.items():
            old = written[fqn] if fqn in written else self.tensor(fqn)
            if fqn in written or (old.shape, old.dtype) == (new.shape, new.dtype):
                self._load(old, new)
            else:  # the forward assigned a new tensor
                self._of.replace(fqn, new.clone())

    def called_alone(self, part: nn.Module) -> Any:
        """A submodule that can be called alone: :func:`~autoshard.module.inner.inner`."""
        if not (self._of.adopted or may_come_first(self)):
            return part
        base = next(c for c in type(self).__mro__ if c.__module__.startswith("autoshard.module."))
        return inner(self, part, base)

    def compile_for_generation(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
        """See :func:`~autoshard.module.inner.compiled_for_generation`."""
        compiled_for_generation(self, inputs, kwargs)

    def _device_type(self) -> str | None:
        """Device type that inputs must have; None if inputs are moved there."""
        return next((t.device.type for t in self._of.tensors()), None) if self._of.adopted else None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradient accumulation: the backward of forwards inside skips the gradient reduction.

        The next backward of a forward outside reduces the accumulated ``.grad``, as with
        DistributedDataParallel. Until then gradients are Partial DTensors: ``full_gradients()``
        returns sums; optimizers and ``autoshard.clip_grad_norm_`` refuse them. Gradients of FSDP
        parameters are reduced by every backward. In one process gradients are full, and sums inside
        are not counted.
        """
        before = self._defer(True)
        try:
            yield
        finally:
            self._defer(before)

    def _defer(self, deferred: bool) -> bool:
        """Set whether forwards leave gradients as summands; returns the previous setting."""
        before = self._deferred
        object.__setattr__(self, "_deferred", deferred)
        return before

    def _step(
        self, executable: Executable, inputs: Mapping[str, torch.Tensor]
    ) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """Outputs of one step, and the mutated states."""
        names, micro = executable.compiled.source.inputs, executable.compiled.micro_batches
        run = partial(self._run if not executable.parts else self._through, executable)
        if micro is None:
            return run([inputs[name] for name in names])
        inputs = self._put_together(inputs)
        steps = MicroBatchRun(run, self._enter, self._defer, self._of.standing_in, self.tensor)
        return steps(micro, inputs, names)

    def _put_together(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Gathered local inputs, for slicing into micro-batches; gradients are resharded."""
        return self._whole((), inputs)[1]

    def _enter(self, index: int, count: int) -> None:
        """Tell all ranks of this process which of ``count`` micro-batches runs."""
        raise NotImplementedError

    def _run(self, executable: Executable, inputs: list[torch.Tensor]) -> tuple[list[Any], dict[str, torch.Tensor]]:
        raise NotImplementedError

    def _through(self, executable: Executable, inputs: list[torch.Tensor]) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """As :meth:`_run`, for pipeline stages one after another."""
        return one_after_another(executable, inputs, self._run)

    @collective
    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write ``rank_module.py``, ``{plan,inputs,lines}.json`` and ``rank<r>.safetensors``.

        The program is that of the latest call, as in :attr:`plan`: without a backward after an
        evaluation. With micro-batches or stages ``step.json`` is written, too. Run it without the
        model's code: ``torchrun --nproc-per-node N directory/rank_module.py``. Every rank calls
        ``save`` and writes its shard. Raises :class:`PlanError` if micro-batches need values of the
        full batch.
        """
        save(self._decided(), self.local_tensors, Path(directory), alone="device_mesh" not in self.__dict__)

    def local_tensors(self, executable: Executable, rank: int) -> dict[str, torch.Tensor]:
        """Detached local tensors that the rank module of ``rank`` reads, by original name."""
        raise NotImplementedError

    # --- state ---

    def meeting(self, what: str) -> AbstractContextManager[None]:
        """Inside, all ranks do ``what``: see :func:`~autoshard.module.meetings.collective`."""
        return contextlib.nullcontext()

    @collective
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Original name → full tensor (a copy), for the original state dict. Collective."""
        return {n: self._full(t.detach()) for n, t in self.state_dict(keep_vars=True).items()}

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load full tensors by name. :class:`PlanError` if missing, unknown or misshapen."""
        own = self.state_dict(keep_vars=True)
        self._check_state(own, state)
        with torch.no_grad():
            for name, tensor in own.items():
                self._load(tensor, state[name])

    @staticmethod
    def _check_state(own: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
        """Raise :class:`PlanError` for entries that are missing, unknown or misshapen."""
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unknown:
            raise PlanError(f"state dict does not fit: missing {missing[:5]}, unknown {unknown[:5]}")
        for name, tensor in own.items():
            if tuple(state[name].shape) != tuple(tensor.shape):
                raise PlanError(
                    f"state dict entry {name!r} has shape {list(state[name].shape)}, the model {list(tensor.shape)}"
                )

    @collective
    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Original parameter name → full gradient, where there is one. Collective."""
        return {n: self._full(p.grad) for n, p in self.named_parameters() if p.grad is not None}

    @property
    def is_staged(self) -> bool:
        """Whether this process holds the parameters of some pipeline stages only."""
        return False

    def gradients_once(self) -> list[Any]:
        """This process's gradients; those of tied stages on one rank only."""
        return [p.grad for p in self.parameters() if p.grad is not None]

    def whole_state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict of all stages; entries of other processes have shape and dtype only."""
        found: dict[str, torch.Tensor] = self.state_dict(keep_vars=True)
        return found

    def whole_parameters(self) -> Iterator[torch.Tensor]:
        """All parameters of the model; those of other processes have shape and dtype only."""
        return map(self._of.tensor, self._of.parameters)

    def _full(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def _whole_buffer(self, name: str) -> torch.Tensor:
        """See :meth:`Compiling._whole_buffer`."""
        return self._full(self.tensor(name).detach())

    def _load(self, tensor: torch.Tensor, full: torch.Tensor) -> None:
        tensor.copy_(full)

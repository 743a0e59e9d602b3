"""This rank's module under torch.distributed: DTensor parameters, programs on local shards."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard import runtime
from autoshard.compiler import build, captured
from autoshard.errors import CommunicationError
from autoshard.layout import I, Layout, R, Shard
from autoshard.mesh import Mesh
from autoshard.module.dtensors.mixed import take_plain_gradient
from autoshard.module.dtensors.of_stage import OfStage
from autoshard.module.dtensors.ops import mend
from autoshard.module.dtensors.outputs import Output
from autoshard.module.dtensors.owned import side_by_side
from autoshard.module.gradients import one_verdict
from autoshard.module.inputs import Cuts, without_data
from autoshard.module.logits import Logits
from autoshard.module.model.attached import duplicate
from autoshard.module.optimizers import load_whole_states
from autoshard.module.programs.compiling import Settings
from autoshard.module.programs.executable import Call, Executable
from autoshard.module.programs.turns import Turns
from autoshard.module.ranks import claims
from autoshard.module.ranks.agreement import AFTERWARDS, Agreement, asked_checks
from autoshard.module.ranks.arrivals import arrived, joined, layout_of, part_for
from autoshard.module.ranks.loaded import Loaded
from autoshard.module.ranks.on_rank import OnRank, execute
from autoshard.module.ranks.replicas import check_replicas, named_tensors, of_first
from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import Program
from autoshard.passes.redistribute import redistribution
from autoshard.plans.compiled import Compiled
from autoshard.plans.plan import Plan
from autoshard.plans.wishes import Wishes
from autoshard.runtime.programs.module import RankModule
from autoshard.runtime.transport.groups import mesh_of

_way = torch.compiler.disable(redistribution)
"""a search, which torch.compile would trace with warnings"""


class DistributedModule(OnRank):
    """The sharded module of one process; every rank of the mesh has one."""

    _home: torch.device
    _loaded: dict[int, Loaded]
    _checks: dict[str, int]
    _comparisons: claims.Comparisons
    _compared: Any
    """the last compared call: repetitions are not compared"""
    _on_gloo: bool
    _generating: bool = False
    """whether logits go to a generation loop"""

    def __init__(self, model: nn.Module, mesh: Mesh, settings: Settings, device_mesh: DeviceMesh | None) -> None:
        super().__init__(model, mesh, settings)
        kind = device_mesh.device_type if device_mesh is not None else default_device_type()
        if device_mesh is None:
            device_mesh = mesh_of(kind, torch.arange(mesh.size, device="cpu").view(mesh.shape), mesh.axes)
        set_ = object.__setattr__
        set_(self, "device_mesh", device_mesh)
        set_(self, "_comm", runtime.TorchCommunicator.of(device_mesh))
        set_(self, "_device", torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind))
        set_(self, "_home", next((t.device for _, t in named_tensors(model) if not t.is_meta), torch.device("cpu")))
        set_(self, "_turns", Turns(waits=False))
        one_verdict()
        load_whole_states()
        mend(device_mesh, self.is_staged)
        set_(self, "_loaded", {})
        set_(self, "_agreement", Agreement(self._comm.notes))
        set_(self, "_checks", asked_checks())
        set_(self, "_comparisons", claims.Comparisons())
        set_(self, "_compared", None)
        set_(
            self, "_on_gloo", all(dist.get_backend(device_mesh.get_group(i)) == "gloo" for i in range(device_mesh.ndim))
        )
        self._comm.device = self._device

    def _shared(self) -> list[Any]:
        """See :meth:`Compiling._shared`."""
        return [*super()._shared(), self.device_mesh, self._comm, self._agreement, self._compared]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """See :meth:`ShardedModule.__deepcopy__`. Loaded programs are not copied."""
        memo[id(self._loaded)] = {}
        for p in self._of.tensors():
            if isinstance(p, DTensor):  # deepcopy of a DTensor would keep its gradient
                memo[id(p)] = duplicate(p)
        return super().__deepcopy__(memo)

    def _alone(self) -> None:
        object.__setattr__(self, "_loaded", {})
        object.__setattr__(self, "_comparisons", claims.Comparisons())
        object.__setattr__(self, "_compared", None)

    # --- inputs ---

    def _device_type(self) -> str | None:
        return None

    def _arrived(self, leaves: Sequence[Any], spec: Any, cuts: Cuts | None = None) -> tuple[Sequence[Any], Cuts]:
        if cuts is None:
            are_global = self._settings.inputs == "global"
            cuts = () if are_global else super()._input_layouts(*pytree.tree_unflatten(leaves, spec))
        return arrived(leaves, cuts, self.device_mesh, self._device), cuts

    def _input_layouts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cuts:
        return tuple(layout_of(x, self._running) for x in pytree.tree_leaves((tuple(args), dict(kwargs))))

    def _whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See :meth:`Compiling._whole`: plain tensors on the device where the model is captured.

        Collective for local inputs; large ones have no data.
        """

        def whole(x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, DTensor) and (x.is_meta or x.device.type == self._home.type):
                return x
            full = without_data(x, x.shape) if isinstance(x, DTensor) else x.detach()
            present = x.everywhere() if full is None and isinstance(x, OfStage) else x
            full = self._full(present.detach()) if full is None else full
            return (full if full.is_meta else full.to(self._home)).requires_grad_(x.requires_grad)

        plain: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
            torch.Tensor, whole, (tuple(args), dict(kwargs))
        )
        return plain

    def _put_together(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """See :meth:`ShardedModule._put_together`."""
        return joined(inputs)

    # --- running ---

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Run module hooks and forward; other ranks are notified of a failure."""
        notes = self._comm.notes
        before = notes.call
        with notes:
            try:
                return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            except Exception:
                if notes.call == before:  # in a pre-forward hook: others have begun the call
                    notes.begin()
                raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`ShardedModule.forward`. Other ranks are notified of a failure."""
        with self._comm.notes, self._turns:
            self._comm.notes.begin()
            return self._called(args, kwargs)

    @contextlib.contextmanager
    def meeting(self, what: str) -> Iterator[None]:
        """See :meth:`ShardedModule.meeting`."""
        notes = self._comm.notes
        with notes, self._turns:
            notes.begin(meeting=True)
            notes.present(what, lambda: claims.of_meeting(notes, what))
            self._agreement.agree(*notes.claims())
            if notes.broken:
                raise CommunicationError(AFTERWARDS)
            yield

    def specialise(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], number: int = 0, recorded: bool | None = None
    ) -> Executable:
        """See :meth:`Compiling.specialise`; ranks pass the same inputs in the same state."""
        with self._comm.notes, self._turns:
            return super().specialise(args, kwargs, number, recorded)

    def _serving(self, call: Call, number: int) -> Executable:
        """See :meth:`Compiling._serving`. Ranks compare the guards while the program runs.

        Not if this rank repeats its last call and called no other module since. Input values are
        compared before, see :class:`Comparisons`. A waiting rank compares again, see
        :class:`Notes`.
        """
        notes, agreement = self._comm.notes, self._agreement
        executable, again = self._program_for(call, number), notes.calls_again()
        # Lengths of a growing KV cache are known to all ranks.
        in_parts = [x for x in call.leaves if isinstance(x, DTensor)]
        present = call.key(number, exactly=_is_plain if in_parts else True), self._deferred, notes.failed, notes.broken
        most = self._comparisons.due(executable, notes.failed)
        most = None if "inputs" in self._checks else most if agreement.ranks > 1 else 0
        of_call = functools.partial(claims.of_call, notes, call, number, self._settings.inputs, self._deferred)
        notes.present("a call", of_call)
        if most != 0 or not again or executable is None or present != self._compared or not self._repeats(executable):
            object.__setattr__(self, "_compared", present)
            agreement.begin(*notes.claims(), *claims.of_values(call.leaves, self._running, self._places, most))
            if most != 0 or executable is None or notes.broken:
                agreement.finish()
        if notes.broken:
            raise CommunicationError(AFTERWARDS)
        if executable is None:
            return super()._serving(call, number)
        object.__setattr__(self, "_latest", executable)
        return executable

    @property
    def _places(self) -> Sequence[Sequence[int]]:
        """The ranks of each stage."""
        return (range(self.mesh.size),)

    def _repeats(self, executable: Executable) -> bool:
        """Whether ranks need not compare repeated calls: a collective would notice a difference.

        Inside no_sync() the backward may have no collective. Backends other than gloo may hang or
        abort on different collectives.
        """
        collectives = executable.compiled.plan.collectives
        return self._on_gloo and any(c.phase == "forward" or not self._deferred for c in collectives)

    def _compiled(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], wishes: Wishes, **options: Any
    ) -> Compiled:
        """Rank 0 plans, others follow its plan; an error of one rank is raised on all."""
        agreement = self._agreement
        agreement.finish()
        graph = agreement.everywhere(lambda: captured(model, args, kwargs, precision=wishes.mixed_precision, **options))
        agreement.agree(("the graph captured from the model", zlib.crc32(str(graph).encode())))
        constants = dict(of_first(agreement, graph.constants, f"a constant of {self._title}"))
        graph = replace(graph, constants={**graph.constants, **constants})
        ours: list[Compiled] = []

        def plan() -> str:
            ours.append(build(graph, self.mesh, wishes, title=self._title))
            return ours[0].plan.to_json(alternatives=False)

        def follow() -> Compiled:
            return ours[0] if ours else build(graph, self.mesh, replace(wishes, plan=received), title=self._title)

        received = Plan.from_json(agreement.from_first(plan))
        found = agreement.everywhere(follow)
        agreement.agree(("the generated program", zlib.crc32(found.source.text.encode())))
        return found

    def _run(self, executable: Executable, inputs: list[torch.Tensor]) -> tuple[list[Any], dict[str, torch.Tensor]]:
        if every := self._checks.get("replicas"):
            self._agreement.finish()
            if self._comm.notes.call % every == 0:
                check_replicas(self._agreement, self.mesh, dict(self.named_parameters()), dict(self.named_buffers()))
        with runtime.bind(self._comm), runtime.synchronised_rng(self._comm):
            results = self._results(executable, inputs)
            program, shapes = executable.compiled.program, executable.shapes(inputs)
            made = enumerate(zip(results[: len(program.outputs)], shapes, strict=False))
            leaves = [self._leaf(executable, i, result, shape) for i, (result, shape) in made]
        self._agreement.finish()
        return leaves, self._new_values(program, results, shapes)

    def _new_values(
        self, program: Program, results: Sequence[Any], shapes: Sequence[Sequence[int] | None]
    ) -> dict[str, torch.Tensor]:
        """Mutated states from the rank module, by original name: DTensors if sharded.

        ``shapes``: global, of outputs and states.
        """
        found, first = {}, len(program.outputs)
        for (fqn, name), new, shape in zip(program.mutations.items(), results[first:], shapes[first:], strict=True):
            layout, local = program.layouts[name], new.detach()
            found[fqn] = self._dtensor(local, layout, shape) if shape and layout.axes_with(Shard) else local
        return found

    def _results(self, executable: Executable, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Local outputs and mutated states of the rank module."""
        program, loaded = executable.compiled.program, self._load_program(executable)
        module = loaded.module
        self._comm.deferred = self._deferred
        if not loaded.recorded:
            self._comm.spare.clear()
        module.bind_tensors(loaded.tensors(self._of))
        _, self._comm.summed_last = loaded.last
        try:
            named = zip(executable.compiled.source.inputs, inputs, strict=True)
            parts = [part_for(x, program.layouts[n], self.device_mesh, self._device) for n, x in named]
            results: Sequence[Any] = module(*parts)
        finally:
            module.release_tensors()
            self._comm.summed_last = ()
        return results

    def _leaf(self, executable: Executable, number: int, local: Any, shape: Sequence[int] | None) -> Any:
        """Output ``number``, of global ``shape``, for the user; ``local``: the rank module's."""
        program = executable.compiled.program
        out = program.outputs[number]
        if not isinstance(out, Ref):
            return local
        whole = local.shape if shape is None else shape
        layout, keeps = program.layouts[out.name], self._keeps(executable, number)
        if self._generating and not keeps and local.is_floating_point() and layout.axes_of(len(whole) - 1):
            return Logits.of(local, layout, whole, self._comm, partial(self._output, kept=False))
        return self._output(local, layout, whole, keeps)

    @contextlib.contextmanager
    def drawing_alike(self) -> Iterator[None]:
        """Inside, all ranks draw as rank 0: other seeds would sample other tokens. Collective."""
        with runtime.synchronised_rng(self._comm):
            self._comm.random_states()
            yield

    def _enter(self, index: int, count: int) -> None:
        self._comm.enter(index, count)

    def rank_modules(self) -> list[RankModule]:
        """See :meth:`ShardedModule.rank_modules`."""
        return [loaded.module for loaded in self._loaded.values()]

    def _load_program(self, executable: Executable) -> Loaded:
        """The program on this rank, loaded once."""
        if id(executable) not in self._loaded:
            side_by_side(map(self.tensor, self._layout_of))
            self._loaded[id(executable)] = Loaded.of(executable, self._comm, self._device)
        return self._loaded[id(executable)]

    def local_tensors(self, executable: Executable, rank: int) -> dict[str, torch.Tensor]:
        """See :meth:`ShardedModule.local_tensors`; for this process's rank only."""
        with torch.no_grad(), runtime.bind(self._comm):
            return {name: t.detach() for name, t in self._load_program(executable).tensors(self._of).items()}

    def _output(self, local: torch.Tensor, layout: Layout, shape: Sequence[int], kept: bool) -> torch.Tensor:
        """The full tensor, or an :class:`Output` if ``kept`` and sharded; scalars plain."""
        cut, state = layout.axes_with(Shard), self._settings.gather_outputs is None and not local.requires_grad
        if kept and (cut or (shape and not state)):
            return Output.of(self._dtensor(local, layout, shape))
        if not cut:
            return local if shape else take_plain_gradient(local)
        mesh = self._running
        whole = Layout(mesh, [I if local.requires_grad else R] * mesh.ndim)
        return execute(_way(layout, whole, tuple(shape), mesh, local.dtype, local.requires_grad), local)


def _is_plain(leaf: Any) -> bool:
    return not isinstance(leaf, DTensor)


def default_device_type() -> str:
    """Device type of the ranks."""
    return "cuda" if "nccl" in str(dist.get_backend()) else "cpu"

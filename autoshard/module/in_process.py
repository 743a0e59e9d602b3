"""Simulated ranks in one process: parameters are full tensors, sharded inside the forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh
from autoshard.module.dtensors.segments import shard_of
from autoshard.module.inputs import InputLayouts
from autoshard.module.programs.compiling import CompileSettings
from autoshard.module.programs.executable import Executable
from autoshard.module.programs.kv_cache import CachedShards
from autoshard.module.programs.simulated_ranks import (
    join_differentiably,
    join_shards,
    shard_for_ranks,
    writable_shards,
)
from autoshard.module.sharded_module import ShardedModule
from autoshard.passes.ir.graph import Ref
from autoshard.runtime.programs.module import RankModule
from autoshard.runtime.transport.communicator import Executed
from autoshard.runtime.transport.in_process import World


class InProcessModule(ShardedModule):
    """A sharded module whose ranks are threads; for debugging, tests and one-process training."""

    _world: World
    _rank_modules: dict[int, list[Any]]
    _parts: dict[Any, tuple[Tensor, Any, tuple[Tensor, ...]]]
    """program without backward, name → (full tensor, its address and strides, shards by rank)"""

    def __init__(self, model: nn.Module, mesh: Mesh, settings: CompileSettings) -> None:
        super().__init__(model, mesh, settings)
        object.__setattr__(self, "_world", World(self._program_mesh.sizes))
        object.__setattr__(self, "_rank_modules", {})
        object.__setattr__(self, "_parts", {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """See :meth:`ShardedModule.__deepcopy__`. Rank modules and shards are not copied."""
        memo[id(self._rank_modules)], memo[id(self._parts)] = {}, {}
        return super().__deepcopy__(memo)

    def _alone(self) -> None:
        object.__setattr__(self, "_rank_modules", {})
        object.__setattr__(self, "_parts", {})

    def record(self, log: list[Executed] | None) -> None:
        """Append every executed collective to ``log`` (None: stop)."""
        self._world.log = log

    def rank_modules(self) -> list[RankModule]:
        """See :meth:`ShardedModule.rank_modules`."""
        return [modules[0] for modules in self._rank_modules.values()]

    def _parameter(self, p: nn.Parameter, layout: Layout, initial: Tensor | None) -> nn.Parameter:
        return nn.Parameter(_materialised_copy(p, initial), requires_grad=p.requires_grad)

    def _buffer(self, b: Tensor, layout: Layout | None, initial: Tensor | None) -> Tensor:
        return _materialised_copy(b, initial)

    def _input_layouts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> InputLayouts:
        given = super()._input_layouts(args, kwargs)
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        if not any(isinstance(x, CachedShards) for x in leaves):
            return given
        asked = given or (None,) * len(leaves)
        mesh = self._program_mesh

        def comes_in(x: Any, given: Layout | None) -> Layout | None:
            if not isinstance(x, CachedShards):
                return given
            return Layout(mesh, x.placements) if x.lies_on(mesh) else None  # other mesh: gathered

        return tuple(map(comes_in, leaves, asked))

    def _whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return pytree.tree_map_only(CachedShards, CachedShards.whole, (tuple(args), dict(kwargs)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it would see the ranks of one thread only
    def _run(self, executable: Executable, inputs: list[Tensor]) -> tuple[list[Any], dict[str, Tensor]]:
        program = executable.compiled.program
        world = self._world
        key = id(executable)
        if key not in self._rank_modules:
            self._rank_modules[key] = [executable.rank_module() for _ in range(world.size)]
        modules = self._rank_modules[key]
        tensors = self._tensors(executable)
        where = next((parts[0].device for parts in tensors.values()), inputs[0].device if inputs else None)
        for comm in world.ranks:
            comm.deferred, comm.device = self._deferred, where
        names = executable.compiled.source.inputs
        written = {name for fqn, name in program.graph.states.items() if fqn in program.in_place}
        arguments = [
            writable_shards(x.whole() if isinstance(x, CachedShards) else x, program.layouts[n])
            if n in written
            else self._input_shards(x, program.layouts[n])
            for n, x in zip(names, inputs, strict=True)
        ]
        for rank, module in enumerate(modules):
            module.bind_tensors({name: parts[rank] for name, parts in tensors.items()})
        try:
            results = world.run(
                lambda module, args: module(*args),
                [(module, [a[rank] for a in arguments]) for rank, module in enumerate(modules)],
            )
        finally:
            for module in modules:
                module.release_tensors()
        shapes, leaves = executable.shapes(inputs), []
        keeps = self._settings.gather_outputs is None and not program.graph.training
        for i, out in enumerate(program.outputs):
            if not isinstance(out, Ref):
                leaves.append(results[0][i])
                continue
            layout, shape = program.layouts[out.name], shapes[i]
            parts = [r[i] for r in results]
            if keeps and self._stays_sharded(executable, i) and shape is not None and layout.axes_with(Shard):
                leaves.append(CachedShards.of(parts, layout, shape))
            else:
                leaves.append(join_differentiably(parts, layout, shape, f"output {i}", executable.computed))
        first = len(program.outputs)
        mutated = {
            fqn: join_shards([r[first + i].detach() for r in results], program.layouts[name], shapes[first + i], fqn)
            for i, (fqn, name) in enumerate(program.mutations.items())
            if fqn not in program.in_place
        }
        return leaves, mutated

    def _enter(self, index: int, count: int) -> None:
        for comm in self._world.ranks:
            comm.enter(index, count)

    def _tensors(self, executable: Executable) -> dict[str, tuple[Tensor, ...]]:
        """Original name → local shards by rank."""
        found: dict[str, tuple[Tensor, ...]] = {}
        for value in executable.graph.inputs:
            if value.kind == "input":
                continue
            layout = executable.compiled.plan.layouts[value.fqn]
            if value.kind == "constant":
                found[value.fqn] = shard_for_ranks(executable.graph.constants[value.name], layout, value.fqn)
            elif value.fqn in executable.compiled.program.in_place:
                found[value.fqn] = writable_shards(self.tensor(value.fqn), layout)
            elif executable.graph.training:
                found[value.fqn] = shard_for_ranks(self.tensor(value.fqn), layout, value.fqn, executable.computed)
            else:
                found[value.fqn] = self._seen((id(executable), value.fqn), self.tensor(value.fqn), layout)
        return found

    def _seen(self, key: Any, full: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        """Shards of a read-only tensor: cached views; copies of segment-wise sharded dims."""
        known, lie = self._parts.get(key), (full.data_ptr(), full.stride())
        if known is None or known[0] is not full or known[1] != lie:
            parts = tuple(shard_of(full, layout, rank).detach() for rank in range(self._program_mesh.size))
            if layout.grouped:  # copies: later writes would not reach them
                return parts
            known = self._parts[key] = full, lie, parts
        return known[2]

    def local_tensors(self, executable: Executable, rank: int) -> dict[str, Tensor]:
        """See :meth:`ShardedModule.local_tensors`."""
        with torch.no_grad():
            return {name: parts[rank].detach() for name, parts in self._tensors(executable).items()}

    def _input_shards(self, x: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        """A global input by rank: sharded, or replicated with the full gradient on each."""
        if isinstance(x, CachedShards):
            return x.parts_in(layout)
        if layout.axes_with(Shard) or (x.requires_grad and torch.is_grad_enabled()):
            return shard_for_ranks(x, layout, "an input")
        return (x,) * self._program_mesh.size


def _materialised_copy(tensor: Tensor, initial: Tensor | None) -> Tensor:
    """A copy of the data; a meta tensor becomes its initial value, or zeros to be loaded."""
    if not tensor.is_meta:
        return tensor.detach().clone()
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if initial is None else initial.detach().clone()

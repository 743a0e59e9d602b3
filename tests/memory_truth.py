"""What a compiled program really keeps and really peaks at: counted by autograd's hooks and a mode that sees every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.compiler import Compiled
from autoshard.module.programs.executable import load_source
from autoshard.runtime.transport.in_process import World


def storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def ranks_of(compiled: Compiled) -> tuple[World, list[Any], list[dict[str, torch.Tensor]], list[Any]]:
    """A world, its rank modules with tensors bound, these tensors, and the arguments of every rank: random."""
    graph, mesh = compiled.graph, compiled.program.mesh
    world = World(dict(zip(mesh.axes, mesh.shape, strict=True)))
    kind = load_source(compiled.source.text, compiled.source.modules)
    modules, tensors = [], []
    types, layouts = compiled.program.types, compiled.program.layouts

    def local(name: str, rank: int) -> torch.Tensor:
        type_ = types[name]
        shape = layouts[name].local_shape(type_.shape, rank)
        if type_.dtype.is_floating_point:
            return torch.rand(shape, dtype=type_.dtype).mul_(0.1).requires_grad_(type_.grad)
        return torch.zeros(shape, dtype=type_.dtype)

    for rank in range(world.size):
        module = kind()
        bound = {
            i.fqn: graph.constants[i.name] if i.kind == "constant" else local(i.name, rank)
            for i in graph.inputs
            if i.kind != "input"
        }
        module.bind_tensors(bound)
        modules.append(module)
        tensors.append(bound)
    args = [local(name, 0) for name in compiled.source.inputs]
    return world, modules, tensors, args


def kept_bytes(compiled: Compiled) -> float:
    """Bytes that autograd keeps on rank 0 beside parameters, buffers and inputs."""
    world, modules, tensors, args = ranks_of(compiled)
    found: list[dict[int, torch.Tensor]] = [{} for _ in modules]
    outputs: list[Any] = []

    def run(module: Any, rank: int) -> Any:
        def pack(x: torch.Tensor) -> torch.Tensor:
            found[rank][storage(x)] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return module(*args)

    outputs.append(world.run(run, [(m, r) for r, m in enumerate(modules)]))
    mine = {storage(x) for x in (*tensors[0].values(), *args)}
    return float(sum(x.untyped_storage().nbytes() for key, x in found[0].items() if key not in mine))


class Tracker(TorchDispatchMode):
    """The bytes of all storages that are alive, and their most."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.known = {storage(x) for x in known}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.marks: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and storage(x) not in self.known:
                kept = x.untyped_storage()
                self.alive[storage(x)] = (StorageWeakRef(kept), kept.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        for key in [k for k, (ref, _) in self.alive.items() if ref.expired()]:
            del self.alive[key]
        return sum(n for _, n in self.alive.values())


def peak_bytes(compiled: Compiled) -> float:
    """Most bytes alive on the one rank of the mesh during forward and backward, parameters and inputs included."""
    world, modules, tensors, args = ranks_of(compiled)
    assert world.size == 1
    given = [*tensors[0].values(), *args]
    at_first = sum(x.untyped_storage().nbytes() for x in given)
    with Tracker(given) as tracker:
        (outputs,) = world.run(modules[0], [args])
        ends = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
        losses = [x for x in ends if not x.shape] or ends
        torch.autograd.backward(losses, [torch.ones_like(x) for x in losses])
    return float(tracker.peak + at_first)

"""What a compiled program really keeps and peaks at: by autograd's hooks, torch's profiler and its memory tracker."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.compiler import Compiled
from autoshard.module.programs.executable import load_source
from autoshard.runtime.parameters import recompute
from autoshard.runtime.transport.communicator import Communicator
from autoshard.runtime.transport.in_process import World


class Evenly(TorchDispatchMode):
    """Rows choose their experts in turns, as a plan counts on; of equal tokens all would choose the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            ids = out[1]
            ids.copy_(torch.arange(ids.numel()).view(ids.shape) % args[0].shape[-1])
        return out


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
    """Bytes that autograd keeps on rank 0 beside parameters, buffers and inputs, and what is kept to make others again."""
    world, modules, tensors, args = ranks_of(compiled)
    found: list[dict[int, torch.Tensor]] = [{} for _ in modules]
    here = threading.local()

    def pack(x: torch.Tensor) -> torch.Tensor:
        found[here.rank][storage(x)] = x
        return x

    def run(module: Any, rank: int) -> Any:
        here.rank = rank
        with (
            recompute.observing_saved_tensors(pack),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
            Evenly(),
        ):
            return module(*args)

    world.run(run, [(m, r) for r, m in enumerate(modules)])
    mine = {storage(x) for x in (*tensors[0].values(), *args)}
    return float(sum(x.untyped_storage().nbytes() for key, x in found[0].items() if key not in mine))


def peak_bytes(compiled: Compiled) -> float:
    """Most bytes alive on the one rank of the mesh during forward and backward, parameters and inputs included."""
    world, modules, tensors, args = ranks_of(compiled)
    assert world.size == 1
    given = [*tensors[0].values(), *args]
    at_first = sum(x.untyped_storage().nbytes() for x in given)
    states = [torch.get_rng_state()]  # 5 KB for each part that draws again: no part of the model
    unkept = patch.object(Communicator, "random_states", lambda self: states)
    gc.collect()  # what others left would be freed in between, and counted
    with unkept, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as allocations:
        step(world, modules, args)
    events = allocations.profiler.kineto_results.events()
    alive = itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]")
    return float(max(alive) + at_first)


def tracked_peak(compiled: Compiled) -> float:
    """The peak of :func:`peak_bytes` by torch's own tracker, which sees tensors, and no copies that kernels make."""
    world, modules, tensors, args = ranks_of(compiled)
    tracker = MemTracker()
    tracker.track_external(*tensors[0].values(), *args)
    # Modules are its way to tell parameters from others; it would put hooks on frozen ones, which have no gradient.
    with patch.object(tracker, "_track_module_params_and_buffers", lambda *args, **kwargs: (0, 0)), tracker:
        step(world, modules, args)
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return float(found["Total"])


def step(world: World, modules: list[Any], args: list[Any]) -> None:
    """Forward and backward on the one rank of a world."""
    (outputs,) = world.run(modules[0], [args])
    ends = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
    losses = [x for x in ends if not x.shape] or ends
    torch.autograd.backward(losses, [torch.ones_like(x) for x in losses])

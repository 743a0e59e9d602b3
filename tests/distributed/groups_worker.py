"""One rank of a gloo world whose modules share process groups; started by test_groups_gloo.py."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checks import TOLERANCE, assert_all_raise, main
from harness import ideal
from microbatch_cases import far
from torch import nn

import autoshard
from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.transport import groups

FOLDER = Path(sys.argv[2]).parent
MESHES = {2: {"tp": 2}, 4: {"dp": 2, "tp": 2}}
STAGED = {2: {"pp": 2}, 4: {"pp": 2, "tp": 2}}
HINTS = {"up.weight": autoshard.Shard(0), "down.weight": autoshard.Shard(1)}
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
STEPS = 12
"""more than are compared with their inputs by default"""


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.up, self.down = nn.Linear(6, 8).double(), nn.Linear(8, 6).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(self.up(x).tanh())).square().mean()


def sharded(seed: int) -> Any:
    return autoshard.compile(Net(seed), ideal(MESHES[dist.get_world_size()]), (X,), hints={**HINTS})


def staged(seed: int) -> Any:
    mesh = ideal(STAGED[dist.get_world_size()])
    return autoshard.compile(Net(seed), mesh, (X,), stages="pp", micro_batches=2)


def steps_of(module: nn.Module, x: torch.Tensor) -> Callable[[], Iterator[torch.Tensor]]:
    """Steps in three parts: forward, backward, and the optimizer's; each gives the loss."""
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2, eps=1e-6)

    def step() -> Iterator[torch.Tensor]:
        optimizer.zero_grad()
        loss = module(x)
        yield loss
        loss.backward()
        yield loss
        optimizer.step()
        yield loss.detach()

    return step


def assert_steps_alike(pairs: list[tuple[Any, nn.Module]], steps: int = 3) -> None:
    """Of modules that take turns, phase by phase: losses, and all weights after the steps."""
    inputs = [X * (1 + number) for number in range(len(pairs))]
    ours = [steps_of(module, x) for (module, _), x in zip(pairs, inputs, strict=True)]
    theirs = [steps_of(model, x) for (_, model), x in zip(pairs, inputs, strict=True)]
    for number in range(steps):
        order = 1 if number % 2 else -1  # the last one may come first
        found = [*zip(*[s() for s in ours[::order]], strict=True)][-1]
        expected = [list(s())[-1] for s in theirs[::order]]
        for a, b in zip(found, expected, strict=True):
            assert far(a, b) <= TOLERANCE, number
    for module, model in pairs:
        weights = module.full_state_dict()
        for name, x in model.state_dict().items():
            assert far(weights[name], x) <= TOLERANCE, name


def counted() -> tuple[int, int]:
    """Process groups and threads of this process."""
    return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/task"))


def do_not_grow() -> None:
    """Modules on the same ranks use the same groups; stages do, too. Without the table there are more."""
    for made in (sharded, staged):
        kept = [made(0)]
        kept[0](X).backward()
        before = counted()
        for seed in range(3):
            kept.append(made(seed))
            kept[-1](X).backward()
        assert counted() == before, made
        if dist.get_world_size() > 2 or made is staged:
            groups._shared_objects.clear()
            kept.append(made(0))
            kept[-1](X).backward()
            assert counted() > before, "negative control"


def turns() -> None:
    """Forwards and backwards of modules on one mesh, one among another, give the numbers of each alone."""
    for made in (sharded, staged):
        assert_steps_alike([(made(seed), Net(seed)) for seed in range(3)])
    assert_steps_alike([(sharded(0), Net(0)), (staged(1), Net(1))])


def one_backward_for_two() -> None:
    """As of a student's and a teacher's losses together."""
    ours, theirs = [sharded(0), sharded(1)], [Net(0), Net(1)]
    for modules in (ours, theirs):
        (modules[0](X) + 2 * modules[1](X) + modules[0](2 * X)).backward()
    for module, model in zip(ours, theirs, strict=True):
        gradients = module.full_gradients()
        for name, p in model.named_parameters():
            assert p.grad is not None
            assert far(gradients[name], p.grad) <= TOLERANCE, name


def given() -> None:
    """A DeviceMesh that is handed in keeps its own groups; modules on it share what they need besides."""
    axes = MESHES[dist.get_world_size()]
    mesh = dist.device_mesh.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    modules: list[Any] = [autoshard.compile(Net(seed), mesh, (X,), hints={**HINTS}) for seed in range(2)]
    for module in modules:
        assert module.device_mesh is mesh
        assert module._comm.process_group(("tp",)).handle is mesh.get_group("tp")
    assert_steps_alike([(module, Net(seed)) for seed, module in enumerate(modules)])


def initialised_again() -> None:
    """Groups end with those of torch.distributed."""
    rank, ranks, old = dist.get_rank(), dist.get_world_size(), sharded(0)
    assert_steps_alike([(old, Net(0)), (staged(1), Net(1))])
    before = dist.group.WORLD, old.device_mesh
    for number in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{FOLDER}/again{number}", rank=rank, world_size=ranks)
        dist.new_group()  # the names of groups are other ones now
        new = sharded(0)
        assert_steps_alike([(new, Net(0)), (staged(1), Net(1))])
        assert all(p.device_mesh is new.device_mesh for p in new.parameters())
        assert new.device_mesh is not before[1]
        assert new._comm.process_group(("tp",)).handle in dist.distributed_c10d._world.pg_map
        assert dist.group.WORLD is not before[0]
        twice = [p.detach() * 2 for p in new.parameters()]
        for p, x in zip(new.parameters(), twice, strict=True):
            assert torch.equal(x.full_tensor(), 2 * p.detach().full_tensor())


def called(count: int) -> list[Any]:
    """Modules of one form, called in turn."""
    modules = [sharded(seed) for seed in range(count)]
    for _ in range(STEPS):
        for module in modules:
            module(X).backward()
    return modules


def late() -> None:
    """A rank may wait for others in one module after it was called again, or another was: longer than until it looks why."""
    modules = called(2)
    losses = []
    for number, module in enumerate([*modules, *modules]):
        if number % 2 == dist.get_rank() == 1:
            time.sleep(1.5)
        losses.append(module(X))
    for number, loss in enumerate(losses):
        if number == 0 and dist.get_rank() == 0:
            time.sleep(1.5)
        loss.backward()


def other_order() -> None:
    """Modules of one form that ranks call in another order: their collectives would meet."""
    modules = called(3)
    mine = modules[min(dist.get_rank(), 1)]
    assert_all_raise(RuntimeMismatchError, "the ranks disagree on which call they make", lambda: mine(X))
    for module in modules:
        module(X).backward()


if __name__ == "__main__":
    main(globals())

"""One rank of a gloo world that carries out redistributions of every kind; rank 0 writes what went over the wire.

Started by test_redistribution_gloo.py, see world.py.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import world

from autoshard import runtime
from autoshard.layout import I, Layout, P, Placement, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.program import Local
from autoshard.passes.redistribute import RedistributionStep, redistribution, runtime_call

S0, S1 = Shard(0), Shard(1)


class Case(NamedTuple):
    mesh: dict[str, int]
    src: list[Placement]
    dst: list[Placement]
    shape: tuple[int, ...]
    grad: bool = True


FLAT, SQUARE = {"a": 4}, {"a": 2, "b": 2}
EVEN, UNEVEN = (256, 512), (131, 517)
CASES = {
    "all_gather": Case(FLAT, [S0], [I], EVEN),
    "all_gather and reduce_scatter": Case(FLAT, [S0], [R], EVEN),
    "all_gather of dim 1": Case(FLAT, [S1], [R], EVEN, False),
    "reduce_scatter": Case(FLAT, [P], [S0], EVEN),
    "all_reduce": Case(FLAT, [P], [I], EVEN),
    "all_reduce twice": Case(FLAT, [P], [R], EVEN),
    "enter": Case(FLAT, [I], [R], EVEN),
    "all_to_all": Case(FLAT, [S0], [S1], EVEN),
    "permute": Case(SQUARE, [S0, S1], [S1, S0], EVEN),
    "two axes as one": Case(SQUARE, [S0, S0], [S1, S1], EVEN),
    "one axis of two": Case(SQUARE, [S0, P], [S0, S1], EVEN),
    "several steps": Case(SQUARE, [R, S0], [S1, S1], EVEN),
    "uneven all_gather": Case(FLAT, [S0], [R], UNEVEN),
    "uneven reduce_scatter": Case(FLAT, [P], [S1], UNEVEN),
    "uneven all_to_all": Case(FLAT, [S0], [S1], UNEVEN),
    "uneven, two axes": Case(SQUARE, [S0, S0], [R, S0], UNEVEN),
}


def call(step: RedistributionStep, x: torch.Tensor) -> torch.Tensor:
    name, args, kwargs = runtime_call(step)
    local = {k: runtime.size(v.size, v.axes) if isinstance(v, Local) else v for k, v in kwargs.items()}
    result: torch.Tensor = getattr(runtime, name)(x, *args, **local)
    return result


def bytes_sent() -> int:
    """Bytes this process has put on the wire, by the kernel's count for its TCP sockets (``struct tcp_info``).

    ``tcpi_bytes_sent`` less ``tcpi_bytes_retrans``: a busy machine sends some packets twice.
    """
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(fd := int(name)).st_mode):
                continue
        except OSError:  # the listing of the folder itself, closed by now
            continue
        s = socket.socket(fileno=fd)
        if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
            info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            sent, again = struct.unpack_from("<QQ", info, 200)
            total += sent - again
        s.detach()  # it is gloo's
    return total


@cache
def communicator(name: str) -> runtime.TorchCommunicator:
    """One for each mesh, so that its groups are connected once."""
    return runtime.TorchCommunicator({"flat": FLAT, "square": SQUARE}[name])


def run(case: Case) -> dict[str, Any]:
    """The planned and the logged collectives, and the bytes sent by this rank, forward and backward."""
    mesh = Mesh(case.mesh)
    src = Layout(mesh, case.src)
    plan = redistribution(src, case.dst, case.shape, mesh, torch.float64, case.grad)
    comm = communicator("flat" if case.mesh == FLAT else "square")
    with runtime.bind(comm):
        local = torch.randn(src.local_shape(case.shape, comm.rank), dtype=torch.float64)
        for log in (None, []):  # the first time connects the groups
            comm.log = log
            x = local.clone().requires_grad_(case.grad)
            sent = [settled()]
            y = x
            for step in plan.steps:
                y = call(step, y)
            sent.append(settled())
            if case.grad:
                y.backward(torch.ones_like(y))
            sent.append(settled())
    return {
        "planned": [(s.kind, s.forward_bytes) for s in plan.steps if s.forward_bytes]
        + [(s.backward, s.backward_bytes) for s in reversed(plan.steps) if s.backward_bytes],
        "logged": [(c.kind, c.bytes) for c in comm.log or ()],
        "predicted": (plan.forward_bytes, plan.backward_bytes),
        "sent": (sent[1] - sent[0], sent[2] - sent[1]),
    }


def settled() -> int:
    """Bytes sent so far, when all ranks have come here; what the waiting itself sends is in the next figure."""
    dist.barrier()
    return bytes_sent()


def idle() -> float:
    """What the wait between two figures sends."""
    found = [settled() for _ in range(6)]
    return (found[-1] - found[0]) / 5


def in_world(rank: int, ranks: int, rendezvous: str, result: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    mine = {"idle": idle(), "cases": {name: run(case) for name, case in CASES.items()}}
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        with open(result, "w", encoding="utf-8") as f:
            json.dump(everyone, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    world.main(in_world)

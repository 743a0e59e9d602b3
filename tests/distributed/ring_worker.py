"""One rank of a gloo world whose attention goes along a ring, or whose products do; started by test_ring_gloo.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from checks import assert_trains_alike, case, loss_of, main
from harness import SLOW_LINK

import autoshard
from autoshard import runtime
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.relay import Hop


def trains(name: str) -> None:
    """As one device; what is sent is what the plan says."""
    ranks = dist.get_world_size()
    mesh = autoshard.Mesh({"cp": ranks}, hardware="ideal_network")
    sharded = assert_trains_alike(name, on=mesh, like="ring")
    labels = {label for c in sharded.plan.choices.values() if "attention" in c.op for label in c.labels}
    assert labels
    assert labels <= {"ring", "folded ring", "ring with helpers"}, labels
    sends_as_planned(name, sharded)


def sends_as_planned(name: str, sharded: autoshard.ShardedModule) -> None:
    planned, executed, log = Counter[Any](), Counter[Any](), list[runtime.Executed]()
    for c in sharded.plan.collectives:
        planned[c.kind, c.axes, c.phase] += c.bytes
    _, args, kwargs = case(name)
    sharded._comm.log = log
    loss_of(sharded(*args, **kwargs)).backward()
    sharded._comm.log = None
    for e in log:
        executed[e.kind, e.axes, e.phase] += e.bytes
    assert executed.keys() == planned.keys()
    assert all(abs(executed[k] - planned[k]) < 1 for k in planned), (executed, planned)


def train_llama() -> None:
    trains("llama")


def train_gpt() -> None:
    """With dropout."""
    trains("gpt")


def train_hf_llama() -> None:
    trains("hf_llama")


def train_spelled() -> None:
    """With sinks, whose gradients all ranks have a part in, and capped scores."""
    trains("spelled")


def products_travel() -> None:
    """Operands and sums of linear layers, on 3 ranks with parts that differ in length."""
    mesh = autoshard.Mesh({"tp": dist.get_world_size()}, hardware=SLOW_LINK)
    for name in ("llama", "gpt"):
        sharded = assert_trains_alike(name, on=mesh, like="megatron-sp")
        assert "gather_products" in sharded.source
        assert "scatter_product" in sharded.source
        sends_as_planned(name, sharded)


def hops_overlap() -> None:
    """Two hops are on their way at once, and what each brings is its own."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    comm = runtime.TorchCommunicator({"cp": ranks})
    move = Move("S", "S", ("cp",), order=("cp",))
    arrivals = []
    for number in range(2):
        x = torch.full((me + 1,), float(10 * number + me))
        source = (me - 1) % ranks
        hop = Hop(move, (me + 1) % ranks, source, (x,), ((source + 1,),), 0.0)
        arrivals += comm.exchange([hop], "forward")
    for number, arrival in reversed(list(enumerate(arrivals))):
        (x,) = arrival()
        source = (me - 1) % ranks
        assert x.tolist() == [10.0 * number + source] * (source + 1)


CHECKS = (train_llama, train_gpt, train_hf_llama, train_spelled, products_travel, hops_overlap)

if __name__ == "__main__":
    main({check.__name__: check for check in CHECKS})

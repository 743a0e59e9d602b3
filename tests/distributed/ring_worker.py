"""One rank of a gloo world whose attention goes along a ring, or whose products do; started by test_ring_gloo.py."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from checks import assert_trains_alike, case, loss_of, main
from harness import SLOW_LINK

import autoshard
from autoshard import runtime
from autoshard.passes.propagate.named_strategies import tensor_sequence
from autoshard.plans import planning
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.rank_coroutines import Collective, Hop

RINGS = frozenset({"ring", "zigzag ring", "ring with helpers"})
PIECES = frozenset({"gathered in chunks", "zigzag, gathered in chunks"})


def trains(name: str, expected: frozenset[str] = RINGS) -> None:
    """As one device; what is sent is what the plan says."""
    ranks = dist.get_world_size()
    mesh = autoshard.Mesh({"cp": ranks}, hardware="ideal_network")
    sharded = assert_trains_alike(name, on=mesh, like="ring")
    labels = {label for c in sharded.plan.choices.values() if "attention" in c.op for label in c.labels}
    assert labels
    assert labels <= expected, labels
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


def train_pieces() -> None:
    """Keys and values gathered in chunks, in a sequence that does not divide, with dropout."""

    def pieces_of(node: Any, families: Any) -> frozenset[str]:
        return frozenset(s.label for s in families.strategies(node)) & PIECES

    before, tensor_sequence.ring_strategies = tensor_sequence.ring_strategies, pieces_of
    try:
        for name in ("llama", "gpt"):
            trains(name, PIECES)
    finally:
        tensor_sequence.ring_strategies = before


def train_folded() -> None:
    """In folded order from tokens to the last product."""
    with patch.object(planning, "order_seconds", lambda found: -found.plan.folded):
        trains("llama", frozenset({"zigzag ring"}))


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


def collectives_overlap() -> None:
    """A gather and a sum that is scattered are on their way at once, of parts that differ in length."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    comm = runtime.TorchCommunicator({"cp": ranks})
    size = 2 * ranks - 1
    start, length = comm.chunk(size, ("cp",))
    gather, total = Move("S", "R", ("cp",), 0, size), Move("P", "S", ("cp",), 0, size)
    rows = torch.arange(start, start + length, dtype=torch.float64)[:, None].expand(-1, 3)
    begun = [
        Collective(gather, rows),
        Collective(total, torch.arange(size).double() + me),
        Collective(gather, 2 * rows),
    ]
    (first,), (summed,), (second,) = (comm.exchange([x], "forward") for x in begun)
    assert second()[0][:, 0].tolist() == [2.0 * n for n in range(size)]
    assert first()[0].tolist() == [[float(n)] * 3 for n in range(size)]
    expected = ranks * torch.arange(start, start + length) + ranks * (ranks - 1) / 2
    assert summed()[0].tolist() == expected.tolist()


CHECKS = (
    train_llama,
    train_gpt,
    train_hf_llama,
    train_spelled,
    train_pieces,
    train_folded,
    products_travel,
    hops_overlap,
    collectives_overlap,
)

if __name__ == "__main__":
    main({check.__name__: check for check in CHECKS})

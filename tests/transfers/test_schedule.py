"""Schedules of transfers: complete, without anything twice, balanced, and equal on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from harness import examples
from hypothesis import given, settings
from transfer_pairs import Pair, decoder, megatron, pairs, problems

from autoshard.errors import PlanError
from autoshard.hardware import hardware
from autoshard.layout import Layout, Owned, Shard
from autoshard.mesh import Mesh
from autoshard.transfers.holdings import Box, Held, Replica, sub_boxes
from autoshard.transfers.names import links_of
from autoshard.transfers.schedule import Piece, make_schedule


@settings(max_examples=examples(240), deadline=None)
@given(pairs())
def test_random_pairs(pair: Pair) -> None:
    assert problems(pair, pair.schedule()) == []


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(pairs())
def test_a_thousand_random_pairs(pair: Pair) -> None:
    assert problems(pair, pair.schedule()) == []


def _dropped(seen: list[Piece], piece: Piece) -> Iterable[Piece]:
    """All but the first piece that is sent."""
    if piece.sender != piece.receiver and piece not in seen:
        seen.append(piece)
        return [piece] if len(seen) > 1 else []
    return [piece]


def _pair(shape: tuple[int, ...] = (8, 6)) -> Pair:
    mesh = Mesh({"dp": 2, "tp": 2}, hardware="h100")
    source = Held(shape, torch.float64, (Replica(Layout(mesh, {"tp": Shard(0)}), (0, 1, 2, 3)),))
    target = Held(shape, torch.float64, (Replica(Layout(Mesh({"tp": 3}), {"tp": Shard(1)}), (3, 4, 5)),))
    return Pair({"w": source}, {"w": target}, hardware("h100"))


def test_the_check_sees_a_box_left_out_and_one_sent_twice() -> None:
    pair = _pair()
    schedule, seen = pair.schedule(), list[Piece]()
    assert problems(pair, schedule) == []
    assert any("wrong values" in p for p in problems(pair, schedule, lambda piece: _dropped(seen, piece)))
    twice = problems(pair, schedule, lambda piece: [piece, piece])
    assert any("comes [2] times" in p for p in twice)
    assert any("bound" in p for p in twice)


def test_the_check_sees_a_sender_that_does_the_work_of_two() -> None:
    pair = _pair()
    source = pair.source["w"]
    half = replace(source, replicas=(Replica(Layout(Mesh({"tp": 2}), {"tp": Shard(0)}), (0, 1)),))
    schedule = replace(pair, source={"w": half}).schedule()
    assert any("is possible" in p for p in problems(pair, schedule))


def test_near_senders_come_first() -> None:
    """Of 16 replicas on two nodes each receiver's own node sends."""
    mesh = Mesh({"dp": 16}, hardware="h100")
    held = Held((64, 64), torch.bfloat16, (Replica(Layout(mesh), tuple(n for n in range(24) if n % 3)),))
    want = replace(held, replicas=(Replica(Layout(Mesh({"tp": 8}), {"tp": Shard(0)}), tuple(range(0, 24, 3))),))
    machine = replace(hardware("h100"), devices_per_node=12)
    schedule = make_schedule({"w": held}, {"w": want}, links_of({"w": held}, {"w": want}), machine)
    assert {m.sender // 12 == m.receiver // 12 for m in schedule.messages} == {True}
    assert schedule.most_sent <= 1.1 * schedule.least_most_sent
    assert schedule.seconds_by_level["network"] == 0.0 < schedule.seconds_by_level["node"] == schedule.seconds


def test_a_tensor_of_two_stages_and_a_table_of_one_owner() -> None:
    """Tied weights lie on the first and on the last stage; the ranks beside an owner hold nothing."""
    tp = Mesh({"tp": 2}, hardware="h100")
    tied = Held(
        (6, 4), torch.float32, tuple(Replica(Layout(tp, {"tp": Shard(d)}), r) for d, r in ((0, (0, 1)), (1, (2, 3))))
    )
    table = Held((6, 4), torch.float32, (Replica(Layout(tp, {"tp": Owned(owner=1)}), (0, 1)),))
    for source, target in ((tied, table), (table, tied)):
        pair = Pair({"w": source}, {"w": target}, hardware("h100"))
        assert problems(pair, pair.schedule()) == []


@pytest.mark.parametrize("box", [((2, 3),), ((1, 3), (0, 4)), ((0, 2), (3, 3), (1, 4)), ()])
def test_ranges_of_a_box_are_boxes(box: Box) -> None:
    numbers = torch.arange(math.prod(s + n for s, n in box)).view([s + n for s, n in box])
    whole = numbers[tuple(slice(s, s + n) for s, n in box)].reshape(-1)
    for begin in range(whole.numel() + 1):
        for end in range(begin, whole.numel() + 1):
            parts = [numbers[tuple(slice(s, s + n) for s, n in b)].reshape(-1) for b in sub_boxes(box, begin, end)]
            assert torch.equal(torch.cat([whole[:0], *parts]), whole[begin:end])
            assert len(parts) <= max(1, 2 * len(box) - 1)


@pytest.mark.parametrize(
    ("size", "trained", "stages", "served", "limit_s"),
    [
        ((80, 8192, 28672, 128256), {"dp": 16, "tp": 8}, 1, {"replica": 8, "tp": 8}, 10),
        pytest.param((126, 16384, 53248, 128256), {"dp": 128, "tp": 8}, 16, {"tp": 16}, 60, marks=pytest.mark.slow),
    ],
    ids=["llama-70b", "llama-405b"],
)
def test_large_models(
    size: tuple[int, ...], trained: dict[str, int], stages: int, served: dict[str, int], limit_s: int
) -> None:
    """FSDP with tensor parallelism, and stages, to tensor-parallel replicas."""
    shapes = decoder(*size)
    source = megatron(shapes, Mesh(trained, hardware="h100"), stages, fsdp=True)
    target = megatron(shapes, Mesh(served, hardware="h100"))
    began = time.perf_counter()
    schedule = make_schedule(source, target, links_of(source, target), hardware("h100"))
    seconds = time.perf_counter() - began
    print(f"{seconds:.1f} s for\n{schedule}")
    assert seconds < limit_s
    assert schedule.received == schedule.bound
    assert schedule.most_sent <= 1.1 * schedule.least_most_sent
    rank = max(served.values()) - 1
    into = [p for p in schedule.pieces(rank) if p.receiver == rank]
    held = sum(math.prod(h.replicas[0].layout.local_shape(h.shape, rank)) * 2 for h in target.values())
    assert sum(p.nbytes for p in into) == held
    assert sum(p.nbytes for p in into if p.sender != rank) == schedule.received[rank]


def test_errors_say_what_is_missing() -> None:
    pair = _pair()
    with pytest.raises(PlanError, match=r"lacks 1 tensors of the target: \['w'\]"):
        links_of({}, pair.target)
    with pytest.raises(PlanError, match=r"'w' of the target has shape \[8, 6\], but 'w' of the source has \[3, 6\]"):
        links_of({"w": _pair((3, 6)).source["w"]}, pair.target)

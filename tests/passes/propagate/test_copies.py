"""What the runtime copies around collectives is in the price of a step, and so is what experts consist of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from routing_models import WIDTH, Routed

import autoshard
from autoshard import Layout, Mesh, Shard
from autoshard.hardware import PRESETS
from autoshard.layout import I, P, Placement, R
from autoshard.models import Gpt, GptConfig
from autoshard.passes.ir.graph import TensorType
from autoshard.passes.propagate.edges import conversion_parts
from autoshard.passes.propagate.prices.collective_overheads import copy_seconds
from autoshard.passes.redistribute.pricing import MessageShares
from autoshard.passes.rules.families.experts import EXPERT_KERNELS
from autoshard.report.schedule import step_timeline

SHAPE = (1024, 512)
NUMEL = 1024 * 512
SOME = MessageShares(0.5, 0.5)


def bytes_copied(
    type_: TensorType, src: Placement, dst: Placement, parameter: bool, share: MessageShares
) -> Sequence[float]:
    """Forward, backward; on four ranks."""
    mesh = Mesh({"dp": 4}, "h100")
    layouts = ([Layout(mesh, {"dp": p})] for p in (src, dst))
    found = copy_seconds(type_, *layouts, parameter, share)
    return [float(x[0, 0]) / mesh.hardware.memory_seconds(1.0) for x in found]


@pytest.mark.parametrize(
    ("src", "dst", "share", "ahead", "back"),
    [
        (Shard(0), R, SOME, 2 * 2 * NUMEL / 4 + 2 * 2 * NUMEL, 2 * 2 * NUMEL),  # in, out; the gradient in
        (Shard(0), R, MessageShares(), 0, 0),  # alone in its bucket it travels as it lies
        (Shard(1), R, MessageShares(), 2 * 2 * NUMEL / 4 + 2 * 2 * NUMEL, 2 * 2 * NUMEL),
        (Shard(0), I, SOME, 2 * 2 * NUMEL / 4 + 2 * 2 * NUMEL, 0),  # the gradient is sliced
        (I, R, SOME, 0, 2 * 2 * NUMEL),
        (R, R, SOME, 0, 0),
    ],
)
def test_parameters_go_through_buffers(
    src: Placement, dst: Placement, share: MessageShares, ahead: float, back: float
) -> None:
    type_ = TensorType(SHAPE, torch.bfloat16, grad=True)
    assert bytes_copied(type_, src, dst, True, share) == pytest.approx([ahead, back])


def test_other_values_are_copied_where_they_are_summed() -> None:
    type_ = TensorType(SHAPE, torch.float32, grad=True)
    whole = 2 * 4 * NUMEL
    pairs = (
        (P, I, [whole, 0]),
        (P, R, [whole, whole]),
        (I, R, [0, whole]),
        (Shard(0), R, [0, 0]),
        (P, Shard(0), [0, 0]),
    )
    for src, dst, expected in pairs:
        assert bytes_copied(type_, src, dst, False, MessageShares()) == pytest.approx(expected)


def test_copies_hide_behind_nothing() -> None:
    mesh, type_ = Mesh({"dp": 4}, "h100"), TensorType(SHAPE, torch.bfloat16, grad=True)
    (ahead,), (back,) = (x[0] for x in copy_seconds(type_, *_gather(mesh), True, SOME))
    for stage, gathers in ((0, 2), (2, 1)):
        parts = conversion_parts(type_, *_gather(mesh), stage, True, SOME)
        launches = (gathers + 1) * mesh.hardware.kernel_latency * 0.5
        assert float(parts.blocking[0, 0]) == pytest.approx(gathers * ahead + back + launches)


def _gather(mesh: Mesh) -> tuple[list[Layout], list[Layout]]:
    return [Layout(mesh, {"dp": Shard(0)})], [Layout(mesh, {"dp": R})]


@pytest.mark.slow_cases("1-ddp", "1-fsdp", "2-fsdp", "2-megatron", "2-ddp")
@pytest.mark.parametrize("like", ["ddp", "fsdp", "megatron"])
@pytest.mark.parametrize("passes", [1, 2])
def test_the_timeline_has_them(like: str, passes: int) -> None:
    with torch.device("meta"):
        model, tokens = Gpt(GptConfig.tiny()), torch.zeros(8, 16, dtype=torch.long)
    args = {"labels": tokens}
    plan = autoshard.plan(model, {"dp": 2}, (tokens,), args, like=like, training=True, micro_batches=passes)
    copied = sum(c.copied_s for c in plan.collectives)
    shown = sum(e.seconds for e in step_timeline(plan) if e.name.startswith("copies of "))
    assert copied * (1 - 1e-9) <= shown <= copied / plan.mesh.hardware.overlap  # slower beside communication
    assert 0 < copied <= plan.cost.local_s * (1 + 1e-9)


@pytest.mark.slow
def test_experts_are_kernels_beside_their_products() -> None:
    """Their backward multiplies rows and weights of experts; not gates, whose rows of two would be narrow products."""
    plain = replace(PRESETS["cpu"], products=((2, 0.05), (16, 1.0)), memory_bandwidth=1e18, kernel_latency=0.0)
    found = []
    for latency in (0.0, 1e-6):
        mesh = Mesh({"x": 1}, replace(plain, kernel_latency=latency))
        plan = autoshard.plan(Routed("in_order"), mesh, (torch.randn(8, 64, WIDTH),), training=True)
        (choice,) = (c for c in plan.choices.values() if "experts" in c.op)
        found.append((choice.seconds - choice.backward_s, choice.backward_s))
    (forward, backward), launched = found
    assert backward == pytest.approx(2 * forward, rel=1e-3)
    assert launched == pytest.approx((forward + EXPERT_KERNELS * 1e-6, backward + EXPERT_KERNELS * 1e-6))

"""What a device takes for products by dtype and by how rows lie in memory; rates of links by kind and group; files."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import autoshard
from autoshard import Hardware, Level, Link, Mesh
from autoshard.hardware import PRESETS, SMALL_ALL_REDUCE, Rate, Route
from autoshard.hardware.device import FIELD_CHECKS

H100 = PRESETS["h100"]
FULL_NODES = ((394 * 7 / 8) ** -4 + (8 * 48) ** -4) ** -0.25
"""GB/s of a ring that takes NVLink and all cards"""


def test_rows_that_are_no_whole_loads_slow_products_of_16_bits() -> None:
    """GPT-2's 50257 classes; the gradients of such a product are slow, too. Decoding one row is not."""
    slow, fast = (H100.is_aligned(2.0 * 1024 * 768 * n, (1024, n), torch.bfloat16) for n in (50257, 50304))
    assert (slow, fast) == (False, True)
    assert H100.is_aligned(2.0 * 768 * 50304, (1, 50304), torch.bfloat16)
    assert H100.is_aligned(2.0 * 1024 * 768 * 50257, (1024, 50257), torch.float32)
    taken = [H100.product_seconds(1e12, (1024, 50304), torch.bfloat16, aligned=aligned) for aligned in (True, False)]
    assert taken[1] == pytest.approx(taken[0] / H100.unaligned)


def test_convolutions_of_few_channels_are_slow() -> None:
    """Between two that were measured seconds are interpolated; fewer than the fewest take as long as these."""
    here = replace(H100, channels=((8, 0.4), (16, 0.8), (24, 0.6), (32, 1.0)))

    def taken(*channels: int) -> float:
        return here.convolution_seconds(2.0 * math.prod(channels), torch.bfloat16, channels)

    full = taken(64, 64) / 64**2
    assert full == pytest.approx(2.0 / (989.4e12 * H100.efficiency * H100.convolutions))
    few = [taken(n, 64) / (64 * full) for n in (4, 8, 12, 16, 24, 32, 48)]
    assert few == pytest.approx([20, 20, 20, 20, 40, 32, 48])
    assert [taken(64, n) / (64 * full) for n in (8, 12, 24)] == pytest.approx([20, 20, 40])
    assert taken(24, 16) / full == pytest.approx(40 * 20)
    assert replace(here, channels=()).convolution_seconds(2.0, torch.bfloat16, (8, 8)) == pytest.approx(full)


def seconds(m: int, n: int, k: int, device: Hardware = H100) -> float:
    return device.product_seconds(2.0 * m * n * k, (m, n), torch.bfloat16)


OPENXLA = """
    4096 4096 4096 783 | 4096 4096 2048 739 | 4096 4096 1024 677 | 4096 2048 4096 758 | 2048 2048 4096 738 | 2048 1024 4096 653
    1024 1024 4096 470 | 4096 2048 2048 716 | 1024 4096 2048 634 | 2048 1024 2048 523 | 1024 1024 2048 350 | 512 4096 4096 644
    512 2048 4096 431 | 512 1024 4096 310 | 256 4096 4096 412 | 512 512 4096 175 | 16384 4096 4096 793 | 16384 4096 1024 726
"""
"""rows, columns, summands, TFLOP/s of products of bfloat16 on H100: gpu/model/matmul_interpolator_data.h of OpenXLA; the last
two in batches of four. Its smallest product takes 5.2 µs; its clock is higher than that of the preset's 716 TFLOP/s."""


def test_products_by_size_are_as_measured() -> None:
    """Within 15 % of OpenXLA's, at a clock at which the largest agree; and of cuBLAS's large square ones."""
    errors = []
    for m, n, k, reached in (map(int, row.split()) for row in OPENXLA.strip().replace("\n", "|").split("|")):
        taken = seconds(m, n, k) * 716 / 808 + 5.2e-6
        errors.append(taken / (2.0 * m * n * k / (reached * 1e12)) - 1)
    assert all(abs(error) < 0.15 for error in errors)
    assert sorted(map(abs, errors))[len(errors) // 2] < 0.04
    assert seconds(8192, 8192, 8192) == pytest.approx(2.0 * 8192**3 / 716e12)
    a100 = PRESETS["a100"]
    assert seconds(8192, 8192, 8192, a100) == pytest.approx(2.0 * 8192**3 / 258e12)


def test_what_fills_no_wave_goes_in_other_tiles() -> None:
    """133 tiles of the largest size would take two waves on 132 multiprocessors; half as large ones take less."""
    rate = [2.0 * 128 * tiles * 256 * 8192 / seconds(128 * tiles, 256, 8192) for tiles in (132, 133, 264)]
    assert rate[0] == pytest.approx(rate[2], rel=0.02)
    assert 0.5 < 133 / 264 * 1.1 < rate[1] / rate[0] < 0.85
    assert H100.tiling is not None
    one = replace(H100, tiling=H100.tiling._replace(tiles=H100.tiling.tiles[:1]))
    full, more = (seconds(128 * tiles, 256, 8192, one) for tiles in (132, 133))
    assert more / full == pytest.approx(2, rel=0.02)
    flat = replace(H100, tiling=None)
    assert seconds(128 * 133, 256, 8192, flat) / 133 == pytest.approx(seconds(128 * 132, 256, 8192, flat) / 132)
    assert Hardware.from_dict(json.loads(json.dumps(H100.to_dict()))) == H100


@pytest.mark.parametrize(("axes", "like"), [({"x": 1}, None), ({"x": 2}, {"x": "ring"})], ids=str)
def test_attention_with_dropout_writes_its_weights_down(axes: dict[str, int], like: Any) -> None:
    """12 layers of GPT-2 of 16 x 1024 tokens took 78 ms more with dropout in their attention than without."""

    def seconds(p: float) -> float:
        class Attention(torch.nn.Module):
            def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)

        operands = [torch.empty(16, 12, 1024, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)] * 3
        mesh = Mesh(axes, replace(H100, fuses=False))
        return autoshard.plan(Attention(), mesh, tuple(operands), like=like, exact_dropout=True).cost.compute_s

    more = seconds(0.1) - seconds(0.0)
    if like is None:
        assert more == pytest.approx(78e-3 / 12, rel=0.15)
    else:  # on half of the rows, and not less: products of tiles are in single precision
        assert more == pytest.approx(78e-3 / 24, rel=0.2)


def test_what_is_slow_takes_little_of_the_memory_from_compute() -> None:
    """Between nodes one card carries 48 GB/s, eight nearly as much as links inside a node."""
    for axes, rate in (({"dp": 8, "tp": 8}, 48), ({"dp": 64}, FULL_NODES)):
        mesh, far = Mesh(axes), 1 - (1 - H100.overlap) * rate / (394 * 7 / 8)
        assert mesh.overlap == pytest.approx((H100.overlap, far), rel=1e-6)
        assert mesh.beside("dp") == pytest.approx(far)
    mesh = Mesh({"dp": 8, "tp": 8})
    assert mesh.beside("tp") == H100.overlap < mesh.beside("tp", "permute") < mesh.beside("dp")
    lost = (1 - mesh.beside("tp", "permute")) / (1 - H100.overlap)
    assert lost == pytest.approx((537 / 2) / (394 * 7 / 8))  # at the rate of two ranks
    alone = Mesh({"dp": 8, "tp": 8}, replace(H100, overlap=0.0))
    assert alone.overlap == (0.0, 0.0)
    assert Mesh({"dp": 2}, "cpu").overlap == (0.0, 0.0)


def test_float32_is_slow_unless_it_may_be_tf32() -> None:
    try:
        assert H100.peak(torch.float32) == H100.peak(torch.float64) == 66.9e12
        torch.set_float32_matmul_precision("high")
        assert H100.peak(torch.float32) == 494.7e12
    finally:
        torch.set_float32_matmul_precision("highest")


def test_rates_of_collectives_are_those_measured() -> None:
    one_node = Mesh({"tp": 8})
    for kind, passes, gigabytes, latency in (("all_gather", 1, 394, 30e-6), ("all_reduce", 2, 267, 31e-6)):
        size = 1e9
        ring = passes * 7 / 8 * size
        taken = H100.kernel_latency + latency + size / (gigabytes * 1e9)
        assert one_node.link("tp").seconds(ring, kind) == pytest.approx(taken)
    assert one_node.link("tp").seconds(0.0, "reduce_scatter") == pytest.approx(H100.kernel_latency + 30e-6)


@pytest.mark.parametrize(("nodes", "gather", "reduce"), [(2, 77e-6, 51e-6), (8, 229e-6, 63e-6)])
def test_groups_that_span_nodes_are_hierarchical(nodes: int, gather: float, reduce: float) -> None:
    mesh = Mesh({"dp": nodes, "tp": 8})
    whole = mesh.link(("dp", "tp"))
    assert whole.seconds(0.0, "all_gather") - H100.kernel_latency == pytest.approx(gather, rel=0.05)  # rings only
    assert whole._rate("all_gather")[0] == pytest.approx(gather, rel=0.05)  # of a ring
    assert whole.seconds(0.0, "all_reduce") - H100.kernel_latency == pytest.approx(reduce, rel=0.05)
    across = mesh.link("dp")
    assert across.rate("all_gather")[0] <= across.rate("all_reduce")[0]  # with one rank per node also trees
    assert (across.inside, across.nodes) == (1, nodes)
    assert [mesh.crosses(axes) for axes in ("dp", ("dp", "tp"), "tp")] == [True, True, False]
    # A group with all cards of its nodes sends through all of them, one with a single rank per node through one.
    assert across.rate("all_gather")[1] == pytest.approx(1 / 48e9)
    assert whole.rate("all_gather")[1] < across.rate("all_gather")[1] / 4
    # An all-to-all sends each rank its own: nearly all of it leaves the node, through the rank's own card.
    assert whole.rate("all_to_all")[1] > 3 * whole.rate("all_gather")[1]
    for route in (whole, across, mesh.link("tp")):
        together, apart = route.rate("all_reduce"), [route.rate(k) for k in ("reduce_scatter", "all_gather")]
        assert together[0] <= sum(a for a, _ in apart)
        assert together[1] <= sum(b for _, b in apart) / 2


MEASURED = {
    "all_gather": {
        (2, 4): 209.7,
        (2, 8): 322.6,
        (4, 8): 328.1,
        (8, 2): 99.1,
        (8, 4): 203.7,
        (8, 8): 305.0,
        (16, 8): 286.1,
    },
    "reduce_scatter": {(2, 8): 377.0, (8, 4): 196.6, (8, 8): 358.5, (16, 8): 299.7, (32, 8): 301.2},
    "all_reduce": {
        (2, 2): 88.5,
        (2, 4): 165.2,
        (4, 4): 101.0,
        (4, 8): 187.7,
        (8, 1): 25.9,
        (8, 4): 97.9,
        (8, 8): 171.4,
    },
    "all_to_all": {(2, 8): 82.5, (4, 8): 55.8, (8, 1): 46.0, (8, 8): 46.8, (32, 8): 43.1},
}
"""GB/s of tensor per second of large NCCL collectives on H100, by (nodes, ranks of each): AutoParallel's table"""


@pytest.mark.parametrize("kind", MEASURED)
def test_rates_between_nodes_are_those_measured(kind: str) -> None:
    for (nodes, inside), gigabytes in MEASURED[kind].items():
        ranks = nodes * inside
        sent = (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
        assert 1e-9 / H100.route(inside, nodes).rate(kind)[1] == pytest.approx(gigabytes * sent, rel=0.16)


def test_rates_between_measured_sizes_and_beyond() -> None:
    link = Link(1.0, 1.0, (Rate("all_gather", 2, 1e-6, 4e9), Rate("all_gather", 6, 3e-6, 2e9)))
    assert link.rate("all_gather", 1) == (0.0, 0.0)
    assert link.rate("all_gather", 4) == pytest.approx((2e-6, (1 / 4e9 + 1 / 2e9) / 2))
    assert link.rate("all_gather", 8) == pytest.approx((4e-6, 1 / 2e9))
    assert link.rate("all_to_all", 6) == link.rate("all_gather", 6)
    assert Link(1e-6, 1e9).rate("all_reduce", 5) == pytest.approx((2e-6, 1e-9))


def test_one_number_goes_as_an_all_reduce_where_nothing_else_was_measured() -> None:
    for hardware in PRESETS.values():
        if any(rate.kind == SMALL_ALL_REDUCE for rate in hardware.node.rates):
            continue
        for inside, nodes in ((2, 1), (8, 1), (4, 3), (1, 4)):
            route = hardware.route(inside, nodes)
            assert route.rate(SMALL_ALL_REDUCE) == route.rate("all_reduce")
    rows = [Rate("all_gather", 4, 2e-6, 1e9), Rate("all_reduce", 4, 3e-6, 1e9)]
    for measured, least in ((1e-6, 1e-6), (5e-6, 3e-6)):
        link = Link(1.0, 1.0, (*rows, Rate(SMALL_ALL_REDUCE, 4, measured, 1e9)))
        assert Route(link, link, 4, 1).rate(SMALL_ALL_REDUCE)[0] == pytest.approx(least)


def test_ranks_that_share_cores_work_faster_while_others_wait() -> None:
    shared = replace(H100, sharing=((1, 0.5), (2, 0.5), (4, 1.0)))
    assert shared.paces(4, 1) == pytest.approx((2.0, 2.0, 4 / 3, 1.0))
    assert shared.paces(2, 2) == (2.0, 1.0)
    assert shared.paces(8, 1) == H100.paces(4, 1) == ()
    assert [shared.relative_duration(n, 4) for n in (1, 1.5, 3, 4)] == pytest.approx([0.5, 0.5, 0.75, 1.0])
    assert [shared.relative_duration(n, 2) for n in (1, 2)] == [1.0, 1.0]
    assert shared.relative_duration(1, 8) == H100.relative_duration(1, 4) == 1.0


def test_hardware_is_saved_and_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    for hardware in PRESETS.values():
        hardware.save(path)
        assert Hardware.load(path) == hardware == Mesh({"dp": 2}, hardware=str(path)).hardware
    wrong: tuple[tuple[str, Any], ...] = (
        ("node", None),
        ("network", 3),
        ("products", "q"),
        ("tiling", "q"),
        ("updates", -1),
    )
    known = PRESETS["cpu"].to_dict()
    for data in ({"name": "half"}, [], *({**known, name: value} for name, value in wrong)):
        path.write_text(json.dumps(data))
        with pytest.raises(autoshard.MeshError, match="was not written by Hardware"):
            Mesh({"dp": 2}, hardware=str(path))
    with pytest.raises(autoshard.MeshError, match="cannot be read"):
        Hardware.load(tmp_path / "none.json")
    with pytest.raises(autoshard.MeshError, match="unknown hardware 'h1oo'"):
        Mesh({"dp": 2}, hardware="h1oo")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"flops": 0.0}, "flops is a number above 0, got 0.0"),
        ({"memory_bandwidth": float("nan")}, "memory_bandwidth is a number above 0, got nan"),
        ({"memory_bytes": -1}, "memory_bytes is a number above 0, got -1"),
        ({"efficiency": 0}, "efficiency is a number above 0, got 0"),
        ({"devices_per_node": 0}, "devices_per_node is an int of at least 1, got 0"),
        ({"devices_per_node": 2.5}, "devices_per_node is an int of at least 1, got 2.5"),
        ({"kernel_latency": -1e-6}, "kernel_latency is seconds, got -1e-06"),
        ({"overlap": 1.5}, "overlap is a share from 0 to 1, got 1.5"),
        ({"updates": -1}, "updates is a number of at least 0, got -1"),
        ({"updates": float("nan")}, "updates is a number of at least 0, got nan"),
        ({"unaligned": "q"}, "unaligned is a number above 0, got 'q'"),
        ({"attention_tile": -1}, "attention_tile is an int of at least 0, got -1"),
        ({"cpu": [-1]}, "cpu is True or False, got"),
        ({"caches": ((1e6, None),)}, "caches is a tuple of tuples of 2 numbers of at least 0, got"),
        ({"caches": (3,)}, "caches is a tuple of tuples of 2 numbers of at least 0, got"),
        ({"attention": [(128, 0.5, 0.5)]}, "attention is a tuple of tuples of 3 numbers of at least 0, got"),
        ({"dtypes": 3}, "dtypes is a tuple of tuples of a name and FLOP/s above 0, got 3"),
        ({"dtypes": (("float32", 0.0),)}, "dtypes is a tuple of tuples of a name and FLOP/s above 0, got"),
        ({"functions": None}, "functions is a tuple of seconds forward and backward, or an empty tuple, got None"),
        ({"node": None}, "node is a Link, got None"),
        ({"tiling": (1, 2)}, "tiling is a Tiling of tiles above 0, or None, got"),
        ({"dtypes": ((1, 1e12),)}, "dtypes is a tuple of tuples of a name and FLOP/s above 0, got"),
        ({"functions": (1e-9,)}, "functions is a tuple of seconds forward and backward, or an empty tuple, got"),
    ],
)
def test_numbers_that_no_device_has_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(autoshard.MeshError, match=f"hardware 'h100': {told}"):
        replace(PRESETS["h100"], **wrong)


SERVER, RACK, POD = Level("server", 8, H100.node), Level("rack", 16, H100.network), Level("pod", 64, Link(2e-5, 40e9))
CLUSTER = Level("cluster", 256, Link(3e-5, 8e9))
FOUR = replace(H100, name="four", levels=(SERVER, RACK, POD, CLUSTER))


def test_two_levels_are_node_and_network() -> None:
    """Spelled out or not, prices are the same; what is replaced afterwards counts."""
    assert [(x.name, x.size, x.link) for x in H100.levels[:1]] == [("node", 8, H100.node)]
    spelled = replace(H100, levels=(SERVER, Level("cluster", 1024, H100.network)))
    for axes in ({"dp": 8, "tp": 8}, {"x": 24}, {"dp": 3, "tp": 4}):
        for kind in ("all_gather", "all_reduce", "all_to_all", "permute"):
            routes = [[Mesh(axes, device).link(a).rate(kind) for a in axes] for device in (H100, spelled)]
            assert routes[0] == routes[1]
    assert replace(H100, devices_per_node=4).levels[0].size == 4
    assert "levels" not in H100.to_dict()
    assert Hardware.from_dict(json.loads(json.dumps(FOUR.to_dict()))) == FOUR
    made = Hardware("made", 1e12, 1e12, 1e9, levels=(SERVER, RACK))
    assert (made.node, made.network, made.devices_per_node) == (SERVER.link, RACK.link, 8)


def test_a_group_pays_for_the_slowest_level_that_it_spans() -> None:
    mesh = Mesh({"cluster": 4, "pod": 4, "rack": 2, "server": 8}, FOUR)
    rates = {axis: mesh.link(axis).rate("all_to_all")[1] for axis in mesh.axes}
    assert rates["cluster"] == pytest.approx(1 / 8e9)
    assert rates["pod"] == pytest.approx(1 / 40e9)
    assert rates["rack"] == pytest.approx(1 / 0.87 / 48e9)
    assert rates["server"] < rates["rack"] / 4
    assert mesh.link("cluster").rate("permute")[0] > mesh.link("pod").rate("permute")[0]


def test_ranks_of_a_unit_share_what_it_sends() -> None:
    """A ring leaves a pod with all its bytes: the more ranks are there, the more devices' shares it has."""
    few, many = (Mesh({"outer": 4, "mid": 64 // n, "inner": n}, FOUR).link(("outer", "inner")) for n in (2, 32))
    assert few.rate("all_gather")[1] == pytest.approx(1 / 8e9 / 2, rel=1e-4)
    assert many.rate("all_gather")[1] == pytest.approx(1e-9 / FULL_NODES, rel=0.01)  # the cards of a server
    # All ranks of an all-to-all send out of the pod, whatever their number.
    assert many.rate("all_to_all")[1] == pytest.approx(96 / 127 / 8e9)


def test_the_slowest_of_many_devices_is_waited_for() -> None:
    """Of n normal variables the largest is expected 1.42, 2.51 and 3.24 deviations above the mean (n = 8, 100, 1000)."""
    for ranks, deviations in ((1, 0.0), (8, 1.42), (100, 2.51), (1000, 3.24)):
        assert replace(H100, variation=0.02).slowest_excess(ranks) == pytest.approx(0.02 * deviations, rel=0.02)
    model, x = torch.nn.Linear(1024, 1024), torch.empty(64, 1024)
    even, uneven = (
        autoshard.plan(
            model, Mesh({"x": 8}, replace(H100, variation=v)), (x,), like="ddp", training=True
        ).cost.compute_s
        for v in (0.0, 0.02)
    )
    assert uneven == pytest.approx(even * (1 + 0.02 * 1.434), rel=1e-3)


@pytest.mark.parametrize(
    ("levels", "told"),
    [
        ((SERVER,), "two or more Level"),
        ((SERVER, POD, RACK), "level 'rack' has 16 devices, which is not a multiple of the 64 of level 'pod'"),
        ((SERVER, Level("rack", 12, H100.network)), "not a multiple of the 8 of level 'server'"),
        (3, "two or more Level"),
    ],
)
def test_levels_that_no_cluster_has_are_refused(levels: Any, told: str) -> None:
    with pytest.raises(autoshard.MeshError, match=told):
        replace(H100, levels=levels)


def test_a_mesh_is_no_larger_than_its_cluster() -> None:
    Mesh({"x": 256}, FOUR)
    with pytest.raises(autoshard.MeshError, match="512 ranks, but level 'cluster' of four joins 256 devices"):
        Mesh({"x": 512}, FOUR)
    for size, link in ((0, H100.node), (8, None)):
        with pytest.raises(autoshard.MeshError, match="level 'server' needs a size of at least 1 device and a Link"):
            Level("server", size, link)  # type: ignore[arg-type]


def test_every_field_has_its_check() -> None:
    assert list(FIELD_CHECKS) == [field.name for field in fields(Hardware)]
    with pytest.raises(autoshard.MeshError, match="hardware 3: name is a text, got 3"):
        replace(PRESETS["h100"], name=3)  # type: ignore[arg-type]
    assert replace(PRESETS["h100"], efficiency=np.float32(0.5), ahead=np.int64(2)).ahead == 2


def test_numbers_that_no_link_has_are_refused() -> None:
    for wrong in ((1e-6, 0.0), (-1e-6, 1e9), (1e-6, 1e9, (Rate("all_gather", 2, 1e-6, 0.0),))):
        with pytest.raises(autoshard.MeshError, match="bandwidth above 0 in B/s"):
            Link(*wrong)

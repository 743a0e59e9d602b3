"""Nets whose positions are cut: equal to one device, with the halos that the plan predicts and nothing gathered."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training, collectives
from sites import recorded, run, site
from torch import nn
from window_samples import SAMPLES

import autoshard
from autoshard import Mesh, Shard, runtime
from autoshard.check.rule_check import check_rule
from autoshard.errors import RuleError
from autoshard.passes.rules import rule_for
from autoshard.runtime.transport.window import Exchange, Window, chunks, halo_of

aten = torch.ops.aten


class Image(nn.Module):
    """Strides, dilation, groups, pools, and back up. Channels are few and odd, so that positions divide best."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(5, 5, 3, padding=1),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Conv2d(5, 5, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv2d(5, 5, 3, dilation=3, padding=3, groups=5),
            nn.MaxPool2d(3, 2, 1),
            nn.ConvTranspose2d(5, 5, 4, 2, 1),
            nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        )
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.body(x), 1).flatten(1)).square().mean()


class Wave(nn.Module):
    """A long sequence: padded to be causal, strided, dilated, and back up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv1d(1, 5, 7, padding="same"), nn.Conv1d(5, 5, 8, 4, 2)
        self.wide, self.up = nn.Conv1d(5, 5, 3, dilation=9), nn.ConvTranspose1d(5, 1, 8, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(F.silu(self.first(x)))
        x = x + self.wide(F.pad(x, (18, 0)))
        return self.up(x).square().mean()


def image() -> torch.Tensor:
    """One sample, odd and narrow."""
    return torch.randn(1, 5, 25, 1, generator=torch.Generator().manual_seed(0))


def height(axes: dict[str, int]) -> dict[str, Any]:
    """Hints that cut the height of everything."""
    cut = {axis: Shard(2) for axis in axes}
    return {"x": cut, "body.?": cut, "body.*.weight": "replicate", "body.*.bias": "replicate"}


@pytest.mark.slow_cases("{'a': 2, 'b': 2}", "{'tp': 2}")
@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 3}, {"a": 2, "b": 2}], ids=str)
def test_a_net_cut_along_the_height(axes: dict[str, int]) -> None:
    found = collectives(Image(), axes, height(axes), (image(),))
    if len(axes) > 1:
        assert any(c[:3] == ("permute", ("a", "b"), "backward") for c in found)
        return
    head = 5 * 8  # its few features may be cut
    assert {kind for kind, _, _, size in found if size > head} == {"permute", "all_reduce"}
    # Six windows; the first one's operand, the image, needs no gradient.
    assert {k: n for k, n in _count(found).items() if k[0] == "permute"} == {
        ("permute", "forward"): 6,
        ("permute", "backward"): 5,
    }


def _count(found: Counter[Any]) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for (kind, _, phase, _), n in found.items():
        counts[kind, phase] += n
    return counts


@pytest.mark.slow
def test_height_and_width_on_two_axes() -> None:
    """The second halo carries the corners of the first."""
    cut = {"a": Shard(2), "b": Shard(3)}
    hints = {"x": cut, "body.?": cut, "body.*.weight": "replicate", "body.*.bias": "replicate"}
    x = torch.randn(1, 5, 18, 14, generator=torch.Generator().manual_seed(0))
    found = collectives(Image(), {"a": 2, "b": 2}, hints, (x,))
    assert {axes for kind, axes, *_ in found if kind == "permute"} >= {("a",), ("b",)}


@pytest.mark.slow_cases("{'sp': 2}")
@pytest.mark.parametrize("axes", [{"sp": 2}, {"sp": 3}], ids=str)
def test_a_long_sequence(axes: dict[str, int]) -> None:
    """What is sent does not grow with the sequence."""
    sent = []
    for length in (400, 1600):
        x = torch.randn(1, 1, length, generator=torch.Generator().manual_seed(0))
        hints = {"x": Shard(2), "*weight": "replicate", "*bias": "replicate"}
        found = collectives(Wave(), axes, hints, (x,))
        assert {kind for kind, *_ in found} == {"permute", "all_reduce"}
        sent.append(sum(size * n for (_, _, _, size), n in found.items()))
    assert sent[1] < 1.3 * sent[0]


def test_the_source_reads_well() -> None:
    axes = {"tp": 2}
    model, x = Image().double(), image().double()  # without an order of channels for oneDNN
    sharded = autoshard.compile(model, Mesh(axes, hardware="ideal_network"), (x,), hints=height(axes))
    lines = (
        "        conv2d = F.conv2d(",
        "            runtime.halo(",
        "                x,",
        "                dim=2,",
        "                size=25,",
        "                to=13,",
        '                axes="tp",',
        "                window=runtime.Window(kernel=5, stride=2, padding=2),",
        "            ),",
        "            x3_weight,",
        "            x3_bias,",
        "            [2, 2],",
        "            [0, 2],",
        "        )",
    )
    assert "\n".join(lines) in sharded.source


def test_patches_need_no_halo() -> None:
    """Windows that end where chunks end: no call, no message."""
    axes = {"tp": 2}
    model = nn.Conv2d(3, 5, 4, 4)
    hints = {"input": Shard(2), "weight": "replicate", "bias": "replicate"}
    x = torch.randn(1, 3, 16, 4)
    sharded = autoshard.compile(model, Mesh(axes, hardware="ideal_network"), (x,), hints=hints)
    assert "S(2)@tp" in sharded.source
    assert "halo" not in sharded.source
    assert_equal_training(model, axes, (x,), hints=hints)


def test_an_image_alone_is_cut_along_its_height_or_width() -> None:
    """No samples and no channels to cut: the work is divided all the same, without a hint."""
    model = nn.Sequential(nn.Conv2d(1, 1, 5, padding=2), nn.ReLU(), nn.Conv2d(1, 1, 5, padding=2))
    report = assert_equal_training(model, {"tp": 3}, (torch.randn(1, 1, 30, 31),), share=1.01)
    assert any(c.kind == "permute" for c in report.plan.collectives)


@pytest.mark.parametrize(("batch", "cut"), [(1, 2), (4, 0)])
def test_large_images_on_real_hardware(batch: int, cut: int) -> None:
    """One image is cut along its height, and the halos cost next to nothing; four of them are dealt out."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 32, 7, 2, 3), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1)).bfloat16()
        images = torch.empty(batch, 3, 2048, 2048, dtype=torch.bfloat16)
    plan = autoshard.plan(model, {"tp": 4}, (images,))
    assert plan.outputs[0] is not None
    assert plan.outputs[0]["tp"] == Shard(cut)
    assert plan.cost.flops_per_rank == plan.cost.flops / 4
    halos = [c.bytes for c in plan.collectives if c.kind == "permute"]
    assert bool(halos) == (cut == 2)
    row = 32 * 1024 * 2
    assert sum(halos) <= 3 * 3 * 2048 * 2 * 2 + 4 * row


@pytest.mark.parametrize("batch", [4, 8])
def test_samples_are_cut_where_they_can_be(batch: int) -> None:
    """Cut samples exchange nothing, so positions are not cut."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    mesh = Mesh({"dp": 4}, hardware="ideal_network")
    plan = autoshard.plan(model, mesh, (torch.randn(batch, 3, 16, 16),))
    assert not any(c.kind == "permute" for c in plan.collectives)
    assert plan.cost.flops_per_rank * 4 == plan.cost.flops


# --- what goes over the wire ---

CASES: list[tuple[Any, tuple[Any, ...], tuple[str, str]]] = [
    (op, SAMPLES[op][number][0], labels)
    for op, number, labels in [
        (aten.conv1d.default, 8, ("d2", "d2")),
        (aten.conv1d.default, 19, ("d2", "d2")),
        (aten.conv2d.default, 5, ("d2", "d3")),
        (aten.conv2d.default, 5, ("d2", "o")),
        (aten.conv_transpose1d.default, 3, ("d2", "d2")),
        (aten.max_pool2d.default, 2, ("d3", "d2")),
        (aten.avg_pool1d.default, 3, ("d2", "d2")),
        (aten.upsample_nearest1d.default, 1, ("d2", "d2")),
    ]
]


@pytest.mark.parametrize(
    ("op", "args", "labels"), CASES, ids=lambda value: str(value) if not isinstance(value, tuple) else None
)
def test_predicted_halos_are_those_executed(op: Any, args: tuple[Any, ...], labels: tuple[str, str]) -> None:
    rule = rule_for(op)
    assert rule is not None
    at = site(rule, args, labels, Mesh({"a": 2, "b": 2}))
    assert recorded(at)
    assert recorded(at) == sorted((e.kind, e.axes, e.phase, e.bytes) for e in run(rule, at, args)[1])


# --- geometry, against counting ---


@pytest.mark.parametrize("transposed", [False, True])
def test_reads_are_what_results_depend_on(transposed: bool) -> None:
    """Every operand position that a result depends on is read; in a plain window the ends are read by some result."""
    for kernel, stride, padding, dilation in itertools.product((1, 2, 4), (1, 2, 3), (0, 1, 3), (1, 2)):
        window = Window(kernel, stride, padding, dilation, transposed)
        spots = range(-20, 40)
        for first, count in ((0, 1), (0, 5), (3, 4), (7, 1)):
            low, length = window.read((first, count))
            results = range(first, first + count)
            if transposed:
                needed = {i for i in spots for k in range(kernel) if i * stride - padding + k * dilation in results}
                assert window.surplus((first, count)) >= 0
                assert window.surplus((first, count)) + count <= (length - 1) * stride + window.reach + 1
            else:
                needed = {o * stride - padding + k * dilation for o in results for k in range(kernel)}
                assert (low, low + length - 1) == (min(needed), max(needed))
            assert needed <= set(range(low, low + length))


def test_only_neighbours_send_and_only_what_is_read() -> None:
    halo = halo_of(Window(3, 1, 1), 24, 24, (4,))
    assert halo.exchange == Exchange(chunks(24, (4,)), ((0, 7), (5, 8), (11, 8), (17, 7)))
    pieces = {(s, r): halo.exchange.piece(s, r)[1] for s in range(4) for r in range(4) if s != r}
    assert {pair for pair, length in pieces.items() if length} == {(s, r) for s, r in pieces if abs(s - r) == 1}
    assert (halo.forward, halo.exchange.backward().received) == (2, 2)


# --- negative controls ---


def test_a_halo_one_short_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last position that comes from a neighbour is zero."""
    original, op, samples = runtime.halo, aten.conv1d.default, SAMPLES[aten.conv1d.default][5:7]
    check_rule(op, samples)

    def short(x: torch.Tensor, dim: int, kernel: int = 1, dilation: int = 1, **options: Any) -> torch.Tensor:
        x = original(x, dim, kernel=kernel - 1, dilation=dilation, **options)
        return F.pad(x, [*(0, 0) * (x.dim() - dim - 1), 0, dilation])

    monkeypatch.setattr(runtime, "halo", short)
    with pytest.raises(RuleError, match="is wrong in"):
        check_rule(op, samples)


def test_a_gradient_that_stays_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values as they should be, and the neighbours' gradients thrown away."""

    def lost(self: Exchange) -> Exchange:
        mine = tuple(chunk if r == 0 else (chunk[0], 0) for r, chunk in enumerate(self.wanted))
        return Exchange(mine, self.held)

    monkeypatch.setattr(Exchange, "backward", lost)
    with pytest.raises(RuleError, match="is wrong in"):
        check_rule(aten.conv1d.default, SAMPLES[aten.conv1d.default][5:7])

"""Splits of fused projections: every part is cut as the whole is, and only what ranks lack of their parts is sent."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch
from harness import collectives, ideal
from state_cases import CASES
from state_experts import Fused

import autoshard
from autoshard.compiler import capture_graph
from autoshard.errors import LayoutError
from autoshard.layout import Grouped
from autoshard.report.record import placement_from
from autoshard.viz import visualize_layout

aten = torch.ops.aten

AS_A_WHOLE = {"qkv.*": autoshard.Shard(0)}


def given() -> torch.Tensor:
    return torch.randn(3, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_slices_that_tile_a_projection_are_a_split() -> None:
    graph = capture_graph(Fused(), (given().float(),), {}, training=True)
    ops = [n.op for n in graph.nodes]
    assert aten.split_with_sizes.default in ops
    assert aten.slice.Tensor not in ops


def test_slices_that_leave_a_gap_are_none() -> None:
    class Gap(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y[..., :4] * y[..., 5:9]

    ops = [n.op for n in capture_graph(Gap(8, 9), (given().float(),), {}, training=True).nodes]
    assert ops.count(aten.slice.Tensor) == 2


def test_a_slice_whose_end_the_data_decides_is_none() -> None:
    class Cut(torch.nn.Linear):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y[:, : int(n)].sum() + y[..., : int(n)].sum() + y[..., int(n) :].sum()

    given_ = given().float(), torch.tensor(4)
    ops = [n.op for n in capture_graph(Cut(8, 9), given_, {}, training=True).nodes]
    assert ops.count(aten.slice.Tensor) == 3


def test_a_fused_layer_is_cut_as_a_pair_of_columns_and_rows() -> None:
    """Every part is cut, also of unequal ones: as Megatron's, two sums forward and one per residual branch backward."""
    found = collectives(Fused(), {"tp": 2}, None, (given(),), like="megatron")
    rows, item = 3 * 6, 8
    of_activations = Counter(c for c in found.elements() if c[3] == 2 * rows * 8 * item / 2)
    assert of_activations == found, found
    assert [kind for kind, _, _, _ in found.elements()] == ["all_reduce"] * 3, found


def test_what_a_shard_of_the_whole_lacks_is_sent() -> None:
    """Where a hint asks for it: all 16 queries lie on the first rank, all 8 keys and 8 values on the second."""
    found = collectives(Fused(), {"tp": 2}, AS_A_WHOLE, (given(),), like="megatron")
    parts = sorted(size for kind, _, phase, size in found.elements() if kind == "permute" and phase == "forward")
    assert parts == sorted(3 * 6 * 8 * n for n in (8, 4, 4)), found


def test_parts_of_another_rank_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every rank takes the parts that it holds itself."""

    def held(x: torch.Tensor, dim: int, lengths: list[int], axes: str) -> list[torch.Tensor]:
        return list(x.split([n // 2 for n in lengths], dim))

    monkeypatch.setattr("autoshard.runtime.split", held)
    report = autoshard.verify(Fused().double(), ideal({"tp": 2}), (given(),), like="megatron", hints=AS_A_WHOLE)
    assert not report.ok


class Viewed(torch.nn.Module):
    """Queries, keys and values of one projection, seen as a dim of three."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.o = heads, torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return (x + self.o(y.transpose(1, 2).flatten(2))).square().mean()


def test_parts_seen_as_a_dim_are_cut_each() -> None:
    """With shards of the weight beside it, too: nothing but weights and row-parallel results is sent."""
    found = collectives(Viewed(), {"dp": 2, "tp": 2}, None, (given()[:2],), like={"dp": "fsdp", "tp": "megatron"})
    assert not {(kind, axes) for kind, axes, _, _ in found} & {("permute", ("tp",)), ("all_gather", ("tp",))}, found


def test_two_axes_cut_parts_seen_as_a_dim() -> None:
    """Each rank of both has a head of queries, keys and values; results alone are summed."""
    found = collectives(Viewed(heads=4), {"a": 2, "b": 2}, None, (given(),), like="megatron")
    assert {kind for kind, _, _, _ in found} == {"all_reduce"}, found


class ThreeHeads(torch.nn.Module):
    """Plain projections that look like fused ones: their three heads are as well three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(18, 18) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (3, 6)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return (x + self.o(y.transpose(1, 2).flatten(2))).square().mean()


@pytest.mark.parametrize("axes", [{"a": 2, "b": 2}, {"a": 3, "b": 2}], ids=str)
def test_three_heads_may_be_shared_by_several_axes(axes: dict[str, int]) -> None:
    """By two of two ranks in no way that all operations have."""
    x = torch.randn(3, 6, 18, dtype=torch.float64)
    report = autoshard.verify(ThreeHeads().double(), ideal(axes), (x,), like="megatron")
    assert report.ok, report


class Gated(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up, self.down = torch.nn.Linear(8, 2 * width), torch.nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(gate.sigmoid() * up).square().mean()


@pytest.mark.parametrize(("width", "axes", "sent"), [(6, [4], True), (8, [2, 2], False), (8, [4], False)], ids=str)
def test_parts_that_do_not_divide_are_sent(width: int, axes: list[int], sent: bool) -> None:
    """Of 6 features in each part four ranks cannot hold as many each."""
    mesh = {f"tp{i}": n for i, n in enumerate(axes)}
    found = collectives(Gated(width), mesh, None, (given(),), like="megatron")
    assert any(kind == "permute" for kind, _, _, _ in found) == sent, found


def test_two_axes_cut_every_part() -> None:
    """Each rank of both has a query head and half a key head, which is gathered; state dicts know what lies where."""
    mesh = ideal({"a": 2, "b": 2})
    CASES["parts_of_fused_projections_stay_cut"](mesh)
    CASES["weights_cut_in_every_part_are_clipped_saved_and_loaded"](mesh)


def test_a_ratio_is_read_as_it_was_written() -> None:
    for parts in ((4, 1, 1), (1, 1), (28, 4, 4), (2**28 - 1, 1), (1, 2, 3, 4, 5, 6, 7), (3,) * 56):
        layout = autoshard.Layout({"a": 2, "b": 2}, {a: Grouped(1, parts) for a in "ab"})
        assert autoshard.Layout.from_torch(layout.mesh, layout.to_torch()) == layout
        assert placement_from(str(layout["a"])) == layout["a"]
    for wrong in ((1, 2**28), (1, 2) * 29, (4,), (3, 0)):
        with pytest.raises(LayoutError, match="parts must be a ratio that a DTensor can express"):
            Grouped(0, wrong)


@pytest.mark.slow
def test_torch_splits_by_ratio_in_a_process_without_a_sharded_module() -> None:
    """The placement itself knows its parts."""
    program = """
import torch
from autoshard.layout import Grouped, Layout
(placement,) = Layout({"a": 2}, {"a": Grouped(0, (2, 1))}).to_torch()
print([x.tolist() for x in placement._split_tensor(torch.arange(6), 2)[0]])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[[0, 1, 4], [2, 3, 5]]\n"


def test_a_plan_with_parts_is_given_back() -> None:
    plan = autoshard.plan(Gated(8).double(), ideal({"tp": 4}), (given(),), like="megatron")
    assert "n/2" in plan.choices["linear"].labels
    again = autoshard.Plan.from_json(plan.to_json())
    followed = autoshard.compile(Gated(8).double(), {"tp": 4}, (given(),), plan=again).plan
    for name in ("gate_up.weight", "gate_up.bias"):
        assert str(followed.layouts[name]) == str(plan.layouts[name]) == "S(0/2)@tp"
    drawn = visualize_layout(plan.layouts["gate_up.bias"], (16,)).splitlines()
    assert drawn[4].replace("│", " ").split() == [*"0123", *"0123"]

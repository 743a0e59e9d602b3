"""Plans as answers: why something lies as it does, two plans side by side, the mesh of a number of devices."""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from harness import captured_once
from torch import nn

import autoshard
from autoshard import models
from autoshard.cli import main
from autoshard.devices import divided_mesh_shape, mesh_shapes
from autoshard.devices.meshes import MeshSearch
from autoshard.report.explain import MOST_LISTED


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


MODEL, X = Blocks(), torch.zeros(256, 64)


@pytest.fixture(autouse=True, scope="module")
def once() -> Iterator[None]:
    with captured_once():
        yield


def planned(like: str | dict[str, str] | None, axes: dict[str, int] | None = None) -> autoshard.Plan:
    return autoshard.plan(MODEL, axes or {"tp": 4}, (X,), like=like)


def check(text: str, expected: str) -> None:
    """The lines of ``expected``, without what they take: seconds are the cost model's affair."""
    lines = [line.split(" in ")[0] if line.startswith("  runs") else line for line in text.splitlines()]
    lines = [line.split(", ")[0] if line.startswith("  sends") else line for line in lines if "instead" not in line]
    assert "\n".join(lines) == textwrap.dedent(expected).strip()


def test_a_parameter() -> None:
    check(
        planned("megatron").explain("blocks.1.down.weight"),
        """
        blocks.1.down.weight: parameter, float32[64, 256]
          layout S(1)@tp: 16.4 kB per rank; asked for by like='megatron'
          read as S(1)@tp by linear_3 (linear in blocks.1.down), sharded along k@tp
          nothing is sent for it
        """,
    )


def test_an_operation_and_what_it_sends() -> None:
    check(
        planned("megatron").explain("linear_3"),
        """
        linear_3: linear in blocks.1.down at test_explain.py:30
          runs sharded along k@tp
          reads relu_1 [256, 256] as S(1)@tp
          reads blocks.1.down.weight [64, 256] as S(1)@tp
          makes linear_3 [256, 64] as P@tp
          sends 98.3 kB by all_reduce@tp forward
        """,
    )


def test_modules_by_pattern_and_alternatives() -> None:
    text = planned("fsdp").explain("blocks.*.up")
    assert [line for line in text.splitlines() if not line.startswith(" ")] == [
        line for line in text.splitlines() if line.startswith("blocks.")
    ]
    assert text.count("(Linear): 1 operation,") == 3
    assert "    instead sharded along" in text
    assert "part of the cheapest plan" in planned(None).explain("blocks.0.up.weight")


def test_a_module_that_is_never_called() -> None:
    """All that lies under it is meant, and what cannot be told one by one is counted."""
    plan = planned("megatron")
    lines = plan.explain("blocks").splitlines()
    assert lines[0].startswith("blocks: 12 operations, ")
    owned = [n for n, kind in plan.kinds.items() if kind == "parameter"]
    assert [line.split()[0] for line in lines if " has layout " in line] == owned
    with pytest.raises(autoshard.PlanError, match=r"'block' is not .* Nearest: blocks"):
        plan.explain("block")


def test_collectives_that_are_not_told_are_counted() -> None:
    """One is no "collectives"."""
    plan = planned("megatron")
    for count, more in ((1, "  and 1 collective more, 5 B"), (2, "  and 2 collectives more, 10 B")):
        sent = [replace(plan.collectives[0], fqn="blocks.0", bytes=5.0)] * (MOST_LISTED + count)
        assert replace(plan, collectives=tuple(sent)).explain("blocks.0").splitlines()[-1] == more


def test_a_message_of_several_tables() -> None:
    """Its reason is told once, and every table has a part in it; so it is read back."""
    reference = models.get("dlrm")
    args, kwargs = reference.inputs(batch=8)
    plan = autoshard.plan(reference.model(), {"x": 2}, args, kwargs, like="table-wise")
    for one in (plan, autoshard.Plan.from_json(plan.to_json())):
        for name in (
            "tables.0",
            "tables.2",
            *(node for node, c in one.choices.items() if c.op.endswith("pooled.default")),
        ):
            sent = [line for line in one.explain(name).splitlines() if line.startswith("  sends")]
            assert [line.partition(": ")[2] for line in sent] == [
                "autoshard.pooled: exchanged rows ×3",
                "autoshard.pooled: exchanged rows (backward) ×3",
            ]
    assert "autoshard.pooled: exchanged rows (backward) ×3" in " ".join(plan.report().split())


def test_an_unknown_name() -> None:
    with pytest.raises(autoshard.PlanError) as caught:
        planned(None).explain("blocks.1.dwn.weight")
    assert str(caught.value).startswith(
        "'blocks.1.dwn.weight' is not a parameter, buffer, input, module or operation of"
    )
    assert "blocks.1.down.weight" in str(caught.value)


def test_plans_side_by_side() -> None:
    text = planned("megatron").diff(planned("ddp"))
    parts = text.split("\n\n")
    assert "this plan: tp=4, training, like='megatron'  other plan: tp=4, training, like='ddp'" in text
    assert [line.split("  ")[0] for line in parts[0].splitlines()] == [
        "", "step", "compute", "communication", "of it hidden", "sent per rank", "memory per rank",
        "", "", "", "", "", "", "busiest rank",
    ]  # fmt: skip
    assert [" ".join(line.split()) for part in parts[1:] for line in part.splitlines()] == [
        "Layouts that differ",
        "blocks.{0-2}.up.weight S(0)@tp R@tp",
        "blocks.{0-2}.down.weight S(1)@tp R@tp",
        "Operations that run differently",
        "blocks.{0-2}.up n@tp ...0@tp",
        "blocks.{0-2}.down k@tp ...0@tp",
        "Collectives of a step",
        "all_reduce@tp forward 3 × 98.3 kB 1 × 6 B",
        "all_reduce@tp backward 2 × 98.3 kB 6 × 98.3 kB",
    ]


def test_a_plan_differs_from_itself_in_nothing() -> None:
    plan = planned("fsdp")
    assert "differ" not in plan.diff(plan)
    assert "All parameters, buffers and inputs have the same layouts" in plan.diff(plan)


def test_what_cannot_be_as_the_expert_has_it_is_told() -> None:
    many = planned("ddp", {"dp": 512})
    assert many.notes[0] == (
        "like='ddp' on dp: a batch of 256 cannot be sharded over 512 ranks, so every rank does all the work"
    )
    assert many.cost.flops_per_rank == many.cost.flops


def test_like_survives_json() -> None:
    plan = planned({"tp": "megatron"})
    assert autoshard.Plan.from_json(plan.to_json()) == plan
    assert autoshard.compile(MODEL, {"tp": 4}, (X,), plan=plan).plan.like == plan.like == "{'tp': 'megatron'}"


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["explain", "mlp", "blocks.0.up.weight", "--mesh", "dp=2,tp=2", "--like", "dp=fsdp,tp=megatron"]
    assert main(asked) == 0
    assert "asked for by like={'dp': 'fsdp', 'tp': 'megatron'}" in capsys.readouterr().out
    assert main(["explain", "mlp", "blocks", "--mesh", "tp=2"]) == 0
    assert capsys.readouterr().out.startswith("blocks: ")


# --- the mesh as part of the plan ---


def test_shapes() -> None:
    """Every division in one and two axes."""
    assert list(mesh_shapes(8)) == [(8,), (2, 4), (4, 2)]
    assert list(mesh_shapes(16)) == [(16,), (2, 8), (4, 4), (8, 2)]
    assert list(mesh_shapes(7)) == [(7,)]
    assert list(mesh_shapes(1)) == [(1,)]


@pytest.mark.slow
def test_the_order_of_two_axes_counts_inside_a_node() -> None:
    """A batch that both cut is gathered along the inner one alone, for which the other order has no layout."""
    with torch.device("meta"):
        model = models.Llama(models.LlamaConfig(width=2048, hidden=8192, layers=1)).to(torch.bfloat16)
        tokens = torch.zeros(8, 1024, dtype=torch.long)
    asked = (model, {"a": 4, "b": 2}, (tokens,), {"labels": tokens})
    outer, inner = autoshard.plan(*asked), autoshard.plan(model, {"a": 2, "b": 4}, *asked[2:])
    assert outer.cost.total_s < inner.cost.lower_bound
    found = autoshard.plan(model, None, *asked[2:], devices=8)
    assert found.mesh.shape == (4, 2)
    assert found.cost.total_s <= outer.cost.total_s * (1 + 1e-6)


def test_the_best_is_divided_once_more() -> None:
    """Where a node ends, else the largest axis."""
    assert divided_mesh_shape((4, 16), 8) == (4, 2, 8)
    assert divided_mesh_shape((16, 4), 8) == (8, 2, 4)
    assert divided_mesh_shape((8, 8), 8) == (4, 2, 8)
    assert divided_mesh_shape((2, 4), 8) == (2, 2, 2)
    assert divided_mesh_shape((64,), 8) == (8, 8)
    assert divided_mesh_shape((3, 5), 8) == (3, 5)


@pytest.mark.slow
def test_a_number_of_devices() -> None:
    x = torch.zeros(1 << 16, 64, device="meta")
    plan = autoshard.plan(MODEL, None, (x,), devices=16, hardware="h100")
    assert plan.mesh.size == 16
    costs = [c.cost.total_s for c in plan.candidates]
    assert costs == sorted(costs)
    assert plan.cost.total_s <= costs[0] * (1 + 1e-6)
    fixed = autoshard.plan(MODEL, plan.mesh, (x,))
    assert fixed.cost == plan.cost
    assert plan.mesh.axes[0] == "dp"
    assert all(c.mesh.size == 16 for c in plan.candidates)
    assert autoshard.Plan.from_json(plan.to_json()) == plan


def test_a_search_of_meshes_is_seldom_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    young = []

    def attempt(self: MeshSearch, shape: tuple[int, ...], of: Callable[..., None] = MeshSearch.attempt) -> None:
        young.append(gc.get_threshold()[0])
        of(self, shape)

    before = gc.get_threshold()
    monkeypatch.setattr(MeshSearch, "attempt", attempt)
    autoshard.plan(nn.Linear(8, 8), None, (torch.zeros(8, 8),), devices=2, hardware="h100")
    assert min(young) > before[0]
    assert gc.get_threshold() == before


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({}, "autoshard.plan needs a mesh, or devices=64 to search one"),
        ({"mesh": {"tp": 2}, "devices": 2}, "autoshard.plan needs a mesh, or devices=64 to search one"),
        ({"devices": 0}, "devices=0: a number of devices is an int of at least 1"),
        ({"devices": 4, "like": {"tp": "megatron"}}, "like by axis or by module needs a mesh"),
    ],
)
def test_errors_of_devices(asked: dict[str, object], error: str) -> None:
    with pytest.raises(autoshard.AutoshardError, match=error):
        autoshard.plan(MODEL, example_args=(X,), **asked)  # type: ignore[arg-type]

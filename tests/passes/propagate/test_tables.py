"""Embedding tables by table, row and column; sparse gradients of tables; which rank owns which."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness import double, ideal
from table_models import DCN, AsManyAsGiven, Call, DeepFM, Regular, fields, loss_of, owners, towers, trains_alike
from torch import nn

import autoshard
import autoshard.models
from autoshard.passes.propagate.embedding_tables import balance_loads


def dlrm(sparse: bool, batch: int = 8) -> Call:
    torch.manual_seed(0)
    reference = autoshard.models.get("dlrm")
    model = reference.model().double().train()
    for table in model.tables:
        table.sparse = sparse
    (dense, ids), kwargs = double(reference.inputs(batch=batch))
    return model, (dense, ids, kwargs["labels"])


CASES = {
    "dlrm": dlrm,
    "deepfm": lambda sparse: fields(DeepFM, sparse, 8),
    "dcn": lambda sparse: fields(DCN, sparse, 7),
    "towers": towers,
}
AXES = {"x2": {"x": 2}, "x4": {"x": 4}, "dp2x2": {"dp": 2, "x": 2}}


def like_of(mesh: dict[str, int], name: str) -> dict[str, str]:
    return {a: name if a == "x" else "ddp" for a in mesh}


@pytest.mark.parametrize(
    ("name", "mesh", "optimizer"),
    [
        ("towers", "dp2x2", "SparseAdam"),
        pytest.param("dcn", "x4", "Adagrad", marks=pytest.mark.slow),
        *(
            pytest.param(name, mesh, optimizer, marks=pytest.mark.slow)
            for name in CASES
            for mesh in AXES
            for optimizer in (None, "SparseAdam", "SGD")
        ),
    ],
)
def test_tables_lie_whole_on_one_rank_each(name: str, mesh: str, optimizer: str | None) -> None:
    sharded = trains_alike(
        CASES[name](optimizer is not None), AXES[mesh], optimizer, like=like_of(AXES[mesh], "table-wise")
    )
    found = owners(sharded)
    tables = {n for n, p in sharded.named_parameters() if n.partition(".")[0] in TABLES}
    assert found.keys() == tables, "every table has an owner"
    assert {x.split("@")[0] for x in found.values()} >= {f"O({r})" for r in range(2)}
    assert sharded.source.count("runtime.table_wise(") <= 4, "one for all tables that are pooled alike"


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        (lambda: dlrm(sparse=True, batch=1), {"dp": 2, "x": 2}),
        pytest.param(lambda: towers(sparse=False, batch=3), {"x": 4}, marks=pytest.mark.slow),
        pytest.param(lambda: towers(sparse=True, batch=3), {"x": 2, "dp": 2}, marks=pytest.mark.slow),
        pytest.param(lambda: fields(DCN, True, 2), {"x": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_batch_of_fewer_rows_than_ranks(case: Callable[[], Call], mesh: dict[str, int]) -> None:
    model, args = case()
    optimizer = "SGD" if any(getattr(m, "sparse", False) for m in model.modules()) else None
    sharded = trains_alike((model, args), mesh, optimizer, like=like_of(mesh, "table-wise"))
    assert owners(sharded).keys() == {n for n, _ in sharded.named_parameters() if n.partition(".")[0] in TABLES}
    assert "summed=True" in sharded.source


def test_bags_of_one_length_are_cut_beside_owners() -> None:
    args = torch.randint(0, 5, (8, 3)), torch.randn(8, 12, dtype=torch.float64)
    sharded = trains_alike((Regular(), args), {"dp": 2, "x": 2}, None, like={"dp": "ddp", "x": "table-wise"})
    assert len(owners(sharded)) == 3
    assert "S(0)@dp S(0)@x" in sharded.source


def test_a_table_wise_plan_serves_any_batch() -> None:
    model, (dense, ids, labels) = dlrm(sparse=True)
    sharded = autoshard.compile(model, ideal({"x": 4}), (dense, ids, labels), like="table-wise")
    before = owners(sharded)
    for rows in (1, 0):
        args = dense[:rows], ids[:rows], labels[:rows]
        torch.testing.assert_close(loss_of(sharded, args), loss_of(model, args), rtol=1e-9, atol=1e-12, equal_nan=True)
    assert before
    assert owners(sharded) == before


def test_a_later_call_that_does_not_read_all_tables() -> None:
    """None of them is a program; one alone is no table that a rank may own, as an error says before anything is changed."""
    model, x, ids = AsManyAsGiven().double(), torch.randn(8, 4, dtype=torch.float64), torch.randint(7, (8, 2))
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"x": 2}), (x, ids), like="table-wise")
    torch.testing.assert_close(sharded(x, ids[:, :0]), model(x, ids[:, :0]), rtol=1e-9, atol=0)
    with pytest.raises(autoshard.PlanError, match=r"'tables\.0\.weight' is stored on one rank .O.0.@x., but this call"):
        sharded(x, ids[:, :1])
    torch.testing.assert_close(sharded(x, ids), model(x, ids), rtol=1e-9, atol=0)


TABLES = {"tables", "linear", "seen", "liked", "tags", "items"}


@pytest.mark.parametrize("mesh", [{"x": 3}, pytest.param({"x": 2, "dp": 2}, marks=pytest.mark.slow)], ids=str)
def test_bags_of_all_modes_lie_by_row(mesh: dict[str, int]) -> None:
    """Jagged sums with weights, means and maxima, bags without indices among them, in rows that do not divide."""
    sharded = trains_alike(towers(sparse=False), mesh, like={"x": "row-wise", **{a: "ddp" for a in mesh if a != "x"}})
    for name in ("seen", "liked", "tags", "items"):
        assert "S(0)@x" in str(sharded.plan.layouts[f"{name}.weight"])
    assert sharded.source.count("runtime.vocab_embedding_bag(") == 3


def test_bags_by_row_that_begin_or_end_outside_are_errors() -> None:
    """As of ``embedding_bag``, whose every rank would see them."""
    bag = nn.EmbeddingBag(10, 4, mode="sum").double()
    ids, starts = torch.randint(10, (12,)), torch.tensor([0, 3, 9])
    sharded = autoshard.compile(copy.deepcopy(bag), ideal({"x": 2}), (ids, starts), like="row-wise")
    torch.testing.assert_close(sharded(ids, starts), bag(ids, starts), rtol=1e-9, atol=1e-12)
    for wrong in (starts + 1, starts * 2):
        for module in (bag, sharded):
            with pytest.raises(RuntimeError, match="offsets"):
                module(ids, wrong)


@pytest.mark.parametrize(
    "name", ["row-wise", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "column-wise", "fsdp"))]
)
def test_sparse_gradients_stay_sparse_in_every_layout(name: str) -> None:
    sharded = trains_alike(dlrm(sparse=True), AXES["x2"], "SparseAdam", like=name)
    assert not owners(sharded)
    dims = {"row-wise": "S(0)@x", "column-wise": "S(1)@x", "ddp": "I@x", "fsdp": "S(0)@x"}
    assert str(sharded.plan.layouts["tables.0.weight"]) == dims[name]


class Bags(nn.Module):
    """Sums of rows, and a layer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(rows, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.top(self.table(ids).sum(1))
        return found.square().mean()


def _gathered(found: Sequence[Any]) -> list[float]:
    return sorted(c.bytes for c in found if (c.kind, c.phase) == ("all_gather", "backward"))


@pytest.mark.parametrize(
    ("like", "axes", "rows", "moved"),
    [
        ("ddp", {"dp": 2}, 32, [8]),
        ("ddp", {"dp": 2}, 4, [4]),
        ("fsdp", {"dp": 2}, 32, [8]),
        ("ddp", {"a": 2, "b": 2}, 32, [3 * 4]),
        ("ddp", {"a": 2, "b": 2}, 4, [4, 4]),  # summed in between
    ],
    ids=str,
)
def test_bytes_of_sums_of_rows(like: str, axes: dict[str, int], rows: int, moved: list[int]) -> None:
    """What replicas looked up: rows and their numbers, as many as look-ups, or as there are rows; and that is what is sent."""
    ids, row = (torch.arange(16) % rows).view(8, 2), 4 * 8 + 8
    sharded = autoshard.compile(Bags(rows).double(), ideal(axes), (ids,), like=like)
    executed: list[Any] = []
    sharded.record(executed)
    sharded(ids).backward()
    of_table = [c for c in sharded.plan.collectives if c.phase == "backward" and c.value == "table.weight"]
    assert [(c.kind, c.bytes) for c in of_table] == [("all_gather", n * row) for n in moved]
    assert _gathered(executed) == pytest.approx(_gathered(sharded.plan.collectives))
    again = list[Any]()
    sharded.record(again)
    sharded(torch.zeros_like(ids)).backward()  # all look up one row
    assert sum(_gathered(again)) < sum(_gathered(executed))


def test_a_wrong_owner_is_seen() -> None:
    """Negative control: results of one table in the place of another's."""
    from autoshard.runtime.operations import tables

    right = tables.unpack_tables
    tables.unpack_tables = lambda *args: right(*args)[::-1]
    try:
        with pytest.raises(AssertionError):
            trains_alike(dlrm(sparse=False), AXES["x2"], like="table-wise")
    finally:
        tables.unpack_tables = right


def test_bytes_are_those_of_the_formulas() -> None:
    """W ranks, T tables, dim D: table-wise (W-1)/W·(B/W)·T·D·e each way, row-wise (W-1)/W·B·T·D·e."""
    batch, dim, ranks = 32, 16, 4
    tables = nn.ModuleList(nn.EmbeddingBag(64, dim, mode="sum") for _ in range(4))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables, self.top = tables, nn.Linear(4 * dim, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found = torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
            return self.top(found.relu()).square().mean()

    ids = torch.randint(64, (batch, 4, 3))
    pooled = (ranks - 1) / ranks * batch * len(tables) * dim * 4
    for like, kinds, expected in (
        ("table-wise", ("all_to_all", "all_to_all"), pooled / ranks),
        ("row-wise", ("reduce_scatter", "all_gather"), pooled),
    ):
        sharded = autoshard.compile(Model(), ideal({"x": ranks}), (ids,), like=like)
        log: list[Any] = []
        sharded.record(log)
        sharded(ids).backward()
        for kind, phase in zip(kinds, ("forward", "backward"), strict=True):
            assert sum(c.bytes for c in sharded.collectives if (c.kind, c.phase) == (kind, phase)) == expected
            assert sum(c.bytes for c in log if (c.kind, c.phase) == (kind, phase)) == expected, "executed as planned"


class Skewed(nn.Module):
    """A giant table, sixteen of a hundredth of its size, four tiny ones, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        rows = [400_000_000, *[4_000_000] * 16, *[100] * 4]
        self.tables = nn.ModuleList(nn.Embedding(n, 16, sparse=True) for n in rows)
        widths = (16 * len(rows), 512, 512, 1)
        self.top = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.cat([table(ids[:, i]).sum(1) for i, table in enumerate(self.tables)], 1)
        for layer in self.top:
            x = layer(x.relu())
        return x.square().mean()


@pytest.mark.slow
def test_tables_are_laid_out_by_their_size_without_hints() -> None:
    with torch.device("meta"):
        model, ids = Skewed(), torch.zeros(65536, 21, 10, dtype=torch.int64)
    plan = autoshard.plan(model, {"x": 8}, (ids,))
    layouts = [plan.layouts[f"tables.{i}.weight"] for i in range(21)]
    assert str(layouts[0]) in ("S(0)@x", "S(1)@x"), "the giant does not fit on a rank"
    assert plan.lower_bound <= plan.cost.total_s * (1 + 1e-9)
    assert sorted(x.owner["x"] for x in layouts[1:17]) == sorted([*range(8)] * 2), "two on every rank"
    assert all(x.owner or str(x) == "I@x" for x in layouts[17:]), "what is tiny is not cut"
    table = 400_000_000 * 16 * 4 / 8
    assert plan.memory.gradients < 0.05 * table, "rows that are looked up, not tables"
    assert autoshard.Plan.from_json(plan.to_json()).layouts["tables.1.weight"] == layouts[1]


def test_balance() -> None:
    """Graham's bound in both kinds of load; a rank that a table is fixed to keeps it."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(40, 2, generator=generator).pow(3)
    loads = {f"t{i}": (float(a), float(b)) for i, (a, b) in enumerate(sizes)}
    place = balance_loads(loads, 4)
    for kind in range(2):
        held = [sum(loads[n][kind] for n, r in place.items() if r == rank) for rank in range(4)]
        assert max(held) < 1.3 * sum(held) / 4
    assert balance_loads(loads, 4, {"t3": 2})["t3"] == 2


def test_verify_knows_sparse_gradients() -> None:
    model, args = dlrm(sparse=True)
    report = autoshard.verify(model, {"x": 2}, args, like="table-wise", steps=2)
    assert report.ok, str(report)
    assert any("(sparse)" in c.what for c in report.comparisons)


@pytest.mark.slow
def test_micro_batches_and_later_shapes_keep_owners() -> None:
    model, args = dlrm(sparse=True)
    sharded = trains_alike((model, args), AXES["x2"], "SGD", like="table-wise", micro_batches=2)
    before = owners(sharded)
    more = tuple(torch.cat([x, x]) for x in args)
    expected = loss_of(model, args)
    sharded.load_full_state_dict(model.state_dict())
    torch.testing.assert_close(loss_of(sharded, more), expected, rtol=1e-9, atol=1e-12)
    assert owners(sharded) == before

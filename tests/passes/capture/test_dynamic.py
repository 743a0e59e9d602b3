"""Sizes and numbers that depend on the data: whole on every rank, inside a program that is sharded otherwise."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import MESHES, assert_equal_training, ideal
from torch import Tensor, nn

import autoshard
from autoshard.check.divergence import first_divergence
from autoshard.errors import RuleError
from autoshard.layout import Shard
from autoshard.module.programs.executable import load_source
from autoshard.passes.capture.export import capture
from autoshard.plans.plan import Plan
from autoshard.runtime.operations.grouped import grouped_mm

pytestmark = pytest.mark.usefixtures("captures")

WIDTH, TOKENS = 8, 12


class Between(nn.Module):
    """A wide linear, what depends on the data, a wide linear, a loss."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.middle = middle
        self.last = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(F.gelu(self.up(x)))
        return self.last(self.middle(h)).square().mean()


class Masked(nn.Module):
    """Rows chosen by a boolean mask, transformed and written back."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        mask = h.sum(-1) > 0
        out = h.clone()
        out[mask] = self.lin(h[mask])
        return out


class Nonzero(nn.Module):
    """The same by indices; a scatter_add, a cat and a reshape on lengths made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        (rows,) = torch.where(h.sum(-1) > 0)
        n = rows.shape[0]
        pairs = self.lin(h.index_select(0, rows)).reshape(2 * n, WIDTH // 2)
        scale = torch.arange(2 * n).to(h.dtype).unsqueeze(1) / (n + 1)
        taken = (pairs * scale).view(n, WIDTH)
        row, column = (h > 1).nonzero().unbind(1)  # a number of columns that is known
        return h.index_add(0, torch.cat([rows, rows]), torch.cat([taken, -0.5 * taken])) + h[row, column].sum()


class Experts(nn.Module):
    """A loop over experts, each on the tokens routed to it. Norms inside make them no mixture that capture knows."""

    def __init__(self, experts: int = 4, top: int = 2) -> None:
        super().__init__()
        self.router, self.top = nn.Linear(WIDTH, experts), top
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(experts)
        )

    def forward(self, h: Tensor) -> Tensor:
        weights, chosen = self.router(h).softmax(-1).topk(self.top, -1)
        hit = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            slot, token = torch.where(hit[number])
            out.index_add_(0, token, expert(h[token]) * weights[token, slot, None])
        return out


class Item(nn.Module):
    """Numbers read out of tensors: as factors, as the end of a slice, as the size of a new tensor, in arithmetic."""

    def forward(self, h: Tensor) -> Tensor:
        n = (h.sum(-1) > 0).sum().item()
        torch._check(n >= 0)
        torch._check(n <= h.shape[0])
        scaled = h * (h.detach().square().mean().item() + 1) + n / 7 + max(n, 3) * (n // 2) + n % 3 + abs(n - 5)
        first = torch.cat([scaled[:n] * 2, h.new_zeros(h.shape[0] - n, WIDTH)])
        return scaled + first


class Segments(nn.Module):
    """Sums over segments whose number is read with Python's ``int``; a factor read with ``float``."""

    def forward(self, h: Tensor) -> Tensor:
        segment = (h[:, 0] > 0).long() + 2 * (h[:, 1] > 0).long()
        count = int(segment.max()) + 1 if isinstance(len(h), int) else 0
        assert isinstance(count, int)
        sums = h.new_zeros(count, WIDTH).index_add(0, segment, h)
        return h + sums[segment] * float(h.detach().mean()) * (float("0.5") + int(3.7))


class Methods(nn.Module):
    """``float`` of Python beside the method of that name."""

    def forward(self, h: Tensor) -> Tensor:
        return h * float((h.detach() > 0).float().sum())


class Unique(nn.Module):
    """A table row is transformed once for all tokens that share it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lin = nn.Embedding(6, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        ids = (h.sum(-1) > 0).long() + 2 * (h[:, 0] > 0).long()
        found, inverse = torch.unique(ids, return_inverse=True)
        return h + self.lin(self.table(found))[inverse]


class Repeated(nn.Module):
    """repeat_interleave by counts of the data, dropout on what came out, a segment sum back."""

    def forward(self, h: Tensor) -> Tensor:
        counts = (h > 0).sum(-1)
        many = F.dropout(h.repeat_interleave(counts, 0), 0.5, self.training)
        rows = torch.arange(h.shape[0]).repeat_interleave(counts)
        return torch.zeros_like(h).index_add(0, rows, many)


class Pieces(nn.Module):
    """A split by sizes of the data; a boolean mask over two dims; masked_select."""

    def forward(self, h: Tensor) -> Tensor:
        n, m = torch.stack([(h[:, 0] > 0).sum(), (h[:, 0] <= 0).sum()]).tolist()
        torch._check(n + m == h.shape[0])
        first, second = torch.split(h, [n, m])
        return h * torch.cat([2 * first, second]).sum(0) + h[h > 0].sum() + h.masked_select(h < 0).square().sum()


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    m.__name__.lower(): m for m in (Masked, Nonzero, Experts, Item, Segments, Methods, Unique, Repeated, Pieces)
}


@functools.cache
def model_of(name: str) -> Between:
    """The same for all tests, which leave its weights alone."""
    torch.manual_seed(0)
    return Between(MIDDLES[name]()).double()


def batch(seed: int, shift: float = 0.0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(TOKENS, WIDTH, dtype=torch.float64) + shift


CASES = [(name, "dp2tp2") for name in MIDDLES] + [("masked", "tp2"), ("experts", "tp2"), ("item", "tp2")]


@pytest.mark.slow_cases("nonzero-dp2tp2", "experts-*", "pieces-dp2tp2", "repeated-dp2tp2", "segments-dp2tp2")
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_training_equals_the_unsharded_model_and_the_linears_are_divided(name: str, mesh: str) -> None:
    model = model_of(name)
    report = assert_equal_training(model, MESHES[mesh], (batch(1),), steps=2)
    ranks = autoshard.Mesh(MESHES[mesh]).size
    choices = report.plan.choices
    for node, choice in choices.items():
        if choice.fqn in ("up", "down", "last") and choice.flops:
            divided = [label for label in choice.labels if label not in ("I", "R")]
            assert len(divided) == (1 if ranks == 2 else 2), (node, choice.labels)


@pytest.mark.slow_cases("item", "nonzero", "segments", "methods", "experts", "pieces", "repeated")
@pytest.mark.parametrize("name", MIDDLES)
def test_one_program_serves_data_with_other_sizes(name: str) -> None:
    """Few rows, one expert without tokens, no row at all, all rows: the sizes differ, the program does not."""
    model = model_of(name)
    sharded = autoshard.compile(model, ideal(MESHES["tp2"]), (batch(1),))
    for x in (
        batch(1),
        batch(2),
        batch(3, 1.0),
        batch(4, -100.0),
        batch(5, 100.0),
        torch.zeros(TOKENS, WIDTH).double(),
    ):
        results = []
        for module in (model, sharded):
            torch.manual_seed(9)
            module.zero_grad()
            results.append(module(x))
            results[-1].backward()
        assert torch.allclose(*results, rtol=1e-10)
        for (key, p), q in zip(model.named_parameters(), sharded.parameters(), strict=True):
            want = torch.zeros_like(p) if p.grad is None else p.grad
            got = torch.zeros_like(p) if q.grad is None else q.grad
            assert torch.allclose(got, want, rtol=1e-9, atol=1e-9 * float(want.abs().max() + 1e-30)), key
    assert len(sharded._executables) == 1


def test_a_baked_in_size_is_noticed() -> None:
    """Negative control: with the size of the first batch as a constant, another batch fails."""
    sharded = autoshard.compile(model_of("nonzero"), ideal(MESHES["tp2"]), (batch(1),))
    executable = sharded.specialise((batch(1),), {})
    broken, found = re.subn(r"= \w+\.shape\[0\]", "= 3", executable.compiled.source.text)
    assert found == 1
    sharded(batch(2))
    executable.rank_module = load_source(broken)
    sharded._rank_modules.clear()
    with pytest.raises(RuntimeError, match=r"shape|size"):
        sharded(batch(1))


@pytest.fixture(scope="module")
def experts() -> autoshard.ShardedModule:
    return autoshard.compile(model_of("experts"), ideal(MESHES["dp2tp2"]), (batch(1),))


def test_dims_of_unknown_length_are_never_cut_and_dims_beside_them_are(experts: autoshard.ShardedModule) -> None:
    program = experts.specialise((batch(1),), {}).compiled.program
    unknown = [name for name, t in program.types.items() if t.unknown]
    assert len(unknown) > 20
    for name in unknown:
        assert not program.layouts[name].axes_of(0) or 0 not in program.types[name].unknown, name
    assert any(program.layouts[name].axes_with(Shard) for name in unknown)
    cost = experts.plan.cost
    assert cost.flops_per_rank == cost.flops / 4
    assert any(t.number is not None for t in capture(model_of("item"), (batch(1),)).types.values())


class Groups(nn.Module):
    """Rows times the matrix of their group, where the groups' sizes are counted: as many as the largest id asks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, 6))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        ends = ids.bincount(minlength=4).cumsum(0).int()
        return grouped_mm(x[ids.argsort()], self.weight, ends, True).square().sum()


@pytest.mark.parametrize("name", ["tp2", "dp2tp2"])
def test_products_of_groups_that_are_counted_are_cut(name: str) -> None:
    torch.manual_seed(0)
    assert_equal_training(Groups(), MESHES[name], (torch.randn(TOKENS, WIDTH), torch.randint(4, (TOKENS,))), share=1.0)


def test_plan_report_and_pictures_show_them(experts: autoshard.ShardedModule, tmp_path: Path) -> None:
    assert re.search(r"\[~12, \d/16\] S\(1\)@", experts.source)
    assert "a length in them depends on the data" in " ".join(str(experts).split())
    again = Plan.from_json(experts.plan.to_json())
    assert again.to_json() == experts.plan.to_json()
    compiled = autoshard.compile(model_of("experts"), ideal(MESHES["dp2tp2"]), (batch(1),), plan=again)
    assert compiled.source == experts.source
    for suffix in ("html", "txt", "dot", "json", "trace.json"):
        experts.visualize(tmp_path / f"picture.{suffix}")
        assert (tmp_path / f"picture.{suffix}").stat().st_size > 100


def test_strict_names_the_operation_of_unknown_length() -> None:
    with pytest.raises(
        RuleError, match=r"aten.index.Tensor in module 'middle' at test_dynamic.py:\d+ runs on full tensors"
    ):
        autoshard.compile(model_of("masked"), ideal(MESHES["tp2"]), (batch(1),), strict=True)


def test_int_is_pythons_own_again_after_the_trace() -> None:
    code = Segments.forward.__code__
    capture(model_of("segments"), (batch(1),))
    assert Segments.forward.__code__ is code


def test_the_first_difference_is_found_past_numbers() -> None:
    model = model_of("item")
    sharded = autoshard.compile(copy.deepcopy(model), ideal(MESHES["tp2"]), (batch(1),))
    assert first_divergence(model, sharded, (batch(2),), {}, 1e-9) is None


class Speech(nn.Module):
    """CTC loss with lengths in tensors, which ATen's op reads while it runs, and labels whose number depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        kept = labels >= 0
        frames = torch.full((x.shape[1],), x.shape[0])
        scores = self.linear(x).log_softmax(-1)
        return F.ctc_loss(scores, labels.masked_select(kept), frames, kept.sum(-1), reduction="sum")


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 3}])
def test_ctc_loss(axes: dict[str, int]) -> None:
    labels = torch.tensor([[1, 2, -1], [3, 3, 2]])
    assert_equal_training(Speech(), axes, (torch.randn(9, 2, 6), labels), steps=1, share=1.2)

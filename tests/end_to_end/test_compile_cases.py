"""Cases that break other auto-sharders, shapes that hurt, and what a user expects of the module he gets back."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training, captured_once, ideal
from torch import nn

import autoshard
from autoshard import Layout, Mesh, Replicate, RuntimeMismatchError, Shard
from autoshard.module.programs.simulated_ranks import join_shards


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


# --- cases that break AutoParallel ---


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}])
def test_dropout_under_batch_sharding(axes: dict[str, int]) -> None:
    """Ranks hold different rows, so they must not share one mask; the masks are those of one device."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    report = assert_equal_training(model, axes, (randn(8, 16),), hints={"input": {"dp": Shard(0)}})
    assert any(c.op == "aten.dropout.default" and "I" not in c.labels[0] for c in report.plan.choices.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_odd_linear(ranks: int) -> None:
    model = nn.Sequential(nn.Linear(64, 255), nn.GELU(), nn.Linear(255, 64))
    report = assert_equal_training(model, {"tp": ranks}, (randn(2, 64),), hints={"0": "colwise", "2": "rowwise"})
    assert report.plan.layouts["0.weight"]["tp"] == Shard(0)


@pytest.mark.slow_cases("axes0")
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 3}])
def test_batch_norm_over_a_sharded_batch(axes: dict[str, int]) -> None:
    """Statistics are those of the global batch; running buffers are updated."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3))
    report = assert_equal_training(model, axes, (randn(6, 3, 8, 8),), hints={"input": {"dp": Shard(0)}})
    assert {c.what for c in report.comparisons if c.kind == "buffer"} >= {"1.running_mean", "1.num_batches_tracked"}


def test_two_meshes_one_after_the_other() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    for axes in ({"tp": 4}, {"dp": 2, "tp": 2}, {"x": 3}):
        assert_equal_training(copy.deepcopy(model), axes, (randn(12, 16),))


# --- shapes that hurt ---


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * kv_heads * self.size)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 2, self.kv_heads, self.size).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.slow_cases("4-4", "2-1")
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (4, 2), (2, 1)])
def test_attention_heads(heads: int, kv_heads: int) -> None:
    """One head per rank, fewer heads than ranks, fewer key-value heads than ranks."""
    model = Attention(16, heads, kv_heads)
    with captured_once() as captures:
        for axes in ({"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}, {"tp": 3}):
            assert_equal_training(model, axes, (randn(3, 5, 16),), steps=1)
    assert len(captures.known) == 1


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_fewer_rows_than_ranks(rows: int) -> None:
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    assert_equal_training(model, {"tp": 4}, (randn(rows, 6),), hints={"0.weight": Shard(0)})


def test_empty_shards_by_hint() -> None:
    """Three rows on four ranks: one rank holds nothing."""
    report = assert_equal_training(nn.Linear(8, 3), {"tp": 4}, (randn(5, 8),), hints={"weight": Shard(0)})
    assert report.plan.layouts["weight"]["tp"] == Shard(0)


class Biased(nn.Module):
    """Attention with learnt biases, as Swin's windows have."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(randn(2, 5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, self.bias)


def test_a_learnt_mask_on_a_rank_without_rows() -> None:
    """PyTorch gives the mask of an empty attention no gradient, where the other ranks have one."""
    assert_equal_training(Biased(), {"fsdp": 3}, (randn(4, 2, 5, 4),), like="fsdp")


def test_axes_of_size_one() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    report = assert_equal_training(model, {"pp": 1, "tp": 2, "dp": 1}, (randn(4, 8),))
    assert all(c.axes == ("tp",) for c in report.plan.collectives)


class Zoo(nn.Module):
    """Integer, bool and non-contiguous tensors, keyword arguments, nested outputs, a tied and an unused parameter."""

    class Result(NamedTuple):
        loss: torch.Tensor
        parts: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))

    def forward(
        self, tokens: torch.Tensor, *, mask: torch.Tensor, extra: dict[str, torch.Tensor], flag: bool = True
    ) -> Any:
        x = self.embedding(tokens) * self.scale
        x = torch.where(mask[..., None], x, torch.zeros_like(x)) + extra["bias"].transpose(0, 1)
        logits = self.head(x)
        loss = logits.logsumexp(-1).mean() + (1.0 if flag else 0.0)
        return self.Result(loss, {"best": logits.argmax(-1), "logits": [logits, None, 3], "mask": mask})


@pytest.mark.slow_cases("{'dp': 2, 'tp': 2}")
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}, {"a": 3}], ids=str)
def test_zoo(axes: dict[str, int]) -> None:
    tokens = torch.randint(0, 13, (4, 6), generator=torch.Generator().manual_seed(0))
    kwargs = {"mask": tokens > 3, "extra": {"bias": randn(6, 4, 8)}}
    assert_equal_training(Zoo(), axes, (tokens,), kwargs)
    sharded = autoshard.compile(Zoo().double(), ideal(axes), (tokens,), kwargs)
    out = sharded(tokens, **kwargs)
    assert isinstance(out, Zoo.Result)
    assert out.parts["logits"][1:] == [None, 3]
    assert out.parts["best"].dtype == torch.int64
    names = dict(sharded.named_parameters())
    assert set(names) == {"embedding.weight", "unused"}
    assert set(sharded.full_state_dict()) == set(Zoo().state_dict())


def test_gradient_of_an_input() -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    x = randn(4, 6).requires_grad_()
    sharded = autoshard.compile(model, ideal({"tp": 2}), (x,))
    for module in (model, sharded):
        x.grad = None
        module(x).square().sum().backward()
        found = x.grad.clone()
        if module is model:
            expected = found
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


# --- the module a user gets ---


def test_first_call_compiles_and_new_shapes_compile_again() -> None:
    model = nn.Linear(8, 4).double()
    sharded = autoshard.compile(model, ideal({"tp": 2}))
    with pytest.raises(autoshard.PlanError, match="nothing is compiled yet"):
        _ = sharded.plan
    for rows in (4, 6, 4, 5):
        x = randn(rows, 8)
        torch.testing.assert_close(sharded(x), model(x), rtol=1e-9, atol=1e-12)
    assert len(sharded._executables) == 3


def test_train_and_eval() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)).double()
    reference = copy.deepcopy(model)
    sharded = autoshard.compile(model, ideal({"tp": 2}), (randn(4, 8),))
    for mode in (True, False, True):
        torch.manual_seed(3)
        expected = reference.train(mode)(randn(4, 8))
        torch.manual_seed(3)
        torch.testing.assert_close(sharded.train(mode)(randn(4, 8)), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(sharded.full_state_dict(), reference.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.slow_cases("h100-pinned-*", "ideal_network-free-*")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("hints", [{}, {"0": "colwise", "2": "rowwise"}], ids=["free", "pinned"])
@pytest.mark.parametrize("hardware", ["h100", "ideal_network"])
def test_parameters_keep_their_layout_in_the_other_mode(hardware: str, hints: dict[str, str], first: bool) -> None:
    """Also those that every rank holds whole: invariant with a gradient, replicated without one."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double().train(first)
    sharded = autoshard.compile(model, autoshard.Mesh({"tp": 2}, hardware), (randn(4, 8),), hints=hints)
    for mode in (first, not first, first):
        with torch.set_grad_enabled(mode):
            torch.testing.assert_close(sharded.train(mode)(randn(4, 8)), model(randn(4, 8)), rtol=1e-9, atol=1e-12)
    plan = sharded.plan
    with pytest.raises(autoshard.PlanError, match="Plan again, with training="):
        autoshard.compile(model.train(not first), plan.mesh, (randn(4, 8),), plan=plan)


@pytest.mark.parametrize("first", [True, False])
def test_a_plan_says_that_its_layouts_were_chosen_for_inference(first: bool) -> None:
    sharded = autoshard.compile(nn.Linear(8, 8).train(first), ideal({"dp": 2}), (torch.randn(4, 8),))
    for mode in (first, True):
        sharded.train(mode)(torch.randn(4, 8))
    assert sharded.plan.training
    assert any("by an earlier program, for inference" in note for note in sharded.plan.notes) is not first


def test_the_users_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
    before = copy.deepcopy(model.state_dict())
    sharded = autoshard.compile(model, ideal({"tp": 2}), (randn(4, 8),))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded(randn(4, 8)).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())


def test_state_dict_round_trip() -> None:
    model, other = nn.Linear(8, 6).double(), nn.Linear(8, 6).double()
    sharded = autoshard.compile(model, ideal({"tp": 2}), (randn(4, 8),))
    sharded.load_full_state_dict(other.state_dict())
    torch.testing.assert_close(sharded(randn(4, 8)), other(randn(4, 8)), rtol=1e-9, atol=1e-12)
    with pytest.raises(autoshard.PlanError, match=r"missing \['bias'\]"):
        sharded.load_full_state_dict({"weight": other.weight})
    with pytest.raises(autoshard.PlanError, match=r"'bias' has shape \[5\], but the model has \[6\]"):
        sharded.load_full_state_dict({"weight": other.weight, "bias": torch.zeros(5)})


def test_a_plan_can_be_stored_and_used_again() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).double()
    plan = autoshard.plan(model, ideal({"tp": 2}), (randn(4, 16),), hints={"0": "colwise"})
    again = autoshard.Plan.from_json(plan.to_json())
    assert again == plan
    sharded = autoshard.compile(model, ideal({"tp": 2}), (randn(4, 16),), plan=again)
    assert sharded.plan.layouts == plan.layouts
    torch.testing.assert_close(sharded(randn(4, 16)), model(randn(4, 16)), rtol=1e-9, atol=1e-12)
    with pytest.raises(autoshard.PlanError, match="the plan was made for the mesh tp=2, not tp=4"):
        autoshard.compile(model, ideal({"tp": 4}), (randn(4, 16),), plan=again)
    with pytest.raises(autoshard.PlanError, match="another model or other input shapes"):
        autoshard.compile(nn.Linear(16, 16).double(), ideal({"tp": 2}), (randn(4, 16),), plan=again)


def test_a_toy_on_real_hardware_is_replicated_and_the_plan_says_so() -> None:
    class Loss(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x)).square().mean()

    plan = autoshard.plan(Loss(8, 8), {"tp": 2}, (torch.randn(2, 8),))
    assert not plan.collectives
    assert "axis tp is not used" in str(plan)


def test_memory_budget_shards_the_parameters() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    example = (torch.randn(8, 64),)
    whole = autoshard.plan(model, {"dp": 4}, example)
    assert all(whole.layouts[f"{i}.weight"]["dp"] != Shard(0) for i in range(4))
    state = 4 * 64 * 64 * 16
    small = autoshard.plan(model, {"dp": 4}, example, memory_budget=0.65 * state)
    assert sum(isinstance(small.layouts[f"{i}.weight"]["dp"], Shard) for i in range(4)) >= 2
    assert small.memory.peak <= 0.65 * state < whole.memory.peak
    with pytest.raises(autoshard.PlanError, match="The least peak found is"):
        autoshard.plan(model, {"dp": 4}, example, memory_budget=state / 5)


def test_sharded_initialisation_equals_one_device() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4))

    torch.manual_seed(11)
    sharded = autoshard.compile(autoshard.deferred_init(make), ideal({"tp": 2}), (torch.randn(4, 16),))
    torch.manual_seed(11)
    torch.testing.assert_close(sharded.full_state_dict(), make().state_dict(), rtol=0, atol=0)


def test_hint_on_every_axis_and_module() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)).double()
    hints = {"0": {"dp": Shard(0), "tp": Shard(1)}, "*.weight": {"dp": Replicate()}}
    plan = autoshard.plan(model, ideal({"dp": 2, "tp": 2}), (randn(4, 16),), hints=hints)
    shared = plan.shared["linear"]
    assert (shared["dp"], shared["tp"]) == (Shard(0), Shard(1))
    assert all(not isinstance(plan.layouts[f"{i}.weight"]["dp"], Shard) for i in range(2))


def test_gradients_in_eval_mode() -> None:
    """An inference program has no backward; a call that records gradients has a program of its own."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 4)).double().eval()
    x = randn(6, 8)
    sharded = autoshard.compile(model, ideal({"tp": 2}), (x,))
    assert not sharded.plan.training
    assert all(c.phase == "forward" for c in sharded.collectives)
    model(x).square().mean().backward()
    sharded(x).square().mean().backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    torch.testing.assert_close(sharded.full_gradients(), expected, rtol=1e-9, atol=1e-15)
    with torch.no_grad():
        assert not sharded(x).requires_grad


def test_training_true_keeps_the_modules_modes() -> None:
    """``training`` says whether gradients are wanted; dropout is on or off as the model's modules are set."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)).double().eval()
    x = randn(6, 8)
    sharded = autoshard.compile(model, ideal({"tp": 2}), (x,), training=True)
    assert sharded.plan.training
    torch.testing.assert_close(sharded(x), model(x), rtol=1e-9, atol=1e-12)


def test_a_hint_on_an_input_binds() -> None:
    """Every reader takes the hinted layout, though the whole input is there on every rank."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).double()
    sharded = autoshard.compile(model, {"dp": 2}, (randn(4, 8),), hints={"input": {"dp": Shard(0)}})
    assert sharded.plan.shared["input"]["dp"] == Shard(0)
    assert "runtime.slice(input, 0" in sharded.source
    assert_equal_training(model, {"dp": 2}, (randn(4, 8),), hints={"input": {"dp": Shard(0)}}, hardware="h100")


def test_parameters_before_compilation() -> None:
    with pytest.raises(autoshard.PlanError, match="nothing is compiled yet"):
        torch.optim.SGD(autoshard.compile(nn.Linear(4, 4), {"tp": 2}).parameters(), lr=0.1)


# --- found by trying to break it ---


class Penalised(nn.Module):
    """A frozen net of its input: its gradient is differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(randn(6, 6) * s, requires_grad=False) for s in (1.0, 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ self.w) @ self.v).pow(3).sum() + x.pow(3).sum()


@pytest.mark.parametrize("hints", [{}, {"x": Shard(0)}, {"w": Shard(1)}])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gradient_penalty(ranks: int, hints: dict[str, object]) -> None:
    model = Penalised()
    sharded = autoshard.compile(
        copy.deepcopy(model), ideal({"tp": ranks}), (randn(4, 6).requires_grad_(),), hints=hints
    )
    assert sharded.collectives or not hints

    def second(module: nn.Module) -> torch.Tensor:
        x = randn(4, 6).requires_grad_()
        (first,) = torch.autograd.grad(module(x), x, create_graph=True)
        first.square().sum().backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(second(sharded), second(model), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("channels", [1, 4, 6])
def test_unfolded_channels(channels: int) -> None:
    class Unfold(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.unfold(x, 3).cumsum(1).square()

    x = randn(1, channels, 6, 6).requires_grad_()
    assert_equal_training(Unfold(), {"tp": 3}, (x,), hints={"x": Shard(1)})


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_mirrored_pads_of_few_channels(mode: str) -> None:
    class Pad(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.pad(x, (3, 5), mode=mode).square()

    assert_equal_training(Pad(), {"tp": 3}, (randn(2, 4, 11).requires_grad_(),), hints={"x": Shard(1)})


def test_ranks_that_differ_by_what_cancels_out() -> None:
    """The gradient of a bias before a batch norm is rounding alone: that ranks round otherwise is no disagreement."""
    whole = Layout(Mesh({"a": 2}), {})
    assert join_shards(
        [torch.full((3,), 1e-17).double(), torch.full((3,), -2e-17).double()], whole, (3,), "x"
    ).shape == (3,)
    for least, dtype in ((1e-14, torch.float64), (1e-6, torch.float32)):
        with pytest.raises(RuntimeMismatchError, match="x: rank 1 disagrees"):
            join_shards([torch.zeros(3, dtype=dtype), torch.full((3,), least, dtype=dtype)], whole, (3,), "x")

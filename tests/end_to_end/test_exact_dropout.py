"""``exact_dropout=False``: each shard drops from a random stream of its own, and attention stays fused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.layout import Shard
from autoshard.models.gpt import Gpt, GptConfig


class Attention(nn.Module):
    """Attention and a residual, both with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(32, 96), nn.Linear(32, 32), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (y.view(rows, length, 4, 8).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        drop = 0.2 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        return x + self.drop(self.out(y.transpose(1, 2).reshape(rows, length, 32)))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean(), "x": x}


class Masks(nn.Module):
    """Two masks of ones, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Dropout(0.5) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = (layer(x * self.scale) for layer in self.layers)
        return (first + second).mean(), first, second


MESHES = [({"dp": 2}, "ddp"), ({"tp": 2}, "megatron"), ({"dp": 2, "tp": 2}, {"dp": "fsdp", "tp": "megatron-sp"})]


@pytest.fixture(autouse=True)
def _float64(float64: None) -> None:
    """All models are float64."""


def stepped(sharded: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and the gradients of one step from a seed."""
    torch.manual_seed(3)
    found = sharded(x)
    found["loss"].backward()
    gradients = {name: g.clone() for name, g in sharded.full_gradients().items()}
    sharded.zero_grad()
    out = found["x"]
    return (out.full_tensor() if hasattr(out, "full_tensor") else out).detach(), gradients


@pytest.mark.slow_cases("{'dp': 2}-ddp", "{'dp': 2, 'tp': 2}-{'dp': 'fsdp', 'tp': 'megatron-sp'}")
@pytest.mark.parametrize(("mesh", "like"), MESHES, ids=str)
def test_a_recomputation_drops_the_same(mesh: dict[str, int], like: Any) -> None:
    """Outputs and gradients are those without recomputation, from a seed; another draw differs."""
    model, x = Model(), torch.randn(4, 8, 32)
    found = []
    for recompute in ("none", "blocks", "selective"):
        sharded = autoshard.compile(
            copy.deepcopy(model), mesh, (x,), like=like, recompute=recompute, exact_dropout=False
        )
        assert "runtime.dropout_attention(" in sharded.source
        assert "runtime.recompute(" in sharded.source or recompute == "none"
        found.append(stepped(sharded, x))
        assert torch.equal(stepped(sharded, x)[0], found[-1][0])
        state = torch.get_rng_state()
        following = sharded(x)["loss"].detach()
        assert float(following) != float(found[-1][0].square().mean())
        torch.set_rng_state(state)
        assert float(sharded(x)["loss"].detach()) == float(following)
    for out, gradients in found[1:]:
        torch.testing.assert_close(out, found[0][0], rtol=1e-12, atol=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, found[0][1][name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("way", ["one", "micro_batches", "stages"])
def test_shards_are_independent(way: str) -> None:
    """Masks of rows on different ranks, of micro-batches, of layers and of steps differ; half of the elements stay."""
    x = torch.ones(64, 16)
    options: dict[str, Any] = {"micro_batches": 2} if way != "one" else {}
    mesh = {"dp": 2} if way != "stages" else {"pp": 2, "dp": 2}
    options |= {"stages": "pp"} if way == "stages" else {}
    sharded = autoshard.compile(
        Masks(), mesh, (x,), exact_dropout=False, hints={"x": {"dp": Shard(0)}}, gather_outputs=True, **options
    )
    seen = []
    for _ in range(2):
        _, first, second = sharded(x)
        seen += [*first.detach().chunk(4), *second.detach().chunk(4)]
    masks = torch.stack([m.ne(0) for m in seen]).flatten(1).double()
    assert 0.4 < float(masks.mean()) < 0.6
    agree = (masks[:, None] == masks[None]).double().mean(-1)
    assert float((agree - torch.eye(len(seen))).max()) < 0.7  # of independent ones a half agrees
    assert set(torch.cat(seen).unique().tolist()) == {0.0, 2.0}


def test_what_is_kept_is_what_was_planned() -> None:
    """Masks of a byte per element; on a CPU, without a fused kernel, attention weights, too."""
    model, x, mesh = Model(), torch.randn(4, 8, 32), autoshard.Mesh({"dp": 2}, "cpu")
    sharded = autoshard.compile(copy.deepcopy(model), mesh, (x,), like="ddp", exact_dropout=False)
    found = autoshard.measure(sharded, (x,), steps=1)
    assert found.kept_bytes == pytest.approx(found.predicted_kept_bytes, rel=0.02)
    without = autoshard.plan(model.eval(), mesh, (x,), like="ddp", training=True)
    assert found.predicted_kept_bytes > without.memory.activations


def test_the_price_of_dropout_on_a_gpu() -> None:
    """A GPT-2 with dropout takes little longer than without, and twice as long with exact masks."""
    config = GptConfig(vocab=50304, width=768, layers=2, heads=12, positions=1024)
    tokens = torch.zeros(16, 1024, dtype=torch.long)
    seconds = {}
    for name, p, exact in (("none", 0.0, None), ("fused", 0.1, None), ("exact", 0.1, True)):
        with torch.device("meta"):
            model = Gpt(replace(config, dropout=p)).to(torch.bfloat16)
        plan = autoshard.plan(model, autoshard.Mesh({"dp": 1}, "h100"), (tokens, tokens), exact_dropout=exact)
        seconds[name] = sum(c.seconds for c in plan.choices.values() if "scaled_dot_product" in str(c.op))
    assert seconds["fused"] == pytest.approx(seconds["none"], rel=0.05)
    assert seconds["exact"] > 2 * seconds["none"]


@pytest.mark.slow
def test_on_gpus_by_default() -> None:
    """A plan for GPUs keeps no attention weights; verify is exact in any case."""
    model, x = Model(), torch.randn(4, 8, 32)
    mesh = autoshard.Mesh({"dp": 2}, "h100")
    plans = {exact: autoshard.plan(model, mesh, (x,), like="ddp", exact_dropout=exact) for exact in (None, True, False)}
    assert plans[None].memory.activations == plans[False].memory.activations < plans[True].memory.activations
    assert plans[None].cost.compute_s == plans[False].cost.compute_s < plans[True].cost.compute_s
    assert autoshard.verify(model, mesh, (x,), like="ddp").ok
    exact = autoshard.compile(copy.deepcopy(model), autoshard.Mesh({"dp": 2}, "cpu"), (x,), like="ddp")
    torch.manual_seed(3)
    expected = model(x)["x"]
    torch.testing.assert_close(stepped(exact, x)[0], expected, rtol=1e-9, atol=1e-12)
    inexact = autoshard.compile(copy.deepcopy(model), {"dp": 2}, (x,), like="ddp", exact_dropout=False)
    assert not torch.allclose(stepped(inexact, x)[0], expected)

"""Plans by an expert's name: what they send to the byte, predicted and executed, and equal numbers (float64)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training, captured_once, collectives, double
from torch import nn

import autoshard
import autoshard.models
from autoshard.models.llama import Llama, LlamaConfig

BATCH, SEQ, LAYERS, VOCAB, WIDTH, HIDDEN = 8, 16, 2, 64, 32, 64
ACTIVATION = BATCH * SEQ * WIDTH * 8
"""bytes of one activation in float64"""
NAMES = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "megatron-sp", "ulysses", "replicate")


@cache
def llama() -> Llama:
    return Llama(LlamaConfig(VOCAB, WIDTH, HIDDEN, heads=4, kv_heads=4, layers=LAYERS)).double()


def tokens() -> tuple[tuple[torch.Tensor], dict[str, torch.Tensor]]:
    return autoshard.models.llama.example_inputs(llama().config, BATCH, SEQ)


def numel(where: Any = lambda name: True) -> int:
    return sum(p.numel() for n, p in llama().named_parameters() if where(n))


def is_matrix(name: str) -> bool:
    return "norm" not in name


@pytest.fixture(autouse=True, scope="module")
def once() -> Iterator[None]:
    """No mesh matters to a capture."""
    with captured_once():
        yield


def sent(axes: dict[str, int], like: Any) -> Counter[tuple[str, tuple[str, ...], str]]:
    """Bytes per kind, axes and phase, without scalars; the counters of a run say the same, and training is equal."""
    args, kwargs = tokens()
    assert_equal_training(llama(), axes, args, kwargs, like=like, hardware="h100", steps=1)
    sharded = autoshard.compile(llama(), autoshard.Mesh(axes), args, kwargs, like=like)
    executed: list[Any] = []
    sharded.record(executed)
    sharded(*args, **kwargs).loss.backward()
    found = _bytes(sharded.collectives)
    assert found == pytest.approx(_bytes(executed))
    return found


def _bytes(collectives: Iterable[Any]) -> Counter[tuple[str, tuple[str, ...], str]]:
    found: Counter[Any] = Counter()
    for c in collectives:
        if c.bytes > 64:
            found[c.kind, c.axes, c.phase] += c.bytes
    return found


def ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def test_ddp_reduces_every_gradient_once() -> None:
    assert sent({"dp": 4}, "ddp") == {("all_reduce", ("dp",), "backward"): 2 * ring(4) * numel() * 8}


def test_fsdp_gathers_twice_and_scatters_once() -> None:
    """3(s-1)/s·Ψe, less the table: looking rows up, its backward does not read it."""
    assert sent({"fsdp": 4}, "fsdp") == {
        ("all_gather", ("fsdp",), "forward"): ring(4) * numel() * 8,
        ("all_gather", ("fsdp",), "backward"): ring(4) * numel(lambda n: "embedding" not in n) * 8,
        ("reduce_scatter", ("fsdp",), "backward"): ring(4) * numel() * 8,
    }


def test_hsdp_reduces_the_shard_over_the_replicas() -> None:
    assert sent({"replica": 2, "shard": 2}, "hsdp") == {
        ("all_gather", ("shard",), "forward"): ring(2) * numel() * 8,
        ("all_gather", ("shard",), "backward"): ring(2) * numel(lambda n: "embedding" not in n) * 8,
        ("reduce_scatter", ("shard",), "backward"): ring(2) * numel() * 8,
        ("all_reduce", ("replica",), "backward"): 2 * ring(2) * numel() / 2 * 8,
    }


def test_megatron_reduces_four_activations_per_layer() -> None:
    """And one of the embedding, one in front of the head, three numbers per token in the loss."""
    forward, backward = 2 * LAYERS + 1, 2 * LAYERS + 1
    loss = 3 * BATCH * SEQ * 8
    assert sent({"tp": 4}, "megatron") == {
        ("all_reduce", ("tp",), "forward"): 2 * ring(4) * (forward * ACTIVATION + loss),
        ("all_reduce", ("tp",), "backward"): 2 * ring(4) * backward * ACTIVATION,
    }


def test_megatron_with_sequence_parallelism_gathers_and_scatters_instead() -> None:
    norms = numel(lambda n: "norm" in n) * 8
    assert sent({"tp": 4}, "megatron-sp") == {
        ("all_gather", ("tp",), "forward"): ring(4) * (2 * LAYERS + 1) * ACTIVATION,
        ("reduce_scatter", ("tp",), "forward"): ring(4) * (2 * LAYERS + 1) * ACTIVATION,
        ("all_reduce", ("tp",), "forward"): 2 * ring(4) * 3 * BATCH * SEQ * 8,
        ("all_gather", ("tp",), "backward"): ring(4) * (2 * LAYERS + 1) * ACTIVATION,
        ("reduce_scatter", ("tp",), "backward"): ring(4) * (2 * LAYERS + 1) * ACTIVATION,
        ("all_reduce", ("tp",), "backward"): 2 * ring(4) * norms,  # each rank has a part of the sequence
    }


def test_data_and_tensor_parallel_together() -> None:
    """Per axis: gradients of a rank's part of the weights over dp, activations of its part of the batch over tp."""
    found = sent({"dp": 2, "tp": 2}, {"dp": "ddp", "tp": "megatron"})
    whole = numel(lambda n: "norm" in n)
    assert found["all_reduce", ("dp",), "backward"] == 2 * ring(2) * (numel(is_matrix) / 2 + whole) * 8
    assert found["all_reduce", ("tp",), "backward"] == 2 * ring(2) * (2 * LAYERS + 1) * ACTIVATION / 2


class Attentions(nn.Module):
    """The residual stream [batch, seq, width] with attention alone; the mean of squares needs no flattened logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for query, key, value, out in self.layers:
            q, k, v = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (query, key, value))
            x = x + out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x.square().mean()


def test_ulysses_turns_the_sequence_into_heads_and_back() -> None:
    x = torch.randn(BATCH, SEQ, WIDTH, generator=torch.Generator().manual_seed(0))
    found = collectives(Attentions(), {"sp": 4}, None, (x,), "h100", like="ulysses")
    turned = Counter({k: n * k[3] for k, n in found.items() if k[0] == "all_to_all"})
    assert sum(turned.values()) == 8 * ring(4) / 4 * ACTIVATION * LAYERS
    assert {k[0] for k in found} == {"all_to_all", "all_reduce"}  # the gradients' and the loss's


@cache
def others() -> tuple[tuple[nn.Module, Any, Any], ...]:
    found = [autoshard.models.get(name) for name in ("gpt", "dlrm")]
    return tuple((r.model().double(), *double(r.inputs(batch=4))) for r in found)


@pytest.mark.parametrize("like", NAMES)
def test_names_are_heard_everywhere(like: str) -> None:
    """On models of other kinds: equal numbers, and what the name promises of the parameters."""
    for model, args, kwargs in others():
        report = assert_equal_training(model, {"x": 2}, args, kwargs, like=like, hardware="h100", steps=1)
        plan = report.plan
        trained = [n for n, kind in plan.kinds.items() if kind == "parameter"]
        whole = [n for n in trained if "S" not in str(plan.layouts[n])]
        if like in ("ddp", "replicate", "ulysses"):
            assert whole == trained
        elif like in ("zero1", "zero2", "fsdp", "hsdp"):
            assert all(plan.shapes[n] == (1,) for n in whole)
        else:
            assert 0 < len(whole) < len(trained)

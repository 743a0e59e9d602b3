"""Plans found without hints are as good as those made by hand: Megatron's tensor parallelism, DDP's all-reduces."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest
import torch

import autoshard
from autoshard.models.llama import Llama, LlamaConfig

pytestmark = pytest.mark.usefixtures("remembering")

VOCAB, RANKS = 32768, 4
SMALL = (256, 1024, 4)
SIZES = {"1k": (1024, 1024, 8), "2k": (2048, 2048, 16), "4k": (4096, 4096, 32)}
"""width, sequence length, heads"""
AS_MUCH = {"1k": 1.7, "2k": 1.01, "4k": 1.01}
"""by size, the work of a rank in its share of all work, at most"""
DTYPE = torch.bfloat16
SCHEDULED = 1.005
"""what timelines may differ by, of a plan that the search prefers"""
Signature = tuple[str, tuple[str, ...], str, float]


@cache
def llama(
    size: str,
    layers: int,
    axis: str,
    batch: int = 1,
    seq: int | None = None,
    vocab: int = VOCAB,
    like: str | None = None,
    hardware: str = "h100",
) -> autoshard.Plan:
    """The plan of a Llama on the meta device, in bfloat16, on four devices; ``axis``: one, or two of two ranks."""
    width, length, heads = SMALL if size == "small" else SIZES[size]
    config = LlamaConfig(vocab, width, 7 * width // 2, heads, heads // 2, layers)
    with torch.device("meta"):
        model = Llama(config).to(DTYPE)
        tokens = torch.zeros(batch, seq or length, dtype=torch.long)
    axes, likes = axis.split(), (like or "").split()
    mesh = autoshard.Mesh(dict.fromkeys(axes, RANKS if len(axes) == 1 else 2), hardware)
    return autoshard.plan(model, mesh, (tokens,), {"labels": tokens}, like=dict(zip(axes, likes, strict=False)) or None)


def megatron(layers: int, batch: int, seq: int, width: int) -> float:
    """Ring bytes per rank of tensor parallelism by hand (Shoeybi et al. 2019), forward and backward.

    Per layer 4 all-reduces of an activation A; one of A after the embedding and one in the backward of the head; the
    cross entropy reduces a maximum, a sum and the target's logit per token, in float32.
    """
    ring, activation = 2 * (RANKS - 1) / RANKS, batch * seq * width * DTYPE.itemsize
    return ring * (4 * layers * activation + 2 * activation + 3 * 4 * batch * seq)


def per_layer(plan: autoshard.Plan) -> list[Counter[Signature]]:
    """The collectives of every decoder layer."""
    found: dict[int, Counter[Signature]] = {}
    for c in plan.collectives:
        if layer := re.match(r"blocks\.(\d+)", c.fqn):
            found.setdefault(int(layer[1]), Counter())[c.kind, c.axes, c.phase, c.bytes] += 1
    return [found[i] for i in sorted(found)]


@pytest.mark.slow_cases("*-8", "2k-*", "1k-1", "4k-*")
@pytest.mark.parametrize("layers", [1, 2, 8])
@pytest.mark.parametrize("size", SIZES)
def test_tensor_parallel_is_no_dearer_than_megatron(size: str, layers: int) -> None:
    """In time, and in the bytes that an operation waits for; parameters may move behind compute. The smallest layers take
    about as long where the weights of attention are gathered, in one message, and all compute it."""
    plan, expert = (llama(size, layers, "tp", like=like) for like in (None, "megatron"))
    width, seq, _ = SIZES[size]
    assert plan.cost.flops_per_rank <= AS_MUCH[size] * plan.cost.flops / RANKS
    assert plan.cost.total_s <= expert.cost.total_s * (1 + 1e-9)
    assert plan.cost.schedule_s <= expert.cost.schedule_s * SCHEDULED
    waits = [c for c in plan.collectives if plan.kinds.get(c.value) != "parameter"]
    assert sum(c.bytes for c in waits) <= megatron(layers, 1, seq, width)


@pytest.mark.slow_cases("dp-8-*")
@pytest.mark.parametrize(
    ("axis", "batch", "hardware", "like"), [("dp", 8, "a100", "zero1"), ("dp tp", 4, "h100", "zero1 megatron-sp")]
)
def test_no_expert_has_the_shorter_timeline(axis: str, batch: int, hardware: str, like: str) -> None:
    """What the search minimises hides communication behind the sum of compute; the timeline, behind what is there."""
    plan, expert = (llama("2k", 2, axis, batch, like=asked, hardware=hardware) for asked in (None, like))
    assert plan.cost.total_s <= expert.cost.total_s * (1 + 1e-9)
    assert plan.cost.schedule_s <= expert.cost.schedule_s * SCHEDULED


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_every_layer_communicates_alike(size: str) -> None:
    """To the byte, but for the first and the last: they have other neighbours."""
    layers = per_layer(llama(size, 8, "tp"))
    assert len(layers) == 8
    assert sum(layers[1].values()) >= 4
    assert all(layer == layers[1] for layer in layers[1:-1])


def test_the_logits_are_never_gathered() -> None:
    logits = 1024 * VOCAB * DTYPE.itemsize
    assert max(c.bytes for c in llama("1k", 2, "tp").collectives) < logits / RANKS


def gradient_bytes(plan: autoshard.Plan) -> dict[str, float]:
    """Per parameter: the ring bytes per rank of one all-reduce of its gradient."""
    numel = {n: torch.Size(plan.shapes[n]).numel() for n, kind in plan.kinds.items() if kind == "parameter"}
    return {n: 2 * (RANKS - 1) / RANKS * count * DTYPE.itemsize for n, count in numel.items()}


@pytest.mark.slow_cases("1", "8")
@pytest.mark.parametrize("layers", [1, 2, 8])
def test_data_parallel_communicates_gradients_only(layers: int) -> None:
    """A small model with a batch to split: every parameter's gradient once, the loss, and nothing else.

    Of larger weights it is faster to update a shard on each rank.
    """
    plan = llama("small", layers, "dp", batch=32, seq=1024, vocab=1024)
    backward = [c for c in plan.collectives if c.phase == "backward"]
    assert {c.kind for c in backward} == {"all_reduce"}
    assert len(backward) == len(gradient_bytes(plan))
    assert {c.value: c.bytes for c in backward} == gradient_bytes(plan)
    assert sum(c.bytes for c in plan.collectives if c.phase == "forward") <= 64
    assert plan.cost.flops_per_rank == pytest.approx(plan.cost.flops / RANKS, rel=0.01)


def test_a_large_vocabulary_is_looked_up_in_columns_instead() -> None:
    """Where the batch has few tokens for its vocabulary, moving the rows twice costs less than the table's gradient."""
    plan = llama("1k", 2, "dp", batch=32, seq=1024)
    table = gradient_bytes(plan)["embedding.weight"]
    assert "embedding.weight" not in {c.value for c in plan.collectives}
    moved = [c for c in plan.collectives if c.kind == "all_to_all"]
    assert [c.phase for c in moved] == ["forward", "backward"]
    assert sum(c.bytes for c in moved) < table


def test_a_worse_plan_is_seen() -> None:
    """Negative control: where all ranks compute the feed-forward's, neither the time nor the work is within its bound."""
    width, seq, heads = SIZES["1k"]
    with torch.device("meta"):
        model = Llama(LlamaConfig(VOCAB, width, 7 * width // 2, heads, heads // 2, 2)).to(DTYPE)
        tokens = torch.zeros(1, seq, dtype=torch.long)
    hints = {"blocks.*.feed_forward": "replicate", "blocks.*.feed_forward.gate": "replicate"}
    plan = autoshard.plan(model, {"tp": RANKS}, (tokens,), {"labels": tokens}, hints=hints)
    assert plan.cost.total_s > llama("1k", 2, "tp", like="megatron").cost.total_s * (1 + 1e-9)
    assert plan.cost.flops_per_rank > AS_MUCH["1k"] * plan.cost.flops / RANKS

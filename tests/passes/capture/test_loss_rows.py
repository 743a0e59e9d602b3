"""Losses of logits that models flatten: cut along the sequence where it is, with several sequences in a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training, collectives, ideal
from torch import nn

import autoshard
from autoshard.compiler import capture_graph
from autoshard.runtime.operations.losses import cross_entropy_op

WORDS, WIDTH = 24, 16
RING = {"cp": 2}, {"cp": "ring"}
WITH_VOCABULARY = {"cp": 2, "tp": 2}, {"cp": "ring", "tp": "megatron"}


class Decoder(nn.Module):
    """One attention, a head, and a loss in one of the forms in which users write it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = FORMS[form]
        self.embedding, self.qkv = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        loss: torch.Tensor = self.form(self, x + self.out(y), labels)
        return loss


def plain(model: Decoder, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.head(model.norm(x)).view(-1, WORDS), labels.view(-1), label_smoothing=0.1)


def padded(model: Decoder, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As transformers: labels are shifted and padded; the sum over all items of a step."""
    logits, labels = model.head(model.norm(x)), F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), ignore_index=-100, reduction="sum")
    return loss / (labels != -100).sum()


def cut_off(model: Decoder, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As transformers before: the last logits and the first labels are left out."""
    logits = model.head(model.norm(x))[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), labels[..., 1:].contiguous().view(-1))


def weighed(model: Decoder, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The head works on flat rows; of each its loss, weighed, and a penalty for large logits."""
    logits, kept = model.head(model.norm(x.flatten(0, 1))), (labels > 3).view(-1)
    each = F.cross_entropy(logits, labels.view(-1), reduction="none") * kept
    return each.sum() / kept.sum() + 1e-3 * logits.logsumexp(-1).square().mean()


def in_columns(model: Decoder, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Positions first, as of old encoders."""
    logits = model.head(model.norm(x)).transpose(0, 1).reshape(-1, WORDS)
    return F.cross_entropy(logits, labels.t().reshape(-1))


def of_the_hardest(model: Decoder, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Rows are compared with each other."""
    each = F.cross_entropy(model.head(model.norm(x)).view(-1, WORDS), labels.view(-1), reduction="none")
    return each.topk(6).values.mean()


FORMS = {f.__name__: f for f in (plain, padded, cut_off, weighed, in_columns, of_the_hardest)}


def text(batch: int = 3, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, WORDS, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    labels = tokens[:, 1:].clone()
    labels[0, :2] = -100
    return tokens[:, :-1], labels


def of_rows(plan: autoshard.Plan) -> list[Any]:
    """What carries rows over cp, but for keys and values on their way round."""
    kinds = ("all_gather", "reduce_scatter", "all_to_all")
    parameters = tuple(n for n, kind in plan.kinds.items() if kind == "parameter")
    found = [c for c in plan.collectives if "cp" in c.axes and c.kind in kinds]
    return [c for c in found if not c.reason.startswith(parameters)]


@pytest.mark.slow_cases("plain-*")
@pytest.mark.parametrize(
    ("form", "mesh", "batch", "length"),
    [
        ("plain", WITH_VOCABULARY, 3, 8),
        ("weighed", RING, 3, 8),
        *(
            pytest.param(form, mesh, *sizes, marks=pytest.mark.slow)
            for form in ("plain", "padded", "cut_off", "weighed", "in_columns")
            for mesh in (RING, WITH_VOCABULARY, ({"dp": 2, "cp": 2}, {"dp": "ddp", "cp": "ring"}))
            for sizes in ((4, 8), (3, 7))
        ),
    ],
)
def test_no_rows_leave_the_sequence(form: str, mesh: tuple[Any, Any], batch: int, length: int) -> None:
    """Neither in front of the loss nor of the last layer, also with a head that is cut by words."""
    axes, like = mesh
    report = assert_equal_training(Decoder(form), axes, text(batch, length), like=like, steps=2)
    if form != "cut_off":  # of which the last rank has one position less
        assert not of_rows(report.plan)
    (labels,) = (c.labels for c in report.plan.choices.values() if "cross_entropy" in c.op)
    assert dict(zip(axes, labels, strict=True))["cp"] == ("d0" if form == "in_columns" else "d1")


def test_bytes_of_a_loss_are_those_of_its_sums() -> None:
    """With words cut over tp and positions over cp: maxima, then sums, of the rows of a rank; one loss over cp."""
    found = collectives(Decoder("plain"), *WITH_VOCABULARY[:1], None, text(4, 8), like=WITH_VOCABULARY[1])
    rows, ranks, word = 4 * 8 / 2, 2 * 1 / 2, 8
    of_tp = [size for (kind, axes, phase, size), n in found.items() for _ in range(n)
             if (kind, axes, phase) == ("all_reduce", ("tp",), "forward")]  # fmt: skip
    assert sorted(of_tp)[:2] == [ranks * rows * word, ranks * rows * 3 * word]


def test_what_compares_rows_reads_them_flat() -> None:
    model = Decoder("of_the_hardest")
    graph = capture_graph(model, text(), {})
    (loss,) = (n for n in graph.nodes if n.op is cross_entropy_op)
    (found,) = (n for n in graph.nodes if n.op is torch.ops.aten.topk.default)
    assert [graph.shape(x) for x in (*loss.outputs, *found.inputs)] == [(3, 8), (24,)]
    assert_equal_training(model, *RING[:1], text(), like=RING[1], steps=1)


def test_transformers_in_float32() -> None:
    """Logits in float32, labels shifted and padded: of a loss nothing but its sum and the count are exchanged."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=WORDS, intermediate_size=24, use_cache=False, **sizes)
    torch.manual_seed(0)
    model, (tokens, labels) = transformers.LlamaForCausalLM(config), text()
    given = {"input_ids": tokens, "labels": labels}
    axes, like = WITH_VOCABULARY
    sharded = autoshard.compile(model, ideal(axes), (), given, like=like)
    assert not of_rows(sharded.plan)
    loss = sharded(**given).loss
    loss.backward()
    expected = model(**given).loss
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    found = sharded.full_gradients()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-6)

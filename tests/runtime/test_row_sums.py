"""A cross entropy that works on pieces of the rows: values, first and second gradients, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import ideal
from torch.nn import functional as F

import autoshard
import autoshard.models
from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import LocalCall
from autoshard.passes.rules.families import loss as rules
from autoshard.passes.rules.interpreters import TensorSpec, abstract_run_on
from autoshard.runtime import cross_entropy
from autoshard.runtime.operations import losses
from autoshard.runtime.transport.communicator import bind
from autoshard.runtime.transport.in_process import World

CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "none": {"reduction": "none"},
    "sum": {"reduction": "sum", "label_smoothing": 0.1},
    "weight": {"weight": torch.rand(7, dtype=torch.float64) + 0.5, "label_smoothing": 0.2},
}


@pytest.fixture
def alone() -> Iterator[None]:
    with bind(World({"x": 1}).ranks[0]):
        yield


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "SLICE_ELEMENTS", 20)
    monkeypatch.setattr(rules, "CHUNKED_LOSS_ELEMENTS", 1)


@pytest.mark.usefixtures("small_pieces", "alone")
@pytest.mark.parametrize("shape", [(9, 7), (5, 7, 3), (7,)], ids=str)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_pieces_are_the_whole(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(shape, dtype=torch.float64) * 3).requires_grad_()
    target = torch.randint(7, shape[:1] + shape[2:] if len(shape) > 1 else ())
    target = target.where(torch.rand(target.shape) < 0.7, -100) if target.dim() else target
    found = []
    for loss in (
        cross_entropy(logits, target, **options, classes=7),
        F.cross_entropy(logits, target, **options),
    ):
        (first,) = torch.autograd.grad(loss.sum().square(), logits, create_graph=True)
        (plain,) = torch.autograd.grad(loss.sum().square(), logits, retain_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), logits)
        found.append((loss, first, plain, second))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("small_pieces")
def test_large_logits_are_worked_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    right = losses._row_slices
    monkeypatch.setattr(losses, "_row_slices", lambda logits: seen.append(logits.numel()) or right(logits))
    reference = autoshard.models.get("llama:tiny")
    model, ((tokens,), kwargs) = reference.model().double(), reference.inputs()
    report = autoshard.verify(model, ideal({"cp": 2}), (tokens, kwargs["labels"]), like="ring")
    assert report.ok, str(report)
    assert tokens.numel() // 2 * 128 in seen


@pytest.mark.usefixtures("small_pieces")
def test_nothing_but_their_gradient_is_as_large_as_logits() -> None:
    forms = {
        "x": TensorSpec((512, 1024), (1024, 1), torch.bfloat16, grad=True),
        "t": TensorSpec((512,), (1,), torch.int64, grad=False),
    }
    size = 2 * 512 * 1024
    rehearsal = abstract_run_on(ideal({"cp": 2}))
    call = LocalCall("cross_entropy", (Ref("x"), Ref("t")), {"classes": 1024, "batch_axes": "cp"})
    ours = rehearsal.run(call, forms, training=True)
    whole = rehearsal.run(replace(call, kwargs={"batch_axes": "cp"}), forms, training=True)
    assert ours is not None
    assert whole is not None
    assert ours.forward_peak < 0.1 * size
    assert whole.forward_peak >= size
    assert ours.backward_peak < 1.1 * size
    assert whole.backward_peak > 1.9 * size


@pytest.mark.usefixtures("alone")
def test_a_piece_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(losses, "_row_slices", lambda logits: [slice(0, 4)])
    logits, target = torch.zeros(6, 7, dtype=torch.float64), torch.zeros(6, dtype=torch.int64)
    ours = cross_entropy(logits, target, classes=7)
    assert not torch.allclose(ours, F.cross_entropy(logits, target))

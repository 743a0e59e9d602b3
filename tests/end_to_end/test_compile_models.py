"""Every reference model and the transformers families, trained three steps on every mesh: equal to one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import MESHES, assert_equal_training
from transformers_models import hugging_face, tokens

import autoshard.models
from autoshard.errors import AutoshardError

pytestmark = pytest.mark.usefixtures("captures")

REFERENCE = ("mlp", "gpt", "llama", "moe", "dlrm", "vit")
Case = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]
"""a model, its arguments and keyword arguments"""
SLOW_MESHES = {"dp2tp2sp2"}


def cases(names: tuple[str, ...]) -> list[object]:
    """(model, mesh); the three-axis mesh is slow to search and runs with --run-slow, but for one model."""
    return [
        pytest.param(n, m, marks=[pytest.mark.slow] if m in SLOW_MESHES and n != names[0] else [], id=f"{n}-{m}")
        for n in names
        for m in MESHES
    ]


@functools.cache
def reference(name: str) -> Case:
    """The same objects for all meshes; nothing trains the model itself."""
    torch.manual_seed(0)
    found = autoshard.models.get(name)
    args, kwargs = found.inputs(batch=4)
    return found.model(), tuple(args), dict(kwargs)


@pytest.mark.slow_cases(
    "vit-tp2",
    "moe-tp2",
    "llama-dp2tp2",
    "gpt-dp2tp2",
    "*-tp4",
    "*-dp4",
    "moe-tp1",
    "vit-tp1",
    "llama-tp1",
    "gpt-tp2",
    "llama-tp2",
    "moe-dp2tp2",
    "vit-dp2tp2",
    "dlrm-dp2tp2",
)
@pytest.mark.parametrize(("name", "mesh"), cases(REFERENCE))
def test_reference_models(name: str, mesh: str) -> None:
    model, args, kwargs = reference(name)
    # Sizes divide these meshes for the transformers.
    share = 1.05 if name in ("gpt", "llama", "mlp") else None
    assert_equal_training(model, MESHES[mesh], args, kwargs, share=share)


@functools.cache
def transformer(name: str, batch: int, vocabulary: int) -> Case:
    return hugging_face(name, vocabulary), (), tokens(batch, vocabulary)


@pytest.mark.slow_cases(
    "llama-tp4",
    "*-dp2tp2sp2",
    "*-dp4",
    "*-tp[12]",
    "t5-tp4",
    "bert-tp4",
    "gpt2-tp4",
    "bert-dp2tp2",
    "gpt2-dp2tp2",
    "t5-*",
)
@pytest.mark.parametrize(("name", "mesh"), cases(("llama", "gpt2", "bert", "t5")))
def test_transformers(name: str, mesh: str) -> None:
    model, args, kwargs = transformer(name, 4, 128)
    assert_equal_training(model, MESHES[mesh], args, kwargs, share=1.05)


@pytest.mark.slow_cases("*-tp4", "*t5-*", "gpt2-dp2tp2", "bert-dp2tp2")
@pytest.mark.parametrize("mesh", ["tp4", "dp2tp2"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_uneven_sizes(name: str, mesh: str) -> None:
    """Vocabulary 131, batch 3, two key-value heads on four ranks."""
    model, args, kwargs = transformer(name, 3, 131)
    report = assert_equal_training(model, MESHES[mesh], args, kwargs)
    assert report.plan.cost.flops_per_rank < 0.6 * report.plan.cost.flops


@pytest.mark.slow
def test_same_tensor_for_two_arguments() -> None:
    """Labels that are the input ids object must not be confused with them in later calls."""
    model = hugging_face("llama", 128)
    x = tokens(4, 128)["input_ids"]
    sharded = autoshard.compile(model, MESHES["tp2"], (), {"input_ids": x, "labels": x})
    other = tokens(4, 128)
    torch.testing.assert_close(sharded(**other).loss, model(**other).loss, rtol=1e-4, atol=1e-4)


def test_unknown_reference_model() -> None:
    with pytest.raises(AutoshardError, match="there is no reference model 'lama'"):
        autoshard.models.get("lama")

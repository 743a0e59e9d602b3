"""Ops without a rule written as others: all of them in the one run that makes the program functional."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.passes.capture.export import capture
from autoshard.passes.capture.translate import decompose


class Calling(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def sampled(x: Tensor) -> Tensor:
    return F.grid_sample(x[None, None], torch.zeros(1, 3, 3, 2, dtype=x.dtype))


def multiplied(x: Tensor) -> Tensor:
    return torch.kron(x, x).inner(x[0].repeat(8))


@pytest.mark.parametrize(
    ("function", "origins"),
    [
        (sampled, {"aten.grid_sampler.default"}),
        (multiplied, {"aten.kron.default", "aten.inner.default"}),
    ],
)
def test_parts_of_parts_need_no_further_trace(
    function: Callable[[Tensor], Tensor], origins: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run traces the whole program twice, which is most of the time that a compilation takes."""
    runs = Mock(wraps=decompose._decompose_exported_program)
    monkeypatch.setattr(decompose, "_decompose_exported_program", runs)
    graph = capture(Calling(function), (torch.randn(6, 8, dtype=torch.float64),))
    assert runs.call_count == 1
    assert {node.origin for node in graph.nodes} - {""} == origins  # the user's own op, also of the parts of a part
    assert not {str(node.op) for node in graph.nodes} & origins

"""Functions of torch that look at values: captured without the look, and equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_models import text
from harness import assert_equal_training, captured_once, ideal
from sample_makers import f, i, unit
from torch import nn

import autoshard

X, WEIGHTS, COUNTS = f(6, 11), unit(11), i(3, 11) + 1


class Of(nn.Module):
    """A function of its scaled input."""

    def __init__(self, function: Callable[..., torch.Tensor], shape: torch.Size) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale, *others)


CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "cov": (torch.cov, ()),
    "cov without correction": (lambda x: x.cov(correction=0), ()),
    "weighted cov": (lambda x, w, n: torch.cov(x, fweights=n, aweights=w), (WEIGHTS, COUNTS)),
    "counted cov": (lambda x, n: torch.cov(x, fweights=n), (COUNTS,)),
    "variance": (lambda x, w: torch.cov(x[0], aweights=w, correction=2), (WEIGHTS,)),
    "selected": (lambda x, m: F.l1_loss(x.masked_select(m), torch.masked_select(x.detach() + 1, m)), (X > 0,)),
    "selected rows": (lambda x, m: x.masked_select(m) - x.cos().masked_select(m), (X[:, :1] > 0,)),
    "corrcoef": (torch.corrcoef, ()),
    "corrcoef of one": (lambda x: x[0].corrcoef(), ()),
    "gaussian": (F.gaussian_nll_loss, (f(6, 11), unit(6, 11))),
    "gaussian, clamped": (nn.GaussianNLLLoss(full=True, reduction="sum"), (f(6, 11), unit(6) * 2e-6)),
    "gaussian, one variance": (lambda x, y: F.gaussian_nll_loss(x, y, 0.5, reduction="none"), (f(6, 11),)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str) -> None:
    function, others = CASES[name]
    model = Of(function, X.shape)
    with captured_once():
        for ranks in (2, 3):
            assert_equal_training(model, {"x": ranks}, (X, *others))


def test_what_eager_refuses_is_not_a_number() -> None:
    """A negative variance, which one graph cannot refuse; a shape it can."""
    model: Any = Of(F.gaussian_nll_loss, X.shape).double()
    given, var = (X, f(6, 11), unit(6, 11)), -unit(6, 11)
    sharded = autoshard.compile(model, ideal({"x": 2}), given)
    assert torch.allclose(sharded(*given), model(*given), rtol=1e-12)
    assert sharded(X, given[1], var).isnan()
    with pytest.raises(ValueError, match="negative"):
        model(X, given[1], var)
    with pytest.raises(autoshard.AutoshardError, match="gaussian_nll_loss: var"):
        autoshard.compile(model, ideal({"x": 2}), (X, given[1], unit(6, 2)))


def test_text_of_what_a_mask_selects() -> None:
    class Selected(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x.masked_select(mask).sum()

    assert (
        text(Selected(), torch.randn(2, 3), torch.ones(2, 3, dtype=torch.bool))
        == """\
index = aten.index.Tensor(x, [mask])
sum_1 = aten.sum.default(index)
return sum_1"""
    )

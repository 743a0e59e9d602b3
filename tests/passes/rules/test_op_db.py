"""PyTorch's op database as oracle: nothing is wrong, nothing crashes, and what should be sharded is.

Every other op of a fixed subset runs by default; the whole database, in some twenty minutes, with --run-slow or
``python benchmarks/op_coverage.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import ideal
from op_database import OpCall, Outcome, differs, infos, names, run_op, samples, verdict

import autoshard
from autoshard.passes.ir.program import LocalCall
from autoshard.passes.rules import _registry, add_rule, rule_for
from autoshard.passes.rules.base import Rule

SHARDED = """
    add mul div sub pow exp tanh sigmoid where clamp lerp addcmul sum mean prod var std cumsum softmax
    log_softmax logsumexp sort topk matmul mm bmm baddbmm addmm einsum outer tensordot gather scatter_add index_select
    index_add index_put cat stack split chunk narrow transpose permute reshape expand repeat roll tril
    masked_fill masked.std nn.functional.linear nn.functional.layer_norm nn.functional.embedding nn.functional.conv2d
    nn.functional.cross_entropy nn.functional.mse_loss nn.functional.gelu nn.functional.batch_norm
    nn.functional.pixel_shuffle linalg.solve fft.fft
""".split()
DECOMPOSED = "kron diag_embed inner".split()
SMALL = "tensordot linalg.solve".split()
"""whose samples leave one of three ranks nothing"""
WHOLE = "linalg.ldl_solve histogram".split()
TWO = "cat repeat".split()
"""whose first sample is one that nothing divides"""
SUBSET = [*SHARDED, *DECOMPOSED, *WHOLE]


def outcomes(name: str) -> list[Outcome]:
    """On three ranks, which divide few sizes; ``test_every_op`` has two as well, and more samples."""
    ranks = (2,) if name in SMALL else (3,)
    return [o for info in infos(name)[:2] for o in run_op(info, 1 + (name in TWO), ranks)]


def failures(found: list[Outcome]) -> str:
    bad = [o for o in found if o.status in ("wrong", "crash")]
    return "\n".join(f"{o.op} sample {o.sample} {o.hint} on {o.ranks} ranks: {o.status}: {o.detail}" for o in bad[:3])


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (i % 2)) for i, n in enumerate(SUBSET)])
@pytest.mark.filterwarnings("ignore")
def test_op(name: str) -> None:
    found = outcomes(name)
    assert found
    assert not failures(found), failures(found)
    if name in SHARDED + DECOMPOSED:
        assert verdict(found) in ("sharded", "decomposed")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", names())
@pytest.mark.filterwarnings("ignore")
def test_every_op(name: str) -> None:
    found = [o for info in infos(name) for o in run_op(info)]
    assert not failures(found), failures(found)


def test_a_wrong_rule_is_found() -> None:
    """Negative control: shards of exp computed by another op."""
    op = torch.ops.aten.exp.default
    true = rule_for(op)
    assert true is not None
    wrong = Rule(op, true.strategies, lambda site: LocalCall(torch.ops.aten.expm1.default, site.node.args, {}))
    try:
        add_rule(wrong)
        assert {o.status for o in outcomes("exp")} == {"wrong"}
    finally:
        add_rule(true)


def test_differences_are_seen() -> None:
    x = torch.ones(3, dtype=torch.float64)
    assert not differs([x, None], [x, None])
    assert not differs([None], [x * 0])
    assert "largest error" in differs([x + 1e-6], [x])
    assert "is not" in differs([x.float()], [x])
    assert "is not" in differs([None], [x])
    assert all(isinstance(c, OpCall) for c in samples(infos("add")[0]))


def test_the_gradient_that_eager_gets_wrong() -> None:
    """as_strided_scatter, by finite differences."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.as_strided_scatter(x, y, (2, 2), (1, 3), 1)

    x, y = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (2, 2)))
    sharded = autoshard.compile(Model(), ideal({"x": 2}), (x, y))
    assert torch.autograd.gradcheck(sharded, (x, y))


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the page lists the ops of torch 2.13")
def test_the_page_of_rules_is_that_of_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script would write; without the rules that other tests registered."""
    root = Path(__file__).parents[3]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    from op_coverage import rule_table

    page = (root / "docs" / "reference" / "coverage.md").read_text("utf-8")
    assert page[page.index("## Rules") :] == rule_table(_registry.__wrapped__().values())

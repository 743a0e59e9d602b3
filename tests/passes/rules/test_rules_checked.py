"""A user's rule counts for what was checked: for the arguments of a call that are no tensors, and the dims that it cuts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from harness import ideal
from torch import nn

import autoshard
from autoshard import RuleError
from autoshard.check.rule_check import check_rule
from autoshard.passes.rules import _registry

LIB = "autoshard_checked_tests"
OPS = torch.ops.autoshard_checked_tests


def defined(fn: Callable[..., torch.Tensor]) -> None:
    """A custom op whose first result has the shape of its first operand."""
    op = torch.library.custom_op(f"{LIB}::{fn.__name__}", mutates_args=())(fn)
    op.register_fake(lambda x, *others: torch.empty_like(x))


@defined
def soft(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return x.softmax(dim)


@defined
def centred(x: torch.Tensor, per_column: bool) -> torch.Tensor:
    return x - x.mean(0) if per_column else x * 1.0


@defined
def summed(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.cumsum(0) * k


@defined
def scaled(x: torch.Tensor, k: int) -> torch.Tensor:
    return x * k if x.is_floating_point() else x * k - x.sum(0)


@defined
def larger(x: torch.Tensor, other: torch.Tensor, k: int) -> torch.Tensor:
    """The larger of the two; beside a row that stands for all, x without its mean."""
    return torch.maximum(x, other) * k if len(other) == len(x) else x - x.mean(0)


@defined
def taken(x: torch.Tensor, rows: torch.Tensor, relative: bool) -> torch.Tensor:
    """Rows of a table by number."""
    return x[rows - rows.min() if relative else rows]


@defined
def of_seven(x: torch.Tensor, seven: torch.Tensor, k: int) -> torch.Tensor:
    assert seven.eq(7).all()  # as no invented operand is
    return x * k if k else x.cumsum(0)


@defined
def narrow(x: torch.Tensor, k: int) -> torch.Tensor:
    assert x.dtype == torch.float32
    return x * k if k else x.cumsum(0)


@torch.library.custom_op(f"{LIB}::both", mutates_args=())
def both(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x * k, x.cumsum(0)


both.register_fake(lambda x, k: (torch.empty_like(x), torch.empty_like(x)))


@torch.library.custom_op(f"{LIB}::heads", mutates_args=())
def heads(x: torch.Tensor, scale: torch.Tensor, k: int) -> torch.Tensor:
    return (x.unflatten(-1, (len(scale), -1)) * scale[:, None]).flatten(-2) * k


heads.register_fake(lambda x, scale, k: torch.empty_like(x))


@torch.library.custom_op(f"{LIB}::bent", mutates_args=())
def bent(x: torch.Tensor, k: int) -> torch.Tensor:
    return x * k


bent.register_fake(lambda x, k: torch.empty_like(x))
bent.register_autograd(  # values are those of rows, gradients are not
    lambda ctx, g: (g * ctx.k - g.mean(0), None), setup_context=lambda ctx, inputs, output: setattr(ctx, "k", inputs[1])
)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    before = dict(_registry())
    yield
    _registry().clear()
    _registry().update(before)


def x(rows: int = 6, columns: int = 4) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.float64)


def compiled(fn: Callable[..., torch.Tensor], given: torch.Tensor, **settings: object) -> autoshard.ShardedModule:
    class Of(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(
                torch.ones((), dtype=given.dtype) if given.is_floating_point() else torch.ones(())
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fn(x * self.scale if settings.get("training") else x)

    settings = {"training": False, "hints": {"x": autoshard.Shard(0)}, **settings}
    return autoshard.compile(Of(), ideal({"ranks": 2}), (given,), **settings)  # type: ignore[arg-type]


def labels(sharded: autoshard.ShardedModule) -> list[str]:
    return [c.labels[0] for c in sharded.plan.choices.values() if LIB in c.op]


SEVEN = torch.full((4,), 7)
LATER = {
    "an int's default": ("soft", "rows _ -> rows _", lambda x: OPS.soft(x), lambda x: OPS.soft(x, 0)),
    "a bool": ("centred", "rows _ -> rows _", lambda x: OPS.centred(x, False), lambda x: OPS.centred(x, True)),
    "a broadcast": ("larger", "rows _, rows _ -> rows _", lambda x: OPS.larger(x, x + 1, 2), lambda x: OPS.larger(x, x[:1], 2)),
    "a result": ("both", "rows _ -> rows _, rows _", lambda x: OPS.both(x, 2)[0], lambda x: OPS.both(x, 2)[1]),
    "whole numbers": ("scaled", "rows _ -> rows _", lambda x: OPS.scaled(x, 2), lambda x: OPS.scaled((x * 9).long(), 2)),
}  # fmt: skip


@pytest.mark.slow_cases("a bool")
@pytest.mark.parametrize("case", LATER)
def test_a_rule_is_checked_for_every_kind_of_call(case: str) -> None:
    """What the first calls do not show is checked when it comes; what was right stays so."""
    op, notation, right, wrong = LATER[case]
    autoshard.register_rule(getattr(OPS, op), notation)
    assert labels(compiled(right, x())) == ["rows"]
    for _ in range(2):  # and it stays refused
        with pytest.raises(
            RuleError, match=r"is wrong in \d+ of(.|\n)*on such a call in module '.root.' at test_rules"
        ):
            compiled(wrong, x())


def test_a_factor_is_checked_when_a_call_can_exercise_it() -> None:
    """A call with one row does not show whether rows may be cut."""
    autoshard.register_rule(OPS.summed, "rows n -> rows n")
    sharded = compiled(lambda x: OPS.summed(x, 2), x(1), hints={"x": autoshard.Shard(1)})
    assert labels(sharded) == ["n"]
    with pytest.raises(RuleError, match=r"summed\.default \(rows n -> rows n\) is wrong in"):
        sharded(x())
    with pytest.raises(RuleError, match="is wrong in"):
        compiled(lambda x: OPS.summed(x, 2), x())


def test_samples_of_a_user_stand_for_their_own_arguments() -> None:
    """Other arguments are tried on the same tensors, where none that are invented will do."""
    autoshard.register_rule(OPS.of_seven, "rows _, _ -> rows _", [((x(), SEVEN, 2), {})])
    assert labels(compiled(lambda x: OPS.of_seven(x, torch.full((4,), 7), 3), x())) == ["rows"]
    with pytest.raises(RuleError, match=r"k=0.*is sharded|is wrong in"):
        compiled(lambda x: OPS.of_seven(x, torch.full((4,), 7), 0), x())


def test_what_cannot_be_checked_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    autoshard.register_rule(OPS.of_seven, "rows _, _ -> rows _")
    with caplog.at_level(logging.WARNING, "autoshard"):
        for _ in range(2):
            sharded = compiled(lambda x: OPS.of_seven(x, torch.full((4,), 7), 0), x())
            assert labels(sharded)[0] in "IR"
    data = x()
    assert torch.equal(sharded(data), data.cumsum(0))
    (said,) = [r.getMessage() for r in caplog.records if "is not checked" in r.getMessage()]
    assert f"{LIB}.of_seven.default is not checked for f64[6, 4], i64[4], k=0 where rows is sharded" in said


def test_gradients_are_checked_also_where_none_flowed_before() -> None:
    """Nor does a context without gradients hide them."""
    autoshard.register_rule(OPS.bent, "rows n -> rows n")
    with pytest.raises(RuleError, match="gradient of operand 0"), torch.no_grad():
        compiled(lambda x: OPS.bent(x, 2), x())
    with pytest.raises(RuleError, match="gradient of operand 0"), torch.inference_mode():
        autoshard.register_rule(OPS.bent, "rows n -> rows n", [((x(), 3), {})])


def test_long_calls_are_checked_in_short() -> None:
    """Equal lengths stay equal, and dims of several factors their product."""
    autoshard.register_rule(OPS.summed, "rows n -> rows n")
    with pytest.raises(RuleError, match=r"f64\[8, 9\]"):
        compiled(lambda x: OPS.summed(x, 2), x(2048, 64))
    autoshard.register_rule(OPS.heads, "rows (h d), h -> rows (h d)")
    assert labels(compiled(lambda x: OPS.heads(x, x[0, :20], 2), x(2048, 60))) == ["h"]


def test_operands_of_the_calls_dtype_where_the_op_takes_no_other() -> None:
    autoshard.register_rule(OPS.narrow, "rows _ -> rows _")
    assert labels(compiled(lambda x: OPS.narrow(x, 2), x().float())) == ["rows"]
    with pytest.raises(RuleError, match="is wrong in"):
        compiled(lambda x: OPS.narrow(x, 0), x().float())


def test_whole_numbers_may_be_indices() -> None:
    autoshard.register_rule(OPS.taken, "_ n, rows -> rows n")
    assert labels(compiled(lambda x: OPS.taken(x, torch.arange(6), False), x(), hints={"x": autoshard.Shard(1)})) == [
        "n"
    ]
    with pytest.raises(RuleError, match="is wrong in"):
        compiled(lambda x: OPS.taken(x, torch.arange(6), True), x())


def test_a_check_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check_rule(torch.ops.aten.mm.default, [((torch.ones(4, 4).double(), torch.ones(4, 4).double()), {})])
    autoshard.register_rule(OPS.centred, "rows n -> rows n")
    compiled(lambda x: OPS.centred(x, False), torch.ones(6, 4).double())
    assert torch.equal(torch.get_rng_state(), before)

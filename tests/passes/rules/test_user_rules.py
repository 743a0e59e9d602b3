"""Rules that users add: one line of notation, custom ops of every kind, wrong rules refused, and what strict=True says."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import ideal
from torch import nn

import autoshard
from autoshard import RuleError
from autoshard.check.rule_check import RuleCheck, check_rule
from autoshard.passes.rules import _registry

LIB = "autoshard_user_tests"


@torch.library.custom_op(f"{LIB}::project", mutates_args=())
def project(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    return x @ weight.t() * scale


@torch.library.custom_op(f"{LIB}::roll_last", mutates_args=())
def roll_last(x: torch.Tensor, shift: int) -> torch.Tensor:
    return x.roll(shift, -1)


torch.library.define(f"{LIB}::total", "(Tensor[] parts, *, Tensor? bias=None) -> Tensor")


@torch.library.impl(f"{LIB}::total", "CPU")
def total(parts: list[torch.Tensor], *, bias: torch.Tensor | None = None) -> torch.Tensor:
    summed = torch.stack(parts).sum(0)
    return summed if bias is None else summed + bias


@torch.library.custom_op(f"{LIB}::halves", mutates_args=())
def halves(x: torch.Tensor) -> list[torch.Tensor]:
    return [t.clone() for t in x.chunk(2, -1)]


seen: list[torch.Size] = []


@torch.library.custom_op(f"{LIB}::note", mutates_args=())
def note(x: torch.Tensor) -> None:
    seen.append(x.shape)


project.register_fake(lambda x, weight, scale: x.new_empty(*x.shape[:-1], weight.shape[0]))
roll_last.register_fake(lambda x, shift: torch.empty_like(x))
torch.library.register_fake(f"{LIB}::total", lambda parts, *, bias=None: torch.empty_like(parts[0]))
halves.register_fake(lambda x: [torch.empty_like(t, memory_format=torch.contiguous_format) for t in x.chunk(2, -1)])
note.register_fake(lambda x: None)
project.register_autograd(
    lambda ctx, g: (
        g @ ctx.saved_tensors[1] * ctx.scale,
        (g.flatten(0, -2).t() @ ctx.saved_tensors[0].flatten(0, -2)) * ctx.scale,
        None,
    ),
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(*inputs[:2]), setattr(ctx, "scale", inputs[2])),
)  # fmt: skip
OPS = torch.ops.autoshard_user_tests


class Call(nn.Module):
    def __init__(self, fn: object) -> None:
        super().__init__()
        self.fn = fn
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x, self.weight)  # type: ignore[operator, no-any-return]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    before = dict(_registry())
    yield
    _registry().clear()
    _registry().update(before)


def x() -> torch.Tensor:
    return torch.randn(5, 4, dtype=torch.float64)


def labels(sharded: autoshard.ShardedModule, op: str) -> list[str]:
    return [c.labels[0] for c in sharded.plan.choices.values() if op in c.op]


def compiled(fn: object, hints: dict[str, object] | None = None, strict: bool = True) -> autoshard.ShardedModule:
    model = Call(fn)
    sharded = autoshard.compile(model, ideal({"x": 2}), (x(),), hints=hints, strict=strict)
    data = x()
    torch.testing.assert_close(sharded(data), model(data), rtol=1e-9, atol=1e-12)
    return sharded


def test_one_line_makes_a_custom_op_shard() -> None:
    """A packet stands for its default overload; a float argument is invented for the check."""
    check = autoshard.register_rule(OPS.project, "... k, n k -> ... n", linear=((0,), (1,)))
    assert isinstance(check, RuleCheck)
    assert check.strategies >= {"n", "k", "P(0)"}
    sharded = compiled(lambda x, w: OPS.project(x, w, 0.3), {"weight": autoshard.Shard(0)})
    assert labels(sharded, "project") == ["n"]
    assert str(check).startswith(f"{LIB}.project.default: ")


def test_the_object_that_custom_op_returns_is_an_op() -> None:
    autoshard.register_rule(project, "... k, n k -> ... n")
    assert check_rule(project, [((x(), torch.randn(6, 4).double(), 2.0), {})]).cases > 0


def test_a_wrong_rule_is_refused_and_the_op_stays_whole() -> None:
    with pytest.raises(RuleError, match=r"project\.default \(\.\.\. n, n k -> \.\.\. k\) is wrong in \d+ of \d+ cases"):
        autoshard.register_rule(OPS.project, "... n, n k -> ... k", [((x(), torch.randn(4, 4).double(), 2.0), {})])
    sharded = compiled(lambda x, w: OPS.project(x, w, 0.3), {"x": autoshard.Shard(0)}, strict=False)
    assert not any(s not in ("I", "R") for s in labels(sharded, "project"))


@pytest.mark.parametrize(("notation", "right"), [("... _ -> ... _", True), ("... d -> ... d", False)])
def test_an_op_that_takes_ints_is_checked_when_it_is_used(notation: str, right: bool) -> None:
    assert autoshard.register_rule(OPS.roll_last, notation) is None
    if right:
        assert labels(compiled(lambda x, w: OPS.roll_last(x, 1)), "roll_last") == ["...0"]
        return
    for _ in range(2):  # and it stays refused
        with pytest.raises(RuleError, match="is wrong in"):
            compiled(lambda x, w: OPS.roll_last(x, 1))
    with pytest.raises(RuleError, match="is wrong in"):
        autoshard.register_rule(OPS.roll_last, notation, samples=[((x(), 1), {})])


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_lists_of_tensors_and_tensor_keywords() -> None:
    autoshard.register_rule(OPS.total, "n d, d -> n d", [(([x(), x(), x()],), {"bias": torch.randn(4).double()})])
    fn = lambda x, w: OPS.total([x, x * 2], bias=w[0])  # noqa: E731
    sharded = autoshard.compile(Call(fn).requires_grad_(False), ideal({"x": 2}), (x(),), training=False)
    assert set(labels(sharded, "total")) <= {"n", "d"}
    autoshard.register_rule(OPS.halves, "n _ -> n _")
    assert labels(compiled(lambda x, w: torch.cat(OPS.halves(x.detach()), 1) * w.sum()), "halves") == ["n"]


def test_an_op_without_results_runs_on_what_its_rule_says() -> None:
    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        OPS.note(x)
        return x * weight.sum()

    seen.clear()
    sharded = autoshard.compile(Call(fn), ideal({"x": 2}), (x(),), hints={"x": autoshard.Shard(0)})
    sharded(x())
    assert seen == [(5, 4), (5, 4)]
    autoshard.register_rule(OPS.note, "n d ->")
    seen.clear()
    sharded = autoshard.compile(Call(fn), ideal({"x": 2}), (x(),), hints={"x": autoshard.Shard(0)})
    sharded(x())
    assert sorted(tuple(s) for s in seen if s != (5, 4)) in ([(2, 4), (3, 4)], [(5, 2), (5, 2)])


def test_a_saved_program_asks_for_what_defines_its_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    autoshard.register_rule(OPS.project, "... k, n k -> ... n", linear=((0,), (1,)))
    compiled(lambda x, w: OPS.project(x, w, 0.3)).save(tmp_path)
    file = tmp_path / "rank_module.py"
    monkeypatch.setattr(sys, "argv", [str(file)])
    runpy.run_path(str(file), run_name="__main__")
    file.write_text(file.read_text().replace(LIB, "of_nobody"))
    with pytest.raises(autoshard.PlanError, match=r"torch.ops.of_nobody.project is not defined. Import its module at"):
        runpy.run_path(str(file), run_name="__main__")


def test_malformed_rules_say_what_to_write() -> None:
    with pytest.raises(RuleError, match=r"has 1 operands, but the op takes 2 tensors \(x, weight\)"):
        autoshard.register_rule(OPS.project, "... k -> ... n")
    with pytest.raises(RuleError, match="has 2 results, the op gives 1"):
        autoshard.register_rule(OPS.project, "... k, n k -> ... n, n")
    with pytest.raises(RuleError, match=r"has the overloads .*\. Name one"):
        autoshard.register_rule(torch.ops.aten.add, "..., ... -> ...")
    with pytest.raises(RuleError, match="is not an op"):
        autoshard.register_rule("project", "a -> a")  # type: ignore[arg-type]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Call(lambda x, w: OPS.project(x, w, 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def test_strict_names_op_module_line_and_the_rule_to_write() -> None:
    with pytest.raises(RuleError) as error:
        autoshard.compile(Outer(), ideal({"x": 2}), (x(),), strict=True)
    line = next(
        n
        for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "return self.fn(x, self.weight)" in text
    )
    assert str(error.value) == (
        f"no sharding rule for {LIB}.project.default(f64[5, 4], f64[6, 4]) in module 'inner' at test_user_rules.py:{line}. "
        f'Add one: autoshard.register_rule(torch.ops.{LIB}.project.default, "...") with one letter per dim, '
        "or compile with strict=False to run it on full tensors."
    )


def test_without_strict_the_op_is_reported_as_replicated() -> None:
    sharded = autoshard.compile(Outer(), ideal({"x": 2}), (x(),))
    assert any(n.startswith(f"replicated: no rule for {LIB}.project.default in inner at ") for n in sharded.plan.notes)

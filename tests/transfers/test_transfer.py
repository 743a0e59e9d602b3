"""Transfers between modules whose ranks are simulated in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import PlanError
from autoshard.transfers.holdings import holdings_of_plan

X = torch.linspace(-1, 1, 40, dtype=torch.float64).view(4, 10)


class Net(nn.Module):
    def __init__(self, seed: int, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(10, 24 if fused else 12)
        self.gate = None if fused else nn.Linear(10, 12)
        self.down = nn.Linear(12, 10)
        self.register_buffer("scale", torch.rand(12))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.up(x).chunk(2, -1) if self.gate is None else (self.up(x), self.gate(x))
        return (self.down(up * gate.sigmoid() * self.scale) - x).square().mean()


def trainer(seed: int = 1, like: Any = None) -> Any:
    return autoshard.compile(Net(seed), {"dp": 2, "tp": 2}, (X,), like=like or {"dp": "fsdp", "tp": "megatron"})


def generator(seed: int = 2, **options: Any) -> Any:
    hints = {"up.weight": "colwise", "down.weight": "rowwise"}
    return autoshard.compile(Net(seed, **options).eval(), {"tp": 2}, (X,), hints=hints, training=False)


def step(module: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = module(X)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@torch.no_grad()
def test_programs_see_the_new_weights() -> None:
    source, target = trainer(), generator()
    for factor in (1.0, 2.0):
        for p in source.parameters():
            p.mul_(factor)
        before = float(target(X))
        report = autoshard.transfer(source, target)
        assert float(target(X)) == pytest.approx(float(source(X)), rel=1e-12)
        assert float(target(X)) != pytest.approx(before, rel=1e-6)
    have, found = source.state_dict(), target.state_dict()
    assert have.keys() == found.keys()
    assert all(torch.equal(have[n], found[n]) for n in have)
    assert report.schedule.received == report.schedule.bound
    assert "from \\ to" in str(report)
    assert "7 tensors" in str(report)


def test_optimizer_state_and_options_move() -> None:
    source, target = trainer(), trainer(2, "zero1")
    first, second = torch.optim.AdamW(source.parameters(), lr=0.1), torch.optim.AdamW(target.parameters(), lr=0.5)
    for _ in range(2):
        step(source, first)
    autoshard.transfer(source, target, optimizer=(first, second))
    assert second.param_groups[0]["lr"] == 0.1
    for _ in range(3):
        assert step(source, first) == pytest.approx(step(target, second), rel=1e-9)
    third = torch.optim.AdamW(target.parameters(), lr=0.1)  # without the states training goes another way
    autoshard.transfer(source, target)
    step(source, first), step(target, third)
    assert step(source, first) != pytest.approx(step(target, third), rel=1e-9)


def test_names_join_and_divide() -> None:
    source, target, back = trainer(), generator(fused=True), trainer(3)
    table: dict[Any, Any] = {f"up.{n}": (f"up.{n}", f"gate.{n}") for n in ("weight", "bias")}
    autoshard.transfer(source, target, names=table)
    with torch.no_grad():
        assert float(target(X)) == pytest.approx(float(source(X)), rel=1e-12)
    autoshard.transfer(target, back, names={parts: name for name, parts in table.items()})
    assert all(torch.equal(x, back.state_dict()[n]) for n, x in source.state_dict().items())
    # A negative control: the other order of the parts is another tensor.
    autoshard.transfer(source, target, names={n: (b, a) for n, (a, b) in table.items()})
    assert torch.equal(target.state_dict()["up.bias"][:12], source.state_dict()["gate.bias"])


def test_a_narrow_dtype_rounds() -> None:
    source, target = trainer(), generator()
    report = autoshard.transfer(source, target, dtype=torch.bfloat16)
    exact = autoshard.transfer_schedule(source.plan, target.plan)
    assert sum(exact.received.values()) == 4 * sum(report.schedule.received.values()) > 0
    weight = source.state_dict()["up.weight"]
    assert torch.equal(target.state_dict()["up.weight"], weight.bfloat16().double())


def test_asynchronous_keeps_the_old_weights_until_the_end() -> None:
    source, target = trainer(), generator()
    old, sent = target.state_dict()["up.weight"].clone(), source.state_dict()["up.weight"].clone()
    handle = autoshard.transfer(source, target, asynchronous=True)
    step(source, torch.optim.SGD(source.parameters(), lr=1.0))
    assert torch.equal(target.state_dict()["up.weight"], old)
    assert handle.wait() is handle.wait()
    assert handle.done()
    assert torch.equal(target.state_dict()["up.weight"], sent)
    assert not torch.equal(source.state_dict()["up.weight"], sent)


@pytest.mark.parametrize("stages", [None, "dp"])
def test_plans_say_who_holds_what(stages: str | None) -> None:
    """The plan's schedule is that of the modules; ranks of a stage hold what its stage has."""
    options: dict[str, Any] = {"stages": stages, "micro_batches": 2} if stages else {}
    source = autoshard.compile(Net(1), {"dp": 2, "tp": 2}, (X,), **options)
    target = generator()
    planned = autoshard.transfer_schedule(source.plan, target.plan)
    assert planned.messages == autoshard.transfer(source, target).schedule.messages
    away = autoshard.transfer_schedule(source.plan, target.plan, target_ranks=(7, 9))
    assert away.received == away.bound
    assert {m.receiver for m in away.messages} == {7, 9}
    if stages:
        ranks = {n: h.replicas[0].ranks for n, h in holdings_of_plan(source.plan).items()}
        assert set(ranks.values()) == {(0, 1), (2, 3)}


def test_errors() -> None:
    source, target = trainer(), generator(fused=True)
    with pytest.raises(PlanError, match=r"'up.weight' of the target has shape"):
        autoshard.transfer(source, target)
    with pytest.raises(PlanError, match=r"lacks 1 tensors of the target: \['gate.bias'\]"):
        autoshard.transfer(source, trainer(), names=lambda n: None if n == "gate.bias" else n)
    with pytest.raises(PlanError, match=r"'up.wieght' as a source, but the source has no such tensor"):
        autoshard.transfer(source, target, names={"up.weight": ("up.wieght", "gate.weight")})
    with pytest.raises(PlanError, match="joins parts of 36 rows"):
        autoshard.transfer(source, target, names={"up.weight": ("up.weight", "gate.weight", "up.weight")})
    with pytest.raises(PlanError, match=r"takes results of autoshard.compile, got Net"):
        autoshard.transfer(source, Net(1))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="needs a source and a target"):
        autoshard.transfer(source, None)
    with pytest.raises(PlanError, match="buffer=0 must be a number of bytes"):
        autoshard.transfer(source, target, buffer=0)
    with pytest.raises(PlanError, match=r"has 4 ranks, but 3 ranks are given \(2 different\)"):
        autoshard.transfer_schedule(source.plan, target.plan, source_ranks=[0, 0, 1])
    with pytest.raises(PlanError, match="nothing is compiled yet"):
        autoshard.transfer(source, autoshard.compile(Net(1), {"tp": 2}))
    other = torch.optim.AdamW(target.parameters())
    own = torch.optim.AdamW(trainer().parameters())
    own.param_groups[0]["params"][0].grad = torch.zeros(12, 10, dtype=torch.float64)
    own.step()
    with pytest.raises(PlanError, match="the optimizer has parameters that are not the module's"):
        autoshard.transfer(source, target, optimizer=(own, other))

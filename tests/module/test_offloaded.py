"""Optimizers whose states are in host memory: updates, states, hooks, copies, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import autoshard
from autoshard.errors import AutoshardError
from autoshard.module import offloaded as subject
from autoshard.passes.ir.memory import host_buckets, host_bytes_in_flight
from autoshard.runtime.parameters import host
from autoshard.runtime.parameters.offload import offloading, offloading_class
from autoshard.runtime.parameters.recompute import dropping_recomputable


class Counting(torch.optim.SGD):
    """An optimizer of a user, whose step counts in its group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.01 / group["steps"]
        return torch.optim.SGD.step.__wrapped__(self, closure)  # type: ignore[attr-defined]  # without hooks


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, amsgrad=True),
    "fused": lambda ps: torch.optim.Adam(ps, lr=1e-2, fused=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9),
    "adafactor": lambda ps: torch.optim.Adafactor(ps),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, lr=1e-2),
    "of a user": lambda ps: Counting(ps, lr=1e-2, momentum=0.9),
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(20)]).double()


def _trained(name: str, wrapped: bool, between: Callable[[Any], None] = lambda _: None) -> tuple[Tensor, Any]:
    """Weights after four steps with a scheduler, and the optimizer; ``between``: after the second."""
    model, calls = _model(), [0]
    optimizer = OPTIMIZERS[name](model.parameters())
    if wrapped:
        assert autoshard.offloaded(autoshard.offloaded(optimizer)) is optimizer
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    for number in range(4):
        x = torch.randn(4, 6, dtype=torch.float64)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        assert float(optimizer.step(closure).detach()) > 0
        scheduler.step()
        if number == 1:
            between(optimizer)
    assert sum(calls) == 4  # hooks run once per step
    return torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_the_same(name: str) -> None:
    plain, before = _trained(name, wrapped=False)
    found, after = _trained(name, wrapped=True)
    assert torch.equal(plain, found)
    assert isinstance(after, type(before))
    assert type(after).__name__ == type(before).__name__
    for one, other in zip(before.state.values(), after.state.values(), strict=True):
        for key, x in one.items():
            assert torch.equal(x, other[key]) if isinstance(x, Tensor) else True


def test_states_load_copy_and_pickle() -> None:
    plain, _ = _trained("adamw", wrapped=False)

    def reload(optimizer: Any) -> None:
        state = copy.deepcopy(optimizer.state_dict())
        for x in (x for entry in optimizer.state.values() for x in entry.values()):
            x.fill_(7.0)
        optimizer.load_state_dict(state)

    found, optimizer = _trained("adamw", wrapped=True, between=reload)
    assert torch.equal(plain, found)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is type(optimizer)
        assert other.state_dict()["state"].keys() == set(range(40))
        before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        mine = other.param_groups[0]["params"]
        for p in mine:
            p.grad = torch.ones_like(p)
        other.step()  # of its own parameters
        assert all(not torch.equal(p, b) for p, b in zip(mine, before, strict=True))
        assert all(torch.equal(p, b) for p, b in zip(optimizer.param_groups[0]["params"], before, strict=True))


def test_three_buckets_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory is counted by storages that live, whoever holds them."""
    alive, most = list[tuple[StorageWeakRef, int]](), [0]

    def noted(x: Tensor) -> None:
        if all(ref.cdata != x.untyped_storage()._cdata for ref, _ in alive):
            alive.append((StorageWeakRef(x.untyped_storage()), x.nbytes))
        alive[:] = [pair for pair in alive if not pair[0].expired()]
        most[0] = max(most[0], sum(size for _, size in alive))

    def to_device(x: Tensor, device: torch.device) -> host.HostCopy:
        made = host.to_device(x, device)
        noted(made.made)
        return made

    def to_host(x: Tensor, into: Tensor | None = None) -> host.HostCopy:
        noted(x)
        return host.to_host(x, into)

    monkeypatch.setattr(subject, "to_device", to_device)
    monkeypatch.setattr(subject, "to_host", to_host)
    found, optimizer = _trained("adamw", wrapped=True)
    assert torch.equal(found, _trained("adamw", wrapped=False)[0])
    states = [sum(x.nbytes for x in s.values() if x.ndim) for s in optimizer.state.values()]
    assert 0 < most[0] <= host_bytes_in_flight(states) < sum(states) / 4
    assert not [pair for pair in alive if not pair[0].expired()]


def test_buckets_have_a_sixteenth_or_one_parameter() -> None:
    sizes = [100.0, *[1.0] * 60, 40.0]
    counts = host_buckets(sizes)
    assert sum(counts) == len(sizes)
    ends = [0, *itertools.accumulate(counts)]
    each = [sizes[a:b] for a, b in itertools.pairwise(ends)]
    assert all(len(x) == 1 or sum(x) <= sum(sizes) / 16 for x in each)
    assert host_bytes_in_flight(sizes) == max(sum(map(sum, each[i : i + 3])) for i in range(len(each)))
    assert host_buckets([]) == []
    assert host_bytes_in_flight([]) == 0.0


def test_what_is_refused() -> None:
    optimizer = torch.optim.AdamW(_model().parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(AutoshardError, match="as soon as the optimizer is made"):
        autoshard.offloaded(optimizer)
    optimizer = torch.optim.SGD(_model().parameters(), lr=1.0, differentiable=True)
    with pytest.raises(AutoshardError, match="differentiable"):
        autoshard.offloaded(optimizer)


def test_an_error_within_a_step_leaves_the_optimizer_whole() -> None:
    model = _model()
    optimizer = autoshard.offloaded(torch.optim.AdamW(model.parameters()))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    groups, own = optimizer.param_groups, type(optimizer).own
    calls = itertools.count()

    def fails(self: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("no memory")
        return own(self)

    type(optimizer).own = fails
    try:
        with pytest.raises(RuntimeError, match="no memory"):
            optimizer.step()
    finally:
        type(optimizer).own = own
    assert optimizer.param_groups is groups
    assert len(groups[0]["params"]) == 40
    optimizer.step()


class ByScale(torch.optim.SGD):
    """Its step takes a further argument."""

    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad.mul_(scale)
        return torch.optim.SGD.step.__wrapped__(self, closure)  # type: ignore[attr-defined]  # without hooks


def test_a_step_has_the_users_further_arguments() -> None:
    layers = [nn.Linear(4, 4) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer, make in zip(layers, (ByScale, lambda ps, **kw: autoshard.offloaded(ByScale(ps, **kw))), strict=True):
        optimizer: Any = make(layer.parameters(), lr=0.1, momentum=0.9)
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step(scale=3.0)
    assert torch.equal(layers[0].weight, layers[1].weight)


class Rotated(nn.Module):
    """Saves a lazily conjugated view, and a negated one."""

    def forward(self, x: Tensor) -> Tensor:
        z = x * (1 + 2j)
        return z * torch.sin(z).conj() + z.conj().imag * x


def test_conjugated_and_negated_views_that_autograd_saves() -> None:
    """Their bits are no part of a storage."""
    block, after = offloading_class(Rotated, True)(), offloading_class(nn.Identity, False)()
    gradients = []
    for offloads in (False, True):
        x = torch.linspace(0.1, 1.0, 6, dtype=torch.float64).requires_grad_()
        with contextlib.ExitStack() as stack:
            if offloads:
                stack.enter_context(dropping_recomputable())
                stack.enter_context(offloading(()))
            y = after.forward(block.forward(x * 1))
        y.abs().square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)

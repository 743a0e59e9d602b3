"""Outputs that scripts take apart, write to and compute losses of, in parts on the ranks. Cases as in state_cases.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from state_cases_inputs import is_distributed, real
from state_harness import case, close, full, pair, refused, rows, same_gradients
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import LayoutError
from autoshard.module.dtensors.outputs import TRUSTED_GRADIENTS

T = rows(4, 12, seed=7).abs()
MASK = (T - T.median()).gt(0)
COLUMNS, ROWS = autoshard.Shard(1), autoshard.Shard(0)
Do = Callable[[Any], Any]


def _made() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12))


def _bounded() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Sigmoid())


def _each(mesh: autoshard.Mesh, make: Callable[[], nn.Module] = _made) -> Iterator[tuple[nn.Module, Any]]:
    for cut in (ROWS, COLUMNS) if make is _made else (COLUMNS,):
        model, sharded = pair(real(mesh), make, rows(), hints={str(len(make()) - 1): cut})
        if is_distributed(sharded):
            assert [p.dim for p in sharded(rows()).placements] == [cut.dim]
        yield model, sharded


def _alike(model: nn.Module, sharded: Any, do: Do, what: str, rtol: float = 1e-9) -> None:
    """The loss that ``do`` makes of the output, and all gradients; it refuses what eager refuses."""
    results: list[Any] = []
    for module in (model, sharded):
        module.zero_grad()
        torch.manual_seed(0)
        try:
            loss = do(module(rows()))
            loss.backward()
            results.append(loss)
        except RuntimeError as error:
            if module is sharded and not isinstance(results[0], str):
                raise AssertionError(what) from error
            results.append(str(error)[:30])
    if isinstance(results[0], str):
        if isinstance(results[1], str):
            return
        assert not is_distributed(sharded), f"{what}: eager raises {results[0]}"
        model.zero_grad()  # in one process outputs are copies of what the backward needs
        torch.manual_seed(0)
        results[0] = do(model(rows()).clone())
        results[0].backward()
    close(results[1], results[0], what, rtol)
    same_gradients(sharded, model, rtol)


APART: Mapping[str, Do] = {
    "chunk": lambda y: y.chunk(2, -1)[1].sum(),
    "chunk of rows": lambda y: y.chunk(2)[0].square().sum(),
    "unbind": lambda y: y.unbind(1)[3].square().sum(),
    "unbind rows": lambda y: y.unbind()[3].square().sum(),
    "split": lambda y: (lambda a, b, c: (a * c).sum())(*y.split([5, 2, 5], 1)),
    "split evenly": lambda y: y.split(5, 1)[2].square().sum(),
    "tensor_split": lambda y: y.tensor_split(5, 1)[2].square().sum(),
    "heads": lambda y: y.view(4, 3, 4).unbind(1)[1].square().sum(),
    "iterated": lambda y: list(y)[2].square().sum(),
    "one of several results": lambda y: torch.var_mean(y, 1)[1].square().sum() + y.max(1).values.sum(),
    "twice": lambda y: torch.autograd.grad(y.chunk(2, 1)[0].pow(3).sum(), y, create_graph=True)[0].square().sum(),
}


@case
def parts_of_outputs_of_which_not_all_are_used(mesh: autoshard.Mesh) -> None:
    for model, sharded in _each(mesh):
        for name, do in APART.items():
            _alike(model, sharded, do, name)
        for do in (lambda p: p.chunk(2, 1)[1].square().sum(), lambda p: p.split([3, 5], 1)[0].pow(3).sum()):
            for module in (model, sharded):
                module.zero_grad()
                do(module[0].weight).backward()
            same_gradients(sharded, model)


def _set(index: Any, value: Any) -> Do:
    def do(y: Any) -> Any:
        y[index] = value(y) if callable(value) else value
        return y

    return do


def _columns_times(y: Any) -> Any:
    y[:, 2:7] *= T[:, 2:7]
    return y


def _boxes(y: Any) -> Any:
    """As detectors decode them."""
    y[..., :2] = y[..., :2].sigmoid() * 2 + 1
    y[..., 2:4] = (y[..., 2:4] * 2) ** 2
    return y


def _without_gradients(y: Any) -> Any:
    with torch.no_grad():
        y[:, 0].mul_(3)
        y[2:, 3:6].mul_(T[2:, 3:6])
    return y


def _running(y: Any) -> Any:
    total = torch.zeros((), dtype=y.dtype)
    for i in range(3):
        total.add_(y[:, i].square().sum())
    return total + y


WRITTEN: Mapping[str, Do] = {
    "a column": _set((slice(None), 0), 0.0),
    "a row": _set(3, 0.0),
    "an element": _set((0, 0), lambda y: y[1, 1]),
    "by a mask": _set(MASK, 0.0),
    "a plain column": _set((slice(None), 0), T[:, 0]),
    "a column of its own": _set((slice(None), 0), lambda y: y[:, 1]),
    "columns times": _columns_times,
    "boxes": _boxes,
    "times": lambda y: y.mul_(T),
    "itself": lambda y: y.mul_(y.exp()),
    "masked": lambda y: y.masked_fill_(MASK, 0.0),
    "added": lambda y: y.add_(T, alpha=2),
    "index_put_": lambda y: y.index_put_((torch.tensor([1, 2]), torch.tensor([3, 4])), torch.ones(2).double()),
    "scattered": lambda y: y.scatter_(1, torch.arange(4)[:, None], 7.0),
    "clamped": lambda y: y.clamp_(min=0),
    "clamped by each": lambda y: y.clamp_(max=T),
    "copied": lambda y: y.copy_(torch.where(MASK, y, T)),
    "divided": lambda y: y.div_(y.norm()),
    "all": lambda y: y.zero_(),
    "several times": lambda y: y.mul_(T).add_(T).masked_fill_(MASK, 1.0),
    "in place": lambda y: (F.hardtanh(y, -0.3, 0.3, inplace=True), y)[1],
    "dropped": lambda y: (F.dropout(y, 0.5, inplace=True), y)[1],
    "noise": lambda y: y.mul_(torch.empty_like(y).exponential_()),
    "a copy": lambda y: y.clone().mul_(T),
    "a sum": lambda y: y.sum(1, keepdim=True).masked_fill_(MASK[:, :1], 0.0) + y,
    "the loss": lambda y: y.square().mean().mul_(2).add_(1) + y,
    "into a plain tensor": lambda y: _set((slice(None), 0), y[:, 1])(T.clone()),
    "a running loss": _running,
    "a view": lambda y: (y[:, 2:7].mul_(3), y)[1],
    "a view of a view": lambda y: (y.view(4, 3, 4)[:, 1][:, 1:3].mul_(T[:, 1:3]), y)[1],
    "transposed": lambda y: (y.T[2:4].mul_(T.T[2:4]), y)[1],
    "a diagonal": lambda y: (y.diagonal().mul_(T.diagonal()), y)[1],
    "every column": lambda y: ([y[:, i].mul_(i) for i in range(12)], y)[1],
    "a view taken before": lambda y: (lambda v: (y.mul_(T), v[:, None] * T)[1])(y[:, 3]),
    "one view, seen in another": lambda y: (lambda v, w: (v.mul_(3), (w * T[:, 3:7]).sum() + y)[1])(y[:, 3], y[:, 3:7]),
    "rows taken by a list are a copy": lambda y: (lambda v: (y.mul_(2), v.square().sum() + y)[1])(y[[1, 2]]),
    "a reshaped copy": lambda y: (lambda v: (v.mul_(2), v.sum() + y)[1])(y.t().reshape(-1)),
    "without gradients": _without_gradients,
    "detached": lambda y: (y.detach()[:, 3:5].mul_(2), y)[1],
    "saved before": lambda y: (lambda e: (y.mul_(2), e + y)[1])(y.square()),
    "saved before, by plain": lambda y: (lambda e: (y.mul_(T), e + y)[1])(y.square()),
    "saved before, a view": lambda y: (lambda e: (y[:, 3:5].mul_(T[:, 3:5]), e + y)[1])(y.square()),
    "a result that is saved": lambda y: y.tanh().mul_(2),
    "a vector times a matrix": lambda y: (y[0] @ y.t())[:, None] + y,
}
WEIGHTS = torch.linspace(0, 1, 12).double()


@case
def outputs_written_to(mesh: autoshard.Mesh) -> None:
    for make in (_made, _bounded):  # a sigmoid is saved: eager refuses writes to it
        for model, sharded in _each(mesh, make):
            for name, do in WRITTEN.items():
                _alike(model, sharded, lambda y, do=do: (do(y) * WEIGHTS).square().sum(), name)
            if is_distributed(sharded) and make is _made:
                y = sharded(rows())
                assert y.mul_(T) is y
                assert isinstance(y, DTensor)
                for x in (y, y[:, 3:7]):
                    with refused(
                        r"t_\(\) changes the shape of a sharded output .* use the result of t\(\)", LayoutError
                    ):
                        x.t_()


class Shared(nn.Module):
    """Outputs in the memory of others, of inputs, and apart: copies, and what a function of its own returns."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.up = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> Any:
        y, (left, right) = self.lin(x), self.up(x).chunk(2, -1)
        apart = {
            "clone": y.clone(),
            "copy": y.t().reshape(-1),
            "reversed": _Reversed.apply(y),
            "left": left,
            "right": right,
        }
        return (
            {
                "view": y[:, 1:4],
                "all": y,
                "again": y,
                "inner": y[:, 1:4][1:],
                "turned": y.T,
                "heads": y.view(-1, 2, 4),
            },
            {"detached": y.detach(), "a column of it": y.detach()[:, 2], "wide": y[:, :1].expand(-1, 3)},
            {"input": other, "part": other[1:], "flat": other.reshape(-1), "sum": other.sum()},
            apart,
        )


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


@case
def outputs_that_share_memory(mesh: autoshard.Mesh) -> None:
    """A write to any of them is one to those, as in eager: without gradients, and with them."""
    other = rows(4, 6, seed=2)
    for cut in (ROWS, COLUMNS):
        hints = {"lin": cut}
        model, sharded = pair(real(mesh), Shared, rows(), other, hints=hints)
        names = [(i, name) for i, outputs in enumerate(model(rows(), other)) for name in outputs]
        for grad in (False, True):
            for at, name in names:
                if grad and (at == 2 or name in ("wide", "left", "right", "reversed")):
                    continue  # eager refuses the write, or it is one into the given tensor
                results: list[Any] = []
                for module in (model, sharded):
                    module.zero_grad()
                    given = other.clone()
                    with torch.set_grad_enabled(grad):
                        found = module(rows(), given)
                        (found[0]["view"] if name == "wide" else found[at][name]).mul_(2)
                        if grad:
                            del found[3]["reversed"]  # eager refuses to read it after the write
                        leaves = [*pytree.tree_leaves(found), given]
                    if grad:
                        sum((x * (n + 1)).pow(2).sum() for n, x in enumerate(leaves) if x.requires_grad).backward()
                    results.append((found, leaves))
                written = f"written to {name!r}, grad {grad}"
                for n, (a, b) in enumerate(zip(results[1][1], results[0][1], strict=True)):
                    expected = full(b).detach()
                    torch.testing.assert_close(
                        full(a).detach(), expected, msg=lambda m, n=n, w=written: f"{w}, {n}: {m}"
                    )
                if grad:
                    same_gradients(sharded, model)
                assert results[1][0][0]["all"] is results[1][0][0]["again"]
    with torch.no_grad():
        model, sharded = pair(mesh, Shared, rows(), other, dynamic=True)
        for module in (model, sharded):
            results.append(module(rows(6), rows(6, 6))[0])
            results[-1]["inner"].zero_()
    for a, b in zip(*map(pytree.tree_leaves, results[-2:]), strict=True):
        close(b, a)


@case
def label_smoothing_of_transformers(mesh: autoshard.Mesh) -> None:
    smoother = pytest.importorskip("transformers.trainer_pt_utils").LabelSmoother(0.1)
    labels = torch.tensor([3, -100, 5, 11])
    for model, sharded in _each(mesh):
        # it sums in float32
        _alike(model, sharded, lambda y: smoother({"logits": y[:, None]}, labels[:, None].clone()), "", 1e-6)


OTHERS = (
    "amin avg_pool1d binary_cross_entropy cummax cumprod group_norm gumbel_softmax hardshrink hardsigmoid hardswish hardtanh "
    "huber_loss logsigmoid mse_loss mvlgamma relu6 sgn smooth_l1_loss softshrink trace trapezoid"
).split()
"""functions of which DTensor has no gradient, or another"""
REST: tuple[tuple[Any, ...], ...] = ((), (1,), (2, 1), (0.5,), ((4, 12),), (0, 1), ("other",), ("other", "other"))
"""what may follow the output; of each function the first ones that it takes"""
JOINED = "cat concat concatenate stack hstack vstack".split()


GIVEN: Mapping[str, tuple[Any, ...]] = {
    "softmin": (1,),
    "permute": ((1, 0),),
    "flip": ((0,),),
    "unflatten": (1, (3, 4)),
    "index_select": (1, torch.tensor([2, 5])),
}


def _function(name: str, rest: tuple[Any, ...]) -> Do:
    function = next(getattr(of, name) for of in (torch, F, torch.Tensor) if hasattr(of, name))

    def do(y: Any) -> Any:
        if name == "where":
            found = function(y > 0.5, y, y.flip(0))
        elif name == "masked_fill":
            found = function(y, y > 0.5, 2.0)
        elif name == "einsum":
            found = function("ij,kj->ik", y, y.flip(0))
        elif name in ("matmul", "mm"):
            found = function(y, y.flip(0).t())
        elif name == "bmm":
            found = function(y[None], y.flip(0).t()[None])
        elif name in GIVEN:
            found = function(y, *GIVEN[name])
        elif name == "acosh":
            found = function(y + 1)
        elif name == "detach":
            found = y - function(y) / 2
        elif name in JOINED:
            found = function([y, y.flip(0)])
        else:
            found = function(y, *(y.flip(0) if x == "other" else x for x in rest))
        results = [x for x in pytree.tree_leaves(found) if isinstance(x, torch.Tensor) and x.requires_grad]
        return results[-1].pow(3).sum()  # of several the last alone

    return do


@case
def gradients_of_functions_of_outputs(mesh: autoshard.Mesh) -> None:
    """All that are left to DTensor, and some of which it has another gradient or none."""
    tried = set()
    for model, sharded in _each(mesh):
        for name in (*sorted(TRUSTED_GRADIENTS), *OTHERS):
            for rest in REST:
                try:
                    torch.manual_seed(0)
                    loss = _function(name, rest)(model(rows()).sigmoid())
                    loss.backward()
                    known = bool(loss.isfinite())
                except Exception:
                    continue
                if name == "dropout" or not known:
                    continue  # drawn in the order of memory, see draws_in_weights_gradients_and_outputs
                do = _function(name, rest)
                _alike(model, sharded, lambda y, do=do: do(y.sigmoid()), f"{name}{rest}")
                tried.add(name)
                break
    assert not {*TRUSTED_GRADIENTS, *OTHERS} - tried - {"dropout"}, {*TRUSTED_GRADIENTS, *OTHERS} - tried


READS: Mapping[str, Do] = {
    "by position": lambda v: v + v,
    "by name": lambda v: torch.add(input=v, other=v),
    "in a list": lambda v: torch.stack([v, v]),
    "in a tuple": lambda v: torch.cat((v, v)),
}


@case
def views_of_parameters_that_were_written_since(mesh: autoshard.Mesh) -> None:
    """Kept over a step, and read in every form that an operation takes tensors in."""
    for model, sharded in _each(mesh):
        for name, read in READS.items():
            for take in (lambda p: p[1], lambda p: p[:, 3], lambda p: p.detach()[2], lambda p: p.t()[5].detach()):
                results = []
                for module in (model, sharded):
                    module.zero_grad()
                    held = take(module[0].weight)
                    with torch.no_grad():
                        module[0].weight.mul_(-1.5)
                    results.append(read(held))
                    if held.requires_grad:
                        results[-1].square().sum().backward()
                close(results[1], results[0], name)
                if held.requires_grad:
                    same_gradients(sharded, model)

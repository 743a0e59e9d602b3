"""What is not the model's: globals, closures and hidden modules that a forward reads; DTensors of a user's own."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_harness import Net, Of, both, case, close, full, ids, once, pair, refused, rows, same_gradients, same_state
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import autoshard
from autoshard.module.dtensors.module_dtensor import ModuleDTensor


class Hidden(nn.Module):
    """A teacher in a list, where parameters() does not see it."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.lin, self.teacher = nn.Linear(8, 8), [nn.Linear(8, 8).double().requires_grad_(trained)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.lin(x) - self.teacher[0](x)).square().mean()


@case
def parameters_of_others_are_trained(mesh: autoshard.Mesh) -> None:
    scale = nn.Parameter(rows(1)[0])
    for model, named in (
        (Of(lambda lin, x: (lin(x) * scale).square().mean()), "'scale' of an enclosing function"),
        (Of(lambda lin, x: (lin(x) * OUTSIDE).square().mean()), "the global 'OUTSIDE'"),
        (Hidden(True), "'weight' of a Linear"),
    ):
        model.double()
        sharded = autoshard.compile(model, mesh)
        with refused(f"the forward reads {named} .* requires a gradient but is not a parameter of the model"):
            sharded(rows())
        with torch.no_grad():
            close(sharded(rows()), model(rows()))
        sharded.requires_grad_(False)
        with refused("requires a gradient but is not a parameter of the model"):  # eager records it
            sharded(rows())
    model, sharded = pair(
        mesh, lambda: Of(lambda lin, x: (lin(x) * scale.detach()).to(scale.dtype).square().mean()), rows()
    )
    once(model, sharded, rows())


OUTSIDE = nn.Parameter(rows(1, seed=5)[0])


@case
def tensors_of_others_are_written(mesh: autoshard.Mesh) -> None:
    """Values that a forward reads outside are those of the call, whether they are computed with or decide a branch."""
    own = SimpleNamespace(scale=rows(1)[0], on=torch.tensor(True))

    def function(lin: nn.Module, x: torch.Tensor) -> Any:
        y = lin(x) * own.scale
        return (y.tanh() if own.on.item() else y).square().mean()

    model, sharded = pair(mesh, lambda: Of(function), rows())
    with torch.no_grad():
        own.scale.mul_(2)
    once(model, sharded, rows())
    own.on.fill_(False)
    once(model, sharded, rows())
    once(model, sharded, rows(6))  # of the program before nothing is kept
    count = len(sharded.programs)
    once(model, sharded, rows(6))
    assert len(sharded.programs) == count

    torch.manual_seed(0)
    model = Hidden(False).double()
    teacher = model.teacher[0]
    sharded = autoshard.compile(model, mesh, (rows(),))
    weights = sharded.full_state_dict()
    for _ in range(2):
        expected = nn.functional.linear(rows(), weights["lin.weight"], weights["lin.bias"]) - teacher(rows())
        close(full(sharded(rows())), expected.square().mean())
        with torch.no_grad():
            teacher.weight.add_(1)


class _Globals(nn.Module):
    """What its forward reads by names of its module are its own parts."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.scale, self.encoder = nn.Linear(8, 8), GLOBALS.scale, GLOBALS.encoder
        self.register_buffer("shift", GLOBALS.shift)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return ((GLOBALS.encoder(self.lin(x)) * GLOBALS.scale + GLOBALS.shift).square().mean(),)


GLOBALS = SimpleNamespace()


@case
def globals_that_are_parts(mesh: autoshard.Mesh) -> None:
    """A parameter, a buffer and a module that the forward reaches by a global are trained, in every later program."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)).double()
        vars(GLOBALS).update(encoder=encoder, scale=nn.Parameter(rows(1)[0]), shift=rows(1, seed=4)[0])
        model: Any = _Globals().double()
        module = autoshard.compile(model, mesh, (rows(),)) if compiled else model
        optimizer, results = torch.optim.SGD(module.parameters(), 0.1), []
        for train, n in ((True, 4), (False, 4), (True, 6), (False, 5)):
            torch.manual_seed(n)
            module.train(train).zero_grad()
            with torch.set_grad_enabled(train):
                results.append(full(module(rows(n))[0]))
            if train:
                results[-1].backward()
                optimizer.step()
                module.get_buffer("shift").add_(1)
        found.append(results)
    for a, b in zip(*found, strict=True):
        close(b, a)
    assert GLOBALS.encoder.training, "the user's own module stays as it was"
    twin = copy.deepcopy(module)
    with refused("a parameter of a model that was compiled"):
        twin(rows(3))


def _indexed(x: Any, y: Any) -> None:
    x[1].zero_()
    x[2:4].mul_(y[2:4])
    x[0] = y[1]


def _assigned(x: Any, y: Any) -> None:
    x.data = y


def _masked(x: Any, y: Any) -> None:
    x[x > 0] = 0


def _stepped(x: Any, y: Any) -> None:
    x.grad = y.clone()
    torch.optim.AdamW([x], 0.1, fused=True).step()


DONE: tuple[Callable[[Any, Any], Any], ...] = (
    *(_indexed, _assigned, _masked, _stepped),
    lambda x, y: (x * y).sum().item(),
    lambda x, y: f"{(x * y).sum().item():.9f}",
    lambda x, y: (x[1] * y[1] + x.sum(0)).softmax(-1),
    lambda x, y: x.copy_(y).pow_(2.0),
    lambda x, y: x[:, 1:3].contiguous() @ y[:2, :2],
    lambda x, y: torch._foreach_copy_([x], [y]) and None,
    lambda x, y: torch.linalg.vector_norm(x).pow_(2.0),
    lambda x, y: x.fill_(y.max()),
)
"""what scripts do with DTensors: those among them that this library mends for its own"""


@case
def dtensors_of_ones_own(mesh: autoshard.Mesh) -> None:
    """On a mesh that equals the module's they are as on any other; what belongs to a module is as the whole."""
    if not dist.is_initialized():
        return
    sharded = autoshard.compile(nn.Linear(8, 8), mesh, (torch.ones(4, 8),))
    equal, other = (init_device_mesh("cpu", (mesh.size,), mesh_dim_names=(name,)) for name in (*mesh.axes, "users"))
    assert sharded.device_mesh == equal != other
    mended = 0
    for do, placement in itertools.product(DONE, (Shard(0), Shard(1), Replicate())):
        wholes = rows(5), rows(5, seed=2)
        expected = do(*wholes), wholes[0]
        on_equal, on_other = (_done(do, on, placement, expected) for on in (equal, other))
        assert on_equal == on_other or not (on_equal[0] or on_other[0])
        assert _done(do, equal, placement, expected, ours=True)[0], (do, placement)
        mended += not on_other[0]
    assert mended, "there is something that torch does not do"


def _done(do: Any, on: DeviceMesh, placement: Any, expected: tuple[Any, Any], ours: bool = False) -> tuple[Any, ...]:
    """Whether the result and the tensor are as with plain tensors; type and layout of the result, and what was sent."""
    x, y = (distribute_tensor(rows(5, seed=seed), on, [placement], src_data_rank=None) for seed in (1, 2))
    x, y = map(ModuleDTensor.of, (x, y)) if ours else (x, y)
    try:
        with CommDebugMode() as sent:
            made = do(x, y)
    except Exception as error:
        return False, error
    right = all(
        torch.allclose(full(a).detach(), b.detach()) if isinstance(b, torch.Tensor) else a == b or a == pytest.approx(b)
        for a, b in zip((made, x), expected, strict=True)
    )
    return right, type(made), getattr(made, "placements", None), sent.get_total_counts()


class Asks(nn.Module):
    """Computes another way where gradients may be recorded, whether or not any are."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.lin(x))
        if torch.is_grad_enabled():
            return y.square().mean()
        return y.add_(1).square().mean() if y.is_leaf else y.mean()


@case
def grad_mode_that_a_forward_asks_for(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Asks, rows())
    for trained, recorded in ((True, True), (True, False), (False, True), (False, False)):
        both(model, sharded, lambda m, trained=trained: m.requires_grad_(trained))
        with torch.set_grad_enabled(recorded):
            close(sharded(rows()), model(rows()))
    model, sharded = pair(mesh, Asks, rows(), train=False)
    with torch.no_grad():
        close(sharded(rows()), model(rows()))
    assert len(sharded.programs) == 1


def _renewed(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0, 0.1)
        nn.init.kaiming_uniform_(module.weight[:4].detach())
        nn.init.trunc_normal_(module.bias, 0, 0.1)


@case
def draws_in_weights_gradients_and_outputs(mesh: autoshard.Mesh) -> None:
    """Weights made anew, noise, dropout of an output: one device's numbers, whatever the ranks are seeded with."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, sharded = pair(mesh, Net, ids())
    dropped: list[torch.Tensor] = []
    for own, module in ((0, model), (rank, sharded)):
        torch.manual_seed(5 + own)
        module.apply(_renewed)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.rand_like(p) * 0.1)
        loss, logits = module(ids())
        dropped.append(full(nn.functional.dropout(logits, 0.5)))
        full(loss).backward()
        for p in module.parameters():
            p.grad.add_(torch.randn_like(p.grad))
        if own:  # it goes on with its own numbers, as for augmentation
            assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(5 + own).get_state())
    close(*reversed(dropped))
    same_state(sharded, model)
    same_gradients(sharded, model)


@case
def anomalies_are_detected(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, lambda: Of(lambda lin, x: (lin(x) * x.sum().sqrt()).square().mean()), rows().abs())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            once(model, sharded, rows().abs())
            with pytest.raises(RuntimeError, match="returned nan values"):
                full(sharded(-rows().abs())).backward()

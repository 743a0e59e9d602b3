"""Tensors of a sharded module are a class of their own, and torch's DTensor is as torch made it. Gloo worlds run the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._redistribute import DTensorRedistributePlanner
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import _muon, adagrad

from autoshard.module.dtensors.module_dtensor import ModuleDTensor, contiguous_spec, from_local_shard, is_view_op
from autoshard.module.dtensors.outputs import ShardedOutput
from autoshard.module.optimizers import StageGradient

DISPATCHER = DTensor._op_dispatcher


def changed(owner: Any) -> list[str]:
    """Names of functions of ``owner``, a class or module of torch, that were not defined by torch."""
    named = {n: getattr(f, "fget", None) or f for n, f in vars(owner).items() if not n.startswith("__annot")}
    return [n for n, f in named.items() if str(getattr(f, "__module__", "torch")).startswith("autoshard")]


def whole(*shape: int) -> DTensor:
    """A tensor of a module on one rank, for which no process group is needed."""
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("a",), _init_backend=False, _rank=0)
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return from_local_shard(x, contiguous_spec(mesh, (Replicate(),), x.shape, x.dtype))


@pytest.mark.parametrize(
    "owner", [DTensor, type(DISPATCHER), _StridedShard, DTensorRedistributePlanner, _muon, adagrad]
)
def test_torchs_own_are_not_changed(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert changed(owner) == []
    monkeypatch.setattr(owner, "of_ours", is_view_op, raising=False)
    assert changed(owner) == ["of_ours"]


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 dispatches subclasses by its table alone")
def test_torchs_handlers_are_its_own() -> None:
    handlers = DISPATCHER._custom_op_handlers
    assert [op for op, f in handlers.items() if not f.__module__.startswith("torch")] == []


MADE: dict[str, Callable[[Any], Any]] = {
    "pointwise": lambda x: x * 2 + 1,
    "view": lambda x: x.t()[1:].reshape(-1),
    "list": lambda x: torch._foreach_mul([x, x], 2.0)[1],
    "lacking": lambda x: torch.linalg.qr(x)[1],
    "like": torch.zeros_like,
    "in place": lambda x: x.clone().mul_(3),
    "parameter": lambda x: nn.Parameter(x).detach(),
    "copied": lambda x: copy.deepcopy(nn.Parameter(x)).data,
    "random": lambda x: x.clone().fill_(0.5),
}


@pytest.mark.parametrize("do", MADE.values(), ids=MADE.keys())
def test_results_keep_the_class(do: Callable[[Any], Any]) -> None:
    x = whole(4, 4)
    made, expected = do(x), do(x._local_tensor.clone())
    assert isinstance(made, ModuleDTensor)
    torch.testing.assert_close(made.full_tensor(), expected)


def test_gradients_keep_the_class() -> None:
    for read in (
        lambda p: p.full_tensor(),
        lambda p: p.to_local(),
        lambda p: p * 1,
        lambda p: p.redistribute(placements=[Replicate()]),
    ):
        p = nn.Parameter(whole(2, 3))
        read(p).sum().backward()
        assert type(p.grad) is ModuleDTensor


def test_dtensors_of_others_stay_theirs() -> None:
    x = whole(2, 2)
    theirs = DTensor(x._local_tensor, x._spec, requires_grad=False)
    assert type(theirs * 2) is DTensor
    assert type(theirs.add_(x)) is DTensor
    assert type(theirs * x) is ModuleDTensor


def test_subclasses_are_kept_where_they_are_rebuilt() -> None:
    for kind in (ModuleDTensor, ShardedOutput, StageGradient):
        inner, spec = whole(2, 2).__tensor_flatten__()
        x = whole(2, 2)
        made = kind.__tensor_unflatten__({n: getattr(x, n) for n in inner}, spec, x.shape, (2, 1))
        assert type(made) is kind

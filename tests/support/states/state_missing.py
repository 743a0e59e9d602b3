"""Cases of states: what DTensor lacks, on parameters, gradients and buffers, beside those of plain layers."""

from __future__ import annotations

from typing import Any

import torch
from state_harness import Net, both, case, close, full, ids, pair, refused, rows, same_gradients, same_state, steps
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autoshard
from autoshard.errors import LayoutError


@case
def initialised_again(mesh: autoshard.Mesh) -> None:
    """By initialisers that decompose, fill or transpose a matrix; what is drawn afterwards is eager's."""
    model, sharded = pair(mesh, Net, ids())

    def fill(m: nn.Module) -> None:
        torch.manual_seed(3)
        for n, p in enumerate(p for p in m.parameters() if p.ndim == 2):
            (nn.init.orthogonal_, nn.init.eye_, lambda p: nn.init.orthogonal_(p.t()))[n % 3](p)
        m.after = None if hasattr(m, "plan") else torch.rand(3)
        if hasattr(m, "plan"):
            close(torch.rand(3), model.after)

    both(model, sharded, fill)
    del model.after
    same_state(sharded, model)
    steps(model, sharded, ids())


@case
def constrained(mesh: autoshard.Mesh) -> None:
    """Norms of rows and columns are bounded; factories write into parameters, and what is drawn is the same on all ranks."""
    model, sharded = pair(mesh, Net, ids())

    @torch.no_grad()
    def bound(m: nn.Module) -> None:
        torch.manual_seed(5)
        for n, p in enumerate(p for p in m.parameters() if p.ndim == 2):
            p.renorm_(2, n % 2, 0.3)
            p.mul_(2).copy_(torch.renorm(p, 1, (n + 1) % 2, 0.7))
            p.data = p.data.renorm(float("inf"), 0, 0.2)
        last = next(p for p in m.parameters() if p.ndim == 2)
        other = torch.zeros_like(last)
        torch.randn(other.shape, out=other)
        last.add_(other)
        torch.full(other.shape, 0.5, out=other)
        last.sub_(other)

    both(model, sharded, bound)
    same_state(sharded, model)
    steps(model, sharded, ids())


@case
def clipped_beside_plain_layers(mesh: autoshard.Mesh) -> None:
    """Gradients of the sharded module and of a layer that every rank has whole, by one norm; averages take buffers along."""
    model, sharded = pair(mesh, Net, ids())
    heads = [nn.Linear(4, 4).double() for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True) for m in (model, sharded)]
    for options in ({}, {"foreach": False}, {"norm_type": 1.0}, {"norm_type": float("inf"), "foreach": True}):
        norms = []
        for m, head, average in zip((model, sharded), heads, averages, strict=True):
            m.zero_grad()
            head.zero_grad()
            (full(m(ids())[0]) * head.weight.square().sum()).backward()
            norms.append(full(nn.utils.clip_grad_norm_([*head.parameters(), *m.parameters()], 0.1, **options)))
            average.update_parameters(m)
        close(norms[1], norms[0])
        close(heads[1].weight.grad, heads[0].weight.grad)
        same_gradients(sharded, model)
    same_state(averages[1].module, averages[0].module)


@case
def traced_by_others(mesh: autoshard.Mesh) -> None:
    _, sharded = pair(mesh, Net, ids())
    with refused("a sharded module cannot be exported by torch.export"):
        torch.export.export(sharded, (ids(),), strict=False)
    sharded(ids())


@case
def pruned_after_compiling(mesh: autoshard.Mesh) -> None:
    """Weights are masked by rank of all their entries; the model is another then, and says so."""
    model, sharded = pair(mesh, lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), rows())
    for m in (model, sharded):
        every = [(m[0], "weight"), (m[1], "weight")]
        prune.global_unstructured(every, pruning_method=prune.L1Unstructured, amount=0.3)
    for n in (0, 1):
        close(sharded[n].weight_mask, model[n].weight_mask)
        close(sharded[n].weight, model[n].weight)
    with refused("'0.weight' is missing from the sharded module"):
        sharded(rows())
    model, sharded = pair(mesh, lambda: nn.Linear(8, 8), rows())
    with torch.no_grad():
        close(*(m.weight[m.weight > 0.1] for m in (sharded, model)))


POSITIONS = {
    "index_add": lambda p: p.clone().flatten().index_add_(0, torch.tensor([0, p.numel() - 1]), p.new_ones(2)),
    "index_copy": lambda p: _chosen(p.clone(), p.abs() < 0.2),
    "quantile": lambda p: p.flatten().quantile(0.3),
    "strided": lambda p: p.flatten().as_strided((2, 3), (3, 1), 2),
    "windows": lambda p: p.unfold(0, 3, 2),
    "stft": lambda p: torch.stft(p.flatten(), 4, window=p.new_ones(4), center=False, return_complex=True).abs(),
    "turned": lambda p: p.clone().transpose_(0, -1).unsqueeze_(0).contiguous(),
    "view that is turned": lambda p: p.clone() + p.reshape(p.shape).transpose_(0, -1).mul_(2).transpose(0, -1),
    "vector times matrix": lambda p: p.flatten(1)[1] @ p.flatten(1).mT @ p.flatten(1) if p.ndim > 1 else p,
    "norm": lambda p: p.clone().norm().add_(0.1).sqrt_(),
    "list of views": lambda p: _added([p.clone().reshape(-1)[1:]], [p.reshape(-1)[1:]])[0],
    "list of means": lambda p: _added([torch.zeros(p.shape[:-1]).double()], [p.mean(-1)])[0],
}
"""functions whose result depends on the places of elements, and plain tensors that are written"""


def _chosen(p: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    places = mask.reshape(-1).nonzero().flatten()
    p.view(-1).index_copy_(0, places, p.reshape(-1).index_select(0, places) * 2)
    return p


def _added(sums: list[torch.Tensor], more: list[torch.Tensor]) -> list[torch.Tensor]:
    torch._foreach_add_(sums, more)
    return sums


@case
def places_in_the_full_tensor(mesh: autoshard.Mesh) -> None:
    """What has no rule in DTensor is not computed by a decomposition, on the places in a shard."""
    model, sharded = pair(mesh, Net, ids())
    steps(model, sharded, ids())
    for p, q in zip(sharded.parameters(), model.parameters(), strict=True):
        for name, function in POSITIONS.items():
            with torch.no_grad():
                close(function(p.detach()), function(q.detach()), name)


class Mixed(torch.optim.Optimizer):
    """Makes DTensors of its own, and adds plain tensors to them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if isinstance(p, DTensor):
                DTensor.from_local(p.to_local().clone(), p.device_mesh, p.placements).add_(torch.ones(p.shape).double())
            p.sub_(p.grad)


@case
def an_optimizer_that_dtensor_refuses(mesh: autoshard.Mesh) -> None:
    """By its name, with the way out; nothing is changed, and with the way out it steps as on one device."""
    model, sharded = pair(mesh, Net, ids())
    optimizers = [Mixed(m.parameters()) for m in (model, sharded)]
    both(model, sharded, lambda m: full(m(ids())[0]).backward())
    if torch.distributed.is_initialized():
        with refused(r"Mixed.step\(\) does what DTensor refuses .* autoshard.whole\(optimizer\)", LayoutError):
            optimizers[1].step()
        same_state(sharded, model)
    for optimizer in (optimizers[0], autoshard.whole(optimizers[1])):
        optimizer.step()
    same_state(sharded, model)

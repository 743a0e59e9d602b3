"""States of routing: how rows fall on experts changes from call to call."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from state_harness import case, close, pair, rows, same_state, steps
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import distribute_tensor

import autoshard
from autoshard.module.checkpoints import full_optimizer_state_dict, load_full_optimizer_state_dict
from autoshard.runtime.operations.experts import experts_op


class Routed(nn.Module):
    """Experts after a layer; ``experts[:, :2]`` of the input says where rows go."""

    def __init__(self, count: int = 3, gated: bool = True) -> None:
        super().__init__()
        self.layer, self.gated = nn.Linear(8, 8), gated
        self.first = nn.Parameter(torch.randn(count, 12 if gated else 6, 8) / 3)
        self.second = nn.Parameter(torch.randn(count, 8, 6) / 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor]:
        x = self.layer(batch["x"])
        y = experts_op(x, batch["ids"], batch["weights"], self.first, self.second, "silu", self.gated, False)
        return ((x + y).square().mean(),)


def batch(*ids: tuple[int, int], seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch whose rows go to these pairs of experts."""
    count = len(ids)
    return {"x": rows(count, seed=seed), "ids": torch.tensor(ids), "weights": rows(count, 2, seed).sigmoid()}


EVEN = ((0, 2), (2, 1), (1, 2), (2, 0), (2, 1), (0, 2))


@case
def rows_travel_to_their_experts(mesh: autoshard.Mesh) -> None:
    """Evenly, all to the experts of one rank, all to those of the other, all to one; the ranks hold 2 and 1 experts."""
    (axis,) = mesh.axes
    model, sharded = pair(mesh, Routed, batch(*EVEN), like={axis: "expert"})
    assert any("experts" in c.reason and c.kind == "all_to_all" for c in sharded.plan.collectives), sharded.plan
    for ids in (EVEN, ((0, 1),) * 6, ((2, 2),) * 6, ((1, 1),) * 6, EVEN):
        steps(model, sharded, batch(*ids), batch(*reversed(ids), seed=2))


@case
def each_rank_sums_its_own_experts(mesh: autoshard.Mesh) -> None:
    """Whole rows, experts cut: no row travels, and what is of no expert here is zero."""
    whole = {"batch*": "replicate", "layer.*": "replicate"}
    hints = {**whole, "first": autoshard.Shard(0), "second": autoshard.Shard(0)}
    model, sharded = pair(mesh, Routed, batch(*EVEN), hints=hints)
    for ids in (EVEN, ((0, 1),) * 6, ((2, 2),) * 6):
        steps(model, sharded, batch(*ids))


class InModules(Routed):
    """The experts are modules."""

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.second
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8)) for _ in range(3))

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor]:
        x = self.layer(batch["x"])
        scores = F.one_hot(batch["ids"], 3).sum(1) + 0 * x[:, :3]  # not known before, as those of a router
        y, ids = torch.zeros_like(x), scores.topk(2).indices
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(ids == number)
            y[rows] += batch["weights"][rows, slots, None] * expert(x[rows])
        return ((x + y).square().mean(),)


@case
def experts_in_modules_lie_whole_on_one_rank(mesh: autoshard.Mesh) -> None:
    """Two on the first rank, one on the second; saved, clipped, loaded into whole weights, and other lengths."""
    (axis,) = mesh.axes
    model, sharded = pair(mesh, InModules, batch(*EVEN), like={axis: "expert"})
    owners = [sharded.plan.layouts[f"experts.{e}.0.weight"].owner for e in range(3)]
    assert owners == [{axis: 0}, {axis: 0}, {axis: 1}]
    steps(model, sharded, batch(*EVEN), batch(*((0, 1),) * 6), batch(*((2, 1),) * 6, seed=2))
    steps(model, sharded, batch(*EVEN[:4]))
    for module in (model, sharded):
        module(batch(*EVEN))[0].backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    close(autoshard.clip_grad_norm_(sharded, 0.1), norm)
    _, other = pair(mesh, InModules, batch(*EVEN), like="ddp")
    other.load_full_state_dict(sharded.full_state_dict())
    same_state(other, model)


class Fused(nn.Module):
    """Attention with fewer key than query heads, and a gated layer, each with one projection for all of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(8, 32), nn.Linear(16, 8)
        self.gate_up, self.down = nn.Linear(8, 24), nn.Linear(12, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.qkv(x)
        q, k, v = made[..., :16], made[..., 16:24], made[..., 24:]
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return (x + self.down(F.silu(gate) * up)).square().mean()


class AsTuple(Fused):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:  # type: ignore[override]
        return (super().forward(x),)


@case
def parts_of_fused_projections_stay_cut(mesh: autoshard.Mesh) -> None:
    x = rows(15).unflatten(0, (3, 5))
    model, sharded = pair(mesh, AsTuple, x, like="megatron")
    layouts = sharded.plan.layouts
    assert tuple(layouts["qkv.weight"].grouped) == tuple(layouts["gate_up.weight"].grouped) == mesh.axes
    for _ in range(2):
        with torch.no_grad():
            close(sharded(x)[0], model(x)[0], "evaluated after steps")
        steps(model, sharded, x, x.flip(0))


@case
def weights_cut_in_every_part_are_clipped_saved_and_loaded(mesh: autoshard.Mesh) -> None:
    """By full state dicts, of optimizers too, and under torch.distributed by its checkpoints, into whole weights and back."""
    x = rows(15).unflatten(0, (3, 5))
    model, sharded = pair(mesh, AsTuple, x, like="megatron")
    pairs = [(m, torch.optim.AdamW(m.parameters(), 1e-2, foreach=True)) for m in (model, sharded)]
    norms = []
    for module, optimizer in pairs:
        module(x)[0].backward()
        if module is sharded:
            close(autoshard.clip_grad_norm_(sharded, 1e9), norms[0])
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1))
        optimizer.step()
    close(norms[1], norms[0])
    same_state(sharded, model)
    known = full_optimizer_state_dict(sharded, pairs[1][1])
    for number, entry in pairs[0][1].state_dict()["state"].items():
        close(known["state"][number]["exp_avg"], entry["exp_avg"])
    _, other = pair(mesh, AsTuple, x, like="ddp")
    other.load_full_state_dict(sharded.full_state_dict())
    same_state(other, model)
    optimizer = torch.optim.AdamW(sharded.parameters(), 1e-2, foreach=True)
    load_full_optimizer_state_dict(sharded, optimizer, known)
    for module, stepped in (pairs[0], (sharded, optimizer)):
        module.zero_grad()
        module(x)[0].backward()
        stepped.step()
    same_state(sharded, model)
    if not dist.is_initialized():
        return
    for name, p in sharded.named_parameters():  # by torch's own operations
        wanted = model.get_parameter(name).detach()
        close(p.full_tensor(), wanted)
        close((p * 2).norm(), (wanted * 2).norm())
        again = distribute_tensor(p.full_tensor().detach(), p.device_mesh, p.placements)
        assert torch.equal(again.to_local(), p.to_local()), (name, p.placements)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for name, source, target in (("a", sharded, other), ("b", other, pair(mesh, AsTuple, x, like="megatron")[1])):
        checkpoint.save(source.state_dict(), checkpoint_id=f"{folder[0]}/{name}")
        state = target.state_dict()
        checkpoint.load(state, checkpoint_id=f"{folder[0]}/{name}")
        target.load_state_dict(state)
        same_state(target, model)
    with torch.no_grad():
        for p in sharded.parameters():
            p.zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded, model.state_dict() if dist.get_rank() == 0 else {}, options=options)
    same_state(sharded, model)


class Windowed(nn.Module):
    """Attention of a window, padded, by masks that it makes of positions and of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor]:
        x = batch["x"]
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in self.qkv(x).split([8, 4, 4], -1))
        k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for y in (k, v))
        at = torch.arange(x.shape[1])
        seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 4) & batch["tokens"][:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, seen)
        return ((x + self.o(y.transpose(1, 2).flatten(2))).square().mean(),)


@case
def windows_beside_padding(mesh: autoshard.Mesh) -> None:
    """Keys go to the ranks that see them, whatever is padding; other lengths are other programs."""
    (axis,) = mesh.axes

    def padded(length: int, *starts: int) -> dict[str, torch.Tensor]:
        x = rows(2 * length, seed=length).unflatten(0, (2, length))
        return {"x": x, "tokens": torch.arange(length) >= torch.tensor(starts)[:, None]}

    model, sharded = pair(mesh, Windowed, padded(10, 0, 3), like={axis: "ring"})
    assert any("keys and values, hop 1" in c.reason for c in sharded.plan.collectives), sharded.plan
    for starts in ((0, 3), (7, 0), (10, 9)):
        steps(model, sharded, padded(10, *starts))
    steps(model, sharded, padded(13, 2, 0))

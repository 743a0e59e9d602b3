"""Inputs and outputs in layouts, gradients that accumulate, optimizers and weights as users bring them.

Cases as in state_cases.py: each takes a mesh of two ranks and raises where it differs from the unsharded model.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from state_harness import both, case, close, full, ids, refused, same_gradients, same_state
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import autoshard
from autoshard.errors import CaptureError, HintError, RuntimeMismatchError


@contextlib.contextmanager
def executed(sharded: Any) -> Iterator[Counter[tuple[str, str]]]:
    """(kind, phase) → how many collectives really ran inside; filled afterwards."""
    log: list[Any] = []
    found: Counter[tuple[str, str]] = Counter()
    holder = sharded._comm if hasattr(sharded, "_comm") else sharded._world
    holder.log = log
    try:
        yield found
    finally:
        holder.log = None
        found.update((e.kind, e.phase) for e in log)


class Tied(nn.Module):
    """A tied head, and no op that needs the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 12)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.emb(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


def real(mesh: autoshard.Mesh, hardware: autoshard.Hardware | str = "h100") -> autoshard.Mesh:
    """The mesh with communication at its price: a plan cuts what hints say, and goes on so."""
    return autoshard.Mesh(dict(zip(mesh.axes, mesh.shape, strict=True)), hardware)


def is_distributed(sharded: Any) -> bool:
    return isinstance(next(sharded.parameters()), DTensor)


ROWS = dict.fromkeys(["ids", "emb", "norm", "up", "down", "head"], autoshard.Shard(0))
BATCH = {"*": "replicate", **ROWS}
"""the batch is cut, and nothing else"""


# --- inputs in parts ---


def part(mesh: autoshard.Mesh, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """What this process brings of the batch, which the first axis cuts."""
    if not dist.is_initialized():
        return x
    return x.chunk(mesh.shape[0], dim)[mesh.index_along(dist.get_rank(), mesh.axes[0])]


@case
def local_inputs(mesh: autoshard.Mesh) -> None:
    """As from a DistributedSampler: loss, gradients and weights of the concatenated batch, and nothing is gathered."""
    torch.manual_seed(0)
    model = Tied().double()
    batches = [ids(rows=n, seed=n) for n in (4, 6, 4)]
    sharded = autoshard.compile(
        copy.deepcopy(model), real(mesh), (part(mesh, batches[0]),), hints=BATCH, inputs="local"
    )
    pairs = [(m, torch.optim.AdamW(m.parameters(), 0.01, eps=1e-6)) for m in (model, sharded)]
    for batch in batches:
        for module, optimizer in pairs:
            optimizer.zero_grad()
            full(module(batch if module is model else part(mesh, batch))[0]).backward()
        same_gradients(sharded, model)
        for _, optimizer in pairs:
            optimizer.step()
        same_state(sharded, model)
    assert not any(c.kind == "all_gather" for c in sharded.collectives)
    assert "S(0)" in str(sharded.plan.layouts["ids"])
    with torch.no_grad():
        close(sharded.eval()(part(mesh, batches[0]))[0], model.eval()(batches[0])[0])


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 12), nn.Linear(12, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.b(torch.tanh(self.a(x)))).softmax(-1).pow(3).mean()


class Weighs(nn.Module):
    """Batch norm and a weighted loss see the whole batch; one input is no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.bn, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = self.out(self.bn(self.lin(x * scale)).relu())
        return F.cross_entropy(y, labels, ignore_index=0) + F.dropout(y, 0.5, self.training).square().mean()


@case
def one_input_is_local(mesh: autoshard.Mesh) -> None:
    """By pattern; the gradients of inputs are those of the parts, and of the whole."""
    random = torch.Generator().manual_seed(1)
    x, scale = (torch.randn(n, 6, dtype=torch.float64, generator=random) for n in (8, 1))
    labels = torch.randint(0, 5, (8,), generator=random)
    labels[:4] = torch.tensor([0, 0, 0, 1])  # the ranks have other counts of labels that are ignored
    torch.manual_seed(0)
    model = Weighs().double()
    sharded = autoshard.compile(copy.deepcopy(model), mesh, inputs={"x": "local", "lab*": "local"})
    given = [
        (model, (x.clone(), scale.clone(), labels)),
        (sharded, (part(mesh, x).clone(), scale.clone(), part(mesh, labels))),
    ]
    for module, args in given:
        torch.manual_seed(3)
        for a in args[:2]:
            a.requires_grad_()
        full(module(*args)).backward()
    same_gradients(sharded, model)
    close(given[1][1][0].grad, part(mesh, given[0][1][0].grad))
    close(given[1][1][1].grad, given[0][1][1].grad)


@case
def options_that_are_changed_after_compile(mesh: autoshard.Mesh) -> None:
    """Dicts that were given count as they were: in a call that repeats the one before, and in one of another shape."""
    torch.manual_seed(0)
    model = nn.Linear(8, 6).double()
    hints, inputs = {"input": {mesh.axes[0]: autoshard.Shard(1)}}, {"input": "local"}
    batches = [torch.randn(3, n, 8, dtype=torch.float64) for n in (4, 4, 6)]
    example = (part(mesh, batches[0], 1),)
    sharded = autoshard.compile(copy.deepcopy(model), mesh, example, hints=hints, inputs=inputs)
    hints["input"][mesh.axes[0]] = autoshard.Shard(0)
    inputs["input"] = "global"
    for batch in batches:
        close(sharded(part(mesh, batch, 1)), model(batch))


@case
def local_inputs_that_do_not_fit(mesh: autoshard.Mesh) -> None:
    model = Weighs().double()
    x, scale, labels = torch.zeros(4, 6).double(), torch.ones(1, 6).double(), torch.zeros(4, dtype=torch.long)
    with refused("'remote' is neither", HintError):
        autoshard.compile(model, mesh, inputs="remote")
    with refused("'labls' matches no input. Nearest: labels", HintError):
        autoshard.compile(model, mesh, inputs={"labls": "local"})(x, scale, labels)
    with refused("'x' has 4 rows and 'scale' 1. Name the inputs that each rank brings", HintError):
        autoshard.compile(model, mesh, inputs="local")(x, scale, labels)
    if not dist.is_initialized():
        with refused(r"the mesh axes \(a=2, b=2\) of its batch are not known. Name them in hints", HintError):
            autoshard.compile(model, {"a": 2, "b": 2}, inputs={"x": "local"})(x, scale, labels)
        return
    cut = {"x": {mesh.axes[0]: autoshard.Shard(1)}}
    with refused(
        rf"could not be traced.* 'x' \[4, {6 * mesh.shape[0]}\] \(S\(1\).*a hint says which dim", CaptureError
    ):
        autoshard.compile(model, mesh, (x, scale, labels), hints=cut, inputs={"x": "local"})
    sharded = autoshard.compile(model, mesh, inputs={"x": "local", "labels": "local"})
    rows = 4 - dist.get_rank()
    with refused(
        "local inputs need one size on all ranks: pad them, or use drop_last=True.*rank 1",
        RuntimeMismatchError,
    ):
        sharded(x[:rows], scale, labels[:rows])


@case
def parts_differ_along_an_axis_that_does_not_cut(mesh: autoshard.Mesh) -> None:
    """Ranks of one group bring the same part, or are refused, in the first calls; along the batch they may differ."""
    if not dist.is_initialized():
        return
    model, x = Smooth().double(), torch.ones(4, 6, dtype=torch.float64)
    sharded = autoshard.compile(model, mesh, (x,), hints={"x": {mesh.axes[0]: autoshard.Shard(0)}}, inputs="local")
    sharded(x + mesh.index_along(dist.get_rank(), mesh.axes[0]))
    if mesh.ndim > 1:
        with refused(r"disagree on the local inputs .*: rank 3 differs from rank 2", RuntimeMismatchError):
            sharded(x + (dist.get_rank() == 3))


class Writes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(x.mean(0))
        return x + 1


@case
def dtensor_inputs(mesh: autoshard.Mesh) -> None:
    """They state their layout, whatever it is; parts may be uneven. In one process there are none."""
    if not dist.is_initialized():
        return
    torch.manual_seed(0)
    model = Smooth().double()
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sharded = autoshard.compile(copy.deepcopy(model), mesh, (x.requires_grad_(),))
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        both(model, sharded, lambda m: m.zero_grad())
        if isinstance(placement, Partial):
            share = 0.25 if dist.get_rank() else 0.75
            given = DTensor.from_local(x.detach() * share, sharded.device_mesh, [placement], run_check=False)
        else:
            given = distribute_tensor(x.detach(), sharded.device_mesh, [placement], src_data_rank=None)
        given.requires_grad_()
        own = x.detach().clone().requires_grad_()
        full(sharded(given)).backward()
        model(own).backward()
        same_gradients(sharded, model)
        close(given.grad, own.grad)
    assert len(sharded.programs) == 3, "of inputs that are cut on dim 0, on dim 1, or whole"
    writes = autoshard.compile(Writes(), mesh)
    for placement in (Shard(0), Shard(1)):
        given = distribute_tensor(x.detach().clone(), writes.device_mesh, [placement], src_data_rank=None)
        own = x.detach().clone()
        close(writes(given), Writes()(own))
        close(given, own)
    in_both = autoshard.compile(copy.deepcopy(model), autoshard.Mesh({"a": 1, "b": mesh.size}), (x,))
    summand = x.detach() * (0.25 if dist.get_rank() else 0.75)
    given = DTensor.from_local(summand, in_both.device_mesh, [Shard(0), Partial()], run_check=False)
    close(full(in_both(given)), model(x.detach()))
    other = init_device_mesh("cpu", (1, mesh.size), mesh_dim_names=("a", "b"))
    with refused("is a DTensor on the mesh .*, but the module's mesh is"):
        sharded(distribute_tensor(x.detach(), other, [Replicate(), Shard(0)], src_data_rank=None))


class Caches(nn.Module):
    """Takes what it returned, as a decoder does its keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache = (cache + self.up(x)).relu()
        return self.down(cache), cache


@case
def outputs_fed_back(mesh: autoshard.Mesh) -> None:
    """In the layout in which they came: nothing is communicated for them."""
    torch.manual_seed(0)
    model, x = Caches().double(), torch.randn(4, 6, dtype=torch.float64)
    hints = {"up": "colwise", "down": "rowwise"}
    sharded = autoshard.compile(copy.deepcopy(model), real(mesh), hints=hints, training=False, gather_outputs=False)
    cache, expected = torch.zeros(4, 8, dtype=torch.float64), torch.zeros(4, 8, dtype=torch.float64)
    for step in range(4):
        with executed(sharded) as counted, torch.no_grad():
            y, cache = sharded(x, cache)
            wanted, expected = model(x, expected)
        close(y, wanted)
        close(cache, expected)
        if step != 1:  # a capture sees the whole cache, once
            assert counted == {("reduce_scatter", "forward"): 1}, (step, counted)  # of y
    if is_distributed(sharded):
        assert [type(p) for p in cache.placements] == [Shard]
        assert len(sharded.programs) == 2
        with executed(sharded) as counted, torch.no_grad():
            sharded(x, cache.full_tensor())  # the control: now it is whole, and cut again, without communication
            assert len(sharded.programs) == 2
            sharded(x, cache.redistribute(placements=[Shard(0)]))
        assert counted["all_to_all", "forward"] + counted["all_gather", "forward"] > 0


@case
def plans_for_local_inputs(mesh: autoshard.Mesh) -> None:
    """The example is what one rank brings."""
    model, x = Tied(), ids(rows=2)
    plan = autoshard.plan(model, {"dp": 4, "tp": 2}, (x,), hints={"up": "colwise", "down": "rowwise"}, inputs="local")
    assert plan.shapes["ids"] == (8, 3)
    assert str(plan.layouts["ids"]) == "S(0)@dp R@tp"
    assert str(autoshard.plan(model, {"dp": 4}, (x,)).layouts["ids"]) == "R@dp"
    hinted = autoshard.plan(model, {"a": 4, "b": 2}, (x,), hints={"ids": {"b": autoshard.Shard(0)}}, inputs="local")
    assert plan.shapes["ids"] != hinted.shapes["ids"] == (4, 3)
    with refused(r"could not be traced.* 'input' \[4, 12\] \(S\(1\)@dp\); a hint says", CaptureError):
        autoshard.plan(
            nn.Linear(6, 2), {"dp": 2}, (torch.ones(4, 6),), hints={"input": autoshard.Shard(1)}, inputs="local"
        )

"""Cases of states: caches that a module keeps, which lie in parts on the ranks and are written in place."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from state_cases_inputs import executed
from state_harness import Net, both, case, close, ids, pair, refused, same_state, steps
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import Shard
from autoshard.errors import HintError

LENGTH, WIDTH, HEADS, BATCH = 12, 16, 4, 2
MEGATRON = {"*.q": "colwise", "*.k": "colwise", "*.v": "colwise", "*.o": "rowwise"}


class Attention(nn.Module):
    """Attention with a cache of its own, as in gpt-fast. ``write``: how it is written to."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.write = write
        for name in ("keys", "values"):
            cache = torch.zeros(BATCH, HEADS, LENGTH, WIDTH // HEADS)
            self.register_buffer(name, cache, persistent=name == "keys")

    def put(self, cache: Any, new: torch.Tensor, at: torch.Tensor, start: int) -> None:
        match self.write:
            case "index_put":
                cache[:, :, at] = new
            case "index_copy":
                cache.index_copy_(2, at, new)
            case "scatter":
                cache.scatter_(2, at[None, None, :, None].expand_as(new), new)
            case "slice":
                cache[:, :, start : start + new.shape[2]] = new
            case "copy":
                cache.copy_(cache.index_copy(2, at, new))

    def forward(self, x: torch.Tensor, at: torch.Tensor, start: int) -> torch.Tensor:
        heads = (x.shape[0], x.shape[1], HEADS, -1)
        q, k, v = (m(x).view(heads).transpose(1, 2) for m in (self.q, self.k, self.v))
        self.put(self.keys, k, at, start)
        self.put(self.values, v, at, start)
        mask = torch.arange(LENGTH) <= at[:, None]
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, write: str = "index_put") -> None:
        super().__init__()
        self.emb = nn.Embedding(12, WIDTH)
        self.layers = nn.ModuleList(Attention(write) for _ in range(2))
        self.head = nn.Linear(WIDTH, 12, bias=False)

    def forward(self, ids: torch.Tensor, at: torch.Tensor, start: int = 0) -> torch.Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = x + layer(x, at, start)
        return self.head(x)  # type: ignore[no-any-return]


def decode(model: nn.Module, sharded: Any, lengths: tuple[int, ...], given: bool = False) -> None:
    """Calls one after another, each for as many tokens; ``given``: with the start as a number."""
    tokens = torch.randint(0, 12, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    start = 0
    for length in lengths:
        end = start + length
        call = tokens[:, start:end], torch.arange(start, end), *([start] if given else [])
        with torch.no_grad():
            close(sharded(*call), model(*call))
        start = end


@case
def a_cache_of_ones_own(mesh: autoshard.Mesh) -> None:
    """Each rank has the part that its heads need, and nothing is sent for it."""
    for write in ("index_put", "index_copy", "scatter", "slice"):
        torch.manual_seed(0)
        model = Decoder(write).double().eval()
        sharded = autoshard.compile(copy.deepcopy(model), mesh, hints=MEGATRON, training=False)
        decode(model, sharded, (5, 1, 1), given=write == "slice")
        assert {str(sharded.plan.layouts[f"layers.{i}.{n}"]) for i in (0, 1) for n in ("keys", "values")} == {"S(1)@tp"}
        program = sharded.programs[-1].compiled.program
        assert program.in_place == program.mutations.keys()
        assert len(program.in_place) == 4
        same_state(sharded, model)
        whole = 4 * BATCH * LENGTH * WIDTH * 8
        assert sharded.plan.memory.buffers - whole / 2 < 1000
        assert sharded.plan.memory.temporaries < whole / 4  # no copy of a cache
        token = BATCH * WIDTH * 8  # the activation of one
        assert sharded.collectives
        assert max(c.bytes for c in sharded.collectives) <= token
    both(model, sharded, lambda m: m.layers[0].keys.zero_())
    decode(model, sharded, (3, 1), given=True)


@case
def a_cache_whose_old_value_is_read(mesh: autoshard.Mesh) -> None:
    """It is not written in place."""

    class Old(Attention):
        def put(self, cache: Any, new: torch.Tensor, at: torch.Tensor, start: int) -> None:
            before = cache.flip(0).transpose(0, 1) if self.write == "read" else cache[:, :, :3]
            cache[:, :, at] = new
            if self.write == "written":
                cache[:, :, 8:11] = cache[:, :, :3]
            else:
                cache.mul_(1 + before.sum().tanh())

    class Reads(Decoder):
        def __init__(self, write: str) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Old(write)])

    for write in ("read", "view", "written"):
        torch.manual_seed(0)
        model = Reads(write).double().eval()
        sharded = autoshard.compile(copy.deepcopy(model), mesh, hints=MEGATRON, training=False)
        decode(model, sharded, (4, 1, 1))
        assert not sharded.programs[-1].compiled.program.in_place
        same_state(sharded, model)


@case
def a_cache_that_users_change(mesh: autoshard.Mesh) -> None:
    """Resets, writes, assignments, copies and loaded weights reach every part."""
    torch.manual_seed(0)
    model = Decoder().double().eval()
    start = torch.randn(BATCH, HEADS, LENGTH, WIDTH // HEADS, dtype=torch.float64)
    model.layers[0].values.copy_(start)
    hints = {"layers.0.keys": Shard(0), "layers.1.keys": Shard(2), "layers.0.values": Shard(3)}
    sharded = autoshard.compile(copy.deepcopy(model), mesh, hints=hints, training=False)

    def change(m: Any) -> None:
        for layer in m.layers:
            layer.keys[:, :, 2:4] = 1
            layer.values[:, 1] += start[:, 1]
            layer.keys.mul_(start[:1, :1])
            layer.values = start + 1
            layer.values.index_fill_(0, torch.tensor([1]), 2)

    for _ in range(2):
        decode(model, sharded, (3, 1))
        both(model, sharded, change)
        same_state(sharded, model)
        close(sharded.layers[1].values, model.layers[1].values)

    def through_views(m: Any) -> None:
        keys = m.layers[0].keys  # cut along dim 0
        keys[1].mul_(2)
        keys[:, 0][1].add_(1)
        keys.select(0, 1)[2:].zero_()
        keys[:, 1] += 1
        keys[0] += 1

    both(model, sharded, through_views)
    same_state(sharded, model)
    both(model, sharded, lambda m: m.layers[0].keys[:, 1].zero_())  # a view in any case
    same_state(sharded, model)
    for pattern, hint in hints.items():
        assert sharded.plan.layouts[pattern].placements == (hint,)
        if isinstance(held := sharded.get_buffer(pattern), DTensor):
            assert held.to_local().numel() == held.numel() // 2
    copies = copy.deepcopy(model), copy.deepcopy(sharded)
    decode(model, sharded, (2, 2))
    decode(*copies, (6, 1))
    state = {n: t + 1 for n, t in model.state_dict().items()}
    model.load_state_dict(state)
    sharded.load_full_state_dict(state)
    decode(model, sharded, (1, 3))
    model.load_state_dict(state)
    sharded.load_state_dict(state)
    decode(model, sharded, (1, 3))


@case
def a_cache_on_the_meta_device(mesh: autoshard.Mesh) -> None:
    torch.manual_seed(0)
    model = Decoder().double().eval()
    with torch.device("meta"):
        empty = Decoder().double().eval()
    sharded = autoshard.compile(empty, mesh, (ids(BATCH), torch.arange(3)), hints=MEGATRON, training=False)
    sharded.load_full_state_dict(model.state_dict())
    for layer in sharded.layers:
        layer.values.zero_()  # in no checkpoint
    decode(model, sharded, (3, 1))
    same_state(sharded, model)


@case
def a_cache_given_as_an_argument(mesh: autoshard.Mesh) -> None:
    """Written in place, as in eager."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            cache[:, at] = self.up(x)
            return self.down(cache).sum(1)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = Writes().double(), torch.randn(4, 1, 6, dtype=torch.float64)
    hints = {"up": "colwise", "down": "rowwise"}
    sharded = autoshard.compile(copy.deepcopy(model), mesh, hints=hints, training=False)
    cache = torch.zeros(4, 5, 8, dtype=torch.float64)
    caches: list[Any] = [cache, cache.clone()]
    for step in range(3):
        if step == 2 and hasattr(sharded, "device_mesh"):
            part = caches[0].chunk(2, -1)[sharded._comm.rank].contiguous()
            caches[0] = DTensor.from_local(part, sharded.device_mesh, [torch.distributed.tensor.Shard(2)])
        at = torch.tensor([step])
        with torch.no_grad():
            close(sharded(x * step, caches[0], at), model(x * step, caches[1], at))
        close(*caches)
        if isinstance(caches[0], DTensor):  # a whole one may be cut for the layers, and put together again
            assert sharded.programs[-1].compiled.program.in_place == {"cache"}


@case
def a_written_buffer_that_is_to_be_cut(mesh: autoshard.Mesh) -> None:
    """Running statistics, in training and after; the program that comes first decides."""
    axis = mesh.axes[0]
    for hint in (Shard(0), {axis: Shard(0)}, autoshard.Replicate()):
        model, sharded = pair(mesh, Net, ids(), hints={"bn.running_mean": hint})
        steps(model, sharded, ids(), ids(seed=1))
        both(model, sharded, lambda m: m.eval())
        with torch.no_grad():
            close(sharded(ids())[1], model(ids())[1])
        assert isinstance(sharded.bn.running_mean, DTensor) <= (hint != autoshard.Replicate())
    model, sharded = pair(mesh, Net, ids())
    assert sharded.plan.layouts["bn.running_mean"] == autoshard.Layout(mesh)

    class Anew(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(4, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = (x + self.last).float()
            return self.last + 1

    with refused("the forward replaces buffer 'last' by another shape or dtype", HintError):
        pair(mesh, Anew, torch.ones(4, 3, dtype=torch.float64), hints={"last": Shard(0)})


class Handed(nn.Module):
    """Attention whose keys and values are handed in and out, one pair a layer, and grow."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 12, bias=False)
        self.layers = nn.ModuleList(Attention("") for _ in range(2))

    def forward(self, ids: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, Any]:
        x, made = self.emb(ids), []
        for i, layer in enumerate(self.layers):
            heads = (x.shape[0], x.shape[1], HEADS, -1)
            q, k, v = (m(x).view(heads).transpose(1, 2) for m in (layer.q, layer.k, layer.v))
            if cache is not None:
                k, v = torch.cat([cache[i][0], k], 2), torch.cat([cache[i][1], v], 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
            x = x + layer.o(y.transpose(1, 2).flatten(2))
            made.append((k, v))
        return self.head(x), tuple(made)


@case
def a_cache_handed_in_and_out(mesh: autoshard.Mesh) -> None:
    """It stays in its layout: nothing is sent for it, and one program serves all lengths."""
    torch.manual_seed(0)
    model = Handed().double().eval()
    mine = autoshard.Mesh(dict(zip(mesh.axes, mesh.shape, strict=True)))
    sharded = autoshard.compile(copy.deepcopy(model), mine, like="megatron", training=False, dynamic=True)
    tokens = torch.randint(0, 12, (3, 12), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        (given, cache), (expected, wanted) = sharded(tokens[:, :4]), model(tokens[:, :4])
        for at in range(4, 12):
            close(given, expected)
            with executed(sharded) as counted:
                given, cache = sharded(tokens[:, at : at + 1], cache)
            expected, wanted = model(tokens[:, at : at + 1], wanted)
            assert type(cache[0][0]) is not torch.Tensor
            if at > 4:  # a capture sees all of it, once
                assert counted["all_reduce", "forward"] == len(model.layers) + 1, counted  # and of the embedding
                assert counted["all_gather", "forward"] <= 1  # of the logits
                assert set(counted) <= {("all_reduce", "forward"), ("all_gather", "forward")}
            if at == 7:  # other beams, in other rows: of the parts
                order = torch.tensor([2, 0, 0])
                cache, wanted = (tuple(tuple(x.index_select(0, order) for x in p) for p in c) for c in (cache, wanted))
                assert type(cache[0][0]) is not torch.Tensor
        assert len(sharded.programs) == 2
        if hasattr(sharded, "_agreement"):  # after the first calls the ranks compare no step that goes on
            cache, wanted = (
                sharded(tokens[:, :1], cache)[1],
                model(tokens[:, :1], wanted)[1],
            )  # the eighth of its program
            with mock.patch.object(sharded._agreement, "begin") as begin:
                for _ in range(2):
                    cache = sharded(tokens[:, :1], cache)[1]
                    wanted = model(tokens[:, :1], wanted)[1]
            assert not begin.called
        for a, b in zip(cache, wanted, strict=True):
            assert a[0].shape == b[0].shape
            assert isinstance(a[0].shape, torch.Size)
            close(a[0] + 0, b[0])
            close(a[1][:, 1], b[1][:, 1])
        for both_sides in (cache, wanted):  # changes what the next call sees
            both_sides[0][0][:, 1:3] = 0
            both_sides[1][0][:, 1].mul_(3)
            both_sides[0][1][0].add_(1)
            both_sides[1][1].mul_(2)
        close(sharded(tokens[:, :1], cache)[0], model(tokens[:, :1], wanted)[0])
        whole = tuple(tuple(x.clone() for x in pair) for pair in wanted)  # a whole one is cut
        close(sharded(tokens[:, :1], whole)[0], model(tokens[:, :1], wanted)[0])

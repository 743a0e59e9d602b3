"""Cases of states: what models keep in plain attributes and buffers."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
from state_harness import Of, both, case, close, full, once, one_graph, pair, refused, rows, same_gradients
from torch import nn

import autoshard


class Cached(nn.Module):
    """Keys in a plain attribute, as Meta's Llama 2 keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.cache = nn.Linear(8, 8), torch.zeros(4, 6, 8, dtype=torch.float64)
        self.scale = torch.tensor(2.0, dtype=torch.float64)

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        self.cache = self.cache.to(x)
        self.cache[: x.shape[0], start : start + x.shape[1]] = self.lin(x)
        return self.cache[: x.shape[0], : start + x.shape[1]] * self.scale


class Recurrent(nn.Module):
    """A state that every call sets anew."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.state = nn.Linear(8, 8), torch.zeros(4, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = torch.tanh(self.lin(x) + self.state.detach())
        return self.lin(self.state)


@case
def a_cache_in_a_plain_attribute(mesh: autoshard.Mesh) -> None:
    torch.manual_seed(0)
    model = Cached().double()
    given = copy.deepcopy(model)
    sharded = autoshard.compile(given, mesh, hints={"lin": "colwise"})
    with torch.no_grad():
        for start in range(3):
            x = rows(4).unsqueeze(1) * (start + 1)
            close(sharded(x, start), model(x, start))
        both(model, sharded, lambda m: m.cache.zero_())
        close(sharded(x, 1), model(x, 1))
    close(sharded.cache, model.cache)
    assert "cache" not in sharded.state_dict()
    assert not given.cache.any()
    assert given.cache.grad_fn is None


@case
def a_state_set_anew_in_the_forward(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Recurrent, rows())
    for seed in range(3):
        once(model, sharded, rows(seed=seed))
    close(sharded.state, model.state)
    model.state = model.state.detach()  # torch copies no other
    copies = copy.deepcopy(model), copy.deepcopy(sharded)
    once(*copies, rows(seed=3))
    once(model, sharded, rows(seed=4))
    close(copies[1].state, copies[0].state)


@case
@one_graph
def a_state_that_grows(mesh: autoshard.Mesh) -> None:
    class Grows(Recurrent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state = torch.cat([self.state, x])
            return self.lin(self.state)

    with refused(r"changes the shape of attribute 'state' from \[4, 8\] to \[8, 8\]"):
        pair(mesh, Grows, rows())

    class GrowsInABuffer(Grows):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", self.__dict__.pop("state"))

    for make in (GrowsInABuffer, lambda: nn.Sequential(GrowsInABuffer())):
        with refused(r"changes the shape of buffer 'state' of GrowsInABuffer from \[4, 8\] to \[8, 8\]"):
            pair(mesh, make, rows())

    class Resized(GrowsInABuffer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state.resize_(8, 8)
            return self.lin(x)

    with refused(r"changes the shape of buffer 'state' of Resized from \[4, 8\] to \[8, 8\]"):
        pair(mesh, Resized, rows())


@case
def a_buffer_that_is_returned(mesh: autoshard.Mesh) -> None:
    """A copy of what it was: eager gives the buffer itself."""

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(x)  # type: ignore[operator]
            return self.count  # type: ignore[return-value]

    one = torch.ones(3, dtype=torch.float64)
    _, sharded = pair(mesh, Returns, one)
    first = full(sharded(one))
    close(full(sharded(one)), 2 * one)
    close(first, one)
    close(sharded.count, 2 * one)


@case
@one_graph
def a_sparse_buffer(mesh: autoshard.Mesh) -> None:
    """One that nobody reads does no harm, as in openai-whisper."""

    class Sparse(Of):
        def __init__(self, function: Any) -> None:
            super().__init__(function)
            self.register_buffer("heads", torch.eye(8, dtype=torch.float64).to_sparse(), persistent=False)

        def forward(self, *inputs: torch.Tensor) -> Any:
            return self.function(self, *inputs)

    model, sharded = pair(mesh, lambda: Sparse(lambda m, x: m.lin(x)), rows())
    once(model, sharded, rows())
    assert sharded.heads.layout == torch.sparse_coo
    with refused("the forward reads buffer 'heads', a tensor of layout torch.sparse_coo"):
        pair(mesh, lambda: Sparse(lambda m, x: m.heads @ m.lin(x)), rows(8))


class Rotary(nn.Module):
    def __init__(self, computes: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        if computes:
            self.reset_buffers = self.compute
        self.register_buffer("table", torch.zeros(8), persistent=False)
        self.compute()

    def compute(self) -> None:
        self.table.copy_(torch.arange(8) / 3)  # type: ignore[operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.table  # type: ignore[no-any-return]


class Recomputes(Rotary):
    def __init__(self) -> None:
        super().__init__(False)

    def reset_buffers(self) -> None:
        self.compute()


@case
def a_meta_model_with_computed_buffers(mesh: autoshard.Mesh) -> None:
    """The module computes them, or somebody has to: zeros are never run with."""
    for kind in (Recomputes, lambda: Rotary(False)):
        model = kind().double()
        with torch.device("meta"):
            empty = kind().double()
        sharded = autoshard.compile(empty, mesh, (rows(),))
        sharded.load_full_state_dict(model.state_dict())
        if kind is not Recomputes:
            with refused("buffers 'table' are computed in the model's constructor and are not in checkpoints"):
                sharded(rows())
            with refused("buffers 'table' are computed in the model's constructor"):
                copy.deepcopy(sharded)(rows())
            sharded.table = model.table.clone()
            once(model, copy.deepcopy(sharded), rows())
        once(model, sharded, rows())


class Counts:
    """How often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


class Slots:
    """An object without a ``__dict__``."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


CALLS = {"all": 0}


class Leaves(nn.Module):
    """Its first call leaves something for the next one, in an attribute, ``kind``, or beside the model."""

    of_class = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lin, self.kind = nn.Linear(8, 8), kind
        self.calls, self.seen, self.cache = 0, list[int](), dict[str, torch.Tensor]()
        self.nested, self.recent = {"of": ([0],)}, deque([0], maxlen=3)
        self.counter, self.mean_of_all, self.slots = Counts(), 0.0, Slots()
        self.steps: Any = (n for n in range(9)) if kind == "generator" else iter(range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.lin(x)
        self.calls += 1
        if self.kind == "unread":
            self.last, self.slots.calls = h, next(self.steps)
            self.mean_of_all = 0.9 * self.mean_of_all + 0.1 * h.detach().mean()  # reads what it left, for itself alone
        if self.kind == "collects":
            for kept in (self.seen, self.nested["of"][0], self.recent):
                kept.append(h)  # type: ignore[attr-defined]
        if self.kind == "counter":
            h = h * self.calls
        if self.kind == "list":
            self.seen.append(1)
            h = h * len(self.seen)
        if self.kind == "nested":
            self.nested["of"][0].append(1)
            h = h * len(self.nested["of"][0])
        if self.kind == "deque":
            self.recent.append(1)
            h = h * len(self.recent)
        if self.kind == "object":
            h = h * self.counter()
        if self.kind == "class":
            type(self).of_class += 1
            h = h * type(self).of_class
        if self.kind == "global":
            CALLS["all"] += 1
            h = h * CALLS["all"]
        if self.kind == "slots":
            self.slots.calls += 1
            h = h * self.slots.calls
        if self.kind in ("generator", "iterator"):
            h = h * (1 + next(self.steps))
        if self.kind == "tensor":
            h = h * self.cache.setdefault("mean", h.detach().mean(0))
        if self.kind == "buffer" and not hasattr(self, "mean"):
            self.register_buffer("mean", h.detach().mean(0))
        if self.kind == "parameter" and not hasattr(self, "mean"):
            self.mean = nn.Parameter(h.detach().mean(0))
        return h * self.mean if self.kind in ("buffer", "parameter") else h  # type: ignore[operator]


@case
def what_a_call_leaves_for_the_next(mesh: autoshard.Mesh) -> None:
    kinds = (
        "counter",
        "list",
        "nested",
        "deque",
        "object",
        "slots",
        "class",
        "global",
        "generator",
        "iterator",
        "tensor",
        "buffer",
        "parameter",
    )
    for kind in kinds:
        model = Leaves(kind).double()
        with refused("call the model once before"):
            autoshard.compile(model, mesh, (rows(),))
        assert (model.calls, model.seen, model.cache, hasattr(model, "mean")) == (0, [], {}, False)
        assert (model.nested, list(model.recent), model.counter.calls) == ({"of": ([0],)}, [0], 0)
        assert model.slots.calls == 0
    model, sharded = pair(mesh, lambda: Leaves("unread"), rows())
    for seed in (1, 2):
        once(model, sharded, rows(seed=seed))


@case
@one_graph
def what_a_call_collects(mesh: autoshard.Mesh) -> None:
    model = Leaves("collects").double()
    with refused("the forward adds to 'seen', 'nested', 'recent' in every call"):
        autoshard.compile(model, mesh, (rows(),))
    assert (model.seen, model.nested, list(model.recent)) == ([], {"of": ([0],)}, [0])


@case
def what_the_first_call_made(mesh: autoshard.Mesh) -> None:
    """The model was called before it is compiled."""
    for kind in ("tensor", "buffer", "parameter"):
        torch.manual_seed(0)
        model = Leaves(kind).double()
        with torch.no_grad():
            model(rows())
        sharded = autoshard.compile(copy.deepcopy(model), mesh, (rows(),))
        for seed in (1, 2):
            once(model, sharded, rows(seed=seed))


@case
def states_before_it_is_compiled(mesh: autoshard.Mesh) -> None:
    """An empty state dict would be a checkpoint of nothing."""
    torch.manual_seed(0)
    model = Cached().double()
    sharded, state = autoshard.compile(copy.deepcopy(model), mesh), model.state_dict()
    for ask in (
        sharded.full_state_dict,
        sharded.full_gradients,
        sharded.state_dict,
        lambda: nn.Sequential(sharded).state_dict(),
        lambda: list(sharded.parameters()),
        lambda: sharded.load_full_state_dict(state),
        lambda: sharded.load_state_dict(state),
    ):
        with refused("nothing is compiled yet: call the module once, or give example_args", autoshard.PlanError):
            ask()
    with torch.no_grad():
        close(sharded(rows(4).unsqueeze(1), 0), model(rows(4).unsqueeze(1), 0))
    assert sharded.full_state_dict().keys() == state.keys()


@case
def a_buffer_written_in_another_dtype(mesh: autoshard.Mesh) -> None:
    """What is written is converted to the buffer's dtype, and read so."""

    class Converts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(8, dtype=torch.int32))
            self.register_buffer("seen", torch.zeros(8, dtype=torch.int32))
            self.register_buffer("sums", torch.zeros(8, 2, dtype=torch.int32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.copy_(3 * x.detach().sum(0))  # type: ignore[operator]
            self.seen[:] = 2.7 * x.detach().sum(0)  # type: ignore[operator]
            torch.sum(3 * x.detach(), 0, out=self.sums[:, 1])  # type: ignore[index]  of converted rows
            return (self.lin(x) * (self.count + self.seen + self.sums[:, 1])).square().mean()  # type: ignore[operator, index]

    model, sharded = pair(mesh, Converts, rows())
    for seed in range(2):
        once(model, sharded, rows(seed=seed))
        for name in ("count", "seen", "sums"):
            close(getattr(sharded, name), getattr(model, name))


@case
def a_dict_that_the_forward_changes(mesh: autoshard.Mesh) -> None:
    """The caller's gains and loses what eager's does, from call to call; with a backward, and without."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
            old = state["h"] if "h" in state else torch.zeros_like(x)
            state["h"] = torch.tanh(self.down(self.up(x).relu()) + old.detach())
            state["inner"]["count"] += 1
            state.pop("first", None)
            return state["h"].square().mean()

    def start() -> dict[str, Any]:
        return {"first": torch.ones(2), "inner": {"count": 0}}

    model, sharded = pair(mesh, Recurrent)
    for recorded in (True, False):
        states = start(), start()
        for seed in range(3):
            with torch.set_grad_enabled(recorded):
                expected, given = (m(rows(seed=seed), s) for m, s in zip((model, sharded), states, strict=True))
            close(given, expected)
            wanted, found = states
            assert list(found) == list(wanted) == ["inner", "h"]
            assert found["inner"] == wanted["inner"]
            close(found["h"], wanted["h"])
    both(model, sharded, lambda m: full(m(rows(), start())).backward())
    same_gradients(sharded, model)

"""What users change between calls of a sharded module, each against the unsharded model: in one process and under gloo.

Every case takes a mesh of two ranks and raises where the two differ. Run by test_states.py and training_worker.py.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard import CaptureError

Case = Callable[[autoshard.Mesh], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Block(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A tied head, dropout, and a batch norm: modes, flags and written buffers all count."""

    def __init__(self, p: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Block(8, p) for _ in range(2))
        self.bn = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.bn(x.flatten(0, 1)))
        return F.cross_entropy(logits, ids.flatten().roll(1)), logits


def ids(rows: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 12, (rows, 3), generator=torch.Generator().manual_seed(seed))


def pair(
    mesh: autoshard.Mesh, make: Callable[[], nn.Module], *args: Any, train: bool = True, **options: Any
) -> tuple[nn.Module, Any]:
    """The unsharded model in float64 and the same sharded, compiled for ``args``."""
    torch.manual_seed(0)
    model = make().double().train(train)
    return model, autoshard.compile(copy.deepcopy(model), mesh, args, **options)


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def close(given: Any, expected: Any, what: str = "", rtol: float = 1e-9) -> None:
    given, expected = full(given).detach(), full(expected).detach()
    assert given.dtype == expected.dtype, f"{what}: {given.dtype}, not {expected.dtype}"
    torch.testing.assert_close(given, expected, rtol=rtol, atol=rtol * float(expected.abs().max()) + 1e-300, msg=None)


def same_gradients(sharded: Any, model: nn.Module, rtol: float = 1e-9) -> None:
    """Of the same parameters, and the same on every rank: each rank compares with the unsharded model's."""
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    given = sharded.full_gradients()
    assert given.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, g in expected.items():
        assert given[name].dtype == g.dtype
        torch.testing.assert_close(given[name], g, rtol=rtol, atol=rtol * largest, msg=lambda m, n=name: f"{n}: {m}")


def same_state(sharded: Any, model: nn.Module, rtol: float = 1e-9) -> None:
    given = sharded.full_state_dict()
    for name, t in model.state_dict().items():
        torch.testing.assert_close(given[name], t, rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def steps(model: nn.Module, sharded: Any, *batches: Any, seed: int = 0) -> None:
    """A step of SGD with momentum on every batch: loss, gradients, weights and buffers agree."""
    pairs = (
        (model, torch.optim.SGD(model.parameters(), 0.1, 0.9)),
        (sharded, torch.optim.SGD(sharded.parameters(), 0.1, 0.9)),
    )
    for batch in batches:
        losses = []
        for module, optimizer in pairs:
            torch.manual_seed(seed)
            optimizer.zero_grad()
            losses.append(full(module(batch)[0]))
            losses[-1].backward()
        close(losses[1], losses[0], "loss")
        same_gradients(sharded, model)
        for _, optimizer in pairs:
            optimizer.step()
        same_state(sharded, model)


def both(model: nn.Module, sharded: Any, change: Callable[[Any], Any]) -> None:
    for module in (model, sharded):
        change(module)


@contextlib.contextmanager
def refused(text: str, error: type[Exception] = CaptureError) -> Iterator[None]:
    with pytest.raises(error, match=text):
        yield


# --- requires_grad ---


def only_the_head(module: Any) -> None:
    for name, p in module.named_parameters():
        p.requires_grad_(name.startswith(("head.bias", "bn")))


@case
def frozen_but_for_the_head_and_unfrozen(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids())
    layouts = {n: sharded.plan.layouts[n] for n, _ in model.named_parameters()}
    steps(model, sharded, ids())
    both(model, sharded, only_the_head)
    both(model, sharded, lambda m: m.zero_grad())
    steps(model, sharded, ids(seed=1), ids(rows=5, seed=2))  # a shape that is first seen frozen
    both(model, sharded, lambda m: m.requires_grad_(True))
    steps(model, sharded, ids(seed=3), ids(rows=5, seed=4), ids(rows=3, seed=5))
    for name, layout in layouts.items():  # R and I hold the same
        assert sharded.plan.layouts[name].to_torch() == layout.to_torch(), name
    programs = len(sharded.programs)
    both(model, sharded, only_the_head)
    both(model, sharded, lambda m: m.zero_grad())
    steps(model, sharded, ids(seed=6))
    assert len(sharded.programs) == programs, "a state that was seen is compiled for again"


@case
def frozen_from_the_beginning(mesh: autoshard.Mesh) -> None:
    def make() -> nn.Module:
        net = Net(tied=False)
        only_the_head(net)
        return net

    model, sharded = pair(mesh, make, ids())
    steps(model, sharded, ids())
    both(model, sharded, lambda m: m.requires_grad_(True))
    steps(model, sharded, ids(seed=1), ids(rows=3))


@case
def all_frozen_records_nothing(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids())
    sharded.requires_grad_(False)
    loss, logits = sharded(ids())
    assert not loss.requires_grad
    assert type(logits) is torch.Tensor  # nothing is recorded, so it is gathered
    assert not sharded.plan.training
    close(loss, model(ids())[0])


@case
def frozen_between_forward_and_backward(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids())
    for module in (model, sharded):
        loss = full(module(ids())[0])
        dict(module.named_parameters())["layers.0.up.weight"].requires_grad_(False)
        loss.backward()
    same_gradients(sharded, model)


# --- modes ---


@case
def modes_of_parts(mesh: autoshard.Mesh) -> None:
    """Dropout in half of the layers, a batch norm that keeps its statistics."""
    model, sharded = pair(mesh, lambda: Net(p=0.5), ids())
    steps(model, sharded, ids())
    both(model, sharded, lambda m: m.layers[0].eval())
    steps(model, sharded, ids(seed=1))
    both(model, sharded, lambda m: [x.eval() for x in m.modules() if isinstance(x, nn.BatchNorm1d)])
    steps(model, sharded, ids(seed=2))
    both(model, sharded, lambda m: m.layers[1].drop.eval())
    steps(model, sharded, ids(seed=3))
    both(model, sharded, lambda m: m.eval())
    steps(model, sharded, ids(seed=4))
    both(model, sharded, lambda m: m.train())
    steps(model, sharded, ids(seed=5))


class Stays(nn.Module):
    """As backbones do whose batch norms stay in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn, self.lin = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.bn.eval()
        return self

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.lin(F.dropout(self.bn(self.stem(x)).relu(), 0.3, self.training)).square().mean(),)


@case
def a_train_of_the_models_own(mesh: autoshard.Mesh) -> None:
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, sharded = pair(mesh, Stays, x)
    steps(model, sharded, x)
    both(model, sharded, lambda m: m.eval())
    both(model, sharded, lambda m: m.train())
    steps(model, sharded, x, seed=1)
    assert not sharded.bn.training


@case
def an_eval_forward_then_train_then_backward(mesh: autoshard.Mesh) -> None:
    """The mode of the forward counts, in whichever the module is when the backward runs."""
    model, sharded = pair(mesh, lambda: Net(p=0.5), ids(), train=False)
    for module in (model, sharded):
        loss = full(module(ids())[0])
        module.train()
        loss.backward()
    same_gradients(sharded, model)


# --- gradients that are recorded, or not ---


@case
def an_eval_model_has_gradients(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids(), train=False)
    assert not sharded.plan.training
    with torch.no_grad():
        logits = sharded(ids())[1]
        assert type(logits) is torch.Tensor
        close(logits, model(ids())[1])
    assert len(sharded.programs) == 1
    steps(model, sharded, ids())
    assert sharded.plan.training
    assert len(sharded.programs) == 2


@case
def training_false_records_nothing(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids(), training=False)
    loss, logits = sharded(ids())
    assert not loss.requires_grad
    assert not logits.requires_grad
    close(loss, model(ids())[0])
    assert len(sharded.programs) == 1
    with refused("does not require grad", RuntimeError):
        loss.backward()


class Kinds(nn.Module):
    """Outputs of all kinds: complex, detached, of frozen weights, of inputs alone, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = self.a(x), self.b(x)
        return torch.complex(a, b), torch.fft.fft(a), a.detach() * 2, b, x * 2, a.argmax(-1), a.square().mean()


@case
def outputs_require_what_eagers_do(mesh: autoshard.Mesh) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, sharded = pair(mesh, Kinds, x)
    for train in (True, False):
        outputs = [m.train(train)(x) for m in (model, sharded)]
        for theirs, ours in zip(*outputs, strict=True):
            assert ours.requires_grad == theirs.requires_grad
            close(ours, theirs)
        both(model, sharded, lambda m: m.zero_grad())
        for out in outputs:
            sum(full(y).abs().square().sum() for y in out[:2]).backward()  # type: ignore[union-attr]
        same_gradients(sharded, model)


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 12), nn.Linear(12, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        y = self.norm(self.b(torch.tanh(self.a(x))))
        return (F.cross_entropy(y, torch.arange(4) % 3) + y.softmax(-1).pow(3).sum(),)


@case
def gradients_of_gradients(mesh: autoshard.Mesh) -> None:
    """A penalty on the gradients of inputs and of parameters, in train and in eval mode."""
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rows = {"x": autoshard.Shard(0)}  # parameters enter together; and cut ones are gathered together, and once more
    cut = {"*.weight": autoshard.Shard(0), **rows}
    for hints in ({}, {"a": "colwise", "b": "rowwise"}, rows, cut):
        model, sharded = pair(mesh, Smooth, x, hints=hints)
        for train in (True, False):
            for module in (model, sharded):
                module.train(train).zero_grad()
                own = list(module.parameters())
                first = torch.autograd.grad(full(module(x)[0]), [x, *own], create_graph=True)
                (sum(full(g.square().sum()) for g in first)).backward()  # type: ignore[union-attr]
            same_gradients(sharded, model, 1e-8)


class Counts(nn.Module):
    """Writes a buffer that its output was computed from, as models do that count calls."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 9)
        self.register_buffer("scale", torch.ones(9))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        y = self.lin(x + torch.randn_like(x)) * self.scale.clone()
        self.scale.mul_(2)
        return (F.dropout(y, 0.3).square().mean(),)


@case
def draws_and_buffers_are_those_of_the_forward(mesh: autoshard.Mesh) -> None:
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, sharded = pair(mesh, Counts, x, train=False)
    for module in (model, sharded):
        torch.manual_seed(1)
        losses = [full(module(x)[0]), full(module(-x)[0])]
        torch.rand(7)
        state = torch.get_rng_state()
        sum(losses).backward()  # type: ignore[union-attr]
        assert torch.equal(torch.get_rng_state(), state)
    close(sharded.tensor("scale"), torch.full((9,), 4.0, dtype=torch.float64))
    same_gradients(sharded, model)


@case
def a_buffer_written_before_the_backward(mesh: autoshard.Mesh) -> None:
    """Eager raises; programs that hold copies give the forward's gradients."""
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 9)
            self.register_buffer("scale", torch.ones(9))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return ((self.lin(x) * self.scale).square().mean(),)

    model, sharded = pair(mesh, Scales, x)
    full(model(x)[0]).backward()
    loss = full(sharded(x)[0])
    sharded.scale.mul_(3)
    if isinstance(next(sharded.parameters()), DTensor):
        with refused("modified by an inplace operation", RuntimeError):
            loss.backward()
    else:
        loss.backward()
        same_gradients(sharded, model)


class Moves(nn.Module):
    """Writes into its input, and returns what that was."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 9)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before, y = x.clone(), self.lin(x.clone())
        x -= x.mean(0)
        return (y * self.lin(x)).square().mean(), before


@case
def an_input_written_in_the_forward(mesh: autoshard.Mesh) -> None:
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, sharded = pair(mesh, Moves, x.clone())
    given = [x.clone(), x.clone()]
    for module, mine in zip((model, sharded), given, strict=True):
        loss, before = module(mine)
        assert torch.equal(full(before), x)
        full(loss).backward()
    close(given[1], given[0])
    same_gradients(sharded, model)


@case
def checkpointed(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, lambda: Net(p=0.2), ids())
    for reentrant in (False, True):
        both(model, sharded, lambda m: m.zero_grad())
        for module in (model, sharded):
            torch.manual_seed(3)
            ones = torch.ones((), dtype=torch.float64, requires_grad=True)

            def loss(scale: torch.Tensor, module: Any = module) -> torch.Tensor:
                return full(module(ids())[0]) * scale

            checkpoint(loss, ones, use_reentrant=reentrant).backward()
        same_gradients(sharded, model)
        same_state(sharded, model)
    both(model, sharded, lambda m: m.zero_grad())
    for module in (model, sharded):
        torch.manual_seed(3)
        full(checkpoint(module, ids(), use_reentrant=False)[0]).backward()
    same_gradients(sharded, model)


@case
def inference_mode_first(mesh: autoshard.Mesh) -> None:
    """What is compiled and adopted inside inference_mode can be trained afterwards."""
    torch.manual_seed(0)
    model = Net().double()
    sharded = autoshard.compile(copy.deepcopy(model), mesh)
    with torch.inference_mode():
        close(sharded.eval()(ids())[1], model.eval()(ids())[1])
        assert sharded(ids())[0].is_inference()
    both(model, sharded, lambda m: m.train())
    steps(model, sharded, ids(), ids(rows=3))


# --- autocast ---


class Mixed(nn.Module):
    """Linear layers of which one is used twice, a norm, attention, a loss, and parts that autocast casts inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.twice, self.down = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.norm, self.gru = nn.LayerNorm(16), nn.GRU(8, 8)
        self.mix = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.twice(self.norm(self.twice(F.gelu(self.up(x)))))
        h = F.scaled_dot_product_attention(h, h, h)
        y = torch.einsum("bsk,kn->bsn", self.down(h), self.mix)
        y = y + self.gru(x)[0]
        with torch.autocast("cpu", enabled=False):
            y = y + x.to(self.mix.dtype) @ self.mix
        return F.cross_entropy(y.flatten(0, 1), torch.arange(12) % 8), self.down(h)


def mixed_inputs(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 3, 8, generator=torch.Generator().manual_seed(2))


def mixed_run(module: Any, x: torch.Tensor, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Loss, logits and gradients under autocast to ``dtype``; the backward outside, as the manual says."""
    module.zero_grad()
    with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype):
        loss, logits = module(x)
    full(loss).backward()
    if isinstance(module, autoshard.ShardedModule):
        gradients = module.full_gradients()
    else:
        gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    return [full(loss).detach(), full(logits).detach(), *(gradients[n] for n in sorted(gradients))]


def error(given: torch.Tensor, truth: torch.Tensor) -> float:
    return float((given.double() - truth.double()).norm() / truth.double().norm())


def autocast_pair(mesh: autoshard.Mesh, inside: bool = False, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """The model, the same in float64, and the same sharded, compiled inside of autocast or outside."""
    torch.manual_seed(0)
    model = Mixed()
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        sharded = autoshard.compile(copy.deepcopy(model), mesh, (mixed_inputs(),), **options)
    return model, copy.deepcopy(model).double(), sharded


@case
def autocast_around_the_call(mesh: autoshard.Mesh) -> None:
    """Cut sums round in another order: no further from float64 than 1.5 times the error of eager autocast, and alike."""
    for inside in (False, True):
        model, exact, sharded = autocast_pair(mesh, inside, hints={"up": "colwise", "x": autoshard.Shard(0)})
        assert sharded.collectives
        truths: dict[int, list[torch.Tensor]] = {}
        for rows, dtype in ((4, torch.bfloat16), (4, None), (4, torch.float16), (4, torch.bfloat16)):
            x = mixed_inputs(rows)
            truth = truths.setdefault(rows, mixed_run(exact, x.double(), None))
            for ours, theirs, true in zip(mixed_run(sharded, x, dtype), mixed_run(model, x, dtype), truth, strict=True):
                assert ours.dtype == theirs.dtype
                worst = max(1.5 * error(theirs, true), 2e-6 if dtype is None else 2e-3)
                assert error(ours, true) <= worst, (dtype, error(ours, true), error(theirs, true))
        assert len(sharded.programs) == 3
        assert all(p.dtype == torch.float32 == p.grad.dtype for p in sharded.parameters())


@case
def autocast_on_whole_tensors_is_eagers_bit_for_bit(mesh: autoshard.Mesh) -> None:
    """Nothing is cut, so nothing may differ: the casts are where eager has them, and kept where eager keeps them."""
    whole = {"*": "replicate", "x": autoshard.Replicate()}
    model, _, sharded = autocast_pair(autoshard.Mesh(dict(zip(mesh.axes, mesh.shape, strict=True))), hints=whole)
    x = mixed_inputs()
    for cache in (True, False):
        for module in (model, sharded):
            module.zero_grad()
        results = []
        for module in (model, sharded):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                loss, logits = module(x)
            full(loss).backward()
            results.append((full(loss), full(logits)))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)
        gradients = sharded.full_gradients()
        for name, p in model.named_parameters():
            assert torch.equal(gradients[name], p.grad), name


@case
def autocast_in_evaluation(mesh: autoshard.Mesh) -> None:
    model, _, sharded = autocast_pair(mesh)
    both(model, sharded, lambda m: m.eval())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = sharded(mixed_inputs())[1], model(mixed_inputs())[1]
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert error(ours, theirs) < 0.02


# --- parameters and buffers replaced, moved, converted ---


@case
def converted_to_another_dtype(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids())
    steps(model, sharded, ids())
    both(model, sharded, lambda m: m.float())
    for p in sharded.parameters():
        assert p.dtype == torch.float32
    for module in (model, sharded):
        module.zero_grad()
        full(module(ids())[0]).backward()
    close(sharded(ids())[0], model(ids())[0], rtol=1e-5)
    same_gradients(sharded, model, 1e-4)
    both(model, sharded, lambda m: m.to(torch.float64))
    both(model, sharded, lambda m: m.zero_grad())
    assert sharded(ids())[0].dtype == torch.float64
    both(model, sharded, lambda m: m.bfloat16().eval())
    with torch.no_grad():
        close(sharded(ids())[1], model(ids())[1], rtol=0.1)


@case
def buffers_replaced_by_assignment(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids())

    def replace(module: Any) -> None:
        module.bn.running_mean = torch.full((8,), 0.5, dtype=torch.float64)
        module.bn.running_var = torch.full((8,), 2.0, dtype=torch.float64)
        module.bn.eval()

    both(model, sharded, replace)
    steps(model, sharded, ids())


@case
def parameters_replaced_by_assignment(mesh: autoshard.Mesh) -> None:
    """In one process followed; under torch.distributed a plain tensor is refused, as it has no layout."""
    model, sharded = pair(mesh, lambda: Net(tied=False), ids())
    new = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    both(model, sharded, lambda m: setattr(m.head, "weight", nn.Parameter(new.clone())))
    if isinstance(next(p for n, p in sharded.named_parameters() if n == "emb.weight"), DTensor):
        with refused(
            "parameter 'head.weight' was replaced by one in layout of a plain tensor; it is kept as a DTensor in"
        ):
            sharded(ids())
        return
    steps(model, sharded, ids())
    sharded.head.weight = nn.Parameter(torch.zeros(13, 8, dtype=torch.float64))
    with refused(r"parameter 'head.weight' has shape \[13, 8\]; the module was compiled with \[12, 8\]"):
        sharded(ids())


@case
def tied_and_untied_after_compile(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(
        mesh, lambda: Net(tied=False), ids(), hints={"emb.weight": "replicate", "head.weight": "replicate"}
    )
    both(model, sharded, lambda m: setattr(m.head, "weight", m.emb.weight))
    for module in (model, sharded):
        full(module(ids())[0]).backward()
    close(full(sharded.emb.weight.grad), model.emb.weight.grad)  # type: ignore[union-attr]
    model, sharded = pair(mesh, Net, ids())
    sharded.head.weight = nn.Parameter(sharded.head.weight.detach().clone())
    with refused("'emb.weight' and 'head.weight' were one tensor when the module was compiled, and are no longer"):
        sharded(ids())


@case
def weights_tied_in_other_layouts(mesh: autoshard.Mesh) -> None:
    cut = {"emb.weight": autoshard.Shard(0), "head.weight": autoshard.Shard(1)}
    model, sharded = pair(mesh, lambda: Net(tied=False), ids(), hints=cut)
    both(model, sharded, lambda m: setattr(m.head, "weight", m.emb.weight))
    if isinstance(sharded.emb.weight, DTensor):
        with refused("parameter 'head.weight' was replaced by one in layout"):
            sharded(ids())
        return
    steps(model, sharded, ids())


@case
def what_is_built_otherwise_is_refused(mesh: autoshard.Mesh) -> None:
    """Modules and attributes are those of the compiled model: every change is refused where it is made."""
    _, sharded = pair(mesh, lambda: Net(p=0.1), ids())
    before = sharded(ids())[0]
    with refused("module 'head' is put into the sharded module"):
        sharded.head = nn.Identity()
    with refused("module 'up' is put into the sharded module"):
        sharded.layers[0].up = nn.Linear(8, 16)
    with refused("module '2' is put into the sharded module"):
        sharded.layers.append(Block(8, 0.0))
    with refused("is taken out of the sharded module"):
        del sharded.layers[1]
    with refused("attribute 'p' of a Dropout is set"):
        sharded.layers[0].drop.p = 0.5
    with refused("attribute 'forward' of a Linear is set"):
        sharded.head.forward = lambda x: x
    with refused("'bias' of a Linear is removed"):
        sharded.head.bias = None
    with refused("'weight' of a Linear is deleted"):
        nn.utils.parametrize.register_parametrization(sharded.layers[0].up, "weight", nn.Identity())
    with refused("a hook is put on a Linear inside the sharded module"):
        sharded.layers[0].down.register_forward_hook(lambda *args: None)
    with refused("a LayerNorm inside a sharded module cannot be called alone"):
        sharded.layers[0].norm(torch.ones(8))
    assert sharded.layers[0].drop.p == 0.1
    torch.manual_seed(0)
    assert sharded(ids())[0].dtype == before.dtype
    del sharded.layers[0].down._parameters["bias"]  # behind its back
    with refused("'layers.0.down.bias' is no longer among the sharded module's tensors"):
        sharded(ids())


@case
def hooks_of_the_whole_and_of_tensors(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids())
    seen: list[int] = []
    for number, module in enumerate((model, sharded)):
        module.register_forward_pre_hook(lambda m, args: (args[0].flip(0),))
        module.register_forward_hook(lambda m, args, out, n=number: (seen.append(n), (out[0] * 2, out[1]))[1])
        module.head.bias.register_hook(lambda g: g * 3)
    steps(model, sharded, ids())
    assert seen == [0, 1]
    hook = nn.modules.module.register_module_forward_hook(lambda m, args, out: None)
    with refused("a global module hook is registered"):
        sharded(ids())
    hook.remove()


# --- torch's own state ---


class Makes(nn.Module):
    """Makes tensors of the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + torch.ones(4) / 3 + torch.tensor(0.1)


@case
def the_default_dtype(mesh: autoshard.Mesh) -> None:
    x = torch.ones(2, 4, dtype=torch.float32)
    torch.manual_seed(0)
    model = Makes().float()
    sharded = autoshard.compile(copy.deepcopy(model), mesh, (x,))
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            with torch.no_grad():
                close(sharded(x), model(x), rtol=1e-6)
    finally:
        torch.set_default_dtype(before)


@case
def deterministic_algorithms(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids())
    torch.use_deterministic_algorithms(True)
    try:
        steps(model, sharded, ids())
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(sharded.programs) == 2


@case
def attention_kernels_and_matmul_precision(mesh: autoshard.Mesh) -> None:
    """Read by the kernels, which run in the rank programs: the same kernel as eager's, to the last bit."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, self.lin(x))

    torch.manual_seed(0)
    model, x = Attends().bfloat16(), torch.randn(2, 2, 64, 64).bfloat16()
    replicated = {"*": "replicate", "x": autoshard.Replicate()}
    sharded = autoshard.compile(copy.deepcopy(model), {"tp": mesh.size}, (x,), hints=replicated)
    results = []
    for backend in (nn.attention.SDPBackend.MATH, nn.attention.SDPBackend.FLASH_ATTENTION):
        with nn.attention.sdpa_kernel(backend), torch.no_grad():
            results.append(sharded(x))
            assert torch.equal(results[-1], model(x))
    assert not torch.equal(*results), "the kernels do not differ on this machine: the case shows nothing"
    before = torch.get_float32_matmul_precision()
    both(model, sharded, lambda m: m.float())
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            with torch.no_grad():
                assert torch.equal(sharded(x.float()), model(x.float()))
    finally:
        torch.set_float32_matmul_precision(before)


@case
def transforms_are_refused(mesh: autoshard.Mesh) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, sharded = pair(mesh, Smooth, x)
    for transform in (
        lambda: torch.func.vmap(lambda y: sharded(y)[0])(x.expand(3, 4, 6)),
        lambda: torch.func.grad(lambda y: full(sharded(y)[0]))(x),
    ):
        with refused("inside a torch.func transform"):
            transform()
    with torch.autograd.forward_ad.dual_level(), refused("called with dual tensors"):
        sharded(torch.autograd.forward_ad.make_dual(x, x))
    sharded(x)


@case
def another_default_device_around_the_first_call(mesh: autoshard.Mesh) -> None:
    torch.manual_seed(0)
    model = Net().double()
    sharded = autoshard.compile(copy.deepcopy(model), mesh)
    x = ids()
    with torch.device("meta"):
        with refused("the default device is meta"):
            sharded(x)
        sharded = autoshard.compile(copy.deepcopy(model), mesh, (x,))
    steps(model, sharded, ids())

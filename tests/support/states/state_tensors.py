"""Cases of states: parameters and buffers replaced, moved and converted; modules as they were built."""

from __future__ import annotations

import copy
import unittest
import warnings
from typing import Any

import pytest
import torch
from state_harness import (
    Block,
    Net,
    Of,
    both,
    case,
    close,
    full,
    ids,
    one_graph,
    pair,
    refused,
    rows,
    same_gradients,
    steps,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

import autoshard
from autoshard.errors import PlanError
from autoshard.module.gathered import changed_modules, gathered_model

# --- parameters and buffers replaced, moved, converted ---


@case
def converted_to_another_dtype(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids())
    steps(model, sharded, ids())
    seen: list[torch.dtype] = []
    both(model, sharded, lambda m: m.layers[0].up.weight.register_hook(lambda g: g * 2))
    both(model, sharded, lambda m: m.head.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype)))
    both(model, sharded, lambda m: m.float())
    for p in sharded.parameters():
        assert p.dtype == torch.float32
    for module in (model, sharded):
        module.zero_grad()
        full(module(ids())[0]).backward()
    close(sharded(ids())[0], model(ids())[0], rtol=1e-5)
    same_gradients(sharded, model, 1e-4)
    assert seen == [torch.float32] * 2
    both(model, sharded, lambda m: m.to(torch.float64))
    both(model, sharded, lambda m: m.zero_grad())
    assert sharded(ids())[0].dtype == torch.float64
    both(model, sharded, lambda m: m.bfloat16().eval())
    with torch.no_grad():
        close(sharded(ids())[1], model(ids())[1], rtol=0.1)
    model, sharded = pair(mesh, lambda: Of(lambda lin, x: lin(x.to(lin.weight.dtype)).square().mean()), rows())
    for dtype in (torch.float64, torch.float32, torch.float64):  # which the forward asks for
        both(model, sharded, lambda m, dtype=dtype: m.to(dtype))
        close(sharded(rows()), model(rows()), rtol=1e-5)


@case
def an_optimizer_made_before(mesh: autoshard.Mesh) -> None:
    """Of the model's own parameters; the model itself may be trained as ever, with gradients or by a closure."""
    model = Net().double()
    given = copy.deepcopy(model)
    optimizer = torch.optim.SGD(given.parameters(), 0.1)
    sharded = autoshard.compile(given, mesh)
    full(sharded(ids())[0]).backward()
    with refused("this optimizer has the parameters of a model from before", autoshard.AutoshardError):
        optimizer.step()
    optimizer.step(lambda: 1.0)
    for m, own in ((model, torch.optim.SGD(model.parameters(), 0.1)), (given, optimizer)):
        m(ids())[0].backward()
        own.step()
    assert all(torch.equal(x, given.state_dict()[n]) for n, x in model.state_dict().items())


@case
def models_that_share_parameters(mesh: autoshard.Mesh) -> None:
    """Each sharded module has its own, with a warning, until they are tied again; without one for a model compiled twice."""
    model, other = pair(mesh, Net, ids())
    given, shared = Net().double(), Net().double()
    given.load_state_dict(model.state_dict())
    shared.load_state_dict(model.state_dict())
    shared.emb, shared.head.weight = given.emb, given.head.weight
    with unittest.TestCase().assertNoLogs("autoshard", "WARNING"):
        first, other = (autoshard.compile(given, mesh, (ids(),)) for _ in range(2))
    with unittest.TestCase().assertLogs("autoshard", "WARNING") as told:
        second = autoshard.compile(shared, mesh, (ids(),))
    assert other.emb.weight is not first.emb.weight
    assert "Net shares 'emb.weight' (and 0 more) with another compiled model" in told.output[0]
    second.emb.weight = second.head.weight = first.emb.weight
    for module in (first, second):
        full(module(ids())[0]).backward()
        full(model(ids())[0]).backward()
    close(full(first.emb.weight.grad), model.emb.weight.grad)  # type: ignore[union-attr]


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
        with refused("'head.weight' was replaced by a tensor in layout of a plain tensor; it is kept as a DTensor in"):
            sharded(ids())
        return
    steps(model, sharded, ids())
    sharded.head.weight = nn.Parameter(torch.zeros(13, 8, dtype=torch.float64))
    with refused(r"parameter 'head.weight' has shape \[13, 8\], but the module was compiled with \[12, 8\]"):
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
    with refused("'emb.weight' and 'head.weight' were one tensor when the module was compiled, and no longer are"):
        sharded(ids())


@case
def weights_tied_in_other_layouts(mesh: autoshard.Mesh) -> None:
    cut = {"emb.weight": autoshard.Shard(0), "head.weight": autoshard.Shard(1)}
    model, sharded = pair(mesh, lambda: Net(tied=False), ids(), hints=cut)
    both(model, sharded, lambda m: setattr(m.head, "weight", m.emb.weight))
    if isinstance(sharded.emb.weight, DTensor):
        with refused("'head.weight' was replaced by a tensor in layout"):
            sharded(ids())
        return
    steps(model, sharded, ids())


@case
def what_is_built_otherwise_is_refused(mesh: autoshard.Mesh) -> None:
    """Modules and methods are those of the compiled model: every change is refused where it is made."""
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
    with refused("attribute 'inplace' of a Dropout is set"):
        sharded.layers[0].drop.inplace = torch.ones(())
    with refused("attribute 'forward' of a Linear is set"):
        sharded.head.forward = lambda x: x
    with refused("'bias' of a Linear is removed"):
        sharded.head.bias = None
    with refused("'weight' of a Linear is deleted"):
        nn.utils.parametrize.register_parametrization(sharded.layers[0].up, "weight", nn.Identity())
    torch.manual_seed(0)
    assert sharded(ids())[0].dtype == before.dtype
    del sharded.layers[0].down._parameters["bias"]  # behind its back
    with refused("'layers.0.down.bias' is missing from the sharded module"):
        sharded(ids())
    for put, remove in REPARAMETRIZED:
        sharded: Any = autoshard.compile(
            nn.Sequential(put(nn.Linear(6, 12).double())), mesh, (rows(width=6),), micro_batches=1, stages=None
        )
        before = {n: full(p).clone() for n, p in sharded.named_parameters()}
        with refused("is removed from a Linear, but its programs compute what"):
            remove(sharded[0])
        assert all(torch.equal(full(p), before[n]) for n, p in sharded.named_parameters())


class Adapted(nn.Module):
    """A frozen layer, and what is added to it."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.own = layer.requires_grad_(False), nn.Linear(8, width).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.own(x)


@case
def modules_put_inside(mesh: autoshard.Mesh) -> None:
    """As adapters are, before the first call or later; copies have full tensors; hooks may ask for gradients of inputs."""

    def put(model: Any) -> None:
        torch.manual_seed(3)
        model.layers[0].up = Adapted(model.layers[0].up, 16)

    def checkpointed(model: Any) -> None:
        def requires_grad(_: Any, __: Any, output: torch.Tensor) -> None:
            output.requires_grad_(True)

        model.handles = [model.layers[0].register_forward_hook(requires_grad)]

    for example in ((), (ids(),)):
        model, sharded = pair(mesh, lambda: Net(p=0.1), *example)
        if example:
            steps(model, sharded, ids())
        both(model, sharded, lambda m: setattr(m.layers[0].drop, "p", 0.7))
        old = torch.optim.SGD(sharded.parameters(), 0.1) if example else None
        put(model)
        with changed_modules(sharded) as inside:
            put(inside)
        if old is not None:
            old.zero_grad()
            with refused("this optimizer has the parameters of a model from before", autoshard.AutoshardError):
                old.step()
        with pytest.raises(PlanError, match="nothing is compiled yet"):
            sharded.state_dict()
        both(model, sharded, lambda m: (torch.manual_seed(2), m(ids())))
        assert "layers.0.up.own.weight" in dict(sharded.named_parameters())
        steps(model, sharded, ids())
        both(model, sharded, checkpointed)
        steps(model, sharded, ids())
        copied = gathered_model(sharded)
        torch.manual_seed(4)
        expected = model(ids())[0]
        torch.manual_seed(4)
        close(copied(ids())[0], expected)
        assert not any(isinstance(p, DTensor) for p in copied.parameters())


@case
def modules_called_alone(mesh: autoshard.Mesh) -> None:
    """On the tensors of the full model: outputs, gradients and steps are eager's, hooks are called, copies have their own."""
    seen: list[str] = []
    for before in (False, True):
        model, sharded = pair(mesh, lambda: Net(p=0.1), *(() if before else (ids(),)))
        if before:
            close(sharded.emb(ids()), model.emb(ids()))
            both(model, sharded, lambda m: (torch.manual_seed(2), m(ids())))
        steps(model, sharded, ids())
        seen.clear()
        both(model, sharded, lambda m: m.layers[0].register_forward_hook(lambda *_: seen.append("hook")))
        outputs = []
        for module in (model, sharded):
            module.zero_grad()
            torch.manual_seed(1)
            outputs.append(module.head(module.layers[0](module.emb(ids()))))
            full(outputs[-1]).square().mean().backward()
        close(outputs[1], outputs[0])
        same_gradients(sharded, model)
        assert seen == ["hook"] * 2
        copied = copy.deepcopy(sharded)
        kept = model.emb(ids()).detach()
        both(model, sharded, lambda m: torch.optim.SGD(m.parameters(), 0.1).step())
        close(sharded.emb(ids()), model.emb(ids()))
        close(copied.emb(ids()), kept)
        assert not torch.equal(full(sharded.emb(ids())), kept)
    sharded = autoshard.compile(Net().double(), mesh, hints={"emb.weight": "replicate"})
    with refused("'emb' is called alone, but what was asked of the full model"):
        sharded.emb(ids())
    sharded = autoshard.compile(Net().double(), mesh)
    sharded.emb(ids())
    with refused("'head' and 'emb' share tensors"):
        sharded.head(rows())


def _weight_norm(m: nn.Module) -> nn.Module:
    with warnings.catch_warnings():  # worlds of processes end without any
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(m)


REPARAMETRIZED: Any = (
    (lambda m: prune.l1_unstructured(m, "weight", 0.3), lambda m: prune.remove(m, "weight")),
    (_weight_norm, nn.utils.remove_weight_norm),
    (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
)


@case
def hooks_of_parts(mesh: autoshard.Mesh) -> None:
    """Those that were there when the model was compiled, and others since, compute until they are removed."""
    model, sharded = pair(mesh, Doubling, ids())
    steps(model, sharded, ids())
    of_both = [
        m.layers[0].down.register_forward_hook(lambda m, args, out: out + m.weight.sum()) for m in (model, sharded)
    ]
    steps(model, sharded, ids())
    programs = len(sharded.programs)
    first = [
        m.layers[0].down.register_forward_hook(lambda m, args, out: out * out, prepend=True) for m in (model, sharded)
    ]
    before = [m.head.register_forward_pre_hook(lambda m, args: (args[0] * 3,)) for m in (model, sharded)]
    steps(model, sharded, ids())
    steps(*copy.deepcopy((model, sharded)), ids())
    for handle in (*first, *before):
        handle.remove()
    steps(model, sharded, ids())
    assert len(sharded.programs) == programs + 1
    for handle in of_both:
        handle.remove()
    steps(model, sharded, ids())
    with refused("a backward hook is put on a Linear inside a sharded module"):
        sharded.head.register_full_backward_hook(lambda *args: None)


class Doubling(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].down.register_forward_hook(lambda m, args, out: out * 2)


@case
def hooks_that_were_there_are_removed(mesh: autoshard.Mesh) -> None:
    model = Net().double()
    other = copy.deepcopy(model)
    handles = [m.head.register_forward_hook(lambda m, args, out: out * 2) for m in (model, other)]
    sharded = autoshard.compile(other, mesh, (ids(),))
    steps(model, sharded, ids())
    kept = other.head.register_forward_hook(lambda m, args, out: out * 5)  # on what was left
    for handle in handles:
        handle.remove()
    steps(model, sharded, ids())
    kept.remove()


def noisy(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
    """As neftune's."""
    if module.training:
        out = out + torch.zeros_like(out).uniform_(-module.noise, module.noise)
    return out


@case
def noise_by_a_hook(mesh: autoshard.Mesh) -> None:
    """A hook that reads what was set on its module since, and does nothing in evaluation."""
    model, sharded = pair(mesh, Net, ids())
    handles = [m.emb.register_forward_hook(noisy) for m in (model, sharded)]
    for noise in (0.5, 2.0):
        both(model, sharded, lambda m, n=noise: setattr(m.emb, "noise", n))
        steps(model, sharded, ids())
    both(model, sharded, lambda m: m.eval())
    steps(model, sharded, ids())
    for handle in handles:
        handle.remove()
    both(model, sharded, lambda m: m.train())
    steps(model, sharded, ids())


@case
@one_graph
def hooks_that_observe_are_refused(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, Net, ids())
    seen: list[Any] = []
    observers = (
        lambda m, args, out: seen.append(out),
        lambda m, args, out: seen.append(1),
        lambda m, args, out: out,
    )
    for observer in observers:
        handle = sharded.head.register_forward_hook(observer)
        with refused("of module 'head' inside a sharded module changes nothing: it only observes values"):
            sharded(ids())
        handle.remove()
    steps(model, sharded, ids())


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


class Partly(nn.Module):
    """A table with a sparse gradient, a layer, one whose weight is read without a gradient, and one that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(12, 8, sparse=True), nn.Linear(8, 8)
        self.fixed, self.left = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        return ((self.last(self.table(ids)) * self.fixed.weight.detach().sum()).square().mean(),)


@case
def hooks_of_parameters_without_a_gradient(mesh: autoshard.Mesh) -> None:
    """They are not called, nor those of a sparse gradient twice."""
    model, sharded = pair(mesh, Partly, ids())
    heard: tuple[list[str], list[str]] = [], []
    for module, calls in zip((model, sharded), heard, strict=True):
        for name, p in module.named_parameters():
            p.register_hook(lambda g, name=name, calls=calls: (calls.append(f"{name} before"), g * 2)[1])
            p.register_post_accumulate_grad_hook(lambda p, name=name, calls=calls: calls.append(f"{name} after"))
        for _ in range(2):
            full(module(ids())[0]).backward()
    assert sorted(heard[1]) == sorted(heard[0])
    given = sharded.full_gradients()
    for name, p in model.named_parameters():
        assert (name in given) == (p.grad is not None), name
        if p.grad is not None:
            close(given[name].to_dense(), p.grad.to_dense(), name)


class Masked(nn.Module):
    """Tensors that are neither parameters nor buffers, and that nobody writes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.3)
        self.mask, self.others = torch.arange(8.0), [torch.arange(8.0) / 3]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.drop(self.b((self.a(x) * self.mask).tanh()) * self.others[0]).square().mean(),)


@case
def a_tensor_in_a_plain_attribute(mesh: autoshard.Mesh) -> None:
    """Known to every program: of new shapes, of the other mode, with and without gradients."""
    model, sharded = pair(mesh, Masked, rows())
    steps(model, sharded, rows(), rows(6))
    both(model, sharded, lambda m: m.eval())
    steps(model, sharded, rows(), rows(2))
    with torch.no_grad():
        close(sharded(rows(2))[0], model(rows(2))[0])
    assert len(sharded.programs) == 5

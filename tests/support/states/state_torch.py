"""Cases of states: autocast, and torch's own modes."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.nn.functional as F
from state_harness import Net, Smooth, both, case, close, full, ids, one_graph, pair, refused, rows, steps
from torch import nn
from torch.nn.utils import parametrize

import autoshard

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
        for n, dtype in ((4, torch.bfloat16), (4, None), (4, torch.float16), (4, torch.bfloat16)):
            x = mixed_inputs(n)
            truth = truths.setdefault(n, mixed_run(exact, x.double(), None))
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


# --- torch's own state ---


class Makes(nn.Module):
    """Makes tensors of the default dtype, which it asks for, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        asked = torch.arange(4).to(torch.get_default_dtype()) / 3
        return self.lin(x) + torch.ones(4) / 3 + torch.tensor(0.1) + asked


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


class OfItsOwn(nn.Module):
    """Makes tensors under a default dtype that it sets; ``whole``: of integers."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.lin, self.whole = nn.Linear(8, 8), whole

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float16)
        try:
            table = torch.arange(8) / 3 if self.whole else torch.tensor(0.1) * torch.full((8,), 0.1)
            return ((self.lin(x) + table).square().mean(),)
        finally:
            torch.set_default_dtype(before)


@case
@one_graph
def another_default_dtype_inside(mesh: autoshard.Mesh) -> None:
    steps(*pair(mesh, lambda: OfItsOwn(False), rows()), rows())
    with refused("on integers under a default dtype that it sets itself"):
        pair(mesh, lambda: OfItsOwn(True), rows())


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
def backwards_under_vmap_are_refused(mesh: autoshard.Mesh) -> None:
    """Before anything is sent: what comes one gradient at a time, or twice through the graph, is right afterwards."""
    by = torch.autograd.functional
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layers = nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)
    model, sharded = pair(mesh, lambda: nn.Sequential(*layers), x, micro_batches=1, stages=None)
    own = x.clone().requires_grad_()
    y, several = sharded(own), torch.stack([torch.ones_like(x), x])
    for ask in (
        lambda: by.jacobian(sharded, x, vectorize=True),
        lambda: by.jacobian(lambda x: full(sharded(x)), x, vectorize=True),
        lambda: by.hessian(lambda x: full(sharded(x)).sum(), x, vectorize=True),
        lambda: torch.autograd.grad(y, own, several, is_grads_batched=True, retain_graph=True),
        lambda: torch.func.vmap(lambda g: torch.autograd.grad(y, own, g, retain_graph=True))(several),
    ):
        with refused("runs under vmap .*Leave vectorize out"):
            ask()
    for ask in (
        lambda m: by.jacobian(m, x),
        lambda m: by.jvp(m, x, x)[1],
        lambda m: by.hessian(lambda x: full(m(x)).square().sum(), x),
        lambda m: torch.autograd.grad(m(x), [*m.parameters()], several[1])[0],
    ):
        close(full(ask(sharded)), ask(model))


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


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Parametrized(nn.Module):
    """A weight that is computed, and read twice."""

    def __init__(self, spectral: bool) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        if spectral:
            nn.utils.parametrizations.spectral_norm(self.lin)
        else:
            parametrize.register_parametrization(self.lin, "weight", Doubled())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.out(torch.tanh(self.lin(x)) + self.lin(x)).square().mean(),)


@case
def cached_parametrizations(mesh: autoshard.Mesh) -> None:
    """``parametrize.cached()`` around a step, around the first call, around several; with what a call updates."""
    for spectral in (False, True):
        torch.manual_seed(0)
        model = Parametrized(spectral).double()
        with parametrize.cached():
            sharded = autoshard.compile(copy.deepcopy(model), mesh, (rows(),))
            steps(model, sharded, rows())
        for n in (4, 6):
            with parametrize.cached():
                steps(model, sharded, rows(n))
            steps(model, sharded, rows(n))
        both(model, sharded, nn.Module.eval)
        with parametrize.cached(), torch.no_grad():
            for n in (4, 6, 5):
                close(sharded(rows(n))[0], model(rows(n))[0])
        both(model, sharded, nn.Module.train)
        with parametrize.cached():
            sharded(rows())
            if spectral:
                with refused(r"called twice in one torch.nn.utils.parametrize.cached\(\).*Use one cached\(\) per call"):
                    sharded(rows())

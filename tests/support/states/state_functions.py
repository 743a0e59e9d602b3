"""Cases of states: functions that a trace would lose something of, and results that nobody reads."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from state_harness import Block, Of, case, close, full, once, one_graph, pair, refused, rows, same_gradients, steps
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import autoshard


class Steps(torch.autograd.Function):
    """A straight-through estimator with a window, bound to a name at import, as many are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.sign() * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad * (ctx.saved_tensors[0].abs() < 1) * ctx.scale * 3, None


class Cubes(torch.autograd.Function):
    """Two arguments, two results, and a context that is set up apart."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x**3, x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cube: torch.Tensor, product: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return 3 * x**2 * cube + product * w, (product * x * 5).sum(0)


step, cube = Steps.apply, Cubes.apply


@case
def an_autograd_function_of_ones_own(mesh: autoshard.Mesh) -> None:
    """Bound to a name, called through its class, made inside a function, and differentiated twice."""

    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * 7

    for function in (
        lambda lin, x: step(lin(x), 0.5),
        lambda lin, x: Steps.apply(lin(x), 2.0),
        lambda lin, x: torch.cat(cube(lin(x), lin.weight[0])),
        lambda lin, x: Local.apply(lin(x)),
    ):
        model, sharded = pair(mesh, lambda f=function: Of(f), rows(), hints={"lin": "colwise"})
        once(model, sharded, rows())
        assert any(choice.op == "autoshard.function.default" for choice in sharded.plan.choices.values())
    x = rows().requires_grad_()
    model, sharded = pair(mesh, lambda: Of(lambda lin, x: cube(lin(x), lin.weight[0])[0].sum()), x)
    for module in (model, sharded):
        (g,) = torch.autograd.grad(full(module(x)), x, create_graph=True)
        full(g).square().sum().backward()
    same_gradients(sharded, model)


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


@case
@one_graph
def an_autograd_function_that_draws_or_writes(mesh: autoshard.Mesh) -> None:
    for function, why in ((Draws, "it draws random numbers"), (Writes, "it writes to its arguments")):
        with refused(f"custom autograd.Function '{function.__name__}' .*: {why}"):
            pair(mesh, lambda f=function: Of(lambda lin, x: f.apply(lin(x))), rows())


class Flex(nn.Module):
    """Causal, with a learnt slope for every head, and fewer heads of keys than of queries."""

    def __init__(self, function: Any, masked: bool = True) -> None:
        super().__init__()
        self.q, self.kv, self.slopes = nn.Linear(8, 16), nn.Linear(8, 16), nn.Parameter(torch.randn(4))
        self.function, self.masked = function, masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)

        def score(s: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
            return s + (i - j) * 0.5 * self.slopes[h]

        n = x.shape[1]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cpu") if self.masked else None
        found: torch.Tensor = self.function(q, k, v, score_mod=score, block_mask=mask, enable_gqa=True)
        return found


class Attends(Flex):
    """The same by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4).repeat_interleave(2, 2)
        at = torch.arange(x.shape[1])
        scores = q @ k.mT / 2 + (at[:, None] - at) * 0.5 * self.slopes[:, None, None]
        if self.masked:
            scores = scores.masked_fill(at[:, None] < at, -torch.inf)
        return scores.softmax(-1) @ v


@case
def flex_attention_as_it_is_and_compiled(mesh: autoshard.Mesh) -> None:
    x = rows(10).unflatten(0, (2, 5))
    for function, masked in ((flex_attention, True), (torch.compile(flex_attention), True), (flex_attention, False)):
        torch.manual_seed(0)
        model = Attends(None, masked).double()
        flex = Flex(function, masked).double()
        flex.load_state_dict(model.state_dict())
        sharded = autoshard.compile(flex, mesh, (x,), hints={"q": "colwise"})
        once(model, sharded, x)


@case
def grouped_products_in_float32(mesh: autoshard.Mesh) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 16))

        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            y = F.grouped_mm(x, self.weight, offs=ends)
            return F.grouped_mm(y.unflatten(0, (3, 2)), self.weight.mT).square().sum()

    torch.manual_seed(0)
    x, ends = torch.randn(6, 8), torch.tensor([2, 5, 6], dtype=torch.int32)
    for dtype in (torch.float32, torch.float16):
        model = Experts().to(dtype)
        sharded = autoshard.compile(copy.deepcopy(model), mesh, (x.to(dtype), ends))
        for module in (model, sharded):
            full(module(x.to(dtype), ends)).backward()
        rtol = 1e-5 if dtype == torch.float32 else 1e-2
        close(sharded(x.to(dtype), ends), model(x.to(dtype), ends), rtol=rtol)
        same_gradients(sharded, model, rtol)


class Unread(nn.Module):
    """Draws whose results nobody reads, and a head that is trained elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.aux, self.bn, self.drop = Block(8, 0.3), nn.Linear(8, 3), nn.BatchNorm1d(8), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        F.dropout(x, 0.1)
        torch.rand(3), torch.randperm(5)
        self.drop(self.bn(self.aux(self.drop(x)) @ self.aux.weight))
        return (F.dropout(self.block(x), 0.2).square().mean(),)


class Closing(nn.Module):
    """Functions in attributes, lists and hooks, that close over the module, a part and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        part, scaled = self.b, self.scaled
        self.first = lambda x: torch.tanh(self.a(x))
        self.others = [lambda x: part(x), lambda x, by=part: by(x)]
        self.a.register_forward_hook(lambda module, args, y: scaled(y))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.exp()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x = self.first(x)
        for other in self.others:
            x = other(x)
        return (x.square().mean(),)


@case
def functions_that_hold_modules(mesh: autoshard.Mesh) -> None:
    """Later programs are of the same parameters as the first."""
    models = []
    for _ in range(2):  # a copy of one would hold the other's
        torch.manual_seed(0)
        models.append(Closing().double())
    sharded = autoshard.compile(models[1], mesh, (rows(),))
    steps(models[0], sharded, rows(), rows(6))
    steps(models[0], copy.deepcopy(sharded), rows(2))


@case
def draws_that_nobody_reads(mesh: autoshard.Mesh) -> None:
    """They advance the generator, and what they would have drawn from is computed as far as it draws or writes."""
    model, sharded = pair(mesh, Unread, rows(6))
    steps(model, sharded, rows(6), rows(6, seed=2))


@case
def a_value_that_is_overwritten(mesh: autoshard.Mesh) -> None:
    """It has a gradient as in eager, and that is zero."""

    def function(lin: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y, z = (x * lin.weight[0]).clone(), (x * lin.weight[1]).clone()
        y.zero_()
        z.fill_(2.0)
        y[0] = lin(x)[1]
        return y + z + lin(x).copy_(x * lin.weight[2])

    def copied(lin: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y = lin(x)
        return F.dropout(y, 0.5, training=False).copy_(y) * lin(x).copy_(x)

    for f in (function, copied, lambda lin, x: (x * lin.weight[0]).clone().zero_(), lambda lin, x: lin(x).copy_(x)):
        model, sharded = pair(mesh, lambda f=f: Of(f), rows())
        once(model, sharded, rows())


@case
def functional_calls(mesh: autoshard.Mesh) -> None:
    """``torch.func.functional_call`` with other parameters: scaled ones, and those after an inner step (MAML)."""
    call = torch.func.functional_call

    def scaled(module: Any) -> Any:
        return full(call(module, {name: 2 * p for name, p in module.named_parameters()}, (rows(),)))

    def after_a_step(module: Any) -> list[Any]:
        own = dict(module.named_parameters())
        first = torch.autograd.grad(
            full(call(module, own, (rows(),))).square().sum(), [*own.values()], create_graph=True
        )
        stepped = {name: p - 0.1 * g for (name, p), g in zip(own.items(), first, strict=True)}
        second = full(call(module, stepped, (rows(seed=2),))).square().sum()
        return [full(g) for g in torch.autograd.grad(second, [*own.values()])]

    model, sharded = pair(mesh, lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), rows())
    close(scaled(sharded), scaled(model))
    for mine, expected in zip(after_a_step(sharded), after_a_step(model), strict=True):
        close(mine, expected)
    once(model, sharded, rows())


@torch.library.custom_op("autoshard_states::project", mutates_args=())
def project(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    return x @ weight.t() * scale


def _kept(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


def _back(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    return g @ weight * ctx.scale, g.flatten(0, -2).t() @ x.flatten(0, -2) * ctx.scale, None


project.register_fake(lambda x, weight, scale: x.new_empty(*x.shape[:-1], weight.shape[0]))
project.register_autograd(_back, setup_context=_kept)


class Projects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + project(project(x, self.up, 0.3).tanh(), self.down, 0.2)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Projects(), Projects())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.blocks(x).square().mean(),)


@case
def rules_of_ones_own(mesh: autoshard.Mesh) -> None:
    """A custom op with a rule of the user's is cut in training, at open lengths, in parts and where it runs again."""
    autoshard.register_rule(project, "... k, n k -> ... n", linear=((0,), (1,)))
    cut: dict[str, Any] = {"hints": {"*.up": autoshard.Shard(0), "*.down": autoshard.Shard(1)}, "strict": True}
    for more in ({}, {"dynamic": True}, {"recompute": "blocks"}, {"micro_batches": 2}):
        model, sharded = pair(mesh, Twice, rows(), **cut, **more)
        labels = {label for c in sharded.plan.choices.values() if "project" in c.op for label in c.labels}
        assert {"n", "k"} <= labels or "pp" in mesh.axes, labels
        steps(model, sharded, rows(), rows(6))

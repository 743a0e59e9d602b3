"""Parameters that enter their blocks before the forward, from its second run on: a check of training_worker.py."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from checks import assert_close
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.module.ranks import parameters
from autoshard.runtime.parameters import block, gradients
from autoshard.runtime.transport import buffer_pool


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + self.layers[0].linear.weight.square().sum()


class Order(TorchDispatchMode):
    """What a backward does, in this order: layers that it goes through, and reductions that it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.tanh_backward.default:
            self.done.append("layer")
        return op(*args, **(kwargs or {}))

    def move(self, *args: Any) -> None:
        self.done.append("sent")
        MOVE(*args)


def but_of_the_first(program: Any) -> frozenset[str]:
    """As if something else read the first layer's parameters, too."""
    return frozenset(name for name in ALONE(program) if not name.startswith("layers.0."))


ALONE = parameters.entering_alone
MOVE = gradients.Gradients.move
ENTER = block._enter_through_bucket


@contextlib.contextmanager
def every_bucket_alone() -> Iterator[None]:
    with (
        patch.object(parameters, "MIN_BUCKET_BYTES", 1),
        patch.object(gradients, "MIN_BUCKET_BYTES", 1),
        patch.object(gradients, "ALL_REDUCE_BUCKET_BYTES", 1),
    ):
        yield


def parameters_enter_ahead() -> None:
    """Their gradients are sent where they were: as soon as a layer has them, not when the backward ends."""
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = Layers().double()
    flat = autoshard.Mesh({"dp": dist.get_world_size()}, hardware="cpu")
    entered: list[int] = []

    def enter(*args: Any) -> Any:
        entered.append(len(args[1]))
        return ENTER(*args)

    with (
        every_bucket_alone(),
        patch.object(block, "_enter_through_bucket", enter),
        patch.object(parameters, "entering_alone", but_of_the_first),
    ):
        sharded = autoshard.compile(copy.deepcopy(model), flat, (x,), like="ddp")
        orders = []
        for step, soon in enumerate((True, True, True, False)):
            entered.clear()
            waits = step == 2
            with (
                patch.object(block, "RUN_FIRST_SEQUENCE_NR", block.RUN_FIRST_SEQUENCE_NR if soon else 0),
                contextlib.ExitStack() as stack,
            ):
                if waits:
                    stack.enter_context(sharded.no_sync())
                loss, order = sharded(x), Order()
            with order, patch.object(gradients.Gradients, "move", lambda *args, order=order: order.move(*args)):
                loss.backward()
            model(x).backward()
            orders.append(order.done)
            assert entered == ([2, 2, 2] if step == 0 or waits else [2]), (step, entered)
            assert_close(
                sharded.full_gradients(),
                {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
                f"step {step}",
            )
    assert orders[:3] == [["layer", "sent"] * 3] * 3, orders
    assert orders[3] == ["layer"] * 3 + ["sent"] * 3, "the order of nodes is what has them sent early"


class Pair:
    """A model and the same one sharded, which take the same steps."""

    def __init__(self) -> None:
        self.model, self.calls = Layers().double(), 0
        flat = autoshard.Mesh({"dp": dist.get_world_size()}, hardware="cpu")
        self.sharded = autoshard.compile(copy.deepcopy(self.model), flat, (self.input(),), like="ddp")

    def input(self) -> torch.Tensor:
        """Another one for every call."""
        return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(self.calls))

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the sharded model, and of the other."""
        self.calls += 1
        return self.sharded(self.input()), self.model(self.input())

    def backward(self, scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss) -> None:
        for loss in self.losses():
            scale(loss).backward()

    def zero(self, set_to_none: bool = True) -> None:
        for m in (self.sharded, self.model):
            m.zero_grad(set_to_none)

    def compare(self, what: str) -> None:
        assert_close(self.sharded.full_gradients(), self.plain(), what)

    def plain(self) -> dict[str, torch.Tensor]:
        """The gradients of the model that is not sharded."""
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def places(self) -> list[int]:
        """Where the sharded model's gradients lie."""
        return [p.grad.to_local().data_ptr() for p in self.sharded.parameters() if p.grad is not None]

    def trained(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The parameters of both."""
        both = (self.sharded, self.model)
        ours, theirs = ([p for p in m.parameters() if p.requires_grad] for m in both)
        return ours, theirs


def held_ones_stay(pair: Pair, hold: Callable[[Any], Any]) -> bool:
    """Whether gradients that the user holds through two more steps stay what they were."""
    pair.zero()
    pair.backward()
    held = {n: hold(p.grad) for n, p in pair.sharded.named_parameters() if p.grad is not None}
    expected = pair.plain()
    for _ in range(2):
        pair.zero()
        pair.backward()
        pair.compare("beside held ones")
    found = {n: x.to_local() if isinstance(x, DTensor) else torch.as_tensor(x) for n, x in held.items()}
    return all(torch.allclose(found[n], x, rtol=0, atol=1e-12) for n, x in expected.items())


def triple(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad *= 3


def gradients_serve_again() -> None:
    """What a step's gradients lie in serves the next one's, but not while somebody has them."""
    with every_bucket_alone(), patch.object(buffer_pool, "MIN_POOLED_BYTES", 1):
        pair, places = Pair(), []
        for _ in range(5):
            pair.zero()
            pair.backward()
            pair.compare("step by step")
            places.append(pair.places())
        assert places[3] == places[4], "nothing serves again"
        views = (
            lambda g: g,
            lambda g: g.to_local(),
            lambda g: g.to_local().view(-1).view(g.shape),
            lambda g: g.to_local().numpy(),
        )
        for hold in views:
            assert held_ones_stay(pair, hold)
            with patch.object(buffer_pool.PooledBuffer, "is_free", True):
                assert not held_ones_stay(pair, hold), "a gradient in use is written to, and that is not seen"
        pair.backward()
        pair.compare("added to the last")
        pair.zero(set_to_none=False)
        pair.backward()
        pair.backward()
        pair.compare("added to zeros, twice")
        with pair.sharded.no_sync():
            pair.backward()
        pair.backward()
        pair.compare("with summands")
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
        for m, scaler, loss in zip((pair.sharded, pair.model), scalers, pair.losses(), strict=True):
            m.zero_grad()
            optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            scaler.step(optimizer)
        pair.compare("scaled, and clipped")
        for parameters in pair.trained():
            for p in parameters[1:3]:
                p.register_hook(lambda g: g * 2)
            parameters[3].register_post_accumulate_grad_hook(triple)
        for _ in range(3):
            pair.zero()
            pair.backward()
            pair.compare("with hooks")
        pair.zero()
        ours, theirs = pair.trained()
        for loss, parameters in zip(pair.losses(), (ours, theirs), strict=True):
            for some in (parameters[2:4], parameters):
                found = torch.autograd.grad(loss, some, create_graph=True)
            sum(g.square().sum() for g in found).backward()
        pair.compare("of gradients")


OF_PARAMETERS = {"parameters_enter_ahead": parameters_enter_ahead, "gradients_serve_again": gradients_serve_again}

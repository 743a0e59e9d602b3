"""Parameters that enter their blocks before the forward, from its second run on: a check of training_worker.py."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from checks import assert_close
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.module.ranks import loaded
from autoshard.runtime.parameters import block, gradients


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


ALONE = loaded.entering_alone
MOVE = gradients.Gradients.move
ENTER = block._entered


@contextlib.contextmanager
def every_bucket_alone() -> Iterator[None]:
    with (
        patch.object(loaded, "SMALL", 1),
        patch.object(gradients, "SMALL", 1),
        patch.object(gradients, "LARGE_ON_GLOO", 1),
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
        patch.object(block, "_entered", enter),
        patch.object(loaded, "entering_alone", but_of_the_first),
    ):
        sharded = autoshard.compile(copy.deepcopy(model), flat, (x,), like="ddp")
        orders = []
        for step, soon in enumerate((True, True, True, False)):
            entered.clear()
            waits = step == 2
            with patch.object(block, "AT_ONCE", block.AT_ONCE if soon else 0), contextlib.ExitStack() as stack:
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


OF_PARAMETERS = {"parameters_enter_ahead": parameters_enter_ahead}

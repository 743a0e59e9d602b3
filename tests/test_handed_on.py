"""Where no gradient comes none goes on: through every Function of a step, and custom ops of the runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from autoshard import Layout, Mesh, runtime
from autoshard.module import microbatches
from autoshard.module.dtensors import made, on_parts, owned
from autoshard.module.programs import simulate
from autoshard.runtime.operations import (
    bags,
    ctc,
    embedding,
    exactly,
    gated,
    grouped,
    random,
    reduce,
    row_sums,
    slots,
)
from autoshard.runtime.operations.stacked import OneAfterAnother, stacked_op
from autoshard.runtime.parameters import later, together
from autoshard.runtime.transport.differentiable import Differentiable
from autoshard.runtime.transport.handed_on import HandingOn
from autoshard.runtime.transport.round_trip import Trip, round_trip
from autoshard.runtime.transport.sparse import _Cast


class Ends(torch.autograd.Function):
    """Hands on no gradient, as a message in which only others had one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


def leaf(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


def order(n: int) -> torch.Tensor:
    return torch.arange(n).flip(0)


def moved(x: torch.Tensor) -> torch.Tensor:
    return runtime.World({"a": 1}).run(lambda x: runtime.all_reduce(x, "a"), [(x,)])[0]


def alone() -> DeviceMesh:
    """A mesh of one rank, for which no process group is needed; all of itself."""
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("a",), _init_backend=False, _rank=0)
    mesh._of = mesh
    return mesh


def whole(x: torch.Tensor) -> Any:
    """``x`` as the DTensor of a mesh of one rank."""
    return made.whole_of(x, made.spec_of(alone(), (Replicate(),), x.shape, x.dtype))


FUNCTIONS: dict[type, Callable[[torch.Tensor], torch.Tensor]] = {
    row_sums._RowSums: lambda x: row_sums.row_sums(x, x.detach().amax(1, True), order(4), None, False),
    row_sums._InPieces: lambda x: row_sums.in_pieces(x, order(4), None, -100, 0.0),
    slots._Dealt: lambda x: slots.dealt(x, slots.slots_of(order(8), 4, 2)),
    slots._Collected: lambda x: slots.collected(x, torch.ones(4, dtype=x.dtype), slots.slots_of(order(4), 2, 2)),
    gated._GatedProducts: lambda x: gated.gated_products(
        x, x.detach().expand(2, 4, 4), x.detach()[:2].expand(2, 2, 4), torch.tensor([1, 4]), "silu"
    ),
    bags._Bagged: lambda x: bags.bagged(order(4).view(2, 2), "sum", -1, x),
    reduce._Shared: lambda x: reduce._Shared.apply(x, x.detach(), x.detach()),
    OneAfterAnother: lambda x: OneAfterAnother.apply(False, x, x.detach()),
    grouped._Product: lambda x: grouped._Product.apply(x, x.detach().expand(2, 4, 4), torch.tensor([1, 4])),
    random._Drop: lambda x: random._Drop.apply(x, x.detach(), 0.5, None),
    _Cast: lambda x: _Cast.apply(x, torch.float32),
    made._Whole: lambda x: made.part_of(whole(x)),
    made._Part: lambda x: made.part_of(whole(x)),
    owned._Told: lambda x: owned._Told.apply(x, x.shape, alone()),
    on_parts._Total: lambda x: made.part_of(on_parts._Total.apply(whole(x), 1)),
    simulate._Join: lambda x: simulate.joined([x], Layout(Mesh({"a": 1}), {}), (4, 4), "x"),
    together._Sum: lambda x: together._Sum.apply(x, x.detach()),
    later._Operand: lambda x: later._Operand.apply(later._LINEAR, lambda *_: None, None, x, x.detach(), None),
    microbatches._Delivered: lambda x: microbatches._Delivered.apply(x.detach().sum(), [x.detach()], x),
}
"""of [4, 4]"""

OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exactly": lambda x: exactly.exactly(x, [4, 4], ""),
    "stacked": lambda x: stacked_op([x, x.detach()], 1),
    "pooled": lambda x: embedding.pooled_op(x, order(4).view(2, 2), "sum"),
    "grouped_mm": lambda x: grouped.grouped_mm(x, x.detach().expand(2, 4, 4), torch.tensor([1, 4])),
    "grouped_outer": lambda x: grouped.grouped_outer(x, x.detach(), torch.tensor([1, 4])),
    "ctc": lambda x: ctc.ctc_loss(
        x.view(4, 1, 4).log_softmax(2), order(2).view(1, 2) + 1, torch.tensor([4]), torch.tensor([2])
    ),
}


def gradients(f: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor | None]:
    """What a parameter gets through ``f`` where no gradient comes for its result, and where one does."""
    found = []
    for end in (Ends.apply, torch.clone):
        x = nn.Parameter(leaf(4, 4).detach())
        (end(f(x)).sum() + leaf(1).sum()).backward()
        found.append(x.grad)
    return found


@pytest.mark.parametrize("kind", FUNCTIONS, ids=lambda kind: kind.__name__)
def test_functions(kind: type) -> None:
    none, some = gradients(FUNCTIONS[kind])
    assert none is None
    assert some is not None


@pytest.mark.parametrize("name", OPS)
def test_ops(name: str) -> None:
    none, some = gradients(OPS[name])
    assert none is None
    assert some is not None


def test_every_function_is_tried() -> None:
    assert {*HandingOn.__subclasses__()} == {*FUNCTIONS, Differentiable, microbatches._Other}  # that has no gradients


def test_messages_and_journeys() -> None:
    def there(x: torch.Tensor) -> Any:
        yield from ()
        return (x * 2, x)

    def back(gradients: Any, saved: Any, wanted: Any) -> Any:
        yield from ()
        return (gradients[0] * 2,)

    def trip(x: torch.Tensor) -> torch.Tensor:
        return runtime.World({"a": 1}).run(
            lambda x: round_trip(runtime.current(), Trip("it", there, back), x)[0], [(x,)]
        )[0]

    for f in (moved, trip):
        none, some = gradients(f)
        assert none is None
        assert some is not None

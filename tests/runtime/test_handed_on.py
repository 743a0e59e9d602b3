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
from autoshard.module.dtensors import module_dtensor, outputs
from autoshard.module.programs import simulated_ranks
from autoshard.runtime.operations import (
    checks,
    chunked_logits,
    embedding,
    experts,
    grouped,
    losses,
    random,
    reductions,
)
from autoshard.runtime.operations.stacked import ConcatenatedView, stacked_op
from autoshard.runtime.parameters import coalesced, split_backward
from autoshard.runtime.transport.autograd import Differentiable, NoneGradFunction
from autoshard.runtime.transport.coroutine_autograd import CoroutinePair, apply_coroutines
from autoshard.runtime.transport.sparse_gradients import _CastTable


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
    """A mesh of one rank, for which no process group is needed."""
    return DeviceMesh("cpu", [0], mesh_dim_names=("a",), _init_backend=False, _rank=0)


def whole(x: torch.Tensor) -> Any:
    """``x`` as the DTensor of a mesh of one rank."""
    return module_dtensor.from_local_shard(x, module_dtensor.contiguous_spec(alone(), (Replicate(),), x.shape, x.dtype))


FUNCTIONS: dict[type, Callable[[torch.Tensor], torch.Tensor]] = {
    losses._CrossEntropySums: lambda x: losses._CrossEntropySums.apply(
        x, x.detach().amax(1, True), order(4), None, False
    ),
    chunked_logits._ChunkedSums: lambda x: chunked_logits._ChunkedSums.apply(
        x, x.detach(), None, chunked_logits.RowChunks(2, x.dtype, (4,), 0, ()), order(4), None, False
    ),
    losses._SlicedCrossEntropy: lambda x: losses._SlicedCrossEntropy.apply(x, order(4), None, -100, 0.0),
    experts._Dispatch: lambda x: experts.dispatch_expert_rows(x, experts.dispatch_slots(order(8), 4, 2)),
    experts._Combine: lambda x: experts.combine_expert_rows(
        x, torch.ones(4, dtype=x.dtype), experts.dispatch_slots(order(4), 2, 2)
    ),
    experts._GatedProducts: lambda x: experts.gated_products(
        x, x.detach().expand(2, 4, 4), x.detach()[:2].expand(2, 2, 4), torch.tensor([1, 4]), "silu"
    ),
    embedding._EmbeddingBagOfTables: lambda x: embedding.embedding_bag_of_tables(order(4).view(2, 2), "sum", -1, x),
    reductions._SharedGradient: lambda x: reductions._SharedGradient.apply(x, x.detach(), x.detach()),
    ConcatenatedView: lambda x: ConcatenatedView.apply(False, x, x.detach()),
    grouped._GroupedProduct: lambda x: grouped._GroupedProduct.apply(
        x, x.detach().expand(2, 4, 4), torch.tensor([1, 4])
    ),
    random._DropoutFunction: lambda x: random._DropoutFunction.apply(x, x.detach(), 0.5, None),
    _CastTable: lambda x: _CastTable.apply(x, torch.float32),
    module_dtensor._FromLocalShard: lambda x: module_dtensor.to_local_shard(whole(x)),
    module_dtensor._ToLocalShard: lambda x: module_dtensor.to_local_shard(whole(x)),
    module_dtensor._ByFullTensor: lambda x: module_dtensor.to_local_shard(
        module_dtensor._ByFullTensor.apply(whole(x), whole(x)._spec)
    ),
    outputs._SumOfShards: lambda x: module_dtensor.to_local_shard(outputs._SumOfShards.apply(whole(x), 1)),
    simulated_ranks._JoinShards: lambda x: simulated_ranks.join_differentiably(
        [x], Layout(Mesh({"a": 1}), {}), (4, 4), "x"
    ),
    coalesced._AllReducedNode: lambda x: coalesced._AllReducedNode.apply(x, x.detach()),
    split_backward._OperandGradient: lambda x: split_backward._OperandGradient.apply(
        split_backward._LINEAR, lambda *_: None, None, x, x.detach(), None
    ),
    microbatches._LossWithGradients: lambda x: microbatches._LossWithGradients.apply(x.detach().sum(), [x.detach()], x),
}
"""of [4, 4]"""

OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exactly": lambda x: checks.exactly(x, [4, 4], ""),
    "stacked": lambda x: stacked_op([x, x.detach()], 1),
    "pooled": lambda x: embedding.pooled_op(x, order(4).view(2, 2), "sum"),
    "grouped_mm": lambda x: grouped.grouped_mm(x, x.detach().expand(2, 4, 4), torch.tensor([1, 4])),
    "grouped_outer": lambda x: grouped.grouped_outer(x, x.detach(), torch.tensor([1, 4])),
    "ctc": lambda x: losses.ctc_loss(
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
    assert {*NoneGradFunction.__subclasses__()} == {
        *FUNCTIONS,
        Differentiable,
        microbatches._ScalarWithoutGradient,
    }  # that has no gradients


def test_messages_and_journeys() -> None:
    def there(x: torch.Tensor) -> Any:
        yield from ()
        return (x * 2, x)

    def back(gradients: Any, saved: Any, wanted: Any) -> Any:
        yield from ()
        return (gradients[0] * 2,)

    def trip(x: torch.Tensor) -> torch.Tensor:
        return runtime.World({"a": 1}).run(
            lambda x: apply_coroutines(runtime.current(), CoroutinePair("it", there, back), x)[0], [(x,)]
        )[0]

    for f in (moved, trip):
        none, some = gradients(f)
        assert none is None
        assert some is not None

"""Checks of tables on gloo ranks: one owner each, sparse gradients, states, checkpoints."""

from __future__ import annotations

import copy
import io
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.distributed.checkpoint.state_dict as states
from table_models import DCN, fields, towers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard import runtime
from autoshard.errors import LayoutError
from autoshard.module.checkpoints import full_optimizer_state_dict, load_full_optimizer_state_dict
from autoshard.runtime.operations.stacked import are_adjacent_in_memory
from autoshard.runtime.transport.move import Move, Splits
from autoshard.runtime.transport.process_group import TorchCommunicator

torch.sparse.check_sparse_tensor_invariants.disable()  # else the reference's Adagrad warns that nobody has said so

Case = tuple[nn.Module, tuple[Any, ...]]


def mesh() -> autoshard.Mesh:
    ranks = dist.get_world_size()
    return autoshard.Mesh({"x": 2} if ranks == 2 else {"dp": 2, "x": 2}, hardware="ideal_network")


def compiled(model: nn.Module, args: tuple[Any, ...], name: str, **options: Any) -> autoshard.ShardedModule:
    like = {a: name if a == "x" else "ddp" for a in mesh().axes}
    return autoshard.compile(copy.deepcopy(model), mesh(), args, like=like, **options)


def optimizers(module: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    sparse = [p for p in module.parameters() if p.grad.is_sparse]
    dense = [p for p in module.parameters() if not p.grad.is_sparse]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(dense, lr=1e-2, eps=1e-6)]
    return [*found, getattr(torch.optim, kind)(sparse, lr=0.1)] if sparse else found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, x in expected.items():
        assert found[name].is_sparse == x.is_sparse, name
        torch.testing.assert_close(found[name].to_dense(), x.to_dense(), rtol=1e-9, atol=1e-12, msg=name)


def step(case: Case, sharded: nn.Module, steps: dict[nn.Module, list[torch.optim.Optimizer]], kind: str) -> None:
    """One of both, compared: gradients, their norm, weights."""
    reference, args = case
    for module in (reference, sharded):
        module.zero_grad()
        module(*args).backward()
        steps.setdefault(module, optimizers(module, kind))
    gradients = {n: p.grad for n, p in reference.named_parameters()}
    same(sharded.full_gradients(), gradients)
    norm = torch.linalg.vector_norm(torch.cat([g.to_dense().flatten() for g in gradients.values()]))
    torch.testing.assert_close(autoshard.clip_grad_norm_(sharded, 1e9), norm, rtol=1e-9, atol=1e-12)
    for optimizer in (o for module in (reference, sharded) for o in steps[module]):
        optimizer.step()
    same(sharded.full_state_dict(), reference.state_dict())


def trained(case: Case, sharded: nn.Module, kind: str) -> dict[nn.Module, list[torch.optim.Optimizer]]:
    steps: dict[nn.Module, list[torch.optim.Optimizer]] = {}
    for _ in range(3):
        step(case, sharded, steps, kind)
    return steps


def tables_of_one_owner() -> None:
    """Sparse gradients, SparseAdam; then on into another module, by a state dict and by torch.distributed.checkpoint."""
    reference, args = case = fields(DCN, True, 7)
    sharded = compiled(reference, args, "table-wise")
    steps = trained(case, sharded, "SparseAdam")
    held = {n: p for n, p in sharded.named_parameters() if n.startswith("tables")}
    mine = [n for n, p in held.items() if p.to_local().numel()]
    assert 0 < len(mine) < len(held), "a rank holds its own tables, and nothing of others"
    assert all(p.shape == reference.get_parameter(n).shape for n, p in held.items())
    if dist.get_rank() == dist.get_world_size() - 1:
        of_width = [p.to_local() for p in held.values() if p.to_local().numel() and p.shape[1] == 8]
        assert len(of_width) == 2
        assert are_adjacent_in_memory(of_width), "one look-up reads them all"
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    checkpoint.save(sharded.state_dict(), checkpoint_id=folder[0])
    for table in held.values():  # whole on one rank, and nothing elsewhere
        with pytest.raises(LayoutError, match="is about to save"):
            torch.save(table, io.BytesIO())
    states = [full_optimizer_state_dict(sharded, o) for o in steps[sharded]]
    other = compiled(reference, args, "table-wise")
    nn.init.zeros_(next(other.parameters()))
    loaded = other.state_dict()
    checkpoint.load(loaded, checkpoint_id=folder[0])
    other.load_state_dict(reference.state_dict())
    same(other.full_state_dict(), reference.state_dict())
    other(*args).backward()
    resumed = optimizers(other, "SparseAdam")
    for optimizer, state in zip(resumed, states, strict=True):
        load_full_optimizer_state_dict(other, optimizer, state)
    step(case, other, {reference: steps[reference], other: resumed}, "SparseAdam")


def every_rank_gets_the_whole_of_a_table() -> None:
    """Of one whose rank is found along all axes, too: values, norms, elements, gradients, and what gradients go through."""
    for sparse in (False, True):
        reference, args = fields(DCN, sparse, 8)
        sharded = autoshard.compile(copy.deepcopy(reference), mesh(), args, like="table-wise")
        tables = [(reference.get_parameter(n), p) for n, p in sharded.named_parameters() if n.startswith("tables")]
        assert any("O(1)" in str(x) for x in sharded.plan.layouts.values())
        for module in (reference, sharded):
            module(*args).backward()
        for expected, p in tables:
            assert torch.equal(p.full_tensor(), expected)
            torch.testing.assert_close(p.norm().item(), expected.norm().item(), rtol=1e-12, atol=0)
            gradients = p.grad.full_tensor(), expected.grad.to_dense()
            torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
            p.grad = expected.grad = None
            (p.full_tensor() ** 3).sum().backward()
            (expected**3).sum().backward()
            torch.testing.assert_close(p.grad.full_tensor(), expected.grad, rtol=1e-9, atol=1e-12)


def full_states_of_torch() -> None:
    """What get_model_state_dict and the others of torch give and take, of weights and of AdamW's moments."""
    reference, args = fields(DCN, False, 8)
    sharded = compiled(reference, args, "table-wise")
    both = reference, sharded
    for module in both:
        module(*args).backward()
    own = [torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-6) for module in both]
    for optimizer in own:
        optimizer.step()
    options = states.StateDictOptions(full_state_dict=True)
    expected = reference.state_dict(), states.get_optimizer_state_dict(reference, own[0])["state"]

    def given() -> Any:
        return (
            states.get_model_state_dict(sharded, options=options),
            states.get_optimizer_state_dict(sharded, own[1], options=options),
        )

    def as_expected() -> None:
        weights, moments = given()
        same(weights, expected[0])
        for name, of_weight in expected[1].items():
            same(moments["state"][name], of_weight)

    as_expected()
    parts = [x for x in pytree.tree_leaves(states.get_optimizer_state_dict(sharded, own[1])) if isinstance(x, DTensor)]
    assert all(x._local_tensor.ndim == x.ndim for x in parts), "of what others own there are no rows, and all dims"
    for from_first in (False, True):
        options.broadcast_from_rank0 = False
        weights, moments = copy.deepcopy(given())
        for x in (*sharded.parameters(), *(x for state in own[1].state.values() for x in state.values())):
            x.detach().zero_()
        if from_first and dist.get_rank():
            weights, moments = {}, {}
        options.broadcast_from_rank0 = from_first
        states.set_model_state_dict(sharded, weights, options=options)
        states.set_optimizer_state_dict(sharded, own[1], moments, options=options)
        options.broadcast_from_rank0 = False
        as_expected()


def sums_go_beside_tables() -> None:
    """Few gradients of layers are sent before those of tables are, and so while these are added up."""
    reference, args = fields(DCN, False, 7)
    sharded = compiled(reference, args, "table-wise")
    sharded._comm.log = executed = list[Any]()
    sharded(*args).backward()
    reference(*args).backward()
    same(sharded.full_gradients(), {n: p.grad for n, p in reference.named_parameters()})
    kinds = [e.kind for e in executed if e.phase == "backward" and "x" in e.axes]
    assert kinds.index("all_reduce") < kinds.index("all_to_all"), kinds


def jagged_bags_of_one_owner() -> None:
    """Adagrad; a gradient of the weights of samples; two micro-batches have no jagged bags, so not in parts."""
    reference, args = case = towers(True)
    trained(case, compiled(reference, args, "table-wise"), "Adagrad")


def bags_of_all_modes() -> None:
    """Jagged sums with weights, means and maxima (never sparse), by row, by column and whole: where their gradients are dense,
    and where those of sums and means are sparse."""
    for like, layout in (("row-wise", "S(0)@x"), ("column-wise", "S(1)@x"), ("table-wise", "O(")):
        for sparse in (True, False):
            reference, args = case = towers(sparse)
            sharded = compiled(reference, args, like)
            for name in ("seen", "liked", "tags"):
                assert layout in str(sharded.plan.layouts[f"{name}.weight"]), (like, name)
            trained(case, sharded, "Adagrad")


def sparse_rows_and_replicas() -> None:
    """Row-wise over x; on four ranks the rows of two replicas are gathered. In micro-batches as well."""
    reference, args = case = fields(DCN, True, 8)
    trained(case, compiled(reference, args, "row-wise"), "SGD")
    trained(case, compiled(reference, args, "ddp", micro_batches=2), "SGD")


def tables_in_parts_and_lower_precision() -> None:
    """Sparse gradients of owned tables: left until a later sum, of micro-batches, cast back from bfloat16."""
    reference, args = fields(DCN, True, 8)
    sharded = compiled(reference, args, "table-wise", micro_batches=2)
    for _ in range(2):
        reference(*args).backward()
    with sharded.no_sync():
        sharded(*args).backward()
    sharded(*args).backward()
    same(sharded.full_gradients(), {n: p.grad for n, p in reference.named_parameters()})
    reference.zero_grad()
    reference(*args).backward()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for like in ("table-wise", "ddp"):
        sharded = compiled(reference, args, like, mixed_precision=half)
        sharded(*args).backward()
        gradients = sharded.full_gradients()
        for name, p in reference.named_parameters():
            found, expected = gradients[name], p.grad
            assert expected is not None
            assert found.is_sparse == expected.is_sparse
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=0.1, atol=0.02, msg=name)


class Ops(TorchDispatchMode):
    """The names of the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def rows_are_sent_from_where_they_lie() -> None:
    """To where they stay, without a copy, unless axes number the ranks in another order than the process group does."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    for axes, order in ((("a", "b"), range(ranks)), (("b", "a"), [0, 2, 1, 3][:ranks] if ranks == 4 else range(ranks))):
        comm = TorchCommunicator({"a": 2, "b": ranks // 2})
        number, names = list(order).index(me), comm.active(axes)
        gives = [1 + (number + k) % 3 for k in range(ranks)]  # as many both ways
        x = torch.cat([torch.full((n, 2), 10.0 * number + k) for k, n in enumerate(gives)])
        with Ops() as ops:
            out = comm.execute(
                Move("S", "S", names, 0, splits=Splits(tuple(gives), tuple(gives), number)), x, "forward"
            )
        expected = torch.cat([torch.full((n, 2), 10.0 * k + number) for k, n in enumerate(gives)])
        assert torch.equal(out, expected), (axes, out, expected)
        assert any("cat" in name for name in ops.names) == (list(order) != list(range(ranks))), ops.names


def parts_of_one_move_as_one() -> None:
    """Forward and backward: to what moving them one by one gives, where chunks are of one length and where they are not."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    comm = TorchCommunicator({"a": ranks})
    functions: dict[str, Any] = {
        "all_to_all": lambda together, x, n: (
            together(x, (2,) * 3, (1,) * 3, "a") if n else [runtime.all_to_all(y, 2, 1, "a") for y in x]
        ),
        "reduce_scatter": lambda together, x, n: (
            together(x, (1,) * 3, "a") if n else [runtime.reduce_scatter(y, 1, "a") for y in x]
        ),
        "all_gather": lambda together, x, n: (
            together(x, (1,) * 3, "a", to="R") if n else [runtime.all_gather(y, 1, "a", to="R") for y in x]
        ),
    }
    for length in (2 * ranks, 2 * ranks + 1):
        for name, run in functions.items():
            generator = torch.Generator().manual_seed(me)
            rows = length if name != "all_gather" else 4
            base = torch.randn(2, rows, 3, 5, dtype=torch.float64, generator=generator).requires_grad_()
            found: list[tuple[list[torch.Tensor], torch.Tensor, int]] = []
            for several in (True, False):
                together = getattr(runtime, f"{name}_together")
                with runtime.bind(comm), Ops() as ops:
                    out = list(run(together, base.unbind(2), several))
                    gradients = [torch.full_like(y, i + me).cumsum(1) for i, y in enumerate(out)]
                    gathered = torch.autograd.grad(out, base, list(torch.stack(gradients, 2).unbind(2)))[0]
                found.append((out, gathered, sum("slice" in n or "narrow" in n for n in ops.names)))
            for a, b in zip(found[0][0], found[1][0], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
            torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-14, atol=1e-14)
            assert found[0][2] <= found[1][2] / 2, (name, "each of them is cut by itself")


TABLES = {
    f.__name__: f
    for f in (
        tables_of_one_owner,
        every_rank_gets_the_whole_of_a_table,
        full_states_of_torch,
        sums_go_beside_tables,
        jagged_bags_of_one_owner,
        bags_of_all_modes,
        sparse_rows_and_replicas,
        tables_in_parts_and_lower_precision,
        rows_are_sent_from_where_they_lie,
        parts_of_one_move_as_one,
    )
}

"""One rank of a gloo world that trains models sharded and unsharded; rank 0 writes the outcome of each check as JSON.

Started by test_training_gloo.py with the names of the checks, see world.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from checks import (
    MESHES,
    TOLERANCE,
    assert_all_raise,
    assert_close,
    assert_trains_alike,
    case,
    loss_of,
    main,
    mesh,
    seed,
)
from entering_checks import OF_PARAMETERS
from expert_checks import CHECKS as EXPERTS
from harness import Captures
from loss_checks import OF_OUTPUTS, names_of_nodes
from profiles import assert_as_predicted, names_of
from state_cases import CASES
from table_checks import TABLES
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard
from walk_steps import walk

import autoshard
from autoshard import compiler
from autoshard.errors import MeshError, RuntimeMismatchError
from autoshard.module.ranks import parameters
from autoshard.runtime.transport import process_group

FOLDER = Path(sys.argv[2]).parent


def train_mlp() -> None:
    assert_trains_alike("mlp")


def train_gpt() -> None:
    """With dropout: the ranks come with different seeds and still draw rank 0's masks."""
    assert any(isinstance(m, nn.Dropout) and m.p > 0 for m in case("gpt")[0].modules())
    assert_trains_alike("gpt")


def train_llama() -> None:
    assert_trains_alike("llama")


def train_dlrm() -> None:
    assert_trains_alike("dlrm")


def train_hf_llama() -> None:
    assert_trains_alike("hf_llama")


def train_hf_t5() -> None:
    assert_trains_alike("hf_t5")


def random_walks() -> None:
    for number in range(6):
        told: list[str] = []
        try:
            walk(MESHES[dist.get_world_size()], number, told=told)
        except Exception as error:
            raise AssertionError(f"seed {number}: {told}") from error


def wrong_reduction_is_seen() -> None:
    """Negative control: an all-reduce that leaves every rank its summand."""
    right = process_group._COLLECTIVES["all_reduce"]
    process_group._COLLECTIVES["all_reduce"] = lambda comm, move, group, x: x.clone()
    try:
        assert_trains_alike("llama", steps=1)
    except AssertionError:
        return
    finally:
        process_group._COLLECTIVES["all_reduce"] = right
    raise AssertionError("a missing all-reduce went unnoticed")


@functools.cache
def llama() -> tuple[nn.Module, autoshard.ShardedModule, tuple[Any, ...], dict[str, Any]]:
    """A Llama, the same sharded, and its inputs; checks leave the weights alone."""
    model, args, kwargs = case("llama")
    return model, autoshard.compile(copy.deepcopy(model), mesh(), args, kwargs), args, kwargs


def parameters_are_dtensors() -> None:
    model, sharded, _, _ = llama()
    expected = {n: p.shape for n, p in model.named_parameters()}
    assert {n: p.shape for n, p in sharded.named_parameters()} == expected
    assert all(isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in sharded.parameters())
    for name, p in sharded.named_parameters():
        assert autoshard.Layout.from_torch(sharded.mesh, p.placements).placements == tuple(
            autoshard.Replicate() if isinstance(x, autoshard.Invariant) else x
            for x in sharded.plan.layouts[name].placements
        )


def only_shards_are_allocated() -> None:
    """This rank's parameters and gradients take the bytes of their chunks and no more."""
    model, sharded, args, kwargs = llama()
    sharded(*args, **kwargs).loss.backward()
    total = 0
    for name, p in sharded.named_parameters():
        shape = sharded.plan.layouts[name].local_shape(p.shape, dist.get_rank())
        for local in (p.to_local(), p.grad.to_local()):
            assert tuple(local.shape) == tuple(shape), name
        assert p.to_local().untyped_storage().nbytes() == math.prod(shape) * p.element_size(), name
        total += math.prod(shape)
    sharded.zero_grad()
    full = sum(p.numel() for p in model.parameters())
    assert total <= 0.55 * full, f"{total} of {full} numbers are on this rank"


def outputs_next_to_a_loss_keep_their_layout() -> None:
    model, sharded, args, kwargs = llama()
    expected, found = model(*args, **kwargs), sharded(*args, **kwargs)
    assert type(found) is type(expected)
    assert type(found.loss) is torch.Tensor
    assert isinstance(found.logits, DTensor)
    assert any(p.is_shard() for p in found.logits.placements)
    assert_close({"logits": found.logits.full_tensor()}, {"logits": expected.logits}, "output")


@contextlib.contextmanager
def broadcasts() -> Iterator[list[Any]]:
    """The tensors that are broadcast inside."""
    right, sent = dist.broadcast, list[Any]()
    dist.broadcast = lambda x, *args, **kwargs: (sent.append(x), right(x, *args, **kwargs))[1]
    try:
        yield sent
    finally:
        dist.broadcast = right


def inference_returns_full_tensors() -> None:
    model, args, _ = case("llama")
    sharded = autoshard.compile(copy.deepcopy(model), mesh(), args, training=False)
    with torch.no_grad(), broadcasts() as sent:
        found = sharded(*args).logits
        assert not sent, "attention without dropout draws nothing, so there is nothing to agree on"
        assert type(found) is torch.Tensor
        assert_close({"logits": found}, {"logits": model(*args).logits}, "output")


def gathered_on_request_with_gradients() -> None:
    """``gather_outputs=True`` in training: the logits are plain, and gradients flow through them."""
    model, args, _ = case("llama")
    sharded = autoshard.compile(copy.deepcopy(model), mesh(), args, gather_outputs=True)
    found, expected = sharded(*args).logits, model(*args).logits
    assert type(found) is torch.Tensor
    found.square().mean().backward()
    expected.square().mean().backward()
    assert_close(sharded.full_gradients(), {n: p.grad for n, p in model.named_parameters()}, "gradient of")


def gradients_through_sharded_logits() -> None:
    """A loss outside the model, on logits that are a DTensor."""
    model, sharded, args, _ = llama()
    model = copy.deepcopy(model)
    sharded(*args).logits.square().mean().full_tensor().backward()
    model(*args).logits.square().mean().backward()
    assert_close(sharded.full_gradients(), {n: p.grad for n, p in model.named_parameters()}, "gradient of")
    sharded.zero_grad()


def clipping() -> None:
    model, sharded, args, kwargs = llama()
    model = copy.deepcopy(model)
    norms = []
    for m in (model, sharded):
        m(*args, **kwargs).loss.backward()
        norm = nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    assert_close({"norm": norms[1]}, {"norm": norms[0]}, "clipping")
    ours, theirs = autoshard.clip_grad_norm_(sharded, 1e-4), nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    assert_close({"norm": ours}, {"norm": theirs}, "clipping by ours")
    assert_close(sharded.full_gradients(), {n: p.grad for n, p in model.named_parameters()}, "clipped gradient of")
    sharded.zero_grad()


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tied, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tied(self.tied(x).tanh()).tanh()).square().mean()


def few_gradients_are_summed_last() -> None:
    """Without a node in every block, by one collective; where there are more to be sent each block has its node."""
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for limit in (parameters.MIN_BUCKET_BYTES, 1):
        model = UsedTwice().double()
        parameters.MIN_BUCKET_BYTES, before = limit, parameters.MIN_BUCKET_BYTES
        try:
            sharded = autoshard.compile(copy.deepcopy(model), mesh(), (x,), like="ddp")
            for waits in (True, False):
                sharded._comm.log = executed = list[Any]()
                loss = sharded(x)
                nodes = names_of_nodes(loss)
                with sharded.no_sync() if waits else contextlib.nullcontext():
                    sharded(x).backward()
                loss.backward()
                for _ in range(2):
                    model(x).backward()
                sent = [e for e in executed if e.phase == "backward"]
                gradients = {n: p.grad for n, p in model.named_parameters()}
                assert_close(sharded.full_gradients(), gradients, "gradient of")
                assert len(sent) == (1 if waits else 2), sent
                assert bool({"_ParameterBucketNodeBackward", "_EarlyEntryNodeBackward"} & nodes) == (limit == 1), nodes
                sharded.zero_grad()
                model.zero_grad()
        finally:
            parameters.MIN_BUCKET_BYTES = before


def checkpoint() -> None:
    """torch.distributed.checkpoint writes the state dict; another mesh's module reads it back."""
    import torch.distributed.checkpoint as dcp

    model, sharded, args, kwargs = llama()
    folder = FOLDER / "checkpoint"
    dcp.save({"model": sharded.state_dict()}, checkpoint_id=folder)
    other, _, _ = case("llama")
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(7.0)
    flat = autoshard.Mesh({"dp": dist.get_world_size()}, hardware="ideal_network")
    reader = autoshard.compile(other, flat, args, kwargs)
    state = {"model": reader.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    reader.load_state_dict(state["model"])
    for name, x in model.state_dict().items():
        assert torch.equal(reader.full_state_dict()[name], x), name


def full_state_dict_round_trip() -> None:
    model, sharded, args, kwargs = llama()
    state = {n: torch.randn_like(x) for n, x in model.state_dict().items()}
    for x in state.values():
        dist.broadcast(x, 0)
    before = sharded.full_state_dict()
    sharded.load_full_state_dict(state)
    assert all(torch.equal(x, state[n]) for n, x in sharded.full_state_dict().items())
    sharded.load_full_state_dict(before)
    assert_close({"loss": sharded(*args, **kwargs).loss}, {"loss": model(*args, **kwargs).loss}, "after loading back")


def different_inputs_are_refused() -> None:
    model, args, kwargs = case("mlp")
    sharded = autoshard.compile(model, mesh(), args, kwargs)
    shifted = tuple(x + dist.get_rank() if x.is_floating_point() else x for x in args)
    values = "the ranks disagree on the values of the inputs (every rank needs the same global batch: "
    assert_all_raise(RuntimeMismatchError, values, lambda: sharded(*shifted, **kwargs))
    sharded(*args, **kwargs)
    assert_all_raise(RuntimeMismatchError, values, lambda: sharded(*shifted, **kwargs))
    shorter = tuple(x[: 4 - 2 * (dist.get_rank() == 1)] for x in args)
    labels = {n: x[: 4 - 2 * (dist.get_rank() == 1)] for n, x in kwargs.items()}
    shapes = "the ranks disagree on the shapes and dtypes of the inputs"
    assert_all_raise(RuntimeMismatchError, shapes, lambda: sharded(*shorter, **labels))
    state = (
        "the ranks disagree on the state of the call: recorded gradients, train or eval mode, "
        "requires_grad and dtypes of parameters, forward hooks, autocast, torch's defaults"
    )
    if dist.get_rank() == 1:
        sharded.eval()
    assert_all_raise(RuntimeMismatchError, state, lambda: sharded(*args, **kwargs))
    sharded.train()
    next(iter(sharded.parameters())).requires_grad_(dist.get_rank() == 1)
    assert_all_raise(RuntimeMismatchError, state, lambda: sharded(*args, **kwargs))
    sharded.requires_grad_(True)
    with torch.set_grad_enabled(dist.get_rank() == 1):
        assert_all_raise(RuntimeMismatchError, state, lambda: sharded(*args, **kwargs))
    sharded(*args, **kwargs)


def wrong_mesh_size() -> None:
    model, args, kwargs = case("mlp")
    ranks = dist.get_world_size()
    text = (
        f"the mesh (dp=3, tp=2) has 6 ranks, but torch.distributed runs {ranks}. "
        f"Start 6 processes (torchrun --nproc-per-node 6) or use a mesh of {ranks}."
    )
    assert_all_raise(MeshError, text, lambda: autoshard.compile(model, {"dp": 3, "tp": 2}, args, kwargs))


def device_mesh() -> None:
    """A torch DeviceMesh may be given instead of a Mesh."""
    model, args, kwargs = case("mlp")
    axes = MESHES[dist.get_world_size()]
    torch_mesh = dist.device_mesh.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    expected = float(loss_of(model(*args, **kwargs)).detach())
    sharded = autoshard.compile(model, torch_mesh, args, kwargs)
    assert (sharded.mesh.axes, sharded.mesh.shape) == (tuple(axes), tuple(axes.values()))
    assert abs(float(loss_of(sharded(*args, **kwargs)).detach()) - expected) <= TOLERANCE * abs(expected)


def other_dtensors() -> None:
    """DTensors that a script makes are torch's own, also on the mesh of a module; those of the module are not."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mine = dist.device_mesh.init_device_mesh(torch.get_default_device().type, (ranks,), mesh_dim_names=("mine",))
    sharded = autoshard.compile(nn.Linear(4, 4 * ranks), mesh(), (torch.ones(8, 4),), hints={"*": "colwise"})
    (number,) = {p.device_mesh for p in sharded.parameters()}
    for on in (mine, number):
        parts = [Partial()] * on.ndim
        total = DTensor.from_local(torch.tensor(rank + 1.0), on, parts, run_check=False)
        assert total.item() == rank + 1
        x = DTensor.from_local(torch.ones(2, 2), on, [*parts[1:], Shard(0)], run_check=False)
        if on.ndim == 1:
            x[0].zero_()
            assert float(x.to_local().sum()) == 4
        x.data = DTensor.from_local(torch.zeros(2, 2), on, [*parts[1:], Shard(0)], run_check=False)
        assert float(x.to_local().detach().sum()) == 4
    weight = sharded.weight
    with torch.no_grad():
        weight[0].zero_()
    assert weight.full_tensor()[0].eq(0).all()
    weight.data = torch.zeros(4 * ranks, 4)
    assert weight.full_tensor().eq(0).all()


def profiled() -> None:
    """Collectives bear the names of the predicted timeline in every rank's profile."""
    _, sharded, args, kwargs = llama()
    assert_as_predicted(names_of(lambda: loss_of(sharded(*args, **kwargs)).backward()), sharded.plan)
    sharded.zero_grad()


def tokens_like(tree: Any, shape: tuple[int, int], number: int) -> Any:
    """Token ids of ``shape`` in place of every tensor."""
    random = torch.Generator().manual_seed(number)
    return pytree.tree_map(lambda x: torch.randint(0, 96, shape, generator=random), tree)


def one_program_for_all_lengths() -> None:
    """Dropout included; sizes that divide the ranks and that do not, logits as DTensors of the call's own shape."""
    model, args, kwargs = case("gpt")
    sharded = autoshard.compile(copy.deepcopy(model), mesh(), args, kwargs, dynamic=True)
    for step, (batch, seq) in enumerate(((4, 16), (3, 5), (5, 9), (2, 3))):
        args, kwargs = tokens_like((args, kwargs), (batch, seq), step)
        model.zero_grad()
        sharded.zero_grad()
        torch.manual_seed(step)
        expected = model(*args, **kwargs)
        seed(step)
        with broadcasts() as sent:
            found = sharded(*args, **kwargs)
        assert len(sent) == 1, "dropout: the generators agree once in a forward"
        expected.loss.backward()
        found.loss.backward()
        outputs = {"loss": found.loss, "logits": found.logits.full_tensor()}
        assert_close(outputs, {"loss": expected.loss, "logits": expected.logits}, f"step {step}")
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_close(sharded.full_gradients(), gradients, f"step {step}, gradient of")
    assert len(sharded.programs) == 1


def a_model_names_its_own_plan() -> None:
    class Named(nn.Sequential):
        _tp_plan: ClassVar = {"0": "colwise", "2": "rowwise"}

    model, x = Named(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).double(), torch.ones(3, 4, dtype=torch.float64)
    sharded = autoshard.compile(copy.deepcopy(model), mesh(), (x,), like={"tp": "tp_plan"})
    assert [str(sharded.plan.layouts[f"{i}.weight"]["tp"]) for i in (0, 2)] == ["S(0)", "S(1)"]
    assert_close({"output": sharded(x)}, {"output": model(x)}, "named plan")


def configuration(model: nn.Module) -> object:
    """What tells models of one class here apart, besides their parameters."""
    return type(model), *(getattr(m, "sparse", None) for m in model.modules())


if __name__ == "__main__":
    if not CASES.keys() & set(sys.argv[4].split(",")):  # others have models of one class that differ in more
        compiler.capture = Captures(of=configuration)  # type: ignore[assignment]
    main(
        {
            **globals(),
            **TABLES,
            **EXPERTS,
            **OF_OUTPUTS,
            **OF_PARAMETERS,
            **{name: lambda case=case: case(mesh()) for name, case in CASES.items()},
        }
    )

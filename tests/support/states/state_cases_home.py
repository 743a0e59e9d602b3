"""Cases of states: what everybody's training scripts do with a module."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import io
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from state_harness import Block, Net, both, case, close, full, ids, pair, refused, same_gradients, same_state, steps
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard import AutoshardError, PlanError
from autoshard.check.reference import upcasts_in_float64
from autoshard.runtime.parameters.offload import OffloadedBlock
from autoshard.transfers.files import SAFETENSORS_INDEX
from autoshard.transfers.messages import RankMessages


@case
def copied(mesh: autoshard.Mesh) -> None:
    """A copy trains by itself, from where the module is, and compiles nothing again."""
    model, sharded = pair(mesh, Net, ids())
    steps(model, sharded, ids())
    other, copy_ = copy.deepcopy(model), copy.deepcopy(sharded)
    before = sharded.full_state_dict()
    steps(other, copy_, ids(seed=1), ids(seed=2))
    assert copy_.programs == sharded.programs
    for name, x in sharded.full_state_dict().items():
        assert torch.equal(x, before[name]), f"{name} is shared with the copy"
    assert copy_.emb.weight is copy_.head.weight
    copy_.eval()
    assert sharded.training
    steps(model, sharded, ids(seed=3), ids(rows=3))
    close(copy_(ids())[1], other.eval()(ids())[1])


@case
def copied_with_handles_of_hooks(mesh: autoshard.Mesh) -> None:
    """As ``gradient_checkpointing_enable`` of transformers leaves one in an attribute; the model itself is gone by then."""

    def handled() -> nn.Module:
        model = Net()
        model.handles = [model.emb.register_forward_hook(lambda _, __, out: 2 * out)]
        return model

    model, sharded = pair(mesh, handled, ids())
    gc.collect()
    steps(model, copy.deepcopy(sharded), ids())


@case
def copied_before_it_is_compiled(mesh: autoshard.Mesh) -> None:
    torch.manual_seed(0)
    model = Net().double()
    sharded = copy.deepcopy(autoshard.compile(model, mesh))
    sharded.specialise((ids(),), {})
    steps(copy.deepcopy(model), sharded, ids(), ids(seed=1))


@case
def averaged(mesh: autoshard.Mesh) -> None:
    """Exponential and plain averages of weights, as AveragedModel makes them, buffers included."""
    model, sharded = pair(mesh, Net, ids())
    for options in ({"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {"use_buffers": True}):
        averages = [AveragedModel(m, **options) for m in (model, sharded)]
        for seed in range(3):
            steps(model, sharded, ids(seed=seed))
            for average, module in zip(averages, (model, sharded), strict=True):
                average.update_parameters(module)
        expected, given = averages
        same_state(given.module, expected.module)
        for average in averages:
            average.eval()
        with torch.no_grad():
            close(given(ids(seed=9))[1], expected(ids(seed=9))[1])


@case
def statistics_computed_anew(mesh: autoshard.Mesh) -> None:
    """``update_bn`` sets ``momentum`` of batch norms, which programs have read, and sets it back."""
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model, sharded = pair(mesh, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), x)
    averages = [AveragedModel(m) for m in (model, sharded)]
    for average, module in zip(averages, (model, sharded), strict=True):
        average.update_parameters(module)
        update_bn([x, 2 * x], average)
    same_state(averages[1].module, averages[0].module)
    close(averages[1](x), averages[0](x))


@case
def wrapped_to_be_made_again(mesh: autoshard.Mesh) -> None:
    """By torch's ``checkpoint_wrapper``: state dicts have the names of the model without it, and load into it, both ways."""

    def wrapped() -> nn.Module:
        model = Net(p=0.2, tied=False)
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block) or m is model.head)
        return model

    model, sharded = pair(mesh, wrapped, ids())
    steps(model, sharded, ids())
    bare = Net(tied=False).double()
    bare.load_state_dict(sharded.full_state_dict())
    whole = model.state_dict()
    for load in (sharded.load_full_state_dict, sharded.load_state_dict):
        model.load_state_dict({n: x / 2 for n, x in whole.items()})
        load(model.state_dict())
        same_state(sharded, model)
    if not sharded.is_staged:
        assert get_model_state_dict(sharded).keys() == whole.keys()
    steps(model, sharded, ids(seed=1))


@case
def wrapped_as_a_whole(mesh: autoshard.Mesh) -> None:
    """The model itself is what ``checkpoint_wrapper`` gives: parameters, gradients and state dicts have the names within."""

    def wrapped() -> nn.Module:
        model = Net(p=0.2)
        model.bn = nn.Identity()  # eager counts a batch twice, as it computes the batch norm again
        return checkpoint_wrapper(model)

    model, sharded = pair(mesh, wrapped, ids())
    steps(model, sharded, ids())
    whole = model.state_dict()
    sharded.load_full_state_dict({n: x / 2 for n, x in whole.items()})
    model.load_state_dict({n: x / 2 for n, x in whole.items()})
    same_state(sharded, model)
    steps(model, sharded, ids(seed=1))


@case
def pickled(mesh: autoshard.Mesh) -> None:
    _, sharded = pair(mesh, Net, ids())
    for what in (sharded, sharded.layers[0]):
        with pytest.raises(AutoshardError, match="cannot be pickled: its programs belong to the mesh of this process"):
            pickle.dumps(what)
    with pytest.raises(AutoshardError, match="cannot be pickled"):
        torch.save(sharded, io.BytesIO())
    for what in (sharded, sharded.layers[0]):
        with pytest.raises(AutoshardError, match=r"copy.copy of a sharded module .*copy.deepcopy\(sharded\)"):
            copy.copy(what)
    if torch.distributed.is_initialized():
        with pytest.raises(AutoshardError, match=r"share_memory\(\) of a sharded tensor of shape .*full_state_dict"):
            sharded.share_memory()
    else:
        assert all(p.is_shared() for p in sharded.share_memory().parameters())


@case
def wrapped_in_ddp(mesh: autoshard.Mesh) -> None:
    """Refused on every rank, and the module is as it was."""
    model, sharded = pair(mesh, Net, ids())
    if torch.distributed.is_initialized():
        with pytest.raises(AutoshardError, match="must not be wrapped in DistributedDataParallel"):
            nn.parallel.DistributedDataParallel(sharded)
    steps(model, sharded, ids())


@case
def prepared_by_accelerate(mesh: autoshard.Mesh) -> None:
    """Its optimizer: gradients are accumulated and clipped as those of the plain model, which nothing prepares."""
    model, sharded = pair(mesh, Net, ids())
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = accelerator.prepare(torch.optim.SGD(sharded.parameters(), 0.1, 0.9))
    plain = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for step in range(4):
        with accelerator.accumulate(sharded):
            accelerator.backward(sharded(ids(seed=step))[0])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(sharded.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        (model(ids(seed=step))[0] / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            plain.step()
            plain.zero_grad()
    same_state(sharded, model)


class Orthogonal(torch.optim.Optimizer):
    """Steps matrices by their polar factor, with momentum and noise; keeps norms of rows."""

    def __init__(self, params: Any, noise: float = 0.01) -> None:
        super().__init__(params, {"noise": noise})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
            state["rows"] = mean.flatten(1).norm(dim=1) if p.ndim > 1 else mean.abs()
            if p.ndim == 2:
                left, values, right = torch.linalg.svd(mean, full_matrices=False)
                mean = left @ (values / (values + 0.1)).diag() @ right
            noise = self.param_groups[0]["noise"]
            p.sub_(0.1 * mean + noise * (torch.rand(p.shape, dtype=p.dtype) if noise else 0.0))


@case
def stepped_on_whole_tensors(mesh: autoshard.Mesh) -> None:
    """By autoshard.whole, also with a closure; its full state, loaded into another, goes on as one device's."""
    model, sharded = pair(mesh, Net, ids())
    for kind in (Orthogonal, functools.partial(torch.optim.LBFGS, lr=0.01, max_iter=3)):
        optimizers: list[Any] = [kind(model.parameters()), autoshard.whole(kind(sharded.parameters()))]
        schedules = [torch.optim.lr_scheduler.StepLR(x, 1, 0.9) for x in optimizers if "lr" in x.defaults]
        for step in range(4):
            if step == 2 and kind is Orthogonal:
                state = autoshard.full_optimizer_state_dict(sharded, optimizers[1])
                optimizers[1] = autoshard.whole(kind(sharded.parameters()))
                autoshard.load_full_optimizer_state_dict(sharded, optimizers[1], state)
            elif step == 3 and kind is Orthogonal:  # steps of a copy's copy are those of the whole tensors, too
                sharded, optimizers[1] = copy.deepcopy(copy.deepcopy((sharded, optimizers[1])))
            elif step == 5:
                optimizers[1].state_dict()
            for module, optimizer in zip((model, sharded), optimizers, strict=True):
                torch.manual_seed(step)

                def closure(module: Any = module, optimizer: Any = optimizer, step: int = step) -> Any:
                    optimizer.zero_grad()
                    loss = module(ids(seed=step))[0]
                    loss.backward()
                    return loss

                if kind is Orthogonal:
                    closure()
                optimizer.step(*([] if kind is Orthogonal else [closure]))
            for schedule in schedules:
                schedule.step()
        same_state(sharded, model)
    assert [p.shape for p in sharded.parameters()] == [p.shape for p in model.parameters()]


@case
def optimizer_states_on_the_host(mesh: autoshard.Mesh) -> None:
    """By autoshard.offloaded: updates are one device's, with a scheduler, clipping, and states saved and loaded."""
    model, sharded = pair(mesh, Net, ids())

    def make(module: Any) -> Any:
        return torch.optim.AdamW(module.parameters(), lr=1e-2, amsgrad=True, eps=1e-6)

    optimizers = [make(model), autoshard.offloaded(make(sharded))]
    schedules = [torch.optim.lr_scheduler.StepLR(x, 1, 0.5) for x in optimizers]
    for step in range(4):
        if step == 2:
            state = autoshard.full_optimizer_state_dict(sharded, optimizers[1])
            optimizers[1] = autoshard.offloaded(make(sharded))
            autoshard.load_full_optimizer_state_dict(sharded, optimizers[1], state)
        for module, optimizer in zip((model, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            module(ids(seed=step))[0].backward()
            autoshard.clip_grad_norm_(module, 0.1) if module is sharded else nn.utils.clip_grad_norm_(
                module.parameters(), 0.1
            )
            optimizer.step()
        for schedule in schedules if step < 2 else ():
            schedule.step()
    same_state(sharded, model)
    assert any(x.ndim for entry in optimizers[1].state.values() for x in entry.values())


class Narrow(nn.Module):
    """Layers that keep more when recomputed than one of them needs."""

    def __init__(self) -> None:
        super().__init__()
        each = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(6))
        self.layers, self.first = nn.ModuleList(each), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@case
def activations_on_the_host(mesh: autoshard.Mesh) -> None:
    """A budget that recomputation does not meet is met; weights after three steps are one device's."""
    torch.manual_seed(0)
    model, x = Narrow().double(), torch.randn(4 * 8192, 16, dtype=torch.float64)
    asked: dict[str, Any] = {"like": "ddp", "recompute": "blocks", "parts": None}
    on = autoshard.Mesh(dict(mesh.sizes), "cpu")
    asked["memory_budget"] = 0.85 * autoshard.compile(copy.deepcopy(model), on, (x,), **asked).plan.memory.peak
    with refused("no plan within", PlanError):
        autoshard.compile(copy.deepcopy(model), on, (x,), **asked)
    sharded = autoshard.compile(copy.deepcopy(model), on, (x,), offload="activations", **asked)
    assert sharded.plan.memory.peak <= asked["memory_budget"]
    (found,) = sharded.plan.offloaded
    assert found.blocks[0] == "layers.0"
    sent, send = list[StorageWeakRef](), OffloadedBlock.send
    sizes = list[int]()

    def noted(block: OffloadedBlock, value: torch.Tensor) -> None:
        sizes.append(value.untyped_storage().nbytes())
        sent.append(StorageWeakRef(value.untyped_storage()))
        send(block, value)

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-6) for m in (model, sharded)]
    with mock.patch.object(OffloadedBlock, "send", noted):
        for _ in range(3):
            for module, optimizer in zip((model, sharded), optimizers, strict=True):
                optimizer.zero_grad()
                loss = module(x)
                assert all(ref.expired() for ref in sent)  # the device has none of them between forward and backward
                loss.backward()
                optimizer.step()
    here = 1 if dist.is_initialized() else on.size
    each = here * max(1, sharded.plan.micro_batches) * found.bytes  # the host holds one micro-batch at a time
    assert sum(sizes) == 3 * each > 0
    same_state(sharded, model)
    sharded.eval()
    with torch.no_grad():
        close(sharded(x[:256]), model(x[:256]))


@case
def matrices_dealt_to_ranks(mesh: autoshard.Mesh) -> None:
    """By autoshard.dealt: one rank orthogonalises each matrix, and only what a rank lacks is sent; states are saved."""
    updated, sent = list[Any](), list[int]()

    def noting(call: Any, note: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            note(args[0])
            return call(*args, **kwargs)

        return noted

    muon = (torch.optim._muon, "_zeropower_via_newtonschulz", lambda gradient: updated.append(tuple(gradient.shape)))
    bytes_ = (RankMessages, "of", lambda schedule: sent.extend(m.bytes for m in schedule.messages))
    for kind in (functools.partial(torch.optim.Muon, lr=0.01), functools.partial(Orthogonal, noise=0.0)):
        model, sharded = pair(mesh, Net, ids())
        first, second = ([p for p in m.parameters() if p.ndim == 2] for m in (model, sharded))
        if sharded.is_staged:
            with refused("without stages", AutoshardError):
                autoshard.dealt(kind(second), sharded)
            return
        optimizers: list[Any] = [kind(first), autoshard.dealt(kind(second), sharded)]
        schedules = [torch.optim.lr_scheduler.StepLR(x, 1, 0.5) for x in optimizers if "lr" in x.defaults]
        for step in range(6):
            if step == 2:
                state = autoshard.full_optimizer_state_dict(sharded, optimizers[1])
                optimizers[1] = autoshard.dealt(kind(second), sharded)
                autoshard.load_full_optimizer_state_dict(sharded, optimizers[1], state)
            for module, optimizer in zip((model, sharded), optimizers, strict=True):
                optimizer.zero_grad()
                module(ids(seed=step))[0].backward()
                if step == 3 and schedules:  # right after the states were loaded
                    next(p for p in module.parameters() if p.ndim == 2).grad = None
                with contextlib.ExitStack() as stack:
                    for owner, name, note in (muon, bytes_) if module is sharded and not sent else ():
                        stack.enter_context(mock.patch.object(owner, name, noting(getattr(owner, name), note)))
                    optimizer.step()
            if step < 2:
                for schedule in schedules:
                    schedule.step()
        same_state(sharded, model)
        assert len(optimizers[1].state_dict()["state"]) == len(second)
        if dist.is_initialized():
            with refused("cannot be copied", AutoshardError):
                copy.deepcopy(optimizers[1])
    if dist.is_initialized():
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, updated)
        assert all(every)
        assert sorted(x for each in every for x in each) == sorted(tuple(p.shape) for p in first)
        cut = [any(placed.is_shard() for placed in p.placements) for p in second]
        assert sum(sent) == sum(p.numel() * 8 * (1.5 if c else 1) for p, c in zip(first, cut, strict=True))


@case
def compiled_by_torch(mesh: autoshard.Mesh) -> None:
    """The generated code of a rank is compiled, in pieces between collectives; in one process it stays as it is."""
    graphs = []

    def counted(graph: torch.fx.GraphModule, example: object) -> Any:
        graphs.append(graph)
        return graph.forward

    model, sharded = pair(mesh, Net, ids())
    for backend in (counted, "aot_eager"):
        torch._dynamo.reset()
        module = torch.compile(sharded, backend=backend)
        for rows in (4, 4, 3):
            both(model, sharded, lambda m: m.zero_grad())
            losses = [full(m(ids(rows))[0]) for m in (model, module)]
            close(losses[1], losses[0])
            for loss in losses:
                loss.backward()
            same_gradients(sharded, model)
        with torch.no_grad():  # gathered, by a way that is not traced: that would print warnings
            close(module(ids())[1], model(ids())[1])
    assert bool(graphs) == torch.distributed.is_initialized()
    torch._dynamo.reset()
    graphs.clear()
    sharded.compile(backend=counted)
    close(sharded(ids())[0], model(ids())[0])
    assert bool(graphs) == torch.distributed.is_initialized()
    torch._dynamo.reset()


class Configured(nn.Module):
    """With what a user's code looks at: a configuration, a property, methods that read both."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"width": 4})()
        self.mesh_name = "flat"
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    @property
    def width(self) -> int:
        return int(self.config.width)

    def count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def encode(self, x: torch.Tensor) -> Any:
        return self.body(x)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return (self.body(x) * scale).sum()


@case
def looked_at(mesh: autoshard.Mesh) -> None:
    """It is an instance of the model's class, with its signature, attributes and methods, and so are its parts."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double()
    model, sharded = pair(mesh, Configured, x)
    assert isinstance(sharded, Configured)
    assert isinstance(sharded, autoshard.ShardedModule)
    assert type(sharded).__name__ == "Configured"
    assert inspect.signature(sharded.forward) == inspect.signature(model.forward)
    assert inspect.signature(type(sharded).forward) == inspect.signature(Configured.forward)
    assert (sharded.config.width, sharded.width, sharded.count()) == (4, 4, model.count())
    assert isinstance(sharded.body[1], nn.Linear)
    assert sharded.body[1].weight is dict(sharded.named_parameters())["body.1.weight"]
    assert [type(m).__name__ for m in sharded.modules()] == [type(m).__name__ for m in model.modules()]
    close(sharded.encode(x), model.encode(x))
    close(sharded(x, scale=2.0), model(x, scale=2.0))


@case
def wrapped_forward(mesh: autoshard.Mesh) -> None:
    """As accelerate does for mixed precision: an attribute ``forward`` that calls the one before."""
    model, sharded = pair(mesh, Net, ids())
    before = sharded.forward
    sharded.forward = lambda *args: before(*args)[0] * 2
    close(sharded(ids()), model(ids())[0] * 2)
    sharded.forward = lambda *args: sharded.layers[0](sharded.emb(*args))  # as trl's head calls the backbone
    close(sharded(ids()), model.layers[0](model.emb(ids())))
    del sharded.__dict__["forward"]
    close(sharded(ids())[0], model(ids())[0])


@case
def loaded_from_files(mesh: autoshard.Mesh) -> None:
    """safetensors files with an index, tied weights once."""
    torch.manual_seed(1)
    model, sharded = Net().double(), autoshard.compile(Net().double(), mesh, (ids(),))
    entries = {n: x for n, x in model.state_dict().items() if n != "head.weight"}
    names = list(entries)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    with tempfile.TemporaryDirectory() as folder:
        for file, held in parts.items():
            save_file({n: entries[n] for n in held}, f"{folder}/{file}")
        index = {"weight_map": {n: file for file, held in parts.items() for n in held}}
        Path(folder, SAFETENSORS_INDEX).write_text(json.dumps(index))
        autoshard.load_safetensors(sharded, folder)
        steps(model, sharded, ids())
        before = sharded.full_state_dict()
        save_file({**entries, "other": torch.ones(1)}, f"{folder}/c.safetensors")
        with pytest.raises(PlanError, match=r"unknown \['other'\]"):
            autoshard.load_safetensors(sharded, f"{folder}/c.safetensors")
        save_file({**entries, names[-1]: torch.ones(3, 3)}, f"{folder}/c.safetensors")
        with pytest.raises(PlanError, match="has shape"):
            autoshard.load_safetensors(sharded, f"{folder}/c.safetensors")
        with pytest.raises(PlanError, match="holds no safetensors"):
            autoshard.load_safetensors(sharded, f"{folder}/none")
    assert all(torch.equal(x, before[n]) for n, x in sharded.full_state_dict().items())


@case
@upcasts_in_float64()
def saved_by_a_method_of_the_models(mesh: autoshard.Mesh) -> None:
    """``save_pretrained`` writes the whole weights; attributes that it reads are there, and of others it is said why not."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )

    def make() -> nn.Module:
        made = LlamaForCausalLM(config)
        made.adapters, made.act = {"default": config}, made.forward
        return made

    model, sharded = pair(mesh, make)
    assert sharded.adapters == {"default": config}
    with pytest.raises(AttributeError, match="attribute 'act' of a LlamaForCausalLM is not kept in a sharded module"):
        sharded.act  # noqa: B018
    for module in (sharded, model):
        full(module(ids(), labels=ids()).loss).backward()
        torch.optim.SGD(module.parameters(), 0.1).step()
    shared: list[Any] = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(shared)
    sharded.save_pretrained(shared[0])
    written = load_file(f"{shared[0]}/model.safetensors")
    for name, x in model.state_dict().items():
        close(written[name], x, name)
    sharded.save_pretrained(f"{shared[0]}/all", distributed_checkpoint=True)
    assert len(list(Path(shared[0]).glob("all/model*.safetensors"))) > dist.is_initialized()  # one of each process
    for name, x in LlamaForCausalLM.from_pretrained(f"{shared[0]}/all", dtype=torch.float64).state_dict().items():
        close(x, model.state_dict()[name], name)
    with refused("does not take push_to_hub=", PlanError):
        sharded.save_pretrained(f"{shared[0]}/all", distributed_checkpoint=True, push_to_hub=True)


@case
def optimizer_states_of_one_device(mesh: autoshard.Mesh) -> None:
    """The state of an optimizer goes to the unsharded model's and back."""
    model, sharded = pair(mesh, Net, ids())
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01, eps=1e-4) for m in (model, sharded)]

    def step(seed: int) -> None:
        for module, optimizer in zip((model, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            full(module(ids(seed=seed))[0]).backward()
            optimizer.step()
        same_state(sharded, model)

    step(0)
    states = model_state, sharded_state = (
        optimizers[0].state_dict(),
        autoshard.full_optimizer_state_dict(sharded, optimizers[1]),
    )
    for number, entry in model_state["state"].items():
        for key, x in entry.items():
            torch.testing.assert_close(sharded_state["state"][number][key], x, rtol=1e-9, atol=1e-12)
    for state in states:
        optimizers = [torch.optim.AdamW(m.parameters(), 0.01, eps=1e-4) for m in (model, sharded)]
        optimizers[0].load_state_dict(copy.deepcopy(state))
        autoshard.load_full_optimizer_state_dict(sharded, optimizers[1], copy.deepcopy(state))
        step(1)

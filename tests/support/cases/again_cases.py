"""Parts of the forward that run again in the backward, against the unsharded model; run in one process and under gloo."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from again_models import Smooth, made
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import autoshard
from autoshard.errors import RuntimeMismatchError

random: Any = importlib.import_module("autoshard.runtime.operations.random")
again: Any = importlib.import_module("autoshard.runtime.parameters.recompute")  # a function has this name, too
TOLERANCE = 1e-9


def loss_of(out: Any) -> torch.Tensor:
    loss: torch.Tensor = out.loss if hasattr(out, "loss") else out if out.ndim == 0 else out.square().mean()
    return full(loss)


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = full(a.detach()), b.detach()
    found = float((a - b).norm() / b.norm().clamp_min(1e-30)) if b.numel() else 0.0
    return math.inf if math.isnan(found) else found


def assert_same_gradients(sharded: nn.Module, model: nn.Module, times: float = 1.0) -> None:
    gradients = {n: p.grad for n, p in model.named_parameters()}
    largest = max(float(g.norm()) for g in gradients.values() if g is not None)
    for n, p in sharded.named_parameters():
        ours, theirs = p.grad, gradients[n]
        assert (ours is None) == (theirs is None), n
        if ours is not None and theirs is not None:
            error = (full(ours) - times * theirs).norm() / theirs.norm().clamp_min(1e-3 * largest)
            assert error <= TOLERANCE, f"gradient of {n}: {error}"


def compiled(model: nn.Module, mesh: autoshard.Mesh, args: Any, recompute: Any = "blocks", **options: Any) -> Any:
    """Of a copy of ``model``; something is recomputed where that is asked, and "selective" finds what it would save."""
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, recompute=recompute, **options)
    remade = bool(sharded.plan.recomputed)
    assert remade == ("runtime.recompute(" in sharded.source)
    assert recompute == "selective" or remade == (recompute != "none")
    return sharded


def compare(name: str, mesh: autoshard.Mesh, recompute: Any, steps: int = 3, **options: Any) -> Any:
    """``steps`` AdamW steps: losses, gradients, weights and buffers are those of one device."""
    model, args = made(name)
    sharded = compiled(model, mesh, args, recompute, **options)
    ours, theirs = (torch.optim.AdamW(m.parameters(), 1e-2, eps=1e-6) for m in (sharded, model))
    for step in range(steps):
        torch.manual_seed(step)
        expected = loss_of(model(*args))
        torch.manual_seed(step)
        found = loss_of(sharded(*args))
        assert far(found, expected) <= TOLERANCE
        expected.backward()
        before = torch.get_rng_state()
        found.backward()
        assert torch.equal(before, torch.get_rng_state()), "the backward took random numbers"
        assert_same_gradients(sharded, model)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    found_state, state = sharded.full_state_dict(), model.state_dict()
    largest = max(float(x.double().norm()) for x in state.values())
    for n, x in state.items():  # keys' biases begin at 0 and have no gradient but what is rounded
        error = (found_state[n].double() - x.double()).norm() / x.double().norm().clamp_min(1e-3 * largest)
        assert error <= TOLERANCE, n
    return sharded


def trains(name: str, recompute: Any, **options: Any) -> Callable[[autoshard.Mesh], None]:
    return lambda mesh: (compare(name, mesh, recompute, **options), None)[1]


def twice(mesh: autoshard.Mesh) -> None:
    """Two backward passes through one graph, by ``retain_graph``."""
    model, args = made("smooth")
    sharded = compiled(model, mesh, args)
    for m in (model, sharded):
        torch.manual_seed(0)
        loss = loss_of(m(*args))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(sharded, model)


def second_derivatives(mesh: autoshard.Mesh) -> None:
    """``create_graph``: what runs again has derivatives of its own."""
    model, args = made("smooth")
    sharded = compiled(model, mesh, args)
    for m in (model, sharded):
        torch.manual_seed(0)
        parameters = list(m.parameters())
        gradients = torch.autograd.grad(loss_of(m(*args)), parameters, create_graph=True)
        sum(full(g).square().sum() for g in gradients).backward()  # type: ignore[union-attr]
    assert_same_gradients(sharded, model)


def two_forwards(mesh: autoshard.Mesh) -> None:
    """Two forwards before one backward: each remembers its own."""
    model, args = made("smooth")
    sharded = compiled(model, mesh, args)
    for m in (model, sharded):
        torch.manual_seed(0)
        (loss_of(m(*args)) + 2 * loss_of(m(*(x.flip(0) for x in args)))).backward()
    assert_same_gradients(sharded, model)


def changed_in_place(mesh: autoshard.Mesh) -> None:
    """Parameters that changed between forward and backward: an error, where the backward computes with them.

    In one process the ranks have copies of the parameters, from which gradients are right.
    """
    message = "was changed in place between forward and backward"
    model, args = made("mlp")
    loss_of(model(*args)).backward()
    for recompute in ("blocks", "selective"):
        sharded = compiled(model, mesh, args, recompute)
        loss = loss_of(sharded(*args))
        with torch.no_grad():
            for p in sharded.parameters():
                p.mul_(1.5)
        with pytest.raises(RuntimeMismatchError, match=message) if dist.is_initialized() else contextlib.nullcontext():
            loss.backward()
            assert_same_gradients(sharded, model)


def open_lengths(mesh: autoshard.Mesh) -> None:
    """One program for all lengths of the batch."""
    model, args = made("smooth")
    sharded = compiled(model, mesh, args, dynamic={"x": {0: "batch"}})
    for rows in (6, 12):
        more = tuple(x.repeat(2, 1, 1)[:rows] for x in args)
        for m in (model, sharded):
            m.zero_grad()
            torch.manual_seed(0)
            loss_of(m(*more)).backward()
        assert_same_gradients(sharded, model)


def autocast(mesh: autoshard.Mesh) -> None:
    """Casts of the program are recomputed as they were, outside the autocast of the backward."""
    model, args = made("mlp")
    model, args = model.float(), tuple(x.float() for x in args)
    found = []
    for recompute in ("none", "blocks"):
        with torch.autocast("cpu", torch.bfloat16):
            sharded = compiled(
                model, mesh, args, recompute, hints={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
            )
            loss = loss_of(sharded(*args).float())
        loss.backward()
        found.append({n: full(p.grad) for n, p in sharded.named_parameters()})
    for n, x in found[0].items():
        assert torch.equal(x, found[1][n]), n


def frozen(mesh: autoshard.Mesh) -> None:
    """The first block is not trained."""
    model, args = made("smooth")
    for p in model.blocks[0].parameters():  # type: ignore[union-attr,index]
        p.requires_grad_(False)
    sharded = compiled(model, mesh, args)
    for m in (model, sharded):
        torch.manual_seed(0)
        loss_of(m(*args)).backward()
    assert_same_gradients(sharded, model)


def without_gradients(mesh: autoshard.Mesh) -> None:
    """Nothing is remembered."""
    model, args = made("smooth")
    sharded = compiled(model, mesh, args)
    with torch.no_grad(), remembered() as seen:
        torch.manual_seed(0)
        found = loss_of(sharded(*args))
        torch.manual_seed(0)
        assert far(found, loss_of(model(*args))) <= TOLERANCE
    assert not seen


def buffers_once(mesh: autoshard.Mesh) -> None:
    """Running statistics of a step are those of one forward."""
    sharded = compare("normed", mesh, "blocks", steps=1)
    assert int(full(sharded.get_buffer("blocks.0.1.num_batches_tracked"))) == 1


def nothing_leaks(mesh: autoshard.Mesh) -> None:
    """What was kept goes with the backward, or with the loss, without the collector."""
    model, args = made("smooth")
    sharded = compiled(model, mesh, args)
    own = {
        x.untyped_storage()._cdata for x in (*map(local, sharded.parameters()), *map(local, sharded.buffers()), *args)
    }
    for backward in (True, False):
        gc.collect()
        gc.disable()
        try:
            with remembered() as seen:
                loss = loss_of(sharded(*args))
            kept = [ref for address, ref in seen if address not in own]
            assert kept
            assert not any(ref.expired() for ref in kept)
            if backward:
                loss.backward()
            del loss
            until = time.monotonic() + 10.0
            while not all(ref.expired() for ref in kept) and time.monotonic() < until:
                time.sleep(0.001)  # gloo's threads let go of messages
            assert all(ref.expired() for ref in kept)
            assert not again._recomputable_storages
        finally:
            gc.enable()


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@contextlib.contextmanager
def remembered() -> Iterator[list[tuple[int, StorageWeakRef]]]:
    """Storages of the tensors that are kept inside, with their addresses."""
    seen: list[tuple[int, StorageWeakRef]] = []

    class Kept(again.SavedTensor):
        def __new__(cls, tensor: torch.Tensor, version: int) -> Any:
            storage = tensor.untyped_storage()
            seen.append((storage._cdata, StorageWeakRef(storage)))
            return super().__new__(cls, tensor, version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(again, "SavedTensor", Kept)
        yield seen


def other_draws_are_seen(mesh: autoshard.Mesh) -> None:
    """Negative control, of what is computed again and of what is drawn again by itself."""
    for where in (again, random):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, "set_generator_states", lambda states: None)
            with pytest.raises(AssertionError, match=r"gradient of|the backward took random numbers"):
                compare("smooth", mesh, "blocks", steps=1)


def drawn_again(mesh: autoshard.Mesh) -> None:
    """What dropout behind the last sum of a block hits is drawn again: neither the sum nor its product is recomputed for it."""
    like = {"like": "megatron-sp"} if "tp" in mesh.axes else {"like": "fsdp"}
    for recompute, micro_batches in (("selective", 1), ("blocks", 1), ("blocks", 2)):
        sharded = compare("smooth", mesh, recompute, steps=1, micro_batches=micro_batches, **like)
        assert sharded.source.count("again=True") == 1  # both blocks are one class
        assert not any("(recomputed)" in c.reason and "scatter" in c.kind for c in sharded.collectives)
        found = [r.bytes for r in sharded.plan.recomputed if r.what == "drawn"]
        assert len(found) == 2
        assert micro_batches > 1 or found == [6 * 4 * 16 / mesh.size] * 2  # a byte for each element
    as_executed(sharded, made("smooth")[1])


def sums_are_kept(mesh: autoshard.Mesh) -> None:
    """What a batch norm sums over ranks is there when it runs again; negative control: with other sums gradients differ."""
    sharded = compare("normed", mesh, "blocks", steps=1, like="ddp")
    of_norms = Counter(c.phase for c in sharded.collectives if "batch_norm" in c.reason)
    assert of_norms == {"forward": 4, "backward": 4}
    assert sum("batch_norm" in r.name for r in sharded.plan.recomputed) == 2
    as_executed(sharded, made("normed")[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(again._RankForward, "summed", lambda run: lambda x, reduce: x.detach().clone().requires_grad_())
        with pytest.raises(AssertionError, match="gradient of"):
            compare("normed", mesh, "blocks", steps=1, like="ddp")


def as_planned(mesh: autoshard.Mesh) -> None:
    """The collectives of the step, those that run again among the backward's: kinds, axes, phases and bytes."""
    model, args = made("gpt")
    sharded = compiled(model, mesh, args)
    as_executed(sharded, args)
    assert any("(recomputed)" in c.reason for c in sharded.collectives)


def as_executed(sharded: Any, args: Any) -> None:
    """The collectives of a plan are those of a step."""
    loss_of(sharded(*args)).backward()
    log: list[Any] = []
    holder = sharded._comm if dist.is_initialized() else sharded._world
    holder.log = log
    loss_of(sharded(*args)).backward()
    holder.log = None
    planned, executed = Counter[Any](), Counter[Any]()
    for c in sharded.collectives:
        planned[c.kind, c.axes, c.phase] += c.bytes
    for e in log:
        executed[e.kind, e.axes, e.phase] += e.bytes
    assert planned == pytest.approx(executed)


def hinted(reentrant: bool) -> Callable[[autoshard.Mesh], None]:
    """``torch.utils.checkpoint`` in the model: the blocks inside are recomputed, with the same numbers."""

    def run(mesh: autoshard.Mesh) -> None:
        _, args = made("smooth")
        torch.manual_seed(0)
        model = Smooth(reentrant).double()
        sharded = compiled(model, mesh, args, "auto")
        assert "def block_again" in sharded.source
        for m in (model, sharded):
            torch.manual_seed(0)
            loss_of(m(*args)).backward()
        assert_same_gradients(sharded, model)
        compiled(model, mesh, args, "none")

    return run


def two_ranks_differ(mesh: autoshard.Mesh) -> None:
    """Ranks with seeds of their own make the masks of rank 0 again."""
    model, args = made("smooth")
    sharded = compiled(model, mesh, args)
    torch.manual_seed(0)
    loss_of(model(*args)).backward()
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    loss_of(sharded(*args)).backward()
    assert_same_gradients(sharded, model)


MODELS = ("gpt", "llama", "moe", "mlp", "normed", "vit")
SETTINGS = {"none": "none", "selective": "selective", "blocks": "blocks", "first": {"blocks.0": True}}
CASES: dict[str, Callable[[autoshard.Mesh], None]] = {
    "gpt_blocks": trains("gpt", "blocks"),
    "gpt_selective": trains("gpt", "selective"),
    "llama_blocks": trains("llama", "blocks"),
    "moe_blocks": trains("moe", "blocks"),
    "normed_blocks": trains("normed", "blocks"),
    "mlp_first": trains("mlp", {"blocks.0": True}),
    "gpt_micro_batches": trains("gpt", "blocks", micro_batches=2),
    "twice": twice,
    "second_derivatives": second_derivatives,
    "two_forwards": two_forwards,
    "changed_in_place": changed_in_place,
    "open_lengths": open_lengths,
    "autocast": autocast,
    "frozen": frozen,
    "without_gradients": without_gradients,
    "buffers_once": buffers_once,
    "nothing_leaks": nothing_leaks,
    "other_draws_are_seen": other_draws_are_seen,
    "drawn_again": drawn_again,
    "sums_are_kept": sums_are_kept,
    "as_planned": as_planned,
    "two_ranks_differ": two_ranks_differ,
    "checkpoint": hinted(reentrant=False),
    "checkpoint_reentrant": hinted(reentrant=True),
}

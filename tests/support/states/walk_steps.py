"""Steps of random walks: what training scripts do between calls."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from walks import Block, Walk

import autoshard
from autoshard import full_optimizer_state_dict, load_full_optimizer_state_dict
from autoshard.errors import AutoshardError

Step = Callable[[Walk], str]
STEPS: dict[str, Step] = {}
"""each does the same to both models, and says what it did"""


def step(function: Step) -> Step:
    STEPS[function.__name__] = function
    return function


def walk(axes: dict[str, int], seed: int, steps: int = 12, told: list[str] | None = None, **options: Any) -> list[str]:
    """The steps that were taken, the last the one that failed where this raises."""
    told = [] if told is None else told
    at = Walk(axes, seed, **options)
    told.append(f"{axes} {at.options}")
    for _ in range(steps):
        name = at.draw.choice([*STEPS])
        told.append(name)
        told[-1] += " " + STEPS[name](at)
        told.append("then a call")
        at.check()
        losses = at.call(recorded=at.draw.random() < 0.7)
        told.append("its backward")
        if at.draw.random() < 0.4:
            at.backward(losses)
        at.check()
        del told[-2:]
        if at.autocast:
            at.resync()
    return told


def some(at: Walk) -> str:
    return at.draw.choice(("", "emb", "head", "blocks.0", "blocks.1.attention", "bn", "blocks.0.up", "blocks"))


@step
def freeze(at: Walk) -> str:
    start, only = some(at), at.draw.random() < 0.3
    at.both(lambda m: [p.requires_grad_(False) for n, p in m.named_parameters() if n.startswith(start) != only])
    return start + " others" * only


@step
def unfreeze(at: Walk) -> str:
    start = some(at)
    at.both(lambda m: [p.requires_grad_(True) for n, p in m.named_parameters() if n.startswith(start)])
    return start


@step
def modes(at: Walk) -> str:
    path, mode = some(at), at.draw.random() < 0.5
    at.both(lambda m: m.get_submodule(path).train(mode))
    return f"{path} {mode}"


@step
def autocast(at: Walk) -> str:
    at.autocast = not at.autocast
    at.tolerance = tolerance(at)
    return f"{at.autocast}"


@step
def dtype(at: Walk) -> str:
    to = at.draw.choice((torch.float32, torch.float64))
    at.both(lambda m: m.to(to))
    at.both(lambda m: m.zero_grad())
    at.tolerance = tolerance(at)
    at.optimize()
    at.sharded.load_full_state_dict(at.model.state_dict())
    at.averages = None
    return str(to)


def tolerance(at: Walk) -> float:
    """Of float64, which autocast leaves alone; of float32, in another order; in bfloat16."""
    if at.model.emb.weight.dtype == torch.float64:
        return 1e-9
    return 0.1 if at.autocast else 3e-4


@step
def swap(at: Walk) -> str:
    how = at.draw.choice(("copy", "data", "load", "zero rows", "init"))
    seed = at.draw.randrange(1000)

    def change(m: Any) -> None:
        a, b = m.blocks[0], m.blocks[1]
        with torch.no_grad():
            if how == "copy":
                for p, q in zip(a.parameters(), b.parameters(), strict=True):
                    kept = p.clone()
                    p.copy_(q)
                    q.copy_(kept)
            elif how == "data":
                for p, q in zip(a.parameters(), b.parameters(), strict=True):
                    p.data, q.data = q.data, p.data
            elif how == "load":
                torch.manual_seed(seed)
                a.load_state_dict({n: t.to(a.norm.weight.dtype) for n, t in Block().state_dict().items()})
            elif how == "zero rows":
                m.emb.weight[2:5].zero_()
                a.attention.qkv.weight.data[3:11] *= 0.5
            else:
                torch.manual_seed(seed)
                b.apply(lambda x: nn.init.normal_(x.weight, std=0.3) if isinstance(x, nn.Linear) else None)

    at.both(change)
    return how


@step
def average(at: Walk) -> str:
    if at.averages is None or at.draw.random() < 0.3:
        at.averages = at.both(lambda m: AveragedModel(m, use_buffers=True))
        return "begins"
    for mean, module in zip(at.averages, at.modules, strict=True):
        mean.update_parameters(module)
    at.averages = [copy.deepcopy(m) for m in at.averages]
    (theirs, ours), given = at.averages, at.ids()
    torch.manual_seed(0)
    with torch.no_grad():
        expected = theirs(given)[1]
        torch.manual_seed(0)
        at.same("logits of the average", ours(given)[1], expected)
    if at.draw.random() < 0.5:
        for mean, module in zip(at.averages, at.modules, strict=True):
            module.load_state_dict(mean.module.state_dict())
        return "is taken"
    return ""


@step
def shape(at: Walk) -> str:
    at.rows, at.length = at.draw.choice((2, 3, 4, 5)), at.draw.choice((2, 3, 5))
    at.scaled = at.draw.random() < 0.3
    return f"{at.rows} {at.length} {at.scaled}"


@step
def accumulate(at: Walk) -> str:
    count, quietly = at.draw.choice((2, 3)), at.draw.random() < 0.5
    for i in range(count):
        with at.sharded.no_sync() if quietly and i < count - 1 else contextlib.nullcontext():
            at.backward(at.call())
    return f"{count} {'no_sync' if quietly else ''}"


@step
def two_calls_one_backward(at: Walk) -> str:
    at.backward(at.call(count=2))
    return ""


@step
def between(at: Walk) -> str:
    """Something between forward and backward."""
    losses, what = at.call(), at.draw.choice(("mode", "freeze", "another call", "zero_grad", "retained"))
    if what == "mode":
        mode = not at.model.training
        at.both(lambda m: m.train(mode))
    elif what == "another call":
        at.call(recorded=False)
    elif what == "zero_grad":
        at.both(lambda m: m.zero_grad())
    elif what == "retained" and losses[0].requires_grad:
        for loss in losses:
            loss.backward(retain_graph=True)
    elif what == "freeze":
        at.both(lambda m: m.head.bias.requires_grad_(False))
    at.backward(losses)
    return what


@step
def clip(at: Walk) -> str:
    at.backward(at.call())
    how, kind = at.draw.choice(("torch", "ours", "value")), at.draw.choice((2.0, 1.0, float("inf")))
    if not any(p.grad is not None for p in at.model.parameters()):
        return "nothing"
    if how == "value":
        at.both(lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.05))
    else:
        theirs = nn.utils.clip_grad_norm_(at.model.parameters(), 0.2, kind)
        clip = nn.utils.clip_grad_norm_ if how == "torch" else autoshard.clip_grad_norm_
        given = at.sharded.parameters() if how == "torch" else at.sharded
        at.same("norm", clip(given, 0.2, kind), theirs)
    return f"{how} {kind}"


@step
def optimizer_step(at: Walk) -> str:
    at.backward(at.call())
    at.check()
    for optimizer in at.optimizers:
        optimizer.step()
    if at.draw.random() < 0.7:
        none = at.draw.random() < 0.5
        for optimizer in at.optimizers:
            optimizer.zero_grad(none)
    return type(at.optimizers[0]).__name__


@step
def other_optimizer(at: Walk) -> str:
    at.optimize()
    return type(at.optimizers[0]).__name__


@step
def lower_rate(at: Walk) -> str:
    for optimizer in at.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    return ""


@step
def gradients_written(at: Walk) -> str:
    what = at.draw.choice(("scaled", "none", "clamped", "row", "assigned", "noise"))
    at.backward(at.call())
    seed = at.draw.randrange(1000)

    def change(m: Any) -> None:
        torch.manual_seed(seed)
        for name, p in m.named_parameters():
            if p.grad is None:
                continue
            if what == "scaled":
                p.grad.mul_(0.5)
            elif what == "none" and name.startswith("blocks.1"):
                p.grad = None
            elif what == "clamped":
                p.grad.clamp_(-0.01, 0.01)
            elif what == "row" and p.ndim == 2:
                p.grad[1] = 0
            elif what == "assigned":
                p.grad = p.grad.tanh() * p.detach().abs()
            elif what == "noise" and name.startswith("blocks.0"):
                p.grad += torch.randn_like(p) * 0.01

    at.both(change)
    return what


@step
def round_trip(at: Walk) -> str:
    how = at.draw.choice(("local", "full", "file", "other mesh", "optimizer"))
    if how == "local":
        at.sharded.load_state_dict(at.sharded.state_dict())
    elif how == "full":
        at.sharded.load_state_dict(at.sharded.full_state_dict())
    elif how == "file":
        folder = [tempfile.mkdtemp()]
        if dist.is_initialized():
            dist.broadcast_object_list(folder)
        path = f"{folder[0]}/{dist.get_rank() if dist.is_initialized() else 0}"
        torch.save((at.sharded.full_state_dict(), full_optimizer_state_dict(at.sharded, at.optimizers[1])), path)
        state, other = torch.load(path)
        at.sharded.load_state_dict(state)
        at.optimizers[1].load_state_dict(other)
    elif how == "other mesh":
        anew(at, lambda: at.compiled(copy.deepcopy(at.model)))
        at.sharded.load_full_state_dict(at.model.state_dict())
    else:
        states = full_optimizer_state_dict(at.sharded, at.optimizers[1])
        at.optimizers[0].load_state_dict(states)
        load_full_optimizer_state_dict(at.sharded, at.optimizers[1], states)
    return how


def anew(at: Walk, make: Callable[[], Any]) -> None:
    """Another module takes the place of the sharded one, without gradients."""
    states = full_optimizer_state_dict(at.sharded, at.optimizers[1])
    training = {n: m.training for n, m in at.model.named_modules()}
    at.model.zero_grad()
    if at.handles:  # a copy has no hooks
        hooks(at)
    at.sharded = make()
    for name, m in at.sharded.named_modules():
        m.training = training.get(name, m.training)
    at.sharded.train(at.model.training)
    for name, _ in at.model.named_modules():
        at.sharded.get_submodule(name).train(training[name])
    for name, p in at.model.named_parameters():
        at.sharded.get_parameter(name).requires_grad_(p.requires_grad)
    group = {k: v for k, v in at.optimizers[1].param_groups[0].items() if k != "params"}
    kind = type(at.optimizers[1])
    at.optimizers[1] = kind(at.sharded.parameters(), lr=group["lr"])
    at.optimizers[1].param_groups[0].update(group)
    load_full_optimizer_state_dict(at.sharded, at.optimizers[1], states)


@step
def copied(at: Walk) -> str:
    anew(at, lambda: copy.deepcopy(at.sharded))
    return ""


@step
def buffers(at: Walk) -> str:
    if at.draw.random() < 0.5:
        at.both(lambda m: setattr(m.bn, "running_mean", torch.ones_like(m.bn.running_mean) / 3))
        return "assigned"
    at.both(lambda m: m.bn.reset_running_stats())
    return "reset"


HOOKED = ("blocks.0.up.weight", "blocks.1.attention.qkv.weight")


def halved(p: torch.Tensor) -> None:
    p.grad.mul_(0.5)


@step
def hooks(at: Walk) -> str:
    if at.handles:
        for handle in at.handles:
            handle.remove()
        at.handles = []
        return "removed"
    if not all(at.model.get_parameter(name).requires_grad for name in HOOKED):
        return "none, as what is frozen takes none"
    for module in at.modules:
        at.handles.append(module.get_parameter(HOOKED[0]).register_hook(lambda g: g * 2))
        p = module.get_parameter(HOOKED[1])
        at.handles.append(p.register_post_accumulate_grad_hook(halved))
    return "of parameters"


@step
def inference(at: Walk) -> str:
    given, outputs, seed = at.ids(), [], at.draw.randrange(1000)
    for module in at.modules:
        torch.manual_seed(seed)
        with torch.inference_mode():
            outputs.append(module(given)[1].clone())
    at.same("logits", outputs[1], outputs[0])
    return ""


@step
def tied(at: Walk) -> str:
    """Followed where the layouts allow it, else refused: then all is as it was."""
    if at.model.head.weight is at.model.emb.weight:
        return "already"
    before = [m.head.weight for m in at.modules]

    def tie(m: Any) -> None:
        m.head.weight = m.emb.weight

    at.both(tie)
    try:
        with torch.no_grad():
            at.sharded(at.ids())
    except AutoshardError as error:
        for module, weight in zip(at.modules, before, strict=True):
            module.head.weight = weight
        return f"refused: {error}"
    with torch.no_grad():
        at.model(at.ids())  # its batch norm and its count
    at.sharded.load_full_state_dict(at.model.state_dict())
    at.averages = None
    at.both(lambda m: m.zero_grad())
    at.optimize()
    return "followed"

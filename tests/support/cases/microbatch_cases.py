"""Steps of several micro-batches against the whole batch on one device, in float64; run in one process and under gloo."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from state_cases_inputs import executed
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import Shard
from autoshard.errors import PlanError
from autoshard.models import Gpt, GptConfig, Llama, LlamaConfig, Moe, MoeConfig

TOLERANCE = 1e-9
IGNORED = -100


class Regression(nn.Module):
    """A mean over all elements, weighted by a mask that all samples share, beside outputs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        found = self.net(x)
        return {"loss": F.mse_loss(found, y), "found": found.T, "hits": (found > 0).sum(), "name": "mlp"}


class Weighted(nn.Module):
    """Classes that count differently."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(10, 7)
        self.register_buffer("weight", torch.linspace(0.5, 2, 7))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x), labels, self.weight, ignore_index=3)


class Flow(nn.Module):
    """A likelihood with the determinant of the map, and a penalty on weights: terms of the loss that no sample decides."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.scale = nn.Linear(8, 8), nn.Parameter(torch.linspace(0.5, 2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.lin(x * self.scale).tanh() + x * self.scale
        likelihood = (
            z.square().sum(1).mean() / 2 - torch.linalg.slogdet(self.lin.weight)[1] - self.scale.abs().log().sum()
        )
        return likelihood + 1e-2 * sum(p.square().sum() for p in self.parameters())


class Terms(nn.Module):
    """A loss of terms that start at zero, and a number; one of them is given back beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        found, loss = self.net(x), torch.zeros(())
        for term in (F.mse_loss(found, y), aux := found.abs().mean()):
            loss = loss + term
        return {"aux": aux, "loss": 1.5 - 2 * loss}


class Speech(nn.Module):
    """CTC loss of frames of several lengths; padding is masked by a tensor that takes only its dtype from another."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, frames: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        h = self.up(x)
        there = torch.arange(x.shape[1]) < frames[:, None]
        scores = self.down(F.gelu(h) * there.unsqueeze(-1).type_as(h)).log_softmax(-1)
        return F.ctc_loss(scores.transpose(0, 1), labels, frames, counts, zero_infinity=True)


def tokens(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """[8, 16] token ids and labels, ignored unevenly: all of one row, most of another."""
    random = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(0, 128, (8, 16), generator=random) for _ in range(2))
    y[0, :13] = IGNORED
    y[5] = IGNORED
    return x, y


def made(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    if name == "regression":
        return Regression().double(), (torch.randn(8, 12).double(), torch.randn(8, 6).double())
    if name == "terms":
        return Terms().double(), (torch.randn(8, 12).double(), torch.randn(8, 6).double())
    if name == "weighted":
        return Weighted().double(), (torch.randn(8, 10).double(), torch.tensor([0, 3, 3, 3, 1, 6, 2, 5]))
    if name == "speech":
        lengths = torch.tensor([9, 7, 8, 9, 5, 9, 6, 9]), torch.tensor([3, 2, 1, 3, 1, 2, 2, 3])
        return Speech().double(), (torch.randn(8, 9, 6).double(), torch.randint(1, 5, (8, 3)), *lengths)
    if name == "flow":
        return Flow().double(), (torch.randn(8, 8).double(),)
    kinds = {
        "gpt": lambda: Gpt(GptConfig.tiny()),
        "llama": lambda: Llama(LlamaConfig.tiny()),
        "moe": lambda: Moe(MoeConfig.tiny()),
    }
    return kinds[name]().double(), tokens()


def loss_of(out: Any) -> torch.Tensor:
    loss: torch.Tensor = out if isinstance(out, torch.Tensor) else out["loss"] if isinstance(out, dict) else out.loss
    return loss


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def far(a: torch.Tensor, b: torch.Tensor, least: float = 1e-30) -> float:
    """Relative to ``b``, or to ``least`` where ``b`` is nothing but what was rounded; infinite where there is no number."""
    assert a.shape == b.shape, f"{list(a.shape)}, not {list(b.shape)}"
    found = float((a.detach() - b.detach()).norm() / b.detach().norm().clamp_min(least)) if b.numel() else 0.0
    return math.inf if math.isnan(found) else found


def farthest(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], least: float = 1e-30) -> float:
    """The largest of :func:`far`, of tensors of the same names."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(far(found[name], x, least) for name, x in expected.items())


def compare(name: str, mesh: autoshard.Mesh, count: int, steps: int = 3) -> autoshard.ShardedModule:
    """``steps`` AdamW steps: losses, gradients and weights are those of the whole batch on one device."""
    model, args = made(name)
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, micro_batches=count)
    ours, theirs = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (sharded, model))
    for step in range(steps):
        torch.manual_seed(step)
        expected = loss_of(model(*args))
        torch.manual_seed(step)
        found = loss_of(sharded(*args))
        (2 * expected).backward()
        (2 * found).backward()
        assert far(found.detach(), expected.detach()) <= TOLERANCE
        gradients = {n: p.grad for n, p in model.named_parameters()}
        for n, p in sharded.named_parameters():
            assert p.grad is not None, n
            assert far(full(p.grad), gradients[n]) <= TOLERANCE, f"step {step}, gradient of {n}"
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    weights = dict(model.named_parameters())
    assert farthest({n: full(p) for n, p in sharded.named_parameters()}, weights) <= TOLERANCE
    return sharded


def trains(name: str, count: int) -> Callable[[autoshard.Mesh], None]:
    return lambda mesh: (compare(name, mesh, count), None)[1]


def other_outputs(mesh: autoshard.Mesh) -> None:
    """Put together, counted, and detached; buffers are written once."""
    model, args = made("regression")
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, micro_batches=4)
    expected, found = model(*args), sharded(*args)
    assert far(full(found["found"]), expected["found"]) <= TOLERANCE
    assert not found["found"].requires_grad
    assert int(full(found["hits"])) == int(expected["hits"])
    assert found["name"] == "mlp"
    assert int(full(sharded.get_buffer("calls"))) == 1
    classifier, x, labels = Classifier().double(), torch.randn(8, 6).double(), torch.arange(8) % 3
    hints = {"head": {mesh.axes[-1]: autoshard.Shard(1)}, "x": "replicate"}
    sharded = autoshard.compile(copy.deepcopy(classifier), mesh, (x, labels), micro_batches=2, hints=hints)
    logits, expected = sharded(x, labels)[1], classifier(x, labels)[1]
    assert torch.equal(logits.argmax(-1) == labels, expected.argmax(-1) == labels)  # it meets a plain tensor
    assert logits.shape == expected.shape  # three classes are cut in two and one
    assert far(full(logits), expected) <= TOLERANCE


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(x)
        return F.cross_entropy(logits, labels), logits


class Drawing(nn.Module):
    """Stochastic depth: whether a sample goes through a layer is drawn without looking at it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh() * torch.floor(torch.rand((x.shape[0], 1), dtype=x.dtype) + 0.5)
        row = torch.multinomial(x.detach().softmax(-1), 1)
        return (x.square() + x.gather(1, row)).sum()


def draws_of_samples(mesh: autoshard.Mesh) -> None:
    """Every sample draws what it draws in the whole batch."""
    steps_alike(Drawing().double(), mesh, (torch.randn(8, 8).double(),), {}, 2, micro_batches=4)


class Tagger(nn.Module):
    """A class for every token; ``loss`` is given it and the ids."""

    def __init__(self, loss: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.mid, self.head, self.loss = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10), loss
        self.register_buffer("weight", torch.linspace(0.5, 2, 10))
        self.register_buffer("mean", torch.zeros(6))

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.embed(ids)).tanh())  # type: ignore[no-any-return]

    def averaged(self, logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)

    def average(self, ids: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.averaged(self.logits(ids), labels, **options)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.loss(self, ids)


def masked_as_bert(m: Tagger, ids: torch.Tensor) -> torch.Tensor:
    """Of the tokens that are to be found most are hidden, and some are others, drawn too; by writes in place."""
    labels, rates = ids.clone(), torch.full(ids.shape, 0.5).masked_fill_(ids == 0, 0.0)
    chosen = torch.bernoulli(rates).bool()
    labels[~chosen] = IGNORED
    hidden = torch.bernoulli(torch.full(ids.shape, 0.8)).bool() & chosen
    given = ids.clone()
    given[hidden] = 9
    other = torch.bernoulli(torch.full(ids.shape, 0.5)).bool() & chosen & ~hidden
    return m.average(torch.where(other, torch.randint(10, ids.shape), given), labels)


def labels_that_are_drawn(mesh: autoshard.Mesh) -> None:
    """Drawn once, for what comes in and for what counts; the same on every rank."""
    torch.manual_seed(0)
    model, ids = Tagger(masked_as_bert).double(), torch.randint(0, 9, (8, 6))
    steps_alike(model, mesh, (ids,), {}, 2, micro_batches=2)
    stages = {mesh.axes[0]: mesh.shape[0]}
    if len(mesh.axes) == 1:
        steps_alike(
            model, autoshard.Mesh(stages, hardware=mesh.hardware), (ids,), {}, 2, micro_batches=2, stages=mesh.axes[0]
        )


def draws_go_on(mesh: autoshard.Mesh) -> None:
    """After a step the generator stands where one device would have left it; under torch.distributed that of rank 0."""
    model, args = made("gpt")
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, micro_batches=2)
    torch.manual_seed(3)
    model(*args)
    expected = torch.rand(4)
    torch.manual_seed(3)
    sharded(*args)
    if not dist.is_initialized() or dist.get_rank() == 0:
        assert torch.equal(torch.rand(4), expected)


def one_backward(mesh: autoshard.Mesh) -> None:
    """A second one adds as much where the graph is retained, and raises where not: what it would hand over is gone."""
    model, args = made("regression")
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, micro_batches=2)
    losses = [loss_of(m(*args)) for m in (model, sharded)]
    for retain in (True, False):
        for loss in losses:
            loss.backward(retain_graph=retain)
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert farthest(sharded.full_gradients(), expected) <= TOLERANCE
    with pytest.raises(RuntimeError, match="a second time"):
        losses[1].backward()


def without_gradients(mesh: autoshard.Mesh) -> None:
    """The whole batch at once, with outputs as ever."""
    model, args = made("gpt")
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, micro_batches=2).eval()
    with torch.no_grad():
        assert far(full(sharded(*args).logits), model.eval()(*args).logits) <= TOLERANCE


def refused(mesh: autoshard.Mesh) -> None:
    """What needs the whole batch, a batch that does not divide, and no loss: before anything is made."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x)).square().mean()

    torch.manual_seed(0)  # inputs are those of all ranks
    with pytest.raises(
        PlanError, match=r"batch_norm.* in norm at .*microbatch_cases.py:\d+ needs .* of the full batch"
    ):
        autoshard.compile(Normed(), mesh, (torch.randn(4, 3, 6, 6),), micro_batches=2)
    model, args = made("regression")
    with pytest.raises(PlanError, match=r"input 'x' has shape \[8, 12\], and its batch of 8 does not divide into 3"):
        autoshard.compile(model, mesh, args, micro_batches=3)
    with pytest.raises(PlanError, match="no output of the model is a scalar that carries a gradient"):
        autoshard.compile(nn.Linear(4, 4), mesh, (torch.randn(4, 4),), micro_batches=2)
    with pytest.raises(PlanError, match="micro_batches is a number of at least 1"):
        autoshard.compile(model, mesh, args, micro_batches=0)


def one_sum_over_replicas(mesh: autoshard.Mesh) -> None:
    """Gradients of parameters that every rank holds are summed once, whatever the number of micro-batches."""
    axes = autoshard.Mesh({"dp": mesh.size}, hardware=mesh.hardware)
    sums = []
    for count in (1, 4):
        model, args = made("regression")
        args = tuple(x.repeat(64, 1) for x in args)  # so many rows that they are what is cut
        sharded = autoshard.compile(
            model, axes, args, hints={"net.*": "replicate", "x": Shard(0), "y": Shard(0)}, micro_batches=count
        )
        loss_of(sharded(*args)).backward()
        with executed(sharded) as counted:
            loss_of(sharded(*args)).backward()
        sums.append(counted["all_reduce", "backward"])
    assert sums[0] == sums[1] > 0, sums


def chosen(mesh: autoshard.Mesh) -> None:
    """As many as fit, the same on every rank; a plan brings its number along."""
    model, args = made("weighted")
    args = (args[0].repeat(64, 1), args[1].repeat(64))
    fitting = autoshard.plan(model, mesh, args, micro_batches=4, recompute="none").memory.peak
    asked = {"micro_batches": "auto", "memory_budget": 1.001 * fitting, "recompute": "none"}
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, **asked)
    assert sharded.plan.micro_batches == 4
    followed = autoshard.compile(copy.deepcopy(model), mesh, args, plan=sharded.plan, micro_batches="auto")
    for found in (sharded, followed):
        assert far(loss_of(found(*args)), loss_of(model(*args))) <= TOLERANCE
    assert followed.source == sharded.source


CASES: dict[str, Callable[[autoshard.Mesh], None]] = {
    **{f"{name}_in_{n}": trains(name, n) for name in ("gpt", "llama") for n in (2, 4)},
    **{f"{name}_in_4": trains(name, 4) for name in ("moe", "regression", "weighted", "flow", "terms", "speech")},
    "other_outputs": other_outputs,
    "draws_go_on": draws_go_on,
    "draws_of_samples": draws_of_samples,
    "labels_that_are_drawn": labels_that_are_drawn,
    "one_backward": one_backward,
    "without_gradients": without_gradients,
    "refused": refused,
    "chosen": chosen,
    "one_sum_over_replicas": one_sum_over_replicas,
}


def steps_alike(
    model: nn.Module, mesh: autoshard.Mesh, args: tuple[Any, ...], kwargs: dict[str, Any], steps: int, **asked: Any
) -> None:
    """AdamW steps: losses, gradients and then weights are those of one device. ``asked``: of the plan."""
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, kwargs, **asked)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, eps=1e-6) for m in (model, sharded)]
    for step in range(steps):
        losses, states = [], []
        for module in (model, sharded):
            torch.manual_seed(step)
            losses.append(loss_of(module(*args, **kwargs)))
            losses[-1].backward()
            states.append(torch.get_rng_state())
        if not dist.is_initialized() or dist.get_rank() == 0:  # the draws of a world are those of rank 0
            assert torch.equal(*states), f"step {step}: the generator stands elsewhere"
        assert far(losses[1].detach(), losses[0].detach()) <= TOLERANCE
        gradients = sharded.full_gradients()
        wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert gradients.keys() == wanted.keys()
        largest = max(float(x.norm()) for x in wanted.values())
        for name, x in wanted.items():
            assert far(gradients[name], x, 1e-6 * largest) <= TOLERANCE, f"step {step}, gradient of {name}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights, state = (
        {n: x for n, x in found.items() if x.is_floating_point()}
        for found in (sharded.full_state_dict(), model.state_dict())
    )
    largest = max(float(x.norm()) for x in state.values())
    assert farthest(weights, state, 1e-3 * largest) <= TOLERANCE

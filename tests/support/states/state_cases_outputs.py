"""Outputs, weights and optimizers as users' scripts treat those of a plain model. Cases as in state_cases.py."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from state_cases_inputs import is_distributed, real
from state_harness import both, case, close, full, pair, refused, same_gradients, same_state
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import autoshard
from autoshard import LayoutError

# --- outputs ---


class Logits(nn.Module):
    """Logits and what they came from, and no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.up, self.head = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 12)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.up(self.emb(ids)))
        return self.head(x), x


RANDOM = torch.Generator().manual_seed(7)
IDS, LABELS = (torch.randint(0, 12, (5, 3), generator=RANDOM) for _ in range(2))
LABELS[0, :2] = -100  # the ranks have other counts of labels
TEACHER = torch.randn(5, 3, 12, dtype=torch.float64, generator=RANDOM)


def shifted(logits: Any, x: Any, own: nn.Module) -> Any:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, 12), LABELS[..., 1:].reshape(-1))


def smoothed(logits: Any, x: Any, own: nn.Module) -> Any:
    return nn.CrossEntropyLoss(label_smoothing=0.1)(logits.transpose(1, 2), LABELS)


def distilled(logits: Any, x: Any, own: nn.Module) -> Any:
    return F.kl_div(logits.log_softmax(-1), TEACHER.softmax(-1), reduction="batchmean") + x.square().mean()


def masked(logits: Any, x: Any, own: nn.Module) -> Any:
    mask = LABELS != -100
    return (torch.logsumexp(logits, -1) * mask).sum() / mask.sum() + (x * mask.unsqueeze(-1)).pow(2).sum()


def with_a_head_of_its_own(logits: Any, x: Any, own: nn.Module) -> Any:
    return F.mse_loss(own(x), TEACHER) + logits.square().mean()


def of_outputs_alone(logits: Any, x: Any, own: nn.Module) -> Any:
    return (logits.flatten().square().mean() + x.abs().max() + logits.std()) * 2


LOSSES: tuple[Callable[..., Any], ...] = (
    shifted, smoothed, distilled, masked, with_a_head_of_its_own, of_outputs_alone,
)  # fmt: skip
CUTS = {"rows": autoshard.Shard(0), "positions": autoshard.Shard(1), "vocabulary": autoshard.Shard(2)}


@case
def a_loss_outside_of_the_model(mesh: autoshard.Mesh) -> None:
    """Logits in every layout, plain labels: loss and gradients of one device on every rank, nothing summed twice."""
    for name, cut in CUTS.items():
        model, sharded = pair(real(mesh), Logits, IDS, hints={"head": cut, "up": autoshard.Shard(0)})
        for loss in LOSSES:
            heads = [nn.Linear(16, 12).double() for _ in range(2)]
            heads[1].load_state_dict(heads[0].state_dict())
            results = []
            for module, own in zip((model, sharded), heads, strict=True):
                module.zero_grad()
                logits, x = module(IDS)
                results.append(loss(logits, x, own))
                results[-1].backward()
            if is_distributed(sharded):
                assert any(p.is_shard() for p in logits.placements), name
            close(results[1], results[0], f"{loss.__name__} of logits cut by {name}")
            assert abs(results[1].item() - results[0].item()) <= 1e-9 * abs(results[0].item())
            same_gradients(sharded, model)
            if heads[0].weight.grad is not None:
                close(heads[1].weight.grad, heads[0].weight.grad)


@case
def outputs_read(mesh: autoshard.Mesh) -> None:
    """Metrics, numpy, numbers; and the other forms on request."""
    model, sharded = pair(real(mesh), Logits, IDS, hints={"head": autoshard.Shard(2)})
    logits, expected = sharded(IDS)[0], model(IDS)[0]
    assert (logits.argmax(-1) == LABELS).sum().item() == (expected.argmax(-1) == LABELS).sum().item()
    assert torch.equal(torch.from_numpy(logits.detach().numpy()), full(logits).detach())
    assert logits.tolist() == full(logits).tolist()
    close(torch.cat([logits, TEACHER]), torch.cat([expected, TEACHER]))
    norm = logits.detach().norm()
    if isinstance(norm, DTensor) and not norm.placements[0].is_replicate():
        with refused(r"call its \.item\(\) on every rank", LayoutError):
            f"{norm:.6f}"  # one rank may do so alone
        norm = norm.redistribute(placements=[Replicate()])
    assert f"{norm:.6f}" == f"{expected.norm().item():.6f}"
    assert abs(logits.norm().item() - expected.norm().item()) < 1e-9
    if is_distributed(sharded):
        assert isinstance(logits, DTensor)
        assert isinstance(logits.float()[:, 0], DTensor), "alone it keeps its layout"
        assert tuple(logits.to_local().shape) == (5, 3, 6)
    with torch.no_grad():
        assert type(sharded(IDS)[0]) is torch.Tensor
    whole = autoshard.compile(copy.deepcopy(model), mesh, (IDS,), gather_outputs=True)
    assert type(whole(IDS)[0]) is torch.Tensor


# --- weights ---


@case
def full_weights_loaded(mesh: autoshard.Mesh) -> None:
    """``load_state_dict`` of a plain checkpoint: into the whole, into a part, in part; one that does not fit is refused."""
    model, sharded = pair(mesh, Logits, IDS, hints={"head.weight": autoshard.Shard(0), "up.weight": autoshard.Shard(1)})
    torch.manual_seed(5)
    other = Logits().double()
    for assign in (False, True):
        found = sharded.load_state_dict(other.state_dict(), assign=assign)
        assert not found.missing_keys
        assert not found.unexpected_keys
        same_state(sharded, other)
        close(sharded(IDS)[0], other(IDS)[0])
        sharded.load_full_state_dict(model.state_dict())
    sharded.head.load_state_dict(other.head.state_dict())
    found = sharded.load_state_dict({"up.bias": other.up.bias.detach(), "no.such": torch.zeros(1)}, strict=False)
    assert found.unexpected_keys == ["no.such"]
    both(model, model, lambda m: m.head.load_state_dict(other.head.state_dict()))
    model.up.load_state_dict({"bias": other.up.bias.detach()}, strict=False)
    same_state(sharded, model)
    with refused("size mismatch for head.weight", RuntimeError):
        sharded.load_state_dict({**model.state_dict(), "head.weight": torch.zeros(13, 16)})
    sharded.load_state_dict(sharded.state_dict())
    same_state(sharded, model)


# --- optimizers ---

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adafactor, foreach": lambda p: torch.optim.Adafactor(p, lr=0.1, foreach=True, weight_decay=0.1),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-6, foreach=True, amsgrad=True),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "NAdam, foreach": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-6, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, eps=1e-6),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6, fused=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01, foreach=False),
    "Rprop, foreach": lambda p: torch.optim.Rprop(p, lr=0.01, foreach=True),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=0.01),
}


@case
def optimizers_of_torch(mesh: autoshard.Mesh) -> None:
    """On parameters that are whole, cut by rows and cut by columns; norms of parameters are numbers of the whole."""
    hints = {"head.*": autoshard.Shard(0), "up.weight": autoshard.Shard(1), "emb.weight": "replicate"}
    model, sharded = pair(mesh, Logits, IDS, hints=hints)
    start = copy.deepcopy(model.state_dict())
    for name, make in OPTIMIZERS.items():
        both(model, sharded, lambda m: m.load_state_dict(start))
        optimizers = [make(m.parameters()) for m in (model, sharded)]
        for step in range(3):
            for module, optimizer in zip((model, sharded), optimizers, strict=True):
                optimizer.zero_grad()
                F.cross_entropy(module(IDS.roll(step))[0].flatten(0, 1), LABELS.flatten()).backward()
                optimizer.step()
        try:
            same_state(sharded, model)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        for p, q in zip(model.parameters(), sharded.parameters(), strict=True):
            assert abs(p.norm().item() - q.norm().item()) <= 1e-9 * p.norm().item()


@case
def hooks_on_outputs_that_others_are_computed_from(mesh: autoshard.Mesh) -> None:
    """Refused where what would not reach them comes back; what is computed outside does."""
    model, sharded = pair(mesh, Logits, torch.arange(4))

    def outside(module: Any) -> None:
        module.zero_grad()
        hidden = module(torch.arange(4))[1]
        hidden.register_hook(lambda g: 2 * g)
        full(hidden.square().sum()).backward()

    both(model, sharded, outside)
    same_gradients(sharded, model)
    hooks: list[Callable[[Any], Any]] = [lambda x: x.register_hook(lambda g: 2 * g), lambda x: x.retain_grad()]
    for hook in hooks:
        logits, hidden = sharded(torch.arange(4))
        hook(hidden)
        with refused("output 1 has a hook or retain_grad", autoshard.RuntimeMismatchError):
            full(logits.sum()).backward()

    def taken_away(module: Any) -> None:
        module.zero_grad()
        logits, hidden = module(torch.arange(4))
        hidden.register_hook(lambda g: 2 * g).remove()
        full(logits.square().sum()).backward()

    both(model, sharded, taken_away)
    same_gradients(sharded, model)
    with warnings.catch_warnings(action="error"):  # torch warns of users' hooks, which are not saved
        for output in sharded(torch.arange(4)):
            torch.save(full(output), io.BytesIO())

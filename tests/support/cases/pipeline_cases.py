"""Steps in pipeline stages against the whole model on one device, in float64; run in one process and under gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from microbatch_cases import TOLERANCE, far, farthest, full, loss_of
from pipeline_steps import Positive, Short, Uneven, compare, made, tokens
from state_harness import same_gradients
from table_models import Looked
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.errors import HintError, MeshError, PlanError, RuntimeMismatchError
from autoshard.models import Gpt, GptConfig


def trains(name: str, count: int, **asked: Any) -> Callable[[autoshard.Mesh], None]:
    return lambda mesh: (compare(name, mesh, count, **asked), None)[1]


def no_second_derivatives(mesh: autoshard.Mesh) -> None:
    model, args = made("detached")
    sharded = autoshard.compile(model, mesh, args, stages="pp", micro_batches=2)
    with pytest.raises(RuntimeMismatchError, match="create_graph=True"):
        torch.autograd.grad(sharded(*args), list(sharded.parameters()), create_graph=True)


def one_verdict(mesh: autoshard.Mesh) -> None:
    """An infinity in a gradient of one stage, which has more dtypes than others: none takes its step, all scale alike."""
    args, model = made("skips")[1], Uneven().double()
    model.factor.data = torch.ones(12)
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, stages="pp", micro_batches=2)
    optimizer, scaler = torch.optim.SGD(sharded.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(sharded(*args))).backward()
    for n, p in sharded.named_parameters():
        if n == "down.0.bias":
            assert p.grad is not None
            (p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad).fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4
    assert all(torch.equal(x, model.get_parameter(n)) for n, x in sharded.full_state_dict().items() if n != "calls")


def zero(like: str, schedule: str) -> Callable[[autoshard.Mesh], None]:
    """What micro-batches share is a stage's own, also where a rank has several, or a backward comes in two parts."""

    def case(mesh: autoshard.Mesh) -> None:
        axes = autoshard.Mesh({"pp": mesh.size // 2, "dp": 2}, hardware=mesh.hardware)
        assert compare("gpt", axes, 4, 2, schedule=schedule, like={"dp": like}).plan.zero

    return case


def ranks_hold_their_stages(mesh: autoshard.Mesh) -> None:
    """Parameters of other stages take no memory, tied ones lie in both; one process holds all."""
    model, args = made("gpt")
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, stages="pp", micro_batches=2)
    names, stages = {n for n, _ in sharded.named_parameters()}, mesh.size_of("pp")
    if not dist.is_initialized():
        assert names == {n for n, _ in model.named_parameters()}
        return
    first_or_last = dist.get_rank() * stages // dist.get_world_size() in (0, stages - 1)
    numbers = {int(n.split(".")[1]) for n in names if n.startswith("blocks.")}
    assert len(numbers) <= 4 // stages + 1
    assert ("token_embedding.weight" in names) == first_or_last


def other_outputs(mesh: autoshard.Mesh) -> None:
    """Outputs of whatever stage are on every rank, detached; a buffer is written once."""
    model, args = made("skips")
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, stages="pp", micro_batches=4)
    expected, found = model(*args), sharded(*args)
    for name in ("found", "middle"):
        assert far(full(found[name]), expected[name]) <= TOLERANCE
        assert not found[name].requires_grad
    assert found["name"] == "u"
    assert int(sharded.full_state_dict()["calls"]) == 1


def without_gradients(mesh: autoshard.Mesh) -> None:
    """Forward only, with the parameters where they are: in micro-batches too, but for a batch that they do not divide."""
    model, args = made("gpt")
    model.eval()
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, stages="pp", micro_batches=4)
    for rows, count in ((8, 4), (3, 1)):
        given = tuple(x[:rows] for x in args)
        with torch.no_grad():
            found, expected = sharded.eval()(*given), model(*given)
        assert sharded.plan.staged is not None
        assert sharded.plan.staged.micro_batches == count
        assert far(full(found.logits), expected.logits) <= TOLERANCE
        assert far(found.loss, expected.loss) <= TOLERANCE
        assert not full(found.logits).requires_grad


def interleaved_without_gradients(mesh: autoshard.Mesh) -> None:
    """Several stages per rank, dropout drawn as on one device, and a model that returns no loss."""
    model, args = made("gpt")
    model.train()
    asked: dict[str, Any] = {"stages": "pp", "micro_batches": 4, "schedule": "interleaved", "training": False}
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args[:1], **asked)
    found = []
    for m in (model, sharded):
        torch.manual_seed(3)
        with torch.no_grad():
            found.append(full(m(args[0]).logits))
    assert sharded.plan.staged is not None
    assert sharded.plan.staged.micro_batches == 4
    assert far(found[1], found[0]) <= TOLERANCE


def first_without_gradients(mesh: autoshard.Mesh) -> None:
    """The stages that a call without a backward was cut into serve calls with one, and other forms of the call."""
    model, args = made("gpt")
    model.eval()
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, stages="pp", micro_batches=1, training=False)
    with torch.no_grad():
        for given in (args, args[:1]):
            assert far(full(sharded(*given).logits), model(*given).logits) <= TOLERANCE
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, stages="pp", micro_batches=1)
    with torch.no_grad():
        sharded(*args)
    for m in (model, sharded):
        loss_of(m.train(False)(*args)).backward()
    same_gradients(sharded, model)


def any_lengths(mesh: autoshard.Mesh) -> None:
    """With open lengths one program of stages serves all, with and without a backward."""
    model, args = made("gpt")
    model.eval()
    asked: dict[str, Any] = {"stages": "pp", "training": True, "dynamic": True}
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, **asked)
    for rows, length in ((4, 7), (6, 5)):
        given = tuple(x[:rows, :length] for x in args)
        losses = []
        for m in (model, sharded):
            m.zero_grad()
            losses.append(loss_of(m(*given)))
            losses[-1].backward()
        assert far(losses[1].detach(), losses[0].detach()) <= TOLERANCE
        same_gradients(sharded, model)
    assert len(sharded.programs) == 1
    with torch.no_grad():
        for rows, length in ((8, 12), (4, 7)):
            given = tuple(x[:rows, :length] for x in args)
            assert far(full(sharded(*given).logits), model(*given).logits) <= TOLERANCE
    assert len(sharded.programs) == 2
    assert autoshard.plan(model, mesh, args, **asked).staged is not None
    with pytest.raises(PlanError, match=r"stages with open lengths \(dynamic\) cannot be saved"):
        sharded.save("nowhere")


def state(mesh: autoshard.Mesh) -> None:
    """A whole state dict goes in and comes out; one that does not fit is refused, before anything is loaded."""
    model, args = made("gpt")
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, stages="pp", micro_batches=2)
    other = {n: x + 1 for n, x in model.state_dict().items()}
    with pytest.raises(PlanError, match="missing"):
        sharded.load_full_state_dict({n: x for n, x in other.items() if "norm" not in n})
    sharded.load_full_state_dict(other)
    found = sharded.full_state_dict()
    assert all(torch.equal(found[n], x) for n, x in other.items())
    sharded.load_state_dict(model.state_dict())
    found = sharded.full_state_dict()
    assert all(torch.equal(found[n], x) for n, x in model.state_dict().items())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        sharded.load_state_dict({**model.state_dict(), "gone": torch.ones(1)})


def functional(mesh: autoshard.Mesh) -> None:
    """``functional_call`` with parameters that are computed: what they are computed of gets the gradients."""
    model, args = made("skips")
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, stages="pp", micro_batches=2)
    for m in (model, sharded):
        scaled = {n: 2 * p for n, p in m.named_parameters()}
        loss_of(torch.func.functional_call(m, scaled, args)).backward()
    same_gradients(sharded, model)


def deferred(mesh: autoshard.Mesh) -> None:
    """Initial values are those of one device, though a rank keeps those of its stages only."""
    config = GptConfig(vocab=50, positions=12, width=32, heads=4, layers=4)
    torch.manual_seed(5)
    expected = Gpt(config).state_dict()
    torch.manual_seed(5)
    model = autoshard.deferred_init(Gpt, config)
    found = autoshard.compile(model, mesh, tokens(), stages="pp", micro_batches=2).full_state_dict()
    assert all(torch.equal(found[n], x) for n, x in expected.items())


def frozen(mesh: autoshard.Mesh) -> None:
    """Nothing is trained in the first stages: no gradient comes back there."""
    model, args = made("gpt")
    for n, p in model.named_parameters():
        p.requires_grad_(n.startswith(("blocks.3", "norm")))
    model.eval()
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, stages="pp", micro_batches=2, training=True)
    for m in (model, sharded):
        loss_of(m(*args)).backward()
    same_gradients(sharded, model)


def frozen_and_unfrozen(mesh: autoshard.Mesh) -> None:
    """Flags and dtypes that change after compilation, on every stage or on some; gradients put together are a stage's."""
    model, args = made("gpt")
    model.eval()
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, stages="pp", micro_batches=2, training=True)
    for start in (("",), ("blocks.3", "norm"), ("blocks.0", "token_embedding"), ()):
        for m in (model, sharded):
            m.zero_grad()
            for n, p in m.named_parameters():
                p.requires_grad_(n.startswith(start))
        losses = [loss_of(m(*args)) for m in (model, sharded)]
        assert far(losses[1].detach(), losses[0].detach()) <= TOLERANCE
        assert losses[1].requires_grad == losses[0].requires_grad == bool(start)
        if start:
            torch.stack(losses).sum().backward()
            same_gradients(sharded, model)
    for dtype, rtol in ((torch.float64, 1e-9), (torch.float32, 1e-4), (torch.float64, 1e-9)):
        for m in (model, sharded):
            m.zero_grad()
            m.requires_grad_(True).to(dtype)
            loss_of(m(*args)).backward()
        same_gradients(sharded, model, rtol)

    def backward() -> torch.Tensor:
        loss = loss_of(sharded(*args))
        loss.backward()
        return loss

    if dist.is_initialized() and dist.get_world_size() == mesh.size_of("pp"):
        with pytest.raises(RuntimeMismatchError, match="Use autoshard"):
            torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        with pytest.raises(RuntimeMismatchError, match="such as LBFGS, cannot train stages"):
            torch.optim.LBFGS(sharded.parameters()).step(backward)
        if "token_embedding.weight" in dict(sharded.named_parameters()):  # held by two stages
            sharded.get_parameter("token_embedding.weight").requires_grad_(dist.get_rank() == 0)
        with pytest.raises(RuntimeMismatchError, match="the ranks disagree on the state of the call"):
            sharded(*args)


def accumulates(mesh: autoshard.Mesh) -> None:
    """A second call adds to what the first left; another shape of inputs has a program of its own."""
    model, args = made("gpt")
    model.eval()
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, stages="pp", micro_batches=2, training=True)
    for part in (args, tuple(x[:4] for x in args)):
        for m in (model, sharded):
            (loss_of(m(*part)) / 2).backward()
    same_gradients(sharded, model)


def called_in_a_checkpoint(mesh: autoshard.Mesh) -> None:
    """``torch.utils.checkpoint`` around a call: what it makes again is the call, not what a micro-batch of it saves."""
    model, args = made("gpt")
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, stages="pp", micro_batches=2)
    for reentrant in (False, True):
        for m in (model, sharded):
            m.zero_grad()
            torch.manual_seed(3)
            scale = torch.ones((), dtype=torch.float64, requires_grad=True)
            checkpoint(lambda s, m=m: loss_of(m(*args)) * s, scale, use_reentrant=reentrant).backward()
        same_gradients(sharded, model)


def like_an_expert(mesh: autoshard.Mesh) -> None:
    """Plans by name, styles by module and hints hold in the stages that they concern."""
    model, args = made("gpt")
    model.eval()
    if mesh.ndim == 1:
        mesh = autoshard.Mesh({"pp": mesh.size // 2, "tp": 2}, hardware=mesh.hardware)
    asked: list[dict[str, Any]] = [
        {"like": {mesh.axes[1]: "megatron"}},
        {"like": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}},
        {"hints": {"blocks.3.up.weight": "colwise", "position_embedding.weight": "replicate"}},
    ]
    expected = loss_of(model(*args)).detach()
    for opts in asked:
        sharded = autoshard.compile(copy.deepcopy(model), mesh, args, stages="pp", micro_batches=2, **opts)
        assert far(loss_of(sharded(*args)).detach(), expected) <= TOLERANCE
        assert str(sharded.plan.layouts["blocks.3.up.weight"]).startswith("S(0)"), opts
    with pytest.raises(HintError, match="matches no parameter"):
        autoshard.compile(model, mesh, args, stages="pp", hints={"block.3.up": "colwise"})


def gradients_of_inputs(mesh: autoshard.Mesh) -> None:
    """Of an input that several stages read they are added up; one that the loss does not lead to has none."""
    for name in ("skips", "aside"):
        model, given = made(name)
        ours, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
        sharded = autoshard.compile(copy.deepcopy(model), mesh, tuple(ours), stages="pp", micro_batches=2)
        loss_of(sharded(*ours)).backward()
        loss_of(model(*theirs)).backward()
        for found, expected in zip(ours, theirs, strict=True):
            assert (found.grad is None) == (expected.grad is None), name
            assert found.grad is None or far(found.grad, expected.grad) <= TOLERANCE, name


def refused(mesh: autoshard.Mesh) -> None:
    """Clear errors, before anything is made."""
    model, args = made("skips")

    def fails(error: type[Exception], match: str, model: nn.Module = model, args: Any = args, **asked: Any) -> None:
        with pytest.raises(error, match=match):
            autoshard.compile(model, mesh, args, **{"stages": "pp", "micro_batches": 2, **asked})

    fails(MeshError, "stages='depth' is not an axis of the mesh. Its axes:", stages="depth")
    fails(
        PlanError, "schedule='2f2b' is not known. Known: 'gpipe', '1f1b', 'interleaved', 'zero_bubble'", schedule="2f2b"
    )
    if mesh.size_of("pp") == 2:
        ten = tuple(x[[*range(8), 0, 1]] for x in args)
        fails(PlanError, "runs micro-batches in 2 equal rounds", args=ten, micro_batches=5, schedule="interleaved")
    fails(PlanError, "its batch of 8 does not divide into 3", micro_batches=3)
    fails(PlanError, "needs .* of the full batch", *made("normed"))
    fails(PlanError, "no output of the model is a scalar", nn.Linear(4, 4), (torch.randn(4, 4),))
    if mesh.size_of("pp") == 2:
        text = "depends on the data, so it cannot be sent to the next stage"
        fails(PlanError, text, Positive(), (torch.randn(4, 4),), micro_batches=1)
    fails(PlanError, "stages: the model has only 1 operations to split between", Short(), args[:1], micro_batches=1)


def tables(mesh: autoshard.Mesh) -> None:
    """Owned tables with sparse gradients in the first stage: full gradients, one verdict of a scaler, weights after a step."""
    torch.manual_seed(0)
    args = torch.randint(9, (8, 4)), torch.randint(2, (8,)).double()
    model = Looked().double()
    axes = mesh.axes[1:]
    sharded = autoshard.compile(
        copy.deepcopy(model), mesh, args, stages="pp", micro_batches=2, like=dict.fromkeys(axes, "table-wise") or None
    )
    assert all(sharded.plan.layouts["tables.0.weight"].owner for _ in axes)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for spoilt, scale in ((True, 4.0), (False, 8.0)):
        optimizer = torch.optim.SGD(sharded.parameters(), 0.1)
        optimizer.zero_grad()
        scaler.scale(sharded(*args)).backward()
        for n, p in sharded.named_parameters():
            if spoilt and n == "tables.0.weight":
                assert p.grad is not None
                getattr(p.grad, "_local_tensor", p.grad)._values().fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
    theirs = torch.optim.SGD(model.parameters(), 0.1)
    model(*args).backward()
    for n, p in model.named_parameters():
        assert p.grad is not None
        found = sharded.full_gradients()[n]
        assert found.is_sparse == p.grad.is_sparse
        assert far(found.to_dense(), p.grad.to_dense()) <= TOLERANCE, n
    theirs.step()
    assert farthest(sharded.full_state_dict(), model.state_dict()) <= TOLERANCE


CASES: dict[str, Callable[[autoshard.Mesh], None]] = {
    "gpt_1f1b": trains("gpt", 4),
    "gpt_gpipe": trains("gpt", 2, schedule="gpipe"),
    "gpt_interleaved": trains("gpt", 4, schedule="interleaved"),
    "gpt_zero_bubble": trains("gpt", 4, schedule="zero_bubble"),
    "gpt_three_per_rank": trains("gpt", 4, schedule="interleaved", stages_per_rank=3),
    "gpt_parts_per_rank": trains("gpt", 4, schedule="zero_bubble", stages_per_rank=2),
    "gpt_one_batch": trains("gpt", 1),
    "zero1_interleaved": zero("zero1", "interleaved"),
    "zero2_interleaved": zero("zero2", "interleaved"),
    "zero1_zero_bubble": zero("zero1", "zero_bubble"),
    "llama": trains("llama", 4),
    "skips": trains("skips", 4),
    "normed": trains("normed", 1),
    **{name: trains(name, 2) for name in ("moe", "detached", "aside", "counted")},
    "aside_zero_bubble": trains("aside", 4, schedule="zero_bubble"),
    "one_verdict": one_verdict,
    "no_second_derivatives": no_second_derivatives,
    "ranks_hold_their_stages": ranks_hold_their_stages,
    "other_outputs": other_outputs,
    "without_gradients": without_gradients,
    "interleaved_without_gradients": interleaved_without_gradients,
    "first_without_gradients": first_without_gradients,
    "any_lengths": any_lengths,
    "state": state,
    "functional": functional,
    "deferred": deferred,
    "frozen": frozen,
    "frozen_and_unfrozen": frozen_and_unfrozen,
    "accumulates": accumulates,
    "called_in_a_checkpoint": called_in_a_checkpoint,
    "like_an_expert": like_an_expert,
    "gradients_of_inputs": gradients_of_inputs,
    "refused": refused,
    "tables": tables,
}

"""One rank of a gloo world that runs steps in pipeline stages; started by test_pipeline_gloo.py."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import precision_cases
import pytest
import state_sweep
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from failing_stages import one_fails
from harness import double, ideal
from microbatch_cases import TOLERANCE, far, farthest, loss_of
from pipeline_cases import CASES
from pipeline_steps import ReadTwice, compare, made, tokens
from product_counts import Counted
from safetensors.torch import load_file
from stage_caches import caches_stay
from state_generate import same_tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from training_worker import FOLDER, main
from transformers_models import build

import autoshard
from autoshard.check.reference import upcasts_in_float64
from autoshard.errors import LayoutError, PlanError, RuntimeMismatchError
from autoshard.runtime.programs.pipeline import Pipeline
from autoshard.runtime.programs.schedules import Stage

MESHES = {2: {"pp": 2}, 4: {"pp": 2, "tp": 2}}


def stepped(module: nn.Module, optimizer: torch.optim.Optimizer, args: Any, seed: int) -> None:
    torch.manual_seed(seed)
    loss_of(module(*args)).backward()
    optimizer.step()
    optimizer.zero_grad()


def resumed_elsewhere() -> None:
    """Weights by torch.distributed.checkpoint, the optimizer by its whole state: from stages, into none, and back."""
    ranks = dist.get_world_size()
    model, args = made("gpt")
    theirs = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-6)
    asked: list[tuple[Any, dict[str, Any]]] = [
        (ideal(MESHES[ranks]), {"stages": "pp", "micro_batches": 2}),
        (ideal({"tp": ranks}), {}),
        (ideal({"pp": ranks}), {"stages": "pp", "micro_batches": 4, "schedule": "gpipe"}),
    ]
    state: Any = None
    for number, (mesh, opts) in enumerate(asked):
        sharded = autoshard.compile(copy.deepcopy(made("gpt")[0]), mesh, args, **opts)
        ours = torch.optim.AdamW(sharded.parameters(), 1e-2, eps=1e-6)
        if number:
            found = {"model": sharded.state_dict()}
            dcp.load(found, checkpoint_id=FOLDER / f"resumed{number - 1}")
            sharded.load_state_dict(found["model"])
            autoshard.load_full_optimizer_state_dict(sharded, ours, state)
        stepped(model, theirs, args, number)
        stepped(sharded, ours, args, number)
        weights = sharded.full_state_dict()
        assert farthest(weights, model.state_dict()) <= TOLERANCE, number
        dcp.save({"model": sharded.state_dict()}, checkpoint_id=FOLDER / f"resumed{number}")
        state = autoshard.full_optimizer_state_dict(sharded, ours)
        expected = theirs.state_dict()
        assert state["param_groups"] == expected["param_groups"]
        for n, entry in expected["state"].items():
            assert all(far(state["state"][n][k], x) <= TOLERANCE for k, x in entry.items()), (number, n)


def saved() -> None:
    """Every rank writes what it holds of its stages."""
    model, args = made("gpt")
    sharded = autoshard.compile(model, ideal(MESHES[dist.get_world_size()]), args, stages="pp", micro_batches=4)
    sharded.save(FOLDER / "saved")
    found = load_file(FOLDER / "saved" / f"rank{dist.get_rank()}.safetensors")
    mine: dict[str, Any] = dict(sharded.named_parameters())
    assert mine.keys() <= found.keys()
    assert all(torch.equal(found[n], p.to_local()) for n, p in mine.items())
    assert not any(n in found for n in sharded.all_stages_names() if n not in mine)
    with pytest.raises(LayoutError, match="is about to save"):  # the tensors of a stage are no state of the model
        torch.save(sharded.state_dict(), FOLDER / "one_stage.pt")


def generates() -> None:
    """Tokens of transformers' ``generate`` on stages: a program for prompts, one for all lengths of what was said."""
    model, _, kwargs = build("llama", pytest.MonkeyPatch())
    model.double().eval()
    ids = kwargs["input_ids"][:4, :5]
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    theirs: Any = copy.deepcopy(model)
    sharded: Any = autoshard.compile(
        model, ideal(MESHES[dist.get_world_size()]), stages="pp", training=False, dynamic=True
    )
    assert torch.equal(sharded.generate(ids, **asked), theirs.generate(ids, **asked))
    assert len(sharded.programs) == 2
    same_tokens(theirs, sharded, ids, {"sampled": {"do_sample": True, "top_p": 0.9}}, new=4)


@upcasts_in_float64()
def library(name: str, **asked: Any) -> None:
    """A model of a public library, called by keywords: loss and gradients."""
    model, _, kwargs = build(name, pytest.MonkeyPatch())
    model.double()
    kwargs = double(kwargs)
    mesh = ideal(MESHES[dist.get_world_size()])
    sharded = autoshard.compile(copy.deepcopy(model), mesh, (), kwargs, stages="pp", micro_batches=2, **asked)
    losses = []
    for m in (model, sharded):
        torch.manual_seed(0)
        losses.append(m(**kwargs).loss)
        losses[-1].backward()
    assert far(losses[1].detach(), losses[0].detach()) <= TOLERANCE
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found, largest = sharded.full_gradients(), max(float(x.abs().max()) for x in gradients.values())
    assert found.keys() == gradients.keys()
    for n, x in gradients.items():
        assert float((found[n] - x).abs().max()) <= TOLERANCE * max(float(x.abs().max()), 1e-3 * largest), n


def local_inputs() -> None:
    """Every rank brings its part of the batch, the same on all stages; parts that differ there are refused."""
    ranks = dist.get_world_size()
    mesh = ideal({"pp": 2, "dp": ranks // 2})
    model, args = made("gpt")
    model.eval()
    rows = 8 // (ranks // 2)
    first = dist.get_rank() % (ranks // 2) * rows
    mine = tuple(x[first : first + rows] for x in args)
    for count in (1, 2):
        asked: dict[str, Any] = {"stages": "pp", "micro_batches": count, "inputs": "local", "training": True}
        sharded = autoshard.compile(copy.deepcopy(model), mesh, mine, **asked)
        model.zero_grad()
        for m, given in ((model, args), (sharded, mine)):
            loss_of(m(*given)).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert farthest(sharded.full_gradients(), gradients) <= TOLERANCE
    if ranks == 4:
        with pytest.raises(RuntimeMismatchError, match="the local inputs"):
            sharded(mine[0] + (dist.get_rank() == 3), mine[1])


def in_flight() -> None:
    """Micro-batches whose forward has run and whose backward has not, counted as they run: as many as plans count."""
    mesh, (model, args) = ideal(MESHES[dist.get_world_size()]), made("gpt")
    stage = dist.get_rank() * mesh.size_of("pp") // dist.get_world_size()
    for schedule, expected in (
        ("gpipe", 4),
        ("1f1b", 2 - stage),
        ("interleaved", 3 + 2 * (1 - stage)),
        ("zero_bubble", 2),
    ):
        asked: dict[str, Any] = {"stages": "pp", "micro_batches": 4, "schedule": schedule}
        sharded = autoshard.compile(copy.deepcopy(model), mesh, args, **asked)
        right, flying, most = sharded._results, set[int](), [0]

        def counted(part: Any, inputs: Any, right: Any = right, flying: Any = flying, most: Any = most) -> Any:
            results = right(part, inputs)
            number = len(most)
            flying.add(number)
            most.append(len(flying))
            next(x for x in results if x.requires_grad).register_hook(lambda _: flying.discard(number))
            return results

        object.__setattr__(sharded, "_results", counted)
        sharded(*args)
        assert not flying
        assert max(most) <= expected, (schedule, stage, most)
        assert max(most) == expected or schedule in ("interleaved", "zero_bubble"), (schedule, stage, most)


def drawn_again() -> None:
    """Blocks made again draw what their own micro-batch drew, also where others' forwards ran in between (1F1B)."""
    mesh = autoshard.Mesh({"pp": dist.get_world_size()}, hardware="ideal_network")
    model, args = made("gpt")
    model.train()
    asked: dict[str, Any] = {"stages": "pp", "micro_batches": 4, "recompute": "blocks"}
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, **asked)
    assert sharded.plan.staged is not None
    assert all(plan.recomputed for plan in sharded.plan.staged.plans)
    assert "runtime.recompute(" in sharded.source
    assert "again=True" in sharded.source  # of dropout
    for m in (model, sharded):
        torch.manual_seed(3)
        m(*args).loss.backward()
    found = sharded.full_gradients()
    for name, p in model.named_parameters():
        assert far(found[name], p.grad) <= TOLERANCE, name


def in_two_parts() -> None:
    """A split backward: I makes no gradient of a weight, W all; made again, with convolutions; one that is lost is missed."""
    mesh = autoshard.Mesh({"pp": dist.get_world_size()}, hardware="ideal_network")
    split: dict[str, Any] = {"schedule": "zero_bubble"}
    parts = Counted(), Counted()
    with pytest.MonkeyPatch.context() as patched:
        for name, part in zip(("backward_one_chunk", "backward_weight_one_chunk"), parts, strict=True):
            patched.setattr(Stage, name, inside(part, getattr(Stage, name)))
        sharded = compare("skips", mesh, 4, 1, **split)
    weights = sum(p.dim() == 2 for p in sharded.parameters())
    first = dist.get_rank() == 0  # whose input wants no gradient
    assert [part.count for part in parts] == [4 * (weights - first), 4 * weights]
    compare("llama", mesh, 4, 1, recompute="blocks", **split)
    compare("detached", mesh, 4, 1, **split)
    if dist.get_world_size() == 2:
        compare("normed", mesh, 1, 1, **split)
    else:
        compare("gpt", ideal({"pp": 2, "dp": 2}), 4, 1, like={"dp": "fsdp"}, **split)
    args = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        cast = autoshard.compile(made("gpt")[0].float(), mesh, args, stages="pp", micro_batches=4, **split)
        assert "runtime.linear(" in cast.source
        assert "F.linear(" not in cast.source
    precision_cases.in_stages(mesh, **split)
    right = Pipeline._weights
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Pipeline, "_weights", lambda self: (self.later.pop(), right(self))[1])
        with pytest.raises(AssertionError):
            compare("skips", mesh, 4, 1, **split)


def what_users_do_with_their_own() -> None:
    """Norms by hand are refused; an optimizer of no parameters steps, also compiled; entries of others are checked; draws."""
    model, args = made("gpt")
    for block in model.blocks:
        block.norm_1.register_buffer("seen", torch.zeros_like(block.norm_1.bias))
        block.norm_1.seen.of = block.norm_1  # an attribute of a buffer that one stage has
        block.norm_1.register_forward_pre_hook(lambda module, given: (given[0] + module.seen,))
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"pp": dist.get_world_size()}), args, stages="pp")
    for name, buffer in sharded.named_buffers():
        if name.endswith("seen"):
            assert buffer.of is sharded.get_submodule(name.removesuffix(".seen"))
    for m in (model, sharded):
        for n, p in m.named_parameters():
            p.requires_grad_(n.startswith(("blocks.3", "norm")))
    optimizers = []
    for m in (sharded, model):
        torch.manual_seed(0)
        loss_of(m(*args)).backward()
        groups = [{"params": [p for p in m.parameters() if p.requires_grad]}]  # of the first rank there are none
        optimizers.append(torch.optim.SGD(groups, 0.1))
    parts = [p.grad for p in sharded.parameters() if p.grad is not None]
    norms: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda g: g.norm(),
        lambda g: torch.norm(g.detach(), 2.0),
        lambda g: g.data.norm(2),
    ]
    for norm in norms if parts else ():
        with pytest.raises(RuntimeMismatchError, match="covers this rank's pipeline stages only"):
            torch.stack([norm(g) for g in parts])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optimizers[0], "step", torch.compile(optimizers[0].step, backend="aot_eager"))
        for optimizer in optimizers:
            optimizer.step()
    assert farthest(sharded.full_state_dict(), model.state_dict()) <= TOLERANCE
    state = model.state_dict()
    for n in ("position_embedding.weight", "blocks.3.up.weight"):
        with pytest.raises(RuntimeError, match=f"size mismatch for {n}"):
            sharded.load_state_dict({**state, n: torch.ones(3)})
    torch.manual_seed(dist.get_rank())
    with sharded.same_draws_on_ranks():
        drawn = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3))


def beside_a_module_on_these_ranks() -> None:
    """Norms and overflows are those of all stages, though a module on the ranks of one stage has an equal mesh."""
    model, args = made("gpt")
    size = dist.get_world_size()
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"pp": 2, "tp": size // 2}), args, stages="pp")
    every = DeviceMesh("cpu", torch.arange(size).view(2, size // 2), mesh_dim_names=("replica", "tp"))
    autoshard.compile(nn.Linear(4, 4), every["tp"], (torch.randn(2, 4),))
    assert every["tp"] == sharded.device_mesh
    for m in (model, sharded):
        torch.manual_seed(0)
        loss_of(m(*args)).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert far(autoshard.clip_grad_norm_(sharded, 1e9), expected) <= TOLERANCE
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(sharded.parameters(), 0.1)
    scaler.scale(torch.ones(()))
    first = next(p for p in sharded.parameters() if p.grad is not None)
    if dist.get_rank() == 0:
        first.grad.to_local().fill_(torch.inf)
    before = sharded.full_state_dict()
    scaler.step(optimizer)
    assert all(torch.equal(x, before[n]) for n, x in sharded.full_state_dict().items()), "a stage took the step"


def tied_in_some_stages() -> None:
    """Each of the tied parameters lies in other stages, whose ranks add up its gradients without the rest."""
    mesh = autoshard.Mesh({"pp": dist.get_world_size()}, hardware="ideal_network")
    sharded = compare("shared", mesh, 4)
    if dist.get_world_size() == 4:
        names = {n for n, _ in sharded.named_parameters()}
        tied = ("layers.0.weight", "layers.0.bias", "layers.2.bias")
        assert [n in names for n in tied] == [r in names for r in tied]


class ReadAgain(nn.Module):
    """A weight and a buffer that the first call reads in two stages, another call in one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: torch.Tensor, kind: str = "twice") -> torch.Tensor:
        x = self.layers[0](x)
        if kind != "late":
            x = x @ self.weight + self.seen
        for layer in self.layers[1:]:
            x = layer(x.tanh())
        if kind == "write":
            self.seen.add_(1)
        return (x @ self.weight + self.seen if kind != "early" else x).square().mean()


def read_in_fewer_stages() -> None:
    """All copies of a weight are trained alike where a call reads it in one stage; none of a buffer is left behind."""
    torch.manual_seed(0)
    model, x = ReadAgain().double(), torch.randn(8, 4, dtype=torch.float64)
    mesh = autoshard.Mesh({"pp": dist.get_world_size()}, hardware="ideal_network")
    sharded = autoshard.compile(copy.deepcopy(model), mesh, (x,), stages="pp", micro_batches=2)
    assert len(sharded._stage_homes["weight"]) == 2
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (sharded, model))
    for kind in ("early", "twice", "late", "early", "twice"):
        for m, optimizer in ((model, theirs), (sharded, ours)):
            m(x, kind).backward()
            optimizer.step()
        for n, p in sharded.named_parameters():
            assert far(p.full_tensor(), model.get_parameter(n)) <= TOLERANCE, (kind, n)
    with pytest.raises(PlanError, match="this call writes 'seen', but the call that the stages were made for left"):
        sharded(x, "write")


def tied_tables() -> None:
    """Sparse gradients of several stages come to a sparse one, of other numbers of rows each; beside a dense one to that."""
    ids = torch.arange(8) % 5
    for axes in ({"pp": dist.get_world_size()}, MESHES[dist.get_world_size()]):
        for head in (False, True):
            torch.manual_seed(0)
            model = ReadTwice(head).double()
            sharded = autoshard.compile(copy.deepcopy(model), ideal(axes), (ids,), stages="pp", micro_batches=2)
            for m in (model, sharded) * 2:
                loss_of(m(ids)).backward()
            gradients = {n: p.grad for n, p in model.named_parameters()}
            found = sharded.full_gradients()
            assert found.keys() == gradients.keys()
            for n, x in found.items():
                assert x.is_sparse == gradients[n].is_sparse == (n == "table.weight" and not head)
                assert far(x.to_dense(), gradients[n].to_dense()) <= TOLERANCE, n


def reduced_once() -> None:
    """Gradients are reduced over replicas once a step also where a backward comes in two parts: the bytes are 1F1B's."""
    mesh = ideal({"pp": dist.get_world_size() // 2, "dp": 2})
    for like in ("ddp", "zero1"):
        sent = []
        for schedule in ("1f1b", "zero_bubble"):
            sharded = compare("llama", mesh, 4, 1, schedule=schedule, like={"dp": like})
            log = sharded._comm.log = []
            loss_of(sharded(*tokens())).backward()
            reductions = [c.bytes for c in log if c.phase == "backward" and c.kind in ("all_reduce", "reduce_scatter")]
            sent.append(sum(reductions))
        assert sent[0] == pytest.approx(sent[1]), (like, sent)


def inside(context: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, run in this context."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return function(*args, **kwargs)

    return run


def gradients_of_inputs_in_parts() -> None:
    """DTensors, and local tensors, get their part of the gradient: of micro-batches, and of stages."""
    ranks = dist.get_world_size()
    for axes, opts in (({"dp": ranks}, {"micro_batches": 2}), ({"pp": 2, "dp": ranks // 2}, {"stages": "pp"})):
        torch.manual_seed(0)
        model, x = (
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), Mean()).double(),
            torch.randn(8, 6).double(),
        )
        sharded = autoshard.compile(copy.deepcopy(model), ideal(axes), (x,), **opts)
        own = x.clone().requires_grad_()
        model(own).backward()
        given = distribute_tensor(x, sharded.device_mesh["dp"], [Shard(0)], src_data_rank=None).requires_grad_()
        sharded(given).backward()
        assert given.grad is not None
        assert far(given.grad.full_tensor(), own.grad) <= TOLERANCE
        with pytest.MonkeyPatch.context() as patch:  # captures see large ones without data; steps do not
            patch.setattr("autoshard.module.inputs._LARGE_INPUT", 8)
            sharded = autoshard.compile(copy.deepcopy(model), ideal(axes), **opts)
            assert far(sharded(given.detach()).detach(), model(x).detach()) <= TOLERANCE


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(3).mean()


if __name__ == "__main__":
    cases = {name: lambda case=case: case(ideal(MESHES[dist.get_world_size()])) for name, case in CASES.items()}
    cases |= {
        "beside_a_module_on_these_ranks": beside_a_module_on_these_ranks,
        "resumed_elsewhere": resumed_elsewhere,
        "one_fails": one_fails,
        "local_inputs": local_inputs,
        "saved": saved,
        "generates": generates,
        "caches_stay": lambda: caches_stay(MESHES[dist.get_world_size()], pytest.MonkeyPatch()),
        "in_flight": in_flight,
        "gradients_of_inputs_in_parts": gradients_of_inputs_in_parts,
        "drawn_again": drawn_again,
        "in_two_parts": in_two_parts,
        "reduced_once": reduced_once,
        "tied_in_some_stages": tied_in_some_stages,
        "tied_tables": tied_tables,
        "read_in_fewer_stages": read_in_fewer_stages,
        "what_users_do_with_their_own": what_users_do_with_their_own,
    }
    cases |= {f"state {name}": functools.partial(state_sweep.run, "stages", name) for name in state_sweep.IN_PROCESSES}
    cases |= {"t5": lambda: library("t5", schedule="interleaved"), "whisper": lambda: library("whisper")}
    main(cases)

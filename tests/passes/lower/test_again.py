"""What is made again in the backward, in one process: numbers of one device, bytes as planned, functions in the source."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from again_cases import CASES, MODELS, SETTINGS, again, compare
from harness import ideal
from memory_truth import ranks_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import autoshard
from autoshard import Invariant, Shard, models, runtime
from autoshard.compiler import Compiled, capture_graph, compile_graph
from autoshard.errors import RuntimeMismatchError
from autoshard.passes.ir.graph import Graph
from autoshard.passes.lower.recompute import group_recomputed, recomputed_statements
from autoshard.passes.propagate.objective import objective
from autoshard.plans.options import CompileOptions
from autoshard.report.record import RECOMPUTED_SUFFIX
from autoshard.runtime.parameters.recompute import dropping_recomputable
from autoshard.runtime.transport.communicator import Executed
from autoshard.runtime.transport.in_process import World

pytestmark = pytest.mark.usefixtures("remembering")

MESHES = {"tp2": {"tp": 2}, "dp2tp2": {"dp": 2, "tp": 2}, "fsdp3": {"fsdp": 3}}


SLOW = {
    "gpt_selective", "llama_blocks", "moe_blocks", "gpt_micro_batches", "second_derivatives", "two_forwards",
    "open_lengths", "autocast", "without_gradients", "buffers_once", "as_planned", "two_ranks_differ",
    "checkpoint_reentrant", "gpt_blocks", "normed_blocks", "twice", "checkpoint", "frozen",
}  # fmt: skip


@pytest.mark.slow_cases("nothing_leaks", "sums_are_kept")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES])
def test_case(name: str) -> None:
    CASES[name](ideal(MESHES["tp2"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", ["dp2tp2", "fsdp3"])
def test_case_on_other_meshes(mesh: str, name: str) -> None:
    CASES[name](ideal(MESHES[mesh]))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_as_one_device(name: str, setting: str, mesh: str) -> None:
    compare(name, ideal(MESHES[mesh]), SETTINGS[setting])


# --- bytes ---


def kept_bytes(compiled: Compiled) -> float:
    """Bytes that are kept on rank 0 for the backward beside parameters, buffers and inputs."""
    world, modules, tensors, args = ranks_of(compiled)
    here = threading.get_ident()  # of rank 0, which runs in the caller
    found: dict[int, tuple[StorageWeakRef, int]] = {}

    class Kept(again.SavedTensor):
        def __new__(cls, tensor: torch.Tensor, version: int) -> Any:
            if threading.get_ident() == here:
                storage = tensor.untyped_storage()
                found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            return super().__new__(cls, tensor, version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(again, "SavedTensor", Kept)
        outputs = world.run(lambda module: module(*args), [(m,) for m in modules])
        mine = {x.untyped_storage()._cdata for x in (*tensors[0].values(), *args)}
        total = sum(size for key, (storage, size) in found.items() if key not in mine and not storage.expired())
    del outputs
    return float(total)


GRAPHS: dict[Any, Graph] = {}


def planned(family: str, recompute: Any, mesh: dict[str, int], like: Any = None, **sizes: int) -> Compiled:
    """In float32, for 8 rows of 32."""
    reference = models.get(family)
    model = reference.model()
    if sizes:
        model = type(model)(replace(model.config, **sizes))
    args, kwargs = reference.inputs(batch=8, seq=32)
    key = family, *sizes.values()
    if key not in GRAPHS:
        GRAPHS[key] = capture_graph(model.train(), args, kwargs, training=True)
    opts = CompileOptions(recompute=recompute, like=like)
    return compile_graph(GRAPHS[key], autoshard.Mesh(mesh, "ideal_network"), opts)


@pytest.mark.slow_cases("llama-selective", "gpt-selective", "gpt-blocks", "llama-blocks")
@pytest.mark.parametrize("recompute", ["blocks", "selective"])
@pytest.mark.parametrize("family", ["gpt", "llama", "mlp"])
def test_kept_bytes_are_the_planned_ones(family: str, recompute: str) -> None:
    found = planned(family, recompute, {"tp": 2})
    assert "runtime.recompute(" in found.source.text
    assert found.plan.memory.activations == pytest.approx(kept_bytes(found), rel=0.05)
    whole = planned(family, "none", {"tp": 2}).plan.memory.activations
    assert kept_bytes(found) < 0.9 * whole


@pytest.mark.slow
def test_a_block_keeps_what_comes_in() -> None:
    """Each further block costs the bytes of its input, and one block is there at a time in the backward."""
    three, four = (planned("gpt", "blocks", {"tp": 2}, layers=n) for n in (3, 4))
    size = 8 * 32 * 64 * 4 / 2  # the input of a block on one of two ranks
    assert size <= kept_bytes(four) - kept_bytes(three) <= 1.05 * size
    whole = [planned("gpt", "none", {"tp": 2}, layers=n).plan.memory.activations for n in (3, 4)]
    block = whole[1] - whole[0]
    assert kept_bytes(four) - (whole[1] - 4 * block) <= 1.05 * (4 * size + block)
    assert four.plan.memory.peak - three.plan.memory.peak <= 1.05 * size + _state(four) - _state(three)


@pytest.mark.slow_cases("megatron-sp")
@pytest.mark.parametrize("like", ["ulysses", "megatron-sp"])
def test_a_block_keeps_no_more_where_values_are_exchanged_inside(like: str) -> None:
    """Exchanged copies of views of what is computed again are made again, too."""
    reference = models.get("gpt")
    args, kwargs = reference.inputs(batch=8, seq=32)
    kept = []
    for layers in (3, 4):
        model = type(reference.model())(replace(reference.model().config, layers=layers))
        graph = capture_graph(model.train(), args, kwargs, training=True)
        mesh = autoshard.Mesh({"tp": 2}, "ideal_network")
        kept.append(kept_bytes(compile_graph(graph, mesh, CompileOptions(recompute="blocks", like=like))))
    size = 8 * 32 * 64 * 4 / 2  # the input of a block on one of two ranks
    assert size <= kept[1] - kept[0] <= 1.05 * size


def _state(found: Compiled) -> float:
    memory = found.plan.memory
    return memory.parameters + memory.gradients + memory.optimizer + memory.buffers


# --- the pass ---


def test_parts() -> None:
    """Neighbours that run again are numbered; what saves nothing is no part; a local conversion goes into its reader's."""
    program = planned("gpt", "blocks", {"tp": 2}, "megatron-sp").program
    last = [s for s in program.statements if s.block == "blocks.1"]
    first = max(s.again for s in last) - 1
    lines = [
        f"{max(0, s.again - first)} {s.step.kind if s.step else str(s.call.fn).removeprefix('aten.')}" for s in last
    ]
    assert ", ".join(lines) == " ".join(PARTS.split())
    assert {s.block for s in program.statements if s.again} == {"blocks.0", "blocks.1", ""}
    assert [s.value for s in program.statements if s.again and not s.block] == ["layer_norm_4"]  # gathered for the head
    assert str(
        group_recomputed(replace(program, statements=tuple(replace(s, again=0) for s in program.statements)))
    ) == str(program)


PARTS = """
0 enter, 0 partial, 0 partial, 1 layer_norm.default, 1 all_gather, 1 linear.default, 1 reshape.default, 1 transpose.int,
1 split.Tensor, 1 attention, 1 transpose.int, 1 reshape.default, 1 linear.default, 1 reduce_scatter, 1 dropout,
1 add.Tensor, 1 layer_norm.default, 1 all_gather, 1 linear.default, 1 gelu.default, 0 linear.default, 0 reduce_scatter,
0 dropout, 0 add.Tensor
"""


class Stacked(nn.Module):
    """Blocks that begin with a product, behind a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


STACKED = capture_graph(Stacked(), (torch.randn(4, 4, 8),), {}, training=True)


def test_a_message_in_front_of_a_block_stays_there() -> None:
    """What it brings may be under way before the block needs it: it is a part of its own."""
    opts = CompileOptions(recompute="selective", like="megatron-sp")
    program = compile_graph(STACKED, autoshard.Mesh({"tp": 2}, "ideal_network"), opts).program
    (message,) = (s for s in program.statements if s.again and not s.block and s.value == "add")
    assert message.step is not None
    assert message.step.kind == "all_gather"
    assert [s for s in program.statements if s.again == message.again] == [message]


@pytest.mark.parametrize("recompute", ["auto", "none", "blocks", "selective"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_what_the_backward_repeats_is_what_was_priced(family: str, recompute: str) -> None:
    """Messages that the backward repeats: their seconds in the program, and in the search that chose them."""
    reference = models.get(family)
    args, kwargs = reference.inputs(batch=8, seq=32)
    graph = capture_graph(reference.model().train(), args, kwargs, training=True)
    opts = CompileOptions(recompute=recompute, like="megatron-sp")
    found = compile_graph(graph, autoshard.Mesh({"tp": 2}, "h100"), opts)
    run = [c.seconds for c in found.plan.collectives if c.reason.endswith(RECOMPUTED_SUFFIX)]
    priced = sum(float(x.communication(1)) for x in objective(found.program.assignment).again.values())
    assert len(run) >= 5
    assert sum(run) == pytest.approx(priced, rel=1e-6)


class Entered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()  # type: ignore[no-any-return]


def test_what_is_converted_again_without_a_copy_is_no_part() -> None:
    graph = capture_graph(Entered(), (torch.randn(4, 4, 8),), {}, training=True)
    opts = CompileOptions(like="megatron-sp", hints={"first": {"tp": Invariant()}, "second": {"tp": Shard(2)}})
    found = compile_graph(graph, autoshard.Mesh({"tp": 2}, "ideal_network"), opts).program
    (enter,) = (s for s in found.statements if s.value == "linear" and s.step is not None and s.step.kind == "enter")
    assert enter in recomputed_statements(
        replace(found, statements=tuple(replace(s, again=0) for s in found.statements))
    )
    assert not enter.again


class Exchanged(nn.Module):
    """A product whose result is exchanged before what reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.Softmax(0), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x))).square().mean()  # type: ignore[no-any-return]


def test_a_message_is_not_repeated_where_its_result_is_no_larger() -> None:
    """What it brought is kept in the place of what it was made from, where nobody else keeps that."""
    graph = capture_graph(Exchanged(), (torch.randn(4, 4, 8),), {}, training=True)
    opts = CompileOptions(recompute={"act": True}, hints={"up": {"tp": Shard(0)}, "act": {"tp": Shard(1)}})
    found = compile_graph(graph, autoshard.Mesh({"tp": 2}, "ideal_network"), opts)
    moved = [s for s in found.program.statements if s.step is not None and s.step.kind == "all_to_all"]
    assert len(moved) == 2
    assert not any(s.again for s in moved)


class Gathered(nn.Module):
    """A norm whose result is gathered along two dims before what reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x)).square().mean()  # type: ignore[no-any-return]


def test_what_is_converted_in_two_steps_is_made_again_in_both() -> None:
    """What comes between them is not kept, either."""
    graph = capture_graph(Gathered(), (torch.randn(4, 4, 8),), {}, training=True)
    opts = CompileOptions(
        recompute={"norm": True, "up": True},
        hints={"norm": {"a": Shard(0), "b": Shard(1)}, "up": {"a": Shard(2), "b": Shard(2)}},
    )
    found = compile_graph(graph, autoshard.Mesh({"a": 2, "b": 2}, "ideal_network"), opts)
    gathers = [s for s in found.program.statements if s.step is not None and s.step.kind == "all_gather"]
    assert [bool(s.again) for s in gathers] == [True, True]


# --- the run time ---


def test_what_is_saved_is_made_again() -> None:
    """Everything that autograd saves of a part, views and outputs that others save, in one run per backward."""
    runs = []

    def part(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        runs.append(1)
        y = (x @ w).tanh()
        left, right = y.chunk(2, -1)
        return left.exp() * right, y.T

    def forward(x: torch.Tensor, w: torch.Tensor, call: Any) -> torch.Tensor:
        a, b = call(part, x, w)
        return (a @ b[:2]).square().sum() + b.sin().sum()  # type: ignore[no-any-return]

    x, w = torch.randn(3, 4).double().requires_grad_(), torch.randn(4, 4).double().requires_grad_()
    with runtime.bind(World({"tp": 1}).ranks[0]):
        expected = torch.autograd.grad(forward(x, w, lambda f, *xs: f(*xs)), (x, w))
    runs.clear()
    world = World({"tp": 1})

    def call() -> torch.Tensor:
        with again.dropping_recomputable():
            return forward(x, w, runtime.recompute)

    (loss,) = world.run(call)
    found = torch.autograd.grad(loss, (x, w), retain_graph=True)
    assert len(runs) == 2
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), expected, rtol=1e-12, atol=0)
    assert len(runs) == 3


@pytest.mark.parametrize("whole", [True, False], ids=["a part", "dropout alone"])
def test_what_is_drawn_again_is_that_of_its_own_micro_batch(whole: bool) -> None:
    """Also where that of another runs by then, which takes no notice of it."""
    world = World({"tp": 2})
    xs = [torch.ones(2, 3).double().requires_grad_() for _ in world.ranks]

    def part(x: torch.Tensor) -> torch.Tensor:
        return runtime.dropout(x, 0.5, (4, 3), {0: "tp"}, batch=0, again=not whole).exp()

    for rank in world.ranks:
        rank.enter(1, 2)
    found = world.run(lambda x: runtime.recompute(part, x, draws=True) if whole else part(x), [(x,) for x in xs])
    for rank in world.ranks:
        rank.enter(0, 2)
    before = torch.get_rng_state()
    torch.stack(found).sum().backward()
    assert torch.equal(before, torch.get_rng_state())
    assert {rank.micro_batch for rank in world.ranks} == {(0, 2)}
    for x, y in zip(xs, found, strict=True):
        torch.testing.assert_close(x.grad, y.detach() * y.detach().log(), rtol=1e-12, atol=0)


def test_a_changed_input_is_refused() -> None:
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)

    def part(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * w).exp()

    (y,) = World({"tp": 1}).run(lambda: runtime.recompute(part, x, w))
    x.mul_(2)
    with pytest.raises(
        RuntimeMismatchError, match="an input of part was changed in place between forward and backward"
    ):
        y.sum().backward()


def test_a_part_that_runs_otherwise_is_refused() -> None:
    w, calls = torch.randn(3, requires_grad=True), []

    def part(w: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return w.exp() if len(calls) == 1 else w.exp().exp()

    (y,) = World({"tp": 1}).run(lambda: runtime.recompute(part, w))
    with pytest.raises(RuntimeMismatchError, match="part saved 1 tensors in the forward and 2 recomputed"):
        y.sum().backward()


def test_what_gives_no_gradient_is_not_remembered() -> None:
    w = torch.randn(3)
    known = dict(again._recomputable_storages)
    (y,) = World({"tp": 1}).run(lambda: runtime.recompute(torch.exp, w))
    assert torch.equal(y, w.exp())
    assert again._recomputable_storages == known


LABELS = torch.arange(4) % 3
SUMMED = {
    "norm": lambda x: runtime.batch_norm_no_stats(x, None, None, 1e-5, 8, "a")[0].exp(),
    "softmax": lambda x: runtime.softmax(x, 1, "a").square(),
    "logsumexp": lambda x: runtime.logsumexp(x, [1], "a").square(),
    "loss_of_parts_of_a_batch": lambda x: runtime.cross_entropy(x, LABELS, batch_axes="a").exp(),
    "loss_of_parts_of_classes": lambda x: runtime.cross_entropy(x, LABELS, classes=6, class_axes="a").exp(),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMMED)
def test_what_operations_sum_over_ranks_is_summed_once(name: str) -> None:
    """A part that runs again has its sums from the forward: bit for bit the same gradients, and no collective more."""
    part = SUMMED[name]

    def made(run: Any) -> tuple[list[Executed], list[torch.Tensor | None]]:
        torch.manual_seed(0)
        xs = [torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        world, log = World({"a": 2}), list[Executed]()
        world.log = log
        torch.autograd.backward([y.sum() for y in world.run(run, [(x,) for x in xs])])
        return log, [x.grad for x in xs]

    def again(x: torch.Tensor) -> Any:
        with dropping_recomputable():
            return runtime.recompute(part, x)

    log, gradients = made(part)
    again_log, again_gradients = made(again)
    assert log == again_log
    assert any(e.phase == "forward" for e in log)
    assert all(map(torch.equal, gradients, again_gradients))

"""``dynamic=True``: one program for all batch sizes and lengths, with sizes that divide the ranks and that do not."""

from __future__ import annotations

import copy
import functools
import logging
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from harness import Captures, captured_once, ideal
from torch import Tensor, nn

import autoshard
from autoshard import HintError, Shard, models
from autoshard.module.programs.executable import load_source

MESHES: dict[str, dict[str, int]] = {"tp2": {"tp": 2}, "dp2tp2": {"dp": 2, "tp": 2}, "tp3": {"tp": 3}}
EXAMPLE = (4, 16)
SIZES = (EXAMPLE, (2, 8), (3, 5), (5, 7), (2, 2), (7, 12), (2, 3), (3, 2))
"""(batch, length): multiples of the ranks, others, and some below the number of ranks"""
WIDTH = 6

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def ids(batch: int, seq: int) -> Tensor:
    return torch.randint(2, 96, (batch, seq))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    width = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=96, **width))
    more = {"num_key_value_heads": 2, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=96, **width, **more))


def padded(batch: int, seq: int) -> dict[str, Tensor]:
    mask = torch.ones(batch, seq, dtype=torch.long)
    mask[0, -1] = 0
    return {"input_ids": ids(batch, seq), "attention_mask": mask, "labels": ids(batch, seq)}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Inputs]]] = {
    "mlp": (mlp, lambda b, s: ((torch.randn(b, s, 8).double(),), {})),
    "gpt": (lambda: models.get("gpt").model(), lambda b, s: ((ids(b, s), ids(b, s)), {})),
    "llama": (lambda: models.get("llama").model(), lambda b, s: ((ids(b, s), ids(b, s)), {})),
    "hf_llama": (lambda: hugging_face("llama"), lambda b, s: ((), {"input_ids": ids(b, s), "labels": ids(b, s)})),
    "hf_bert": (lambda: hugging_face("bert"), lambda b, s: ((), padded(b, s))),
}


@pytest.fixture
def captures() -> Iterator[Captures]:
    with captured_once() as found:
        yield found


def train(model: nn.Module, inputs: Inputs, seed: int = 5) -> dict[str, Tensor]:
    """Outputs and all gradients of one step."""
    torch.manual_seed(seed)
    model.zero_grad()
    args, kwargs = inputs
    out = model(*args, **kwargs)
    leaves = pytree.tree_leaves(dict(out) if hasattr(out, "keys") else out)
    loss = getattr(out, "loss", None)
    if loss is None:
        floats = [x for x in leaves if x.is_floating_point()]
        loss = sum(((x * torch.arange(1, x.numel() + 1).view(x.shape).cos()).sum() for x in floats), torch.zeros(()))
    loss.backward()
    found = {f"output {i}": x.detach() for i, x in enumerate(leaves)}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {f"input {i}": x.grad for i, x in enumerate(pytree.tree_leaves(inputs)) if x.grad is not None}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], what: Any, within: float = 1e-9) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(x.abs().max()) for x in expected.values() if x.numel() and x.is_floating_point())
    for name, x in expected.items():
        assert found[name].shape == x.shape, (what, name)
        scale = max(float(x.abs().max()), 1e-3 * largest) if x.numel() else 1.0
        error = float((found[name] - x).abs().max()) / scale if x.numel() else 0.0
        assert error <= within, (what, name, error)


@pytest.mark.slow_cases("*hf_llama", "*gpt", "llama", "hf_bert")
@pytest.mark.parametrize("name", CASES)
def test_one_program_serves_all_sizes(name: str, captures: Captures) -> None:
    make, inputs = CASES[name]
    model = make().double().eval()
    for mesh, axes in MESHES.items():
        args, kwargs = inputs(*EXAMPLE)
        sharded = autoshard.compile(model, ideal(axes), args, kwargs, training=True, dynamic=True)
        cost = sharded.plan.cost
        assert cost.flops_per_rank <= 1.2 * cost.flops / math.prod(axes.values())
        for batch, seq in SIZES:
            given = inputs(batch, seq)
            assert_equal(train(sharded, given), train(model, given), (mesh, batch, seq))
        assert len(sharded.programs) == 1, mesh
    assert len(captures.known) == 1


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: x.flatten(0, 1) @ torch.ones(WIDTH, 4).to(x),
    "unflatten": lambda x: x.flatten(0, 1).view(x.shape[0], x.shape[1], WIDTH),
    "merge": lambda x: x.reshape(x.shape[0], -1),
    "swap": lambda x: x.permute(1, 0, 2).reshape(x.shape[1], -1),
    "heads": lambda x: x.view(*x.shape[:2], 2, 3).transpose(1, 2).reshape(x.shape[0] * 2, x.shape[1], 3),
    "roll": lambda x: x.roll(1, 1),
    "cumsum": lambda x: x.cumsum(1),
    "pad": lambda x: F.pad(x, (0, 0, 1, 2)),
    "last": lambda x: x[:, -1],
    "triangle": lambda x: (x @ x.transpose(1, 2)).tril(),
    "softmax": lambda x: (x @ x.transpose(1, 2)).softmax(-1),
    "positions": lambda x: x * torch.arange(x.shape[1]).to(x)[:, None],
    "masked_fill": lambda x: x.masked_fill((torch.arange(x.shape[1]) > x.shape[1] // 2)[None, :, None], 0.0),
    "relative": lambda x: x @ x.transpose(1, 2) + (torch.arange(x.shape[1])[None] - torch.arange(x.shape[1])[:, None]),
    "mean": lambda x: x.mean((0, 1)),
    "mean_by_hand": lambda x: x.sum() / x.numel(),
    "scaled": lambda x: x / x.shape[1] ** 0.5,
    "variance": lambda x: x.var(1),
    "largest": lambda x: x.topk(2, 1).values,
    "sorted": lambda x: x.sort(1).values,
    "flip": lambda x: x.flip(1),
    "repeat": lambda x: x.repeat(2, 1, 1).repeat_interleave(2, 1),
    "expand": lambda x: x.mean(1, keepdim=True).expand(-1, x.shape[1], -1) * x,
    "join": lambda x: torch.cat([torch.cat([x, 2 * x], 1), torch.cat([x, x], 1)], 0),
    "stack": lambda x: torch.stack([x, 2 * x], 1),
    "einsum": lambda x: torch.einsum("bsd,btd->bst", x, x),
    "gather": lambda x: x.gather(1, torch.zeros(x.shape[0], 1, WIDTH, dtype=torch.long)),
    "index": lambda x: x[torch.arange(x.shape[0]), -1],
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, torch.zeros(x.shape, dtype=torch.long), x),
    "factories": lambda x: torch.eye(x.shape[1]).to(x) @ x + x.new_zeros(x.shape[1], 1) + torch.ones(x.shape[1], 1),
    "group_norm": lambda x: F.group_norm(x.transpose(1, 2), 2),
    "batch_norm": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True),
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), torch.ones(3, WIDTH, 3).to(x), padding=1),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3, is_causal=True),
    "cross_entropy": lambda x: F.cross_entropy(x.reshape(-1, WIDTH), x.reshape(-1, WIDTH).argmin(-1)),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), x.roll(1, -1).softmax(-1), reduction="batchmean"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid().detach()),
    "dropout": lambda x: F.dropout(x, 0.5, True),
    "random": lambda x: x * torch.rand(x.shape[0], x.shape[1], 1).to(x),
    "interpolate": lambda x: F.interpolate(x.transpose(1, 2), scale_factor=2, mode="nearest"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.unsqueeze(1).expand(-1, 4, -1, -1), 2),
    "data_dependent": lambda x: x[x[..., 0] > 0].sum(0) / x.shape[1],
}


class Op(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


class Many(nn.Module):
    """A linear, and each op on its result."""

    def __init__(self, *ops: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.ops = nn.ModuleList(map(Op, ops))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.linear(x)
        return tuple(op(h) for op in self.ops)


def floats(batch: int, seq: int) -> Inputs:
    return (torch.randn(batch, seq, WIDTH, dtype=torch.float64, requires_grad=True),), {}


CUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"a": 2}, {"a": Shard(0)}),
    ({"a": 3}, {"a": Shard(1)}),
    ({"a": 3}, {"a": Shard(0)}),
    ({"a": 2, "b": 2}, {"a": Shard(0), "b": Shard(1)}),
    ({"a": 2, "b": 2}, {"a": Shard(1), "b": Shard(1)}),
]


@functools.cache
def all_ops() -> Many:
    return Many(*OPS.values()).double()


@pytest.mark.parametrize(
    ("axes", "cut"),
    [pytest.param(*cut, marks=[pytest.mark.slow] * (len(cut[1]) == 1 or cut[1]["a"] == cut[1]["b"])) for cut in CUTS],
    ids=str,
)
def test_every_op_on_a_cut_symbolic_dim(axes: dict[str, int], cut: dict[str, Any], captures: Captures) -> None:
    """The linear's result lies cut along batch or length, unevenly for most sizes; each op starts from there."""
    model, known, (args, kwargs) = all_ops(), len(captures.known), floats(4, 6)
    sharded = autoshard.compile(model, ideal(axes), args, kwargs, hints={"linear": cut}, dynamic=True)
    assert all(sharded.plan.shared["linear"][axis] == placement for axis, placement in cut.items())
    for batch, seq in ((4, 6), (3, 5), (2, 9)):
        given = floats(batch, seq)
        expected = train(model, given)
        given[0][0].grad = None
        assert_equal(train(sharded, given), expected, (axes, cut, batch, seq))
    assert len(sharded.programs) == 1, sharded.programs[0].compiled.symbols
    assert len(captures.known) <= known + 1


# --- the source ---


@pytest.mark.slow
def test_the_source_computes_with_lengths_of_the_inputs(golden: Callable[[str, str], None]) -> None:
    reference = models.get("gpt")
    args, kwargs = reference.inputs(batch=4)
    mesh = ideal(MESHES["dp2tp2"])
    hints = {"blocks.*.up": {"dp": Shard(0), "tp": Shard(2)}, "norm": {"dp": Shard(0), "tp": Shard(1)}}
    model = reference.model()
    made = autoshard.compile(copy.deepcopy(model), mesh, args, kwargs, hints=hints, dynamic=True)
    source = made.source
    assert "batch, seq = tokens.shape" in source
    assert "(batch, seq, 64)" in source  # the global shape that dropout draws
    assert 'runtime.all_gather(norm, 1, "tp", to="R", size=seq)' in source or "size=batch" in source
    golden("gpt_dynamic_dp2tp2.py", source)
    for batch, seq in (EXAMPLE, (3, 5)):
        given = CASES["gpt"][1](batch, seq)
        expected = train(model, given)
        assert_equal(train(made, given), expected, (batch, seq), within=1e-4)  # it is a file of a float32 model


def test_a_baked_in_length_is_noticed() -> None:
    """Negative control: with the example's length as a constant, another one fails."""
    args, kwargs = floats(4, 6)
    model = Many(OPS["merge"]).double()
    sharded = autoshard.compile(model, ideal({"a": 2}), args, kwargs, dynamic=True)
    (program,) = sharded.programs
    broken = re.sub(r"runtime\.require\(.*\)", "seq = 6", program.compiled.source.text)
    assert "seq = 6" in broken
    program.rank_module = load_source(broken)
    sharded._rank_modules.clear()
    with pytest.raises(RuntimeError, match=r"shape|size|invalid"):
        train(sharded, floats(3, 5))


# --- where one program is not enough ---


def agreed(model: nn.Module, sharded: autoshard.ShardedModule, batch: int, seq: int) -> int:
    """Run both; how many programs there are by now."""
    given = floats(batch, seq)
    expected = train(model, given)
    given[0][0].grad = None
    assert_equal(train(sharded, given), expected, (batch, seq))
    return len(sharded.programs)


def test_a_branch_on_a_length_is_a_condition_of_the_program() -> None:
    model = Many(lambda x: x * 2 if x.shape[1] > 8 else x.cumsum(1)).double()
    sharded = autoshard.compile(model, ideal({"a": 2}), *floats(4, 6), dynamic=True)
    assert "seq <= 8" in sharded.programs[0].compiled.symbols.conditions
    assert [agreed(model, sharded, *x) for x in ((3, 8), (3, 9), (5, 20), (2, 7))] == [1, 2, 2, 2]


def test_a_length_of_1_has_a_program_of_its_own() -> None:
    model = Many(OPS["softmax"]).double()
    sharded = autoshard.compile(model, ideal({"a": 2}), *floats(1, 6), dynamic=True)
    assert any("x dim 0 = 1" in note for note in sharded.plan.notes), sharded.plan.notes
    sizes = ((1, 6), (1, 9), (3, 5), (1, 4), (2, 2), (3, 1), (5, 1))
    assert [agreed(model, sharded, *x) for x in sizes] == [1, 1, 2, 2, 2, 3, 3]


def test_equal_lengths_that_do_not_look_equal_are_one() -> None:
    """The sum demands 2·⌈seq/2⌉ = seq; the cut of both is that of seq."""
    model = Many(lambda x: x + x[:, ::2].repeat_interleave(2, 1)).double()
    hints = {"linear": Shard(1), "ops.0": Shard(1)}
    sharded = autoshard.compile(model, ideal({"a": 3}), *floats(4, 6), hints=hints, dynamic=True)
    assert [agreed(model, sharded, *x) for x in ((4, 6), (3, 8), (2, 10))] == [1, 1, 1]


@pytest.mark.slow
def test_fewer_rows_than_ranks_under_a_hint() -> None:
    """A program of its own, for the model asks; the parameters' layouts, which are fixed by now, take two steps each."""
    model = Many(lambda x: x[:, 1:] if x.shape[1] > 2 else x[:, :1]).double()
    cut = {"linear": {"a": Shard(0), "b": Shard(0)}}
    sharded = autoshard.compile(model, ideal({"a": 2, "b": 2}), *floats(4, 6), hints=cut, dynamic=True)
    assert [agreed(model, sharded, *x) for x in ((2, 5), (2, 2), (3, 2))] == [1, 2, 2]
    one = Many(lambda x: x[:, 1:]).double()  # where a length that is 1 decides nothing, the same program serves
    sharded = autoshard.compile(one, ideal({"a": 2, "b": 2}), *floats(4, 6), hints=cut, dynamic=True)
    assert [agreed(one, sharded, *x) for x in ((2, 5), (2, 2), (3, 2), (1, 2))] == [1, 1, 1, 2]


def test_inputs_in_containers() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, pair: tuple[Tensor, Tensor], *, extra: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"out": self.linear(pair[0]) @ pair[1].transpose(1, 2) * extra["scale"]}

    def inputs(b: int, s: int, t: int) -> Inputs:
        x, y = torch.randn(b, s, WIDTH).double(), torch.randn(b, t, WIDTH).double()
        return ((x, y),), {"extra": {"scale": torch.randn(t).double()}}

    model = Nested().double()
    args, kwargs = inputs(4, 6, 9)
    sharded = autoshard.compile(model, ideal({"a": 2}), args, kwargs, dynamic=True)
    for sizes in ((4, 6, 9), (3, 3, 7), (5, 8, 2)):
        given = inputs(*sizes)
        assert_equal(train(sharded, given), train(model, given), sizes)
    assert len(sharded.programs) == 1


def test_lengths_that_the_model_fixes_are_named() -> None:
    sharded = autoshard.compile(Many(OPS["flip"]).double(), ideal({"a": 2}), *floats(4, 6), dynamic=True)
    assert "a length that stays fixed: x dim 2 = 6 (fixed by the model)" in sharded.plan.notes


def test_what_has_no_expression_is_compiled_for_its_shapes(caplog: pytest.LogCaptureFixture) -> None:
    model = Many(lambda x: x[:, : int(x.shape[1] ** 0.5)]).double()
    with caplog.at_level(logging.WARNING, "autoshard"):
        sharded = autoshard.compile(model, ideal({"a": 2}), *floats(4, 6), dynamic=True)
    assert "no program with symbolic lengths" in caplog.text
    assert [agreed(model, sharded, *x) for x in ((4, 6), (3, 9))] == [1, 2]


@pytest.mark.slow_cases("enable_grad")
@pytest.mark.parametrize("scope", [torch.enable_grad, torch.no_grad])
def test_writes_reach_what_they_go_through_the_last_of(scope: Any) -> None:
    def halved(x: Tensor) -> Tensor:
        last = (y := x.detach().clone())[:, -9:]
        with scope():
            last.mul_(0.5)
        return x + y

    model = Many(halved).double()
    sharded = autoshard.compile(model, ideal({"a": 2}), *floats(4, 6), dynamic=True)
    assert [agreed(model, sharded, *x) for x in ((4, 6), (3, 12))] == [1, 2]


def test_a_plan_for_fixed_sizes_is_refused_where_they_need_not_divide() -> None:
    """Batch 4 cut by 2 goes through a flattening; a batch of any size does not."""
    model, (args, kwargs) = Many(OPS["flatten"]).double(), floats(4, 6)
    hints = {"linear": Shard(0), "ops.0": Shard(0)}
    plan = autoshard.compile(model, ideal({"a": 2}), args, kwargs, hints=hints).plan
    sharded = autoshard.compile(model, ideal({"a": 2}), args, kwargs, plan=plan, dynamic=True)
    assert sharded.programs[0].compiled.symbols.read == ()
    assert agreed(model, sharded, 4, 6) == 1


# --- what the user may say ---


def test_a_promised_multiple_keeps_a_flattened_batch_cut() -> None:
    model = Many(OPS["flatten"]).double()
    hints = {"linear": Shard(0), "ops.0": Shard(0)}
    general = autoshard.compile(model, ideal({"a": 2}), *floats(4, 6), hints=hints, dynamic=True)
    assert "linear" in {c.value for c in general.collectives}
    assert any("dynamic={'x': {0: '2*batch'}}" in note for note in general.plan.notes)
    asked = {"x": {0: "2*pairs", 1: "length"}}
    sharded = autoshard.compile(model, ideal({"a": 2}), *floats(4, 6), hints=hints, dynamic=asked)
    assert "pairs = x.shape[0] // 2" in sharded.source
    assert "reshape(length * pairs, 6)" in sharded.source
    assert "linear" not in {c.value for c in sharded.collectives}
    assert [agreed(model, sharded, *x) for x in ((6, 5), (2, 3), (8, 2), (5, 4), (3, 7), (4, 4))] == [1, 1, 1, 2, 2, 2]


def test_only_the_named_dims_are_open() -> None:
    model = Many(OPS["cumsum"]).double()
    sharded = autoshard.compile(model, ideal({"a": 2}), *floats(4, 6), dynamic={"x": {1: "time"}})
    assert [agreed(model, sharded, *x) for x in ((4, 9), (4, 3), (5, 6))] == [1, 1, 2]
    assert [s.name for s in sharded.programs[0].compiled.symbols.read] == ["time"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"y": {0: "batch"}}, "no tensor argument 'y'. Known: x"), ({"x": {3: "t"}}, "has 3 dims, so there is no dim 3"),
     ({"x": {0: "b+1"}}, "neither a name nor a multiple"), ({"x": {0: "torch"}}, "neither a name nor a multiple")],
)  # fmt: skip
def test_a_wrong_request_is_refused(asked: Any, message: str) -> None:
    with pytest.raises(HintError, match=message):
        autoshard.compile(Many(OPS["flip"]).double(), ideal({"a": 2}), *floats(4, 6), dynamic=asked)


@pytest.mark.slow
def test_a_saved_program_takes_inputs_of_any_length(tmp_path: Path) -> None:
    reference = models.get("gpt")
    model = reference.model().eval()
    sharded = autoshard.compile(model, ideal({"tp": 2}), (ids(4, 16), ids(4, 16)), training=True, dynamic=True)
    sharded.save(tmp_path)
    given = {"tokens": ids(3, 9), "labels": ids(3, 9)}
    safetensors.torch.save_file(given, str(tmp_path / "other.safetensors"))
    command = [sys.executable, str(tmp_path / "rank_module.py"), "--inputs", str(tmp_path / "other.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "loss " in done.stdout, done.stdout + done.stderr
    assert float(done.stdout.split("loss ")[1]) == pytest.approx(model(**given).loss.item(), rel=1e-5)
    safetensors.torch.save_file({"tokens": ids(1, 9), "labels": ids(1, 9)}, command[-1])
    done = subprocess.run(command, capture_output=True, text=True)
    assert "the program does not hold for inputs of these lengths: condition 2" in done.stderr

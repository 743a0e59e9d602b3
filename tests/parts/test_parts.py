"""Models that are not one graph: parts are compiled, and the code between them runs as it is written."""

from __future__ import annotations

import copy
import re
import traceback
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import parts_cases
import pytest
import torch
from families import Family, outcome
from harness import ideal
from parts_cases import LayerDrop, check, made
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard import CaptureError, PlanError, compiler
from autoshard.errors import RuntimeMismatchError

AXES = {"tp": 2}


@pytest.mark.slow_cases("momentum_in_place", "triplets", "a_solver", "matching")
@pytest.mark.parametrize("name", parts_cases.CASES)
def test_trains_as_on_one_device(name: str) -> None:
    sharded = check(name)
    assert "" not in sharded.parts
    assert all(plan.cost.flops_per_rank < plan.cost.flops for plan in sharded.plans.values() if plan.cost.flops)
    with pytest.raises(CaptureError):
        autoshard.compile(made(name)[0], ideal(AXES), made(name)[1], parts=None)


def test_a_model_that_is_one_graph_has_one_part() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    sharded = autoshard.compile(model, ideal(AXES), (x,))
    assert sharded.parts == ("",)
    assert sharded.plans[""] is sharded.plan
    assert sharded.plan == autoshard.compile(model, ideal(AXES), (x,), parts=None).plan


@pytest.mark.slow
def test_plans_and_their_sum() -> None:
    model, args = made("matching")
    sharded = autoshard.compile(model, ideal(AXES), args)
    assert sharded.parts == ("backbone", "decoder", "head")
    plan, plans = sharded.plan, sharded.plans
    assert plan.cost.flops == sum(p.cost.flops for p in plans.values())
    assert plan.cost.flops_per_rank * 2 == plan.cost.flops
    assert "decoder.linear1.weight" in plan.layouts
    assert {c.fqn.split(".")[0] for c in plan.collectives} <= {"backbone", "decoder", "head"}
    line = plan.notes[0]
    assert "criterion" in line
    assert re.search(r"parts_cases\.py:\d+", line), line
    assert "3 parts are sharded, 100.0% of the FLOPs" in line
    assert line in " ".join(plan.report().split())
    assert "# decoder" in sharded.source


def test_compiling_leaves_no_trace() -> None:
    """The call that compiles the parts writes no buffer, and draws nothing."""
    model, args = made("momentum_by_data")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    sharded = autoshard.compile(model, ideal(AXES), args)
    assert torch.equal(torch.get_rng_state(), state)
    for name, x in sharded.state_dict().items():
        assert torch.equal(x, before[name]), name
        assert torch.equal(model.state_dict()[name], before[name]), name
    assert sharded.start == model.start == 0
    sharded(*args)
    assert (sharded.start, model.start) == (4, 0)


def test_equal_modules_share_one_program() -> None:
    model, args = made("layerdrop")
    model.layers.eval()
    for layer in model.layers:
        layer[1].p = 0.0
    sharded = autoshard.compile(model, ideal(AXES))
    for _ in range(6):
        sharded(args[0].requires_grad_())
    programs = sharded._between.programs
    assert len(sharded._inner_modules) == 3
    assert sum(map(len, programs.values())) == 1


def test_modes_are_tried_one_by_one() -> None:
    """In eval mode the model is one graph, in training it is not."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = LayerDrop(), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x) + (self.inner(x) if self.training else 0)

    torch.manual_seed(0)
    model, x = Dropped().double(), torch.randn(4, 8).double()
    sharded = autoshard.compile(model, ideal(AXES))
    for train in (False, True, False, True):
        torch.manual_seed(0)
        torch.random.manual_seed(0)
        assert (sharded.train(train)(x) - 0).shape == (4, 8)
        assert sharded.parts == (("",) if not train else sharded.parts)
        assert (sharded.parts == ("",)) is not train
    sharded.eval()
    torch.testing.assert_close(sharded(x), model.eval()(x), rtol=1e-9, atol=1e-12)


def test_parts_by_name() -> None:
    model, args = made("matching")
    sharded = autoshard.compile(model, ideal(AXES), args, parts=["model.backbone", "dec*"])
    assert sharded.parts == ("backbone", "decoder")
    torch.manual_seed(0)
    expected = model(*args)["loss"]
    torch.manual_seed(0)
    torch.testing.assert_close(sharded(*args)["loss"], expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(CaptureError, match=r"'neck' matches no module. Nearest: "):
        autoshard.compile(model, ideal(AXES), parts=["neck"])
    with pytest.raises(CaptureError, match="give 'auto', None, or a list"):
        autoshard.compile(model, ideal(AXES), parts="backbone")


@pytest.mark.slow
def test_a_module_that_is_kept_out() -> None:
    model, args = made("matching")
    autoshard.eager(model.decoder.linear1)
    sharded = autoshard.compile(model, ideal(AXES), args)
    assert "decoder" not in sharded.parts
    assert {"backbone", "decoder.linear2", "head"} <= {*sharded.parts}
    assert "decoder.linear1" not in sharded.parts
    one = nn.Sequential(nn.Linear(8, 8), autoshard.eager(nn.Linear(8, 8)))
    sharded, x = autoshard.compile(one, ideal(AXES)), torch.randn(4, 8)
    torch.testing.assert_close(sharded(x), one(x))
    assert sharded.parts == ("0",)
    assert "keeps '1' out" in sharded.plan.notes[0]
    in_plain_code = 3 * 2 * 4 * 8 * 8  # the backward of a product is two
    assert sharded.plan.cost.flops == sharded.plans["0"].cost.flops + in_plain_code


def test_what_needs_one_graph_says_what_is_in_the_way() -> None:
    model, args = made("matching")
    for options in ({"micro_batches": 2}, {"strict": True}):
        with pytest.raises(CaptureError, match=r"criterion \(.*parts_cases\.py:\d+.* needs? one graph"):
            autoshard.compile(model, ideal(AXES), args, **options)  # type: ignore[arg-type]


@pytest.mark.slow
class Threaded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(2) as threads:
            results = [threads.submit(m, x) for m in (self.one, self.other)]
            return sum(r.result() for r in results)  # type: ignore[return-value]


@pytest.mark.timeout(60)
def test_modules_in_threads_are_refused() -> None:
    """They would wait for the lock that the forward around them holds, and ranks would meet in any order."""
    sharded = autoshard.compile(Threaded(), ideal(AXES))
    for _ in range(2):
        with pytest.raises(RuntimeMismatchError, match=r"(one|other) \(Linear\) is called in another thread than"):
            sharded(torch.randn(4, 8))


def test_errors_of_the_model_change_nothing() -> None:
    """A wrong shape fails in eager, too: it is the refusal of the first call, and nothing is taken over."""
    model, (x, labels) = made("matching")
    sharded = autoshard.compile(model, ideal(AXES))
    with pytest.raises(CaptureError):
        sharded(x[..., :5], labels)
    with pytest.raises(PlanError, match="nothing is compiled yet"):
        sharded.plan  # noqa: B018
    assert sharded(x, labels)["loss"].requires_grad
    model.register_buffer("view", model.head.weight.detach())
    with pytest.raises(CaptureError, match="shares memory with parameter"):
        autoshard.compile(model, ideal(AXES), (x, labels))


def test_copies_train_apart() -> None:
    model, args = made("matching")
    sharded = autoshard.compile(model, ideal(AXES), args)
    twin: Any = copy.deepcopy(sharded)
    before = {n: x.clone() for n, x in twin.state_dict().items()}
    with torch.no_grad():
        for p in sharded.parameters():
            p.add_(1.0)
    assert all(torch.equal(x, before[n]) for n, x in twin.state_dict().items())
    torch.manual_seed(0)
    expected = model(*args)["loss"]
    torch.manual_seed(0)
    torch.testing.assert_close(twin(*args)["loss"], expected, rtol=1e-9, atol=1e-12)


class Recomputed(nn.Module):
    """Plain code recomputes a part, and reads a configuration that its modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=1.0)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.one.config = self.config  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.one, x, use_reentrant=False)
        if x.sum().item() > 1e9:
            return x.sum()
        return (self.other(x) * self.config.scale).square().mean()


def test_copies_share_their_own_configuration() -> None:
    model, x = Recomputed().double(), torch.randn(4, 8, dtype=torch.float64)
    sharded = autoshard.compile(model, ideal(AXES), (x,))
    sharded(x)
    twin: Any = copy.deepcopy(sharded)
    twin.config.scale = 3.0
    before = model(x).detach()
    torch.testing.assert_close(sharded(x).detach(), before)
    torch.testing.assert_close(twin(x).detach(), before * 9)
    assert twin.config is twin.one.config


def test_parts_are_recomputed_in_the_thread_of_the_backward() -> None:
    """As of a GPU."""
    model, x = Recomputed().double(), torch.randn(4, 8, dtype=torch.float64)
    sharded = autoshard.compile(copy.deepcopy(model), ideal(AXES), (x,))
    model(x).backward()
    loss = sharded(x)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(loss.backward).result()
    grads = sharded.full_gradients()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)


def test_verify_compares_across_parts() -> None:
    model, args = made("matching")
    report = autoshard.verify(model, ideal(AXES), args, steps=2)
    assert report.ok, str(report)


@pytest.mark.internal_errors
def test_an_error_of_ours_leaves_the_model_to_eager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once; a flag, which is set in tests, raises it."""

    def fails(*_: Any, **__: Any) -> Any:
        raise KeyError("a strategy")

    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double(), torch.randn(4, 8).double()
    monkeypatch.setattr(compiler, "search_graph", fails)
    said = r"KeyError: 'a strategy' \(test_parts\.py:\d+\)\. Please report"
    with pytest.raises(CaptureError, match=said):
        autoshard.compile(model, ideal(AXES), (x,), parts=None)
    sharded = autoshard.compile(model, ideal(AXES), (x,))
    assert sharded.parts == ()
    torch.testing.assert_close(sharded(x), model(x), rtol=0, atol=0)
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("modules run eagerly")]
    assert len(told) == 1
    assert re.search(said, told[0])
    monkeypatch.setenv("AUTOSHARD_CHECK", "errors")
    with pytest.raises(CaptureError, match=said) as error:
        autoshard.compile(model, ideal(AXES), (x,))
    assert "in fails" in "".join(traceback.format_exception(error.value))


@pytest.mark.internal_errors
def test_the_note_has_errors_of_ours_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = compiler.search_graph

    def fails(graph: Any, *args: Any, **kwargs: Any) -> Any:
        if "sigmoid" in str(graph):
            raise KeyError("a part")
        return real(graph, *args, **kwargs)

    monkeypatch.setattr(compiler, "search_graph", fails)
    model = Branched().double()
    sharded = autoshard.compile(model, ideal(AXES), (torch.randn(4, 8).double(),))
    assert sharded.parts == ("other",)
    assert re.search(r"KeyError: 'a part' \(test_parts\.py:\d+\)\. Please report", sharded.plan.notes[0])


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Gated(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if float(x.sum()) > 1e9 else self.other(self.one(x))


class Gated(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sigmoid()


class Scaled(nn.Module):
    """A part that gets another number in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count = ScaledLinear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.inner(x, 0.1 * self.count) if float(x.sum()) < 1e9 else x


class ScaledLinear(nn.Linear):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


@pytest.mark.slow
def test_a_part_that_always_needs_another_program_runs_eagerly() -> None:
    model, x = Scaled().double(), torch.randn(4, 8).double()
    sharded = autoshard.compile(model, ideal(AXES))
    for _ in range(10):
        torch.testing.assert_close(sharded(x), model(x), rtol=1e-9, atol=1e-12)
    assert sharded.parts == ()
    assert "has 8 programs" in str(sharded._between.refused)


class Frozen(nn.Module):
    """A body that is frozen for one of its two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.body.requires_grad_(False)
        still = self.body(x)
        self.body.requires_grad_(True)
        return (self.head(self.body(x)).mean() - still.mean()).square()


def test_a_module_that_the_forward_freezes() -> None:
    found = outcome(Family(Frozen, lambda: (torch.randn(4, 8),)), AXES)
    assert found.verdict == "equal", found.said
    assert found.parts == ("body", "head")


def test_a_submodule_that_its_parent_pickles() -> None:
    found = outcome(Family(parts_cases.Pickled, lambda: (torch.randn(4, 3),)), AXES)
    assert found.verdict == "equal", found.said
    assert found.parts == ("into", "generated")


def test_modules_that_the_forward_makes_are_shown() -> None:
    model, args = made("modules_made_in_the_forward")
    sharded: Any = autoshard.compile(model, ideal(AXES), args)
    assert sharded.twin is None
    sharded(*args)
    assert {"scale.weight", "twin.0.weight"} <= {*sharded.state_dict()}
    assert {"scale.weight", "scale.bias"} <= {*dict(sharded.named_parameters())}
    twin = copy.deepcopy(sharded)
    with torch.no_grad():
        sharded.scale.weight.zero_()
    assert not torch.equal(twin(*args), sharded(*args))
    assert not sharded.eval().scale.training


class Clusters(nn.Module):
    """Rows go to the layers of their clusters; the last one is always empty, and a trace takes it for a long one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of, found = (x.sum(1) > 0).long(), x
        for number, layer in enumerate(self.layers):
            rows = (of == number).nonzero().squeeze(1)
            if rows.numel() == 0:
                continue
            found = found.index_copy(0, rows, layer(x.index_select(0, rows)))
        return found


def test_a_length_that_one_program_takes_for_a_long_one() -> None:
    family = Family(Clusters, lambda: (torch.randn(6, 8),))
    found = outcome(family, AXES)
    assert found.verdict == "equal", found.said
    assert found.parts == ("layers.0", "layers.1")
    assert outcome(family, AXES, parts=None).verdict == "refused"


class Toggled(nn.Module):
    """The statistics of a submodule are switched off for one of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.head(self.body(x))
        self.body[1].track_running_stats = False
        more = self.head(self.body(x * 3)) if float(x.sum()) < 1e9 else found
        self.body[1].track_running_stats = True
        return found + more


@pytest.mark.slow
def test_attributes_that_plain_code_sets_on_a_part() -> None:
    found = outcome(Family(Toggled, lambda: (torch.randn(6, 8),)), AXES)
    assert found.verdict == "equal", found.said
    assert {"body", "head"} <= {*found.parts}


class Adjusted(nn.Module):
    """Plain code and a part read attributes that users set."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Sequential(nn.Linear(8, 8), nn.ELU(1.0)), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.body(x) * self.scale + getattr(self, "offsets", [0.0])[0]
        return found if float(x.sum()) < 1e9 else x


def test_attributes_that_are_set_before_the_first_call_and_later() -> None:
    model, x = Adjusted(), torch.randn(6, 8)
    sharded, losses = autoshard.compile(copy.deepcopy(model), ideal(AXES)), []
    for name, value in (("scale", 2.0), ("offsets", [1.0])):
        setattr(model, name, value)
        setattr(sharded, name, copy.copy(value))
    model.body[1].alpha = sharded.body[1].alpha = 0.5
    for change in (lambda m: m.offsets.insert(0, 3.0), lambda m: setattr(m, "scale", 1.0), None):
        torch.testing.assert_close(sharded(x), model(x))
        losses.append(model(x).sum().item())
        for of in (model, sharded) if change else ():
            change(of)
    assert len({*losses}) == 3
    assert {*sharded.parts} == {"body"}


class Branch(nn.Module):
    """Not one graph, without modules that could be parts."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w if float(x.sum()) > 0 else x


def test_a_model_without_parts_says_so(caplog: pytest.LogCaptureFixture) -> None:
    sharded = autoshard.compile(Branch(), ideal(AXES), (torch.ones(4, 4),))
    assert sharded.parts == ()
    assert any("0 parts are sharded" in r.message for r in caplog.records if r.levelname == "WARNING")


def test_a_plan_of_parts_claims_no_bound_and_no_part_of_the_memory() -> None:
    model, args = made("matching")
    sharded = autoshard.compile(model, ideal(AXES), args)
    assert sharded.plan.lower_bound == 0
    assert max(p.memory.peak for p in sharded.plans.values()) < sharded.plan.memory.peak
    assert sum(sharded.plan.memory.at_peak.values()) == pytest.approx(sharded.plan.memory.peak)


class Heads(nn.Module):
    """Its output is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).view(4, 6, 2, 4).transpose(1, 2)


class Viewed(nn.Module):
    """``view()`` asks for the memory order that the output of its part has in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out = Heads(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.heads(x)
        if found.detach().abs().max().item() < 0:
            return found
        return self.out(found.transpose(1, 2).view(4, 6, 8))


def test_outputs_of_parts_have_the_memory_order_of_eager() -> None:
    found = outcome(Family(Viewed, lambda: (torch.randn(4, 6, 8),)), AXES)
    assert (found.verdict, found.parts) == ("equal", ("heads", "out")), found.said
    model = Viewed()
    sharded = autoshard.compile(model, ideal(AXES))
    with torch.no_grad():
        torch.testing.assert_close(sharded(x := torch.randn(4, 6, 8)), model(x))


class Pairs(nn.Module):
    """A loss over all pairs of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.T).softmax(-1).square().mean()


class Contrasted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.loss, self.small = nn.Linear(8, 8), Pairs(), Pairs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.body(x)
        return self.loss(found) + self.small(found[:2]) if float(x.sum()) < 1e9 else found


def test_a_module_without_parameters_that_has_most_of_the_products() -> None:
    for parts, expected in (("auto", ("body", "loss")), (["loss"], ("loss",)), (["body"], ("body",))):
        found = outcome(Family(Contrasted, lambda: (torch.randn(64, 8),)), AXES, parts=parts)
        assert (found.verdict, found.parts) == ("equal", expected), found.said
        assert found.divided == pytest.approx(1.0, abs=0.01) or parts != "auto"
    in_plain_code = 3 * (2 * 64 * 64 * 8 + 2 * 2 * 2 * 8)
    plan = found.sharded.plan
    assert plan.cost.flops == found.sharded.plans["body"].cost.flops + in_plain_code
    sharded = autoshard.compile(Contrasted(), ideal(AXES))
    for parts in (("body",), ("body", "loss")):  # the first call shows it
        sharded(torch.randn(64, 8)).backward()
        assert sharded.parts == parts
        assert sharded.plan.cost.flops == plan.cost.flops


class Counts(nn.Module):
    """Its forward counts in a list, which no program can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return self.layer(x) * self.calls[0]


def test_a_list_that_the_forward_writes_is_the_compiled_modules_own() -> None:
    """Compiling ahead counts nothing, and calls do not reach the model."""
    torch.manual_seed(0)
    model, x = Counts().double(), torch.randn(4, 8, dtype=torch.float64)
    sharded = autoshard.compile(model, ideal({"tp": 2}), (x,))
    assert model.calls == [0]
    for number in range(1, 4):
        assert torch.allclose(sharded(x), model(x), rtol=1e-12)
        assert sharded.calls == model.calls == [number]

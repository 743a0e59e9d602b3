"""The watched trace: observers in order, answers, refusals, stand-ins, and attributes that are what they were afterwards."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_models import text
from harness import ideal
from torch import Tensor, nn

import autoshard
from autoshard.errors import CaptureError
from autoshard.passes.capture import watch as watching
from autoshard.passes.capture.export import capture
from autoshard.passes.capture.observer import ObservedCall, Observer, ObserverAnswer, Patch, RefusalLog, TracedForward
from autoshard.passes.capture.shared_regions.observer import SharedRegions
from autoshard.passes.capture.specialization.loops import LoopFindings
from autoshard.passes.capture.specialization.scalars import ScalarConversions
from autoshard.passes.capture.watch import ObserverMode, trace_observers

X = torch.ones(2, 3)


class Told(Observer):
    """Writes down what it is told of calls to ``relu``."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def before(self, call: ObservedCall) -> ObserverAnswer | ObservedCall | None:
        if call.func is torch.relu:
            self.said.append(f"{self.name} before")
        return None

    def after(self, call: ObservedCall, result: Any) -> Any:
        if call.func is torch.relu:
            self.said.append(f"{self.name} after")
        return result


class Instead(Observer):
    """Answers a sum with 7, makes a sine of a cosine, and watches what stands for ``tanh``."""

    def before(self, call: ObservedCall) -> ObserverAnswer | ObservedCall | None:
        if call.func is torch.sum:
            return ObserverAnswer(7, "seven")
        if call.func is torch.cos:
            return replace(call, func=torch.sin)
        return replace(call, func=torch.relu, observes_inner=True) if call.func is torch.tanh else None

    def after(self, call: ObservedCall, result: Any) -> Any:
        return result + 1 if call.func is torch.sin else result


def test_the_first_observer_sees_a_call_first_and_its_result_last() -> None:
    said: list[str] = []
    with ObserverMode((Told("a", said), Told("b", said))):
        torch.relu(X)
    assert said == ["a before", "b before", "b after", "a after"]


def test_an_answer_ends_the_walk_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "autoshard")
    with ObserverMode((Instead(),)):
        assert torch.sum(X) == 7
    (line,) = [r.getMessage() for r in caplog.records if "answered" in r.getMessage()]
    assert line.startswith("test_watch.py:")
    assert line.endswith(" is answered: seven")


def test_another_call_in_its_place_is_made_and_seen_by_those_inside() -> None:
    said: list[str] = []
    with ObserverMode((Instead(), Told("inside", said))):
        assert torch.equal(torch.cos(X), torch.sin(X))
        torch.tanh(X)
    assert said == ["inside before", "inside after"]
    with ObserverMode((Instead(),)):
        assert torch.allclose(torch.cos(X), torch.ones(()).sin() + 1)


def test_a_refusal_that_the_model_swallows_is_raised_after_the_trace() -> None:
    refusals = RefusalLog()
    watch = ObserverMode((refusals,))

    def swallows() -> None:
        with watch.active():
            for message in ("first", "second"):
                with contextlib.suppress(CaptureError):
                    raise refusals(message)

    with pytest.raises(CaptureError, match=r"^first$"):
        swallows()


def test_what_begins_ends_and_is_learnt_reaches_every_observer() -> None:
    class Counts(Observer):
        told = 0

        def begin(self, forward: TracedForward) -> None:
            self.told += len(forward.inputs)

        def end(self, output: Any) -> None:
            self.told += output

        def learn(self, error: Exception) -> bool:
            return self.told == 12

    counts = Counts(), Counts()
    watch = ObserverMode(counts)
    watch.begin(TracedForward([X, X], [], [], [False, False], {}))
    watch.end(10)
    assert [c.told for c in counts] == [12, 12]
    assert watch.learn(ValueError())
    assert not ObserverMode((Observer(),)).learn(ValueError())


def attributes() -> dict[tuple[Any, str], Any]:
    """What each observer's patches replace, as it is now."""
    equal = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    patches = [
        patch
        for observer in trace_observers(True, LoopFindings(), ScalarConversions(), SharedRegions(equal))
        for patch in observer.patches()
    ]
    return {(owner, name): vars(owner).get(name, ...) for owner, name, _ in patches}


BEFORE: dict[tuple[Any, str], Any] = {}


@pytest.fixture(autouse=True)
def before() -> None:
    """What they are before a test: torch replaces some itself, when it is first asked for them."""
    BEFORE.update(attributes())


def changed() -> list[str]:
    """Those that are not what they were before this test."""
    return [name for (owner, name), value in BEFORE.items() if vars(owner).get(name, ...) is not value]


def fails(self: nn.Module, x: Tensor) -> Tensor:
    raise ValueError("of the model")


def asks(self: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


def works(self: nn.Module, x: Tensor) -> Tensor:
    assert len(changed()) == len(BEFORE)
    return x.relu()


@pytest.mark.parametrize("forward", [works, fails, asks])
def test_patches_are_undone_whatever_happens(forward: Callable[..., Tensor]) -> None:
    model = type("Model", (nn.Module,), {"forward": forward})()
    if forward is works:
        capture(model, (X,))
    else:
        with pytest.raises(CaptureError):
            capture(model, (X,))
    assert changed() == []
    assert {"tolist", "create_node", "_apply", "random", "instance_norm", "apply"} <= {name for _, name in BEFORE}


@pytest.mark.parametrize("at", ["export", "patches"])
def test_patches_are_undone_where_export_or_a_patch_raises(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Observer):
        def patches(self) -> Iterable[Patch]:
            yield F, "relu", None
            raise ValueError("no patch")

    def raises(*args: Any, **kwargs: Any) -> None:
        assert len(changed()) == len(BEFORE)
        raise ValueError("no program")

    relu = F.relu
    if at == "export":
        monkeypatch.setattr(torch.export, "export", raises)
    else:
        original = watching.trace_observers
        monkeypatch.setattr(
            "autoshard.passes.capture.export.trace_observers", lambda *args: (*original(*args), Broken())
        )
    with pytest.raises(CaptureError, match="no patch" if at == "patches" else "no program"):
        capture(nn.Linear(3, 3), (X,))
    assert F.relu is relu
    assert changed() == []


def hooks(self: nn.Linear, x: Tensor) -> Tensor:
    y = nn.Linear.forward(self, x)
    y.register_hook(lambda g: g)
    return y


def hooks_in_eager(self: nn.Linear, x: Tensor) -> Tensor:
    return nn.Linear.forward(self, x) if torch.compiler.is_exporting() else hooks(self, x)


@pytest.mark.parametrize(("forward", "traces"), [(hooks, 1), (hooks_in_eager, 2)], ids=["one", "two"])
def test_only_a_model_with_another_program_for_tracers_is_traced_again(
    forward: Callable[..., Tensor], traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, export = [], torch.export.export

    def counts(*args: Any, **kwargs: Any) -> Any:
        counted.append(args)
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counts)
    model = type("Model", (nn.Linear,), {"forward": forward})(3, 3)
    with pytest.raises(CaptureError, match="tensor hook") if traces == 1 else contextlib.nullcontext():
        capture(model, (X,))
    assert len(counted) == traces


@torch.jit.script
def gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class StandIns(nn.Linear):
    """One of each: gradients off, ``.data``, a module that is converted, a scripted function, a comparison."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = self.weight.sum()
        y = super().forward(x) * scale * self.bias.data.sum()
        return self.double().weight + gelu(y) if torch.equal(torch.ones(3), torch.ones(3)) else y


def test_text_of_what_stands_in() -> None:
    assert (
        text(StandIns(3, 3), X[:1])
        == """\
detach = aten.detach.default(p_weight)
sum_1 = aten.sum.default(detach)
linear = aten.linear.default(x, p_weight, p_bias)
mul = aten.mul.Tensor(linear, sum_1)
detach_1 = aten.detach.default(p_bias)
sum_2 = aten.sum.default(detach_1)
mul_1 = aten.mul.Tensor(mul, sum_2)
_to_copy = aten._to_copy.default(p_weight, dtype=float64)
mul_2 = aten.mul.Tensor(mul_1, 1.702)
sigmoid = aten.sigmoid.default(mul_2)
mul_3 = aten.mul.Tensor(mul_1, sigmoid)
add = aten.add.Tensor(_to_copy, mul_3)
return add"""
    )


def test_threads_compile_and_run_modules_of_their_own() -> None:
    """What a trace patches is the process's: while one thread traces, others neither trace nor run."""
    interval, errors = sys.getswitchinterval(), list[Exception]()

    def run(width: int) -> None:
        try:
            model, x = (
                nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)).double(),
                torch.ones(2, 4).double(),
            )
            sharded = autoshard.compile(model, ideal({"tp": 2}), (x,))
            torch.testing.assert_close(sharded(x), model(x), rtol=1e-9, atol=0)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(width,)) for width in (4, 6, 8)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors

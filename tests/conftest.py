"""Shared set-up: one thread, fixed seeds, the markers ``slow`` and ``slow_cases``, golden files, float64 helpers."""

from __future__ import annotations

import fnmatch
import gc
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from harness import RUN_SLOW, Captures, captured_once, freeze_imports, use_device
from remembered import OF_RUN, remembered
from torch.utils import _pytree as pytree

import autoshard
from autoshard.check.reference import upcasts_in_float64
from autoshard.hardware.presets import HARDWARE_VARIABLE

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="run tests marked slow, too")
    parser.addoption("--device", default=None, help="make tensors there, such as cuda; gloo worlds become NCCL's")
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the code gives now")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # all processes of a run have one folder of captures
        folder = tempfile.TemporaryDirectory(prefix="captures")
        os.environ[OF_RUN] = folder.name
        config.add_cleanup(folder.cleanup)
    # Tests run side by side in several processes; more threads each would only get in one another's way.
    torch.set_num_threads(1)
    os.environ[HARDWARE_VARIABLE] = "h100"  # whatever is here; the worlds' processes read it, too
    os.environ.pop(RUN_SLOW, None)
    if config.getoption("--run-slow"):
        os.environ[RUN_SLOW] = "1"
    if device := config.getoption("--device"):
        os.environ["AUTOSHARD_TEST_DEVICE"] = device  # for the worlds' processes
        use_device(device)
    if config.getoption("dist", "no") == "no":  # not in the process that has others collect and run
        import state_cases  # noqa: F401  imports transformers, before the freeze
    freeze_imports()
    gc.set_threshold(20_000, 20, 100)  # thousands of captures leave cycles: to look at everything for them took a tenth
    # A run of the suite says the same twice; slow runs look for examples that nobody has seen.
    hypothesis.settings.register_profile("same", derandomize=not config.getoption("--run-slow"), deadline=None)
    hypothesis.settings.load_profile("same")


@pytest.fixture(autouse=True)
def one_graph(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of refusals: ``compile`` refuses a model that is not one graph, as with ``parts=None``."""
    if request.node.get_closest_marker("one_graph"):
        monkeypatch.setitem(autoshard.compile.__kwdefaults__, "parts", None)


@pytest.fixture(autouse=True)
def errors_of_ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of autoshard fails a test that does not ask for it: parts would hide it."""
    if not request.node.get_closest_marker("internal_errors"):
        monkeypatch.setenv("AUTOSHARD_CHECK", "errors")


@pytest.hookimpl(tryfirst=True)  # before -m chooses by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if any(fnmatch.fnmatchcase(item.callspec.id, name) for m in item.iter_markers("slow_cases") for name in m.args):
            item.add_marker(pytest.mark.slow)
    if config.getoption("--run-slow") or "slow" in config.getoption("-m"):
        return
    slow = [item for item in items if "slow" in item.keywords]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counts of the library beside their limits, from whichever process counted them."""
    reports = (report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome))
    for text in (text for report in reports for name, text in report.user_properties if name == "house"):
        terminalreporter.write_sep("-", "the house: counts of the library and their limits")
        terminalreporter.write_line(text)


@pytest.fixture(autouse=True)
def _deterministic(pytestconfig: pytest.Config) -> Iterator[None]:
    """Every test starts from the same seeds and leaves no default dtype or device behind."""
    torch.set_default_device(pytestconfig.getoption("--device"))
    random.seed(0)
    # Without a device, manual_seed would note the calls for those that might come, a millisecond each.
    (torch.manual_seed if pytestconfig.getoption("--device") else torch.default_generator.manual_seed)(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.set_default_device(pytestconfig.getoption("--device"))


@pytest.fixture
def float64() -> None:
    """Models and tensors made in the test are float64; the autouse fixture puts the dtype back."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture(name="upcasts_in_float64")
def _upcasts_in_float64() -> Iterator[None]:
    """float64 models compute in float64 where they upcast to float32."""
    with upcasts_in_float64():
        yield


@pytest.fixture
def plain_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans in which attention enters and leaves the folded order by itself: no graph carries it."""
    monkeypatch.setattr("autoshard.plans.planning.zigzag_ranks", lambda assignment: 0)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans in folded order are taken whatever they cost, of as many ranks as there are along ``cp``."""
    monkeypatch.setattr("autoshard.plans.planning.order_seconds", lambda found: -found.plan.folded)
    monkeypatch.setattr("autoshard.plans.planning.zigzag_ranks", lambda assignment: assignment.mesh.size_of("cp"))


@pytest.fixture(scope="module")
def captures() -> Iterator[Captures]:
    """The tests of a module that compile one model, the same object, for several meshes capture it once."""
    with captured_once() as found:
        yield found


@pytest.fixture
def remembering() -> Iterator[None]:
    """Models like one that was captured before, in any test with this fixture or any world, are not captured again."""
    with remembered(Path(os.environ[OF_RUN])):
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: ``text`` equals tests/golden/``name``; with ``--update-golden`` it is written there."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing; make it with: pytest {request.node.nodeid} --update-golden"
        assert text == path.read_text(encoding="utf-8"), f"{name} differs; if meant, run pytest --update-golden"

    return check


@pytest.fixture
def close() -> Callable[..., None]:
    """``close(actual, expected, rtol=1e-9)``: nested tensors agree, relative to each tensor's largest value."""

    def check(actual: object, expected: object, rtol: float = 1e-9) -> None:
        ours, theirs = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
        assert len(ours) == len(theirs)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if not isinstance(b, torch.Tensor):
                assert a == b, f"leaf {i}: {a!r} is not {b!r}"
                continue
            assert a.shape == b.shape, f"leaf {i}: shape {tuple(a.shape)} is not {tuple(b.shape)}"
            assert a.dtype == b.dtype, f"leaf {i}: {a.dtype} is not {b.dtype}"
            scale = b.abs().max().item() if b.numel() else 1.0
            error = (a.double() - b.double()).abs().max().item() if b.numel() else 0.0
            assert error <= rtol * max(scale, 1e-30), f"leaf {i}: relative error {error / max(scale, 1e-30):.3g}"

    return check

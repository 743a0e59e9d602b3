"""The public arguments as a user spells them: each means what the pages say, and what is none says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard import Mesh, Plan, Shard

pytestmark = pytest.mark.usefixtures("remembering")

X, IDS = torch.ones(8, 16), torch.arange(24).reshape(4, 6) % 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(12, 16), nn.Linear(16, 12, bias=False)
        self.net = Net()
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.net(self.emb(ids))
        logits = self.head(x if mask is None else x + mask)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.slow
def test_a_batch_to_plan_for() -> None:
    """Rows of the batch, not of what else comes in; a number of devices or a mesh."""
    mask = torch.zeros(6, 16)
    for where in ({"mesh": {"tp": 2}}, {"devices": 2}):
        plan = autoshard.plan(Tied(), example_args=(IDS, IDS), example_kwargs={"mask": mask}, batch=64, **where)  # type: ignore[arg-type]
        assert [plan.shapes[n] for n in ("ids", "labels", "mask")] == [(64, 6), (64, 6), (6, 16)]
    larger = torch.ones(32, 16)
    assert autoshard.plan(Net(), {"tp": 2}, (X,), batch=32).cost == autoshard.plan(Net(), {"tp": 2}, (larger,)).cost
    on_meta = autoshard.plan(Net(), {"tp": 2}, (X.to("meta"),), batch=1 << 16)
    assert on_meta.shapes["x"] == (1 << 16, 16)


def test_hardware_of_a_mesh_that_says_none() -> None:
    for mesh in ({"tp": 2}, Mesh({"tp": 2}, hardware="a100")):
        assert autoshard.plan(Net(), mesh, (X,), hardware="a100").mesh.hardware.name == "a100"
    assert autoshard.plan(Net(), {"tp": 2}, (X,)).mesh.hardware.name == "h100"
    with pytest.raises(autoshard.MeshError, match="has hardware h100, not the given 'a100'"):
        autoshard.plan(Net(), Mesh({"tp": 2}), (X,), hardware="a100")
    with pytest.raises(autoshard.PlanError, match="as its third argument and got like='fsdp' as well"):
        autoshard.score(Net(), {"tp": 2}, "ddp", (X,), like="fsdp")


@pytest.mark.parametrize("broken", [None, [], "x", 3], ids=str)
def test_text_that_is_no_plan_is_refused(broken: object) -> None:
    known = json.loads(autoshard.plan(Net(), {"tp": 2}, (X,)).to_json())
    for text in (json.dumps({**known, "choices": broken}), json.dumps(broken), "", "{"):
        with pytest.raises(autoshard.PlanError, match="not a plan that autoshard wrote"):
            Plan.from_json(text)


class Pair(nn.Module):
    """Two linear layers of these names and widths."""

    def __init__(self, names: tuple[str, str] = ("up", "down"), width: int = 16) -> None:
        super().__init__()
        self.names = names
        self.add_module(names[0], nn.Linear(16, width))
        self.add_module(names[1], nn.Linear(width, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = map(self.get_submodule, self.names)
        return down(up(x).relu()).square().mean()  # type: ignore[no-any-return]


def _changed(text: str, change: Callable[[Any], Any]) -> Plan:
    data = json.loads(text)
    change(data)
    return Plan.from_json(json.dumps(data))


def _labels(labels: list[str]) -> Callable[[Any], Any]:
    return lambda data: [choice.update(labels=labels) for choice in data["choices"].values()]


WIDE = torch.randn(4, 16)
OTHER_MODELS: dict[str, tuple[Callable[[str], Plan], nn.Module, torch.Tensor, str]] = {
    "names": (
        Plan.from_json,
        Pair(("a", "b")),
        WIDE,
        r"another model or other input shapes: .* and 'a.weight' differs",
    ),
    "dims": (Plan.from_json, Pair(), WIDE.unsqueeze(1), "another model or other input shapes: .* and 'x' differs"),
    "sizes": (
        Plan.from_json,
        Pair(width=1),
        WIDE,
        "shards aten.linear.default in up at .* along n, which these sizes do not",
    ),
    "labels": (lambda t: _changed(t, _labels(["n2"])), Pair(), WIDE, "along n2, which these sizes do not allow"),
    "no labels": (lambda t: _changed(t, _labels([])), Pair(), WIDE, "a label per axis of the mesh"),
    "outputs": (lambda t: _changed(t, lambda d: d.update(outputs=[])), Pair(), WIDE, "'output' differs"),
    "zero": (lambda t: _changed(t, lambda d: d.update(zero={"z": 1})), Pair(), WIDE, "layouts lacks 'z'"),
    "again": (lambda t: _changed(t, lambda d: d.update(shared_again=["z"])), Pair(), WIDE, "'z' differs"),
    "layouts": (lambda t: _changed(t, lambda d: d["layouts"].pop("up.bias")), Pair(), WIDE, "layouts lacks 'up.bias'"),
}


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_a_plan_of_another_model_is_refused(case: str) -> None:
    text = autoshard.plan(Pair(), Mesh({"tp": 2}), (WIDE,), hints={"up": "colwise"}).to_json()
    read, model, x, why = OTHER_MODELS[case]
    with pytest.raises(autoshard.PlanError, match=why):
        autoshard.compile(model, {"tp": 2}, (x,), plan=read(text))
    # a field of tomorrow
    autoshard.compile(Pair(), {"tp": 2}, (WIDE,), plan=_changed(text, lambda d: d.update(later=1)))


def test_a_plan_in_stages_is_for_these_stages() -> None:
    asked: dict[str, Any] = {"stages": "pp", "micro_batches": 2}
    plan = autoshard.plan(Pair(), {"pp": 2}, (WIDE,), **asked)
    assert autoshard.compile(Pair(), {"pp": 2}, (WIDE,), plan=plan).plan.staged == plan.staged
    for axes in ({"pp": 3}, {"pp": 2, "tp": 2}, {"dp": 2}):
        with pytest.raises(autoshard.PlanError, match="was made for the mesh pp=2, not"):
            autoshard.compile(Pair(), axes, (WIDE,), plan=plan)
    with pytest.raises(autoshard.PlanError, match="another model"):
        autoshard.compile(Pair(("a", "b")), {"pp": 2}, (WIDE,), plan=plan, **asked)


OTHER = [
    {"kinds": None},
    {"dtypes": -7},
    {"ties": 3},
    {"prefetch": 0},
    {"folded": -7},
    {"mixed_precision": -7},
    {"notes": [1]},
]


@pytest.mark.parametrize(
    "field", [{"format": 2}, {"zero": [1]}, {"prefetch": "x"}, {"micro_batches": None}, *OTHER], ids=str
)
def test_a_plan_with_a_field_of_another_kind_is_refused(field: dict[str, Any]) -> None:
    text = autoshard.plan(Net(), {"tp": 2}, (X,)).to_json()
    with pytest.raises(autoshard.PlanError, match="not a plan that autoshard wrote"):
        _changed(text, lambda data: data.update(field))


def test_a_plan_knows_tied_tensors_by_each_name() -> None:
    args, hints = (IDS, IDS), {"head.weight": Shard(0)}
    for mesh, more in (({"tp": 2}, {"hints": hints}), ({"pp": 2}, {"stages": "pp", "micro_batches": 2})):
        plan = autoshard.plan(Tied(), mesh, args, **more)  # type: ignore[arg-type]
        again = Plan.from_json(plan.to_json())
        for p in (plan, again):
            assert p.ties == {"head.weight": "emb.weight"}
            assert p.layouts["head.weight"] == p.layouts["emb.weight"]
            assert p.explain("head.weight") == "head.weight is tied to emb.weight\n" + p.explain("emb.weight")
        assert "head.weight" not in plan.report()  # it is held once
        assert again == plan
    assert autoshard.compile(Tied(), {"tp": 2}, args, plan=autoshard.plan(Tied(), {"tp": 2}, args)).plan.ties


def test_a_module_is_measured_before_its_first_call() -> None:
    measured = autoshard.measure(autoshard.compile(Net(), {"tp": 2}), (X,), steps=1)
    assert measured.kept_bytes == autoshard.measure(autoshard.compile(Net(), {"tp": 2}, (X,)), (X,), steps=1).kept_bytes


def compiled(**asked: Any) -> Any:
    return autoshard.compile(Net(), {"tp": 2}, (X,), **asked)


def inside(part: nn.Module) -> nn.Module:
    return nn.Sequential(part, nn.Tanh())


class Quiet:
    def __repr__(self) -> str:
        raise ValueError


MADE: dict[str, tuple[Callable[[], Any], str]] = {
    "scripted": (lambda: torch.jit.script(nn.Linear(8, 8)), "the model: a ScriptModule cannot be traced. Pass"),
    "traced": (
        lambda: torch.jit.trace(nn.Linear(16, 8), X.float()),
        "the model: a ScriptModule cannot be traced. Pass",
    ),
    "frozen": (lambda: torch.jit.freeze(torch.jit.script(nn.Linear(8, 8).eval())), "the model: a ScriptModule cannot"),
    "one inside": (lambda: inside(torch.jit.script(nn.Linear(8, 8))), "0: a ScriptModule cannot be traced"),
    "exported": (
        lambda: torch.export.export(nn.Linear(16, 8), (X.float(),)),
        r"got an ExportedProgram: give .*\.module\(\)",
    ),
    "a class": (lambda: nn.Linear, r"got the class Linear: make one, Linear\("),
    "what has no repr": (Quiet, "the model is an nn.Module, got <.*Quiet object at"),
    "a list": (lambda: nn.ModuleList([nn.Linear(8, 8)]), "the model: ModuleList has no forward. Pass the module"),
    "not initialised": (lambda: inside(nn.Linear.__new__(nn.Linear)), "0: Linear was not initialised"),
    "in parallel": (
        lambda: inside(nn.DataParallel(nn.Linear(8, 8))),
        "0: DataParallel is distributed already. Pass its",
    ),
}
"""what is given as a model, and how it is refused"""


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("what", MADE)
def test_what_cannot_be_compiled_is_refused_before_it_is_asked(what: str) -> None:
    make, text = MADE[what]
    for ask in (autoshard.compile, autoshard.plan):
        with pytest.raises(autoshard.CaptureError, match=text):
            ask(make(), {"tp": 2}, (X,))


NOT_TAKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "a function": (lambda: autoshard.compile(lambda x: x, {"tp": 2}, (X,)), "the model is an nn.Module, got <function"),  # type: ignore[arg-type]
    "no model": (lambda: autoshard.plan(None, {"tp": 2}, (X,)), "the model is an nn.Module, got None"),  # type: ignore[arg-type]
    "verified": (lambda: autoshard.verify(None, {"tp": 2}, (X,)), "the model is an nn.Module, got None"),  # type: ignore[arg-type]
    "kwargs": (lambda: autoshard.plan(Net(), {"tp": 2}, (), X), "example_kwargs is a dict of the arguments"),  # type: ignore[arg-type]
    "hardware": (lambda: Mesh({"tp": 2}, hardware=3), "unknown hardware 3. Known: a100"),  # type: ignore[arg-type]
    "a plan as text": (lambda: compiled(plan="{}"), "plan='{}': give a Plan, from autoshard.plan or Plan.from_json"),
    "hints": (lambda: compiled(hints=["up"]), r"hints=\['up'\]: give {pattern: "),
    "strict": (lambda: compiled(strict="x"), "strict='x': give True or False"),
    "training": (lambda: compiled(training="yes"), "training='yes': give True, False or None"),
    "outputs": (lambda: compiled(gather_outputs="x"), "gather_outputs='x': give True, False or None"),
    "dynamic": (lambda: compiled(dynamic="batch"), "dynamic='batch': give True, False or"),
    "open dims": (lambda: compiled(dynamic={"x": 0}), "dynamic: 'x' is 0: give {dim: name}"),
    "names": (
        lambda: autoshard.plan(Net(), {"tp": 2}, (X,), dynamic={"x": {0: 3}}),
        "3 is neither a name nor a multiple",
    ),  # type: ignore[dict-item]
    "recompute": (lambda: compiled(recompute={"up": "x"}), "recompute: 'up': 'x' is neither True"),
    "recompute a number": (lambda: compiled(recompute={3: True}), "recompute: 3 is not a pattern of modules"),  # type: ignore[dict-item]
    "batch": (lambda: autoshard.plan(Net(), {"tp": 2}, (X,), batch=0), "batch=0: a number of rows is an int"),
    "no rows": (lambda: autoshard.plan(Net(), {"tp": 2}, (3,), batch=2), "batch=2: no example input has rows"),
    "no steps": (lambda: autoshard.verify(Net(), {"tp": 2}, (X,), steps=0), "steps is 0: at least one step is needed"),
    "measured": (lambda: autoshard.measure(Net(), (X,)), "measure takes the result of autoshard.compile, got Net"),  # type: ignore[arg-type]
    "clipped": (lambda: autoshard.clip_grad_norm_(Net(), 1.0), "takes the result of autoshard.compile, got Net"),  # type: ignore[arg-type]
    "explained": (lambda: autoshard.plan(Net(), {"tp": 2}, (X,)).explain(3), "explain takes a name or .* got 3"),  # type: ignore[arg-type]
    "compared": (lambda: autoshard.plan(Net(), {"tp": 2}, (X,)).diff("x"), "diff takes another plan, got 'x'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", NOT_TAKEN)
def test_what_is_no_argument_says_so(what: str) -> None:
    ask, text = NOT_TAKEN[what]
    with pytest.raises(autoshard.AutoshardError, match=text):
        ask()


KINDS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"}


def test_collectives_have_the_kinds_that_are_promised() -> None:
    """Neighbours that send each other a halo permute, in the plan as in the log of what ran."""
    plan = autoshard.plan(
        nn.Conv2d(3, 3, 3, padding=1).double(),
        Mesh({"sp": 2}, hardware="ideal_network"),
        (torch.ones(1, 3, 8, 8, dtype=torch.float64),),
        hints={"input": Shard(2), "weight": "replicate"},
    )
    assert "permute" in {c.kind for c in plan.collectives} <= KINDS

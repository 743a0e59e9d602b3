"""Pictures of plans: what they hold, that other programs read them, and that no name breaks them."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from picture_samples import ODD_NAMES, chain, deep_llama, planned

import autoshard
from autoshard import Layout, LayoutError, Partial, PlanError, Shard, dumps
from autoshard.models.moe import Moe, MoeConfig
from autoshard.plans.plan import Plan
from autoshard.progress import shown_progress
from autoshard.report.schedule import COMPUTE_STREAM, LINK_STREAMS, step_timeline
from autoshard.viz import dot, html, trace_json, tree_text, visualize, visualize_layout
from autoshard.viz.drawing import Box, drawing
from autoshard.viz.trace import memory_over_time

jsonschema = pytest.importorskip("jsonschema")
pydot = pytest.importorskip("pydot")


@pytest.fixture(scope="module")
def llama() -> Plan:
    return planned("llama", dp=2, tp=2)


@pytest.fixture(scope="module")
def odd() -> Plan:
    return chain(ODD_NAMES)


def page_data(text: str) -> dict[str, list[dict[str, object]]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    data: dict[str, list[dict[str, object]]] = json.loads(found.group(1))
    return data


# --- the drawing ---


def test_every_operation_and_collective_is_drawn_once(llama: Plan) -> None:
    drawn = drawing(llama)
    items = list(drawn.root.items())
    assert sum(i.times for i in items if i.kind == "op") == len(llama.choices)
    assert sum(i.times * len(i.collectives) for i in items if i.kind == "comm") == len(llama.collectives)
    ids = {i.id for i in items}
    assert len(ids) == len(items)
    assert all(a in ids and b in ids for a, b, _ in drawn.edges)


def test_every_operand_has_an_edge(llama: Plan) -> None:
    drawn = drawing(llama)
    reached = {b for _, b, _ in drawn.edges}
    for item in drawn.root.items():
        if item.kind == "op" and llama.choices[item.name].inputs:
            assert item.id in reached, item


def test_a_redistribution_starts_where_the_one_before_ended() -> None:
    plan = planned("gpt:tiny", dp=2, tp=2)
    drawn = drawing(plan)
    first = {i.id: plan.collectives[i.collectives[0]] for i in drawn.root.items() if i.collectives}
    pairs = [(first[a], first[b]) for a, b, _ in drawn.edges if a in first and b in first]
    assert pairs
    for a, b in pairs:
        assert a.value == b.value
        assert a.reason.split(" → ")[1].split(" (")[0] == b.reason.split(": ", 1)[1].split(" → ")[0]


@pytest.mark.slow
def test_equal_layers_are_one_box() -> None:
    boxes = [c for c in drawing(deep_llama()).root.children if isinstance(c, Box) and c.path.startswith("blocks.")]
    members = [m for box in boxes for m in box.members]
    assert members == [f"blocks.{i}" for i in range(12)]
    assert len(boxes) <= 3  # the first and the last layer may differ


def test_a_layer_that_differs_is_not_folded() -> None:
    def boxes(plan: Plan) -> list[int]:
        return [len(b.members) for b in drawing(plan).root.children if isinstance(b, Box)]

    names = tuple(f"layers.{i}" for i in range(4))
    plan = chain(names, per_module=2)
    assert boxes(plan) == [4]
    plan.shapes["linear_2_1"] = (4, 9)  # type: ignore[index]
    assert boxes(plan) == [2, 1, 1]


def test_a_long_box_is_cut_into_parts() -> None:
    root = drawing(chain(("flat",), per_module=5000)).root
    stack: list[Box] = [root]
    while stack:
        box = stack.pop()
        assert len(box.children) <= 150
        stack += [c for c in box.children if isinstance(c, Box)]
    assert sum(i.kind == "op" for i in root.items()) == 5000


# --- html ---


def test_html_is_one_file_that_asks_nothing_of_the_network(llama: Plan) -> None:
    text = html(llama)
    assert not re.search(
        r'(src|href)\s*=\s*["\']?(https?:)?//|@import|url\((?![#`"])', text.replace("http://www.w3.org", "")
    )
    assert "default-src 'none'" in text
    assert len(text) < 500_000


def test_html_holds_what_the_plan_holds(llama: Plan) -> None:
    (data,) = page_data(html(llama))["plans"]
    rows = data["collectives"]
    assert isinstance(rows, list)
    for row, c in zip(rows, llama.collectives, strict=True):
        assert row[:8] == [c.kind, list(c.axes), c.phase, c.bytes, c.seconds, c.fqn, c.value, c.reason]
        assert row[8] >= 0
    assert data["cost"]["total_s"] == llama.cost.total_s  # type: ignore[index]


def test_html_of_five_thousand_nodes_is_small() -> None:
    plan = chain(tuple(f"part{i}" for i in range(50)), per_module=100)
    text = html(plan)
    assert len(text.encode()) < 5_000_000


def test_no_name_leaves_the_data_block(odd: Plan) -> None:
    text = html(odd)
    assert text.count("</script>") == 2  # the data's and the code's own
    data = page_data(text)["plans"][0]
    assert data["title"] == ODD_NAMES[0]
    for name in ODD_NAMES:
        assert any(name == row[5] for row in data["collectives"])  # type: ignore[attr-defined]


# --- other formats ---


@pytest.mark.slow_cases("vit", "moe")
@pytest.mark.parametrize("name", ["llama", "moe", "dlrm", "vit", "mlp"])
def test_json_validates_and_reads_back(name: str) -> None:
    schema = json.loads(files("autoshard.viz").joinpath("plan.schema.json").read_text("utf-8"))
    text = planned(name, dp=2, tp=2).to_json()
    data = json.loads(text)
    jsonschema.Draft202012Validator(schema).validate(data)
    assert Plan.from_json(text).to_json() == text
    data["collectives"] = [{"kind": "teleport"}]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(data)


@pytest.mark.slow_cases("llama")
@pytest.mark.parametrize("plan", ["llama", "odd"])
def test_dot_parses(plan: str, request: pytest.FixtureRequest) -> None:
    made: Plan = request.getfixturevalue(plan)
    drawn = drawing(made)
    parsed = pydot.graph_from_dot_data(dot(made))
    assert parsed is not None
    nodes, edges, stack = set(), 0, list(parsed)
    while stack:
        graph = stack.pop()
        nodes |= {n.get_name() for n in graph.get_nodes()} - {"node", "edge", "graph", '"\\n"'}
        edges += len(graph.get_edges())
        stack += graph.get_subgraphs()
    assert nodes == {f"n{i.id}" for i in drawn.root.items()}
    assert edges == len(drawn.edges)


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_svg_shows_odd_names_as_text(odd: Plan, tmp_path: Path) -> None:
    visualize(odd, tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text("utf-8")
    assert text.lstrip().startswith("<?xml")
    assert "<img" not in text
    assert "window.hacked=1&lt;" in text


def test_svg_without_graphviz_says_what_to_do(llama: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PlanError, match="install graphviz"):
        visualize(llama, tmp_path / "plan.svg")


def test_suffixes(llama: Plan, tmp_path: Path) -> None:
    for suffix in (".html", ".dot", ".json", ".txt", ".trace.json"):
        llama.visualize(tmp_path / f"plan{suffix}")
    assert json.loads((tmp_path / "plan.trace.json").read_text())["traceEvents"]
    assert Plan.from_json((tmp_path / "plan.json").read_text()) == llama
    with pytest.raises(PlanError, match=r"\.html, \.dot"):
        llama.visualize(tmp_path / "plan.pdf")
    with pytest.raises(PlanError, match=r"\.html only"):
        llama.visualize(tmp_path / "plan.dot", other=llama)


def test_a_compiled_module_draws_itself(tmp_path: Path) -> None:
    reference = autoshard.models.get("mlp")
    args, kwargs = reference.inputs()
    sharded = autoshard.compile(reference.model(), autoshard.Mesh({"tp": 2}, hardware="ideal_network"), args, kwargs)
    sharded.visualize(tmp_path / "plan.html")
    assert page_data((tmp_path / "plan.html").read_text("utf-8"))["plans"]
    assert str(sharded) == str(sharded.plan)


def test_text_is_one_line_per_thing(odd: Plan, llama: Plan) -> None:
    def lines(box: Box) -> int:
        return 1 + sum(lines(c) if isinstance(c, Box) else 1 for c in box.children)

    for plan in (odd, llama):
        assert tree_text(plan).count("\n") == lines(drawing(plan).root)


# --- the timeline ---


@pytest.mark.parametrize("name", ["llama", "moe", "dlrm"])
def test_the_timeline_is_the_predicted_step(name: str) -> None:
    plan = planned(name, dp=2, tp=2)
    events, cost = step_timeline(plan), plan.cost
    ends = max(e.start + e.seconds for e in events)
    assert ends == cost.schedule_s
    # This hardware overlaps nothing; local copies are no events of their own.
    assert ends == pytest.approx(cost.total_s - cost.merged_s - cost.local_s, rel=1e-12)
    sent = [e for e in events if e.stream != "compute"]
    assert len(sent) == len(plan.collectives)
    assert sum(e.bytes for e in sent) == pytest.approx(sum(c.bytes for c in plan.collectives))


@pytest.mark.slow
def test_compute_waits_for_no_gradients_where_it_takes_longer() -> None:
    """Of a mixture of experts: large reduce-scatters, of which two may be under way, and small ones, which do not count."""
    with torch.device("meta"):
        model, tokens = Moe(MoeConfig(layers=2)).bfloat16(), torch.zeros(64, 4096, dtype=torch.long)
    events = step_timeline(autoshard.plan(model, {"dp": 8, "ep": 8}, (tokens,), {"labels": tokens}))
    assert sum(e.name.startswith("reduce_scatter") for e in events) >= 6
    backward = [e for e in events if e.phase == "backward" and e.stream in (COMPUTE_STREAM, *LINK_STREAMS)]
    waited = sum(b.start - (a.start + a.seconds) for a, b in itertools.pairwise(backward))
    assert waited < 0.01 * (backward[-1].start - backward[0].start)


@pytest.mark.parametrize("name", ["llama", "moe", "dlrm"])
def test_memory_peaks_at_the_plans_memory_and_comes_back_down(name: str) -> None:
    plan = planned(name, dp=2, tp=2)
    points = memory_over_time(plan)
    assert max(b for _, b in points) == pytest.approx(plan.cost.memory_bytes)
    assert points[-1][1] == pytest.approx(points[0][1])


def test_the_trace_is_chromes_format(llama: Plan) -> None:
    rows = json.loads(trace_json(llama))["traceEvents"]
    named = {r["tid"]: r["args"]["name"] for r in rows if r["name"] == "thread_name"}
    assert named[0] == "compute"
    links = {LINK_STREAMS[llama.mesh.crosses(c.axes)] for c in llama.collectives}
    assert links == set(named.values()) - {"compute"}
    complete = [r for r in rows if r["ph"] == "X"]
    assert all(r["dur"] >= 0 and r["ts"] >= 0 and r["tid"] in named for r in complete)


# --- who holds what ---


def test_a_layouts_picture_names_every_rank_once() -> None:
    layout = Layout({"dp": 2, "tp": 4}, {"dp": Shard(0), "tp": Shard(1)})
    text = visualize_layout(layout, (10, 6))
    cells = [
        c.strip() for line in text.splitlines() if line.lstrip().startswith("dim 0") for c in line.split("│")[1:-1]
    ]
    assert cells == [str(r) for r in range(8)]
    for part in ("dim 0 0:5", "dim 0 5:10", "0:2", "2:4", "4:6", "empty"):
        assert part in text


def test_a_layouts_picture_shows_copies_and_summands() -> None:
    mesh = {"dp": 2, "tp": 2}
    assert "2 ranks hold every block" in visualize_layout(Layout(mesh, {"tp": Shard(1)}), (4, 6))
    assert "along tp hold" in visualize_layout(Layout(mesh, {"tp": Partial()}), (4, 6))
    assert "0 1 2 3" in visualize_layout(Layout(mesh), (4, 6))
    with pytest.raises(LayoutError):
        visualize_layout(Layout(mesh, {"tp": Shard(3)}), (4, 6))


# --- logs, dumps, progress ---

_SCRIPT = """
import autoshard
from autoshard.models.mlp import Mlp, MlpConfig, example_inputs
config = MlpConfig.tiny()
args, kwargs = example_inputs(config)
autoshard.plan(Mlp(config), autoshard.Mesh({"tp": 2}, hardware="ideal_network"), args, kwargs)
"""

STAGES = ("01_graph.txt", "02_plan.txt", "03_program.txt", "04_rank_module.py")


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("dump")
    env = {"PATH": "", "PYTHONPATH": ":".join(sys.path), "AUTOSHARD_DUMP": str(folder), "OMP_NUM_THREADS": "1"}
    env["AUTOSHARD_LOGS"] = "plan,code,nonsense"
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=env, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return folder, done.stderr


@pytest.mark.slow
def test_dump_writes_every_stage(dumped: tuple[Path, str]) -> None:
    folder, _ = dumped
    assert {p.name for p in folder.iterdir()} >= {*STAGES, "plan.json", "plan.html", "plan.dot", "plan.trace.json"}
    compile((folder / "04_rank_module.py").read_text(), "04_rank_module.py", "exec")
    assert "def forward" in (folder / "04_rank_module.py").read_text()


@pytest.mark.parametrize("name", STAGES)
def test_dumps_are_as_agreed(dumped: tuple[Path, str], name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"stages_mlp/{name}", (dumped[0] / name).read_text("utf-8"))


def test_logs_are_chosen_by_name(dumped: tuple[Path, str]) -> None:
    _, stderr = dumped
    assert "[autoshard.plan] " in stderr
    assert "class RankModule" in stderr
    assert "[autoshard.capture]" not in stderr
    assert "there is no log 'nonsense'" in stderr


def test_logs_are_silent_unless_asked(capfd: pytest.CaptureFixture[str]) -> None:
    dumps.set_up_logs("")
    planned("mlp", tp=4)
    assert capfd.readouterr() == ("", "")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_terminals_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.progress.SILENT_SECONDS", 0.05)
    out = _Terminal()
    with shown_progress("planning", out):
        time.sleep(0.1)
    assert re.fullmatch(r"\rautoshard: planning … \d+ s\rautoshard: planning   \d\.\d s\n", out.getvalue())


def test_progress_in_logs_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are equally far apart; a phase inside another is named in them, and writes none."""
    monkeypatch.setattr("autoshard.progress.LOG_SECONDS", 0.1)
    out = io.StringIO()
    with shown_progress("meshes of 64", out), shown_progress("mesh 8 × 8", out):
        time.sleep(0.4)
    during, after = r"autoshard: meshes of 64, mesh 8 × 8 … 0 s\n", r"autoshard: meshes of 64   0\.\d s\n"
    assert re.fullmatch(f"({during}){{3,4}}{after}", out.getvalue())
    monkeypatch.setenv("RANK", "1")
    silent = io.StringIO()
    with shown_progress("planning", silent):
        time.sleep(0.2)
    assert silent.getvalue() == ""


def test_progress_is_silent_for_short_stages() -> None:
    out = _Terminal()
    with shown_progress("planning", out):
        pass
    assert out.getvalue() == ""

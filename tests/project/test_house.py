"""The structure of the library: rooms, floors, and arrows that run downwards. docs/internals/design.md describes it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import networkx as nx
import pytest
from house_counts import counts, private_names, sources, table

ROOT = Path(__file__).parents[2]
PACKAGES = {"autoshard": ROOT / "autoshard", "autoshard.passes": ROOT / "passes", "autoshard.models": ROOT / "models"}

FLOORS = (
    (
        "__main__",
        "cli",
        "completion",
        "demo",
        "testing",
        "hugging_face",
        "accelerate",
        "lightning",
        "check",
        "api",
        "transfers",
    ),
    ("module", "devices"),
    ("serving", "compiler", "dumps"),
    ("plans", "initialise"),
    ("viz", "exports", "passes.codegen", "passes.memory"),
    ("report", "passes.lower"),
    ("passes.microbatch", "passes.pipeline"),
    ("passes.capture", "passes.propagate"),
    ("passes.rules", "passes.redistribute"),
    ("passes.ir",),
    ("passes.search", "runtime", "models"),
    ("progress", "frames", "layout", "mesh", "hardware", "precision", "aten", "torch_private", "errors"),
)
"""from top to bottom: a room imports from its own floor and from those below"""

WITHIN = {
    "passes.capture": (
        ("",),
        ("translate", "specialization", "polyfills", "shared_regions"),
        ("refusals",),
        ("exported",),
        ("observer",),
    ),
    "passes.propagate": (("named_strategies",), ("prices",)),
    "passes.rules": (("families",), ("",)),
    "passes.search": (("rows",), ("exact",)),
    "module": (("ranks",), ("parts", "programs"), ("model",), ("dtensors",)),
    "runtime": (("programs",), ("parameters", "attention"), ("operations",), ("transport",)),
}
"""room → its floors; "" are the files that lie directly in it, which elsewhere may stand between its rooms"""

MOST_FILES = 30
"""in one folder"""

MOST_LINES = 600

LIMITS = {
    "lines": 81655,
    "tokens": 705818,
    "lines over 100 columns": 4900,
    "files": 374,
    "files under 60 lines": 8,
    "names at module level in 3 or more files": 8,
    "numeric constants at module level": 99,
    "private names of torch, however imported": 110,
    "private paths of torch": 37,
    "files that name a private path of torch": 9,
    "functions with more than 10 parameters": 2,
    "parameters of the longest list": 27,
}
"""of the library. Lower a limit with the change that makes room; raise one only by a commit that says why"""


def _files() -> dict[str, Path]:
    """Module name → its file."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


FILES = _files()
Trees = dict[str, ast.Module]


@pytest.fixture(scope="module")
def trees() -> Trees:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def _imports(tree: ast.AST, name: str) -> Iterator[str]:
    """The modules of the library that ``name`` imports, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autoshard"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in FILES and a.name != name)


@pytest.fixture(scope="module")
def arrows(trees: Trees) -> nx.DiGraph:
    graph: nx.DiGraph = nx.DiGraph()
    for name, tree in trees.items():
        graph.add_node(name)
        for other in _imports(tree, name):
            if name != "autoshard" and other != "autoshard":  # the public names, and what is loaded on first use
                graph.add_edge(name, other)
    return graph


def _room(name: str) -> str:
    parts = name.split(".")[1:]
    return ".".join(parts[:2]) if parts and parts[0] == "passes" else parts[0] if parts else ""


def test_no_circle_among_files(arrows: nx.DiGraph) -> None:
    assert list(nx.simple_cycles(arrows)) == []


def test_every_room_has_a_floor() -> None:
    named = {room for floor in FLOORS for room in floor}
    assert {_room(name) for name in FILES} == named | {"", "passes"}


def test_arrows_run_downwards(arrows: nx.DiGraph) -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    upwards = [
        f"{a} → {b}"
        for a, b in arrows.edges
        if _room(a) in floor and _room(b) in floor and floor[_room(a)] > floor[_room(b)]
    ]
    assert upwards == []


@pytest.mark.parametrize("rooms", [r for r in FLOORS if len(r) > 1], ids=" ".join)
def test_rooms_of_one_floor_do_not_need_each_other(rooms: tuple[str, ...], arrows: nx.DiGraph) -> None:
    """Files aside that are no rooms, such as errors and layout, which stand beside each other without a circle."""
    between = defaultdict(set)
    for a, b in arrows.edges:
        if _room(a) in rooms and _room(b) in rooms and _room(a) != _room(b):
            between[_room(a)].add(_room(b))
    folders = {
        room for room in rooms if f"autoshard.{room}" in FILES and FILES[f"autoshard.{room}"].name == "__init__.py"
    }
    assert {(a, b) for a, others in between.items() for b in others if {a, b} <= folders} == set()


@pytest.mark.parametrize("room", WITHIN)
def test_arrows_within_a_room_run_downwards(room: str, arrows: nx.DiGraph) -> None:
    floor = {inner: number for number, inners in enumerate(WITHIN[room]) for inner in inners}

    def inside(name: str) -> str | None:
        if _room(name) != room:
            return None
        parts = name.removeprefix(f"autoshard.{room}").split(".")[1:]
        found = parts[0] if parts and parts[0] in floor else ""
        return found if found in floor else None

    pairs = [(a, b, inside(a), inside(b)) for a, b in arrows.edges]
    assert [f"{a} → {b}" for a, b, x, y in pairs if x is not None and y is not None and floor[x] > floor[y]] == []


def test_folders_are_not_flat() -> None:
    files = Counter(path.parent for path in FILES.values())
    assert {str(folder): number for folder, number in files.items() if number > MOST_FILES} == {}


def test_no_import_is_hidden_in_a_function(trees: Trees) -> None:
    """But for the command line, which loads what a command needs, and stages, whose schedules bring TorchDynamo."""
    late = ("autoshard.cli:", "autoshard.runtime.programs.pipeline:")
    hidden = [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        for outside in tree.body
        if isinstance(outside, ast.FunctionDef | ast.ClassDef)
        for node in ast.walk(outside)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autoshard")
    ]
    assert [place for place in hidden if not place.startswith(late)] == []


def test_no_test_imports_a_test() -> None:
    """What several need lies in tests/support."""
    tests = [*(ROOT / "tests").rglob("*.py")]
    names = {path.stem for path in tests if path.stem.startswith("test_")}
    imported = {
        f"{path.name}: {name}"
        for path in tests
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (*(a.name for a in node.names), getattr(node, "module", None) or "")
        if name.split(".")[-1] in names
    }
    assert len(names) > 100
    assert imported == set()


def test_ops_are_named_through_a_table_that_may_lack_them(trees: Trees) -> None:
    """Read from torch itself, a name that a version of it lacks would end the import of the library."""
    direct = [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Assign | ast.AnnAssign)
        if isinstance(node.value, ast.Attribute) and node.value.attr == "aten"
    ]
    assert direct == []


REPLACED = {
    "autoshard.initialise.recording": {"torch.nn.init._no_grad_trunc_normal_"},
    "autoshard.module.model.submodules": {
        "torch.nn.Module._apply",
        "torch.nn.Module._load_from_state_dict",
        "torch.nn.Module._save_to_state_dict",
    },
    "autoshard.module.optimizers": {"torch.amp.GradScaler._unscale_grads_"},
    "autoshard.runtime.transport.profiling": {"torch.autograd.profiler._is_profiler_enabled"},
}
"""file → private names of torch that it replaces or overrides, and a flag that torch changes"""


def test_private_names_of_torch_stand_in_one_room(trees: Trees) -> None:
    """There they are chosen by version, and one that a torch lacks is refused by its name."""
    elsewhere = {name: private_names(tree) for name, tree in trees.items() if _room(name) != "torch_private"}
    assert {name: names for name, names in elsewhere.items() if names} == REPLACED


def test_a_private_name_is_found_in_every_form() -> None:
    """As an import, an attribute, and behind an alias; what Python or the library itself names is none."""
    text = (
        "import torch, torch._a, torch._b as b\nfrom torch import _c, nn as n\nfrom torch.d import _e as e\n"
        "torch.f._g.h, n._i, e.j, b.k, self._l, torch.Tensor.__len__, torch.utils._pytree.tree_map\n"
    )
    assert private_names(ast.parse(text)) == {
        *("torch._a", "torch._b", "torch._c", "torch.d._e", "torch.f._g.h", "torch.nn._i"),
    }


def test_the_runtime_imports_nothing_of_the_compiler(arrows: nx.DiGraph) -> None:
    outside = {b for a, b in arrows.edges if _room(a) == "runtime" and _room(b) != "runtime"}
    light = {f"autoshard.torch_private.{name}" for name in ("autograd", "dispatch", "distributed", "ops")}
    assert outside == {"autoshard.aten", "autoshard.errors", *light}


def test_sizes() -> None:
    long = {name: n for name, path in FILES.items() if (n := path.read_text("utf-8").count("\n")) > MOST_LINES}
    long |= {
        str(path): n
        for path in (ROOT / "tests").rglob("*.py")
        if (n := path.read_text("utf-8").count("\n")) > MOST_LINES
    }
    assert long == {}
    assert len(list((ROOT / "passes").glob("*.py"))) <= 10
    assert len(list((ROOT / "autoshard").glob("*.py"))) <= 19
    assert FILES["autoshard.compiler"].read_text("utf-8").count("\n") <= 160


def test_no_count_grows_past_its_limit(record_property: Callable[[str, object], None]) -> None:
    """``make test`` prints the table at its end, whether this passes or fails."""
    found = counts(sources())
    rows = list(table(found, LIMITS))
    record_property("house", "\n".join(rows))
    assert found.keys() == LIMITS.keys()
    assert {what: n for what, n in found.items() if n > LIMITS[what]} == {}, "\n".join(rows)


def test_what_grows_is_counted(tmp_path: Path) -> None:
    """Each count is one more with one more of its kind; a link is not counted twice."""
    for folder in ("autoshard", "passes", "models"):
        (tmp_path / folder).mkdir()
    (tmp_path / "autoshard" / "passes").symlink_to("../passes")
    (tmp_path / "models" / "__init__.py").write_text("")
    (tmp_path / "passes" / "a.py").write_text("import torch\n\n_N = 1\n\n\ndef f(self, *, a):\n    return torch._C.x\n")
    before = counts(sources(tmp_path))
    wide, many = f"# {'x' * 100}\n", ", ".join(f"a{i}" for i in range(11))
    text = f"import torch\n{wide}L: float = 2.0\n\nclass N:\n    async def f(self, {many}):\n        torch._dynamo.y\n"
    text += "        torch.utils._pytree.z\n"
    for name in ("b", "c"):
        (tmp_path / "passes" / f"{name}.py").write_text(text)
    after = counts(sources(tmp_path))
    grown = {what: after[what] - n for what, n in before.items()}
    assert grown == {
        "lines": 16, "tokens": grown["tokens"], "lines over 100 columns": 2, "files": 2, "files under 60 lines": 2,
        "names at module level in 3 or more files": 1, "numeric constants at module level": 2,
        "private names of torch, however imported": 1, "private paths of torch": 1,
        "files that name a private path of torch": 2, "functions with more than 10 parameters": 2,
        "parameters of the longest list": 10,
    }  # fmt: skip
    assert grown["tokens"] > 60
    assert list(table({"a": 3}, {"a": 5})) == [f"{'a':<45} {3:>7}  limit {5:>7}  2 below"]
    assert list(table({"a": 7}, {"a": 5})) == [f"{'a':<45} {7:>7}  limit {5:>7}  2 over"]


# --- docs/internals/design.md ---

PAGE = (ROOT / "docs" / "internals" / "design.md").read_text(encoding="utf-8")


def _rows(heading: str) -> list[list[str]]:
    """The cells of the table that begins with ``heading``, row by row, each as the names in backticks."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [[" ".join(re.findall(r"`([^`]+)`", cell)) for cell in line.strip("| ").split(" | ")] for line in lines]


def _called(functions: dict[str, ast.FunctionDef], name: str) -> Iterator[str]:
    """Names that a function reads, in order; in place of a function of its own file what that reads."""
    names = (node for node in ast.walk(functions[name]) if isinstance(node, ast.Name))
    for node in sorted(names, key=lambda node: (node.lineno, node.col_offset)):
        yield node.id
        if node.id in functions:
            yield from _called(functions, node.id)


@pytest.mark.parametrize(
    ("heading", "file", "first"),
    [
        ("step of `compiler.py`", "autoshard.compiler", "compile_model"),
        ("step of `plan_graph`", "autoshard.plans.planning", "plan_graph"),
        ("step of `lower_assignment`", "autoshard.passes.lower.lowering", "lower_assignment"),
    ],
)
def test_the_recipe_is_the_documented_one(heading: str, file: str, first: str, trees: Trees) -> None:
    """Every step of the page, in its order; and no pass that the page does not name."""
    tree = trees[file]
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    steps = " ".join(row[0] for row in _rows(heading)).split()
    called = list(dict.fromkeys(_called(functions, first)))
    assert [name for name in called if name in steps] == steps
    passes = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autoshard.passes")
        for alias in node.names
        if alias.name.islower() and alias.name in called
    }
    assert passes - set(steps) <= {
        "record_conditions",
        "given_input_layouts",
        "wanted_output_layouts",
        "kept_buffer_layouts",
        "micro_batch_placements",
        "expand_tp_plan",
        "lower_and_simulate",
        "is_fully_replicated",
        "refs",
    }  # what steps are given


def test_where_to_add_something_leads_to_files() -> None:
    for what, *cells in _rows("what | file"):
        for cell in cells:
            paths = [name for name in cell.split() if "/" in name]
            assert paths or "nowhere" in PAGE, what
            for path in paths:
                assert list(ROOT.glob(path)), f"{what}: {path}"


def test_generated_code_starts_without_the_compiler() -> None:
    """What it imports, ``autoshard.runtime``, loads nothing that is for compiling, or for stages alone."""
    names = "('torch._dynamo', 'torch.distributed.pipelining', 'sympy', 'networkx', 'autoshard.compiler')"
    code = f"import sys, autoshard.runtime; print([n for n in {names} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

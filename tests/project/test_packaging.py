"""What is shipped and where it is found: in a checkout, installed from one, and from the wheel."""

from __future__ import annotations

import ast
import bdb
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType

import pytest
import torch

import autoshard.models.by_name
import autoshard.passes.ir.sizes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it along on Python 3.10

ROOT = Path(__file__).parents[2]
FOLDERS = {"autoshard": "autoshard", "autoshard.passes": "passes", "autoshard.models": "models"}


def _files(package: str, folder: str) -> list[Path]:
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return [Path(package.replace(".", "/")) / path.relative_to(ROOT / folder) for path in found]


def _shipped() -> Counter[str]:
    """Every source and data file that belongs into the wheel, under its installed name."""
    return Counter(path.as_posix() for package, folder in FOLDERS.items() for path in _files(package, folder))


def _run(*command: str | Path, cwd: Path, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that builds leave nothing in this one. Links would be copied as such."""
    copy = tmp_path_factory.mktemp("checkout") / "source"
    ignored = shutil.ignore_patterns(*"__pycache__ .git .venv* build dist out *.egg-info .*_cache .hypothesis".split())
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    return copy


def _built(what: str, checkout: Path, folder: Path) -> Path:
    build = f"from setuptools import build_meta; print(build_meta.build_{what}({str(folder)!r}))"
    return folder / _run(sys.executable, "-c", build, cwd=checkout).split()[-1]


@pytest.fixture(scope="module")
def sdist(checkout: Path) -> Path:
    return _built("sdist", checkout, checkout.parent)


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Built from the sdist, so that both are proven complete."""
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", sdist.parent)
    _run(*pip, sdist, cwd=sdist.parent)
    (path,) = sdist.parent.glob("*.whl")
    return path


def _environment(folder: Path, *install: str | Path) -> Path:
    """The Python of a new environment with autoshard alone in it; of this one it sees packages, but no finders."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "borrowed.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index")
    _run(*pip, "--no-compile", "--ignore-installed", "--no-build-isolation", *install, cwd=folder)
    return python


# --- a checkout ---


def test_every_folder_with_modules_is_a_package() -> None:
    files = {Path(name) for name in _shipped() if name.endswith(".py")}
    assert {path.parent / "__init__.py" for path in files} <= files


def test_there_are_no_links(checkout: Path) -> None:
    assert [path for path in checkout.rglob("*") if path.is_symlink()] == []
    assert (checkout / "passes" / "__init__.py").is_file()


def test_a_breakpoint_in_a_top_level_folder_is_hit() -> None:
    stops = []

    class Debugger(bdb.Bdb):
        def user_line(self, frame: FrameType) -> None:
            stops.append(frame.f_code.co_name)
            self.set_continue()

    gcd = autoshard.passes.ir.sizes.gcd
    debugger = Debugger()
    assert debugger.set_break(str(ROOT / "passes" / "ir" / "sizes.py"), gcd.__code__.co_firstlineno + 3) is None
    debugger.runcall(lambda: gcd(4, 6))  # it stops at the first line of all, too
    debugger.clear_all_breaks()
    assert stops == ["<lambda>", "gcd"]
    assert Path(autoshard.models.by_name.__file__) == ROOT / "models" / "by_name.py"


@pytest.mark.parametrize("name", ["passes", "passes.ir.graph", "models", "models.gpt"])
def test_nothing_is_imported_twice_under_another_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    before = set(sys.modules)
    with pytest.raises(
        ImportError, match=rf"__init__.py is autoshard\.{name.partition('.')[0]}: import it by this name"
    ):
        __import__(name)
    assert {m for m in set(sys.modules) - before if not m.startswith("autoshard.")} == set()


@pytest.mark.parametrize("name", ["autoshard.tests", "autoshard.benchmarks", "autoshard.docs", "autoshard.autoshard"])
def test_of_the_checkout_only_two_folders_belong_to_the_package(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        __import__(name)


USED_ELSEWHERE = """
import multiprocessing, pickle
from autoshard.models import mlp
from autoshard.passes.ir import graph
import autoshard
if __name__ == "__main__":
    value = mlp.MlpConfig(3), graph.Ref("x"), graph.Graph
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.apply(pickle.dumps, (value,))
    assert pickle.loads(there) == value
    print(autoshard.__file__, graph.__file__, graph.Ref.__str__.__code__.co_filename, mlp.__file__)
"""


@pytest.mark.slow
def test_a_checkout_is_used_without_being_installed(checkout: Path, tmp_path: Path) -> None:
    """By PYTHONPATH, whatever is installed beside it; and by processes that it starts."""
    script = tmp_path / "script.py"
    script.write_text(USED_ELSEWHERE, encoding="utf-8")
    output = _run(sys.executable, script, cwd=tmp_path, PYTHONPATH=str(checkout))
    names = ("autoshard/__init__.py", "passes/ir/graph.py", "passes/ir/graph.py", "models/mlp.py")
    assert output.split() == [str(checkout / name) for name in names]


WHERE = "import autoshard.passes.ir, autoshard.models as m; print(autoshard.__file__, autoshard.passes.ir.__file__, m.__file__)"


@pytest.mark.parametrize("room", ["passes", "models"])
def test_the_finder_of_another_editable_install_is_not_asked(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Editable:  # as setuptools' does
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec:
            return ModuleSpec(name, None, origin="elsewhere")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])
    specs = (finder.find_spec(f"autoshard.{room}", autoshard.__path__) for finder in sys.meta_path)
    assert next(filter(None, specs)).origin == str(ROOT / room / "__init__.py")
    assert autoshard._InCheckout.find_spec(f"autoshard.{room}", ["elsewhere"]) is None  # of another autoshard


@pytest.mark.slow
def test_an_editable_install_serves_its_checkout_and_yields_to_another(checkout: Path, tmp_path: Path) -> None:
    python = _environment(tmp_path / "env", "-e", checkout)
    relative = f"import sys; sys.path.insert(0, {ROOT.name!r}); {WHERE}"
    ways = [(checkout, WHERE, tmp_path, {}), (ROOT, WHERE, tmp_path, {"PYTHONPATH": str(ROOT)})]
    for root, code, cwd, env in [*ways, (ROOT, relative, ROOT.parent, {})]:
        found = [cwd / path for path in _run(python, "-c", code, cwd=cwd, **env).split()]
        assert found == [root / name / "__init__.py" for name in ("autoshard", "passes/ir", "models")]


# --- what is shipped ---


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert project["version"] == autoshard.__version__ == cited


def test_a_bug_report_has_versions_environment_and_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The issue templates ask for it."""
    monkeypatch.setenv("AUTOSHARD_HARDWARE", "h100")
    monkeypatch.setenv("SECRET_TOKEN", "not printed")
    text = autoshard.bug_report()
    for expected in (autoshard.__version__, f"torch {torch.__version__.partition('+')[0]}", "default hardware: h100"):
        assert expected in text
    assert "AUTOSHARD_HARDWARE=h100" in text
    assert "not printed" not in text
    sharded = autoshard.compile(torch.nn.Linear(4, 4), {"tp": 2}, (torch.zeros(2, 4),))
    full = sharded.plan.report("full")
    assert autoshard.bug_report(sharded) == autoshard.bug_report(sharded.plan) == f"{text}\n\n{full}"
    templates = [path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()]
    assert all("print(autoshard.bug_report())" in template for template in templates)


def _imported(source: str) -> set[str]:
    """Top-level packages of others that ``source`` imports, wherever the import stands."""
    names = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"autoshard"}


def _declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


def test_what_is_imported_is_declared() -> None:
    """Each package that the library imports is a dependency or an extra, and the other way round."""
    files = [path for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*.py")]
    imported = set[str]().union(*(_imported(path.read_text(encoding="utf-8")) for path in files))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = set[str]().union(
        *(_declared(project["optional-dependencies"][name]) for name in ("hugging_face", "lightning", "peft"))
    )
    assert imported - extra == _declared(project["dependencies"])
    assert extra <= imported


def test_imports_of_others_are_seen() -> None:
    source = "import os.path, torch.nn\ndef f():\n    from sympy.core import Expr\nfrom autoshard import mesh\n"
    assert _imported(source) == {"torch", "sympy"}
    assert _declared(["torch>=2.11,<2.16", "a-b[c]==1", "plain"]) == {"torch", "a-b", "plain"}


@pytest.mark.slow
def test_the_sdist_holds_every_file_once(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = Counter(name.partition("/")[2] for name in archive.getnames())
    files = [path for folder in FOLDERS.values() for path in _files(folder, folder)]
    assert {name: names[name] for name in map(Path.as_posix, files)} == {path.as_posix(): 1 for path in files}
    assert [name for name in names if name.startswith(("autoshard/passes", "autoshard/models"))] == []


@pytest.mark.slow
def test_the_wheel_holds_every_file_once_and_nothing_else(wheel: Path) -> None:
    names = Counter(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)
    assert names == _shipped()
    assert {"autoshard/passes/ir/graph.py", "autoshard/models/gpt.py", "autoshard/py.typed"} <= set(names)


@pytest.mark.slow
def test_the_wheel_carries_licence_and_console_script(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    text = {name.partition(".dist-info/")[2]: archive.read(name).decode() for name in archive.namelist()}
    assert "Apache License" in text["licenses/LICENSE"]
    assert "autoshard = autoshard.cli:main" in text["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in text["METADATA"]


def test_the_installed_wheel_imports_from_anywhere(checkout: Path, tmp_path: Path) -> None:
    """Built without an sdist, from a copy, so that no sdist is built from what that leaves."""
    shutil.copytree(checkout, tmp_path / "source")
    python = _environment(tmp_path / "env", _built("wheel", tmp_path / "source", tmp_path))
    script = """
import autoshard, autoshard.models, autoshard.passes.ir, autoshard.passes.rules.base, importlib.util, sys
import torch
reference = autoshard.models.get("mlp")
args, kwargs = reference.inputs(batch=2, seq=3)
assert reference.model()(*args, **kwargs).shape == (2, 3, 16)
assert importlib.util.find_spec("passes") is None and importlib.util.find_spec("models") is None
assert autoshard._InCheckout not in sys.meta_path
"""
    found = _run(python, "-c", script + WHERE, cwd=Path("/")).split()
    assert [Path(p).is_relative_to(tmp_path / "env") for p in found] == [True, True, True]
    assert found[1].endswith("autoshard/passes/ir/__init__.py")

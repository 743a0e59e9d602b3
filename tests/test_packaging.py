"""What is shipped: the package list against the folders, and the wheel as a user installs it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it along on Python 3.10

ROOT = Path(__file__).parent.parent
FOLDERS = {"autoshard": "autoshard", "autoshard.passes": "passes", "autoshard.models": "models"}


def _setuptools() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def _shipped() -> set[str]:
    """Every source and data file that belongs into the wheel, under its installed name."""
    files = set()
    for package, folder in FOLDERS.items():
        for directory, _, names in os.walk(ROOT / folder):  # os.walk does not enter symlinked folders
            if Path(directory).name == "__pycache__":
                continue
            relative = Path(directory).relative_to(ROOT / folder)
            files |= {(Path(package.replace(".", "/")) / relative / name).as_posix() for name in names}
    return files


def _run(*command: str, cwd: Path, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from an sdist, so that both are proven complete. It leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "source"
    ignored = shutil.ignore_patterns(*"__pycache__ .git .venv build dist out *.egg-info .*_cache .hypothesis".split())
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(folder)!r}))"
    sdist = _run(sys.executable, "-c", build, cwd=copy).split()[-1]
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder))
    _run(*pip, str(folder / sdist), cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_every_folder_with_modules_is_in_the_list_of_packages() -> None:
    found = {path.rpartition("/")[0].replace("/", ".") for path in _shipped() if path.endswith(".py")}
    assert set(_setuptools()["packages"]) == found


def test_every_package_has_an_init_file() -> None:
    shipped = _shipped()
    assert [p for p in _setuptools()["packages"] if f"{p.replace('.', '/')}/__init__.py" not in shipped] == []


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
    extra = _declared(project["optional-dependencies"]["hugging_face"])
    assert imported - extra == _declared(project["dependencies"])
    assert extra <= imported


def test_imports_of_others_are_seen() -> None:
    source = "import os.path, torch.nn\ndef f():\n    from sympy.core import Expr\nfrom autoshard import mesh\n"
    assert _imported(source) == {"torch", "sympy"}
    assert _declared(["torch>=2.11,<2.16", "a-b[c]==1", "plain"]) == {"torch", "a-b", "plain"}


def test_the_symlinks_are_there_and_relative() -> None:
    assert os.readlink(ROOT / "autoshard" / "passes") == "../passes"
    assert os.readlink(ROOT / "autoshard" / "models") == "../models"


def test_the_wheel_holds_every_file_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == _shipped()
    assert {"autoshard/passes/ir/graph.py", "autoshard/models/gpt.py", "autoshard/py.typed"} <= names


def test_the_wheel_carries_licence_and_console_script(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    text = {name.partition(".dist-info/")[2]: archive.read(name).decode() for name in archive.namelist()}
    assert "Apache License" in text["licenses/LICENSE"]
    assert "autoshard = autoshard.cli:main" in text["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in text["METADATA"]


def test_the_installed_wheel_imports_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    """Installed beside nothing else: the checkout is not on the path; torch comes from this environment."""
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target))
    _run(*pip, str(wheel), cwd=tmp_path)
    assert {p.name for p in target.iterdir() if ".dist-info" not in p.name} <= {"autoshard", "bin"}
    script = """
import autoshard, autoshard.models, autoshard.passes.ir, autoshard.passes.rules.base, importlib.util
import torch
reference = autoshard.models.get("mlp")
args, kwargs = reference.inputs(batch=2, seq=3)
assert reference.model()(*args, **kwargs).shape == (2, 3, 16)
assert importlib.util.find_spec("passes") is None and importlib.util.find_spec("models") is None
print(autoshard.__file__, autoshard.passes.ir.__file__, autoshard.models.__file__)
"""
    # PYTHONPATH comes before site-packages, so that an editable install of the checkout does not win.
    output = _run(sys.executable, "-c", script, cwd=Path("/"), PYTHONPATH=str(target))
    assert [Path(p).is_relative_to(target) for p in output.split()] == [True, True, True]

"""Private names of torch: each is there, or is one that this version may lack; a missing one is refused by its name."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from house_counts import private_names
from torch.utils import checkpoint

import autoshard.torch_private
from autoshard.errors import AutoshardError
from autoshard.torch_private import SINCE, by_name, capture, distributed, dtensor, fake

FILES = sorted(Path(autoshard.torch_private.__file__).parent.glob("[a-z]*.py"))
NAMES = sorted({*SINCE, *(name for file in FILES for name in private_names(ast.parse(file.read_text("utf-8"))))})
VERSION = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


def _found(name: str) -> Any:
    """What torch has by this full name: a module, or an attribute of the longest module that can be imported."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_there_unless_this_version_lacks_it(name: str) -> None:
    if SINCE.get(name, VERSION) > VERSION:
        with pytest.raises(AttributeError):
            _found(name)
    else:
        _found(name)


def test_the_names_are_found() -> None:
    """The test above would pass with no names as well."""
    assert len(NAMES) > 80
    assert "torch._subclasses.fake_tensor.FakeTensor" in NAMES
    with pytest.raises(AttributeError):
        _found("torch._C._no_such_name")


def test_what_is_chosen_by_version() -> None:
    assert [name for _, name, _ in fake.STORAGE_CLONES] == ["_clone_real_storage_from_tensor"] * (VERSION >= (2, 14))
    assert capture.CHECKPOINT_GENERATOR.endswith("_impl") == (VERSION >= (2, 14))
    assert callable(vars(checkpoint)[capture.CHECKPOINT_GENERATOR])


@pytest.mark.parametrize(
    "line",
    [
        "from torch._C import _no_such",
        "from torch._no_such import name",
        "import torch._no_such",
        "import torch; torch._no_such",
        "import torch; torch.Tensor._no_such",
    ],
)
def test_a_missing_name_is_refused_by_it(line: str) -> None:
    version = re.escape(torch.__version__)
    refusal = pytest.raises(AutoshardError, match=rf"torch {version} has no [\w.]*_no_such \(.*torch 2\.11 to 2\.15")
    with refusal, by_name:
        exec(line, {})


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError), by_name:
        1 / 0  # noqa: B018


def test_what_is_loaded_at_the_call() -> None:
    placement = distributed.strided_shard(1, split_factor=2)
    assert isinstance(placement, dtensor.StridedShard)
    assert (placement.dim, placement.split_factor) == (1, 2)

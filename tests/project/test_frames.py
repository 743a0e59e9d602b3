"""Whose code a file is, and the line that users are shown."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
import types

import pytest
import torch
from torch import nn

import autoshard
from autoshard import frames, models, passes
from autoshard.models import gpt

_HOME, _PASSES, _MODELS = (os.path.dirname(package.__file__) for package in (autoshard, passes, models))
_HERE = os.path.basename(__file__)


@pytest.mark.parametrize(
    ("file", "ours", "users"),
    [
        (os.path.join(_HOME, "frames.py"), True, False),
        (os.path.join(_PASSES, "anything", "deep.py"), True, False),
        (os.path.realpath(passes.__file__), True, False),
        (gpt.__file__, False, True),
        (os.path.realpath(gpt.__file__), False, True),
        (torch.__file__, False, False),
        (functools.__file__, False, False),
        (copy.__file__, False, False),
        (pytest.__file__, False, True),  # an installed package, though below the folder of Python's own files
        ("/home/me/torch/train.py", False, True),
        ("/home/me/autoshard/train.py", False, True),
        ("<string>", False, False),
    ],
)
def test_whose_file_it_is(file: str, ours: bool, users: bool) -> None:
    assert (frames.is_autoshard_file(file), frames.is_users_file(file)) == (ours, users)


def test_every_file_of_the_library_is_ours_and_no_model_is() -> None:
    """However deep a file lies: moving one changes nothing."""
    for package, ours in ((_HOME, True), (_PASSES, True), (_MODELS, False)):
        files = [os.path.join(folder, name) for folder, _, names in os.walk(package) for name in names]
        files = [file for file in files if file.endswith(".py")]
        assert len(files) > 5
        for file in files:
            assert frames.is_autoshard_file(file) is ours, file
            assert frames.is_autoshard_file(os.path.realpath(file)) is ours, file


def test_the_users_frame_is_seen_through_torch_and_python() -> None:
    found = []

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append(frames.frame_location_text(frames.users_frame()))
            return x

    list(map(functools.partial(nn.Sequential(Model())), [torch.ones(1)]))
    line = inspect.getsourcelines(Model.forward)[1] + 1
    assert found == [f"{_HERE}:{line}"]


def test_the_users_lines_of_a_text() -> None:
    text = f'File "/a/b.py", line 3, in f\n  File "{__file__}", line 7, in g\n  File "{torch.__file__}", line 9, in h\n'
    assert frames.users_lines(text) == (("/a/b.py", 3), (__file__, 7))
    assert frames.users_lines(f'File "{torch.__file__}", line 9, in h') == ()


def test_lines_of_the_graph_are_the_models() -> None:
    """A model in a folder called torch has lines, too."""
    from autoshard.passes.capture.export import capture

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    line = inspect.getsourcelines(Model.forward)[1] + 1
    assert [n.source for n in capture(Model(), (torch.ones(2),)).nodes] == [f"{_HERE}:{line}"]


def test_modules_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = types.ModuleType("one"), types.ModuleType("other")
    one.__file__, other.__file__ = "/home/me/one.py", "/home/me/other.py"
    assert one not in frames.users_modules()
    monkeypatch.setitem(sys.modules, "one", one)
    assert one in frames.users_modules()
    monkeypatch.setitem(sys.modules, "one", other)
    assert other in frames.users_modules()
    assert one not in frames.users_modules()
    assert torch not in frames.users_modules()

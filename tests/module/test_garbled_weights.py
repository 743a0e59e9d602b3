"""Files of weights that are cut short, garbled, of another kind or elsewhere: refused by name, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autoshard
from autoshard import PlanError
from autoshard.hugging_face import Trainer
from autoshard.transfers.files import SAFETENSORS_INDEX

NAME = "model.safetensors"


class Net(nn.Module):
    """A linear layer, and a buffer of ints."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4)
        self.register_buffer("count", torch.tensor([3, 4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).square().mean()  # type: ignore[no-any-return]


def cut(folder: Path, length: int) -> None:
    (folder / NAME).write_bytes((folder / NAME).read_bytes()[:length])


def index(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / SAFETENSORS_INDEX).write_text(text) and None


def naming(file: object) -> Callable[[Path], None]:
    return index(json.dumps({"weight_map": dict.fromkeys(("up.weight", "up.bias", "count"), file)}))


def of_dtype(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        entries = dict(Net().state_dict())
        save_file({**entries, name: entries[name].to(dtype)}, folder / NAME)

    return change


UNREADABLE = r"cannot be read \("
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (lambda f: cut(f, 0), UNREADABLE),
    "half a header": (lambda f: cut(f, 40), UNREADABLE),
    "cut short": (lambda f: cut(f, (f / NAME).stat().st_size - 1), UNREADABLE),
    "garbled": (lambda f: (f / NAME).write_bytes(b"\xff" * 300) and None, UNREADABLE),
    "a deep header": (
        lambda f: (f / NAME).write_bytes((10**5).to_bytes(8, "little") + b"[" * 10**5) and None,
        UNREADABLE,
    ),
    "no index": (index("{"), UNREADABLE),
    "a deep index": (index('{"a":' * 10**5), UNREADABLE),
    "an index of another kind": (index("[]"), UNREADABLE),
    "a map of another kind": (index('{"weight_map": 3}'), UNREADABLE),
    "files of another kind": (naming(3), UNREADABLE),
    "a file elsewhere": (
        naming("../model.safetensors"),
        "names '../model.safetensors': an index may only name files in its own folder",
    ),
    "an absolute file": (naming("/model.safetensors"), "an index may only name files in its own folder"),
    "the folder above": (naming(".."), r"cannot be read|in its own folder"),
    "a file that is missing": (naming("other.safetensors"), UNREADABLE),
    "an entry in two files": (
        lambda f: (f / "model.fp16.safetensors").write_bytes((f / NAME).read_bytes()) and None,
        r"model.safetensors and .*fp16.safetensors both have an entry 'count'. Give one",
    ),
    "ints for floats": (
        of_dtype("up.weight", torch.int32),
        r"entry 'up.weight' in .* has dtype torch.int32, but the model has torch.float32",
    ),
    "booleans for floats": (of_dtype("up.bias", torch.bool), "has dtype torch.bool"),
    "floats for ints": (of_dtype("count", torch.float32), r"has dtype torch.float32, but the model has torch.int64"),
}


@pytest.fixture(scope="module")
def sharded() -> autoshard.ShardedModule:
    return autoshard.compile(Net(), {"tp": 2}, (torch.randn(4, 8),), hints={"up": "colwise"})


@pytest.mark.parametrize("name", BROKEN)
def test_weights_are_refused_by_name(name: str, sharded: autoshard.ShardedModule, tmp_path: Path) -> None:
    save_file(dict(Net().state_dict()), tmp_path / NAME)
    before = sharded.full_state_dict()
    change, told = BROKEN[name]
    change(tmp_path)
    with pytest.raises(PlanError, match=told):
        autoshard.load_safetensors(sharded, tmp_path)
    assert all(torch.equal(x, before[n]) for n, x in sharded.full_state_dict().items())


def test_other_floats_are_loaded(sharded: autoshard.ShardedModule, tmp_path: Path) -> None:
    """The control: what the refusals are not about."""
    of_dtype("up.weight", torch.float64)(tmp_path)
    naming(NAME)(tmp_path)
    autoshard.load_safetensors(sharded, tmp_path)


def saved(value: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda path: torch.save(value(torch.load(path)), path)


def entry(state: Any) -> Any:
    state["state"][1] = "x"
    return state


STATES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), UNREADABLE),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-40]), UNREADABLE),
    "half": (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), UNREADABLE),
    "garbled": (lambda path: path.write_bytes(b"\xff" * 300), UNREADABLE),
    "a class of a user's": (saved(lambda state: SimpleNamespace()), UNREADABLE),
    "a list": (saved(lambda state: [state]), "cannot be read|not the state of an optimizer"),
    "empty mapping": (saved(lambda state: {}), "cannot be read|not the state of an optimizer"),
}
OF_OPTIMIZERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "states in a list": (saved(lambda state: {**state, "state": []}), "not the state of an optimizer"),
    "an entry": (saved(entry), "not the state of an optimizer"),
    "no groups": (saved(lambda state: {**state, "param_groups": 3}), "not the state of an optimizer"),
    "another model": (
        lambda path: torch.save(torch.optim.Adam(nn.Linear(2, 2, bias=False).parameters()).state_dict(), path),
        r"has \[1\] parameters per group, the optimizer has \[2\]",
    ),
}


@pytest.mark.parametrize("name", [*STATES, *OF_OPTIMIZERS, "as saved"])
@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt"])
def test_states_of_a_checkpoint(
    name: str, file: str, sharded: autoshard.ShardedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the Trainer's checkpoints hold beside the weights."""
    if file == "scheduler.pt" and name in OF_OPTIMIZERS:
        return
    optimizer = torch.optim.Adam(sharded.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    trainer: Any = SimpleNamespace(model=sharded, optimizer=optimizer, lr_scheduler=scheduler)
    trainer.args = SimpleNamespace(should_save=True)
    sharded(torch.randn(4, 8)).backward()
    optimizer.step()
    Trainer._save_optimizer_and_scheduler(trainer, str(tmp_path))
    if name == "as saved":
        Trainer._load_optimizer_and_scheduler(trainer, str(tmp_path))
        return
    change, told = {**STATES, **OF_OPTIMIZERS}[name]
    change(tmp_path / file)
    with pytest.raises(PlanError, match=told):
        Trainer._load_optimizer_and_scheduler(trainer, str(tmp_path))

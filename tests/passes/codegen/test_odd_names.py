"""Names that are no identifiers and no numbers, and texts of the user's in generated source: read as they are, run never."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_equal_training, ideal
from torch import Tensor, nn

import autoshard
from autoshard import frames
from autoshard.passes.ir.text import attribute_source, block_path, identifier, is_attribute_name, is_number

NUMBERS = ("00", "01", "02", "²", "٣", "1_0", "0x1", "9" * 50)
OTHER = (
    "class", "None", "lambda", "self", "runtime", "torch", "F", "aten", "MESH", "BLOCKS", "tensors", "_slots", "_ahead",
    "_bound", "block_path", "scope", "__w", "__w__", "ª", "ﬁ", "é", "e\u0301", "𝐱", "α", "a b", "a'b", 'a"b', "a\\b", "a\nb",
    "a\rb", "a\0b", "a{b}", '"""', "'", "\\", "#", "\u2028", "\ud800", "x" * 300, "__", "*", "[a]", " for ", "} | {", "😀",
)  # fmt: skip
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """A weight, a buffer and a child with names as the caller says."""

    def __init__(self, weight: str, buffer: str, child: str) -> None:
        super().__init__()
        self.names = weight, buffer, child
        self.register_parameter(weight, nn.Parameter(torch.randn(8, 8) / 3))
        self.register_buffer(buffer, torch.zeros(8))
        self.add_module(child, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        weight, buffer, child = self.names
        self._buffers[buffer].add_(x.detach().mean(0))
        return x + getattr(self, child)((x @ self._parameters[weight] + self._buffers[buffer]).tanh())


class Named(nn.Module):
    """Layers under odd names beside numbered ones, and numbered layers in a container of an odd name."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        turned = [names[i:] + names[:i] for i in range(3)]
        self.blocks = nn.ModuleDict(
            {"0": nn.Linear(8, 8), **{n: Layer(*z) for n, *z in zip(names, *turned, strict=True)}}
        )
        self.blocks["1"] = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x).tanh()
        return x.square().mean()


class Containers(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.ModuleList(nn.Linear(8, 8) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        for blocks in self.children():
            for block in blocks:
                x = block(x).tanh()
        return x.square().mean()


@pytest.mark.slow_cases("other", "others")
@pytest.mark.parametrize("names", [NUMBERS, OTHER[::2], OTHER[1::2]], ids=["numbers", "other", "others"])
def test_modules_parameters_and_buffers(names: tuple[str, ...]) -> None:
    assert_equal_training(Named(names), {"tp": 2}, (X,), share=1.2)


@pytest.mark.slow
def test_containers_of_blocks(tmp_path: Path) -> None:
    """Their paths stand in docstrings, in f-strings and in loops; and in the files."""
    names = tuple(n for n in (*NUMBERS[:4], *OTHER) if n != "\ud800")  # which safetensors cannot write
    report = assert_equal_training(Containers(names), {"tp": 2}, (X,), share=1.2)
    assert autoshard.Plan.from_json(report.plan.to_json()).to_json() == report.plan.to_json()
    sharded = autoshard.compile(Containers(names), ideal({"tp": 2}), (X,), plan=report.plan)
    classes = [node for node in ast.parse(sharded.source).body if isinstance(node, ast.ClassDef)]
    assert len(classes) < 10  # blocks are blocks still
    sharded.save(tmp_path)
    report = sharded.plan.report()
    assert len(report.splitlines()) == len(report.split("\n"))  # no name breaks a line


def test_two_names_that_read_alike_are_two() -> None:
    """Was silently the wrong module: ``[00]`` is ``[0]``."""
    sharded = autoshard.compile(Named(("00", "000", "0_0")), ideal({"tp": 2}), (X,))
    assert "self.blocks[0]" in sharded.source
    assert 'self.blocks["00"]' in sharded.source


class Arguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, batch: dict[Any, Tensor], **others: Tensor) -> dict[Any, Tensor]:
        total = sum(others.values(), torch.zeros(()))
        return {name: self.second(self.first(x + total).relu()) for name, x in batch.items()}


def test_keys_of_inputs_and_outputs() -> None:
    names = [n for n in (*NUMBERS, *OTHER) if n != "self"]
    batch, others = {n: X + i for i, n in enumerate(names[::6])}, {n: X - i for i, n in enumerate(names)}
    torch.manual_seed(0)
    model = Arguments()
    sharded = autoshard.compile(model, ideal({"tp": 2}), (batch,), others)
    found, expected = sharded(batch, **others), model(batch, **others)
    assert list(found) == list(expected)
    assert all(torch.allclose(found[n], x, atol=1e-5) for n, x in expected.items())


def test_what_python_reads_otherwise() -> None:
    assert [n for n in (*NUMBERS, "0", "12", "-1", "") if is_number(n)] == ["0", "12"]
    assert [n for n in OTHER if is_attribute_name(n) and n.startswith("_")] == [
        "_slots",
        "_ahead",
        "_bound",
        "__w__",
        "__",
    ]
    assert [block_path(p) for p in ("a.0.b", "a.00.b", "0", "a.²", "a\n.3.b")] == ["a.0", "", "0", "", "a\n.3"]
    assert attribute_source("x", "a.class.0") == "getattr(getattr(x.a, 'class'), '0')"
    made = [identifier(n) for n in (*NUMBERS, *OTHER)]
    assert all(ast.parse(f"{n} = 1").body[0].targets[0].id == n for n in made)  # type: ignore[attr-defined]


def _model(name: str, block: type[nn.Module]) -> nn.Module:
    model = type(name, (nn.Sequential,), {})(block("w", "b", "c"), block("w", "b", "c"))
    assert isinstance(model, nn.Module)
    return model


@pytest.mark.parametrize("name", ["torch", "RankModule", '"""\nimport os\n"""', "__W"])
def test_names_of_classes(name: str) -> None:
    model = _model(name, type(name, (Layer,), {}))
    sharded = autoshard.compile(model, ideal({"tp": 2}), (X,), training=False)
    with torch.no_grad():
        assert torch.allclose(sharded(X), _twin(model)(X), atol=1e-5)
    assert "import os" not in sharded.source.split("\n")


def _twin(model: nn.Module) -> nn.Module:
    found = nn.Sequential(Layer("w", "b", "c"), Layer("w", "b", "c"))
    found.load_state_dict({k: v if "b" not in k.split(".") else torch.zeros(8) for k, v in model.state_dict().items()})
    return found


SOURCE = """
class Model(Module):
    def __init__(self):
        super().__init__(); self.up = Linear(8, 16)
    def forward(self, x):
        return self.up(x).relu()
"""


@pytest.mark.parametrize("file", ["m\n        torch.CANARY.append(1)  #.py", "c\r    x = 1\udcff.py"])
def test_the_name_of_the_users_file_is_not_run(file: str) -> None:
    """It stands in comments. Without the escape the second appends to the list."""
    namespace: dict[str, Any] = {"Module": nn.Module, "Linear": nn.Linear, "__name__": "odd"}
    linecache.cache[file] = (len(SOURCE), None, SOURCE.splitlines(True), file)
    canary: list[int] = []
    torch.CANARY = canary  # type: ignore[attr-defined]
    try:
        exec(compile(SOURCE, file, "exec"), namespace)
        sharded = autoshard.compile(namespace["Model"](), ideal({"tp": 2}), (X,))
        assert sharded(X).shape == (4, 16)
        assert canary == []
        assert len(str(sharded.plan.explain(next(iter(sharded.plan.choices)))).split("\r")) == 1
    finally:
        del torch.CANARY, linecache.cache[file]  # type: ignore[attr-defined]


def test_a_place_is_one_line() -> None:
    assert frames.location_text("/a/b\nc\ud800.py", 3) == "b\\nc\\ud800.py:3"

"""Identifiers in generated code: the user's own where that is sure; taken again only when nobody reads the old value."""

from __future__ import annotations

import ast
import linecache
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training, double, ideal
from torch import nn

import autoshard
from autoshard import Shard, frames, models
from autoshard.passes.capture.export import capture
from autoshard.passes.codegen import emit as codegen
from autoshard.passes.codegen.source_text import NameScope
from autoshard.passes.codegen.variable_names import module_names, user_names
from autoshard.passes.rules.interpreters import interpret


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


X = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
SEQUENCE_PARALLEL = {"*.up": "colwise", "*.down": "rowwise", "layers.?": Shard(1), "x": Shard(1)}


def train() -> autoshard.VerifyReport:
    """Every layer reads its input in shards, for the residual, and gathered, for the first weight."""
    return assert_equal_training(Layers(), {"tp": 2}, (X,), hints=SEQUENCE_PARALLEL, hardware="h100")


def test_a_value_that_a_later_block_reads_keeps_its_name() -> None:
    kinds = {(c.kind, c.phase) for c in train().plan.collectives}
    assert ("all_gather", "forward") in kinds
    assert ("reduce_scatter", "forward") in kinds


def test_a_name_that_is_taken_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: as if nothing were read after the statements between two blocks."""
    monkeypatch.setattr(
        codegen._ProgramEmitter, "_read_later", lambda emitter: [frozenset[str]() for _ in emitter.segments]
    )
    with pytest.raises((AssertionError, RuntimeError)):
        train()


class Taken(nn.Module):
    """A parameter, a buffer, two arguments and the results of ops share their names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.matmul = nn.Parameter(torch.randn(16, 12)), nn.Parameter(torch.randn(12, 7))
        self.register_buffer("x", torch.zeros(16))

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.x += x.sum((0, 1))
        return torch.relu(x * weight @ self.weight) @ self.matmul


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_equal_names_of_tensors_arguments_and_results(axes: dict[str, int]) -> None:
    report = assert_equal_training(Taken(), axes, (X, X.roll(1, 0)), share=1.2)
    layouts = report.plan.layouts
    assert {"weight", "weight (input)", "x", "x (input)", "matmul", "matmul_result"} <= layouts.keys()
    assert [report.plan.shapes[n] for n in ("weight", "weight (input)", "matmul")] == [(16, 12), (4, 8, 16), (12, 7)]


# --- the user's own names ---


def swapped(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = torch.stack([a, b]).unbind(0)
    return second, first


def both(kept: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    y = x.cos()
    kept.append(y.exp())
    return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.seen = nn.Linear(16, 32), nn.Linear(32, 16), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(
            self.up(x),
        )
        out = self.down(hidden)
        return out  # noqa: RET504


class Clear(nn.Module):
    """Assignments that say what a value is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        turned *= 2
        for block in self.blocks:
            turned = block(turned)
        scale: torch.Tensor = self.norm(turned).sigmoid()
        largest, _ = scale.max(-1, keepdim=True)
        return turned * scale / largest


class Unclear(nn.Module):
    """Assignments that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = swapped(x * 2, x * 3)
        c, d = swapped(a, b)
        e = c.sin() if x.ndim == 3 else d.cos()
        f = [e + 1, e + 2]
        g = (h := f[0] * 2) + f[1]; i = h.exp()  # fmt: skip  # noqa: E702
        j = torch.zeros_like(x)
        j[..., 0] = 1.5
        k = j[..., 1]
        k += 1
        m = (lambda y: y * 5)(g)
        for n in (i, m):
            j = j + n.tanh()
        o = j.relu_() + 1
        p = q = o + j
        kept: list[torch.Tensor] = []
        r = both(kept, q)
        return p * r * kept[0] + d + self.block(o).sum() + k.sum()


def given(model: nn.Module, args: Any, kwargs: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Names by variable and by module; no variable has a name that it did not bear when the model ran."""
    held: dict[str, dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]] = defaultdict(dict)

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        if not frames.is_users_file(frame.f_code.co_filename) or frames.is_installed(frame.f_code.co_filename):
            return None
        for name, value in frame.f_locals.items():
            if isinstance(value, torch.Tensor):
                # alive: ids are kept
                held[name].setdefault((id(value), value._version), (value.detach().clone(), value))
        return look

    sys.settrace(look)
    try:
        model(*args, **kwargs)
    finally:
        sys.settrace(None)
    graph = capture(model, args, kwargs, training=False)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **kwargs}
    positional = iter(args)
    inputs = {
        i.name: tensors[i.fqn] if i.fqn in tensors else next(positional) for i in graph.inputs if i.kind != "constant"
    }
    values = interpret(graph, inputs)
    found = user_names(graph)
    for value, name in found.items():
        made, borne = values[value], held[name].values()
        # Rows of experts stay in the dims that the model flattens.
        alike = (t for t, _ in borne if t.numel() == made.numel() and made.shape[-1:] == t.shape[-1:])
        assert any(torch.allclose(made.reshape(t.shape), t) for t in alike), (value, name)
    return found, module_names(graph)


def test_values_bear_the_names_of_the_users_variables() -> None:
    found, modules = given(Clear().double().eval(), (X.double(),), {})
    names = ["first", "hidden", "hidden", "largest", "out", "out", "scale", "second", "turned", "turned"]
    assert sorted(found.values()) == names
    assert sorted(modules.values()) == ["down", "down", "norm", "up", "up"]


def test_what_is_not_sure_has_no_name() -> None:
    found, _ = given(Unclear().double().eval(), (X.double(),), {})
    assert set(found.values()) == {"hidden", "j", "k", "m", "out"}


@pytest.mark.parametrize("name", ["gpt", "llama", "moe", "dlrm", "vit"])
def test_no_name_is_wrong(name: str) -> None:
    reference = models.get(name)
    found, _ = given(reference.model().double().eval(), *double(reference.inputs()))
    assert len(found) >= 4


def test_a_wrong_name_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: as if the last value of a statement were always what is assigned."""
    monkeypatch.setattr(
        "autoshard.passes.codegen.variable_names._values_read_after", lambda nodes, end, last: list(nodes[-1].outputs)
    )
    with pytest.raises(AssertionError):
        given(Unclear().double().eval(), (X.double(),), {})


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "gone.py"
    path.write_text("class M(Module):\n    def forward(self, x):\n        total = x.sin()\n        return total * 2\n")
    namespace: dict[str, Any] = {"Module": nn.Module}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    graph = capture(namespace["M"](), (X,))
    assert list(user_names(graph).values()) == ["total"]
    path.unlink()
    linecache.clearcache()
    assert user_names(graph) == {}


def test_equal_layers_have_equal_names() -> None:
    source = autoshard.compile(Clear(), ideal({"tp": 2}), (X,)).source
    kinds = [n.name for n in ast.parse(source).body if isinstance(n, ast.ClassDef)]
    assert kinds == ["Block", "RankModule"]
    assert all(text in source for text in ("turned = torch.cat([", "hidden = F.gelu(", "scale = torch.sigmoid("))


def test_identifiers() -> None:
    """The first that is free; then the first with a number; never what emitted code reads itself."""
    names = NameScope(["batch"])
    wanted = [("x",), ("x", "up"), ("x", "up"), ("batch",), ("class",), ("max",), ("F",), ("2d",), ("a.b[0]",), ("",)]
    made = [names.fresh(f"v{i}", *w) for i, w in enumerate(wanted)]
    assert made == ["x", "up", "x_1", "batch_1", "class_", "max_", "F_", "x2d", "a_b_0", "x_2"]
    names.dead = lambda local: local == "v0"
    assert names.fresh("w", "x", avoid=["x"]) == "x_3"
    assert names.fresh("w", "x") == "x"
    assert (names.of["w"], names.is_held("w"), names.is_held("v9")) == ("x", True, True)

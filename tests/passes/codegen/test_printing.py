"""Emitted text: calls as Python, signatures, tables of blocks, loops; a line each way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh
from autoshard.passes.codegen.body import SourceLine
from autoshard.passes.codegen.emit import roll_loops
from autoshard.passes.codegen.source_text import (
    Expression,
    atom,
    block_table,
    def_lines,
    format_paths,
    layout_text,
    literal,
    literal_mesh,
    op_name,
    print_call,
    python_path,
    shape_text,
    singular_name,
)
from autoshard.passes.ir.graph import Ref, TensorType
from autoshard.passes.ir.program import Local, LocalCall, Offset

aten = torch.ops.aten
X, Y = Ref("x"), Ref("y")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (LocalCall(aten.add.Tensor, (X, Y), {}), "x + y"),
        (LocalCall(aten.add.Tensor, (X, Y), {"alpha": 2}), "aten.add.Tensor(x, y, alpha=2)"),
        (LocalCall(aten.pow.Tensor_Scalar, (X, 2), {}), "x**2"),
        (LocalCall(aten.neg.default, (X,), {}), "-x"),
        (LocalCall(aten.linear.default, (X, Y), {}), "F.linear(x, y)"),
        (LocalCall(aten.view.default, (X, [2, -1]), {}), "x.reshape(2, -1)"),
        (LocalCall(aten.view.default, (X, []), {}), "x.reshape(())"),
        (LocalCall(aten.view.dtype, (X, torch.int32), {}), "x.view(torch.int32)"),
        (LocalCall(aten.slice.Tensor, (X, 1, 2, 2**63 - 1), {}), "x[:, 2:]"),
        (LocalCall(aten.slice.Tensor, (X, -1, None, 4, 2), {}), "x[..., :4:2]"),
        (LocalCall(aten.cat.default, ([X, Y], -1), {}), "torch.cat([x, y], dim=-1)"),
        (LocalCall(aten.embedding.default, (X, Y, -1), {}), "F.embedding(y, x)"),
        (LocalCall(aten.zeros.default, ([2],), {}), "torch.zeros([2], device=runtime.device())"),
        (LocalCall(aten.cross_entropy_loss.default, (X, Y, None, 2), {}), 'F.cross_entropy(x, y, reduction="sum")'),
        (LocalCall(aten.erfinv.default, (X,), {}), "aten.erfinv.default(x)"),
        (LocalCall("all_gather", (X, 0, "tp"), {"to": "R"}), 'runtime.all_gather(x, 0, "tp", to="R")'),
        (LocalCall(aten.mul.Tensor, (LocalCall(aten.sub.Tensor, (X, Y), {}), 2), {}), "(x - y) * 2"),
        (
            LocalCall(aten.view.default, (X, [Local(8, ("dp", "tp")), Local(9, ("tp",))]), {}),
            'x.reshape(2, runtime.size(9, "tp"))',
        ),
        (LocalCall(aten.add.Tensor, (X, Offset(8, ("dp", "tp"))), {}), 'x + runtime.offset(8, ("dp", "tp"))'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_call_as_python(call: LocalCall, text: str) -> None:
    assert print_call(call, {"x": "x", "y": "y"}, {"dp": 2, "tp": 2}).flat == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", '"a"'),
        ('a"b', "'a\"b'"),
        (float("inf"), 'float("inf")'),
        (torch.float64, "torch.float64"),
        (torch.device("meta"), 'torch.device("meta")'),
        (None, "None"),
    ],
    ids=str,
)
def test_a_constant_as_python(value: Any, text: str) -> None:
    assert literal(value) == text


def test_a_wide_call_is_wrapped_as_ruff_wraps_it() -> None:
    short, wide = atom("a" * 30), atom("b" * 60)
    assert Expression("f(", [short, short], ")").lines("x = ", "") == [f"x = f({short.flat}, {short.flat})"]
    assert Expression("f(", [short, atom("c" * 50)], ")").lines("x = ", "") == [
        "x = f(",
        f"    {short.flat}, {'c' * 50}",
        ")",
    ]
    assert Expression("f(", [short, wide], ")").lines("x = ", "") == [
        "x = f(",
        f"    {short.flat},",
        f"    {wide.flat},",
        ")",
    ]


def test_shapes_and_layouts() -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    layout = Layout(mesh, {"dp": Shard(0), "tp": Shard(1)})
    assert shape_text(TensorType((6, 9, 3), torch.float32), layout) == "[3/6, 5/9, 3]"
    assert layout_text(layout) == " S(0)@dp S(1)@tp"
    assert layout_text(Layout(mesh)) == ""
    assert literal_mesh({"dp": 2, "tp": 4}) == '{"dp": 2, "tp": 4}'


def test_paths_and_names() -> None:
    assert python_path("layers.0.mlp") == "self.layers[0].mlp"
    assert python_path("a-b.class.TENSORS") == 'self["a-b"]["class"]["TENSORS"]'
    found = [op_name(n) for n in ("mul_3", "split_1", "scaled_dot_product_attention", "_to_copy_2", "pow_1", "_")]
    assert found == ["mul", "part", "attention", "cast", "power", "x"]
    assert [singular_name(c) for c in ("model.layers", "h", "", "glass", "entries")] == [
        "layer", "block", "block", "block", "block",
    ]  # fmt: skip


def test_signatures() -> None:
    assert def_lines("forward", ["self", "x"]) == ["    def forward(self, x):"]
    wide = ["self", *(f"argument_{i}" for i in range(6))]
    assert def_lines("forward", wide) == ["    def forward(", f"        {', '.join(wide)}", "    ):"]
    assert len(def_lines("forward", [*wide, *wide])) == 16


def test_equal_blocks_are_listed_together() -> None:
    paths = ["a.0", "a.1", "a.2", "a.4", "b"]
    assert format_paths(paths) == "a.0 … a.2, a.4, b"
    assert block_table([("Block", paths[:3])]) == '    BLOCKS = {f"a.{i}": Block for i in range(3)}'
    assert block_table([]) == "    BLOCKS = {}"
    assert block_table([("A", ["a.1", "a.2"]), ("B", ["a.0"])]) == (
        '    BLOCKS = {f"a.{i}": A for i in range(1, 3)} | {"a.0": B}'
    )


# --- loops ---


def call(number: int, given: str = "x", made: str = "x", kind: str = "Block", container: str = "layers") -> SourceLine:
    path = f"{container}.{number}"
    return SourceLine((made,), Expression(f"{python_path(path)}(", [atom(given)], ")"), block=path, kind=kind)


def gather(module: str) -> SourceLine:
    return SourceLine(("x",), Expression("runtime.all_gather(", [atom("x")], ")"), "S → R", module)


def looped(*body: SourceLine, others: tuple[str, ...] = (), taken: tuple[str, ...] = ("x",)) -> str:
    children: dict[str, set[str]] = {"layers": set(others), "h": set()}
    for line in body:
        container, _, number = line.block.rpartition(".")
        children.setdefault(container, set()).update({number} if line.block else ())
    return "\n".join(line[8:] for line in roll_loops(body, children, taken, lambda module: f" <{module}>"))


def test_calls_of_equal_blocks_are_a_loop() -> None:
    assert looped(call(0), call(1), call(2)) == "for layer in self.layers:\n    x = layer(x)"
    assert looped(call(0), call(1), others=("2",)) == "for layer in self.layers[:2]:\n    x = layer(x)"
    assert looped(call(3), call(4)) == "for layer in self.layers[3:5]:\n    x = layer(x)"
    assert looped(call(0, container="h"), call(1, container="h")) == "for block in self.h:\n    x = block(x)"
    assert looped(call(0), call(1), taken=("x", "layer")) == "for layer_1 in self.layers:\n    x = layer_1(x)"


def test_what_stands_between_the_calls_is_part_of_the_turn() -> None:
    """The line's module is the turn's; after the last call comes what comes after every call, or the turn is apart."""
    lines = [line for i in range(3) for line in (call(i), gather(f"layers.{i}.down"))]
    turn = "    x = layer(x)\n    x = runtime.all_gather(x)  # S → R <@layer.down>"
    assert looped(*lines) == f"for layer in self.layers:\n{turn}"
    assert looped(*lines[:-1]) == f"for layer in self.layers[:2]:\n{turn}\nx = self.layers[2](x)"
    before = [line for i in range(2) for line in (gather(f"layers.{i}.up"), call(i))]
    turn = "    x = runtime.all_gather(x)  # S → R <@layer.up>\n    x = layer(x)"
    assert looped(*before) == f"for layer in self.layers:\n{turn}"


def test_calls_that_differ_are_no_loop() -> None:
    for other in (call(1, given="y"), call(1, made="y"), call(1, kind="Block_2"), call(2), call(1, container="h")):
        text = looped(call(0), other)
        assert "for" not in text
        assert text.count("self.") == 2
    assert "for" not in looped(call(0), gather("layers.0.a"), call(1), gather("layers.1.b"))
    assert looped(call(0, given="y"), call(1), call(2)) == (
        "x = self.layers[0](y)\nfor layer in self.layers[1:3]:\n    x = layer(x)"
    )

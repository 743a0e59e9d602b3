"""Patterns as text, what they match, and what is built in the place of a match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped,unused-ignore]
import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Input, Node, Ref, TensorType
from autoshard.passes.ir.patterns import Matcher, permutation_of, product_of
from autoshard.passes.ir.rewrite import NodeBuilder, rewrite
from autoshard.passes.ir.sizes import Size, length_symbol

X, W, IDS = TensorType((4, 6), torch.float32), TensorType((6, 8), torch.float32, True), TensorType((4,), torch.int64)


def written(write: Callable[[NodeBuilder], Ref], **inputs: TensorType) -> Graph:
    """The graph of the nodes that ``write`` builds; it returns their result."""
    given = tuple(Input(name, "input", name) for name in inputs)
    build = NodeBuilder(Graph(given, (), inputs, (), None, None))
    build.place = Node("n", aten.add.Tensor, (), {}, (), ())
    result = write(build)
    return Graph(given, tuple(build.nodes), build.types, (result,), None, None)


def gated(build: NodeBuilder) -> Ref:
    """silu(x @ w) · (x @ w), the product computed twice."""
    one, other = (build(aten.matmul.default, Ref("x"), Ref("w")) for _ in range(2))
    return build(aten.mul.Tensor, other, build(aten.silu.default, one))


@pytest.mark.parametrize(
    ("pattern", "bound"),
    [
        ("mul(silu(gate), up)", {"gate": "n_matmul", "up": "n_matmul_2"}),
        ("mul(silu(same), same)", {"same": "n_matmul"}),  # computed alike
        ("mul(silu(x), y) | silu(x)", {"x": "n_matmul", "y": "n_matmul_2"}),
        ("mul((silu | relu)(einsum('ij,jk->ik', x, w)), _)", {"x": "x", "w": "w"}),
        (
            "y = mul(act, _)\nact = silu(inner)\ninner = matmul(rows, _)",
            {"y": "n_mul", "inner": "n_matmul", "rows": "x"},
        ),
        ("gate(inner)", {"inner": "n_matmul"}),
        ("mul(silu(parameter()), _)", None),
        ("mul(relu(gate), up)", None),
        ("mul(silu(einsum('ij,kj->ik', x, w)), _)", None),
        ("silu(x)", None),
    ],
)
def test_patterns(pattern: str, bound: dict[str, str] | None) -> None:
    graph = written(gated, x=X, w=W)
    matcher = Matcher(
        graph, {"gate(x)": "mul(silu(x), _)"}, {"parameter": lambda v, known: [()] if v == Ref("w") else []}
    )
    found = matcher.match(pattern, graph.outputs[0])
    names = None if found is None else {name: ref.name for name, ref in found.items() if name in (bound or {})}
    assert names == bound


def test_dims_count_from_both_ends_and_other_arguments_have_their_defaults() -> None:
    graph = written(lambda b: b(aten.sum.dim_IntList, b(aten.unsqueeze.default, Ref("x"), -1), [1], True), x=X)
    matcher, (result,) = Matcher(graph), graph.outputs
    assert matcher.match("sum(unsqueeze(x, 2), [-2], True)", result) is not None
    assert matcher.match("sum(unsqueeze(x, dim), _, keepdim=_)", result) == {  # type: ignore[comparison-overlap]
        "": ("n_sum", "n_unsqueeze"), "x": Ref("x"), "dim": 2
    }  # fmt: skip
    assert matcher.match("sum(x, [1])", result) is None  # keepdim
    assert matcher.match("sum(x, [-1], True)", result) is None


def test_results_of_one_op_and_values_behind_casts_and_reshapes() -> None:
    def write(build: NodeBuilder) -> Ref:
        cast = build(aten._to_copy.default, Ref("x"), dtype=torch.float64)
        return build(aten.reshape.default, build(aten._to_copy.default, cast, dtype=torch.float32), [2, 2, 6])

    graph = written(write, x=X)
    matcher, (result,) = Matcher(graph), graph.outputs
    assert [m["x"].name for m in matcher.matches("+~(x := _)", result)][-1] == "x"
    assert matcher.match("~(x := _)", result) is not None
    top = replace_op(graph, aten.topk.default, (Ref("x"), 2), 1)
    assert Matcher(top).match("topk(x, k)[1]", top.outputs[0]) is not None
    assert Matcher(top).match("topk(x, k)", top.outputs[0]) is None


def replace_op(graph: Graph, op: Any, args: tuple[Any, ...], slot: int) -> Graph:
    """The graph of one op, of which result ``slot`` is read."""
    node = Node("top", op, args, {}, ("top",), (slot,))
    return Graph(graph.inputs, (node,), {**graph.types, "top": IDS}, (Ref("top"),), None, None)


def test_closed_matches_are_read_by_nothing_else() -> None:
    graph = written(gated, x=X, w=W)
    matcher, last = Matcher(graph), graph.nodes[-1]
    closed, open_ = (matcher.match(p, graph.outputs[0]) for p in ("mul(silu(_), _)", "mul(silu(matmul(_, _)), _)"))
    assert closed is not None
    assert open_ is not None
    assert matcher.is_closed(closed, last)
    assert matcher.is_closed(open_, last)
    assert not matcher.is_closed({"": ("n_matmul",)}, last)  # silu reads it


def test_products_in_any_spelling_are_one_einsum() -> None:
    stack = TensorType((3, 6, 8), torch.float32)
    graph = written(lambda b: b(aten.matmul.default, Ref("x"), Ref("s")), x=X, s=stack)
    product = product_of(graph.outputs[0], graph)
    assert product is not None
    assert product.named(*product.operands) == ("ab", "cbd", "cad")
    turned = written(lambda b: b(aten.linear.default, Ref("x"), b(aten.t.default, Ref("w"))), x=X, w=W)
    product = product_of(turned.outputs[0], turned)
    assert product is not None
    assert product.named(*product.operands) == ("ab", "cb", "ac")
    assert permutation_of(turned.nodes[0], turned) == (1, 0)
    assert product_of(Ref("x"), graph) is None


def test_built_nodes_get_their_types_and_dynamic_lengths() -> None:
    batch = length_symbol("batch")
    rows, size = TensorType((Size(4, batch, {batch: 4}), 6), torch.float32), Size(8, 2 * batch, {batch: 4})
    graph = written(
        lambda b: b(aten.reshape.default, b(aten.matmul.default, Ref("x"), Ref("w")), [size, 4]), x=rows, w=W
    )
    assert str(graph.types["n_matmul"]) == "f32[batch, 8]"
    assert graph.types["n_matmul"].grad
    assert [str(n) for n in graph.shape(graph.outputs[0])] == ["2 * batch", "4"]
    assert sympy.simplify(graph.shape("n_reshape")[0].expr - 2 * batch) == 0  # type: ignore[attr-defined]


def test_rewriting_replaces_nodes_and_their_reads() -> None:
    graph = written(gated, x=X, w=W)

    def swiglu(build: NodeBuilder, node: Node) -> bool:
        found = Matcher(graph).match("mul(silu(same), same)", Ref(node.outputs[0]))
        if found is not None:
            squared = build(aten.mul.Tensor, found["same"], found["same"])
            build.finish(aten.mul.Tensor, squared, build(aten.sigmoid.default, found["same"]))
        if node.name == "n_matmul_2":
            build.renamed["n_matmul_2"] = "n_matmul"
        return found is not None or node.name == "n_matmul_2"

    assert [line.partition("#")[0].strip() for line in str(rewrite(graph, swiglu)).splitlines()[1:]] == [
        "n_matmul = aten.matmul.default(x, w)",
        "n_silu = aten.silu.default(n_matmul)",
        "n_mul_mul = aten.mul.Tensor(n_matmul, n_matmul)",
        "n_mul_sigmoid = aten.sigmoid.default(n_matmul)",
        "n_mul = aten.mul.Tensor(n_mul_mul, n_mul_sigmoid)",
        "return n_mul",
    ]
    assert rewrite(graph, lambda build, node: False) is graph

"""What is found once of a graph or node, and kept there; and what a plan does without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import autoshard
from autoshard.hardware import PRESETS
from autoshard.layout import R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.capture import capture
from autoshard.passes.capture.exported.example_inputs import example_without_data
from autoshard.passes.ir.analyses import cached_per_graph, cached_per_node, interned_types, node_signature
from autoshard.passes.ir.assignment import cached_layout, operand_placements, result_placements
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
from autoshard.passes.propagate.op_space import OpSpaces
from autoshard.passes.propagate.prices.roofline import node_seconds


def _graph(dynamic: bool = False) -> Graph:
    return capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(6, 4),), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_is_asked_once_unless_lengths_are_open(dynamic: bool) -> None:
    graph, asked = _graph(dynamic), list[int]()

    @cached_per_graph
    def times(graph: Graph, n: int) -> int:
        asked.append(n)
        return n * len(graph.nodes)

    found = [times(graph, 2), times(graph, 2), times(graph, 3), times(replace(graph, passes=2), 2)]
    count = len(graph.nodes)
    assert found == [2 * count, 2 * count, 3 * count, 2 * count]
    assert asked == ([2, 2, 3, 2] if dynamic else [2, 3, 2])


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_node_is_asked_once_for_the_same_types(dynamic: bool) -> None:
    graph, asked = _graph(dynamic), list[str]()
    node = graph.nodes[0]
    other = {**graph.types, node.inputs[0]: TensorType((9, 4), torch.float32)}

    @cached_per_node
    def shape(node: Node, types: Mapping[str, TensorType]) -> Any:
        asked.append(node.name)
        return types[node.inputs[0]].shape

    found = [tuple(map(int, shape(node, types))) for types in (graph.types, graph.types, other, other, graph.types)]
    assert found == [(6, 4), (6, 4), (9, 4), (9, 4), (6, 4)]
    assert len(asked) == (5 if dynamic else 3)


def test_what_lies_alike_is_one_object() -> None:
    mesh = Mesh({"dp": 2, "tp": 4})
    assert cached_layout(mesh, (Shard(0), R)) is cached_layout(mesh, (Shard(0), R))
    assert cached_layout(mesh, (Shard(0), R)) == autoshard.Layout(mesh, (Shard(0), R))
    assert cached_layout(Mesh({"dp": 2, "cp": 4}), (Shard(0), R)).mesh.axes == ("dp", "cp")


def test_a_plan_is_made_without_source() -> None:
    example = nn.Linear(4, 4), {"tp": 2}, (torch.randn(4, 4),)
    with patch("autoshard.plans.planning.codegen", side_effect=AssertionError("nobody asked")):
        assert autoshard.plan(*example).choices
        with pytest.raises(AssertionError, match="nobody asked"):
            autoshard.compile(*example)


def test_parameters_without_data_lie_as_they_did() -> None:
    made = [
        torch.empty(3, 4, device="meta"),
        torch.empty(4, 3, device="meta").t(),
        torch.empty(2, 3, 4, 5, device="meta").to(memory_format=torch.channels_last),
        torch.empty(8, 4, device="meta")[::2],
        torch.empty((), device="meta"),
        torch.empty(3, 4, device="meta").expand(2, 3, 4),
    ]
    model = nn.ParameterList(nn.Parameter(x, requires_grad=i % 2 == 0) for i, x in enumerate(made))
    before = list(model)
    example_without_data(model, ((torch.empty(2),), {}))
    for old, new in zip(before, model, strict=True):
        assert isinstance(new, nn.Parameter)
        assert new.device.type == "cpu"
        assert new.stride() == torch.empty_like(old).stride()
        assert (new.shape, new.dtype, new.requires_grad) == (old.shape, old.dtype, old.requires_grad)


def test_equal_types_are_one_object_but_for_estimates() -> None:
    """An estimate of 1 is equal to one of 1.0, and another one."""
    types = {name: TensorType((4, 2), torch.float32, name != "c") for name in "abc"}
    types |= {name: TensorType((), torch.float32, number=n) for name, n in (("one", 1), ("float", 1.0))}
    found = interned_types(types)
    assert found == types
    assert found["a"] is found["b"] is not found["c"]
    assert [type(found[name].number) for name in ("one", "float")] == [int, float]


def test_values_are_told_apart_from_numbers_in_a_signature() -> None:
    """``x + x``, ``x + y`` and ``x + 0`` of equal types."""
    types = dict.fromkeys("xyz", TensorType((4,), torch.float32))
    add = torch.ops.aten.add.Tensor
    nodes = [
        Node("n", add, args, {}, ("z",), (0,)) for args in ((Ref("x"), Ref("x")), (Ref("x"), Ref("y")), (Ref("x"), 0))
    ]
    assert len({node_signature(node, types) for node in nodes}) == 3
    assert node_signature(nodes[1], types) == node_signature(
        Node("m", add, (Ref("y"), Ref("x")), {}, ("z",), (0,)), types
    )


def test_plans_on_meshes_that_differ_in_names_alone_are_one() -> None:
    model, batch = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)), (torch.randn(1024, 512),)
    plans = [
        autoshard.plan(model, Mesh(axes, "cpu"), batch, training=True)
        for axes in ({"dp": 2, "tp": 4}, {"tp": 2, "dp": 4}, {"dp": 4, "tp": 2})
    ]
    one, other, turned = plans
    assert one.cost == other.cost
    assert [(c.labels, c.alternatives) for c in one.choices.values()] == [
        (c.labels, c.alternatives) for c in other.choices.values()
    ]
    assert turned.collectives != one.collectives
    for plan in plans:
        assert all(set(c.axes) <= set(plan.mesh.axes) for c in plan.collectives)
    assert any(c.axes for c in one.collectives)


def test_choices_are_told_apart_by_layouts_and_each_has_its_own_seconds() -> None:
    graph = capture(nn.Linear(8, 8), (torch.randn(16, 8, requires_grad=True),))
    mesh = Mesh({"dp": 2, "tp": 2}, replace(PRESETS["h100"], variation=0.0))
    for node in graph.nodes:
        space = OpSpaces(graph, mesh)[node]
        grads = [[graph.types[n].grad for n in names] for names in (node.inputs, node.outputs)]
        layouts = set()
        for i, choice in enumerate(space.choices):
            read = tuple(operand_placements(choice, k, grad) for k, grad in enumerate(grads[0]))
            results = tuple(result_placements(choice, k, grad) for k, grad in enumerate(grads[1]))
            assert read == tuple(x[i] for x in space.inputs)
            assert results == tuple(x[i] for x in space.outputs)
            layouts.add((read, results))
            traffic = OpSpaces(graph, mesh).traffic.get(node.name)
            seconds = node_seconds(node, graph, mesh, choice, (*read, *results), traffic)
            assert space.compute(i)[:2] == seconds[:2]
        assert len(layouts) == len(space.choices) > 1

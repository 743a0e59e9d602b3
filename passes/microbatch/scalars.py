"""Which output of a step is its loss, and what outputs are called."""

from __future__ import annotations

from typing import Any

from autoshard.errors import PlanError
from autoshard.passes.ir.graph import Graph, Ref


def loss_of(graph: Graph, asked: str) -> tuple[int, dict[int, str]]:
    """The position of the loss among the flat outputs; of the other scalars that carry a gradient, and what these are called.

    The loss is the scalar of that name, else the first. Raises :class:`PlanError` where none carries a gradient; ``asked``:
    what was asked for.
    """
    outputs = enumerate((graph.types[o.name] if isinstance(o, Ref) else None) for o in graph.outputs)
    found = [i for i, type_ in outputs if type_ is not None and type_.grad and not type_.shape]
    if not found:
        raise PlanError(
            f"{asked}: no output of the model is a scalar that carries a gradient. Its forward has to return one loss, because "
            "forward and backward of a micro-batch run together."
        )
    names = names_of(graph.out_spec)
    loss = next((i for i in found if names.get(i) == "loss"), found[0])
    return loss, {i: output_named(i, names) for i in found if i != loss}


def output_named(position: int, names: dict[int, str]) -> str:
    """What a message calls an output."""
    return f"output {names[position]!r}" if position in names else f"output number {position}"


def names_of(spec: Any) -> dict[int, str]:
    """Position of a flat output → its key or field, of outputs that have one at the top."""
    children = [] if spec.is_leaf() else spec.children()
    labels = getattr(spec.context, "_fields", getattr(spec.context, "names", spec.context))
    if not isinstance(labels, list | tuple) or len(labels) != len(children):
        return {}
    found, position = {}, 0
    for label, child in zip(labels, children, strict=True):
        if child.is_leaf():
            found[position] = str(label)
        position += child.num_leaves
    return found

"""The loss among the outputs of a step, and names of outputs."""

from __future__ import annotations

from typing import Any

from autoshard.errors import PlanError
from autoshard.passes.ir.graph import Graph, Ref


def loss_of(graph: Graph, asked: str) -> tuple[int, dict[int, str]]:
    """The flat position of the loss; positions and names of other scalars with a gradient.

    The loss is the scalar named "loss", else the first. Raises :class:`PlanError` if there is none;
    ``asked``: the option that needs it, for the message.
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
    """How a message names an output."""
    return f"output {names[position]!r}" if position in names else f"output number {position}"


def names_of(spec: Any) -> dict[int, str]:
    """Flat position → key or field, of outputs at the top level."""
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

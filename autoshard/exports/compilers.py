"""Exports to compilers that take a layout per tensor: MindSpore strategies, JAX PartitionSpecs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from autoshard.exports.description import Description, patterns_text
from autoshard.layout import Grouped, Layout, Owned, Partial
from autoshard.mesh import Mesh
from autoshard.report.record import Record, placement_from


def layout_of(mesh: Mesh, use: str) -> Layout:
    """The layout of a text such as ``S(0)@dp R@tp``: sharding axes first, outer to inner."""
    parts = [part.rpartition("@") for part in use.split()]
    found = {axis: placement_from(placed) for placed, _, axis in parts if axis in mesh.axes}
    return Layout(mesh, found, [axis for _, _, axis in parts if axis in mesh.axes])


def _is_plain(layout: Layout) -> bool:
    return not any(isinstance(p, Partial | Owned | Grouped) for p in layout.placements)


def mindspore_files(found: Description) -> dict[str, str]:
    """Strategies of operations and parameters: tensor maps over one device matrix, or null."""
    plan = found.plan

    def tensor_map(layout: Layout, ndim: int) -> Any:
        return layout.to_tensor_map(ndim)[1] if _is_plain(layout) else None

    operators: dict[str, Any] = {}
    for name, choice in plan.choices.items():
        inputs = [
            tensor_map(layout_of(plan.mesh, use), len(plan.shapes[n]))
            for n, use in zip(choice.inputs, choice.uses, strict=True)
        ]
        outputs = [tensor_map(plan.layouts[n], len(plan.shapes[n])) for n in choice.outputs]
        operators[name] = {"cell": choice.fqn, "op": choice.op, "in_strategy": inputs, "out_strategy": outputs}
    parameters = {n: tensor_map(plan.layouts[n], len(plan.shapes[n])) for n in found.parameters}
    data = {"device_matrix": plan.mesh.shape, "alias_name": plan.mesh.axes, "parameters": parameters}
    return {"mindspore_strategies.json": _rows({**data, "operators": operators})}


def _rows(data: Mapping[str, Any]) -> str:
    """JSON text with one line per operator and parameter."""
    parts = []
    for key, value in data.items():
        text = json.dumps(value)
        if isinstance(value, Mapping):
            text = "{\n" + ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n  }"
        parts.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _spec(layout: Layout, ndim: int) -> str:
    """``P(("dp", "tp"), None)`` of a layout."""
    dims = [layout.axes_of(d) for d in range(ndim)]
    while dims and not dims[-1]:
        dims.pop()
    entries = ("None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes) for axes in dims)
    return re.sub("'", '"', f"P({', '.join(entries)})")


JAX_HEADER = '''"""Shardings of {title} on mesh {mesh}: a PartitionSpec per parameter, a constraint per activation."""

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {axes}

PARAMETERS = {{
{parameters}}}

ACTIVATIONS = {{  # module → sharding of its output
{activations}}}


def make_mesh(devices=None):
    """The mesh of the plan; axes are those of the specs."""
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=kinds, devices=devices)


def shard_parameters(params, mesh):
    """A flat {{name: array}}, each array placed as planned."""
    return {{name: jax.device_put(x, NamedSharding(mesh, PARAMETERS[name])) for name, x in params.items()}}


def constrain(x, module, mesh):
    """``x``, the output of a module, with the planned sharding; for use inside jit."""

    spec = ACTIVATIONS.get(module)
    return x if spec is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
'''


def jax_files(found: Description) -> dict[str, str]:
    """Python source: specs of parameters and of module outputs that are not partial sums."""
    plan = found.plan
    parameters = {
        n: _spec(plan.layouts[n], len(plan.shapes[n])) for n in found.parameters if _is_plain(plan.layouts[n])
    }
    outputs = {m: v for m, v in module_outputs(plan).items() if _is_plain(plan.layouts[v])}
    activations = {m: _spec(plan.layouts[v], len(plan.shapes[v])) for m, v in outputs.items()}
    text = JAX_HEADER.format(
        title=plan.title or "the model",
        mesh=" ".join(f"{a}={n}" for a, n in plan.mesh.sizes.items()),
        axes=json.dumps(plan.mesh.sizes),
        parameters="".join(f"    {json.dumps(n)}: {s},\n" for n, s in parameters.items()),
        activations="".join(f"    {json.dumps(n)}: {s},\n" for n, s in activations.items()),
    )
    return {"shardings.py": text}


def module_outputs(plan: Record) -> dict[str, str]:
    """Module → the last value that it makes."""
    return {c.fqn: c.outputs[0] for c in plan.choices.values() if c.fqn and c.outputs}


def partial_gaps(found: Description) -> Iterator[str]:
    """Outputs of modules that are partial sums, for which these compilers have no layout."""
    plan = found.plan
    if sums := [m for m, v in module_outputs(plan).items() if plan.layouts[v].axes_with(Partial)]:
        yield f"outputs of these modules are partial sums until they are reduced: {patterns_text(sums)}"

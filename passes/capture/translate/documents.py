"""Document masks of packed sequences: a query sees the keys of its own document."""

from __future__ import annotations

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Ref

_VIEWS = frozenset(
    {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.reshape.default, aten.expand.default}
)


def documents_of(mask: Ref, graph: Graph) -> Ref | None:
    """Integer ids [b, t] or [t] if ``mask`` [b, 1, t, t], [b, t, t] or [t, t] is ids == idsᵀ."""
    compares, shape = graph.producers.get(mask.name), graph.shape(mask)
    while compares is not None and compares.op is aten.unsqueeze.default:
        mask = compares.args[0]
        compares = graph.producers.get(mask.name)
    if compares is None or compares.op is not aten.eq.Tensor or len(shape) < 2 or shape[-1] != shape[-2]:
        return None
    inner, keys = graph.shape(mask), shape[-1]
    if inner[-2:] != shape[-2:]:
        return None
    found = set[str]()
    for operand in compares.args:
        if not isinstance(operand, Ref) or graph.types[operand.name].dtype.is_floating_point:
            return None
        found.add(_source(operand, graph).name)
    if len(found) != 1:
        return None
    (name,) = found
    of = graph.shape(name)
    forms = {_lies(operand, graph, of) for operand in compares.args}
    fits = shape in ((*of[:-1], 1, keys, keys), (*of[:-1], keys, keys))
    return Ref(name) if of[-1:] == (keys,) and len(of) in (1, 2) and forms == {"rows", "columns"} and fits else None


def _source(x: Ref, graph: Graph) -> Ref:
    """The source of ``x`` before views that keep all elements in order."""
    producer = graph.producers.get(x.name)
    while producer is not None and producer.op in _VIEWS:
        before = producer.args[0]
        if graph.types[before.name].numel != graph.types[x.name].numel or len(graph.shape(before)) < 1:
            break
        x, producer = before, graph.producers.get(before.name)
    return x


def _lies(x: Ref, graph: Graph, of: tuple[int, ...]) -> str:
    """For ``of`` [b, t]: "rows" if ``x`` is [b, t, 1], "columns" if [b, 1, t], else ""."""
    *batch, first, last = (1, *graph.shape(x))
    batch = [n for n in batch if n != 1]
    whole = [n for n in of[:-1] if n != 1]
    if batch != whole:
        return ""
    return "rows" if (first, last) == (of[-1], 1) else "columns" if (first, last) == (1, of[-1]) else ""

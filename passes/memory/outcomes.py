"""Results and saved tensors of statements that the abstract run cannot execute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.program import Statement, reads
from autoshard.passes.rules.facts import saved
from autoshard.passes.rules.rehearsal import Form, Made, Outcome


def form_bytes(form: Form) -> int:
    """Bytes of a contiguous tensor of this form."""
    return math.prod(form.shape) * form.dtype.itemsize


def of_bucket(s: Statement, forms: Sequence[Form]) -> Outcome:
    """A bucket of parameters: views of one buffer if gathered, else the parameters themselves.

    ``forms``: of its results.
    """
    sizes = tuple(map(form_bytes, forms))
    each = tuple(Made(form, ~i) for i, form in enumerate(forms))
    if s.call.fn == "gather_parameters":
        if s.call.kwargs.get("zero"):  # separate storages, so that those that the backward does not need are freed
            return Outcome(each, sizes, (), 2 * sum(sizes), sizes, 0)
        return Outcome(tuple(Made(form, ~0) for form in forms), (sum(sizes),), (), 2 * sum(sizes), sizes, 0)
    if s.call.kwargs.get("dtype") is not None:  # copies in the dtype of computation
        return Outcome(each, sizes)
    return Outcome(tuple(Made(form, i) for i, form in enumerate(forms)), ())


def guessed(
    s: Statement, graph: Graph, form: Callable[[str], Form], gradient: Callable[[str], float | None]
) -> Outcome:
    """Outcome of a statement that cannot run without data: contiguous results, saved tensors by
    rule.

    ``gradient``: bytes of an operand's gradient, None if it has none.
    """
    operands = tuple(dict.fromkeys(reads(s)))
    forms = [None if o == "_" else form(o) for o in s.outputs]
    sizes = [0 if f is None else form_bytes(f) for f in forms]
    made = tuple(None if f is None else Made(f, ~i) for i, f in enumerate(forms))
    kept: list[int] = []
    if s.node is not None and s.step is None and graph.training:
        found = saved(s.node, graph.types)
        names = [n for i, n in enumerate(reads(s)) if i in found.operands and i < len(s.node.inputs)]
        kept = [operands.index(n) for n in names]
        kept += [~slot for i, slot in enumerate(s.node.output_slots) if i in found.results]
    grads = tuple(None if (size := gradient(o)) is None else int(size) for o in operands)
    return Outcome(made, tuple(sizes), tuple(kept), sum(sizes), grads, sum(g or 0 for g in grads))

"""The combined plan of a model in pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.pipeline import Stages
from autoshard.passes.propagate.alternatives import Later
from autoshard.plans.plan import Plan
from autoshard.report.pipeline import pipeline_cost, pipeline_memory
from autoshard.report.record import Choice, Staged
from autoshard.report.text import utilisation

T = TypeVar("T")

WHOLE = "–"
"""an operation's label along the axis of stages: it runs in one of them"""


def rest(mesh: Mesh, axis: str) -> Mesh:
    """The mesh of a stage: ``mesh`` without ``axis``; a mesh of one rank if nothing is left."""
    others = {a: n for a, n in zip(mesh.axes, mesh.shape, strict=True) if a != axis}
    return Mesh(others or {axis: 1}, mesh.hardware)


def together(stages: Stages, plans: Sequence[Plan], mesh: Mesh, staged: Staged) -> Plan:
    """The combined plan on the full ``mesh``; shared values are listed as in the first stage."""
    first = plans[0]
    outputs: list[Layout | None] = [None] * len(stages.whole.outputs)
    for stage, plan in zip(stages.each, plans, strict=True):
        for position, layout in zip(stage.results, plan.outputs[len(stage.sent) :], strict=True):
            outputs[position] = layout
    backwards = [*reversed(plans)]
    plan = replace(
        first,
        mesh=mesh,
        layouts=_on(mesh, _joined(p.layouts for p in backwards)),
        collectives=(
            *(c for p in plans for c in p.collectives if c.phase == "forward"),
            *(c for p in backwards for c in p.collectives if c.phase == "backward"),
        ),
        cost=pipeline_cost(staged, mesh),
        choices={n: _labelled(c, mesh, staged.axis) for p in backwards for n, c in p.choices.items()},
        shared=_on(mesh, _joined(p.shared for p in backwards)),
        outputs=tuple(None if x is None else _whole(mesh, x) for x in outputs),
        given=tuple(sorted({name for p in plans for name in p.given} & {i.fqn for i in stages.whole.inputs})),
        shapes=_joined(p.shapes for p in backwards),
        kinds={**_joined(p.kinds for p in plans), **{n: "value" for s in stages.each for n in s.received}},
        notes=(_note(staged), *_notes(plans)),
        ties=_joined(p.ties for p in plans),
        modules=_joined(p.modules for p in backwards),
        dtypes=_joined(p.dtypes for p in backwards),
        differentiable=tuple(dict.fromkeys(n for p in plans for n in p.differentiable)),
        memory=pipeline_memory(staged, mesh.size_of(staged.axis)),
        recomputed=tuple(r for p in plans for r in p.recomputed),
        zero=_joined(p.zero for p in plans),
        shared_again=tuple(sorted({n for p in plans for n in p.shared_again})),
        staged=staged,
    )
    mfu, hfu = utilisation(plan)
    return replace(plan, cost=replace(plan.cost, mfu=mfu, hfu=hfu))


def _notes(plans: Sequence[Plan]) -> Iterator[str]:
    """Notes of the stages, without those whose first clause repeats."""
    begun: set[str] = set()
    for note in dict.fromkeys(note for p in plans for note in p.notes):
        begins = note.partition(",")[0]
        if begins not in begun:
            begun.add(begins)
            yield note


def _note(staged: Staged) -> str:
    return f"{len(staged.plans)} stages along {staged.axis}, schedule {staged.schedule}, {staged.micro_batches} micro-batches"


def _joined(parts: Iterator[Mapping[str, T]]) -> dict[str, T]:
    return {name: x for part in parts for name, x in part.items()}


def _on(mesh: Mesh, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    return {name: _whole(mesh, layout) for name, layout in layouts.items()}


def _whole(mesh: Mesh, layout: Layout) -> Layout:
    """A stage's layout on the full mesh: replicated along the axis of stages."""
    return Layout(mesh, {a: layout[a] for a in layout.mesh.axes})


def _labelled(choice: Choice, mesh: Mesh, axis: str) -> Choice:
    """A stage's choice with a label along the axis of stages."""

    def with_axis(labels: Sequence[str]) -> tuple[str, ...]:
        if mesh.ndim == 1:
            return (WHOLE,)
        at = mesh.index(axis)
        return (*labels[:at], WHOLE, *labels[at:])

    others = Later(lambda: [(with_axis(labels), seconds) for labels, seconds in choice.alternatives])
    return replace(choice, labels=with_axis(choice.labels), alternatives=others)

"""Stage boundaries: for the shortest step, or as in an earlier call of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autoshard.errors import PlanError
from autoshard.passes.ir.graph import Graph
from autoshard.passes.pipeline.choose import Boundaries
from autoshard.passes.pipeline.pieces import Pieces, weights_prepared

EACH = 16
"""most stages per rank (virtual stages) that are tried"""
BETTER = 0.002
"""least gain for one more stage per rank, as a share of the step: estimates know no better"""
GAIN = 0.05
"""least gain for a cut inside a layer, as a share of the step: equal stages are planned once"""


def boundaries(
    pieces: Pieces, schedule: str, ranks: int, batches: int, chunks: int = 1, budget: float = math.inf
) -> tuple[int, ...]:
    """Positions in the graph's nodes before which stages begin, for the shortest step.

    ``ranks`` · ``chunks`` stages, ``budget`` bytes per rank. Raises :class:`PlanError` for too few
    ops.
    """
    graph, count = pieces.graph, ranks * chunks
    if count == 1:
        return ()
    if len(pieces.places) + 1 < count:
        own = sum(n.name not in pieces.free for n in graph.nodes)
        raise PlanError(f"{count} stages: the model has {own} operations to cut between. Ask for fewer stages.")

    def shortest(places: Sequence[int], limit: float) -> tuple[Boundaries, list[int]]:
        found = pieces.cutting(pieces.between(places), schedule, ranks, batches, chunks, limit).shortest()
        return found, [places[end - 1] for end in found.ends[:-1]]

    for limit in (budget, math.inf):  # stages may fit where estimates do not
        try:
            found, cuts = shortest(pieces.places, limit)
            break
        except PlanError:
            if limit == math.inf:
                raise
    blocks = pieces.block_ends
    if len(blocks) + 1 >= count:
        try:
            whole, between = shortest(blocks, limit)
        except PlanError:  # a block does not fit
            return tuple(cuts)
        if whole.seconds <= found.seconds * (1 + GAIN):
            return tuple(between)
    return tuple(cuts)


def stages_per_rank(pieces: Pieces, schedule: str, ranks: int, batches: int, budget: float = math.inf) -> int:
    """The number of stages per rank with the shortest interleaved step: 2 to :data:`EACH`.

    More stages shorten the bubble and send more messages; ties go to fewer. 2 if none fits
    ``budget``.
    """
    parts, found, least = pieces.between(pieces.block_ends), 2, math.inf
    for chunks in range(2, min(EACH, len(parts) // ranks) + 1):
        try:
            step = pieces.cutting(parts, schedule, ranks, batches, chunks, budget).shortest().seconds
        except PlanError:
            continue
        if step < least * (1 - BETTER):
            found, least = chunks, step
    return found


def following(pieces: Pieces, homes: Mapping[str, tuple[int, ...]], count: int) -> tuple[int, ...]:
    """Boundaries of another graph of the same model that keep parameters in their stages ``homes``.

    Raises :class:`PlanError` if ops read the stages' parameters in another order, or write one that
    several stages hold.
    """
    graph, free = pieces.graph, pieces.free
    for fqn in graph.mutations:
        if len(held := homes.get(fqn, ())) > 1:
            raise PlanError(
                f"stages: {fqn!r} is written by this call, and the call that the stages were made for left copies in stages "
                f"{', '.join(map(str, held))}. Compile with an example of the call that writes it, or ask for fewer stages."
            )
    kept = (i for i in graph.inputs if i.kind in ("parameter", "buffer"))
    stages = {i.name: frozenset(homes[i.fqn]) for i in kept if i.fqn in homes}
    found, stage, everywhere = list[int](), 0, frozenset(range(count))
    for place, node in enumerate(graph.nodes):
        known = everywhere.intersection(*(stages.get(n, everywhere) for n in node.inputs))
        if node.name in free:  # computed where it is read, such as a parameter's cast
            stages |= dict.fromkeys(node.outputs, known)
            continue
        least = min((k for k in known if k >= stage), default=None)
        if least is None:
            read = sorted({k for n in node.inputs for k in stages.get(n, ())})
            raise PlanError(
                f"stages: {node.op} in {node.fqn or '(root)'} at {node.source} reads a parameter of stage {read[0]} after "
                f"one of stage {max(stage, read[-1])}, other than in the call that the stages were made for"
            )
        found += [place] * (least - stage)
        stage = least
    return (
        *found,
        *[len(graph.nodes)] * (count - 1 - len(found)),
    )  # last stages may be empty, as when only an encoder runs


def with_parameters(graph: Graph, cuts: Sequence[int]) -> tuple[int, ...]:
    """``cuts`` moved forward where a stage would train nothing: optimizers refuse to be empty.

    Without a backward: where it has no parameter of its own, by which later calls find their
    stages; a tied head does not count.
    """
    parameters = [i.name for i in graph.inputs if i.kind == "parameter"]
    trained = {n for n in parameters if (graph.types[n].grad if graph.training else len(graph.uses[n]) == 1)}
    reads = [place for place, node in enumerate(graph.nodes) if any(name in trained for name in node.inputs)]
    found, end, prepared = list(cuts), len(graph.nodes), weights_prepared(graph)
    for k in reversed(range(len(found))):
        if not any(found[k] <= place < end for place in reads):
            before = [place for place in reads if place < min(found[k], end)]
            if not before or (k and before[-1] <= found[k - 1] and len(before) < k + 1):
                return tuple(cuts)
            found[k] = next((place for place in range(before[-1], 0, -1) if place not in prepared), 0)
        end = found[k]
    return tuple(found) if all(a < b for a, b in zip([0, *found], found, strict=False)) else tuple(cuts)

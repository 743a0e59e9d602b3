"""The search for the cheapest assignment of a graph, with and without a memory limit.

:class:`Planner` solves the cost network of one graph again and again: without a limit, under
limits of bytes at the end of the forward and of the backward, restricted (all mesh axes alike,
whole blocks recomputed), or for least memory. :func:`decode_assignment` turns a solution of the
network into layouts and strategies."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from autoshard.errors import PlanError
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment, Strategy, cached_layout
from autoshard.passes.ir.graph import Graph, Ref
from autoshard.passes.propagate.activation_memory import NEEDED, RECONVERTED, SavedTensorTables, is_memory_view
from autoshard.passes.propagate.edges import EdgeTables
from autoshard.passes.propagate.embedding_tables import GroupedOpSpaces, assign_owners, choice_index
from autoshard.passes.propagate.hints import Constraint, DimLimit
from autoshard.passes.propagate.live_memory import LiveMemory
from autoshard.passes.propagate.named_strategies import FREE, InfeasibleStrategyError, NamedStrategy, without_hinted
from autoshard.passes.propagate.network import BuiltNetwork, LayoutNetwork, NetworkVariable
from autoshard.passes.propagate.recompute import Recompute, offered_zero_stages, recompute_offer, with_model_checkpoints
from autoshard.passes.search import CostNetwork, LinearRow, Prepared, Solution, solve
from autoshard.passes.search.arrays import Matrix, map_entries
from autoshard.passes.search.network import FULL, Effort


def decode_assignment(network: LayoutNetwork, solution: Solution) -> Assignment:
    """The layouts, strategies and recompute states that ``solution`` chose."""
    chosen: dict[str, Any] = {}
    tags: dict[str, int] = {}
    places: dict[str, int] = {}
    zero: dict[str, int] = {}
    for (name, variable), state in zip(network.variables.items(), solution.choice, strict=True):
        tag, places[name] = divmod(state, len(variable.choices))
        chosen[name], tags[name] = variable.choices[places[name]], variable.tags[tag]
        if variable.stages and variable.stages[tag]:
            zero[name.removeprefix("shared:")] = variable.stages[tag]
    layouts = {i.name: cached_layout(network.mesh, chosen[i.name]) for i in network.graph.inputs}
    choices: dict[str, tuple[Strategy, ...]] = {}
    again: dict[str, int] = {}
    made: dict[tuple[int, int, int], Layout] = {}  # equal layers share one op space
    for node in network.graph.nodes:
        at = f"node:{node.name}"
        choices[node.name] = chosen[at]
        space, passive = network.spaces[node], node.name in network.views
        for slot, name in enumerate(node.outputs):
            if (key := (id(space), slot, places[at])) not in made:
                made[key] = cached_layout(network.mesh, space.outputs[slot][places[at]])
            layouts[name] = made[key]
        if tags[at] > (NEEDED if passive else 0):
            again[node.name] = 1 if passive else tags[at]
    shared = {
        v.removeprefix("shared:"): cached_layout(network.mesh, s) for v, s in chosen.items() if v.startswith("shared:")
    }
    outputs = tuple(
        cached_layout(network.mesh, chosen[f"out:{i}"]) if isinstance(out, Ref) else None
        for i, out in enumerate(network.graph.outputs)
    )
    remade = frozenset(v for v in shared if tags[f"shared:{v}"] == RECONVERTED)
    given = frozenset(network.constraints)
    found = layouts, shared, choices, outputs, solution, given, again, remade, zero
    return assign_owners(Assignment(network.graph, network.mesh, *found), network.constraints)


def matching_states(network: LayoutNetwork, name: str, variable: NetworkVariable, assignment: Assignment) -> list[int]:
    """The states of a variable that encode ``assignment`` without recomputation."""
    kind, _, rest = name.rpartition(":")
    if kind == "way":
        return list(range(variable.size))
    if kind == "node":
        chosen: Any = assignment.choices[rest]
    elif kind == "shared":
        chosen = assignment.shared[rest].placements
    elif kind == "out":
        layout = assignment.outputs[int(rest)]
        chosen = None if layout is None else layout.placements
    else:
        chosen = variable.choices[0] if kind == "mutation" else assignment.layouts[name].placements
    key = "place", id(variable.choices), chosen
    if key not in network.known:
        network.known[key] = choice_index(chosen, variable.choices)
    place, count = network.known[key], len(variable.choices)
    most = NEEDED if kind == "shared" or (kind == "node" and rest in network.views) else 0
    if kind == "shared" and NEEDED not in variable.tags:  # its copies are converted again in any case
        most = RECONVERTED
    stages = variable.stages or (None,) * len(variable.tags)
    wanted = assignment.zero.get(rest, 0) if variable.stages else None
    allowed = (t for t, tag in enumerate(variable.tags) if tag <= most or len(variable.tags) == 1)
    return [t * count + place for t in allowed if stages[t] == wanted]


log = logging.getLogger("autoshard.plan")

PrepareSearch = Callable[
    [LayoutNetwork, CostNetwork, tuple[LinearRow, ...], Sequence[Hashable | None] | None], Prepared
]
"""prepares a search: (network, costs, rows, labels of equal variables) → solver"""

TIE_BYTES_PER_SECOND = 1e-3
"""bytes that a second is worth in :meth:`Planner.least`: breaks ties between equal memory"""
LIMITED_EFFORT = 0.1
"""effort of a search under a limit, as a share of the effort of a proof"""


def _infeasible_message(constraints: Mapping[str, Constraint | DimLimit], mesh: Mesh) -> str:
    """Error text: a named strategy leaves some operation no layouts, with or without hints."""
    hints = sorted({f"{c.pattern!r} (on {c.name})" for c in constraints.values() if isinstance(c, Constraint)})
    what = "like= and hints= ask for cannot be met together" if hints else "like= asks for cannot be met"
    told = f" Hints: {', '.join(hints[:3])}{f' and {len(hints) - 3} more' if len(hints) > 3 else ''}." if hints else ""
    less = (
        [f"like= for one axis of the mesh, such as like={{{mesh.axes[-1]!r}: 'megatron-sp'}}"] if mesh.ndim > 1 else []
    )
    less += ["fewer hints"] if hints else []
    ask = f"Ask for less: {', or '.join(less)}" if less else "Ask for another plan, or none"
    return f"what {what}: an operation is left without layouts that its neighbours can give or take.{told} {ask}."


@dataclass(frozen=True)
class SearchSettings:
    """How one graph is searched as a part of a larger search."""

    micro_batches_held: int = 0
    """of a pipeline stage: micro-batches in flight, whose activations it holds at once"""
    keep_gathered: bool = True
    """whether parameters may stay gathered between forward and backward (ZeRO-1, ZeRO-2)"""
    effort: Effort = FULL
    """work limit of the search"""


ALONE = SearchSettings()


class Planner:
    """Searches of one graph on one mesh. Op spaces, tables and networks are built once for all."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        constraints: Mapping[str, Constraint],
        strategy: NamedStrategy = FREE,
        optimizer: str = "adamw",
        recompute: Recompute = "none",
        settings: SearchSettings = ALONE,
        given: Mapping[str, Layout] | None = None,
        carried: frozenset[str] = frozenset(),
    ) -> None:
        """``constraints``: value → layouts; they win over ``strategy``. ``optimizer``: whose state
        memory counts. ``given``: layouts of inputs that arrive sharded. ``carried``: inputs returned
        by an earlier call (KV caches), whose layouts the search chooses."""
        self.hinted, self.recompute, self.settings = constraints, recompute, settings
        strategy = without_hinted(strategy, constraints, graph, mesh)
        self.optimizer, self.micro_batches_held = optimizer, settings.micro_batches_held
        self.keep_gathered, self.effort, self.carried = settings.keep_gathered, settings.effort, carried
        self.prepare: PrepareSearch = _prepare_single
        self.given, self.zero = given or {}, strategy.zero
        self.graph, self.mesh, self.constraints = graph, mesh, {**strategy.limits, **constraints}
        self.spaces, self.keeps = GroupedOpSpaces(graph, mesh, strategy.asked), SavedTensorTables(graph, mesh)
        recompute = with_model_checkpoints(graph, recompute)
        self.offer = recompute_offer(graph, recompute, strategy.regathers)
        self.searches_recompute = graph.training and recompute == "auto"
        """whether the search chooses per operation what is recomputed"""
        self.recomputes_nothing = not graph.training or (recompute in ("auto", "none") and not strategy.regathers)
        """whether nothing has to be recomputed"""
        self.prices: tuple[float, ...] = ()
        """multipliers of the rows in the last search: the start of the next"""
        self._known: dict[Any, Any] = {}
        """see :attr:`Network.known`"""
        self._tables: EdgeTables | None = None
        """of the unlimited network; most serve the limited network, too"""
        self._free: LayoutNetwork | None = None
        """the network of the last :meth:`cheapest`"""
        self._limited: tuple[LayoutNetwork, BuiltNetwork] | None = None
        self._unrestricted: tuple[LayoutNetwork, BuiltNetwork] | None = None
        """the limited network before a restriction"""
        self._moments: LiveMemory | None = None
        """of the limited network"""
        self._restriction = ""
        """the restriction: "even", "blocks", or the operation of :meth:`at`; "": none"""
        self._moment = ""
        """the operation of :meth:`at`"""
        self._prepared: dict[str, Prepared] = {}
        """restriction → the network with its memory rows"""
        self._loosest_limit = 0.0
        """loosest memory limit searched, in bytes: linear sums may exceed the simulated peak"""

    def under(self, strategy: NamedStrategy) -> Planner:
        """A planner of the same graph under another named strategy."""
        rest = self.settings, self.given, self.carried
        return Planner(self.graph, self.mesh, self.hinted, strategy, self.optimizer, self.recompute, *rest)

    def cheapest(self, rough: bool = False) -> Assignment:
        """The fastest assignment without a memory limit; :func:`with_proven_bound` adds its lower bound.
        ``rough``: stop near the optimum; :meth:`refined` continues."""
        network, built = self.network(limited=not self.recomputes_nothing)
        effort = replace(self.effort, rough=rough)
        try:
            found = self.prepare(network, built.network, built.hiding, built.alike).solve(effort=effort)
        except PlanError as error:
            if not self.spaces.asked:
                raise
            raise InfeasibleStrategyError(_infeasible_message(self.constraints, self.mesh)) from error
        self.prices, self._free = found.prices, network
        return decode_assignment(network, found)

    def refined(self, rough: Assignment) -> Assignment:
        """``rough`` searched to the optimum; ``rough`` itself if it is optimal already."""
        search_on = rough.solution.search_on
        if search_on is None or self._free is None:
            return rough
        found = search_on()
        self.prices = found.prices
        if found.choice == rough.solution.choice:
            return replace(rough, solution=found)
        return decode_assignment(self._free, found)

    def within(self, limit: float, budget: float | None = None, then: float = math.inf) -> tuple[Assignment, float]:
        """The fastest assignment under memory limits, and its bytes at the end of the forward.

        ``limit``: bytes per rank at the end of the forward; ``budget``: at the end of the backward
        (None: ``limit``); ``then``: during the operation of :meth:`at`. The result has no lower
        bound. Raises :class:`~autoshard.errors.PlanError` if nothing fits.
        """
        moment = (then,) if self._moment else ()
        self._loosest_limit = max(self._loosest_limit, limit)
        found = self._under(*moment, limit, limit if budget is None else budget)
        network, built = self.network(limited=True)
        return decode_assignment(network, replace(found, prove=None, lower_bound=0.0)), _forward_end_bytes(built, found)

    def bound(self, budget: float) -> float:
        """Lower bound in seconds of assignments within ``budget`` bytes per rank; 0: none exist.
        The limit at the end of the forward is the loosest limit searched, if that is larger."""
        if self._restriction != self._moment:
            self.lift_restrictions()
        most = max(budget, self._loosest_limit)
        moment = (most,) if self._moment else ()
        try:
            return max(0.0, self._under(*moment, most, budget, rough=True).proven().lower_bound)
        except PlanError:
            return 0.0

    def _under(self, *limits: float, rough: bool = False) -> Solution:
        """The fastest solution under limits in bytes; its lower bound may be unproven. ``rough``:
        near the optimum, enough for a bound."""
        self._free = None
        prepared = self._with_bytes(*self.network(limited=True))
        _, built = self.network(limited=True)
        every = *(row.limit for row in built.hiding), *limits
        start = (*self.prices, *(0.0,) * (len(every) - len(self.prices))) if self.prices else None
        effort = replace(self.effort, part=min(LIMITED_EFFORT, self.effort.part), rough=rough)
        found = prepared.solve(every, effort, prices=start)
        self.prices = found.prices
        return found

    def at(self, moment: str) -> None:
        """Lift all restrictions, and limit the memory while operation ``moment`` runs."""
        if moment != self._moment:
            self.lift_restrictions()
            self._prepared.clear()
            self._restriction, self._moment = moment, moment

    def lift_restrictions(self) -> None:
        """Lift all restrictions except the limit of :meth:`at`."""
        self._limited, self._unrestricted = self._unrestricted or self._limited, None
        self.prices, self._restriction = (), self._moment

    def bytes_at(self, assignment: Assignment, moment: str) -> tuple[float, float]:
        """Bytes of a limited search's result during an operation, and at the end of the forward."""
        network, built = self.network(limited=True)
        then = self._live_row(moment, network, built)
        return then.used(built.network, assignment.solution.choice), _forward_end_bytes(built, assignment.solution)

    def _live_row(self, moment: str, network: LayoutNetwork, built: BuiltNetwork) -> LinearRow:
        """Row of the bytes held during an operation: of all variables before it, and of inputs."""
        row, names = built.kept[0], list(network.variables)
        last, inputs = names.index(f"node:{moment}"), {value.name for value in self.graph.inputs}
        nodes = (
            x if i <= last or name in inputs else None for i, (name, x) in enumerate(zip(names, row.nodes, strict=True))
        )
        edges = (x if j <= last else None for x, (_, j, _) in zip(row.edges, built.network.edges, strict=True))
        return LinearRow(tuple(nodes), tuple(edges), 0.0)

    def _with_bytes(self, network: LayoutNetwork, built: BuiltNetwork) -> Prepared:
        if self._restriction not in self._prepared:
            kept = tuple(replace(row, limit=0.0) for row in built.kept)
            moment = (self._live_row(self._moment, network, built),) if self._moment else ()
            prepared = (
                self._prepared[""].restricted(built.network.nodes)
                if "" in self._prepared
                else self.prepare(network, built.network, (*built.hiding, *moment, *kept), built.alike)
            )
            if self.prepare is _prepare_single:  # the folded tables take most memory: keep one copy
                prepared = prepared.lean()
                hiding, bytes_ = prepared.rows[: len(built.hiding)], prepared.rows[-len(kept) :]
                self._limited = network, replace(built, network=prepared.network, hiding=hiding, kept=bytes_)
            self._prepared[self._restriction] = prepared
        return self._prepared[self._restriction]

    def least(self, excess: np.ndarray | None = None, price: float = TIE_BYTES_PER_SECOND) -> tuple[Assignment, float]:
        """The assignment with least mean memory, and its bytes at the end of the forward.

        ``excess`` [operations + 1]: log-weight per moment, optimizer's step last. ``price``: bytes
        per second; small, so it breaks ties only. Overlap is ignored.
        """
        network, built = self.network(limited=True)
        moments = self._moments_of(network, built)
        row = moments.row(moments.weights(np.zeros(len(self.graph.nodes) + 1) if excess is None else excess))
        seconds, priced = built.network, partial(_bytes_plus_time, price)
        nodes = tuple(priced(s, row.nodes[i]) for i, s in enumerate(seconds.nodes))
        edges = tuple((a, b, map_entries(priced, s, row.edges[i])) for i, (a, b, s) in enumerate(seconds.edges))
        found = self.prepare(network, CostNetwork(nodes, edges), (), built.alike).solve()
        over = (max(0.0, x.used(seconds, found.choice) - x.limit) * x.price for x in built.hiding)
        cost = seconds.cost(found.choice) + sum(over)
        found = replace(found, cost=cost, lower_bound=0.0, exact=False, prove=None, search_on=None)
        return decode_assignment(network, found), _forward_end_bytes(built, found)

    def _moments_of(self, network: LayoutNetwork, built: BuiltNetwork) -> LiveMemory:
        if self._moments is None or self._moments.built.network.edges is not built.network.edges:
            self._moments = LiveMemory(network, built)
        return self._moments

    def restrict_evenly(self) -> None:
        """Restrict every choice to the same strategy along all axes, as on a mesh of one axis."""
        self._restrict("even", lambda _, v: np.tile([len(set(choice)) == 1 for choice in v.choices], len(v.tags)))

    def recompute_by_block(self) -> None:
        """Restrict to recomputing whole repeated modules, so that only one is live at a time."""
        blocks = recompute_offer(self.graph, "blocks")
        again = {f"node:{n.name}": blocks(n) == (2,) for n in self.graph.nodes if not is_memory_view(n)}
        self._restrict(
            "blocks",
            lambda name, v: np.repeat([again.get(name, tag == 2) == (tag == 2) for tag in v.tags], len(v.choices)),
        )

    def _restrict(self, to: str, allowed: Callable[[str, NetworkVariable], np.ndarray]) -> None:
        """``allowed``: (name, variable) → mask over its states."""
        self._unrestricted = network, built = self._unrestricted or self.network(limited=True)
        pairs = zip(network.variables.items(), built.network.nodes, strict=True)
        nodes = tuple(np.where(allowed(name, v), seconds, np.inf) for (name, v), seconds in pairs)
        self.prices, self._restriction = (), to
        self._limited = network, replace(built, network=replace(built.network, nodes=nodes))

    def held(self, assignment: Assignment) -> float:
        """Bytes of ``assignment``, a result of :meth:`cheapest`, at the end of the forward."""
        network, built = self.network(limited=True)
        if not self.recomputes_nothing:  # it was found in this network
            return _forward_end_bytes(built, assignment.solution)
        allowed = [tuple(matching_states(network, name, v, assignment)) for name, v in network.variables.items()]
        made: dict[Any, np.ndarray] = {}

        def forbidden(i: int, j: int, table: Matrix) -> np.ndarray:
            key = id(table), allowed[i], allowed[j]
            if key not in made:
                made[key] = np.where(np.isinf(table[np.ix_(allowed[i], allowed[j])]), np.inf, 0.0)
            return made[key]

        edges = tuple((i, j, forbidden(i, j, table)) for i, j, table in built.network.edges)
        found = solve(CostNetwork(tuple(np.zeros(len(states)) for states in allowed), edges))
        choice = tuple(states[s] for states, s in zip(allowed, found.choice, strict=True))
        return _forward_end_bytes(built, replace(found, choice=choice))

    def network(self, limited: bool) -> tuple[LayoutNetwork, BuiltNetwork]:
        """The network; ``limited`` (then cached): with memory rows and recompute states."""
        if limited and self._limited is not None:
            return self._limited
        what = self.graph, self.mesh, self.constraints, self.spaces, self.keeps
        asked = self.constraints.keys() if self.keep_gathered else self.graph.parameters
        stages = offered_zero_stages(self.graph, self.mesh, self.zero, asked, limited)
        more = self.optimizer, self.given, stages, max(1, self.micro_batches_held), self.carried
        network = LayoutNetwork(*what, self.offer if limited else None, *more, known=self._known)
        tables = self._tables or EdgeTables(self.graph, self.mesh)
        built = network.build(tables)
        self._tables = None if limited else tables  # no other network follows the limited one
        states, (nodes, edges) = sum(map(len, built.network.nodes)), (built.network.nodes, built.network.edges)
        log.info("cost network: %d variables, %d states, %d edges", len(nodes), states, len(edges))
        if limited:
            self._limited = network, built
        return network, built


def with_proven_bound(assignment: Assignment) -> Assignment:
    """``assignment`` with the proven lower bound of its solution."""
    return replace(assignment, solution=assignment.solution.proven())


def _prepare_single(
    network: LayoutNetwork, costs: CostNetwork, rows: tuple[LinearRow, ...], alike: Sequence[Hashable | None] | None
) -> Prepared:
    return Prepared(costs, rows, alike)


def _forward_end_bytes(built: BuiltNetwork, found: Solution) -> float:
    return built.kept[0].used(built.network, found.choice)


def _bytes_plus_time(price: float, seconds: np.ndarray, held: np.ndarray | None) -> np.ndarray:
    """Bytes plus seconds times ``price``; infinite seconds stay infinite."""
    return seconds * price + (0.0 if held is None else held)

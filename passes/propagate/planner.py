"""The search for the cheapest assignment of a graph, with and without a memory limit.
:class:`Planner` solves the cost network of one graph again and again: without a limit, within rows
of the bytes live at some moments (cutting planes), or for least memory. :func:`decode_assignment`
turns a solution of the network into layouts and strategies."""

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
from autoshard.passes.propagate.activation_memory import NEEDED, RECONVERTED, SavedTensorTables
from autoshard.passes.propagate.edges import EdgeTables
from autoshard.passes.propagate.embedding_tables import GroupedOpSpaces, assign_owners
from autoshard.passes.propagate.hints import Constraint, DimLimit
from autoshard.passes.propagate.live_memory import LiveMemory
from autoshard.passes.propagate.named_strategies import FREE, InfeasibleStrategyError, NamedStrategy, without_hinted
from autoshard.passes.propagate.network import BuiltNetwork, LayoutNetwork
from autoshard.passes.propagate.recompute import Recompute, offered_zero_stages, recompute_offer, with_model_checkpoints
from autoshard.passes.search import CostNetwork, LinearRow, Prepared, Solution
from autoshard.passes.search.arrays import map_entries
from autoshard.passes.search.limits import OUTER_LIMITS
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


log = logging.getLogger("autoshard.plan")

PrepareSearch = Callable[
    [LayoutNetwork, CostNetwork, tuple[LinearRow, ...], Sequence[Hashable | None] | None], Prepared
]
"""prepares a search: (network, costs, rows, labels of equal variables) → solver"""

TIE_BYTES_PER_SECOND = 1e-3
"""bytes that a second is worth in :meth:`Planner.least`: breaks ties between equal memory"""
FORWARD_END = "end of the forward"
"""the moment at which all that is saved is there, and nothing is recomputed yet"""


@dataclass
class MomentCut:
    """A cutting plane: a row of the bytes live at a moment, and its limit as simulations tell it.
    The row approximates the simulation, so the limit is exact for the plan that set it."""

    row: LinearRow
    limit: float = math.inf
    least_above: float = math.inf
    """least bytes, by the row, of a plan that is above the budget at this moment"""
    most_fitting: float = 0.0
    """most bytes, by the row, of a plan within the budget"""

    def learn(self, held: float, live: float, budget: float, fits: bool) -> bool:
        """Learn of a plan: ``held`` bytes by the row, ``live`` simulated; whether the limit changed
        much."""
        old, exact = self.limit, budget - (live - held)
        if live > budget:
            self.least_above, self.limit = min(self.least_above, held), min(old, exact)
        elif fits:
            self.most_fitting = max(self.most_fitting, held)
            if exact > old:
                self.limit = min(exact, (old + self.least_above) / 2)
        self.limit = max(self.limit, self.most_fitting)
        return self.limit != old and (not fits or self.limit - old > OUTER_LIMITS.close_limits * budget)


def _infeasible_message(constraints: Mapping[str, Constraint | DimLimit], mesh: Mesh) -> str:
    """Error text: a named strategy leaves some operation no layouts, with or without hints."""
    hints = sorted({f"{c.pattern!r} (on {c.name})" for c in constraints.values() if isinstance(c, Constraint)})
    what = "like= and hints= cannot be met together" if hints else "like= cannot be met"
    told = f" Hints: {', '.join(hints[:3])}{f' and {len(hints) - 3} more' if len(hints) > 3 else ''}." if hints else ""
    less = (
        [f"like= for one axis of the mesh, such as like={{{mesh.axes[-1]!r}: 'megatron-sp'}}"] if mesh.ndim > 1 else []
    )
    less += ["fewer hints"] if hints else []
    ask = f"Ask for less: {', or '.join(less)}" if less else "Ask for another strategy, or none"
    return f"{what}: an operation has no layouts left that its neighbours can give or take.{told} {ask}."


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
        self._moments: LiveMemory | None = None
        """of the limited network"""
        self._cuts: dict[str, MomentCut] = {}
        """by moment; see :meth:`cut`"""
        self._fitting: list[tuple[int, ...]] = []
        """choices of plans within the budget"""
        self._spare = [0.0, 0.0]
        """most bytes by which sums at the end of each pass exceed the simulated peak"""
        self._least_spare = (0.0, 0.0)
        """the same of sums without workspace, which no simulation is known to exceed"""
        self._bounds: dict[tuple[float, tuple[float, float]], float] = {}
        """by budget and spare bytes; see :meth:`bound`"""
        self._prepared: Prepared | None = None
        """the limited network with its rows"""

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

    def cut(self, live: Mapping[str, float], budget: float, simulated: Assignment) -> bool:
        """Cut off a plan above ``budget`` by the row of the moment of its peak; whether a limit
        changed much. ``live``: moment (operation; "": the optimizer's step; :data:`FORWARD_END`)
        → simulated bytes of ``simulated``, a result of a limited search. Limits are exact for
        the plan that is cut off, and loosened after a plan that fits."""
        peak, choice = max(live, key=live.__getitem__), simulated.solution.choice
        network, fits = self.network(limited=True)[1].network, live[peak] <= budget
        if fits:
            self._fitting.append(choice)
        elif peak not in self._cuts:
            cut = self._cuts[peak] = MomentCut(self._row_at(peak))
            cut.most_fitting = max((cut.row.used(network, other) for other in self._fitting), default=0.0)
            self._prepared = None
        pairs = [(cut, live[moment]) for moment, cut in self._cuts.items() if moment in live]
        moved = [cut.learn(cut.row.used(network, choice), then, budget, fits) for cut, then in pairs]
        beyond = [row.used(network, choice) - live[peak] for row in self.network(limited=True)[1].kept]
        moved += [new - old > OUTER_LIMITS.close_limits * budget for new, old in zip(beyond, self._spare, strict=True)]
        self._spare = [max(pair) for pair in zip(beyond, self._spare, strict=True)]
        return any(moved)

    def loosen(self, budget: float) -> bool:
        """Raise limits that no plan meets halfway to the plans cut off; whether one rose much."""
        rises = [(cut, (cut.least_above - cut.limit) / 2) for cut in self._cuts.values()]
        for cut, rise in rises:
            cut.limit += rise if math.isfinite(rise) else 0.0
        return any(OUTER_LIMITS.close_limits * budget < rise < math.inf for _, rise in rises)

    def forget_cuts(self) -> None:
        """Lift the limits of all moments."""
        self._cuts, self._fitting, self._prepared, self.prices = {}, [], None, ()

    def within(self, budget: float, slack: float = 0.0) -> Assignment:
        """The fastest assignment within all rows, with the end of the forward and of the backward in
        ``budget`` bytes per rank; without a lower bound. PlanError: nothing fits. ``slack``: share of
        the budget by which sums at both ends may exceed it, as they may exceed a simulated peak."""
        spare = [max(x, slack * budget) for x in self._spare]
        found = self._under(budget, [cut.limit for cut in self._cuts.values()], spare)
        return decode_assignment(self.network(limited=True)[0], replace(found, prove=None, lower_bound=0.0))

    def learn(self, simulated: Assignment, peak: float) -> None:
        """Widen the limits of :meth:`bound` where the simulated ``peak`` of a result of a limited search
        is below what their rows count."""
        built, choice = self.network(limited=True)[1], simulated.solution.choice
        beyond = (row.used(built.network, choice) - peak for row in built.least_kept)
        first, last = (max(pair) for pair in zip(beyond, self._least_spare, strict=True))
        self._least_spare = first, last

    def bound(self, budget: float) -> float:
        """Lower bound in seconds of assignments within ``budget`` bytes per rank; 0: none exist. At
        both ends each holds no more than its peak, as all simulations say, unproven. Other rows
        may exceed it."""
        if (key := (budget, self._least_spare)) not in self._bounds:
            network, built = self.network(limited=True)
            limits = (*(row.limit for row in built.hiding), *(budget + more for more in self._least_spare))
            rows = (*built.hiding, *(replace(row, limit=0.0) for row in built.least_kept))
            try:
                prepared = self.prepare(network, built.network, rows, built.alike)
                found = prepared.solve(limits, self._limited_effort(rough=True), self._start(len(limits)))
                self._bounds[key] = max(0.0, found.proven().lower_bound)
            except PlanError:
                self._bounds[key] = 0.0
        return self._bounds[key]

    def _under(self, budget: float, limits: Sequence[float], spare: Sequence[float]) -> Solution:
        """The fastest solution, perhaps without proof. ``spare``: bytes beyond ``budget`` at both
        ends."""
        self._free = None
        prepared = self._prepared = self._prepared or self._with_rows()
        built = self.network(limited=True)[1]
        every = (*(row.limit for row in built.hiding), *(budget + more for more in spare), *limits)
        found = prepared.solve(every, self._limited_effort(), self._start(len(every)))
        self.prices = found.prices
        return found

    def _start(self, rows: int) -> tuple[float, ...] | None:
        """The last search's prices for the first rows of the next one."""
        return (*self.prices, *(0.0,) * rows)[:rows] if self.prices else None

    def _limited_effort(self, rough: bool = False) -> Effort:
        """``rough``: near the optimum, enough for a bound."""
        return replace(self.effort, part=min(OUTER_LIMITS.limited_effort, self.effort.part), rough=rough)

    def _with_rows(self) -> Prepared:
        network, built = self.network(limited=True)
        rows = (
            *built.hiding,
            *(replace(row, limit=0.0) for row in built.kept),
            *(cut.row for cut in self._cuts.values()),
        )
        prepared = self.prepare(network, built.network, rows, built.alike)
        if self.prepare is _prepare_single:  # the folded tables take most memory: keep one copy
            prepared, first = prepared.lean(), len(built.hiding)
            last = first + len(built.kept)
            hiding, kept, cuts = prepared.rows[:first], prepared.rows[first:last], prepared.rows[last:]
            self._limited = network, replace(built, network=prepared.network, hiding=hiding, kept=kept)
            for cut, row in zip(self._cuts.values(), cuts, strict=True):
                cut.row = row
        return prepared

    def _row_at(self, moment: str) -> LinearRow:
        """Bytes live at a moment, exact but for what only a simulation knows."""
        network, built = self.network(limited=True)
        if moment == FORWARD_END:
            return replace(built.kept[0], limit=0.0)
        weights = np.zeros(len(self.graph.nodes) + 1)
        weights[next((i for i, node in enumerate(self.graph.nodes) if node.name == moment), -1)] = 1.0
        return self._moments_of(network, built).row(weights)

    def least(self, excess: np.ndarray | None = None, price: float = TIE_BYTES_PER_SECOND) -> Assignment:
        """The assignment with least mean memory; ignores overlap. ``excess`` [operations + 1]:
        log-weight per moment, optimizer's step last. ``price``: bytes per second, small, to
        break ties."""
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
        return decode_assignment(network, found)

    def _moments_of(self, network: LayoutNetwork, built: BuiltNetwork) -> LiveMemory:
        if self._moments is None or self._moments.built.network.edges is not built.network.edges:
            self._moments = LiveMemory(network, built)
        return self._moments

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
    return replace(assignment, solution=assignment.solution.proven())


def _prepare_single(
    network: LayoutNetwork, costs: CostNetwork, rows: tuple[LinearRow, ...], alike: Sequence[Hashable | None] | None
) -> Prepared:
    return Prepared(costs, rows, alike)


def _bytes_plus_time(price: float, seconds: np.ndarray, held: np.ndarray | None) -> np.ndarray:
    """Bytes plus seconds times ``price``; infinite seconds stay infinite."""
    return seconds * price + (0.0 if held is None else held)

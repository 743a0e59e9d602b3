"""The search for the cheapest assignment of a graph, with and without a memory limit."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from autoshard.errors import PlanError
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate.chosen import assigned, states_of
from autoshard.passes.propagate.edges import EdgeTables
from autoshard.passes.propagate.experts import AskedTooMuchError
from autoshard.passes.propagate.hints import Constraint, Limit
from autoshard.passes.propagate.keep import KeepTables, is_passive
from autoshard.passes.propagate.moments import Moments
from autoshard.passes.propagate.network import Built, Network, Variable
from autoshard.passes.propagate.op_space import AskedOf
from autoshard.passes.propagate.prices.zero import offered
from autoshard.passes.propagate.recompute import Recompute, hinted, offer
from autoshard.passes.propagate.ways import SpacesWithWays
from autoshard.passes.search import CostNetwork, Prepared, Row, Solution, solve
from autoshard.passes.search.folded import Matrix, mapped
from autoshard.passes.search.network import FULL, Effort

log = logging.getLogger("autoshard.plan")

Prepare = Callable[[Network, CostNetwork, tuple[Row, ...], Sequence[Hashable | None] | None], Prepared]
"""prepares a search: (network, costs, rows, labels of equal variables) → solver"""

LITTLE = 1e-3
"""bytes that a second is worth in :meth:`Planner.least`: breaks ties between equal memory"""
LIMITED = 0.1
"""effort of a search under a limit, as a share of the effort of a proof"""


def propagate(graph: Graph, mesh: Mesh, constraints: Mapping[str, Constraint | Limit]) -> Assignment:
    """The cheapest assignment of ``graph`` on ``mesh`` under ``constraints``, without memory limit.

    Raises :class:`~autoshard.errors.PlanError` if none satisfies them.
    """
    return proven(Planner(graph, mesh, constraints).cheapest())


def _asked_too_much(constraints: Mapping[str, Constraint | Limit], mesh: Mesh) -> str:
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


class Planner:
    """Searches of one graph on one mesh. Op spaces, tables and networks are built once for all."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        constraints: Mapping[str, Constraint | Limit],
        optimizer: str = "adamw",
        asked: Mapping[str, AskedOf] | None = None,
        recompute: Recompute = "none",
        regather: bool = False,
        given: Mapping[str, Layout] | None = None,
        zero: Mapping[str, int] | None = None,
        flying: int = 0,
        stays: bool = True,
        effort: Effort = FULL,
        carried: frozenset[str] = frozenset(),
    ) -> None:
        """``asked``: node → what a named strategy allows. ``regather``: see
        :func:`~autoshard.passes.propagate.recompute.offer`. ``given``: layouts of inputs that
        arrive sharded. ``zero``: parameter → ZeRO stage. ``flying``: micro-batches in flight in a
        pipeline stage. ``stays``: parameters may stay gathered. ``carried``: inputs returned by an
        earlier call (KV caches), whose layouts the search chooses."""
        self.flying, self.stays, self.effort, self.carried = flying, stays, effort, carried
        self.prepare: Prepare = _alone
        self.given, self.zero = given or {}, zero or {}
        self.graph, self.mesh, self.constraints, self.optimizer = graph, mesh, constraints, optimizer
        self.spaces, self.keeps = SpacesWithWays(graph, mesh, asked), KeepTables(graph, mesh)
        recompute = hinted(graph, recompute)
        self.offer = offer(graph, recompute, regather)
        self.decides = graph.training and recompute == "auto"
        """whether the search chooses per operation what is recomputed"""
        self.plain = not graph.training or (recompute in ("auto", "none") and not regather)
        """whether nothing has to be recomputed"""
        self.prices: tuple[float, ...] = ()
        """multipliers of the rows in the last search: the start of the next"""
        self._known: dict[Any, Any] = {}
        """see :attr:`Network.known`"""
        self._tables: EdgeTables | None = None
        """of the unlimited network; most serve the limited network, too"""
        self._free: Network | None = None
        """the network of the last :meth:`cheapest`"""
        self._limited: tuple[Network, Built] | None = None
        self._wide: tuple[Network, Built] | None = None
        """the limited network before a restriction"""
        self._moments: Moments | None = None
        """of the limited network"""
        self._narrow = ""
        """the restriction: "even", "blocks", or the operation of :meth:`at`; "": none"""
        self._moment = ""
        """the operation of :meth:`at`"""
        self._prepared: dict[str, Prepared] = {}
        """restriction → the network with its memory rows"""
        self._loosest = 0.0
        """loosest memory limit searched, in bytes: linear sums may exceed the simulated peak"""

    def cheapest(self, rough: bool = False) -> Assignment:
        """The fastest assignment without a memory limit; :func:`proven` adds its lower bound.
        ``rough``: stop near the optimum; :meth:`searched_on` continues."""
        network, built = self.network(limited=not self.plain)
        effort = replace(self.effort, rough=rough)
        try:
            found = self.prepare(network, built.network, built.hiding, built.alike).solve(effort=effort)
        except PlanError as error:
            if not self.spaces.asked:
                raise
            raise AskedTooMuchError(_asked_too_much(self.constraints, self.mesh)) from error
        self.prices, self._free = found.prices, network
        return assigned(network, found)

    def searched_on(self, rough: Assignment) -> Assignment:
        """``rough`` searched to the optimum; ``rough`` itself if it is optimal already."""
        search_on = rough.solution.search_on
        if search_on is None or self._free is None:
            return rough
        found = search_on()
        self.prices = found.prices
        if found.choice == rough.solution.choice:
            return replace(rough, solution=found)
        return assigned(self._free, found)

    def within(self, limit: float, budget: float | None = None, then: float = math.inf) -> tuple[Assignment, float]:
        """The fastest assignment under memory limits, and its bytes at the end of the forward.

        ``limit``: bytes per rank at the end of the forward; ``budget``: at the end of the backward
        (None: ``limit``); ``then``: during the operation of :meth:`at`. The result has no lower
        bound. Raises :class:`~autoshard.errors.PlanError` if nothing fits.
        """
        moment = (then,) if self._moment else ()
        self._loosest = max(self._loosest, limit)
        found = self._under(*moment, limit, limit if budget is None else budget)
        network, built = self.network(limited=True)
        return assigned(network, replace(found, prove=None, lower_bound=0.0)), _used(built, found)

    def bound(self, budget: float) -> float:
        """Lower bound in seconds of assignments within ``budget`` bytes per rank; 0: none exist.
        The limit at the end of the forward is the loosest limit searched, if that is larger."""
        if self._narrow != self._moment:
            self.freely()
        most = max(budget, self._loosest)
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
        effort = replace(self.effort, part=min(LIMITED, self.effort.part), rough=rough)
        found = prepared.solve(every, effort, prices=start)
        self.prices = found.prices
        return found

    def at(self, moment: str) -> None:
        """Lift all restrictions, and limit the memory while operation ``moment`` runs."""
        if moment != self._moment:
            self.freely()
            self._prepared.clear()
            self._narrow, self._moment = moment, moment

    def freely(self) -> None:
        """Lift all restrictions except the limit of :meth:`at`."""
        self._limited, self._wide = self._wide or self._limited, None
        self.prices, self._narrow = (), self._moment

    def held_at(self, assignment: Assignment, moment: str) -> tuple[float, float]:
        """Bytes of a limited search's result during an operation, and at the end of the forward."""
        network, built = self.network(limited=True)
        then = self._until(moment, network, built)
        return then.used(built.network, assignment.solution.choice), _used(built, assignment.solution)

    def _until(self, moment: str, network: Network, built: Built) -> Row:
        """Row of the bytes held during an operation: of all variables before it, and of inputs."""
        row, names = built.kept[0], list(network.variables)
        last, inputs = names.index(f"node:{moment}"), {value.name for value in self.graph.inputs}
        nodes = (
            x if i <= last or name in inputs else None for i, (name, x) in enumerate(zip(names, row.nodes, strict=True))
        )
        edges = (x if j <= last else None for x, (_, j, _) in zip(row.edges, built.network.edges, strict=True))
        return Row(tuple(nodes), tuple(edges), 0.0)

    def _with_bytes(self, network: Network, built: Built) -> Prepared:
        if self._narrow not in self._prepared:
            kept = tuple(replace(row, limit=0.0) for row in built.kept)
            moment = (self._until(self._moment, network, built),) if self._moment else ()
            prepared = (
                self._prepared[""].restricted(built.network.nodes)
                if "" in self._prepared
                else self.prepare(network, built.network, (*built.hiding, *moment, *kept), built.alike)
            )
            if self.prepare is _alone:  # the folded tables take most memory: keep one copy
                prepared = prepared.lean()
                hiding, bytes_ = prepared.rows[: len(built.hiding)], prepared.rows[-len(kept) :]
                self._limited = network, replace(built, network=prepared.network, hiding=hiding, kept=bytes_)
            self._prepared[self._narrow] = prepared
        return self._prepared[self._narrow]

    def least(self, excess: np.ndarray | None = None, price: float = LITTLE) -> tuple[Assignment, float]:
        """The assignment with least mean memory, and its bytes at the end of the forward.

        ``excess`` [operations + 1]: log-weight per moment, optimizer's step last. ``price``: bytes
        per second; small, so it breaks ties only. Overlap is ignored.
        """
        network, built = self.network(limited=True)
        moments = self._moments_of(network, built)
        row = moments.row(moments.weights(np.zeros(len(self.graph.nodes) + 1) if excess is None else excess))
        seconds, priced = built.network, partial(_priced, price)
        nodes = tuple(priced(s, row.nodes[i]) for i, s in enumerate(seconds.nodes))
        edges = tuple((a, b, mapped(priced, s, row.edges[i])) for i, (a, b, s) in enumerate(seconds.edges))
        found = self.prepare(network, CostNetwork(nodes, edges), (), built.alike).solve()
        over = (max(0.0, x.used(seconds, found.choice) - x.limit) * x.price for x in built.hiding)
        cost = seconds.cost(found.choice) + sum(over)
        found = replace(found, cost=cost, lower_bound=0.0, exact=False, prove=None, search_on=None)
        return assigned(network, found), _used(built, found)

    def _moments_of(self, network: Network, built: Built) -> Moments:
        if self._moments is None or self._moments.built.network.edges is not built.network.edges:
            self._moments = Moments(network, built)
        return self._moments

    def evenly(self) -> None:
        """Restrict every choice to the same strategy along all axes, as on a mesh of one axis."""
        self._narrowed("even", lambda _, v: np.tile([len(set(choice)) == 1 for choice in v.choices], len(v.tags)))

    def by_blocks(self) -> None:
        """Restrict to recomputing whole repeated modules, so that only one is live at a time."""
        blocks = offer(self.graph, "blocks")
        again = {f"node:{n.name}": blocks(n) == (2,) for n in self.graph.nodes if not is_passive(n)}
        self._narrowed(
            "blocks",
            lambda name, v: np.repeat([again.get(name, tag == 2) == (tag == 2) for tag in v.tags], len(v.choices)),
        )

    def _narrowed(self, to: str, allowed: Callable[[str, Variable], np.ndarray]) -> None:
        """``allowed``: (name, variable) → mask over its states."""
        self._wide = network, built = self._wide or self.network(limited=True)
        pairs = zip(network.variables.items(), built.network.nodes, strict=True)
        nodes = tuple(np.where(allowed(name, v), seconds, np.inf) for (name, v), seconds in pairs)
        self.prices, self._narrow = (), to
        self._limited = network, replace(built, network=replace(built.network, nodes=nodes))

    def held(self, assignment: Assignment) -> float:
        """Bytes of ``assignment``, a result of :meth:`cheapest`, at the end of the forward."""
        network, built = self.network(limited=True)
        if not self.plain:  # it was found in this network
            return _used(built, assignment.solution)
        allowed = [tuple(states_of(network, name, v, assignment)) for name, v in network.variables.items()]
        made: dict[Any, np.ndarray] = {}

        def forbidden(i: int, j: int, table: Matrix) -> np.ndarray:
            key = id(table), allowed[i], allowed[j]
            if key not in made:
                made[key] = np.where(np.isinf(table[np.ix_(allowed[i], allowed[j])]), np.inf, 0.0)
            return made[key]

        edges = tuple((i, j, forbidden(i, j, table)) for i, j, table in built.network.edges)
        found = solve(CostNetwork(tuple(np.zeros(len(states)) for states in allowed), edges))
        choice = tuple(states[s] for states, s in zip(allowed, found.choice, strict=True))
        return _used(built, replace(found, choice=choice))

    def network(self, limited: bool) -> tuple[Network, Built]:
        """The network; ``limited`` (then cached): with memory rows and recompute states."""
        if limited and self._limited is not None:
            return self._limited
        what = self.graph, self.mesh, self.constraints, self.spaces, self.keeps
        asked = self.constraints.keys() if self.stays else self.graph.parameters
        stages = offered(self.graph, self.mesh, self.zero, asked, limited)
        more = self.optimizer, self.given, stages, max(1, self.flying), self.carried
        network = Network(*what, self.offer if limited else None, *more, known=self._known)
        tables = self._tables or EdgeTables(self.graph, self.mesh)
        built = network.build(tables)
        self._tables = None if limited else tables  # no other network follows the limited one
        states, (nodes, edges) = sum(map(len, built.network.nodes)), (built.network.nodes, built.network.edges)
        log.info("cost network: %d variables, %d states, %d edges", len(nodes), states, len(edges))
        if limited:
            self._limited = network, built
        return network, built


def proven(assignment: Assignment) -> Assignment:
    """``assignment`` with the proven lower bound of its solution."""
    return replace(assignment, solution=assignment.solution.proven())


def _alone(
    network: Network, costs: CostNetwork, rows: tuple[Row, ...], alike: Sequence[Hashable | None] | None
) -> Prepared:
    return Prepared(costs, rows, alike)


def _used(built: Built, found: Solution) -> float:
    return built.kept[0].used(built.network, found.choice)


def _priced(price: float, seconds: np.ndarray, held: np.ndarray | None) -> np.ndarray:
    """Bytes plus seconds times ``price``; infinite seconds stay infinite."""
    return seconds * price + (0.0 if held is None else held)

"""Limits of the search's work, in counts instead of seconds, so that every run makes the same choices.
Their source is the project's own tables: ``benchmarks/plan_time.py`` for layers that are alike, ``benchmarks/contest/`` for
irregular networks. A larger figure costs time and may close more of the gap; none changes what a plan costs or whether a
bound holds. "Entries" are those of cost tables: a billion takes about a second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SearchLimits:
    """Work limits of elimination, messages, rows, tied layers, branching; unit: each line."""

    # Elimination and pruning, in entries of one join: while bounds may still prune, without further checks, and at all
    # (beyond that, the MILP). Tests set the two larger ones.
    quick_join: int = 3_000_000
    easy_join: int = 20_000_000
    max_join: int = 1_000_000_000
    joined_per_variable: int = 10_000  # entries of all joins that take as long as one MILP variable
    easy_total: int = 1_000_000_000  # entries of all joins that are always joined
    easy_comparisons: int = 20_000_000  # row comparisons per table while bounds may prune
    max_comparisons: int = 1_000_000_000  # row comparisons per table beyond which pruning does not pay
    unfolded_entries: int = 1_000  # entries up to which a matrix is not deduplicated
    trial_join: int = 1_000_000  # entries of the largest join under a guess of the optimum
    trial_strategies: int = 3_000  # strategies up to which the MILP solves what a guess leaves

    # Message passing: ends after so many sweeps, or when stalled ones close less than a share of the gap.
    max_sweeps: int = 300
    stalled_sweeps: int = 10
    least_progress: float = 0.02
    start_margin: float = 1e-6  # relative, above a known choice, so that the search finds that choice again

    # MILP.
    entries_per_second: int = 30_000  # variables per second of the time limit, beyond which HiGHS would not end
    large_core: int = 100_000  # variables: a larger MILP takes minutes, and a choice close to the bound is accepted
    close_to_bound: float = 1e-4  # relative gap of such a choice
    direct_milp_entries: int = 500  # entries up to which the MILP solves a problem with rows directly
    milp_entries: int = 10_000  # the same after pruning
    hopeless: int = 30  # message passing does not shrink a problem by more than this factor
    milp_work: int = 400_000  # entries × nodes of the MILP's tree, for effort 1
    first_look: float = 0.002  # first range of the MILP above the bound, relative; each failure quadruples it
    max_looks: int = 6

    # Linear rows: iterations of the bound for effort 1, at first and after pruning; rounds of column generation.
    first_iterations: int = 12
    iterations: int = 48
    enough: float = 2e-3  # sufficient relative gap: closing it would cost a plan of many layers its regularity
    column_rounds: int = 60
    mixtures: int = 8
    sweeps: int = 8
    max_corners: int = 3  # soft rows; with more there are too many corners, and each row must gain on its own
    least_step: float = 1e-6  # least relative gain that a step must promise
    largest_row_join: int = 10_000_000_000  # entries, as if all strategies differed, to eliminate at every price
    all_tables: int = 50_000_000  # entries of all tables, to eliminate at every price
    all_joins: int = 500_000_000  # entries of all joins, to eliminate at every price
    node_work: int = 40_000  # entries that take as long as reading out a node's choice

    # Duality gap: moves of nodes, shares of nodes that move between two solutions, branches.
    max_flips_per_node: float = 2.0
    min_flip_gain: float = 1e-9  # relative
    hard_row_factor: float = 3.0  # on the price of a hard row's excess while borders move
    branch_iterations: int = 8
    branch_box: float = 0.3  # first box of a branch's prices, relative
    branches: int = 24  # for effort 1
    branch_work: int = 4_000_000_000  # entries that branches may compute
    branch_mixtures: int = 2

    # Tied layers.
    max_tied_share: float = 0.5  # classes over nodes up to which layers are tied
    tied_turns: int = 5  # turns between tied and untied layers, for effort 1
    tied_sweeps: int = 120
    least_gain: float = 3e-5  # relative gain of four sweeps between classes, which is cheap
    least_gain_near: float = 1e-4  # the same near irregular nodes
    last_sweeps: int = 3  # through all copies; more than one only if that may reach a sufficient bound
    last_sweep_entries: int = 500_000_000  # with more, only if the classes promise a gain
    promised: float = 1e-3  # that gain, as a share of the bound


@dataclass
class OuterSearchLimits:
    """Limits of outer searches: memory, cuts, meshes; shares are of the plan's step time."""

    # Memory: rounds of searches (counts) and gaps between cost and bound, relative to the cost.
    cut_rounds: int = 10  # within cuts while no plan fits
    fit_rounds: int = 4  # within cuts once one fits
    least_rounds: int = 10  # for the least memory while no plan fits
    quicker_rounds: int = 8  # for a plan quicker than one that fits
    slack: float = 0.05  # share of the budget by which sums may exceed it; the simulation then decides
    narrow_gap: float = 0.001  # from here on limits are placed otherwise
    wide_gap: float = 0.05  # from here on more is searched
    price_step: float = 16.0  # factor on a second's worth in bytes, until one plan fits and one does not
    moment_weight_rate: float = 4.0  # exponential weight of a peak's moments over moments that hold nothing
    close_limits: float = 0.02  # share of the budget below which two limits are the same
    limited_effort: float = 0.1  # effort of a search under a limit, as a share of a proof's
    small_share: float = 0.01  # share of the budget that a rank's logits take, below which no chunks are tried
    tight_share: float = 0.5  # share of a stage's budget below which memory did not influence its plan

    # Pipelines: counts of cuts, and gains as shares of the step.
    max_cuts: int = 256  # possible cuts; among cuts after nearly equal work those with the smallest messages
    simulated_cuts: int = 100  # simulated before one is proven shortest
    boundary_moves: int = 10  # of one boundary, with several stages per rank
    mixed_bounds: int = 16  # bounds on first stages, with several stages per rank
    max_chunks: int = 16  # stages per rank (virtual stages)
    most_stage_plans: int = 8  # with more, equal stages share plans in so many blocks, by quick searches
    least_step_gain: float = 0.002  # for one more stage per rank: estimates know no better
    block_tolerance: float = 0.05  # for a cut inside a layer: equal stages are planned once

    # Meshes: counts of estimates.
    most_estimates: int = 40
    retry_cost: int = 5  # extra cost of an estimate that is repeated with less memory
    most_full_plans: int = 2  # where the first takes longer than its estimate
    tie_share: float = 1e-6  # relative difference of plans below which the mesh with fewer axes is taken


LIMITS, OUTER_LIMITS = SearchLimits(), OuterSearchLimits()

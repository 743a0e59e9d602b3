"""The definition of the placements, as code that knows nothing of the runtime, and the runtime's functions as cases.

A case converts a global tensor T from one placement to another along a group of ranks. With L = <C, T> the gradient
dL/dT is C, so inputs, outputs and both gradients are known from the table of placements alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard import runtime

MESHES = ({"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3})
GRADIENT = {"S": "S", "R": "P", "I": "I", "P": "R"}
SHAPES = {"even": (12, 6), "uneven": (5, 7), "empty chunks": (2, 3), "no rows": (0, 3), "one row": (1, 12)}


@dataclass(frozen=True)
class Case:
    """``call(x)`` is run on every rank; ``dim``/``to_dim``: the dims cut before and after."""

    name: str
    mesh: dict[str, int]
    axes: tuple[str, ...]
    shape: tuple[int, int]
    source: str
    target: str
    call: Callable[[torch.Tensor], torch.Tensor]
    dim: int = 0
    to_dim: int = 0
    order: tuple[str, ...] = field(default=())

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    def __str__(self) -> str:
        axes = ",".join(self.axes)
        mesh = "x".join(f"{a}{n}" for a, n in self.mesh.items())
        return f"{self.name} {self.source}→{self.target}@{axes} of {mesh}, {list(self.shape)}"


def cases(mesh: dict[str, int]) -> Iterator[Case]:
    """Every function along every group of ``mesh``, for even, uneven and empty cuts."""
    groups = [g for k in range(1, len(mesh) + 1) for g in itertools.permutations(mesh, k)]
    for axes, (kind, shape) in itertools.product(groups, SHAPES.items()):
        n = math.prod(mesh[a] for a in axes)
        divides = all(length % n == 0 for length in shape)

        def case(name: str, pair: str, call: Any, axes: tuple[str, ...] = axes, shape: Any = shape, **kw: Any) -> Case:
            return Case(name, mesh, axes, shape, pair[0], pair[1], call, **kw)

        names = axes[0] if len(axes) == 1 else axes
        yield case("enter", "IR", lambda x, a=names: runtime.enter(x, a))
        yield case("enter_together", "IR", both(lambda xs, a=names: runtime.enter_together(xs, a)))
        yield case("leave", "RI", lambda x, a=names: runtime.leave(x, a))
        for to in "IR":
            yield case("all_reduce", "P" + to, lambda x, a=names, to=to: runtime.all_reduce(x, a, to=to))
            yield case(
                "all_reduce_together",
                "P" + to,
                both(lambda xs, a=names, to=to: runtime.all_reduce_together(xs, a, to=to)),
            )
            yield case("partial", to + "P", lambda x, a=names, to=to: runtime.partial(x, a, of=to))
        for dim in (0, 1):
            size = None if divides and kind == "even" else shape[dim]
            yield case(
                "reduce_scatter", "PS", lambda x, a=names, d=dim: runtime.reduce_scatter(x, d, a), dim=dim, to_dim=dim
            )
            yield case(
                "reduce_scatter_together",
                "PS",
                both(lambda xs, a=names, d=dim: runtime.reduce_scatter_together(xs, (d, d), a)),
                dim=dim,
                to_dim=dim,
            )
            yield case("pad", "SP", lambda x, a=names, d=dim, s=size: runtime.pad(x, d, a, size=s), dim=dim)
            to_dim = 1 - dim
            yield case(
                "all_to_all",
                "SS",
                lambda x, a=names, d=dim, t=to_dim, s=size: runtime.all_to_all(x, d, t, a, size=s),
                dim=dim,
                to_dim=to_dim,
            )
            sizes = None if size is None else (size, size)
            yield case(
                "all_to_all_together",
                "SS",
                both(
                    lambda xs, a=names, d=(dim, dim), t=(to_dim, to_dim), s=sizes: runtime.all_to_all_together(
                        xs, d, t, a, sizes=s
                    )
                ),
                dim=dim,
                to_dim=to_dim,
            )
            for to in "IR":
                yield case(
                    "all_gather_together",
                    "S" + to,
                    both(
                        lambda xs, a=names, d=(dim, dim), s=sizes, to=to: runtime.all_gather_together(
                            xs, d, a, to=to, sizes=s
                        )
                    ),
                    dim=dim,
                )
                yield case(
                    "all_gather",
                    "S" + to,
                    lambda x, a=names, d=dim, s=size, to=to: runtime.all_gather(x, d, a, to=to, size=s),
                    dim=dim,
                )
                yield case(
                    "slice", to + "S", lambda x, a=names, d=dim, of=to: runtime.slice(x, d, a, of=of), to_dim=dim
                )
            for order in itertools.permutations(axes):
                kw: dict[str, Any] = {} if size is None else {"dim": dim, "size": size}
                yield case(
                    "permute",
                    "SS",
                    lambda x, a=axes, o=order, kw=kw: runtime.permute(x, a, o, **kw),
                    dim=dim,
                    to_dim=dim,
                    order=order,
                )


def both(together: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]) -> Any:
    """As a function of one tensor: x and 2x are moved, and their difference is x moved."""

    def call(x: torch.Tensor) -> torch.Tensor:
        once, twice = together((x, 2 * x if x.requires_grad else x))
        return twice - once if x.requires_grad else twice

    return call


def unasked(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What comes of ``a``, as of a model whose other loss is not asked for: ``b`` went along, and through more besides."""
    a, b = runtime.all_reduce_together((a, b), "a", to="I")
    b = runtime.all_reduce(runtime.enter(b, "a"), "a", to="R")
    b = runtime.amax(runtime.dropout(b, 0.5, b.shape, {}), [0], "a", True)
    return runtime.enter_together((a, b), "a")[0]


def coordinates(mesh: dict[str, int], rank: int) -> dict[str, int]:
    """The rank's index along every axis; the last axis varies fastest."""
    grid = list(itertools.product(*(range(n) for n in mesh.values())))
    return dict(zip(mesh, grid[rank], strict=True))


def number(mesh: dict[str, int], axes: tuple[str, ...], rank: int) -> int:
    """The rank's number in its flattened group."""
    at = coordinates(mesh, rank)
    return list(itertools.product(*(range(mesh[a]) for a in axes))).index(tuple(at[a] for a in axes))


def cut(t: torch.Tensor, dim: int, counts: list[int]) -> list[torch.Tensor]:
    """Nested torch.chunk; ranks beyond the last chunk hold nothing."""
    if not counts:
        return [t]
    pieces = list(torch.chunk(t, counts[0], dim))
    pieces += [t.narrow(dim, 0, 0)] * (counts[0] - len(pieces))
    return [c for p in pieces for c in cut(p, dim, counts[1:])]


def held(case: Case, placement: str, what: str, dim: int, order: tuple[str, ...] = ()) -> list[torch.Tensor]:
    """What every rank holds of T ("value") or C ("gradient") in ``placement``."""
    out = []
    counts = [case.mesh[a] for a in case.axes]
    for rank in range(case.ranks):
        t, k = whole(case, what, rank), number(case.mesh, order or case.axes, rank)
        if placement == "S":
            t = cut(t, dim, counts)[k]
        elif placement == "P":
            n = math.prod(counts)
            summands = torch.randn(n, *t.shape, dtype=t.dtype, generator=torch.Generator().manual_seed(7))
            summands[-1] = t - summands[:-1].sum(0)
            t = summands[k]
        out.append(t)
    return out


def whole(case: Case, what: str, rank: int) -> torch.Tensor:
    """T or C of the rank's group: another one for every group, so that a wrong group shows."""
    others = [i for a, i in coordinates(case.mesh, rank).items() if a not in case.axes]
    seed = 1000 * (what == "gradient") + sum(i * 10**k for k, i in enumerate(others))
    return torch.randn(case.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(case: Case) -> list[torch.Tensor]:
    """The function's input on every rank."""
    return held(case, case.source, "value", case.dim)


def output_gradients(case: Case) -> list[torch.Tensor]:
    """The gradient that arrives at the output on every rank."""
    return held(case, GRADIENT[case.target], "gradient", case.to_dim, case.order)


def check(case: Case, outputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Outputs are T in the target placement; input gradients are C in the gradient's placement."""
    _agree(case, "value", outputs, case.target, case.to_dim, case.order)
    _agree(case, "gradient", gradients, GRADIENT[case.source], case.dim, ())


def _agree(case: Case, what: str, got: list[torch.Tensor], placement: str, dim: int, order: tuple[str, ...]) -> None:
    expected = held(case, "I" if placement == "P" else placement, what, dim, order)
    if placement == "P":
        got = [sum_of_group(case, got, rank) for rank in range(case.ranks)]
    for rank, (g, e) in enumerate(zip(got, expected, strict=True)):
        if g.shape != e.shape or not torch.allclose(g, e, rtol=0, atol=1e-12):
            raise AssertionError(f"{case}: {what} on rank {rank}: got\n{g}\nexpected\n{e}")


def sum_of_group(case: Case, xs: list[torch.Tensor], rank: int) -> torch.Tensor:
    """The sum of what the rank's group holds."""
    at = coordinates(case.mesh, rank)
    members = [
        r
        for r in range(case.ranks)
        if all(coordinates(case.mesh, r)[a] == i for a, i in at.items() if a not in case.axes)
    ]
    return torch.stack([xs[r] for r in members]).sum(0)


def scrambled(x: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous in memory."""
    return x.t().contiguous().t()

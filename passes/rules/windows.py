"""Sliding-window dims: they can be sharded where neighbouring ranks exchange halos."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Internal, spell
from autoshard.passes.ir.sizes import Size
from autoshard.passes.rules.base import CollectivesOf, Site
from autoshard.runtime.transport.window import Halo, Window, halo_of


@dataclass(frozen=True, slots=True)
class Sliding:
    """One windowed dim of the first operand and of the result, with its global lengths."""

    dim: int
    size: int
    to: int
    window: Window

    @property
    def factor(self) -> str:
        """The factor's name in the rule."""
        return f"d{self.dim}"

    @property
    def fixed(self) -> bool:
        """Whether both lengths are static, so that the halo exchange can be planned."""
        return not isinstance(self.size, Size) and not isinstance(self.to, Size)

    def axes(self, site: Site) -> tuple[str, ...]:
        """Mesh axes that shard the dim, outer to inner."""
        return site.inputs[0].axes_of(self.dim)

    def halo(self, site: Site) -> Halo:
        """The positions that each rank reads, and its halo exchange."""
        ranks = tuple(site.mesh.size_of(a) for a in self.axes(site))
        return halo_of(self.window, self.size, self.to, ranks)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for the runtime: the window's fields that differ from the defaults."""
        default = Window()
        return {k: v for k, v in self.window._asdict().items() if v != getattr(default, k)}


def cut(site: Site, slidings: Sequence[Sliding]) -> tuple[Sliding, ...]:
    """The windowed dims that some mesh axis shards."""
    return tuple(s for s in slidings if site.mesh.size_of(s.axes(site)) > 1)


def haloed(site: Site, x: Any, slidings: Sequence[Sliding], fill: float = 0.0) -> Any:
    """``x`` with halo: the positions that this rank's results read."""
    for s in slidings:
        halo = s.halo(site)
        if halo.reads == halo.exchange.held:
            continue
        extra = {"fill": fill} if fill != 0.0 and halo.reads != halo.exchange.wanted else {}
        where = {"dim": s.dim, "size": s.size, "to": s.to, **s.options, **extra, "axes": spell(s.axes(site))}
        x = Call("halo", (x,), where)
    return x


def cropped(site: Site, y: Any, slidings: Sequence[Sliding]) -> Any:
    """Results of a transposed op, cropped where the operand with its halo makes more."""
    for s in slidings:
        halo, window = s.halo(site), s.window
        made = [(n - 1) * window.stride + window.reach + 1 for _, n in halo.reads]
        if made == [n for _, n in halo.results] and not any(map(window.surplus, halo.results)):
            continue
        options = {k: v for k, v in s.options.items() if k != "transposed"}
        y = Call("crop", (y,), {"dim": s.dim, "to": s.to, **options, "axes": spell(s.axes(site))})
    return y


def each(node: Node, name: str, count: int) -> list[int]:
    """A per-dim argument as one int per position dim; an absent stride equals the kernel size."""
    if name not in [a.name for a in node.op._schema.arguments]:
        return [1] * count
    value = node.argument(name)
    value = [value] if isinstance(value, int) else list(value)
    return value * (count // len(value)) if value else each(node, "kernel_size", count)


SlidingsOf = Callable[[Node, Graph], tuple[Sliding, ...]]


def both_ways(axes: tuple[str, ...], row: float, halo: Halo, grad: bool, what: str, back: str) -> Iterator[Internal]:
    """Halo exchange of positions of ``row`` bytes, and its gradient; empty halos give none."""
    if halo.forward:
        yield Internal("permute", axes, row * halo.forward, "forward", what)
        if grad:
            yield Internal("permute", axes, row * halo.backward, "backward", back)


def halos(slidings: SlidingsOf) -> CollectivesOf:
    """Collectives of the halo exchanges, dim by dim, and of their gradients."""

    def collectives(site: Site) -> tuple[Internal, ...]:
        if not (along := cut(site, slidings(site.node, site.graph))):
            return ()
        type_ = site.in_type(0)
        shape = list(site.inputs[0].max_local_shape(type_.shape))
        found: list[Internal] = []
        for s in along:
            halo = s.halo(site)
            shape[s.dim] = 1
            row = math.prod(shape) * type_.dtype.itemsize
            shape[s.dim] = halo.reads[0][1]
            found += both_ways(s.axes(site), row, halo, type_.grad, "halo", "gradient of the halo")
        return tuple(found)

    return collectives

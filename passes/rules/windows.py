"""Dims along which an op slides a window: they can be cut where neighbours exchange halos."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.rules.base import Call, Internal, Site
from autoshard.passes.rules.named import spell
from autoshard.runtime.window import Exchange, Interval, Window, exchange


@dataclass(frozen=True, slots=True)
class Sliding:
    """One dim, the same of the first operand and of the result; ``size``, ``to``: its global lengths there."""

    dim: int
    size: int
    to: int
    window: Window

    @property
    def factor(self) -> str:
        """The factor's name in the rule."""
        return f"d{self.dim}"

    def axes(self, site: Site) -> tuple[str, ...]:
        """Mesh axes that cut it, outer to inner."""
        return site.inputs[0].axes_of(self.dim)

    def results(self, site: Site) -> list[Interval]:
        """The chunks of the result, by rank of the group."""
        return _chunks(site.outputs[0], self.dim, self.to, site.mesh, self.axes(site))

    def wanted(self, site: Site) -> list[Interval]:
        """What every rank of the group reads."""
        return [self.window.read(chunk) for chunk in self.results(site)]

    def held(self, site: Site) -> list[Interval]:
        """The chunks of the operand, by rank of the group."""
        return _chunks(site.inputs[0], self.dim, self.size, site.mesh, self.axes(site))

    def exchange(self, site: Site) -> Exchange:
        """What the ranks of the group give each other."""
        return exchange(self.held(site), self.wanted(site), self.size)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the runtime's functions: what is not the default."""
        default = Window()
        return {k: v for k, v in self.window._asdict().items() if v != getattr(default, k)}


def _chunks(layout: Layout, dim: int, size: int, mesh: Mesh, axes: tuple[str, ...]) -> list[Interval]:
    return [layout.chunk_of(dim, size, rank) for rank in mesh.group(0, axes)]


def cut(site: Site, slidings: Sequence[Sliding]) -> tuple[Sliding, ...]:
    """Those that an axis cuts."""
    return tuple(s for s in slidings if site.mesh.size_of(s.axes(site)) > 1)


def haloed(site: Site, x: Any, slidings: Sequence[Sliding], fill: float = 0.0) -> Any:
    """``x`` with the positions that this rank's results read, where it has not just these."""
    for s in slidings:
        if s.wanted(site) == s.held(site):
            continue
        extra = {"fill": fill} if fill != 0.0 and any(a < 0 or a + n > s.size for a, n in s.wanted(site)) else {}
        where = {"dim": s.dim, "size": s.size, "to": s.to, **s.options, **extra, "axes": spell(s.axes(site))}
        x = Call("halo", (x,), where)
    return x


def cropped(site: Site, y: Any, slidings: Sequence[Sliding]) -> Any:
    """This rank's results of a transposed op, where its operand of :func:`haloed` makes more."""
    for s in slidings:
        window = s.window
        made = [(n - 1) * window.stride + window.reach + 1 for _, n in s.wanted(site)]
        if made == [n for _, n in s.results(site)] and not any(window.surplus(r) for r in s.results(site)):
            continue
        options = {k: v for k, v in s.options.items() if k != "transposed"}
        y = Call("crop", (y,), {"dim": s.dim, "to": s.to, **options, "axes": spell(s.axes(site))})
    return y


def halo_collectives(site: Site, slidings: Sequence[Sliding]) -> tuple[Internal, ...]:
    """The halos, dim by dim, and back in the backward."""
    type_ = site.in_type(0)
    shape = list(site.inputs[0].max_local_shape(type_.shape))
    found: list[Internal] = []
    for s in cut(site, slidings):
        moved = s.exchange(site)
        shape[s.dim] = 1
        row = math.prod(shape) * type_.dtype.itemsize
        shape[s.dim] = s.wanted(site)[0][1]
        phases: Mapping[str, Exchange] = {"forward": moved, "backward": moved.backward()}
        for phase, e in phases.items():
            if moved.received and (phase == "forward" or type_.grad):
                what = "halo" if phase == "forward" else "gradient of the halo"
                found.append(Internal("halo", s.axes(site), row * e.received, phase, what))
    return tuple(found)

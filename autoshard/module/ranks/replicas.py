"""Comparison of replicas: of initial values, and on demand later."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import RuntimeMismatchError
from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh
from autoshard.module.dtensors.owned import is_owned
from autoshard.module.ranks.agreement import Agreement, differing, listed

log = logging.getLogger("autoshard")

_META = -1
"""checksum of a tensor without data"""

_SHOWN = 5


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by their first names."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def of_first(
    agreement: Agreement, tensors: Mapping[str, torch.Tensor], title: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Rank 0's values (on the CPU) of tensors that differ or lack data on another rank.

    Collective. Names, shapes and dtypes are equal. Rank 0 warns of different data, not of missing
    data. Raises :class:`RuntimeMismatchError` on every rank if only rank 0 has no data.
    """
    rows = agreement.numbers_of(list(tensors.values()))
    found = [(n, i) for i, n in enumerate(tensors) if differing(rows, i)]
    lost = [n for n, i in found if rows[0][i] == _META]
    if lost:
        raise RuntimeMismatchError(
            f"rank 0 has {title} on the meta device, and others have data for it ({', '.join(lost[:_SHOWN])}): "
            "give rank 0 the data, or load them into the sharded module"
        )
    other = [(n, i) for n, i in found if any(rows[r][i] != _META for r in differing(rows, i))]
    if other and agreement.rank == 0:
        names = ", ".join(f"{n} ({listed(differing(rows, i))})" for n, i in other[:_SHOWN])
        log.warning(
            "the ranks come with different values of %d of %d tensors of %s; rank 0's are taken: %s%s",
            len(other),
            len(tensors),
            title,
            names,
            ", …" if len(other) > _SHOWN else "",
        )
    return ((n, agreement.tensor_of_first(tensors[n])) for n, _ in found)


def check_replicas(
    agreement: Agreement, mesh: Mesh, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Raise :class:`RuntimeMismatchError` on every rank if replicas differ."""
    tensors = {**parameters, **buffers}
    whole = Layout(mesh)
    tensors = {name: x for name, x in tensors.items() if not is_owned(x)}
    layouts = [Layout.from_torch(mesh, x.placements) if isinstance(x, DTensor) else whole for x in tensors.values()]
    rows = agreement.numbers_of([x.to_local() if isinstance(x, DTensor) else x for x in tensors.values()])
    wrong = []
    for i, (name, layout) in enumerate(zip(tensors, layouts, strict=True)):
        for ranks in _alike(layout):
            others = [r for r in ranks if rows[r][i] != rows[ranks[0]][i]]
            if others:
                wrong.append(f"{name} ({listed(others)} from rank {ranks[0]})")
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise RuntimeMismatchError(
            f"replicas have drifted apart: {', '.join(wrong[:_SHOWN])}{more}. Something changed them on some ranks only"
        )


def _alike(layout: Layout) -> list[Sequence[int]]:
    """Groups of ranks that hold the same shard."""
    mesh = layout.mesh
    cut = [mesh.index(a) for a in layout.axes_with(Shard)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        coordinates = mesh.coordinates(rank)
        groups.setdefault(tuple(coordinates[i] for i in cut), []).append(rank)
    return list(groups.values())

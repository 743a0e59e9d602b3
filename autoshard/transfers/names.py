"""Which source tensor each target tensor takes: equal names, a function, a table, ties."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from autoshard.errors import PlanError
from autoshard.transfers.holdings import Held, Holdings, Link

Names = Callable[[str], str | None] | Mapping[Any, Any] | None
"""source name → target name, or a table; see :func:`autoshard.transfer`"""

STATE_SEPARATOR = "|"
"""between a parameter's name and the key of its optimizer state"""


def whole_link(source: str, target: str, have: Held, want: Held) -> Link:
    """The link of two whole tensors. Raises :class:`PlanError` if their shapes differ."""
    if have.shape != want.shape:
        raise PlanError(
            f"{target!r} of the target has shape {list(want.shape)}, but {source!r} of the source has "
            f"{list(have.shape)}. A transfer does not reshape"
        )
    zeros = (0,) * len(want.shape)
    return Link(source, target, zeros, zeros, want.shape)


def links_of(have: Holdings, want: dict[str, Held], names: Names = None, trained: bool = False) -> list[Link]:
    """The links of all target tensors, tied ones once; if ``trained``, adds the source's optimizer
    states to ``want``. Raises :class:`PlanError` for targets without a source, missing sources,
    and other shapes."""
    weights = {n: h for n, h in have.items() if STATE_SEPARATOR not in n}
    wanted = {n: h for n, h in want.items() if STATE_SEPARATOR not in n}
    first: dict[int, str] = {}  # of tied tensors
    links = [
        link
        for link in _named_links(weights, wanted, names)
        if first.setdefault(id(want[link.target]), link.target) == link.target
    ]
    lacking = sorted(n for n, h in wanted.items() if id(h) not in first)
    if lacking:
        raise PlanError(
            f"the source of the transfer lacks {len(lacking)} tensors of the target: {lacking[:5]}. Map the names "
            "with names=, a function from source to target names or a table {target: source}"
        )
    states = [name.split(STATE_SEPARATOR) for name in have if STATE_SEPARATOR in name]
    keys: dict[str, list[str]] = {}
    for name, key in states if trained else ():
        keys.setdefault(name, []).append(key)
    more = []
    for link in links:
        for key in keys.get(link.source, ()):
            source, target = (f"{n}{STATE_SEPARATOR}{key}" for n in link[:2])
            want.setdefault(target, replace(want[link.target], dtype=have[source].dtype))
            more.append(link._replace(source=source, target=target))
    return links + more


def _named_links(have: Holdings, want: Holdings, names: Names) -> Iterator[Link]:
    if callable(names):
        by_target = {target: name for name in have if (target := names(name)) is not None}
        yield from (whole_link(by_target[n], n, have[by_target[n]], h) for n, h in want.items() if n in by_target)
        return
    table = dict(names or {})
    inside = {n: key for key in table if isinstance(key, tuple) for n in key}
    unknown = [n for n in (*(k for k in table if not isinstance(k, tuple)), *inside) if n not in want]
    for name in (n for value in table.values() for n in ([value] if isinstance(value, str) else value)):
        if name not in have:
            raise PlanError(
                f"names= gives {name!r} as a source, but the source has no such tensor: {_near(name, have)}"
            )
    if unknown:
        raise PlanError(
            f"names= gives {unknown[0]!r} as a target, but the target has no such tensor: {_near(unknown[0], want)}"
        )
    for name, held in want.items():
        if name in inside:
            parts = inside[name]
            sizes = [want[n].shape[0] for n in parts]
            yield _part_link(table[parts], name, have, held, sum(sizes[: parts.index(name)]), sum(sizes), joins=False)
        elif isinstance(of := table.get(name, name), str):
            if of in have:
                yield whole_link(of, name, have[of], held)
        else:
            sizes = [have[n].shape[0] for n in of]
            for at, part in enumerate(of):
                yield _part_link(part, name, have, held, sum(sizes[:at]), sum(sizes), joins=True)


def _part_link(source: str, target: str, have: Holdings, held: Held, at: int, total: int, joins: bool) -> Link:
    """A link of rows from ``at``, of the target (which ``joins`` sources) or of the source."""
    fused, part = (held.shape, have[source].shape) if joins else (have[source].shape, held.shape)
    if fused != (total, *part[1:]):
        raise PlanError(
            f"names= joins parts of {total} rows and shape {list(part)} along dim 0, but the fused tensor "
            f"({target!r} from {source!r}) has shape {list(fused)}"
        )
    zeros = (0,) * len(part)
    starts = (zeros, (at, *zeros[1:])) if joins else ((at, *zeros[1:]), zeros)
    return Link(source, target, *starts, part)


def _near(name: str, known: Iterable[str]) -> str:
    """Names of ``known`` that may be meant, for messages."""
    last = name.rsplit(".", 1)[-1]
    found = sorted(n for n in known if n.endswith(last)) or sorted(known)
    return f"there are {', '.join(found[:3])}" + (", …" if len(found) > 3 else "")

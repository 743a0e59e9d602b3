"""Random settings of random models, and random scripts of their training."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import fuzz_training
from fuzz_training import Source

Event = tuple[Any, ...]
"""a step of a script and its arguments, see :class:`Script`"""

MESHES: tuple[dict[str, int], ...] = (
    *[{"a": 2}] * 14, *[{"a": 3}] * 7, *[{"a": 4}] * 5, *[{"dp": 2, "tp": 2}] * 5, {"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2},
)  # fmt: skip
PIPES: tuple[dict[str, int], ...] = (
    *[{"pp": 2}] * 6, *[{"pp": 2, "tp": 2}] * 2, *[{"pp": 3}] * 2, *[{"dp": 2, "pp": 2}] * 2, {"pp": 4}, {"pp": 2, "a": 3},
)  # fmt: skip
INPUTS = ("x", "ids", "labels", "keep")
LIKES = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "megatron-sp", "ulysses", "ring", "expert", "replicate")


@dataclass(frozen=True)
class Setting:
    """How a model is compiled."""

    seed: int = 0
    mesh: tuple[tuple[str, int], ...] = (("a", 2),)
    chosen: str = "search"
    """the plan: "search", "random", "hints", "given", or the ``like`` of each axis"""
    hardware: str = "split"
    micro_batches: int = 1
    schedule: str = ""
    """of stages; "" without"""
    stages_per_rank: int | None = None
    wide: bool = False
    """parameters of float32 that are read in float64"""
    recompute: str = "auto"
    gather_outputs: bool | None = None
    dynamic: bool = False
    local: bool = False
    """ranks bring their parts of the batch"""
    optimizer: str = "sgd"
    example: bool = True
    """whether compile is given an example"""

    @property
    def parts(self) -> bool:
        """Whether a step is run in parts, so that the loss alone has a gradient."""
        return self.micro_batches > 1 or bool(self.schedule)

    @property
    def axes(self) -> dict[str, int]:
        return dict(self.mesh)

    def smaller(self) -> Iterator[Setting]:
        """The same with one option as it is by default, or fewer axes."""
        plain = Setting()
        for field in fields(self):
            if field.name not in ("seed", "mesh") and getattr(self, field.name) != field.default:
                if field.name == "schedule" and self.stages_per_rank:
                    continue
                yield replace(self, **{field.name: getattr(plain, field.name)})
        for name, size in self.mesh:
            if len(self.mesh) > 1 and not (name == "pp" and self.schedule):
                yield replace(self, mesh=tuple(x for x in self.mesh if x[0] != name))
            elif size > 2:
                yield replace(self, mesh=tuple((n, 2 if n == name else s) for n, s in self.mesh))


def setting(draw: random.Random, whole: bool, ranks: int = 0) -> Setting:
    """``whole``: of a model that needs the whole batch at once; ``ranks``: as many processes, or 0: all in this one."""
    seed = draw.randrange(1 << 16)
    micro = 1 if whole else draw.choice((1, 1, 1, 2, 2, 2, 4))
    staged = draw.random() < 0.25
    schedule, per_rank = "", None
    if staged:
        axes = draw.choice([m for m in PIPES if not ranks or math.prod(m.values()) == ranks])
        schedule = draw.choice(("1f1b", "gpipe", "interleaved", "zero_bubble"))
        if whole:
            schedule = draw.choice(("1f1b", "gpipe"))
        elif schedule in ("interleaved", "zero_bubble"):
            micro = draw.choice((2, 4)) if axes["pp"] == 2 else 4
            per_rank = 2 if schedule == "interleaved" else None
    else:
        axes = draw.choice([m for m in MESHES if not ranks or math.prod(m.values()) == ranks])
    chosen = draw.choice((*["search"] * 3, *["random"] * 7, *["hints"] * 3, "given", *["like"] * 3))
    if chosen == "like":
        free = [a for a in axes if a != "pp" or not staged]
        chosen = ",".join(f"{a}={draw.choice(LIKES)}" for a in free) or "search"
    if chosen == "given" and schedule:
        chosen = "search"
    return Setting(
        seed,
        tuple(axes.items()),
        chosen,
        draw.choice(("split", "split", "split", "slow", "cpu")),
        micro,
        schedule,
        per_rank,
        False,
        draw.choice(("auto", "auto", "none", "blocks", "selective")),
        draw.choice((None, None, True, False)),
        False,
        bool(ranks) and not staged and draw.random() < 0.2,
        draw.choice(("sgd", "adamw")),
        chosen in ("given", "hints") or draw.random() < 0.7,
    )


def script(draw: random.Random, other: Event, frozen: str) -> tuple[Event, ...]:
    """A training step, then changes and calls as drawn. ``other``: a call of another kind; ``frozen``: what may be."""
    found: list[Event] = [("call", "train", 0)]
    changes: tuple[Event, ...] = (
        ("step",), ("step",), ("step",), ("zero", True), ("zero", False), ("edit",), ("edit",), ("load",), ("copy",),
        ("clip",), ("state",), ("rate",),
    )  # fmt: skip
    if frozen:
        changes += (("freeze", frozen), ("thaw",))
    for _ in range(draw.choice((1, 1, 2, 3))):
        found += [draw.choice(changes) for _ in range(draw.randint(1, 3))]
        found.append(other if draw.random() < 0.12 else ("call", "train", 0))
    return (*found, ("step",), ("call", "train", 0))


@dataclass(frozen=True)
class Case:
    """A model, how it is compiled, and what is done with it."""

    source: Source
    setting: Setting
    script: tuple[Event, ...]
    grad: bool = False
    """whether the first input requires a gradient"""

    def __str__(self) -> str:
        plain = Setting()
        said = [f"{f.name}={x!r}" for f in fields(plain) if (x := getattr(self.setting, f.name)) != f.default]
        model = f"Source{tuple(getattr(self.source, f.name) for f in fields(self.source))}"
        return f"Case({model}, Setting({', '.join(said)}), {self.script}, {self.grad})\n{self.source.text}"

    @property
    def compiled_as(self) -> Case:
        return replace(self, script=())

    def smaller(self) -> Iterator[Case]:
        """Those with a little less."""
        for i in range(1, len(self.script)):
            yield replace(self, script=(*self.script[:i], *self.script[i + 1 :]))
        if self.grad:
            yield replace(self, grad=False)
        for x in self.source.smaller():
            yield replace(self, source=x)
        for y in self.setting.smaller():
            yield replace(self, setting=y)


SCRIPTS = 4
"""cases, one after the other, of one model in one setting: it is compiled once for them, see :func:`compiled_once`"""


def cases(seed: int, count: int, ranks: int = 0) -> list[Case]:
    """As many cases of one model, which is captured once for all of them."""
    draw, source = random.Random(seed), fuzz_training.source(seed)
    grad = draw.random() < 0.3
    other = draw.choice((("call", "eval", 0), ("call", "quiet", 0), ("call", "train", 1), ("call", "quiet", 1)))
    frozen = draw.choice(("", "", "head", "blocks.0", "lin", "emb"))
    wide, dynamic = draw.random() < 0.12, draw.random() < 0.08
    wide = wide and "checkpoint" not in source.text  # its second forward would miss the emulation
    found: list[Case] = []
    for number in range(count):
        if number % SCRIPTS:
            found.append(replace(found[-1], script=script(draw, other, frozen)))
            continue
        how = replace(setting(draw, source.whole, ranks), wide=wide)
        if how.schedule and how.axes["pp"] > 2 and source.layers == 1:  # too few operations for as many stages
            how = replace(how, mesh=(("pp", 2),))
        if dynamic and not how.parts and draw.random() < 0.5:
            how = replace(how, dynamic=True, example=True)
        found.append(Case(source, how, script(draw, other, frozen), grad))
    return found

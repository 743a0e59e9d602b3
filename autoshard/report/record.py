"""What a plan records: every layout and every collective of a sharded model, what it is predicted to cost; as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch

from autoshard.errors import AutoshardError, PlanError
from autoshard.hardware import Hardware
from autoshard.hardware.schema import SchemaError, parsed, read
from autoshard.hardware.schema import fields as fields_from
from autoshard.layout import Grouped, Invariant, Layout, Owned, Partial, Placement, Replicate, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.memory import Memory, Recomputed
from autoshard.passes.pipeline.timeline import SCHEDULES
from autoshard.report.serving import Serving

Kind = TypeVar("Kind", bound="Record")

TOGETHER = "; "
"""between the reasons of values that one collective moves"""


@dataclass(frozen=True)
class Collective:
    """One collective of a step. ``bytes``: ring bytes per rank.

    ``fqn``: the module that asked for it; between two numbered blocks, such as layers, the one that made the value.
    """

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or permute"""
    axes: tuple[str, ...]
    phase: str
    """forward or backward"""
    bytes: float
    fqn: str
    reason: str
    value: str = ""
    """the value it moves: a parameter's name or the graph's name"""
    seconds: float = 0.0
    op: str = ""
    """the operation it is made for, a key of :attr:`Record.choices`; "" for an output of the model"""
    movable: bool = False
    """whether it may run beside compute: it moves a parameter or its gradient"""
    times: int = 1
    """how often it runs in a step; ``bytes`` and ``seconds`` are of all of them"""
    hidden_s: float = 0.0
    """of :attr:`seconds`: what runs beside the compute of the operation that it is part of"""
    bucket: str = ""
    """the first of the parameters that one message moves with this one; "" for what goes alone"""
    copied_s: float = 0.0
    """seconds, beside :attr:`seconds`, in which the rank copies it into a buffer before, or out of one after"""
    also: tuple[str, ...] = ()
    """further values that go in the same message"""

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reason of each value that it moves: several may go together."""
        return tuple(self.reason.split(TOGETHER))

    def __str__(self) -> str:
        return f"{self.kind}@{','.join(self.axes)} {self.phase} {self.bytes:.0f} B  {self.fqn}  {self.reason}"


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one step on one rank: seconds, bytes of memory, FLOPs of matmul-like ops.

    ``total_s`` = ``compute_s`` + ``exposed_s`` + ``bubble_s`` is what the search minimises. The plan's collectives take
    ``comm_s`` - ``local_s`` - ``merged_s``; ``hidden_s`` of ``comm_s`` run beside compute.
    """

    compute_s: float
    """operations, forward and backward, and the optimizer"""
    comm_s: float
    """all communication, hidden or not"""
    total_s: float
    memory_bytes: float
    """the peak of :attr:`Record.memory`"""
    flops: float
    """of the whole model, forward and backward"""
    flops_per_rank: float
    """of the busiest rank"""
    local_s: float = 0.0
    """the part of ``comm_s`` that redistributions spend in local copies, those around collectives included"""
    merged_s: float = 0.0
    """the part of ``comm_s`` that the program saves, because what one collective brings serves several readers or what
    goes together pays one latency; the search does not count it"""
    exposed_s: float = math.nan
    """the communication that compute does not hide; where nothing is said, all of it"""
    bubble_s: float = 0.0
    """waiting for other stages"""
    lower_bound: float = field(default=0.0, compare=False)
    """seconds: no plan with the layouts in :attr:`Record.given`, and with sums of what it holds within the memory budget, has a
    smaller ``total_s``; 0 where no bound is known"""
    optimizer_s: float = 0.0
    """the part of ``compute_s`` that updates the parameters"""
    schedule_s: float = 0.0
    """when the last event of the timeline ends (:mod:`autoshard.report.schedule`): what the search does not see is which
    collective finds which compute to hide behind, and what collectives save that go together"""
    mfu: float = 0.0
    """model FLOPs per rank over what the hardware could do in ``total_s``"""
    hfu: float = 0.0
    """the same of the FLOPs that the busiest rank runs"""

    def __post_init__(self) -> None:
        if math.isnan(self.exposed_s):
            object.__setattr__(self, "exposed_s", self.comm_s)

    @property
    def hidden_s(self) -> float:
        """The communication that runs beside compute."""
        return self.comm_s - self.exposed_s


@dataclass(frozen=True)
class Choice:
    """What was chosen for one operation."""

    op: str
    fqn: str
    source: str
    labels: tuple[str, ...]
    """per mesh axis: the factor that is cut, or I, R, P(…)"""
    flops: float = 0.0
    seconds: float = 0.0
    """compute, forward and backward"""
    has_rule: bool = True
    inputs: tuple[str, ...] = ()
    """per operand: the value's name"""
    outputs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    """per operand: the layout it is read in, as text"""
    alternatives: Sequence[tuple[tuple[str, ...], float]] = ()
    """the next best strategies: (labels, seconds more per step if everything else stays); found when they are asked for"""
    backward_s: float = 0.0
    """the part of ``seconds`` in the backward"""
    again: int = 0
    """1: the conversions of its operands are made again in the backward, and what it drew is drawn again; 2: it is computed
    again"""


@dataclass(frozen=True, repr=False)
class Candidate:
    """A mesh that was tried for a number of devices and not taken: what its best plan costs, and why it lost."""

    mesh: Mesh
    cost: Cost
    memory: Memory
    why: str

    def __repr__(self) -> str:
        return f"Candidate({self.mesh}: {self.cost.total_s:.3g} s, {self.memory.peak / 1e9:.3g} GB; {self.why})"


@dataclass(frozen=True)
class Staged:
    """How a graph is cut into stages along a mesh axis, and the plan of every stage on the rest of the mesh."""

    axis: str
    schedule: str
    """gpipe, 1f1b, interleaved or zero_bubble"""
    micro_batches: int
    boundaries: tuple[int, ...]
    """positions among the graph's operations before which it is cut"""
    plans: tuple[Record, ...]
    """per stage, of all its micro-batches"""
    messages: tuple[float, ...] = ()
    """per boundary the bytes that one micro-batch sends forward, whole"""
    sent: tuple[tuple[float, float], ...] = ()
    """per boundary the bytes that one rank sends of one micro-batch: forward, and the gradients that come back"""
    flying: tuple[int, ...] = ()
    """per stage the micro-batches that it keeps something for at once"""


@dataclass(frozen=True)
class Record:
    """All choices for a model on a mesh. ``layouts``: by parameter, buffer or input name, and by graph value."""

    mesh: Mesh
    layouts: Mapping[str, Layout]
    collectives: tuple[Collective, ...]
    cost: Cost
    choices: Mapping[str, Choice] = field(default_factory=dict)
    shared: Mapping[str, Layout] = field(default_factory=dict)
    outputs: tuple[Layout | None, ...] = ()
    given: tuple[str, ...] = ()
    """names whose layout was asked for, by a hint or by an earlier compilation"""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    """name → parameter, buffer, input, constant or value"""
    ties: Mapping[str, str] = field(default_factory=dict)
    """further name of a tied parameter or buffer, a key of ``layouts`` as well → the name that it has everywhere else"""
    notes: tuple[str, ...] = ()
    training: bool = True
    title: str = ""
    """the model's class"""
    modules: Mapping[str, str] = field(default_factory=dict)
    """module path → class name"""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """name → dtype, such as float32"""
    differentiable: tuple[str, ...] = ()
    """names of the values that carry a gradient"""
    memory: Memory = field(default_factory=Memory)
    """what the busiest rank holds, and when it holds most"""
    optimizer: str = "adamw"
    """whose state is counted"""
    recomputed: tuple[Recomputed, ...] = ()
    """what the backward makes again instead of having it kept"""
    shared_again: tuple[str, ...] = ()
    """values whose conversion into the shared layout is made again in the backward"""
    zero: Mapping[str, int] = field(default_factory=dict)
    """parameter → ZeRO stage 1 or 2: gathered once a step and kept; others that are gathered are so again in the backward"""
    like: str = ""
    """the expert's plan that was asked for, as text; "" for none"""
    prefetch: int = 1
    """how many buckets of parameters are gathered ahead of the one that is read"""
    micro_batches: int = 1
    """parts of the batch that the step runs one after another; shapes, and what is held, are those of one"""
    mixed_precision: str = ""
    """the policy that it was made for, as text; "" for none"""
    folded: int = 0
    """of how many ranks the folded order is in which a part of the graph has the sequence; 0: none"""
    candidates: tuple[Candidate, ...] = ()
    """where a number of devices was given instead of a mesh: the runners-up, the best first"""
    staged: Staged | None = None
    """where the graph is cut into stages: where, and the plan of each"""
    serving: Serving | None = None
    """where prompts and tokens are served by one layout of the weights: what each takes; the plan is that of a token"""

    @property
    def folds(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The values that are brought into the folded order, and those that are brought back."""
        into, back = (
            tuple(c.inputs[0] for c in self.choices.values() if c.op == f"autoshard.{name}.default")
            for name in ("folded", "unfolded")
        )
        return into, back

    @property
    def lower_bound(self) -> float:
        """:attr:`Cost.lower_bound`"""
        return self.cost.lower_bound

    def to_json(self, alternatives: bool = True) -> str:
        """The plan as JSON text; :meth:`from_json` reads it back.

        ``alternatives``: with what could have been done instead. To find that takes as long as the search.
        """
        return json.dumps(self if alternatives else _bare(self), default=_encoded, indent=1)

    @classmethod
    def from_json(cls: type[Kind], text: str | bytes) -> Kind:
        """The plan that :meth:`to_json` wrote. Raises :class:`PlanError` for anything else, with the field that is wrong."""
        try:
            return _decoded(cls, parsed(text))
        except (AutoshardError, RecursionError, SchemaError) as error:
            raise PlanError(f"this is not a plan that autoshard wrote: {error}") from error


def local_bytes(plan: Record, name: str) -> int:
    """Bytes of a value or parameter on the fullest rank (rank 0)."""
    dtype: torch.dtype = getattr(torch, plan.dtypes.get(name, "float32"))
    return math.prod(plan.layouts[name].max_local_shape(plan.shapes[name])) * dtype.itemsize


_LETTERS: dict[str, Placement] = {"R": Replicate(), "I": Invariant(), "P": Partial()}


def _bare(plan: Record) -> Record:
    choices = {n: replace(c, alternatives=()) for n, c in plan.choices.items()}
    staged = plan.staged and replace(plan.staged, plans=tuple(map(_bare, plan.staged.plans)))
    return replace(plan, choices=choices, staged=staged)


def _encoded(part: Any) -> Any:
    """A part of a plan that JSON has no form for."""
    if isinstance(part, Layout):
        order = {} if part.order == part.mesh.axes else {"order": part.order}
        return {"placements": [str(p) for p in part.placements], **order}
    if isinstance(part, Mesh):
        return dict(zip(part.axes, part.shape, strict=True))
    if isinstance(part, Mapping | Sequence):
        return dict(part) if isinstance(part, Mapping) else list(part)
    data = {f.name: getattr(part, f.name) for f in fields(part)}
    if isinstance(part, Record):
        more = {"format": 1, "hardware": part.mesh.hardware, "lower_bound": part.lower_bound}
        data = {**more, **{k: v for k, v in data.items() if v is not None}}
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in data.items()}


def _decoded(cls: type[Kind], data: Any, path: str = "") -> Kind:
    """The inverse of :func:`_encoded`. What plans of before lack has its default."""
    form = read(_Form, data, path)
    if form.format != 1:
        raise SchemaError(f"its format is {form.format}, and 1 is known")
    for name, least in _LEAST.items():
        if getattr(form, name) < least:
            raise SchemaError(f"{name} is an int of at least {least}, got {getattr(form, name)}")
    hardware, mesh = form.hardware, Mesh(form.mesh, form.hardware)
    readers: dict[Any, Callable[[Any, str], Any]] = {
        Mesh: lambda x, p: Mesh(read(Mapping[str, int], x, p), hardware),
        Layout: lambda x, p: _layout_from(mesh, read(_LayoutForm, x, p)),
        Record: lambda x, p: _decoded(cls, x, p),
        float: _finite,
    }
    cost = {"lower_bound": form.lower_bound, **data["cost"]} if isinstance(data.get("cost"), dict) else None
    made = cls(**fields_from(cls, {"given": data.get("pinned", ()), **data, "cost": cost}, path, readers))
    _check(made)
    return made


_LARGEST = 1e100
"""of the numbers in a plan: so that sums of them are finite"""


def _finite(data: Any, path: str) -> float:
    found: float = read(float, data, path)
    if abs(found) >= _LARGEST:
        raise SchemaError(f"{path} is a number below {_LARGEST:g}, got {found}")
    return found


def _check(plan: Record) -> None:
    """Raise :class:`SchemaError` where one part of a plan names what another lacks, or is not as long as that."""
    choices, collectives = plan.choices.values(), plan.collectives
    for part in ("shapes", "dtypes", "kinds"):
        _known(getattr(plan, part), part, plan.layouts.keys() - plan.ties.keys())
    read_or_made = {name for c in choices for name in (*c.inputs, *c.outputs)}
    _known(plan.layouts, "layouts", {*plan.ties, *plan.ties.values(), *plan.shared, *plan.zero, *read_or_made})
    inside = plan.choices.keys()  # of an op with several results the op itself
    _known({*plan.layouts, *inside}, "layouts", {c.value for c in collectives} - {""})
    _known(plan.choices, "choices", {c.op for c in collectives} - {""})
    _known(plan.mesh.axes, "mesh", {axis for c in collectives for axis in c.axes})
    _known(_DTYPES, "dtypes of torch", set(plan.dtypes.values()))
    for name, layout in (*plan.layouts.items(), *plan.shared.items()):
        layout.max_local_shape(plan.shapes[plan.ties.get(name, name)])
    for name, choice in plan.choices.items():
        uses, labels = len(choice.uses), {len(x) for x in (choice.labels, *(x for x, _ in choice.alternatives))}
        if uses != len(choice.inputs) or labels != {len(plan.mesh.axes)} or (choice.flops and not choice.outputs):
            raise SchemaError(
                f"choices[{name!r}] has a use per input, a label per axis of the mesh, and outputs of its flops"
            )
    if (staged := plan.staged) is not None:
        _known(plan.mesh.axes, "mesh", {staged.axis})
        _known(SCHEDULES, "schedules", {staged.schedule})
        size, count = plan.mesh.size_of((staged.axis,)), len(staged.plans)
        between = {len(x) for x in (staged.boundaries, staged.messages, staged.sent)}
        if between != {count - 1} or len(staged.flying) != count or count % size:
            raise SchemaError(f"staged is of {size} stages or a multiple, with one boundary less")


def _known(names: Container[str], where: str, asked: Iterable[str]) -> None:
    if lacking := sorted(name for name in asked if name not in names):
        raise SchemaError(f"{where} lacks {lacking[0]!r}")


_DTYPES = {str(x).removeprefix("torch.") for x in vars(torch).values() if isinstance(x, torch.dtype)}


@dataclass(frozen=True)
class _Form:
    """What is read of a plan before the rest."""

    mesh: Mapping[str, int]
    hardware: Hardware
    lower_bound: float
    format: int = 1
    micro_batches: int = 1
    prefetch: int = 1
    folded: int = 0


_LEAST = {"micro_batches": 1, "prefetch": 1, "folded": 0}


@dataclass(frozen=True)
class _LayoutForm:
    placements: tuple[str, ...]
    order: tuple[str, ...] | None = None


def _layout_from(mesh: Mesh, form: _LayoutForm) -> Layout:
    return Layout(mesh, [placement_from(p) for p in form.placements], form.order)


def placement_from(text: str) -> Placement:
    """``S(1)``, ``S(1/2)``, ``S(1/4:1:1)``, ``O(2)``, ``R``, ``I``, ``P`` or ``P(max)`` as a placement."""
    if text in _LETTERS:
        return _LETTERS[text]
    inner = text[2:-1]
    if text.startswith("O("):
        return Owned(owner=int(inner))
    if "/" in inner:
        dim, parts = inner.split("/")
        return Grouped(int(dim), tuple(map(int, parts.split(":"))) if ":" in parts else (1,) * int(parts))
    return Shard(int(inner)) if text.startswith("S(") else Partial(inner)

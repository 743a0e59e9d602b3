"""The record of a plan: layouts, collectives, costs, memory, serving; to and from JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch

from autoshard.errors import AutoshardError, PlanError
from autoshard.hardware import Hardware
from autoshard.hardware.schema import SchemaError, parse_json, read_as
from autoshard.hardware.schema import read_fields as fields_from
from autoshard.layout import Grouped, Invariant, Layout, Owned, Partial, Placement, Replicate, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.analyses import LazySequence
from autoshard.passes.ir.assignment import is_dividing_label
from autoshard.passes.ir.memory import Memory, Offloaded, Recomputed
from autoshard.passes.ir.text import show_bytes, show_seconds
from autoshard.passes.pipeline.schedules import SCHEDULES


@dataclass(frozen=True)
class Phase:
    """One kind of call, such as prefill or decode; bytes are those of the busiest rank."""

    name: str
    times: float
    """runs, relative to other phases"""
    requests: int
    """batch size"""
    tokens: int
    """tokens per request that the call reads"""
    seconds: float
    sent: float  # bytes of its collectives
    weights: float
    """bytes of weights read; of embedding tables the rows looked up"""
    caches: float
    """bytes of the KV cache read"""
    least_s: float
    """roofline of all devices: matmuls at peak FLOP/s, or weights and KV cache read once"""
    peak: float
    """peak memory of a rank in bytes"""

    @property
    def roofline(self) -> float:
        """Share of ``seconds`` that the roofline takes, which no layout can save."""
        return self.least_s / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Serving:
    """Serving of prompts and tokens with one layout of the weights; see :func:`autoshard.plan`."""

    objective: str
    """latency or throughput"""
    phases: tuple[Phase, ...]
    devices: int
    lower_bound: float = 0.0
    """lower bound on :attr:`total_s` with one layout of the weights"""
    room: float = math.nan
    """further requests of this length whose KV cache would fit; nan without caches"""

    @property
    def decode(self) -> Phase:
        """The decode phase: fewest tokens per request, then most frequent."""
        return min(self.phases, key=lambda p: (p.tokens, -p.times))

    @property
    def total_s(self) -> float:
        """Seconds of all phases, each as often as it runs."""
        return math.fsum(p.times * p.seconds for p in self.phases)

    @property
    def seconds_per_token(self) -> float:
        """Latency of the next token of a request."""
        return self.decode.seconds

    @property
    def tokens_per_second(self) -> float:
        """Throughput of new tokens over all requests and devices; the time includes prompts."""
        decode = self.decode
        return decode.times * decode.requests / self.total_s if self.total_s else 0.0

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """Bytes per rank for a new token of one request: sent, weights read, KV cache read."""
        decode = self.decode
        return {n: getattr(decode, n) / decode.requests for n in ("sent", "weights", "caches")}


def serving_text(serving: Serving) -> list[str]:
    """Lines for a report."""
    decode, per = serving.decode, serving.bytes_per_token
    lines = [
        f"{serving.objective}: {show_seconds(serving.seconds_per_token)} a token of each request, "
        f"{serving.tokens_per_second:.3g} tokens/s by {serving.devices} devices ({_requests(decode.requests)})",
        f"a token of a request: {show_bytes(per['sent'])} sent per rank, {show_bytes(per['weights'])} of weights and "
        f"{show_bytes(per['caches'])} of caches read",
    ]
    lines += [
        f"{phase.name} ×{phase.times:g}: {_requests(phase.requests)} of {phase.tokens} "
        f"token{'s' if phase.tokens > 1 else ''} in {show_seconds(phase.seconds)}, "
        f"{phase.roofline:.0%} of it by the roofline; {show_bytes(phase.peak)} held per rank"
        for phase in serving.phases
    ]
    if not math.isnan(serving.room):
        lines.append(f"room for the caches of {serving.room:.0f} more requests as long as these")
    return lines


def _requests(count: int) -> str:
    return f"{count} request{'s' if count > 1 else ''}"


Kind = TypeVar("Kind", bound="Record")

ComparedRow = tuple[str, float | None, float, str]
"""(name, seconds of a step or None without a plan, peak bytes per rank, why it is not the plan)"""

REASON_SEPARATOR = "; "
"""separator of the reasons of several values in one collective"""

GRADIENT_SUM = "add its gradients"
"""reason of a collective that sums the gradients of a replicated value"""

RECOMPUTED_SUFFIX, REGATHERED_SUFFIX = "(recomputed)", "(gathered again)"
"""ends of the reasons of collectives that the backward repeats"""


@dataclass(frozen=True)
class Collective:
    """One collective of a step. ``bytes``: ring bytes per rank.

    ``fqn``: the module that needs it; between two numbered blocks (layers), the producer's.
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
    """moved value: name of a parameter or graph value"""
    seconds: float = 0.0
    op: str = ""
    """the operation that needs it, a key of :attr:`Record.choices`; "" for a model output"""
    movable: bool = False
    """overlappable: moves a parameter or gradient, so may run during other compute"""
    times: int = 1
    """runs per step; ``bytes`` and ``seconds`` include all of them"""
    hidden_s: float = 0.0
    """part of :attr:`seconds` hidden by its own operation (ring attention, collective matmul)"""
    bucket: str = ""
    """first parameter of its bucket; "" if not bucketed"""
    copied_s: float = 0.0
    """seconds of packing into and unpacking from buffers, in addition to :attr:`seconds`"""
    also: tuple[str, ...] = ()
    """further values in the same message"""

    @property
    def repeats(self) -> bool:
        """Whether the backward repeats a collective of the forward."""
        return self.reason.endswith((RECOMPUTED_SUFFIX, REGATHERED_SUFFIX))

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reason of each moved value; coalesced collectives have several."""
        return tuple(self.reason.split(REASON_SEPARATOR))

    @property
    def kind_on_axes(self) -> str:
        """Kind and axes, such as "all_gather@dp,tp"."""
        return f"{self.kind}@{','.join(self.axes)}"

    def __str__(self) -> str:
        return f"{self.kind_on_axes} {self.phase} {self.bytes:.0f} B  {self.fqn}  {self.reason}"


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one step on one rank: seconds, bytes of memory, FLOPs of matmul-like ops.

    The search minimises ``total_s`` = ``compute_s`` + ``exposed_s`` + ``bubble_s``. The plan's
    collectives take ``comm_s`` - ``local_s`` - ``merged_s``; ``hidden_s`` of ``comm_s`` overlaps
    with compute.
    """

    compute_s: float
    """operations, forward and backward, and optimizer"""
    comm_s: float
    """all communication, exposed and hidden"""
    total_s: float
    memory_bytes: float
    """the peak of :attr:`Record.memory`"""
    flops: float
    """FLOPs of the full model, forward and backward"""
    flops_per_rank: float
    """FLOPs of the busiest rank"""
    local_s: float = 0.0
    """part of ``comm_s`` in local copies of redistributions, those around collectives included"""
    merged_s: float = 0.0
    """part of ``comm_s`` saved by shared and coalesced collectives, unseen by the search"""
    exposed_s: float = math.nan
    """communication that compute does not hide; default: all of it"""
    bubble_s: float = 0.0
    """pipeline bubble: waiting for other stages"""
    lower_bound: float = field(default=0.0, compare=False)
    """lower bound on ``total_s`` (seconds) of any plan with the layouts :attr:`Record.given` and
    linear sums of memory within the budget; 0 if unknown"""
    optimizer_s: float = 0.0
    """part of ``compute_s`` that updates parameters"""
    schedule_s: float = 0.0
    """end of the timeline (:mod:`autoshard.report.schedule`), which pairs collectives with compute
    that hides them and includes coalescing"""
    mfu: float = 0.0
    """model FLOPs utilisation: model FLOPs per rank over peak FLOPs in ``total_s``"""
    hfu: float = 0.0
    """hardware FLOPs utilisation: the same for FLOPs executed by the busiest rank"""
    tokens: float = 0.0
    """token ids that a step reads; 0 if the model looks up none"""
    devices: float = 1.0

    def __post_init__(self) -> None:
        if math.isnan(self.exposed_s):
            object.__setattr__(self, "exposed_s", self.comm_s)

    @property
    def hidden_s(self) -> float:
        """Communication that overlaps with compute."""
        return self.comm_s - self.exposed_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices; 0 if the model looks up no token ids."""
        return self.tokens / self.total_s if self.total_s else 0.0

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.devices

    @property
    def device_hours_per_token(self) -> float:
        """Hours of one device for a token; times 1e12 for a trillion."""
        return self.devices * self.total_s / self.tokens / 3600 if self.tokens else math.nan


@dataclass(frozen=True)
class Choice:
    """The strategy chosen for one operation."""

    op: str
    fqn: str
    source: str
    labels: tuple[str, ...]
    """per mesh axis the sharded factor, or I, R, P(…)"""
    flops: float = 0.0
    seconds: float = 0.0
    """compute, forward and backward"""
    has_rule: bool = True
    inputs: tuple[str, ...] = ()
    """per operand the value's name"""
    outputs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    """per operand the layout it is read in, as text"""
    alternatives: Sequence[tuple[tuple[str, ...], float]] = ()
    """runner-up strategies: (labels, extra seconds per step if all else stays); computed lazily"""
    backward_s: float = 0.0
    """part of ``seconds`` in the backward"""
    again: int = 0
    """recompute in the backward: 1: operand redistributions and random numbers; 2: the operation"""


@dataclass(frozen=True, repr=False)
class Candidate:
    """A runner-up mesh of the search over devices: cost and memory of its plan, and why it lost."""

    mesh: Mesh
    cost: Cost
    memory: Memory
    why: str

    def __repr__(self) -> str:
        return f"Candidate({self.mesh}: {self.cost.total_s:.3g} s, {self.memory.peak / 1e9:.3g} GB; {self.why})"


@dataclass(frozen=True)
class Staged:
    """Pipeline stages along a mesh axis, and the plan of every stage on the rest of the mesh."""

    axis: str
    schedule: str
    """gpipe, 1f1b, interleaved or zero_bubble"""
    micro_batches: int
    boundaries: tuple[int, ...]
    """positions among the graph's operations where stages 1, 2, … begin"""
    plans: tuple[Record, ...]
    """per stage, of all micro-batches"""
    messages: tuple[float, ...] = ()
    """per boundary the unsharded bytes of one micro-batch sent forward"""
    sent: tuple[tuple[float, float], ...] = ()
    """per boundary the bytes per rank of one micro-batch: (activations forward, gradients back)"""
    flying: tuple[int, ...] = ()
    """per stage the micro-batches in flight"""


@dataclass(frozen=True)
class Record:
    """All choices for a model on a mesh. ``layouts``: by parameter, buffer, input or value name."""

    mesh: Mesh
    layouts: Mapping[str, Layout]
    collectives: tuple[Collective, ...]
    cost: Cost
    choices: Mapping[str, Choice] = field(default_factory=dict)
    shared: Mapping[str, Layout] = field(default_factory=dict)
    outputs: tuple[Layout | None, ...] = ()
    given: tuple[str, ...] = ()
    """names whose layout was fixed by a hint or an earlier compilation"""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    """name → parameter, buffer, input, constant or value"""
    ties: Mapping[str, str] = field(default_factory=dict)
    """other name of a tied parameter or buffer (also in ``layouts``) → its name everywhere else"""
    notes: tuple[str, ...] = ()
    training: bool = True
    title: str = ""  # the model's class
    modules: Mapping[str, str] = field(default_factory=dict)
    """module path → class name"""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """name → dtype, such as float32"""
    differentiable: tuple[str, ...] = ()
    """names of the values that carry a gradient"""
    memory: Memory = field(default_factory=Memory)
    """memory of the fullest rank, and the moment of its peak"""
    memory_budget: float = 0.0
    """bytes per rank that the search kept within; 0 if unknown"""
    optimizer: str = "adamw"
    """optimizer whose state is counted"""
    recomputed: tuple[Recomputed, ...] = ()
    """values that the backward recomputes instead of saving (activation checkpointing)"""
    offloaded: tuple[Offloaded, ...] = ()
    """optimizer states and activations in host memory"""
    shared_again: tuple[str, ...] = ()
    """values whose redistribution into the shared layout is recomputed in the backward"""
    zero: Mapping[str, int] = field(default_factory=dict)
    """parameter → ZeRO stage 1 or 2: kept gathered for the step; others are gathered again"""
    like: str = ""
    """the named strategy asked for, as text; "" for none"""
    prefetch: int = 1
    """parameter buckets gathered ahead of the one in use"""
    micro_batches: int = 1
    """micro-batches per step; shapes and memory are those of one"""
    mixed_precision: str = ""
    """mixed-precision policy, as text; "" for none"""
    asked: tuple[str, ...] = ()
    """options other than the defaults, as the command line takes them: ``--like=fsdp``"""
    folded: int = 0
    """ranks of the zigzag (load-balanced) sequence order of part of the graph; 0: none"""
    loss_chunks: int = 1
    """chunks of a rank's rows in which a linear layer and its cross entropy run; 1: all at once"""
    candidates: tuple[Candidate, ...] = ()
    """runners-up of the search over a number of devices, best first"""
    baselines: Sequence[ComparedRow] = field(default=(), compare=False, repr=False)
    """named strategies on the same mesh; planned when they are first read (:attr:`compared`)"""
    staged: Staged | None = None
    """pipeline stages and their plans"""
    serving: Serving | None = None
    """serving figures, if planned for requests; the plan is then that of a token"""

    @property
    def folds(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Values brought into the zigzag order, and values brought back."""
        every = self.choices.values()
        of = {n: tuple(c.inputs[0] for c in every if c.op == f"autoshard.{n}.default") for n in ("folded", "unfolded")}
        return of["folded"], of["unfolded"]

    @property
    def idle_axes(self) -> tuple[str, ...]:
        """Mesh axes, other than that of the stages, along which no product is divided."""
        stages = "" if self.staged is None else self.staged.axis
        return tuple(axis for axis in axes_without_work(self.mesh, self.choices) if axis != stages)

    @property
    def lower_bound(self) -> float:
        """:attr:`Cost.lower_bound`"""
        return self.cost.lower_bound

    @property
    def dtype(self) -> str:
        """The dtype of most FLOPs, such as bfloat16."""
        work: Counter[str] = Counter()
        for c in (c for c in self.choices.values() if c.flops):
            of = c.inputs if "linear_cross_entropy" in c.op else c.outputs  # a loss may have another dtype
            work[self.dtypes.get(of[0], "float32")] += int(c.flops)
        return max(work, key=lambda name: work[name], default="float32")

    @property
    def strategies_are_compared(self) -> bool:
        """Whether :attr:`baselines` are known, so that :attr:`compared` costs nothing."""
        return self.baselines.is_found if isinstance(self.baselines, LazySequence) else bool(self.baselines)

    @property
    def compared(self) -> tuple[ComparedRow, ...]:
        """This plan, then named strategies and runners-up, fastest first, then those without a plan.
        Each row: (name, seconds or None, peak bytes per rank, why not). Named strategies are
        planned when this is first read, by a quick search each; all together take about as long as
        capture and plan. Until then ``print(plan)`` lists the runners-up of a search over
        meshes."""
        self.baselines[:0]
        return self.known_compared

    @property
    def known_compared(self) -> tuple[ComparedRow, ...]:
        """:attr:`compared`, of what is known already."""
        own = "free" if not self.like else f"like={self.like}"
        meshes = ((f"mesh {c.mesh}", c.cost.total_s, c.memory.peak, c.why) for c in self.candidates)
        named = self.baselines if self.strategies_are_compared else ()
        others = sorted((*named, *meshes), key=lambda row: (row[1] is None, row[1] or -row[2]))
        return ((own, self.cost.total_s, self.cost.memory_bytes, ""), *others)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have :attr:`baselines` if they are known."""
        return {**vars(self), "baselines": self.baselines if self.strategies_are_compared else ()}

    def to_json(self, alternatives: bool = True) -> str:
        """The plan as JSON text, for :meth:`from_json`.
        ``alternatives``: include runner-up strategies; computing them takes as long as the search.
        Named strategies are written if :attr:`compared` was read."""
        return json.dumps(self if alternatives else _without_alternatives(self), default=_encoded, indent=1)

    @classmethod
    def from_json(cls: type[Kind], text: str | bytes) -> Kind:
        """Read a plan of :meth:`to_json`. Raises :class:`PlanError` with the invalid field."""
        try:
            return _decoded(cls, parse_json(text))
        except (AutoshardError, RecursionError, SchemaError) as error:
            raise PlanError(f"this is not a plan that autoshard wrote: {error}") from error


def axes_without_work(mesh: Mesh, choices: Mapping[str, Choice]) -> tuple[str, ...]:
    """Axes of several ranks that all compute the same products (without products: the same)."""
    heavy = [choice for choice in choices.values() if choice.flops] or [*choices.values()]
    return tuple(
        axis
        for i, axis in enumerate(mesh.axes)
        if mesh.shape[i] > 1 and not any(is_dividing_label(choice.labels[i]) for choice in heavy)
    )


def local_bytes(plan: Record, name: str) -> int:
    """Bytes of a value or parameter on rank 0: the largest shard, unless another rank owns it."""
    dtype: torch.dtype = getattr(torch, plan.dtypes.get(name, "float32"))
    return math.prod(plan.layouts[name].max_local_shape(plan.shapes[name])) * dtype.itemsize


_LETTER_PLACEMENTS: dict[str, Placement] = {"R": Replicate(), "I": Invariant(), "P": Partial()}


def _without_alternatives(plan: Record) -> Record:
    choices = {n: replace(c, alternatives=()) for n, c in plan.choices.items()}
    staged = plan.staged and replace(plan.staged, plans=tuple(map(_without_alternatives, plan.staged.plans)))
    return replace(plan, choices=choices, staged=staged, baselines=())


def _encoded(part: Any) -> Any:
    """JSON types for a part of a plan, as ``json.dumps(default=…)``."""
    if isinstance(part, Layout):
        order = {} if part.order == part.mesh.axes else {"order": part.order}
        return {"placements": [str(p) for p in part.placements], **order}
    if isinstance(part, Mesh):
        return dict(zip(part.axes, part.shape, strict=True))
    if isinstance(part, Hardware):
        return part.to_dict()
    if isinstance(part, Mapping | Sequence):
        return dict(part) if isinstance(part, Mapping) else list(part)
    data = {f.name: getattr(part, f.name) for f in fields(part)}
    if isinstance(part, Record):
        more = {"format": 1, "hardware": part.mesh.hardware, "lower_bound": part.lower_bound}
        if not part.strategies_are_compared:
            del data["baselines"]
        data = {**more, **{k: v for k, v in data.items() if v is not None}}
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in data.items()}


def _decoded(cls: type[Kind], data: Any, path: str = "") -> Kind:
    """The inverse of :func:`_encoded`; fields that older plans lack get defaults."""
    form = read_as(_PlanHeader, data, path)
    if form.format != 1:
        raise SchemaError(f"its format is {form.format}, but only 1 is known")
    for name, least in _FIELD_MINIMUMS.items():
        if getattr(form, name) < least:
            raise SchemaError(f"{name} is an int of at least {least}, got {getattr(form, name)}")
    hardware, mesh = form.hardware, Mesh(form.mesh, form.hardware)
    readers: dict[Any, Callable[[Any, str], Any]] = {
        Mesh: lambda x, p: Mesh(read_as(Mapping[str, int], x, p), hardware),
        Layout: lambda x, p: _layout_from(mesh, read_as(_LayoutJson, x, p)),
        Record: lambda x, p: _decoded(cls, x, p),
        float: _finite,
    }
    cost = {"lower_bound": form.lower_bound, **data["cost"]} if isinstance(data.get("cost"), dict) else None
    made = cls(**fields_from(cls, {"given": data.get("pinned", ()), **data, "cost": cost}, path, readers))
    _check_consistency(made)
    return made


_LARGEST_NUMBER = 1e100
"""limit of numbers in a plan, so that their sums are finite"""


def _finite(data: Any, path: str) -> float:
    found: float = read_as(float, data, path)
    if abs(found) >= _LARGEST_NUMBER:
        raise SchemaError(f"{path} must be a number below {_LARGEST_NUMBER:g}, got {found}")
    return found


def _check_consistency(plan: Record) -> None:
    """Raise :class:`SchemaError` if parts of a plan are inconsistent in names or lengths."""
    choices, collectives = plan.choices.values(), plan.collectives
    for part in ("shapes", "dtypes", "kinds"):
        _require_names(getattr(plan, part), part, plan.layouts.keys() - plan.ties.keys())
    read_or_made = {name for c in choices for name in (*c.inputs, *c.outputs)}
    _require_names(plan.layouts, "layouts", {*plan.ties, *plan.ties.values(), *plan.shared, *plan.zero, *read_or_made})
    inside = plan.choices.keys()  # an op with several results stands for them
    _require_names({*plan.layouts, *inside}, "layouts", {c.value for c in collectives} - {""})
    _require_names(plan.choices, "choices", {c.op for c in collectives} - {""})
    _require_names(plan.mesh.axes, "mesh", {axis for c in collectives for axis in c.axes})
    _require_names(_DTYPE_NAMES, "dtypes of torch", set(plan.dtypes.values()))
    for name, layout in (*plan.layouts.items(), *plan.shared.items()):
        layout.max_local_shape(plan.shapes[plan.ties.get(name, name)])
    for name, choice in plan.choices.items():
        uses, labels = len(choice.uses), {len(x) for x in (choice.labels, *(x for x, _ in choice.alternatives))}
        if uses != len(choice.inputs) or labels != {len(plan.mesh.axes)} or (choice.flops and not choice.outputs):
            raise SchemaError(
                f"choices[{name!r}] has a use per input, a label per axis of the mesh, and outputs of its flops"
            )
    if (staged := plan.staged) is not None:
        _require_names(plan.mesh.axes, "mesh", {staged.axis})
        _require_names(SCHEDULES, "schedules", {staged.schedule})
        size, count = plan.mesh.size_of((staged.axis,)), len(staged.plans)
        between = {len(x) for x in (staged.boundaries, staged.messages, staged.sent)}
        if between != {count - 1} or len(staged.flying) != count or count % size:
            raise SchemaError(f"staged must have {size} stages or a multiple, with one boundary fewer")


def _require_names(names: Container[str], where: str, asked: Iterable[str]) -> None:
    if lacking := sorted(name for name in asked if name not in names):
        raise SchemaError(f"{where} lacks {lacking[0]!r}")


_DTYPE_NAMES = {str(x).removeprefix("torch.") for x in vars(torch).values() if isinstance(x, torch.dtype)}


@dataclass(frozen=True)
class _PlanHeader:
    """Fields of a plan that are read first."""

    mesh: Mapping[str, int]
    hardware: Hardware
    lower_bound: float
    format: int = 1
    micro_batches: int = 1
    prefetch: int = 1
    folded: int = 0
    loss_chunks: int = 1


_FIELD_MINIMUMS = {"micro_batches": 1, "prefetch": 1, "folded": 0, "loss_chunks": 1}


@dataclass(frozen=True)
class _LayoutJson:
    placements: tuple[str, ...]
    order: tuple[str, ...] | None = None


def _layout_from(mesh: Mesh, form: _LayoutJson) -> Layout:
    return Layout(mesh, [placement_from(p) for p in form.placements], form.order)


def placement_from(text: str) -> Placement:
    """``S(1)``, ``S(1/4:1:1)``, ``O(2)``, ``R``, ``I``, ``P`` or ``P(max)`` as a placement."""
    inner = text[2:-1]
    if text in _LETTER_PLACEMENTS or text.startswith("O("):
        return _LETTER_PLACEMENTS[text] if text in _LETTER_PLACEMENTS else Owned(owner=int(inner))
    if "/" in inner:
        dim, parts = inner.split("/")
        return Grouped(int(dim), tuple(map(int, parts.split(":"))) if ":" in parts else (1,) * int(parts))
    return Shard(int(inner)) if text.startswith("S(") else Partial(inner)

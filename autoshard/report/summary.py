"""First lines of a report: what a plan is in the field's words, does it fit, how fast, how sure."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from autoshard.layout import Shard
from autoshard.passes.ir.memory import Offloaded
from autoshard.passes.ir.text import block_path, show_bytes, show_seconds
from autoshard.passes.rules.facts import is_view_named
from autoshard.report.record import Choice, ComparedRow, Cost, Record

Described = TypeVar("Described", bound=Record)

STATED_ERRORS = {
    "h100": "−20% to +4% on 16 published training steps",
    "a100": "−9% to +6% on 12 published training steps",
}
"""device → errors of predicted steps (docs/internals/cost_model.md, plans of ``like=`` alone)"""

UNLIMITED_BYTES = 1e15
"""memory of a device from which on it counts as unlimited"""


USUAL_ROLES = {
    **dict.fromkeys(("dp", "ddp", "fsdp", "hsdp", "data"), ("data", "ZeRO")),
    **dict.fromkeys(("tp", "model"), ("tensor",)),
    **dict.fromkeys(("cp", "sp"), ("context", "tensor + sequence", "spatial")),
    "ep": ("expert",),
}
"""usual name of a mesh axis → first words of the roles that it stands for"""

TABLES, EXPERTS = "sharded embedding tables", "sharded experts"

FULL_SHARE = 0.9
"""share of a block's FLOPs, but its last product's, from which on its recomputation is called full"""


# --- figures ---


def utilisation(plan: Record) -> tuple[float, float]:
    """(MFU, HFU): model FLOPs per rank, and executed FLOPs of the busiest rank, over peak FLOPs."""
    capacity = plan.mesh.hardware.peak(getattr(torch, plan.dtype)) * plan.cost.total_s
    if capacity <= 0:
        return 0.0, 0.0
    return plan.cost.flops / plan.mesh.size / capacity, plan.cost.flops_per_rank / capacity


def with_rates(plan: Described) -> Described:
    """``plan`` with the figures of its cost that need all of it: MFU, HFU, tokens, devices."""
    mfu, hfu = utilisation(plan)
    rates = replace(plan.cost, mfu=mfu, hfu=hfu, tokens=step_tokens(plan), devices=plan.mesh.size)
    return replace(plan, cost=rates)


def step_tokens(plan: Record) -> int:
    """Tokens of a step: elements of the largest input of token ids that an embedding looks up."""
    views: dict[str, str] = {}
    found = 0
    for choice in plan.choices.values():
        if is_view_named(choice.op) and choice.inputs:
            views |= dict.fromkeys(choice.outputs, views.get(choice.inputs[0], choice.inputs[0]))
        if choice.op.startswith("aten.embedding.") and len(choice.inputs) > 1:
            name = views.get(choice.inputs[1], choice.inputs[1])
            if plan.kinds.get(name) == "input":
                found = max(found, math.prod(plan.shapes[name]))
    return found * _step_micro_batches(plan)


def _step_micro_batches(plan: Record) -> int:
    return plan.micro_batches if plan.staged is None else plan.staged.micro_batches


def _samples(plan: Record) -> int:
    """Rows of the first input, all micro-batches together; 0 without inputs."""
    shapes = (plan.shapes[name] for name, kind in plan.kinds.items() if kind == "input" and plan.shapes[name])
    return next((shape[0] for shape in shapes), 0) * _step_micro_batches(plan)


def work_seconds(plan: Record) -> float:
    """Seconds of all operations, collectives (hidden ones too) and the optimizer: shares of it sum
    to 1, while hidden communication may exceed the step."""
    parts = (*(c.seconds for c in plan.choices.values()), *(c.seconds for c in plan.collectives))
    return math.fsum((*parts, plan.cost.optimizer_s))


def what_if(plan: Record) -> Iterator[tuple[str, str]]:
    """(question, command line) of nearby plans; MODEL: one the command line cannot name."""
    mesh, hardware, rows = plan.mesh.sizes, plan.mesh.hardware, _samples(plan)
    (*name,) = (word for word in plan.asked if word[0] not in "-#")
    comments = dict.fromkeys(word for word in plan.asked if word.startswith("#"))
    own: dict[str, list[str]] = {}
    for option, _, value in (word.partition("=") for word in plan.asked if word.startswith("--")):
        own.setdefault(option, []).append(value)

    def command(sizes: Mapping[str, int] = mesh, **changed: object) -> str:
        asked: dict[str, object] = {"--mesh": ",".join(f"{axis}={n}" for axis, n in sizes.items())}
        asked |= {"--hardware": hardware.name, "--dtype": _parameter_dtype(plan)}
        if not name:  # else those of the command line are in plan.asked
            asked |= {"--batch": rows or None, "--seq": _sequence_length(plan)}
        asked |= {} if plan.training else {"--inference": ""}
        asked |= {**own, **{f"--{key.replace('_', '-')}": value for key, value in changed.items()}}
        words = ["autoshard plan", *(name or ["MODEL"])]
        for option, values in asked.items():
            given = [] if values is None else values if isinstance(values, list) else [values]
            words += [f"{option} {shlex.quote(str(value))}" if value != "" else option for value in given]
        return " ".join([*words, *comments])

    if rows:
        yield "twice the batch", command(batch=2 * rows)
    if hardware.memory_bytes < UNLIMITED_BYTES:
        yield "half the memory", command(memory_budget=f"{(plan.memory_budget or hardware.memory_bytes) / 2e9:.3g}e9")
    yield "other hardware", command(hardware="a100" if hardware.name.startswith("h100") else "h100")
    yield "twice the devices", command({**mesh, plan.mesh.axes[0]: 2 * plan.mesh.shape[0]})


def _parameter_dtype(plan: Record) -> str | None:
    """The floating dtype of most elements of the parameters."""
    size: Counter[str] = Counter()
    for name, kind in plan.kinds.items():
        if kind == "parameter" and "float" in plan.dtypes.get(name, ""):
            size[plan.dtypes[name]] += math.prod(plan.shapes[name])
    return max(size, key=lambda dtype: size[dtype], default=None)


def _sequence_length(plan: Record) -> int | None:
    """Dim 1 of the first input of integers of two dims."""
    inputs = (name for name, kind in plan.kinds.items() if kind == "input" and len(plan.shapes[name]) == 2)
    return next((plan.shapes[name][1] for name in inputs if plan.dtypes.get(name, "").startswith("int")), None)


# --- the plan in the field's words ---


def strategy_text(plan: Record) -> str:
    """Such as "ZeRO-3 over dp=64, full recomputation of 12 of 32 blocks"."""
    parts = [*_parallelism(plan), *_recomputation(plan), *map(offloaded_text, plan.offloaded)]
    if plan.staged is None and plan.micro_batches > 1:
        parts.append(f"gradient accumulation over {plan.micro_batches} micro-batches")
    if plan.loss_chunks > 1:
        parts.append(f"loss in {plan.loss_chunks} chunks")
    return ", ".join(parts)


def offloaded_text(part: Offloaded) -> str:
    """Such as "optimizer states on the host: 12.3 GB, 0.21 s a step, hidden 0.18 s"."""
    hidden = show_seconds(max(0.0, part.seconds - part.exposed_s))
    return f"{part.what} on the host: {show_bytes(part.bytes)}, {show_seconds(part.seconds)} a step, hidden {hidden}"


def _parallelism(plan: Record) -> Iterator[str]:
    roles: dict[str, list[str]] = {}
    for axis, size in plan.mesh.sizes.items():
        if size > 1 and (plan.staged is None or axis != plan.staged.axis):
            roles.setdefault(axis_role(plan, axis), []).append(axis)
    if plan.staged is not None:
        stages, size = len(plan.staged.plans), plan.mesh.size_of(plan.staged.axis)
        more = f", {stages // size} stages per rank" if stages > size else ""
        schedule = plan.staged.schedule.replace("1f1b", "1F1B").replace("_", "-")
        where = f"{plan.staged.axis}={size}"
        yield f"pipeline parallel over {where} ({schedule}, {plan.staged.micro_batches} micro-batches{more})"
    labels = [role for role, axes in roles.items() if role != "replicated" and not _are_usual_names(axes, role)]
    for role, axes in roles.items():
        sizes = "×".join(f"{axis}={plan.mesh.size_of(axis)}" for axis in axes)
        if role == "replicated":
            yield f"replicated along {sizes} (unused)"
        elif len(axes) == 1 and role not in labels:
            yield f"{role} over {sizes}"
        else:  # the last one says it for all
            note = "; axis names are labels" if role in labels[-1:] else ""
            yield f"{role} over {plan.mesh.size_of(axes)} ranks ({sizes}{note})"
    if not roles and plan.staged is None:
        yield "one device"


def _are_usual_names(axes: Sequence[str], role: str) -> bool:
    """Whether axes have names of their role, or names that stand for no role."""
    return all(role.startswith(USUAL_ROLES.get(re.sub(r"\d+$", "", axis), "")) for axis in axes)


def axis_role(plan: Record, axis: str) -> str:
    """What most FLOPs of the products make of a mesh axis."""
    at, work = plan.mesh.index(axis), Counter[str]()
    weights = {name for name, kind in plan.kinds.items() if kind in ("parameter", "buffer")}
    attention = set()
    for choice in plan.choices.values():
        if choice.inputs and weights.issuperset(choice.inputs):
            weights.update(choice.outputs)
        if choice.flops:
            work[_product_role(plan, choice, axis, weights)] += int(choice.flops)
            if "attention" in choice.op:
                attention.add(choice.labels[at])
    role = max(work, key=lambda name: work[name], default="replicated")
    if role == "data":
        return _data_role(plan, axis)
    if role == "context parallel":
        ring = any("ring" in label or "gather" in label for label in attention)
        return f"{role} ({'ring attention' if ring else 'Ulysses' if 'heads' in attention else 'attention by queries'})"
    return "tensor + sequence parallel" if role == "tensor parallel" and _shards_sequence(plan, axis) else role


def _product_role(plan: Record, choice: Choice, axis: str, weights: set[str]) -> str:
    """What a product makes of a mesh axis, by its operands and its result."""
    reads = [name in weights and _placement(use, axis) for name, use in zip(choice.inputs, choice.uses, strict=True)]
    if choice.op.startswith("autoshard.experts"):
        if choice.labels[plan.mesh.index(axis)] == "exchange" or "S(0)" in reads:
            return "expert parallel"
        return "tensor parallel" if any(placed and placed[0] == "S" for placed in reads) else "data"
    made = plan.layouts[choice.outputs[0]][axis] if choice.outputs else None
    if any(placed and placed[0] in "SO" for placed in reads):
        stacked = isinstance(made, Shard) and made.dim == 0
        return "expert parallel" if stacked else "tensor parallel"
    if "attention" in choice.op and isinstance(made, Shard):
        return {0: "data", 1: "tensor parallel"}.get(made.dim, "context parallel")
    if "conv" in choice.op and isinstance(made, Shard) and made.dim > 1:
        return "spatial parallel"
    if isinstance(made, Shard):
        last = made.dim == len(plan.shapes[choice.outputs[0]]) - 1
        return "data" if made.dim == 0 else "tensor parallel" if last else "context parallel"
    return "replicated"


def _placement(use: str, axis: str) -> str:
    """The placement along ``axis`` in the text of a layout, such as S(0)."""
    placed = (part.rpartition("@") for part in use.split())
    return next((what for what, _, name in placed if name == axis), "R")


def _data_role(plan: Record, axis: str) -> str:
    """ZeRO stage of most parameters along an axis of the batch; then tables and experts that are read
    sharded, from a third of all parameters on."""
    size: Counter[str] = Counter()
    placed: dict[str, str] = {}
    for c in plan.choices.values():
        kind = EXPERTS if "experts" in c.op else TABLES if re.search("embedding|pooled", c.op) else ""
        placed |= {n: kind for n, use in zip(c.inputs, c.uses, strict=True) if _placement(use, axis)[0] in "SO"}
    for name, kind in plan.kinds.items():
        if kind == "parameter" and name in placed:
            size[placed[name]] += math.prod(plan.shapes[name])
        elif kind == "parameter":
            stored = isinstance(plan.layouts[name][axis], Shard)
            stage = plan.zero.get(name, 3) if plan.training else 3
            size[f"ZeRO-{stage}" if stored else "data parallel"] += math.prod(plan.shapes[name])
    total, sharded = size.total(), {kind: size.pop(kind, 0) for kind in (TABLES, EXPERTS, "")}
    del sharded[""]
    most = max(size, key=lambda name: size[name], default="data parallel")
    return " + ".join([most, *(kind for kind, n in sharded.items() if 3 * n > total)])


def _shards_sequence(plan: Record, axis: str) -> bool:
    """Whether most results of the commonest shape of three dims, the residual stream, are sharded
    along a dim before the last."""
    shapes = Counter(
        plan.shapes[o] for c in plan.choices.values() for o in c.outputs if len(plan.shapes[o]) == 3 and not c.flops
    )
    if not shapes:
        return False
    stream, yes, every = shapes.most_common(1)[0][0], 0, 0
    for choice in plan.choices.values():
        for o in choice.outputs:
            if plan.shapes[o] == stream and not choice.flops:
                placed = plan.layouts[o][axis]
                yes, every = yes + (isinstance(placed, Shard) and placed.dim < 2), every + 1
    return yes > every / 2


def _recomputation(plan: Record) -> Iterator[str]:
    """Full and selective recomputation, by numbered blocks."""
    every: dict[str, float] = defaultdict(float)
    last: dict[str, float] = {}
    again: dict[str, float] = defaultdict(float)
    touched: dict[str, None] = {}
    for choice in plan.choices.values():
        block = block_path(choice.fqn)
        every[block] += choice.flops
        last[block] = choice.flops or last.get(block, 0.0)
        again[block] += choice.flops * (choice.again == 2)
        if choice.again == 2:
            touched[block] = None
    blocks = [b for b in every if b and every[b]]
    # the result of the last product goes to the next block, so nothing needs it again
    full = [b for b in blocks if b in touched and again[b] >= FULL_SHARE * (every[b] - last[b])]
    some = [b for b in blocks if b in touched and b not in full]
    if full:
        yield f"full recomputation of {len(full)} of {len(blocks)} blocks"
    if some:
        yield f"selective recomputation in {len(some)} of {len(blocks)} blocks"
    if not full and not some and touched:
        yield "selective recomputation"


# --- the lines ---


def summary_rows(plan: Record) -> Iterator[tuple[str, str]]:
    """(label, text) of the first lines of a report; the page shows the same."""
    yield "plan", strategy_text(plan)
    yield "memory", _memory_text(plan)
    yield "predicted step", _step_text(plan.cost)
    yield "speed", _speed_text(plan)
    yield "how sure", f"{optimality_text(plan)}; {_error_text(plan)}"
    yield "compared", compared_text(plan)


def setting_text(plan: Record) -> str:
    """Hardware, mesh, ranks, dtype and kind of the step."""
    what = "training step" if plan.training else "inference"
    what += f" in {plan.micro_batches} micro-batches" if plan.micro_batches > 1 and plan.staged is None else ""
    mixed = f" ({plan.mixed_precision})" if plan.mixed_precision else ""
    mesh, ranks = plan.mesh, f"{plan.mesh.size} rank{'s' * (plan.mesh.size > 1)}"
    return f"{mesh.hardware.name}, mesh {mesh}: {ranks}, {plan.dtype}{mixed or _peak_text(plan)}, {what}"


def _peak_text(plan: Record) -> str:
    """Peak of the plan's dtype and of bfloat16, where a GPU computes faster in bfloat16."""
    machine = plan.mesh.hardware
    own, half = machine.peak(getattr(torch, plan.dtype)), machine.peak(torch.bfloat16)
    if not machine.is_accelerator or own >= half:
        return ""
    return f" ({own / 1e12:.0f} TFLOP/s; in bfloat16 {half / 1e12:.0f} TFLOP/s)"


def _memory_text(plan: Record) -> str:
    peak, limit = plan.cost.memory_bytes, plan.mesh.hardware.memory_bytes
    most = max(plan.memory.at_peak, key=lambda part: plan.memory.at_peak[part], default="")
    where = f"; most of it {most} ({show_bytes(plan.memory.at_peak[most])})" if most else ""
    if limit >= UNLIMITED_BYTES:
        return f"{show_bytes(peak)} per rank at the peak{where}"
    fits = "fits" if peak <= limit else "does not fit"
    asked = any(word.startswith("--memory-budget=") for word in plan.asked)
    budget = f", within the budget of {show_bytes(plan.memory_budget)}" if asked else ""
    return f"{fits}: {show_bytes(peak)} of {show_bytes(limit)} per rank ({peak / limit:.0%}){budget}{where}"


def _step_text(cost: Cost) -> str:
    total = cost.total_s

    def share(seconds: float) -> str:
        return f" ({seconds / total:.0%})" if total else ""

    text = f"{show_seconds(total)} = compute {show_seconds(cost.compute_s)}"
    text += f" + exposed communication {show_seconds(cost.exposed_s)}{share(cost.exposed_s)}"
    text += f" + pipeline bubble {show_seconds(cost.bubble_s)}{share(cost.bubble_s)}" if cost.bubble_s else ""
    if cost.hidden_s > 1e-9 * total:
        text += f"; {show_seconds(cost.hidden_s)} more is hidden behind compute"
    return text


def _speed_text(plan: Record) -> str:
    cost, parts = plan.cost, []
    if cost.tokens_per_s:
        parts.append(f"{_rate(cost.tokens_per_s)} tokens/s, {_rate(cost.tokens_per_s_per_device)} per device")
    elif cost.total_s and (samples := _samples(plan)):
        parts.append(f"{_rate(samples / cost.total_s)} samples/s")
    parts.append(f"MFU {cost.mfu:.1%}, HFU {cost.hfu:.1%}")
    if cost.tokens_per_s and plan.training:
        hours = f"{_rate(cost.device_hours_per_token * 1e12)} device hours per trillion tokens"
        parts.append(hours if plan.mesh.hardware.cpu else hours.replace("device", "GPU"))
    return "; ".join(parts)


def _rate(n: float) -> str:
    """Three digits, with thousands separated: 86,700."""
    if n >= 1e9 or n < 1:
        return f"{n:.3g}"
    rounded = round(n, 2 - math.floor(math.log10(n)))
    return f"{rounded:,.0f}" if n >= 100 else f"{rounded:g}"


def optimality_text(plan: Record) -> str:
    """The optimality gap as text, for the searched problem with its given layouts."""
    gap = plan.cost.total_s / plan.lower_bound - 1 if plan.lower_bound > 0 else 0.0
    if plan.lower_bound <= 0 < plan.cost.total_s or gap < -1e-6:  # a bound above is of other costs
        return "not compared with the optimum of the cost model"
    share = f"{100 * gap:.2g}" if gap < 0.995 else f"{100 * gap:.0f}"
    found = "optimal in" if gap < 1e-9 else f"at most {share}% above the optimum of"
    return f"{found} the cost model" + (" with the layouts given" if plan.given else "")


def _error_text(plan: Record) -> str:
    name = plan.mesh.hardware.name
    stated = next((text for device, text in STATED_ERRORS.items() if name.partition("_")[0] == device), "")
    if stated and plan.training:
        return f"error of predicted times: {stated}"
    return f"no {'training' if plan.training else 'inference'} step on {name} was compared with a published one"


def compared_text(plan: Record, most: int = 6) -> str:
    """Named strategies and runners-up in one line: "free 325 ms · fsdp 339 ms · ddp does not fit"."""
    rows = plan.known_compared
    fits, not_fit = [r for r in rows if r[1] is not None], [r for r in rows if r[1] is None]
    shown = fits[:most]
    text = " · ".join([*map(compared_cell, shown), *map(compared_cell, not_fit[: max(1, most - len(shown))])])
    left = len(rows) - len(shown) - len(not_fit[: max(1, most - len(shown))])
    more = f" · {left} more" if left else ""
    asked = "" if plan.strategies_are_compared else "; plan.compared plans the named strategies, too"
    return f"{text}{more}{asked}"


def compared_cell(row: ComparedRow) -> str:
    """One plan of a comparison, in short."""
    name, seconds, peak, _ = row
    if seconds is not None:
        return f"{name} {show_seconds(seconds)}"
    return f"{name} does not fit: {show_bytes(peak)}" if peak else f"{name} has no plan"


def compared_rows(plans: Sequence[ComparedRow]) -> Sequence[tuple[str, str, str, str, str]]:
    """(name, seconds, relative to the first, peak, why not) as text."""
    first = plans[0][1] if plans else None
    return [
        (
            name,
            "–" if seconds is None else show_seconds(seconds),
            f"× {seconds / first:.3f}" if seconds is not None and first else "",
            show_bytes(peak) if peak else "–",
            why,
        )
        for name, seconds, peak, why in plans
    ]


def strategy_name(like: object) -> str:
    """A named strategy in a table: fsdp, or "fsdp + megatron-sp" of one per mesh axis."""
    if like is None:
        return "free"
    if isinstance(like, Mapping):
        return " + ".join(dict.fromkeys(v for v in like.values() if isinstance(v, str))) or "styles by module"
    return str(like)

"""Neutral description of a plan: roles of axes, styles of modules, ZeRO stage, stages,
recomputation. Exporters are tables over a :class:`Description`; a target without a
:class:`Feature`'s word reports its sentence."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autoshard.layout import Grouped, Owned, Partial, Placement, Replicate, Shard
from autoshard.passes.ir.assignment import is_dividing_label
from autoshard.passes.ir.text import block_path, enclosing_modules
from autoshard.report.record import Choice, Record, placement_from
from autoshard.report.tp_plan import EMBEDDING_OPS, OUTPUT_FEATURE_DIMS

WHOLE = Replicate()
ZERO_WORDS = ("ddp", "zero1", "zero2", "zero3")
"""by ZeRO stage"""
ATTENTION_OP = "aten.scaled_dot_product_attention.default"


@dataclass(frozen=True)
class ModuleStyle:
    """A module with parameters along the tensor-parallel axis."""

    kind: str
    """colwise, rowwise, sequence (parameters whole, work divided) or replicate"""
    is_table: bool
    takes: Placement
    """layout in which the value comes that the module reads"""
    makes: Placement
    """layout of its output"""
    wanted: Placement | None
    """layout that all readers of its output want; None: they differ"""
    readers: tuple[str, ...] = ()
    """modules that read its output"""
    in_loss: bool = False
    """whether a loss reads its output sharded over classes"""
    is_returned: bool = False
    """whether its output is a result of the model"""


@dataclass(frozen=True)
class Feature:
    """Something of a plan that a target may have no word for."""

    word: str
    sentence: str


@dataclass(frozen=True)
class Description:
    """``plan`` in terms that engines share."""

    plan: Record

    @cached_property
    def choices(self) -> dict[str, Choice]:
        """Operations in the order in which they run."""
        named = self.plan.choices
        order = (n for stage in self.plan.staged.plans for n in stage.choices) if self.plan.staged else iter(named)
        return {n: named[n] for n in order if n in named}

    @cached_property
    def roles(self) -> dict[str, str]:
        """Mesh axis → dp, cp, tp, ep, pp or idle; axes of one rank are left out."""
        mesh = self.plan.mesh
        return {a: self._role(a) for a, n in mesh.sizes.items() if n > 1}

    def _role(self, axis: str) -> str:
        plan, at = self.plan, self.plan.mesh.index(axis)
        if plan.staged is not None and axis == plan.staged.axis:
            return "pp"
        work: Counter[str] = Counter()
        for choice in self.choices.values():
            if choice.flops and is_dividing_label(choice.labels[at]) and self.weights_of(choice):
                work[self._role_in(choice, axis)] += int(choice.flops)
        return work.most_common(1)[0][0] if work else "idle"

    def _role_in(self, choice: Choice, axis: str) -> str:
        weights = self.weights_of(choice)
        for i, name in weights.items():
            placed = along(choice.uses[i], axis)
            if isinstance(placed, Shard):
                return "ep" if len(self.plan.shapes[name]) > 2 and placed.dim == 0 else "tp"
        cuts = [along(use, axis) for i, use in enumerate(choice.uses) if i not in weights]
        return "cp" if any(isinstance(p, Shard) and p.dim > 0 for p in cuts) else "dp"

    @cached_property
    def _origins(self) -> dict[str, str]:
        """Value → the parameter that it is a view or a cast of."""
        found = {n: n for n, kind in self.plan.kinds.items() if kind == "parameter"}
        for choice in self.choices.values():
            if len(choice.inputs) == 1 and choice.inputs[0] in found:
                found |= dict.fromkeys(choice.outputs, found[choice.inputs[0]])
        return found

    def weights_of(self, choice: Choice) -> dict[int, str]:
        """Operand number → parameter."""
        return {i: self._origins[n] for i, n in enumerate(choice.inputs) if n in self._origins}

    def axes(self, role: str) -> tuple[str, ...]:
        """Mesh axes of a role, outer to inner."""
        return tuple(a for a, r in self.roles.items() if r == role)

    def size(self, role: str) -> int:
        """Ranks along the axes of a role."""
        return math.prod(self.plan.mesh.size_of(a) for a in self.axes(role))

    @cached_property
    def parameters(self) -> dict[str, Mapping[str, Placement]]:
        """Parameter → mesh axis → placement."""
        plan = self.plan
        names = [n for n, kind in plan.kinds.items() if kind == "parameter"]
        return {n: dict(zip(plan.mesh.axes, plan.layouts[n].placements, strict=True)) for n in names}

    @cached_property
    def fsdp_axes(self) -> tuple[str, ...]:
        """Data-parallel axes along which most parameter bytes are sharded."""
        sizes = {n: math.prod(self.plan.shapes[n]) for n in self.parameters}
        cut = {
            a: sum(sizes[n] for n, p in self.parameters.items() if isinstance(p[a], Shard))
            for a in (*self.axes("dp"), *self.axes("cp"))
        }
        return tuple(a for a, n in cut.items() if 2 * n > sum(sizes.values()))

    @cached_property
    def replicated_on(self) -> dict[str, str]:
        """Parameter → an FSDP axis along which the plan leaves it whole."""
        found = ((n, a) for n, p in self.parameters.items() for a in self.fsdp_axes if not isinstance(p[a], Shard))
        return dict(found)

    @property
    def zero(self) -> int:
        """ZeRO stage of the parameters: 0 to 3."""
        return max(self.plan.zero.values(), default=3) if self.fsdp_axes else 0

    @property
    def replicas(self) -> int:
        """Ranks along data-parallel axes that hold the same parameters."""
        return math.prod(self.plan.mesh.size_of(a) for a in self.axes("dp") if a not in self.fsdp_axes)

    @property
    def shards(self) -> int:
        """Ranks along data-parallel axes that shard parameters."""
        return self.size("dp") // self.replicas

    @property
    def tp_axis(self) -> str | None:
        """The axis of :attr:`styles`."""
        return next(iter(self.axes("tp")), None)

    @cached_property
    def styles(self) -> dict[str, ModuleStyle]:
        """Module with parameters → its style along :attr:`tp_axis`, in order of use."""
        return {} if self.tp_axis is None else {m: self._style(m, self.tp_axis) for m in self._choices_by_module}

    @cached_property
    def _choices_by_module(self) -> dict[str, tuple[Choice, ...]]:
        """Module → its operations, if one of them reads a parameter."""
        found: dict[str, list[Choice]] = {}
        for choice in self.choices.values():
            found.setdefault(choice.fqn, []).append(choice)
        return {m: tuple(cs) for m, cs in found.items() if any(self.weights_of(c) for c in cs)}

    def _style(self, module: str, axis: str) -> ModuleStyle:
        plan, choices = self.plan, self._choices_by_module[module]
        heavy = next((c for c in choices if c.op in (*OUTPUT_FEATURE_DIMS, *EMBEDDING_OPS)), None)
        read = heavy or next(c for c in choices if self.weights_of(c))
        kind, at = "replicate", plan.mesh.index(axis)
        sharded = [p for i in self.weights_of(read) if isinstance(p := along(read.uses[i], axis), Shard)]
        if sharded and heavy is not None:
            features = 1 if heavy.op in EMBEDDING_OPS else OUTPUT_FEATURE_DIMS[heavy.op]
            kind = "colwise" if sharded[0].dim == features else "rowwise"
        elif sharded:
            kind = "other"
        elif is_dividing_label(read.labels[at]):
            kind = "sequence"
        first = next((c for c in choices for n in c.inputs if plan.kinds.get(n) != "parameter"), read)
        given = next((i for i in range(len(first.inputs)) if i not in self.weights_of(first)), 0)
        value = first.inputs[given] if first.inputs else ""
        takes: Placement = WHOLE
        if kind == "sequence":
            takes = along(first.uses[given], axis)
        elif kind in ("colwise", "rowwise") and value in plan.layouts:
            takes = _counted_from_end(plan.layouts[value][axis], len(plan.shapes[value]))
        last, inside = choices[-1].outputs[0], {id(c) for c in choices}
        uses = [(c, u) for c in self._readers.get(last, ()) for n, u in zip(c.inputs, c.uses, strict=True) if n == last]
        wants = {_counted_from_end(along(u, axis), len(plan.shapes[last])) for c, u in uses if id(c) not in inside}
        return ModuleStyle(
            kind=kind,
            is_table=read.op in EMBEDDING_OPS,
            takes=takes,
            makes=plan.layouts[last][axis],
            wanted=wants.pop() if len(wants) == 1 else None,
            readers=tuple(dict.fromkeys(c.fqn for c, _ in uses)),
            in_loss=kind == "colwise" and self._reaches_loss(last, axis),
            is_returned=not uses,
        )

    def _reaches_loss(self, name: str, axis: str) -> bool:
        """Whether a value stays sharded along ``axis`` until a loss over classes reads it."""
        readers = [c for c in self._readers.get(name, ()) if not self.weights_of(c)]
        readers = [c for c in readers if is_dividing_label(c.labels[self.plan.mesh.index(axis)])]
        if any("cross_entropy" in c.op or "nll_loss" in c.op for c in readers):
            return True
        return any(self._reaches_loss(n, axis) for c in readers for n in c.outputs)

    @cached_property
    def _readers(self) -> dict[str, list[Choice]]:
        found: dict[str, list[Choice]] = {}
        for choice in self.choices.values():
            for name in dict.fromkeys(choice.inputs):
                found.setdefault(name, []).append(choice)
        return found

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Numbered modules (layers) in order."""
        return tuple(dict.fromkeys(b for c in self.choices.values() if (b := block_path(c.fqn))))

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """Block → the pipeline stage that does most of its work."""
        work: dict[str, Counter[int]] = {b: Counter() for b in self.blocks}
        for number, stage in enumerate(self.plan.staged.plans if self.plan.staged else (self.plan,)):
            for choice in stage.choices.values():
                if block := block_path(choice.fqn):
                    work[block][number] += int(choice.flops) + 1
        return {b: n.most_common(1)[0][0] for b, n in work.items()}

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Blocks of each pipeline stage; one number without stages."""
        count = Counter(self.stage_of.values())
        return tuple(count[i] for i in range(len(self.plan.staged.plans) if self.plan.staged else 1))

    @cached_property
    def recompute(self) -> dict[str, str]:
        """Block that the backward recomputes → "full" or "selective"."""
        again = {r.name for r in self.plan.recomputed if r.what == "computed"}
        again = again or {n for n, c in self.choices.items() if c.again > 1}
        found = {}
        for block in self.blocks:
            inside = {n: c for n, c in self.choices.items() if block_path(c.fqn) == block}
            heavy = [n in again for n, c in inside.items() if c.flops and self.weights_of(c)]
            if again & inside.keys():
                found[block] = "full" if heavy and 2 * sum(heavy) > len(heavy) else "selective"
        return found

    @property
    def recompute_mode(self) -> str:
        """ "none", "selective" or "full", if any block is recomputed in full."""
        return min(self.recompute.values(), default="none")

    @property
    def rows(self) -> int:
        """Batch rows of one micro-batch on all data-parallel ranks; 0 without inputs."""
        return next((s[0] for s in self._input_shapes if s), 0)

    @property
    def length(self) -> int:
        """Sequence length of token ids; 0 without."""
        return next((s[1] for s in self._input_shapes if len(s) == 2), 0)

    @property
    def _input_shapes(self) -> Iterator[tuple[int, ...]]:
        return (self.plan.shapes[n] for n, kind in self.plan.kinds.items() if kind == "input")

    @property
    def rows_per_rank(self) -> int:
        """Batch rows of one micro-batch on one data-parallel rank."""
        return max(1, self.rows // (self.size("dp") * self.size("ep")))

    @property
    def micro_batches(self) -> int:
        return self.plan.staged.micro_batches if self.plan.staged else self.plan.micro_batches

    @property
    def precision(self) -> dict[str, str]:
        """Fields of a MixedPrecisionPolicy; empty without."""
        return dict(re.findall(r"(\w+)=(\w+)", self.plan.mixed_precision))

    @property
    def dtype(self) -> str:
        """The dtype that products compute in."""
        return self.precision.get("param_dtype", self.plan.dtype)

    @property
    def is_sequence_parallel(self) -> bool:
        return any(s.kind == "sequence" and s.takes == Shard(1) for s in self.styles.values())

    @property
    def context_word(self) -> str:
        """ "ulysses" if attention shards heads along the context-parallel axis, else "ring"."""
        at = [self.plan.mesh.index(a) for a in self.axes("cp")]
        labels = {c.labels[i] for c in self.choices.values() if c.op == ATTENTION_OP for i in at}
        return "ulysses" if "heads" in labels else "ring"

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """All that a target may be unable to say."""
        return tuple(Feature(word, sentence) for word, sentence in (*self._axis_features(), *self._part_features()))

    def _axis_features(self) -> Iterator[tuple[str, str]]:
        plan, mesh = self.plan, self.plan.mesh
        for axis, role in self.roles.items():
            ranks = f"axis {axis!r} ({mesh.size_of(axis)} ranks)"
            if role == "idle":
                yield "idle", f"{ranks} divides no product: its ranks repeat the same work"
            elif role == "cp":
                yield self.context_word, f"{ranks} shards the sequence, {self.context_word} attention"
            elif role == "ep":
                yield "ep", f"{ranks} shards experts"
            elif role == "tp":
                yield "tp", f"{ranks} shards features of linear layers"
            elif role == "pp" and plan.staged is not None:
                yield "pp", f"{ranks} runs {len(plan.staged.plans)} pipeline stages, schedule {plan.staged.schedule}"
                yield plan.staged.schedule, f"the pipeline schedule is {plan.staged.schedule}"
        for axis in self.axes("tp")[1:]:
            yield "tp2", f"axis {axis!r} shards features, too: one tensor-parallel axis is exported ({self.tp_axis!r})"
        if self.size("dp") > 1:
            word = ZERO_WORDS[self.zero]
            yield word, f"data parallelism over {self.size('dp')} ranks is {word}"
            if self.fsdp_axes and self.replicas > 1:
                yield "hsdp", f"parameters are sharded over {self.shards} ranks, {self.replicas} times"
        for axis in set(self.fsdp_axes) & set(self.axes("cp")):
            yield "cp fsdp", f"parameters are sharded along the context-parallel axis {axis!r}, too"
        if self.is_sequence_parallel:
            yield "sequence", f"the sequence is sharded along {self.tp_axis!r} between linear layers"
        if any(s.in_loss for s in self.styles.values()):
            yield "loss", f"the loss reads logits that stay sharded along {self.tp_axis!r}"
        if self.micro_batches > 1:
            yield "micro-batches", f"a step runs {self.micro_batches} micro-batches of {self.rows} rows"
        if self.precision:
            yield "precision", f"mixed precision: {plan.mixed_precision}"
        if plan.folded:
            yield "zigzag", f"the sequence is in zigzag order over {plan.folded} ranks"

    def _part_features(self) -> Iterator[tuple[str, str]]:
        plan = self.plan
        for mode in sorted(set(self.recompute.values())):
            some = [block for block, m in self.recompute.items() if m == mode]
            yield f"recompute {mode}", f"the backward recomputes {len(some)} of {len(self.blocks)} layers ({mode})"
            if len(some) < len(self.blocks):
                yield "recompute some", f"only these layers are recomputed ({mode}): {patterns_text(some)}"
        if again := [r.fqn or r.name for r in plan.recomputed if r.what == "converted"]:
            yield "regather", f"the backward gathers again what was gathered after: {patterns_text(again)}"
        if self.recompute:
            yield "recompute operations", "the plan names each operation to recompute; others of those layers are kept"
        if plan.staged is not None and len(set(self.layers_per_stage)) > 1:
            yield "pp layout", f"layers per stage: {', '.join(map(str, self.layers_per_stage))}"
        yield from self._split_blocks()
        if whole := set(self.replicated_on):
            axes = ", ".join(sorted(set(self.replicated_on.values())))
            yield "replicated on dp", f"these parameters are replicated along {axes}: {patterns_text(whole)}"
        if small := {
            n for n, p in self.parameters.items() if n not in self.replicated_on and self._is_sharded_beside(p)
        }:
            yield (
                "sharded on dp",
                f"these parameters alone are sharded along {self.axes('dp')[0]}: {patterns_text(small)}",
            )
        plain = {n: p for n, p in self.parameters.items() if n not in self.replicated_on}
        if other := {n for n, p in plain.items() if any(p[a] not in (Shard(0), WHOLE) for a in self.fsdp_axes)}:
            yield "fsdp dims", f"these parameters are sharded along another dim than 0: {patterns_text(other)}"
        if inner := {n for n in self.parameters if self.nests_fsdp_outside(n)}:
            yield "order", f"data-parallel shards contain tensor-parallel ones, not the reverse: {patterns_text(inner)}"
        if fixed := {n for n, p in self.parameters.items() if any(isinstance(x, Owned | Grouped) for x in p.values())}:
            yield (
                "owned",
                f"these parameters have one owner rank each, or are sharded by segments: {patterns_text(fixed)}",
            )
        yield from self._tensor_parallel_features()

    def _split_blocks(self) -> Iterator[tuple[str, str]]:
        for number, stage in enumerate(self.plan.staged.plans if self.plan.staged else ()):
            split = {b for c in stage.choices.values() if (b := block_path(c.fqn)) and self.stage_of[b] != number}
            if split:
                yield (
                    "pp operations",
                    f"stage {number} has operations of {patterns_text(split)}; those go with their layer",
                )

    def _is_sharded_beside(self, placed: Mapping[str, Placement]) -> bool:
        return any(isinstance(placed[a], Shard) for a in self.axes("dp") if a not in self.fsdp_axes)

    def nests_fsdp_outside(self, name: str) -> bool:
        """Whether a dim of a parameter is sharded by data, and inside by tensor parallelism."""
        layout = self.plan.layouts[name]
        cuts = [layout.axes_of(d) for d in range(len(self.plan.shapes[name]))]
        return any(
            self.roles.get(a) in ("dp", "cp") and self.roles.get(b) == "tp"
            for axes in cuts
            for a, b in itertools.pairwise(axes)
        )

    def _tensor_parallel_features(self) -> Iterator[tuple[str, str]]:
        axis = self.tp_axis
        if axis is None:
            return
        linear = {m for m, s in self.styles.items() if s.kind == "replicate" and self._is_product(m)}
        if linear:
            yield "replicated on tp", f"these modules are replicated along {axis!r}: {patterns_text(linear)}"
        if divided := {m for m, s in self.styles.items() if s.kind == "sequence" and self._is_product(m)}:
            yield (
                "divided on tp",
                f"these modules divide activations, not weights, along {axis!r}: {patterns_text(divided)}",
            )
        if other := {m for m, s in self.styles.items() if s.kind == "other"}:
            yield (
                "other on tp",
                f"these modules are sharded, but not linear layers, along {axis!r}: {patterns_text(other)}",
            )
        used = {
            n
            for cs in self._choices_by_module.values()
            for c in cs
            for i, n in self.weights_of(c).items()
            if isinstance(along(c.uses[i], axis), Shard)
        }
        if stored := {n for n, p in self.parameters.items() if isinstance(p[axis], Shard) and n not in used}:
            yield (
                "stored on tp",
                f"these parameters are stored in shards along {axis!r}, but used in full: {patterns_text(stored)}",
            )

    def _is_product(self, module: str) -> bool:
        return any(c.op in (*OUTPUT_FEATURE_DIMS, *EMBEDDING_OPS) for c in self._choices_by_module[module])


def along(use: str, axis: str) -> Placement:
    """The placement along ``axis`` in the text of a layout (``S(0)@dp R@tp``); I becomes R."""
    for part in use.split():
        placed, _, name = part.rpartition("@")
        if name == axis:
            return WHOLE if placed == "I" else placement_from(placed)
    return WHOLE


def _counted_from_end(placed: Placement, ndim: int) -> Placement:
    """``Shard(-1)`` for a shard of the last dim."""
    return Shard(-1) if placed == Shard(ndim - 1) else placed


def is_whole(placed: Placement | None) -> bool:
    return placed is not None and not isinstance(placed, Shard | Partial)


def patterns_text(names: set[str] | list[str], most: int = 6) -> str:
    """Names with ``*`` in place of numbers, at most ``most`` of them."""
    found = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", n) for n in sorted(names)))
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def modules_of(plan: Record) -> set[str]:
    """Paths of the modules that have operations, and of those around them."""
    names = {c.fqn for c in plan.choices.values()}
    return names | set(enclosing_modules(names))

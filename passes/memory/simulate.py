"""Simulation of the peak memory of one step: statements forward, then backward, storage by storage.

A local lives until it is deleted or its function returns, as in the emitted code. A tensor saved by autograd lives until the
backward of its operation. Gradients of parameters appear as the backward proceeds. A recomputed part runs again, statement by
statement, where the backward first needs one of its values. Collectives return contiguous copies."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from autoshard.passes.ir.graph import Graph, Ref
from autoshard.passes.ir.memory import Memory, host_bytes_in_flight, optimizer_bytes, state_bytes
from autoshard.passes.ir.program import Program, Statement, reads
from autoshard.passes.lower.blocks import Segment, program_segments
from autoshard.passes.lower.bucket import prefetch_depth, regathered_parameters
from autoshard.passes.lower.recompute import recomputed_statements, redrawn_dropouts
from autoshard.passes.memory.storages import Heap, OffloadedSaves, ReplayedPart, ReplayedStatement
from autoshard.passes.propagate.prices.roofline import sparse_gradient_bytes
from autoshard.passes.rules.facts import saved_for_backward
from autoshard.passes.rules.interpreters import Outcome, ResultSpec, TensorSpec, abstract_run_on


def statement_name(part: Statement) -> str:
    """The redistributed value, or the name of the operation."""
    return part.value if part.step is not None else part.node.name if part.node is not None else ""


def moment_text(s: Statement | None, phase: str) -> str:
    if s is None:
        return "the optimizer's step" if phase == "step" else phase
    where = s.node.fqn if s.node is not None else ""
    name = str(s.call.fn).removeprefix("aten.").removesuffix(".default")
    return f"the {phase} of {name} in {where or '(root)'}"


def form_bytes(form: TensorSpec) -> int:
    return math.prod(form.shape) * form.dtype.itemsize


def bucket_outcome(s: Statement, forms: Sequence[TensorSpec]) -> Outcome:
    """A bucket of parameters: views of one buffer if gathered. ``forms``: of its results."""
    sizes = tuple(map(form_bytes, forms))
    each = tuple(ResultSpec(form, ~i) for i, form in enumerate(forms))
    if s.call.fn == "gather_parameters":
        if s.call.kwargs.get("zero"):  # separate storages, so that those that the backward does not need are freed
            return Outcome(each, sizes, (), 2 * sum(sizes), sizes, 0)
        return Outcome(tuple(ResultSpec(form, ~0) for form in forms), (sum(sizes),), (), 2 * sum(sizes), sizes, 0)
    if s.call.kwargs.get("dtype") is not None:  # copies in the dtype of computation
        return Outcome(each, sizes)
    return Outcome(tuple(ResultSpec(form, i) for i, form in enumerate(forms)), ())


def outcome_by_rule(
    s: Statement, graph: Graph, form: Callable[[str], TensorSpec], gradient: Callable[[str], float | None]
) -> Outcome:
    """Outcome of a statement that cannot run without data: contiguous results, saved tensors by
    rule. ``gradient``: bytes of an operand's gradient, None if it has none."""
    operands = tuple(dict.fromkeys(reads(s)))
    forms = [None if o == "_" else form(o) for o in s.outputs]
    sizes = [0 if f is None else form_bytes(f) for f in forms]
    made = tuple(None if f is None else ResultSpec(f, ~i) for i, f in enumerate(forms))
    kept: list[int] = []
    if s.node is not None and s.step is None and graph.training:
        found = saved_for_backward(s.node, graph.types)
        names = [n for i, n in enumerate(reads(s)) if i in found.operands and i < len(s.node.inputs)]
        kept = [operands.index(n) for n in names]
        kept += [~slot for i, slot in enumerate(s.node.output_slots) if i in found.results]
    grads = tuple(None if (size := gradient(o)) is None else int(size) for o in operands)
    return Outcome(made, tuple(sizes), tuple(kept), sum(sizes), grads, sum(g or 0 for g in grads))


class PrefetchBytes(NamedTuple):
    """Bytes in prefetch while a bucket is used, in the forward and in the backward."""

    forward: float
    backward: float


def bytes_of_prefetch(
    program: Program, again: Set[str], size: Callable[[Statement], float]
) -> dict[str, PrefetchBytes]:
    """First result of each gathered bucket → bytes in prefetch then, in the last micro-batch.
    ``again``: local names gathered again in the backward; ``size``: unsharded bytes of a
    bucket."""
    depth = prefetch_depth(program)
    shares = program.graph.passes > 1
    buckets = [s for s in program.statements if s.call.fn == "gather_parameters"]
    coming = [0.0 if shares and s.call.kwargs.get("zero") else size(s) for s in buckets]
    back = [size(s) if not again.isdisjoint(s.outputs) else None for s in buckets] if again else []
    return {
        s.outputs[0]: PrefetchBytes(sum(coming[i + 1 : i + 1 + depth]), _last_known_bytes(back[:i], depth))
        for i, s in enumerate(buckets)
    }


def _last_known_bytes(sizes: Sequence[float | None], depth: int) -> float:
    known = [n for n in sizes if n is not None]
    return sum(known[-depth:]) if depth else 0.0


def unsharded_parameters(program: Program) -> Iterator[tuple[str, str, int]]:
    """(parameter, local name of its unsharded copy, ZeRO stage) of those that stay gathered."""
    for s in program.statements:
        if s.call.kwargs.get("zero"):
            yield from ((program.values[o], o, s.call.kwargs["zero"]) for o in s.outputs)


NO_OUTCOME = Outcome((), ())
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "temporaries")


def simulate_memory(program: Program, optimizer: str = "adamw") -> Memory:
    """Memory of ``program`` on the busiest rank. ``optimizer``: a name in :data:`OPTIMIZERS`."""
    return _Simulation(program, optimizer).run()


@dataclass(frozen=True)
class _TapeEntry:
    """An executed statement, with what its backward needs."""

    statement: Statement
    operands: tuple[str, ...]
    outputs: tuple[str, ...]
    outcome: Outcome
    kept: tuple[int, ...]
    """saved storages"""


class _Simulation:
    def __init__(self, program: Program, optimizer: str) -> None:
        self.program, self.graph, self.mesh = program, program.graph, program.mesh
        self.rehearsal = abstract_run_on(program.mesh)
        self.heap = Heap()
        self.forms: dict[str, TensorSpec] = {}
        self.storage: dict[str, int] = {}
        self.fixed: set[int] = set()
        """storages of parameters and buffers, which are counted apart"""
        self.tape: list[_TapeEntry] = []
        self.gradient: dict[str, int] = {}
        """local name → storage of its gradient"""
        self.again = regathered_parameters(program) if self.graph.training else set()
        self.prefetch = bytes_of_prefetch(program, self.again, self._gathered_bytes)
        self.under_way = 0.0
        """bytes of buckets in prefetch"""
        self.bucket: dict[int, str] = {}
        """storage of a bucket that is gathered again → its first result"""
        self.shared: set[int] = set()
        """storages of buckets that are gathered once per step"""
        self.constant = dict.fromkeys(("parameters", "optimizer", "buffers"), 0.0)
        self.on_host: list[float] = []
        """bytes of optimizer states in host memory, per parameter"""
        self.gradients = self.activations = self.gathered = 0.0
        self.best = Memory()
        self.curve: dict[tuple[str, str], float] = {}
        """(operation, phase) → most bytes during it"""
        self.curve_at = ""
        self.reached: set[str] = set()
        """parameters that have a gradient by now"""
        self.uses: Counter[int] = Counter()
        """recomputed storage → operations that would have saved it"""
        self.present: set[int] = set()
        """those of ``uses`` that exist again in the backward"""
        self.parts: dict[int, ReplayedPart] = {}
        self.maker: dict[int, tuple[Statement, int]] = {}
        """storage made in a recomputed part → (its statement, number of the part)"""
        self.spared: set[int] = set()
        """those of ``maker`` that autograd would save without recomputation"""
        self.wanted: set[int] = set()
        """other storages that autograd saves"""
        self.extra: dict[int, Statement] = {}
        """storage saved only for recomputation → the first statement that reads it"""
        self.block = OffloadedSaves()
        """what the block that runs has saved, if it is offloaded"""
        self.offloads: list[OffloadedSaves] = []
        self.leaving: list[int] = []
        self.sent: dict[int, int] = {}
        """storage in host memory → place in ``offloads``"""
        for value in self.graph.inputs:
            self._input(value.name, value.kind, optimizer)
        if self.graph.training and self.graph.passes > 1:
            self._start_last_micro_batch()

    def run(self) -> Memory:
        offloaded = self.program.assignment.offloaded if self.graph.training else ()
        for segment in program_segments(self.program):
            self.block = OffloadedSaves(segment.path)
            for number, group in groupby(segment.statements, key=lambda s: s.again):
                statements = tuple(group)
                if number:
                    self._part(number, statements, segment)
                for s in statements:
                    self._forward(s, segment)
                    self._drop_locals(s.dead_after)
                if number:
                    self._drop_locals(self.parts[number].inner)
            if segment.path:
                self._drop_locals({o for s in segment.statements for o in s.outputs} - set(segment.outputs))
                self._settle()
                if segment.path in offloaded:
                    self._offload()
        self._settle()
        self.activations = self.heap.kept
        self.gathered = float(sum(self.heap.sizes[x] for x in self.shared if self.heap.saved[x]))
        self._drop_locals(set(self.storage) - self.program.returned - {i.name for i in self.graph.inputs})
        if self.graph.training:
            self._seed_gradients()
            for ran in reversed(self.tape):
                self._backward(ran)
            self._note_peak(None, "step", host_bytes_in_flight(self.on_host))
        grads = sum(self._gradient(i.name) for i in self.graph.inputs if self._trained(i.name))
        constant = self.constant
        return Memory(
            constant["parameters"],
            grads,
            constant["optimizer"],
            constant["buffers"],
            self.activations,
            self.best.temporaries,
            self.best.peak,
            self.best.at_peak,
            self.best.moment,
            tuple((op, phase, size) for (op, phase), size in self.curve.items()),
            self._recomputed(),
            self.gathered,
            sum(self.on_host),
            {block.path: float(sum(map(self.heap.sizes.__getitem__, block.storages))) for block in self.offloads},
        )

    def _recomputed(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(
            float, dict.fromkeys(map(statement_name, recomputed_statements(self.program)), 0.0)
        )
        for s in redrawn_dropouts(self.program):  # its mask has a byte per element
            found[statement_name(s)] += math.prod(self._form(s.outputs[0]).shape)
        for storage in self.spared:
            found[statement_name(self.maker[storage][0])] += self.heap.sizes[storage]
        for storage, part in self.extra.items():
            if storage not in self.wanted:
                found[statement_name(part)] -= self.heap.sizes[storage]
        return dict(found)

    # --- state ---

    def _start_last_micro_batch(self) -> None:
        """Start at the last micro-batch, where summed gradients of the others already exist."""
        whole = {p: o for p, o, stage in unsharded_parameters(self.program) if stage == 1}
        for name in filter(self._trained, self.graph.parameters):
            self.reached.add(name)
            sparse = self.program.types[name].sparse
            self.gradients += self._gradient(name) if sparse else form_bytes(self._form(whole.get(name, name)))

    def _input(self, name: str, kind: str, optimizer: str) -> None:
        form = self._form(name)
        size = math.prod(form.shape) * form.dtype.itemsize
        if kind in ("parameter", "buffer", "constant"):
            self.constant["parameters" if kind == "parameter" else "buffers"] += size
            size = 0
        if self._trained(name):
            state = optimizer_bytes(optimizer, form.shape, form.dtype)
            self.constant["optimizer"] += state
            self.on_host.append(state_bytes(optimizer, form.shape, form.dtype) - state)
        self.storage[name] = self.heap.new(size)
        self.heap.hold(self.storage[name])
        self.fixed.add(self.storage[name])
        self.forms[name] = form

    def _trained(self, name: str) -> bool:
        return self.graph.training and name in self.graph.parameters and self.graph.types[name].grad

    def _form(self, name: str) -> TensorSpec:
        type_ = self.program.types[name]
        shape = self.program.layouts[name].max_local_shape(type_.example.shape)
        strides = [math.prod(max(1, n) for n in shape[d + 1 :]) for d in range(len(shape))]
        return TensorSpec(tuple(shape), tuple(strides), type_.dtype, type_.grad and self.graph.training)

    def _gathered_bytes(self, bucket: Statement) -> float:
        return sum(form_bytes(self._form(o)) for o in bucket.outputs)

    def _bytes(self, name: str) -> float:
        return form_bytes(self.forms[name])

    def _gradient(self, name: str) -> float:
        """Bytes of a gradient; of a sparse one, those of the rows looked up and their indices."""
        type_ = self.program.types[name]
        if not type_.sparse:
            return self._bytes(name)
        return float(sparse_gradient_bytes(type_, (self.program.layouts[name].placements,), self.mesh)[0])

    def _wanted_gradient(self, name: str) -> float | None:
        return self._gradient(name) if self.forms[name].grad else None

    def _note_peak(self, s: Statement | None, phase: str, more: float) -> None:
        """Record the current bytes plus ``more``."""
        parts = dict(self.constant) | {
            "gradients": self.gradients,
            "activations": self.heap.kept,
            "temporaries": self.heap.alive - self.heap.kept + self.under_way + more,
        }
        peak = sum(parts.values())
        key = (s.node.name if s is not None and s.node is not None else self.curve_at, phase)
        if key[0] or phase == "step":
            self.curve_at = key[0]
            self.curve[key] = max(self.curve.get(key, 0.0), peak)
        if peak > self.best.peak:
            at = {name: parts.get(name, 0.0) for name in MEMORY_PARTS}
            self.best = Memory(temporaries=at["temporaries"], peak=peak, at_peak=at, moment=moment_text(s, phase))

    def _drop_locals(self, names: Iterable[str]) -> None:
        """The function that owns these locals returns."""
        for name in names:
            if name in self.storage:
                self.heap.hold(self.storage.pop(name), -1)

    # --- forward ---

    def _forward(self, s: Statement, segment: Segment) -> None:
        if s.members and s.call.fn in ("enter_parameters", "gather_parameters"):
            self._bucket(s)
            return
        for part in s.parts:
            if part.again and not s.again:
                self._part(part.again, (part,), segment)
            operands = tuple(dict.fromkeys(reads(part)))
            forms = {name: self.forms[name] for name in operands}
            outcome = self.rehearsal.run(part.call, forms, self.graph.training)
            outcome = outcome or outcome_by_rule(part, self.graph, self._form, self._wanted_gradient)
            self._note_peak(part, "forward", outcome.forward_peak)
            self._record_outputs(part, operands, outcome, s.again or part.again)
        self._drop_locals({o for part in s.parts for o in part.outputs} - set(s.outputs))

    def _part(self, number: int, statements: Sequence[Statement], segment: Segment) -> None:
        """Begin a recomputed part: its operands are saved until the backward has used them."""
        part = self.parts[number] = ReplayedPart.of(statements, segment)
        part.inputs = tuple(dict.fromkeys(self.storage[n] for n in part.reads))
        part.inputs = tuple(x for x in part.inputs if x not in self.fixed)
        part.counted = tuple(x for x in part.inputs if x in self.uses)
        kept = (*(x for x in part.inputs if x not in self.uses), self.heap.new(int(part.sums)))
        for s in statements:
            for x in (self.storage[name] for name in reads(s) if name in part.reads):
                if x in kept:
                    self.extra.setdefault(x, s)
        self._keep((*part.inputs, kept[-1]))
        self.tape.append(_TapeEntry(statements[0], (), (), NO_OUTCOME, kept))

    def _keep(self, storages: Iterable[int]) -> None:
        for x in storages:
            if x in self.uses:
                self.uses[x] += 1
            else:
                if not self.heap.saved[x]:
                    self.block.storages.append(x)
                self.heap.save(x)

    # --- blocks in host memory ---

    def _offload(self) -> None:
        """What the block saved leaves: for the host, when the next block has computed."""
        storages = [x for x in dict.fromkeys(self.block.storages) if x not in self.fixed | self.shared]
        for x in storages:
            self.uses[x] = self.heap.saved[x]
            self.heap.hold(x)
            self.heap.save(x, -self.uses[x])
            self.sent[x] = len(self.offloads)
        self.offloads.append(OffloadedSaves(self.block.path, storages))
        self.leaving = storages

    def _settle(self) -> None:
        """What an earlier block sent is in host memory."""
        for x in self.leaving:
            self.heap.hold(x, -1)
        self.leaving = []

    def _return(self, number: int) -> None:
        """What block ``number`` saved comes back, and that of the block before it begins to."""
        for block in self.offloads[max(0, number - 1) : number + 1]:
            for x in block.storages:
                if self.uses[x] and x not in self.present:
                    self._hold_recomputed(x)
        self.offloads[number].awaited = False

    def _is_away(self, storage: int) -> bool:
        """Whether the backward has to bring a storage, or to begin with its block."""
        return storage not in self.present or (storage in self.sent and self.offloads[self.sent[storage]].awaited)

    def _record_outputs(self, s: Statement, operands: tuple[str, ...], outcome: Outcome, again: int = 0) -> None:
        new = [self.heap.new(size) for size in outcome.new]

        def storage(number: int) -> int:
            return self.storage[operands[number]] if number >= 0 else new[~number]

        if again:
            self.maker.update(dict.fromkeys(new, (s, again)))
            self.uses.update(dict.fromkeys(new, 0))
        keeps = tuple(x for x in dict.fromkeys(map(storage, outcome.kept)) if x not in self.fixed)
        for x in keeps:
            (self.spared if x in self.maker else self.wanted).add(x)
        self._keep(keeps)
        for name, made in zip(s.outputs, outcome.made, strict=False):
            if name != "_" and made is not None:
                self.storage[name] = storage(made.storage)
                self.heap.hold(self.storage[name])
                self.forms[name] = made.form
            elif name != "_":  # a number
                self.storage[name], self.forms[name] = self.heap.new(0), self._form(name)
                self.heap.hold(self.storage[name])
        if again:
            local = {o: self.storage[o] for o in s.outputs if o != "_"}
            self.parts[again].ran.append(ReplayedStatement(s, tuple(new), local, outcome.forward_peak))
        if self.graph.training:
            self.tape.append(_TapeEntry(s, operands, s.outputs, outcome, keeps))

    def _bucket(self, s: Statement) -> None:
        """A bucket of parameters: views of one buffer if gathered, else the parameters."""
        operands, gathers = tuple(reads(s)), s.call.fn == "gather_parameters"
        forms, stage = [self._form(o) for o in s.outputs], s.call.kwargs.get("zero")
        if gathers:
            self.under_way = self.prefetch[s.outputs[0]].forward
            self._note_peak(s, "forward", 2 * sum(map(form_bytes, forms)))  # the receive buffer, and the parameters
        self._record_outputs(s, operands, bucket_outcome(s, forms))
        if gathers and self.again.intersection(s.outputs):
            self.uses[self.storage[s.outputs[0]]] = 0
            self.bucket[self.storage[s.outputs[0]]] = s.outputs[0]
        if stage:
            self.shared.update(self.storage[o] for o in s.outputs)
        if stage and self.graph.passes > 1:  # for all micro-batches
            for o in s.outputs:
                self.heap.hold(self.storage[o])

    # --- backward ---

    def _seed_gradients(self) -> None:
        """Seed gradients of the outputs: of scalars (losses), or of all if none is scalar."""
        names = [out.name for out in self.program.outputs if isinstance(out, Ref)]
        names = [n for n in dict.fromkeys(names) if self.forms[n].grad]
        for name in [n for n in names if not self.forms[n].shape] or names:
            self._add_gradient(name, self.heap.new(int(self._bytes(name))))

    def _add_gradient(self, name: str, storage: int) -> None:
        """Add a gradient, or one more summand, to ``name``."""
        if name in self.graph.parameters:
            if self._trained(name) and name not in self.reached:
                self.reached.add(name)
                self.gradients += self._gradient(name)
            return
        self.heap.hold(storage)
        if name in self.gradient:  # summed in place
            self._note_peak(None, "backward", 0.0)
            self.heap.hold(storage, -1)
        else:
            self.gradient[name] = storage

    def _backward(self, ran: _TapeEntry) -> None:
        given = [name for name in ran.outputs if name in self.gradient]
        if given:
            for storage in (x for x in ran.kept if x in self.uses and self._is_away(x)):
                self._recompute(storage)
            if ran.statement.members and ran.statement.call.fn in ("enter_parameters", "gather_parameters"):
                self._reduce_bucket(ran)
            else:
                self._propagate_gradients(ran)
        for name in given:
            self.heap.hold(self.gradient.pop(name), -1)
        for storage in ran.kept:
            if storage not in self.uses:
                self.heap.save(storage, -1)
            else:
                self._release_recomputed(storage)

    def _release_recomputed(self, storage: int) -> None:
        """A recomputed storage has one fewer use left."""
        self.uses[storage] -= 1
        if not self.uses[storage] and storage in self.present:
            self.present.remove(storage)
            self.heap.hold(storage, -1)

    def _recompute(self, storage: int) -> None:
        """Recompute a part at its first use; each storage lives until its last use."""
        if storage in self.sent:
            self._return(self.sent[storage])
        elif storage in self.bucket:
            self.under_way = self.prefetch[self.bucket[storage]].backward
            self._hold_recomputed(storage)
        else:
            self._replay_part(self.parts[self.maker[storage][1]])

    def _hold_recomputed(self, storage: int) -> None:
        self.present.add(storage)
        self.heap.hold(storage)

    def _replay_part(self, part: ReplayedPart) -> None:
        again = [x for x in part.inputs if x in self.uses]
        for x in again:
            if self._is_away(x):
                self._recompute(x)
        local: dict[str, int] = {}
        for ran in part.ran:
            self._note_peak(ran.statement, "backward", ran.peak)
            for x in ran.new:
                if self.uses[x]:
                    self._hold_recomputed(x)
            for name, storage in ran.outputs.items():
                self.heap.hold(storage)
                local[name] = storage
            for name in ran.statement.dead_after:
                if name in local:
                    self.heap.hold(local.pop(name), -1)
        for storage in local.values():
            self.heap.hold(storage, -1)
        for x in again:
            if x in part.counted:
                self._release_recomputed(x)

    def _propagate_gradients(self, ran: _TapeEntry) -> None:
        outcome = ran.outcome
        self._note_peak(ran.statement, "backward", outcome.backward_peak)
        for name, gradient in zip(ran.operands, outcome.gradients, strict=False):
            if gradient is None or not self.forms[name].grad:
                continue
            if gradient >= 0:
                self._add_gradient(name, self.heap.new(gradient))
            elif ran.outputs[-1 - gradient] in self.gradient:
                self._add_gradient(name, self.gradient[ran.outputs[-1 - gradient]])

    def _reduce_bucket(self, ran: _TapeEntry) -> None:
        """A bucket's gradients, packed into one buffer and reduced."""
        present = [(p, o) for p, o in zip(ran.operands, ran.outputs, strict=True) if o in self.gradient]
        flat = sum(self._bytes(o) for _, o in present)
        if dtype := ran.statement.call.kwargs.get("reduce_dtype"):
            flat = sum(math.prod(self.forms[o].shape) * dtype.itemsize for _, o in present)
        if ran.statement.call.kwargs.get("zero") == 1 and self.graph.passes > 1:
            self._note_peak(ran.statement, "backward", 2 * flat)  # while earlier sums exist: added to them, and packed
            self.gradients -= flat - sum(self._bytes(p) for p, _ in present)
        self._note_peak(ran.statement, "backward", flat)
        for p, _ in present:
            self._add_gradient(p, self.heap.new(0))

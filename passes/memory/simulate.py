"""Simulation of the peak memory of one step: statements forward, then backward, storage by storage.

Liveness follows the emitted code. A local lives until its ``del`` or the end of its function, a
saved tensor until the backward of its operation. Gradients of parameters appear as the backward
proceeds. A recomputed part reruns statement by statement when the backward first needs one of its
values. Results of collectives are contiguous.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.memory import Memory, optimizer_bytes
from autoshard.passes.ir.program import Program, Statement, reads
from autoshard.passes.lower.again import redrawn, run_again
from autoshard.passes.lower.blocks import Segment, segments
from autoshard.passes.lower.bucket import regathered
from autoshard.passes.memory.heap import Heap
from autoshard.passes.memory.moments import moment, name_of
from autoshard.passes.memory.outcomes import form_bytes, guessed, of_bucket
from autoshard.passes.memory.parts import Part, Replayed
from autoshard.passes.memory.under_way import kept_gathered, under_way
from autoshard.passes.propagate.prices.cost import row_bytes
from autoshard.passes.rules.rehearsal import Form, Outcome, rehearsal_on

NOTHING = Outcome((), ())
PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "temporaries")


def simulate(program: Program, optimizer: str = "adamw") -> Memory:
    """Memory of ``program`` on the busiest rank. ``optimizer``: a name in :data:`OPTIMIZERS`."""
    return _Simulation(program, optimizer).run()


@dataclass(frozen=True)
class _Ran:
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
        self.rehearsal = rehearsal_on(program.mesh)
        self.heap = Heap()
        self.forms: dict[str, Form] = {}
        self.storage: dict[str, int] = {}
        self.fixed: set[int] = set()
        """storages of parameters and buffers, which are counted apart"""
        self.tape: list[_Ran] = []
        self.gradient: dict[str, int] = {}
        """local name → storage of its gradient"""
        self.again = regathered(program) if self.graph.training else set()
        self.prefetch = under_way(program, self.again, self._gathered_bytes)
        self.under_way = 0.0
        """bytes of buckets in prefetch"""
        self.bucket: dict[int, str] = {}
        """storage of a bucket that is gathered again → its first result"""
        self.shared: set[int] = set()
        """storages of buckets that are gathered once per step"""
        self.constant = dict.fromkeys(("parameters", "optimizer", "buffers"), 0.0)
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
        self.parts: dict[int, Part] = {}
        self.maker: dict[int, tuple[Statement, int]] = {}
        """storage made in a recomputed part → (its statement, number of the part)"""
        self.spared: set[int] = set()
        """those of ``maker`` that autograd would save without recomputation"""
        self.wanted: set[int] = set()
        """other storages that autograd saves"""
        self.extra: dict[int, Statement] = {}
        """storage saved only for recomputation → the first statement that reads it"""
        for value in self.graph.inputs:
            self._input(value.name, value.kind, optimizer)
        if self.graph.training and self.graph.passes > 1:
            self._after_others()

    def run(self) -> Memory:
        for segment in segments(self.program):
            for number, group in groupby(segment.statements, key=lambda s: s.again):
                statements = tuple(group)
                if number:
                    self._part(number, statements, segment)
                for s in statements:
                    self._forward(s, segment)
                    self._leave(s.frees)
                if number:
                    self._leave(self.parts[number].inner)
            if segment.path:
                self._leave({o for s in segment.statements for o in s.outputs} - set(segment.outputs))
        self.activations = self.heap.kept
        self.gathered = float(sum(self.heap.sizes[x] for x in self.shared if self.heap.saved[x]))
        self._leave(set(self.storage) - self.program.returned - {i.name for i in self.graph.inputs})
        if self.graph.training:
            self._ends()
            for ran in reversed(self.tape):
                self._backward(ran)
            self._seen(None, "step", 0.0)
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
        )

    def _recomputed(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float, dict.fromkeys(map(name_of, run_again(self.program)), 0.0))
        for s in redrawn(self.program):  # its mask has a byte per element
            found[name_of(s)] += math.prod(self._form(s.outputs[0]).shape)
        for storage in self.spared:
            found[name_of(self.maker[storage][0])] += self.heap.sizes[storage]
        for storage, part in self.extra.items():
            if storage not in self.wanted:
                found[name_of(part)] -= self.heap.sizes[storage]
        return dict(found)

    # --- state ---

    def _after_others(self) -> None:
        """Start at the last micro-batch, where summed gradients of the others already exist."""
        whole = {p: o for p, o, stage in kept_gathered(self.program) if stage == 1}
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
            self.constant["optimizer"] += optimizer_bytes(optimizer, form.shape, form.dtype)
        self.storage[name] = self.heap.new(size)
        self.heap.hold(self.storage[name])
        self.fixed.add(self.storage[name])
        self.forms[name] = form

    def _trained(self, name: str) -> bool:
        return self.graph.training and name in self.graph.parameters and self.graph.types[name].grad

    def _form(self, name: str) -> Form:
        type_ = self.program.types[name]
        shape = self.program.layouts[name].max_local_shape(type_.example.shape)
        strides = [math.prod(max(1, n) for n in shape[d + 1 :]) for d in range(len(shape))]
        return Form(tuple(shape), tuple(strides), type_.dtype, type_.grad and self.graph.training)

    def _gathered_bytes(self, bucket: Statement) -> float:
        return sum(form_bytes(self._form(o)) for o in bucket.outputs)

    def _bytes(self, name: str) -> float:
        return form_bytes(self.forms[name])

    def _gradient(self, name: str) -> float:
        """Bytes of a gradient; of a sparse one, those of the rows looked up and their indices."""
        type_ = self.program.types[name]
        if not type_.sparse:
            return self._bytes(name)
        return float(row_bytes(type_, (self.program.layouts[name].placements,), self.mesh)[0])

    def _wanted_gradient(self, name: str) -> float | None:
        return self._gradient(name) if self.forms[name].grad else None

    def _seen(self, s: Statement | None, phase: str, more: float) -> None:
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
            at = {name: parts.get(name, 0.0) for name in PARTS}
            self.best = Memory(temporaries=at["temporaries"], peak=peak, at_peak=at, moment=moment(s, phase))

    def _leave(self, names: Iterable[str]) -> None:
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
            outcome = outcome or guessed(part, self.graph, self._form, self._wanted_gradient)
            self._seen(part, "forward", outcome.forward_peak)
            self._made(part, operands, outcome, s.again or part.again)
        self._leave({o for part in s.parts for o in part.outputs} - set(s.outputs))

    def _part(self, number: int, statements: Sequence[Statement], segment: Segment) -> None:
        """Begin a recomputed part: its operands are saved until the backward has used them."""
        part = self.parts[number] = Part.of(statements, segment)
        part.inputs = tuple(dict.fromkeys(self.storage[n] for n in part.reads))
        part.inputs = tuple(x for x in part.inputs if x not in self.fixed)
        kept = (*(x for x in part.inputs if x not in self.uses), self.heap.new(int(part.sums)))
        for s in statements:
            for x in (self.storage[name] for name in reads(s) if name in part.reads):
                if x in kept:
                    self.extra.setdefault(x, s)
        self._keep((*part.inputs, kept[-1]))
        self.tape.append(_Ran(statements[0], (), (), NOTHING, kept))

    def _keep(self, storages: Iterable[int]) -> None:
        for x in storages:
            if x in self.uses:
                self.uses[x] += 1
            else:
                self.heap.save(x)

    def _made(self, s: Statement, operands: tuple[str, ...], outcome: Outcome, again: int = 0) -> None:
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
            self.parts[again].ran.append(Replayed(s, tuple(new), local, outcome.forward_peak))
        if self.graph.training:
            self.tape.append(_Ran(s, operands, s.outputs, outcome, keeps))

    def _bucket(self, s: Statement) -> None:
        """A bucket of parameters: views of one buffer if gathered, else the parameters."""
        operands, gathers = tuple(reads(s)), s.call.fn == "gather_parameters"
        forms, stage = [self._form(o) for o in s.outputs], s.call.kwargs.get("zero")
        if gathers:
            self.under_way = self.prefetch[s.outputs[0]].forward
            self._seen(s, "forward", 2 * sum(map(form_bytes, forms)))  # the receive buffer, and the parameters
        self._made(s, operands, of_bucket(s, forms))
        if gathers and self.again.intersection(s.outputs):
            self.uses[self.storage[s.outputs[0]]] = 0
            self.bucket[self.storage[s.outputs[0]]] = s.outputs[0]
        if stage:
            self.shared.update(self.storage[o] for o in s.outputs)
        if stage and self.graph.passes > 1:  # for all micro-batches
            for o in s.outputs:
                self.heap.hold(self.storage[o])

    # --- backward ---

    def _ends(self) -> None:
        """Seed gradients of the outputs: of scalars (losses), or of all if none is scalar."""
        names = [out.name for out in self.program.outputs if isinstance(out, Ref)]
        names = [n for n in dict.fromkeys(names) if self.forms[n].grad]
        for name in [n for n in names if not self.forms[n].shape] or names:
            self._give(name, self.heap.new(int(self._bytes(name))))

    def _give(self, name: str, storage: int) -> None:
        """Add a gradient, or one more summand, to ``name``."""
        if name in self.graph.parameters:
            if self._trained(name) and name not in self.reached:
                self.reached.add(name)
                self.gradients += self._gradient(name)
            return
        self.heap.hold(storage)
        if name in self.gradient:  # summed in place
            self._seen(None, "backward", 0.0)
            self.heap.hold(storage, -1)
        else:
            self.gradient[name] = storage

    def _backward(self, ran: _Ran) -> None:
        given = [name for name in ran.outputs if name in self.gradient]
        if given:
            for storage in (x for x in ran.kept if x in self.uses and x not in self.present):
                self._make_again(storage)
            if ran.statement.members and ran.statement.call.fn in ("enter_parameters", "gather_parameters"):
                self._reduced(ran)
            else:
                self._passed(ran)
        for name in given:
            self.heap.hold(self.gradient.pop(name), -1)
        for storage in ran.kept:
            if storage not in self.uses:
                self.heap.save(storage, -1)
            else:
                self._used(storage)

    def _used(self, storage: int) -> None:
        """A recomputed storage has one fewer use left."""
        self.uses[storage] -= 1
        if not self.uses[storage] and storage in self.present:
            self.present.remove(storage)
            self.heap.hold(storage, -1)

    def _make_again(self, storage: int) -> None:
        """Recompute a part at its first use; each storage lives until its last use."""
        if storage in self.bucket:
            self.under_way = self.prefetch[self.bucket[storage]].backward
            self._there(storage)
        else:
            self._run_again(self.parts[self.maker[storage][1]])

    def _there(self, storage: int) -> None:
        self.present.add(storage)
        self.heap.hold(storage)

    def _run_again(self, part: Part) -> None:
        again = [x for x in part.inputs if x in self.uses]
        for x in again:
            if x not in self.present:
                self._make_again(x)
        local: dict[str, int] = {}
        for ran in part.ran:
            self._seen(ran.statement, "backward", ran.peak)
            for x in ran.new:
                if self.uses[x]:
                    self._there(x)
            for name, storage in ran.outputs.items():
                self.heap.hold(storage)
                local[name] = storage
            for name in ran.statement.frees:
                if name in local:
                    self.heap.hold(local.pop(name), -1)
        for storage in local.values():
            self.heap.hold(storage, -1)
        for x in again:
            self._used(x)

    def _passed(self, ran: _Ran) -> None:
        outcome = ran.outcome
        self._seen(ran.statement, "backward", outcome.backward_peak)
        for name, gradient in zip(ran.operands, outcome.gradients, strict=False):
            if gradient is None or not self.forms[name].grad:
                continue
            if gradient >= 0:
                self._give(name, self.heap.new(gradient))
            elif ran.outputs[-1 - gradient] in self.gradient:
                self._give(name, self.gradient[ran.outputs[-1 - gradient]])

    def _reduced(self, ran: _Ran) -> None:
        """A bucket's gradients, packed into one buffer and reduced."""
        present = [(p, o) for p, o in zip(ran.operands, ran.outputs, strict=True) if o in self.gradient]
        flat = sum(self._bytes(o) for _, o in present)
        if dtype := ran.statement.call.kwargs.get("reduce_dtype"):
            flat = sum(math.prod(self.forms[o].shape) * dtype.itemsize for _, o in present)
        if ran.statement.call.kwargs.get("zero") == 1 and self.graph.passes > 1:
            self._seen(ran.statement, "backward", 2 * flat)  # while earlier sums exist: added to them, and packed
            self.gradients -= flat - sum(self._bytes(p) for p, _ in present)
        self._seen(ran.statement, "backward", flat)
        for p, _ in present:
            self._give(p, self.heap.new(0))

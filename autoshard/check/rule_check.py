"""Validation of sharding rules: local forms on every rank's shards against the unsharded op.

Every strategy of the op's rule is tried on small meshes, for values and gradients (after DTensor's
strategy validation).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Union

import torch
from torch._library.custom_ops import CustomOpDef

from autoshard.check.local_forms import evaluate, flat, run
from autoshard.check.shards import Tensors, differs, noise, scatter
from autoshard.errors import AutoshardError, RuleError
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
from autoshard.passes.ir.program import Call
from autoshard.passes.ir.sizes import Size
from autoshard.passes.propagate.op_space import fits
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.base import Rule, Site
from autoshard.runtime import World
from autoshard.runtime.autocast import without_autocast
from autoshard.runtime.transport import generators

Sample = tuple[Sequence[Any], Mapping[str, Any]]
"""``(args, kwargs)`` of a call, with float64 tensors where gradients are compared"""

Op = Union[torch._ops.OpOverload, torch._ops.OpOverloadPacket, CustomOpDef]
"""an op of torch.ops or torch.library; a packet stands for its default overload"""

MESHES: tuple[Mapping[str, int], ...] = ({"x": 2}, {"x": 3})
SEED = 20


@dataclass(frozen=True)
class RuleCheck:
    """Result of :func:`check_rule`: number of cases, and labels of the strategies that ran."""

    op: str
    cases: int
    strategies: frozenset[str]
    ran: frozenset[Hashable] = field(default=frozenset(), repr=False)
    """keys of :func:`tried` that were compared"""

    def __str__(self) -> str:
        return f"{self.op}: {self.cases} cases agree ({', '.join(sorted(self.strategies))})"


@dataclass(frozen=True)
class _Example:
    """A sample as a graph of one node, with operands, results and gradients of the unsharded op."""

    node: Node
    graph: Graph
    operands: Tensors
    results: Tensors
    cotangents: list[torch.Tensor | None]
    gradients: list[torch.Tensor | None]


def overload(op: Op) -> torch._ops.OpOverload:
    """One overload of an op: the default one of a packet. Raises :class:`RuleError` otherwise."""
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if isinstance(op, torch._ops.OpOverloadPacket):
        known = [name for name in op.overloads() if "Tensor" in str(getattr(op, name)._schema)]
        if len(known) != 1 and "default" not in known:
            raise RuleError(f"{op} has the overloads {', '.join(known)}: name one, such as torch.ops.{op}.{known[0]}")
        op = getattr(op, "default" if "default" in known else known[0])
    if not isinstance(op, torch._ops.OpOverload):
        raise RuleError(f"{op!r} is no op; give one such as torch.ops.mylib.scale or torch.ops.aten.add.Tensor")
    return op


@contextmanager
def undisturbed() -> Iterator[None]:
    """Context with gradients and without autocast, which restores random generators at its end."""
    before = generators.states()
    try:
        with torch.inference_mode(False), torch.enable_grad(), without_autocast():
            yield
    finally:
        generators.set_states(before)


def tried(node: Node, graph: Graph, strategy: Strategy, moving: bool) -> Hashable:
    """Key of the calls that a check covers: plain arguments, kinds of tensors, and the strategy.

    ``moving``: whether gradients were compared as well, as far as the op has any.
    """
    kinds = [(t.is_floating_point, t.is_complex, t == torch.bool) for t in (graph.types[n].dtype for n in node.inputs)]
    slots = node.input_slots, node.output_slots
    return _plain(node), tuple(kinds), slots, strategy.label, strategy.inputs, strategy.outputs, moving


def _plain(node: Node) -> str:
    """Non-tensor arguments as text; "…" stands for a tensor."""

    def told(value: Any) -> str:
        if isinstance(value, tuple | list):
            return f"[{', '.join(map(told, value))}]"
        return "…" if isinstance(value, Ref) else str(int(value)) if isinstance(value, Size) else str(value)

    texts = [(a.name, told(node.argument(a.name))) for a in node.op._schema.arguments]
    return ", ".join(f"{name}={text}" for name, text in texts if text != "…")


@undisturbed()
def check_rule(
    op: Op | Rule,
    samples: Iterable[Sample],
    *,
    meshes: Sequence[Mapping[str, int]] = MESHES,
    tolerance: float = 1e-9,
    values: bool = True,
    gradients: bool = True,
    results: Collection[int] | None = None,
) -> RuleCheck:
    """Compare every strategy of a rule with the unsharded op on every sample and mesh.

    Args:
        op: an op with a registered rule, or a rule.
        samples: calls, with float64 tensors where gradients are compared.
        meshes: axis sizes; on several axes every combination of strategies is tried.
        tolerance: error relative to the largest element.
        values, gradients: False to compare shapes only (``empty``), or values only.
        results: positions of results that are read (default: all).
    Raises :class:`RuleError` with the differences, or if nothing could be checked.
    """
    tested = op if isinstance(op, Rule) else rule_for(overload(op))
    if tested is None:
        raise RuleError(f"{op} has no rule; write one with autoshard.register_rule")
    cases, failures = 0, list[str]()
    labels, ran = set[str](), set[Hashable]()
    worlds = [(Mesh(sizes), World(sizes)) for sizes in meshes]
    for number, sample in enumerate(samples):
        example = _example(tested, sample, gradients, results)
        allowed = max(tolerance, 8 * _rounding(example)) if values else float("inf")
        for mesh, world in worlds:
            for graph, choice in _choices(tested, example, mesh):
                cases += 1
                labels.update(s.label for s in choice)
                known = (False, True) if graph is example.graph else (False,)
                ran.update(tried(example.node, graph, s, moving) for s in choice for moving in known)
                difference = _differs(tested, example, graph, mesh, world, choice, allowed)
                if difference:
                    failures.append(f"  {_describe(example, number, mesh, choice)}\n    {difference}")
    if failures:
        more = f"\n  … and {len(failures) - 5} more" if len(failures) > 5 else ""
        raise RuleError(
            f"the rule of {tested.op} ({tested.notation or 'hand-written'}) is wrong in "
            f"{len(failures)} of {cases} cases:\n" + "\n".join(failures[:5]) + more
        )
    if not cases:
        raise RuleError(f"{tested.op}: no sample could be run on meshes {list(meshes)}; give samples with longer dims")
    return RuleCheck(str(tested.op), cases, frozenset(labels), frozenset(ran))


def _describe(example: _Example, number: int, mesh: Mesh, choice: tuple[Strategy, ...]) -> str:
    parts = []
    for axis, s in zip(mesh.axes, choice, strict=True):
        ins, outs = ", ".join(map(str, s.inputs)), ", ".join(map(str, s.outputs))
        parts.append(f"{s.label}@{axis}: ({ins}) → ({outs})")
    return f"sample {number} ({call_text(example.node, example.graph)}), mesh {mesh}, strategy " + "; ".join(parts)


def call_text(node: Node, graph: Graph) -> str:
    """Types of the operands and the other arguments, as text."""
    return ", ".join([*(str(graph.types[name]) for name in node.inputs), *filter(None, [_plain(node)])])


def _example(rule: Rule, sample: Sample, moves: bool, wanted: Collection[int] | None) -> _Example:
    """Run the sample unsharded; arguments without a derivative (class weights) are constants.

    An op without a backward is compared for values only.
    """
    constants: set[str] = set()
    while True:
        try:
            return _run_whole(rule, sample, moves, constants, wanted)
        except RuntimeError as error:
            if "no autograd formula was registered" in str(error) and moves:
                moves = False
                continue
            refused = re.search(r"not differentiable with respect to argument '(\w+)'", str(error))
            if refused is None or refused.group(1) in constants:
                raise
            constants.add(refused.group(1))


def _run_whole(
    rule: Rule, sample: Sample, moves: bool, constants: Collection[str], wanted: Collection[int] | None
) -> _Example:
    """Run the sample on full tensors, forward and backward."""
    operands: Tensors = []

    def lift(value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            differentiable = moves and name not in constants and (value.is_floating_point() or value.is_complex())
            operands.append(value.detach().clone().requires_grad_(differentiable))
            return Ref(f"x{len(operands) - 1}")
        if isinstance(value, tuple | list):
            return [lift(v, name) for v in value]
        return value

    names_of_arguments = [a.name for a in rule.op._schema.arguments]
    args = tuple(lift(a, name) for a, name in zip(sample[0], names_of_arguments, strict=False))
    kwargs = {k: lift(v, k) for k, v in sample[1].items()}
    names = {f"x{i}": x for i, x in enumerate(operands)}
    _seed()
    if torch.Tag.nondeterministic_seeded in rule.op.tags:
        results = _alone(rule, args, kwargs, names)
    else:
        results = flat(evaluate(Call(rule.op, args, kwargs), names, Mesh({"x": 1}), 0))
    slots = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and (wanted is None or i in wanted)]
    outputs = [results[i] for i in slots]
    node, graph = _graph(rule.op, args, kwargs, operands, outputs, slots)
    random = torch.Generator("cpu").manual_seed(SEED)
    cotangents = [noise(y, random) if y.requires_grad else None for y in outputs]
    gradients = _backward(outputs, cotangents, operands)
    return _Example(node, graph, operands, [y.detach() for y in outputs], cotangents, gradients)


def _seed() -> None:
    # Without accelerator torch.manual_seed takes a millisecond: it records a stack per backend.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(SEED)


def _rounding(example: _Example) -> float:
    """Relative rounding error (eps) of the narrowest floating dtype in the call."""
    dtypes = {x.dtype for x in example.operands + example.results}
    return max((torch.finfo(d).eps for d in dtypes if d.is_floating_point or d.is_complex), default=0.0)


def _graph(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    operands: Tensors,
    outputs: Tensors,
    slots: list[int],
) -> tuple[Node, Graph]:
    names = tuple(f"y{i}" for i in slots)
    node = Node("node", op, args, kwargs, names, tuple(slots))
    types = {f"x{i}": TensorType(tuple(x.shape), x.dtype, x.requires_grad) for i, x in enumerate(operands)}
    types |= {n: TensorType(tuple(y.shape), y.dtype, y.requires_grad) for n, y in zip(names, outputs, strict=True)}
    return node, Graph((), (node,), types, tuple(map(Ref, names)), None, None)


def _alone(rule: Rule, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Mapping[str, torch.Tensor]) -> Tensors:
    """Reference of a random op: its local form on one rank, so that random numbers are equal."""
    operands = list(names.values())
    shapes = flat(evaluate(Call(rule.op, args, kwargs), names, Mesh({"x": 1}), 0))
    slots = [i for i, r in enumerate(shapes) if isinstance(r, torch.Tensor)]
    node, graph = _graph(rule.op, args, kwargs, operands, [shapes[i] for i in slots], slots)
    mesh = Mesh({"x": 1})
    choice = (next(s for s in rule.strategies(node, graph) if s.label == "R"),)
    _seed()
    (results,) = run(rule, _site(node, graph, mesh, choice), [operands], World({"x": 1}))
    return results


def _choices(rule: Rule, example: _Example, mesh: Mesh) -> Iterator[tuple[Graph, tuple[Strategy, ...]]]:
    """(graph, strategy per axis): strategies for inference only get a graph without gradients."""
    still = {n: TensorType(t.shape, t.dtype) for n, t in example.graph.types.items()}
    without = Graph((), (example.node,), still, example.graph.outputs, None, None)
    moving = rule.strategies(example.node, example.graph)
    for choice in itertools.product(moving, repeat=mesh.ndim):
        if fits(choice, mesh):
            yield example.graph, choice
    plain = [(s, s not in moving) for s in rule.strategies(example.node, without)]
    for marked in itertools.product(plain if any(new for _, new in plain) else (), repeat=mesh.ndim):
        choice = tuple(s for s, _ in marked)
        if any(new for _, new in marked) and fits(choice, mesh):
            yield without, choice


def _site(node: Node, graph: Graph, mesh: Mesh, choice: tuple[Strategy, ...]) -> Site:
    for s in choice:
        if len(s.inputs) != len(node.inputs) or len(s.outputs) != len(node.outputs):
            raise RuleError(
                f"{node.op}: strategy {s.label!r} places {len(s.inputs)} operands and {len(s.outputs)} results; "
                f"the call has {len(node.inputs)} and {len(node.outputs)}"
            )
    inputs = tuple(Layout(mesh, [s.inputs[i] for s in choice]) for i in range(len(node.inputs)))
    outputs = tuple(Layout(mesh, [s.outputs[i] for s in choice]) for i in range(len(node.outputs)))
    for name, layout in zip(node.inputs + node.outputs, inputs + outputs, strict=True):
        layout.check(graph.types[name].shape)
    return Site(node, graph, mesh, inputs, outputs, choice)


def _differs(
    rule: Rule,
    example: _Example,
    graph: Graph,
    mesh: Mesh,
    world: World,
    choice: tuple[Strategy, ...],
    tolerance: float,
) -> str | None:
    """Error text for the strategies of ``choice``; None if values and gradients agree."""
    random = torch.Generator("cpu").manual_seed(SEED)
    try:
        site = _site(example.node, graph, mesh, choice)
        parts = [scatter(x.detach(), at, random) for x, at in zip(example.operands, site.inputs, strict=True)]
        held = [[part[r].requires_grad_(x.requires_grad) for part, x in zip(parts, example.operands, strict=True)]
                for r in range(mesh.size)]  # fmt: skip
        _seed()
        made = run(rule, site, held, world)
        for i, (result, at) in enumerate(zip(example.results, site.outputs, strict=True)):
            wrong = differs([row[i].detach() for row in made], at, result, tolerance)
            if wrong:
                return f"result {i} ({at}): {wrong}"
        if graph is not example.graph:
            return None
        return _gradients_differ(example, site, held, made, random, tolerance)
    except (AutoshardError, RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def _gradients_differ(
    example: _Example, site: Site, held: list[Tensors], made: list[Tensors], random: torch.Generator, tolerance: float
) -> str | None:
    """Error text for the gradient of an operand, assembled by its gradient placement."""
    outputs: Tensors = []
    cotangents: list[torch.Tensor | None] = []
    for i, cotangent in enumerate(example.cotangents):
        if cotangent is not None:
            outputs += [row[i] for row in made]
            cotangents += scatter(cotangent, site.outputs[i].gradient(), random)
    if not outputs:
        return None
    leaves = [x for row in held for x in row]
    found = _backward(outputs, cotangents, leaves)
    for i, (gradient, at) in enumerate(zip(example.gradients, site.inputs, strict=True)):
        if gradient is None:
            continue
        locals_ = [g if g is not None else torch.zeros_like(x) for g, x in zip(found, leaves, strict=True)]
        wrong = differs(locals_[i :: len(example.operands)], at.gradient(), gradient, tolerance)
        if wrong:
            return f"gradient of operand {i} ({at}, so its gradient is {at.gradient()}): {wrong}"
    return None


def _backward(
    outputs: Tensors, cotangents: Sequence[torch.Tensor | None], leaves: Tensors
) -> list[torch.Tensor | None]:
    """Gradients of the leaves; None for those that require none."""
    pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if g is not None and y.requires_grad]
    wanted = [i for i, x in enumerate(leaves) if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    ys, gs = zip(*pairs, strict=True)
    found = torch.autograd.grad(ys, [leaves[i] for i in wanted], gs, allow_unused=True)
    by_leaf: list[torch.Tensor | None] = [None] * len(leaves)
    for i, g in zip(wanted, found, strict=True):
        by_leaf[i] = torch.zeros_like(leaves[i]) if g is None else g
    return by_leaf

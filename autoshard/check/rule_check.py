"""Validation of sharding rules: every strategy's local form, on every rank's shards of small
meshes, against the unsharded op, values and gradients (after DTensor's strategy validation)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Union

import torch
from torch import Tensor

from autoshard import runtime
from autoshard.aten import result_list
from autoshard.errors import AutoshardError, RuleError
from autoshard.layout import Layout, Partial, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType, map_tree, walk
from autoshard.passes.ir.program import Local, LocalCall, Offset
from autoshard.passes.ir.sizes import Size
from autoshard.passes.propagate.op_space import is_feasible
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.base import Rule, Site
from autoshard.runtime import World
from autoshard.runtime.transport import torch_state
from autoshard.runtime.transport.torch_state import without_autocast
from autoshard.torch_private.ops import CustomOpDef, OpOverload, OpOverloadPacket

TensorList = list[Tensor]


def scatter_by_layout(value: Tensor, layout: Layout, random: torch.Generator) -> TensorList:
    """Local tensors of all ranks for ``value`` in ``layout``; Partial axes get random summands."""
    summed = layout.axes_with(Partial)
    count = layout.mesh.size_of(summed) if summed else 1
    summands = [random_summand(value, random) for _ in range(count - 1)]
    rest = value.clone()
    for s in summands:
        rest = rest - s
    summands.append(rest)
    parts = [_slice_of_rank(summands[layout.mesh.index_along(r, summed)], layout, r) for r in range(layout.mesh.size)]
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def _slice_of_rank(value: Tensor, layout: Layout, rank: int) -> Tensor:
    for d, n in enumerate(value.shape):
        chunks = layout.chunks_of(d, n, rank)
        if chunks != ((0, n),):
            value = torch.cat([value.narrow(d, *chunk) for chunk in chunks], d)
    return value


def random_summand(like: Tensor, random: torch.Generator) -> Tensor:
    """Random tensor of the same shape, dtype and device; raises :class:`RuleError` for bool."""
    if like.is_floating_point() or like.is_complex():
        return torch.randn(like.shape, generator=random, dtype=like.dtype, device=random.device).to(like.device)
    if like.dtype == torch.bool:
        raise RuleError("a boolean tensor has no partial sums: leave Partial out of strategies for bool")
    return torch.randint(-9, 10, like.shape, generator=random, device=random.device).to(like)


def shards_mismatch(parts: TensorList, layout: Layout, expected: Tensor, tolerance: float) -> str | None:
    """Error text if the ranks' shards in ``layout`` do not form ``expected``, else None.
    ``tolerance``: relative to the largest element. Each replica is compared; summands are
    added."""
    mesh, summed = layout.mesh, layout.axes_with(Partial)
    for r, part in enumerate(parts):
        if tuple(part.shape) != layout.local_shape(expected.shape, r):
            want = list(layout.local_shape(expected.shape, r))
            return f"rank {r} holds shape {list(part.shape)}, should hold {want} of {list(expected.shape)}"
        if part.dtype != expected.dtype:
            return f"rank {r} holds {part.dtype}, should hold {expected.dtype}"
    for r in range(mesh.size):
        group = mesh.group(r, summed) if summed else (r,)
        found = parts[group[0]]
        for other in group[1:]:
            found = _combined_partial(found, parts[other], layout, summed)
        wrong = _deviation_text(found, _slice_of_rank(expected, layout, r), tolerance)
        if wrong:
            what = f"combined over {', '.join(summed)}" if summed else "its part"
            return f"rank {r}, {what}: {wrong}"
    return None


def _combined_partial(a: Tensor, b: Tensor, layout: Layout, axes: Sequence[str]) -> Tensor:
    p = layout[axes[0]]
    op = p.op if isinstance(p, Partial) else "sum"
    return a + b if op == "sum" else torch.maximum(a, b) if op == "max" else torch.minimum(a, b)


def _deviation_text(found: Tensor, expected: Tensor, tolerance: float) -> str | None:
    if tolerance == float("inf") or not expected.numel():
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        bad = int((found != expected).sum())
        return f"{bad} of {expected.numel()} elements differ" if bad else None
    if torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True):  # the usual case
        return None
    scale = float(expected[expected.isfinite()].abs().max()) if bool(expected.isfinite().any()) else 0.0
    if torch.allclose(found, expected, rtol=0, atol=tolerance * max(scale, 1.0), equal_nan=True):
        return None
    error = float((found - expected).abs().nan_to_num(float("inf")).max())
    return f"largest error {error:.3g} (largest element {scale:.3g})"


def run_local_form(rule: Rule, site: Site, held: list[TensorList], world: runtime.World) -> list[TensorList]:
    """Results [rank][slot] of the rule's local form on ``held``; ``world``: of the site's mesh."""
    call = rule.local(site) if rule.local else LocalCall(rule.op, site.node.args, site.node.kwargs)

    def one(rank: int) -> TensorList:
        names = dict(zip(site.node.inputs, held[rank], strict=True))
        results = result_list(evaluate(call, names, site.mesh, rank))
        return [results[slot] for slot in site.node.output_slots]

    if not any(isinstance(item, LocalCall) and isinstance(item.fn, str) for item in walk(call)):  # no runtime calls
        return [one(rank) for rank in range(site.mesh.size)]
    return world.run(one, [(rank,) for rank in range(site.mesh.size)])


def evaluate(tree: Any, names: Mapping[str, Tensor], mesh: Mesh, rank: int) -> Any:
    """The value of a call, or of any argument of one, on ``rank``; ``names``: its local values."""

    def at(item: Any) -> Any:
        if isinstance(item, Ref):
            return names[item.name]
        if isinstance(item, LocalCall):
            return (getattr(runtime, item.fn) if isinstance(item.fn, str) else item.fn)(*item.args, **item.kwargs)
        if isinstance(item, Local | Offset):
            start, length = Layout(mesh, {a: Shard(0) for a in item.axes}, item.axes).chunk_of(0, item.size, rank)
            return length if isinstance(item, Local) else start
        return item

    return map_tree(tree, at)


Sample = tuple[Sequence[Any], Mapping[str, Any]]
"""``(args, kwargs)`` of a call, with float64 tensors where gradients are compared"""

Op = Union[OpOverload, OpOverloadPacket, CustomOpDef]
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
    """keys of :func:`checked_case` that were compared"""

    def __str__(self) -> str:
        return f"{self.op}: {self.cases} cases agree ({', '.join(sorted(self.strategies))})"


@dataclass(frozen=True)
class _Example:
    """A sample as a graph of one node, with operands, results and gradients of the unsharded op."""

    node: Node
    graph: Graph
    operands: TensorList
    results: TensorList
    cotangents: list[Tensor | None]
    gradients: list[Tensor | None]


def overload(op: Op) -> OpOverload:
    """One overload of an op: the default one of a packet. Raises :class:`RuleError` otherwise."""
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if isinstance(op, OpOverloadPacket):
        known = [name for name in op.overloads() if "Tensor" in str(getattr(op, name)._schema)]
        if len(known) != 1 and "default" not in known:
            raise RuleError(f"{op} has the overloads {', '.join(known)}. Name one, such as torch.ops.{op}.{known[0]}")
        op = getattr(op, "default" if "default" in known else known[0])
    if not isinstance(op, OpOverload):
        raise RuleError(f"{op!r} is not an op. Give one such as torch.ops.mylib.scale or torch.ops.aten.add.Tensor")
    return op


@contextmanager
def with_clean_op_state() -> Iterator[None]:
    """Context with gradients and without autocast, which restores random generators at its end."""
    before = torch_state.generator_states()
    try:
        with torch.inference_mode(False), torch.enable_grad(), without_autocast():
            yield
    finally:
        torch_state.set_generator_states(before)


def checked_case(node: Node, graph: Graph, strategy: Strategy, moving: bool) -> Hashable:
    """Key of the calls that a check covers: plain arguments, kinds of tensors, and the strategy.
    ``moving``: whether gradients were compared as well, as far as the op has any."""
    kinds = [(t.is_floating_point, t.is_complex, t == torch.bool) for t in (graph.types[n].dtype for n in node.inputs)]
    slots = node.input_slots, node.output_slots
    return _plain_argument_text(node), tuple(kinds), slots, strategy.label, strategy.inputs, strategy.outputs, moving


def _plain_argument_text(node: Node) -> str:
    """Non-tensor arguments as text; "…" stands for a tensor."""

    def argument_text(value: Any) -> str:
        if isinstance(value, tuple | list):
            return f"[{', '.join(map(argument_text, value))}]"
        return "…" if isinstance(value, Ref) else str(int(value)) if isinstance(value, Size) else str(value)

    texts = [(a.name, argument_text(node.argument(a.name))) for a in node.op._schema.arguments]
    return ", ".join(f"{name}={text}" for name, text in texts if text != "…")


@with_clean_op_state()
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
        raise RuleError(f"{op} has no rule. Write one with autoshard.register_rule")
    cases, failures = 0, list[str]()
    labels, ran = set[str](), set[Hashable]()
    worlds = [(Mesh(sizes), World(sizes)) for sizes in meshes]
    for number, sample in enumerate(samples):
        example = _run_sample(tested, sample, gradients, results)
        allowed = max(tolerance, 8 * _rounding(example)) if values else float("inf")
        for mesh, world in worlds:
            for graph, choice in _strategy_choices(tested, example, mesh):
                cases += 1
                labels.update(s.label for s in choice)
                known = (False, True) if graph is example.graph else (False,)
                ran.update(checked_case(example.node, graph, s, moving) for s in choice for moving in known)
                difference = _strategy_error(tested, example, graph, mesh, world, choice, allowed)
                if difference:
                    failures.append(f"  {_case_text(example, number, mesh, choice)}\n    {difference}")
    if failures:
        more = f"\n  … and {len(failures) - 5} more" if len(failures) > 5 else ""
        raise RuleError(
            f"the rule of {tested.op} ({tested.notation or 'hand-written'}) is wrong in "
            f"{len(failures)} of {cases} cases:\n" + "\n".join(failures[:5]) + more
        )
    if not cases:
        raise RuleError(f"{tested.op}: no sample could run on meshes {list(meshes)}. Give samples with longer dims")
    return RuleCheck(str(tested.op), cases, frozenset(labels), frozenset(ran))


def _case_text(example: _Example, number: int, mesh: Mesh, choice: tuple[Strategy, ...]) -> str:
    parts = []
    for axis, s in zip(mesh.axes, choice, strict=True):
        ins, outs = ", ".join(map(str, s.inputs)), ", ".join(map(str, s.outputs))
        parts.append(f"{s.label}@{axis}: ({ins}) → ({outs})")
    return f"sample {number} ({call_text(example.node, example.graph)}), mesh {mesh}, strategy " + "; ".join(parts)


def call_text(node: Node, graph: Graph) -> str:
    """Types of the operands and the other arguments, as text."""
    return ", ".join([*(str(graph.types[name]) for name in node.inputs), *filter(None, [_plain_argument_text(node)])])


def _run_sample(rule: Rule, sample: Sample, with_gradient: bool, wanted: Collection[int] | None) -> _Example:
    """Run the sample unsharded; arguments without a derivative (class weights) are constants, and
    without a backward only values are compared."""
    constants: set[str] = set()
    while True:
        try:
            return _run_unsharded(rule, sample, with_gradient, constants, wanted)
        except RuntimeError as error:
            if "no autograd formula was registered" in str(error) and with_gradient:
                with_gradient = False
                continue
            refused = re.search(r"not differentiable with respect to argument '(\w+)'", str(error))
            if refused is None or refused.group(1) in constants:
                raise
            constants.add(refused.group(1))


def _run_unsharded(
    rule: Rule, sample: Sample, with_gradient: bool, constants: Collection[str], wanted: Collection[int] | None
) -> _Example:
    """Run the sample on full tensors, forward and backward."""
    operands: TensorList = []

    def lift(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            differentiable = (
                with_gradient and name not in constants and (value.is_floating_point() or value.is_complex())
            )
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
        results = _single_rank_results(rule, args, kwargs, names)
    else:
        results = result_list(evaluate(LocalCall(rule.op, args, kwargs), names, Mesh({"x": 1}), 0))
    slots = [i for i, r in enumerate(results) if isinstance(r, Tensor) and (wanted is None or i in wanted)]
    outputs = [results[i] for i in slots]
    node, graph = _graph_of_call(rule.op, args, kwargs, operands, outputs, slots)
    random = torch.Generator("cpu").manual_seed(SEED)
    cotangents = [random_summand(y, random) if y.requires_grad else None for y in outputs]
    gradients = _leaf_gradients(outputs, cotangents, operands)
    return _Example(node, graph, operands, [y.detach() for y in outputs], cotangents, gradients)


def _seed() -> None:
    # Without accelerator torch.manual_seed takes a millisecond: it records a stack per backend.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(SEED)


def _rounding(example: _Example) -> float:
    """Relative rounding error (eps) of the narrowest floating dtype in the call."""
    dtypes = {x.dtype for x in example.operands + example.results}
    return max((torch.finfo(d).eps for d in dtypes if d.is_floating_point or d.is_complex), default=0.0)


def _graph_of_call(
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    operands: TensorList,
    outputs: TensorList,
    slots: list[int],
) -> tuple[Node, Graph]:
    names = tuple(f"y{i}" for i in slots)
    node = Node("node", op, args, kwargs, names, tuple(slots))
    types = {f"x{i}": TensorType(tuple(x.shape), x.dtype, x.requires_grad) for i, x in enumerate(operands)}
    types |= {n: TensorType(tuple(y.shape), y.dtype, y.requires_grad) for n, y in zip(names, outputs, strict=True)}
    return node, Graph((), (node,), types, tuple(map(Ref, names)), None, None)


def _single_rank_results(
    rule: Rule, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Mapping[str, Tensor]
) -> TensorList:
    """Reference of a random op: its local form on one rank, so that random numbers are equal."""
    operands = list(names.values())
    shapes = result_list(evaluate(LocalCall(rule.op, args, kwargs), names, Mesh({"x": 1}), 0))
    slots = [i for i, r in enumerate(shapes) if isinstance(r, Tensor)]
    node, graph = _graph_of_call(rule.op, args, kwargs, operands, [shapes[i] for i in slots], slots)
    mesh = Mesh({"x": 1})
    choice = (next(s for s in rule.strategies(node, graph) if s.label == "R"),)
    _seed()
    (results,) = run_local_form(rule, _site_of_choice(node, graph, mesh, choice), [operands], World({"x": 1}))
    return results


def _strategy_choices(rule: Rule, example: _Example, mesh: Mesh) -> Iterator[tuple[Graph, tuple[Strategy, ...]]]:
    """(graph, strategy per axis): strategies for inference only get a graph without gradients."""
    still = {n: TensorType(t.shape, t.dtype) for n, t in example.graph.types.items()}
    without = Graph((), (example.node,), still, example.graph.outputs, None, None)
    moving = rule.strategies(example.node, example.graph)
    for choice in itertools.product(moving, repeat=mesh.ndim):
        if is_feasible(choice, mesh):
            yield example.graph, choice
    plain = [(s, s not in moving) for s in rule.strategies(example.node, without)]
    for marked in itertools.product(plain if any(new for _, new in plain) else (), repeat=mesh.ndim):
        choice = tuple(s for s, _ in marked)
        if any(new for _, new in marked) and is_feasible(choice, mesh):
            yield without, choice


def _site_of_choice(node: Node, graph: Graph, mesh: Mesh, choice: tuple[Strategy, ...]) -> Site:
    for s in choice:
        if len(s.inputs) != len(node.inputs) or len(s.outputs) != len(node.outputs):
            raise RuleError(
                f"{node.op}: strategy {s.label!r} places {len(s.inputs)} operands and {len(s.outputs)} "
                f"results, but the call has {len(node.inputs)} and {len(node.outputs)}"
            )
    inputs = tuple(Layout(mesh, [s.inputs[i] for s in choice]) for i in range(len(node.inputs)))
    outputs = tuple(Layout(mesh, [s.outputs[i] for s in choice]) for i in range(len(node.outputs)))
    for name, layout in zip(node.inputs + node.outputs, inputs + outputs, strict=True):
        layout.check(graph.types[name].shape)
    return Site(node, graph, mesh, inputs, outputs, choice)


def _strategy_error(
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
        site = _site_of_choice(example.node, graph, mesh, choice)
        parts = [scatter_by_layout(x.detach(), at, random) for x, at in zip(example.operands, site.inputs, strict=True)]
        held = [[part[r].requires_grad_(x.requires_grad) for part, x in zip(parts, example.operands, strict=True)]
                for r in range(mesh.size)]  # fmt: skip
        _seed()
        made = run_local_form(rule, site, held, world)
        for i, (result, at) in enumerate(zip(example.results, site.outputs, strict=True)):
            wrong = shards_mismatch([row[i].detach() for row in made], at, result, tolerance)
            if wrong:
                return f"result {i} ({at}): {wrong}"
        if graph is not example.graph:
            return None
        return _gradient_error(example, site, held, made, random, tolerance)
    except (AutoshardError, RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def _gradient_error(
    example: _Example,
    site: Site,
    held: list[TensorList],
    made: list[TensorList],
    random: torch.Generator,
    tolerance: float,
) -> str | None:
    """Error text for the gradient of an operand, assembled by its gradient placement."""
    outputs: TensorList = []
    cotangents: list[Tensor | None] = []
    for i, cotangent in enumerate(example.cotangents):
        if cotangent is not None:
            outputs += [row[i] for row in made]
            cotangents += scatter_by_layout(cotangent, site.outputs[i].gradient(), random)
    if not outputs:
        return None
    leaves = [x for row in held for x in row]
    found = _leaf_gradients(outputs, cotangents, leaves)
    for i, (gradient, at) in enumerate(zip(example.gradients, site.inputs, strict=True)):
        if gradient is None:
            continue
        locals_ = [g if g is not None else torch.zeros_like(x) for g, x in zip(found, leaves, strict=True)]
        wrong = shards_mismatch(locals_[i :: len(example.operands)], at.gradient(), gradient, tolerance)
        if wrong:
            return f"gradient of operand {i} ({at}, so its gradient is {at.gradient()}): {wrong}"
    return None


def _leaf_gradients(
    outputs: TensorList, cotangents: Sequence[Tensor | None], leaves: TensorList
) -> list[Tensor | None]:
    """Gradients of the leaves; None for those that require none."""
    pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if g is not None and y.requires_grad]
    wanted = [i for i, x in enumerate(leaves) if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    ys, gs = zip(*pairs, strict=True)
    found = torch.autograd.grad(ys, [leaves[i] for i in wanted], gs, allow_unused=True)
    by_leaf: list[Tensor | None] = [None] * len(leaves)
    for i, g in zip(wanted, found, strict=True):
        by_leaf[i] = torch.zeros_like(leaves[i]) if g is None else g
    return by_leaf

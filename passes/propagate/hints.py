"""Layouts that a value may have: candidates from its shape, hints, layouts of earlier programs.
A hint is a pattern of names with a placement or a style; :func:`resolve_hints` turns hints into
constraints on values."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from autoshard.errors import HintError, PlanError
from autoshard.layout import (
    Grouped,
    I,
    Invariant,
    Layout,
    Owned,
    Partial,
    Placement,
    R,
    Replicate,
    Shard,
    from_torch_placement,
)
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Placements, normalize_placement
from autoshard.passes.ir.graph import Graph, Input, TensorType
from autoshard.passes.ir.text import enclosing_modules
from autoshard.passes.rules.families.embedding import LOOKUP_OPS


def free_buffers(graph: Graph, given: Collection[str], constraints: Collection[str]) -> frozenset[str]:
    """Buffers kept between calls (KV cache) whose layout the search chooses, except ``given``; in
    training (running statistics) hinted ones."""
    buffers = {i.fqn for i in graph.of_kind("buffer")}
    states = {old for fqn, old in graph.states.items() if fqn in buffers and old not in given}
    return frozenset(n for n in states if not graph.training or n in constraints)


def candidate_placements(type_: TensorType, mesh: Mesh, replicated: Placement | None = None) -> tuple[Placements, ...]:
    """All sharded placements with chunks for all ranks; else ``replicated`` (None: R or I)."""
    whole: tuple[Placement, ...] = (replicated,) if replicated is not None else (R, I) if type_.grad else (R,)
    per_axis = [
        (*whole, *(Shard(d) for d, n in enumerate(type_.shape) if ranks > 1 and int(n) >= ranks and not type_.unknown))
        for ranks in mesh.shape
    ]
    return tuple(p for p in itertools.product(*per_axis) if _leaves_chunks(type_.shape, p, mesh))


def fixed_placements(type_: TensorType, mesh: Mesh) -> tuple[Placements, ...]:
    """Placements of a parameter that no conversion reaches: owned by one rank, or grouped."""
    return _owned_placements(type_, mesh) + _grouped_placements(type_, mesh)


def _owned_placements(type_: TensorType, mesh: Mesh) -> tuple[Placements, ...]:
    """Table-wise placements: a table or an expert's matrix is owned along some axes; others
    replicate it, or shard a matrix evenly: ranks without rows derive shapes from that."""
    if not type_.tables:
        return ()
    whole = I if type_.grad else R
    cuts = () if type_.looked_up else tuple(Shard(d) for d in range(len(type_.shape)))
    per_axis = [(whole, Owned(), *cuts) if ranks > 1 else (whole,) for ranks in mesh.shape]
    return tuple(
        p
        for p in itertools.product(*per_axis)
        if any(isinstance(x, Owned) for x in p)
        and all(int(n) % cut == 0 for n, cut in zip(type_.shape, _chunk_counts(type_.shape, p, mesh), strict=True))
    )


def _grouped_placements(type_: TensorType, mesh: Mesh) -> tuple[Placements, ...]:
    """Placements that shard every part of a fused dim along some axes, and no others shard it."""
    if type_.parts is None:
        return ()
    (dim, parts), whole = type_.parts, I if type_.grad else R
    others = tuple(Shard(d) for d in range(len(type_.shape)) if d != dim)
    per_axis = [(whole, *others, Grouped(dim, parts)) if ranks > 1 else (whole,) for ranks in mesh.shape]
    size = int(type_.shape[dim]) // sum(parts)
    return tuple(
        p
        for p in itertools.product(*per_axis)
        if any(isinstance(x, Grouped) for x in p)
        and size % math.prod(n for x, n in zip(p, mesh.shape, strict=True) if isinstance(x, Grouped)) == 0
        and _leaves_chunks(type_.shape, p, mesh)
    )


def _leaves_chunks(shape: tuple[int, ...], placements: Placements, mesh: Mesh) -> bool:
    return all(int(n) >= cut or cut == 1 for n, cut in zip(shape, _chunk_counts(shape, placements, mesh), strict=True))


def _chunk_counts(shape: tuple[int, ...], placements: Placements, mesh: Mesh) -> list[int]:
    """Chunks per dim."""
    pairs = list(zip(placements, mesh.shape, strict=True))
    return [math.prod(ranks for p, ranks in pairs if p == Shard(d)) for d in range(len(shape))]


OWNER_DIM = -1
"""in place of a dim: owned by one rank instead of sharded"""
HINT_STYLES = ("colwise", "rowwise", "replicate")
MICRO_BATCH = "micro_batch"
"""name of the mesh axis in time, along which micro-batches divide inputs"""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A hint on one value: placements on named axes, or ``anywhere``: on at least one axis."""

    pattern: str
    name: str
    axes: tuple[tuple[str, Placement], ...] = ()
    anywhere: Placement | None = None

    def allowed(
        self, states: Iterable[tuple[Placement, ...]], type_: TensorType, mesh: Mesh, whole: Placement | None = None
    ) -> tuple[tuple[Placement, ...], ...]:
        """The ``states`` that meet the hint; else its own one, whose shards are too small for a
        search. ``whole``: the replicated placement of this value (None: R or I)."""
        result = dict.fromkeys(s for s in states if self.meets(s, mesh))
        if not result:  # shards too small for the search are still the user's request
            asked: dict[str, Placement | None] = {**dict(self.axes)} or {mesh.axes[-1]: self.anywhere}
            result = {tuple(_resolved_placement(asked.get(a), type_, whole) for a in mesh.axes): None}
        return tuple(result)

    def meets(self, state: tuple[Placement, ...], mesh: Mesh) -> bool:
        """Whether placements satisfy the hint."""
        if self.anywhere is not None:
            if not isinstance(self.anywhere, Shard):
                return all(_placement_matches(self.anywhere, p) for p in state)
            others = (p for p in state if p != self.anywhere)
            return self.anywhere in state and not any(isinstance(p, Shard) for p in others)
        return all(_placement_matches(p, state[mesh.index(axis)]) for axis, p in self.axes)

    def check(self, type_: TensorType, kind: str, reassigned: bool = False) -> None:
        """Raise :class:`HintError` for an impossible hint. ``reassigned``: calls set the buffer."""
        for axis, p in self.axes or ((None, self.anywhere),):
            where = f" on axis {axis!r}" if axis else ""
            if isinstance(p, Shard) and p.dim < 0:
                raise HintError(f"hint {self.pattern!r}: {p}{where} counts from the end. Give the dim as 0 or more")
            if isinstance(p, Shard) and p.dim >= len(type_.shape):
                raise HintError(
                    f"hint {self.pattern!r} asks for Shard({p.dim}){where}, but {kind} {self.name!r} has "
                    f"{len(type_.shape)} dims, shape {list(type_.shape)}. "
                    + (f"Use Shard(0) to Shard({len(type_.shape) - 1})." if type_.shape else "A scalar is replicated.")
                )
            if isinstance(p, Shard) and kind == "buffer" and reassigned:
                raise HintError(
                    f"hint {self.pattern!r} asks for {p}{where}, but the forward replaces buffer "
                    f"{self.name!r} by another shape or dtype, so it is replicated. Leave it out "
                    "of the pattern, use Replicate(), or write to it in place."
                )
            if isinstance(p, Partial) and kind in ("parameter", "buffer", "input"):
                raise HintError(
                    f"hint {self.pattern!r} asks for Partial{where}, but {kind} {self.name!r} is "
                    "replicated or sharded. Use Shard(d) or Replicate()."
                )


@dataclass(frozen=True, slots=True)
class DimLimit:
    """A named strategy's limit on a parameter: dims to shard per mesh axis (:data:`OWNER_DIM`:
    owned), where sizes allow. Empty: replicated; None: free."""

    dims: tuple[frozenset[int] | None, ...]

    def allowed(
        self, states: Iterable[tuple[Placement, ...]], type_: TensorType, mesh: Mesh, whole: Placement | None = None
    ) -> tuple[tuple[Placement, ...], ...]:
        """The ``states`` that meet the limit on the most axes that ask for a shard; of a vector
        also grouped placements, as no other axis can shard it then."""
        found: dict[int, list[tuple[Placement, ...]]] = {}
        beside: list[tuple[Placement, ...]] = []
        for state in states:
            pairs = [(p, dims) for p, dims in zip(state, self.dims, strict=True) if dims is not None]
            if all(
                not isinstance(p, Shard) or (OWNER_DIM if isinstance(p, Owned) else p.dim) in dims for p, dims in pairs
            ):
                if len(type_.shape) == 1 and any(isinstance(p, Grouped) for p in state):
                    beside.append(state)
                else:
                    found.setdefault(sum(isinstance(p, Shard) for p, _ in pairs), []).append(state)
        return (*found[max(found, default=0)], *beside) if found else tuple(beside)


def _placement_matches(asked: Placement, given: Placement) -> bool:
    """Replicate asks for the full value and leaves the form of its gradient open."""
    if isinstance(asked, Replicate):
        return isinstance(given, Replicate | Invariant)
    return asked == given


def _resolved_placement(asked: Placement | None, type_: TensorType, whole: Placement | None) -> Placement:
    if asked is None or isinstance(asked, Replicate):
        return whole or (I if type_.grad else R)
    return asked


def resolve_hints(
    hints: Mapping[str, Any] | None, graph: Graph, mesh: Mesh, *, known: bool = False
) -> dict[str, Constraint]:
    """Value name → constraint, of the last hint on it. Patterns match parameters and buffers, then
    inputs, then modules: there a style ("colwise", "rowwise", "replicate") is for parameters, a
    placement for the output. ``known``: checked with an earlier program; patterns may match
    nothing here. Raises :class:`HintError`."""
    constraints: dict[str, Constraint] = {}
    for pattern, given in without_micro_batch_axis(hints, mesh).items():
        hint = (
            {axis: from_torch_placement(p) for axis, p in given.items()}
            if isinstance(given, Mapping)
            else from_torch_placement(given)
        )
        _check_hint(pattern, hint, mesh)
        targets = _hint_targets(pattern, hint, graph)
        if targets is None:
            if known:
                continue
            raise HintError(_unmatched_hint_text(pattern, graph))
        for name, kind, asked in targets:
            value = module_output(graph, name) if kind == "module" else _input_named(graph, name)
            constraint = _constraint(pattern, name, asked, mesh)
            what = "the output of module" if kind == "module" else kind
            constraint.check(graph.types[value], what, name in graph.mutations and name not in graph.states)
            constraints[value] = constraint
    return constraints


def micro_batch_placements(
    hints: Mapping[str, Any] | None, graph: Graph, mesh: Mesh | None = None, *, known: bool = False
) -> dict[str, Placement]:
    """Input name → the dim that micro-batches divide, from hints on axis ``"micro_batch"``. Raises
    as :func:`resolve_hints`, for patterns that name no input, and if ``mesh`` has an axis of
    that name."""
    given = {pattern: hint for pattern, hint in (hints or {}).items() if isinstance(hint, Mapping)}
    given = {pattern: {MICRO_BATCH: hint[MICRO_BATCH]} for pattern, hint in given.items() if MICRO_BATCH in hint}
    if given and mesh is not None and MICRO_BATCH in mesh.axes:
        raise HintError(
            f"hint {next(iter(given))!r} names axis {MICRO_BATCH!r}, which means "
            "micro-batches but is also an axis of the mesh. Rename the mesh axis"
        )
    found = resolve_hints(given, graph, Mesh({MICRO_BATCH: 1}), known=known)
    kinds = {i.name: i.kind for i in graph.inputs}
    for name, constraint in found.items():
        if kinds.get(name) != "input":
            raise HintError(
                f"hint {constraint.pattern!r} names axis {MICRO_BATCH!r}, along which inputs are "
                f"divided into micro-batches, but {constraint.name!r} is not an input. Inputs: "
                f"{', '.join(i.fqn for i in graph.of_kind('input'))}"
            )
    return {name: dict(constraint.axes)[MICRO_BATCH] for name, constraint in found.items()}


def without_micro_batch_axis(hints: Mapping[str, Any] | None, mesh: Mesh) -> dict[str, Any]:
    """``hints`` without their entries for axis ``"micro_batch"``."""
    found = {}
    for pattern, hint in (hints or {}).items():
        if MICRO_BATCH in mesh.axes or not isinstance(hint, Mapping) or MICRO_BATCH not in hint:
            found[pattern] = hint
        elif rest := {axis: p for axis, p in hint.items() if axis != MICRO_BATCH}:
            found[pattern] = rest
    return found


def _constraint(pattern: str, name: str, asked: Any, mesh: Mesh) -> Constraint:
    if isinstance(asked, Mapping):
        return Constraint(pattern, name, axes=tuple(asked.items()))
    if mesh.ndim == 1:
        return Constraint(pattern, name, axes=((mesh.axes[0], asked),))
    return Constraint(pattern, name, anywhere=asked)


def _check_hint(pattern: str, hint: Any, mesh: Mesh) -> None:
    placement = Shard | Replicate | Invariant | Partial
    if not isinstance(pattern, str):
        raise HintError(f"hint {pattern!r} is not a pattern: name a parameter, buffer, input or module")
    if isinstance(hint, Mapping):
        for axis, p in hint.items():
            if axis not in mesh.axes:
                raise HintError(f"hint {pattern!r} names axis {axis!r}, but the mesh has {', '.join(mesh.axes)}")
            if not isinstance(p, placement):
                raise HintError(f"hint {pattern!r}: {p!r} on axis {axis!r} is not Shard(d), Replicate() or Partial()")
    elif not isinstance(hint, placement) and hint not in HINT_STYLES:
        raise HintError(
            f"hint {pattern!r}: {hint!r} is not a hint. Use Shard(d), Replicate(), {', '.join(map(repr, HINT_STYLES))}, "
            "or {axis: placement}."
        )


def _hint_targets(pattern: str, hint: Any, graph: Graph) -> list[tuple[str, str, Any]] | None:
    """(name, kind, placement or {axis: placement}) of matches; None if nothing matches."""
    found: list[tuple[str, str, Any]] = []
    for kinds in (("parameter", "buffer"), ("input",)):
        for value in graph.inputs:
            names = [n for n in (value.fqn, *value.aliases) if n == pattern or fnmatch.fnmatchcase(n, pattern)]
            if value.kind in kinds and names:
                found.append((value.fqn, value.kind, _style_placement(hint, value, graph, names[0].rpartition(".")[0])))
        if found:
            return found
    running = modules_of(graph)
    matched = [m for m in running if fnmatch.fnmatchcase(m, pattern)]
    matched = matched or [m for m in _parent_modules(graph) if fnmatch.fnmatchcase(m, pattern)]
    if not matched:
        return None
    for module in matched:
        if not isinstance(hint, str):
            if module not in running:
                raise HintError(
                    f"hint {pattern!r}: module {module!r} {_why_no_output(graph, module)}, so it "
                    f"has no output to lay out as {hint!r}. Hint its parameters, or modules in it"
                )
            found.append((module, "module", hint))
            continue
        parameters = list(graph.of_kind("parameter"))
        owned = [i for i in parameters if any(n.startswith(module + ".") for n in (i.fqn, *i.aliases))]
        direct = [i for i in owned if any(n.rpartition(".")[0] == module for n in (i.fqn, *i.aliases))]
        if not (owned if hint == "replicate" else direct):
            raise HintError(f"hint {pattern!r}: module {module!r} has no parameters of its own to lay out {hint!r}")
        found += [
            (i.fqn, i.kind, _style_placement(hint, i, graph, module))
            for i in (owned if hint == "replicate" else direct)
        ]
    return found


def _style_placement(hint: Any, value: Input, graph: Graph, module: str) -> Any:
    """A style as a placement of this parameter: column-parallel shards output features."""
    if not isinstance(hint, str):
        return hint
    ndim = len(graph.types[value.name].shape)
    if hint == "replicate" or ndim == 0 or (ndim == 1 and hint == "rowwise"):
        return R
    if ndim == 1:
        return Shard(0)
    return Shard(int((hint == "rowwise") != _is_lookup_table(value.name, graph, module)))


def _is_lookup_table(name: str, graph: Graph, module: str) -> bool:
    """Whether rows of it, or of a value of its shape made from it alone, are looked up; a tied
    table is what ``module`` reads it as."""
    made, shape = {name}, graph.types[name].shape
    if own := [node.op in LOOKUP_OPS and node.inputs[0] == name for node in graph.uses[name] if node.fqn == module]:
        return any(own)
    for node in graph.nodes:
        if node.op in LOOKUP_OPS and node.inputs[0] in made:
            return True
        if node.inputs and made.issuperset(node.inputs):
            made.update(o for o in node.outputs if graph.types[o].shape == shape)
    return False


def modules_of(graph: Graph) -> list[str]:
    return list(dict.fromkeys(path for n in graph.nodes for path, _ in n.module_types if path))


def _parent_modules(graph: Graph) -> list[str]:
    """Paths of modules with parameters, buffers or running modules, as of ``nn.ModuleList``."""
    held = (n for i in graph.of_kind("parameter", "buffer") for n in (i.fqn, *i.aliases))
    return enclosing_modules([*held, *modules_of(graph)])


def _why_no_output(graph: Graph, module: str) -> str:
    """Why a module has no operations: never called, or fused with others (experts)."""
    inside = f"{module}."
    own = {i.name for i in graph.inputs if any(n.startswith(inside) for n in (i.fqn, *i.aliases))}
    read = next((n for n in graph.nodes if own.intersection(n.inputs) and not n.fqn.startswith(inside)), None)
    if read is None:
        return "is never called"
    after = {read.name, *read.outputs}
    of = next((n for n in graph.nodes if after.intersection(n.inputs) and n.op._opname == "experts"), read)
    return f"became part of one operation ({of.op._opname} in {of.fqn or 'the model'} at {of.source})"


def _input_named(graph: Graph, fqn: str) -> str:
    return next(i.name for i in graph.inputs if i.fqn == fqn)


def module_output(graph: Graph, module: str) -> str:
    """The value a module returns: its last one read outside, else its last."""
    inside = [n for n in graph.nodes if n.fqn == module or n.fqn.startswith(module + ".")]
    names = {n.name for n in inside}
    returned = {o.name for o in graph.outputs if hasattr(o, "name")}
    for node in reversed(inside):
        for out in node.outputs:
            if out in returned or any(user.name not in names for user in graph.uses[out]):
                return out
    return inside[-1].outputs[-1]


def _unmatched_hint_text(pattern: str, graph: Graph) -> str:
    names = [n for i in graph.inputs if i.kind != "constant" for n in (i.fqn, *i.aliases)]
    names += dict.fromkeys((*modules_of(graph), *_parent_modules(graph)))
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
    return (
        f"hint {pattern!r} matches no parameter, buffer, input or module. Nearest: "
        f"{', '.join(near) if near else ', '.join(names[:3])}"
    )


def fixed_parameters(parameters: Mapping[str, Layout], graph: Graph) -> dict[str, Constraint]:
    """Constraints that keep parameters (by fqn) in an earlier compilation's layouts. Raises
    :class:`PlanError` if an owned or grouped one is read in a way that cannot use it."""
    found = {}
    for value in graph.inputs:
        if value.kind == "parameter" and value.fqn in parameters:
            type_, layout = graph.types[value.name], parameters[value.fqn]
            grad, unread = type_.grad, not graph.uses[value.name]
            if not unread and ((layout.owner and not type_.tables) or (layout.grouped and type_.parts is None)):
                how = "stored on one rank" if layout.owner else "sharded segment by segment"
                what = "one of several embedding tables or experts" if layout.owner else "a fused projection"
                alike = ', or {"experts.*": "replicate"} for all experts of a list' if layout.owner else ""
                raise PlanError(
                    f"parameter {value.fqn!r} is {how} ({layout.without_gradient()}), but this call does not read it as "
                    f"{what}. It may run another part of the model, or experts under autocast. Change its "
                    f'layout by hints={{{value.fqn!r}: "replicate"}}{alike} or by like=. Or compile in the '
                    "state of this call (mode, autocast, arguments), and its plan serves the other calls."
                )
            placements = (normalize_placement(p, grad) for p in layout.placements)  # I and R differ in the gradient
            axes = tuple(zip(layout.mesh.axes, placements, strict=True))
            found[value.name] = Constraint(value.fqn, value.fqn, axes)
    return found


def given_input_layouts(layouts: Sequence[Layout | None], graph: Graph) -> dict[str, Layout]:
    """Layouts of arriving inputs by name; dims of dynamic length are replicated. ``layouts``: per
    leaf of arguments; None: replicated."""
    given = {n: x for n, x in zip(graph.flat_inputs, layouts, strict=False) if n is not None and x is not None}
    read = {(s.value, axis) for s in graph.symbols.read if s.value in given for axis in given[s.value].axes_of(s.dim)}
    return {
        n: Layout(x.mesh, [R if (n, axis) in read else p for axis, p in zip(x.mesh.axes, x.placements, strict=True)])
        if any(n == value for value, _ in read)
        else x
        for n, x in given.items()
    }


def wanted_output_layouts(states: Mapping[str, Layout], graph: Graph) -> dict[str, Layout]:
    """Layouts wanted of outputs, by "out:i", from ``states`` by the next call's argument names.
    Outputs of pipeline stages are named "out:i" in ``states``, too."""
    if not states or graph.out_spec is None or graph.out_spec.num_leaves > len(graph.outputs):
        return {name: layout for name, layout in states.items() if name.startswith("out:")}
    blank = pytree.tree_unflatten(
        [torch.empty(0, device="meta") for _ in range(graph.out_spec.num_leaves)], graph.out_spec
    )
    paths = (path for path, _ in pytree.tree_flatten_with_path(blank)[0])
    names = ("".join([str(getattr(key, "key", "")) for key in path[:1]] + [*map(str, path[1:])]) for path in paths)
    return {f"out:{i}": states[name] for i, name in enumerate(names) if name in states}


def kept_buffer_layouts(tensors: Mapping[str, Layout] | None, graph: Graph) -> dict[str, Layout]:
    """Layouts of buffers kept since an earlier compilation, by name."""
    known = tensors or {}
    return {i.name: known[i.fqn] for i in graph.of_kind("buffer") if i.fqn in known}

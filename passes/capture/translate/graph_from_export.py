"""A functional ``torch.export`` program → :class:`~autoshard.passes.ir.graph.Graph`, rewritten."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    SymIntArgument,
    TensorArgument,
)

from autoshard.aten import aten
from autoshard.errors import CaptureError
from autoshard.passes.capture.exported.example_inputs import Example, argument_paths, export_order, model_tensor
from autoshard.passes.capture.exported.output_views import OUTPUT_VIEWS_KEY, with_lengths
from autoshard.passes.capture.exported.provenance import (
    module_path_of,
    module_stack_of,
    names_by_tensor,
    node_loc,
    rename_clashing_results,
    source_frames,
)
from autoshard.passes.capture.exported.symbolic_shapes import (
    DynamicInput,
    ExportedLengths,
    constant_number,
    fake_value_type,
    is_data_dependent_number,
    is_input_length,
    number_op,
)
from autoshard.passes.capture.polyfills.autograd_regions import checkpoint_of
from autoshard.passes.capture.polyfills.trailing_slices import as_trailing_slice
from autoshard.passes.capture.refusals.checks import (
    check_as_strided_operand,
    check_result,
    dense_constant,
    has_no_data,
    is_unread_sparse_buffer,
    unsupported_effect_message,
    unsupported_target_message,
)
from autoshard.passes.capture.refusals.errors import DATA_DEPENDENT_MESSAGE
from autoshard.passes.capture.translate.attention_masks import simplify_masks
from autoshard.passes.capture.translate.attention_patterns import fuse_attention, pad_head_dims
from autoshard.passes.capture.translate.canonicalize import (
    OVERWRITING_OPS,
    READS_MEMORY_LAYOUT,
    GradientFlow,
    canonical_op,
    cat_with_empty,
    live_nodes,
    nonzero_as_where,
    operand_order,
    remove_dead,
    unchanged_operand,
)
from autoshard.passes.capture.translate.decompose import decomposed_from
from autoshard.passes.capture.translate.fused_projections import mark_fused_projections, slices_as_split
from autoshard.passes.capture.translate.moe_routing import fuse_expert_routing
from autoshard.passes.capture.translate.unflatten import unflatten_linears, unflatten_rows, unmerge_views
from autoshard.passes.ir.graph import Graph, Input, Node, Ref, TensorType, map_refs, refs, walk
from autoshard.passes.ir.rewrite import run_on_meta
from autoshard.passes.ir.sizes import Size
from autoshard.passes.rules.facts import is_random
from autoshard.torch_private.ops import OpOverload


def apply_rewrites(graph: Graph) -> Graph:
    """``graph`` after all rewrites, in order; each expects the results of those before it."""
    graph = remove_dead(graph)
    for form in (
        unmerge_views,
        fuse_attention,
        simplify_masks,
        nonzero_as_where,
        unflatten_linears,
        fuse_expert_routing,
        unflatten_rows,
        slices_as_split,
        mark_fused_projections,
        pad_head_dims,
    ):
        if (made := form(graph)) is not graph:
            graph = remove_dead(made)
    return graph


_INPUT_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


def graph_of_export(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    example: Example,
    training: bool,
    inputs: Mapping[str, DynamicInput],
) -> Graph:
    """The graph of a functional ``program`` that was exported from ``model`` for ``example``.
    ``inputs``: path → dynamic lengths of a tensor argument. Raises :class:`CaptureError`."""
    return _GraphBuilder(program, model, example, training, inputs).graph()


class _GraphBuilder:
    def __init__(
        self, program: torch.export.ExportedProgram, model: nn.Module, example: Example, training: bool,
        inputs: Mapping[str, DynamicInput],
    ) -> None:  # fmt: skip
        self.program, self.model, self.example, self.training = program, model, example, training
        self.names = names_by_tensor(model)
        self.paths = [f"{p} (input)" if p in self.names else p for p in argument_paths(model, example)]
        rename_clashing_results(program, {*self.names, *self.paths})
        self.fx_nodes: dict[str, fx.Node] = {n.name: n for n in program.graph.nodes}
        self.types: dict[str, TensorType] = {}
        self.values: dict[str, Any] = {}
        """fx name → its Ref or constant"""
        self.fakes: dict[str, Any] = {}
        """value → its fake tensor or symbol in the trace"""
        self.nodes: list[Node] = []
        self.gradients = GradientFlow()
        self.detached: dict[str, Ref] = {}
        self.inputs: dict[str, Input] = {}
        self.constants: dict[str, Tensor] = {}
        self.lengths = ExportedLengths(self.opened(inputs))

    def opened(self, inputs: Mapping[str, DynamicInput]) -> dict[str, tuple[DynamicInput, Tensor]]:
        """Input name → (its dynamic lengths, its fake tensor)."""
        paths, order = argument_paths(self.model, self.example), iter(export_order(self.program, self.example))
        specs = [s for s in self.program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
        named = [(spec.arg.name, paths[next(order)]) for spec in specs]
        return {name: (inputs[path], self.fx_nodes[name].meta["val"]) for name, path in named if path in inputs}

    def graph(self) -> Graph:
        flat_inputs = self.read_inputs()
        for node in live_nodes(self.program.graph):
            if node.op == "call_function" and node.target is not operator.getitem:
                self.node(node)
        outputs, mutations = self.outputs()
        graph = Graph(
            inputs=tuple(self.inputs.values()),
            nodes=tuple(self.nodes),
            types=self.types,
            outputs=outputs,
            out_spec=self.program.call_spec.out_spec,
            in_spec=pytree.tree_structure(self.example),
            mutations=mutations,
            constants=self.constants,
            symbols=self.lengths.symbols(),
            flat_inputs=flat_inputs,
            training=self.training,
            views=tuple(with_lengths(self.program.graph_module.meta[OUTPUT_VIEWS_KEY], self.length)),
        )
        return apply_rewrites(graph)

    def read_inputs(self) -> tuple[str | None, ...]:
        leaves, order = pytree.tree_leaves(self.example), iter(export_order(self.program, self.example))
        flat: list[str | None] = [None] * len(leaves)
        live = {source.name for node in live_nodes(self.program.graph) for source in node.all_input_nodes}
        for spec in self.program.graph_signature.input_specs:
            kind, name = _INPUT_KINDS.get(spec.kind), spec.arg.name
            index = next(order) if kind == "input" else -1
            if kind is None or not isinstance(spec.arg, TensorArgument | ConstantArgument):
                raise CaptureError(
                    f"the forward uses {spec.target or name}, an object that is not a tensor "
                    f"({spec.kind.name.lower()}), such as a torch.Generator or a script object. "
                    "Use torch's default generator and plain tensors."
                )
            if not isinstance(spec.arg, TensorArgument):
                continue
            if kind == "buffer" and is_unread_sparse_buffer(str(spec.target), self.fx_nodes[name]):
                continue
            if kind == "input":
                flat[index] = name
                new, grad = Input(name, kind, self.paths[index]), leaves[index].requires_grad
            elif kind == "constant":
                held = self.program.constants[str(spec.target)]
                if name not in live and has_no_data(held):
                    continue
                self.constants[name] = dense_constant(str(spec.target), held)
                new, grad = Input(name, kind, str(spec.target)), False
            else:
                first, *aliases = self.names[str(spec.target)]
                tensor = model_tensor(self.model, spec)
                new, grad = Input(name, kind, first, tuple(aliases)), tensor is not None and tensor.requires_grad
                if twin := next((i.name for i in self.inputs.values() if i.fqn == first and i.kind == kind), None):
                    self.values[name] = Ref(twin)
                    continue
            self.inputs[name] = new
            self.define(name, self.fx_nodes[name].meta["val"], grad)
        return tuple(flat)

    def define(self, name: str, value: Any, grad: bool) -> None:
        self.types[name] = fake_value_type(value, grad and self.training, self.lengths.of)
        self.fakes[name] = value
        self.values[name] = Ref(name)

    def node(self, node: fx.Node) -> None:
        op, value = node.target, node.meta.get("val")
        if (fixed := self.known(value)) is not None:
            self.values[node.name] = fixed
            return
        for result in value if isinstance(value, tuple | list) else (value,):
            check_result(node, result)
        op = number_op(op, value) or op
        if node.target is torch.sym_ite and tuple(node.args[1:]) == (1, 0):  # int(bool)
            op, node.args = aten.Int.Scalar, node.args[:1]
        if not isinstance(op, OpOverload):
            raise CaptureError(f"{node_loc(node)}: {unsupported_target_message(node)}")
        args, kwargs = self.argument(node.args), self.argument(dict(node.kwargs))
        op, args = as_trailing_slice(op, args)
        if any(map(is_data_dependent_number, walk((args, kwargs)))):
            raise CaptureError(f"{node_loc(node)}: {DATA_DEPENDENT_MESSAGE.format(what=f'an argument of {op}')}")
        if op is aten._to_copy.default and not isinstance(args[0], Ref):  # vmap makes tensors of numbers
            op, args, kwargs = aten.full.default, ([], args[0]), {"dtype": node.meta["val"].dtype}
        if op in (aten.type_as.default, aten.to.other):  # the second operand gives only the dtype
            op, args, kwargs = aten._to_copy.default, args[:1], {"dtype": node.meta["val"].dtype}
        if op is aten.cat.default and (whole := cat_with_empty(args, self.types, value)):
            op, args, kwargs = aten.clone.default, (whole,), {"memory_format": torch.contiguous_format}
        if op is aten.linear.default and len(args) == 2 and len(self.types[args[1].name].shape) == 1:
            op = aten.matmul.default  # linear with a vector as its weight
        if op is aten.broadcast_tensors.default and not self.is_open(args):
            self.broadcast(node, args[0])
        elif op is aten.detach.default and args[0].name in self.detached:
            self.values[node.name] = self.detached[args[0].name]
        elif op is aten.as_strided_scatter.default:
            self.values[node.name] = self.scatter(node, *args, **kwargs)
        elif op is aten.copy.default:
            self.values[node.name] = self.cast(node, args[1], node.meta["val"], args[0])
        elif same := self.same(node, op, args):
            self.rename(node, same)
        else:
            if op is aten.clone.default:  # also of what lies contiguously
                kwargs = {**kwargs, "memory_format": torch.preserve_format} if _is_returned(node) else kwargs
            if op is aten.as_strided.default:
                args, kwargs = self.in_memory(node, *args, **kwargs)[0], {}
            if op in READS_MEMORY_LAYOUT:
                contiguous = {"memory_format": torch.contiguous_format}
                args = (self.emit(node, aten.clone.default, args[:1], contiguous), *args[1:])
            self.emit_all(node, op, args, kwargs)
            if op is aten.detach.default:
                self.detached[args[0].name] = Ref(node.name)

    def known(self, value: Any) -> int | float | None:
        """A constant number or a length; None for anything else, such as data-dependent numbers."""
        return self.lengths.of(value) if is_input_length(value) else constant_number(value)

    def length(self, n: Any) -> int:
        return self.lengths.of(n) if is_input_length(n) else n

    def shape(self, value: Tensor) -> list[int]:
        return [self.length(n) for n in value.shape]

    def same(self, node: fx.Node, op: Any, args: Any) -> Ref | None:
        if op is aten.clone.default and _is_returned(node):
            return None  # an output must not alias the operand
        if op is aten.clone.default and any(user.target is aten.as_strided.default for user in node.users):
            return None  # as_strided counts in the memory of the copy
        return unchanged_operand(op, args, self.types, node.meta.get("val"), self.shape)

    def rename(self, node: fx.Node, ref: Ref) -> None:
        self.values[node.name] = ref
        for get in node.users:
            if get.target is operator.getitem and get.args[1] == 0:
                self.values[get.name] = ref

    def broadcast(self, node: fx.Node, operands: Sequence[Ref]) -> None:
        for get in node.users:
            slot: Any = get.args[1]
            self.values[get.name] = self.cast(get, operands[slot], get.meta["val"])

    def is_open(self, tree: Any) -> bool:
        """Whether an operand in ``tree`` is a data-dependent number, or has such a length."""
        return any(self.types[ref.name].unknown or self.types[ref.name].number is not None for ref in refs(tree))

    def cast(self, node: fx.Node, ref: Ref, value: Tensor, like: Ref | None = None) -> Ref:
        """``ref``, expanded and cast to the shape and dtype of ``value``."""
        if [str(n) for n in self.fakes[ref.name].shape] != [str(n) for n in value.shape]:
            if like is not None and self.is_open((ref, like)):
                ref = self.emit(node, aten.expand_as.default, (ref, like), {})
            else:
                ref = self.emit(node, aten.expand.default, (ref, self.shape(value)), {}, (ref, list(value.shape)))
        if self.types[ref.name].dtype != value.dtype:
            ref = self.emit(node, aten._to_copy.default, (ref,), {"dtype": value.dtype})
        return ref

    def scatter(
        self, node: fx.Node, ref: Ref, src: Ref, size: list[int], stride: list[int], storage_offset: int | None = None
    ) -> Ref:
        """as_strided_scatter as index_put: its own backward is wrong in torch 2.13."""
        if self.is_open((ref, src)):
            raise CaptureError(f"{node_loc(node)}: {DATA_DEPENDENT_MESSAGE.format(what='a write through as_strided')}")
        (ref, _, _, storage_offset), order = self.in_memory(node, ref, size, stride, storage_offset)
        shape = self.types[ref.name].shape
        if any(isinstance(n, Size) for n in (*shape, *size, *stride, storage_offset)):
            raise CaptureError(f"{node_loc(node)}: a write through as_strided needs fixed lengths")
        name = f"{node.name}_index"
        positions = torch.arange(self.types[ref.name].numel).as_strided(size, stride, storage_offset or 0)
        self.constants[name] = positions.reshape(-1)
        self.inputs[name] = Input(name, "constant", name)
        self.define(name, self.constants[name], False)
        flat, values = (self.emit(node, aten.reshape.default, (x, [-1]), {}) for x in (ref, src))
        put = self.emit(node, aten.index_put.default, (flat, [Ref(name)], values), {})
        written = self.emit(node, aten.reshape.default, (put, list(shape)), {})
        back = sorted(range(len(order)), key=order.__getitem__)
        return self.emit(node, aten.permute.default, (written, back), {}) if order else written

    def in_memory(
        self, node: fx.Node, ref: Ref, size: list[int], stride: list[int], storage_offset: int | None = None
    ) -> tuple[tuple[Ref, list[int], list[int], int], tuple[int, ...]]:
        """(arguments of as_strided on an operand permuted to memory order, that order or ())."""
        value, order = self.fakes[ref.name], operand_order(node)
        offset = 0 if storage_offset is None else storage_offset - value.storage_offset()
        check_as_strided_operand(node, value, order, offset)
        if order:
            ref = self.emit(node, aten.permute.default, (ref, list(order)), {})
        return (ref, size, stride, offset), order

    def emit(self, node: fx.Node, op: Any, args: Any, kwargs: Any, export_args: Any = None) -> Ref:
        """Add an op with one result for ``node``. ``export_args``: ``args`` in export's symbols."""
        stem, number = f"{node.name}_{op._schema.name.rpartition(':')[2].strip('_')}", 1
        name = stem
        while name in self.types or name in self.fx_nodes:
            number += 1
            name = f"{stem}_{number}"
        if self.is_open(args) or any(isinstance(n, Size) for ref in refs(args) for n in self.types[ref.name].shape):
            given = map_refs(args if export_args is None else export_args, lambda ref: self.fakes[ref.name])
            value = op(*given, **kwargs)
        else:
            value = run_on_meta(op, args, kwargs, self.types)
        grads = self.gradients.flags(op, args, kwargs, self.types, [value])
        self.add(node, name, op, args, kwargs, [(name, 0, value)], grads)
        return Ref(name)

    def emit_all(self, node: fx.Node, op: Any, args: Any, kwargs: Any) -> None:
        value = node.meta.get("val")
        results = list(value) if isinstance(value, tuple | list) else [value]
        used = self.results(node, value)
        written = op in OVERWRITING_OPS and self.types[args[0].name].grad  # needed for a zero gradient
        op, args, kwargs = (op, args, kwargs) if written else canonical_op(op, args, kwargs, [s for _, s, _ in used])
        grads = self.gradients.flags(op, args, kwargs, self.types, results)
        self.add(node, node.name, op, args, kwargs, used, grads)

    def add(
        self, node: fx.Node, name: str, op: Any, args: Any, kwargs: Any, used: list[tuple[str, int, Any]],
        grads: list[bool],
    ) -> None:  # fmt: skip
        for output, slot, value in used:
            self.define(output, value, grads[slot])
        made = Node(
            name=name,
            op=op,
            args=args,
            kwargs=kwargs,
            outputs=tuple(output for output, _, _ in used),
            output_slots=tuple(slot for _, slot, _ in used),
            fqn=module_path_of(node),
            module_types=module_stack_of(node),
            frames=source_frames(node),
            origin=decomposed_from(node),
            checkpoint=checkpoint_of(node),
        )
        self.nodes.append(replace(made, order=operand_order(node)) if is_random(made) else made)

    def results(self, node: fx.Node, value: Any) -> list[tuple[str, int, Any]]:
        """(value name, slot of the op's result, fake value) of the used results."""
        if value is None:
            return []
        if not isinstance(value, tuple | list):
            return [(node.name, 0, value)]
        gets = [g for g in node.users if g.target is operator.getitem and g.users]
        slot_of: dict[fx.Node, Any] = {g: g.args[1] for g in gets}
        slots: list[int] = sorted(set(slot_of.values())) or [0]  # an unread draw has result 0
        names = {s: node.name if len(slots) == 1 else f"{node.name}_{s}" for s in slots}
        for get in gets:
            slot = slot_of[get]
            if len(slots) > 1 and names[slot] in self.fx_nodes:
                names[slot] = get.name
            self.values[get.name] = Ref(names[slot])
        return [(names[slot], slot, value[slot]) for slot in slots]

    def argument(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            # Values that no node computes stay; the caller refuses symbols.
            return self.values.get(arg.name, arg.meta.get("val"))
        if isinstance(arg, tuple | list):
            return (tuple if isinstance(arg, tuple) else list)(self.argument(a) for a in arg)
        return {k: self.argument(v) for k, v in arg.items()} if isinstance(arg, dict) else arg

    def outputs(self) -> tuple[tuple[Any, ...], dict[str, str]]:
        outputs: list[Any] = []
        mutations: dict[str, str] = {}
        for spec in self.program.graph_signature.output_specs:
            arg, target = spec.arg, str(spec.target)
            if spec.kind is OutputKind.BUFFER_MUTATION:
                mutations[self.names[target][0]] = self.values[arg.name].name
            elif spec.kind is OutputKind.USER_INPUT_MUTATION and not self.types[self.values[arg.name].name].grad:
                mutations[self.inputs[target].fqn] = self.values[arg.name].name
            elif spec.kind is not OutputKind.USER_OUTPUT:
                raise CaptureError(
                    unsupported_effect_message(spec.kind, self.inputs[target].fqn if target in self.inputs else target)
                )
            elif isinstance(arg, TensorArgument):
                outputs.append(self.values[arg.name])
            elif isinstance(arg, ConstantArgument):
                outputs.append(arg.value)
            elif isinstance(arg, SymIntArgument) and is_input_length(value := self.fx_nodes[arg.name].meta["val"]):
                outputs.append(self.lengths.of(value))
            else:
                made = f"{node_loc(node)}: " if (node := self.fx_nodes.get(arg.name)) is not None else ""
                raise CaptureError(
                    f"{made}the forward returns a number that it reads from a tensor (item(), float(), tolist()), "
                    "but a program returns tensors. Return the tensor, detach()ed, and read the number outside."
                )
        return tuple(outputs), mutations


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)

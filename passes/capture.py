"""capture: an ``nn.Module`` and example inputs → :class:`~autoshard.passes.ir.Graph`. Export and fx types stop here."""

from __future__ import annotations

import contextlib
import operator
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from autoshard.errors import CaptureError
from autoshard.passes.ir import Graph, Input, Node, Ref, TensorType

aten = torch.ops.aten

_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool | None = None,
) -> Graph:
    """The functional graph of one call ``model(*args, **kwargs)``, with static shapes.

    ``training``: whether gradients are wanted (default: ``model.training``); when it differs from the
    model's mode, the model is captured in the asked mode. Without gradients every type has ``grad=False``.
    The model is left as it was. Parameters on the meta device need no memory.
    Raises :class:`CaptureError` where the graph would not compute what the model computes.
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    training = model.training if training is None else training
    with _untouched(model, training), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fresh_args, fresh_kwargs = _fresh_examples(model, args, kwargs)
        program = torch.export.export(model, fresh_args, fresh_kwargs, strict=False)
        inline_no_grad(program.graph_module)
        program = program.run_decompositions({})
        return _Builder(program, model, (args, kwargs), training).graph()


@contextlib.contextmanager
def _untouched(model: nn.Module, training: bool) -> Iterator[None]:
    """Put every module's attributes and the RNG state back, whatever happens inside."""
    modules = list(model.modules())
    before = [(m, dict(m.__dict__), {k: dict(v) for k, v in m.__dict__.items() if type(v) is dict}) for m in modules]
    rng = torch.get_rng_state()
    try:
        if training != model.training:
            model.train(training)
        yield
    finally:
        torch.set_rng_state(rng)
        for module, attributes, dicts in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for key, content in dicts.items():
                module.__dict__[key].clear()
                module.__dict__[key].update(content)


def _fresh_examples(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Distinct example tensors on the model's device: export merges a tensor passed twice into one input."""
    device = next((t.device for t in (*model.parameters(), *model.buffers())), None)

    def fresh(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        target = device if device is not None and "meta" in (device.type, x.device.type) else x.device
        return torch.zeros_like(x, device=target).requires_grad_(x.requires_grad)

    fresh_args, fresh_kwargs = pytree.tree_map(fresh, (args, kwargs))
    return fresh_args, fresh_kwargs


def inline_no_grad(gm: fx.GraphModule) -> None:
    """Replace no_grad regions of ``gm`` (and of the regions in it) by their nodes and a detach on what leaves them."""
    for child in list(gm.children()):
        if isinstance(child, fx.GraphModule):
            inline_no_grad(child)
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            _inline(gm, node)
    gm.graph.lint()
    gm.recompile()


def _inline(gm: fx.GraphModule, region: fx.Node) -> None:
    enabled, body_attr, *operands = region.args
    assert isinstance(body_attr, fx.Node)
    body = getattr(gm, str(body_attr.target))
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    env = dict(zip(placeholders, operands, strict=True))
    with gm.graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            new = gm.graph.node_copy(node, lambda n: env[n])
            if node.op == "get_attr":
                new.target = f"{body_attr.target}_{node.target}"
                gm.add_submodule(new.target, getattr(body, node.target))
            env[node] = new
        (results,) = next(n for n in body.graph.nodes if n.op == "output").args
        for get in list(region.users):
            result = results[get.args[1]] if isinstance(results, tuple | list) else results
            value = env[result]
            if not enabled:
                value = gm.graph.call_function(aten.detach.default, (value,))
                value.meta = dict(env[result].meta)
            get.replace_all_uses_with(value)
            gm.graph.erase_node(get)
    gm.graph.erase_node(region)


class _Builder:
    """Translates an exported program, node by node."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        model: nn.Module,
        example: tuple[tuple[Any, ...], dict[str, Any]],
        training: bool,
    ) -> None:
        self.program, self.model, self.example, self.training = program, model, example, training
        self.types: dict[str, TensorType] = {}
        self.rename: dict[str, Any] = {}
        self.nodes: list[Node] = []
        self.fx_nodes: dict[str, fx.Node] = {n.name: n for n in program.graph.nodes}
        self.requires: dict[str, bool] = {}

    def graph(self) -> Graph:
        inputs, constants, flat_inputs, in_spec = self.inputs()
        for node in self.program.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                self.node(node)
            elif node.op == "get_attr":
                raise CaptureError(f"{where(node)}: unsupported constant {node.target}")
        outputs, mutations = self.outputs()
        out = Graph(
            inputs=inputs, nodes=tuple(self.nodes), types=self.types, outputs=outputs,
            out_spec=self.program.call_spec.out_spec, in_spec=in_spec, mutations=mutations,
            constants=constants, flat_inputs=flat_inputs, training=self.training,
        )  # fmt: skip
        return remove_dead(out)

    def inputs(self) -> tuple[tuple[Input, ...], dict[str, torch.Tensor], tuple[str | None, ...], Any]:
        names = _names_by_tensor(self.model)
        leaves, in_spec = pytree.tree_flatten_with_path(self.example)
        order = self._export_order()
        flat: list[str | None] = [None] * len(leaves)
        inputs: list[Input] = []
        constants: dict[str, torch.Tensor] = {}
        user = 0
        merged: set[str] = set()
        for spec in self.program.graph_signature.input_specs:
            kind, name = _KINDS.get(spec.kind), spec.arg.name
            if kind is None:
                raise CaptureError(f"input {name}: {spec.kind} is not supported")
            if kind == "input":
                index = order[user]
                user += 1
                if not isinstance(spec.arg, TensorArgument):
                    continue
                path, example = leaves[index]
                flat[index] = name
                inputs.append(Input(name, kind, _argument_path(path)))
                grad = example.requires_grad
            elif kind == "constant":
                constants[name] = tensor = self.program.constants[spec.target].detach()
                inputs.append(Input(name, kind, spec.target))
                grad = False
                del tensor
            else:
                first, *aliases = names[spec.target]
                tensor = _attribute(self.model, first)
                if first in merged:
                    self.rename[name] = next(i.name for i in inputs if i.fqn == first)
                    continue
                merged.add(first)
                inputs.append(Input(name, kind, first, tuple(aliases)))
                grad = tensor.requires_grad
            self.define(name, self.fx_nodes[name].meta["val"], grad)
        return tuple(inputs), constants, tuple(flat), in_spec

    def _export_order(self) -> list[int]:
        """Per user input of the program the index of its leaf in the example (export sorts kwargs by the signature)."""
        spec = self.program.call_spec.in_spec
        args, kwargs = pytree.tree_unflatten(range(spec.num_leaves), spec)
        positions = pytree.tree_leaves((args, {k: kwargs[k] for k in self.example[1]}))
        order = [0] * len(positions)
        for leaf, position in enumerate(positions):
            order[position] = leaf
        return order

    def define(self, name: str, value: Any, grad: bool) -> None:
        if not all(isinstance(n, int) for n in value.shape):
            raise CaptureError(
                f"{where(self.fx_nodes[name])}: the shape {list(value.shape)} of {name} depends on the data. "
                "Give it a fixed size (for example mask instead of indexing by a boolean tensor)."
            )
        self.types[name] = TensorType(tuple(value.shape), value.dtype, grad and self.training)

    def node(self, node: fx.Node) -> None:
        op = node.target
        if op in _DROPPED:
            return
        if not isinstance(op, torch._ops.OpOverload):
            raise CaptureError(f"{where(node)}: {op} is not supported")
        if op in _IDENTITY or op is aten.clone.default and not self.is_output(node):
            self.rename[node.name] = self.argument(node.args[0]).name
            return
        slots = self.slots(node)
        op, args, kwargs, slots = canonical(node, op, self.argument(node.args), self.argument(dict(node.kwargs)), slots)
        grads = self.gradients(node, op)
        for name, (slot, value) in slots.items():
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or not isinstance(value, torch.Tensor):
                raise CaptureError(
                    f"{where(node)}: {op} takes a number out of a tensor, so that the program depends on the data. "
                    "Keep it a tensor (no .item(), int(), or `if` on values)."
                )
            self.define(name, value, grads and value.dtype.is_floating_point)
            del slot
        self.nodes.append(
            Node(
                name=node.name, op=op, args=args, kwargs=kwargs, outputs=tuple(slots),
                output_slots=tuple(slot for slot, _ in slots.values()), fqn=fqn(node),
                module_types=module_types(node), source=source(node),
            )  # fmt: skip
        )

    def gradients(self, node: fx.Node, op: Any) -> bool:
        if op is aten.detach.default:
            return False
        return any(
            self.types[self.argument(n).name].grad for n in node.all_input_nodes if n.name in self.types
            or n.name in self.rename
        )

    def is_output(self, node: fx.Node) -> bool:
        return any(user.op == "output" for user in node.users)

    def slots(self, node: fx.Node) -> dict[str, tuple[int, Any]]:
        """Value name → (position in the op's result, fake value), for the results that are used."""
        value = node.meta.get("val")
        if not isinstance(value, tuple | list):
            return {node.name: (0, value)} if value is not None else {}
        slots: dict[int, str] = {}
        for get in node.users:
            assert get.target is operator.getitem
            if not get.users:
                continue
            self.rename[get.name] = slots.setdefault(get.args[1], get.name)
        return {name: (slot, value[slot]) for slot, name in sorted(slots.items())}

    def argument(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return Ref(self.rename.get(arg.name, arg.name))
        if isinstance(arg, tuple | list):
            return tuple(self.argument(a) for a in arg) if type(arg) is tuple else [self.argument(a) for a in arg]
        if isinstance(arg, dict):
            return {k: self.argument(v) for k, v in arg.items()}
        return arg

    def outputs(self) -> tuple[tuple[Any, ...], dict[str, str]]:
        outputs: list[Any] = []
        mutations: dict[str, str] = {}
        names = _names_by_tensor(self.model)
        for spec in self.program.graph_signature.output_specs:
            arg = spec.arg
            if spec.kind is OutputKind.BUFFER_MUTATION:
                mutations[names[spec.target][0]] = self.rename.get(arg.name, arg.name)
            elif spec.kind is not OutputKind.USER_OUTPUT:
                raise CaptureError(f"the forward writes to {spec.target} in place ({spec.kind.name.lower()})")
            elif isinstance(arg, TensorArgument):
                outputs.append(Ref(self.rename.get(arg.name, arg.name)))
            elif isinstance(arg, ConstantArgument):
                outputs.append(arg.value)
            else:
                raise CaptureError(f"output {arg} depends on the data")
        return tuple(outputs), mutations


_DROPPED = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.default,
    aten._assert_async.msg,
}
_IDENTITY = {aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}
_RESHAPES = {aten.view.default, aten._unsafe_view.default}


def canonical(node: fx.Node, op: Any, args: Any, kwargs: Any, slots: Any) -> tuple[Any, Any, Any, Any]:
    """One form for what export writes in several."""
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "layout")}
    if op in _RESHAPES:
        op = aten.reshape.default
    elif op is aten.native_dropout.default and [s for s, _ in slots.values()] == [0]:
        op = aten.dropout.default
        args = (*args[:2], True if args[2] is None else args[2])
    elif op is aten._to_copy.default:
        kwargs = {k: v for k, v in kwargs.items() if k == "dtype"}
    return op, args, kwargs, slots


def remove_dead(graph: Graph) -> Graph:
    """Without nodes that nothing needs. Random ops stay: each advances the generator."""
    needed = {o.name for o in graph.outputs if isinstance(o, Ref)} | set(graph.mutations.values())
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs) or torch.Tag.nondeterministic_seeded in node.op.tags:
            kept.append(node)
            needed.update(node.inputs)
    kept.reverse()
    defined = {i.name for i in graph.inputs} | {o for n in kept for o in n.outputs}
    types = {name: t for name, t in graph.types.items() if name in defined}
    from dataclasses import replace

    return replace(graph, nodes=tuple(kept), types=types)


def fqn(node: fx.Node) -> str:
    stack = module_types(node)
    return stack[-1][0] if stack else ""


def module_types(node: fx.Node) -> tuple[tuple[str, str], ...]:
    stack = node.meta.get("nn_module_stack") or {}
    return tuple((path, str(getattr(kind, "__name__", kind)).rpartition(".")[2]) for path, kind in stack.values())


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source(node: fx.Node) -> str:
    """The innermost ``file:line`` outside torch."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    user = [f for f in frames if f"{os.sep}torch{os.sep}" not in f[0] and not f[0].startswith("<")]
    if not user:
        return ""
    file, line = user[-1]
    return f"{os.path.basename(file)}:{line}"


def where(node: fx.Node) -> str:
    return " ".join(filter(None, (fqn(node) or "the model", f"({source(node)})" if source(node) else "")))


def _names_by_tensor(model: nn.Module) -> dict[str, list[str]]:
    """Every parameter or buffer name → all names of that tensor, the canonical one first."""
    by_id: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        by_id.setdefault(id(tensor), []).append(name)
    return {name: names for names in by_id.values() for name in names}


def _attribute(model: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    tensor = getattr(model.get_submodule(path), leaf)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _argument_path(path: Sequence[Any]) -> str:
    """``args[0]``, ``labels``, ``batch['x'][1]``."""
    root, first, *rest = path
    head = f"args{first}" if root.idx == 0 else str(first.key)
    return head + "".join(map(str, rest))

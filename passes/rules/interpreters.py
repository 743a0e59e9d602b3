"""Interpreters: :func:`interpret` runs a graph on full tensors and so defines its meaning;
:class:`AbstractRun` runs one statement, forward and backward, without data: autograd reports
what it saves, a dispatch mode sees temporary tensors, a recording communicator what ranks
send."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard import runtime
from autoshard.aten import aten, result_list
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph, Ref, map_refs, map_tree
from autoshard.passes.ir.program import InternalCollective, Local, LocalCall, Offset
from autoshard.passes.rules.facts import makes_tensor
from autoshard.runtime.transport.communicator import Communicator, bind
from autoshard.runtime.transport.move import LOCAL, Move
from autoshard.runtime.transport.rank_coroutines import Arrival, Collective, Hop, Sending
from autoshard.torch_private.dispatch import TorchDispatchMode, storage_id
from autoshard.torch_private.fake import suggest_memory_format


def interpret(graph: Graph, inputs: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Any]:
    """All values of ``graph`` by name, computed with the real ops and recorded by autograd.
    ``inputs``: one tensor per entry of ``graph.inputs`` but constants; set ``requires_grad``
    yourself. New values of buffers are in ``graph.mutations``. Raises KeyError for a missing
    input."""
    values: dict[str, Any] = dict(graph.constants)
    values.update({i.name: inputs[i.name] for i in graph.inputs if i.kind != "constant" or i.name in inputs})
    if device is None:
        device = next((values[i.name].device for i in graph.inputs if i.kind != "constant"), torch.device("cpu"))
    values.update({name: t.to(device) for name, t in graph.constants.items() if name not in inputs})
    for node in graph.nodes:
        args = map_refs(node.args, lambda ref: values[ref.name])
        kwargs = map_refs(dict(node.kwargs), lambda ref: values[ref.name])
        if makes_tensor(node):
            kwargs.setdefault("device", device)
        results = result_list(node.op(*args, **kwargs))
        values.update({name: results[slot] for name, slot in zip(node.outputs, node.output_slots, strict=True)})
    return values


def model_outputs(graph: Graph, values: Mapping[str, Any]) -> Any:
    """The model's output object, rebuilt from the values of :func:`interpret`."""
    flat = [map_refs(out, lambda ref: values[ref.name]) for out in graph.outputs]
    return pytree.tree_unflatten(flat[: graph.out_spec.num_leaves], graph.out_spec)


SCRATCH_KERNELS = frozenset({aten.native_batch_norm_backward.default})
"""ops whose CPU kernels allocate scratch as large as operand 0, unseen by dispatch modes"""


class TensorSpec(NamedTuple):
    """Shape, strides, dtype and requires_grad of a local tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    @classmethod
    def of(cls, x: Tensor) -> TensorSpec:
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.requires_grad)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta").requires_grad_(self.grad)


ResultCache = dict[Any, tuple[TensorSpec] | None]
"""(op, forms of its operands) → form of the result; None unless that is one new tensor"""


class ResultSpec(NamedTuple):
    """One result. ``storage``: index of the operand that shares its memory; ~n: new storage n."""

    form: TensorSpec
    storage: int


@dataclass(frozen=True)
class Outcome:
    """Memory of one statement, in bytes. Storages are numbered as in :class:`ResultSpec`."""

    made: tuple[ResultSpec | None, ...]
    new: tuple[int, ...]
    """bytes of each new storage that outlives the statement (results, saved tensors)"""
    kept: tuple[int, ...] = ()
    """storages that autograd saves"""
    forward_peak: int = 0
    """peak bytes of new tensors in the forward"""
    gradients: tuple[int | None, ...] = ()
    """per operand: bytes of its gradient; None: none; -1 - n: it is the gradient of result n"""
    backward_peak: int = 0
    """peak bytes of new tensors in the backward, less saved tensors that were freed by then"""


def abstract_run_on(mesh: Mesh) -> AbstractRun:
    """The shared :class:`AbstractRun` of ``mesh``: all programs use one cache."""
    return _cached_abstract_run(mesh.axes, mesh.shape, mesh.hardware.cpu)


@lru_cache(maxsize=8)
def _cached_abstract_run(axes: tuple[str, ...], shape: tuple[int, ...], cpu: bool) -> AbstractRun:
    return AbstractRun(dict(zip(axes, shape, strict=True)), cpu)


class AbstractRun:
    """Abstract runs of statements on rank 0 of a mesh, which holds the largest shards."""

    def __init__(self, axes: Mapping[str, int], cpu: bool = False) -> None:
        """``cpu``: whether the mesh is one of CPUs."""
        self.comm, self.cpu = _SoleRankCommunicator(dict(axes), 0), cpu
        self.axes = {repr(name): size for name, size in axes.items()}
        self.axis_pattern = re.compile("|".join(map(re.escape, self.axes)) or "(?!)")
        self.known: dict[Any, tuple[LocalCall, Outcome | None]] = {}
        """with the call: keys contain addresses of its functions, which must stay alive"""
        self.sent: dict[Any, tuple[LocalCall, tuple[InternalCollective, ...], tuple[str, ...]]] = {}
        """with the call and its axes: what ranks send"""
        self.results: ResultCache = {}

    def run(self, call: LocalCall, operands: Mapping[str, TensorSpec], training: bool) -> Outcome | None:
        """The memory of ``call``, whose :class:`Ref` name ``operands``; None if it needs data."""
        key, _ = self._key(call, operands, training)
        if key not in self.known:
            try:
                with bind(self.comm), torch.set_grad_enabled(training):
                    self.known[key] = call, self._run(call, operands)
            except Exception:
                self.known[key] = call, None
        return self.known[key][1]

    def messages(
        self, call: LocalCall, operands: Mapping[str, TensorSpec], training: bool, used: tuple[int, ...]
    ) -> tuple[InternalCollective, ...]:
        """What ranks send in ``call``, in order, if results in the slots ``used`` get gradients."""
        key, axes = self._key(call, operands, training)
        key = (*key, used)
        if key not in self.sent:
            with bind(self.comm), torch.set_grad_enabled(training):
                self.sent[key] = call, self._messages(call, operands, used), axes
        _, found, known = self.sent[key]
        names = dict(zip(known, axes, strict=True))
        return found if known == axes else tuple(replace(c, axes=tuple(names[a] for a in c.axes)) for c in found)

    def _messages(
        self, call: LocalCall, operands: Mapping[str, TensorSpec], used: tuple[int, ...]
    ) -> tuple[InternalCollective, ...]:
        given = {name: form.empty() for name, form in operands.items()}
        made = _result_tensors(self._value(map_tree(call, _with_dense_gradients), given))
        ends = [x for slot, x in enumerate(made) if slot in used and x is not None and x.requires_grad]
        wanting = [x for x in given.values() if x.requires_grad]
        if ends and wanting:
            with self.comm.in_backward():
                torch.autograd.grad(ends, wanting, [torch.empty_like(x) for x in ends], allow_unused=True)
        return tuple(self.comm.sent)

    def _key(self, call: LocalCall, operands: Mapping[str, TensorSpec], training: bool) -> tuple[Any, tuple[str, ...]]:
        """A key that is equal for runs with equal results; the axes in order of mention."""
        numbers = {name: i for i, name in enumerate(operands)}
        text, axes = self._canonical_axes(repr(map_tree(call, lambda x: numbers[x.name] if isinstance(x, Ref) else x)))
        return (text, *operands.values(), training, torch.get_default_dtype()), axes

    def _canonical_axes(self, text: str) -> tuple[str, tuple[str, ...]]:
        """``text`` with each axis as its size and order of mention (rank 0 sees no more of it), and
        the axes in this order."""
        names: dict[str, str] = {}
        canonical = self.axis_pattern.sub(lambda m: names.setdefault(m[0], f"{self.axes[m[0]]}.{len(names)}"), text)
        return canonical, tuple(name[1:-1] for name in names)

    def _run(self, call: LocalCall, operands: Mapping[str, TensorSpec]) -> Outcome:
        given = {name: form.empty() for name, form in operands.items()}
        scratch_ops = SCRATCH_KERNELS if self.cpu else frozenset()
        seen = _StorageCounter(self.results, given.values(), scratch_ops=scratch_ops)
        kept: list[Tensor] = []

        def pack(x: Tensor) -> Tensor:
            kept.append(x)
            return x

        with seen, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            made = _result_tensors(self._value(call, given))
        forward_peak = seen.peak
        numbers = {storage_id(x): i for i, x in enumerate(given.values())}
        new: list[int] = []

        def number(x: Tensor) -> int:
            if storage_id(x) not in numbers:
                numbers[storage_id(x)] = ~len(new)
                new.append(x.untyped_storage().nbytes())
            return numbers[storage_id(x)]

        results = tuple(None if x is None else ResultSpec(TensorSpec.of(x), number(x)) for x in made)
        keeps = tuple(dict.fromkeys(number(x) for x in kept))
        old = _StorageCounter(self.results, [*given.values(), *(x for x in made if x is not None)], kept, scratch_ops)
        del kept[:]
        gradients, backward_peak = _run_backward(made, list(given.values()), old)
        return Outcome(results, tuple(new), keeps, forward_peak, gradients, backward_peak)

    def _value(self, tree: Any, given: Mapping[str, Tensor]) -> Any:
        """``tree`` with tensors for references, numbers for local lengths, and its calls run."""

        def value(item: Any) -> Any:
            match item:
                case Ref():
                    return given[item.name]
                case Local():
                    return self.comm.chunk(int(item.size), self.comm.active(item.axes))[1]
                case Offset():
                    return 0
                case LocalCall():
                    return _run_call(item, self.cpu)
            return item

        self.comm.sent = []
        return map_tree(tree, value)


def _with_dense_gradients(item: Any) -> Any:
    """Meta tensors have no sparse gradients; ranks send the same with dense ones."""
    if isinstance(item, LocalCall) and item.kwargs.get("sparse"):
        return replace(item, kwargs={**item.kwargs, "sparse": False})
    return item


def _run_call(call: LocalCall, cpu: bool) -> Any:
    if call.fn in ("channels_last", "channels_first") and not cpu:
        return call.args[0]
    if call.fn is aten.group_norm.default and cpu:
        return _meta_group_norm(*call.args, **call.kwargs)
    if call.fn == "dropout_attention" and not cpu:  # a fused kernel, which CPUs lack
        query, key, value, *_ = call.args
        return _meta_attention(query, key, value, **call.kwargs)
    if isinstance(call.fn, str):
        return getattr(runtime, call.fn)(*call.args, **call.kwargs)
    if call.fn is aten.scaled_dot_product_attention.default:
        return _meta_attention(*call.args, **call.kwargs)
    kwargs = dict(call.kwargs)
    if any(a.name == "device" for a in call.fn._schema.arguments):
        kwargs["device"] = torch.device("meta")
    return call.fn(*call.args, **kwargs)


def _meta_group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Group norm as on CPUs: unlike the meta kernel they do not copy a channels-last operand."""
    n, c = x.shape[:2]
    x = x.contiguous(memory_format=suggest_memory_format(x))
    return aten.native_group_norm(x, weight, bias, n, c, x.shape[2:].numel(), num_groups, eps)[0]


def _meta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention by a fused kernel where one applies, as real devices choose."""
    one_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    plain = len(query.shape) == 4 and one_width and key.shape[-3] == value.shape[-3]
    if plain and not dropout_p and not (attn_mask is not None and attn_mask.requires_grad):
        mask = attn_mask.to(query.dtype) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _run_backward(
    made: Sequence[Tensor | None], operands: Sequence[Tensor], seen: _StorageCounter
) -> tuple[tuple[int | None, ...], int]:
    """Bytes of the gradients of ``operands``, and the peak of new bytes in ``seen``."""
    ends = [x for x in made if x is not None and x.requires_grad]
    wanting = [x for x in operands if x.requires_grad]
    if not ends or not wanting:
        return (None,) * len(operands), 0
    given = [torch.empty_like(x, requires_grad=False) for x in ends]
    places = iter([i for i, x in enumerate(made) if x is not None and x.requires_grad])
    sources = {storage_id(g): -1 - i for g, i in zip(given, places, strict=True)}
    seen.ignore(given)
    with seen:
        found = iter(torch.autograd.grad(ends, wanting, given, allow_unused=True))
    result: list[int | None] = []
    for x in operands:
        g = next(found) if x.requires_grad else None
        result.append(None if g is None else sources.get(storage_id(g), g.numel() * g.element_size()))
    return tuple(result), seen.peak


class _StorageCounter(TorchDispatchMode):
    """Dispatch mode that counts live bytes of new storages, except those of ``known``. Tensors in
    ``kept`` exist at the start; the peak is reduced when they are freed."""

    def __init__(
        self,
        results: ResultCache,
        known: Iterable[Tensor],
        kept: Iterable[Tensor] = (),
        scratch_ops: Set[Any] = frozenset(),
    ) -> None:
        """``results``: cache of ops, extended here. ``scratch_ops``: as :data:`SCRATCH_KERNELS`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.results, self.scratch_ops = results, scratch_ops
        self.ignored: dict[int, StorageWeakRef] = {}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.ignore(known)
        alone = {storage_id(x): x.untyped_storage() for x in kept if storage_id(x) not in self.ignored}
        self.kept = [(StorageWeakRef(storage), storage.nbytes()) for storage in alone.values()]
        self.ignored.update({key: ref for key, (ref, _) in zip(alone, self.kept, strict=True)})

    def ignore(self, known: Iterable[Tensor]) -> None:
        """Do not count these tensors. Weak references keep their addresses from being reused."""
        self.ignored.update({storage_id(x): StorageWeakRef(x.untyped_storage()) for x in known})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._result(func, args, kwargs or {})
        for key in [k for k, (ref, _) in self.alive.items() if ref.expired()]:
            del self.alive[key]
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and storage_id(x) not in self.ignored:
                storage = x.untyped_storage()
                self.alive[storage_id(x)] = (StorageWeakRef(storage), storage.nbytes())
        gone = sum(n for ref, n in self.kept if ref.expired())
        scratch = args[0].untyped_storage().nbytes() if func in self.scratch_ops else 0
        self.peak = max(self.peak, sum(n for _, n in self.alive.values()) - gone + scratch)
        return out

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``func``, from the cache if known: many meta kernels run in slow Python."""
        schema = func._schema
        if schema.is_mutable or any(r.alias_info is not None for r in schema.returns):
            return func(*args, **kwargs)
        try:
            key = func, torch.get_default_dtype(), _operand_key(args), _operand_key(kwargs)
            known = self.results.get(key, ())
        except TypeError:  # unhashable arguments
            return func(*args, **kwargs)
        if known:
            return known[0].empty()
        out = func(*args, **kwargs)
        if func is aten.convolution.default:  # real kernels keep the operand's memory format, the meta kernel does not
            out = out.contiguous(memory_format=suggest_memory_format(args[0]))
        if known == ():
            self.results[key] = (TensorSpec.of(out),) if _is_alone(out, (args, kwargs)) else None
        return out


def _operand_key(x: Any) -> Any:
    """Cache key: equal keys give results of equal form. Raises TypeError if there is none."""
    match x:
        case Tensor():
            # scalars, and complex tensors with lazy conjugation
            if not x.dim() or x.dtype.is_complex or x.device.type != "meta":
                raise TypeError
            return tuple(x.shape), x.stride(), x.dtype
        case tuple() | list():
            return type(x), *map(_operand_key, x)
        case dict():
            return tuple((name, _operand_key(value)) for name, value in x.items())
    hash(x)
    return type(x), x  # True == 1, but they are different arguments


def _is_alone(out: Any, operands: Any) -> bool:
    """Whether ``out`` is one tensor that fills its own storage."""
    if not isinstance(out, Tensor) or out.device.type != "meta" or out.dtype.is_complex:
        return False
    shared = any(isinstance(x, Tensor) and storage_id(x) == storage_id(out) for x in pytree.tree_leaves(operands))
    return not shared and out.untyped_storage().nbytes() == TensorSpec.of(out).empty().untyped_storage().nbytes()


def _result_tensors(made: Any) -> list[Tensor | None]:
    return [x if isinstance(x, Tensor) else None for x in result_list(made)]


_SENT_AS = {
    "all_reduce": "sums",
    "all_gather": "gathered values",
    "reduce_scatter": "gathered values",
    "permute": "messages",
    "all_to_all": "exchanged rows",
}
"""what a collective sends, in reports"""


class _SoleRankCommunicator(Communicator):
    """Communicator of a single rank, which records what ranks send: right shapes of results and
    gradients, no peers."""

    device = torch.device("meta")

    def __init__(self, axes: Mapping[str, int], rank: int) -> None:
        super().__init__(axes, rank)
        self.sent: list[InternalCollective] = []
        """what ranks send, in the current run"""

    def apply(self, move: Move, x: Tensor) -> Tensor:
        """See :meth:`Communicator.apply`."""
        if x.requires_grad and torch.is_grad_enabled():
            return _MetaMove.apply(self, move, x)  # type: ignore[no-untyped-call]
        return self.execute(move, x)

    def note(self, move: Move, size: float, dtype: torch.dtype) -> None:
        """Record a message of ``size`` bytes."""
        what = {"max": "maxima", "min": "minima"}.get(move.op, _SENT_AS[move.kind])
        if what == _SENT_AS["all_to_all"] and not dtype.is_floating_point:
            what = "numbers of rows"
        what += " (backward)" if self.phase == "backward" else ""
        self.sent.append(InternalCollective(move.kind, move.axes, float(size), self.phase, what))

    def execute(self, move: Move, x: Tensor) -> Tensor:
        """Run ``move`` without autograd."""
        if move.verb in LOCAL:
            return self.local(move, x)
        self.note(move, move.payload_bytes(x, self.size_of(move.axes), self.phase), x.dtype)
        if move.splits is not None:
            sent = move.splits.going(x)
            return move.splits.staying(sent.new_empty(sum(move.splits.received), *x.shape[1:]))
        shape = list(x.shape)
        if move.exchange is not None:
            shape[move.dim] = move.exchange.wanted[self.index(move.axes)][1]
        elif move.dim >= 0 and not move.order:
            gathers = move.source == "S"
            shape[move.dim] = move.size if gathers else self.chunk(move.size, move.axes)[1]
        if move.to_dim >= 0:
            shape[move.to_dim] = self.chunk(move.to_size, move.axes)[1]
        return x.new_empty(shape)

    def exchange(self, hops: Sequence[Sending], phase: str) -> Sequence[Arrival]:
        """See :meth:`Communicator.exchange`."""
        (hop,) = hops
        if isinstance(hop, Collective):
            return [partial(tuple, (self.execute(hop.move, hop.x),))]
        self.note(hop.move, hop.bytes, hop.tensors[0].dtype)
        return [partial(_empty_arrival, hop)]

    def shared(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :meth:`Communicator.shared`."""
        return fn(*args, **kwargs)


def _empty_arrival(hop: Hop) -> tuple[Tensor, ...]:
    if hop.into is not None:
        return (hop.into,)
    return tuple(hop.tensors[0].new_empty(shape) for shape in hop.shapes)


class _MetaMove(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: _SoleRankCommunicator, move: Move, x: Tensor) -> Tensor:
        ctx.comm, ctx.move = comm, move
        return comm.execute(move, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, ctx.comm.execute(ctx.move.backward(), gradient)

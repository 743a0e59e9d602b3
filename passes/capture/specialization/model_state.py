"""State that a forward leaves in attributes of the model: the second-call check, and warm-up calls.
After a forward that leaves state (a counter, a cache, a list), the model is traced again. If
both graphs are equal, no forward reads the state, except for a number that both calls change and
an ``if`` reads. State that grows in both calls is refused: code outside would find nothing
collected.
If the graphs differ because the first call fills a cache (position tables, grids), compiling makes
that call. Two checks: the cache depends on no input and no trained parameter, and both calls'
outputs are equal."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.errors import CaptureError
from autoshard.frames import is_users_file
from autoshard.passes.capture.exported.example_inputs import Example
from autoshard.passes.capture.exported.snapshots import (
    ITERATOR_MODULES,
    LEFT_BY_TRACE,
    SNAPSHOT_DEPTH,
    ContentsSnapshot,
    attribute_or_none,
    attributes_restored,
    container_length,
    items_or_attributes,
    iterator_state,
    restore_snapshot,
    take_snapshot,
    value_key,
)
from autoshard.passes.capture.refusals.untraceable_calls import recording_outside_reads
from autoshard.passes.ir.graph import Graph
from autoshard.torch_private.dispatch import TorchDispatchMode
from autoshard.torch_private.fake import FakeTensor

StateBeforeCall = list[tuple[str, Any, dict[str, Any], dict[str, Any]]]
"""(path, nn.Module, class or Python module, its attributes, their :func:`_comparable_contents`)"""

_left_state: ContextVar[dict[str, tuple[dict[str, Any], str, Any, ContentsSnapshot]]] = ContextVar("left")
"""last trace: dotted name → (attributes of the module, attribute name, new value, its contents)"""
_growing_state: ContextVar[list[str]] = ContextVar("grows")
"""last trace: dotted names of attributes that grew"""

_MAX_CONTAINER_ITEMS = 256
"""largest global container (items) that is compared, nested ones included"""
_MAX_SCANNED_ITEMS = _MAX_CONTAINER_ITEMS**2
"""most items compared per global: scripts keep data sets there, in lists of lists"""

_RNN_PARAMETER_LISTS = ("_flat_weights", "_flat_weight_refs")
"""parameter lists of recurrent layers, which torch rebuilds whenever a trace replaces one"""
_DECIDING = "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __bool__ __hash__ __int__ __float__".split()
"""methods by which a number decides what Python does"""
_STATE_REGISTRIES = {"parameter": "_parameters", "buffer": "_buffers", "module": "_modules"}


@contextlib.contextmanager
def recording_left_state(model: nn.Module) -> Iterator[None]:
    """Inside, traces record state (:func:`record_left_state`); clears globals' tensors."""
    token, grows = _left_state.set({}), _growing_state.set([])
    before = [
        (place, dict(vars(place)), [(x, items_or_attributes(x)) for x in _small_global_containers(place)])
        for place in _user_classes_and_modules(model)
    ]
    try:
        yield
    finally:
        _left_state.reset(token)
        _growing_state.reset(grows)
        for place, names, contents in before:
            restore_snapshot([(x, held) for x, held in contents if _holds_fake_tensor(x)])
            for name, x in dict(vars(place)).items():
                if isinstance(x, FakeTensor) and name in names:
                    setattr(place, name, names[name])
                elif isinstance(x, FakeTensor):
                    delattr(place, name)


def _small_global_containers(place: Any) -> Iterator[Any]:
    """Small containers among the attributes of a class or Python module."""
    return (
        x
        for x in vars(place).values()
        if isinstance(x, list | dict | set | deque) and container_length(x) <= _MAX_CONTAINER_ITEMS
    )


def _holds_fake_tensor(x: Any) -> bool:
    held = items_or_attributes(x) or ()
    return any(
        isinstance(y, FakeTensor) for y in pytree.tree_leaves([*(held.values() if isinstance(held, dict) else held)])
    )


def state_before_call(model: nn.Module) -> StateBeforeCall:
    """Snapshot of attributes before a call: modules, their classes and Python modules."""
    modules = [
        (p, m, dict(vars(m)), {k: _comparable_contents(v) for k, v in vars(m).items()})
        for p, m in model.named_modules()
    ]
    return modules + [
        (place.__name__, place, dict(vars(place)), _small_contents(vars(place)))
        for place in _user_classes_and_modules(model)
    ]


def _user_classes_and_modules(model: nn.Module) -> Iterator[Any]:
    """User classes of the model's modules, and the Python modules that define them."""
    own = dict.fromkeys(type(module) for module in model.modules())
    kinds = dict.fromkeys(kind for each in own for kind in each.__mro__)
    yield from (kind for kind in kinds if _is_user_class(kind))
    yield from dict.fromkeys(sys.modules[kind.__module__] for kind in own if _is_user_class(kind))


def _is_user_class(kind: type) -> bool:
    return is_users_file(str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"))


def _small_contents(names: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of globals or class attributes, without large containers and dunder names."""
    found = {}
    for name, x in names.items():
        is_container = isinstance(x, list | dict | set | deque)
        if (name.startswith("__") and name.endswith("__")) or (
            is_container and container_length(x) > _MAX_CONTAINER_ITEMS
        ):
            continue
        known = is_container or type(x).__module__ in ITERATOR_MODULES or _is_user_class(type(x))
        found[name] = _comparable_contents(
            x, SNAPSHOT_DEPTH - 1 if known else 0, _MAX_CONTAINER_ITEMS, _MAX_SCANNED_ITEMS
        )
    return found


def check_created_state(before: StateBeforeCall) -> None:
    """Refuse a forward that creates or replaces parameters, buffers or modules."""
    for path, module, _, contents in before:
        if not isinstance(module, nn.Module):
            continue
        for kind, holder in _STATE_REGISTRIES.items():
            had = dict(contents[holder])
            for leaf, x in vars(module)[holder].items():
                name, known = f"{path}.{leaf}" if path else leaf, had.get(leaf, _NONE)
                if x is not None and known == _NONE:
                    raise CaptureError(
                        f"the forward creates the {kind} {name!r} in its first call. Create it in "
                        "__init__, or call the model once before compiling it."
                    )
                if isinstance(x, nn.Parameter | nn.Module) and known != _ByIdentity(x):  # no tensor of a conversion
                    raise CaptureError(
                        f"the forward puts another {kind} in the place of {name!r}, which a program would lose. "
                        "Write to its tensors in place."
                    )


def record_left_state(before: StateBeforeCall) -> None:
    """Record attributes that differ from ``before`` the call that has ended."""
    found, grows = _left_state.get(), _growing_state.get()
    found.clear()
    grows.clear()
    for path, module, old, contents in before:
        own = isinstance(module, nn.Module)
        now: Any = vars(module)
        inside = {} if own else _small_contents(now)
        for name, value in now.items():
            if name in _STATE_REGISTRIES.values() if own else name not in inside:
                continue
            if isinstance(module, nn.RNNBase) and name in _RNN_PARAMETER_LISTS:
                continue
            is_now = _comparable_contents(value) if own else inside[name]
            if name in old and is_now == contents.get(name):
                continue
            dotted = f"{path}.{name}" if path else name
            # State outside the model stays as the call left it.
            found[dotted] = (now if own else {}, name, value, take_snapshot([value]) if own else [])
            if _has_grown(is_now, contents.get(name)):
                grows.append(dotted)


def check_left_losses(buffers: Iterable[tuple[nn.Module, Mapping[str, Any]]]) -> None:
    """Refuse a forward that leaves a number with a gradient in an attribute: a loss for the code outside. ``buffers``:
    per module those before the call. Called after :func:`record_left_state`."""
    lost = [name for name, (_, _, *left) in _own_left(_left_state.get()).items() if _holds_loss(*left)]
    lost += [n for module, old in buffers for n, x in module._buffers.items() if x is not old.get(n) and _is_loss(x)]
    if lost:
        raise CaptureError(
            f"the forward leaves a loss in {', '.join(map(repr, lost))} of the model, and its program would lose the "
            "gradient. Return it from the forward, or leave its detach() there."
        )


def _own_left(left: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``left`` that the model's modules hold, without weights that torch's own hooks compute in each call."""
    return {
        dotted: (attributes, name, *rest)
        for dotted, (attributes, name, *rest) in left.items()
        if attributes
        and not any(
            type(hook).__module__.startswith("torch.nn.utils.")
            and name in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None))
            for hook in attributes["_forward_pre_hooks"].values()
        )
    }


def _holds_loss(value: Any, contents: ContentsSnapshot) -> bool:
    return any(map(_is_loss, _values_and_contents([value], contents)))


def _is_loss(x: Any) -> bool:
    return isinstance(x, FakeTensor) and x.requires_grad and x.dim() == 0 and not x.is_leaf


def _has_grown(now: Any, before: Any) -> bool:
    """Whether :func:`_comparable_contents` has grown anywhere, or a full deque moved on."""
    if isinstance(now, frozenset) and isinstance(before, frozenset):
        return now > before
    if not (isinstance(now, tuple) and isinstance(before, tuple)) or len(now) < len(before):
        return False
    changed = [(x, y) for x, y in zip(now, before, strict=False) if x != y]
    is_moved = len(now) > 1 and bool(changed) and now[:-1] == before[1:]  # a deque that is full
    return len(now) > len(before) or is_moved or any(_has_grown(x, y) for x, y in changed)


def check_second_call(model: nn.Module, graph: Graph, retrace: Callable[[], Graph], is_part: bool) -> None:
    """Refuse a forward whose second call differs or whose state grows in both calls; of a part, one that leaves
    anything to the code around it. ``retrace`` traces the model as the first call, whose graph is ``graph``, left it."""
    left, grows = dict(_left_state.get()), list(_growing_state.get())
    if not left:
        return
    compared: set[str] = set()
    with attributes_restored(model), recording_outside_reads():
        stand_in = _DatalessCopies()
        for dotted, (attributes, name, value, contents) in left.items():
            attributes[name] = _counter(stand_in(value), partial(compared.add, dotted))
            restore_snapshot([(holder, stand_in.in_held(held)) for holder, held in contents])
        failed = None
        try:
            same = _graph_signature(retrace()) == _graph_signature(graph)
        except Exception as error:
            same, failed = False, error
        grows = [name for name in grows if name in _growing_state.get()]
        # Where a number that every call changes decides something, a later call may decide otherwise.
        same = same and not any(_left_state.get()[n][2] != left[n][2] for n in compared & _left_state.get().keys())
    if not same:
        raise SecondCallError(left, graph) from failed
    if grows:
        raise CaptureError(
            f"the forward adds to {', '.join(map(repr, grows))} in every call, and its program would lose "
            "those values. Return them from the forward, and collect them (or update the metric) outside."
        )
    if is_part and (own := _own_left(left)):
        raise CaptureError(
            f"the forward leaves {', '.join(map(repr, own))} behind in the model for the code around it, and a program "
            "would lose that. Return it from the forward to compile this module"
        )


def _counter(value: Any, compared: Callable[[], None]) -> Any:
    """``value``; of a number a twin that calls ``compared`` when it decides something."""
    if type(value) not in (int, float):
        return value
    kind: Any = type(value)

    def plain(x: Any) -> Any:
        return kind.__add__(x, 0)

    def asks(name: str) -> Any:
        def method(x: Any, *others: Any) -> Any:
            compared()
            return getattr(kind, name)(x, *others)

        return method

    def computes(name: str, is_right: bool) -> Any:
        def method(x: Any, y: Any) -> Any:
            return _counter(getattr(operator, name)(*((y, plain(x)) if is_right else (plain(x), y))), compared)

        return method

    methods = {name: asks(name) for name in _DECIDING}
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        methods |= {f"__{name}__": computes(name, False), f"__r{name}__": computes(name, True)}
    return type(kind.__name__, (kind,), methods)(value)


class SecondCallError(CaptureError):
    """The second call computes something else. ``left``: state after the first, by dotted name."""

    def __init__(self, left: Mapping[str, tuple[dict[str, Any], str, Any, ContentsSnapshot]], graph: Graph) -> None:
        self.left, self.written = tuple(left), tuple(graph.mutations)
        self.places = [(attributes, name) for attributes, name, *_ in left.values()]
        """(attributes of the module, {} for classes and globals; attribute name)"""
        super().__init__(
            f"the forward leaves {', '.join(map(repr, left))} behind in the model, which changes the result "
            "of its next call, but a program computes one call. Keep this state in a buffer that exists "
            "from the beginning. If only the first call fills it, call the model once before compiling."
        )


class _DatalessCopies:
    """Meta tensors in place of those left by a traced call, marked as no state of the model."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Any) -> Any:
        """``x``, with traced tensors replaced."""
        if isinstance(x, FakeTensor):
            left = torch.empty(tuple(map(int, x.shape)), dtype=x.dtype, device="meta")
            setattr(left, LEFT_BY_TRACE, True)
            return self.found.setdefault(id(x), (x, left))[1]
        if not isinstance(x, tuple) or pytree.tree_is_leaf(x):  # such as a user's tuple class
            return x
        return pytree.tree_map(self, x, is_leaf=lambda y: y is not x)

    def in_held(self, held: Any) -> Any:
        """Contents of a container or object, with traced tensors replaced."""
        return {k: self(v) for k, v in held.items()} if isinstance(held, dict) else type(held)(map(self, held))


def _graph_signature(graph: Graph) -> tuple[Any, ...]:
    """Comparison key of a graph's computation, with values numbered: dead code uses up names."""
    values = itertools.chain((i.name for i in graph.inputs), *(n.outputs for n in graph.nodes))
    names = {name: str(i) for i, name in enumerate(values)}
    as_numbered = graph.renamed(names)
    nodes = [(str(n.op), repr(n.args), repr(n.kwargs), len(n.outputs)) for n in as_numbered.nodes]
    inputs = [
        (i.kind, _constant_bytes(graph.constants[i.name]) if i.kind == "constant" else i.fqn) for i in graph.inputs
    ]
    return inputs, nodes, repr(as_numbered.outputs), dict(as_numbered.mutations)


def _constant_bytes(x: Tensor) -> Any:
    """Dtype, shape and bytes of a constant; the tensor itself if it has no data."""
    if x.is_meta or isinstance(x, FakeTensor):
        return x
    return x.dtype, x.shape, x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class _ByIdentity:
    """Comparison by identity. Keeps the object alive, so that no other reuses its id."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.x is self.x

    def __hash__(self) -> int:
        return id(self.x)


def _comparable_contents(
    x: Any, depth: int = SNAPSHOT_DEPTH, large: int = sys.maxsize, item_budget: int = sys.maxsize
) -> Any:
    """Comparison key of an attribute: values of numbers and strings, else identity and contents;
    identity alone above ``large`` items in a container, or ``item_budget`` in total."""
    if (known := value_key(x)) is not None:
        return known
    held = iterator_state(x) if depth > 1 else None
    is_place = held is not None
    if not is_place:
        held = items_or_attributes(x) if depth else None
    if held is None or len(held) > large or len(held) > item_budget:
        return _ByIdentity(x)
    inside = partial(_comparable_contents, depth=depth - 1, large=large, item_budget=item_budget // (len(held) or 1))
    if is_place:
        return _ByIdentity(x), tuple(map(inside, held))
    if isinstance(held, set):
        return frozenset(map(_ByIdentity, held))
    if isinstance(held, list):
        return tuple(map(inside, held))
    items = tuple((k if isinstance(k, str) else _ByIdentity(k), inside(v)) for k, v in held.items())
    return items if isinstance(x, dict) else (_ByIdentity(x), items)


_NONE = _comparable_contents(None)

log = logging.getLogger("autoshard")


def graph_after_warm_up(
    model: nn.Module, example: Example, retrace: Callable[[], Graph], error: SecondCallError
) -> Graph:
    """The graph of ``model`` after a warm-up call with ``example``, of which only filled caches
    remain. Raises ``error`` and restores the model if caches are not why. ``retrace`` traces the
    model."""
    tensors = [*model.parameters(), *model.buffers(), *filter(torch.is_tensor, pytree.tree_leaves(example))]
    buffers = {name: attribute_or_none(model, name) for name in error.written}
    own = {id(vars(module)) for module in model.modules()}
    if any(id(attributes) not in own for attributes, _ in error.places) or any(t.is_meta for t in tensors):
        raise error  # state in a class or global, or no data to compute it
    if any(isinstance(x, nn.Parameter) for x in buffers.values()):
        raise error
    before = _copied_values(buffers)
    try:
        with attributes_restored(model):
            data = _DependencyMode(p for p in model.parameters() if p.requires_grad)
            state = _DependencyMode(x for x in _frozen_state(model) if all(x is not b for b in buffers.values()))
            first = _warm_up_output(model, example, data, state)
            left = [attributes[name] for attributes, name in error.places]
            contents, after = take_snapshot(left), _copied_values(buffers)
            graph = retrace()
            caches = buffers.keys() - graph.mutations.keys()
            kept = before | {name: after[name] for name in caches}
            filled = [buffers[name] for name in caches] + [
                x for x in _values_and_contents(left, contents) if torch.is_tensor(x)
            ]
            _write_values(buffers, kept)
            restore_snapshot(contents)
            if (
                data.asked
                or any(x in data for x in filled)
                or not _have_equal_tensors(first, _warm_up_output(model, example))
            ):
                raise error
    except Exception:
        _write_values(buffers, before)
        raise error from error.__cause__
    _write_values(buffers, kept)
    for (attributes, name), value in zip(error.places, left, strict=True):
        attributes[name] = value
    restore_snapshot(contents)
    known = any(x in state for x in filled)
    log.log(
        logging.WARNING if known else logging.INFO,
        "%s: its first call fills %s, so compilation ran that call%s",
        type(model).__name__,
        ", ".join(map(repr, [*error.left, *sorted(caches)])),
        ". It reads buffers or frozen parameters: load a checkpoint before compiling." if known else "",
    )
    return graph


class _DependencyMode(TorchDispatchMode):
    """Tracks tensors computed from values of ``sources``, or drawn at random."""

    def __init__(self, sources: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = {StorageWeakRef(x.untyped_storage()) for x in sources}
        self.asked = False
        """whether Python read a tracked value"""

    def __contains__(self, x: Tensor) -> bool:
        return StorageWeakRef(x.untyped_storage()) in self.found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        given = [] if name.startswith("new_") or name.endswith("_like") else _tensor_leaves((args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags or any(x in self for x in given):
            writes = [
                x for x, s in zip(args, func._schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write
            ]
            made = _tensor_leaves((out, writes))
            self.asked |= not made
            self.found |= {StorageWeakRef(x.untyped_storage()) for x in made}
        return out


def _tensor_leaves(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _frozen_state(model: nn.Module) -> Iterator[Tensor]:
    yield from (p for p in model.parameters() if not p.requires_grad)
    yield from model.buffers()


def _warm_up_output(model: nn.Module, example: Example, *modes: _DependencyMode) -> Any:
    """Output of ``model`` for a copy of ``example``, a source of ``modes[0]``. Forks the RNG."""
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), example)
    with torch.random.fork_rng(), contextlib.ExitStack() as stack:
        for mode in modes[:1]:
            mode.found |= {StorageWeakRef(x.untyped_storage()) for x in _tensor_leaves((args, kwargs))}
        for mode in modes:
            stack.enter_context(mode)
        return model(*args, **kwargs)


def _have_equal_tensors(one: Any, other: Any) -> bool:
    """Whether two outputs have equal tensors."""
    try:
        torch.testing.assert_close(_tensor_leaves(other), _tensor_leaves(one), equal_nan=True)
    except AssertionError:
        return False
    return True


def _copied_values(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in buffers.items()}


def _write_values(buffers: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, x in buffers.items():
            x.detach().copy_(values[name])


def _values_and_contents(values: list[Any], contents: ContentsSnapshot) -> Iterator[Any]:
    """Attribute values, and the contents of their containers."""
    yield from values
    for _, held in contents:
        yield from held.values() if isinstance(held, dict) else held

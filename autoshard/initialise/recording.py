"""Recording of a constructor's tensor operations on fake tensors, and replay per parameter. A
tensor is an area of a storage, which operations read, write or make: views, ``.data`` and ties
are no special case."""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoshard.aten import aten
from autoshard.errors import InitialiseError
from autoshard.frames import frames_outwards, users_frame
from autoshard.torch_private.dispatch import TorchDispatchMode, storage_id, without_dispatch_modes
from autoshard.torch_private.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

Storages = dict[int, torch.UntypedStorage]


@dataclass(frozen=True, slots=True)
class Area:
    """A tensor as an area of storage number ``storage``; strides and offset in elements."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def fills(self, nbytes: int) -> bool:
        """Whether the area covers a storage of ``nbytes`` bytes, each element once."""
        dense = 1
        for stride, size in sorted((s, n) for s, n in zip(self.stride, self.size, strict=True) if n != 1):
            if stride != dense:
                return False
            dense *= size
        return math.prod(self.size) * self.dtype.itemsize == nbytes and self.offset == 0

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, on a real or meta storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


def area_of(tensor: Tensor, storage: int) -> Area:
    """The area of ``tensor`` in its storage, which has the number ``storage``."""
    return Area(storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True, slots=True)
class Op:
    """One recorded call; an :class:`Area` in its arguments stands for a recorded tensor."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Area | None, ...]
    """per returned tensor its area, if in a storage that this call made"""
    reads: frozenset[int]
    writes: frozenset[int]
    covers: frozenset[int]
    """storages that this call overwrites entirely"""
    random: bool
    where: str
    """file:line of the user's code"""

    def __str__(self) -> str:
        return f"{getattr(self.call, '__name__', self.call)} ({self.where})"


@dataclass
class Recording:
    """All recorded operations. ``tensors``: name → (meta tensor in the model, its area)."""

    ops: list[Op] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    """bytes of every storage"""
    writers: list[list[int]] = field(default_factory=list)
    """per storage the indices of ops that write it, ascending"""
    tensors: dict[str, tuple[Tensor, Area]] = field(default_factory=dict)

    def add_storage(self, nbytes: int) -> int:
        self.nbytes.append(nbytes)
        self.writers.append([])
        return len(self.nbytes) - 1

    def add_op(self, op: Op) -> None:
        for storage in op.writes:
            self.writers[storage].append(len(self.ops))
        self.ops.append(op)

    def needed(self, storages: Iterable[int], before: int | None = None) -> list[int]:
        """Backward slice: indices of ops that determine ``storages`` before op ``before``."""
        end = len(self.ops) if before is None else before
        todo = [(storage, end) for storage in storages]
        seen: set[tuple[int, int]] = set()
        while todo:
            storage, limit = todo.pop()
            for i in reversed(self.writers[storage]):
                if i >= limit:
                    continue
                if (i, storage) in seen:
                    break
                seen.add((i, storage))
                todo += [(read, i) for read in self.ops[i].reads]
                if storage in self.ops[i].covers:
                    break
        return sorted({i for i, _ in seen})

    def run(self, indices: Iterable[int], states: Mapping[int, Tensor]) -> Storages:
        """Run ops on new storages; a random op i draws from the generator state ``states[i]``."""
        storages: Storages = {}
        with torch.no_grad():
            for i in indices:
                op = self.ops[i]
                if op.random:
                    torch.set_rng_state(states[i])
                try:
                    self._run_op(op, storages)
                except InitialiseError:
                    raise
                except Exception as error:
                    raise InitialiseError(f"cannot replay {op}: {error}") from error
        return storages

    def _run_op(self, op: Op, storages: Storages) -> None:
        args, kwargs = pytree.tree_map_only(Area, lambda area: self.tensor(area, storages), (op.args, op.kwargs))
        outputs = [x for x in pytree.tree_leaves(op.call(*args, **kwargs)) if isinstance(x, Tensor)]
        constants = {storage_id(x) for x in pytree.tree_leaves((op.args, op.kwargs)) if isinstance(x, Tensor)}
        adopted: set[int] = set()
        for area, output in zip(op.results, outputs, strict=True):
            if area is None or area.storage in adopted:
                continue
            made = output.untyped_storage()
            fits = area == area_of(output, area.storage) and made.nbytes() == self.nbytes[area.storage]
            if fits and made._cdata not in constants:
                storages[area.storage] = made
                adopted.add(area.storage)
            else:
                # A constant must not be written to, and later areas refer to the recorded strides.
                self.tensor(area, storages).copy_(output)

    def tensor(self, area: Area, storages: Storages) -> Tensor:
        """``area`` on real storages; a missing storage is allocated."""
        if area.storage not in storages:
            storages[area.storage] = _allocate(self.nbytes[area.storage])
        return area.on(storages[area.storage])

    def replay(self, storages: Iterable[int]) -> Iterator[tuple[int, Storages]]:
        """Yield (number, real storages) for each of ``storages``, one at a time. Random ops draw in
        program order from the default generator, which ends as ``fn`` would leave it. A storage
        is computed at the last random op it depends on, so usually each op runs once."""
        slices = {storage: self.needed([storage]) for storage in storages}
        due: dict[int, list[int]] = {}
        for storage, ops in slices.items():
            due.setdefault(max((i for i in ops if self.ops[i].random), default=-1), []).append(storage)
        states: dict[int, Tensor] = {}
        for storage in due.get(-1, ()):
            yield storage, self.run(slices[storage], states)
        for i, op in enumerate(self.ops):
            if not op.random:
                continue
            states[i] = torch.get_rng_state()
            if i not in due:
                self.run([*self.needed(self.ops[i].reads, before=i), i], states)
            for storage in due.get(i, ()):
                real = self.run(slices[storage], states)
                after = torch.get_rng_state()
                yield storage, real
                del real
                # The caller may have drawn random numbers itself.
                torch.set_rng_state(after)


def _allocate(nbytes: int) -> torch.UntypedStorage:
    """Memory that returns to the system when freed (mmap for 1 MiB and more): with malloc small
    tensors fragment the holes of large ones, up to the unsharded model's size."""
    if nbytes < 1 << 20:
        return torch.UntypedStorage(nbytes, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).untyped_storage()


RecordedModule = TypeVar("RecordedModule", bound=nn.Module)

# In-place ops that do not read what they overwrite.
_RECORDED_OVERWRITES = set(
    "normal_ uniform_ zero_ fill_ copy_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_".split()
)
_UNINITIALISED_OPS = set("empty empty_like empty_strided new_empty new_empty_strided empty_permuted".split())


def record_module(fn: Callable[..., RecordedModule], *args: Any, **kwargs: Any) -> tuple[RecordedModule, Recording]:
    """Call ``fn`` on fake CPU tensors: (its module on the meta device, recording)."""
    # Not on meta tensors: libraries skip their initialisation when they see those.
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder, recorder.patches():
        model = _built_module(fn, args, kwargs)
    _ToMeta(recorder).modules(model)
    return model, recorder.recording


def _built_module(fn: Callable[..., RecordedModule], args: Any, kwargs: Any) -> RecordedModule:
    try:
        model = fn(*args, **kwargs)
    except RuntimeError as error:
        if "UninitializedParameter" in str(error) or "UninitializedBuffer" in str(error):
            problem = "has a lazy module, whose shapes are unknown before its first call. Give its input size"
            raise InitialiseError(f"{_callable_name(fn)} {problem}") from error
        raise
    if not isinstance(model, nn.Module):
        raise InitialiseError(f"{_callable_name(fn)} returned {type(model).__name__}, not an nn.Module")
    return model


class Recorder(TorchDispatchMode):
    """Dispatch mode on top of :class:`FakeTensorMode` that fills ``recording``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        # Keeps the storages alive, so that no address is reused while recording.
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        written = _written_tensors(func, args, kwargs)
        _refuse_unrecordable(func, written, kwargs)
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._known_value(func, args, kwargs)
        except Exception as error:
            raise InitialiseError(f"cannot record {func} at {users_file_line()}{self._owner(args)}: {error}") from error
        name = func.overloadpacket.__name__
        call = _with_zeroed_result(func) if name in _UNINITIALISED_OPS else func
        self.add(
            call, args, kwargs, out, written, fills=name in _RECORDED_OVERWRITES, random=_draws_random_numbers(func)
        )
        return out

    def add(
        self, call: Any, args: Any, kwargs: Any, out: Any, written: list[Tensor], *, fills: bool, random: bool
    ) -> None:
        """Record a call that writes or makes a storage; views and queries are not recorded."""
        inputs = _fake_tensors((args, kwargs))
        reads = {self.area(t).storage for t in inputs if not (fills and any(t is w for w in written))}
        targets = [self.area(t) for t in written]
        args, kwargs = self._areas((args, kwargs))
        known = len(self._storages)
        outputs = [self.area(t) for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        made = {area.storage for area in outputs if area.storage >= known}
        if not made and not targets:
            return
        covers = {a.storage for a in targets if fills and a.fills(self.recording.nbytes[a.storage])}
        op = Op(
            call,
            args,
            kwargs,
            results=tuple(area if area.storage in made else None for area in outputs),
            reads=frozenset(reads),
            writes=frozenset({a.storage for a in targets} | made),
            covers=frozenset(covers | made),
            random=random,
            where=users_file_line(),
        )
        self.recording.add_op(op)

    def area(self, tensor: Tensor) -> Area:
        """The area of ``tensor``; a new storage gets the next number."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = self.recording.add_storage(storage.nbytes()), storage
        return area_of(tensor, self._storages[storage._cdata][0])

    def constant(self, real: Tensor) -> Area:
        """The area of a new storage filled with ``real``, a tensor from outside the recording."""
        with FakeTensorMode():
            return self.area(self._fake_constant(real))

    @contextmanager
    def patches(self) -> Iterator[None]:
        """Patch three functions of torch while recording: ``trunc_normal_`` becomes one call, as
        its number of draws varies; conversions such as ``model.half()`` set ``.data``, as
        torch's swap fails for fake tensors; parameters of a user's class are refused, as torch
        would make plain ones."""
        original, parameter = nn.init._no_grad_trunc_normal_, nn.Parameter.__new__

        def made(kind: Any, data: Any = None, requires_grad: bool = True) -> Any:
            if isinstance(data, FakeTensor) and kind.__module__.partition(".")[0] != "torch":
                raise InitialiseError(
                    f"a parameter of class {kind.__name__} is made at {users_file_line()}, but deferred_init "
                    "does not keep the class. Make the model without it, or convert the parameters afterwards."
                )
            return parameter(kind, data, requires_grad)

        def trunc_normal(
            tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
        ) -> Tensor:
            if not isinstance(tensor, FakeTensor):
                return original(tensor, mean, std, a, b, generator)
            _refuse_unrecordable("trunc_normal_", [], {"generator": generator})
            self.add(original, (tensor, mean, std, a, b), {}, tensor, [tensor], fills=True, random=True)
            return tensor

        with (
            mock.patch.object(nn.init, "_no_grad_trunc_normal_", trunc_normal),
            mock.patch.object(nn.Parameter, "__new__", made),
            mock.patch.object(nn.Module, "_apply", _apply_like_plain),
            warnings.catch_warnings(),
        ):
            # copy.deepcopy of a parameter reads its address.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield

    def _areas(self, tree: Any) -> Any:
        return pytree.tree_map_only(FakeTensor, self.area, tree)

    def _known_value(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The real result of an op that Python or a shape depends on; an error if it is random."""
        needed = self.recording.needed({self.area(t).storage for t in _fake_tensors((args, kwargs))})
        if any(self.recording.ops[i].random for i in needed):
            raise InitialiseError(
                f"{func} at {users_file_line()}{self._owner(args)} reads values that depend on "
                "random numbers, which are not drawn yet. The function must not depend on them"
            )
        areas = self._areas((args, kwargs))
        with without_dispatch_modes(), torch.no_grad():
            storages = self.recording.run(needed, {})
            args, kwargs = pytree.tree_map_only(Area, lambda area: self.recording.tensor(area, storages), areas)
            real = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, self._fake_constant, real)

    def _fake_constant(self, real: Tensor) -> Tensor:
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cpu")
        self.add(aten.clone.default, (real,), {}, fake, [], fills=False, random=False)
        return fake

    def _owner(self, args: Any) -> str:
        """The parameter in ``args`` and its module as text, found by the callers' ``self``."""
        storages = {storage_id(t) for t in _fake_tensors(args)}
        for frame in frames_outwards():
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and "_parameters" in module.__dict__:
                for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                    if storage_id(tensor) in storages:
                        return f", on {name!r} of {type(module).__name__},"
        return ""


class _ToMeta:
    """Replaces fake tensors in a module by named meta tensors; ties and views are preserved."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.memo: dict[int, tuple[Tensor, Tensor, Area]] = {}
        """id of a fake tensor or of its meta tensor → (fake, meta, area)"""
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.attached: list[tuple[str, Tensor, str, Any]] = []
        """(name of a tensor, its meta tensor, name and value of an attribute that the user set)"""
        with FakeTensorMode():
            self.own_attributes = {*vars(torch.empty(0)), "_is_param"}

    def modules(self, model: nn.Module) -> None:
        for path, module in model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            attributes = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
            for key, value in {**module._parameters, **module._buffers, **attributes}.items():
                new = self.convert(f"{prefix}{key}", value)
                if new is not value:
                    owner = next((g for g in (module._parameters, module._buffers) if key in g), vars(module))
                    owner[key] = new
        for name, meta, key, attribute in self.attached:
            setattr(meta, key, pytree.tree_map_only(FakeTensor, partial(self._attached, name, key), attribute))

    def _attached(self, name: str, key: str, value: FakeTensor) -> Tensor:
        if id(value) not in self.memo:
            raise InitialiseError(
                f"attribute {key!r} of {name!r} is a tensor that deferred_init would not restore. "
                "Set it on the parameter after the module is compiled, or make it a buffer."
            )
        return self.memo[id(value)][1]

    def convert(self, name: str, value: Any) -> Any:
        """``value`` with its tensors replaced; lists and dicts in place, as they may be shared."""
        if isinstance(value, Tensor):
            return self.tensor(name, value)
        if type(value) is tuple:
            items = tuple(self.convert(f"{name}.{i}", item) for i, item in enumerate(value))
            return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
        if type(value) in (list, dict):
            for key, item in list(value.items() if type(value) is dict else enumerate(value)):
                new = self.convert(f"{name}.{key}", item)
                if new is not item:
                    value[key] = new
        return value

    def tensor(self, name: str, value: Tensor) -> Tensor:
        if id(value) not in self.memo:
            area = self.recorder.area(value) if isinstance(value, FakeTensor) else self.recorder.constant(value)
            meta = self.meta(name, value, area)
            self.memo[id(value)] = self.memo[id(meta)] = value, meta, area
        _, meta, area = self.memo[id(value)]
        self.recorder.recording.tensors[name] = meta, area
        return meta

    def meta(self, name: str, value: Tensor, area: Area) -> Tensor:
        if area.storage not in self.storages:
            nbytes = self.recorder.recording.nbytes[area.storage]
            self.storages[area.storage] = torch.UntypedStorage(nbytes, device="meta")
        meta = area.on(self.storages[area.storage])
        if isinstance(value, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=value.requires_grad)
        for key, attribute in vars(value).items():
            if key not in self.own_attributes:
                self.attached.append((name, meta, key, attribute))
        return meta


def _apply_like_plain(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` as for plain CPU tensors."""
    for child in module.children() if recurse else ():
        child._apply(fn)
    for parameter in module._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                parameter.data = fn(parameter)
    for key, buffer in module._buffers.items():
        module._buffers[key] = buffer if buffer is None else fn(buffer)
    return module


def users_file_line() -> str:
    """file:line of the innermost user frame, with folder; "?" if there is none."""
    frame = users_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"


def _fake_tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, FakeTensor)]


def _written_tensors(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Tensors that ``func`` writes to, by its schema."""
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]


def _draws_random_numbers(func: Any) -> bool:
    if func.overloadpacket.__name__ in _UNINITIALISED_OPS:
        return False
    draws = any(argument.name == "generator" for argument in func._schema.arguments)
    return draws or torch.Tag.nondeterministic_seeded in func.tags


def _with_zeroed_result(func: Any) -> Callable[..., Tensor]:
    """``func``, which returns uninitialised memory, with zeros: ranks must agree on values."""

    def zeroed(*args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = func(*args, **kwargs)
        return made.zero_()

    return zeroed


def _refuse_unrecordable(func: Any, written: list[Tensor], kwargs: Mapping[str, Any]) -> None:
    device = kwargs.get("device")
    if kwargs.get("generator") is not None:
        problem = "draws from its own generator, but only the default generator can be replayed from a seed"
    elif device is not None and torch.device(device).type != "cpu":
        problem = f"makes a tensor on {device}, but only initialisation on the CPU can be replayed"
    elif not all(isinstance(t, FakeTensor) for t in written):
        problem = "writes to a tensor made outside the recorded function. Make it inside"
    else:
        return
    raise InitialiseError(f"{func} at {users_file_line()} {problem}")


def _callable_name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)

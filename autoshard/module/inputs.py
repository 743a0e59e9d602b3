"""Local inputs: which inputs are shards of the batch (in processes that pass their own), their
layouts, and their global shapes. An in-process mesh is one process: its shard is the global
input."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autoshard.errors import CaptureError, HintError
from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh
from autoshard.passes.capture.exported.example_inputs import argument_paths
from autoshard.passes.propagate.hints import without_micro_batch_axis

InputScope = str | Mapping[str, str]
"""``"global"``, ``"local"``, or {fnmatch pattern of an input name: one of these}"""

InputLayouts = tuple[Layout | None, ...]
"""per argument leaf the layout of a local input; None, or an empty tuple: global"""

_INPUT_SCOPES = ("global", "local")
_BATCH_AXIS = re.compile(r"(dp|ddp|fsdp|hsdp|zero\d?|data|batch|replica|replicate|shard)(_|\d|$)")
"""conventional names of mesh axes that shard the batch"""


def check_inputs(inputs: Any) -> None:
    """Raise :class:`HintError` unless ``inputs`` is one of :data:`InputScope`."""
    kinds = inputs.values() if isinstance(inputs, Mapping) else (inputs,)
    if wrong := [k for k in kinds if k not in _INPUT_SCOPES]:
        raise HintError(f'inputs={inputs!r}: {wrong[0]!r} is neither "global" nor "local"')


def with_batch_size(
    batch: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs with rows repeated up to ``batch`` (None: unchanged) in tensors with as many
    rows as the first. :class:`HintError` for an invalid number."""
    if batch is None:
        return args, kwargs
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise HintError(f"batch={batch!r}: a number of rows is an int of at least 1")
    rows = next((x.shape[0] for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim), 0)
    if not rows:
        raise HintError(f"batch={batch}: no example input has rows to repeat")

    def repeated(x: Tensor) -> Tensor:
        if not x.ndim or x.shape[0] != rows:
            return x
        return x.detach()[torch.arange(batch, device=x.device) % rows].requires_grad_(x.requires_grad)

    return pytree.tree_map_only(Tensor, repeated, (args, kwargs))


def local_layouts(
    model: nn.Module, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: InputScope, hints: Any
) -> InputLayouts:
    """The layout of each local argument leaf; None if global. Dim 0 is sharded over the batch axes
    unless a hint says otherwise. :class:`HintError` for unmatched patterns or unknown axes."""
    if inputs == "global":
        return ()
    example, hints = (tuple(args), dict(kwargs)), without_micro_batch_axis(hints, mesh)
    names, leaves = argument_paths(model, example), pytree.tree_leaves(example)
    if isinstance(inputs, Mapping):
        _check_patterns(inputs, model, names)
    local = [bool(n) and leaf.ndim > 0 and _is_local(n, inputs) for n, leaf in zip(names, leaves, strict=True)]
    found = tuple(
        _local_input_layout(n, mesh, hints) if is_local else None for n, is_local in zip(names, local, strict=True)
    )
    if inputs == "local":
        _check_batch_dim(
            [(n, x) for n, x, layout in zip(names, leaves, found, strict=True) if layout is not None], found
        )
    return found


def _is_local(name: str, inputs: InputScope) -> bool:
    if isinstance(inputs, str):
        return inputs == "local"
    return any(kind == "local" and _matches(name, pattern) for pattern, kind in inputs.items())


def _matches(name: str, pattern: str) -> bool:
    root = re.match(r"\w*", name)
    return any(n == pattern or fnmatch.fnmatchcase(n, pattern) for n in (name, root[0] if root else name))


def _check_patterns(inputs: Mapping[str, str], model: nn.Module, names: Sequence[str]) -> None:
    known = [*filter(None, names), *inspect.signature(model.forward).parameters]
    for pattern in inputs:
        if not any(_matches(n, pattern) for n in known):
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3]
            raise HintError(f"inputs: {pattern!r} matches no input. Nearest: {', '.join(near)}")


def _local_input_layout(name: str, mesh: Mesh, hints: Any) -> Layout:
    asked: Any = Shard(0)
    for pattern, hint in (hints or {}).items():
        cuts = [p for p in (hint.values() if isinstance(hint, Mapping) else (hint,)) if isinstance(p, Shard)]
        if cuts and _matches(name, pattern):
            asked = hint
    if isinstance(asked, Mapping):
        return Layout(mesh, asked)
    return Layout(mesh, dict.fromkeys(_batch_axes(name, mesh), asked))


def _batch_axes(name: str, mesh: Mesh) -> list[str]:
    axes = [a for a in mesh.axes if mesh.size_of(a) > 1]
    found = axes if len(axes) < 2 else [a for a in axes if _BATCH_AXIS.match(a)]
    if not found and axes:
        raise HintError(
            f"input {name!r} is local, but the mesh axes ({mesh}) of its batch are not known. Name them in "
            f"hints={{{name!r}: {{{axes[0]!r}: Shard(0)}}}}, or give them a usual name: dp, data, fsdp, replica, …"
        )
    return found


def batch_part(sharded: Any, number: int | None = None) -> tuple[int, int]:
    """(number of the part of the batch that a rank loads, number of parts): (0, 1) for global
    inputs. ``number``: of the rank in the module's mesh; default: this rank's."""
    if sharded._settings.inputs == "global":
        return 0, 1
    mesh = sharded._program_mesh
    axes = _batch_axes("batch", mesh)
    return mesh.index_along(sharded._comm.rank if number is None else number, axes), mesh.size_of(axes)


def batch_rows(described: Mapping[str, Mapping[str, Any]], inputs: InputScope) -> set[int]:
    """Rows of the full batch, in parts on ranks. ``described``: input → global shape."""
    return {entry["shape"][0] for name, entry in described.items() if entry["shape"] and _is_local(name, inputs)}


def _check_batch_dim(local: Sequence[tuple[str, Tensor]], layouts: Sequence[Layout | None]) -> None:
    """For ``inputs="local"``: check that dim 0 has one length, the batch, in all inputs."""
    cuts = [layout for layout in layouts if layout is not None]
    rows = [(n, x.shape[0]) for (n, x), layout in zip(local, cuts, strict=True) if layout.axes_of(0)]
    if other := [(n, length) for n, length in rows if length != rows[0][1]]:
        raise HintError(
            f'inputs="local" takes dim 0 of every input for the batch, but {rows[0][0]!r} has '
            f"{rows[0][1]} rows and {other[0][0]!r} {other[0][1]}. Name the inputs that each "
            f'rank brings its own part of: inputs={{{rows[0][0]!r}: "local"}}.'
        )


def global_input_shape(part: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """The global shape of an input whose shard on every rank has shape ``part``."""
    return tuple(n * layout.mesh.size_of(layout.axes_of(d)) for d, n in enumerate(part))


def global_examples(
    args: Sequence[Any], kwargs: Mapping[str, Any], layouts: Sequence[Layout | None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of global shape from repeated shards: examples for planning without other ranks."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    for i, layout in enumerate(layouts):
        if layout is not None:
            part = leaves[i].detach()
            whole = meta_input(part, global_input_shape(part.shape, layout))
            made = part.repeat(global_input_shape([1] * part.ndim, layout)) if whole is None else whole
            leaves[i] = made.requires_grad_(leaves[i].requires_grad)
    return pytree.tree_unflatten(leaves, spec)


@contextlib.contextmanager
def report_global_inputs(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], layouts: InputLayouts
) -> Iterator[None]:
    """Inside, errors of tracing name the assumed global shapes of local inputs."""
    try:
        yield
    except CaptureError as error:
        example = tuple(args), dict(kwargs)
        named = zip(argument_paths(model, example), pytree.tree_leaves(example), layouts, strict=False)
        told = [
            f"{n!r} {list(x.shape)} ({layout.without_gradient()})"
            for n, x, layout in named
            if layout and layout.axes_with(Shard)
        ]
        if not told or "could not be traced" not in str(error):
            raise
        text = (
            f"{error} The global shapes of local inputs were taken to be {', '.join(told)}; "
            "a hint says which dim is sharded."
        )
        raise CaptureError(text) from error.__cause__


_LARGE_INPUT = 1 << 24
"""elements of a local floating-point input (KV cache) above which capture gets no data"""


def meta_input(like: Tensor, shape: Sequence[int]) -> Tensor | None:
    """A meta tensor for a large floating-point input; None for others: capture gets their data."""
    large = like.is_floating_point() and torch.Size(shape).numel() > _LARGE_INPUT
    return torch.empty(tuple(shape), dtype=like.dtype, device="meta") if large else None

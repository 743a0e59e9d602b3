"""Full weights and optimizer states, by original name, between files and any sharded module."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.module.base import ShardedModule
from autoshard.module.dtensors.owned import layout_on, local_of
from autoshard.module.meetings import collective
from autoshard.module.programs.simulate import shard_of
from autoshard.module.staged.pipelined import PipelinedModule
from autoshard.module.staged.state import own_state, whole_state
from autoshard.runtime.programs.saved import reading

INDEX = "model.safetensors.index.json"
"""index file of save_pretrained for sharded checkpoints: ``{"weight_map": {name: file}}``"""


def load_safetensors(sharded: ShardedModule, folder: str | os.PathLike[str]) -> None:
    """Load the safetensors files that ``save_pretrained`` wrote into ``folder``, by original name.

    Each rank reads its own shards one by one; no rank materialises a sharded tensor. One name of
    tied tensors is enough. ``folder`` may be a file. Raises :class:`PlanError` for missing, unknown
    or misshapen entries, before any tensor is loaded.
    """
    files = _files(Path(folder))
    own = sharded.state_dict(keep_vars=True)
    whole = sharded.whole_state_dict()
    names = {name: _found(name, tensor, whole, files) for name, tensor in whole.items()}
    missing = [n for n, found in names.items() if found is None]
    unknown = sorted(files.keys() - whole.keys())
    if missing or unknown:
        raise PlanError(f"the files in {folder} do not fit: missing {missing[:5]}, unknown {unknown[:5]}")
    for name, tensor in whole.items():  # also entries of other stages: all ranks raise, or none
        with _opened(files[names[name]]) as file:  # type: ignore[index]
            entry = file.get_slice(names[name])
            shape, kind = entry.get_shape(), entry.get_dtype()
        if shape != list(tensor.shape):
            raise PlanError(f"entry {name!r} in {folder} has shape {shape}, the model {list(tensor.shape)}")
        if _is_float(kind) != tensor.is_floating_point() or kind.startswith("C") != tensor.is_complex():
            raise PlanError(
                f"entry {name!r} in {folder} holds {kind}, the model {tensor.dtype}: no load makes one of the other. "
                "Convert the entry before, for example by dequantising it."
            )
    seen = set()
    with torch.no_grad():
        for name, tensor in own.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                with _opened(files[names[name]]) as file:  # type: ignore[index]
                    part = _part(file, str(names[name]), sharded, tensor)
                _local(tensor).copy_(part)


def _is_float(kind: str) -> bool:
    """Whether a dtype name of safetensors is floating point."""
    return kind.startswith(("F", "BF"))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with reading(path, "download or save it again"), safe_open(path, "pt") as file:
        yield file


@collective
def full_optimizer_state_dict(sharded: ShardedModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The unsharded model's optimizer state dict: full tensors on the CPU. Collective.

    Save it with ``torch.save`` on one rank; load it by :func:`load_full_optimizer_state_dict`.
    """
    if isinstance(sharded, PipelinedModule):
        return whole_state(sharded, optimizer)
    state: dict[str, Any] = pytree.tree_map_only(
        torch.Tensor, lambda x: sharded._full(x.detach()).cpu(), optimizer.state_dict()
    )
    return state


def load_full_optimizer_state_dict(
    sharded: ShardedModule, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load a full optimizer state dict; every rank keeps its shards.

    Raises :class:`PlanError` if it is no optimizer state, has other parameters, or holds a tensor
    that is neither a scalar nor shaped as its parameter.
    """
    held, groups = (state.get(k) if isinstance(state, Mapping) else None for k in ("state", "param_groups"))
    if not (_all_mappings(held, Mapping) and _all_mappings(groups, list)):
        raise PlanError(
            "this is no state of an optimizer: it has no mappings in 'state' and a list of them in 'param_groups'"
        )
    if isinstance(sharded, PipelinedModule):
        state = own_state(sharded, optimizer, state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    theirs, ours = ([len(g.get("params", ())) for g in gs] for gs in (state["param_groups"], optimizer.param_groups))
    if theirs != ours:
        raise PlanError(
            f"the optimizer state is of {theirs} parameters by group, the optimizer of {ours}: make it of the same"
        )
    for parameter, entry in ((p, state["state"].get(number, {})) for number, p in enumerate(parameters)):
        for key, value in entry.items():
            if not (isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.ndim):
                continue
            if value.shape != parameter.shape and not all(p.is_replicate() for p in parameter.placements):
                raise PlanError(
                    f"optimizer state {key!r} has shape {list(value.shape)}, its parameter {list(parameter.shape)}: how the "
                    "ranks share it is not known. Save and load it with torch.distributed.checkpoint."
                )
    optimizer.load_state_dict(dict(state))


def _all_mappings(found: Any, kind: type) -> bool:
    """Whether ``found`` is a ``kind`` whose values are mappings."""
    values = found.values() if isinstance(found, Mapping) else found
    return isinstance(found, kind) and all(isinstance(x, Mapping) for x in values)


def _rank(sharded: Any) -> int:
    return int(sharded._comm.rank)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _part(file: Any, name: str, sharded: Any, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a file entry."""
    if not isinstance(tensor, DTensor) or not tensor.ndim:
        whole: torch.Tensor = file.get_tensor(name)
        return whole
    layout = layout_on(sharded._running, sharded.device_mesh, tensor)
    if layout.grouped:
        return shard_of(file.get_tensor(name), layout, _rank(sharded))
    chunks = (layout.chunk_of(dim, size, _rank(sharded)) for dim, size in enumerate(tensor.shape))
    part: torch.Tensor = file.get_slice(name)[tuple(slice(start, start + n) for start, n in chunks)]
    return part


def _files(folder: Path) -> dict[str, Path]:
    """Entry name → file. Raises :class:`PlanError` if there is none."""
    if (folder / INDEX).is_file():
        with reading(folder / INDEX, f'it has to be JSON such as {{"weight_map": {{"weight": "{INDEX[:17]}"}}}}'):
            weights = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
            outside = [file for file in weights.values() if Path(file).name != file or "\\" in file]
        if outside:
            raise PlanError(
                f"{folder / INDEX} names {outside[0]!r}: a file of an index lies beside it, and has a name alone"
            )
        return {name: folder / file for name, file in weights.items()}
    found: dict[str, Path] = {}
    for path in [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")):
        with _opened(path) as file:
            names = dict.fromkeys(file.keys(), path)
        if twice := names.keys() & found.keys():
            raise PlanError(
                f"{path} and {found[name := min(twice)]} both have an entry {name!r}: name one of the files"
            )
        found.update(names)
    if not found:
        raise PlanError(f"{folder} holds no safetensors files")
    return found


def _found(name: str, tensor: torch.Tensor, own: Mapping[str, torch.Tensor], files: Mapping[str, Path]) -> str | None:
    """The entry of a tensor in the files: its own name, or that of a tied tensor."""
    if name in files:
        return name
    return next((other for other, x in own.items() if x is tensor and other in files), None)

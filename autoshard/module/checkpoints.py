"""Weights and optimizer states between files and a sharded module on any mesh, under original names."""

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
from autoshard.module.dtensors.module_dtensor import local_shard
from autoshard.module.dtensors.segments import shard_of
from autoshard.module.dtensors.table_wise import dtensor_layout
from autoshard.module.programs.call_checks import collective_method
from autoshard.module.ranks.pipelined import PipelinedModule
from autoshard.module.sharded_module import ShardedModule
from autoshard.runtime.programs.launch import as_plan_error


def full_optimizer_state(sharded: PipelinedModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State dict of the full model's optimizer, on the CPU of every rank. Collective."""
    own, groups = optimizer.state_dict(), _model_groups(sharded, optimizer)
    mine = {name: own["state"][n] for n, name in enumerate(_own_names(sharded, optimizer)) if n in own["state"]}
    forms = sharded.gathered({name: {key: _meta_entry(x) for key, x in entry.items()} for name, entry in mine.items()})
    known: dict[str, dict[str, Any]] = {name: form for rank in reversed(forms) for name, form in rank.items()}
    state = {}
    for number, name in enumerate(name for names in groups for name in names):
        if name in known:
            entry = mine.get(name, {})
            state[number] = {
                key: sharded.everywhere(name, form, entry.get(key)).cpu() if isinstance(form, torch.Tensor) else form
                for key, form in known[name].items()
            }
    numbers = iter(range(sum(map(len, groups))))
    options = [
        {**group, "params": [next(numbers) for _ in names]}
        for group, names in zip(own["param_groups"], groups, strict=True)
    ]
    return {**own, "state": state, "param_groups": options}


def local_optimizer_state(
    sharded: PipelinedModule, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """This rank's part of the full model's optimizer state; tensors stay full. Collective.

    Raises :class:`PlanError` for another number of parameters.
    """
    groups = _model_groups(sharded, optimizer)
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != [len(names) for names in groups]:
        raise PlanError(f"the optimizer state has {sizes} parameters by group, the model {[len(g) for g in groups]}")
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    number = dict(zip((name for names in groups for name in names), numbers, strict=True))
    names, own = _own_names(sharded, optimizer), optimizer.state_dict()["param_groups"]
    found = {i: state["state"][number[name]] for i, name in enumerate(names) if number[name] in state["state"]}
    options = [{**group, "params": mine["params"]} for group, mine in zip(state["param_groups"], own, strict=True)]
    return {**state, "state": found, "param_groups": options}


def _meta_entry(x: Any) -> Any:
    """A meta tensor for a tensor; anything else unchanged."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x


def _own_names(sharded: PipelinedModule, optimizer: torch.optim.Optimizer) -> list[str]:
    """Original names of the parameters in this rank's optimizer, in order."""
    return [name for names in _own_groups(sharded, optimizer) for name in names]


def _own_groups(sharded: PipelinedModule, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    known = {id(p): name for name, p in sharded.named_parameters()}
    return [[known[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _model_groups(sharded: PipelinedModule, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Per parameter group the names of all ranks, in model order. Collective."""
    order = {name: n for n, name in enumerate(sharded.all_stages_names())}
    every = sharded.gathered(_own_groups(sharded, optimizer))
    return [
        sorted({name for group in groups for name in group}, key=order.__getitem__)
        for groups in zip(*every, strict=True)
    ]


SAFETENSORS_INDEX = "model.safetensors.index.json"
"""index file of save_pretrained for sharded checkpoints: ``{"weight_map": {name: file}}``"""


def load_safetensors(sharded: ShardedModule, folder: str | os.PathLike[str]) -> None:
    """Load the safetensors files that ``save_pretrained`` wrote into ``folder``, by original name.

    Each rank reads its own shards one by one; no rank materialises a sharded tensor. One name of
    tied tensors is enough. ``folder`` may be a file. Raises :class:`PlanError` for missing, unknown
    or misshapen entries, before any tensor is loaded.
    """
    files = _entry_files(Path(folder))
    own = sharded.state_dict(keep_vars=True)
    whole = sharded.all_stages_state_dict()
    names = {name: _entry_name(name, tensor, whole, files) for name, tensor in whole.items()}
    missing = [n for n, found in names.items() if found is None]
    unknown = sorted(files.keys() - whole.keys())
    if missing or unknown:
        raise PlanError(f"the files in {folder} do not fit: missing {missing[:5]}, unknown {unknown[:5]}")
    for name, tensor in whole.items():  # also entries of other stages: all ranks raise, or none
        with _open_safetensors(files[names[name]]) as file:  # type: ignore[index]
            entry = file.get_slice(names[name])
            shape, kind = entry.get_shape(), entry.get_dtype()
        if shape != list(tensor.shape):
            raise PlanError(f"entry {name!r} in {folder} has shape {shape}, but the model has {list(tensor.shape)}")
        if _is_float(kind) != tensor.is_floating_point() or kind.startswith("C") != tensor.is_complex():
            raise PlanError(
                f"entry {name!r} in {folder} has dtype {kind}, but the model has {tensor.dtype}, and loading "
                "does not convert between them. Convert the entry first, for example by dequantising it."
            )
    seen = set()
    with torch.no_grad():
        for name, tensor in own.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                with _open_safetensors(files[names[name]]) as file:  # type: ignore[index]
                    part = _entry_shard(file, str(names[name]), sharded, tensor)
                local_shard(tensor).copy_(part)


def _is_float(kind: str) -> bool:
    """Whether a dtype name of safetensors is floating point."""
    return kind.startswith(("F", "BF"))


@contextlib.contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    with as_plan_error(path, "download or save it again"), safe_open(path, "pt") as file:
        yield file


@collective_method
def full_optimizer_state_dict(sharded: ShardedModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The unsharded model's optimizer state dict: full tensors on the CPU. Collective.

    Save it with ``torch.save`` on one rank; load it by :func:`load_full_optimizer_state_dict`.
    """
    if isinstance(sharded, PipelinedModule):
        return full_optimizer_state(sharded, optimizer)
    state: dict[str, Any] = pytree.tree_map_only(
        torch.Tensor, lambda x: sharded._full(x.detach()).cpu(), optimizer.state_dict()
    )
    return state


def load_full_optimizer_state_dict(
    sharded: ShardedModule, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load a full optimizer state dict; every rank keeps its shards.

    Raises :class:`PlanError` if it is not an optimizer state, or has other parameters. Each tensor
    must be a scalar or have its parameter's shape, unless :func:`autoshard.whole` steps the optimizer.
    """
    held, groups = (state.get(k) if isinstance(state, Mapping) else None for k in ("state", "param_groups"))
    if not (_holds_mappings(held, Mapping) and _holds_mappings(groups, list)):
        raise PlanError("not the state of an optimizer: it needs mappings in 'state' and a list in 'param_groups'")
    if isinstance(sharded, PipelinedModule):
        state = local_optimizer_state(sharded, optimizer, state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    theirs, ours = ([len(g.get("params", ())) for g in gs] for gs in (state["param_groups"], optimizer.param_groups))
    if theirs != ours:
        raise PlanError(
            f"the optimizer state has {theirs} parameters per group, the optimizer has "
            f"{ours}. Make the optimizer with the same groups"
        )
    entries = ((p, state["state"].get(number, {})) for number, p in enumerate(parameters))
    for parameter, entry in () if getattr(optimizer, "steps_whole", False) else entries:
        for key, value in entry.items():
            if not (isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.ndim):
                continue
            if value.shape != parameter.shape and not all(p.is_replicate() for p in parameter.placements):
                raise PlanError(
                    f"optimizer state {key!r} has shape {list(value.shape)}, but its parameter "
                    f"has {list(parameter.shape)}, so its sharding is not known. Save and load "
                    "it with torch.distributed.checkpoint."
                )
    optimizer.load_state_dict(dict(state))


def _holds_mappings(found: Any, kind: type) -> bool:
    """Whether ``found`` is a ``kind`` whose values are mappings."""
    values = found.values() if isinstance(found, Mapping) else found
    return isinstance(found, kind) and all(isinstance(x, Mapping) for x in values)


def _rank(sharded: Any) -> int:
    return int(sharded._comm.rank)


def _entry_shard(file: Any, name: str, sharded: Any, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a file entry."""
    if not isinstance(tensor, DTensor) or not tensor.ndim:
        whole: torch.Tensor = file.get_tensor(name)
        return whole
    layout = dtensor_layout(sharded._program_mesh, sharded.device_mesh, tensor)
    if layout.grouped:
        return shard_of(file.get_tensor(name), layout, _rank(sharded))
    chunks = (layout.chunk_of(dim, size, _rank(sharded)) for dim, size in enumerate(tensor.shape))
    part: torch.Tensor = file.get_slice(name)[tuple(slice(start, start + n) for start, n in chunks)]
    return part


def _entry_files(folder: Path) -> dict[str, Path]:
    """Entry name → file. Raises :class:`PlanError` if there is none."""
    if (folder / SAFETENSORS_INDEX).is_file():
        with as_plan_error(
            folder / SAFETENSORS_INDEX,
            f'it must be JSON such as {{"weight_map": {{"weight": "{SAFETENSORS_INDEX[:17]}"}}}}',
        ):
            weights = dict(json.loads((folder / SAFETENSORS_INDEX).read_text(encoding="utf-8"))["weight_map"])
            outside = [file for file in weights.values() if Path(file).name != file or "\\" in file]
        if outside:
            raise PlanError(
                f"{folder / SAFETENSORS_INDEX} names {outside[0]!r}: an index may only name "
                "files in its own folder, without a path"
            )
        return {name: folder / file for name, file in weights.items()}
    found: dict[str, Path] = {}
    for path in [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")):
        with _open_safetensors(path) as file:
            names = dict.fromkeys(file.keys(), path)
        if twice := names.keys() & found.keys():
            raise PlanError(f"{path} and {found[name := min(twice)]} both have an entry {name!r}. Give one file")
        found.update(names)
    if not found:
        raise PlanError(f"{folder} holds no safetensors files")
    return found


def _entry_name(
    name: str, tensor: torch.Tensor, own: Mapping[str, torch.Tensor], files: Mapping[str, Path]
) -> str | None:
    """The entry of a tensor in the files: its own name, or that of a tied tensor."""
    if name in files:
        return name
    return next((other for other, x in own.items() if x is tensor and other in files), None)

"""Write a compiled module as a directory that runs without the original model's code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from autoshard.layout import Layout
from autoshard.module.executable import Executable

Held = Callable[[Executable, int], Mapping[str, torch.Tensor]]
"""what gives every tensor that the rank module of a rank reads, by original name"""


def save(executable: Executable, held: Held, directory: Path, alone: bool) -> None:
    """``rank_module.py``, the JSON files beside it, and one safetensors file per rank (this process's ranks).

    ``alone``: all ranks run in this process.
    """
    directory.mkdir(parents=True, exist_ok=True)
    mine = range(executable.compiled.plan.mesh.size) if alone else [dist.get_rank()]
    trained = [i.fqn for i in executable.graph.inputs if i.kind == "parameter" and executable.graph.types[i.name].grad]
    metadata = {"trained": json.dumps(trained), "mutated": json.dumps(list(executable.compiled.source.mutated))}
    for rank in mine:
        tensors = held(executable, rank)
        needed = {name: tensors[name].cpu().contiguous().clone() for name in executable.rank_module().tensor_names}
        save_file(needed, str(directory / f"rank{rank}.safetensors"), metadata=metadata)
    if alone or dist.get_rank() == 0:
        source = executable.compiled.source
        (directory / "rank_module.py").write_text(source.text, encoding="utf-8")
        lines = {"sha256": sha256(source.text.encode()).hexdigest(), "modules": source.modules}
        (directory / "lines.json").write_text(json.dumps(lines), encoding="utf-8")
        (directory / "plan.json").write_text(executable.compiled.plan.to_json(), encoding="utf-8")
        arguments = dict(zip(executable.compiled.source.inputs, executable.compiled.source.arguments, strict=True))
        cuts = {
            name: _cut(executable.compiled.program.layouts[name], entry) for name, entry in executable.inputs.items()
        }
        described = {arguments[n]: {**entry, **cuts[n]} for n, entry in executable.inputs.items() if n in arguments}
        (directory / "inputs.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
    if not alone:
        dist.barrier()


def _cut(layout: Layout, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Of an input that comes in parts: dim → axes that cut it, outer to inner."""
    cut = {dim: layout.axes_of(dim) for dim in range(len(entry["shape"])) if layout.axes_of(dim)}
    return {"cut": cut} if cut else {}

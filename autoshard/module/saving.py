"""Write a compiled module as a directory that runs without the original model's code."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from safetensors.torch import save_file

if TYPE_CHECKING:
    from autoshard.module.base import ShardedModule
    from autoshard.module.executable import Executable


def save(sharded: ShardedModule, executable: Executable, directory: Path) -> None:
    """``rank_module.py``, the JSON files beside it, and one safetensors file per rank (this process's ranks)."""
    directory.mkdir(parents=True, exist_ok=True)
    alone = not hasattr(sharded, "device_mesh")
    mine = range(sharded.mesh.size) if alone else [dist.get_rank()]
    trained = [i.fqn for i in executable.graph.inputs if i.kind == "parameter" and executable.graph.types[i.name].grad]
    metadata = {"trained": json.dumps(trained), "mutated": json.dumps(list(executable.compiled.source.mutated))}
    for rank in mine:
        tensors = sharded.local_tensors(executable, rank)
        needed = {name: tensors[name].cpu().contiguous().clone() for name in executable.rank_module().tensor_names}
        save_file(needed, str(directory / f"rank{rank}.safetensors"), metadata=metadata)
    if alone or dist.get_rank() == 0:
        source = executable.compiled.source
        (directory / "rank_module.py").write_text(source.text, encoding="utf-8")
        lines = {"sha256": sha256(source.text.encode()).hexdigest(), "modules": source.modules}
        (directory / "lines.json").write_text(json.dumps(lines), encoding="utf-8")
        (directory / "plan.json").write_text(executable.compiled.plan.to_json(), encoding="utf-8")
        arguments = dict(zip(executable.compiled.source.inputs, executable.compiled.source.arguments, strict=True))
        described = {arguments[name]: entry for name, entry in executable.inputs.items() if name in arguments}
        (directory / "inputs.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
    if not alone:
        dist.barrier()

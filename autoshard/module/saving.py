"""Save a compiled module as a directory that runs without the original model's code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from autoshard.errors import PlanError
from autoshard.layout import Layout
from autoshard.module.programs.executable import Executable
from autoshard.module.programs.pipeline import pipeline_form, stage_ranks
from autoshard.passes.ir.graph import Ref
from autoshard.passes.microbatch import MicroBatches
from autoshard.passes.pipeline import Stages

TensorsOfRank = Callable[[Executable, int], Mapping[str, Tensor]]
"""(program, rank) → original name → tensor that the rank module reads"""


def save_rank_modules(executable: Executable, held: TensorsOfRank, directory: Path, alone: bool) -> None:
    """Write ``rank_module.py``, JSON files, and one safetensors file per rank of this process
    (``alone``: all). Raises :class:`PlanError` for a step that needs more than rank modules, and
    for stages with symbolic lengths."""
    micro = executable.compiled.micro_batches
    if micro is not None and micro.before is not None:
        made = ", ".join(i.name for i in micro.before.inputs)
        raise PlanError(
            f"this step cannot be saved: values that depend on inputs alone ({made}) are "
            "computed from the full batch before the first micro-batch. Compile with "
            "micro_batches=1 to save it, or save full_state_dict() and plan.to_json()."
        )
    if executable.graph.clamped:
        raise PlanError(
            f"this step cannot be saved: the forward clamps parameters ({next(iter(executable.graph.clamped))}) in "
            "place, and rank modules do not. Save full_state_dict() and plan.to_json(), or the module in eval()."
        )
    if executable.parts and executable.compiled.symbols.read:
        raise PlanError(
            "stages with open lengths (dynamic) cannot be saved, because messages between stages have fixed "
            "shapes. Compile without dynamic to save it, or save full_state_dict() and plan.to_json()."
        )
    directory.mkdir(parents=True, exist_ok=True)
    _write_shards(executable, held, directory, alone)
    if alone or dist.get_rank() == 0:
        source = executable.compiled.source
        (directory / "rank_module.py").write_text(source.text, encoding="utf-8")
        lines = {"sha256": sha256(source.text.encode()).hexdigest(), "modules": source.modules}
        (directory / "lines.json").write_text(json.dumps(lines), encoding="utf-8")
        (directory / "plan.json").write_text(executable.compiled.plan.to_json(), encoding="utf-8")
        (directory / "inputs.json").write_text(json.dumps(_input_entries(executable), indent=1), encoding="utf-8")
        step = directory / "step.json"
        step.unlink(missing_ok=True)
        if micro is not None or executable.parts:
            step.write_text(json.dumps(_step_entry(executable), indent=1), encoding="utf-8")
    if not alone:
        dist.barrier()


def _write_shards(executable: Executable, held: TensorsOfRank, directory: Path, alone: bool) -> None:
    trained = [i.fqn for i in executable.graph.of_kind("parameter") if executable.graph.types[i.name].grad]
    metadata = {"trained": json.dumps(trained), "mutated": json.dumps(list(executable.compiled.source.mutated))}
    parts, stages = executable.parts or (executable,), stage_ranks(executable)
    for mine, row in enumerate(stages):
        for place, rank in enumerate(row):
            if not alone and rank != dist.get_rank():
                continue
            needed: dict[str, Tensor] = {}
            for part in parts[mine :: len(stages)]:
                tensors = held(part, place)
                needed |= {name: tensors[name].cpu().contiguous().clone() for name in part.rank_module().tensor_names}
            save_file(needed, str(directory / f"rank{rank}.safetensors"), metadata=metadata)


def _input_entries(executable: Executable) -> dict[str, Any]:
    """Global inputs by argument name; with stages or micro-batches by name in the graph."""
    source, layouts = executable.compiled.source, executable.compiled.program.layouts
    if executable.parts or executable.compiled.micro_batches is not None:
        return {name: dict(entry) for name, entry in executable.inputs.items()}
    arguments = dict(zip(source.inputs, source.arguments, strict=True))
    described = ((n, {**entry, **_axes_by_dim(layouts[n], entry)}) for n, entry in executable.inputs.items())
    return {arguments[n]: entry for n, entry in described if n in arguments}


def _axes_by_dim(layout: Layout, entry: Mapping[str, Any]) -> dict[str, Any]:
    """For a local input: dim → axes that shard it, outer to inner."""
    cut = {dim: layout.axes_of(dim) for dim in range(len(entry["shape"])) if layout.axes_of(dim)}
    return {"cut": cut} if cut else {}


def _step_entry(executable: Executable) -> dict[str, Any]:
    """Entries of :class:`~autoshard.runtime.programs.launch.SavedStep`."""
    compiled, stages = executable.compiled, stage_ranks(executable)
    pipeline, micro = compiled.pipeline, compiled.micro_batches
    received = [()] if pipeline is None else [stage.received for stage in pipeline.each]
    forms = [] if pipeline is None else [pipeline_form(executable, place) for place in range(len(stages[0]))]
    count = 1 if micro is None else micro.count
    return {
        "count": count,
        "schedule": "gpipe" if compiled.plan.staged is None else compiled.plan.staged.schedule,
        "loss": _loss_position(executable),
        "training": micro is not None and micro.loss is not None,
        "draws": bool(forms) and forms[0].draws,
        "ranks": stages,
        "tied": {} if pipeline is None else _tied_parameters(pipeline, micro),
        "stages": [
            {
                "arguments": [_argument_source(name, got, micro) for name in part.compiled.source.inputs],
                "sent": 0 if pipeline is None else len(pipeline.each[number].sent),
                "mutated": list(part.compiled.source.mutated),
            }
            for number, (part, got) in enumerate(zip(executable.parts or (executable,), received, strict=True))
        ],
        "messages": [
            [
                {"dtype": str(m[0].dtype).removeprefix("torch."), "grad": m[0].grad, "shapes": [x.shape for x in m]}
                for m in zip(*sent, strict=True)
            ]
            for sent in zip(*(form.messages for form in forms), strict=True)
        ]
        or [[]],
    }


def _tied_parameters(pipeline: Stages, micro: MicroBatches | None) -> dict[str, tuple[int, ...]]:
    """Trained parameters that several stages hold, with these stages."""
    reached = pipeline.reached(None if micro is None else micro.loss)
    trained = {i.fqn for i in pipeline.whole.inputs if i.name in reached}
    return {fqn: homes for fqn, homes in pipeline.tied.items() if fqn in trained}


def _argument_source(name: str, received: tuple[str, ...], micro: MicroBatches | None) -> int | tuple[str, int | None]:
    if name in received:
        return received.index(name)
    return (name, None) if micro is None else micro.inputs[name]


def _loss_position(executable: Executable) -> int | None:
    """Number of the loss in the last stage's outputs; without backward the first summed scalar."""
    compiled = executable.compiled
    micro, graph = compiled.micro_batches, compiled.graph
    if micro is None:
        return None
    position = micro.loss
    if position is None:
        summed = (i for i, how in enumerate(micro.outputs) if how == "sum")
        position = next(
            (i for i in summed if isinstance(o := graph.outputs[i], Ref) and not graph.types[o.name].shape), None
        )
    if compiled.pipeline is None or position is None:
        return position
    results = compiled.pipeline.each[-1].results
    return results.index(position) if position in results else None

"""Run a saved directory: ``torchrun … rank_module.py``, or all ranks in one ``python`` process."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from autoshard.errors import MeshError, PlanError
from autoshard.runtime.operations.random import synchronised_rng
from autoshard.runtime.programs.along import Along
from autoshard.runtime.programs.module import RankModule
from autoshard.runtime.programs.pipeline import Pipeline, packed
from autoshard.runtime.programs.saved import Held, SavedStep, reading
from autoshard.runtime.transport.communicator import bind
from autoshard.runtime.transport.generators import set_states, states
from autoshard.runtime.transport.in_process import World
from autoshard.runtime.transport.process_group import TorchCommunicator
from autoshard.runtime.transport.profiling import name_lines

Outputs = Sequence[Any]


def main(rank_module: type[RankModule] | Sequence[type[RankModule]], file: str) -> None:
    """Load this rank's shards from beside ``file``, take training steps, print the loss.

    ``rank_module``: the class of a rank, or those of all stages. ``--inputs``: a safetensors file
    with the global inputs by name; default: random inputs as described in ``inputs.json``. Raises
    :class:`MeshError` for a wrong number of processes, :class:`PlanError` for operations of a
    library that is not imported."""
    _check_operations(Path(file))
    classes = [rank_module] if isinstance(rank_module, type) else [*rank_module]
    parser = argparse.ArgumentParser(description=classes[0].__doc__)
    parser.add_argument("--inputs", type=Path, help="safetensors file with the global inputs by name")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps to take (default 1)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW, and SparseAdam")
    options = parser.parse_args()
    folder = Path(file).resolve().parent
    _name_lines(classes, Path(file))
    if "WORLD_SIZE" in os.environ:
        with _processes() as device:
            _distributed(classes, folder, options, device)
    else:
        _in_process(classes, folder, options)


def _check_operations(file: Path) -> None:
    """Raise :class:`PlanError` for a custom op whose library (of the model) is not imported."""
    for library, name in sorted(set(re.findall(r"\btorch\.ops\.(\w+)\.(\w+)", file.read_text(encoding="utf-8")))):
        if not hasattr(getattr(torch.ops, library), name):
            raise PlanError(f"nothing has defined torch.ops.{library}.{name}: import what does at the top of {file}")


# --- all ranks in this process ---


def _in_process(classes: Sequence[type[RankModule]], folder: Path, options: argparse.Namespace) -> None:
    world = World(classes[0].MESH)
    first = Held(classes, None, folder, 0, torch.device("cpu"))
    step = first.step
    held = [
        [first if r == 0 else Held(classes, step, folder, r, torch.device("cpu")) for r in row] for row in step.ranks
    ]
    inputs = _inputs(step, folder, options.inputs)
    for number in range(options.steps):
        torch.manual_seed(number)
        drawn, made = states(), []
        for index in range(step.count):
            set_states(drawn)  # each micro-batch slices the full batch's draws
            for comm in world.ranks:
                comm.enter(index, step.count)
            outputs = _through(world, step, held, index, inputs)
            losses = [x for x in (_loss(step, of_rank) for of_rank in outputs) if x is not None and x.requires_grad]
            if losses:  # one graph spans all ranks, and each rank has the full loss
                torch.autograd.backward(losses)
            made.append(outputs[0])
        for comm in world.ranks:
            comm.enter(0, 1)
        for fqn in step.tied:
            for place in range(world.size):
                _add_up([held[k][place].tensors[fqn] for k in step.homes(fqn)])
        for run in (run for row in held for run in row):
            run.update(options.lr)
        _print(number, step, made)


def _through(
    world: World, step: SavedStep, held: Sequence[Sequence[Held]], index: int, inputs: Mapping[str, torch.Tensor]
) -> list[Outputs]:
    """The last stage's outputs for a micro-batch, on every rank."""
    received: list[Outputs] = [()] * world.size
    outputs: list[Outputs] = []
    for number, stage in enumerate(step.stages):
        runs = held[number % len(held)]
        outputs = world.run(
            lambda run, got, number=number: run.call(number, index, got, inputs), [*zip(runs, received, strict=True)]
        )
        received = [of_rank[: stage.sent] for of_rank in outputs]
    return outputs


def _add_up(parameters: Sequence[torch.Tensor]) -> None:
    """Sum the gradients of a parameter that several stages share."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        total = torch.stack(gradients).sum(0)
        for p in parameters:
            p.grad = total.clone()


# --- this process's rank ---


@contextmanager
def _processes() -> Iterator[torch.device]:
    """Initialise torch.distributed; yields this rank's device."""
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if not cuda:  # gloo's threads sometimes abort the interpreter's exit ("terminate called …")
        sys.stdout.flush()
        os._exit(0)


def _distributed(
    classes: Sequence[type[RankModule]], folder: Path, options: argparse.Namespace, device: torch.device
) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    needed = sum(map(len, SavedStep.beside(folder, classes, ()).ranks))
    if dist.get_world_size() != needed:
        raise MeshError(
            f"the mesh {dict(classes[0].MESH)} has {needed} ranks, but {dist.get_world_size()} processes run: "
            f"torchrun --nproc-per-node {needed} {folder / 'rank_module.py'}"
        )
    held = Held(classes, None, folder, rank, device)
    step = held.step
    mine, place = step.of_rank(rank)
    comm = TorchCommunicator(classes[0].MESH, step.ranks[mine])
    comm.device = device
    groups = [dist.new_group(list(column)) for column in zip(*step.ranks, strict=True)] if len(step.ranks) > 1 else []
    inputs = {n: t.to(device) for n, t in _inputs(step, folder, options.inputs).items()}
    pipeline: Pipeline | None = None
    if groups:
        along = Along(groups[place], comm.notes)
        pipeline = Pipeline(step.form(place), along, device, partial(_of_stage, held, comm, inputs))
    for number in range(options.steps):
        torch.manual_seed(number)
        if pipeline is not None:
            made = _on_schedule(pipeline, along, held, comm)
        else:
            with bind(comm), synchronised_rng(comm):
                made = _one_after_another(held, comm, inputs)
        held.update(options.lr)
        if place == 0 and len(step.stages) - 1 in held.modules:
            _print(number, step, made)


def _one_after_another(held: Held, comm: TorchCommunicator, inputs: Mapping[str, torch.Tensor]) -> list[Outputs]:
    """Outputs of all micro-batches of a step without stages."""
    drawn, made = comm.random_states(), list[Outputs]()
    for index in range(held.step.count):
        set_states(drawn)
        made.append(_of_stage(held, comm, inputs, 0, index, ()))
        loss = _loss(held.step, made[-1])
        if loss is not None and loss.requires_grad:
            loss.backward()
    comm.enter(0, 1)
    return made


def _of_stage(
    held: Held,
    comm: TorchCommunicator,
    inputs: Mapping[str, torch.Tensor],
    number: int,
    index: int,
    received: Sequence[torch.Tensor],
) -> Outputs:
    comm.enter(index, held.step.count, number)
    return held.call(number, index, received, inputs)


def _on_schedule(pipeline: Pipeline, along: Along, held: Held, comm: TorchCommunicator) -> list[Outputs]:
    """Outputs of all micro-batches, on the ranks of the last stage."""
    state = packed(pipeline.device) if pipeline.draws and 0 in pipeline.mine else None
    with bind(comm):
        pipeline.step(comm.notes, list(held.trained.values()), state)
    comm.enter(0, 1)
    if pipeline.failed is not None:
        raise pipeline.failed
    for fqn in held.step.tied:
        if along.rank in held.step.homes(fqn):
            leaf = held.tensors[fqn]
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            along.add_up(leaf.grad, held.step.tied[fqn], f"the gradient of {fqn}")
    return list(pipeline.made.get(pipeline.last, ()))


# --- files, and what is printed ---


def _name_lines(classes: Sequence[type[RankModule]], file: Path) -> None:
    """Name modules in profiles from ``lines.json``, unless ``file`` was edited since."""
    table = file.with_name("lines.json")
    if table.exists():
        with reading(table):
            found = json.loads(table.read_text(encoding="utf-8"))
            is_of_file = found["sha256"] == sha256(file.read_bytes()).hexdigest()
            modules = {int(n): module for n, module in found["modules"].items()}
        for kind in classes if is_of_file else ():
            name_lines(kind, modules)


def _inputs(step: SavedStep, folder: Path, given: Path | None) -> dict[str, torch.Tensor]:
    """The global inputs."""
    names = list(dict.fromkeys(a[0] for stage in step.stages for a in stage.arguments if not isinstance(a, int)))
    if given is not None:
        from safetensors.torch import load_file

        with reading(given, "--inputs takes a safetensors file"):
            found = load_file(str(given))
        if missing := [n for n in names if n not in found]:
            raise PlanError(f"{given} has no input {missing[0]!r}; it needs {', '.join(names)}")
        return {n: found[n] for n in names}
    generator = torch.Generator("cpu").manual_seed(0)
    with reading(path := folder / "inputs.json"):
        described = json.loads(path.read_text())
        return {n: _synthetic(described[n], generator) for n in names}


def _synthetic(described: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    dtype, shape = getattr(torch, described["dtype"]), described["shape"]
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
    low, high = described["low"], described["high"]
    found = torch.randint(low, high + 1, shape, generator=generator, device="cpu").to(dtype)
    if described.get("ascending"):
        found = found.sort().values
        found[0] = low
    return found


def _loss(step: SavedStep, outputs: Outputs) -> torch.Tensor | None:
    """The output marked as the loss; else the first scalar."""
    if step.loss is not None:
        loss: torch.Tensor = outputs[step.loss]
        return loss
    if step.count > 1:
        return None
    return next((x for x in outputs if isinstance(x, torch.Tensor) and x.ndim == 0 and x.is_floating_point()), None)


def _print(number: int, step: SavedStep, made: Sequence[Outputs]) -> None:
    """Print the sum of the losses. ``made``: outputs of every micro-batch."""
    losses = [x.detach() for x in (_loss(step, outputs) for outputs in made) if x is not None]
    if losses:
        print(f"step {number}: loss {torch.stack(losses).sum().item():.6f}", flush=True)
        return
    shapes = ", ".join(str(list(x.shape)) for x in made[0] if isinstance(x, torch.Tensor))
    print(f"step {number}: outputs (local) {shapes}", flush=True)

"""Run a saved directory: ``torchrun … rank_module.py``, or all ranks in one process. ``step.json``
lists the micro-batches and stages; without it there is one of each."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.errors import MeshError, PlanError
from autoshard.runtime.operations.random import synchronised_rng
from autoshard.runtime.parameters.block import wait_gradients
from autoshard.runtime.programs.module import RankModule
from autoshard.runtime.programs.pipeline import Message, Pipeline, StageForm, StageRanks, packed_generator_states
from autoshard.runtime.transport.communicator import bind, current
from autoshard.runtime.transport.in_process import World
from autoshard.runtime.transport.process_group import TorchCommunicator
from autoshard.runtime.transport.profiling import name_lines
from autoshard.runtime.transport.torch_state import generator_states, set_generator_states

GlobalInputs = Mapping[str, Tensor]


@contextlib.contextmanager
def as_plan_error(path: Path, remedy: str = "save the module again with sharded.save()") -> Iterator[None]:
    """Raise :class:`PlanError` with ``remedy`` if the file read inside is missing or corrupt."""
    from safetensors import SafetensorError

    try:
        yield
    except (AttributeError, KeyError, OSError, RecursionError, SafetensorError, TypeError, ValueError) as error:
        raise PlanError(f"{path} cannot be read ({type(error).__name__}: {str(error)[:200]}): {remedy}") from error


@dataclass(frozen=True)
class SavedStage:
    """``arguments``: per forward argument (input, micro-batch dim), or number of a message."""

    arguments: tuple[int | tuple[str, int | None], ...]
    sent: int
    mutated: tuple[str, ...]
    """original names of buffers whose new values are the last outputs"""


@dataclass(frozen=True)
class SavedStep:
    """The schedule of a step, besides the classes of its stages."""

    stages: tuple[SavedStage, ...]
    ranks: tuple[tuple[int, ...], ...]
    """per rank along the stage axis: the processes of its stages, by place"""
    schedule: str
    count: int
    """number of micro-batches"""
    loss: int | None
    """which output of the last stage is the loss (a summand per micro-batch); None: unknown"""
    training: bool
    draws: bool
    messages: tuple[tuple[Mapping[str, Any], ...], ...]
    """per stage what it sends: dtype, whether it carries a gradient, shape on every rank"""
    tied: Mapping[str, tuple[int, ...]]
    """parameters that several stages share → these stages"""

    @staticmethod
    def beside(folder: Path, classes: Sequence[type[RankModule]], mutated: Sequence[str]) -> SavedStep:
        """The step that ``step.json`` in ``folder`` describes."""
        path = folder / "step.json"
        if not path.exists():
            names = list(inspect.signature(classes[0].forward).parameters)[1:]
            ranks = 1
            for n in classes[0].MESH.values():
                ranks *= n
            whole = SavedStage(tuple((name, None) for name in names), 0, tuple(mutated))
            return SavedStep((whole,), (tuple(range(ranks)),), "gpipe", 1, None, True, False, ((),), {})
        with as_plan_error(path):
            data = json.loads(path.read_text(encoding="utf-8"))
            stages = tuple(
                SavedStage(
                    tuple(a if isinstance(a, int) else tuple(a) for a in s["arguments"]), s["sent"], tuple(s["mutated"])
                )
                for s in data["stages"]
            )
            return SavedStep(
                **{k: data[k] for k in ("schedule", "count", "loss", "training", "draws")},
                stages=stages,
                ranks=tuple(map(tuple, data["ranks"])),
                messages=tuple(map(tuple, data["messages"])),
                tied={fqn: tuple(homes) for fqn, homes in data["tied"].items()},
            )

    def form(self, place: int) -> StageForm:
        """The form for ranks with this ``place`` among those of their stage."""
        messages = tuple(
            tuple(Message(tuple(m["shapes"][place]), getattr(torch, m["dtype"]), m["grad"]) for m in sent)
            for sent in self.messages
        )
        return StageForm(self.schedule, self.count, messages, self.loss if self.training else None, self.draws)

    def of_rank(self, rank: int) -> tuple[int, int]:
        """(position of a process along the stage axis, its place within its stage)."""
        return next((k, row.index(rank)) for k, row in enumerate(self.ranks) if rank in row)

    def homes(self, fqn: str) -> list[int]:
        """The ranks along the stage axis that hold a shared parameter."""
        return sorted({stage % len(self.ranks) for stage in self.tied[fqn]})


class SavedRank:
    """State of one process: the modules of its stages, and its shards as leaves."""

    def __init__(
        self, classes: Sequence[type[RankModule]], step: SavedStep | None, folder: Path, rank: int, device: torch.device
    ) -> None:
        from safetensors import safe_open

        path = folder / f"rank{rank}.safetensors"
        if not path.exists():
            raise PlanError(f"{path} is missing: save the module again with sharded.save({str(folder)!r})")
        self.tensors: dict[str, Tensor] = {}
        with as_plan_error(path), safe_open(str(path), framework="pt", device=str(device)) as shards:
            metadata = shards.metadata() or {}
            trained = set(json.loads(metadata.get("trained", "[]")))
            for name in shards.keys():  # noqa: SIM118  not a mapping
                tensor = shards.get_tensor(name)
                self.tensors[name] = nn.Parameter(tensor) if name in trained else tensor
        self.step = step or SavedStep.beside(folder, classes, json.loads(metadata.get("mutated", "[]")))
        mine = self.step.of_rank(rank)[0]
        numbers = range(mine, len(classes), len(self.step.ranks))
        self.modules = {number: classes[number]() for number in numbers}
        self.trained = {n: t for n, t in self.tensors.items() if n in trained}
        described = folder / "inputs.json"
        with as_plan_error(described):
            self.inputs = json.loads(described.read_text()) if described.exists() else {}
        self.written: dict[str, Tensor] = {}
        self.fresh = [*self.trained.values()]
        """parameters without a gradient so far: dense or sparse is unknown"""
        self.optimizers: list[torch.optim.Optimizer] = []

    def call(self, number: int, index: int, received: Sequence[Tensor], inputs: GlobalInputs) -> tuple[Any, ...]:
        """Outputs of stage ``number`` in micro-batch ``index``. ``inputs``: global."""
        stage, module = self.step.stages[number], self.modules[number]
        own = {name: self.tensors[name] for name in module.tensor_names}
        module.bind_tensors(dict(zip(own, wait_gradients(*own.values()), strict=True)))
        arguments = (received[a] if isinstance(a, int) else self._part(inputs, *a, index) for a in stage.arguments)
        outputs: tuple[Any, ...] = module(*arguments)
        first = len(outputs) - len(stage.mutated)
        self.written |= {n: x.detach() for n, x in zip(stage.mutated, outputs[first:], strict=True)}
        return outputs[:first]

    def _part(self, inputs: GlobalInputs, name: str, dim: int | None, index: int) -> Tensor:
        """This rank's shard of an input in a micro-batch."""
        x = inputs[name]
        if dim is not None:
            length = x.shape[dim] // self.step.count
            x = x.narrow(dim, index * length, length)
        for cut, axes in self.inputs.get(name, {}).get("cut", {}).items():
            x = x.narrow(int(cut), *current().chunk(x.shape[int(cut)], current().active(axes)))
        return x

    def update(self, lr: float) -> None:
        """Write mutated buffers, and step AdamW (SparseAdam for sparse gradients)."""
        self.tensors |= self.written  # a mutated input's value is not read again
        for kind, is_sparse in ((torch.optim.AdamW, False), (torch.optim.SparseAdam, True)):
            own = [x for x in self.fresh if x.grad is not None and x.grad.is_sparse == is_sparse]
            if own:
                self.optimizers.append(kind(own, lr=lr))
        self.fresh = [x for x in self.fresh if x.grad is None]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


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
        with _process_group_device() as device:
            _distributed(classes, folder, options, device)
    else:
        _in_process(classes, folder, options)


def _check_operations(file: Path) -> None:
    """Raise :class:`PlanError` for a custom op whose library (of the model) is not imported."""
    for library, name in sorted(set(re.findall(r"\btorch\.ops\.(\w+)\.(\w+)", file.read_text(encoding="utf-8")))):
        if not hasattr(getattr(torch.ops, library), name):
            raise PlanError(f"torch.ops.{library}.{name} is not defined. Import its module at the top of {file}")


# --- all ranks in this process ---


def _in_process(classes: Sequence[type[RankModule]], folder: Path, options: argparse.Namespace) -> None:
    world = World(classes[0].MESH)
    first = SavedRank(classes, None, folder, 0, torch.device("cpu"))
    step = first.step
    held = [
        [first if r == 0 else SavedRank(classes, step, folder, r, torch.device("cpu")) for r in row]
        for row in step.ranks
    ]
    inputs = _global_inputs(step, folder, options.inputs)
    for number in range(options.steps):
        torch.manual_seed(number)
        drawn, made = generator_states(), []
        for index in range(step.count):
            set_generator_states(drawn)  # each micro-batch slices the full batch's draws
            for comm in world.ranks:
                comm.enter(index, step.count)
            outputs = _through_stages(world, step, held, index, inputs)
            losses = [
                x for x in (_step_loss(step, of_rank) for of_rank in outputs) if x is not None and x.requires_grad
            ]
            if losses:  # one graph spans all ranks, and each rank has the full loss
                torch.autograd.backward(losses)
            made.append(outputs[0])
        for comm in world.ranks:
            comm.enter(0, 1)
        for fqn in step.tied:
            for place in range(world.size):
                _add_tied_gradients([held[k][place].tensors[fqn] for k in step.homes(fqn)])
        for run in (run for row in held for run in row):
            run.update(options.lr)
        _print_step(number, step, made)


def _through_stages(
    world: World, step: SavedStep, held: Sequence[Sequence[SavedRank]], index: int, inputs: Mapping[str, Tensor]
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


def _add_tied_gradients(parameters: Sequence[Tensor]) -> None:
    """Sum the gradients of a parameter that several stages share."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        total = torch.stack(gradients).sum(0)
        for p in parameters:
            p.grad = total.clone()


# --- this process's rank ---


@contextmanager
def _process_group_device() -> Iterator[torch.device]:
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
            f"the mesh {dict(classes[0].MESH)} has {needed} ranks, but {dist.get_world_size()} processes "
            f"run. Start it with torchrun --nproc-per-node {needed} {folder / 'rank_module.py'}"
        )
    held = SavedRank(classes, None, folder, rank, device)
    step = held.step
    mine, place = step.of_rank(rank)
    comm = TorchCommunicator(classes[0].MESH, step.ranks[mine])
    comm.device = device
    groups = [dist.new_group(list(column)) for column in zip(*step.ranks, strict=True)] if len(step.ranks) > 1 else []
    inputs = {n: t.to(device) for n, t in _global_inputs(step, folder, options.inputs).items()}
    pipeline: Pipeline | None = None
    if groups:
        along = StageRanks(groups[place], comm.notes)
        pipeline = Pipeline(step.form(place), along, device, partial(_run_stage, held, comm, inputs))
    for number in range(options.steps):
        torch.manual_seed(number)
        if pipeline is not None:
            made = _on_schedule(pipeline, along, held, comm)
        else:
            with bind(comm), synchronised_rng(comm):
                made = _run_micro_batches(held, comm, inputs)
        held.update(options.lr)
        if place == 0 and len(step.stages) - 1 in held.modules:
            _print_step(number, step, made)


def _run_micro_batches(held: SavedRank, comm: TorchCommunicator, inputs: Mapping[str, Tensor]) -> list[Outputs]:
    """Outputs of all micro-batches of a step without stages."""
    drawn, made = comm.random_states(), list[Outputs]()
    for index in range(held.step.count):
        set_generator_states(drawn)
        made.append(_run_stage(held, comm, inputs, 0, index, ()))
        loss = _step_loss(held.step, made[-1])
        if loss is not None and loss.requires_grad:
            loss.backward()
    comm.enter(0, 1)
    return made


def _run_stage(
    held: SavedRank,
    comm: TorchCommunicator,
    inputs: Mapping[str, Tensor],
    number: int,
    index: int,
    received: Sequence[Tensor],
) -> Outputs:
    comm.enter(index, held.step.count, number)
    return held.call(number, index, received, inputs)


def _on_schedule(pipeline: Pipeline, along: StageRanks, held: SavedRank, comm: TorchCommunicator) -> list[Outputs]:
    """Outputs of all micro-batches, on the ranks of the last stage."""
    state = packed_generator_states(pipeline.device) if pipeline.draws and 0 in pipeline.mine else None
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
        with as_plan_error(table):
            found = json.loads(table.read_text(encoding="utf-8"))
            is_of_file = found["sha256"] == sha256(file.read_bytes()).hexdigest()
            modules = {int(n): module for n, module in found["modules"].items()}
        for kind in classes if is_of_file else ():
            name_lines(kind, modules)


def _global_inputs(step: SavedStep, folder: Path, given: Path | None) -> dict[str, Tensor]:
    names = list(dict.fromkeys(a[0] for stage in step.stages for a in stage.arguments if not isinstance(a, int)))
    if given is not None:
        from safetensors.torch import load_file

        with as_plan_error(given, "--inputs takes a safetensors file"):
            found = load_file(str(given))
        if missing := [n for n in names if n not in found]:
            raise PlanError(f"{given} has no input {missing[0]!r}. It needs {', '.join(names)}")
        return {n: found[n] for n in names}
    generator = torch.Generator("cpu").manual_seed(0)
    with as_plan_error(path := folder / "inputs.json"):
        described = json.loads(path.read_text())
        return {n: _random_input(described[n], generator) for n in names}


def _random_input(described: Mapping[str, Any], generator: torch.Generator) -> Tensor:
    dtype, shape = getattr(torch, described["dtype"]), described["shape"]
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
    low, high = described["low"], described["high"]
    found = torch.randint(low, high + 1, shape, generator=generator, device="cpu").to(dtype)
    if described.get("ascending"):
        found = found.sort().values
        found[0] = low
    return found


def _step_loss(step: SavedStep, outputs: Outputs) -> Tensor | None:
    """The output marked as the loss; else the first scalar."""
    if step.loss is not None:
        return outputs[step.loss]
    if step.count > 1:
        return None
    return next((x for x in outputs if isinstance(x, Tensor) and x.ndim == 0 and x.is_floating_point()), None)


def _print_step(number: int, step: SavedStep, made: Sequence[Outputs]) -> None:
    """Print the sum of the losses. ``made``: outputs of every micro-batch."""
    losses = [x.detach() for x in (_step_loss(step, outputs) for outputs in made) if x is not None]
    if losses:
        print(f"step {number}: loss {torch.stack(losses).sum().item():.6f}", flush=True)
        return
    shapes = ", ".join(str(list(x.shape)) for x in made[0] if isinstance(x, Tensor))
    print(f"step {number}: outputs (local) {shapes}", flush=True)

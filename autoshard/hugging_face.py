"""Trainers of Hugging Face for sharded modules; needs the packages transformers and accelerate.
Importing this file prepares :class:`transformers.Trainer` itself, so that its subclasses (trl's, a
user's own) work, too. :func:`autoshard.compile` imports it if transformers' Trainer is imported.
Trainers of other models are as before."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import IterableDataset

from autoshard.errors import PlanError
from autoshard.module.checkpoints import full_optimizer_state_dict, full_state, load_full_optimizer_state_dict
from autoshard.module.parts.split import prepare_parts
from autoshard.module.ranks.distributed import DistributedModule
from autoshard.module.sharded_module import ShardedModule
from autoshard.runtime.programs.launch import as_plan_error
from autoshard.runtime.transport import torch_state
from autoshard.transfers.running import load_safetensors

_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"
"""file names in a transformers checkpoint"""
_ONE = {"num_processes": 1, "process_index": 0, "local_process_index": 0, "distributed_type": DistributedType.NO}
"""accelerate's state of a process that is alone"""
_PROCESSES: dict[str, Any] = {}
"""accelerate's state of this process as it is; empty before the first Trainer of a sharded module"""


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """:class:`transformers.Trainer`, which takes sharded modules, by the name that it had here.
    Every rank gets the same batches: ``per_device_train_batch_size`` is the global batch size. The
    module is not wrapped in DDP; autocast follows ``bf16=True``. Checkpoints are the unsharded
    model's: resume on another mesh, on one device, or with ``from_pretrained``."""


def _sharded(model: Any) -> ShardedModule | None:
    """The sharded module that ``model`` is, or wraps."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((m for m in modules if isinstance(m, ShardedModule)), None)


def _for_sharded(
    name: str, kind: type[ShardedModule] = ShardedModule
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces a method of transformers' Trainer for sharded modules of this ``kind``. The function
    gets the trainer, its sharded module, the method as it was, and the arguments."""

    def replace(ours: Callable[..., Any]) -> Callable[..., Any]:
        theirs = getattr(transformers.Trainer, name)

        @functools.wraps(theirs)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            sharded = _sharded(self.model)
            if not isinstance(sharded, kind):
                if kind is DistributedModule:
                    _see_processes(one=False)
                return theirs(self, *args, **kwargs)
            return ours(self, sharded, functools.partial(theirs, self), *args, **kwargs)

        setattr(transformers.Trainer, name, method)
        return ours

    return replace


def _see_processes(one: bool) -> None:
    """Let accelerate see ``one`` process, as every rank takes the full batch, or those that there
    are. The first rank stays the main process, which prints and writes."""
    shared = PartialState._shared_state
    if one and shared["num_processes"] > 1:
        _PROCESSES.update({name: shared[name] for name in _ONE})
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        if state and _PROCESSES:
            state.update(_ONE if one else _PROCESSES)


def _ranks_seen(one: bool = False) -> PartialState:
    """These arguments' process, alone; its rank decides whether it writes, unless ``one``."""
    made = object.__new__(PartialState)
    made.__dict__ = {**PartialState._shared_state, **({} if one else _PROCESSES), "num_processes": 1}
    made.__dict__["distributed_type"] = DistributedType.NO
    return made


def _main_by_rank(name: str, index: str) -> None:
    """Let accelerate's property ``name`` go by rank, where it sees one process."""
    theirs = getattr(PartialState, name).fget

    def is_main(self: PartialState) -> bool:
        one = _PROCESSES and PartialState._shared_state.get("num_processes") == 1
        return bool(_PROCESSES[index] == 0 if one else theirs(self))

    setattr(PartialState, name, property(is_main))


_main_by_rank("is_main_process", "process_index")
_main_by_rank("is_local_main_process", "local_process_index")


@_for_sharded("create_accelerator_and_postprocess", DistributedModule)
def _create(trainer: Any, sharded: DistributedModule, theirs: Callable[..., None]) -> None:
    if sharded._settings.inputs != "global":
        raise PlanError(
            "the Trainer gives every rank the same batch, but the module was compiled with inputs='local'. Compile it "
            "without: per_device_train_batch_size is then the global batch size"
        )
    if sharded.mesh.size != dist.get_world_size():
        raise PlanError(f"the Trainer needs all {dist.get_world_size()} ranks, but the mesh ({sharded.mesh}) has fewer")
    trainer.args._setup_devices  # noqa: B018  joins the processes
    _see_processes(one=True)
    trainer.args.distributed_state = _ranks_seen()
    theirs()


@_for_sharded("_get_dataloader", DistributedModule)
def _get_dataloader(
    trainer: Any, sharded: DistributedModule, theirs: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """As in one process: seeds of workers by rank would change batches."""
    _see_processes(one=True)  # other training arguments may have been made since
    trainer.args.distributed_state = _ranks_seen(one=True)
    try:
        return theirs(*args, **kwargs)
    finally:
        trainer.args.distributed_state = _ranks_seen()


@_for_sharded("_save")
def _save(
    trainer: Any,
    sharded: ShardedModule,
    theirs: Callable[..., None],
    output_dir: Any = None,
    state_dict: Any = None,
) -> None:
    """Full tensors, on the rank that writes. Collective."""
    if state_dict is None:
        state_dict = full_state(trainer.model, trainer.args.should_save)
    if trainer.args.should_save:
        fields = getattr(getattr(sharded, "config", None), "__dict__", {})
        before = dict(fields)
        try:
            theirs(output_dir, state_dict)
        finally:
            fields.clear()  # save_pretrained sets some, which the other ranks would lack
            fields.update(before)
    if dist.is_initialized():
        dist.barrier()


@_for_sharded("_save_rng_state", DistributedModule)
def _save_rng_state(trainer: Any, sharded: DistributedModule, theirs: Callable[..., None], output_dir: str) -> None:
    if trainer.args.should_save:
        theirs(output_dir)


@_for_sharded("_save_optimizer_and_scheduler")
def _save_optimizer(trainer: Any, sharded: ShardedModule, theirs: Callable[..., None], output_dir: str) -> None:
    optimizer = full_optimizer_state_dict(sharded, trainer.optimizer)
    if trainer.args.should_save:
        torch.save(optimizer, os.path.join(output_dir, _OPTIMIZER))
        torch.save(trainer.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))


@_for_sharded("_load_optimizer_and_scheduler")
def _load_optimizer(trainer: Any, sharded: ShardedModule, theirs: Callable[..., None], checkpoint: str | None) -> None:
    if checkpoint is None or not os.path.isfile(os.path.join(checkpoint, _OPTIMIZER)):
        return
    with _checkpoint_entry(checkpoint, _OPTIMIZER, mmap=True) as state:
        load_full_optimizer_state_dict(sharded, trainer.optimizer, state)
    with _checkpoint_entry(checkpoint, _SCHEDULER) as state:
        trainer.lr_scheduler.load_state_dict(state)


@_for_sharded("_load_from_checkpoint")
def _load_from_checkpoint(
    trainer: Any, sharded: ShardedModule, theirs: Callable[..., None], checkpoint: str, model: Any = None
) -> None:
    if hasattr(sharded, "peft_config"):  # adapters alone
        theirs(checkpoint, model)
    else:
        load_safetensors(sharded, checkpoint)


@_for_sharded("_load_best_model")
def _load_best_model(trainer: Any, sharded: ShardedModule, theirs: Callable[..., None]) -> None:
    _load_from_checkpoint(trainer, sharded, lambda *_: theirs(), trainer.state.best_model_checkpoint)


def _compiled_for_first_batch(create: Callable[..., Any]) -> Callable[..., Any]:
    """``create_optimizer``, which first compiles the module: it needs parameters."""

    @functools.wraps(create)
    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        sharded, data = _sharded(self.model), self.train_dataset
        known = data is None or isinstance(data, IterableDataset)
        if sharded is not None and not sharded._original_model.adopted and not known:
            states = torch_state.generator_states(), random.getstate(), numpy.random.get_state()
            loader = self.get_train_dataloader()
            batches, count = self.get_batch_samples(
                iter(getattr(loader, "base_dataloader", loader)), 1, self.args.device
            )
            self.model.train()
            wrapped = {n: x for n, x in vars(sharded).items() if n == "forward"}  # as trl does
            object.__setattr__(sharded, "forward", functools.partial(_compile_only, sharded))
            try:
                with self.accelerator.autocast():
                    self.compute_loss(self.model, self._prepare_inputs(batches[0]), num_items_in_batch=count)
            except _CompiledError:
                pass
            finally:
                del sharded.__dict__["forward"]
                sharded.__dict__.update(wrapped)
                torch_state.set_generator_states(states[0])
                random.setstate(states[1])
                numpy.random.set_state(states[2])
        return create(self, *args, **kwargs)

    return create_optimizer


class _CompiledError(Exception):
    """Ends a call that was to compile only."""


def _compile_only(sharded: ShardedModule, *args: Any, **kwargs: Any) -> None:
    prepare_parts(sharded, args, kwargs)
    raise _CompiledError


transformers.Trainer.create_optimizer = _compiled_for_first_batch(transformers.Trainer.create_optimizer)


@contextlib.contextmanager
def _checkpoint_entry(checkpoint: str, name: str, mmap: bool = False) -> Iterator[Any]:
    """The content of a ``torch.save`` file. Raises :class:`PlanError` if it is unusable."""
    path = Path(checkpoint, name)
    with as_plan_error(path, "resume from another checkpoint, or without this file"):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(str(error)) from error
        yield state

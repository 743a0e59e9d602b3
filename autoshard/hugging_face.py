"""Hugging Face's Trainer for sharded modules; needs the packages transformers and accelerate."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import find_batch_size, recursively_apply
from torch.utils.data import IterableDataset

from autoshard.module.base import ShardedModule
from autoshard.module.checkpoints import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
    load_safetensors,
)
from autoshard.module.ranks.distributed import DistributedModule
from autoshard.runtime.programs.saved import reading

_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"
"""files of a checkpoint of transformers"""


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """:class:`transformers.Trainer` for the result of :func:`autoshard.compile`, in one process or under torchrun.

    Every rank is given the same batches: ``per_device_train_batch_size`` is the global batch. The module is not wrapped
    in DDP, and autocast follows ``bf16=True``. A checkpoint is that of the unsharded model, so that training can be resumed
    on another mesh, on one device, or by ``from_pretrained``.
    """

    _sharing = 1
    """how many ranks have the same batch: what each counts of it is summed over all"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.model, DistributedModule):
            self._sharing = dist.get_world_size()
            # As for models that transformers itself shards: the model owns its placement, and is not wrapped. To their
            # arithmetic the ranks of one model are tensor parallel: they share batches, and each counts once.
            self.is_distributed_loading_by_transformers = True
            object.__setattr__(self.model, "_tp_size", self._sharing)
            self.args.average_tokens_across_devices = True  # else one rank's count is divided by all, too
            self.accelerator.prepare_data_loader = self._whole_batches
            self.accelerator.gather_for_metrics = self.gather_function = self._gather_for_metrics

    def _gather_for_metrics(self, data: Any, **_: Any) -> Any:
        """As accelerate in one process: of the last batch its rows, since the loss is repeated for those of a full one."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder < 1:
            return data
        try:
            return recursively_apply(lambda tensor: tensor[: state.remainder], data)
        except IndexError:  # where one has no rows, accelerate leaves all
            return data

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """As in one process: else the sampler of a rank, and the seeds of its workers, give it batches of its own."""
        if self._sharing == 1:
            return super()._get_dataloader(*args, **kwargs)
        ranks = self.args.distributed_state
        self.args.distributed_state = SimpleNamespace(num_processes=1, process_index=0, local_process_index=0)
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.args.distributed_state = ranks

    def _whole_batches(self, loader: Any, **_: Any) -> Any:
        """The batches of ``loader``, all of them for every rank, on its device."""
        made = self.accelerator
        prepared = prepare_data_loader(
            loader,
            self.args.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,  # else rank 0 reads an iterable dataset, and each rank has a part of the batch
            rng_types=made.rng_types.copy(),
            use_seedable_sampler=made.use_seedable_sampler,
            data_seed=made.dataloader_config.data_seed,
        )
        if isinstance(loader.dataset, IterableDataset):
            _count_last_batch(prepared)
        return prepared

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self._sharing

    def store_flos(self) -> None:
        """See :meth:`transformers.Trainer.store_flos`."""
        self.current_flos /= self._sharing
        super().store_flos()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """On the rank that writes, with the tensors that :meth:`save_model` gathered."""
        super()._save(output_dir, state_dict if state_dict is not None else self._weights())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See :meth:`transformers.Trainer.save_model`. Collective."""
        folder, weights = output_dir or self.args.output_dir, self._weights()
        if self.args.should_save:
            self._save(folder, weights)
        if dist.is_initialized():
            dist.barrier()

    def _weights(self) -> dict[str, torch.Tensor]:
        """The whole tensors, those that are tied once; kept on the CPU of the rank that writes."""
        sharded: ShardedModule = self.model
        found: dict[int, torch.Tensor] = {}
        weights = {}
        for name, tensor in sharded.state_dict(keep_vars=True).items():
            if id(tensor) not in found:
                full = sharded._full(tensor.detach())
                found[id(tensor)] = full.cpu() if self.args.should_save else full.new_empty(0)
            weights[name] = found[id(tensor)]
        return weights

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_safetensors(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        load_safetensors(self.model, self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = full_optimizer_state_dict(self.model, self.optimizer)
        if self.args.should_save:
            torch.save(optimizer, os.path.join(output_dir, _OPTIMIZER))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not os.path.isfile(os.path.join(checkpoint, _OPTIMIZER)):
            return
        with _loaded(checkpoint, _OPTIMIZER, mmap=True) as state:
            load_full_optimizer_state_dict(self.model, self.optimizer, state)
        with _loaded(checkpoint, _SCHEDULER) as state:
            self.lr_scheduler.load_state_dict(state)


def _count_last_batch(loader: Any) -> None:
    """Let ``loader`` know the rows of its last batch, which accelerate computes from the length of a dataset only."""
    base = loader.base_dataloader
    batches = base.__iter__

    def counted() -> Iterator[Any]:
        rows = None
        for batch in batches():
            rows = find_batch_size(batch)
            yield batch
        loader.remainder = rows or -1  # accelerate reads one batch ahead: before it gives the last one

    base.__iter__ = counted


@contextlib.contextmanager
def _loaded(checkpoint: str, name: str, mmap: bool = False) -> Iterator[Any]:
    """What ``torch.save`` wrote. Raises :class:`PlanError` where it cannot be read, or cannot be used inside."""
    path = Path(checkpoint, name)
    with reading(path, "resume from another checkpoint, or without this file"):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(str(error)) from error
        yield state

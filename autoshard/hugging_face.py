"""Trainer of Hugging Face for sharded modules; needs the packages transformers and accelerate."""

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

from autoshard.module.checkpoints import full_optimizer_state_dict, load_full_optimizer_state_dict
from autoshard.module.ranks.distributed import DistributedModule
from autoshard.module.sharded_module import ShardedModule
from autoshard.runtime.programs.launch import as_plan_error
from autoshard.transfers.running import load_safetensors

_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"
"""file names in a transformers checkpoint"""


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """:class:`transformers.Trainer` for sharded modules, in one process or under torchrun.

    Every rank gets the same batches: ``per_device_train_batch_size`` is the global batch size. The
    module is not wrapped in DDP; autocast follows ``bf16=True``. Checkpoints are the unsharded
    model's: resume on another mesh, on one device, or with ``from_pretrained``.
    """

    _sharing = 1
    """number of ranks that share one batch; divides counts of tokens and FLOPs"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.model, DistributedModule):
            self._sharing = dist.get_world_size()
            # As for models sharded by transformers: they own their placement and are not wrapped.
            # As in tensor parallelism, ranks share a batch, and each batch counts once.
            self.is_distributed_loading_by_transformers = True
            object.__setattr__(self.model, "_tp_size", self._sharing)
            self.args.average_tokens_across_devices = True  # else one rank's count is divided
            self.accelerator.prepare_data_loader = self._whole_batches
            self.accelerator.gather_for_metrics = self.gather_function = self._gather_for_metrics

    def _gather_for_metrics(self, data: Any, **_: Any) -> Any:
        """Results of the last batch's valid rows; its loss was repeated for a full batch."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder < 1:
            return data
        try:
            return recursively_apply(lambda tensor: tensor[: state.remainder], data)
        except IndexError:  # accelerate keeps all rows if one tensor has none
            return data

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """As in one process: a distributed sampler or per-rank seeds would change batches."""
        if self._sharing == 1:
            return super()._get_dataloader(*args, **kwargs)
        ranks = self.args.distributed_state
        self.args.distributed_state = SimpleNamespace(num_processes=1, process_index=0, local_process_index=0)
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.args.distributed_state = ranks

    def _whole_batches(self, loader: Any, **_: Any) -> Any:
        """The batches of ``loader``, unsharded on every rank, on its device."""
        made = self.accelerator
        prepared = prepare_data_loader(
            loader,
            self.args.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,  # else rank 0 reads an iterable dataset and scatters each batch
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
        """Write the tensors that :meth:`save_model` gathered; called on the writing rank only."""
        super()._save(output_dir, state_dict if state_dict is not None else self._weights())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See :meth:`transformers.Trainer.save_model`. Collective."""
        folder, weights = output_dir or self.args.output_dir, self._weights()
        if self.args.should_save:
            self._save(folder, weights)
        if dist.is_initialized():
            dist.barrier()

    def _weights(self) -> dict[str, torch.Tensor]:
        """The full tensors, tied ones once; kept on the CPU of the rank that writes. Collective."""
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
        with _checkpoint_entry(checkpoint, _OPTIMIZER, mmap=True) as state:
            load_full_optimizer_state_dict(self.model, self.optimizer, state)
        with _checkpoint_entry(checkpoint, _SCHEDULER) as state:
            self.lr_scheduler.load_state_dict(state)


def _count_last_batch(loader: Any) -> None:
    """Tell ``loader`` the rows of its last batch; accelerate knows them only for sized datasets."""
    base = loader.base_dataloader
    batches = base.__iter__

    def counted() -> Iterator[Any]:
        rows = None
        for batch in batches():
            rows = find_batch_size(batch)
            yield batch
        loader.remainder = rows or -1  # runs before the last batch: accelerate prefetches

    base.__iter__ = counted


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

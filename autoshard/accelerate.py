"""Accelerator of Hugging Face for sharded modules; needs the package accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType, is_torch_tensor, recursively_apply
from accelerate.utils.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors.torch import load_model
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from autoshard.errors import AutoshardError
from autoshard.module.checkpoints import FullOptimizer, full_state
from autoshard.module.inputs import batch_part, batch_rows
from autoshard.module.optimizers import clip_grad_norm_
from autoshard.module.ranks.distributed import DistributedModule
from autoshard.transfers.running import load_safetensors


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """:class:`accelerate.Accelerator` for sharded modules, in one process or under torchrun.
    A script means on all ranks what it means on one device: loaders give every rank the full batch,
    ``gather_for_metrics`` gives each row once, and checkpoints hold the unsharded model. Modules of
    ``inputs="local"`` get their part of the batch, as accelerate's data parallelism deals it out.
    Without a sharded module, or in one process, all is accelerate's own."""

    _optimizers: list[Any]

    @property
    def _sharded(self) -> DistributedModule | None:
        models = self.__dict__.get("_models", ())  # absent while accelerate's constructor runs
        return next((m for m in models if isinstance(m, DistributedModule)), None)

    @property
    def num_processes(self) -> int:
        """Parts of the batch: 1 if ranks share it; the number of processes before ``prepare``."""
        return super().num_processes if self._sharded is None else batch_part(self._sharded)[1]

    @property
    def process_index(self) -> int:
        """Number of this rank's part of the batch; the rank before ``prepare``."""
        return super().process_index if self._sharded is None else batch_part(self._sharded)[0]

    # --- prepare ---

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """See :meth:`accelerate.Accelerator.prepare`. :class:`AutoshardError` before any change."""
        modules = [x for x in args if isinstance(x, DistributedModule)]
        for module in modules:
            self._check(module, args)
        self._models += [m for m in modules if m not in self._models]  # loaders and schedules follow the module
        return super().prepare(*args, device_placement=device_placement)

    def _check(self, module: DistributedModule, args: Iterable[Any]) -> None:
        """Raise :class:`AutoshardError` for what accelerate would do beside the module's plan."""
        if self.distributed_type not in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
            raise AutoshardError(
                f"accelerate shards by {self.distributed_type.value}, and the module is sharded already. Leave its "
                "plugin out, and say it in autoshard.compile(..., like=)"
            )
        if self.parallelism_config is not None and self.parallelism_config.total_size > 1:
            raise AutoshardError("the mesh of a sharded module divides its ranks. Leave parallelism_config out")
        others = [m for m in self._models if isinstance(m, DistributedModule)]
        if (others and batch_part(others[0]) != batch_part(module)) or (not others and self._dataloaders):
            before = "another module" if others else "a data loader"
            raise AutoshardError(
                f"{before} was prepared, which takes other parts of the batch than this module. Prepare the module first"
            )
        parts, ranks = batch_part(module)[1], dist.get_world_size()
        if module.mesh.size != ranks:
            raise AutoshardError(f"the mesh of the module ({module.mesh}) must have all {ranks} processes")
        if not self.split_batches and 1 < parts < ranks and any(isinstance(x, LRScheduler) for x in args):
            raise AutoshardError(
                f"accelerate steps a schedule once per process, {ranks} times for {parts} parts of the batch. Do not "
                "prepare the schedule, or pass split_batches=True"
            )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """See :meth:`accelerate.Accelerator.prepare_model`. Sharded modules get no DDP."""
        if not isinstance(model, DistributedModule):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if model not in self._models:
            self._check(model, ())
        if not getattr(model, "_is_accelerate_prepared", False) and model in self._models:
            self._models.remove(model)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """See :meth:`accelerate.Accelerator.prepare_data_loader`."""
        if self._sharded is None or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if self.dispatch_batches:
            raise AutoshardError("ranks read their batches themselves. Leave dispatch_batches out")
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.num_processes,
            process_index=self.process_index,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """See :meth:`accelerate.Accelerator.prepare_scheduler`. It steps once if ranks share the batch."""
        prepared = super().prepare_scheduler(scheduler)
        if self._sharded is not None and self.num_processes == 1:
            prepared.split_batches = True
        return prepared

    # --- collectives ---

    def gather(self, tensor: Any) -> Any:
        """See :meth:`accelerate.Accelerator.gather`: rows of the full batch, each once. With local
        inputs, tensors with as many rows as the part are gathered; those with the batch's are
        whole outputs. :class:`AutoshardError` for others."""
        sharded = self._sharded
        if sharded is None:
            return super().gather(tensor)
        whole = recursively_apply(_plain, tensor, error_on_other_type=True)
        parts = self.num_processes
        if parts == 1:
            return whole
        rows = batch_rows(sharded._latest_executable().inputs, sharded._settings.inputs)

        def gathered(x: torch.Tensor) -> torch.Tensor:
            if not x.ndim or len(x) in rows:
                return x
            if len(x) * parts not in rows:
                raise AutoshardError(
                    f"gather: a tensor of shape {list(x.shape)} has neither the rows of the batch ({min(rows)}) nor of "
                    f"this rank's part ({min(rows) // parts})"
                )
            every = super(Accelerator, self).gather(x.contiguous())
            return torch.cat([every.tensor_split(dist.get_world_size())[rank] for rank in _first_ranks(sharded)])

        return recursively_apply(gathered, whole)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """See :meth:`accelerate.Accelerator.gather_for_metrics`."""
        sharded = self._sharded
        if sharded is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        if self.num_processes == 1:  # as in one process, objects are of the full batch
            with contextlib.suppress(TypeError):
                return self.gather(input_data)
            return input_data
        if use_gather_object:
            raise AutoshardError("gather_for_metrics(use_gather_object=True) needs inputs='global'")
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """See :meth:`accelerate.Accelerator.reduce`. Ranks with the same part count once."""
        sharded = self._sharded
        if sharded is None:
            return super().reduce(tensor, reduction, scale)
        whole = recursively_apply(_plain, tensor, error_on_other_type=True)
        if self.num_processes == 1:
            return whole
        made, shared = super().reduce(whole, reduction, scale), dist.get_world_size() // self.num_processes
        return recursively_apply(lambda x: x / shared, made) if reduction == "sum" and shared > 1 else made

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """See the same method of accelerate: all inputs if ranks share the batch."""
        if self._sharded is not None and self.num_processes == 1:
            yield inputs
            return
        with super().split_between_processes(inputs, apply_padding) as part:
            yield part

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """See :meth:`accelerate.Accelerator.clip_grad_norm_`."""
        given = [parameters] if is_torch_tensor(parameters) else list(parameters)
        sharded = self._sharded
        if sharded is None or {id(p) for p in given} != {id(p) for p in sharded.parameters()}:
            return super().clip_grad_norm_(given, max_norm, norm_type)
        self.unscale_gradients()
        return clip_grad_norm_(sharded, max_norm, norm_type)

    # --- checkpoints ---

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """See :meth:`accelerate.Accelerator.get_state_dict`: full tensors on the CPU of the main
        process, none on others, as with FSDP. Tied weights are one tensor. Collective."""
        if not isinstance(model, DistributedModule):
            return super().get_state_dict(model, unwrap)
        writes = self.is_local_main_process if self.project_configuration.save_on_each_node else self.is_main_process
        return full_state(model, writes)

    def save_model(self, model: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """See :meth:`accelerate.Accelerator.save_model`. Collective; on return the files are there for all ranks."""
        super().save_model(model, save_directory, *args, **kwargs)
        self.wait_for_everyone()

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """See :meth:`accelerate.Accelerator.save_state`: files of the unsharded model. Collective."""
        with self._full_states():
            location = super().save_state(output_dir, safe_serialization, **kwargs)
        self.wait_for_everyone()
        return location

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """See :meth:`accelerate.Accelerator.load_state`: each rank's shards, from any mesh."""
        if self._sharded is not None and kwargs:
            raise AutoshardError(f"load_state of a sharded module takes no {', '.join(kwargs)}")
        with self._full_states():
            super().load_state(input_dir, load_kwargs, **kwargs)

    @contextlib.contextmanager
    def _full_states(self) -> Iterator[None]:
        """Inside, accelerate reads and writes states of full tensors."""
        if self._sharded is None:
            yield
            return
        before = self._optimizers
        self._optimizers = [FullOptimizer(x.optimizer, self._models) for x in before]
        hook = self.register_load_state_pre_hook(_load_models)
        try:
            yield
        finally:
            hook.remove()
            self._optimizers = before


def _load_models(models: list[nn.Module], folder: str) -> None:
    """Load all ``models`` from accelerate's files, and leave none to accelerate."""
    for number, model in enumerate(models):
        safe, plain = (
            Path(folder, name.replace(".", f"_{number}.") if number else name)
            for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME)
        )
        if not safe.exists():
            model.load_state_dict(torch.load(plain, map_location="cpu", weights_only=True))
        elif isinstance(model, DistributedModule):
            load_safetensors(model, safe)
        else:
            load_model(model, safe)
    models.clear()


def _first_ranks(sharded: DistributedModule) -> list[int]:
    """Of each part of the batch the first rank that has it, in order."""
    found: dict[int, int] = {}
    for number, rank in enumerate(sharded.device_mesh.mesh.flatten().tolist()):
        found.setdefault(batch_part(sharded, number)[0], rank)
    return [found[part] for part in sorted(found)]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

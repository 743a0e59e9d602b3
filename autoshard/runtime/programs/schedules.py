"""Schedules of torch.distributed.pipelining; the import loads TorchDynamo: only with stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import pipelining

_SCHEDULE_CLASSES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


def pipeline_schedule(name: str, stages: Sequence[Stage], count: int, ranks: int, *, training: bool) -> Any:
    """The schedule of ``count`` micro-batches on this rank's ``stages``."""
    kind: Any = _SCHEDULE_CLASSES[name]
    if not training or (name == "1f1b" and count < ranks):
        kind = _SCHEDULE_CLASSES["gpipe"]  # with fewer micro-batches than ranks 1F1B is the same
    if len(stages) > 1 and not training:
        kind = _SCHEDULE_CLASSES["interleaved"]
    multiple = kind not in (_SCHEDULE_CLASSES["gpipe"], _SCHEDULE_CLASSES["1f1b"])
    return kind(
        [*stages] if multiple else stages[0], count, loss_fn=_output_as_loss if training else None, scale_grads=False
    )


class Stage(pipelining.PipelineStage):
    """A stage that reports errors to ``fail``, while the schedule goes on and sends zeros."""

    def __init__(self, fail: Callable[[Exception], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fail = fail
        self.received: Sequence[Tensor] = kwargs["input_args"]

    def _create_grad_send_info(self, args_recv_info: tuple[Any, ...]) -> list[int | None]:
        """Per received tensor the stage of its gradient, or None (torch < 2.13 expects all)."""
        found = super()._create_grad_send_info(args_recv_info)
        return [to if x.requires_grad else None for to, x in zip(found, self.received, strict=True)]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """See :class:`torch.distributed.pipelining.PipelineStage`."""
        try:
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        except Exception as error:
            self.fail(error)
            self.bwd_cache[bwd_chunk_id] = (None,) * len(self.received)
        # Torch < 2.13 refuses to send no gradient; later versions send zeros.
        if self.has_backward and not self.is_first:
            pairs = zip(self.bwd_cache[bwd_chunk_id], self.received, strict=True)
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(x, device=self.device) if grad is None and x.requires_grad else grad
                for grad, x in pairs
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """See :class:`torch.distributed.pipelining.PipelineStage`."""
        try:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        except Exception as error:
            self.fail(error)


def _output_as_loss(output: Tensor, target: Tensor) -> Tensor:
    return output

"""Micro-batches (gradient accumulation) as a mesh axis in time: their graph and number."""

from autoshard.passes.microbatch.micro_batch import (
    AUTO,
    MicroBatches,
    check_lengths,
    micro_batch_counts,
    micro_batched,
    one_micro_batch,
    parse_micro_batches,
)

__all__ = [
    "AUTO",
    "MicroBatches",
    "check_lengths",
    "micro_batch_counts",
    "micro_batched",
    "one_micro_batch",
    "parse_micro_batches",
]

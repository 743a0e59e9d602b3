"""Micro-batches (gradient accumulation) as a mesh axis in time: their graph and number."""

from autoshard.passes.microbatch.body import MicroBatches, check_lengths, micro_batched
from autoshard.passes.microbatch.count import AUTO, count_of, in_parts

__all__ = ["AUTO", "MicroBatches", "check_lengths", "count_of", "in_parts", "micro_batched"]

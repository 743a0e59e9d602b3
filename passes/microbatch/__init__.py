"""Micro-batches: a mesh axis in time. The graph of one of them, and what the whole step makes of all."""

from autoshard.passes.microbatch.body import MicroBatches, check_lengths, micro_batched
from autoshard.passes.microbatch.count import AUTO, count_of, in_parts

__all__ = ["AUTO", "MicroBatches", "check_lengths", "count_of", "in_parts", "micro_batched"]

"""Micro-batches (gradient accumulation) as a mesh axis in time: their graph and number."""

from autoshard.passes.microbatch.count import AUTO, choose_micro_batches, parse_micro_batches
from autoshard.passes.microbatch.micro_batch import MicroBatches, check_lengths, micro_batched

__all__ = ["AUTO", "MicroBatches", "check_lengths", "choose_micro_batches", "micro_batched", "parse_micro_batches"]

"""Micro-batches: a mesh axis in time. The graph of one of them, and what the whole step makes of all."""

from autoshard.passes.microbatch.body import MicroBatches, micro_batched

__all__ = ["MicroBatches", "micro_batched"]

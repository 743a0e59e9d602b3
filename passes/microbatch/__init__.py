"""Micro-batches: a mesh axis in time. The graph of one of them, and what the whole step makes of all."""

from autoshard.passes.microbatch.body import MicroBatches, micro_batched
from autoshard.passes.microbatch.count import cheapest_in_parts, in_parts

__all__ = ["MicroBatches", "cheapest_in_parts", "in_parts", "micro_batched"]

"""From an ``nn.Module`` and example inputs to the graph: one call is traced, and watched while it is."""

from autoshard.passes.capture.export import capture

__all__ = ["capture"]

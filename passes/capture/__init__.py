"""Capture: one call of an ``nn.Module`` with example inputs is exported as a graph."""

from autoshard.passes.capture.export import capture

__all__ = ["capture"]

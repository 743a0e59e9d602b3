"""From chosen layouts to a program on local tensors."""

from autoshard.passes.lower.lowering import lower, narrowed
from autoshard.passes.lower.together import together

__all__ = ["lower", "narrowed", "together"]

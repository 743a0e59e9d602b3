"""Plans that experts write: what a name such as ``"fsdp"`` asks of every operation and parameter of a graph."""

from autoshard.passes.propagate.experts.experts import NAMES, Expert, asked_by, like_of

__all__ = ["NAMES", "Expert", "asked_by", "like_of"]

"""Named strategies: requests of a name (``"fsdp"``) to operations and parameters of a graph."""

from autoshard.passes.propagate.experts.beside import beside
from autoshard.passes.propagate.experts.experts import NAMES, AskedTooMuchError, Expert, asked_by, like_of, met
from autoshard.passes.propagate.experts.usual import usual

__all__ = ["NAMES", "AskedTooMuchError", "Expert", "asked_by", "beside", "like_of", "met", "usual"]

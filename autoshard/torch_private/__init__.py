"""Private names of torch: nowhere else does the library name one, except where it replaces one.
There is a file per subject, and each names its private paths once. Names lose their underscore here. A file imports them inside
:data:`by_name`: a name that this torch lacks is then refused by its name. Names that only some supported versions have
stand in :data:`SINCE`, and their files choose."""

from __future__ import annotations

import re
from types import TracebackType

from autoshard.errors import AutoshardError

SINCE = {
    "torch._subclasses.meta_utils._clone_real_storage_from_tensor": (2, 14),
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl": (2, 14),
}
"""name that a supported torch lacks → first version that has it"""

_MISSING = re.compile(r"(?:cannot import name|has no attribute) '(\w+)'")


class _ByName:
    """Turns a failed import of a private name into an error that says which."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, ImportError | AttributeError):
            return
        from torch import __version__

        owner = (
            error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", type(error.obj).__name__)
        )
        found = _MISSING.search(str(error))
        name = f"{owner}.{found[1]}" if found else owner
        raise AutoshardError(
            f"torch {__version__} has no {name} ({error}). autoshard needs it and supports torch "
            "2.11 to 2.15. Install one of these; docs/compatibility.md lists what ran on each."
        ) from error


by_name = _ByName()
"""context in which private names are imported"""

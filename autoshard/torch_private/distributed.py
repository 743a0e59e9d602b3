"""What is loaded when it is called: the store of processes."""

from __future__ import annotations

from typing import Any

from autoshard.torch_private import by_name


def default_store() -> Any:
    """The store by which the default process group came up."""
    with by_name:
        from torch.distributed.distributed_c10d import _get_default_store
    return _get_default_store()

"""ATen ops by name; an op that this torch lacks is a placeholder, which equals no op."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import __version__ as torch_version

from autoshard.errors import AutoshardError


class MissingOp:
    """Placeholder of an op that this version of torch lacks; a call raises with its name."""

    def __init__(self, name: str) -> None:
        self.name, self._opname = name, name.split(".")[1]
        operands = tuple(SimpleNamespace(name=f"x{i}", type="Tensor", default_value=None) for i in range(9))
        self._schema = SimpleNamespace(name=name.replace(".", "::", 1), arguments=operands, returns=())
        self.tags: tuple[torch.Tag, ...] = ()

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise AutoshardError(f"torch {torch_version} has no op {self.name}: see docs/compatibility.md")


class _Packet:
    """Overloads of one op, with placeholders for missing ones; a call goes to torch's packet."""

    def __init__(self, name: str) -> None:
        self._packet = getattr(torch.ops.aten, name, None) or MissingOp(f"aten.{name}")

    def __getattr__(self, overload: str) -> Any:
        found = getattr(self._packet, overload, None) or MissingOp(f"{self._packet}.{overload}")
        setattr(self, overload, found)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._packet(*args, **kwargs)

    def overloads(self) -> list[str]:
        return [] if isinstance(self._packet, MissingOp) else list(self._packet.overloads())


class _Aten:
    def __getattr__(self, name: str) -> Any:
        found = _Packet(name)
        setattr(self, name, found)
        return found


aten: Any = _Aten()
"""``torch.ops.aten`` with placeholders for missing ops"""


def result_list(result: Any) -> list[Any]:
    """The results of an op, of one or of several."""
    return list(result) if isinstance(result, tuple | list) else [result]

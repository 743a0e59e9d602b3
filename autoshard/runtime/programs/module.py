"""Base classes of generated code: a module tree whose tensors are bound by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.parameters.block import Prefetcher, regather
from autoshard.runtime.parameters.offload import offloading, offloading_class
from autoshard.runtime.parameters.recompute import dropping_recomputable


class ModuleTree(nn.Module):
    """A node of the module tree. Names that are no identifiers are items: ``self.layers[0]``;
    ``self.layers[2:5]`` is a list of numbered children, over which a scope can be iterated."""

    def __getitem__(self, name: int | str | slice) -> Any:
        if isinstance(name, slice):
            return [self[number] for number in range(name.start or 0, name.stop)]
        return self._modules[str(name)] if str(name) in self._modules else self._parameters[str(name)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[: len(self._modules)])

    def place(self, path: str, child: nn.Module) -> None:
        """Put ``child`` at dotted ``path``, and create scopes on the way."""
        *parents, last = path.split(".")
        _attach_child(self.scope(".".join(parents)), last, child)

    def scope(self, path: str) -> nn.Module:
        """The scope at dotted ``path`` ("" is this one), created if needed."""
        scope: nn.Module = self
        for part in path.split(".") if path else ():
            if part not in scope._modules:
                _attach_child(scope, part, ModuleTree())
            scope = scope._modules[part]  # type: ignore[assignment]
        return scope


def _attach_child(scope: nn.Module, name: str, child: nn.Module) -> None:
    """Attach ``child``; also as a plain attribute (found faster) unless the name is taken."""
    scope._modules[name] = child
    if name not in scope.__dict__ and not hasattr(type(scope), name):
        scope.__dict__[name] = child


class Block(ModuleTree):
    """A module of the original model. ``TENSORS``: name → local/global shape and layout."""

    TENSORS: ClassVar[Mapping[str, str]] = {}

    block_path = ""
    """path in the model; "" for the root"""

    def __init__(self) -> None:
        super().__init__()
        for name in self.TENSORS:
            path, _, leaf = name.rpartition(".")
            self.scope(path)._parameters[leaf] = None


class RankModule(Block):
    """The program of one rank. ``BLOCKS``: path → class of blocks with a forward of their own."""

    MESH: ClassVar[Mapping[str, int]] = {}
    BLOCKS: ClassVar[Mapping[str, type[Block]]] = {}
    RECOMPUTES: ClassVar[bool] = False
    """whether parts are recomputed in the backward"""
    GATHERS: ClassVar[bool] = False
    """whether gathered parameters are gathered again in the backward instead of saved"""
    OFFLOADS: ClassVar[tuple[str, ...]] = ()
    """blocks whose saved tensors are in host memory until the backward"""
    PREFETCH: ClassVar[int] = 0
    """number of parameter buckets gathered ahead, forward and backward"""

    _slots: Mapping[str, tuple[dict[str, Any], str]]
    _ahead: Prefetcher

    def __init__(self) -> None:
        super().__init__()
        for path, block in self.BLOCKS.items():
            kind: Any = block
            placed = (offloading_class(kind, path in self.OFFLOADS) if self.OFFLOADS else kind)()
            placed.__dict__["block_path"] = path
            self.place(path, placed)
        for name, own in (("_slots", dict(self._find_slots())), ("_ahead", Prefetcher(self.PREFETCH))):
            self.__dict__[name] = own  # a module or parameter may have the same name

    def _find_slots(self) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
        holders = [("", type(self)), *((f"{path}.", block) for path, block in self.BLOCKS.items())]
        for prefix, block in holders:
            for name in block.TENSORS:
                path, _, leaf = f"{prefix}{name}".rpartition(".")
                yield f"{prefix}{name}", (self.scope(path)._parameters, leaf)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward; call :meth:`bind_tensors` first."""
        if not (self.PREFETCH or self.GATHERS or self.RECOMPUTES or self.OFFLOADS):
            return super().__call__(*args, **kwargs)
        stays = (x for x in (*self.tensors(), *args, *kwargs.values()) if isinstance(x, Tensor))
        ahead = self._ahead.forward(self._bound()) if self.PREFETCH else contextlib.nullcontext()
        with (
            ahead,
            regather(self.PREFETCH)
            if self.GATHERS
            else dropping_recomputable()
            if self.RECOMPUTES or self.OFFLOADS
            else contextlib.nullcontext(),
            offloading(stays) if self.OFFLOADS else contextlib.nullcontext(),
        ):
            return super().__call__(*args, **kwargs)

    def tensors(self) -> list[Tensor]:
        return list(self._bound().values())

    def _bound(self) -> dict[str, Tensor]:
        found = ((name, held[leaf]) for name, (held, leaf) in self._slots.items())
        return {name: x for name, x in found if x is not None}

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Original names of all its parameters and buffers."""
        return tuple(self._slots)

    def bind_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these local tensors, by original name, from now on; they need not be leaves."""
        for name, (held, leaf) in self._slots.items():
            held[leaf] = tensors[name]

    def release_tensors(self) -> None:
        """Drop the bound tensors."""
        for held, leaf in self._slots.values():
            held[leaf] = None


def require(*conditions: bool) -> None:
    """Raise :class:`~autoshard.errors.RuntimeMismatchError` unless all conditions hold."""
    if not all(conditions):
        number = conditions.index(False) + 1
        raise RuntimeMismatchError(
            f"the program does not hold for inputs of these lengths: condition {number} of "
            "runtime.require in its forward fails. Compile for such inputs."
        )

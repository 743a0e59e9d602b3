"""Whether the model is being compiled or exported: no. Libraries have other programs for tracers, which round otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch

from autoshard.frames import is_ours
from autoshard.passes.capture.observer import Observer, Patch, replacing


class AsInEager(Observer):
    """While in place, code outside of torch that asks hears no. ``asked``: whether anyone did."""

    asked = False

    def patches(self) -> Iterable[Patch]:
        for name in ("is_compiling", "is_exporting", "is_dynamo_compiling"):
            yield replacing(torch.compiler, name, self._answer)

    def _answer(self, original: Callable[[], bool]) -> Callable[[], bool]:
        def no() -> bool:
            asker = sys._getframe(1)
            if asker.f_globals.get("__name__", "").partition(".")[0] == "torch":
                return original()
            self.asked = self.asked or not is_ours(asker.f_code.co_filename)
            return False

        return no

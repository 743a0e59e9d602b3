"""Torch's sympy functions and printer. They bring sympy, which generated code lacks."""

from __future__ import annotations

from autoshard.torch_private import by_name

with by_name:
    from torch.utils._sympy.functions import FloorDiv, PythonMod
    from torch.utils._sympy.printers import PythonPrinter

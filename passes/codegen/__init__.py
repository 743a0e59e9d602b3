"""From a program to one readable Python file."""

from autoshard.passes.codegen.emit import Source, codegen

__all__ = ["Source", "codegen"]

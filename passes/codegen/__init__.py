"""Code generation: a program becomes one readable Python file."""

from autoshard.passes.codegen.emit import Source, codegen, codegen_stages, root_class

__all__ = ["Source", "codegen", "codegen_stages", "root_class"]

"""Where an fx node comes from: module path, class names, and the user's source line."""

from __future__ import annotations

import os
import re

from torch import fx

_TORCH = (f"{os.sep}torch{os.sep}", f"{os.sep}fx{os.sep}passes{os.sep}")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def module_types(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """The module stack, outermost first: (path, class name)."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple((path, str(getattr(kind, "__name__", kind)).rpartition(".")[2]) for path, kind in stack.values())


def fqn(node: fx.Node) -> str:
    """The path of the innermost module, "" for the model itself."""
    stack = module_types(node)
    return stack[-1][0] if stack else ""


def source(node: fx.Node) -> str:
    """The innermost ``file:line`` outside torch, or ""."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    user = [f for f in frames if not any(part in f[0] for part in _TORCH) and not f[0].startswith("<")]
    return f"{os.path.basename(user[-1][0])}:{user[-1][1]}" if user else ""


def where(node: fx.Node) -> str:
    """Module path and source line, for errors."""
    line = source(node)
    return (fqn(node) or "the model") + (f" ({line})" if line else "")

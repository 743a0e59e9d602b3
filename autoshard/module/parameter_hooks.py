"""Hooks of parameters that get no gradient from autograd's engine, in a backward that serves all parameters in one node.

In eager no node leads to such a parameter, and its hooks are not called. Here the engine comes with nothing, to hooks before
and after the gradient is added. One that is a list of rows has been added by then, and its hooks were called.
"""

from __future__ import annotations

from typing import Any


class _Came:
    """A hook that knows whether there was a gradient, last."""

    known = False

    def __call__(self, gradient: Any) -> None:
        self.known = gradient is not None


class _Before:
    """A hook that is called with a gradient alone."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, gradient: Any) -> Any:
        return None if gradient is None else self.hook(gradient)


class _After:
    """A hook that is called where there was a gradient."""

    def __init__(self, hook: Any, came: _Came) -> None:
        self.hook, self.came = hook, came

    def __call__(self, p: Any) -> None:
        if self.came.known:
            self.hook(p)


def unheard(p: Any) -> None:
    """From now on no hook of ``p`` is called where the engine brings no gradient."""
    if after := p._post_accumulate_grad_hooks:
        came = next((h for h in (p._backward_hooks or {}).values() if isinstance(h, _Came)), None)
        if came is None:
            came = _Came()
            p.register_hook(came)
        after.update({n: _After(h, came) for n, h in after.items() if not isinstance(h, _After)})
    if before := p._backward_hooks:
        before.update({n: _Before(h) for n, h in before.items() if not isinstance(h, _Came | _Before)})

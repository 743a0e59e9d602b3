"""Hooks of parameters without gradient, where one autograd node serves all parameters.

In eager no node leads to such a parameter, and its hooks do not run. Here the engine passes None to
them. Hooks for sparse gradients have run by then.
"""

from __future__ import annotations

from typing import Any


class _Came:
    """A hook that records whether the last gradient was there."""

    known = False

    def __call__(self, gradient: Any) -> None:
        self.known = gradient is not None


class _Before:
    """A tensor hook that skips None."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, gradient: Any) -> Any:
        return None if gradient is None else self.hook(gradient)


class _After:
    """A post-accumulate hook that skips parameters without gradient."""

    def __init__(self, hook: Any, came: _Came) -> None:
        self.hook, self.came = hook, came

    def __call__(self, p: Any) -> None:
        if self.came.known:
            self.hook(p)


def unheard(p: Any) -> None:
    """Stop hooks of ``p`` from running where the engine brings no gradient."""
    if after := p._post_accumulate_grad_hooks:
        came = next((h for h in (p._backward_hooks or {}).values() if isinstance(h, _Came)), None)
        if came is None:
            came = _Came()
            p.register_hook(came)
        after.update({n: _After(h, came) for n, h in after.items() if not isinstance(h, _After)})
    if before := p._backward_hooks:
        before.update({n: _Before(h) for n, h in before.items() if not isinstance(h, _Came | _Before)})

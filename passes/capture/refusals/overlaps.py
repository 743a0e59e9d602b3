"""Writes into tensors with overlapping elements (``expand``, ``unfold``), which traces lose."""

from __future__ import annotations

import torch

from autoshard.passes.capture.observer import Call, Observer, Refusals


class Overlaps(Observer):
    """Refuses them. Eager allows fills, and only warns about writes by index or mask."""

    def __init__(self, refuse: Refusals) -> None:
        self.refuse = refuse

    def before(self, call: Call) -> None:
        if any(_overlaps(x) and _overlaps(_part(call, x)) for x in call.written):
            name = getattr(call.func, "__name__", call.func)
            raise self.refuse(
                f"the forward writes by {name}() into an expanded tensor, or one of windows (unfold), of which several "
                "elements lie in one place of memory. Write before it is expanded, or into a clone()."
            )


def _overlaps(x: torch.Tensor) -> bool:
    """Whether elements of ``x`` overlap in memory; symbolic lengths count only at stride 0."""
    if x.layout != torch.strided or x.is_nested:
        return False
    steps = [(s, n) for s, n in zip(x.stride(), x.shape, strict=True) if not (type(n) is int and n == 1)]
    if any(type(n) is int and n == 0 for n in x.shape):
        return False
    known = sorted((s, n) for s, n in steps if type(s) is int and type(n) is int)
    reached = 0
    for stride, length in known:
        if stride <= reached:
            return True
        reached += stride * (length - 1)
    return any(type(s) is int and s == 0 for s, _ in steps)


def _part(call: Call, x: torch.Tensor) -> torch.Tensor:
    """The part of ``x`` that ``call`` writes."""
    if call.func is not torch.Tensor.__setitem__:
        return x
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    basic = all(isinstance(i, int | slice | torch.SymInt | None) or i is ... for i in index)
    return x[call.args[1]] if basic else x

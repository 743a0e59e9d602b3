"""Parts of parameters and gradients that scripts write to: ``p.grad[pad] = 0``, ``weight.data[pad].zero_()``.

DTensor gives a copy where the dim that is indexed is cut, and what is written there is lost without a word. Here it
reaches the parts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor, distribute_tensor

from autoshard.module.dtensors.draws import first_ranks_generator
from autoshard.module.dtensors.strided import cuts

aten = torch.ops.aten

VIEWS = {
    aten.select.int: 1,
    aten.slice.Tensor: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.diagonal.default: None,
}
"""what indexing, ``split``, ``chunk`` and ``diagonal`` take → where its dim stands, 0 if not given; None: it has several"""

_WRITING = re.compile(r"\w*[^_]_|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__")
"""names of functions that write into their first argument"""
_DRAWS = re.compile(
    "normal|uniform|bernoulli|random|exponential|cauchy|geometric|dropout|orthogonal|sparse|rrelu|dirac"
)
"""in names of functions that may draw"""
_VIEWS = frozenset(
    "__getitem__ select narrow unbind chunk split tensor_split view view_as reshape transpose t permute movedim squeeze "
    "unsqueeze flatten unflatten expand diagonal detach".split()
)
"""names of functions whose results are views in eager torch"""


class Copied(DTensor):
    """What eager has as a view of a parameter or gradient, and is a copy here: what is written goes to the source, too."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = in_order(args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if writes(func) and set_through(func, args, kwargs):
                return args[0]
            made = func(*args, **kwargs)
        return seen_from(args[0], made, func, args[1:]) if is_view(func) else made


def in_order(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a call with the first one by place: ``torch.nn.init`` gives all by name."""
    if args or "tensor" not in kwargs:
        return args, kwargs
    return (kwargs["tensor"],), {name: x for name, x in kwargs.items() if name != "tensor"}


def seen_from(x: DTensor, made: Any, view: Any, rest: Sequence[Any]) -> Any:
    """``made``, by ``view`` of ``x``, noted as copies of what ``x`` is a copy of: of itself, if of nothing else."""
    source, steps = x.__dict__.get("_of", (x, ()))
    for i, each in enumerate(made if isinstance(made, list | tuple) else (made,)):
        if type(each) is DTensor:
            each.__class__ = Copied
        each.__dict__["_of"] = source, (*steps, (view, rest, i))
    return made


def is_view(func: Any) -> bool:
    """Whether what ``func`` gives is a view of its first argument in eager."""
    return getattr(func, "__name__", "") in _VIEWS or func == torch.Tensor.data.__get__  # type: ignore[attr-defined]


def writes(func: Any) -> bool:
    """Whether ``func`` writes into its first argument."""
    return _is_writing(getattr(func, "__name__", ""))


@functools.lru_cache(maxsize=1 << 10)
def _is_writing(name: str) -> bool:
    return bool(_WRITING.fullmatch(name))


def indexed(x: Any, made: Any, op: Any, rest: tuple[Any, ...]) -> Any:
    """``made``, by one of :data:`VIEWS`, of ``x``: noted where it is a copy of a parameter or gradient."""
    at = VIEWS[op]
    dims = range(x.ndim) if at is None else (rest[at - 1] % max(x.ndim, 1) if len(rest) >= at else 0,)
    cut = any(cuts(p, dim) for p in x.placements for dim in dims)
    copied = type(x) is Copied or (type(x) is DTensor and cut and x.grad_fn is None)
    return seen_from(x, made, op, rest) if copied else made


def set_through(write: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``write`` is into what :func:`seen_from` noted; then it was done to what that is a copy of, and to the copy."""
    copied = args[0] if args else None
    if not isinstance(copied, DTensor) or "_of" not in copied.__dict__:
        return False
    view = set_whole(write, args, kwargs, *copied.__dict__["_of"])
    copied.to_local().copy_(_part(view, copied).to_local())
    return True


def set_whole(
    write: Any, args: Sequence[Any], kwargs: Mapping[str, Any], source: DTensor, steps: Sequence[Any] = ()
) -> torch.Tensor:
    """Do ``write`` to a view, by ``steps``, of the whole of ``source``, of which every rank takes its part; the view."""
    with torch.no_grad():
        own, named = pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), (tuple(args[1:]), dict(kwargs)))
        view = whole = source.full_tensor().clone()
        for step, rest, i in steps:
            made = step(view, *rest)
            view = made[i] if isinstance(made, list | tuple) else made
        with first_ranks_generator(source, named.get("generator")) if _DRAWS.search(write.__name__) else nullcontext():
            write(view, *own, **named)
        source.copy_(_part(whole, source))
    return view


def alongside(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor whose part on this rank is ``local``, and which lies as ``like`` does; gradients flow."""
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def _part(whole: torch.Tensor, like: DTensor) -> DTensor:
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)

"""Observers that refuse calls which a trace loses or answers wrongly.

Tensors read from outside the model's attributes, questions about a tensor's identity or history
(``grad_fn``, ``data_ptr()``), side effects on autograd (hooks, ``backward()``, ``.data``), and
default dtypes set in the forward.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autoshard.errors import SharedStateError
from autoshard.frames import frames_outwards, is_autoshard_file, is_torch_frame, is_users_file
from autoshard.passes.capture.exported.tensor_attributes import MOVED_MARK
from autoshard.passes.capture.observer import ObservedCall, Observer, ObserverAnswer, Patch, RefusalLog, TracedForward
from autoshard.passes.capture.refusals.errors import IN_TRANSFORM_MESSAGE
from autoshard.torch_private.autograd import is_functorch_wrapped_tensor
from autoshard.torch_private.dispatch import without_dispatch_modes
from autoshard.torch_private.fake import FakeTensor

_outside_reads: ContextVar[dict[int, tuple[Tensor, int]]] = ContextVar("read")


@contextlib.contextmanager
def recording_outside_reads() -> Iterator[Mapping[int, tuple[Tensor, int]]]:
    """Yields id → (tensor with data that a trace inside has read, its version counter)."""
    found: dict[int, tuple[Tensor, int]] = {}
    token = _outside_reads.set(found)
    try:
        yield found
    finally:
        _outside_reads.reset(token)


class OutsideTensors(Observer):
    """Records outside tensors. With ``training``, refuses those that would get a gradient."""

    def __init__(self, training: bool, refuse: RefusalLog) -> None:
        self.training, self.refuse = training, refuse
        self.own: dict[int, Tensor] = {}

    def begin(self, forward: TracedForward) -> None:
        self.own = {i: x for i, x in forward.own.items() if id(x) != i}

    def before(self, call: ObservedCall) -> ObservedCall | None:
        """The call with the model's own tensors replaced by traced ones."""
        if self.own.keys().isdisjoint(map(id, call.operands)):
            return None
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: self.own.get(id(x), x), (call.args, call.kwargs))
        return replace(call, args=args, kwargs=kwargs)

    def after(self, call: ObservedCall, result: Any) -> Any:
        """Refuse a result that propagates a gradient to an outside tensor."""
        outside = [
            x for x in call.operands if (type(x) in (Tensor, nn.Parameter) and not x.is_meta and not x.is_inference())
        ]
        read = _outside_reads.get()
        for x in outside:
            read.setdefault(id(x), (x, x._version))
            if x.requires_grad and hasattr(x, MOVED_MARK):
                raise self.refuse(
                    f"the forward reads {_label(x)} {list(x.shape)}, a parameter of a model that "
                    "was compiled, so it would not see what the sharded module trains. Read the "
                    "sharded module's parameter, or a clone of it.",
                    SharedStateError,
                )
        trained = next((x for x in outside if x.requires_grad), None)
        if not self.training or trained is None:
            return result
        if any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(result)):
            if is_functorch_wrapped_tensor(trained):
                raise self.refuse(IN_TRANSFORM_MESSAGE)
            raise self.refuse(
                f"the forward reads {_label(trained)} {list(trained.shape)}, which requires a "
                "gradient but is not a parameter of the model, so it would get no gradient. Make it "
                "an nn.Parameter of the model, add its module to the model, or read its .detach().",
                SharedStateError,
            )
        return result


def _label(x: Tensor) -> str:
    """Description of ``x`` by its name in the running user code, for errors."""
    for f in frames_outwards():
        if is_autoshard_file(f.f_code.co_filename):
            continue
        for own in [value for value in list(f.f_locals.values()) if isinstance(value, nn.Module)]:
            if name := next((n for n, p in (*own._parameters.items(), *vars(own).items()) if p is x), ""):
                return f"{name!r} of a {type(own).__name__}"
        if name := next((n for n in f.f_code.co_freevars if f.f_locals.get(n) is x), ""):
            return f"{name!r} of an enclosing function"
        if name := next((n for n, value in list(f.f_globals.items()) if value is x), ""):
            return f"the global {name!r}"
    return "a tensor"


_QUERIES_ON_INPUTS = {getattr(Tensor, name).__get__: name for name in ("is_leaf", "grad_fn")}
_QUERIES_ON_TENSORS = {
    **{getattr(Tensor, name).__get__: name for name in ("_version", "_cdata")},
    **{getattr(Tensor, name): f"{name}()" for name in ("data_ptr", "is_inference", "is_set_to")},
    torch.is_inference: "is_inference()",
}
_REQUIRES_GRAD_GETTER = getattr(Tensor, "requires_grad").__get__  # noqa: B009


class TensorIdentityQueries(Observer):
    """Refuses identity queries; ``requires_grad`` of an input is the caller's."""

    def __init__(self, refuse: RefusalLog) -> None:
        self.refuse = refuse
        self.trained: dict[int, bool] = {}
        """id of an input → whether the caller's requires a gradient"""

    def begin(self, forward: TracedForward) -> None:
        self.trained = {id(x): trained for x, trained in zip(forward.inputs, forward.trained, strict=True)}

    def before(self, call: ObservedCall) -> ObserverAnswer | None:
        func: Any = call.func
        frame = call.frame
        if frame is None or not call.args or is_torch_frame(frame) or is_autoshard_file(frame.f_code.co_filename):
            return None
        trained = self.trained.get(id(call.args[0]))
        if func == _REQUIRES_GRAD_GETTER and trained is not None and trained != call.args[0].requires_grad:
            return ObserverAnswer(trained, "the input requires a gradient if the caller's does")
        asked = _QUERIES_ON_TENSORS.get(func) or (_QUERIES_ON_INPUTS.get(func) if trained else None)
        if asked is not None:
            raise self.refuse(
                f"the forward asks {asked} of a tensor. The answer depends on the tensor's history or memory, and "
                "would be a constant of the program. Ask outside the forward, and pass the answer as an argument."
            )
        return None


_DATA_GET, _DATA_SET = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
_TENSOR_SET = Tensor.set_
_REQUIRES_GRAD_SETTERS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_AUTOGRAD_ADVICE = "Do it on the compiled module's outputs or gradients, or remove it."
_LOST_AUTOGRAD_CALLS: dict[Any, str] = {
    Tensor.register_hook: "a tensor hook (register_hook)",
    Tensor.register_post_accumulate_grad_hook: "a tensor hook (register_post_accumulate_grad_hook)",
    Tensor.retain_grad: "retain_grad()",
    Tensor.backward: "backward()",
    torch.autograd.backward: "torch.autograd.backward()",
    torch.autograd.grad: "torch.autograd.grad()",
}


class AutogradSideEffects(Observer):
    """Refuses them if ``training``; assignments to ``.data`` and ``set_()`` always."""

    def __init__(self, training: bool, refuse: RefusalLog) -> None:
        self.training, self.refuse = training, refuse
        self.inputs: list[Any] = []
        self.held: list[Tensor] = []

    def patches(self) -> Iterable[Patch]:
        yield Tensor, "set_", lambda x, *sources, **named: self._set(x, *sources, **named)
        if self.training:
            yield torch.autograd.graph.saved_tensors_hooks, "__enter__", lambda hooks: self._saved_tensors(hooks)

    def begin(self, forward: TracedForward) -> None:
        self.inputs = forward.inputs
        self.held = [*forward.parameters, *(buffer for buffer, _ in forward.buffers)]

    def before(self, call: ObservedCall) -> ObserverAnswer | None:
        func, args = call.func, call.args
        if func == _DATA_GET:
            return ObserverAnswer(args[0].detach(), ".data gives a detached alias that export does not track")
        if func == _DATA_SET:
            raise self.refuse("the forward assigns to .data of a tensor. Compute a new tensor instead.")
        if self.training and (name := _LOST_AUTOGRAD_CALLS.get(func)) is not None:
            raise self.refuse(f"{name} is called in the forward, and the compiled module loses it. {_AUTOGRAD_ADVICE}")
        wanted = self.training and func in _REQUIRES_GRAD_SETTERS and (*args[1:], *call.kwargs.values(), True)[0]
        switched = self.training and func in _REQUIRES_GRAD_SETTERS and wanted != args[0].requires_grad
        if switched and any(args[0] is x for x in self.held):
            raise self.refuse(
                "the forward switches requires_grad of a parameter, but a program has it as it was when the forward "
                "began. Switch it outside of the forward, or read the parameter's .detach()."
            )
        # intermediate gradients are invisible; those of outputs are compared after the trace
        if switched and wanted and any(args[0] is x for x in self.inputs):
            raise self.refuse(
                "the forward turns requires_grad on for its input, but the compiled module would "
                "not return that gradient. Pass the input with requires_grad=True."
            )
        return None

    def _set(self, x: Tensor, *sources: Any, **named: Any) -> Tensor:
        """``set_()``, which bypasses function modes: only on a traced tensor, from one tensor."""
        users = is_users_file(sys._getframe(2).f_code.co_filename)  # export itself calls set_()
        known = any(x is other for other in (*self.inputs, *self.held)) or not isinstance(x, FakeTensor)
        given = (*sources, *named.values())
        if users and (known or len(given) != 1 or not isinstance(given[0], Tensor)):
            raise self.refuse(
                "the forward calls set_() with a storage, or on an input or a tensor of the model, but a program "
                "does not replace their memory. Assign the new tensor (self.x = new), or write by copy_()."
            )
        return _TENSOR_SET(x, *sources, **named)

    def _saved_tensors(self, hooks: Any) -> None:
        raise self.refuse("the forward uses saved-tensor hooks, and the compiled module would lose them. Remove them.")


class DefaultDtypeChanges(Observer):
    """Adds ``dtype=`` to factory calls; refuses calls that make floats of integers."""

    def __init__(self, refusals: RefusalLog) -> None:
        self.refusals, self.outside = refusals, torch.get_default_dtype()

    def before(self, call: ObservedCall) -> ObservedCall | None:
        """The call with an explicit dtype."""
        if torch.get_default_dtype() is self.outside or call.operands or call.kwargs.get("dtype") is not None:
            return None
        with contextlib.suppress(TypeError), without_dispatch_modes():
            made = call.func(*call.args, **{**call.kwargs, "device": "meta"})
            if isinstance(made, Tensor):
                return replace(call, kwargs={**call.kwargs, "dtype": made.dtype})
        return None

    def after(self, call: ObservedCall, result: Any) -> Any:
        """Refuse a float result of integer operands."""
        if torch.get_default_dtype() is self.outside or not call.operands:
            return result
        floats = any(x.dtype.is_floating_point or x.dtype.is_complex for x in call.operands)
        made = (x.dtype for x in pytree.tree_leaves(result) if isinstance(x, Tensor))
        if not floats and torch.get_default_dtype() in made and call.kwargs.get("dtype") is None:
            raise self.refusals(
                f"the forward calls {getattr(call.func, '__name__', call.func)} on integers "
                f"under a default dtype that it sets itself ({torch.get_default_dtype()}), and "
                "its program would not know that dtype. Convert them: x.to(dtype)."
            )
        return result

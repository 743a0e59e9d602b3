"""What tracing would lose without a word: found before, during and after the trace, and refused.

Export runs the forward once on tensors without data. A custom backward, a hook, a checkpoint or a draw from
Python's random generator leaves no trace in the graph, so each is looked for here.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from autoshard import frames
from autoshard.errors import CaptureError
from autoshard.passes.capture.answers import steering
from autoshard.passes.capture.answers.conditions import FAILS, Conditions, truth_of_number
from autoshard.passes.capture.answers.known import Known
from autoshard.passes.capture.answers.loops import LOOP, Learnt, Loops
from autoshard.passes.capture.caches import caches_stay_clean
from autoshard.passes.capture.refusals import draws
from autoshard.passes.capture.substitutes import autocast, scripted
from autoshard.passes.capture.substitutes.custom_functions import as_op, inline, is_derivative
from autoshard.passes.capture.substitutes.mistraced import MISTRACED, PATCHES
from autoshard.passes.capture.substitutes.packed import PackedSequences
from autoshard.passes.capture.substitutes.unchecked import UNCHECKED
from autoshard.passes.capture.translate.regions import NO_GRAD
from autoshard.passes.rules.facts import is_random

log = logging.getLogger("autoshard")


class Watch(TorchFunctionMode):
    """Active around the traced forward: refuses calls that tracing would lose. ``refusal`` is the first of them."""

    def __init__(self, training: bool, learnt: Learnt, steered: bool = False) -> None:
        super().__init__()
        self.training = training
        self.refusal: CaptureError | None = None
        self.loops = Loops(learnt)
        self.conditions = Conditions()
        self.known = Known(steered)
        self.packed = PackedSequences()
        self.inputs: list[Any] = []

    def refuse(self, message: str) -> CaptureError:
        self.refusal = self.refusal or CaptureError(message)
        return self.refusal

    def turn_on(self, tensor: torch.Tensor) -> None:
        """requires_grad_ on an intermediate tensor: nobody sees its gradient, and :mod:`export` compares outputs."""
        if any(tensor is x for x in self.inputs):
            raise self.refuse(
                "the forward turns requires_grad on for its input, whose gradient the compiled module would not give. "
                "Pass it with requires_grad=True."
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.packed.concerns(func, args, kwargs):
            with self:
                return self.packed.call(func, args, kwargs)
        if func == _DATA_GET:  # what .data reads is a detached alias; export loses track of it
            return args[0].detach()
        if func == _DATA_SET:
            raise self.refuse("the forward assigns to .data of a tensor. Compute a new tensor instead.")
        if self.training:
            name = _LOST.get(func)
            if name is not None:
                raise self.refuse(f"{name} is called in the forward; the compiled module would lose it. {_ADVICE}")
            if func in _REQUIRES and not args[0].requires_grad and (*args[1:], *kwargs.values(), True)[0]:
                self.turn_on(args[0])
        if torch.compiler.is_dynamo_compiling():  # the body of a higher-order op
            return func(*args, **kwargs)
        if (value := self.known.read(func, args)) is not ...:
            return value
        if func == torch.Tensor.__bool__ and not self.loops.running:  # in a loop, a check would hold for all places
            known = self.conditions.truth(args[0], sys._getframe(1))
            if known is not None:
                return known
        if func in (torch.equal, torch.Tensor.equal):
            with self:
                return _equal(*args, **kwargs)
        if func in (F.pad, torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            sizes = func == F.pad
            args, kwargs = (args[0], *self.known.plain(args[1:], sizes)), self.known.plain(kwargs, sizes)
        func = _REWRITTEN.get(func, func)
        result = self.loops.call(func, args, kwargs)
        if self.known.steered:
            result = steering.sized(result)
        self.conditions.follow(func, args, result)
        self.known.follow(func, args, kwargs, result)
        return result


def _equal(input: torch.Tensor, other: torch.Tensor) -> bool:  # noqa: A002
    return input.shape == other.shape and bool((input == other).all())


_REWRITTEN = UNCHECKED | MISTRACED
_DATA_GET, _DATA_SET = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_REQUIRES = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_ADVICE = "Do it on the compiled module's outputs or gradients, or remove it."
_LOST: dict[Any, str] = {
    torch.Tensor.register_hook: "a tensor hook (register_hook)",
    torch.Tensor.register_post_accumulate_grad_hook: "a tensor hook (register_post_accumulate_grad_hook)",
    torch.Tensor.retain_grad: "retain_grad()",
    torch.Tensor.backward: "backward()",
    torch.autograd.backward: "torch.autograd.backward()",
    torch.autograd.grad: "torch.autograd.grad()",
}


@contextlib.contextmanager
def watching(training: bool, learnt: Learnt, steered: bool = False) -> Iterator[Watch]:
    """While inside, calls that the trace would lose raise :class:`CaptureError`.

    Afterwards raises if one was swallowed, or if a generator advanced: its draws would be constants of the graph.
    """
    watch = Watch(training, learnt, steered)
    states = draws.states()
    with contextlib.ExitStack() as stack:
        stack.callback(draws.restore, states)
        stack.enter_context(caches_stay_clean())
        if steered:
            stack.enter_context(steering.values_at_hand())
        if training:
            for function in _subclasses(torch.autograd.Function):
                if _is_foreign(function):
                    refuse = _refuse_function(watch, function)
                    stack.enter_context(_patched(function, "apply", staticmethod(_inlined(function, refuse))))
                    stack.enter_context(_patched(function, "forward", staticmethod(refuse)))
        hooks = torch.autograd.graph.saved_tensors_hooks
        if training:
            stack.enter_context(_patched(hooks, "__enter__", _refuse_saved_tensors(watch)))
        stack.enter_context(_patched(torch.fx.Graph, "create_node", _mark(torch.fx.Graph.create_node, watch)))
        stack.enter_context(_patched(nn.Module, "_apply", _apply_per_call))
        for patch in (autocast.PATCH, *PATCHES, *draws.patches(watch.refuse)):
            stack.enter_context(_patched(*patch))
        stack.enter_context(_patched(torch.jit.ScriptFunction, "__call__", scripted.call))
        stack.enter_context(_patched(torch.SymBool, "__bool__", _truth(torch.SymBool.__bool__, watch)))
        stack.enter_context(_patched(FakeTensor, "tolist", watch.loops.tolist(FakeTensor.tolist)))
        stack.enter_context(_patched(torch, "_check_tensor_all_with", _check_all))
        stack.enter_context(_patched(torch.inference_mode, "__enter__", _enter_no_grad))
        stack.enter_context(_patched(torch.inference_mode, "__exit__", _exit_no_grad))
        yield watch
        if watch.refusal is not None:
            raise watch.refusal
        for name, before, now in zip(("Python's random", "numpy's", "torch's"), states, draws.states(), strict=True):
            if before != now:
                raise CaptureError(draws.message(name))


def _truth(original: Callable[[torch.SymBool], bool], watch: Watch) -> Callable[[torch.SymBool], bool]:
    def truth(self: torch.SymBool) -> bool:
        try:
            return original(self)
        except GuardOnDataDependentSymNode:
            known = None if watch.loops.running else truth_of_number(self, sys._getframe(1))
            if known is None:
                raise
            return known

    return truth


def _check_all(kind: type, condition: torch.Tensor, message: Callable[[], str] | None = None) -> None:
    torch._assert_async(condition.all(), str(message() if message else FAILS))


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _subclasses(cls: type) -> Iterator[type]:
    sub: type
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _is_foreign(function: type) -> bool:
    """Whether a forward may call it. torch's own are behind ops, which are kept whole, but for a few."""
    module = function.__module__
    return not module.startswith("torch.") or module.startswith(("torch.nn.", "torch.utils.", "torch.distributed."))


def _is_a_librarys(function: type) -> bool:
    """Whether ``function`` comes with an installed package other than torch."""
    file = getattr(sys.modules.get(function.__module__), "__file__", None) or ""
    return frames.is_installed(file) and not function.__module__.startswith("torch.")


def _inlined(function: Any, refuse: Callable[..., Any]) -> Callable[..., Any]:
    """``function.apply`` of a library as its forward's own ops where their derivative is its backward, else as one op.

    A user's is refused: a trial on random numbers is evidence, not proof, and he can rewrite it.
    """
    forward = function.forward

    def apply(*args: Any) -> Any:
        if not _is_a_librarys(function):
            return refuse(*args)
        if is_derivative(function, forward, args):
            return inline(function, forward, args)
        result = as_op(function, forward, args)
        return refuse(*args) if result is None else result

    return apply


def _refuse_function(watch: Watch, function: type) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if function.__module__ == "torch.utils.checkpoint":
            raise watch.refuse(CHECKPOINT)
        raise watch.refuse(
            f"custom autograd.Function {function.__qualname__!r} ({function.__module__}): tracing keeps its forward "
            "and drops its backward, so gradients would be wrong. Write it with differentiable torch ops, or make it "
            "an op with torch.library.custom_op and register_autograd."
        )

    return forward


CHECKPOINT = (
    "activation checkpointing (torch.utils.checkpoint) is erased by tracing. Turn it off "
    "(Hugging Face: model.gradient_checkpointing_disable())."
)


def _refuse_saved_tensors(watch: Watch) -> Callable[[Any], None]:
    def enter(self: Any) -> None:
        if type(self).__module__ == "torch.utils.checkpoint":
            raise watch.refuse(CHECKPOINT)
        raise watch.refuse(
            "saved-tensor hooks are used in the forward; the compiled module would lose them. Remove them."
        )

    return enter


def _apply_per_call(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """``module.to(...)`` in the forward: parameters stay what they are, and each call converts them.

    Export cannot replace a parameter for good, which is what eager does in the first call.
    """
    for module in self.modules() if recurse else (self,):
        for tensors in (module._parameters, module._buffers):
            for name, before in [(n, t) for n, t in tensors.items() if t is not None]:
                after = fn(before)
                if (before.dtype, before.device) == (after.dtype, after.device):
                    continue
                log.warning(
                    "the forward converts %r of a %s to %s; the compiled module does so in every call and keeps it in "
                    "%s. Convert the module before compiling to store it so.", name, type(module).__name__,
                    after.dtype, before.dtype,
                )  # fmt: skip
                tensors[name] = after  # type: ignore[assignment]
    return self


def _enter_no_grad(self: Any) -> None:
    """inference_mode as no_grad: the same values and gradients, and export keeps no_grad."""
    self._traced_as = torch.no_grad() if self.mode else contextlib.nullcontext()
    self._traced_as.__enter__()


def _exit_no_grad(self: Any, *error: Any) -> None:
    self._traced_as.__exit__(*error)


def _mark(original: Callable[..., torch.fx.Node], watch: Watch) -> Callable[..., torch.fx.Node]:
    def create_node(self: torch.fx.Graph, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = original(self, *args, **kwargs)
        if not torch.is_grad_enabled():
            node.meta[NO_GRAD] = True
        if watch.loops.running:
            node.meta[LOOP] = True
        return node

    return create_node


@contextlib.contextmanager
def as_in_eager() -> Iterator[Callable[[], bool]]:
    """While inside, code outside of torch that asks whether it is being compiled or exported hears no.

    Libraries have other programs for tracers, which round otherwise. Yields a function: whether anyone asked.
    """
    asked = []

    def answer(original: Callable[[], bool]) -> Callable[[], bool]:
        def no() -> bool:
            if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch":
                return original()
            asked.append(True)
            return False

        return no

    with contextlib.ExitStack() as stack:
        for name in ("is_compiling", "is_exporting", "is_dynamo_compiling"):
            stack.enter_context(_patched(torch.compiler, name, answer(getattr(torch.compiler, name))))
        yield lambda: bool(asked)


def check_loops(program: torch.export.ExportedProgram) -> None:
    """Refuse draws of fixed size in a loop of unknown length: where the body is not run, eager draws nothing."""
    for node in program.graph.nodes:
        shape = getattr(node.meta.get("val"), "shape", ())
        if node.meta.get(LOOP) and is_random(node.target) and all(isinstance(n, int) for n in shape):
            raise CaptureError(
                "random numbers are drawn in a loop over a tensor of unknown length. Draw them before it."
            )

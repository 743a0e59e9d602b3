"""Capture: model and example inputs → :class:`~autoshard.passes.ir.graph.Graph`, by export."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor

from autoshard.errors import CaptureError
from autoshard.passes.capture.answers import steering
from autoshard.passes.capture.answers.classes import Classes
from autoshard.passes.capture.answers.eager import AsInEager, without_grad
from autoshard.passes.capture.answers.first_call import with_first_call
from autoshard.passes.capture.answers.loops import Learnt, check_draws
from autoshard.passes.capture.answers.numbers import Numbers
from autoshard.passes.capture.answers.questions import Exported, indifferent
from autoshard.passes.capture.answers.retries import Retry, asks, tried
from autoshard.passes.capture.exported.arguments import Example, gradient_sources, tensors_of, with_keywords
from autoshard.passes.capture.exported.attached import own_tensors, stand_for
from autoshard.passes.capture.exported.attributes import (
    WrittenError,
    apart,
    as_buffers,
    check_shapes,
    check_unwritten,
    held,
    shapes_of,
    untouched,
    write_back,
)
from autoshard.passes.capture.exported.contents import stand_in_for
from autoshard.passes.capture.exported.growing import from_one, longer
from autoshard.passes.capture.exported.handed import CHANGED, RETURNED, Handed, Returned, of_dicts
from autoshard.passes.capture.exported.lengths import Dynamic, opened, shapes_for_export
from autoshard.passes.capture.exported.provenance import ENABLES, ForwardFrames, plainly_named
from autoshard.passes.capture.exported.trees import register_types
from autoshard.passes.capture.exported.without_data import without_data
from autoshard.passes.capture.observer import Forward, patched, replacing
from autoshard.passes.capture.refusals.checks import check_dtypes, check_example, check_model
from autoshard.passes.capture.refusals.draws import none_drawn
from autoshard.passes.capture.refusals.explain import explain
from autoshard.passes.capture.refusals.outside import reading_outside
from autoshard.passes.capture.refusals.second_call import (
    SecondCallError,
    as_found,
    check_made,
    check_second_call,
    leave,
    leaving,
)
from autoshard.passes.capture.refusals.shared import check_shared, memory_of
from autoshard.passes.capture.repeats.calls import UnequalError
from autoshard.passes.capture.repeats.observer import Repeats
from autoshard.passes.capture.repeats.written_out import write_out
from autoshard.passes.capture.substitutes.autocast import with_kept_casts
from autoshard.passes.capture.substitutes.clamps import CLAMPED, clamped
from autoshard.passes.capture.substitutes.precision import reading_in, with_precision
from autoshard.passes.capture.substitutes.windows import check_views
from autoshard.passes.capture.translate.decompose import decompose
from autoshard.passes.capture.translate.nodes import translate
from autoshard.passes.capture.translate.regions import detach_no_grad, record_nothing
from autoshard.passes.capture.translate.tables import with_tables
from autoshard.passes.capture.watch import Watch, concerns
from autoshard.passes.ir.graph import Graph, Ref
from autoshard.passes.ir.known import one_of_each
from autoshard.passes.ir.names import attribute
from autoshard.passes.rules.facts import has_effect
from autoshard.precision import Precision

log = logging.getLogger("autoshard")
ALONE = threading.RLock()
"""lock of the tracing thread: tracers and their monkey patches are global to the process"""
ATTACHED = "autoshard_attached"
"""key in an exported program's meta: attributes of parameters and buffers that the forward read"""
_NO_METADATA = "_extract_tensor_metadata", lambda tensor: None
"""patch that skips fx's second description of every traced tensor, which nothing here reads"""
_NOISY = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export")


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool | None = None,
    dynamic: Dynamic = False,
    precision: Precision | None = None,
) -> Graph:
    """The functional graph of one call ``model(*args, **kwargs)``.

    ``dynamic``: names the input lengths that stay symbolic (True: all) unless the model fixes them.
    ``training``: whether gradients are wanted (default: ``model.training``). If not, every type has
    ``grad=False``. Modules are captured in their current train or eval mode.
    ``precision``: capture a step in mixed precision.

    The model is left unchanged. Parameters and examples may be on the meta device.
    Raises :class:`CaptureError` if the graph would not compute the same as the model.
    """
    example = (tuple(args), dict(kwargs or {}))
    training = model.training if training is None else training
    check_model(model, training)
    check_example(model, example)
    register_types(example)
    if dynamic:
        opened(tensors_of(model, example), dynamic)  # a wrong request is refused before tracing
    trace = functools.partial(_captured, model, example, training, dynamic, precision)
    try:
        graph = trace()
    except SecondCallError as error:
        with torch.set_grad_enabled(training or torch.is_grad_enabled()):
            graph = with_first_call(model, example, trace, error)
    if dynamic is True and (other := longer(graph, example)) is not None:
        with contextlib.suppress(CaptureError):
            return from_one(graph, _captured(model, other, training, dynamic, precision)) or graph
    return graph


def _captured(
    model: nn.Module, example: Example, training: bool, dynamic: Dynamic, precision: Precision | None
) -> Graph:
    """One trace of :func:`capture`, with all tracer patches installed. Takes the trace lock."""
    with (
        _transforms_ended(),
        ALONE,
        untouched(model),
        _quiet(),
        # Most intermediate graph modules are never called; lazy ones generate code on demand.
        _use_lazy_graph_module(True),
        patched([(torch.fx.proxy, "CapturedTraceback", ForwardFrames), (proxy_tensor, *_NO_METADATA)]),
        patched([(torch.fx.graph, "_format_target", attribute)]),  # fx leaves "class" and quotes unescaped
        patched([(type(model), "named_parameters", nn.Module.named_parameters)]),  # export looks them up by path
        torch.set_grad_enabled(training or torch.is_grad_enabled()),
        reading_in(model, precision) as kept,
        reading_outside() as read,
        leaving(model),
    ):
        apart(model)
        graph, eager_grads = _graph(model, example, training, dynamic)
        check_shared(model, graph)
        check_second_call(model, graph, lambda: _graph(model, example, training, dynamic)[0])
    graph = with_tables(with_precision(graph, kept, precision))
    graph = replace(graph, types=one_of_each(graph.types), outside=tuple(read.values()))
    check_dtypes(graph)
    if training and eager_grads is not None:
        _compare_gradients(graph, eager_grads)
    return graph


def _graph(model: nn.Module, example: Example, training: bool, dynamic: Dynamic) -> tuple[Graph, list[bool] | None]:
    """The graph, and per output tensor whether it required a gradient in the trace."""
    try:
        program, eager_grads, inputs = _export(model, example, training, dynamic)
    except WrittenError as error:
        as_buffers(model, error.names)
        program, eager_grads, inputs = _export(model, example, training, dynamic)
    graph = with_kept_casts(translate(program, model, example, training, inputs))
    meta = program.graph_module.meta
    own, changed = of_dicts(graph.out_spec, meta[CHANGED])
    found = replace(graph, enables=meta[ENABLES], handed=meta[RETURNED], clamped=meta[CLAMPED], attached=meta[ATTACHED])
    return replace(found, out_spec=own, changed=changed), eager_grads


def _export(model: nn.Module, example: Example, training: bool, dynamic: Dynamic) -> Exported:
    """The functional exported program, gradient flags of its outputs, and its dynamic inputs.

    A model may branch on ``is_compiling()``. The branch for tracers is traced if eager's fails.
    """
    eager, export = AsInEager(), functools.partial(_functional, model, example, training, dynamic)

    def for_tracers() -> Exported:
        eager.answers = False
        return export()

    def has_other(error: CaptureError) -> bool:
        return eager.asked or "HigherOrder" in str(error)  # dynamo stops at the False

    with eager.around(), Classes(model).around():
        return tried(export, Retry(has_other, for_tracers, "Its program for tracers"))


def _functional(model: nn.Module, example: Example, training: bool, dynamic: Dynamic) -> Exported:
    """See :func:`_export`. Traces with shared regions first; if that fails, traces every module."""
    repeats = Repeats(None if dynamic or isinstance(model, torch.fx.GraphModule) else model)
    if repeats.members:
        try:
            return _answered(model, example, training, dynamic, repeats)
        except (CaptureError, UnequalError) as error:
            log.debug("every module is traced: %s", error)
        finally:
            repeats.close()
    return _answered(model, example, training, dynamic, Repeats(None))


def _answered(model: nn.Module, example: Example, training: bool, dynamic: Dynamic, repeats: Repeats) -> Exported:
    """The exported program. Value questions: try a program for all answers, then the example's."""
    trace = functools.partial(_traced, model, example, training, dynamic, Numbers(), repeats)
    finish = functools.partial(_finished, model, example, training)

    def whatever() -> Exported | None:
        found = indifferent(trace)
        return None if found is None else finish(found)

    return tried(
        lambda: finish(trace()),
        Retry(asks, whatever, "Whatever the answers are"),
        Retry(
            lambda e: asks(e) and not dynamic, lambda: finish(trace(steered=True)), "With the answers of the example"
        ),
    )


def _finished(model: nn.Module, example: Example, training: bool, traced: Exported) -> Exported:
    """The traced program in functional form, decomposed into ops that have sharding rules."""
    program, output_grads, inputs = traced
    check_views(program.graph_module)
    known = {key: program.graph_module.meta[key] for key in (RETURNED, CHANGED, CLAMPED, ATTACHED)}
    try:
        plainly_named(program)
        with effects_stay():
            if training:
                detach_no_grad(program.graph_module, gradient_sources(program, model, example))
            enables = (not training or without_grad.get()) and record_nothing(program.graph_module)
            program = decompose(program)
            program.graph_module.meta |= {ENABLES: enables, **known}
        write_out(program)
        return program, output_grads, inputs
    except UnequalError:
        raise
    except Exception as error:
        raise explain(model, error) from error


def _traced(
    model: nn.Module, example: Example, training: bool, dynamic: Dynamic, numbers: Numbers, repeats: Repeats,
    steered: bool = False,
) -> Exported:  # fmt: skip
    """The traced program. The trace is repeated while an observer learns from its error."""
    learnt = Learnt()
    while True:
        watch = Watch(concerns(training, learnt, numbers, repeats, example if steered else None))
        with untouched(model):
            trace = _Trace(model, watch, example, example[1] if dynamic else ())
            try:
                with steering.values_at_hand() if steered else contextlib.nullcontext():
                    given = without_data(model, example)
                if not training:  # with gradients off, the forward may write to views of inputs
                    given = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, given)
                inputs = opened(tensors_of(model, given), dynamic) if dynamic else {}
                shapes = shapes_for_export(inputs.values()) if inputs else None
                grad = torch.is_grad_enabled() and not without_grad.get()
                with effects_stay(), watch.active(), torch.set_grad_enabled(grad):
                    program = torch.export.export(model, *given, strict=False, dynamic_shapes=shapes)  # type: ignore[arg-type]
                check_draws(program)
                changed = tuple((path, lost) for path, (lost, _) in trace.changed.items())
                found = {RETURNED: trace.returned, CHANGED: changed, CLAMPED: clamped(watch.observers, model)}
                found[ATTACHED] = tuple(trace.attached)
                program.graph_module.meta |= found
                return program, trace.output_grads, inputs
            except Exception as error:
                cause = trace.error or error
                if isinstance(cause, WrittenError):
                    raise cause from None
                if not watch.learn(cause):
                    raise explain(model, cause) from cause


class _StoppedError(Exception):
    """Replaces the user's error while export unwinds: for some, export prints full graphs."""


class _Trace:
    """Record of the traced call: the forward's error, mutated arguments, gradient flags."""

    def __init__(self, model: nn.Module, watch: Watch, example: Example, keywords: Collection[str] = ()) -> None:
        self.error: Exception | None = None
        self.returned: Returned = ()
        self.changed: dict[Any, tuple[tuple[Any, ...], dict[Any, Any]]] = {}
        self.output_grads: list[bool] | None = None  # stays None for an fx.GraphModule
        forward, buffers, tensors = model.forward, dict(model.named_buffers()), own_tensors(model)
        self.attached: dict[tuple[str, str], Any] = {}
        parameters = memory_of(model.parameters())  # export replaces them during the trace
        trained = [isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.tree_leaves(example)]

        @functools.wraps(forward)
        def traced(*args: Any, **kwargs: Any) -> Any:
            own: dict[int, torch.Tensor] = {}
            try:
                own = stand_for(model, tensors, self.attached)
                stand_in_for(model, own)
                attributes, before = held(model), as_found(model)
                assigned = [(module, dict(module._buffers), shapes_of(module)) for module in model.modules()]
                with none_drawn(model), watch:
                    state = [(b, buffers.get(n)) for n, b in model.named_buffers()]
                    watch.begin(Forward(self.given, list(model.parameters()), state, trained, own))
                    output = forward(*args, **kwargs)
                    watch.end(output)
                check_made(before)
                for module, owned, shapes in assigned:
                    check_shapes(module, shapes)
                    if module is not model:
                        write_back(module, owned)
                check_unwritten(model, attributes, parameters)
                leave(model, before)
                return output
            except Exception as error:
                self.error = error
                raise _StoppedError from None
            finally:
                stand_in_for(model, {id(own[id(x)]): x for x in tensors.values() if id(x) in own})

        if keywords:
            traced.__signature__ = with_keywords(inspect.signature(forward), keywords)  # type: ignore[attr-defined]
        model.__dict__["forward"] = traced  # removed again by ``untouched``
        model.register_forward_pre_hook(self._input, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._output)

    def _input(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook, called before the user's hooks."""
        self.given, self.handed = pytree.tree_leaves((args, kwargs)), Handed(args, kwargs)

    def _output(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook after the user's: notes gradient flags, adds entries of mutated dicts."""
        try:
            self.returned, self.changed = self.handed.returned(output), self.handed.changed
        except Exception as error:
            self.error = error
            raise _StoppedError from None
        if self.changed:
            output = output, tuple(gained for _, gained in self.changed.values())
        register_types(output)
        self.output_grads = [x.requires_grad for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
        return output


def _compare_gradients(graph: Graph, eager: list[bool]) -> None:
    """Refuse a graph whose outputs differ from the traced run's in ``requires_grad``."""
    captured = [graph.types[o.name].grad for o in graph.outputs if isinstance(o, Ref)]
    for index, (ours, theirs) in enumerate(zip(captured, eager, strict=True)):
        if ours != theirs:
            has, lacks = ("the graph", "eager") if ours else ("eager", "the graph")
            raise CaptureError(
                f"tensor {index} of the output has a gradient in {has} and none in {lacks}: the forward turns "
                "requires_grad on or off for an intermediate tensor, which the graph cannot express. Use detach() and "
                "torch.no_grad() only, or pass training=False."
            )


@contextlib.contextmanager
def _transforms_ended() -> Iterator[None]:
    """Close open torch.func transforms on exit: after a failed trace, torch's own exit may fail."""
    depth, nesting = torch._C._functorch.get_dynamic_layer_stack_depth(), eager_transforms.JVP_NESTING
    level = forward_ad._current_level
    try:
        yield
    finally:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        eager_transforms.JVP_NESTING = nesting
        if level < 0:  # the trace entered a dual level and only recorded its exit
            with contextlib.suppress(RuntimeError):
                torch._C._exit_dual_level(level=0)
            forward_ad._current_level = level


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and logs of the tracer; errors carry the relevant text."""
    levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in _NOISY]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger, _ in levels:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in levels:
                logger.setLevel(level)


def effects_stay() -> AbstractContextManager[None]:
    """While inside, fx dead-code elimination keeps unused nodes with side effects."""

    def also(original: Callable[..., bool]) -> Callable[..., bool]:
        return lambda node, *args, **kwargs: has_effect(node) or original(node, *args, **kwargs)

    return patched([replacing(torch.fx.Node, "is_impure", also)])

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
from torch import Tensor, nn
from torch.fx.experimental import proxy_tensor

from autoshard.errors import CaptureError
from autoshard.passes.capture.exported.example_inputs import (
    Example,
    example_without_data,
    gradient_sources,
    tensors_by_argument,
    with_explicit_keywords,
)
from autoshard.passes.capture.exported.mutated_arguments import (
    CHANGED_KEY,
    RETURNED_KEY,
    MutatedArguments,
    ReturnedObjects,
    split_output_spec,
)
from autoshard.passes.capture.exported.output_views import OUTPUT_VIEWS_KEY, find_output_views
from autoshard.passes.capture.exported.plain_objects import recording_fields
from autoshard.passes.capture.exported.provenance import ENABLES_GRAD_KEY, ForwardFrames, rename_unreadable_inputs
from autoshard.passes.capture.exported.pytrees import check_output_objects, register_types
from autoshard.passes.capture.exported.snapshots import (
    AttributeWriteError,
    alias_plain_tensors,
    attributes_restored,
    buffer_shapes,
    check_attribute_writes,
    check_buffer_shapes,
    plain_tensors,
    register_as_buffers,
    replace_in_attributes,
    write_buffers_in_place,
)
from autoshard.passes.capture.exported.symbolic_shapes import (
    Dynamic,
    covering_length_one,
    dynamic_inputs,
    lengthened_example,
    shapes_for_export,
)
from autoshard.passes.capture.exported.tensor_attributes import parameters_and_buffers, record_origins
from autoshard.passes.capture.observer import TracedForward, patched, replacement_patch
from autoshard.passes.capture.polyfills.mixed_precision import (
    annotate_stored_dtypes,
    with_parameter_dtype,
    with_shared_casts,
)
from autoshard.passes.capture.polyfills.parameter_writes import CLAMPED_KEY, clamped_parameters
from autoshard.passes.capture.polyfills.trailing_slices import check_trailing_writes
from autoshard.passes.capture.refusals.aliasing import check_parameter_aliases, storages_of
from autoshard.passes.capture.refusals.checks import check_dtypes, check_example, check_model
from autoshard.passes.capture.refusals.errors import explained_capture_error
from autoshard.passes.capture.refusals.random_draws import model_generators_unused
from autoshard.passes.capture.refusals.untraceable_calls import recording_outside_reads
from autoshard.passes.capture.shared_regions.inlining import inline_regions
from autoshard.passes.capture.shared_regions.observer import SharedRegions
from autoshard.passes.capture.shared_regions.recording import RegionMismatchError
from autoshard.passes.capture.specialization import known_values
from autoshard.passes.capture.specialization.eager_semantics import EagerClasses, EagerModes, grad_off_at_start
from autoshard.passes.capture.specialization.loops import LoopFindings, check_loop_draws
from autoshard.passes.capture.specialization.model_state import (
    SecondCallError,
    check_created_state,
    check_left_losses,
    check_second_call,
    graph_after_warm_up,
    record_left_state,
    recording_left_state,
    state_before_call,
)
from autoshard.passes.capture.specialization.retries import (
    TracedProgram,
    TraceRetry,
    answer_independent,
    is_value_question,
    trace_with_retries,
)
from autoshard.passes.capture.specialization.scalars import ScalarConversions
from autoshard.passes.capture.translate.decompose import decompose
from autoshard.passes.capture.translate.embedding_tables import mark_embedding_tables
from autoshard.passes.capture.translate.graph_from_export import graph_of_export
from autoshard.passes.capture.translate.no_grad import detach_no_grad, drop_enable_grad
from autoshard.passes.capture.watch import ObserverMode, trace_observers
from autoshard.passes.ir.analyses import interned_types
from autoshard.passes.ir.graph import Graph, OutputView, Ref
from autoshard.passes.ir.text import attribute_source
from autoshard.passes.rules.facts import has_effect
from autoshard.precision import Precision
from autoshard.torch_private.capture import (
    TRACER_LOGS,
    empty_parametrization_cache,
    trace_leftovers_removed,
    use_lazy_graph_module,
)

log = logging.getLogger("autoshard")
TRACE_LOCK = threading.RLock()
"""lock of the tracing thread: tracers and their monkey patches are global to the process"""
ATTRIBUTE_READS_KEY = "autoshard_attached"
"""key in an exported program's meta: attributes of parameters and buffers that the forward read"""
_NO_METADATA = "_extract_tensor_metadata", lambda tensor: None
"""patch that skips fx's second description of every traced tensor, which nothing here reads"""


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool | None = None,
    dynamic: Dynamic = False,
    precision: Precision | None = None,
    is_part: bool = False,
) -> Graph:
    """The functional graph of one call ``model(*args, **kwargs)``.

    ``dynamic``: names the input lengths that stay symbolic (True: all) unless the model fixes them.
    ``training``: whether gradients are wanted (default: ``model.training``). If not, every type has
    ``grad=False``. Modules are captured in their current train or eval mode.
    ``precision``: capture a step in mixed precision.
    ``is_part``: code around the model may read what its forward leaves in attributes.

    The model is left unchanged. Parameters and examples may be on the meta device.
    Raises :class:`CaptureError` if the graph would not compute the same as the model.
    """
    example = (tuple(args), dict(kwargs or {}))
    training = model.training if training is None else training
    check_model(model, training)
    check_example(model, example)
    register_types(example)
    if dynamic:
        dynamic_inputs(tensors_by_argument(model, example), dynamic)  # a wrong request is refused before tracing
    trace = functools.partial(_capture_once, model, example, training, dynamic, precision, is_part)
    try:
        graph = trace()
    except SecondCallError as error:
        with torch.set_grad_enabled(training or torch.is_grad_enabled()):
            graph = graph_after_warm_up(model, example, trace, error)
    if dynamic is True and (other := lengthened_example(graph, example)) is not None:
        with contextlib.suppress(CaptureError):
            return (
                covering_length_one(graph, _capture_once(model, other, training, dynamic, precision, is_part)) or graph
            )
    return graph


def _capture_once(
    model: nn.Module, example: Example, training: bool, dynamic: Dynamic, precision: Precision | None, is_part: bool
) -> Graph:
    """One trace of :func:`capture`, with all tracer patches installed. Takes the trace lock."""
    with (
        trace_leftovers_removed(),
        TRACE_LOCK,
        attributes_restored(model),
        _tracer_logs_silenced(),
        # Most intermediate graph modules are never called; lazy ones generate code on demand.
        use_lazy_graph_module(True),
        patched([(torch.fx.proxy, "CapturedTraceback", ForwardFrames), (proxy_tensor, *_NO_METADATA)]),
        patched([(torch.fx.graph, "_format_target", attribute_source)]),  # fx leaves "class" and quotes unescaped
        patched([(type(model), "named_parameters", nn.Module.named_parameters)]),  # export looks them up by path
        torch.set_grad_enabled(training or torch.is_grad_enabled()),
        with_parameter_dtype(model, precision) as stored_dtypes,
        recording_outside_reads() as read,
        recording_left_state(model),
        recording_fields(model) as fields,
    ):
        alias_plain_tensors(model)
        graph, eager_grads = _graph_and_output_grads(model, example, training, dynamic)
        check_parameter_aliases(model, graph)
        retrace = functools.partial(_graph_and_output_grads, model, example, training, dynamic)
        check_second_call(model, graph, lambda: retrace()[0], is_part)
    graph = mark_embedding_tables(annotate_stored_dtypes(graph, stored_dtypes, precision))
    graph = replace(graph, types=interned_types(graph.types), outside=tuple(read.values()), fields=frozenset(fields))
    check_dtypes(graph)
    if training and eager_grads is not None:
        _compare_gradients(graph, eager_grads)
    return graph


def _graph_and_output_grads(
    model: nn.Module, example: Example, training: bool, dynamic: Dynamic
) -> tuple[Graph, list[bool] | None]:
    """The graph, and per output tensor whether it required a gradient in the trace."""
    try:
        program, eager_grads, inputs = _export(model, example, training, dynamic)
    except AttributeWriteError as error:
        register_as_buffers(model, error.names)
        program, eager_grads, inputs = _export(model, example, training, dynamic)
    graph = with_shared_casts(graph_of_export(program, model, example, training, inputs))
    meta = program.graph_module.meta
    own, changed = split_output_spec(graph.out_spec, meta[CHANGED_KEY])
    found = replace(
        graph,
        enables_grad=meta[ENABLES_GRAD_KEY],
        handed=meta[RETURNED_KEY],
        clamped=meta[CLAMPED_KEY],
        attached=meta[ATTRIBUTE_READS_KEY],
    )
    return replace(found, out_spec=own, changed=changed), eager_grads


def _export(model: nn.Module, example: Example, training: bool, dynamic: Dynamic) -> TracedProgram:
    """The functional exported program, its outputs' gradient flags, and its dynamic inputs. If the
    trace for eager fails, the branch for tracers (``is_compiling()``) is traced."""
    eager, export = EagerModes(), functools.partial(_export_sharing_regions, model, example, training, dynamic)

    def for_tracers() -> TracedProgram:
        eager.answers = False
        return export()

    def has_other(error: CaptureError) -> bool:
        return eager.asked or "HigherOrder" in str(error)  # dynamo stops at the False

    with eager.around(), EagerClasses(model).around():
        return trace_with_retries(export, TraceRetry(has_other, for_tracers, "Its program for tracers"))


def _export_sharing_regions(model: nn.Module, example: Example, training: bool, dynamic: Dynamic) -> TracedProgram:
    """See :func:`_export`. Traces with shared regions first; if that fails, traces every module."""
    repeats = SharedRegions(None if dynamic or isinstance(model, torch.fx.GraphModule) else model)
    if repeats.members:
        try:
            return _export_with_retries(model, example, training, dynamic, repeats)
        except (CaptureError, RegionMismatchError) as error:
            log.debug("every module is traced: %s", error)
        finally:
            repeats.close()
    return _export_with_retries(model, example, training, dynamic, SharedRegions(None))


def _export_with_retries(
    model: nn.Module, example: Example, training: bool, dynamic: Dynamic, repeats: SharedRegions
) -> TracedProgram:
    """The exported program. Value questions: try a program for all answers, then the example's."""
    trace = functools.partial(_trace_until_learnt, model, example, training, dynamic, ScalarConversions(), repeats)
    finish = functools.partial(_functionalized, model, example, training)

    def with_any_answers() -> TracedProgram | None:
        found = answer_independent(trace)
        return None if found is None else finish(found)

    return trace_with_retries(
        lambda: finish(trace()),
        TraceRetry(is_value_question, with_any_answers, "Whatever the answers are"),
        TraceRetry(
            lambda e: is_value_question(e) and not dynamic,
            lambda: finish(trace(specialized=True)),
            "With the answers of the example",
        ),
    )


def _functionalized(model: nn.Module, example: Example, training: bool, traced: TracedProgram) -> TracedProgram:
    """The traced program in functional form, decomposed into ops that have sharding rules."""
    program, output_grads, inputs = traced
    check_trailing_writes(program.graph_module)
    keys = RETURNED_KEY, CHANGED_KEY, CLAMPED_KEY, ATTRIBUTE_READS_KEY, OUTPUT_VIEWS_KEY
    known = {key: program.graph_module.meta[key] for key in keys}
    try:
        rename_unreadable_inputs(program)
        with effects_kept():
            if training:
                detach_no_grad(program.graph_module, gradient_sources(program, model, example))
            enables_grad = (not training or grad_off_at_start.get()) and drop_enable_grad(program.graph_module)
            program = decompose(program)
            program.graph_module.meta |= {ENABLES_GRAD_KEY: enables_grad, **known}
        inline_regions(program)
        return program, output_grads, inputs
    except RegionMismatchError:
        raise
    except Exception as error:
        raise explained_capture_error(model, error) from error


def _trace_until_learnt(
    model: nn.Module, example: Example, training: bool, dynamic: Dynamic, numbers: ScalarConversions, repeats: SharedRegions,
    specialized: bool = False,
) -> TracedProgram:  # fmt: skip
    """The traced program. The trace is repeated while an observer learns from its error."""
    findings = LoopFindings()
    while True:
        watch = ObserverMode(trace_observers(training, findings, numbers, repeats, example if specialized else None))
        with attributes_restored(model), empty_parametrization_cache():
            trace = _TracedCall(model, watch, example, example[1] if dynamic else ())
            try:
                with known_values.with_concrete_values() if specialized else contextlib.nullcontext():
                    given = example_without_data(model, example)
                if not training:  # with gradients off, the forward may write to views of inputs
                    given = pytree.tree_map_only(Tensor, Tensor.detach, given)
                inputs = dynamic_inputs(tensors_by_argument(model, given), dynamic) if dynamic else {}
                shapes = shapes_for_export(inputs.values()) if inputs else None
                grad = torch.is_grad_enabled() and not grad_off_at_start.get()
                with effects_kept(), trace_leftovers_removed(), watch.active(), torch.set_grad_enabled(grad):
                    program = torch.export.export(model, *given, strict=False, dynamic_shapes=shapes)  # type: ignore[arg-type]
                check_loop_draws(program)
                changed = tuple((path, lost) for path, (lost, _) in trace.changed.items())
                found = {
                    RETURNED_KEY: trace.returned,
                    CHANGED_KEY: changed,
                    CLAMPED_KEY: clamped_parameters(watch.observers, model),
                    OUTPUT_VIEWS_KEY: trace.views,
                }
                found[ATTRIBUTE_READS_KEY] = tuple(trace.attached)
                program.graph_module.meta |= found
                return program, trace.output_grads, inputs
            except Exception as error:
                cause = trace.error or error
                if isinstance(cause, AttributeWriteError):
                    raise cause from None
                if not watch.learn(cause):
                    raise explained_capture_error(model, cause) from cause


class _StoppedError(Exception):
    """Replaces the user's error while export unwinds: for some, export prints full graphs."""


class _TracedCall:
    """Record of the traced call: the forward's error, mutated arguments, gradient flags."""

    def __init__(self, model: nn.Module, watch: ObserverMode, example: Example, keywords: Collection[str] = ()) -> None:
        self.error: Exception | None = None
        self.returned: ReturnedObjects = ()
        self.changed: dict[Any, tuple[tuple[Any, ...], dict[Any, Any]]] = {}
        self.views: tuple[OutputView, ...] = ()
        self.output_grads: list[bool] | None = None  # stays None for an fx.GraphModule
        forward, buffers, tensors = model.forward, dict(model.named_buffers()), parameters_and_buffers(model)
        self.attached: dict[tuple[str, str], Any] = {}
        parameters = storages_of(model.parameters())  # export replaces them during the trace
        trained = [isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(example)]

        @functools.wraps(forward)
        def traced(*args: Any, **kwargs: Any) -> Any:
            own: dict[int, Tensor] = {}
            try:
                own = record_origins(model, tensors, self.attached)
                replace_in_attributes(model, own)
                attributes, before = plain_tensors(model), state_before_call(model)
                assigned = [(module, dict(module._buffers), buffer_shapes(module)) for module in model.modules()]
                with model_generators_unused(model), watch:
                    state = [(b, buffers.get(n)) for n, b in model.named_buffers()]
                    watch.begin(TracedForward(self.given, list(model.parameters()), state, trained, own))
                    output = forward(*args, **kwargs)
                    watch.end(output)
                check_created_state(before)
                record_left_state(before)
                check_left_losses((module, owned) for module, owned, _ in assigned)
                for module, owned, shapes in assigned:
                    check_buffer_shapes(module, shapes)
                    if module is not model:
                        write_buffers_in_place(module, owned)
                check_attribute_writes(model, attributes, parameters)
                return output
            except Exception as error:
                self.error = error
                raise _StoppedError from None
            finally:
                replace_in_attributes(model, {id(own[id(x)]): x for x in tensors.values() if id(x) in own})

        if keywords:
            traced.__signature__ = with_explicit_keywords(inspect.signature(forward), keywords)  # type: ignore[attr-defined]
        model.__dict__["forward"] = traced  # removed again by ``attributes_restored``
        model.register_forward_pre_hook(self._input, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._output)

    def _input(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook, called before the user's hooks."""
        self.given, self.handed = pytree.tree_leaves((args, kwargs)), MutatedArguments(args, kwargs)

    def _output(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook after the user's: notes gradient flags, adds entries of mutated dicts."""
        try:
            self.returned, self.changed = self.handed.returned(output), self.handed.changed
            check_output_objects(output, {*map(id, self.given), *(id(x) for x, _ in self.handed.before.values())})
        except Exception as error:
            self.error = error
            raise _StoppedError from None
        if self.changed:
            output = output, tuple(gained for _, gained in self.changed.values())
        register_types(output)
        leaves = pytree.tree_leaves(output)
        self.views = find_output_views(self.given, leaves)
        self.output_grads = [x.requires_grad for x in leaves if isinstance(x, Tensor)]
        return output


def _compare_gradients(graph: Graph, eager: list[bool]) -> None:
    """Refuse a graph whose outputs differ from the traced run's in ``requires_grad``."""
    captured = [graph.types[o.name].grad for o in graph.outputs if isinstance(o, Ref)]
    for index, (ours, theirs) in enumerate(zip(captured, eager, strict=True)):
        if ours != theirs:
            has, lacks = ("the graph", "eager") if ours else ("eager", "the graph")
            raise CaptureError(
                f"tensor {index} of the output has a gradient in {has} and none in {lacks}. The "
                "forward turns requires_grad on or off for an intermediate tensor, which a graph "
                "cannot express. Use detach() and torch.no_grad() only, or pass training=False."
            )


@contextlib.contextmanager
def _tracer_logs_silenced() -> Iterator[None]:
    """Silence warnings and logs of the tracer; errors carry the relevant text."""
    levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in TRACER_LOGS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger, _ in levels:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in levels:
                logger.setLevel(level)


def effects_kept() -> AbstractContextManager[None]:
    """While inside, fx dead-code elimination keeps unused nodes with side effects."""

    def also(original: Callable[..., bool]) -> Callable[..., bool]:
        return lambda node, *args, **kwargs: has_effect(node) or original(node, *args, **kwargs)

    return patched([replacement_patch(torch.fx.Node, "is_impure", also)])

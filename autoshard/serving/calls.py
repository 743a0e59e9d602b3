"""Calls of a serving profile: prefill (the prompt) and decode (a token with the KV cache)."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autoshard.errors import CaptureError, PlanError
from autoshard.passes.capture.exported.pytrees import flatten_registered
from autoshard.passes.ir.graph import Graph, Ref

log = logging.getLogger("autoshard.plan")

OBJECTIVES = ("step", "latency", "throughput")
PREFILL, DECODE = "prefill", "decode"
DEFAULT_PROFILE: Mapping[str, Any] = {DECODE: 1}
"""the profile of an objective without one"""

Profile = Mapping[str, Any] | None
"""name of a call → how often it comes, or (how often, args, kwargs)"""
CaptureFunction = Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Graph]


@dataclass(frozen=True)
class ServedCall:
    """One kind of call, captured on meta tensors."""

    name: str
    times: float
    graph: Graph
    requests: int
    tokens: int
    carried: tuple[tuple[str, int], ...] = ()
    """of decode: (input, output of prefill that it takes), the KV cache"""


def check_asked(objective: str, profile: Profile, training: bool, others: Mapping[str, Any]) -> None:
    """Raise :class:`PlanError` for an invalid objective or profile, or options (``others``, by
    name) not for serving."""
    if objective not in OBJECTIVES:
        raise PlanError(f"objective={objective!r} is not known. Known: {', '.join(map(repr, OBJECTIVES))}")
    if objective == "step" and profile is None:
        return
    if profile is not None and not isinstance(profile, Mapping):
        raise PlanError(f'profile is {{call: frequency}}, such as {{"prefill": 1, "decode": 200}}, got {profile!r}')
    what = f"objective={objective!r}" if profile is None else "profile"
    if training:
        raise PlanError(f"{what} is for inference: pass training=False (--inference on the command line)")
    if wrong := [name for name, value in others.items() if value]:
        raise PlanError(f"{what} cannot be combined with {wrong[0]}=. Leave one of them out")
    for name, given in (profile or {}).items():
        times = given[0] if isinstance(given, tuple) and given else given
        if isinstance(given, tuple) and not _is_call_arguments(*given[1:]):
            raise PlanError(f"profile: {name!r} is not a frequency or (frequency, args tuple, kwargs dict): {given!r}")
        if isinstance(times, bool) or not isinstance(times, int | float) or not 0 <= times < float("inf"):
            raise PlanError(f"profile: the frequency of {name!r} is a number, or (number, args, kwargs), got {given!r}")
        if not (isinstance(given, tuple) and len(given) > 1) and name not in (PREFILL, DECODE):
            raise PlanError(
                f"profile: {name!r} needs its arguments: {{{name!r}: (frequency, args, kwargs)}}. Only "
                f"{PREFILL!r} (the example) and {DECODE!r} (a token after it) are known without them"
            )
    if profile is not None and not any(g[0] if isinstance(g, tuple) else g for g in profile.values()):
        raise PlanError("profile: every frequency is zero")


def _is_call_arguments(args: Any = (), kwargs: Any = None, *more: Any) -> bool:
    return not more and isinstance(args, tuple | list) and isinstance(kwargs or {}, Mapping)


def capture_calls(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    objective: str,
    profile: Profile,
    capture: CaptureFunction,
) -> tuple[ServedCall, ...]:
    """Captured calls of a profile, without those that never come; latency: of one request. Decode
    has the KV cache at its longest: all tokens but one. Raises :class:`CaptureError` for unknown
    arguments."""
    skeleton, given = meta_copy(model), _bound_arguments(model, args, kwargs)
    if "use_cache" in inspect.signature(model.forward).parameters:
        given["use_cache"] = True
    found: list[ServedCall] = []
    for name, entry in (profile or DEFAULT_PROFILE).items():
        times = entry[0] if isinstance(entry, tuple) else entry
        if not times:
            continue
        if isinstance(entry, tuple) and len(entry) > 1:
            own = _bound_arguments(model, *(*entry[1:], {})[:2])
            own = _to_meta(_first_request(own) if objective == "latency" else own)
            graph, carried = capture(skeleton, (), own), tuple[tuple[str, int], ...]()
            if name == DECODE:
                prompt = _to_meta(_first_request(given) if objective == "latency" else given)
                with contextlib.suppress(CaptureError):  # the example may need what has no data
                    carried = _carried_states(_meta_outputs(skeleton, prompt, capture), own, graph)
            found.append(ServedCall(name, float(times), graph, *_requests_and_tokens(own), carried))
            continue
        prompt = _to_meta(_first_request(given) if objective == "latency" else given)
        if name == PREFILL:
            found.append(ServedCall(name, float(times), capture(skeleton, (), prompt), *_requests_and_tokens(prompt)))
            continue
        try:
            found.append(_decode_call(skeleton, prompt, float(times), capture))
        except _UnknownDecodeError:
            if profile is not None:
                raise
            # it makes no tokens
            found.append(ServedCall("call", 1.0, capture(skeleton, (), prompt), *_requests_and_tokens(prompt)))
    return tuple(found)


class _UnknownDecodeError(CaptureError):
    """A model whose decode arguments are unknown."""


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device; its parameters take no memory."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        meta = tensor.detach().to("meta")
        memo[id(tensor)] = (
            nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
        )
    return copy.deepcopy(model, memo)


def _bound_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(f"the arguments do not fit the forward of {type(model).__name__}: {error}") from error
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise CaptureError("a profile needs named arguments, but this forward takes *args")
        found |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return found


def _first_request(given: dict[str, Any]) -> dict[str, Any]:
    leaves, spec = flatten_registered(given)
    requests, _ = _requests_and_tokens(given)
    one = [x[:1] if isinstance(x, Tensor) and x.ndim and x.shape[0] == requests else x for x in leaves]
    return pytree.tree_unflatten(one, spec)


def _to_meta(given: dict[str, Any]) -> dict[str, Any]:
    leaves, spec = flatten_registered(given)
    bare = [x.detach().to("meta") if isinstance(x, Tensor) else x for x in leaves]
    return pytree.tree_unflatten(bare, spec)


def _requests_and_tokens(given: Mapping[str, Any]) -> tuple[int, int]:
    """(requests, tokens per request) of a call."""
    shape = next((x.shape for x in given.values() if isinstance(x, Tensor) and x.ndim), (1,))
    return int(shape[0]), int(shape[1]) if len(shape) > 1 else 1


def _decode_call(skeleton: nn.Module, prompt: dict[str, Any], times: float, capture: CaptureFunction) -> ServedCall:
    """The decode call with the longest KV cache, from output shapes of a prompt of that length."""
    requests, tokens = _requests_and_tokens(prompt)
    name = next((n for n, x in prompt.items() if isinstance(x, Tensor) and x.ndim), "")
    ids, length = prompt.get(name), tokens + max(0, round(times) - 1)
    if ids is None or ids.ndim != 2 or ids.is_floating_point():
        raise _UnknownDecodeError(_unknown_decode_text("its first argument is not [requests, tokens]"))
    others = {n: x for n, x in prompt.items() if not isinstance(x, Tensor)}
    masks = {n: x for n, x in prompt.items() if "mask" in n and isinstance(x, Tensor) and x.shape == ids.shape}

    def of_length(mask_length: int) -> dict[str, Any]:
        return {n: x.new_empty((requests, mask_length)) for n, x in masks.items()}

    longest = _to_meta({**others, name: ids.new_empty((requests, length)), **of_length(length)})
    try:
        given = _meta_outputs(skeleton, longest, capture)
    except CaptureError as error:
        raise _UnknownDecodeError(
            _unknown_decode_text(f"with {', '.join(longest)} alone it fails ({error})")
        ) from error
    parameters = inspect.signature(skeleton.forward).parameters
    states = {n: x for n, x in _output_fields(given).items() if n in parameters and x is not None}
    if not states:
        raise _UnknownDecodeError(_unknown_decode_text("it returns nothing that has the name of an argument"))
    own = {**others, name: ids.new_empty((requests, 1)), **of_length(length + 1), **states}
    made = capture(skeleton, (), own)
    return ServedCall(DECODE, times, made, requests, 1, _carried_states(given, own, made))


def _carried_states(given: Any, own: Mapping[str, Any], decode: Graph) -> tuple[tuple[str, int], ...]:
    """See :attr:`ServedCall.carried`; ``given``: prefill's outputs, ``own``: decode's arguments."""
    places = {id(x): i for i, x in enumerate(flatten_registered(given)[0]) if isinstance(x, Tensor)}
    fields, taken = _output_fields(given), list[int | None]()
    for name, value in own.items():
        leaves, made = (flatten_registered(x)[0] for x in (value, fields.get(name)))
        fits = len(leaves) == len(made)
        taken += [places.get(id(x)) if fits else None for x in (made if fits else leaves)]
    return tuple((n, i) for n, i in zip(decode.flat_inputs, taken, strict=True) if n is not None and i is not None)


def _meta_outputs(skeleton: nn.Module, given: dict[str, Any], capture: CaptureFunction) -> Any:
    """Outputs on the meta device: of the model's Python, else of a capture."""
    try:
        with torch.no_grad():
            return skeleton(**given)
    except Exception as error:  # of the model's own code
        log.info("the model does not run without data: %s. It is captured", error)
    graph = capture(skeleton, (), given)
    leaves = [
        torch.empty(tuple(map(int, t.shape)), dtype=t.dtype, device="meta")
        if isinstance(out, Ref) and (t := graph.types[out.name])
        else out
        for out in graph.outputs
    ]
    return pytree.tree_unflatten(leaves[: graph.out_spec.num_leaves], graph.out_spec)


def _output_fields(given: Any) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    return given._asdict() if hasattr(given, "_asdict") else dict(getattr(given, "__dict__", {}))


def _unknown_decode_text(why: str) -> str:
    return (
        f"the arguments of a decoding step are not known for this model: {why}. Give an example: "
        f'profile={{"{PREFILL}": 1, "{DECODE}": (200, args, kwargs)}}'
    )

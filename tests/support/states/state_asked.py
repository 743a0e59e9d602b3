"""Cases of states: what a forward asks of torch's state, of a tensor, of its process."""

from __future__ import annotations

import functools
import operator
import os
import random
import secrets
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from state_harness import Of, case, close, full, once, one_graph, pair, refused, rows, same_gradients
from torch import is_inference_mode_enabled, nn
from torch.compiler import is_compiling

import autoshard

GENERATOR = np.random.default_rng(0)
Question = Callable[[nn.Linear, torch.Tensor, torch.Tensor], Any]
"""of a module, an input, and a value that is computed from them"""


def _within(mode: Any) -> list[bool]:
    with mode:
        return [torch.is_inference_mode_enabled(), torch.is_grad_enabled()]


SEEN = ("input", "value", "weight")
KNOWN = (
    *("shape", "dtype", "device", "layout", "requires_grad", "is_meta", "is_sparse", "is_quantized", "ndim"),
    *(
        "stride",
        "is_contiguous",
        "storage_offset",
        "is_shared",
        "is_pinned",
        "is_conj",
        "is_neg",
        "numel",
        "element_size",
    ),
    *("get_device", "type", "is_floating_point", "dim"),
)
MODES = (
    *("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cache_enabled"),
    *("is_anomaly_enabled", "are_deterministic_algorithms_enabled", "is_warn_always_enabled", "get_default_dtype"),
    *("get_default_device", "get_float32_matmul_precision", "get_num_threads", "initial_seed"),
)


def _told(x: torch.Tensor, attribute: str) -> Any:
    found = getattr(x, attribute)
    return found() if callable(found) else found


def _turned_on(m: nn.Module, x: torch.Tensor) -> tuple[Any, ...]:
    with torch.enable_grad():
        y = m(x)
        return torch.is_grad_enabled(), y.requires_grad, y.is_leaf, y.grad_fn is None


ANSWERED: dict[str, Question] = {
    **{name: lambda m, x, h, name=name: getattr(torch, name)() for name in MODES},  # type: ignore[misc]
    **{
        f"{what}: {attribute}": lambda m, x, h, i=i, attribute=attribute: _told((x, h, m.weight)[i], attribute)  # type: ignore[misc]
        for i, what in enumerate(SEEN)
        for attribute in KNOWN
    },
    "leaves": lambda m, x, h: (h.is_leaf, h.grad_fn is None, m.weight.is_leaf),
    "classes": lambda m, x, h: [type(t) for t in (x, h, m.weight, torch.ones(3), x.shape, m, type(m))],
    "classes compared": lambda m, x, h: (
        type(h) is torch.Tensor, operator.eq(type(m.weight), nn.Parameter), type(x) in {torch.Tensor: 1},
        type(type(h)) is type is type(type),
        isinstance(type(h), type), issubclass(type(h), torch.Tensor), type("A", (), {}).__name__, isinstance(type, type),
        str(type[int]),
    ),
    "autograd": lambda m, x, h: (
        torch._C._is_fwd_grad_enabled(), torch._C._is_multithreading_enabled(),
        torch.autograd.forward_ad._is_fwd_grad_enabled(), torch.autograd.is_multithreading_enabled(),
    ),
    "a view's stride": lambda m, x, h: (h.t().stride(), h.t().is_contiguous(), h[1:].storage_offset()),
    "imported names": lambda m, x, h: (is_compiling(), is_inference_mode_enabled()),
    "compiling": lambda m, x, h: (torch.compiler.is_compiling(), torch.compiler.is_exporting(), torch._dynamo.is_compiling()),
    "tracing": lambda m, x, h: (torch.jit.is_tracing(), torch.jit.is_scripting(), torch.onnx.is_in_onnx_export()),
    "in inference mode": lambda m, x, h: _within(torch.inference_mode()),
    "out of it": lambda m, x, h: _within(torch.inference_mode(False)),
    "gradients turned on": lambda m, x, h: _turned_on(m, x),
    "kernels": lambda m, x, h: (torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled),
    "attention": lambda m, x, h: torch.backends.cuda.flash_sdp_enabled(),
    "processes": lambda m, x, h: (dist.is_initialized() and dist.get_world_size(), torch.utils.data.get_worker_info()),
    "environment": lambda m, x, h: os.environ.get("HOME"),
    "modes": lambda m, x, h: (m.training, [p.requires_grad for p in m.parameters()]),
}  # fmt: skip
"""as in eager, in the mode of the call"""

UNSEEN = "would be a constant"
REFUSED: dict[str, Question] = {
    "_version": lambda m, x, h: m.weight._version,
    "data_ptr": lambda m, x, h: x.data_ptr(),
    "is_inference": lambda m, x, h: h.is_inference(),
    "is_set_to": lambda m, x, h: h.is_set_to(h),
    "is_leaf of an input": lambda m, x, h: x.is_leaf,
    "random": lambda m, x, h: random.randint(0, 9),
    "numpy": lambda m, x, h: np.random.rand(),
    "a generator of numpy": lambda m, x, h: GENERATOR.random(),
    "a generator without a seed": lambda m, x, h: random.Random().random(),
    "uuid": lambda m, x, h: uuid.uuid4(),
    "secrets": lambda m, x, h: secrets.randbelow(9),
    "bytes of the system": lambda m, x, h: os.urandom(4),
    "the system's generator": lambda m, x, h: random.SystemRandom().random(),
    "one in an attribute": lambda m, x, h: m.own.random(),  # type: ignore[operator, union-attr]
}


class Asks(nn.Module):
    """Gives the answers out beside what it computes."""

    def __init__(self, questions: dict[str, Question]) -> None:
        super().__init__()
        self.lin, self.questions = nn.Linear(8, 8), questions
        self.lin.own = random.Random(0)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, str]]:
        h = self.lin(x)
        return h.square().mean(), {name: repr(ask(self.lin, x, h)) for name, ask in self.questions.items()}


@case
def questions_about_torch_and_tensors(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, lambda: Asks(ANSWERED))
    x = rows().requires_grad_()
    single = functools.partial(torch.autograd.set_multithreading_enabled, False)
    backward_only = functools.partial(torch.autograd.forward_ad._set_fwd_grad_enabled, False)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode, single, backward_only):
        for frozen in (False, mode is torch.no_grad):
            answers = []
            for module in (model, sharded):
                module.lin.requires_grad_(not frozen)
                with mode():
                    answers.append(module(x))
            close(answers[1][0], answers[0][0])
            assert answers[0][0].requires_grad == answers[1][0].requires_grad
            differ = {
                name: (answers[1][1][name], told) for name, told in answers[0][1].items() if answers[1][1][name] != told
            }
            assert not differ, f"{mode}: asked is told, not eager's: {differ}"


@case
@one_graph
def questions_that_are_refused(mesh: autoshard.Mesh) -> None:
    x = rows().requires_grad_()
    for name, ask in REFUSED.items():
        model = Asks({name: ask}).double()
        before = model.lin.own.getstate(), random.getstate(), GENERATOR.bit_generator.state  # type: ignore[operator, union-attr]
        with refused(UNSEEN):
            autoshard.compile(model, mesh, (x,))
        after = model.lin.own.getstate(), random.getstate(), GENERATOR.bit_generator.state  # type: ignore[operator, union-attr]
        assert before == after, name


@functools.singledispatch
def _dispatched(x: Any) -> int:
    return 1


for _number, _kind in enumerate((int, float, torch.Tensor, nn.Parameter), 2):
    _dispatched.register(_kind, lambda x, number=_number: number)


def _matched(x: Any) -> int:
    match x:
        case float():
            return 1
        case int():
            return 2
        case nn.Parameter():
            return 3
        case torch.Tensor():
            return 4
    return 5


@case
def classes_of_tensors_and_numbers(mesh: autoshard.Mesh) -> None:
    """A forward that decides by them, also where a trace has numbers that are open or depend on data."""

    def asks(lin: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        h = lin(x)
        told = (
            type(h) is torch.Tensor,
            type(lin.weight) is nn.Parameter,
            type(len(x)) is int,
            isinstance(x.shape[0], int),
        )
        told += (type(x.sum().item()) is float, isinstance(h.sum().item(), float))
        told += (h.__class__ is torch.Tensor, lin.weight.__class__ is nn.Parameter, x.shape[0].__class__ is int)
        for ask in (_dispatched, _matched):
            told += tuple(ask(y) == ask(stands_for) for y, stands_for in zip(asked(lin, x, h), eagers, strict=True))
        return (h * sum(2**i * yes for i, yes in enumerate(told, 1))).square().mean()

    def asked(lin: nn.Linear, x: torch.Tensor, h: torch.Tensor) -> tuple[Any, ...]:
        return len(x), h.sum().item(), x, h, lin.weight, x.shape

    eagers = (4, 0.5, torch.ones(1), torch.ones(1), nn.Parameter(torch.ones(1)), ())

    for dynamic in (False, True):
        model, sharded = pair(mesh, lambda: Of(asks), rows(), dynamic=dynamic)
        for n in (4, 6):
            close(full(sharded(rows(n))), model(rows(n)))


@case
def inference_mode_that_a_forward_asks_for(mesh: autoshard.Mesh) -> None:
    def asks(lin: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return (lin(x) * (3 if torch.is_inference_mode_enabled() else 2)).square().mean()

    model, sharded = pair(mesh, lambda: Of(asks))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.inference_mode):
        with mode():
            close(full(sharded(rows())), model(rows()))
    assert len(sharded.programs) == 3


@case
def gradients_that_a_forward_turns_on_itself(mesh: autoshard.Mesh) -> None:
    """As where a part of a model is trained: ``set_grad_enabled(self.trains)``, in calls with gradients and without."""

    def enables(lin: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            h = lin(x)
        with torch.enable_grad():
            z = lin(h.tanh())
            loss = z.square().mean()
        return loss, h, z, lin(z)

    model, sharded = pair(mesh, lambda: Of(enables))
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.no_grad):
        given = []
        for module in (model, sharded):
            with mode():
                given.append(module(rows()))
            module.zero_grad()
            if given[-1][0].requires_grad:
                full(given[-1][0]).backward()
        for mine, theirs in zip(given[1], given[0], strict=True):
            close(mine, theirs)
        assert given[1][0].requires_grad == (mode is not torch.inference_mode)
        assert not given[1][1].requires_grad
        if given[1][0].requires_grad:
            same_gradients(sharded, model)
    assert len(sharded.programs) == 4


@case
def gradients_turned_on_in_an_inference_mode_of_its_own(mesh: autoshard.Mesh) -> None:
    """Nothing is recorded there, in eager: neither answers nor gradients say otherwise."""

    def frozen(lin: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            with torch.enable_grad():
                scale = lin(x).sin()
            asked = 2 if scale.requires_grad else 3
            with torch.inference_mode(False):
                trained = lin(x).cos()
        return (lin(x) + trained + scale.clone()) * asked

    model, sharded = pair(mesh, lambda: Of(frozen), rows())
    for seed in (1, 2):
        once(model, sharded, rows(seed=seed))

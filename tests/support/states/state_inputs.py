"""Cases of states: inputs of any kind, from any thread."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import torch
from state_harness import Of, case, close, full, once, one_graph, pair, refused, rows, same_gradients
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import autoshard
from autoshard.errors import RuntimeMismatchError


@case
def integers_of_every_width(mesh: autoshard.Mesh) -> None:
    """Cut and gathered too; those that torch has few kernels for."""
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64):
        number = torch.arange(32).view(4, 8).to(dtype)
        model, sharded = pair(mesh, lambda: Of(lambda lin, x, n: lin(x) * n.double()), rows(), number)
        once(model, sharded, rows(), number)
        model, sharded = pair(
            mesh, lambda: Of(lambda lin, x, n: (lin(x), n.view(8, 4))), rows(), number, train=False, training=False
        )
        with torch.no_grad():
            assert torch.equal(full(sharded(rows(), number)[1]), number.view(8, 4))
        hints = {"inputs[[]1]": autoshard.Shard(1)}
        model, sharded = pair(
            mesh, lambda: Of(lambda lin, x, n: lin(x) * n[:, -1:].double()), rows(), number, hints=hints
        )
        once(model, sharded, rows(), number)


@case
@one_graph
def inputs_that_are_not_dense(mesh: autoshard.Mesh) -> None:
    """Refused in the first call as in a later one."""
    model, sharded = pair(mesh, lambda: Of(lambda lin, x: lin(x)), rows())
    parts = [torch.randn(2, 8), torch.randn(3, 8)]
    with warnings.catch_warnings(action="ignore"):  # torch's own, about how new or old these kinds are
        kinds = {
            "of layout torch.sparse_coo": rows().to_sparse(),
            "of layout torch.sparse_csr": rows().to_sparse_csr(),
            "nested": torch.nested.nested_tensor(parts, layout=torch.jagged),
            "nested ": torch.nested.nested_tensor(parts),
            "quantized": torch.quantize_per_tensor(rows().float(), 0.1, 0, torch.qint8),
        }
    for what, x in kinds.items():
        for module in (sharded, autoshard.compile(copy.deepcopy(model), mesh)):
            with refused(rf"input 'inputs\[0\]' is a tensor that is {what.strip()}"):
                module(x)
    once(model, sharded, rows())


@case
def inputs_of_another_dtype_or_device(mesh: autoshard.Mesh) -> None:
    model, sharded = pair(mesh, lambda: Of(lambda lin, x: lin(x)), rows())
    with refused(
        r"lin \(\S+:\d+\): aten.linear.default needs operands of one dtype and gets torch.float16 and torch.float64; .* "
        r"The module was compiled for input 'inputs\[0\]' with float64, and got float16"
    ):
        sharded(rows().half())
    with refused(r"input 'inputs\[0\]' of Of is on device meta, and it has no data"):
        sharded(rows().to("meta"))
    once(model, sharded, rows())


@case
def a_dict_that_hooks_change(mesh: autoshard.Mesh) -> None:
    """A hook before puts something into the caller's, or hands on another; one behind wraps what comes out."""

    def forward(lin: nn.Linear, given: dict[str, Any]) -> Any:
        given["h"] = torch.tanh(lin(given["x"])).exp()
        given["rows"] = given["x"].shape[0]
        loss = given["h"].sum()
        return (loss, given) if "whole" in given else loss

    hooks: list[tuple[str, Any, dict[str, Any]]] = [
        ("pre", lambda m, args: args[0].update(mask=args[0]["x"].relu()), {}),
        ("pre", lambda m, args: ({**args[0]},), {}),
        ("post", lambda m, args, out: args[0].update(out=args[0]["h"].exp()), {}),
        ("post", lambda m, args, out: {"out": out}, {"whole": True}),
    ]
    for options in ({}, {"dynamic": True}):
        for kind, hook, others in hooks:
            model, sharded = Of(forward).double(), Of(forward).double()
            sharded.load_state_dict(model.state_dict())
            for m in (model, sharded):
                register = m.register_forward_pre_hook if kind == "pre" else m.register_forward_hook
                register(hook)
            dicts = [{"x": rows(), **others} for _ in range(3)]
            sharded = autoshard.compile(sharded, mesh, dicts[:1], **options)
            expected, given = model(dicts[1]), sharded(dicts[2])
            assert dicts[2].keys() == dicts[1].keys()
            for name, wanted in dicts[1].items():
                if isinstance(wanted, torch.Tensor):
                    close(dicts[2][name], wanted, name)
                else:
                    assert dicts[2][name] == wanted
            assert not others or (given["out"][1] is dicts[2] and expected["out"][1] is dicts[1])


@case
def a_dict_of_transformers_that_the_forward_changes(mesh: autoshard.Mesh) -> None:
    """An output of transformers takes its items one by one; a dict that is handed in twice is refused."""

    def forward(lin: nn.Linear, given: BaseModelOutput, *more: Any) -> torch.Tensor:
        given.last_hidden_state = lin(given.last_hidden_state)
        return given.last_hidden_state.square().sum()

    model, sharded = pair(mesh, lambda: Of(forward), BaseModelOutput(last_hidden_state=rows()))
    dicts = [BaseModelOutput(last_hidden_state=rows()) for _ in range(2)]
    for m, given in zip((model, sharded), dicts, strict=True):
        full(m(given)).backward()
    close(dicts[1].last_hidden_state, dicts[0].last_hidden_state)
    same_gradients(sharded, model)
    with refused("changes a BaseModelOutput that is passed twice", RuntimeMismatchError):
        sharded(dicts[0], dicts[0])


@case
def two_threads_at_once(mesh: autoshard.Mesh) -> None:
    """In one process they take turns; ranks that are processes would see their calls in different orders."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(lin: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        inside.set()
        go_on.wait(60)
        return lin(x)

    model, expected = Of(slow).double(), []
    sharded = autoshard.compile(model, mesh)
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(full(sharded(rows())))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    threads[0].start()
    assert inside.wait(60)  # it compiles, and is in the forward
    if torch.distributed.is_initialized():
        for module in (sharded, autoshard.compile(Of(lambda lin, x: lin(x)), mesh)):  # they share process groups
            with refused("two threads call sharded modules at once", RuntimeMismatchError):
                module(rows())
        go_on.set()
        threads[0].join()
        return
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join()
    expected.append(model(rows()))
    for result in results:
        close(result, expected[0])
    assert len(results) == 2

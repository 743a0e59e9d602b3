"""Cases of states: inputs of any kind, from any thread."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import torch
from state_harness import Of, case, close, full, once, pair, refused, rows
from torch import nn

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


@case
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
        r"lin \(\S+:\d+\): aten.linear.default takes operands of one dtype and gets torch.float16 and torch.float64; .* "
        r"The module was compiled for input 'inputs\[0\]' with float64 and comes with float16"
    ):
        sharded(rows().half())
    with refused(r"input 'inputs\[0\]' of Of comes on device meta, and it has no data"):
        sharded(rows().to("meta"))
    once(model, sharded, rows())


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
        with refused("is called by two threads at once", RuntimeMismatchError):
            sharded(rows())
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

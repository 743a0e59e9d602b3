"""Training steps on a pretended device with a fake process group: every rank's part of them, one after another.

What the device would have to wait for, operands on two devices and shapes that do not fit raise; values mean nothing.
Started by test_device.py with the names of the checks; prints one line of JSON.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pretended_device
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from pretended_device import DEVICE, fake_world, reading
from torch import nn

import autoshard
from autoshard import models
from autoshard.module.ranks import distributed, rank_calls
from autoshard.runtime.transport import process_group


class Net(nn.Module):
    """Halos, batch norm, dropout, an uneven head and a written buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(6 * 8 * 8, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        logits = self.head(self.drop(x.flatten(1)))
        return F.cross_entropy(logits, labels), logits


def images() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return Net(), (torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))), {}


def reference(name: str) -> Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    def make() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        found = models.get(name)
        return found.model(), *found.inputs(batch=4)

    return make


def steps(
    make: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]],
    axes: dict[str, int],
    ranks: tuple[int, ...],
    **options: Any,
) -> None:
    """Two micro-batches and a step of AdamW, then an evaluation, on each of these ranks of a world."""
    for rank in ranks:
        with fake_world(math.prod(axes.values()), rank):
            torch.manual_seed(0)
            model, args, kwargs = make()
            sharded = _reading(autoshard.compile, model, autoshard.Mesh(axes, "ideal_network"), args, kwargs, **options)
            assert sharded.collectives
            assert all(p.to_local().device.type == DEVICE for p in sharded.parameters())
            optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
            with sharded.no_sync():
                first_of(sharded(*args, **kwargs)).backward()
            loss = first_of(sharded(*args, **kwargs))
            loss.backward()
            assert loss.device.type == DEVICE
            autoshard.clip_grad_norm_(sharded, 1.0)
            optimizer.step()
            for p in sharded.parameters():
                assert p.grad is None or p.grad.to_local().device.type == DEVICE
            sharded.eval()
            with torch.no_grad():
                assert first_of(sharded(*args, **kwargs)).device.type == DEVICE


def first_of(outputs: Any) -> torch.Tensor:
    found: torch.Tensor = outputs[0] if type(outputs) is tuple else outputs.loss
    return found


def gpt() -> None:
    """Dropout, a vocabulary in shards."""
    steps(reference("gpt"), {"tp": 4}, (3,))


def dlrm() -> None:
    """Tables; experts would not do: their rows travel, for which the host waits once."""
    steps(reference("dlrm"), {"dp": 2, "tp": 2}, (1,))


def llama_in_shards() -> None:
    """Parameters in uneven shards are gathered in buckets; eight ranks."""
    steps(reference("llama"), {"dp": 2, "fsdp": 4}, (6,), hints={"*weight": {"fsdp": autoshard.Shard(0)}})


def convolutions() -> None:
    """Along the height: neighbours exchange halos."""
    steps(images, {"sp": 3}, (1,), hints={"x": {"sp": autoshard.Shard(2)}, "conv": {"sp": autoshard.Shard(2)}})


def local_inputs() -> None:
    steps(reference("llama"), {"dp": 2}, (1,), inputs="local")


def inputs_on_the_device() -> None:
    """… of a model that came on the CPU: programs are captured where it was, also later ones."""
    with fake_world(2):
        found = models.get("gpt")
        sharded = _reading(autoshard.compile, found.model(), autoshard.Mesh({"tp": 2}, "ideal_network"))
        for batch in (4, 2):
            args, kwargs = pytree.tree_map(lambda x: x.to(DEVICE), found.inputs(batch=batch))
            first_of(sharded(*args, **kwargs)).backward()
        assert len(sharded.programs) == 2


def a_value_that_the_host_reads_is_seen() -> None:
    """Negative control: an all-reduce that looks at its operand."""
    right = process_group._COLLECTIVES["all_reduce"]
    process_group._COLLECTIVES["all_reduce"] = lambda comm, move, group, x: right(comm, move, group, x * x.sum().item())
    try:
        _raises("the host waits for the device")
    finally:
        process_group._COLLECTIVES["all_reduce"] = right


def a_tensor_on_the_host_is_seen() -> None:
    """Negative control: an all-reduce to which something on the CPU is added."""
    right = process_group._COLLECTIVES["all_reduce"]
    process_group._COLLECTIVES["all_reduce"] = lambda comm, move, group, x: right(comm, move, group, x) + torch.zeros(1)
    try:
        _raises("operands on two devices")
    finally:
        process_group._COLLECTIVES["all_reduce"] = right


def _raises(text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        steps(reference("gpt"), {"tp": 2}, (0,))


def main() -> None:
    pretended_device.install()
    torch.set_num_threads(1)
    rank_calls.FIRST_CALLS = rank_calls.SAMPLED_ELEMENTS = 0  # inputs are compared: the host reads their checksums
    distributed.default_device_type = lambda: DEVICE
    compiled = distributed.DistributedModule._built
    distributed.DistributedModule._built = lambda *args: _reading(compiled, *args)  # type: ignore[method-assign]
    outcomes = {}
    for name in sys.argv[1:]:
        try:
            globals()[name]()
            outcomes[name] = ""
        except (Exception, pytest.fail.Exception):
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))


def _reading(do: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What compiles, once for every signature, may look at tensors."""
    with reading():
        return do(*args, **options)


if __name__ == "__main__":
    main()

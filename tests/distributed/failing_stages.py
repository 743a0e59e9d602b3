"""A stage that fails in the middle of a schedule; a case of pipeline_worker.py."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import ideal
from microbatch_cases import TOLERANCE, far, loss_of
from pipeline_steps import made

import autoshard
from autoshard.errors import CommunicationError


def one_fails() -> None:
    """In a forward, where the backward of a stage begins or ends, or without one: all ranks raise; the next step is right."""
    ranks = dist.get_world_size()
    model, args = made("gpt")
    torch.manual_seed(0)
    expected = loss_of(model(*args))
    expected.backward()
    for schedule in ("1f1b", "zero_bubble"):
        asked: dict[str, Any] = {"stages": "pp", "micro_batches": 4, "schedule": schedule}
        sharded = autoshard.compile(copy.deepcopy(model), ideal({"pp": 2, "tp": ranks // 2}), args, **asked)
        right = sharded._results
        for rank, phase in itertools.product((ranks - 1, 0), ("forward", "backward", "its end", "inference")):

            def wrong(part: Any, inputs: Any, phase: str = phase, right: Any = right, of: Any = sharded) -> Any:
                if phase in ("forward", "inference") and of._comm.micro_batch[0] == 2:
                    raise MemoryError("no memory left")
                ends = phase == "its end" and of._comm.micro_batch[0] == 3  # the last one: nothing clears up after it
                given = broken(inputs) if ends else inputs
                results = right(part, given)
                return broken(results) if phase == "backward" else results

            if rank == 0 and phase == "its end":
                continue  # nothing that the first stage takes has a gradient
            if dist.get_rank() == rank:
                object.__setattr__(sharded, "_results", wrong)
            failing = pytest.raises((MemoryError, CommunicationError), match="no memory left")
            with failing, torch.set_grad_enabled(phase != "inference"):
                sharded(*args)
            assert not any(p.later for p in sharded._pipelines.values()), "memory of a backward that is over"
            if ranks > 2:  # one of the same stage gave up a collective
                return
            object.__setattr__(sharded, "_results", right)
            sharded.zero_grad()
            torch.manual_seed(0)
            loss = loss_of(sharded(*args))
            loss.backward()
            assert far(loss.detach(), expected.detach()) <= TOLERANCE
            found = sharded.full_gradients()
            for name, p in model.named_parameters():
                assert far(found[name], p.grad) <= TOLERANCE, (schedule, rank, phase, name)


def broken(values: Any) -> list[Any]:
    return [Broken.apply(x) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in values]


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no memory left")

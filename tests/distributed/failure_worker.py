"""Two gloo ranks, of which rank 1 fails. Argument: how. The result is what each of them says, and when.

Started by test_failures_gloo.py.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import world
from torch import nn

import autoshard
from autoshard.runtime.transport import process_group

STEPS = 12
"""calls; after the first 8, those that repeat the one before are not compared"""
WAIT = 4
"""seconds that a collective may take"""
X = torch.ones(8, 6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    # As models of transformers have them.
    config, main_input_name = None, "x"

    def get_encoder(self) -> Any:
        return self

    def generate(self, x: torch.Tensor, between: Callable[[], None]) -> Any:
        self(x)
        between()
        return self(x)


def fail(*args: object) -> None:
    raise MemoryError("no memory left")


def main(run: Callable[[int, TextIO], None]) -> None:
    """Call ``run(rank, file for what it says)`` in both ranks; it is no failure where one is killed."""
    texts = [Path(f"{sys.argv[3]}.{rank}") for rank in range(2)]

    def joined(rank: int, ranks: int, rendezvous: str, result: str) -> None:
        wait = datetime.timedelta(seconds=WAIT) if sys.argv[4:] == ["catch"] else None
        world.join(rendezvous, rank, ranks, timeout=wait)
        with texts[rank].open("w", encoding="utf-8") as said:
            run(rank, said)

    with contextlib.suppress(SystemExit):
        world.main(joined)
    Path(sys.argv[3]).write_text(json.dumps([text.read_text("utf-8") for text in texts]), encoding="utf-8")


def run(rank: int, said: TextIO) -> None:
    how = sys.argv[4]
    hints = {"blocks.*.up.weight": autoshard.Shard(0), "blocks.*.down.weight": autoshard.Shard(1)}
    mesh = autoshard.Mesh({"tp": 2}, hardware="ideal_network")
    if how.endswith("in stages"):
        sharded = autoshard.compile(Net(), {"pp": 2}, (X,), stages="pp", micro_batches=2)
    else:
        sharded = autoshard.compile(Net(), mesh, (X,), hints=hints)
    beside = how in ("raise", "other module")
    other = autoshard.compile(Net(), mesh, (X,), hints=hints) if beside else None
    collectives: dict[str, Any] = process_group._COLLECTIVES
    right = dict(collectives)
    begin, hooks = 0.0, list[Any]()
    try:
        for step in range(STEPS):
            dist.barrier()
            begin = time.monotonic()
            if how == "generate" and step == STEPS - 1:
                sharded.generate(X, fail if rank == 1 else lambda: None)
            if rank == 1 and step == STEPS - 1:
                if how == "raise":  # where its next collective would begin
                    collectives.update(dict.fromkeys(right, fail))
                elif how.startswith("hook before"):
                    hooks.append(sharded.register_forward_pre_hook(fail))
                elif how.startswith("hook after"):
                    hooks.append(sharded.register_forward_hook(fail))
                elif how == "refuse":
                    sharded(X, {1, 2})
                elif how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif how == "stop":
                    break
                elif how == "catch":  # an error of the script's own code, which it survives
                    time.sleep(2 * WAIT)
                    break
                elif how == "kill in backward":
                    loss = sharded(X)
                    os.kill(os.getpid(), signal.SIGKILL)
                elif how == "other shape":
                    sharded(X[:4])
                elif how == "state":  # as those who save on one rank alone do
                    sharded.full_state_dict()
                elif how == "other mode":
                    sharded.eval()
                elif how == "other module":  # which it called last, so that this is not compared
                    other(X)
            loss = sharded(X)
            if how == "kill in backward" and step == STEPS - 1:
                time.sleep(0.5)
            loss.backward()
            if other is not None:
                other(X).backward()
    except Exception as error:
        print(f"{time.monotonic() - begin:.2f} s: {type(error).__name__}: {error}", file=said)
        if how not in ("kill", "stop", "catch", "kill in backward"):
            # Who goes on after that is told so, and nothing hangs.
            collectives.update(right)
            for hook in hooks:
                hook.remove()
            time.sleep(3 * rank)
            for module in filter(None, (other, sharded)):
                try:
                    module(X)
                except Exception as again:
                    print(f"then: {type(again).__name__}: {again}", file=said)
            time.sleep(1)


if __name__ == "__main__":
    main(run)

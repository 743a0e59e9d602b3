"""Trains a sharded Llama for two steps and saves it first; the same script runs under python and torchrun."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import autoshard
from autoshard.models import Llama, LlamaConfig


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(0, 128, (4, 17), generator=torch.Generator().manual_seed(3))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def main() -> None:
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokens, labels = inputs()
    mesh = autoshard.Mesh({"tp": 2}, hardware="ideal_network")
    sharded = autoshard.compile(Llama(LlamaConfig.tiny()).double(), mesh, (tokens,), {"labels": labels})
    sharded.save(sys.argv[1])
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    for step in range(2):
        loss = sharded(tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

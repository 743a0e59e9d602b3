"""Fine-tune with LoRA, autocast, accumulation, an average of the weights, evaluation and checkpoints; python or torchrun.

python docs/examples/finetune.py out
torchrun --nproc-per-node 2 docs/examples/finetune.py out
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import autoshard
from autoshard import models


class LoRA(nn.Module):
    """A frozen linear layer and a trained product of rank r beside it."""

    def __init__(self, base: nn.Linear, r: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, base.in_features) * 0.02)
        self.b = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def main() -> None:
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    model = models.get("gpt").model().requires_grad_(False)
    for block in model.blocks:
        block.attention.out = LoRA(block.attention.out)
        block.up = LoRA(block.up)
    tokens = (torch.randint(0, 96, (40, 1)) + torch.arange(17)) % 96  # counting upwards: something to learn
    train = DataLoader(TensorDataset(tokens[:32, :-1], tokens[:32, 1:]), batch_size=4)  # the same on every rank
    test = tokens[32:, :-1], tokens[32:, 1:]

    mesh = autoshard.Mesh({"tp": 2}, hardware="ideal_network")  # "h100", …: of what the ranks really are
    sharded = autoshard.compile(model, mesh, test)
    optimizer = torch.optim.AdamW([p for p in sharded.parameters() if p.requires_grad], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")  # for float16; bfloat16 needs none
    average = AveragedModel(sharded, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for epoch in range(2):
        sharded.train()
        for step, batch in enumerate(train):
            last = step % 2 == 1
            with contextlib.nullcontext() if last else sharded.no_sync():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = sharded(*batch).loss / 2
                scaler.scale(loss).backward()
            if last:
                scaler.unscale_(optimizer)
                autoshard.clip_grad_norm_(sharded, 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                average.update_parameters(sharded)
        average.eval()
        with torch.no_grad():
            found = average(*test).loss
        print(f"epoch {epoch}: evaluation: {found.item():.3f}")
    state = average.module.full_state_dict()  # collective; plain tensors under the original names
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(state, sys.argv[1] if len(sys.argv) > 1 else "out.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

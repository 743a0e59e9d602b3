"""Continuous batching: requests come and go in a static cache that each rank holds its heads of.

    python docs/examples/serving.py                                     # two ranks in this process
    torchrun --nproc-per-node 2 docs/examples/serving.py                # the same tokens
    python docs/examples/serving.py --whole                             # one device, without autoshard: the same tokens

Every request has a slot, a row of the cache, and a position of its own. A step takes a chunk of tokens for each slot: some
of a prompt, or the one that was chosen last. Two programs serve all of it: chunks of 8 while prompts are read, and of 1.
The token is chosen where the vocabulary lies, so a step sends two sums a layer and, for each slot, a number and an index.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autoshard

VOCABULARY, WIDTH, HEADS, LAYERS = 128, 64, 4, 2
SLOTS, LENGTH, CHUNK = 3, 48, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for name in ("keys", "values"):  # what is no token of a request is written behind the last position
            cache = torch.zeros(SLOTS, LENGTH + 1, HEADS, WIDTH // HEADS)
            self.register_buffer(name, cache, persistent=False)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, (HEADS, -1)) for m in (self.q, self.k, self.v))
        slots = torch.arange(SLOTS)[:, None]
        self.keys[slots, at], self.values[slots, at] = k, v
        seen = torch.arange(LENGTH + 1) <= at[..., None]  # [slots, chunk, length]
        whole = (t.transpose(1, 2) for t in (q, self.keys, self.values))
        y = F.scaled_dot_product_attention(*whole, attn_mask=seen[:, None])
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.mlp_norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x), at)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """tokens, at [slots, chunk] and last [slots] → the next token of each slot: that after number ``last`` of its chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH + 1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, at: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(at)
        for block in self.blocks:
            x = block(x, at)
        x = x.gather(1, last[:, None, None].expand(-1, -1, WIDTH)).squeeze(1)
        return self.head(self.norm(x)).argmax(-1)


@dataclass
class Request:
    name: str
    todo: list[int]
    """tokens that the model has not seen yet: of the prompt, then the one chosen last"""
    new: int
    at: int = 0
    """how many it has seen"""
    made: list[int] = field(default_factory=list)


class Batcher:
    """The slots of a model, and who has them."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.waiting, self.steps = model, [], 0
        self.slots: list[Request | None] = [None] * SLOTS

    def add(self, request: Request) -> None:
        if len(request.todo) + request.new > LENGTH:
            raise ValueError(f"request {request.name}: more than {LENGTH} tokens")
        self.waiting.append(request)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """One step of all requests that have a slot; gives those that are done, whose slots are free."""
        self.slots = [r or (self.waiting.pop(0) if self.waiting else None) for r in self.slots]
        chunk = CHUNK if any(r and len(r.todo) > 1 for r in self.slots) else 1
        tokens, at = torch.zeros(SLOTS, chunk, dtype=torch.long), torch.full((SLOTS, chunk), LENGTH)
        last = torch.zeros(SLOTS, dtype=torch.long)
        for slot, request in enumerate(self.slots):
            if request:
                n = min(chunk, len(request.todo))
                tokens[slot, :n], at[slot, :n] = torch.tensor(request.todo[:n]), torch.arange(n) + request.at
                last[slot], request.at, request.todo = n - 1, request.at + n, request.todo[n:]
        chosen = self.model(tokens, at, last).tolist()
        self.steps += 1
        for request, token in zip(self.slots, chosen, strict=True):
            if request and not request.todo:  # the prompt is read
                request.made.append(token)
                request.todo = [token]
        done = [r for r in self.slots if r and len(r.made) == r.new]
        self.slots = [None if r in done else r for r in self.slots]
        return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="one device, without autoshard")
    whole = parser.parse_args().whole
    if "RANK" in os.environ:
        dist.init_process_group()
    torch.manual_seed(0)
    model: nn.Module = Decoder().eval()
    if not whole:
        model = autoshard.compile(model, {"tp": 2}, like="megatron", training=False)
    batcher, done = Batcher(model), []
    for number in range(7):  # one comes every other step; later ones wait for a slot
        prompt = torch.randint(0, VOCABULARY, (3 + 4 * number,)).tolist()
        batcher.add(Request(f"request {number}", prompt, new=4 + 3 * (number % 3)))
        done += batcher.step() + batcher.step()
    while any(batcher.slots) or batcher.waiting:
        done += batcher.step()
    if not dist.is_initialized() or dist.get_rank() == 0:
        for request in done:
            print(f"{request.name}: {request.made}")
        print(f"steps: {batcher.steps}" + ("" if whole else f", programs: {len(model.programs)}"))
        print("" if whole else [f"{c.kind} {c.bytes:.0f} B" for c in model.collectives])
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A step of a Llama with its sequence cut on gloo ranks: the compiled module beside torch's context_parallel, taken in turns.

    python benchmarks/context_step.py
    python benchmarks/context_step.py --ranks 4 --sequence 2048

torch's ``context_parallel`` (2.13) knows the attention of GPUs alone, and refuses that of CPUs ("does not have a sharding
strategy registered"). So its own ring (``_templated_ring_attention``, forward and backward, which its handlers for GPUs call,
with its balanced order of the sequence) is given torch's kernel for CPUs here, without a DTensor around it; both ways of
sending keys and values that it has take part. Parameters are whole; gradients are averaged by DDP.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import step_time
import torch
import torch.distributed as dist
import torch.nn.functional as F
import worlds
from rich.console import Console
from step_time import Contestant, Step, TrainingStep, mean
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs
from torch.nn.parallel import DistributedDataParallel

import autoshard
from autoshard.models.llama import Llama, LlamaConfig
from autoshard.models.output import token_batch

aten = torch.ops.aten
CONFIG = LlamaConfig(vocab=4096, width=256, hidden=768, heads=4, kv_heads=4, layers=4)


class Ring(torch.autograd.Function):
    """torch's ring attention with its kernel for CPUs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        def kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
            return found

        out, sums = torchs._templated_ring_attention(group, 2, kernel, query, key, value, is_causal=True)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        def kernel(
            grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool
        ) -> tuple[Tensor, ...]:
            operands = grad_out, query, key, value, out, logsumexp
            found: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *operands, 0.0, is_causal
            )
            return found

        given = gradient, "grad_out", *ctx.saved_tensors
        return *torchs._templated_ring_attention_backward(ctx.group, 2, kernel, *given, is_causal=True), None


class Part(nn.Module):
    """The loss of a part of the sequence; positions are those of the whole."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        m = self.model
        x = m.embedding(tokens)
        cos, sin = m.rope(positions)
        for block in m.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(m.head(m.norm(x)).flatten(0, 1), labels.flatten())


class Only(NamedTuple):
    """What a step needs of the results."""

    loss: Tensor


class Loss(nn.Module):
    """The loss of the whole."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Only:
        return Only(self.model(tokens, labels).loss)


class Peer:
    """A step under ``context_parallel``."""

    def __init__(self, make: Callable[[], Llama], tokens: Tensor, labels: Tensor, method: str) -> None:
        self.mesh, self.method = init_device_mesh("cpu", (dist.get_world_size(),)), method
        self.group = self.mesh.get_group()
        self.model = DistributedDataParallel(Part(make()))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.given = tokens, labels, torch.arange(tokens.shape[1])

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert options == {"is_causal": True, "enable_gqa": True}
        found: Tensor = Ring.apply(query, key, value, self.group)  # type: ignore[no-untyped-call]
        return found

    def __call__(self) -> float:
        set_rotate_method(self.method)
        tokens, labels, positions = given = [x.clone() for x in self.given]
        buffers = {"buffers": given, "buffer_seq_dims": [1, 1, 0], "no_restore_buffers": set(given)}
        with context_parallel(self.mesh, **buffers):  # type: ignore[arg-type]
            torchs_own, F.scaled_dot_product_attention = F.scaled_dot_product_attention, self.attention
            try:
                loss = self.model(tokens, labels, positions)
                loss.backward()
            finally:
                F.scaled_dot_product_attention = torchs_own
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def rank_main(options: argparse.Namespace) -> None:
    worlds.join(options.rank, options.ranks, options.rendezvous)
    (tokens,), kwargs = token_batch(CONFIG.vocab, options.batch, options.sequence)
    given = tokens, kwargs["labels"]

    def model() -> Llama:
        torch.manual_seed(0)
        return Llama(CONFIG)

    def ours(like: str | None, _: Any) -> Step:
        mesh = autoshard.Mesh({"cp": options.ranks}, hardware=options.hardware)
        return TrainingStep(autoshard.compile(Loss(model()), mesh, given, like=like), given, {})

    def theirs(method: str, _: Any) -> Step:
        return mean(Peer(model, *given, method))

    peers = ("gathered", "in a ring")
    contestants = [
        Contestant('like="ring"', partial(ours, "ring"), peers, 1.0),
        Contestant("free plan", partial(ours, None), peers, 1.0),
        Contestant("gathered", partial(theirs, "allgather")),
        Contestant("in a ring", partial(theirs, "alltoall")),
    ]
    times = step_time.race({c.name: c.make(Any) for c in contestants}, options.steps, options.seconds)
    if options.rank == 0:
        title = f"{options.batch} × {options.sequence} tokens"
        Console(width=120).print(step_time.report(title, contestants, times))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so long")
    parser.add_argument("--hardware", default="cpu")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        raise SystemExit(worlds.launch(__file__, sys.argv[1:], options.ranks))
    rank_main(options)


if __name__ == "__main__":
    main()

"""What models with fused projections send where features are cut: bytes of a step, messages and predicted time of a token.

    python benchmarks/fused_projections.py          # or some of: gpt2 phi3 phi3-grouped mamba

Two layers each, by like="megatron" on {"tp": 4}, h100. "parts" are exchanges between what a rank holds of a fused
result and what it needs of its parts. Nothing is executed; models have no data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import autoshard

MESH = {"tp": 4}
LENGTH, WIDTH, WORDS = 1024, 1024, 4096


def phi3(key_heads: int) -> Any:
    config = transformers.Phi3Config(
        num_hidden_layers=2, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=16,
        num_key_value_heads=key_heads, vocab_size=WORDS, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    return transformers.Phi3ForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=WIDTH, n_head=16, vocab_size=WORDS, use_cache=False, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def mamba() -> Any:
    config = transformers.MambaConfig(num_hidden_layers=2, hidden_size=WIDTH // 2, vocab_size=WORDS, use_cache=False)
    return transformers.MambaForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "phi3": lambda: phi3(16),
    "phi3-grouped": lambda: phi3(4),
    "mamba": mamba,
}


def row(name: str) -> tuple[str, ...]:
    with torch.device("meta"):
        model = MODELS[name]().to(torch.bfloat16)
    tokens = torch.zeros(4, 64 if name == "mamba" else LENGTH, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    step = autoshard.plan(model.train(), MESH, (), batch, like="megatron", training=True)
    token = autoshard.plan(model.eval(), MESH, (), {"input_ids": tokens[:1, :1]}, like="megatron", training=False)
    parts = sum(c.bytes for c in step.collectives if c.kind == "permute")
    others = sum(c.bytes for c in step.collectives if c.kind != "permute")
    messages = sum(c.kind == "permute" for c in token.collectives)
    return (
        name, f"{parts / 1e6:.1f} MB", f"{others / 1e6:.1f} MB", f"{step.cost.total_s * 1e3:.2f} ms", str(messages),
        f"{token.cost.total_s * 1e6:.0f} µs",
    )  # fmt: skip


def main() -> None:
    table = Table("model", "parts", "else", "step", "parts in a token", "token", box=None)
    for name in sys.argv[1:] or MODELS:
        table.add_row(*row(name))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

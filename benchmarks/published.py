"""All published training steps, predicted, with errors by kind: ``python benchmarks/published.py [NAMES] [--table FILE]``.

Those of ``planner.py``, ``pipeline.py`` and ``published_steps.csv``, and these; or those of another table with its columns.

Of a step in several micro-batches one is predicted, against its share of the step. What these rows showed, steps of FSDP too
fast, is why a source was sought for what collectives take from compute beside them; none was chosen by the errors.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from pathlib import Path

import pipeline
import torch
from planner import (
    AT_500_WATTS,
    EAGER,
    ROWS,
    TITAN_LOSS,
    UNFUSED_UPDATE,
    Row,
    every_second_product,
    gpt,
    llama,
    plain_gpt,
    steps,
    tell_errors,
    whole,
)
from published_table import TABLE, rows_of

from autoshard.models.llama import LlamaConfig

LLAMA_8B, LLAMA_70B = llama(LlamaConfig()), llama(LlamaConfig.llama_70b())


def mpt(
    name: str, hardware: str, ranks: int, heads: int, layers: int, batch: int, length: int, tokens: int, again: bool
) -> Row:
    """llm-foundry, scripts/train/benchmarking/README.md: ``tokens`` per second and device; ``again``: recomputed in full."""
    title = f"llm-foundry MPT {name}, FSDP {ranks}, {batch} x {length}, {hardware}"
    return Row(
        title, EAGER[hardware], {"dp": ranks}, {"dp": "fsdp"}, gpt(heads * 128, 50368, length, heads), layers, batch * ranks,
        length, 50368, batch * length / tokens, whole if again else None, torch.float32,
        loss=TITAN_LOSS, update=UNFUSED_UPDATE,
    )  # fmt: skip


def narayanan(name: str, width: int, heads: int, layers: int, tp: int, ranks: int, reached: float) -> Row:
    """Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", table 1, by its formula."""
    batch, dp = 4, ranks // tp
    flops = 96 * batch * dp * 2048 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
    mesh, like = ({"dp": dp, "tp": tp}, {"dp": "ddp", "tp": "megatron"}) if tp > 1 else ({"dp": dp}, {"dp": "ddp"})
    return Row(
        f"Narayanan {name}, TP {tp}, DP {dp}, a100", "a100", mesh, like, plain_gpt(width, 51200, 2048, heads), layers,
        batch * dp, 2048, 51200, flops / (ranks * reached * 1e12), whole, torch.float16,
    )  # fmt: skip


OTHERS = (
    mpt("1B", "h100", 8, 16, 24, 14, 2048, 45455, False),
    mpt("3B", "h100", 16, 20, 32, 10, 2048, 24142, False),
    mpt("7B", "h100", 8, 32, 32, 6, 2048, 10643, False),
    mpt("13B", "h100", 64, 40, 40, 2, 2048, 4800, False),
    mpt("30B", "h100", 32, 56, 48, 14, 2048, 2308, True),
    mpt("1B", "a100", 8, 16, 24, 14, 2048, 20513, False),
    mpt("7B", "a100", 8, 32, 32, 6, 2048, 4641, False),
    mpt("13B", "a100", 8, 40, 40, 2, 2048, 2262, False),
    mpt("30B", "a100", 8, 56, 48, 3, 2048, 916, True),
    Row(
        "torchtitan Llama-3 8B, FSDP 128, not compiled", replace(AT_500_WATTS, fuses=False), {"dp": 128}, {"dp": "fsdp"},
        LLAMA_8B, 32, 256, 8192, 128256, 2 * 8192 / 5605, every_second_product, torch.float32,
        loss=TITAN_LOSS, update=UNFUSED_UPDATE,
    ),
    *(  # benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md
        Row(
            f"torchtitan Llama-3 8B, FSDP 8 TP 8, {how}", AT_500_WATTS, {"dp": 8, "tp": 8}, {"dp": "fsdp", "tp": "megatron-sp"},
            LLAMA_8B, 32, 96, 8192, 128256, 12 * 8192 / 8 / tokens, every_second_product, torch.float32,
            loss=TITAN_LOSS, update=UNFUSED_UPDATE, part_by_part=how == "asynchronous TP",
        )
        for how, tokens in (("selective", 4378), ("asynchronous TP", 4809.4))
    ),
    *(  # docs/performance.md of 2024-07; not compiled
        Row(
            f"torchtitan Llama-3 {name}, FSDP 64, {how}, a100", EAGER["a100"], {"dp": 64}, {"dp": "fsdp"}, model, layers, 64,
            8192, 128256, 8192 / tokens, again, torch.float32, loss=TITAN_LOSS, update=UNFUSED_UPDATE,
        )
        for name, model, layers, how, again, tokens in (
            ("8B", LLAMA_8B, 32, "selective", every_second_product, 2973), ("70B", LLAMA_70B, 80, "full", whole, 331),
        )
    ),
    narayanan("1.7B", 2304, 24, 24, 1, 32, 137),
    narayanan("3.6B", 3072, 32, 30, 2, 64, 138),
    narayanan("7.5B", 4096, 32, 36, 4, 128, 142),
    narayanan("18.4B", 6144, 48, 40, 8, 256, 135),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="rows whose name has one of these in it")
    parser.add_argument("--table", type=Path, help="the rows of this table alone")
    options = parser.parse_args()
    logging.getLogger("torch").setLevel(logging.ERROR)
    table = dict(rows_of(options.table or TABLE))
    parts = [] if options.table else [steps((*ROWS, *OTHERS), options.names)]
    staged = [row for row in table.values() if isinstance(row, pipeline.Row)]
    parts.append(pipeline.steps(staged if options.table else (*pipeline.ROWS, *staged), options.names))
    for name, why in table.items():
        if isinstance(why, str):
            print(f"{name}: left out, {why}")
    tell_errors(*parts)


if __name__ == "__main__":
    main()

"""Compile time of Llama-3-8B in training on a mesh of 8 × 8, stage by stage, on the meta device.

    python benchmarks/plan_time.py --layers 1 8 32

Every row is a process of its own, so that its peak memory is its own. AutoParallel's rows are figures published by its
authors for the same mesh and are not measured here. CPU: processor seconds of all stages together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import autoshard
from autoshard.models import Llama, LlamaConfig
from autoshard.passes.capture.export import capture
from autoshard.passes.codegen.emit import codegen
from autoshard.passes.lower.lowering import lower
from autoshard.passes.propagate import propagate
from autoshard.plans.describe import describe

MESH = {"dp": 8, "tp": 8}
BATCH, SEQUENCE = 64, 4096
STAGES = ("capture", "propagate", "lower", "describe", "codegen")
MODELS = ("autoshard.models", "transformers")
PUBLISHED = {1: (94.0, None), 8: (254.0, None), 32: (439.0, 4.4)}
"""AutoParallel, layers → (seconds, GB)"""


def ours(layers: int) -> nn.Module:
    return Llama(dataclasses.replace(LlamaConfig.llama_8b(), layers=layers))


def hugging_face(layers: int) -> nn.Module:
    from transformers import LlamaConfig as Config
    from transformers import LlamaForCausalLM

    sizes = LlamaConfig.llama_8b()
    config = Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_base},
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class _Size(logging.Handler):
    """Catches the size of the cost network, which propagate logs."""

    variables = 0

    def emit(self, record: logging.LogRecord) -> None:
        if "variables" in record.msg and isinstance(record.args, tuple):
            self.variables = int(str(record.args[0]))


def measure(model: str, layers: int) -> dict[str, Any]:
    """Seconds per stage, sizes, and the peak resident memory of this process in bytes."""
    torch.set_num_threads(1)
    size = _Size()
    logger = logging.getLogger("autoshard.plan")
    logger.addHandler(size)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        module = ours(layers) if model == MODELS[0] else hugging_face(layers)
        tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    torch.set_default_dtype(torch.float32)
    args = (tokens,) if model == MODELS[0] else ()
    kwargs = {"labels": tokens} if args else {"input_ids": tokens, "labels": tokens}
    module.train()
    mesh = autoshard.Mesh(MESH, hardware="h100")
    seconds: dict[str, float] = {}
    started = time.process_time()

    def timed(stage: str, run: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = run()
        seconds[stage] = time.perf_counter() - begin
        return result

    graph = timed("capture", lambda: capture(module, args, kwargs, training=True))
    assignment = timed("propagate", lambda: propagate(graph, mesh, {}))
    program = timed("lower", lambda: lower(graph, assignment))
    plan = timed("describe", lambda: describe(program, "Llama"))
    source = timed("codegen", lambda: codegen(program, "Llama"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": seconds,
        "cpu": time.process_time() - started,
        "nodes": len(graph.nodes),
        "variables": size.variables,
        "lines": source.text.count("\n"),
        "collectives": len(plan.collectives),
        "peak": peak,
    }


def rows(layers: list[int], models: list[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for model in models:
        for n in layers:
            command = [sys.executable, __file__, "--row", model, str(n)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            yield model, n, json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(options.row[0], int(options.row[1]))))
        return
    table = Table(
        title=f"Llama-3-8B, training, mesh {MESH}, batch {BATCH} × {SEQUENCE}, torch {torch.__version__}; seconds"
    )
    for column in ("", "layers", *STAGES, "all", "CPU", "nodes", "variables", "lines", "peak GB"):
        table.add_column(column, justify="right" if column else "left")
    for model, n, row in rows(options.layers, options.models):
        times = [row["seconds"][s] for s in STAGES]
        cells = [
            *(f"{t:.2f}" for t in times),
            f"{sum(times):.1f}",
            f"{row['cpu']:.1f}",
            *(str(row[k]) for k in ("nodes", "variables", "lines")),
        ]
        table.add_row(model, str(n), *cells, f"{row['peak'] / 1e9:.2f}")
    for n, (seconds, memory) in PUBLISHED.items():
        if n in options.layers:
            table.add_row(
                "AutoParallel (published)", str(n), *[""] * len(STAGES), f"{seconds:.0f}", "", "", "", "",
                f"{memory:.1f}" if memory else "",
            )  # fmt: skip
    Console(width=130).print(table)


if __name__ == "__main__":
    main()

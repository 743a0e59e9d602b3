"""Compile time of Llama-3-8B in training on a mesh of 8 × 8, stage by stage, on the meta device.

    python benchmarks/plan_time.py --layers 1 8 32
    python benchmarks/plan_time.py --depth 8 80

Every row is a process of its own, so that its peak memory is its own. AutoParallel's rows are figures published by its
authors for the same mesh and are not measured here. Seconds are those of the processor. ``--depth``: Llama-3-70B on 16 × 8 at
two depths, and how many times as long each stage takes for the second, with memory that binds nothing and with one that binds
both. "search" is all that chooses: cost tables, every search, the bound; "lower" makes programs of what was chosen and
simulates their memory, several where memory binds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import autoshard
from autoshard.compiler import capture_graph
from autoshard.models import Llama, LlamaConfig
from autoshard.passes.codegen.emit import codegen
from autoshard.passes.memory import fit
from autoshard.passes.propagate.named_strategies import NamedStrategy
from autoshard.plans.describe import describe_program
from autoshard.plans.options import CompileOptions
from autoshard.plans.planning import make_planner
from autoshard.progress import infrequent_gc

MESH = {"dp": 8, "tp": 8}
BATCH, SEQUENCE = 64, 4096
DEEP_MESH, DEEP_BATCH, DEEP_SEQUENCE = {"dp": 16, "tp": 8}, 32, 8192
STAGES = ("capture", "search", "lower", "describe", "codegen")
MODELS = ("autoshard.models", "transformers")
DEEP = "llama-3-70b"
BOUND = 0.77
"""of the peak of the plan that memory does not bind: a budget that binds, at any depth"""
PUBLISHED = {1: (94.0, None), 8: (254.0, None), 32: (439.0, 4.4)}
"""AutoParallel, layers → (seconds, GB)"""


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


def example(
    model: str, layers: int
) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor], dict[str, int]]:
    """A model, its arguments, and a mesh."""
    batch, sequence, mesh = (DEEP_BATCH, DEEP_SEQUENCE, DEEP_MESH) if model == DEEP else (BATCH, SEQUENCE, MESH)
    config = LlamaConfig.llama_70b() if model == DEEP else LlamaConfig.llama_8b()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        ours = model != MODELS[1]
        module = Llama(dataclasses.replace(config, layers=layers)) if ours else hugging_face(layers)
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
    torch.set_default_dtype(torch.float32)
    args = (tokens,) if ours else ()
    return module.train(), args, {"labels": tokens} if ours else {"input_ids": tokens, "labels": tokens}, mesh


class _Clock:
    """Processor seconds per stage; of stages inside each other the inner one's are its own."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.inside = 0.0

    def timed(self, stage: str, run: Callable[..., Any], *args: Any) -> Any:
        begin, before = time.process_time(), self.inside
        result = run(*args)
        took = time.process_time() - begin
        self.seconds[stage] = self.seconds.get(stage, 0.0) + took - (self.inside - before)
        self.inside = before + took
        return result

    def around(self, owner: Any, name: str, stage: str) -> AbstractContextManager[Any]:
        """Where the stage is a function that another stage calls."""
        return patch.object(owner, name, partial(self.timed, stage, getattr(owner, name)))


@infrequent_gc()
def measure(model: str, layers: int, budget: float | None) -> dict[str, Any]:
    """Processor seconds per stage, sizes, and the peak resident memory of this process in bytes. ``budget``: of memory, bytes
    per rank; None: the default."""
    torch.set_num_threads(1)
    size = _Size()
    logger = logging.getLogger("autoshard.plan")
    logger.addHandler(size)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    module, args, kwargs, axes = example(model, layers)
    mesh, clock = autoshard.Mesh(axes, hardware="h100"), _Clock()
    graph = clock.timed("capture", partial(capture_graph, module, args, kwargs, training=True))
    planner = clock.timed("search", make_planner, graph, mesh, CompileOptions(), NamedStrategy())
    with clock.around(fit, "lower_and_simulate", "lower"):
        program, memory = clock.timed("search", fit.search_within_memory, planner, budget)
    plan = clock.timed("describe", describe_program, program, "Llama", "adamw", memory)
    source = clock.timed("codegen", codegen, program, "Llama")
    return {
        "seconds": clock.seconds,
        "nodes": len(graph.nodes),
        "variables": size.variables,
        "lines": source.text.count("\n"),
        "collectives": len(plan.collectives),
        "held": memory.peak,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def of_own(model: str, layers: int, budget: float | None = None) -> dict[str, Any]:
    """:func:`measure` in a process of its own."""
    command = [sys.executable, __file__, "--row", model, str(layers), str(budget or "")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compile_times(layers: list[int], models: list[str]) -> Table:
    table = Table(
        title=f"Llama-3-8B, training, mesh {MESH}, batch {BATCH} × {SEQUENCE}, torch {torch.__version__}; seconds"
    )
    for column in ("", "layers", *STAGES, "all", "nodes", "variables", "lines", "peak GB"):
        table.add_column(column, justify="right" if column else "left")
    for model in models:
        for n in layers:
            row = of_own(model, n)
            sizes = (str(row[k]) for k in ("nodes", "variables", "lines"))
            table.add_row(model, str(n), *_stages(row["seconds"]), *sizes, f"{row['peak'] / 1e9:.2f}")
    for n, (seconds, memory) in PUBLISHED.items():
        if n in layers:
            published = f"{memory:.1f}" if memory else ""
            table.add_row(
                "AutoParallel (published)", str(n), *[""] * len(STAGES), f"{seconds:.0f}", "", "", "", published
            )
    return table


def depths(few: int, many: int) -> Table:
    table = Table(title=f"Llama-3-70B, training, mesh {DEEP_MESH}, batch {DEEP_BATCH} × {DEEP_SEQUENCE}; seconds")
    for column in ("layers", "memory", *STAGES, "all", "holds GB"):
        table.add_column(column, justify="left" if column == "memory" else "right")
    found: dict[tuple[int, str], dict[str, float]] = {}
    for n in (few, many):
        free = of_own(DEEP, n, math.inf)
        for memory, row in (
            ("free", free),
            ("short", of_own(DEEP, n, BOUND * free["held"])),
            ("default", of_own(DEEP, n)),
        ):
            found[n, memory] = row["seconds"]
            table.add_row(str(n), memory, *_stages(row["seconds"]), f"{row['held'] / 1e9:.1f}")
    for memory in ("free", "short", "default"):
        ratios = _stages(found[many, memory], found[few, memory])
        table.add_row(f"{many} / {few}", memory, *ratios)
    return table


def _stages(seconds: dict[str, float], of: dict[str, float] | None = None) -> list[str]:
    """Per stage, and in all; ``of``: as so many times these."""
    each = [seconds[s] for s in STAGES]
    if of is None:
        return [f"{t:.2f}" for t in (*each, sum(each))]
    others = [of[s] for s in STAGES]
    return [f"{t / o:.1f} ×" for t, o in zip((*each, sum(each)), (*others, sum(others)), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--depth", type=int, nargs=2, metavar=("FEW", "MANY"))
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        model, layers, budget = options.row
        print(json.dumps(measure(model, int(layers), float(budget) if budget else None)))
        return
    table = depths(*options.depth) if options.depth else compile_times(options.layers, options.models)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()

"""Parses exported configurations with the peers' own parsers, in a virtual environment that has them.

    python -m venv peers && peers/bin/pip install torch transformers vllm deepspeed jax
    peers/bin/pip install . && peers/bin/python benchmarks/export_peers.py

A peer that is not installed is reported as such. Not in CI: some peers bring gigabytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import autoshard
from autoshard.models import Llama, LlamaConfig


def transformers(folder: Path) -> str:
    from transformers.distributed import DistributedConfig

    return str(DistributedConfig(**json.loads((folder / "distributed_config.json").read_text("utf-8"))))


def deepspeed(folder: Path) -> str:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    os.environ["WORLD_SIZE"] = "2"  # data-parallel ranks
    return str(DeepSpeedConfig(str(folder / "deepspeed.json")).zero_config)


def vllm(folder: Path) -> str:
    from vllm.engine.arg_utils import EngineArgs

    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    lines = (line.partition(": ") for line in (folder / "vllm.yaml").read_text("utf-8").splitlines())
    words = [word for name, _, value in lines for word in (f"--{name}", str(json.loads(value)))]
    return str(parser.parse_args(words).tensor_parallel_size)


def megatron(folder: Path) -> str:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return str(
        parser.parse_args(shlex.split((folder / "megatron-flags.txt").read_text("utf-8"))).tensor_model_parallel_size
    )


def jax(folder: Path) -> str:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    spec = importlib.util.spec_from_file_location("shardings", folder / "shardings.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    import jax.numpy as jnp

    mesh = made.make_mesh()
    found = made.shard_parameters({"norm.weight": jnp.ones(64)}, mesh)
    return str(found["norm.weight"].sharding)


PEERS: dict[str, Callable[[Path], str]] = {
    "transformers": transformers,
    "deepspeed": deepspeed,
    "vllm": vllm,
    "megatron": megatron,
    "jax": jax,
}


def main() -> None:
    ids = torch.zeros(8, 32, dtype=torch.long)
    with torch.device("meta"):
        model = Llama(LlamaConfig.tiny())
    mesh = autoshard.Mesh({"dp": 2, "tp": 2}, "h100")
    plan = autoshard.plan(model, mesh, (ids, ids), like={"dp": "zero1", "tp": "megatron"})
    with TemporaryDirectory() as folder:
        for kind, parse in PEERS.items():
            plan.export(kind).write(folder)
            try:
                print(f"{kind}: {parse(Path(folder))}")
            except ImportError as error:
                print(f"{kind}: not installed ({error})")


if __name__ == "__main__":
    main()

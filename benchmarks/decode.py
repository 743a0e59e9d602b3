"""Time of serving on two gloo ranks, a token or a prompt: autoshard against parallelize_module and one process.

    python benchmarks/decode.py --width 64 --layers 2                     # what a call costs beside the compute
    python benchmarks/decode.py --width 2048 --batch 16                   # where compute dominates
    python benchmarks/decode.py --prefill --prompt 4096 --batch 1         # a prompt instead of tokens after it
    python benchmarks/decode.py --own                                     # without transformers
    python benchmarks/decode.py --prefill --prompt 4096 --batch 1 --like search

A step is a token for each request of the batch, float32, one thread each: of transformers' Llama, with a cache that grows,
or with ``--own`` of a decoder that keeps its cache in buffers. The contestants take turns (A B C … A B C …), so that whatever
else the machine does meets all of them alike, and their logits have to agree. A step's time is that of the slower rank; CPU:
processor time of the busier rank. Below them: what torch.distributed takes to send as much, and what a rank's part takes, run
eagerly by both ranks at once. Where compute dominates, no plan that cuts heads takes less than these two together. It ends
after ``--seconds``, or ``--steps``, whichever comes first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from decode_gpu import Decoder
from overhead import alone
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autoshard
from autoshard.runtime.transport.communicator import Executed

RANKS, WARM_UP = 2, 10
Step = Callable[[torch.Tensor], torch.Tensor]
"""a token for each request → its logits"""

SENT: list[Executed] = []
"""the collectives of a step of ours"""


def make_model(options: argparse.Namespace, ranks: int = 1) -> Any:
    """The model, or what one of so many ranks computes of it: its heads, and its part of the MLP and of the vocabulary."""
    torch.manual_seed(0)
    if options.own:
        return Decoder(options.width, options.layers, 1024, options.batch, options.length).eval()
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1024 // ranks,
        hidden_size=options.width,
        intermediate_size=4 * options.width // ranks,
        num_hidden_layers=options.layers,
        num_attention_heads=8 // ranks,
        num_key_value_heads=4 // ranks,
        head_dim=options.width // 8,
    )
    return transformers.LlamaForCausalLM(config).eval()


def decoding(model: Any, prompt: torch.Tensor, options: argparse.Namespace) -> Step:
    """A step after ``prompt``, and after those before; or the prompt itself."""
    if options.own:
        return own_steps(model, prompt, options)
    if options.prefill:
        return lambda token: model(input_ids=prompt, use_cache=True, logits_to_keep=1).logits[:, -1]
    made = [model(input_ids=prompt, use_cache=True)]

    def step(token: torch.Tensor) -> torch.Tensor:
        made[0] = model(input_ids=token, past_key_values=made[0].past_key_values, use_cache=True)
        logits: torch.Tensor = made[0].logits[:, -1]
        return logits

    return step


def own_steps(model: Any, prompt: torch.Tensor, options: argparse.Namespace) -> Step:
    at = torch.arange(prompt.shape[1])
    if options.prefill:
        return lambda token: model(prompt, at)[:, -1]
    model(prompt, at)
    at = at[-1:].clone()

    def step(token: torch.Tensor) -> torch.Tensor:
        at.add_(1).remainder_(options.length)
        logits: torch.Tensor = model(token, at)[:, -1]
        return logits

    return step


def ours(options: argparse.Namespace, prompt: torch.Tensor) -> Step:
    like = None if options.like == "search" else options.like
    mesh = autoshard.Mesh({"tp": RANKS}, **({} if like else {"hardware": autoshard.calibrate()}))
    sharded = autoshard.compile(make_model(options), mesh, like=like, training=False, dynamic=True)
    step = decoding(sharded, prompt, options)
    step(prompt[:, :1])
    sharded._comm.log = SENT
    step(prompt[:, :1])
    sharded._comm.log = None
    if dist.get_rank() == 0:
        counts = Counter(c.kind for c in SENT)
        print(f"ours: {dict(counts)} a step, {sum(c.bytes for c in SENT):.0f} B per rank", flush=True)
    return decoding(sharded, prompt, options)


def its_collectives(options: argparse.Namespace, prompt: torch.Tensor) -> Step:
    """What torch.distributed itself takes to send as much in as many calls."""
    send = alone(SENT)
    return lambda token: send() or torch.empty(0)


def its_compute(options: argparse.Namespace, prompt: torch.Tensor) -> Step:
    """A rank's heads and widths as a model of their own: all of the compute, nothing sent, and logits of no meaning."""
    step = decoding(make_model(options, RANKS), prompt % (1024 // RANKS), options)
    return lambda token: step(token)[:0]


def tensor_parallel(options: argparse.Namespace, prompt: torch.Tensor) -> Step:
    """torch's parallelize_module with the plan of transformers' ``tp_plan``."""
    model, mesh = make_model(options), init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    column, row = ColwiseParallel(), RowwiseParallel()
    whole, table = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
    if options.own:
        plan = {f"attention.{n}": column for n in "qkv"} | {
            "attention.o": row,
            "gate": column,
            "up": column,
            "down": row,
        }
        for layer in model.blocks:
            parallelize_module(layer, mesh, plan)
            for name, cache in list(layer.attention.named_buffers()):
                setattr(layer.attention, name, cache.chunk(RANKS, 1)[0].clone())
        parallelize_module(model, mesh, {"head": whole, "tokens": table})
        return decoding(model, prompt, options)
    plan = {f"self_attn.{n}_proj": column for n in "qkv"} | {"self_attn.o_proj": row, "mlp.down_proj": row}
    plan |= {f"mlp.{n}_proj": column for n in ("gate", "up")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    parallelize_module(model, mesh, {"lm_head": whole, "model.embed_tokens": table})
    return decoding(model, prompt, options)


def one_process(options: argparse.Namespace, prompt: torch.Tensor) -> Step:
    """On rank 0, while the other waits."""
    return decoding(make_model(options), prompt, options) if dist.get_rank() == 0 else lambda token: torch.empty(0)


def race(contestants: dict[str, Step], options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """(seconds, processor seconds) of every step. The logits have to agree."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    warm_up = 2 if options.prefill else WARM_UP
    ends = time.perf_counter() + options.seconds
    for number in range(options.steps + warm_up):
        over = torch.tensor(float(time.perf_counter() > ends and number >= warm_up + 3))
        dist.all_reduce(over)
        if over:
            break
        token = torch.full((options.batch, 1), number % 7)
        found = {}
        for name, step in contestants.items():
            dist.barrier()
            begin = time.perf_counter(), time.process_time()
            found[name] = step(token)
            took = torch.tensor([time.perf_counter() - begin[0], time.process_time() - begin[1]])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number >= warm_up:
                times[name].append((float(took[0]), float(took[1])))
        known = [x for x in found.values() if x.numel()]
        if not all(torch.allclose(x, known[0], atol=1e-4) for x in known):
            raise SystemExit(f"step {number}: the logits differ")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 200), ("width", 256), ("layers", 4), ("batch", 4), ("prompt", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=30.0, help="of all steps together")
    parser.add_argument("--prefill", action="store_true", help="time the prompt instead of tokens after it")
    plans = "of autoshard: a named strategy, or search, for this machine, which is measured first"
    parser.add_argument("--like", default="megatron-sp", help=plans)
    parser.add_argument("--own", action="store_true", help="a decoder with a cache in buffers, without transformers")
    options = parser.parse_args()
    options.length = options.prompt + (0 if options.prefill else options.steps + 2 * WARM_UP)
    if "RANK" not in os.environ:
        command = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), __file__, *sys.argv[1:]]
        raise SystemExit(subprocess.run([sys.executable, *command], check=False).returncode)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    prompt = torch.randint(0, 1024, (options.batch, options.prompt), generator=torch.Generator().manual_seed(0))
    makers = {"one process": one_process, "parallelize_module": tensor_parallel, "autoshard": ours}
    makers["its collectives alone"] = its_collectives
    if not options.own:
        makers["a rank's part alone"] = its_compute
    with torch.no_grad():
        times = race({name: make(options, prompt) for name, make in makers.items()}, options)
    if dist.get_rank() == 0:
        what = f"a prompt of {options.prompt}" if options.prefill else "a token"
        sizes = f"{what}, batch {options.batch}, width {options.width}, {options.layers} layers"
        table = Table(title=f"{RANKS} gloo ranks, one thread each, torch {torch.__version__}: {sizes}; ms, medians")
        for column in ("", "time", "CPU", "of parallelize_module", "of one process"):
            table.add_column(column, justify="left" if not column else "right")
        print(f"{len(times['autoshard'])} steps")
        medians = {n: [statistics.median(x) * 1e3 for x in zip(*t, strict=True)] for n, t in times.items()}
        for name, (wall, cpu) in medians.items():
            ratios = [f"{wall / medians[other][0]:.2f}" for other in ("parallelize_module", "one process")]
            table.add_row(name, f"{wall:.2f}", f"{cpu:.2f}", *ratios)
        sent = medians["its collectives alone"][0]
        beside = medians["one process"][0] + sent
        table.caption = f"autoshard: {medians['autoshard'][0] / beside:.2f} of one process and its collectives together"
        if not options.own:
            bound = (medians["a rank's part alone"][0] + sent) / medians["parallelize_module"][0]
            table.caption += f"; a rank's part and its collectives: {bound:.2f} of parallelize_module"
        Console(width=100).print(table)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

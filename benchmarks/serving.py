"""Plans for serving Llama-3 on a number of devices: seconds a token, tokens a second, memory, and the roofline's share.

    python benchmarks/serving.py                              # 70B on 8 H100: one request, then as many as are asked for
    python benchmarks/serving.py --layers 8 --requests 1 64   # a part of the layers: seconds instead of minutes

Predictions of the cost model, without weights or devices. The share of the roofline says how far from the least possible
a step is: bytes of weights and caches, read once by all devices together at the data sheet's bandwidth, over the step. Beside
it stands what engines measured, as a share of the same roofline on their own devices: a scale, not a comparison, as device,
model, prompt and number format differ. Of TensorRT-LLM the reading of prompts is in the time, and caches are counted at half
of what is made. Of vLLM no figure was found that says the batch and the lengths it was measured with.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import autoshard

SIZES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}

_TENSORRT = "its docs/source/performance.md"
PUBLISHED = (
    # what, tokens/s of all requests, GB/s that each device read, of the data sheet's GB/s, source
    ("gpt-fast, Llama-2-70B, bfloat16, 8 × A100 80 GB (330 W), prompt of 5", 62.5, 1135, 2039, "its README, 0f925b5"),
    ("gpt-fast, Llama-2-70B, bfloat16, 4 × A100 80 GB (330 W), prompt of 5", 38.0, 1341, 2039, "its README, 0f925b5"),
    ("TensorRT-LLM 0.5.0, Llama-2-70B, fp8, 4 × H100, 64 requests, 128 + 2048 tokens", 2616, 829, 3352, _TENSORRT),
    ("TensorRT-LLM 0.6.1, Llama-2-70B, fp8, 4 × H100, 480 requests, 128 + 2048 tokens", 5944, 494, 3352, _TENSORRT),
)
"""TensorRT-LLM's: steps/s · (69.0 GB of weights + requests · 1152 tokens · 163,840 B) / 4"""


def make_model(size: str, layers: int | None) -> Any:
    sizes = SIZES[size] if layers is None else {**SIZES[size], "num_hidden_layers": layers}
    with torch.device("meta"):
        config = transformers.LlamaConfig(vocab_size=128256, num_key_value_heads=8, **sizes)
        return transformers.LlamaForCausalLM(config).bfloat16().eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="70b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--mesh", help="such as tp=8: this one, instead of a search over all")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 64], help="of a batch, one plan each")
    options = parser.parse_args()
    mesh = None if options.mesh is None else {a: int(n) for a, n in (x.split("=") for x in options.mesh.split(","))}
    model = make_model(options.size, options.layers)
    layers = model.config.num_hidden_layers
    table = Table(title=f"Llama-3 {options.size}, {layers} layers, bfloat16, {options.devices} × {options.hardware}")
    columns = (
        "requests",
        "mesh",
        "ms a token",
        "tokens/s",
        "roofline",
        "first token, ms",
        "GB a rank",
        "kB sent a token",
    )
    for column in (*columns, "CPU s"):
        table.add_column(column, justify="right")
    for requests in options.requests:
        begin = time.process_time()
        plan = autoshard.plan(
            model,
            None if mesh is None else autoshard.Mesh(mesh, options.hardware),
            (torch.zeros(requests, options.prompt, dtype=torch.long, device="meta"),),
            **({"devices": options.devices, "hardware": options.hardware} if mesh is None else {}),
            training=False,
            objective="latency" if requests == 1 else "throughput",
            profile={"prefill": 1, "decode": options.tokens},
        )
        serving = plan.serving
        assert serving is not None
        print(plan.serving, f"planned in {time.process_time() - begin:.0f} s of processor time", flush=True)
        prefill = next(p for p in serving.phases if p is not serving.decode)
        table.add_row(
            str(requests),
            str(plan.mesh),
            f"{1e3 * serving.seconds_per_token:.2f}",
            f"{serving.tokens_per_second:.0f}",
            f"{serving.decode.roofline:.0%}",
            f"{1e3 * prefill.seconds:.0f}",
            f"{max(p.peak for p in serving.phases) / 1e9:.1f}",
            f"{serving.bytes_per_token['sent'] / 1e3:.0f}",
            f"{time.process_time() - begin:.0f}",
        )
    published = Table(title="Measured by others; one request where none are named")
    for column in ("", "tokens/s", "roofline", "source"):
        published.add_column(column)
    for what, tokens, read, sheet, source in PUBLISHED:
        published.add_row(what, f"{tokens:.1f}", f"{read / sheet:.0%}", source)
    for each in (table, published):
        Console(width=120).print(each)


if __name__ == "__main__":
    main()

"""Published steps as a table, one per row: ``published_steps.csv``, or another file with its columns.

A row names a model of :mod:`decoders`, the hardware, the precision of products, sizes and degrees, and the seconds of a step;
``source`` and ``notes`` say where it stands and which software ran it. A row that lacks one of these, or whose model is not
there, is left out by name. No figure is solved for from a row, but which terms are counted was chosen with the rows in view.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decoders import SIZES, Sizes, decoder
from pipeline import Row
from planner import MEGATRON_LOSS, TRANSFORMER_ENGINE, whole

from autoshard import Hardware
from autoshard.hardware import PRESETS

TABLE = Path(__file__).with_name("published_steps.csv")


class IncompleteError(ValueError):
    """Why a row cannot be predicted."""


CUDNN_FLOAT8 = 1.2e15 / 617e12
"""speed of cuDNN's attention in float8 relative to 16 bits, at most (NVIDIA 2024, "Accelerating Transformers with NVIDIA cuDNN
9"; Shah et al. 2024, figure 5); the recipes of :func:`whole_graph` have ``fp8_dot_product_attention``"""
HALF_HEADS = 395 / 465
"""speed of cuDNN's attention with 64 features of a head relative to 128, on H100 at 2048 keys (Shah et al. 2024, figure 6)"""
HALF_HEADS_BLACKWELL = 0.5
"""the same on B200, where exponentials take as long as products of 128 features (Together 2026, "FlashAttention-4"): derived.
B300 has twice as many units for them"""
LAUNCH = 10e-6
"""seconds in which a host issues a kernel of an eager program (5 to 25 µs: docs of PyTorch's dispatcher and profiler)"""
EXPERT_LAUNCHES = 60, 5
"""kernels of half a layer of experts, forward and backward, that wait for the host after it has waited for the numbers of rows
(megatron/core/transformer/moe): router, sorting and combination; of each own expert three products and two casts"""
NANOTRON_SUMS = 2 + 4 + 4 - 6.0
"""bytes per parameter of its gradients added in float32 (optim/gradient_accumulator.py), more than those of a plan in 16 bits.
Its loss is Megatron-LM's (parallel/tensor_parallel/functional.py)"""


@dataclass(frozen=True)
class Precision:
    """How products are computed."""

    speed: float = 1.0
    """relative to bfloat16"""
    cast: float = 0.0
    """bytes that casts move per element of an operand or its gradient, at the speed of other kernels"""


def precision(name: str, hardware: str) -> Precision:
    """Speeds and casts that Transformer Engine measured for a layer of 4096 features on B300 and H200
    (docs/examples/gemm_profiling): 13.10 ms in bfloat16, 6.81 in scaled float8, 7.16 in MXFP8 and 3.76 in NVFP4; casts of its
    2.48 billion operands 2.34, 1.82 and 2.69 ms. Training casts a tensor once, and writes it in both directions; Hopper needs
    the transposed one for float8, Blackwell does not."""
    if name == "BF16":
        return Precision()
    operands, moved = 2.482e9, 8e12 * 0.7
    if name.startswith("FP8"):
        hopper = hardware.startswith("h")
        taken = 3.5e-3 * 0.7 * 4.8e12 if hopper else 2.335e-3 * moved
        return Precision(1.90 if hopper else 1.92, taken / operands + hopper)
    speed, taken, written = {"MXFP8": (1.83, 1.823e-3, 1.0), "NVFP4": (3.48, 2.689e-3, 0.5)}[name]
    return Precision(speed, taken * moved / operands + written)


def device(name: str, products: Precision, attention_speed: float, library: bool) -> Hardware:
    """A preset with these products, and with attention so many times as fast as that of Transformer Engine (``library``; else
    FlashAttention-2)."""
    found = PRESETS[name]
    attention = TRANSFORMER_ENGINE.attention if library and name.startswith("h") else found.attention
    faster = attention_speed / products.speed
    attention = tuple((keys, faster * ahead, faster * back) for keys, ahead, back in attention)
    return replace(found, dtypes=(*found.dtypes, ("bfloat16", products.speed * found.flops)), attention=attention)


def attention_speed(line: dict[str, str], sizes: Sizes) -> float:
    """Of attention relative to 16 bits and 128 features of a head."""
    speed = CUDNN_FLOAT8 if whole_graph(line, sizes) else 1.0
    if sizes.head_dim > 64 or sizes.latent:
        return speed
    return speed * (HALF_HEADS_BLACKWELL if line["hardware"] in ("B200", "GB200") else HALF_HEADS)


def rows_of(path: Path = TABLE) -> Iterator[tuple[str, Row | str]]:
    """(name, row, or why it cannot be predicted) of each line."""
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            try:
                yield line["id"], row_of(line)
            except IncompleteError as error:
                yield line["id"], str(error)


def row_of(line: dict[str, str]) -> Row:
    """The row of one line. Raises :class:`IncompleteError`."""
    kind, sizes = line.get("kind", "pretrain"), sizes_of(line["model"])
    if kind != "pretrain":
        raise IncompleteError(f"{kind} is no full training step")
    if "not tuned" in line["notes"]:
        raise IncompleteError("its authors did not tune it")
    number = {
        name: int(float(line[name]))
        for name in ("gpus", "seq", "gbs", "mbs", "tp", "pp", "vp", "cp", "ep")
        if line[name] and line[name] != "n/a"
    }
    for name in ("gpus", "seq", "gbs", "mbs"):
        if name not in number:
            raise IncompleteError(f"{name} was not published")
    tp, pp, cp, ep = (number.get(name, 1) for name in ("tp", "pp", "cp", "ep"))
    replicas = number["gpus"] // (tp * pp * cp)
    sharded = line["fsdp"] not in ("", "0", "ZeRO-1")
    products = precision(line["precision"] or "BF16", line["hardware"].lower())
    mesh, like = mesh_of(replicas, ep, cp, tp, sharded)
    nanotron = "nanotron" in line["source"]
    hardware = device(line["hardware"].lower(), products, attention_speed(line, sizes), not nanotron)
    length, layers = number["seq"], sizes.layers + sizes.predictions
    if line["step_s"]:
        seconds = float(line["step_s"])
    elif line["tokens_s_gpu"]:
        seconds = number["gbs"] * length / float(line["tokens_s_gpu"]) / number["gpus"]
    elif line["tflops_gpu"]:
        flops = model_flops(sizes, length) * number["gbs"] * length
        seconds = flops / float(line["tflops_gpu"]) / 1e12 / number["gpus"]
    else:
        raise IncompleteError("neither seconds nor a rate was published")
    if sharded and "recompute" in line and "not stated" in line["notes"]:
        raise IncompleteError("which layers are recomputed was not published")
    cut = tp * cp

    def beside(layers: int, batch: int) -> tuple[float, float, float]:
        """Casts: of operands in the forward, of gradients in the backward; and the head, which stays in bfloat16."""
        tokens = batch * length / cut
        moved = products.cast * layers * sizes.features() / 2 * tokens
        head = 2.0 * tokens * sizes.width * sizes.vocab * (1 + sizes.predictions)
        slower = head / (hardware.flops * hardware.efficiency) * (1 - 1 / products.speed)
        each = hardware.memory_seconds(moved) if products.cast else 0.0
        if sizes.experts:
            fixed, of_expert = EXPERT_LAUNCHES
            issued = LAUNCH * (fixed + of_expert * sizes.experts / ep) * by_host(line, sizes)
            each += layers * (expert_seconds(line, sizes, hardware, tokens) + issued)
        if not nanotron:
            ahead = 3.0 if sizes.experts else 2.0
            return 2 / ahead * each + slower, 2 * (1 - 1 / ahead) * each + 2 * slower, 0.0
        layer = sizes.width * (2 * sizes.head_dim * (sizes.heads + sizes.kv_heads) + 3 * sizes.hidden)
        parameters = (layers * layer + (2 - sizes.tied) * sizes.vocab * sizes.width) / tp
        return 0.0, hardware.memory_seconds(MEGATRON_LOSS * tokens * sizes.vocab + NANOTRON_SUMS * parameters), 0.0

    return Row(
        line["id"], hardware, pp, (number.get("vp", 1),), mesh, like, decoder(sizes), sizes.width, layers, number["gbs"],
        (number["mbs"],), length, seconds, selects(line, sizes), kind=kind_of(sizes, pp, sharded), beside=beside,
        part_by_part=not sizes.experts and not nanotron,
        gathered=1.0 if products.speed == 1.0 else 0.5,
        exchanged=(copies_sent(sizes, ep, hardware.devices_per_node) if joins_rows(line, sizes) else 1.0) / min(tp, ep),
        exchanges_hide=whole_graph(line, sizes) or (line["hardware"] == "H100" and sizes.layers == 94),
    )  # fmt: skip


def sizes_of(model: str) -> Sizes:
    plain = re.sub(r"[^a-z0-9.]+", " ", model.lower()).strip()
    plain = re.sub(r"\b(deepseek)(v3)\b", r"\1 \2", plain).replace("deepseek v3 671b", "deepseek v3")
    plain = (
        re.sub(r"^(llama[23](?:\.1)?) ?(\d)", r"\1 \2", plain)
        .replace("llama 3", "llama3")
        .replace("gpt3175b", "gpt3 175b")
    )
    if model.startswith("Llama shape"):
        plain = {"1.34B": "nanotron 1b", "3.57B": "nanotron 3b", "8.86B": "nanotron 8b"}.get(
            (re.findall(r"(\d\.\d+B)", model) or [""])[0], plain
        )
    if plain not in SIZES:
        raise IncompleteError(f"the model {model!r} is not in decoders.py")
    return SIZES[plain]


def mesh_of(replicas: int, ep: int, cp: int, tp: int, sharded: bool) -> tuple[dict[str, int], dict[str, Any]]:
    """The mesh of one stage and its named strategies. Experts lie along ranks of tp, too, which counts here as ep."""
    ep = max(1, ep // tp)
    mesh, like = {"dp": replicas // ep, "ep": ep, "cp": cp, "tp": tp}, {}
    for axis, name in (("dp", "fsdp" if sharded else "zero1"), ("ep", "expert"), ("cp", "ring"), ("tp", "megatron-sp")):
        if mesh[axis] == 1 and axis != "dp":
            del mesh[axis]
        else:
            like[axis] = name
    return mesh, like


def container(line: dict[str, str]) -> float:
    """Year and month of the container in which NVIDIA measured the row, such as 26.06; 0: another source."""
    found = re.search(r"container (\d\d\.\d\d)", line["source"])
    return float(found[1]) if found else 0.0


def whole_graph(line: dict[str, str], sizes: Sizes) -> bool:
    """Whether a CUDA graph holds the whole step of experts, with activations in the products' kernels (``full_iteration`` and
    ``cutedsl_fused_grouped_mlp`` in the recipes of Megatron-Bridge): of DeepSeek since 26.06, of GPT OSS since 26.08."""
    since = 26.08 if sizes.window else 26.06 if sizes.latent and line["mbs"] == "1" else 99.0
    return line["precision"] == "MXFP8" and line["hardware"] != "B200" and container(line) >= since


def by_host(line: dict[str, str], sizes: Sizes) -> float:
    """Share of a layer's kernels that the host issues one by one: on GB200 and GB300 the recipes capture attention, the router
    and what comes before the exchange as CUDA graphs."""
    return 0.0 if whole_graph(line, sizes) else 1 / 3 if line["hardware"].startswith("GB") else 1.0


def expert_seconds(line: dict[str, str], sizes: Sizes, device: Hardware, tokens: float) -> float:
    """Half of a layer's seconds, forward and backward, of what experts move through memory beyond a plan (or below 0).

    A plan writes and reads sorted rows twice, and what lies between products; HybridEP and DeepEP sort as they send. GPT OSS
    adds biases, clamps and shifts, each as a kernel that reads and writes.
    """
    rows, moved = tokens * sizes.chosen, 0.0
    if joins_rows(line, sizes):
        moved -= 8 * rows * sizes.width
    if whole_graph(line, sizes):
        moved -= 16 * rows * sizes.hidden
    elif sizes.window:
        moved += 36 * rows * sizes.hidden
    return 1.5 * device.memory_seconds(abs(moved)) * (1 if moved > 0 else -1)


def joins_rows(line: dict[str, str], sizes: Sizes) -> bool:
    """Whether DeepEP or HybridEP dispatches: Automodel's tables and the recipes of Megatron-Bridge, but for those of
    GPT OSS on H100 and of Qwen3 on 8 GPUs a node with PP (scripts/performance/configs there)."""
    if not sizes.experts or line["source"].startswith(("yanring", "NVIDIA/Megatron-LM")):
        return False
    eight = line["hardware"] in ("H100", "H200", "B200", "B300")
    return not (eight and ((line["hardware"] == "H100" and sizes.window) or sizes.layers == 94))


def copies_sent(sizes: Sizes, ep: int, per_node: int) -> float:
    """Rows that DeepEP and HybridEP send relative to one per chosen expert: one for each node, or rank of a node, with any
    of a row's experts (their READMEs), of experts chosen at random."""
    places = max(ep // per_node, 1) if ep > per_node else ep
    if places == 1:
        return 1.0
    apart = places * (1 - (1 - 1 / places) ** sizes.chosen)
    return apart / sizes.chosen


def kind_of(sizes: Sizes, stages: int, sharded: bool) -> str:
    return "experts" if sizes.experts else "FSDP" if sharded else "pipeline" if stages > 1 else "dense"


def selects(line: dict[str, str], sizes: Sizes) -> Any:
    """What is computed again in the backward."""
    again = line["recompute"]
    if "full" in again or again.startswith("blocks"):
        return whole
    if sizes.latent and not whole_graph(line, sizes):  # the recipes of Megatron-Bridge make its up-projections again
        return lambda module, op, product: float("_up" in module and "attention" in module)
    return None


def model_flops(sizes: Sizes, length: int) -> float:
    """FLOPs of a step per token as Megatron-LM counts them: attention in full."""
    active = sizes.chosen if sizes.experts else 1
    layer = (
        2 * sizes.width * sizes.head_dim * (sizes.heads + sizes.kv_heads) + 2 * length * sizes.heads * sizes.head_dim
    )
    layer += (2 + sizes.gated) * sizes.width * (active * sizes.hidden + sizes.shared)
    return 6.0 * (sizes.layers * layer + sizes.width * sizes.vocab)

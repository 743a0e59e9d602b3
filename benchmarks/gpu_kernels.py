"""What kernels take on this GPU, beside what the cost model says of a preset.

    python benchmarks/gpu_kernels.py --hardware h100

Times are medians of CUDA events, of bfloat16 on normally distributed data if nothing else is said, with inputs that take turns
so that caches do not hold them. ``model``: seconds of the cost model over seconds measured, 1 where it is right.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.hardware.device import Hardware
from autoshard.hardware.presets import hardware

BF16 = torch.bfloat16
CACHE = 100 * 2**20
"""bytes that inputs taking turns have together at least: twice the cache of an H100"""


def seconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Of one call on the GPU, launched ahead of time."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda._sleep(2_000_000)  # the host is ahead: gaps between launches are not the kernels'
    for begin, end in marks:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1e3


def replayed(call: Callable[[], object], count: int = 50) -> float:
    """Seconds of one call inside a CUDA graph: no launch by the host."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return seconds(graph.replay, 10) / count


def turns(make: Callable[[], tuple[Tensor, ...]], call: Callable[..., object]) -> Callable[[], object]:
    """``call`` on inputs that take turns."""
    first = make()
    size = sum(x.nbytes for x in first)
    sets = [first, *(make() for _ in range(min(40, CACHE // max(1, size))))]
    state = iter(range(1 << 40))
    return lambda: call(*sets[next(state) % len(sets)])


def row(what: str, taken: float, model: float, rate: str = "") -> None:
    print(f"  {what:44}{taken * 1e6:12.1f} µs{rate:>16}{model / taken:8.2f}", flush=True)


def backward(out: Tensor, *inputs: Tensor) -> Callable[[], object]:
    """Gradients of ``inputs``, again and again."""
    return partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True)


def products(h: Hardware) -> None:
    """Squares, the layers of an 8B model whole and cut for 8 ranks, and few rows."""
    print(f"\nproducts (m × k) · (k × n){'measured':>34}{'TFLOP/s':>15}{'model':>8}")
    squares = [(n, n, n) for n in (512, 1024, 2048, 4096, 8192, 16384)]
    layers = [(8192, 4096, n) for n in (6144, 28672, 3584, 1792, 768, 512)]
    back = [(8192, k, 4096) for k in (14336, 4096, 1792, 512)]
    few = [(m, 4096, 14336) for m in (1, 4, 16, 64, 256, 1024)]
    short = [(4096, k, 4096) for k in (64, 128, 256, 512, 1024)]
    head = [(8192, 4096, 128256), (8192, 4096, 16032), (16384, 768, 50304), (16384, 768, 50257)]
    for m, k, n in (*squares, *layers, *back, *few, *short, *head):
        make = partial(_random, (m, k), (n, k))
        _product(f"{m} × {k} · {k} × {n}", h, make, lambda a, b: a @ b.t(), (m, k, n), BF16)
    _product("the same by the gradient: 4096 × 8192 · 14336", h,
             partial(_random, (8192, 4096), (8192, 14336)), lambda a, b: a.t() @ b, (4096, 8192, 14336), BF16)  # fmt: skip
    for dtype in (torch.float32, torch.float64):
        make = partial(_random, (4096, 4096), (4096, 4096), dtype=dtype)
        _product(f"4096 cubed, {dtype}", h, make, torch.matmul, (4096,) * 3, dtype)
    torch.set_float32_matmul_precision("high")
    make = partial(_random, (4096, 4096), (4096, 4096), dtype=torch.float32)
    _product("4096 cubed, float32 as TF32", h, make, torch.matmul, (4096,) * 3, torch.float32)
    torch.set_float32_matmul_precision("highest")
    for batch, m, k, n in ((8, 1024, 4096, 1792), (64, 128, 2048, 1408), (256, 64, 128, 2048)):
        make = partial(_random, (batch, m, k), (batch, k, n))
        _product(f"{batch} of {m} × {k} · {n}", h, make, torch.bmm, (m, k, n), BF16, batch)


def _random(*shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    return tuple(torch.randn(s, device="cuda", dtype=dtype) for s in shapes)


def _product(
    what: str, h: Hardware, make: Callable[[], tuple[Tensor, ...]], call: Callable[..., Tensor],
    sizes: tuple[int, int, int], dtype: torch.dtype, batch: int = 1,
) -> None:  # fmt: skip
    m, k, n = sizes
    taken = seconds(turns(make, call), 10)
    flops, moved = 2.0 * batch * m * k * n, batch * (m * k + k * n + m * n) * dtype.itemsize
    shape = (batch, m, n) if batch > 1 else (m, n)
    model = h.kernel_latency + max(h.product_seconds(flops, shape, dtype), h.memory_seconds(moved))
    row(what, taken, model, f"{flops / taken / 1e12:.0f}")


def attention(h: Hardware) -> None:
    """Causal attention of 16384 tokens, width 2048; FLOPs of the causal half."""
    print(f"\ncausal attention{'measured':>43}{'TFLOP/s':>15}{'model':>8}")
    for dim in (128, 64):
        for length in (512, 1024, 2048, 4096, 8192, 16384):
            heads, batch = 2048 // dim, 16384 // length
            q, k, v = (torch.randn(batch, heads, length, dim, device="cuda", dtype=BF16) for _ in range(3))
            flops = 4.0 * batch * heads * length**2 * dim / 2
            call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
            for what, times, back in (("forward", 1.0, False), ("backward", 2.5, True)):
                if back:
                    q, k, v = (x.requires_grad_() for x in (q, k, v))
                    call = backward(F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
                taken, model = seconds(call, 10), h.attention_seconds(times * flops, length, BF16, back)
                rate = f"{times * flops / taken / 1e12:.0f}"
                row(f"{batch} × {length}, head dim {dim}, {what}", taken, h.kernel_latency + model, rate)
    q = torch.randn(64, 32, 1, 128, device="cuda", dtype=BF16)
    k, v = (torch.randn(64, 8, 4096, 128, device="cuda", dtype=BF16) for _ in range(2))
    taken = seconds(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), 10)
    row("one token, 64 × 4096 cached, 8 of 32 heads", taken, h.kernel_latency + h.memory_seconds(k.nbytes * 2),
        f"{2 * k.nbytes / taken / 1e9:.0f} GB/s")  # fmt: skip


def memory(h: Hardware) -> None:
    """Operations that are bound by memory; bytes read and written once."""
    print(f"\nbound by memory{'measured':>44}{'GB/s':>15}{'model':>8}")

    def one(what: str, moved: float, call: Callable[[], object]) -> None:
        taken = seconds(call, 10)
        row(what, taken, h.kernel_latency + h.memory_seconds(moved), f"{moved / taken / 1e9:.0f}")

    for tokens, width in ((256, 4096), (2048, 4096), (8192, 4096), (8192, 14336), (65536, 4096)):
        x, y = _random((tokens, width), (tokens, width))
        weight = torch.ones(width, device="cuda", dtype=BF16)
        out = torch.empty_like(x)
        n = x.nbytes
        one(f"add {tokens} × {width}", 3 * n, lambda x=x, y=y, out=out: torch.add(x, y, out=out))
        one(f"copy {tokens} × {width}", 2 * n, lambda x=x, out=out: out.copy_(x))
        one(f"rms_norm {tokens} × {width}", 2 * n, lambda x=x, w=weight: F.rms_norm(x, (x.shape[-1],), w))
        one(f"layer_norm {tokens} × {width}", 2 * n, lambda x=x, w=weight: F.layer_norm(x, (x.shape[-1],), w, w))
        one(f"gelu {tokens} × {width}", 2 * n, lambda x=x: F.gelu(x))
        one(f"silu(x)·y {tokens} × {width}, two kernels", 5 * n, lambda x=x, y=y: F.silu(x) * y)
        one(f"transposed copy {tokens} × {width}", 2 * n, lambda x=x: x.t().contiguous())
        one(f"softmax {tokens} × {width}", 2 * n, lambda x=x: torch.softmax(x, -1))
        one(f"to float32 {tokens} × {width}", 3 * n, lambda x=x: x.float())
        one(f"sum over rows {tokens} × {width}", n, lambda x=x: x.sum(0))
    logits = torch.randn(8192, 128256, device="cuda", dtype=BF16)
    labels = torch.randint(0, 128256, (8192,), device="cuda")
    one("cross entropy 8192 × 128256, bf16", 2 * logits.nbytes, partial(F.cross_entropy, logits, labels))
    table = torch.randn(128256, 4096, device="cuda", dtype=BF16)
    one("embedding, 8192 rows of 4096", 2 * 8192 * 4096 * 2, partial(F.embedding, labels, table))
    del logits, table
    for fused in (True, False):
        weights = [torch.randn(4096, 4096, device="cuda").requires_grad_() for _ in range(24)]
        for w in weights:
            w.grad = torch.randn_like(w)
        optimizer = torch.optim.AdamW(weights, fused=fused, foreach=not fused)
        one(
            f"AdamW {'fused' if fused else 'foreach'}, 403 M float32",
            7.0 * sum(w.nbytes for w in weights),
            optimizer.step,
        )
    x = torch.ones(8, device="cuda")
    out = torch.empty_like(x)
    row("smallest kernel, in a CUDA graph", replayed(lambda: torch.add(x, x, out=out)), h.kernel_latency)
    small = torch.randn(64, 64, device="cuda", dtype=BF16)
    row("smallest product, in a CUDA graph", replayed(lambda: small @ small), h.kernel_latency)
    row("smallest kernel, launched ahead", seconds(lambda: torch.add(x, x, out=out), 50), h.kernel_latency)
    row("200 smallest kernels, launched by the host, each", _hosted(x, out), h.kernel_latency)


def _hosted(x: Tensor, out: Tensor) -> float:
    def many() -> None:
        for _ in range(200):
            torch.add(x, x, out=out)

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    many()
    torch.cuda.synchronize()
    begin.record()
    many()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 200e3


def convolutions(h: Hardware) -> None:
    """Layers of ResNet-50 for 64 images, forward and backward."""
    print(f"\nconvolutions{'measured':>47}{'TFLOP/s':>15}{'model':>8}")
    layers = ((3, 64, 224, 7), (64, 64, 56, 3), (256, 64, 56, 1), (256, 256, 14, 3), (512, 512, 7, 3))
    for inner, outer, side, kernel in layers:
        for form in (torch.contiguous_format, torch.channels_last):
            x, w = (
                torch.randn(shape, device="cuda", dtype=BF16).to(memory_format=form).requires_grad_()
                for shape in ((64, inner, side, side), (outer, inner, kernel, kernel))
            )
            call: Callable[[], Tensor] = partial(F.conv2d, x, w, stride=2 if kernel == 7 else 1, padding=kernel // 2)
            out = call()
            flops, moved = 2.0 * out.numel() * inner * kernel**2, h.memory_seconds(x.nbytes + out.nbytes)
            work = h.convolution_seconds(flops, BF16)
            name = f"{inner} → {outer}, {kernel}², {side}²{', channels last' if form is torch.channels_last else ''}"
            for what, one, kernels in ((name, call, 1), ("  backward", backward(out, x, w), 2)):
                taken = seconds(one, 10)
                model = kernels * (h.kernel_latency + max(moved, work))
                row(what, taken, model, f"{kernels * flops / taken / 1e12:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", default="h100", help="the preset, or file, to compare with")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here")
        return
    torch.manual_seed(0)
    h = hardware(options.hardware)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, beside {h.name}")
    for part in (products, attention, memory, convolutions):
        part(h)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

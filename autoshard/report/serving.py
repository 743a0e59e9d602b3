"""Serving figures of a plan: seconds and bytes per token, tokens per second, and the roofline."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoshard.passes.ir.units import show_bytes, show_seconds


@dataclass(frozen=True)
class Phase:
    """One kind of call, such as prefill or decode; bytes are those of the busiest rank."""

    name: str
    times: float
    """runs, relative to other phases"""
    requests: int
    """batch size"""
    tokens: int
    """tokens per request that the call reads"""
    seconds: float
    sent: float
    """bytes of its collectives"""
    weights: float
    """bytes of weights read; of embedding tables the rows looked up"""
    caches: float
    """bytes of the KV cache read"""
    least_s: float
    """roofline of all devices: matmuls at peak FLOP/s, or weights and KV cache read once"""
    peak: float
    """peak memory of a rank in bytes"""

    @property
    def roofline(self) -> float:
        """Share of ``seconds`` that the roofline takes, which no layout can save."""
        return self.least_s / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Serving:
    """Serving of prompts and tokens with one layout of the weights; see :func:`autoshard.plan`."""

    objective: str
    """latency or throughput"""
    phases: tuple[Phase, ...]
    devices: int
    lower_bound: float = 0.0
    """lower bound on :attr:`total_s` with one layout of the weights"""
    room: float = math.nan
    """further requests of this length whose KV cache would fit; nan without caches"""

    @property
    def decode(self) -> Phase:
        """The decode phase: fewest tokens per request, then most frequent."""
        return min(self.phases, key=lambda p: (p.tokens, -p.times))

    @property
    def total_s(self) -> float:
        """Seconds of all phases, each as often as it runs."""
        return math.fsum(p.times * p.seconds for p in self.phases)

    @property
    def seconds_per_token(self) -> float:
        """Latency of the next token of a request."""
        return self.decode.seconds

    @property
    def tokens_per_second(self) -> float:
        """Throughput of new tokens over all requests and devices; the time includes prompts."""
        decode = self.decode
        return decode.times * decode.requests / self.total_s if self.total_s else 0.0

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """Bytes per rank for a new token of one request: sent, weights read, KV cache read."""
        decode = self.decode
        return {n: getattr(decode, n) / decode.requests for n in ("sent", "weights", "caches")}


def serving_text(serving: Serving) -> list[str]:
    """Lines for a report."""
    decode, per = serving.decode, serving.bytes_per_token
    lines = [
        f"{serving.objective}: {show_seconds(serving.seconds_per_token)} a token of each request, "
        f"{serving.tokens_per_second:.3g} tokens/s by {serving.devices} devices ({_requests(decode.requests)})",
        f"a token of a request: {show_bytes(per['sent'])} sent per rank, {show_bytes(per['weights'])} of weights and "
        f"{show_bytes(per['caches'])} of caches read",
    ]
    lines += [
        f"{phase.name} ×{phase.times:g}: {_requests(phase.requests)} of {phase.tokens} token"
        f"{'s' if phase.tokens > 1 else ''} in {show_seconds(phase.seconds)}, {phase.roofline:.0%} of which the "
        f"roofline takes; {show_bytes(phase.peak)} held per rank"
        for phase in serving.phases
    ]
    if not math.isnan(serving.room):
        lines.append(f"room for the caches of {serving.room:.0f} more requests as long as these")
    return lines


def _requests(count: int) -> str:
    return f"{count} request{'s' if count > 1 else ''}"

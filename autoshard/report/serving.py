"""What serving takes by a plan: seconds and bytes of a token, tokens a second, and what of it the hardware could not do
without."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoshard.passes.ir.units import show_bytes, show_seconds


@dataclass(frozen=True)
class Phase:
    """One kind of call, such as a prompt or a token after it; bytes are those of the busiest rank."""

    name: str
    times: float
    """how often it runs, relative to the others"""
    requests: int
    """rows of the batch"""
    tokens: int
    """of each request that the call reads"""
    seconds: float
    sent: float
    """bytes of its collectives"""
    weights: float
    """bytes of weights that it reads; of a table that is looked up in only rows"""
    caches: float
    """bytes of caches that it takes"""
    least_s: float
    """what all devices together need at least: for its products at their peak, or to read weights and caches once"""
    peak: float
    """bytes that a rank holds"""

    @property
    def roofline(self) -> float:
        """The share of ``seconds`` that no layout can save."""
        return self.least_s / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Serving:
    """Prompts and tokens by one set of weights; see :func:`autoshard.plan`, ``objective`` and ``profile``."""

    objective: str
    """latency or throughput"""
    phases: tuple[Phase, ...]
    devices: int
    lower_bound: float = 0.0
    """seconds that one run through all phases, as often as they run, takes at least with one layout of the weights"""
    room: float = math.nan
    """requests as long as these whose caches would fit beside them; nan: there are none"""

    @property
    def decode(self) -> Phase:
        """The phase that makes tokens: the one with the fewest for each request, of equals the most frequent."""
        return min(self.phases, key=lambda p: (p.tokens, -p.times))

    @property
    def total_s(self) -> float:
        """Seconds of one run through all phases, as often as they run."""
        return math.fsum(p.times * p.seconds for p in self.phases)

    @property
    def seconds_per_token(self) -> float:
        """What a request waits for its next token."""
        return self.decode.seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests on all devices, prompts included in the time."""
        decode = self.decode
        return decode.times * decode.requests / self.total_s if self.total_s else 0.0

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """Bytes of one rank for a new token of one request: sent, and read of weights and caches."""
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

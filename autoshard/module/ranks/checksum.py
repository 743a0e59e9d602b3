"""Checksum of a tensor, computed on its device."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

_ROW = 4096
"""words that are hashed together"""

_BLOCK = 1 << 20
"""words that are copied at once"""

_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
"""an odd number without a pattern: 2^64 / golden ratio"""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(x: torch.Tensor, most: int | None = None) -> torch.Tensor:
    """A multilinear hash: an int64 scalar on the device of ``x``.

    Zero for tensors without strided data (meta, sparse, nested, empty). ``most``: number of sampled
    elements; None: all. Sums 64-bit words times random odd weights modulo 2^64, then hashes the
    sums. Tensors of one shape that differ collide with a chance of about 2^-33.
    """
    if x.is_meta or x.layout != torch.strided or x.is_nested or not x.numel():
        return torch.zeros((), dtype=torch.int64, device="cpu" if x.is_meta else x.device)
    if most is not None and x.numel() > most:
        x = x.detach().reshape(-1)[:: x.numel() // most | 1]  # odd: rows may have 2^n columns
    sums = _words(x)
    while sums.numel() > 1:
        sums = torch.cat([_weighed(part) for part in sums.split(_BLOCK)])
    return sums.reshape(())


def _words(x: torch.Tensor) -> torch.Tensor:
    """``x`` as int64 words if its bytes allow it, else one word per element."""
    x = x.detach().resolve_conj().resolve_neg()
    x = (torch.view_as_real(x) if x.is_complex() else x).contiguous().reshape(-1)
    size = x.element_size()
    if x.numel() * size % 8 or x.storage_offset() * size % 8:
        return x.view(_INTEGERS[size]).to(torch.int64)
    return x.view(torch.int64)


def _weighed(words: torch.Tensor) -> torch.Tensor:
    """One hash per row of words."""
    words = words * _MIX
    words = words ^ ((words >> 32) & 0xFFFFFFFF)  # else changes of high bits (signs) would cancel
    weights = _weights(words.device)
    if words.numel() <= _ROW:
        return (words * weights[: words.numel()]).sum().reshape(1)
    rows = F.pad(words, (0, -words.numel() % _ROW)).view(-1, _ROW)
    return (rows * weights).sum(1)


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Random odd weights, equal on every rank."""
    generator = torch.Generator("cpu").manual_seed(0x5EED)
    limits = torch.iinfo(torch.int64)
    numbers = torch.randint(limits.min, limits.max, (_ROW,), generator=generator, dtype=torch.int64, device="cpu")
    return (numbers | 1).to(device)

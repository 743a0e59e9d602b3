"""A folder of safetensors files as a transfer's target: one rank writes each, as bytes arrive."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from autoshard.errors import PlanError
from autoshard.layout import Layout
from autoshard.transfers.files import DTYPES, SAFETENSORS_INDEX, Chunk, FileTensor
from autoshard.transfers.holdings import Held, Holdings, Replica
from autoshard.transfers.names import STATE_SEPARATOR, Names

MOST_FILE_BYTES = 5 * 10**9
"""bytes of one safetensors file, as transformers and hubs have used them"""

_ALIGNMENT = 16
"""bytes: tensors begin at a multiple, so that every dtype can be mapped"""


@dataclass
class FolderTarget:
    """A transfer's files, as many as ranks, of at most 5 GB, named when all are written."""

    path: Path
    held: dict[str, Held] = field(default_factory=dict)
    """entry → which rank writes it"""
    _contents: dict[str, list[str]] = field(default_factory=dict)
    _written: list[str] = field(default_factory=list)

    def number(self) -> int:
        """32-bit hash, equal for equal folders in every process."""
        return zlib.crc32(str(self.path).encode())

    def take(self, have: Holdings, names: Names, dtype: torch.dtype | None, ranks: Sequence[int]) -> None:
        """Decide entries, files, and which of ``ranks`` writes each. The same on all ranks."""
        wanted: dict[str, Held] = {}
        seen: set[int] = set()
        for entry, held in _entries(have, names).items():
            if id(held) not in seen:  # tied tensors once
                seen.add(id(held))
                wanted[entry] = replace(held, dtype=dtype) if dtype and held.dtype.is_floating_point else held
        if strange := sorted(n for n, h in wanted.items() if h.dtype not in DTYPES.values()):
            raise PlanError(
                f"safetensors has no dtype {wanted[strange[0]].dtype}, which {strange[:5]} have: give dtype=, "
                "or leave them out with names="
            )
        self._contents = _divided(wanted, len(ranks))
        one = Layout({"file": 1})
        self.held = {
            entry: replace(wanted[entry], replicas=(Replica(one, (ranks[n % len(ranks)],)),))
            for n, entries in enumerate(self._contents.values())
            for entry in entries
        }

    def targets(self, want: Holdings, names: Collection[str]) -> dict[str, FileTensor]:
        """Begin the files of entries ``names``, under other names until the end."""
        found: dict[str, FileTensor] = {}
        self._written.clear()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for file, entries in self._contents.items():
                if not entries or entries[0] in names:
                    found |= self._begin(file, {n: want[n] for n in entries})
        except OSError as error:
            raise PlanError(
                f"{self.path} cannot be written ({error}): give a folder with room for the files"
            ) from error
        return found

    def _begin(self, file: str, entries: Holdings) -> dict[str, FileTensor]:
        path, at = self.path / f"{file}.partial", 0
        kinds = {dtype: name for name, dtype in DTYPES.items()}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        ordered = sorted(entries.items(), key=lambda e: -e[1].dtype.itemsize)  # stays aligned
        for name, held in ordered:
            end = at + math.prod(held.shape) * held.dtype.itemsize
            header[name] = {"dtype": kinds[held.dtype], "shape": held.shape, "data_offsets": (at, end)}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        with path.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + at)
        self._written.append(file)
        first = 8 + len(text)
        return {
            name: FileTensor.whole(held.shape, held.dtype, Chunk(path, first + header[name]["data_offsets"][0]), -2)
            for name, held in ordered
        }

    def switch(self, *_: Any) -> None:
        """Give the files of this rank their names."""
        for file in self._written:
            os.replace(self.path / f"{file}.partial", self.path / file)

    def finish(self) -> None:
        """Write the index of several files, and remove what an earlier save left. On one rank, when all have switched."""
        index = self.path / SAFETENSORS_INDEX
        for path in self.path.glob("model*.safetensors"):
            if path.name not in self._contents and re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", path.name):
                path.unlink()
        if len(self._contents) == 1:
            index.unlink(missing_ok=True)
            return
        size = sum(math.prod(h.shape) * h.dtype.itemsize for h in self.held.values())
        weights = {entry: file for file, entries in self._contents.items() for entry in entries}
        partial = index.with_suffix(".partial")
        partial.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weights}, indent=2), "utf-8")
        os.replace(partial, index)


def _entries(have: Holdings, names: Names) -> dict[str, Held]:
    """Entry of the files → what it takes."""
    weights = {n: h for n, h in have.items() if STATE_SEPARATOR not in n}
    if callable(names):
        return {entry: h for n, h in weights.items() if (entry := names(n)) is not None}
    table = dict(names or {})
    if any(not isinstance(target, str) for target in table):
        raise PlanError(
            "names= divides a tensor among entries of a folder: write the fused tensor, and divide it when reading"
        )
    used = {n for value in table.values() for n in ([value] if isinstance(value, str) else value)}
    joined = {}
    for target, value in table.items():
        parts = [weights[n] for n in ([value] if isinstance(value, str) else value) if n in weights]
        if parts:
            rows = sum(p.shape[0] for p in parts) if len(parts) > 1 else None
            shape = parts[0].shape if rows is None else (rows, *parts[0].shape[1:])
            joined[target] = parts[0] if rows is None else replace(parts[0], shape=shape)
    return {n: h for n, h in weights.items() if n not in used} | joined


def _divided(wanted: Holdings, ranks: int) -> dict[str, list[str]]:
    """File → entries, in order, of about equal bytes: one file per rank, or more of 5 GB."""
    sizes = {n: math.prod(h.shape) * h.dtype.itemsize for n, h in wanted.items()}
    limit = min(MOST_FILE_BYTES, -(-sum(sizes.values()) // ranks))
    parts: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if parts[-1] and filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{n + 1:05}-of-{len(parts):05}.safetensors": entries for n, entries in enumerate(parts)}

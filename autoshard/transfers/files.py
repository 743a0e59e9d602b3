"""Folders of weights (safetensors, torch.distributed.checkpoint) as meshes of files: which file
holds which box, and byte ranges of boxes. :class:`FileTensor` reads and writes boxes like a
tensor that is indexed."""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import operator
import os
import pickle
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from autoshard.errors import PlanError
from autoshard.layout import Layout
from autoshard.runtime.programs.launch import as_plan_error
from autoshard.torch_private.fake import saved_tensor_place
from autoshard.transfers.holdings import FileGrid, Held
from autoshard.transfers.names import STATE_SEPARATOR

SAFETENSORS_INDEX = "model.safetensors.index.json"
"""index file of save_pretrained for sharded checkpoints: ``{"weight_map": {name: file}}``"""

_WORDS = {"F": ("float", 16, 32, 64), "BF": ("bfloat", 16), "I": ("int", 8, 16, 32, 64), "U": ("uint", 8, 16, 32, 64)}
_FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
DTYPES: dict[str, torch.dtype] = {
    f"{k}{n}": getattr(torch, f"{w}{n}") for k, (w, *bits) in _WORDS.items() for n in bits
}
DTYPES |= {"BOOL": torch.bool, "C64": torch.complex64} | _FLOAT8
"""name in safetensors headers → dtype"""


class Chunk(NamedTuple):
    """Where a chunk lies: first byte, and length of its archive (torch.distributed.checkpoint)."""

    path: Path
    offset: int
    archive: int = 0


@dataclass(frozen=True)
class FileTensor:
    """A tensor in files. ``x[slices].to(dtype)`` reads a box of one chunk, ``x[slices].copy_(tensor)`` writes it."""

    dtype: torch.dtype
    grid: FileGrid
    chunks: tuple[Chunk, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(b[-1] for b in self.grid.borders)

    @property
    def held(self) -> Held:
        """The tensor as a side of a schedule."""
        return Held(self.shape, self.dtype, (self.grid,))

    def __getitem__(self, at: tuple[slice, ...]) -> FileBox:
        return FileBox(self, at)

    @staticmethod
    def whole(shape: Sequence[int], dtype: torch.dtype, chunk: Chunk, number: int) -> FileTensor:
        """A tensor in one piece, in file ``number``."""
        grid = FileGrid(Layout({"file": 1}), (number,), tuple((0, n) for n in shape), (chunk.path.name,))
        return FileTensor(dtype, grid, (chunk,))


class FileBox(NamedTuple):
    """A box of a tensor in files, within one chunk."""

    tensor: FileTensor
    at: tuple[slice, ...]

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Read the box: its own bytes only."""
        chunk, starts, sizes = self._chunk()
        with (
            as_plan_error(chunk.path, "save or download it again. Weights may be loaded in part"),
            _open(chunk, "rb") as f,
        ):
            offset, strides = _place(chunk, sizes)
            order = sorted(range(len(strides)), key=lambda d: -strides[d])  # of the dims in the file
            shape = [self.at[d].stop - self.at[d].start for d in order]
            found = torch.empty(shape, dtype=self.tensor.dtype, device="cpu")
            for start, flat in _runs(found, [starts[d] for d in order], offset, [strides[d] for d in order]):
                f.seek(start)
                if f.readinto(flat) != len(flat):
                    raise OSError("the file ends within a tensor")
        return found.permute([order.index(d) for d in range(len(order))]).to(dtype)

    def copy_(self, values: torch.Tensor) -> None:
        """Write the box."""
        chunk, starts, sizes = self._chunk()
        values = values.to("cpu", self.tensor.dtype).contiguous()
        try:
            with _open(chunk, "rb+") as f:
                for start, flat in _runs(values, starts, *_place(chunk, sizes)):
                    f.seek(start)
                    if f.write(flat) != len(flat):
                        raise OSError("the disk is full")
        except OSError as error:
            raise PlanError(f"{chunk.path} cannot be written ({error}): give a folder with room for it") from error

    def _chunk(self) -> tuple[Chunk, list[int], list[int]]:
        """The chunk that holds the box, where the box begins in it, and its sizes."""
        number, starts, sizes = 0, [], []
        for slice_, borders in zip(self.at, self.tensor.grid.borders, strict=True):
            n = next(i for i, (_, end) in enumerate(itertools.pairwise(borders)) if slice_.start < end)
            number = number * (len(borders) - 1) + n
            starts.append(slice_.start - borders[n])
            sizes.append(borders[n + 1] - borders[n])
        return self.tensor.chunks[number], starts, sizes


def _runs(
    values: torch.Tensor, starts: Sequence[int], offset: int, strides: Sequence[int]
) -> Iterator[tuple[int, memoryview]]:
    """(first byte in the file, bytes) of each contiguous part of a box beginning at ``starts``."""
    octets: Any = values.reshape(-1).view(torch.uint8).numpy()
    flat = memoryview(octets)
    inner, run = len(starts), 1
    while inner and strides[inner - 1] == run:
        inner, run = inner - 1, run * values.shape[inner - 1]
    size = values.element_size()
    first, run = offset + size * sum(map(operator.mul, starts, strides)), run * size
    for n, at in enumerate(itertools.product(*map(range, values.shape[:inner]))):
        yield first + size * sum(map(operator.mul, at, strides)), flat[n * run : (n + 1) * run]


def _open(chunk: Chunk, mode: str) -> Any:
    return open(chunk.path, mode, buffering=0)


@functools.lru_cache(maxsize=1 << 16)
def _archived(chunk: Chunk) -> tuple[int, tuple[int, ...]]:
    """First byte and strides (elements) of a tensor that torch.save wrote."""
    with _open(chunk, "rb") as file:
        return saved_tensor_place(file, chunk.offset, chunk.archive)


def _place(chunk: Chunk, sizes: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """First byte and strides (elements) of a chunk in its file."""
    if chunk.archive:
        return _archived(chunk)
    return chunk.offset, tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))


@dataclass(frozen=True)
class Folder:
    """Weights, and optimizer state, in files: a source of transfers."""

    path: Path
    tensors: dict[str, FileTensor]
    """by name; the optimizer's as ``name|key``"""
    numbers: dict[str, Any] = field(default_factory=dict)
    """optimizer state without its parameter's shape, as ``name|key``"""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """options of the optimizer's parameter groups"""

    @property
    def held(self) -> dict[str, Held]:
        """Name → shape, dtype and files of a tensor."""
        return {name: tensor.held for name, tensor in self.tensors.items()}


def open_folder(path: str | os.PathLike[str], wanted: Collection[str]) -> Folder:
    """The tensors in a folder, or in one safetensors file; reads headers only. ``wanted``: weights
    of the target, perhaps under a prefix (``model.``). :class:`PlanError` for files missing, cut
    short or garbled."""
    folder = Path(path)
    return _checkpoint(folder, wanted) if (folder / ".metadata").is_file() else _safetensors(folder)


# --- safetensors ---


def _safetensors(folder: Path) -> Folder:
    indexed, tensors = _indexed_files(folder), dict[str, FileTensor]()
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    for number, path in enumerate(paths if indexed is None else sorted(set(indexed.values()))):
        entries = _header(path, -2 - number)
        if indexed is not None:
            absent = sorted(n for n, file in indexed.items() if file == path and n not in entries)
            if absent:
                raise PlanError(f"{path} lacks {absent[:5]}, which the index says it holds. Download both again")
            entries = {n: x for n, x in entries.items() if indexed.get(n) == path}
        if twice := entries.keys() & tensors.keys():
            name = min(twice)
            raise PlanError(f"{path} and {tensors[name].chunks[0].path} both have an entry {name!r}. Give one file")
        tensors |= entries
    if not tensors:
        raise PlanError(f"{folder} holds no safetensors files and no .metadata of torch.distributed.checkpoint")
    return Folder(folder, tensors)


def _indexed_files(folder: Path) -> dict[str, Path] | None:
    """Entry → file of the index of ``save_pretrained``; None without an index."""
    index = folder / SAFETENSORS_INDEX
    if not index.is_file():
        return None
    with as_plan_error(index, f'it must be JSON such as {{"weight_map": {{"weight": "{SAFETENSORS_INDEX[:17]}"}}}}'):
        weights = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        outside = [file for file in weights.values() if Path(file).name != file or "\\" in file]
    if outside:
        raise PlanError(f"{index} names {outside[0]!r}: an index may only name files in its own folder, without a path")
    return {name: folder / file for name, file in weights.items()}


def _header(path: Path, number: int) -> dict[str, FileTensor]:
    with as_plan_error(path, "download or save it again"):
        with safe_open(path, "pt"):  # checks offsets and lengths
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
        entries.pop("__metadata__", None)
        found = {}
        for name, entry in entries.items():
            chunk = Chunk(path, 8 + size + entry["data_offsets"][0])
            found[name] = FileTensor.whole(entry["shape"], DTYPES[entry["dtype"]], chunk, number)
        return found


# --- torch.distributed.checkpoint ---


def _checkpoint(folder: Path, wanted: Collection[str]) -> Folder:
    with as_plan_error(folder / ".metadata", "the save did not end, or give another folder"):
        try:
            metadata = FileSystemReader(folder).read_metadata()
        except (pickle.UnpicklingError, EOFError, ImportError, IndexError) as error:
            raise ValueError(f"it is not metadata: {error}") from error
    stored: Mapping[Any, Any] = metadata.storage_data
    numbers = {name: -2 - n for n, name in enumerate(sorted({s.relative_path for s in stored.values()}))}
    found: dict[str, FileTensor] = {}
    objects: dict[str, Chunk] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            places = {tuple(c.offsets): (tuple(c.sizes), stored[MetadataIndex(key, c.offsets)]) for c in entry.chunks}
            found[key] = _gridded(folder, key, entry, places, numbers)
        else:
            place = stored[MetadataIndex(key)]
            objects[key] = Chunk(folder / place.relative_path, place.offset, place.length)
    return _by_parameter(folder, found, objects, wanted)


def _gridded(
    folder: Path, key: str, entry: TensorStorageMetadata, places: Mapping[Any, Any], numbers: Mapping[str, int]
) -> FileTensor:
    """A tensor of a checkpoint, whose chunks are the boxes of a grid."""
    borders = []
    for dim, size in enumerate(entry.size):
        starts = sorted({at[dim] for at, (sizes, _) in places.items() if math.prod(sizes)})
        borders.append((*starts, size) if starts else (0, size))
    chunks, ranks = [], []
    for block in itertools.product(*map(itertools.pairwise, borders)):
        sizes, place = places.get(tuple(start for start, _ in block), ((), None))
        if place is None or sizes != tuple(end - start for start, end in block) or place.transform_descriptors:
            raise PlanError(
                f"the chunks of {key!r} in {folder} are compressed, or no grid: load it with its own reader"
            )
        path = folder / place.relative_path
        if not path.is_file() or path.stat().st_size < place.offset + place.length:
            raise PlanError(f"{path} cannot be read (it is missing, or shorter than the metadata says): save it again")
        chunks.append(Chunk(path, place.offset, place.length))
        ranks.append(numbers[place.relative_path])
    names = tuple(c.path.name for c in chunks)
    grid = FileGrid(Layout({"file": 1}), tuple(ranks), tuple(borders), names)
    return FileTensor(entry.properties.dtype, grid, tuple(chunks))


def _by_parameter(
    folder: Path, found: Mapping[str, FileTensor], objects: Mapping[str, Chunk], wanted: Collection[str]
) -> Folder:
    """Keys (``model.NAME``, ``optimizer.state.NAME.exp_avg``, ``….param_groups.0.lr``) by parts."""
    some = sorted(wanted)[:8]
    prefixes = sorted({k.removesuffix(n) for n in some for k in found if k == n or k.endswith(f".{n}")})
    count = {prefix: sum(prefix + n in found for n in wanted) for prefix in prefixes}
    best = [prefix for prefix in prefixes if count[prefix] == max(count.values())]
    if len(best) > 1:
        raise PlanError(f"{folder} holds the weights several times, under {best}: name one with names=")
    prefix, tensors, numbers = "".join(best), dict[str, FileTensor](), dict[str, Any]()
    options: dict[int, dict[str, Any]] = {}
    for key, x in found.items():
        name, _, state = key.partition("state.")[2].rpartition(".")
        if prefix + name in found and name:
            like = found[prefix + name]
            if x.shape == like.shape:
                tensors[f"{name}{STATE_SEPARATOR}{state}"] = x
            else:
                numbers[f"{name}{STATE_SEPARATOR}{state}"] = x[tuple(slice(0, n) for n in x.shape)].to(x.dtype)
        elif key.startswith(prefix):
            tensors[key.removeprefix(prefix)] = x
    for key, chunk in objects.items():
        if match := re.search(r"param_groups\.(\d+)\.(\w+)$", key):
            options.setdefault(int(match[1]), {})[match[2]] = _saved_object(chunk)
    groups = [{k: v for k, v in options[n].items() if k != "params"} for n in sorted(options)]
    return Folder(folder, tensors, numbers, groups)


def _saved_object(chunk: Chunk) -> Any:
    with as_plan_error(chunk.path, "save it again"), _open(chunk, "rb") as file:
        file.seek(chunk.offset)
        return torch.load(io.BytesIO(file.read(chunk.archive)), weights_only=True)

"""Folders of weights as sources and targets of transfers: byte ranges that each rank reads, and files that ranks write."""

from __future__ import annotations

import io
import json
import math
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from transfer_pairs import decoder, megatron

import autoshard
from autoshard.errors import PlanError
from autoshard.hardware import hardware
from autoshard.layout import Grouped, Layout, Shard
from autoshard.mesh import Mesh
from autoshard.module.dtensors.segments import shard_of
from autoshard.transfers import files
from autoshard.transfers.files import SAFETENSORS_INDEX, Chunk, FileTensor, Folder, open_folder
from autoshard.transfers.holdings import Held, Replica
from autoshard.transfers.messages import RankMessages
from autoshard.transfers.names import links_of
from autoshard.transfers.schedule import make_schedule

IDS = torch.arange(24).view(4, 6) % 11


class Net(nn.Module):
    """Uneven sizes, a tied head, and buffers of ints and bools."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.up, self.down = nn.Embedding(11, 6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.randint(9, (5,)))
        self.register_buffer("mask", torch.rand(10) < 0.5)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.down(self.up(x).tanh() * self.mask * self.count.sum())
        return self.head(x).square().mean()


class Counted(io.FileIO):
    """A file that counts what is read in bytes."""

    read_bytes = 0

    def readinto(self, into: Any) -> int:
        n = super().readinto(into)
        Counted.read_bytes += n
        return n


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr(files, "open", lambda path, mode, buffering: Counted(path, mode), raising=False)
    Counted.read_bytes = 0
    return Counted


def shards(folder: Folder, want: dict[str, Held], rank: int, buffer: int = 10**6) -> dict[str, torch.Tensor]:
    """What ``rank`` reads of a folder."""
    schedule = make_schedule(folder.held, want, links_of(folder.held, want), hardware("h100"))
    assert schedule.received == schedule.bound
    found = {
        n: torch.full(h.replicas[0].layout.local_shape(h.shape, rank), 77, dtype=torch.float64) for n, h in want.items()
    }
    messages = RankMessages.of(schedule, rank, buffer)
    assert max(p.nbytes for p, _ in messages.kept) <= max(buffer, 8)
    messages.write(folder.tensors, (), found)
    return found


LAYOUTS = {
    "rows": ({"tp": Shard(0)}, (13, 6)),
    "columns": ({"tp": Shard(1)}, (6, 13)),
    "both": ({"tp": Shard(1), "dp": Shard(0)}, (7, 9)),
    "nested": ({"tp": Shard(0), "dp": Shard(0)}, (17, 3)),
    "segments": ({"tp": Grouped(0, (2, 1, 1))}, (24, 5)),
    "four dims": ({"tp": Shard(2), "dp": Shard(1)}, (3, 5, 7, 2)),
    "a scalar": ({}, ()),
}
MESH = Mesh({"dp": 2, "tp": 3}, hardware="h100")


@pytest.mark.parametrize("buffer", [10**6, 40])
def test_a_rank_reads_its_own_bytes(tmp_path: Path, counted: type[Counted], buffer: int) -> None:
    """Of every layout and dtype; the bytes read are those of the shard."""
    values = {n: torch.arange(math.prod(s)).view(s).to(torch.float32) for n, (_, s) in LAYOUTS.items()}
    save_file(values, tmp_path / "model.safetensors")
    folder = open_folder(tmp_path, values)
    want = {
        n: Held(s, torch.float64, (Replica(Layout(MESH, cut), tuple(range(6))),)) for n, (cut, s) in LAYOUTS.items()
    }
    for rank in range(MESH.size):
        counted.read_bytes = 0
        found = shards(folder, want, rank, buffer)
        for name, x in found.items():
            assert torch.equal(x, shard_of(values[name], want[name].replicas[0].layout, rank).double()), name
        assert counted.read_bytes == 4 * sum(x.numel() for x in found.values())


def checkpoint_of(folder: Path, values: dict[str, torch.Tensor], layouts: dict[str, tuple[Mesh, Any]]) -> None:
    """A torch.distributed.checkpoint whose chunks are the shards of ``layouts``, each rank's in a file."""
    entries, stored = {}, {}
    dcp.save({n: x.clone() for n, x in values.items()}, checkpoint_id=folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for name, (mesh, cut) in layouts.items():
        layout, chunks = Layout(mesh, cut), []
        for rank in range(mesh.size):
            block = [layout.chunk_of(d, n, rank) for d, n in enumerate(values[name].shape)]
            offsets, sizes = (torch.Size(side) for side in zip(*block, strict=True))
            index = MetadataIndex(name, offsets)
            if not math.prod(sizes) or index in stored:
                continue
            chunks.append(dcp.metadata.ChunkStorageMetadata(offsets, sizes))
            part = shard_of(values[name], layout, rank).clone()
            part = part.t().contiguous().t() if part.ndim == 2 else part  # strides are kept by torch.save
            with (folder / f"__{rank}_0.distcp").open("ab") as out:
                begin = out.tell()
                torch.save(part, out)
                place = type(next(iter(metadata.storage_data.values())))(
                    f"__{rank}_0.distcp", begin, out.tell() - begin
                )
            stored[index] = place
        entries[name] = replace(metadata.state_dict_metadata[name], chunks=chunks)
    found = replace(metadata, state_dict_metadata=entries, storage_data=stored)
    (folder / ".metadata").write_bytes(pickle.dumps(found))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_chunks_of_a_checkpoint(tmp_path: Path, counted: type[Counted]) -> None:
    """A checkpoint of one mesh is read on another: bytes as of the shard, besides the archives' headers."""
    values = {n: torch.randn(s) for n, (_, s) in LAYOUTS.items() if s and "segments" not in n}
    other = Mesh({"a": 2, "b": 2})
    saved = {"rows": {"a": Shard(0), "b": Shard(0)}, "columns": {"b": Shard(0)}, "four dims": {"a": Shard(2)}}
    checkpoint_of(tmp_path, values, {n: (other, saved.get(n, {"a": Shard(1), "b": Shard(0)})) for n in values})
    folder = open_folder(tmp_path, values)
    assert {len(folder.tensors[n].chunks) for n in values} == {2, 4}
    want = {
        n: Held(s, torch.float64, (Replica(Layout(MESH, LAYOUTS[n][0]), tuple(range(6))),))
        for n, s in ((n, tuple(x.shape)) for n, x in values.items())
    }
    for rank in range(MESH.size):
        for _ in range(2):  # the second time the archives' headers are known
            counted.read_bytes = 0
            found = shards(folder, want, rank)
            for name, x in found.items():
                assert torch.equal(x, shard_of(values[name], want[name].replicas[0].layout, rank).double()), name
        assert counted.read_bytes == 4 * sum(x.numel() for x in found.values())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux does")
@pytest.mark.parametrize("whole", [False, True])
def test_peak_memory_is_shard_and_buffer(tmp_path: Path, whole: bool) -> None:
    """Of columns of 64 MB on eight ranks; the control reads the whole tensor, as files are usually read."""
    save_file({"w": torch.arange(2**24, dtype=torch.float32).view(4096, 4096)}, tmp_path / "model.safetensors")
    layout, buffer = Layout(Mesh({"tp": 8}), {"tp": Shard(1)}), 2**20
    want = {"w": Held((4096, 4096), torch.float32, (Replica(layout, tuple(range(8))),))}
    folder = open_folder(tmp_path, want)
    shards(folder, want, 3, buffer)

    def status(key: str) -> int:
        text = Path("/proc/self/status").read_text()
        return int(text[text.index(key) :].split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS:")
    found = shard_of(load_file(tmp_path / "model.safetensors")["w"].clone(), layout, 3) if whole else None
    found = shards(folder, want, 3, buffer)["w"] if found is None else found
    grown = status("VmHWM:") - before
    assert torch.equal(found[:, 0], torch.arange(4096) * 4096.0 + 3 * 512)
    limit = 4096 * 512 * 8 + 2 * buffer + 4 * 2**20  # the shard is float64; allocators and Python round up
    assert (grown <= limit) != whole, (grown, limit)


def test_a_schedule_of_a_large_checkpoint() -> None:
    """70B parameters in 30 files, on the ranks of a tensor-parallel server: each rank reads its shard."""
    shapes = decoder(80, 8192, 28672, 128256)
    stored = {
        name: FileTensor.whole(
            shape, torch.bfloat16, Chunk(Path(f"{n * 30 // len(shapes)}"), 0), -2 - n * 30 // len(shapes)
        )
        for n, (name, shape) in enumerate(shapes.items())
    }
    want, folder = megatron(shapes, Mesh({"replica": 8, "tp": 8}, hardware="h100")), Folder(Path(), stored)
    began = time.perf_counter()
    schedule = make_schedule(folder.held, want, links_of(folder.held, want), hardware("h100"))
    assert time.perf_counter() - began < 10
    assert schedule.received == schedule.bound
    for rank in (0, 13, 63):
        held = sum(math.prod(h.replicas[0].layout.local_shape(h.shape, rank)) * 2 for h in want.values())
        assert schedule.received[rank] == held == sum(p.nbytes for p in schedule.pieces(rank))
    assert "30 senders → 64 receivers" in str(schedule)
    page = schedule._repr_html_()
    assert "30 senders → 64 receivers" in page
    assert page.count("<tr>") == 1 + 30
    assert page.count('<td title="0 B"') == 30 * 64 - len(schedule.messages)
    want = megatron(shapes, Mesh({"replica": 16, "tp": 8}, hardware="h100"))
    many = make_schedule(folder.held, want, links_of(folder.held, want), hardware("h100"))
    assert "<table>" not in many._repr_html_()  # of 158 files and ranks


def compiled(seed: int, axes: dict[str, int], like: Any = "fsdp") -> Any:
    return autoshard.compile(Net(seed), axes, (IDS,), like=like)


def equal(a: Any, b: Any) -> bool:
    x, y = a.full_state_dict(), b.full_state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


@pytest.mark.parametrize("ranks", [1, 3])
def test_to_a_folder_and_back(tmp_path: Path, ranks: int) -> None:
    """Each rank writes a file; tied weights once; the index is that of transformers; older files go."""
    for stale in (
        "model.safetensors",
        "model-00001-of-00009.safetensors",
        SAFETENSORS_INDEX,
        "adapter_model.safetensors",
    ):
        (tmp_path / stale).write_text("{}")
    source, other = compiled(1, {"dp": ranks}), compiled(2, {"tp": 2}, "megatron")
    report = autoshard.transfer(source, tmp_path)
    assert report.tensors == 7
    (tmp_path / "adapter_model.safetensors").unlink()
    names = {p.name for p in tmp_path.iterdir()}
    parts = sorted(n for n in names if n.endswith(".safetensors"))
    assert names == {*parts, *([SAFETENSORS_INDEX] if len(parts) > 1 else [])}
    assert (len(parts) > 1) == (ranks > 1)
    written = {n: x for part in parts for n, x in load_file(tmp_path / part).items()}
    state = source.full_state_dict()
    assert state.keys() - written.keys() == {"head.weight"}
    assert all(torch.equal(x, state[n]) and x.dtype == state[n].dtype for n, x in written.items())
    if len(parts) > 1:
        index = json.loads((tmp_path / SAFETENSORS_INDEX).read_text())
        assert index["weight_map"].keys() == written.keys()
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in written.values())
    assert not equal(source, other)
    autoshard.load_safetensors(other, tmp_path)
    assert equal(source, other)
    assert float(other(IDS)) == pytest.approx(float(source(IDS)), rel=1e-12)


def test_names_and_dtypes(tmp_path: Path) -> None:
    source, other = compiled(1, {"dp": 2}), compiled(2, {"tp": 2}, "megatron")
    autoshard.transfer(source, tmp_path, names=lambda n: f"net.{n}", dtype=torch.bfloat16)
    with pytest.raises(PlanError, match=r"lacks 8 tensors of the target: .*Map the names"):
        autoshard.transfer(tmp_path, other)
    autoshard.load_safetensors(other, tmp_path, names=lambda n: n.removeprefix("net."))
    for name, x in source.full_state_dict().items():
        rounded = x.bfloat16().double() if x.is_floating_point() else x
        assert torch.equal(other.full_state_dict()[name], rounded), name
    joined = {"both": ("up.bias", "down.bias")}
    autoshard.transfer(source, tmp_path, names=joined)
    autoshard.transfer(tmp_path, other, names={v: k for k, v in joined.items()})
    assert equal(source, other)


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:Detected an existing")
def test_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    """torch.distributed.checkpoint's keys, with the optimizer's state and options."""
    source, other = compiled(1, {"dp": 2}), compiled(2, {"tp": 2}, "megatron")
    first, second = torch.optim.AdamW(source.parameters(), lr=0.1), torch.optim.AdamW(other.parameters(), lr=0.5)

    def step(module: Any, optimizer: torch.optim.Optimizer) -> float:
        loss = module(IDS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    step(source, first)
    model, optim = dcp.state_dict.get_state_dict(source, first)
    dcp.save({"model": model, "optimizer": optim, "step": 1}, checkpoint_id=tmp_path / "a")
    report = autoshard.transfer(tmp_path / "a", other, optimizer=(None, second))
    assert "reads" in str(report)
    assert "__0_0.distcp" in str(report)
    assert second.param_groups[0]["lr"] == 0.1
    assert [step(source, first) for _ in range(3)] == pytest.approx([step(other, second) for _ in range(3)], rel=1e-9)
    dcp.save({"model": source.state_dict(), "ema": source.state_dict()}, checkpoint_id=tmp_path / "b")
    with pytest.raises(PlanError, match=r"several times, under \['ema.', 'model.'\]"):
        autoshard.transfer(tmp_path / "b", other)
    dcp.save(source.state_dict(), checkpoint_id=tmp_path / "c")
    autoshard.transfer(tmp_path / "c", other)
    assert equal(source, other)


def test_errors(tmp_path: Path) -> None:
    source = compiled(1, {"dp": 2})
    with pytest.raises(PlanError, match="no optimizer state"):
        autoshard.transfer(source, tmp_path, optimizer=(torch.optim.AdamW(source.parameters()), None))
    with pytest.raises(PlanError, match=r"holds no safetensors files and no \.metadata"):
        autoshard.transfer(tmp_path, source)
    with pytest.raises(PlanError, match="dtype= is for what ranks send"):
        autoshard.transfer(tmp_path, source, dtype=torch.bfloat16)
    (tmp_path / ".metadata").write_bytes(b"\x80garbled")
    with pytest.raises(PlanError, match=r"\.metadata cannot be read"):
        autoshard.transfer(tmp_path, source)
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written"):
        autoshard.transfer(source, tmp_path / "file")
    with pytest.raises(PlanError, match=r"takes results of autoshard.compile, got NoneType"):
        autoshard.transfer(tmp_path, None)

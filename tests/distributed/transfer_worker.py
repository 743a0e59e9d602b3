"""One rank of a gloo world that moves weights between sharded modules. Started by test_transfers_gloo.py."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import world
from checks import assert_all_raise, main
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autoshard
from autoshard.errors import CommunicationError, MeshError, PlanError
from autoshard.transfers.messages import Exchange

TOKENS = torch.arange(48).view(4, 12) % 23
TRAINED: dict[int, dict[str, int]] = {2: {"dp": 2}, 4: {"dp": 2, "tp": 2}}


class Net(nn.Module):
    """Uneven sizes, a buffer, and a head that is tied to the embedding."""

    def __init__(self, width: int = 10, inner: int = 14, fused: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, width)
        self.norm = nn.LayerNorm(width)
        if fused:
            self.qk = nn.Linear(width, 2 * inner)
        else:
            self.q, self.k = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.head = nn.Linear(width, 23, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(inner))
        self.fused = fused

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens))
        q, k = self.qk(x).chunk(2, -1) if self.fused else (self.q(x), self.k(x))
        return self.head(x + self.down(q.tanh() * k * self.scale)).square().mean()


def net(seed: int, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options).double()


def compiled(seed: int, mesh: Any, like: Any = None, **options: Any) -> Any:
    model = net(seed, **options)
    inference = {"training": False} if like is None else {}
    hints = {
        "down.weight": {mesh.mesh_dim_names[-1] if isinstance(mesh, DeviceMesh) else [*mesh][-1]: autoshard.Shard(1)}
    }
    return autoshard.compile(model, mesh, (TOKENS,), like=like, hints=None if like else hints, **inference)


def trainer(seed: int = 1) -> Any:
    mesh = TRAINED[dist.get_world_size()]
    return compiled(seed, mesh, {"dp": "fsdp"})


def step(module: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = module(TOKENS)
    loss.backward()
    autoshard.clip_grad_norm_(module, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def assert_equal_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert torch.equal(x, b[name].to(x.dtype)), name


def same_ranks() -> None:
    """After every step the generator has the trainer's weights; its programs and caches see them."""
    source, target = trainer(), compiled(2, {"tp": dist.get_world_size()})
    optimizer = torch.optim.AdamW(source.parameters(), lr=0.1)
    target.eval()
    for _ in range(3):
        with torch.no_grad():
            before = float(target(TOKENS))
        report = autoshard.transfer(source, target)
        assert_equal_weights(source.full_state_dict(), target.full_state_dict())
        with torch.no_grad():
            assert abs(float(target(TOKENS)) - float(source(TOKENS))) < 1e-12 < abs(float(target(TOKENS)) - before)
        assert report.schedule.received == report.schedule.bound
        assert report.unused == ()
        step(source, optimizer)


def small_buffers_and_dtypes() -> None:
    """Many rounds, and bfloat16 on the wire: both sides then have rounded values everywhere."""
    source, target = trainer(), compiled(2, {"tp": dist.get_world_size()})
    report = autoshard.transfer(source, target, buffer=512)
    assert report.rounds > 3
    assert_equal_weights(source.full_state_dict(), target.full_state_dict())
    autoshard.transfer(source, target, dtype=torch.bfloat16, buffer=512)
    rounded = {n: x.to(torch.bfloat16).double() for n, x in source.full_state_dict().items()}
    assert_equal_weights(rounded, target.full_state_dict())


def fused_names() -> None:
    source, target = trainer(), compiled(2, {"tp": dist.get_world_size()}, fused=True)
    join = {f"qk.{n}": (f"q.{n}", f"k.{n}") for n in ("weight", "bias")}
    autoshard.transfer(source, target, names=join)
    have, found = source.full_state_dict(), target.full_state_dict()
    for n in ("weight", "bias"):
        assert torch.equal(found[f"qk.{n}"], torch.cat([have[f"q.{n}"], have[f"k.{n}"]]))
    back = trainer(3)
    autoshard.transfer(target, back, names={v: k for k, v in join.items()})
    assert_equal_weights(have, back.full_state_dict())


def a_wrapped_model() -> None:
    """A function maps names; what the target lacks is not sent."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm, self.value = net(1), nn.Linear(1, 1).double()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.value(self.lm(tokens)[None])[0]

    mesh = TRAINED[dist.get_world_size()]
    source, target = (
        autoshard.compile(Loss(), mesh, (TOKENS,), like={"dp": "fsdp"}),
        compiled(2, {"tp": dist.get_world_size()}),
    )
    report = autoshard.transfer(source, target, names=lambda n: n.removeprefix("lm.") if n.startswith("lm.") else None)
    assert report.unused == ("value.weight", "value.bias")
    assert_equal_weights(
        {n.removeprefix("lm."): x for n, x in source.full_state_dict().items() if "value" not in n},
        target.full_state_dict(),
    )


def optimizers() -> None:
    """Training goes on in another layout as if nothing had happened."""
    source, target = trainer(), compiled(2, {"tp": dist.get_world_size()}, "zero1")
    first, second = (torch.optim.AdamW(m.parameters(), lr=lr) for m, lr in ((source, 0.1), (target, 0.3)))
    for _ in range(2):
        step(source, first)
    autoshard.transfer(source, target, optimizer=(first, second))
    losses = [step(m, o) for m, o in ((source, first), (target, second)) for _ in range(3)]
    assert max(abs(a / b - 1) for a, b in zip(losses[:3], losses[3:], strict=True)) < 1e-9, losses
    for n, x in source.full_state_dict().items():
        assert torch.allclose(x, target.full_state_dict()[n], rtol=1e-9, atol=1e-12)


def parts() -> tuple[DeviceMesh, DeviceMesh]:
    """Meshes of the first and of the second half of the ranks; every rank makes both."""
    half = dist.get_world_size() // 2
    return DeviceMesh("cpu", torch.arange(half), mesh_dim_names=("dp",)), DeviceMesh(
        "cpu", torch.arange(half, 2 * half), mesh_dim_names=("tp",)
    )


def disjoint_ranks() -> None:
    """A trainer on one half of the ranks, a generator on the other; each trains or runs by itself."""
    first, second = parts()
    mine = dist.get_rank() < dist.get_world_size() // 2
    source = compiled(1, first, "fsdp") if mine else None
    target = None if mine else compiled(2, second)
    optimizer = torch.optim.AdamW(source.parameters(), lr=0.1) if mine else None
    plain = net(1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(3):
        autoshard.transfer(source, target)
        with torch.no_grad():
            assert abs(float((source or target)(TOKENS)) - float(plain(TOKENS))) < 1e-9
        if mine:
            step(source, optimizer)
        loss = plain(TOKENS)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
    other = parts()[mine]
    with pytest.raises(MeshError, match="is not in the DeviceMesh"):
        compiled(3, other)
    with pytest.raises(PlanError, match=r"save\(\) needs a module of all"):
        (source or target).save("/nowhere")


def replicas() -> None:
    """Generators on several groups of ranks are replicas: each receives all weights."""
    source = trainer()
    ranks = torch.arange(dist.get_world_size()).view(2, -1)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replica", "tp"))["tp"]
    target = compiled(2, mesh)
    report = autoshard.transfer(source, target)
    assert_equal_weights(source.full_state_dict(), target.full_state_dict())
    assert report.schedule.received == report.schedule.bound


def beside_training() -> None:
    """The target has the old weights until wait(), and then those of the time of the call."""
    source, target = trainer(), compiled(2, {"tp": dist.get_world_size()})
    optimizer = torch.optim.AdamW(source.parameters(), lr=0.1)
    sent, old = source.full_state_dict(), target.full_state_dict()
    handle = autoshard.transfer(source, target, asynchronous=True, buffer=2000)
    for _ in range(2):
        step(source, optimizer)
    assert_equal_weights(old, target.full_state_dict())
    handle.wait()
    assert handle.done()
    assert_equal_weights(sent, target.full_state_dict())
    assert not torch.equal(sent["down.weight"], source.full_state_dict()["down.weight"])


def stages() -> None:
    """A pipeline, whose head is tied to the embedding on another stage, with its optimizer."""
    size = dist.get_world_size()
    mesh = {"pp": 2} if size == 2 else {"pp": 2, "tp": 2}
    source = autoshard.compile(net(1), mesh, (TOKENS,), stages="pp", micro_batches=2)
    target = compiled(2, {"tp": size}, "zero1")
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (source, target))
    step(source, first)
    autoshard.transfer(source, target, optimizer=(first, second))
    have, found = source.full_state_dict(), target.full_state_dict()
    for n, x in have.items():  # each of the two stages rounds its gradient of the tied weight
        tolerance = 1e-9 if n in ("embedding.weight", "head.weight") else 0.0
        far = float((x - found[n]).abs().max() / x.abs().max())
        assert far <= tolerance, (n, far)
    losses = [step(source, first), step(target, second), step(source, first), step(target, second)]
    assert abs(losses[0] / losses[1] - 1) + abs(losses[2] / losses[3] - 1) < 1e-9, losses


def shared_folder() -> Path:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def folders() -> None:
    """Every rank writes a file, in small rounds, beside training; ranks on one half read them without the others."""
    source, folder, size = trainer(), shared_folder(), dist.get_world_size()
    sent = source.full_state_dict()
    handle = autoshard.transfer(source, folder, asynchronous=True, buffer=512)
    step(source, torch.optim.SGD(source.parameters(), lr=0.1))
    if dist.get_rank() == 0:
        assert not [p for p in folder.iterdir() if p.suffix != ".partial"], "no file appears before the end"
    handle.wait()
    files = sorted(p.name for p in folder.iterdir())
    assert len(files) > size / 2, files
    target = compiled(2, {"tp": size})
    autoshard.load_safetensors(target, folder)
    assert_equal_weights(sent, target.full_state_dict())
    if dist.get_rank() < size // 2:
        first = compiled(3, parts()[0], "fsdp")
    else:
        parts()
        return
    autoshard.transfer(folder, first)
    assert_equal_weights(sent, first.full_state_dict())


def stages_in_folders() -> None:
    """A pipeline writes and reads; the tied head is on two stages."""
    size, folder = dist.get_world_size(), shared_folder()
    mesh = {"pp": 2} if size == 2 else {"pp": 2, "tp": 2}
    made = [autoshard.compile(net(n), mesh, (TOKENS,), stages="pp", micro_batches=2) for n in (1, 2)]
    sent = made[0].full_state_dict()
    autoshard.transfer(made[0], folder)
    autoshard.load_safetensors(made[1], folder)
    assert_equal_weights(sent, made[1].full_state_dict())


def refused() -> None:
    """What one rank gives otherwise is refused on all, and nothing hangs afterwards."""
    source, target = trainer(), compiled(2, {"tp": dist.get_world_size()})
    old = target.full_state_dict()
    mine = {"missing": "q.weight"} if dist.get_rank() == 1 else None
    assert_all_raise(
        PlanError, "names= gives 'missing' as a target", lambda: autoshard.transfer(source, target, names=mine)
    )
    assert_all_raise(PlanError, "no rank has a target", lambda: autoshard.transfer(source, None))
    other = 1000 + dist.get_rank()
    assert_all_raise(
        autoshard.RuntimeMismatchError,
        "the ranks disagree on the names, dtype, buffer",
        lambda: autoshard.transfer(source, target, buffer=other),
    )
    assert_equal_weights(old, target.full_state_dict())
    autoshard.transfer(source, target)
    assert_equal_weights(source.full_state_dict(), target.full_state_dict())


def killed(rank: int, ranks: int, rendezvous: str, result: str) -> None:
    """The last rank is killed in the second round; the others say after how many seconds they knew."""
    world.join(rendezvous, rank, ranks)
    source, target = trainer(), compiled(2, {"tp": ranks})
    folder = Path(result).parent / "weights"
    into = target if sys.argv[4] == "kill" else folder

    def kept() -> dict[str, Any]:
        if into is folder:
            return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".partial"}
        held = {n: getattr(x, "_local_tensor", x) for n, x in target.state_dict().items()}
        return {n: x.clone().numpy().tobytes() for n, x in held.items()}

    autoshard.transfer(source, into, buffer=2000)
    dist.barrier()
    old = kept()
    with torch.no_grad():
        for p in source.parameters():
            p.mul_(2)
    begin, rounds, began = Exchange._begin, 0, 0.0

    def cut_off(self: Exchange, *args: Any) -> Any:
        nonlocal rounds, began
        rounds, began = rounds + 1, time.monotonic()
        if rank == ranks - 1 and rounds == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(self, *args)

    Exchange._begin = cut_off  # type: ignore[method-assign]
    try:
        autoshard.transfer(source, into, buffer=2000)
        said = "no error"
    except CommunicationError as error:
        said = f"{time.monotonic() - began:.2f} s: {error}"
    said += "\nold weights" if old == kept() else "\nnew weights"
    Path(f"{result}.{rank}").write_text(said, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[4].startswith("kill"):
        world.main(killed)
    else:
        main({n: f for n, f in globals().items() if n not in ("main", "killed")})

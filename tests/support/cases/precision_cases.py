"""Steps in mixed precision against eager emulations of them, in one process and under gloo.

Where parameters of float32 are read in float64, everything between a cast and the optimizer is exact to 1e-9: losses are
those of the model in float64, and a gradient is its gradient rounded to float32 once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from microbatch_cases import far, farthest, full, loss_of, made
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard import Shard
from autoshard.errors import AutoshardError, CaptureError, PlanError

TOLERANCE = 1e-9
ROUNDED = 1e-7
"""what is rounded to float32 once"""
WIDE = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
NARROW = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)


class Net(nn.Module):
    """A tied head, a buffer that stays as it is, and an input that is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(24, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.register_buffer("scale", torch.full((), 0.7))
        self.frozen = nn.Linear(16, 16, bias=False).requires_grad_(False)

    def forward(self, ids: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = x + self.scale * layer(x)
        logits = F.linear(self.frozen(x), self.emb.weight)
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (each * weight.flatten()).mean()


def net(dtype: torch.dtype = torch.float32) -> tuple[Net, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    ids, labels = (torch.randint(0, 24, (8, 6)) for _ in range(2))
    return Net().to(dtype), (ids, torch.rand(8, 6), labels)


class Emulated:
    """A model in mixed precision in eager mode: cast parameters and inputs, and gradients that autograd casts back."""

    def __init__(self, model: nn.Module, policy: MixedPrecisionPolicy) -> None:
        self.model, self.policy = model, policy

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        dtype = self.policy.param_dtype
        read = {n: p.to(dtype) for n, p in self.model.named_parameters()}
        given = tuple(x.to(dtype) if x.is_floating_point() else x for x in args)
        return loss_of(torch.func.functional_call(self.model, read, given))


def compare(
    model: nn.Module,
    args: tuple[torch.Tensor, ...],
    mesh: autoshard.Mesh,
    policy: MixedPrecisionPolicy = WIDE,
    rounded: float = ROUNDED,
    **how: Any,
) -> autoshard.ShardedModule:
    """Three AdamW steps: losses, gradients and weights are those of the emulation, and the dtypes as they were."""
    emulated = Emulated(model, policy)
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, mixed_precision=policy, **how)
    ours, theirs = (torch.optim.AdamW(m.parameters(), 1e-2, eps=1e-4) for m in (sharded, model))
    for step in range(3):
        torch.manual_seed(step)
        expected = emulated(*args)
        torch.manual_seed(step)
        found = loss_of(sharded(*args))
        expected.backward()
        found.backward()
        assert found.dtype == expected.dtype
        assert step or far(found, expected) <= (TOLERANCE if policy is WIDE else rounded)
        for n, p in sharded.named_parameters():  # of stages, those of this rank's
            q = model.get_parameter(n)
            assert p.dtype == q.dtype, n
            assert (p.grad is None) == (q.grad is None), n
            if p.grad is not None and q.grad is not None:
                assert p.grad.dtype == q.dtype, n
                assert step or far(full(p.grad), q.grad) <= rounded, f"gradient of {n}"
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    weights = dict(model.named_parameters())
    mine = {n: full(p) for n, p in sharded.named_parameters()}  # those of this rank's stages
    assert farthest(mine, {n: x for n, x in weights.items() if n in mine}) <= 30 * rounded
    return sharded


def trains(like: Any = None, policy: MixedPrecisionPolicy = WIDE, **how: Any) -> Callable[[autoshard.Mesh], None]:
    """``like``: for the first axis of the mesh, where it has several."""

    def case(mesh: autoshard.Mesh) -> None:
        model, args = net(torch.float32 if policy is WIDE else torch.float64)
        asked = {"like": like} if like else {}
        sharded = compare(model, args, mesh, policy, ROUNDED if policy is WIDE else 2e-6, **asked, **how)
        shown = f"torch.{'float64' if policy is WIDE else 'float32'}"
        assert f"dtype={shown}" in sharded.source or f".to({shown})" in sharded.source

    return case


def of_several_axes(mesh: autoshard.Mesh) -> None:
    """Parameters cut in two dims, gathered along one axis after the other: the last gather casts."""
    axes = mesh if len(mesh.axes) > 1 else autoshard.Mesh({"dp": mesh.size, "tp": 1}, hardware=mesh.hardware)
    model, args = net()
    compare(model, args, axes, hints={"layers.*.1.weight": {axes.axes[0]: Shard(0), axes.axes[1]: Shard(1)}})


def dropout_and_recomputation(mesh: autoshard.Mesh) -> None:
    model, args = made("gpt")
    compare(model.float(), args, mesh, recompute="blocks", rounded=5e-7)


def in_stages(mesh: autoshard.Mesh, **asked: Any) -> None:
    """Every stage casts its own; the tied table is summed over two of them."""
    model, args = net()
    axes = {"pp": 2, **({"dp": mesh.size // 2} if mesh.size > 2 else {})}
    compare(model, args, autoshard.Mesh(axes, hardware=mesh.hardware), stages="pp", micro_batches=4, **asked)


def without_gradients(mesh: autoshard.Mesh) -> None:
    """Cast, and gathered as such."""
    model, args = net()
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, mixed_precision=WIDE, like="fsdp", training=False)
    with torch.no_grad():
        assert far(full(sharded(*args)), Emulated(model, WIDE)(*args)) <= TOLERANCE
    gathered = sum(c.bytes for c in sharded.collectives if c.kind == "all_gather" and "weight" in c.value)
    plain = autoshard.plan(model, mesh, args, like="fsdp", training=False)
    assert gathered == 2 * sum(c.bytes for c in plain.collectives if c.kind == "all_gather" and "weight" in c.value) > 0


def accumulated(mesh: autoshard.Mesh) -> None:
    """Two backward passes, the first without a sum over the replicas; and the same as micro-batches."""
    axes = autoshard.Mesh({"dp": mesh.size}, hardware=mesh.hardware)
    for like in ("ddp", "fsdp"):
        model, args = net()
        sharded = autoshard.compile(copy.deepcopy(model), axes, args, mixed_precision=WIDE, like=like)
        with sharded.no_sync():
            sharded(*args).backward()
        sharded(*args).backward()
        (2 * Emulated(model, WIDE)(*args)).backward()
        for (n, p), q in zip(sharded.named_parameters(), model.parameters(), strict=True):
            assert q.grad is None or far(full(p.grad), q.grad) <= 3e-7, n


def summed(like: str, reduce: torch.dtype | None) -> Callable[[autoshard.Mesh], None]:
    """A sum in float64 has more digits than float32, and one in float32 has not."""

    def case(mesh: autoshard.Mesh) -> None:
        axes = autoshard.Mesh({"dp": mesh.size}, hardware=mesh.hardware)
        model, args = net(torch.float64)
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=reduce)
        sharded = autoshard.compile(model, axes, args, mixed_precision=policy, like=like)
        sharded(*args).backward()
        found = sharded.full_gradients()["layers.0.1.weight"]
        assert found.dtype == torch.float64
        assert torch.equal(found, found.float().double()) == (reduce != torch.float64)

    return case


def sums_alone(mesh: autoshard.Mesh) -> None:
    """Without another dtype for parameters: only gradients travel in one of their own."""
    model, args = net()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    axes = autoshard.Mesh({"dp": mesh.size}, hardware=mesh.hardware)
    for like in ("ddp", "fsdp"):
        sharded = autoshard.compile(copy.deepcopy(model), axes, args, mixed_precision=policy, like=like)
        assert "reduce_dtype=torch.float64" in sharded.source
        assert " dtype=torch" not in sharded.source
        sharded(*args).backward()
        model.zero_grad()
        model(*args).backward()
        for n, p in sharded.named_parameters():
            q = model.get_parameter(n)
            assert q.grad is None or (p.grad.dtype == q.dtype and far(full(p.grad), q.grad) <= 1e-6), n


def half_on_the_wire(mesh: autoshard.Mesh) -> None:
    """Gathers move half the bytes, sums of gradients as many as without; what runs is what the plan says."""
    axes = autoshard.Mesh({"dp": mesh.size}, hardware=mesh.hardware)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    sent: list[dict[str, float]] = []
    for mixed in (None, policy):
        model, args = made("regression")
        model, args = model.float(), tuple(x.float().repeat(16, 1) for x in args)
        sharded = autoshard.compile(model, axes, args, mixed_precision=mixed, like="fsdp")
        log: list[Any] = []
        holder = sharded._comm if hasattr(sharded, "_comm") else sharded._world
        loss_of(sharded(*args)).backward()
        holder.log = log
        loss_of(sharded(*args)).backward()
        holder.log = None
        ran = _bytes((e.kind, e.bytes) for e in log)
        planned = _bytes((c.kind, c.bytes) for c in sharded.collectives)
        for kind in ("all_gather", "reduce_scatter"):
            assert ran[kind] == pytest.approx(planned[kind]), kind
        sent.append(planned)
    assert sent[1]["all_gather"] == sent[0]["all_gather"] / 2
    assert sent[1]["reduce_scatter"] == sent[0]["reduce_scatter"]


def _bytes(found: Any) -> dict[str, float]:
    total: dict[str, float] = {}
    for kind, size in found:
        total[kind] = total.get(kind, 0.0) + size
    return total


def scaled_and_clipped(mesh: autoshard.Mesh) -> None:
    """float16 with a loss scale, and one norm over all gradients; an overflow skips the step on every rank."""
    model, args = net()
    policy = MixedPrecisionPolicy(torch.float16, torch.float32, output_dtype=torch.float32)
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, mixed_precision=policy)
    optimizer = torch.optim.SGD(sharded.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    loss = sharded(*args)
    assert loss.dtype == torch.float32
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    expected = model(*args)
    expected.backward()
    norm = autoshard.clip_grad_norm_(sharded, 0.01)
    exact = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert far(norm, exact) <= 1e-2
    scaler.step(optimizer)
    scaler.update()
    torch.optim.SGD(model.parameters(), 0.1).step()
    weights = dict(model.named_parameters())
    moved = max(float((full(p.detach()) - weights[n].detach()).abs().max()) for n, p in sharded.named_parameters())
    assert moved <= 1e-5, moved  # of steps up to 1e-3
    before = sharded.full_state_dict()
    optimizer.zero_grad()
    scaler.scale(sharded(*args) * 1e9).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(x, before[n]) for n, x in sharded.full_state_dict().items())
    assert scaler.get_scale() == 2.0**7


def under_autocast(mesh: autoshard.Mesh) -> None:
    """Autocast finds what it would cast in its dtype already, and keeps what it keeps in float32."""
    model, args = net()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, mixed_precision=policy)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = sharded(*args), Emulated(model, policy)(*args)
    found.backward()
    expected.backward()
    assert found.dtype == expected.dtype == torch.float32
    assert far(found, expected) <= 1e-3
    for (n, p), q in zip(sharded.named_parameters(), model.parameters(), strict=True):
        assert q.grad is None or far(full(p.grad), q.grad) <= 3e-2, n


def refused(mesh: autoshard.Mesh) -> None:
    """Before anything is changed; the model keeps its dtypes, also where its capture fails."""
    model, args = net()
    wrong: Mapping[str, tuple[Any, type[AutoshardError]]] = {
        r"mixed_precision has param_dtype=torch.int32, but needs a floating": (
            MixedPrecisionPolicy(torch.int32),
            PlanError,
        ),
        r"mixed_precision='bf16' is not a torch.distributed.fsdp.MixedPrecisionPolicy": ("bf16", PlanError),
    }
    for text, (policy, error) in wrong.items():
        with pytest.raises(error, match=text):
            autoshard.compile(model, mesh, args, mixed_precision=policy)
    plan = autoshard.plan(model, mesh, args, mixed_precision=NARROW)
    assert (plan.mixed_precision, type(plan).from_json(plan.to_json()).mixed_precision) == (str_of(NARROW),) * 2
    with pytest.raises(PlanError, match=r"the plan was made for mixed_precision \(param_dtype=float32.*\(none\)"):
        autoshard.compile(model, mesh, args, plan=plan)
    traced = fx.symbolic_trace(nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"an fx\.GraphModule has only its graph"):
        autoshard.compile(traced, mesh, (torch.ones(4, 4),), mixed_precision=NARROW, parts=None)
    before = {n: (p.dtype, p.data_ptr()) for n, p in model.named_parameters()}
    with pytest.raises(AutoshardError):
        autoshard.compile(model, mesh, (args[0], args[1], args[2].float()), mixed_precision=WIDE)
    assert {n: (p.dtype, p.data_ptr()) for n, p in model.named_parameters()} == before
    assert "forward" not in vars(model)


def str_of(policy: MixedPrecisionPolicy) -> str:
    return f"param_dtype={str(policy.param_dtype)[6:]}, reduce_dtype={str(policy.reduce_dtype)[6:]}"


CASES: dict[str, Callable[[autoshard.Mesh], None]] = {
    "free": trains(),
    "free_narrow": trains(policy=NARROW),
    "in_micro_batches": trains(micro_batches=2),
    **{name: trains(name) for name in ("ddp", "fsdp", "megatron", "megatron-sp")},
    "zero1_in_micro_batches": trains("zero1", micro_batches=2),
    "of_several_axes": of_several_axes,
    "dropout_and_recomputation": dropout_and_recomputation,
    "in_stages": in_stages,
    "without_gradients": without_gradients,
    "accumulated": accumulated,
    "summed_double": summed("fsdp", torch.float64),
    "summed_single": summed("fsdp", None),
    "replicas_summed_double": summed("ddp", torch.float64),
    "replicas_summed_single": summed("ddp", torch.float32),
    "sums_alone": sums_alone,
    "half_on_the_wire": half_on_the_wire,
    "scaled_and_clipped": scaled_and_clipped,
    "under_autocast": under_autocast,
    "refused": refused,
}

SLOW = {
    "free_narrow", "zero1_in_micro_batches", "megatron", "megatron-sp", "of_several_axes", "dropout_and_recomputation",
    "under_autocast",
    "in_micro_batches", "in_stages", "without_gradients", "sums_alone", "summed_single", "replicas_summed_double",
    "replicas_summed_single",
}  # fmt: skip
"""of little that is new beside the others, or long"""

"""One rank of a gloo world that runs every check below; rank 0 writes the outcome of each as JSON.

Started by test_runtime_gloo.py, see world.py.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import runtime_cases as rc
import torch
import torch.distributed as dist
import world
from parameter_blocks import batch, blocks, compare, forward, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from autoshard import runtime
from autoshard.module.dtensors.module_dtensor import contiguous_spec, shard_full
from autoshard.module.dtensors.outputs import ShardedOutput
from autoshard.runtime.parameters import gradients
from autoshard.runtime.transport import process_group
from autoshard.runtime.transport.move import Move


def meshes() -> list[dict[str, int]]:
    """The meshes that this many ranks can form."""
    n = dist.get_world_size()
    return [{"a": n}] if n == 2 else [{"a": n}, {"a": 2, "b": 2}]


def run_cases(change: Callable[[torch.Tensor], torch.Tensor], wanted: Callable[[rc.Case], bool]) -> None:
    for mesh in meshes():
        comm, done = runtime.TorchCommunicator(mesh), []
        for case in filter(wanted, rc.cases(mesh)):
            x = change(rc.inputs(case)[comm.rank]).requires_grad_()
            with runtime.bind(comm):
                y = case.call(x)
            y.backward(change(rc.output_gradients(case)[comm.rank]))
            done.append((y.detach(), x.grad))
        everyone: list[Any] = [None] * comm.world_size
        dist.all_gather_object(everyone, done)
        for i, case in enumerate(filter(wanted, rc.cases(mesh))):
            rc.check(case, [e[i][0] for e in everyone], [e[i][1] for e in everyone])


def check_values_and_gradients() -> None:
    run_cases(torch.clone, lambda case: case.shape != rc.SHAPES["empty chunks"] or len(case.mesh) > 1)


def check_scrambled_memory() -> None:
    run_cases(rc.scrambled, lambda case: case.shape == rc.SHAPES["uneven"] and len(case.axes) == len(case.mesh))


@contextlib.contextmanager
def as_nccl_is_called() -> Iterator[None]:
    """gloo is called as NCCL is, without the detours that are for gloo."""
    right = process_group.AxesGroup
    process_group.AxesGroup = lambda *args: right(*args[:-1], gloo=False)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        process_group.AxesGroup = right  # type: ignore[misc]


def check_values_and_gradients_as_nccl_is_called() -> None:
    with as_nccl_is_called():
        assert not runtime.TorchCommunicator(meshes()[0]).process_group(("a",)).gloo
        check_values_and_gradients()


def check_a_backward_that_sums_again_is_caught() -> None:
    right = Move.backward
    Move.backward = lambda m: right(m)._replace(source="P") if m.source == "P" else right(m)  # type: ignore[method-assign]
    try:
        run_cases(torch.clone, lambda case: case.name == "all_reduce" and case.target == "I")
    except AssertionError:
        return
    finally:
        Move.backward = right  # type: ignore[method-assign]
    raise AssertionError("a wrong gradient went unnoticed")


def check_halos() -> None:
    """A convolution of cut positions, any order of axes; windows longer than a chunk as well."""
    random = torch.Generator().manual_seed(3)
    for mesh in meshes():
        comm = runtime.TorchCommunicator(mesh)
        for axes in [("a",), ("a", "b"), ("b", "a")][: 2 * len(mesh) - 1]:
            for size, kernel, stride, padding, dilation in ((23, 3, 1, 1, 1), (30, 4, 3, 2, 2), (13, 3, 1, 5, 5)):
                x, weight = (torch.randn(2, 2, n, generator=random, dtype=torch.float64) for n in (size, kernel))
                x.requires_grad_()
                y = F.conv1d(x, weight, None, stride, padding, dilation)
                gradient = torch.randn(y.shape, generator=random, dtype=torch.float64)
                y.backward(gradient)
                mine, results = comm.chunk(size, axes), comm.chunk(y.shape[2], axes)
                part = x.detach().narrow(2, *mine).requires_grad_()
                with runtime.bind(comm):
                    read = runtime.halo(
                        part, 2, size, y.shape[2], axes, runtime.Window(kernel, stride, padding, dilation)
                    )
                    made = F.conv1d(read, weight, None, stride, 0, dilation)
                made.backward(gradient.narrow(2, *results))
                for found, expected in ((made, y.narrow(2, *results)), (part.grad, x.grad.narrow(2, *mine))):
                    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12), (mesh, axes, size)


def check_dtypes_without_gradient() -> None:
    for mesh in meshes():
        comm = runtime.TorchCommunicator(mesh)
        for case in rc.cases(mesh):
            if case.shape != rc.SHAPES["uneven"] or "P" in (case.source, case.target):
                continue
            for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.float8_e4m3fn):
                with runtime.bind(comm), torch.inference_mode(dtype is torch.bool):
                    y = case.call(rc.inputs(case)[comm.rank].to(dtype))
                value = rc.held(case, case.target, "value", case.to_dim, case.order)[comm.rank]
                assert y.dtype == dtype, case
                assert torch.equal(y.float(), value.to(dtype).float()), case


def check_max_and_min() -> None:
    xs = torch.randn(dist.get_world_size(), 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with runtime.bind(runtime.TorchCommunicator(meshes()[-1])) as comm:
        for op, best in (("max", torch.amax), ("min", torch.amin)):
            y = runtime.all_reduce(xs[comm.rank], tuple(comm.mesh), op=op)
            assert torch.equal(y, best(xs, 0))
            assert not y.requires_grad
            for dtype in (torch.float64, torch.bfloat16, torch.int64):
                values = torch.tensor([[-3.5, -0.0, torch.inf, 2], [-4, 7, -torch.inf, 1]]).to(dtype)
                values = values.repeat(comm.world_size // 2, 1)
                mine = runtime.all_reduce(values[comm.rank], tuple(comm.mesh), op=op)
                assert torch.equal(mine, best(values, 0)), (op, dtype)
            lost = torch.full((2,), 1.0 if comm.rank < comm.world_size - 1 else torch.nan)
            assert runtime.all_reduce(lost, tuple(comm.mesh), op=op).isnan().all(), "a NaN is lost"


def check_scans_and_rankings() -> None:
    """Along a dim of which the last rank may hold nothing; every rank takes part in the backward."""
    forms: list[tuple[Callable[..., Any], Callable[..., Any], bool]] = [
        (lambda x: x.cumsum(0), lambda x, a: runtime.cumsum(x, 0, a), True),
        (lambda x: x.cumprod(0), lambda x, a: runtime.cumprod(x, 0, a), True),
        (lambda x: x.logcumsumexp(0), lambda x, a: runtime.logcumsumexp(x, 0, a), True),
        (lambda x: x.cummax(0), lambda x, a: runtime.cummax(x, 0, 5, a), True),
        (lambda x: x.topk(3, 0), lambda x, a: runtime.topk(x, 3, 0, 5, a), False),
        (lambda x: x.min(0), lambda x, a: runtime.min_dim(x, 0, 5, a), False),
        (lambda x: x.logsumexp(0), lambda x, a: runtime.logsumexp(x, [0], a), False),
        (lambda x: x.std(0), lambda x, a: runtime.std(x, [0], 5, a), False),
        (lambda x: x.norm(3, 0), lambda x, a: runtime.vector_norm(x, 3, [0], a), False),
        (lambda x: x.prod(0), lambda x, a: runtime.prod(x, [0], a), False),
        (lambda x: (x > 1).any(0), lambda x, a: runtime.any(x > 1, [0], a), False),
    ]
    generator = torch.Generator().manual_seed(0)
    for mesh in meshes():
        comm = runtime.TorchCommunicator(mesh)
        axes = tuple(mesh)
        for whole, local, cut in forms:
            full = torch.rand(5, 3, generator=generator, dtype=torch.float64).requires_grad_()
            start, length = comm.chunk(5, axes)
            part = full.detach()[start : start + length].requires_grad_()
            expected = whole(full)
            with runtime.bind(comm):
                found = local(part, axes)
            pairs = [(found, expected)] if isinstance(found, torch.Tensor) else list(zip(found, expected, strict=True))
            for mine, reference in pairs:
                assert torch.allclose(mine, reference[start : start + length] if cut else reference, rtol=1e-12)
            if pairs[0][1].requires_grad:
                pairs[0][1].square().sum().backward()
                pairs[0][0].square().sum().backward()
                assert full.grad is not None
                assert part.grad is not None
                assert torch.allclose(part.grad, full.grad[start : start + length], rtol=1e-9)


def check_dropout_is_that_of_one_device() -> None:
    mesh = meshes()[-1]
    x, comm = torch.arange(5.0 * 33).view(5, 33), runtime.TorchCommunicator(mesh)
    torch.manual_seed(3)
    expected, state = F.dropout(x, 0.4), torch.get_rng_state()
    for seed, alike in ((3 if comm.rank == 0 else 100 + comm.rank, comm.rank == 0), (3, True)):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with runtime.bind(comm), runtime.synchronised_rng(comm):
            mine = runtime.slice(x, 1, tuple(mesh))
            y = runtime.dropout(mine, 0.4, x.shape, {1: tuple(mesh)})
            y = runtime.all_gather(y, 1, tuple(mesh), size=33)
        assert torch.equal(y, expected)
        assert torch.equal(torch.get_rng_state(), state if alike else before)


def check_what_no_gradient_reaches_has_none() -> None:
    a, b = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
    with runtime.bind(runtime.TorchCommunicator(meshes()[0])) as comm, runtime.synchronised_rng(comm):
        rc.unasked(a, b).sum().backward()
    assert [x.grad is None for x in (a, b)] == [False, True]


def check_device_mesh() -> None:
    if dist.get_world_size() == 2:
        return
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    comm = runtime.TorchCommunicator.of(mesh)
    with runtime.bind(comm):
        y = runtime.all_gather(torch.tensor([comm.rank]), 0, "tp")
        z = runtime.all_gather(torch.tensor([comm.rank]), 0, ("tp", "dp"))
    assert y.tolist() == [comm.rank // 2 * 2, comm.rank // 2 * 2 + 1]
    assert z.tolist() == [0, 2, 1, 3]
    assert comm.process_group(("tp",)).handle is mesh.get_group("tp")


def check_profiles_name_the_collective() -> None:
    with runtime.bind(runtime.TorchCommunicator(meshes()[0])), torch.profiler.profile(acc_events=True) as profile:
        runtime.all_reduce(torch.ones(2), "a")
    assert any(e.key == "all_reduce@a ? forward" for e in profile.key_averages())  # no generated code calls it


# Parameters: see parameter_blocks.py ------------------------------------------------------------------------------


@contextlib.contextmanager
def every_bucket_alone() -> Iterator[None]:
    """However small it is."""
    before, gradients.MIN_BUCKET_BYTES = gradients.MIN_BUCKET_BYTES, 0
    try:
        yield
    finally:
        gradients.MIN_BUCKET_BYTES = before


def check_small_gradients_go_together() -> None:
    comm, params = runtime.TorchCommunicator(meshes()[0]), blocks()
    comm.log = []
    train(comm, params, lambda b: runtime.enter_parameters(b, "a"), True)
    compare(params)
    n = comm.size_of(("a",))
    assert [c.bytes for c in comm.log if c.phase == "backward"] == [2 * (n - 1) / n * 8 * 40] * 2, comm.log


@every_bucket_alone()
def check_large_gradients_do_not_wait() -> None:
    """An all-reduce begins while another is under way, once enough is there."""
    sent, before = [], gradients.ALL_REDUCE_BUCKET_BYTES
    for enough in (0, before):
        gradients.ALL_REDUCE_BUCKET_BYTES = enough
        comm, params = runtime.TorchCommunicator(meshes()[0]), blocks()
        comm.log = []
        enter = runtime.enter_parameters
        train(comm, params, lambda b, enter=enter: (*enter(b[:1], "a"), *enter(b[1:], "a")), True)
        gradients.ALL_REDUCE_BUCKET_BYTES = before
        compare(params)
        sent.append([c.bytes for c in comm.log if c.phase == "backward"])
    assert [len(bytes_) for bytes_ in sent] == [2 * 4, 2 * 2], sent
    assert sum(sent[0]) == sum(sent[1]), sent


@every_bucket_alone()
def check_enter_parameters() -> None:
    for mesh in meshes():
        axes = tuple(mesh)
        for waiting in (True, False):
            comm, params = runtime.TorchCommunicator(mesh), blocks()
            comm.log = []
            train(comm, params, lambda b, axes=axes: runtime.enter_parameters(b, axes), waiting)
            compare(params)
            backward = [c for c in comm.log if c.phase == "backward"]
            n = dist.get_world_size()
            assert [c.bytes for c in backward] == [2 * (n - 1) / n * 8 * 20] * 4, backward


@every_bucket_alone()
def check_gather_parameters() -> None:
    """FSDP on "a", or HSDP with the shards on the last axis; two ways to write the replicas."""
    dims, sizes = (1, 0, 0, 0), (4, 4, 4, 3)
    for mesh in meshes():
        *replica_axes, axis = mesh
        replicas, n = tuple(a for a in replica_axes if mesh[a] > 1), mesh[axis]
        for waiting, nested in ((True, False), (True, True), (False, False)):
            comm = runtime.TorchCommunicator(mesh)
            comm.log, index, alive = [], comm.rank % n, []
            params = [
                [
                    rc.cut(p.detach(), d, [n])[index].clone().requires_grad_(p.requires_grad)
                    for p, d in zip(b, dims, strict=True)
                ]
                for b in blocks()
            ]

            def arrive(
                b: Any, axis: Any = axis, replicas: Any = replicas, nested: Any = nested, alive: Any = alive
            ) -> Any:
                if nested:
                    b = runtime.enter_parameters(b, replicas)
                full = runtime.gather_parameters(b, dims, axis, sizes=sizes, replicas=() if nested else replicas)
                storage = full[0].untyped_storage()
                alive.append(torch.multiprocessing.reductions.StorageWeakRef(storage))  # type: ignore[no-untyped-call]
                return full

            train(comm, params, arrive, waiting)
            compare(params, dims, n, index)
            assert all(a.expired() for a in alive), "gathered parameters are kept"
            kinds = [c.kind for c in comm.log if c.phase == "backward"]
            assert kinds.count("all_gather") == kinds.count("reduce_scatter") == 4, kinds
            assert kinds.count("all_reduce") == (4 if replicas else 0), kinds
            if waiting and not nested and replicas:
                # The second block's shards are all-reduced while the first block's backward runs.
                step = ["all_gather", "reduce_scatter", "all_gather", "all_reduce", "reduce_scatter", "all_reduce"]
                assert kinds == step * 2, kinds


def check_invariant_gather() -> None:
    comm = runtime.TorchCommunicator(meshes()[0])
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    with runtime.bind(comm):
        (waiting,) = runtime.wait_gradients(x)
        (full,) = runtime.gather_parameters((waiting,), (0,), "a", to="I")
        full.pow(2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def check_a_parameter_used_by_several_blocks() -> None:
    """Tied weights: two buckets and a plain use; nothing is added to a sum that is still under way."""
    comm = runtime.TorchCommunicator(meshes()[0])
    p = torch.randn(1 << 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    q = torch.ones(3, dtype=torch.float64, requires_grad=True)
    n = comm.world_size
    for _ in range(3):
        p.grad = q.grad = None
        with runtime.bind(comm):
            waiting, other = runtime.wait_gradients(p, q)
            one, three = runtime.enter_parameters((waiting, other), "a")
            (two,) = runtime.enter_parameters((waiting,), "a")
            scale = 1.0 + comm.rank
            loss = (one.sin() * scale).sum() + (two.pow(2) * scale).sum() + (three * scale).sum()
            (runtime.all_reduce(loss, "a") + (waiting * 5).sum()).backward()
        total = n * (n + 1) / 2
        torch.testing.assert_close(p.grad, total * (p.detach().cos() + 2 * p.detach()) + 5)
        torch.testing.assert_close(q.grad, torch.full_like(q, total))


def check_mixed_dtypes() -> None:
    comm = runtime.TorchCommunicator(meshes()[0])
    n = comm.world_size
    ps = [torch.ones(5, dtype=d, requires_grad=True) for d in (torch.float32, torch.float64, torch.float32)]
    comm.log = []
    with runtime.bind(comm):
        a, b, c = runtime.gather_parameters(runtime.wait_gradients(*ps), (0, 0, 0), "a")
        assert [t.dtype for t in (a, b, c)] == [p.dtype for p in ps]
        (a.sum() + 2 * b.sum() + 3 * c.sum()).backward()
    assert [float(p.grad[0]) for p in ps if p.grad is not None] == [n, 2 * n, 3 * n]
    assert [(c.kind, c.bytes) for c in comm.log] == [
        (kind, (n - 1) / n * 5 * n * width) for kind in ("all_gather", "reduce_scatter") for width in (8, 8)
    ]


def check_the_log_is_that_of_the_in_process_mesh() -> None:
    mesh = meshes()[-1]
    axes, dims, sizes = tuple(mesh), (1, 0, 0, 0), (4, 4, 4, 3)
    n = mesh[axes[-1]]

    def step(comm: runtime.Communicator) -> torch.Tensor:
        params = [
            [rc.cut(p.detach(), d, [n])[comm.rank % n].clone().requires_grad_() for p, d in zip(b, dims, strict=True)]
            for b in blocks()
        ]
        with runtime.bind(comm):
            arrive = lambda b: runtime.gather_parameters(b, dims, axes[-1], sizes=sizes)  # noqa: E731
            return runtime.all_reduce(forward(runtime.slice(batch(), 0, axes, of="R"), params, arrive), axes)

    comm = runtime.TorchCommunicator(mesh)
    comm.log = []
    step(comm).backward()
    world = runtime.World(mesh)
    world.log = []
    torch.autograd.backward(world.run(lambda: step(runtime.current())))
    assert sorted(comm.log) == sorted(world.log)


def _element(x: torch.Tensor, i: int, value: float) -> torch.Tensor:
    x.index_put_((torch.tensor(i),), torch.tensor(value, dtype=x.dtype))
    return x


def _view(x: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    change(x[1:2])
    return x


def _plain(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape, dtype=x.dtype)


def _columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(x.shape[1:], dtype=x.dtype), torch.zeros(x.shape[1:], dtype=torch.long)


def _odd_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0]).remainder(2).bool().view(-1, *[1] * (x.ndim - 1))


WRITES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a list": lambda x: (torch._foreach_mul_([x], 2.0), x)[1],
    "lists": lambda x: (torch._foreach_add_([x], [_plain(x)]), x)[1],
    "out=": lambda x: torch.cumsum(x.clone(), 0, out=x),
    "out= of plain ones": lambda x: torch.add(torch.ones_like(x), _plain(x), out=x),
    "out= of itself": lambda x: torch.lerp(0 * _plain(x), x, 0.5, out=x),
    "a plain out=": lambda x: torch.add(x, 1.0, out=_plain(x)),
    "a pair of out=": lambda x: torch.max(x, 0, out=_columns(x))[0],
    "a view as out=": lambda x: _view(x, lambda v: torch.mul(v, 2.0, out=v)),
    "a view": lambda x: _view(x, lambda v: v.add_(1.0)),
    "by name": lambda x: torch.relu_(input=x),
    "an element": lambda x: _element(x, 3, 99.0),
    "fill_": lambda x: x.fill_(3.0),
    "beside plain ones": lambda x: x.add_(_plain(x)).addcmul_(torch.ones_like(x), _plain(x)),
    "masked": lambda x: x.masked_fill_(_odd_rows(x), 9.0),
}
"""writes into a tensor, whose result is compared"""


def check_writes_reach_the_shards() -> None:
    """Of parameters and outputs, sharded by rows and as partial sums."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(32.0, dtype=torch.float64).view(8, 4) - 5

    def parameter(dim: int) -> Any:
        return shard_full(whole.clone(), contiguous_spec(mesh, (Shard(dim),), whole.shape, whole.dtype))

    for name, write in WRITES.items():
        for kind in (lambda x: x, ShardedOutput.of):
            for made, full in (
                (kind(parameter(0)), whole.clone()),
                (kind(parameter(1)).sum(-1), whole.sum(-1)),
            ):
                got, want = write(made), write(full)
                got = got.full_tensor() if isinstance(got, DTensor) else got
                assert torch.equal(got, want), (name, made, got, want)


def check_outputs_with_empty_shards() -> None:
    """Kernels that raise where a rank holds nothing: all ranks gather alike, and none waits."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for rows in (1, dist.get_world_size() + 1):
        whole = torch.arange(4.0 * rows).view(rows, 4)
        for call in (torch.max, torch.argmax, lambda x: x.amax(0), lambda x: x.sort(0)[0], lambda x: x.topk(1, 0)[0]):
            x = shard_full(whole, contiguous_spec(mesh, (Shard(0),), whole.shape, whole.dtype))
            got: Any = call(ShardedOutput.of(x))
            got = got.full_tensor() if isinstance(got, DTensor) else got
            assert torch.equal(got, call(whole)), (rows, call)


CHECKS = {name.removeprefix("check_"): fn for name, fn in list(globals().items()) if name.startswith("check_")}


def run(rank: int, ranks: int, rendezvous: str, result: str) -> None:
    torch.set_num_threads(1)
    world.join(rendezvous, rank, ranks)
    outcomes: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            check()
            mine = ""
        except Exception:
            mine = traceback.format_exc()
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, mine)
        outcomes[name] = next((f"rank {r}:\n{e}" for r, e in enumerate(everyone) if e), "")
    if rank == 0:
        with open(result, "w") as file:
            json.dump(outcomes, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    world.main(run)

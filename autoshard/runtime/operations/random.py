"""Random ops (dropout, factories) that draw what one device draws from the same seed: each op is
drawn once at its global shape, and every rank takes its shard, so that values do not depend on
layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from autoshard.aten import aten
from autoshard.errors import LayoutError
from autoshard.runtime.operations.indexing import part_of_batch
from autoshard.runtime.transport.autograd import NoneGradFunction
from autoshard.runtime.transport.communicator import Axes, Communicator, bind, current, device
from autoshard.runtime.transport.process_group import TorchCommunicator
from autoshard.runtime.transport.torch_state import generator_states, set_generator_states, synchronised_generators


def shared(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn(*args, **kwargs)``, a random draw of global shape, the same on every rank.
    In one process a single draw from torch's default generator serves all ranks. Under
    torch.distributed every rank draws, from generators that :func:`synchronised_rng` made equal.
    Each rank gets its own tensor."""
    comm = current()
    drawn = comm.shared(fn, args, kwargs)
    if isinstance(comm, TorchCommunicator):
        return drawn
    return torch.utils._pytree.tree_map_only(Tensor, torch.clone, drawn)


def synchronised_rng(comm: Communicator) -> AbstractContextManager[None]:
    """Inside, every rank draws what rank 0 would; wrap a forward that calls :func:`shared`.
    Under torch.distributed rank 0's generator states are broadcast at the first draw. Afterwards
    ranks seeded like rank 0 keep the advanced states, and others get their own back. No effect in
    one process."""
    if isinstance(comm, TorchCommunicator) and comm.world_size > 1:
        return synchronised_generators(comm)
    return nullcontext()


def dropout(
    x: Tensor,
    p: float,
    shape: Sequence[int],
    dims: Mapping[int, Axes],
    order: Sequence[int] = (),
    batch: int | None = None,
    again: bool = False,
    exact: bool = True,
) -> Tensor:
    """``F.dropout(training=True)`` of the global tensor, on this rank's shard ``x``.
    ``shape``: global shape; ``dims``: the axes that shard each dim. The unsharded model drops the
    same elements from the same seed. ``order``: the dims of its tensor in memory order, which eager
    draws follow. ``batch``: the dim that micro-batches divide; each takes its slice of the full
    batch's draw. ``again``: the backward draws the mask again instead of saving it. Without
    ``exact`` each shard draws from a stream of its own."""
    if not 0.0 <= p <= 1.0:
        raise LayoutError(f"dropout probability {p} is not between 0 and 1")
    if p == 0.0 or 0 in shape:
        return x
    if p == 1.0:
        return x * 0.0
    redraw = None
    if not exact:
        seed = shard_seed(dims.values())

        def own() -> Tensor:
            with own_stream(x.device, seed):
                return draw_dropout_noise(tuple(x.shape), p, x.dtype, x.device)

        made: Tensor = _DropoutFunction.apply(x, own(), p, own if again else None)
        return made
    if again and x.requires_grad and torch.is_grad_enabled():
        fill = partial(draw_dropout_noise, p=p, dtype=x.dtype, device=x.device)
        redraw = _redraw_in_backward(lambda: local_part(draw_micro_batch(fill, shape, order, batch), dims))
    scales = full_dropout_noise(x, p, shape, order, batch)
    return _DropoutFunction.apply(x, local_part(scales, dims), p, redraw)


def _redraw_in_backward(draw: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """``draw`` for the backward: with the generator states and the micro-batch of now."""
    comm = current()
    now, micro_batch = comm.random_states(), comm.micro_batch

    def drawn_then() -> Tensor:
        before, entered = generator_states(), comm.micro_batch
        set_generator_states(now)
        comm.micro_batch = micro_batch
        try:
            with bind(comm):
                return draw()
        finally:
            set_generator_states(before)
            comm.micro_batch = entered

    return drawn_then


def shard_seed(axes: Iterable[Axes]) -> int:
    """A seed for this rank's shard, divided by ``axes``: a draw of the generator that ranks share,
    and its number. The same on ranks with the same shard, and in a recomputation."""
    comm = current()
    drawn = comm.shared(torch.randint, (2**48, ()), {"device": "cpu"})
    index, count = comm.micro_batch
    number = comm.index(tuple(axis for each in axes for axis in comm.active(each)))
    return (0 if drawn.is_meta else int(drawn)) + number * count + index  # a rehearsal without data draws nothing


@contextmanager
def own_stream(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, ``device``'s default generator draws from ``seed``; then it is where it was."""
    generator = torch.default_generator
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        generator = module.default_generators[module.current_device() if device.index is None else device.index]
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def full_dropout_noise(
    x: Tensor, p: float, shape: Sequence[int], order: Sequence[int] = (), batch: int | None = None
) -> Tensor:
    """Dropout factors of the full tensor of ``shape``; ``x``: for dtype and device."""
    return draw_micro_batch(
        lambda s: current().shared(draw_dropout_noise, (s, p, x.dtype, x.device), {}), shape, order, batch
    )


class _DropoutFunction(NoneGradFunction):
    """``x * noise``; saves one byte per element, or nothing with ``redraw``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor, p: float, redraw: Callable[[], Tensor] | None) -> Tensor:
        if redraw is None:
            ctx.save_for_backward(noise != 0)
        ctx.p, ctx.redraw = p, redraw
        return x * noise

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        kept = ctx.saved_tensors[0] if ctx.redraw is None else ctx.redraw() != 0
        return gradient * dropout_scaled(kept.to(gradient.dtype), ctx.p), None, None, None


def dropout_scaled(kept: Tensor, p: float) -> Tensor:
    """Dropout factors of ones where an element is kept, rounded like ATen's."""
    return kept.div_(1 - p) if kept.device.type == "cpu" else kept.mul_(1 / (1 - p))


def draw_dropout_noise(shape: tuple[int, ...], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Dropout factors, drawn step by step like ATen's."""
    if device.type == "cpu":
        return dropout_scaled(torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - p), p)
    ones = torch.ones(shape, dtype=dtype, device=device)
    return torch.native_dropout(ones, p, True)[0]


def draw_micro_batch(
    draw: Callable[[tuple[int, ...]], Tensor], shape: Sequence[int], order: Sequence[int], batch: int | None
) -> Tensor:
    """What ``draw`` makes in memory order ``order``; with ``batch`` this micro-batch's slice."""
    index, count = current().micro_batch
    if batch is None or count == 1:
        return in_memory_order(order, draw, shape)
    length = shape[batch]
    whole = [n * count if d == batch else n for d, n in enumerate(shape)]
    return in_memory_order(order, draw, whole).narrow(batch, index * length, length)


def in_memory_order(order: Sequence[int], draw: Callable[[tuple[int, ...]], Tensor], shape: Sequence[int]) -> Tensor:
    """What ``draw(shape)`` makes with dims in memory order ``order`` (empty: as numbered)."""
    if not order:
        return draw(tuple(shape))
    return draw(tuple(shape[d] for d in order)).permute([order.index(d) for d in range(len(order))])


def local_part(x: Tensor, dims: Mapping[int, Axes]) -> Tensor:
    """This rank's shard of a global ``x``, copied: a view would keep all of ``x`` alive."""
    comm, cut = current(), x
    for dim, axes in dims.items():
        cut = cut.narrow(dim, *comm.chunk(x.shape[dim], comm.active(axes)))
    return x if cut is x else cut.clone()


def draw(
    op: str, *args: Any, dims: Mapping[int, Axes] | None = None, batch: int | None = None, **kwargs: Any
) -> Tensor:
    """This rank's shard of ``aten.op(*args)``: ``draw("rand", [8, 4], dims={0: "dp"})``.
    ``args`` have global shapes. ``dims``: the axes that shard each dim. ``batch``: the dim that
    micro-batches divide; each slices a draw for the full batch. Tensor arguments are replicated."""
    args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    if not any(isinstance(a, Tensor) for a in args):
        kwargs.setdefault("device", device())
    found = shared(getattr(aten, op), *args, **kwargs)
    if batch is not None:
        found = part_of_batch(found, batch, current().micro_batch[1])
    return local_part(found, dims or {})


def draw_whole(op: str, *args: Any, **kwargs: Any) -> Any:
    """The results of ``op(*args)`` (``aten::rand``) on replicated arguments, drawn once for all."""
    namespace, _, name = op.partition("::")
    whole = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
    return shared(getattr(getattr(torch.ops, namespace), name), *whole[0], **whole[1])


def draw_like(
    op: str,
    x: Tensor,
    shape: Sequence[int],
    dims: Mapping[int, Axes],
    *args: Any,
    order: Sequence[int] = (),
    batch: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """This rank's shard of ``aten.op(t, *args)`` for a ``t`` of global ``shape`` with any values,
    and the dtype and device of ``x``. ``dims``: the axes that shard each dim. ``order``: memory
    order of ``t``, which normal draws follow. ``batch``: see
    :func:`~autoshard.runtime.dropout`."""

    def fill(shape: Sequence[int]) -> Tensor:
        empty = partial(torch.empty, dtype=x.dtype, device=x.device)
        return getattr(aten, op)(in_memory_order(order, empty, shape), *args, **kwargs)

    return local_part(draw_micro_batch(lambda s: shared(fill, s), shape, (), batch), dims)


def native_dropout(
    x: Tensor,
    p: float,
    shape: Sequence[int],
    dims: Mapping[int, Axes],
    order: Sequence[int] = (),
    batch: int | None = None,
    train: bool | None = True,
) -> tuple[Tensor, Tensor]:
    """``aten.native_dropout``: (result, kept mask). In training it draws for every ``p``.
    ``train=None`` trains, too, but torch's gradient is then the mask without the scale."""
    if train is False:
        return x, torch.ones_like(x, dtype=torch.bool)

    def fill(shape: tuple[int, ...]) -> Tensor:
        return torch.native_dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p, True)[1] != 0

    kept = local_part(draw_micro_batch(lambda s: shared(fill, s), shape, order, batch), dims)
    scale = 1 / (1 - p) if p < 1 else 0
    if train is None:
        return x * kept + (x * kept * (scale - 1)).detach(), kept
    return x * kept * scale, kept


@torch.library.custom_op("autoshard::packed_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def packed_noise(x: Tensor, lengths: Tensor, p: float) -> Tensor:
    """Dropout factors of packed sequences ``x`` [steps, batch, features], longest first."""
    inside = torch.arange(x.shape[0], device=lengths.device)[:, None] < lengths
    whole = torch.zeros_like(x, memory_format=torch.contiguous_format)
    whole[inside] = draw_dropout_noise((int(lengths.sum()), x.shape[2]), p, x.dtype, x.device)
    return whole


packed_noise.register_fake(lambda x, lengths, p: torch.empty_like(x, memory_format=torch.contiguous_format))


def rrelu(x: Tensor, lower: float, upper: float) -> tuple[Tensor, Tensor]:
    """``F.rrelu`` of a replicated ``x`` in training, and the slopes of its negative elements."""
    slopes = shared(aten.rrelu_with_noise_functional, x.detach(), torch.zeros_like(x), lower, upper, True)[1]
    return x * slopes, slopes

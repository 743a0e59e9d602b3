"""Random programs of ops that have rules: 10 to 25 steps on small tensors of odd shapes, each step a module of its own.

A program is a list of numbers; every number picks an op, its operands and its dims. So hypothesis can shrink it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LARGEST = 1500
"""elements of a value"""

Maker = Callable[["Step", random.Random, Sequence[torch.Tensor]], Any]


class Step(nn.Module):
    """One op. ``fn`` takes the operands; parameters are its own."""

    fn: Callable[..., torch.Tensor]
    operands: tuple[int, ...] = ()

    def forward(self, *operands: torch.Tensor) -> torch.Tensor:
        return self.fn(*operands)

    def weight(self, *shape: int) -> nn.Parameter:
        number = torch.Generator().manual_seed(sum(shape) + 31 * len(shape))
        self.w = nn.Parameter(torch.randn(shape, generator=number, dtype=torch.float64) / shape[-1] ** 0.5)
        return self.w


class Program(nn.Module):
    """Steps on the inputs x, y (float64) and index (int64); returns the last value and a scalar of all of them."""

    def __init__(self, numbers: Sequence[int], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.example = inputs(shape)
        values = list(self.example.values())[:2]
        self.steps = nn.ModuleList()
        for number in numbers:
            step = make(number, values, self.example["index"])
            if step is None:
                continue
            with torch.no_grad():
                made = step(*(self.pick(values, i) for i in step.operands))
            if 0 < made.numel() <= LARGEST and made.ndim <= 5:
                self.steps.append(step)
                values.append(made)
        self.shapes = [tuple(v.shape) for v in values[2:]]

    def pick(self, values: Sequence[torch.Tensor], i: int) -> torch.Tensor:
        return self.example["index"] if i < 0 else values[i]

    def forward(self, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = [x, y]
        for step in self.steps:
            values.append(step(*(index if i < 0 else values[i] for i in step.operands)))
        total = torch.stack([(v * v).mean() for v in values]).sum()
        return values[-1], total


def inputs(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    number = torch.Generator().manual_seed(3)
    x, y = (torch.randn(shape, generator=number, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return {"x": x, "y": y, "index": torch.randint(0, min(shape), (4,), generator=number)}


def make(number: int, values: Sequence[torch.Tensor], index: torch.Tensor) -> Step | None:
    """The step that ``number`` stands for, or None where its op does not fit the values."""
    draw = random.Random(number)
    step = Step()
    position = len(values) - 1 - min(int(draw.expovariate(0.7)), len(values) - 1)
    fn = MAKERS[number % len(MAKERS)](step, draw, [values[position]])
    if fn is None:
        return None
    operands: tuple[int, ...] = (position,)
    if isinstance(fn, tuple):
        fn, wanted = fn
        if wanted == "index":
            operands = (position, -1)
        else:
            fits = [i for i, v in enumerate(values) if wanted(v)]
            if not fits:
                return None
            operands = (position, draw.choice(fits))
    step.fn, step.operands = fn, operands
    return step


def _dim(draw: random.Random, x: torch.Tensor) -> int:
    return draw.randrange(x.ndim)


def _pointwise(fn: Callable[[torch.Tensor], torch.Tensor]) -> Maker:
    return lambda step, draw, v: fn


def _of_dim(fn: Callable[[torch.Tensor, int], torch.Tensor]) -> Maker:
    def make(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
        if not v[0].ndim:
            return None
        d = _dim(draw, v[0])
        return lambda x: fn(x, d)

    return make


def _reduce(fn: Callable[..., torch.Tensor]) -> Maker:
    def make(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
        if not v[0].ndim:
            return None
        d, keep = _dim(draw, v[0]), draw.random() < 0.5
        return lambda x: fn(x, d, keepdim=keep)

    return make


def _binary(fn: Callable[..., torch.Tensor]) -> Maker:
    def make(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
        shape = v[0].shape

        def fits(other: torch.Tensor) -> bool:
            pairs = zip(reversed(shape), reversed(other.shape), strict=False)
            return other.ndim <= len(shape) and all(b in (1, a) for a, b in pairs)

        return fn, fits

    return make


def _linear(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
    if not v[0].ndim:
        return None
    step.weight(draw.choice((1, 3, 4, 6, 7)), v[0].shape[-1])
    return lambda x: F.linear(x, step.w)


def _gram(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
    return (lambda x: x @ x.transpose(-1, -2) / x.shape[-1]) if v[0].ndim > 1 else None


def _merge(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
    if v[0].ndim < 2:
        return None
    d = draw.randrange(v[0].ndim - 1)
    return lambda x: x.flatten(d, d + 1)


def _divide(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
    found = [(d, k) for d, n in enumerate(v[0].shape) for k in (2, 3) if n > k and n % k == 0]
    if not found:
        return None
    d, k = draw.choice(found)
    return lambda x: x.unflatten(d, (k, x.shape[d] // k))


def _swap(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
    if v[0].ndim < 2:
        return None
    a, b = draw.sample(range(v[0].ndim), 2)
    return lambda x: x.transpose(a, b)


def _expand(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
    n = draw.choice((2, 3))
    return lambda x: x.unsqueeze(0).expand(n, *x.shape)


def _slice(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
    if not v[0].ndim:
        return None
    d = _dim(draw, v[0])
    n = v[0].shape[d]
    start, stride = draw.randrange(n), draw.choice((1, 1, 2))
    return lambda x: x[(slice(None),) * d + (slice(start, None, stride),)]


def _norm(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
    if not v[0].ndim or v[0].shape[-1] < 2:
        return None
    step.weight(v[0].shape[-1])
    return lambda x: F.layer_norm(x, x.shape[-1:], step.w)


def _chunk(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
    if not v[0].ndim:
        return None
    d, n = _dim(draw, v[0]), draw.choice((2, 3))
    return lambda x: x.chunk(n, d)[0]


def _join(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
    shape = v[0].shape
    if not shape:
        return None
    d = _dim(draw, v[0])
    return (lambda x, y: torch.cat([x, y], d)), lambda other: other.shape == shape


def _taken(fn: Callable[..., torch.Tensor]) -> Maker:
    """Look-ups by the index input, whose values fit every dim of the inputs."""

    def make(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
        dims = [d for d, n in enumerate(v[0].shape) if n >= 4]
        if not dims:
            return None
        d = draw.choice(dims)
        return (lambda x, index: fn(x, d, index % 4)), "index"

    return make


def _embedding(step: Step, draw: random.Random, v: Sequence[torch.Tensor]) -> Any:
    if not v[0].ndim or v[0].shape[-1] > 64:
        return None
    step.weight(draw.choice((5, 7, 8)), v[0].shape[-1])
    return (lambda x, index: F.embedding(index % 5, step.w) * x.mean()), "index"


def _gathered(x: torch.Tensor, d: int, index: torch.Tensor) -> torch.Tensor:
    at = index.view(-1, *(1,) * (x.ndim - d - 1)).expand(*x.shape[:d], 4, *x.shape[d + 1 :])
    return x.gather(d, at)


MAKERS: tuple[Maker, ...] = (
    _linear,
    _binary(torch.add),
    _linear,
    _binary(lambda x, y: torch.tanh(x * y)),
    _gram,
    _merge,
    _divide,
    _swap,
    _expand,
    _slice,
    _norm,
    _chunk,
    _join,
    _embedding,
    _pointwise(F.gelu),
    _pointwise(torch.tanh),
    _pointwise(lambda x: x.exp() / (1 + x.exp())),
    _pointwise(lambda x: torch.where(x > 0, x, 0.1 * x)),
    _pointwise(lambda x: (x * x + 1).rsqrt()),
    _reduce(torch.sum),
    _reduce(torch.mean),
    _reduce(torch.amax),
    _reduce(torch.logsumexp),
    _of_dim(torch.softmax),
    _of_dim(torch.log_softmax),
    _of_dim(torch.cumsum),
    _of_dim(lambda x, d: x.unsqueeze(d)),
    _of_dim(lambda x, d: x.squeeze(d)),
    _of_dim(lambda x, d: x.flip(d)),
    _of_dim(lambda x, d: x.roll(1, d)),
    _of_dim(lambda x, d: x.select(d, x.shape[d] - 1)),
    _of_dim(lambda x, d: x.sort(d).values),
    _of_dim(lambda x, d: F.pad(x, (1, 1))),
    _taken(lambda x, d, index: x.index_select(d, index)),
    _taken(_gathered),
    _taken(lambda x, d, index: x[(slice(None),) * d + (index,)]),
    _taken(lambda x, d, index: x.index_add(d, index, x.narrow(d, 0, 4))),
)

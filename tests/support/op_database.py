"""PyTorch's op database as oracle: run an op sharded, every input cut along every dim in turn, beside eager.

``run_op(info)`` gives the outcome of every case. The statuses, best first:

- sharded: values and gradients equal eager's, and a strategy divides the op's own work
- decomposed: the same, where capture writes the function as several ops
- replicated: equal, on full tensors
- refused: an :class:`autoshard.AutoshardError` before anything runs
- not run: eager itself cannot run the sample on a CPU
- wrong, crash: a bug
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from harness import SPLIT_ALL
from torch import nn
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from autoshard import AutoshardError, Mesh, Shard
from autoshard.compiler import Compiled, compile_graph
from autoshard.module.in_process import InProcessModule
from autoshard.module.programs.compiling import CompileSettings
from autoshard.module.programs.executable import Executable, ModuleCall, load_source
from autoshard.passes.capture.export import capture
from autoshard.passes.ir.graph import Graph
from autoshard.passes.rules.facts import is_view
from autoshard.plans.options import CompileOptions
from autoshard.runtime.transport.in_process import World

STATUSES = ("wrong", "crash", "sharded", "decomposed", "replicated", "refused", "not run")
"""of an op: the first of these that any of its cases has"""
SAMPLES = 4
RANKS = (2, 3)
LIMIT = 60
"""seconds for one case"""

DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128, torch.float16)
UNINITIALISED = frozenset("empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split())

# Random ops of the database seed the generator themselves, which a graph cannot.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

EAGER_IS_WRONG = frozenset({"as_strided_scatter"})
"""torch 2.13's backward gives the gradient of the wrong elements: only values are compared"""

Hint = tuple[str, int] | None
"""(input, tensor dim to cut); None: the compiler is free"""


@dataclass(frozen=True)
class Outcome:
    """One case: an op on one sample, one input cut along one dim, on one mesh."""

    op: str
    sample: int
    hint: str
    ranks: int
    status: str
    detail: str = ""
    graph: tuple[str, ...] = ()
    """the captured ops"""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def names() -> list[str]:
    """Every op name of the database, once."""
    return sorted({info.name for info in op_db})


def infos(name: str) -> list[OpInfo]:
    """The database's entries of one op name: its variants."""
    return [info for info in op_db if info.name == name]


def verdict(outcomes: Sequence[Outcome]) -> str:
    """An op's status from those of its cases."""
    found = {o.status for o in outcomes}
    return next((s for s in STATUSES if s in found), "not run")


class OpCall(nn.Module):
    """One call of the database, whose tensors are the inputs x0, x1, …"""

    def __init__(self, fn: Callable[..., Any], sample: SampleInput) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
        self.fn = fn
        self.leaves = [x if not isinstance(x, torch.Tensor) else None for x in leaves]
        self.positions = {f"x{i}": i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        self.tensors = {
            n: leaves[i].detach().requires_grad_(leaves[i].requires_grad) for n, i in self.positions.items()
        }

    def forward(self, **tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for name, tensor in tensors.items():
            leaves[self.positions[name]] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.fn(*args, **kwargs)

    def inputs(self) -> dict[str, torch.Tensor]:
        """Fresh leaves, the same on every call."""
        return {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in self.tensors.items()}


class _Captured(InProcessModule):
    """A sharded module of a graph that is captured once and planned for every hint."""

    def __init__(self, model: nn.Module, graph: Graph, compiled: Compiled, world: World) -> None:
        super().__init__(model, compiled.plan.mesh, CompileSettings(training=graph.training))
        object.__setattr__(self, "_world", world)
        object.__setattr__(self, "_compiled", compiled)

    def _build(self, call: ModuleCall, structure: Any) -> Executable:
        return Executable(self._compiled, load_source(self._compiled.source.text))


_worlds = {n: World({"x": n}) for n in RANKS}


def samples(info: OpInfo, count: int = SAMPLES) -> list[OpCall]:
    """A few small sample inputs of an op, spread over those the database has."""
    dtype = next((d for d in DTYPES if d in info.dtypes), None)
    if dtype is None:
        return []
    grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    found = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=grad), 48))
    calls = [OpCall(info.op, s) for s in found]
    small = [c for c in calls if 1 < max((t.numel() for t in c.tensors.values()), default=0) <= 4096] or calls
    step = max(1, len(small) // max(1, count - 2))
    chosen = [max(small, key=_dims), max(small, key=_options), *small[::step]] if small else []
    return list({id(c): c for c in chosen}.values())[:count]


def _dims(call: OpCall) -> int:
    return max((t.ndim for t in call.tensors.values()), default=0)


def _options(call: OpCall) -> int:
    return sum(x is not None for x in call.leaves)


def run_op(info: OpInfo, count: int = SAMPLES, ranks: Sequence[int] = RANKS) -> Iterator[Outcome]:
    """Every case of one entry of the database."""
    name = f"{info.name}:{info.variant_test_name}" if info.variant_test_name else info.name
    for number, call in enumerate(samples(info, count)):
        if info.name in EAGER_IS_WRONG:
            for tensor in call.tensors.values():
                tensor.requires_grad_(False)
        yield from _run_sample(name, info.name in UNINITIALISED, number, call, ranks)


def _run_sample(name: str, shapes_only: bool, number: int, call: OpCall, ranks: Sequence[int]) -> Iterator[Outcome]:
    def outcome(status: str, hint: Hint, n: int, detail: str, graph: Graph | None = None) -> Outcome:
        ops = tuple(str(node.op) for node in graph.nodes) if graph else ()
        return Outcome(name, number, f"{hint[0]} on dim {hint[1]}" if hint else "", n, status, detail, ops)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = _eager(call)
        except (RuntimeError, AssertionError) as error:  # a kernel of CUDA, or as_strided beyond the end of a view
            yield outcome("not run", None, 0, f"eager: {error}")
            return
        try:
            graph = _graph(call)
        except AutoshardError as error:
            yield outcome("refused", None, 0, str(error))
            return
        except Exception as error:
            yield outcome("crash", None, 0, f"capture: {type(error).__name__}: {error}")
            return
        known = {i.fqn for i in graph.inputs}
        hints: list[Hint] = [None, *((x, d) for x, t in call.tensors.items() if x in known for d in range(t.ndim))]
        for n, hint in itertools.product(ranks, hints):
            status, detail = _run_case(call, graph, n, hint, expected, shapes_only)
            yield outcome(status, hint, n, detail, graph)


def _graph(call: OpCall) -> Graph:
    inputs = call.inputs()
    with limit(LIMIT):
        return capture(call, (), inputs, training=any(t.requires_grad for t in inputs.values()))


def _eager(call: OpCall) -> list[Any]:
    """What eager makes of the call; without gradients where it has none for these operands (a phase of ``eig``)."""
    try:
        return run(call, call.inputs())
    except RuntimeError:
        for tensor in call.tensors.values():
            tensor.requires_grad_(False)
        return run(call, call.inputs())


def _run_case(
    call: OpCall, graph: Graph, n: int, hint: Hint, expected: list[Any], shapes_only: bool
) -> tuple[str, str]:
    mesh = Mesh({"x": n}, hardware=SPLIT_ALL)
    try:
        with limit(LIMIT):
            compiled = compile_graph(graph, mesh, CompileOptions(hints={hint[0]: Shard(hint[1])} if hint else None))
    except AutoshardError as error:
        return "refused", str(error)
    except Exception as error:
        return "crash", f"compile: {type(error).__name__}: {error}"
    try:
        with limit(LIMIT):
            found = run(_Captured(call, graph, compiled, _worlds[n]), call.inputs())
    except Exception as error:
        return "crash", f"run: {type(error).__name__}: {error}\n{compiled.source.text}"
    wrong = differs(found, expected, shapes_only)
    if wrong:
        return "wrong", f"{wrong}\n{compiled.source.text}"
    return divided(graph, compiled), ""


def divided(graph: Graph, compiled: Compiled) -> str:
    """sharded, decomposed or replicated: whether a strategy divides work, views apart where there is anything else."""
    if not graph.nodes:  # the operand itself: sharded where it stays so
        return "sharded" if any(x and x.axes_with(Shard) for x in compiled.program.assignment.outputs) else "replicated"
    choices = compiled.program.assignment.choices
    working = [node for node in graph.nodes if not is_view(node.op)] or list(graph.nodes)
    if not any(s.divides for node in working for s in choices[node.name]):
        return "replicated"
    return "sharded" if len(working) == 1 and not working[0].origin else "decomposed"


def run(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[Any]:
    """Leaves of the output, the gradient of every input, and what is left in the inputs: some ops write to them."""
    torch.manual_seed(1)
    leaves = pytree.tree_leaves(model(**inputs))
    moving = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    random = torch.Generator().manual_seed(2)
    seeds = [torch.randn(x.shape, generator=random, dtype=torch.float64).to(x.dtype) for x in moving]
    wanted = [x for x in inputs.values() if x.requires_grad]
    gradients: Sequence[torch.Tensor | None] = [None] * len(wanted)
    if moving and wanted:
        gradients = torch.autograd.grad(moving, wanted, seeds, allow_unused=True)
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in (*leaves, *gradients, *inputs.values())]


def differs(found: list[Any], expected: list[Any], shapes_only: bool = False) -> str:
    """What is not equal, in words; "" where all is."""
    if len(found) != len(expected):
        return f"{len(found)} results and gradients, eager has {len(expected)}"
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        wrong = _differs(a, b, shapes_only)
        if wrong:
            return f"result {i}: {wrong}"
    return ""


def _differs(a: Any, b: Any, shapes_only: bool) -> str:
    if b is None or a is None:  # a gradient that does not exist is a zero one
        return "" if a is b or not torch.count_nonzero(b if a is None else a) else f"{a} is not {b}"
    if not isinstance(b, torch.Tensor):
        return "" if a == b or (a != a and b != b) else f"{a!r} is not {b!r}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} is not {b.dtype}{list(b.shape)}"
    if shapes_only or not b.numel():
        return ""
    if not (b.is_floating_point() or b.is_complex()):
        return "" if torch.equal(a, b) else f"{int((a != b).sum())} of {b.numel()} elements differ"
    finite = b.abs()[b.isfinite()]
    scale = float(finite.max()) if finite.numel() else 1.0
    tolerance = 1e-9 if b.dtype in (torch.float64, torch.complex128) else 1e-4
    if torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True):
        return ""
    error = float((a - b).abs().nan_to_num(math.inf).max())
    return f"largest error {error:.3g} (largest element {scale:.3g})"


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the main thread after ``seconds``."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

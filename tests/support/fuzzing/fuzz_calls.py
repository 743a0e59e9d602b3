"""Random forwards as people write them: views and in-place ops, unused results, dropout, dtypes, flags, nested outputs.

A program is source text; the seed decides it. Lines that eager refuses are dropped while it is written.
"""

from __future__ import annotations

import itertools
import linecache
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LARGEST = 800
"""elements of a value"""

VALUES = (
    "{new} = self.lin{last}({f})",
    "{new} = self.lin{last}({f})",
    "{new} = self.norm{last}({f})",
    "{new} = {f} + {g}",
    "{new} = {f} * {g}",
    "{new} = {f} - {g}.mean()",
    "{new} = {f} @ {g}.transpose(-1, -2)",
    "{new} = torch.cat([{f}, {g}], {d})",
    "{new} = torch.stack([{f}, {f} * 2])",
    "{new} = torch.where({m}, {f}, {c})",
    "{new} = torch.tanh({f})",
    "{new} = F.gelu({f}) * {c}",
    "{new} = F.relu({f}, inplace=True)",
    "{new} = self.drop({f})",
    "{new} = F.dropout({f}, 0.3, self.training)",
    "{new} = {f} + torch.randn_like({f})",
    "{new} = {f} + torch.rand({f}.shape[0], 1, dtype={f}.dtype)",
    "{new} = {f}.softmax({d})",
    "{new} = {f}.sum({d}, keepdim=True)",
    "{new} = {f}.mean({d})",
    "{new} = {f}.var(unbiased=False) + {f}",
    "{new} = {f}.cumsum({d})",
    "{new} = {f}.abs().sqrt().clamp(max=3)",
    "{new} = {f}.detach() + 1",
    "{new} = {f} if scale > 1 else {g}",
    "{new} = {f} * scale",
    "{new} = {f} + (0 if bias is None else bias)",
    "{new} = {f} + self.count",
    "{new} = self.bn({f})",
    "{new} = F.embedding(index % 5, self.table)",
    "{new} = {f}[index % 2]",
    "{new} = {f}.float().to({f}.dtype)",
    "{new} = ({f} > 0).to({f}.dtype)",
    "{new} = {f}.masked_fill({m}, 0.5)",
    "{new}, {new2} = {f}.max({d})",
    "{new} = {f}.argmax({d})",
    "{new} = {i} + 1",
    "{new} = {i}.to(torch.int32) * 2",
    "{new} = ({i} % 2).bool()",
    "{new} = {i}.to(torch.float64) * 0.5",
    "{new} = {f} > {g}",
    "{new} = ~{m}",
    "{new} = torch.arange({f}.shape[-1]) + {i}.sum()",
    "{new} = torch.zeros_like({f})",
    "{new} = torch.ones({f}.shape[0], dtype={f}.dtype)",
    "{new} = torch.complex({f}, {f} * 2).abs()",
)

VIEWS = (
    "{new} = {f}.transpose(0, -1)",
    "{new} = {f}.flatten()",
    "{new} = {f}.unsqueeze({d})",
    "{new} = {f}.view({f}.shape[0], -1)",
    "{new} = {f}[:, 1:]",
    "{new} = {f}[..., ::2]",
    "{new} = {f}[0]",
    "{new}, {new2} = {f}.chunk(2, {d})",
    "{new} = {f}.expand(2, *{f}.shape)",
    "{new} = {f}.narrow({d}, 0, 2)",
    "{new} = {f}.diagonal()",
)

WRITES = (
    "{w}.add_({g})",
    "{w}.mul_({c})",
    "{w}.zero_()",
    "{w}.clamp_(-1, 1)",
    "{w}[0] = {c}",
    "{w}[..., -1] = {w}[..., 0] * 2",
    "{w}[:, ::2] += {c}",
    "{w}.transpose(0, -1).mul_({c})",
    "{w}.copy_({g})",
    "{w}[{w} > 0] = {c}",
    "{w}.masked_fill_({w} < 0, {c})",
    "{w} += {g}",
    "{w}.index_add_(0, index % 2, {w}[[0, 0, 1, 1]])",
    "{w}.relu_()",
    "F.dropout({w}, 0.2, self.training, inplace=True)",
    "written.add_(1)",
    "written[0] = {f}.detach().sum()",
    "self.count += 1",
    "self.count.mul_(0.5)",
    "self.state[:2] = {f}.detach().flatten()[:2]",
)

_files = itertools.count()


class Generated(nn.Module):
    """What a program's lines read of the module; ``forward`` is the program's."""

    def __init__(self) -> None:
        super().__init__()
        for n in (3, 4, 6):
            setattr(self, f"lin{n}", nn.Linear(n, 6 if n == 4 else 4))
            setattr(self, f"norm{n}", nn.LayerNorm(n))
        self.drop, self.bn = nn.Dropout(0.2), nn.BatchNorm1d(6)
        self.table = nn.Parameter(torch.randn(5, 6))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("state", torch.zeros(3), persistent=False)
        self.double()


HEAD = "def forward(self, x, y, index, written, *, scale=1.5, bias=None, mask=None):\n"


def inputs(rows: int = 4, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``x`` requires a gradient; the forward may write into ``written``."""
    number = torch.Generator().manual_seed(seed + rows)
    x, y, written = (torch.randn(rows, 6, generator=number, dtype=torch.float64) for _ in range(3))
    index = torch.randint(0, 4, (4,), generator=number)
    return (x.requires_grad_(), y, index, written), {"scale": 0.5 + seed % 3, "mask": y > 0}


def program(seed: int) -> tuple[str, type[Generated]]:
    """The text of a forward, and a module class that has it."""
    writer = _Writer(seed)
    for _ in range(writer.draw.randrange(5, 14)):
        writer.line()
    text = HEAD + "".join(f"    {line}\n" for line in [*writer.lines, writer.returned()])
    return text, module(text)


def module(text: str) -> type[Generated]:
    """A module class with this forward, whose lines errors can show."""
    file = f"<program {next(_files)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = {"torch": torch, "F": F}
    exec(compile(text, file, "exec"), names)
    return type("Generated", (Generated,), {"forward": names["forward"]})


class _Writer:
    """Writes a program line by line, and runs each on examples to know what there is."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        (x, y, index, written), options = inputs(seed=seed)
        self.scope: dict[str, Any] = {"torch": torch, "F": F, "self": Generated(), "x": x, "y": y, "index": index}
        self.scope |= {"written": written, "bias": None, **options}
        self.lines: list[str] = []
        self.made = 0

    def names(self, kind: str) -> list[str]:
        """Of float, integer or boolean tensors; of those that may be written to ("w"), made by this forward."""
        found = [(n, t) for n, t in self.scope.items() if isinstance(t, torch.Tensor) and n != "written"]
        if kind == "i":
            return [n for n, t in found if t.dtype in (torch.int64, torch.int32)]
        if kind == "m":
            return [n for n, t in found if t.dtype == torch.bool]
        floats = [n for n, t in found if t.dtype == torch.float64]
        return [n for n in floats if n not in ("x", "y")] if kind == "w" else floats

    def some(self, kind: str) -> str:
        found = self.names(kind)
        return found[-1 - min(int(self.draw.expovariate(0.5)), len(found) - 1)] if found else "none"

    def line(self) -> None:
        """One more, of which eager makes something."""
        for _ in range(20):
            template = self.draw.choice(self.draw.choice((VALUES, VALUES, VIEWS, WRITES)))
            first = self.some("f")
            example = self.scope[first]
            line = template.format(
                new=f"v{self.made}", new2=f"v{self.made + 1}", f=first, g=self.some("f"), i=self.some("i"),
                m=self.some("m"), w=self.some("w"), c=self.draw.choice((0.5, 2.0, -1.0)),
                d=self.draw.choice((0, -1)), last=example.shape[-1] if example.ndim else 0,
            )  # fmt: skip
            if self._runs(line):
                self.lines.append(line)
                self.made += 2
                return

    def _runs(self, line: str) -> bool:
        scope = dict(self.scope)
        try:
            with torch.no_grad():
                exec(line, scope)
        except Exception:
            return False
        made = [t for n, t in scope.items() if n not in self.scope and isinstance(t, torch.Tensor)]
        if any(t.numel() > LARGEST or not t.numel() or t.ndim > 4 for t in made):
            return False
        scope.pop("__builtins__", None)
        self.scope = scope
        return True

    def returned(self) -> str:
        """Nested, with a scalar that has a gradient; what is not named is an unused result."""
        made = [n for n in self.scope if n[0] == "v"] or ["x"]
        a, b, c = (self.draw.choice(made) for _ in range(3))
        loss = f"(self.lin6(x).square().mean() + sum(v.sum() for v in ({self.some('f')}, {self.some('f')})))"
        forms = (
            f"return {loss}, {a}",
            f"return {{'loss': {loss}, 'rest': [{a}, ({b}, None)]}}",
            f"return {loss}, {a}, {b}, {c}, 3, 'text'",
            f"return ({loss}, {{'a': {a}, 'x': x, 'same': {a}}})",
            f"return [{loss}, {a}.sum(), {b}.reshape(-1)]",
        )
        return self.draw.choice(forms)

"""Loss curves of a small GPT on a text, sharded and on one device; run as a script it draws them into docs/.

``python tests/support/loss_curves.py`` writes docs/figures/loss_curves.svg.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import ideal
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard.models import Gpt, GptConfig

TEXT = (Path(__file__).parent / "sonnets.txt").read_text("utf-8")
BFLOAT16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
ROWS, LENGTH = 8, 24


def model() -> nn.Module:
    """With dropout, in float64."""
    torch.manual_seed(0)
    return Gpt(GptConfig(vocab=len(set(TEXT)), positions=LENGTH, width=48, heads=4, layers=2, dropout=0.1)).double()


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of the text as numbers of its letters, and the letters that follow; [rows, length]."""
    letters = {letter: number for number, letter in enumerate(sorted(set(TEXT)))}
    text, random = torch.tensor([letters[x] for x in TEXT]), torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(text) - LENGTH - 1, (steps, ROWS), generator=random)
    rows = starts[..., None] + torch.arange(LENGTH)
    return [(text[x], text[x + 1]) for x in rows]


def curve(trained: nn.Module, steps: int) -> list[float]:
    """The loss of every AdamW step."""
    optimizer = torch.optim.AdamW(trained.parameters(), 3e-3)
    found = []
    for step, (ids, labels) in enumerate(batches(steps)):
        torch.manual_seed(step)
        loss = trained(ids, labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def sharded(module: nn.Module, **how: Any) -> autoshard.ShardedModule:
    """On {dp: 2, tp: 2}, in two micro-batches whose blocks run again."""
    example = batches(1)[0]
    return autoshard.compile(module, ideal({"dp": 2, "tp": 2}), example, micro_batches=2, recompute="blocks", **how)


def draw(curves: dict[str, Sequence[float]], path: Path) -> None:
    """An SVG of the curves, one over the other; later ones are thinner."""
    width, height, left, bottom = 640, 320, 48, 36
    steps, top = max(map(len, curves.values())), max(map(max, curves.values()))

    def x(step: float) -> float:
        return left + step / (steps - 1) * (width - left - 12)

    def y(loss: float) -> float:
        return height - bottom - loss / top * (height - bottom - 12)

    colours = ("#b8c7d9", "#c0392b", "#222222")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
    ]
    lines.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for loss in range(int(top) + 1):
        lines.append(f'<path d="M{left} {y(loss):.1f}H{width - 12}" stroke="#ddd"/>')
        lines.append(f'<text x="{left - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    marks = range(0, steps + 1, max(1, steps // 4))
    lines += [f'<text x="{x(min(n, steps - 1)):.1f}" y="{height - 20}" text-anchor="middle">{n}</text>' for n in marks]
    lines.append(f'<text x="{width / 2}" y="{height - 5}" text-anchor="middle">step</text>')
    for i, (name, losses) in enumerate(curves.items()):
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses))
        stroke = f'stroke="{colours[i]}" stroke-width="{(6, 2, 1)[i]}"'
        lines.append(f'<polyline points="{points}" fill="none" {stroke}/>')
        at = 24 + 16 * i
        lines.append(f'<path d="M{width - 330} {at}h24" {stroke}/><text x="{width - 300}" y="{at + 4}">{name}</text>')
    path.write_text("\n".join([*lines, "</svg>"]) + "\n", encoding="utf-8")


def main(steps: int = 200) -> None:
    """Train three times, and draw."""
    alone, ours = model(), sharded(model())
    mixed = sharded(model().float(), mixed_precision=BFLOAT16)
    curves = {
        "one device, float64": curve(alone, steps),
        "{dp: 2, tp: 2}, 2 micro-batches, blocks run again": curve(ours, steps),
        "the same in bfloat16, kept in float32": curve(mixed, steps),
    }
    draw(curves, Path(__file__).parents[2] / "docs" / "figures" / "loss_curves.svg")


if __name__ == "__main__":
    main()

"""Random models that are trained: repeated blocks, attention, norms, look-ups, writes in place, draws, counters, and a loss.

A model is a few snippets of source text, each of which makes ``h`` of ``h`` [rows, length, width]; the seed decides them.
Samples stay apart, so that micro-batches apply, except in the snippets of ``WHOLE``.
"""

from __future__ import annotations

import itertools
import linecache
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

HEADS = 2
VOCABULARY = 11

ANYWHERE = (
    "h = h + self.lin{p}(h)",
    "h = h + self.down{p}(F.gelu(self.up{p}(h)))",
    "h = h + self.down{p}(self.drop(F.relu(self.up{p}(h))))",
    "a, b = self.up{p}(h).chunk(2, -1)\nh = h + self.lin{p}(F.silu(a) * b)",
    "h = self.norm{p}(h)",
    "h = self.rms{p}(h)",
    "h = h + self.drop(h)",
    "h = F.dropout(h, 0.2, self.training)",
    "q, k, v = self.qkv{p}(h).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)\n"
    "h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)",
    "q, k, v = (m(h).unflatten(-1, (2, -1)).transpose(1, 2) for m in (self.lin0, self.lin1, self.lin2))\n"
    "w = (q @ k.transpose(-1, -2) / 2).masked_fill(~keep[:, None, None], -1e9).softmax(-1)\n"
    "h = h + (w @ v).transpose(1, 2).flatten(2)",
    "q, k, v = self.qkv{p}(h).chunk(3, -1)\n"
    "q, k, v = (t.reshape(*t.shape[:2], 2, -1).transpose(1, 2) for t in (q, k, v))\n"
    "m = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()[None, None] & keep[:, None, None]\n"
    "m = m | torch.eye(h.shape[1], dtype=torch.bool)\n"
    "h = h + F.scaled_dot_product_attention(q, k, v, attn_mask=m).transpose(1, 2).flatten(2)",
    "q = self.lin{p}(h).unflatten(-1, (2, -1)).transpose(1, 2)\n"
    "k = v = self.key{p}(h).unsqueeze(1)\n"
    "h = h + F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)",
    "h = h + self.mha{p}(h, h, h, need_weights=False)[0]",
    "h = h + self.conv{p}(h.transpose(1, 2)).transpose(1, 2)",
    "h = h + self.emb(ids)",
    "h = h + self.emb(ids) * scale",
    "h = h + self.pos[: h.shape[1]]",
    "h = h + F.embedding(torch.arange(h.shape[1]), self.pos)",
    "h = h * torch.sigmoid(self.lin{p}(h))",
    "h = h * self.scale{p}",
    "h = h.cumsum(1) / 3",
    "h = h + h.roll(1, 1)",
    "h = h + h.flip(1)",
    "h = F.pad(h[:, :-1], (0, 0, 1, 0)) + h",
    "h = h + h.mean(1, keepdim=True)",
    "h = h - h.amax(1, keepdim=True)",
    "h = h + h[:, :1]",
    "w = keep.to(h.dtype)[..., None]\nh = h + (h * w).sum(1, keepdim=True) / w.sum(1, keepdim=True).clamp(min=1)",
    "h = torch.where(keep[..., None], h, 0.1 * h)",
    "h = h.masked_fill(~keep[..., None], 0.5)",
    "t = h.clone()\nt[:, 0] = 0.0\nh = h + t",
    "t = h * 2\nt[:, 1:] += h[:, :-1]\nh = t",
    "t = h.tanh()\nt[..., ::2].mul_(0.5)\nh = h + t",
    "t = torch.zeros_like(h)\nt[:, 1:] = h[:, 1:]\nh = h + t",
    "h = F.relu(self.lin{p}(h), inplace=True) + h",
    "h = torch.cat([h, h * 2], 1)[:, ::2]",
    "h = torch.cat([h, x], -1) @ self.wide{p}",
    "h = h + torch.einsum('bsw,wv->bsv', h, self.mat{p})",
    "h = h + torch.baddbmm(h, h @ h.transpose(1, 2), h, beta=0.5, alpha=0.1)",
    "h = h + torch.randn_like(h) * 0.1",
    "h = h + torch.rand(h.shape[0], 1, 1, dtype=h.dtype)",
    "h = h * torch.empty_like(h[:, :1, :1]).bernoulli_(0.7)",
    "self.count += 1\nh = h * (1 + 0.01 * self.count)",
    "h = h * (1 + self.count)\nself.count.mul_(0.5).add_(0.1)",
    "i = h[..., 0].topk(2, 1).indices\n"  # of a normalised h the sum is rounding
    "h = h + h.gather(1, i[..., None].expand(-1, -1, h.shape[-1])).sum(1, keepdim=True)",
    "h = h + h.sort(1).values",
    "h = h + checkpoint(lambda t: self.down{p}(F.gelu(self.up{p}(t))), h, use_reentrant=False)",
    "w, i = self.router(h).softmax(-1).topk(2, -1)\n"
    "o = torch.zeros_like(h)\n"
    "for e, expert in enumerate(self.experts):\n"
    "    o = o + expert(h) * (w * (i == e)).sum(-1, keepdim=True)\n"
    "h = h + o",
    "f = h.flatten(0, 1)\n"
    "w, i = self.router(f).softmax(-1).topk(2, -1)\n"
    "o = torch.zeros_like(f)\n"
    "for e, expert in enumerate(self.experts):\n"
    "    r, c = torch.where(i == e)\n"
    "    o.index_add_(0, r, expert(f[r]) * w[r, c, None])\n"
    "h = h + o.view_as(h)",
    "h = h.transpose(1, 2).contiguous().transpose(1, 2).tanh()",
    "h = h.flatten(1).view(h.shape[0], h.shape[1], -1) * 0.5",
    "h = h.flatten(0, 1).view_as(h)",
    "h = h.detach() + self.lin{p}(h)",
    "with torch.no_grad():\n    s = h.std(-1, keepdim=True)\nh = h / (1 + s)",
    "if scale > 1:\n    h = h * scale",
    "h = h if self.training else 0.5 * h",
    "h = h + F.normalize(h, dim=-1)",
    "h = torch.stack([h, self.lin{p}(h)], 2).logsumexp(2)",
    "a, b = h.unbind(1)[0], h[:, 1:].split(1, 1)[0].squeeze(1)\nh = h + (a * b).unsqueeze(1)",
    "h = h + F.avg_pool1d(h.transpose(1, 2), 3, 1, 1).transpose(1, 2)",
    "h = h + (h.unsqueeze(1) - h.unsqueeze(2)).abs().mean(2)",
    "h = h + h.unfold(1, 2, 1).mean(-1)[:, :1]",
    "i = torch.remainder(ids, h.shape[1])\nh = h + h[torch.arange(h.shape[0])[:, None], i]",
    "h = h.scatter_add(1, (ids % h.shape[1])[..., None].expand_as(h), h * 0.1)",
)
WHOLE = (
    "h = h * torch.bernoulli(torch.full_like(h[:, :1, :1], 0.7))",
    "t = h * 1\nt[~keep] = 0.25\nh = t",
    "h = self.bn{p}(h.transpose(1, 2)).transpose(1, 2)",
    "h = h - h.mean(0, keepdim=True)",
    "self.mean.lerp_(h.detach().mean((0, 1)), 0.1)\nh = h - self.mean",
    "h = h + h[torch.randperm(h.shape[0])]",
    "h = h + h.flip(0)",
    "h = h / h.norm()",
    "h = h + (h.flatten(1) @ h.flatten(1).T).softmax(-1)[:, :1, None]",
    "h = h[keep.flatten(1).any(1).nonzero().flatten()].sum(0) + h",
)
"""what is not of one sample alone"""
START = ("h = x", "h = self.emb(ids)", "h = x + self.emb(ids)", "h = self.lin0(x)")
LOSSES = (
    "loss = F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())",
    "loss = F.cross_entropy(F.linear(h, self.emb.weight).flatten(0, 1), labels.flatten(), label_smoothing=0.1)",
    "loss = F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), self.classes)",
    "loss = F.cross_entropy(self.head(h).transpose(1, 2), labels, reduction='sum') / labels.numel()",
    "z = self.head(h)\nloss = F.cross_entropy(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
    "each = F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), reduction='none').view_as(labels)\n"
    "loss = (each * keep).sum() / keep.sum()",
    "z = self.head(h).log_softmax(-1)\nloss = F.nll_loss(z.flatten(0, 1), labels.flatten())",
    "loss = F.mse_loss(h, x)",
    "loss = (h - x).square().mean()",
    "loss = (h - x).abs().sum() / h.shape[0]",
    "loss = (F.smooth_l1_loss(h, x, reduction='none').mean(-1) * keep).sum() / keep.sum()",
    "loss = F.binary_cross_entropy_with_logits(h.mean(-1), keep.to(h.dtype))",
    "loss = F.kl_div(self.head(h).log_softmax(-1), self.head(x).softmax(-1), reduction='batchmean')",
    "loss = h.logsumexp((1, 2)).mean()",
    "loss = sum(F.cross_entropy(self.head(h[:, i]), labels[:, i].clamp(min=0)) for i in range(h.shape[1]))",
)
WHOLE_LOSSES = (
    "loss = -self.head(h).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[keep].mean()",
    "loss = F.smooth_l1_loss(h, x, reduction='none').mean(-1)[keep].mean()",
)
MORE = ("", "", "loss = loss + 0.01 * h.square().mean()", "loss = loss + 0.1 * self.lin0.weight.square().sum()",
        "loss = loss * scale", "loss = loss + 0.01 * (h.var(1) + 1e-3).sqrt().mean()")  # fmt: skip
RETURNED = (
    "return loss",
    "return loss, h",
    "return {'loss': loss, 'h': h, 'n': 3}",
    "return h.mean(1), {'loss': loss, 'none': None}",
    "return loss, h.detach(), h[:, 0], 'text'",
    "return {'logs': h.abs().mean().detach(), 'loss': loss, 'i': h.argmax(-1)}",
)

_files = itertools.count()


@dataclass(frozen=True)
class Source:
    """A model as snippets; ``text`` is its source."""

    seed: int
    width: int
    layers: int
    before: tuple[str, ...]
    block: tuple[str, ...]
    after: tuple[str, ...]
    loss: str
    more: str
    returned: str
    whole: bool

    @property
    def text(self) -> str:
        loop = "for block in self.blocks:\n    h = block(h, x, ids, keep, scale)"
        body = (*self.before, *((loop,) if self.block else ()), *self.after, self.loss, self.more, self.returned)
        found = (
            "def block(self, h, x, ids, keep, scale):\n" + _indented((*self.block, "return h")) if self.block else ""
        )
        return f"{found}def forward(self, x, ids, labels, keep, *, scale=1.5):\n{_indented(body)}"

    def smaller(self) -> Iterator[Source]:
        """The same without one of its snippets, or with a plainer one."""
        for name in ("before", "block", "after"):
            snippets = getattr(self, name)
            for i in range(name == "before", len(snippets)):
                yield replace(self, **{name: (*snippets[:i], *snippets[i + 1 :])})
        if self.layers > 1:
            yield replace(self, layers=1)
        for name, plain in (("returned", "return loss"), ("loss", "loss = (h - x).square().mean()"), ("more", "")):
            if getattr(self, name) != plain:
                yield replace(self, **{name: plain})
        if self.before[0] != "h = x":
            yield replace(self, before=("h = x", *self.before[1:]))

    def model(self) -> nn.Module:
        """In float64, with the values of the seed; its lines are in ``linecache``, so that errors show them."""
        text = self.text
        file = f"<model {next(_files)}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        names: dict[str, Any] = {"torch": torch, "F": F, "checkpoint": checkpoint}
        exec(compile(text, file, "exec"), names)
        torch.manual_seed(self.seed)
        blocks = []
        if self.block:
            kind = type("Block", (Part,), {"forward": names["block"]})
            blocks = [kind("\n".join(self.block), self.width) for _ in range(self.layers)]
        rest = "\n".join((*self.before, *self.after, self.loss, self.more, self.returned))
        model = type("Generated", (Part,), {"forward": names["forward"], "text": f"{self}"})(rest, self.width)
        model.blocks = nn.ModuleList(blocks)
        return model.double()


def _indented(snippets: tuple[str, ...]) -> str:
    return "".join(f"    {line}\n" for snippet in snippets if snippet for line in snippet.split("\n"))


class Part(nn.Module):
    """A module with what its lines name."""

    count: torch.Tensor

    def __init__(self, text: str, width: int) -> None:
        super().__init__()
        for name in sorted(set(re.findall(r"self\.(\w+)", text)) - {"training", "blocks"}):
            made = PARTS[name.rstrip("012")](width)
            if isinstance(made, nn.Module | nn.Parameter):
                setattr(self, name, made)
            else:
                self.register_buffer(name, made)


PARTS: dict[str, Callable[[int], Any]] = {
    "lin": lambda w: nn.Linear(w, w),
    "up": lambda w: nn.Linear(w, 2 * w, bias=False),
    "down": lambda w: nn.Linear(2 * w, w),
    "qkv": lambda w: nn.Linear(w, 3 * w),
    "key": lambda w: nn.Linear(w, w // 2, bias=False),
    "mha": lambda w: nn.MultiheadAttention(w, HEADS, batch_first=True),
    "conv": lambda w: nn.Conv1d(w, w, 3, padding=1),
    "norm": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "bn": nn.BatchNorm1d,
    "drop": lambda w: nn.Dropout(0.3),
    "emb": lambda w: nn.Embedding(VOCABULARY, w),
    "head": lambda w: nn.Linear(w, VOCABULARY),
    "router": lambda w: nn.Linear(w, 3, bias=False),
    "experts": lambda w: nn.ModuleList(nn.Sequential(nn.Linear(w, w), nn.GELU(), nn.Linear(w, w)) for _ in range(3)),
    "pos": lambda w: nn.Parameter(torch.randn(8, w) / 4),
    "scale": lambda w: nn.Parameter(torch.linspace(0.5, 1.5, w)),
    "wide": lambda w: nn.Parameter(torch.randn(2 * w, w) / w),
    "mat": lambda w: nn.Parameter(torch.randn(w, w) / w),
    "count": lambda w: torch.zeros(()),
    "mean": lambda w: torch.zeros(w),
    "classes": lambda w: torch.linspace(0.5, 2, VOCABULARY),
}


def source(seed: int) -> Source:
    """The model that ``seed`` stands for."""
    draw = random.Random(seed)
    whole = draw.random() < 0.25
    table = (*ANYWHERE, *WHOLE * 2) if whole else ANYWHERE

    def snippets(least: int, most: int) -> tuple[str, ...]:
        return tuple(
            draw.choice(table).replace("{p}", str(draw.randrange(2))) for _ in range(draw.randint(least, most))
        )

    width, layers = draw.choice((4, 6, 8)), draw.choice((1, 1, 2))
    before, block, after = (draw.choice(START), *snippets(0, 1)), snippets(1, 3), snippets(0, 1)
    return Source(
        seed,
        width,
        layers,
        before,
        block,
        after,
        draw.choice((*LOSSES, *WHOLE_LOSSES) if whole else LOSSES),
        draw.choice(MORE),
        draw.choice(RETURNED),
        whole,
    )


def inputs(width: int, rows: int, length: int, seed: int, grad: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call; ``grad``: whether x requires a gradient."""
    number = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, width, generator=number, dtype=torch.float64)
    ids, labels = (torch.randint(0, VOCABULARY, (rows, length), generator=number) for _ in range(2))
    keep = torch.rand(rows, length, generator=number) > 0.3
    keep[0, 0] = True
    ignored = torch.rand(rows, length, generator=number) < 0.2
    ignored[0] = False  # with no label that counts a mean is nan
    labels = labels.masked_fill(ignored, -100)
    return (x.requires_grad_(grad), ids, labels, keep), {"scale": 0.5 + seed % 3}

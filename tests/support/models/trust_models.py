"""Small models, one for each kind of silently wrong gradient that was reported against distributed training.

Every model returns its loss, and is small in all dims: vocabularies, heads and tokens that do not divide, labels that
fall unevenly on ranks. ``KINDS`` says on which meshes and with which layouts each kind would go wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoshard import Shard

BATCH, SEQ, WIDTH, VOCAB = 4, 8, 8, 13
"""a vocabulary that no mesh here divides"""
HEADS, DIM = 2, 4
Setting = Mapping[str, Any]


class Trunk(nn.Module):
    """Tokens, two layers, hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Loss(nn.Module):
    """A trunk, a head, and a loss of the logits: ``of(logits, labels)``."""

    def __init__(self, of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.trunk, self.head, self.of = Trunk(), nn.Linear(WIDTH, VOCAB, bias=False), of

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.of(self.head(self.trunk(ids)), labels)


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1, ignore_index=-100)


def entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)


def per_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over the count of labels, written by hand."""
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
    return total / (labels != -100).sum()


def of_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Probabilities by hand: every rank that has gathered the logits could count it."""
    log = logits - logits.logsumexp(-1, keepdim=True)
    return -log.gather(-1, labels.clamp(min=0)[..., None]).mean() + 1e-2 * logits.logsumexp(-1).square().mean()


class Heads(nn.Module):
    """Several predictions from one trunk, each normalised by the count of its own labels."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = Trunk(), nn.ModuleList(nn.Linear(WIDTH, VOCAB) for _ in range(3))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h, loss = self.trunk(ids), torch.zeros((), dtype=torch.float64)
        for shift, head in enumerate(self.heads):
            loss = loss + per_token(head(h[:, : SEQ - shift]), labels[:, shift:]) / (shift + 1)
        return loss


class Chunked(nn.Module):
    """Logits of one slice of the sequence at a time, computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(), nn.Linear(WIDTH, VOCAB, bias=False)

    def part(self, h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(h).flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.trunk(ids).chunk(2, 1), labels.chunk(2, 1), strict=True)
        parts = [checkpoint(self.part, h, y, use_reentrant=False) for h, y in pairs]
        return torch.stack(parts).sum() / (labels != -100).sum()


class Recomputed(nn.Module):
    """Dropout inside of what the backward runs again, beside dropout on the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.up, self.down = Trunk(), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def block(self, h: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.down(F.dropout(F.gelu(self.up(h)), 0.3)), 0.2)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.trunk(ids)
        h = h + checkpoint(self.block, h, use_reentrant=False)
        return (h + checkpoint(self.block, h, use_reentrant=False)).square().mean() + 0 * labels.sum()


class Images(nn.Module):
    """Embeddings of image patches take the places of one token in the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.patch = Trunk(), nn.Linear(6, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        h = self.trunk.embed(ids)
        h = h.masked_scatter((ids == 0)[..., None].expand_as(h), self.patch(pixels))
        return entropy(self.head(h + self.trunk.down(F.gelu(self.trunk.up(h)))), labels)


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, DIM)).transpose(1, 2)


class Attention(nn.Module):
    """Causal attention. ``sinks``: a learnable logit per head; ``kv``: heads of keys and values."""

    def __init__(self, sinks: bool = False, kv: int = HEADS) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * DIM, bias=False) for n in (HEADS, kv, kv))
        self.o = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.sinks = nn.Parameter(torch.randn(HEADS)) if sinks else None

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(m(h)) for m in (self.q, self.k, self.v))
        if self.sinks is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < HEADS)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(DIM)
            scores = scores.masked_fill(torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1), -math.inf)
            sinks = self.sinks[None, :, None, None].expand(h.shape[0], -1, SEQ, 1)
            mixed = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class Attending(nn.Module):
    """Tokens with positions, attention, a layer, a loss."""

    def __init__(self, **kind: Any) -> None:
        super().__init__()
        self.trunk, self.attention = Trunk(), Attention(**kind)
        self.position = nn.Embedding(SEQ, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.trunk(ids) + self.position(torch.arange(SEQ))
        return entropy(self.head(self.norm(h + self.attention(h))), labels)


class Latent(nn.Module):
    """Latent attention: one rotary key is shared by all heads, beside keys that each head makes of the latent."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.q = Trunk(), nn.Linear(WIDTH, HEADS * 2 * DIM, bias=False)
        self.latent, self.rotary = nn.Linear(WIDTH, 6, bias=False), nn.Linear(WIDTH, DIM, bias=False)
        self.kv, self.o = nn.Linear(6, HEADS * 2 * DIM, bias=False), nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.trunk(ids)
        q = self.q(h).unflatten(-1, (HEADS, 2 * DIM)).transpose(1, 2)
        k, v = self.kv(self.latent(h)).unflatten(-1, (HEADS, 2 * DIM)).transpose(1, 2).split(DIM, -1)
        angle = torch.arange(SEQ, dtype=h.dtype)[:, None] / torch.arange(1, DIM + 1, dtype=h.dtype)
        shared = (self.rotary(h) * angle.cos())[:, None].expand(-1, HEADS, -1, -1)
        mixed = F.scaled_dot_product_attention(q, torch.cat([k, shared], -1), v, is_causal=True)
        return entropy(self.head(h + self.o(mixed.transpose(1, 2).flatten(2))), labels)


class DeltaRule(nn.Module):
    """A gated delta rule: a state along the sequence; the output's norm is over all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.q, self.k, self.v, self.g = (nn.Linear(WIDTH, HEADS * DIM, bias=False) for _ in range(4))
        self.beta, self.o = nn.Linear(WIDTH, HEADS), nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.norm = nn.RMSNorm(HEADS * DIM)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.trunk(ids)
        q, k, v = (heads(m(h)) for m in (self.q, self.k, self.v))
        k, beta = F.normalize(k, dim=-1), self.beta(h).sigmoid().transpose(1, 2)[..., None]
        state, outputs = torch.zeros(len(ids), HEADS, DIM, DIM, dtype=h.dtype), []
        for t in range(SEQ):
            old = torch.einsum("bhd,bhde->bhe", k[:, :, t], state)
            state = state + torch.einsum("bhd,bhe->bhde", k[:, :, t], beta[:, :, t] * (v[:, :, t] - old))
            outputs.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], state))
        mixed = torch.stack(outputs, 1).flatten(2)
        return self.o(self.norm(mixed) * self.g(h).sigmoid()).square().mean() + 0 * labels.sum()


class Experts(nn.Module):
    """Top-2 routing with normalised weights, a loss that balances, and one on the router's logits."""

    def __init__(self, experts: int = 4, balance: bool = True) -> None:
        super().__init__()
        self.trunk, self.router = Trunk(), nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 6) / 3)
        self.down = nn.Parameter(torch.randn(experts, 6, WIDTH) / 3)
        self.balance = balance

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.trunk(ids).flatten(0, 1)
        scores = self.router(h).softmax(-1)
        top, chosen = scores.topk(2, -1)
        weight = torch.zeros_like(scores).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        hidden = F.silu(torch.einsum("tf,efh->teh", h, self.up))
        mixed = torch.einsum("te,tef->tf", weight, torch.einsum("teh,ehf->tef", hidden, self.down))
        loss = (h + mixed).square().mean() + 0 * labels.sum()
        if self.balance:
            share = F.one_hot(chosen, scores.shape[-1]).sum(1).to(h.dtype).mean(0)
            loss = loss + 0.1 * scores.shape[-1] * (share * scores.mean(0)).sum()
        return loss


class Tied(nn.Module):
    """One weight embeds tokens and makes logits; one module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.again = Trunk(), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.trunk.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.again(F.gelu(self.again(self.trunk(ids))))
        return entropy(self.head(h), labels)


class Contrast(nn.Module):
    """Every sample against all others of the batch, with a learnable temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.other = Trunk(), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        a = F.normalize(self.trunk(ids).mean(1), dim=-1)
        b = F.normalize(self.other(self.trunk(ids.flip(1))).mean(1), dim=-1)
        logits, own = self.scale.exp() * a @ b.T, torch.arange(len(ids))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2 + 0 * labels.sum()


class Statistics(nn.Module):
    """Batch norm over all samples, group norm over channels."""

    def __init__(self, group: bool) -> None:
        super().__init__()
        self.trunk, self.norm = Trunk(), nn.GroupNorm(2, WIDTH) if group else nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.trunk(ids).transpose(1, 2)).transpose(1, 2)).square().mean() + 0 * labels.sum()


class Normed(nn.Module):
    """A norm of queries and keys with one weight that all heads share, and a gate by a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.attention = Trunk(), Attention()
        self.q_norm, self.gate = nn.RMSNorm(DIM), nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h, a = self.trunk(ids), self.attention
        q, k, v = self.q_norm(heads(a.q(h))), self.q_norm(heads(a.k(h))), heads(a.v(h))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return (h + self.gate * a.o(mixed)).square().mean() + 0 * labels.sum()


class Scan(nn.Module):
    """A cumulative mean along the sequence, and positions counted from the attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.position = Trunk(), nn.Embedding(SEQ + 1, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = (ids != 0).long().cumsum(-1)
        h = self.trunk(ids) + self.position(places)
        h = h.cumsum(1) / torch.arange(1, SEQ + 1, dtype=h.dtype)[:, None]
        return entropy(self.head(h), labels)


class Padded(nn.Module):
    """An embedding whose padding row gets no gradient, and a mean over the tokens that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, WIDTH, padding_idx=0), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        there = (ids != 0)[..., None]
        h = (self.out(self.embed(ids)) * there).sum(1) / there.sum(1)
        return h.square().mean() + 0 * labels.sum()


def tokens() -> dict[str, torch.Tensor]:
    """Ids and labels; nearly all labels that count are in the last rows."""
    made = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=made)
    labels = torch.randint(0, VOCAB, (BATCH, SEQ), generator=made)
    labels[0, 1:], labels[1, ::2] = -100, -100
    return {"ids": ids, "labels": labels}


def with_images() -> dict[str, torch.Tensor]:
    given = tokens()
    pixels = torch.randn(int((given["ids"] == 0).sum()), 6, generator=torch.Generator().manual_seed(4)).double()
    return {**given, "pixels": pixels}


TP, DP, PP = {"tp": 2}, {"dp": 2}, {"pp": 2, "tp": 2}
HEAD_ROWS = {"*head*.weight": Shard(0)}
"""logits are cut along a vocabulary that does not divide"""


@dataclass(frozen=True)
class Kind:
    """A kind of wrong gradient: a model, and settings of ``verify`` in which it would show."""

    make: Callable[[], nn.Module]
    settings: tuple[Setting, ...]
    inputs: Callable[[], dict[str, torch.Tensor]] = field(default=tokens)


def on(mesh: Mapping[str, int], **asked: Any) -> Setting:
    return {"mesh": mesh, **asked}


MICRO = on(TP, micro_batches=2)
DDP, FSDP = on(DP, like="ddp"), on(DP, like="fsdp")
SP = on(TP, like="megatron-sp")
STAGES = on(PP, stages="pp", micro_batches=2)
ROWS = on(TP, hints=HEAD_ROWS)

KINDS: dict[str, Kind] = {
    "label smoothing over a sharded vocabulary": Kind(lambda: Loss(smoothed), (ROWS, MICRO, STAGES)),
    "a vocabulary that does not divide": Kind(lambda: Loss(entropy), (on({"tp": 4}, hints=HEAD_ROWS), FSDP)),
    "loss of gathered logits": Kind(lambda: Loss(of_logits), (ROWS, on({"dp": 2, "tp": 2}, hints=HEAD_ROWS))),
    "mean over local label counts": Kind(lambda: Loss(per_token), (DDP, on(DP, micro_batches=2), STAGES)),
    "several prediction heads": Kind(Heads, (DDP, SP, MICRO)),
    "chunked cross entropy, sharded vocabulary": Kind(Chunked, (ROWS, FSDP, on(DP, micro_batches=2))),
    "draws of recomputed blocks": Kind(
        Recomputed, (on({"dp": 2, "tp": 2}), SP, on(TP, recompute="blocks", micro_batches=2))
    ),
    "image tokens in a sharded sequence": Kind(Images, (on(TP, hints={"ids": Shard(1)}), DDP), with_images),
    "attention sinks": Kind(lambda: Attending(sinks=True), (on(TP, like="megatron"), FSDP)),
    "fewer key-value heads than ranks": Kind(lambda: Attending(kv=1), (on(TP, like="megatron"), on({"tp": 4}))),
    "shared rotary key of latent attention": Kind(Latent, (on(TP, like="megatron"), SP)),
    "norm of a gated delta rule's output": Kind(DeltaRule, (on(TP, like="megatron"), on(DP))),
    "one norm weight for all heads": Kind(Normed, (on(TP, like="megatron"), MICRO)),
    "router under expert parallelism": Kind(
        lambda: Experts(balance=False), (on({"ep": 2}, hints={"up": Shard(0), "down": Shard(0)}), STAGES)
    ),
    "balance of experts over local tokens": Kind(
        Experts, (on({"dp": 2, "ep": 2}, hints={"up": {"ep": Shard(0)}, "down": {"ep": Shard(0)}}), DDP)
    ),
    "experts' gradients counted twice": Kind(
        lambda: Experts(3, balance=False),
        (on({"dp": 2, "ep": 2}, hints={"up": {"ep": Shard(0)}, "down": {"ep": Shard(0)}}), FSDP),
    ),
    "norm weights under sequence parallelism": Kind(
        Attending, (SP, on({"dp": 2, "tp": 2}, like={"dp": "fsdp", "tp": "megatron-sp"}))
    ),
    "sequence and context parallelism together": Kind(
        Attending, (on({"cp": 2, "tp": 2}, like={"cp": "ring", "tp": "megatron-sp"}), on(TP, like="ulysses"))
    ),
    "bias of a row-parallel layer": Kind(lambda: Loss(entropy), (on(TP, like="megatron"), SP, MICRO)),
    "tied weights": Kind(Tied, (STAGES, ROWS, FSDP)),
    "negatives of other ranks": Kind(Contrast, (DDP, on(DP, like="fsdp"))),
    "statistics of a local batch": Kind(lambda: Statistics(group=False), (DDP, on({"dp": 2, "tp": 2}))),
    "statistics over sharded channels": Kind(lambda: Statistics(group=True), (on(TP, like="megatron"), DDP)),
    "positions in a sharded sequence": Kind(Scan, (on(TP, hints={"ids": Shard(1)}), MICRO)),
    "padding row of a sharded table": Kind(Padded, (on(TP, hints={"embed.weight": Shard(0)}), DDP)),
}

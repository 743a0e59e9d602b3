"""DLRM (Naumov et al. 2019): embedding tables, two MLPs, pairwise dot interactions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard.models.output import Output

# Rows of the 26 tables of Criteo Terabyte, indices capped at 40M, as in MLPerf Training v1.0.
_TERABYTE_ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976,
    14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DlrmConfig:
    """``rows`` per table; ``bottom[-1]``: width of tables; ``lookups`` per table are summed."""

    rows: tuple[int, ...] = _TERABYTE_ROWS
    dense: int = 13
    bottom: tuple[int, ...] = (512, 256, 128)
    top: tuple[int, ...] = (1024, 1024, 512, 256)
    lookups: int = 1

    @property
    def width(self) -> int:
        return self.bottom[-1]

    @classmethod
    def tiny(cls) -> DlrmConfig:
        return cls(rows=(64, 40, 24), dense=8, bottom=(32, 16), top=(32, 16), lookups=2)

    @classmethod
    def terabyte(cls) -> DlrmConfig:
        """The MLPerf model on Criteo Terabyte, 24B parameters."""
        return cls()


def _mlp(sizes: tuple[int, ...]) -> nn.Sequential:
    """Alternating Linear and ReLU; ends with ReLU."""
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*itertools.chain.from_iterable((nn.Linear(i, o), nn.ReLU()) for i, o in pairs))


class Dlrm(nn.Module):
    """``dense [batch, dense]``, ``sparse [batch, tables, lookups]`` → click logits ``[batch]``.

    ``labels [batch]``: 1.0 for a click; the loss is binary cross entropy.
    """

    pair_rows: Tensor
    pair_columns: Tensor

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        self.config = config
        self.tables = nn.ModuleList(nn.Embedding(rows, config.width) for rows in config.rows)
        self.bottom = _mlp((config.dense, *config.bottom))
        features = len(config.rows) + 1
        self.top = _mlp((config.width + features * (features - 1) // 2, *config.top))
        self.head = nn.Linear(config.top[-1], 1)
        pairs = torch.tril_indices(features, features, offset=-1)
        self.register_buffer("pair_rows", pairs[0].clone(), persistent=False)
        self.register_buffer("pair_columns", pairs[1].clone(), persistent=False)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            bound = math.sqrt(1 / module.num_embeddings)
            nn.init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=math.sqrt(2 / (module.in_features + module.out_features)))
            nn.init.normal_(module.bias, std=math.sqrt(1 / module.out_features))

    def forward(self, dense: Tensor, sparse: Tensor, labels: Tensor | None = None) -> Output:
        bottom = self.bottom(dense)
        looked_up = [table(sparse[:, i]).sum(1) for i, table in enumerate(self.tables)]
        features = torch.stack([bottom, *looked_up], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        interactions = products[:, self.pair_rows, self.pair_columns]
        logits = self.head(self.top(torch.cat([bottom, interactions], dim=1))).squeeze(-1)
        if labels is None:
            return Output(logits)
        return Output(logits, F.binary_cross_entropy_with_logits(logits, labels))


def example_inputs(config: DlrmConfig, batch: int = 4, seq: int = 0) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """``dense``, ``sparse`` and ``labels``; ``seq`` is ignored."""
    generator = torch.Generator("cpu").manual_seed(0)
    dense = torch.randn(batch, config.dense, generator=generator, device="cpu")
    columns = [torch.randint(n, (batch, config.lookups), generator=generator, device="cpu") for n in config.rows]
    labels = torch.randint(2, (batch,), generator=generator, device="cpu").to(dense.dtype)
    return (dense, torch.stack(columns, dim=1)), {"labels": labels}


SIZES: dict[str, Callable[[], DlrmConfig]] = {
    "tiny": DlrmConfig.tiny,
    "terabyte": DlrmConfig.terabyte,
}

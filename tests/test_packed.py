"""Packed sequences of recurrent layers: results and gradients of one device, and refusals of what would see a stand-in."""

from __future__ import annotations

import pytest
import torch
from harness import assert_equal_training
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autoshard


class Packed(nn.Module):
    """A recurrent layer over sequences of these lengths, and something more with the packed data."""

    def __init__(self, layer: nn.Module, total: int | None = None, with_data: bool = False) -> None:
        super().__init__()
        self.layer, self.total, self.with_data = layer, total, with_data

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, last = self.layer(packed)
        if self.with_data:
            last = last + out.data.sum()
        return pad_packed_sequence(out, batch_first=True, total_length=self.total, padding_value=0.5)[0], last


X, LENGTHS = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 5, 1, 4])


@pytest.mark.parametrize(
    ("layer", "total"),
    [
        (lambda: nn.GRU(6, 8, num_layers=2, bidirectional=True, batch_first=True), 7),
        (lambda: nn.RNN(6, 8, bias=False), None),
    ],
)
def test_results_and_gradients_are_those_of_one_device(layer: type[nn.Module], total: int | None) -> None:
    torch.manual_seed(0)
    assert_equal_training(Packed(layer(), total), {"tp": 2}, (X, LENGTHS), steps=1)


@pytest.mark.parametrize("model", [Packed(nn.GRU(6, 8), with_data=True), Packed(nn.LSTM(6, 8))], ids=["data", "lstm"])
def test_what_would_see_the_stand_in_is_refused(model: nn.Module) -> None:
    with pytest.raises(autoshard.AutoshardError, match=r"a packed sequence .* mask what comes after"):
        autoshard.compile(model, {"tp": 2}, (X, LENGTHS))


def test_what_lies_behind_the_end_of_a_sequence_does_not_count() -> None:
    torch.manual_seed(0)
    inside = torch.arange(5)[:, None] < LENGTHS[:, None, None]
    x = torch.where(inside, X, torch.nan)
    assert_equal_training(Packed(nn.GRU(6, 8, batch_first=True), 7), {"tp": 2}, (x, LENGTHS), steps=1)

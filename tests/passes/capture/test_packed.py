"""Packed sequences of recurrent layers: results and gradients of one device, and refusals of what would see a stand-in."""

from __future__ import annotations

import pytest
import torch
from capture_models import text
from harness import assert_equal_training
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autoshard


class Packed(nn.Module):
    """A recurrent layer over sequences of these lengths, and something more with the packed data."""

    def __init__(self, layer: nn.Module, total: int | None = None, with_data: bool = False) -> None:
        super().__init__()
        self.layer, self.total, self.with_data = layer, total, with_data

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, states = self.layer(packed)
        last, *cells = states if isinstance(states, tuple) else (states,)
        if self.with_data:
            last = last + out.data.sum()
        return pad_packed_sequence(out, batch_first=True, total_length=self.total, padding_value=0.5)[0], last, *cells


X, LENGTHS = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 5, 1, 4])


@pytest.mark.parametrize(
    ("layer", "total"),
    [
        pytest.param(
            lambda: nn.GRU(6, 8, num_layers=2, bidirectional=True, batch_first=True), 7, marks=pytest.mark.slow
        ),
        (lambda: nn.RNN(6, 8, bias=False), None),
        pytest.param(
            lambda: nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True), 7, marks=pytest.mark.slow
        ),
        pytest.param(lambda: nn.LSTM(6, 8, bias=False, proj_size=4, batch_first=True), None, marks=pytest.mark.slow),
    ],
)
def test_results_and_gradients_are_those_of_one_device(layer: type[nn.Module], total: int | None) -> None:
    torch.manual_seed(0)
    assert_equal_training(Packed(layer(), total), {"tp": 2}, (X, LENGTHS), steps=1)


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(
            lambda: nn.LSTM(6, 4, num_layers=2, bidirectional=True, batch_first=True, dropout=0.4),
            marks=pytest.mark.slow,
        ),
        lambda: nn.GRU(6, 4, num_layers=3, batch_first=True, dropout=0.4),
        pytest.param(lambda: nn.RNN(6, 4, num_layers=2, batch_first=True, dropout=1.0), marks=pytest.mark.slow),
    ],
)
def test_dropout_between_layers_is_that_of_the_packed_data(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert_equal_training(Packed(layer()), {"tp": 2}, (X, LENGTHS), steps=2)


@pytest.mark.slow
def test_the_length_of_what_is_padded_again_goes_with_recomputation() -> None:
    torch.manual_seed(0)
    model = Packed(nn.LSTM(6, 8, batch_first=True))
    assert autoshard.verify(model, {"tp": 2}, (X, LENGTHS), recompute="selective").ok


@pytest.mark.one_graph
def test_what_would_see_the_stand_in_is_refused() -> None:
    with pytest.raises(autoshard.AutoshardError, match=r"a packed sequence .* mask the positions after"):
        autoshard.compile(Packed(nn.GRU(6, 8), with_data=True), {"tp": 2}, (X, LENGTHS))


@pytest.mark.slow
def test_what_lies_behind_the_end_of_a_sequence_does_not_count() -> None:
    torch.manual_seed(0)
    inside = torch.arange(5)[:, None] < LENGTHS[:, None, None]
    x = torch.where(inside, X, torch.nan)
    assert_equal_training(Packed(nn.GRU(6, 8, batch_first=True), 7), {"tp": 2}, (x, LENGTHS), steps=1)


def test_text_of_a_packed_sequence_that_is_padded_again() -> None:
    class Repacked(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return pad_packed_sequence(pack_padded_sequence(x, lengths), total_length=5)[0]

    assert (
        text(Repacked(), torch.randn(5, 2, 3), torch.tensor([5, 2]))
        == """\
arange = aten.arange.default(5)
unsqueeze = aten.unsqueeze.default(arange, 1)
lt = aten.lt.Tensor(unsqueeze, lengths)
unsqueeze_1 = aten.unsqueeze.default(lt, 2)
where = aten.where.ScalarOther(unsqueeze_1, x, 0)
max_1 = aten.max.default(lengths)
item = aten._local_scalar_dense.default(max_1)
gt = aten.gt.default(item, 5)
sym_not = aten.__not__.default(gt)
sym_ite = aten.Int.Scalar(sym_not)
scalar_tensor = aten.scalar_tensor.default(sym_ite, dtype=int64)
_ = aten._assert_async.msg(scalar_tensor, "rnn.py: the model's check of its values fails: if total_length < max_seq_length:")
arange_1 = aten.arange.default(5)
unsqueeze_2 = aten.unsqueeze.default(arange_1, 1)
lt_1 = aten.lt.Tensor(unsqueeze_2, lengths)
unsqueeze_3 = aten.unsqueeze.default(lt_1, 2)
full_like = aten.full_like.default(where, 0.0)
where_1 = aten.where.self(unsqueeze_3, where, full_like)
pad = aten.pad.default(where_1, [0, 0, 0, 0, 0, 0], 'constant', 0.0)
return pad"""
    )

"""Packed sequences in a trace. ``pack_padded_sequence`` returns one row per element, a length
unknown to a trace. A stand-in keeps the padded batch, and recurrent layers stop at each
sequence's end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from autoshard.errors import CaptureError
from autoshard.passes.capture.observer import ObservedCall, Observer
from autoshard.runtime.operations.random import packed_noise
from autoshard.torch_private.ops import check

_RECURRENT_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_DATA_GETTERS = [getattr(Tensor, n).__get__ for n in ("shape", "data", "T", "mT", "H", "mH", "real", "imag")]
"""attributes that read a tensor's shape or data"""
_PACKED_ADVICE = "Pass the padded batch to layers, and mask the positions after the end of each sequence."


@dataclass
class _Batch:
    """Sequences of ``lengths`` [b] in ``padded`` [steps, b, features], and their stand-ins."""

    lengths: Tensor
    padded: Tensor
    rows: Tensor
    """[steps · b, features]: stand-in for the packed data"""
    sizes: Tensor
    """stand-in for the batch sizes"""


class PackedSequences(Observer):
    """Packed sequences of one trace. Calls that :meth:`concerns` accepts go to :meth:`call`."""

    def __init__(self) -> None:
        self.batches: dict[int, _Batch] = {}
        """id of a stand-in → its batch, which keeps the stand-in alive"""

    def before(self, call: ObservedCall) -> ObservedCall | None:
        given = call.func, call.args, call.kwargs
        return ObservedCall(self.call, given, {}, call.frame, observes_inner=True) if self.concerns(*given) else None

    def _stand_ins_in(self, tree: Any) -> list[Tensor]:
        return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and id(x) in self.batches]

    def concerns(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call makes a packed sequence, or reads more than metadata of one."""
        name = getattr(func, "__name__", "")
        if name == "_pack_padded_sequence":
            return True
        of_features = func is Tensor.size and args[1:] == (-1,)
        of_kind = func is Tensor.dim or of_features or (name == "__get__" and func not in _DATA_GETTERS)
        return bool(self.batches) and not of_kind and bool(self._stand_ins_in((args, kwargs)))

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``func(*args, **kwargs)``. Raises :class:`CaptureError` if the stand-in would show."""
        name = getattr(func, "__name__", "")
        if name == "_pack_padded_sequence":
            return self.pack(*args)
        of = self._stand_ins_in((args, kwargs))
        batch = self.batches[id(of[0])]
        if name in _RECURRENT_LAYERS and len(args) == 9:
            return self.layers(func, batch, *args[2:])
        if name == "_pad_packed_sequence":
            return self.pad(batch, *args[2:])
        if of[0] is batch.sizes and func is Tensor.__getitem__ and args[1] == 0:
            return len(batch.lengths)
        if of[0] is batch.sizes and func is Tensor.size:
            return batch.lengths.max().item()
        raise CaptureError(f"{name} uses a packed sequence (pack_padded_sequence). {_PACKED_ADVICE}")

    def _stand_ins(self, lengths: Tensor, padded: Tensor) -> tuple[Tensor, Tensor]:
        batch = _Batch(lengths, padded, padded.reshape(-1, padded.shape[-1]), lengths.clone())
        self.batches |= {id(batch.rows): batch, id(batch.sizes): batch}
        return batch.rows, batch.sizes

    def pack(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """``_pack_padded_sequence``: stand-ins for the data and the batch sizes."""
        if x.dim() != 3:
            raise CaptureError(f"a packed sequence has {x.dim()} dims. {_PACKED_ADVICE}")
        x = x.transpose(0, 1) if batch_first else x
        inside = torch.arange(x.shape[0], device=lengths.device)[:, None] < lengths
        return self._stand_ins(lengths, torch.where(inside[..., None], x, 0))  # no NaN in gradients

    def pad(self, batch: _Batch, batch_first: bool, value: float, total: Any) -> tuple[Tensor, Tensor]:
        """``_pad_packed_sequence``: the padded batch of ``total`` steps, and the lengths."""
        x, steps = batch.padded, batch.padded.shape[0]
        x = torch.where((_step_numbers(batch) < batch.lengths)[..., None], x, torch.full_like(x, value))
        if isinstance(total, int) and total >= steps:
            x = F.pad(x, (0, 0, 0, 0, 0, total - steps), value=value)
        else:
            check(total >= 0)
            check(total <= steps)
            x = x.narrow(0, 0, total)
        return x.transpose(0, 1) if batch_first else x, batch.lengths

    def layers(
        self, func: Callable[..., Any], batch: _Batch, hx: Tensor | tuple[Tensor, ...], weights: list[Tensor],
        biases: bool, layers: int, dropout: float, train: bool, bidirectional: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Recurrent layers: packed results; final states per layer and direction."""
        x, ends, cells = batch.padded, [], []
        directions = 2 if bidirectional else 1
        each = len(weights) // (layers * directions)
        for layer in range(layers):
            if layer and dropout and train:  # torch applies dropout to packed data
                x = x * (packed_noise(x.detach(), batch.lengths, dropout) if dropout < 1 else 0.0)
            results = []
            for reverse in range(directions):
                number = layer * directions + reverse
                own, place = weights[number * each : (number + 1) * each], slice(number, number + 1)
                state = tuple(s[place] for s in hx) if isinstance(hx, tuple) else hx[place]
                run = _reversed_sequences if reverse else _in_given_order
                given = run(batch, x)
                out = func(given, state, own, biases, 1, 0.0, train, False, False)[0]
                ends.append(out.gather(0, (batch.lengths - 1)[None, :, None].expand(1, -1, out.shape[-1])))
                if isinstance(state, tuple):
                    cells.append(_last_cell_states(batch, given, out, state, own, biases))
                results.append(run(batch, out))
            x = torch.cat(results, -1) if bidirectional else results[0]
        states = (torch.cat(s) for s in (ends, cells) if s)
        return self._stand_ins(batch.lengths, x)[0], *states


def _last_cell_states(
    batch: _Batch, x: Tensor, out: Tensor, state: tuple[Tensor, ...], weights: list[Tensor],
    biases: bool,
) -> Tensor:  # fmt: skip
    """LSTM cell states [1, b, hidden] at each sequence's end, not after the padding, from
    ``out``."""
    h, c = state
    b_ih, b_hh = weights[2:4] if biases else (None, None)
    gates = F.linear(x, weights[0], b_ih) + F.linear(torch.cat([h, out[:-1]]), weights[1], b_hh)
    enters, stays, new, _ = gates.chunk(4, -1)
    added, stays = enters.sigmoid() * new.tanh(), stays.sigmoid()
    for step, inside in enumerate((_step_numbers(batch) < batch.lengths)[..., None].unbind(0)):
        c = torch.where(inside, stays[step] * c + added[step], c)
    return c


def _step_numbers(batch: _Batch) -> Tensor:
    return torch.arange(batch.padded.shape[0], device=batch.lengths.device)[:, None]


def _in_given_order(batch: _Batch, x: Tensor) -> Tensor:
    return x


def _reversed_sequences(batch: _Batch, x: Tensor) -> Tensor:
    """``x`` [steps, b, features] with each sequence reversed in front of its padding."""
    steps = _step_numbers(batch)
    order = torch.where(steps < batch.lengths, batch.lengths - 1 - steps, steps)
    return x.gather(0, order[..., None].expand_as(x))

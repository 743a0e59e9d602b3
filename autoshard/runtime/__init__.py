"""What generated rank modules call: differentiable collectives on plain local tensors, and what they run on.

Imports torch and nothing of the compiler.
"""

from autoshard.runtime.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    enter,
    leave,
    offset,
    pad,
    partial,
    permute,
    reduce_scatter,
    size,
    slice,
)
from autoshard.runtime.communicator import Communicator, Executed, bind, current
from autoshard.runtime.in_process import InProcessCommunicator, World
from autoshard.runtime.module import Block, RankModule, device
from autoshard.runtime.parameters import enter_parameters, gather_parameters, regather, wait_gradients
from autoshard.runtime.process_group import TorchCommunicator
from autoshard.runtime.random import dropout, shared, synchronised_rng

__all__ = [
    "Block",
    "Communicator",
    "Executed",
    "InProcessCommunicator",
    "RankModule",
    "TorchCommunicator",
    "World",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "bind",
    "current",
    "device",
    "dropout",
    "enter",
    "enter_parameters",
    "gather_parameters",
    "leave",
    "offset",
    "pad",
    "partial",
    "permute",
    "reduce_scatter",
    "regather",
    "shared",
    "size",
    "slice",
    "synchronised_rng",
    "wait_gradients",
]

from autoshard.runtime.attention import attention, causal_mask, kv_heads  # noqa: E402
from autoshard.runtime.draw import draw, draw_like, native_dropout  # noqa: E402
from autoshard.runtime.embedding import vocab_embedding, vocab_embedding_bag  # noqa: E402
from autoshard.runtime.loss import cross_entropy, nll_loss  # noqa: E402
from autoshard.runtime.norm import batch_norm, batch_norm_no_stats, group_norm, layer_norm, rms_norm  # noqa: E402
from autoshard.runtime.softmax import log_softmax, safe_softmax, softmax  # noqa: E402

__all__ += [
    "attention",
    "batch_norm",
    "batch_norm_no_stats",
    "causal_mask",
    "cross_entropy",
    "draw",
    "draw_like",
    "group_norm",
    "kv_heads",
    "layer_norm",
    "log_softmax",
    "native_dropout",
    "nll_loss",
    "rms_norm",
    "safe_softmax",
    "softmax",
    "vocab_embedding",
    "vocab_embedding_bag",
]

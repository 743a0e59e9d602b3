"""What generated rank modules call: differentiable collectives on plain local tensors, and what they run on.

Imports torch and nothing of the compiler.
"""

from torch import reshape

from autoshard.runtime import ctc, exactly, functions, grouped  # noqa: F401  their ops
from autoshard.runtime.again import again
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
    slice,  # noqa: A004
)
from autoshard.runtime.communicator import Communicator, Executed, bind, current
from autoshard.runtime.fan_out import fan_out
from autoshard.runtime.gradients import Gradients
from autoshard.runtime.in_place import write_select, write_slice
from autoshard.runtime.in_process import InProcessCommunicator, World
from autoshard.runtime.launch import main
from autoshard.runtime.module import Block, RankModule, device, require
from autoshard.runtime.parameters import enter_parameters, gather_parameters, regather, wait_gradients
from autoshard.runtime.process_group import TorchCommunicator
from autoshard.runtime.random import dropout, shared, synchronised_rng
from autoshard.runtime.together import (
    all_gather_together,
    all_reduce_together,
    all_to_all_together,
    enter_together,
    reduce_scatter_together,
)

__all__ = [
    "Block",
    "Communicator",
    "Executed",
    "Gradients",
    "InProcessCommunicator",
    "RankModule",
    "TorchCommunicator",
    "World",
    "again",
    "all_gather",
    "all_gather_together",
    "all_reduce",
    "all_reduce_together",
    "all_to_all",
    "all_to_all_together",
    "bind",
    "cast_table",
    "current",
    "device",
    "dropout",
    "enter",
    "enter_parameters",
    "enter_together",
    "fan_out",
    "gather_parameters",
    "leave",
    "main",
    "offset",
    "pad",
    "partial",
    "permute",
    "pooled",
    "reduce_scatter",
    "reduce_scatter_together",
    "regather",
    "require",
    "reshape",
    "shared",
    "size",
    "slice",
    "synchronised_rng",
    "wait_gradients",
]

from autoshard.runtime.attention import attention, causal_mask, kv_heads
from autoshard.runtime.draw import draw, draw_like, native_dropout, rrelu
from autoshard.runtime.embedding import pooled, vocab_embedding, vocab_embedding_bag
from autoshard.runtime.experts import experts
from autoshard.runtime.halo import average, crop, halo, split
from autoshard.runtime.indexing import (
    sharded_gather,
    sharded_grouped_mm,
    sharded_index,
    sharded_index_add,
    sharded_index_copy,
    sharded_index_fill,
    sharded_index_put,
    sharded_index_select,
    sharded_scatter,
    sharded_scatter_add,
    sharded_select,
)
from autoshard.runtime.loss import cross_entropy, nll_loss
from autoshard.runtime.norm import batch_norm, batch_norm_no_stats, group_norm, layer_norm, rms_norm
from autoshard.runtime.ranking import argmax, argmin, flat_argmax, flat_argmin, max_dim, min_dim, multinomial, topk
from autoshard.runtime.reduce import (
    all,  # noqa: A004
    amax,
    amin,
    aminmax,
    any,  # noqa: A004
    bincount,
    logsumexp,
    prod,
    std,
    std_mean,
    var,
    var_mean,
    vector_norm,
)
from autoshard.runtime.ring import banded_rows, ring_attention
from autoshard.runtime.scan import cummax, cummin, cumprod, cumsum, logcumsumexp
from autoshard.runtime.softmax import log_softmax, safe_softmax, softmax
from autoshard.runtime.sparse import cast_table
from autoshard.runtime.stacked import stacked
from autoshard.runtime.tables import table_wise

__all__ += [
    "all",
    "amax",
    "amin",
    "aminmax",
    "any",
    "argmax",
    "argmin",
    "attention",
    "average",
    "banded_rows",
    "batch_norm",
    "batch_norm_no_stats",
    "bincount",
    "causal_mask",
    "crop",
    "cross_entropy",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "draw",
    "draw_like",
    "experts",
    "flat_argmax",
    "flat_argmin",
    "group_norm",
    "halo",
    "kv_heads",
    "layer_norm",
    "log_softmax",
    "logcumsumexp",
    "logsumexp",
    "max_dim",
    "min_dim",
    "multinomial",
    "native_dropout",
    "nll_loss",
    "prod",
    "ring_attention",
    "rms_norm",
    "rrelu",
    "safe_softmax",
    "sharded_gather",
    "sharded_grouped_mm",
    "sharded_index",
    "sharded_index_add",
    "sharded_index_copy",
    "sharded_index_fill",
    "sharded_index_put",
    "sharded_index_select",
    "sharded_scatter",
    "sharded_scatter_add",
    "sharded_select",
    "softmax",
    "split",
    "stacked",
    "std",
    "std_mean",
    "table_wise",
    "topk",
    "var",
    "var_mean",
    "vector_norm",
    "vocab_embedding",
    "vocab_embedding_bag",
    "write_select",
    "write_slice",
]

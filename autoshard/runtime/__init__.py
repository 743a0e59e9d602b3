"""What generated rank modules call: differentiable collectives on local tensors, and transports.
Imports torch and nothing of the compiler."""

from torch import reshape

from autoshard.runtime.operations import autograd_ops, checks, grouped, losses  # noqa: F401  their ops
from autoshard.runtime.operations.chunked_logits import chunked_logits
from autoshard.runtime.operations.collective_matmul import gather_products, scatter_product
from autoshard.runtime.operations.collectives import (
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
from autoshard.runtime.operations.halo import channels_first, channels_last
from autoshard.runtime.operations.indexing import write_select, write_slice
from autoshard.runtime.operations.random import dropout, shared, synchronised_rng
from autoshard.runtime.parameters.block import enter_parameters, gather_parameters, regather, wait_gradients
from autoshard.runtime.parameters.coalesced import (
    all_gather_together,
    all_reduce_together,
    all_to_all_together,
    enter_together,
    reduce_scatter_together,
)
from autoshard.runtime.parameters.gradients import Gradients
from autoshard.runtime.parameters.recompute import recompute
from autoshard.runtime.parameters.split_backward import conv, linear, matmul
from autoshard.runtime.programs.launch import main
from autoshard.runtime.programs.module import Block, RankModule, require
from autoshard.runtime.transport.communicator import Communicator, Executed, bind, current, device
from autoshard.runtime.transport.in_process import InProcessCommunicator, World
from autoshard.runtime.transport.process_group import TorchCommunicator

__all__ = [
    "Block",
    "Communicator",
    "Executed",
    "Gradients",
    "InProcessCommunicator",
    "RankModule",
    "TorchCommunicator",
    "World",
    "all_gather",
    "all_gather_together",
    "all_reduce",
    "all_reduce_together",
    "all_to_all",
    "all_to_all_together",
    "bind",
    "cast_table",
    "channels_first",
    "channels_last",
    "conv",
    "current",
    "device",
    "dropout",
    "dropout_attention",
    "enter",
    "enter_parameters",
    "enter_together",
    "gather_parameters",
    "gather_products",
    "leave",
    "linear",
    "main",
    "matmul",
    "offset",
    "pad",
    "partial",
    "permute",
    "pooled",
    "pooled_together",
    "recompute",
    "reduce_scatter",
    "reduce_scatter_together",
    "regather",
    "require",
    "reshape",
    "scatter_product",
    "shared",
    "size",
    "slice",
    "synchronised_rng",
    "wait_gradients",
]

from autoshard.runtime.attention.masked_attention import attention, causal_mask, dropout_attention, kv_heads
from autoshard.runtime.attention.ring import banded_rows, gathered_attention, ring_attention
from autoshard.runtime.attention.ring_geometry import AttentionSpec
from autoshard.runtime.attention.zigzag import from_zigzag, to_zigzag
from autoshard.runtime.operations.embedding import pooled, pooled_together, vocab_embedding, vocab_embedding_bag
from autoshard.runtime.operations.experts import ExpertForm, ExpertSharding, experts
from autoshard.runtime.operations.halo import average, crop, halo, split
from autoshard.runtime.operations.indexing import (
    part_of_batch,
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
    sharded_slice,
)
from autoshard.runtime.operations.losses import cross_entropy, nll_loss
from autoshard.runtime.operations.random import draw, draw_like, draw_whole, native_dropout, rrelu
from autoshard.runtime.operations.ranking import (
    argmax,
    argmin,
    flat_argmax,
    flat_argmin,
    max_dim,
    min_dim,
    multinomial,
    topk,
)
from autoshard.runtime.operations.reductions import (
    all,  # noqa: A004
    amax,
    amin,
    aminmax,
    any,  # noqa: A004
    batch_norm,
    batch_norm_no_stats,
    bincount,
    cummax,
    cummin,
    cumprod,
    cumsum,
    group_norm,
    layer_norm,
    log_softmax,
    logcumsumexp,
    logsumexp,
    prod,
    rms_norm,
    safe_softmax,
    softmax,
    std,
    std_mean,
    var,
    var_mean,
    vector_norm,
)
from autoshard.runtime.operations.stacked import stacked
from autoshard.runtime.operations.tables import table_wise
from autoshard.runtime.transport.sparse_gradients import cast_table
from autoshard.runtime.transport.window import Window

__all__ += [
    "AttentionSpec",
    "ExpertForm",
    "ExpertSharding",
    "Window",
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
    "chunked_logits",
    "crop",
    "cross_entropy",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "draw",
    "draw_like",
    "draw_whole",
    "experts",
    "flat_argmax",
    "flat_argmin",
    "from_zigzag",
    "gathered_attention",
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
    "part_of_batch",
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
    "sharded_slice",
    "softmax",
    "split",
    "stacked",
    "std",
    "std_mean",
    "table_wise",
    "to_zigzag",
    "topk",
    "var",
    "var_mean",
    "vector_norm",
    "vocab_embedding",
    "vocab_embedding_bag",
    "write_select",
    "write_slice",
]

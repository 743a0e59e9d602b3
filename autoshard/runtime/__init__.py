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

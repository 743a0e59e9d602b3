"""The parts that a pipeline is cut between."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """A stretch of the graph that is never cut. Seconds of one micro-batch, bytes on the busiest rank."""

    forward: float
    backward: float
    weights: float = 0.0
    """seconds of the backward that make gradients of weights"""
    send: float = 0.0
    """seconds of the message to the next piece, if it lies on another stage"""
    send_back: float = 0.0
    """seconds of the gradients to the piece before, if it lies on another stage"""
    state: float = 0.0
    """bytes that stay: parameters, gradients, the optimizer's state"""
    kept: float = 0.0
    """bytes that one micro-batch keeps for the backward"""
    most: float = 0.0
    """bytes that it needs beside while it runs"""
    least: float = math.nan
    """bytes that one micro-batch keeps where all else is made again; NaN: nothing can be made again"""
    again: float = 0.0
    """seconds that this takes"""
    carry: float = 0.0
    """seconds that either end works for the message to the next piece"""
    carry_back: float = 0.0
    """seconds that either end works for the gradients to the piece before"""
    once: float = 0.0
    """seconds of what comes once a step, behind all micro-batches"""

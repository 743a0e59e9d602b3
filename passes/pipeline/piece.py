"""Segments of a graph between possible stage boundaries."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Costs of a segment: seconds of one micro-batch, bytes on the busiest rank."""

    forward: float
    backward: float
    weights: float = 0.0
    """seconds of the backward for weight gradients"""
    send: float = 0.0
    """seconds to send activations to the next segment, if on another stage"""
    send_back: float = 0.0
    """seconds to send gradients to the segment before, if on another stage"""
    state: float = 0.0
    """bytes of parameters, gradients and optimizer state"""
    kept: float = 0.0
    """bytes of activations per micro-batch"""
    most: float = 0.0
    """bytes of working memory"""
    least: float = math.nan
    """bytes of activations per micro-batch with full recomputation; NaN: cannot be recomputed"""
    again: float = 0.0
    """seconds of full recomputation"""
    carry: float = 0.0
    """processor seconds at either end to send activations"""
    carry_back: float = 0.0
    """processor seconds at either end to send gradients"""
    once: float = 0.0
    """seconds once per step, after all micro-batches"""

"""Ops of the runtime that run on whole tensors only."""

from __future__ import annotations

from autoshard.passes.rules.base import Facts, Rule
from autoshard.passes.rules.factors import undivided
from autoshard.runtime.operations.ctc import ctc_loss
from autoshard.runtime.operations.exactly import exactly
from autoshard.runtime.operations.functions import function

RULES: tuple[Rule, ...] = (
    Rule(
        ctc_loss._opoverload, undivided, notation="whole", facts=Facts("log_probs targets input_lengths target_lengths")
    ),
    Rule(exactly._opoverload, undivided, notation="whole", facts=Facts(saves="", effect=True)),
    Rule(function._opoverload, undivided, notation="whole"),
)

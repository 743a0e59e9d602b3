"""Samples of all rules."""

from __future__ import annotations

import linalg_samples
import special_samples
import window_samples
from rule_samples import SAMPLES as GENERAL

SAMPLES = {**GENERAL, **special_samples.SAMPLES, **linalg_samples.SAMPLES, **window_samples.SAMPLES}

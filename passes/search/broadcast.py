"""Broadcast sums of arrays by torch: numpy is 3 to 5 times slower if an operand is repeated."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Values = NDArray[np.float64]

FEW = 5_000
"""entries up to which the overhead of a torch call exceeds numpy's sum"""


def added(a: Values, b: Values, out: Values | None = None) -> Values:
    """``a + b``, broadcast; ``out``: result array."""
    entries = np.broadcast(a, b).size if out is None else out.size
    if entries <= FEW:
        return np.add(a, b, out=out)
    found = None if out is None else torch.from_numpy(out)
    total: Values = torch.add(torch.from_numpy(a), torch.from_numpy(b), out=found).numpy()
    return total

"""Functions whose DTensor gradient equals the unsharded one; a test tries each.

For others DTensor lacks the backward (``hardtanh``), mixes shards and plain tensors in it
(``cumprod``), or computes another gradient (``mse_loss`` with a trained target).
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
import torch.nn.functional as F

TRUSTED = frozenset(
    "abs absolute acos acosh add addcdiv addcmul adjoint asin asinh atan atan2 atanh bmm broadcast_to "
    "cat ceil celu chunk clamp clamp_max clamp_min clip clone concat concatenate contiguous cos cosh cosine_similarity "
    "cumsum detach diagonal div divide dropout einsum elu erf erfc exp exp2 expand expand_as expm1 fix flatten flip "
    "fliplr flipud float_power floor fmax fmin frac gelu hstack index_select kl_div l1_loss leaky_relu lerp linear log "
    "log10 log1p log2 log_softmax logaddexp logsumexp masked_fill matmul max maximum mean median min minimum mish mm moveaxis "
    "movedim mul multiply nan_to_num neg negative norm normalize permute positive pow prod ravel real reciprocal relu "
    "repeat_interleave reshape reshape_as roll round rsqrt rsub select selu sigmoid sign silu sin sinh softmax softmin "
    "softplus softsign sort split sqrt square squeeze stack std sub subtract sum swapaxes swapdims t tan tanh "
    "tensor_split tile topk transpose tril triu true_divide trunc type_as unbind unflatten unsqueeze var vstack "
    "binary_cross_entropy_with_logits where".split()
)
"""function names; ``add_``, ``inplace=True`` and methods count as the function"""

_WITHOUT = re.compile(
    r"arg\w+|is\w+|logical_\w+|bitwise_\w+|\w+_like|all|allclose|any|count_nonzero|detach|eq|equal|ge|greater\w*|gt|le|"
    r"less\w*|lt|ne|not_equal|numel|result_type|zero|fill"
)
"""names of functions without a gradient for their arguments"""


@functools.lru_cache(maxsize=1 << 10)
def lacks_gradient(func: Any) -> bool:
    """Whether ``func`` is differentiable and not in :data:`TRUSTED`."""
    name = getattr(func, "__name__", "")
    name = name if name.startswith("__") else name.rstrip("_")
    if name in TRUSTED or _WITHOUT.fullmatch(name):
        return False
    known = any(callable(getattr(of, name, None)) for of in (torch, F, torch._C._nn))
    return known or name.startswith(("linalg_", "special_", "fft_"))

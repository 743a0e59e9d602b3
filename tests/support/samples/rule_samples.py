"""Concrete calls for every rule: dims of 2 to 6, some of them uneven for 2 and for 3 ranks, some of length 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from elementwise_samples import ELEMENTWISE, NO_DERIVATIVE, OWN
from reduction_samples import RANK, REDUCE, SCAN
from sample_makers import Sample, b, call, f, i, unit, z

__all__ = ["NO_DERIVATIVE", "SAMPLES", "SHAPES_ONLY", "call", "f"]
from autoshard.aten import aten
from autoshard.runtime.operations.experts import experts_op
from autoshard.runtime.operations.grouped import grouped_mm

MATMUL: dict[torch._ops.OpOverload, list[Sample]] = {
    aten.linear.default: [
        call(f(2, 5, 4), f(6, 4), f(6)),
        call(f(3, 4), f(5, 4)),
        call(f(4), f(6, 4), f(6)),
    ],
    aten.mm.default: [call(f(4, 5), f(5, 3))],
    aten.bmm.default: [call(f(3, 4, 5), f(3, 5, 2))],
    aten.mv.default: [call(f(4, 5), f(5))],
    aten.dot.default: [call(f(5), f(5))],
    aten.vdot.default: [call(f(5), f(5))],
    aten.outer.default: [call(f(5), f(4))],
    aten.ger.default: [call(f(5), f(4))],
    aten.addmm.default: [call(f(4, 3), f(4, 5), f(5, 3)), call(f(3), f(4, 5), f(5, 3), beta=2, alpha=3)],
    aten.addmv.default: [call(f(4), f(4, 5), f(5))],
    aten.baddbmm.default: [call(f(2, 4, 3), f(2, 4, 5), f(2, 5, 3)), call(f(2, 1, 3), f(2, 4, 5), f(2, 5, 3), beta=2)],
    aten.addbmm.default: [call(f(4, 3), f(2, 4, 5), f(2, 5, 3), alpha=2)],
    aten.matmul.default: [
        call(f(4, 5), f(5, 3)),
        call(f(5), f(5)),
        call(f(5), f(5, 4)),
        call(f(4, 5), f(5)),
        call(f(2, 3, 4, 5), f(5, 3)),
        call(f(2, 3, 4, 5), f(3, 5, 2)),
        call(f(2, 1, 4, 5), f(2, 3, 5, 2)),
        call(f(2, 4, 5), f(5)),
        call(f(5), f(3, 5, 4)),
        call(f(4, 3), f(2, 3, 5)),
    ],
    aten.einsum.default: [
        call("bij,bjk->bik", [f(2, 3, 4), f(2, 4, 5)]),
        call("bij,bjk", [f(2, 3, 4), f(2, 4, 5)]),
        call("...ij,...jk->...ik", [f(2, 3, 4, 5), f(3, 5, 2)]),
        call("ii->i", [f(4, 4)]),
        call("bhqd,bhkd->bhqk", [f(2, 3, 4, 2), f(2, 3, 5, 2)]),
        call("ij->", [f(4, 5)]),
        call("i,j,k->ijk", [f(2), f(3), f(4)]),
        call("bi,oij,bj->bo", [f(3, 2), f(4, 2, 5), f(3, 5)]),
    ],
    aten.bilinear.default: [call(f(4, 2), f(4, 3), f(5, 2, 3), f(5)), call(f(3, 2), f(3, 3), f(4, 2, 3))],
    aten.cdist.default: [call(f(2, 4, 3), f(2, 5, 3)), call(f(4, 3), f(5, 3))],
    aten.linalg_inv.default: [call(f(3, 2, 2) + 3 * torch.eye(2))],
    aten.inverse.default: [call(f(3, 2, 2) + 3 * torch.eye(2))],
    aten.matrix_exp.default: [call(f(3, 2, 2))],
    aten.linalg_det.default: [call(f(3, 2, 2))],
    aten.logdet.default: [call(f(3, 2, 2) + 3 * torch.eye(2))],
    aten.linalg_slogdet.default: [call(f(3, 2, 2))],
    aten.linalg_cholesky.default: [call(f(3, 2, 2) * 0.1 + 3 * torch.eye(2))],
    aten.cholesky.default: [call(f(3, 2, 2) * 0.1 + 3 * torch.eye(2))],
    aten.cholesky_inverse.default: [call(f(3, 2, 2) + 3 * torch.eye(2))],
    aten.linalg_matrix_power.default: [call(f(3, 2, 2), 3)],
    aten.pinverse.default: [call(f(3, 2, 2))],
    aten.linalg_svdvals.default: [call(f(3, 3, 2))],
    aten.linalg_eigvalsh.default: [call(f(3, 2, 2))],
    aten.linalg_eigvals.default: [call(f(3, 2, 2))],
    aten.linalg_cholesky_ex.default: [call(f(3, 2, 2) * 0.1 + 3 * torch.eye(2))],
    aten.linalg_inv_ex.default: [call(f(3, 2, 2) + 3 * torch.eye(2))],
    aten.linalg_eigh.default: [call(f(3, 2, 2))],
    aten.linalg_eig.default: [call(f(3, 2, 2))],
    aten.linalg_qr.default: [call(f(3, 3, 2))],
    aten.linalg_svd.default: [call(f(3, 3, 2), False)],
    aten.linalg_solve_triangular.default: [call(f(2, 3, 3) + 3 * torch.eye(3), f(2, 3, 5), upper=True)],
    aten.linalg_vecdot.default: [call(f(4, 3), f(4, 3)), call(f(2, 4, 3), f(4, 3))],
    aten.addr.default: [call(f(4, 5), f(4), f(5), beta=2), call(f(1, 5), f(4), f(5))],
    aten.trace.default: [call(f(4, 4))],
    aten._grouped_mm.default: [
        call(f(7, 16).bfloat16(), f(5, 16, 24).bfloat16(), torch.tensor([2, 2, 5, 6, 7], dtype=torch.int32)),
    ],
    grouped_mm._opoverload: [call(f(7, 4), f(5, 4, 6), torch.tensor([2, 2, 5, 6, 7], dtype=torch.int32))],
    experts_op._opoverload: [
        call(f(6, 4), i(5, 6, 2), f(6, 2), f(5, 6, 4), f(5, 4, 3), "silu", True, False),
        call(f(2, 6, 4), i(5, 2, 6, 2), f(2, 6, 2), f(5, 6, 4), f(5, 4, 3), "silu", True, False),
        call(f(6, 4), i(3, 6, 2), f(6, 2), f(3, 8, 4), f(3, 5, 4), "silu", True, False, f(3, 8), f(3, 5)),
        call(
            f(6, 4),
            i(3, 6, 1),
            f(6, 1),
            f(3, 4, 8),
            f(3, 4, 5),
            "swish 1.5",
            True,
            True,
            f(3, 8),
            f(3, 5),
            limit=0.5,
            shift=1.0,
            interleaved=True,
        ),
        call(
            f(5, 4),
            torch.tensor([[2], [-1], [0], [3], [2]]),
            f(5, 1),
            f(3, 4, 2),
            f(3, 2, 6),
            "relu_squared",
            False,
            True,
        ),
    ],
    aten.tensordot.default: [
        call(f(2, 3, 4), f(4, 3, 5), [2, 1], [0, 1]),
        call(f(2, 3), f(3, 4), [1], [0]),
        call(f(1, 1, 4), f(2, 3, 2), [0, 1], [2, 0]),
    ],
}


def places(high: int, rows: Sequence[int], inner: Sequence[int]) -> torch.Tensor:
    """For every row as many indices below ``high`` as ``inner`` holds, no two equal."""
    return f(*rows, high).argsort(-1)[..., : math.prod(inner)].reshape(*rows, *inner)


SHAPE: dict[str, list[Sample]] = {
    **{
        f"{op}.default": [
            call(f(2, 6, 4), [2, -1]),
            call(f(4, 6, 4), [-1, 4]),
            call(f(2, 3, 12), [2, 3, 4, 3]),
            call(f(6, 4), [4, 6]),
            call(f(1, 5, 4), [5, 1, 4]),
            call(f(4, 2, 3, 5), [4, 6, 5]),
            call(f(3, 4), [1, 3, 2, 2, 1]),
        ]
        for op in ("view", "reshape", "_unsafe_view", "view_copy")
    },
    "view_as.default": [call(f(6, 4), f(6, 2, 2))],
    "reshape_as.default": [call(f(6, 4), f(3, 2, 4))],
    "flatten.using_ints": [call(f(2, 6, 4), 1), call(f(4, 3, 2))],
    "ravel.default": [call(f(4, 3))],
    "unsqueeze.default": [call(f(4, 3), 1), call(f(3, 5), -1)],
    "unflatten.int": [call(f(2, 6, 4), 1, [2, -1]), call(f(6, 3), 0, [3, 2])],
    "squeeze.default": [call(f(2, 1, 3, 1)), call(f(3, 4))],
    "squeeze.dim": [call(f(2, 1, 3), 1), call(f(2, 3), 0)],
    "squeeze.dims": [call(f(2, 1, 3, 1), [0, 1]), call(f(4, 1, 3), [])],
    "expand.default": [call(f(2, 1, 3), [2, 4, -1]), call(f(1, 3), [5, 2, 3])],
    "expand_as.default": [call(f(2, 1, 3), f(2, 4, 3))],
    "broadcast_to.default": [call(f(1, 3), [4, 3])],
    "repeat.default": [call(f(2, 1, 3), [1, 4, 2]), call(f(3), [5, 1]), call(f(1, 4), [6, 1])],
    "repeat_interleave.self_int": [call(f(4, 3), 2, 0), call(f(2, 6), 3, 1, output_size=18), call(f(4, 3), 2)],
    "transpose.int": [call(f(2, 3, 4), 1, 2), call(f(2, 3, 4), 0, -1)],
    "swapdims.default": [call(f(2, 3, 4), 0, 1)],
    "swapaxes.default": [call(f(2, 3, 4), 0, 1)],
    "t.default": [call(f(4, 3)), call(f(4))],
    "numpy_T.default": [call(f(2, 3, 4))],
    "mT.default": [call(f(2, 3, 4))],
    "permute.default": [call(f(2, 3, 4), [2, 0, -2])],
    "movedim.int": [call(f(2, 3, 4), 0, -1), call(f(2, 3, 4), 2, 0)],
    "movedim.intlist": [call(f(2, 3, 4), [0, 1], [2, 0])],
    "slice.Tensor": [
        call(f(4, 6), 1, 1, 5, 2),
        call(f(4, 3), 0, 0, 2**63 - 1),
        call(f(4, 3), -1, 1),
        call(f(2, 11), 1, -9, -1),
        call(f(2, 8), 1, 3),
        call(f(2, 8), 1, None, 7),
        call(f(2, 8), 1, -1),
        call(f(9, 2), 0, 2, 5),
        call(f(7, 2), 0, -20, 3),
        call(f(7, 2), 0, -20, 5),
        call(i(9, 2, 7), 1, 1, 6),
    ],
    "narrow.default": [call(f(4, 3), 1, 0, 2)],
    "flip.default": [call(f(4, 3), [0])],
    "roll.default": [call(f(4, 3), [1], [0]), call(f(4, 3), [2])],
    "tril.default": [call(f(2, 4, 3)), call(f(2, 4, 3), 1)],
    "triu.default": [call(f(2, 4, 3)), call(f(2, 4, 3), -1)],
    "diff.default": [call(f(4, 3)), call(f(4, 3), 1, 0), call(f(4, 3), 1, -1, f(4, 1))],
    "glu.default": [call(f(4, 6)), call(f(4, 3), 0)],
    "constant_pad_nd.default": [
        call(f(4, 3), [1, 2]),
        call(f(4, 3, 2), [0, 0, 1, 0], 1.5),
        call(f(5, 7), [2, -1, -2, 4], 2.0),
        call(f(2, 5), [9, 0]),
        call(f(2, 9), [-2, -2]),
        call(i(9, 2, 5), [0, 3], 4),
        call(b(2, 5), [1, 1]),
    ],
    "pad.default": [call(f(4, 3), [1, 2]), call(f(4, 3), [0, 1], "constant", 2.0), call(f(2, 3, 4), [1, 1], "reflect")],
    **{
        f"{op}.default": [call([f(4, 3), f(4, 2)], 1), call([f(2, 3), f(1, 3), f(3, 3)]), call([f(4, 3), f(0)], -1)]
        for op in ("cat", "concat", "concatenate")
    },
    "stack.default": [call([f(4, 3), f(4, 3)]), call([f(4, 3), f(4, 3)], -1)],
    "split.Tensor": [call(f(4, 6), 4, 1), call(f(4, 3), 2)],
    "split.sizes": [call(f(4, 6), [1, 5], 1)],
    "split_with_sizes.default": [call(f(4, 6), [1, 5], 1)],
    "chunk.default": [call(f(4, 6), 3, -1)],
    "tensor_split.sections": [call(f(4, 5), 2, 1)],
    "tensor_split.indices": [call(f(4, 5), [2, 3], 1)],
    "unsafe_chunk.default": [call(f(4, 6), 3, -1)],
    "unsafe_split.Tensor": [call(f(4, 6), 4, 1)],
    "unsafe_split_with_sizes.default": [call(f(4, 6), [1, 5], 1)],
    "select.int": [call(f(4, 3, 2), 1, 2), call(f(4, 3), -1, -1)],
    "unbind.int": [call(f(4, 3)), call(f(4, 3), 1)],
    "diagonal.default": [call(f(2, 4, 4), 0, 1, 2), call(f(3, 4))],
    "diagonal_scatter.default": [call(f(4, 4, 3), f(3, 4)), call(f(2, 4, 5), f(2, 3), 2, 1, -1), call(f(3, 3), f(3))],
    "max_unpool2d.default": [
        call(f(3, 4, 2, 3), places(24, (3, 4), (2, 3)), [4, 6]),
        call(f(5, 2, 2), places(9, (5,), (2, 2)), [3, 3]),
    ],
    "max_unpool3d.default": [call(f(3, 4, 1, 2, 2), places(32, (3, 4), (1, 2, 2)), [2, 4, 4], [2, 2, 2], [0, 0, 0])],
    "renorm.default": [call(f(4, 5), 2, 0, 1.0), call(f(3, 4, 5), 1, -1, 0.7)],
    "tile.default": [call(f(2, 1, 3), [1, 4, 2]), call(f(3), [5, 1])],
    "slice_scatter.default": [call(f(4, 6), f(4, 2), 1, 1, 5, 2), call(f(4, 3), f(4, 3), 0)],
    "select_scatter.default": [call(f(4, 6), f(4), 1, 2)],
    "_weight_norm_interface.default": [call(f(4, 3, 2), unit(4, 1, 1))],
    "view.dtype": [call(f(4, 3), torch.int64), call(f(4, 3), torch.int32)],
    "unsqueeze_copy.default": [call(f(4, 3), 1)],
    "squeeze_copy.default": [call(f(2, 1, 3))],
    "squeeze_copy.dim": [call(f(2, 1, 3), 1)],
    "squeeze_copy.dims": [call(f(2, 1, 3, 1), [1, 3])],
    "expand_copy.default": [call(f(2, 1, 3), [2, 4, -1])],
    "transpose_copy.int": [call(f(2, 3, 4), 1, 2)],
    "t_copy.default": [call(f(4, 3))],
    "permute_copy.default": [call(f(2, 3, 4), [2, 0, 1])],
    "narrow_copy.default": [call(f(4, 3), 1, 0, 2)],
    "split_with_sizes_copy.default": [call(f(4, 6), [1, 5], 1)],
    "unbind_copy.int": [call(f(4, 3), 1)],
    "diagonal_copy.default": [call(f(2, 4, 4), 0, 1, 2)],
    "unfold_copy.default": [call(f(4, 6), 1, 3, 2)],
    "hstack.default": [call([f(4, 3), f(4, 2)]), call([f(4), f(3)])],
    "vstack.default": [call([f(4, 3), f(2, 3)]), call([f(4), f(4)])],
    "dstack.default": [call([f(4, 3, 2), f(4, 3, 1)]), call([f(4, 3), f(4, 3)])],
    "column_stack.default": [call([f(4, 3), f(4, 2)]), call([f(4), f(4)])],
    "rot90.default": [call(f(4, 3, 5), 1, [0, 1]), call(f(4, 3), 2)],
    "fliplr.default": [call(f(4, 3))],
    "flipud.default": [call(f(4, 3))],
    "meshgrid.default": [call([f(4), f(3)])],
    "meshgrid.indexing": [call([f(4), f(3), f(2)], indexing="xy"), call([f(4), f(5)], indexing="ij")],
    "broadcast_tensors.default": [call([f(4, 1), f(3)])],
    "pixel_shuffle.default": [call(f(2, 12, 4, 3), 2)],
    "pixel_unshuffle.default": [call(f(2, 4, 4, 6), 2)],
    "channel_shuffle.default": [call(f(4, 6, 3, 5), 2)],
    "im2col.default": [
        call(f(3, 4, 5, 5), [2, 2], [1, 1], [0, 0], [1, 1]),
        call(f(4, 5, 5), [2, 2], [1, 1], [1, 0], [1, 1]),
    ],
    "col2im.default": [call(f(3, 16, 16), [5, 5], [2, 2], [1, 1], [0, 0], [1, 1])],
    **{f"fft_{n}.default": [call(z(4, 6)), call(z(4, 3), None, 0)] for n in ("fft", "ifft", "irfft", "hfft")},
    **{f"fft_{n}.default": [call(f(4, 6)), call(f(4, 3), None, 0)] for n in ("rfft", "ihfft")},
    **{f"fft_{n}.default": [call(z(4, 3, 2), None, [0])] for n in ("fftn", "ifftn", "irfftn")},
    "fft_rfftn.default": [call(f(4, 3, 2), None, [0, 1])],
    **{f"fft_{n}.default": [call(z(3, 4, 6))] for n in ("fft2", "ifft2", "irfft2")},
    "fft_rfft2.default": [call(f(3, 4, 6))],
    **{f"fft_{n}.default": [call(f(4, 3), [1])] for n in ("fftshift", "ifftshift")},
    "unfold.default": [call(f(4, 6), 1, 3, 2)],
}

INDEX: dict[str, list[Sample]] = {
    "index.Tensor": [
        call(f(5, 3), [i(5, 4)]),
        call(f(5, 3, 2), [None, i(3, 4)]),
        call(f(5, 3, 4), [i(5, 2, 1), None, i(4, 3)]),
        call(f(5, 3, 4), [None, i(3, 2, 1), i(4, 3)]),
        call(f(4, 3), [b(4), None]),
    ],
    "_unsafe_index.Tensor": [call(f(5, 3), [i(5, 4)])],
    "index_put.default": [
        call(f(5, 3), [torch.tensor([1, 4, 2])], f(3, 3)),
        call(f(5, 3), [i(5, 4)], f(4, 3), True),
        call(f(5, 3, 2), [i(5, 4), None, i(2, 4)], f(3), True),
        call(f(5, 3), [None, torch.tensor([0, 2])], f(1, 2)),
        call(f(5, 3), [i(5, 2, 3)], f(), True),
        call(f(4, 3), [torch.tensor([True, False, True, True])], f(3, 3)),
    ],
    "_unsafe_index_put.default": [call(f(5, 3), [i(5, 4)], f(4, 3), True)],
    "scatter_reduce.two": [
        call(f(4, 5), 1, i(5, 4, 3), f(4, 3), "sum"),
        call(f(4, 5), 1, i(5, 4, 3), f(4, 3), "mean"),
        call(f(4, 5), 1, i(5, 4, 3), f(4, 3), "amax", include_self=False),
        call(f(4, 5), 0, i(4, 3, 5), f(3, 5), "sum", include_self=False),
    ],
    "searchsorted.Tensor": [
        call(torch.tensor([0.3, 0.6], dtype=torch.float64), unit(4, 3)),
        call(unit(3, 4).sort(1).values, unit(3, 5)),
    ],
    "isin.Tensor_Tensor": [call(i(5, 4, 3), torch.tensor([1, 2]))],
    "isin.Tensor_Scalar": [call(i(5, 4, 3), 2)],
    "index_select.default": [call(f(4, 5), 1, i(5, 3)), call(f(4, 5), 0, i(4, 6))],
    "gather.default": [call(f(4, 5), 1, i(5, 4, 3)), call(f(4, 5, 2), 0, i(4, 6, 5, 1))],
    "scatter.src": [
        call(f(4, 5), 1, torch.tensor([[0, 2, 4], [1, 0, 2], [3, 4, 0], [1, 2, 3]]), f(4, 3)),
    ],
    "scatter.value": [call(f(4, 5), 1, i(5, 4, 3), 0.0), call(f(4, 5), 0, i(4, 2, 5), 1.5)],
    "scatter_add.default": [call(f(4, 5), 1, i(5, 4, 3), f(4, 3)), call(f(4, 5), 0, i(4, 6, 5), f(6, 5))],
    "index_add.default": [call(f(5, 3), 0, i(5, 4), f(4, 3)), call(f(3, 5), 1, i(5, 6), f(3, 6), alpha=2)],
    "index_copy.default": [call(f(5, 3), 0, torch.tensor([4, 0, 2]), f(3, 3))],
    "index_fill.int_Scalar": [call(f(5, 3), 0, i(5, 4), 0.0), call(f(5, 3), 1, i(3, 2), 1.5)],
    "index_fill.int_Tensor": [call(f(5, 3), 0, i(5, 4), f())],
    "take.default": [call(f(4, 5), i(20, 3, 2))],
    "one_hot.default": [call(i(5, 4, 3), 5)],
    "bucketize.Tensor": [call(unit(4, 3), torch.tensor([0.3, 0.6], dtype=torch.float64))],
}

_options = {"dtype": torch.float64}
FACTORY: dict[str, list[Sample]] = {
    **{f"{op}.default": [call([4, 3], **_options)] for op in ("zeros", "ones")},
    "empty.memory_format": [call([4, 3])],
    "full.default": [call([4, 3], 1.5), call([5], True)],
    **{f"new_{op}.default": [call(f(2, 5), [4, 3]), call(f(3), [])] for op in ("zeros", "ones", "empty")},
    "new_full.default": [call(f(2, 5), [4, 3], 2.5)],
    "arange.default": [call(5), call(6, dtype=torch.float64)],
    "arange.start": [call(2, 7)],
    "arange.start_step": [call(1, 12, 2), call(0.0, 1.0, 0.15)],
    "linspace.default": [call(0.0, 1.0, 5)],
    "logspace.default": [call(0.0, 1.0, 5)],
    "eye.default": [call(4)],
    "eye.m": [call(4, 3)],
    **{f"{op}_like.default": [call(f(4, 3))] for op in ("zeros", "ones", "empty")},
    "full_like.default": [call(f(4, 3), 2.5)],
    "tril_indices.default": [call(4, 4)],
    "triu_indices.default": [call(4, 3, 1)],
    "range.default": [call(0, 5)],
    "range.step": [call(0, 9, 2)],
    "scalar_tensor.default": [call(1.5)],
}

SHAPES_ONLY = {aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default}


def _op(name: str) -> torch._ops.OpOverload:
    packet, overload = name.split(".")
    found: torch._ops.OpOverload = getattr(getattr(aten, packet), overload)
    return found


SAMPLES: dict[torch._ops.OpOverload, list[Sample]] = {
    **ELEMENTWISE,
    **OWN,
    **MATMUL,
    **{_op(name): samples for table in (REDUCE, SCAN, RANK, SHAPE, INDEX, FACTORY) for name, samples in table.items()},
}

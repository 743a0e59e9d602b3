"""Samples of the rules of factorisations and solvers: batches, matrices that broadcast, vectors as right-hand sides."""

from __future__ import annotations

import torch
from sample_makers import Sample, call, f, i

from autoshard.aten import aten


def regular(*batch: int) -> torch.Tensor:
    """Well-conditioned 3 × 3 matrices."""
    return f(*batch, 3, 3) / 3 + 2 * torch.eye(3, dtype=torch.float64)


def symmetric(*batch: int) -> torch.Tensor:
    a = regular(*batch)
    return a + a.transpose(-1, -2)


_lu, _pivots, _ = torch.linalg.lu_factor_ex(regular(4))
_ld, _ld_pivots, _ = torch.linalg.ldl_factor_ex(symmetric(4))
_a, _tau = torch.geqrf(f(4, 5, 3))
_grid = torch.rand(3, 4, 5, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 1.8 - 0.9
_grid3 = torch.rand(3, 2, 4, 3, 3, generator=torch.Generator().manual_seed(6), dtype=torch.float64) * 1.8 - 0.9
_solves = [
    call(regular(4), f(4, 3, 5)),
    call(regular(4), f(4, 3)),
    call(regular(2, 1), f(4, 3, 2)),
    call(regular(4), f(4, 2, 3), left=False),
]

SAMPLES: dict[torch._ops.OpOverload, list[Sample]] = {
    aten.linalg_solve.default: _solves,
    aten.linalg_solve_ex.default: _solves,
    aten._linalg_solve_ex.default: _solves,
    aten.linalg_lu_factor_ex.default: [call(regular(4)), call(f(2, 4, 3, 2))],
    aten.linalg_lu_factor.default: [call(regular(4))],
    aten.linalg_ldl_factor.default: [call(symmetric(4))],
    aten._lu_with_info.default: [call(regular(4))],
    aten.linalg_lu.default: [call(regular(4))],
    aten.linalg_ldl_factor_ex.default: [call(symmetric(4))],
    aten.linalg_ldl_solve.default: [call(_ld, _ld_pivots, f(4, 3, 2))],
    aten.lu_unpack.default: [call(_lu, _pivots), call(_lu, _pivots, True, False)],
    aten.linalg_lu_solve.default: [call(_lu, _pivots, f(4, 3, 2))],
    aten.geqrf.default: [call(f(4, 5, 3))],
    aten.linalg_householder_product.default: [call(_a, _tau)],
    aten.ormqr.default: [call(_a, _tau, f(4, 5, 2))],
    aten.cholesky_solve.default: [call(f(4, 3, 2), torch.linalg.cholesky(regular(4) @ regular(4).mT + 9 * torch.eye(3)))],
    aten.triangular_solve.default: [call(f(4, 3, 2), regular(4).triu())],
    aten.linalg_pinv.atol_rtol_tensor: [
        call(f(4, 3, 2), rtol=torch.full((4,), 1e-9, dtype=torch.float64)),
        call(f(4, 3, 2)),
    ],
    aten.grid_sampler_2d.default: [call(f(3, 4, 5, 6), _grid, 0, 0, False), call(f(3, 2, 5, 6), _grid, 1, 1, True)],
    aten.grid_sampler_3d.default: [call(f(3, 2, 4, 5, 6), _grid3, 0, 0, False)],
    aten.index_reduce.default: [call(f(5, 4), 0, i(5, 3), f(3, 4), "prod"), call(f(5, 4), 1, i(4, 6), f(5, 6), "amax")],
}  # fmt: skip

NO_DERIVATIVE = {"geqrf", "linalg_ldl_factor", "linalg_ldl_factor_ex", "linalg_ldl_solve"}

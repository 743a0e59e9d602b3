"""Clipping and loss scaling over gradients that are cut and whole; run by agreement_worker.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from agreeing import HINTS, Net, X, compiled, expected
from checks import assert_close
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard

RANK = 0
"""this process's, set by the worker"""


def mixed() -> tuple[Any, nn.Module]:
    """A module with weights that are cut, along other dims, and whole; and the unsharded one."""
    sharded = compiled(Net(), X, hints=HINTS | {"last.weight": autoshard.Shard(1)})
    kinds = {str(p.placements) for p in sharded.parameters()}
    assert len(kinds) >= 2, kinds
    return sharded, Net()


def clipping_in_any_order() -> None:
    sharded, reference = mixed()
    sharded(X).backward()
    full = expected(reference, X)
    parameters = dict(sharded.named_parameters())
    before = {n: p.grad.clone() for n, p in parameters.items()}
    for order in itertools.islice(itertools.permutations(parameters), 0, None, 29):
        for kind in (2.0, 1.0, float("inf")):
            for n, p in parameters.items():
                p.grad = before[n].clone()
            plain = {n: nn.Parameter(torch.zeros_like(g)) for n, g in full.items()}
            for n, p in plain.items():
                p.grad = full[n].clone()
            wanted = nn.utils.clip_grad_norm_(plain.values(), 1e-2, kind)
            found = nn.utils.clip_grad_norm_([parameters[n] for n in order], 1e-2, kind)
            assert_close({"norm": found.full_tensor()}, {"norm": wanted}, f"{order}")
            assert_close(sharded.full_gradients(), {n: p.grad for n, p in plain.items()}, "clipped gradient of")
            for n, p in parameters.items():
                p.grad = before[n].clone()
            ours = autoshard.clip_grad_norm_(sharded, 1e-2, kind)
            assert type(ours) is torch.Tensor
            assert_close({"norm": ours}, {"norm": wanted}, "our norm")
            assert_close(sharded.full_gradients(), {n: p.grad for n, p in plain.items()}, "clipped gradient of")
    parameters["first.weight"].grad.to_local()[0, 0] = float("nan") if RANK else 1.0
    assert autoshard.clip_grad_norm_(sharded, 1.0, float("inf")).isnan()
    with pytest.raises(RuntimeError, match="no gradient was clipped"):
        autoshard.clip_grad_norm_(sharded, 1.0, error_if_nonfinite=True)


def scaler_agrees() -> None:
    """An infinity in one rank's shard: all ranks skip the step and take the same scale, whatever comes first."""
    sharded, _ = mixed()
    parameters = dict(sharded.named_parameters())
    cut = [n for n, p in parameters.items() if any(x.is_shard() for x in p.placements)]
    for order in itertools.islice(itertools.permutations(parameters), 0, None, 37):
        for spoilt in (*cut, ""):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
            optimizer = torch.optim.SGD([parameters[n] for n in order], lr=0.1)
            optimizer.zero_grad()
            scaler.scale(sharded(X)).backward()
            before = sharded.full_state_dict()
            if spoilt and RANK:
                parameters[spoilt].grad.to_local().view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (512.0 if spoilt else 2048.0), (order, spoilt, scaler.get_scale())
            same = all(torch.equal(x, before[n]) for n, x in sharded.full_state_dict().items())
            assert same == bool(spoilt)


def scaled_steps() -> None:
    """Steps with a scaler, unscaling and clipping between, are those of one device."""
    sharded, reference = mixed()
    for model in (sharded, reference):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
        for _ in range(3):
            scaler.scale(model(X)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_close(sharded.full_state_dict(), reference.state_dict(), "weight")
    assert all(isinstance(p, DTensor) for p in sharded.parameters())

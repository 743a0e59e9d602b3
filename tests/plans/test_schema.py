"""JSON of plans and hardware that was edited or garbled: every value of another kind is refused by name when it is read."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoshard
from autoshard import Hardware, Link, MeshError, Plan, PlanError
from autoshard.errors import AutoshardError
from autoshard.hardware import PRESETS
from autoshard.hardware.device import Tiling

DELETED, NESTED = object(), object()
OTHER = (None, True, 3, -1, 10**400, 1.5, "x", "", [], [1], ["x"], [[1]], {}, {"x": 1}, {"x": "y"}, math.inf,
         1e308, DELETED, NESTED)  # fmt: skip
H100 = PRESETS["h100"]


class Net(nn.Module):
    """Two linear layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()  # type: ignore[no-any-return]


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value; of lists the first two entries."""
    yield path
    inner = data.items() if isinstance(data, dict) else enumerate(data[:2]) if isinstance(data, list) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


def mutated(data: Any, path: tuple[Any, ...], value: Any) -> str:
    """The JSON with another value at the path."""
    root = copy.deepcopy([data])
    *outer, last = (0, *path)
    at: Any = root
    for key in outer:
        at = at[key]
    if value is DELETED:
        del at[last]
    else:
        at[last] = [at[last]] if value is NESTED else value
    return json.dumps(root[0] if root else None)


def plans() -> dict[str, str]:
    """Of one mesh, and of stages."""
    x = torch.randn(8, 8)
    return {
        "tp": autoshard.plan(Net(), {"tp": 2}, (x,), hints={"up": "colwise"}).to_json(),
        "pp": autoshard.plan(Net(), {"pp": 2}, (x,), stages="pp").to_json(),
    }


@pytest.mark.slow
def test_every_field_of_a_plan_of_another_kind(tmp_path: Path) -> None:
    """What is read can be shown and written, too: nothing fails later."""
    draw, counted = random.Random(0), {True: 0, False: 0}
    shown = [tmp_path / f"plan.{kind}" for kind in ("html", "dot", "txt", "trace.json")]
    for text in plans().values():
        data = json.loads(text)
        assert Plan.from_json(text).to_json() == text
        known = list(places(data))
        for path in (*known[:1], *draw.sample(known, 9)):
            for value in OTHER:
                plan = None
                with contextlib.suppress(PlanError):
                    plan = Plan.from_json(mutated(data, path, value))
                counted[plan is not None] += 1
                if plan is not None:
                    assert plan.to_json(alternatives=False)
                    assert str(plan)
                    assert all(str(plan.explain(name)) for name in ("up.weight", *plan.choices))
                    plan.visualize(shown[counted[True] % len(shown)])
    assert counted[False] > counted[True] > 0


@pytest.mark.slow
def test_every_field_of_hardware_of_another_kind(tmp_path: Path) -> None:
    link = Link(1e-6, 1e9, (autoshard.hardware.Rate("all_reduce", 2, 1e-6, 1e9),))
    hardware = replace(H100, node=link, caches=((1e6, 1e-6),), functions=(1e-12, 1e-12))
    data, path = json.loads(json.dumps(hardware.to_dict())), tmp_path / "hardware.json"
    refused = 0
    for place in places(data):
        for value in OTHER:
            path.write_text(mutated(data, place, value), encoding="utf-8")
            refused += 1
            with contextlib.suppress(MeshError):
                Hardware.load(path).save(path)
                refused -= 1
    assert refused > 500


GARBLED = ("", "{", "[" * 100_000, '{"a":' * 100_000, "\x00", "1" * 5000, "NaN", "nul")


@pytest.mark.parametrize("text", GARBLED, ids=lambda t: t[:6])
def test_text_that_is_no_json(text: str, tmp_path: Path) -> None:
    for found in (text, text.encode(), b"\xff\xfe\x00"):
        with pytest.raises(PlanError, match="not a plan that autoshard wrote"):
            Plan.from_json(found)
    for found in (text.encode(), b"\xff\xfe\x00"):
        (tmp_path / "h.json").write_bytes(found)
        with pytest.raises(MeshError, match=r"was not written by Hardware\.save"):
            Hardware.load(tmp_path / "h.json")


BROKEN: dict[str, Callable[[], Any]] = {
    "dtypes": lambda: replace(H100, dtypes=3),  # type: ignore[arg-type]
    "rows": lambda: replace(H100, caches=(1, 2)),  # type: ignore[arg-type]
    "node": lambda: replace(H100, node=3),  # type: ignore[arg-type]
    "network": lambda: replace(H100, network={}),  # type: ignore[arg-type]
    "tiling": lambda: replace(H100, tiling=(1, 2, 3)),  # type: ignore[arg-type]
    "tiles": lambda: replace(H100, tiling=Tiling(1, ((1, 2),), 0.0)),  # type: ignore[arg-type]
    "latency": lambda: Link("1", 1e9),  # type: ignore[arg-type]
    "rates": lambda: Link(1e-6, 1e9, (("all_reduce", 2, 1.0, 1.0),)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BROKEN)
def test_fields_are_checked_where_they_are_given(name: str) -> None:
    with pytest.raises(AutoshardError):
        BROKEN[name]()


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """JSON has no form for them."""
    link = Link(np.float32(0.5), np.float64(2.0))  # type: ignore[arg-type]
    made = replace(
        H100, node=link, flops=np.float32(2.0), fuses=np.bool_(True), ahead=np.int64(2), caches=((np.float32(1), 1.0),)
    )
    made.save(tmp_path / "h.json")
    assert Hardware.load(tmp_path / "h.json") == made
    assert math.isclose(made.flops, 2.0)
    assert autoshard.Mesh({"tp": np.int64(2)}) == autoshard.Mesh({"tp": 2})  # type: ignore[dict-item]


def test_a_plan_whose_batch_norm_is_cut_is_read_back() -> None:
    """Its collectives are inside an operation with several results."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))
    text = autoshard.plan(model, {"a": 2}, (torch.randn(8, 6),), like="fsdp").to_json()
    assert "_native_batch_norm_legit_functional" in {c["value"] for c in json.loads(text)["collectives"]}
    assert Plan.from_json(text).to_json() == text


class Asserts(nn.Module):
    """An operation without a result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x < 9).all(), "large")
        return x.relu()


def test_a_plan_with_an_assertion_is_read_back() -> None:
    text = autoshard.plan(Asserts(), {"a": 2}, (torch.randn(8, 6),)).to_json()
    assert not json.loads(text)["choices"]["_assert_async"]["outputs"]
    assert Plan.from_json(text).to_json() == text

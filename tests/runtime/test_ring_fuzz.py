"""Random attention along rings, in pieces and with queries cut, against the formula on one device: what meets nowhere else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import examples
from torch import nn

from autoshard import runtime
from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.attention import ring_geometry as ring_order
from autoshard.runtime.attention import ring_task, tile
from autoshard.runtime.attention.masked_attention import banded_op
from autoshard.runtime.transport.in_process import InProcessCommunicator
from autoshard.runtime.transport.window import chunks

Case = dict[str, Any]


def drawn(seed: int) -> Case:
    """A case: how many ranks, lengths that do not divide, heads, and what hides, adds to, caps or drops weights."""
    of = random.Random(seed)
    causal, queries = of.random() < 0.6, of.randint(1, 23)
    square = causal or of.random() < 0.5
    around = of.random() < 0.7
    case: Case = {
        "ranks": of.choice([3, 8]),
        "around": around,
        "queries": queries,
        "keys": queries if square else of.randint(1, 23),
        "heads": (of.choice([1, 2, 4]), 4),
        "widths": (of.choice([2, 4]), of.choice([2, 4])),
        "before": of.choice([None, None, 0, 1, 5]),
        "after": 0 if causal else of.choice([None, None, 2]),
        "mask": of.choice(["", "", "documents" if square else "", "rows", "numbers", "padding", "deep"]),
        "dropout": of.choice([0.0, 0.3]) if around else 0.0,
        "soft_cap": of.choice([None, None, 0.5]),
        "sinks": of.random() < 0.4,
        "scale": of.choice([None, 0.3]),
        "blocks": of.choice([3, 1024]),
    }
    if case["mask"] == "deep":  # capture leaves positions in a mask that hides by numbers
        case["before"], case["after"] = None, None
    rows = case["mask"] in ("rows", "numbers")
    case["sloped"] = not case["mask"] and of.random() < 0.25
    case["folded"] = case["after"] == 0 and case["before"] is None and not rows and of.random() < 0.7
    return case


def in_folded_order(case: Case) -> Case:
    """A case like it that is folded: capture makes no causal attention beside a mask that hides by numbers."""
    mask = "padding" if case["mask"] in ("rows", "numbers", "deep") else case["mask"]
    return {**case, "before": None, "after": 0, "folded": True, "around": True, "mask": mask, "keys": case["queries"]}


def with_helpers(case: Case) -> Case:
    """A case like it that helpers can take."""
    return {**in_folded_order(case), "folded": False, "dropout": 0.0, "sloped": False}


def in_pieces(case: Case) -> Case:
    """A case like it in which keys and values are gathered in chunks of their heads."""
    return {**case, "around": True, "pieces": 1 + case["heads"][0] // 2}


def masks(case: Case, of: torch.Generator) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(the mask, what it shows [..., s, t], what it adds)."""
    s, t = case["queries"], case["keys"]
    every, none = torch.ones(s, t, dtype=torch.bool), torch.zeros(s, t, dtype=torch.float64)
    if case["sloped"]:
        slopes = torch.rand(1, 4, 1, 1, generator=of, dtype=torch.float64)
        return slopes, every, slopes * (torch.arange(t) - torch.arange(s)[:, None])
    match case["mask"]:
        case "documents":
            numbers = (torch.rand(2, 1, 1, t, generator=of) < 0.3).cumsum(-1)
            return numbers, numbers.mT == numbers, none
        case "rows":
            shown = torch.rand(2, 1, s, t, generator=of) < 0.7
            return shown, shown, none
        case "numbers":
            added, shown = (
                torch.randn(1, 4, s, t, generator=of, dtype=torch.float64),
                torch.rand(s, t, generator=of) < 0.6,
            )
            return added.masked_fill(~shown, -torch.inf), shown, added
        case "padding":
            shown = torch.rand(2, 1, 1, t, generator=of) < 0.7
            return shown, shown, none
        case "deep":  # hides by numbers; where it hides all, all count alike
            added = (torch.rand(2, 1, 1, t, generator=of, dtype=torch.float64) < 0.4) * -1e30
            return added, every, added
    return None, every, none


def formula(case: Case, seed: int, q: Any, k: Any, v: Any, sinks: Any, shown: Any, added: Any) -> torch.Tensor:
    k, v = (x.repeat_interleave(4 // x.shape[1], 1) for x in (k, v))
    row, column = torch.arange(case["queries"])[:, None], torch.arange(case["keys"])
    if case["before"] is not None:
        shown = shown & (column >= row - case["before"])
    if case["after"] is not None:
        shown = shown & (column <= row + case["after"])
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if case["scale"] is None else case["scale"])
    if case["soft_cap"] is not None:
        scores = case["soft_cap"] * torch.tanh(scores / case["soft_cap"])
    scores = (scores + added).masked_fill(~shown, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    else:
        scores = scores.masked_fill(~shown.any(-1, keepdim=True), 0.0)
    weights = scores.softmax(-1)[..., : case["keys"]] * shown.any(-1, keepdim=True)
    torch.manual_seed(seed)
    return nn.functional.dropout(weights, case["dropout"]) @ v


def error(seed: int, way: Callable[[Case], Case] = Case) -> float:
    """The largest difference of the result and of every gradient; ``way``: makes a case for it of one that is drawn."""
    case, of = way(drawn(seed)), torch.Generator().manual_seed(seed)
    ranks, (kv, _) = case["ranks"], case["heads"]

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=of, dtype=torch.float64, requires_grad=True)

    s, t, (e, d) = case["queries"], case["keys"], case["widths"]
    given = [values(2, 4, s, e), values(2, kv, t, e), values(2, kv, t, d)]
    given += [values(4)] if case["sinks"] else []
    mask, shown, added = masks(case, of)
    expected = formula(case, seed, *given[:3], given[3] if case["sinks"] else None, shown, added)
    cotangent = torch.randn(expected.shape, generator=of, dtype=torch.float64)
    theirs = [expected, *torch.autograd.grad(expected, given, cotangent)]

    def cut(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.detach().narrow(-2, *c).clone().requires_grad_(x.requires_grad) for c in chunks(x.shape[-2], (ranks,))
        ]

    def same(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.detach().clone().requires_grad_() for _ in range(ranks)]

    around = case["around"]
    parts = [cut(given[0]), *((cut if around else same)(x) for x in given[1:3]), *(same(x) for x in given[3:])]
    own = [mask] * ranks if mask is None or mask.shape[-2] != s or s == 1 or case["mask"] == "documents" else cut(mask)
    how = {n: case[n] for n in ("queries", "before", "after", "scale", "sloped", "soft_cap", "folded")}
    function = runtime.banded_rows
    if around:
        function = runtime.gathered_attention if "pieces" in case else runtime.ring_attention
        how |= {"keys": t, "helpers": way is with_helpers, "pieces": case.get("pieces", 1)}
        how |= {"dropout_p": case["dropout"], "shape": (2, 4, s, t)} if case["dropout"] else {}
    spec = runtime.AttentionSpec(axes="cp", **how)

    def one(q: Any, k: Any, v: Any, mask: Any, sinks: Any = None) -> torch.Tensor:
        return function(q, k, v, spec, mask, sinks)

    torch.manual_seed(seed)
    operands = zip(*parts[:3], own, *parts[3:], strict=True)
    outs = runtime.World({"cp": ranks}).run(one, list(operands))
    found = torch.autograd.grad(outs, [x for part in parts for x in part], cut(cotangent))
    by_part = [found[i * ranks : (i + 1) * ranks] for i in range(len(parts))]
    ours = [torch.cat(outs, -2), torch.cat(by_part[0], -2)]
    ours += [torch.cat(x, -2) if around else sum(x) for x in by_part[1:3]] + [sum(x) for x in by_part[3:]]
    apart = [(a - b).detach().abs().max() for a, b in zip(theirs, ours, strict=True) if a.numel()]
    return float(torch.stack(apart).max().nan_to_num(torch.inf))  # what is no number is far


@pytest.mark.parametrize("first", [0, pytest.param(20, marks=pytest.mark.slow)])
def test_random_cases(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + (examples(20) if not first else 200)):
        monkeypatch.setattr(tile, "UNFUSED_BLOCK_ROWS", drawn(seed)["blocks"])
        monkeypatch.setattr(ring_order, "WINDOW_BLOCK_ROWS", drawn(seed)["blocks"])
        for way in (Case, in_folded_order, with_helpers, in_pieces):
            assert error(seed, way) < 1e-9, (seed, way, drawn(seed))


@pytest.mark.parametrize("way", [Case, with_helpers, in_pieces], ids=["ring", "helpers", "in pieces"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_that_is_sent_is_waited_for(
    ranks: int, way: Callable[[Case], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a rank has no rows, or none that came in the folded order."""
    right, begun, waited = InProcessCommunicator.exchange, set[int](), set[int]()

    def exchange(self: InProcessCommunicator, *given: Any) -> list[Callable[[], Any]]:
        def watched(arrival: Callable[[], Any], number: int) -> Callable[[], Any]:
            begun.add(number)
            return lambda: (waited.add(number), arrival())[1]

        return [watched(arrival, len(begun)) for arrival in right(self, *given)]

    monkeypatch.setattr(InProcessCommunicator, "exchange", exchange)
    plain = {"ranks": ranks, "before": None, "after": 0, "mask": "", "dropout": 0.0, "sloped": False, "around": True}
    for n in (1, 2, 9):
        case = {"queries": n, "keys": n, **plain, "folded": way is not with_helpers}
        assert error(0, lambda drawn, case=case: way({**drawn, **case})) < 1e-9
    assert begun
    assert begun == waited


def test_what_draws_when_it_runs_has_no_backward() -> None:
    """It would draw others: captured, it is the ring's, which keeps what it drew."""
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    with pytest.raises(RuntimeMismatchError, match="no backward with dropout"):
        banded_op(x, x, x, dropout_p=0.5).sum().backward()


@pytest.mark.parametrize("way", [Case, in_pieces], ids=["ring", "in pieces"])
def test_where_all_weights_are_dropped_nothing_is_left(way: Callable[[Case], Case]) -> None:
    assert error(0, lambda case: way({**case, "around": True, "dropout": 1.0})) == 0.0


def test_what_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: sinks that take no weight."""
    right = ring_task.sink_scores
    monkeypatch.setattr(ring_task, "sink_scores", lambda sinks, *rest: right(sinks - 50.0, *rest))
    assert error(next(s for s in range(100) if drawn(s)["sinks"])) > 1e-3

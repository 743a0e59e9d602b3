"""What a forward collects in containers for somebody outside: a metric's batches, histories, logs. It is refused by name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_equal_training
from torch import Tensor, nn

import autoshard

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
OUTSIDE: list[Tensor] = []


class History:
    """An object of a user with a list."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class Keeps(nn.Module):
    """A linear layer, and what its forward does with its output beside: ``note``."""

    of_class: list[Tensor] = []  # noqa: RUF012

    def __init__(self, note: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.note = nn.Linear(8, 8), note
        self.batches, self.by_name, self.history = list[Any](), dict[str, list[Any]](a=[]), History()
        self.recent, self.full = deque[Any](maxlen=3), deque(range(3), maxlen=3)
        self.shapes, self.last, self.count, self.counts = set[Any](), None, 0, {"all": 0}

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.note(self, y.detach())
        return y.square().mean()  # type: ignore[no-any-return]


class Metric(nn.Module):
    """As torchmetrics' with list states: made of what there was and one batch more."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.value = nn.Linear(8, 8), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.value = [*self.value, y.detach()]
        return y.square().mean()  # type: ignore[no-any-return]


def put(self: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(self, name, value)


ADDS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a list": (lambda self, y: self.batches.append(y), "batches"),
    "a list of numbers": (lambda self, y: self.batches.append(1.5), "batches"),
    "a list of lists": (lambda self, y: self.batches.append([y]), "batches"),
    "a dict of lists": (lambda self, y: self.by_name["a"].append(y), "by_name"),
    "a dict": (lambda self, y: self.by_name.update({str(len(self.by_name)): []}), "by_name"),
    "a set": (lambda self, y: self.shapes.add(y), "shapes"),
    "an object": (lambda self, y: self.history.seen.append(y), "history"),
    "a deque": (lambda self, y: self.recent.append(y), "recent"),
    "a deque that is full": (lambda self, y: self.full.append(y), "full"),
    "a class": (lambda self, y: self.of_class.append(y), "Keeps.of_class"),
    "a global": (lambda self, y: OUTSIDE.append(y), "test_collected.OUTSIDE"),
}


@pytest.mark.one_graph
@pytest.mark.parametrize("name", ADDS)
def test_what_is_added_in_every_call(name: str) -> None:
    note, where = ADDS[name]
    model = Keeps(note)
    with pytest.raises(autoshard.CaptureError, match=f"adds to '{where}' in every call"):
        autoshard.compile(model, {"tp": 2}, (X,))
    assert (model.batches, model.by_name, model.history.seen, len(model.recent)) == ([], {"a": []}, [], 0)
    assert not OUTSIDE
    assert not Keeps.of_class


@pytest.mark.one_graph
def test_a_metric_with_a_list_state() -> None:
    with pytest.raises(autoshard.CaptureError, match="adds to 'value' in every call"):
        autoshard.compile(Metric(), {"tp": 2}, (X,))


STAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a list that is emptied": lambda self, y: (self.batches.clear(), self.batches.append(y)),
    "a new list": lambda self, y: put(self, batches=[y]),
    "an entry": lambda self, y: self.by_name.update(last=y),
    "an attribute": lambda self, y: put(self, last=y),
    "a count": lambda self, y: put(self, count=self.count + 1, counts={"all": self.counts["all"] + 1}),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_is_of_the_last_call_alone(name: str) -> None:
    """It does no harm."""
    assert_equal_training(Keeps(STAYS[name]), {"tp": 2}, (X,), share=1.2)

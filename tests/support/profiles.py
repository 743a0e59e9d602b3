"""What a profile of a run says about its collectives, against the plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from autoshard.plans.plan import Plan
from autoshard.report.schedule import collective_name

BUCKET = re.compile(r" \(\+(\d+)\)$")


def names_of(step: Callable[[], object]) -> Counter[str]:
    """The names of the collectives that ``step`` runs in this thread, and how often."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        step()
    return Counter(e.name for e in found.events() if re.match(r"\w+@", e.name))


def assert_as_predicted(seen: Counter[str], plan: Plan) -> None:
    """Every predicted collective is in the profile under its name, or in a bucket with the name of its first member.

    A bucket does not say who its other members are: of these only the kind, axes and phase are compared. So of a bucket of the
    root, which sums gradients of parameters of all blocks.
    """
    predicted = Counter(map(collective_name, plan.collectives))
    buckets = {BUCKET.sub("", name): times for name, times in seen.items() if BUCKET.search(name)}
    firsts = Counter({name: times for name, times in buckets.items() if " (root) " not in name})
    alone = Counter({name: times for name, times in seen.items() if not BUCKET.search(name)})
    assert not (alone + firsts) - predicted, "names that the plan does not have"
    if not buckets:
        assert alone == predicted
    every: Counter[str] = Counter()
    for name, times in seen.items():
        members = BUCKET.search(name)
        every[_kind(BUCKET.sub("", name))] += times * (1 + int(members[1]) if members else 1)
    assert every == _by_kind(predicted)


def _by_kind(names: Counter[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, times in names.items():
        found[_kind(name)] += times
    return found


def _kind(name: str) -> str:
    """``all_gather@tp forward``."""
    return f"{name.split(' ', 1)[0]} {name.rsplit(' ', 1)[1]}"

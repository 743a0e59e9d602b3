"""One rank of a gloo world that trains models in parts; started by test_parts_gloo.py."""

import functools

import parts_cases
from training_worker import main

LIKE = {"an_inner_step": "fsdp", "triplets": "fsdp"}


def case(name: str) -> None:
    """Train a case; ranks agree on their draws."""
    sharded = parts_cases.check(name, like=LIKE.get(name))
    assert "" not in sharded.parts
    if name in LIKE:
        assert any(x.is_shard() for p in sharded.parameters() for x in getattr(p, "placements", ()))


if __name__ == "__main__":
    main({name: functools.partial(case, name) for name in parts_cases.CASES})

"""benchmarks/fingerprint.py: which pairs it compiles, and which change shows in which field."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path

import pytest
from transformers_models import families

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import fingerprint as fp

SOURCE = '''"""Two linear layers."""

import torch.nn.functional as F

from autoshard import runtime


class Block(runtime.Block):
    """layers.0"""

    def forward(self, x):
        # summed over the ranks
        y = F.linear(x, self.weight)
        return runtime.leave(y, "tp")
'''


def test_there_are_200_pairs_of_every_kind() -> None:
    pairs = list(fp.pairs())
    assert len({pair.key for pair in pairs}) == len(pairs) >= 200
    assert len(families()) >= 30
    assert {*families(), *fp.OURS, *fp.BY_NAME, *fp.LARGE} == {pair.model for pair in pairs}
    assert {len(pair.axes) for pair in pairs} == {1, 2, 3}
    for option in ("like", "stages", "schedule", "micro_batches", "memory_budget", "recompute", "objective", "profile"):
        assert any(option in pair.options for pair in pairs), option


def test_two_runs_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And one that differs in a cost, a layout and a collective says so, field by field."""
    pairs = [pair for pair in fp.pairs() if pair.model == "mlp"]
    chosen = [pairs[0], next(pair for pair in pairs if pair.options.get("memory_budget") == fp.TIGHT)]
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for path in paths[:2]:
        fp.write({pair.key: fp.fingerprint(pair, *fp.made("mlp")) for pair in chosen}, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert fp.compare(*paths[:2], ()) == 0
    changed = fp.read(paths[0])
    assert all("error" not in fields for fields in changed.values()), changed
    key = min(changed)
    changed[key]["cost"] *= 2
    name = min(changed[key]["layouts"])
    changed[key]["layouts"][name] = "P@tp"
    changed[key]["collectives"]["permute tp forward"] = [1, 8.0]
    fp.write(changed, paths[2])
    capsys.readouterr()
    assert fp.compare(paths[0], paths[2], ["layouts"]) == 1
    told = capsys.readouterr().out
    assert "cost: 1 of 2 pairs" in told
    assert "(+1.00e+00)" in told
    assert "permute tp forward: None → [1, 8.0]" in told
    assert "layouts" not in told
    assert name in str(fp.differences(fp.read(paths[0]), changed)["layouts"])
    assert list(json.loads(paths[0].read_text().splitlines()[0])) == sorted(["key", *changed[key]])


def test_pairs_that_one_side_lacks_are_told() -> None:
    before = {"a": {"cost": 1.0}, "b": {"error": "x"}}
    after = copy.deepcopy(before)
    after["c"] = after.pop("a")
    assert fp.differences(before, after) == {"pairs": ["a: only before", "c: only after"]}


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        (r"summed over the ranks", "reduced", {"code", "structure"}),
        (r"layers\.0", "layers.1", {"code", "structure"}),
        (r"\by\b", "each", {"code", "structure"}),
        (r"Block\(", "Layer(", {"code", "structure"}),
        (r"runtime\.leave", "runtime.reduce", {"structure"}),
        (r"F\.linear", "F.bilinear", set()),
        ('"tp"', '"dp"', set()),
        (r"\(x, self\.weight\)", "(self.weight, x)", set()),
        ("return runtime", "return 2 * runtime", set()),
    ],
)
def test_what_a_change_of_the_source_changes(old: str, new: str, same: set[str]) -> None:
    changed = re.sub(old, new, SOURCE)
    assert changed != SOURCE
    before, after = fp.of_source(SOURCE), fp.of_source(changed)
    assert {field for field in before if before[field] == after[field]} == same

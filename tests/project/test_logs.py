"""What a program that logs hears of the library: warnings, unless it asks for more."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

SCRIPT = """
import logging
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s")
import torch, autoshard
autoshard.compile(torch.nn.Linear(4, 4), {"tp": 2}, (torch.randn(4, 4),))(torch.randn(4, 4))
"""


AGAIN = """
linear = autoshard.compile(torch.nn.Linear(4, 4), {"tp": 2}, (torch.randn(4, 4),), dynamic=True)
linear(torch.randn(4, 4))
linear(torch.randn(1, 4))
with torch.no_grad():
    linear(torch.randn(1, 4))
linear(torch.randn(1, 4))
"""


def _heard(before: str = "", script: str = SCRIPT, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", before + script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    return done.stderr


@pytest.fixture(scope="module")
def asked() -> str:
    return _heard(script=SCRIPT + AGAIN, AUTOSHARD_LOGS="plan,programs")


@pytest.mark.slow
def test_a_program_that_logs_at_info_hears_nothing() -> None:
    assert "autoshard" not in _heard()


def test_what_is_asked_for_is_heard(asked: str) -> None:
    assert "[autoshard.plan]" in asked
    assert "autoshard.plan INFO" not in asked, "a program that logs hears it once"


@pytest.mark.slow
def test_what_loggers_are_set_to_is_heard() -> None:
    before = "import logging; logging.getLogger('autoshard').setLevel(logging.INFO)\n"
    assert "autoshard.plan INFO" in _heard(before)


def test_why_a_call_compiles_another_program(asked: str) -> None:
    """Lengths that an open program does not take, and another state; a call that a program serves compiles none."""
    said = re.findall(r"^\[autoshard.programs\] (.*)$", asked, re.MULTILINE)
    assert "a program does not fit this call: batch >= 2 does not hold for batch = 1" in said
    assert [line for line in said if line.startswith("another program")] == [
        "another program is compiled, for other shapes, dtypes or constants of the arguments",
        "another program is compiled, for other recorded, grad",
    ]

"""What a program that logs hears of the library: warnings, unless it asks for more."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import logging
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s")
import torch, autoshard
autoshard.compile(torch.nn.Linear(4, 4), {"tp": 2}, (torch.randn(4, 4),))(torch.randn(4, 4))
"""


def _heard(before: str = "", **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", before + SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    return done.stderr


def test_a_program_that_logs_at_info_hears_nothing() -> None:
    assert "autoshard" not in _heard()


def test_what_is_asked_for_is_heard() -> None:
    assert "[autoshard.plan]" in _heard(AUTOSHARD_LOGS="plan")
    asked = "import logging; logging.getLogger('autoshard').setLevel(logging.INFO)\n"
    assert "autoshard.plan INFO" in _heard(asked)

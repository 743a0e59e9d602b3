"""Pages of the docs: their files and commands, as a reader would write and type them.

A block with a title (py title="train.py") is a file. A ``console`` block has commands after ``$ `` and what they print.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+\.\d+")
SEPARATOR = "\x1e"
PROGRAMS = {"python": "", "torchrun": "-m torch.distributed.run", "autoshard": "-m autoshard"}


def files(text: str) -> dict[str, str]:
    """Name → content; of several blocks with one title the last one."""
    return {match[1]: match[2] for match in FILE.finditer(text)}


def commands(block: str) -> list[tuple[str, str]]:
    """Each command with its continuation lines, and the output below it."""
    found: list[tuple[str, str]] = []
    for line in block.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found[-1][0].endswith("\\\n"):
            found[-1] = (found[-1][0] + line, "")
        else:
            found[-1] = (found[-1][0], found[-1][1] + line)
    return found


def run_commands(typed: list[str], folder: Path) -> list[str]:
    """What each command prints to the standard output, all run in one shell in ``folder``."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    for name, arguments in PROGRAMS.items():
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    script = f"\nprintf '{SEPARATOR}'\n".join(typed)
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return ["".join(f"{line.rstrip()}\n" for line in part.splitlines()) for part in done.stdout.split(SEPARATOR)]


def same(printed: str, expected: str) -> bool:
    """Equal texts, but for decimal numbers that differ by at most 1 %, as of another processor."""
    if NUMBER.sub("#", printed) != NUMBER.sub("#", expected):
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(expected), strict=True)
    return all(abs(float(a) - float(b)) <= 0.01 * abs(float(b)) for a, b in pairs)


def console_differences(text: str, folder: Path) -> tuple[list[str], str]:
    """What the outputs on a page get wrong, and the page with the outputs that its commands print now."""
    wrong: list[str] = []
    for name, content in files(text).items():
        (folder / name).write_text(content, encoding="utf-8")

    def renewed(match: re.Match[str]) -> str:
        typed = commands(match[1])
        outputs = run_commands([command for command, _ in typed], folder)
        lines: list[str] = []
        for (command, expected), printed in zip(typed, outputs, strict=True):
            if not same(printed, expected):
                wrong.append(f"--- $ {command}--- the page says\n{expected}--- it prints\n{printed}")
            lines += [f"$ {command}", expected if same(printed, expected) else printed]
        return f"```console\n{''.join(lines)}```"

    return wrong, CONSOLE.sub(renewed, text)


def markdown() -> Iterator[Path]:
    """README and every page of the docs."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))

"""mypy, told that ``passes`` and ``models`` are packages of ``autoshard``: it takes a module's name from its folders.

``python .ci/check_types.py`` takes mypy's options, and checks the files that pyproject.toml names.
"""

from __future__ import annotations

import sys
import time

from mypy.fscache import FileSystemCache
from mypy.main import process_options, run_build
from mypy.util import hard_exit

BESIDE = ("passes", "models")


def main() -> int:
    sys.setrecursionlimit(2**14)  # as mypy does for itself
    cache = FileSystemCache()
    sources, options = process_options(sys.argv[1:], fscache=cache)
    for source in sources:
        if source.module.partition(".")[0] in BESIDE:
            source.module = f"autoshard.{source.module}"
    _, messages, blocked = run_build(sources, options, cache, time.time(), sys.stdout, sys.stderr)
    errors = sum(": error: " in message for message in messages)
    print(f"Found {errors} errors" if messages else f"Success: no issues found in {len(sources)} source files")
    return 2 if blocked else int(bool(messages))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    hard_exit(status)  # as mypy does: to free what it read takes a while

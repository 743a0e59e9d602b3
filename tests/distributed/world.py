"""Worlds of gloo processes: a script is started once and forks a process per rank, so that torch is imported once.

The test calls :func:`start`, the script :func:`main`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from harness import freeze_imports

HERE = Path(__file__).parent


def environment() -> dict[str, str]:
    """For processes that import autoshard and the tests' helpers from this checkout."""
    paths = [str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def start(script: str, ranks: int, folder: Path, *arguments: str, timeout: float) -> str:
    """What rank 0 of ``script`` (beside this file) wrote to its result file; all ranks must end well, without warnings.

    Raises :class:`AssertionError` with what the processes printed, and ends them after ``timeout`` seconds.
    """
    files = [str(folder / "rendezvous"), str(folder / "result.json")]
    world = subprocess.Popen(
        [sys.executable, str(HERE / script), str(ranks), *files, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        log = world.communicate(timeout=timeout)[0]
    finally:
        if world.poll() is None:
            os.killpg(world.pid, signal.SIGKILL)
    assert world.returncode == 0, log
    assert "Warning" not in log, log
    return (folder / "result.json").read_text("utf-8")


def main(run: Callable[[int, int, str, str], None]) -> None:
    """Call ``run(rank, ranks, rendezvous file, result file)`` in a process per rank; exit with 1 where one failed."""
    ranks, rendezvous, result = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    freeze_imports()
    ids = [_fork(run, rank, ranks, rendezvous, result) for rank in range(ranks)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ids]
    sys.exit(any(statuses))


def _fork(run: Callable[[int, int, str, str], None], rank: int, *arguments: object) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        run(rank, *arguments)  # type: ignore[arg-type]
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        # Results are written. torch's threads sometimes abort the interpreter's own way out ("terminate called …").
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

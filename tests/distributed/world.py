"""Worlds of gloo (or NCCL) processes: forked from one process that has imported torch, a process per rank.

The test calls :func:`start`, the script :func:`main`, every rank :func:`join`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"
CAPTURES = "AUTOSHARD_TEST_CAPTURES"
"""variable with the folder of what ranks have captured"""

if "AUTOSHARD_TEST_RANK" in os.environ:  # for what scripts make when they are imported, too
    from harness import use_device

    use_device(os.environ["AUTOSHARD_TEST_DEVICE"])


def environment() -> dict[str, str]:
    """For processes that import autoshard and the tests' helpers from this checkout."""
    support = sorted({str(path.parent) for path in SUPPORT.rglob("*.py")})
    paths = [*support, str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def start(script: str, ranks: int, folder: Path, *arguments: str, timeout: float) -> str:
    """What rank 0 of ``script`` (beside this file) wrote to its result file; all ranks must end well, without warnings.

    Raises :class:`AssertionError` with what the processes printed, and :class:`subprocess.TimeoutExpired`, having ended
    them, after ``timeout`` seconds.
    """
    files = [str(folder / name) for name in ("rendezvous", "result.json", "log")]
    command = [str(HERE / script), str(ranks), *files[:2], *arguments]
    with _nursery() as connection:
        connection.sendall(json.dumps([files[2], *command]).encode() + b"\n")
        world, answer = int(line(connection)), ""
        connection.settimeout(timeout)
        try:
            answer = line(connection)
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(command, timeout, (folder / "log").read_text("utf-8", "replace")) from error
        finally:
            if not answer:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(world, signal.SIGKILL)
    log = (folder / "log").read_text("utf-8", "replace")
    assert answer == "0", log
    assert "Warning" not in log or "AUTOSHARD_TEST_DEVICE" in os.environ, log
    return (folder / "result.json").read_text("utf-8")


def cases(
    script: str, module: str, test: str, *, ranks: int = 2, also: Sequence[str] = (), timeout: float = 280
) -> Callable[..., Any]:
    """A fixture: case → its outcome in one world that runs all chosen cases of ``module.test``, and ``also`` these."""

    @pytest.fixture(scope="session")
    def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
        items = [i for i in request.session.items if (i.function.__module__, i.function.__name__) == (module, test)]
        names = ",".join([*(i.callspec.params["name"] for i in items), *also])

        @functools.cache
        def results() -> dict[str, Any]:
            folder = tmp_path_factory.mktemp("world")
            found: dict[str, Any] = json.loads(start(script, ranks, folder, names, timeout=timeout))
            return found

        return lambda name: results()[name]

    return outcome


def outcomes(script: str, ranks: int, folder: Path, names: list[str], timeout: float) -> dict[str, str]:
    """What cases of ``script`` came to: "" or the first failing rank's traceback; where their world ended, its log."""
    try:  # one that failed is not started again for every case in it
        found = json.loads(start(script, ranks, folder, ",".join(names), timeout=timeout))
    except AssertionError as error:
        return dict.fromkeys(names, f"in the world of {', '.join(names)}: {error}")
    except subprocess.TimeoutExpired as error:
        result = folder / "result.json"
        done = json.loads(result.read_text("utf-8")) if result.exists() else {}
        return {name: done.get(name, str(error)) for name in names}
    return {name: found[name] for name in names}


def line(connection: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n") and (got := connection.recv(1)):
        line += got
    return line.decode().strip()


def _nursery() -> socket.socket:
    """A connection to the process that forks worlds. It has imported torch and compiled a model, which takes seconds."""
    ours, theirs = socket.socketpair()
    socket.send_fds(_parent(), [b"x"], [theirs.fileno()])
    theirs.close()
    return ours


@functools.cache
def _parent() -> socket.socket:
    """Of one test process; it ends when this end is closed."""
    from remembered import OF_RUN

    ours, theirs = socket.socketpair()
    command = [sys.executable, str(HERE / "nursery.py"), str(theirs.fileno())]
    environ = {**environment(), CAPTURES: os.environ[OF_RUN]}
    subprocess.Popen(command, env=environ, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    return ours


@contextlib.contextmanager
def exiting() -> Iterator[None]:
    """The body ends this forked process. torch's threads sometimes abort the interpreter's own way out ("terminate …")."""
    status = 1
    try:
        yield
        status = 0
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def join(rendezvous: str, rank: int, ranks: int, **options: Any) -> None:
    """Make this process a rank of torch.distributed: with gloo, or on GPUs, which ranks may have to share, with NCCL."""
    import torch
    import torch.distributed as dist
    from harness import use_device

    device = os.environ.get("AUTOSHARD_TEST_DEVICE", "cpu")
    backend = "gloo"
    if device == "cuda":
        backend = "nccl"
        os.environ["NCCL_HOSTID"] = str(rank)  # ranks of one GPU pass for hosts of their own, which send over a socket
        torch.cuda.set_device(rank % torch.cuda.device_count())
        use_device(device)
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, **options)


def main(run: Callable[[int, int, str, str], None]) -> None:
    """Call ``run(rank, ranks, rendezvous file, result file)`` in a process per rank; exit with 1 where one failed."""
    ranks, rendezvous, result = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if rank := os.environ.get("AUTOSHARD_TEST_RANK"):
        with exiting():
            _run(run, int(rank), ranks, rendezvous, result)
    ids = [_fork(run, rank, ranks, rendezvous, result) for rank in range(ranks)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ids]
    sys.exit(any(statuses))


def _fork(run: Callable[[int, int, str, str], None], rank: int, *arguments: object) -> int:
    process = os.fork()
    if process == 0:
        if "AUTOSHARD_TEST_DEVICE" in os.environ:  # CUDA does not live on in a fork
            os.execve(sys.executable, [sys.executable, *sys.argv], {**environment(), "AUTOSHARD_TEST_RANK": str(rank)})
        with exiting():
            _run(run, rank, *arguments)
    return process


def _run(run: Callable[[int, int, str, str], None], rank: int, *arguments: Any) -> None:
    """``run`` of a rank, which captures what no rank has captured before. A script that no nursery started captures all."""
    from remembered import remembered

    folder = os.environ.get(CAPTURES)
    with remembered(Path(folder)) if folder else contextlib.nullcontext():
        run(rank, *arguments)

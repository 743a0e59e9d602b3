"""The process that worlds are forked from: see :mod:`world`."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import sys
from typing import NoReturn

import torch
from harness import freeze_imports
from torch import nn
from world import exiting, line

import autoshard


def serve(parent: socket.socket) -> None:
    """Fork a process for every connection that ``parent`` sends."""
    with torch.device("meta"):
        # imports what a compile imports; no backward, whose threads builds for GPUs do not let live on in a fork
        autoshard.plan(nn.Linear(2, 2), {"x": 2}, (torch.zeros(2, 2),), training=False)
    freeze_imports()
    import checks  # noqa: F401  what most worlds import, transformers too: seconds for each; after the freeze, as what
    import remembered  # noqa: F401
    import state_cases  # noqa: F401  a trace looks for among the objects of user code is not to be hidden

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, descriptors, _, _ = socket.recv_fds(parent, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            parent.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _answer(socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])


def _answer(connection: socket.socket) -> NoReturn:
    """Fork a world that runs a script with arguments as if from a shell, say its number, wait for it, say its status."""
    log, *arguments = json.loads(line(connection))
    world = os.fork()
    if world == 0:
        os.setsid()
        connection.close()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        sys.argv = arguments
        with exiting():
            runpy.run_path(arguments[0], run_name="__main__")
    connection.sendall(f"{world}\n".encode())
    status = os.waitstatus_to_exitcode(os.waitpid(world, 0)[1])
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as here:
        serve(here)

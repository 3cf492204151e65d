"""Starts launchers whose first spare for services that need torch is a fork of this test session's spare, because its
imports would take most of the time of a short run. The launcher itself is a new process that imports what it needs.

`python -m tests.integration.warm fork ENVIRONMENT MODULE ...` runs in a fork of the session's spare. It forks the spare
of the launcher and becomes `python -m tests.integration.warm launch SPARE MODULE ...` in the given environment. That
program runs the launcher MODULE, to which it hands over the spare. ENVIRONMENT and SPARE are JSON.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from launch.processes.programs import Child, child_environment
from launch.spares import spare
from launch.spares.processes import SPARE, SpareKind, SpareProcesses
from tests.integration.forks import Fork, forked


def started(command: Sequence[str], environment: Mapping[str, str], output: IO[bytes], folder: Path) -> Fork:
    """Start `python -m` with the command, which is a launcher's module and its arguments, in `folder`."""
    words = ("tests.integration.warm", "fork", json.dumps(dict(environment)), *command)
    return forked(*words, output=output, folder=folder)


def _fork(environment: dict[str, str], command: list[str]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        theirs.close()
        ours.set_inheritable(True)
        words = [sys.executable, "-m", "tests.integration.warm", "launch", json.dumps([ours.fileno(), pid]), *command]
        os.execve(sys.executable, words, environment)  # noqa: S606  # this program
    ours.close()
    _become_spare(theirs, environment)


def _become_spare(orders: socket.socket, environment: dict[str, str]) -> None:
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    os.environ.update(child_environment(1))
    sys.argv = ["launch.spares.spare", str(orders.detach())]
    spare.main()


def _launch(handed: tuple[int, int], command: list[str]) -> None:
    real, taken = SpareProcesses._started, False
    orders = socket.socket(fileno=handed[0])
    orders.set_inheritable(False)

    def take(self: SpareProcesses, kind: SpareKind) -> tuple[Child, socket.socket]:
        nonlocal taken
        if taken or "rollout" not in kind.services:
            return real(self, kind)
        taken = True
        orders.send(json.dumps(kind.imports).encode())
        orders.setblocking(False)
        return self._programs.adopt(SPARE, handed[1]), orders

    SpareProcesses._started = take  # type: ignore[method-assign]
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _given = json.loads(sys.argv[2])
    (_fork if sys.argv[1] == "fork" else _launch)(_given, sys.argv[3:])

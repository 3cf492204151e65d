"""Starts services that need torch as forks of one spare process per test session, because imports take seconds.

`python -m tests.integration.forks FOLDER MODULE ...` runs a module as `python -m` would in that folder. Forks begin so,
because their spare is in the repository.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from launch.processes.programs import child_environment
from launch.spares.processes import COMMAND_BYTES
from tests.integration.tiny.harness import ROOT

IMPORTS = (
    "services.policy_trainer.worker.service",
    "services.policy_trainer.worker.start",
    "services.policy_trainer.worker.checkpoint",
    "services.reference.service",
    "services.reference.scoring",
    "services.reference.scorer",
    "services.reference.frozen",
    "services.rollout.service",
    "services.rollout.engines.transformers_engine",
    "services.batch_store.server",
    "services.scheduler.server",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
)
WARM_S, FORK_S = 120.0, 30.0
POLL_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


class Fork:
    """A fork, with the methods of `subprocess.Popen` that tests need. `stderr` also has what it writes to stdout."""

    def __init__(self, pid: int, stderr: IO[bytes] | None = None) -> None:
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_S)
        return status

    def communicate(self, timeout: float) -> tuple[None, bytes]:
        assert self.stderr is not None
        until, parts = time.monotonic() + timeout, []
        while True:
            if not select.select([self.stderr], [], [], max(0.0, until - time.monotonic()))[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            if not (part := os.read(self.stderr.fileno(), 1 << 16)):
                break
            parts.append(part)
        self.stderr.close()
        self.wait(max(0.0, until - time.monotonic()))
        return None, b"".join(parts)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def forked(module: str, *arguments: str, output: IO[bytes] | None = None, folder: Path = ROOT) -> Fork:
    """Return a fork that runs `python -m module arguments` in `folder`. Without `output`, its output is discarded."""
    with contextlib.ExitStack() as opened:
        sink = output or opened.enter_context(Path(os.devnull).open("wb"))
        return Fork(_fork([module, *arguments], sink, folder))


def piped(module: str, *arguments: str, folder: Path = ROOT) -> Fork:
    """Return a fork that runs `python -m module arguments` in `folder` and whose output can be read."""
    reading, writing = os.pipe()
    with open(writing, "wb") as output:
        return Fork(_fork([module, *arguments], output, folder), open(reading, "rb"))


def _fork(command: list[str], output: IO[bytes], folder: Path) -> int:
    """Return the process id of a new fork."""
    ours, theirs = socket.socketpair()
    order = json.dumps([["tests.integration.forks", str(folder), *command], child_environment(1)]).encode()
    orders = _spare()
    # This process is a subreaper only during the fork. Otherwise every orphan of the tests would become its child.
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        with ours, theirs:
            socket.send_fds(orders, [order], [output.fileno(), theirs.fileno()])
            theirs.close()
            ours.settimeout(FORK_S)
            pid = int(ours.recv(32))
            ours.send(b"!")
            return pid
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)


@functools.cache
def _spare() -> socket.socket:
    """Start this process's spare. Return the socket through which it receives orders."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.spares.spare", str(theirs.fileno()), "-" * COMMAND_BYTES],
            pass_fds=(theirs.fileno(),),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            env=child_environment(1) | {"PYTHONPATH": str(ROOT)},  # a test's own variables come with each order
        )
    atexit.register(process.kill)
    ours.settimeout(WARM_S)
    ours.send(json.dumps(IMPORTS).encode())
    if not ours.recv(64):
        raise RuntimeError("the tests' spare has failed")
    return ours


if __name__ == "__main__":
    _, _folder, _module, *_arguments = sys.argv
    os.chdir(_folder)
    sys.path.insert(0, _folder)
    sys.argv = [_module, *_arguments]
    runpy.run_module(_module, run_name="__main__", alter_sys=True)

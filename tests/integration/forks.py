"""Starts services that need torch as forks of one spare process per test session, because imports take seconds."""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import IO

from tests.integration.tiny.harness import ROOT

IMPORTS = (
    "services.policy_trainer.worker.service",
    "services.policy_trainer.worker.start",
    "services.policy_trainer.worker.checkpoint",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
)
WARM_S, FORK_S = 120.0, 30.0
POLL_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


class Fork:
    """A fork, with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def forked(module: str, *arguments: str, output: IO[bytes] | None = None) -> Fork:
    """Return a fork that runs `python -m module arguments` in the repository. Without `output`, its output is
    discarded."""
    ours, theirs = socket.socketpair()
    sink = output.fileno() if output is not None else os.open(os.devnull, os.O_WRONLY)
    # This process is a subreaper only during the fork. Otherwise every orphan of the tests would become its child.
    orders = _spare()
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        with ours, theirs:
            socket.send_fds(orders, [json.dumps([[module, *arguments], {}]).encode()], [sink, theirs.fileno()])
            theirs.close()
            ours.settimeout(FORK_S)
            fork = Fork(int(ours.recv(32)))
            ours.send(b"!")
            return fork
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if output is None:
            os.close(sink)


@functools.cache
def _spare() -> socket.socket:
    """Start this process's spare. Return the socket through which it receives orders."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.spares.spare", str(theirs.fileno()), "-" * 500],
            pass_fds=(theirs.fileno(),),
            cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
    atexit.register(process.kill)
    ours.settimeout(WARM_S)
    ours.send(json.dumps(IMPORTS).encode())
    if not ours.recv(64):
        raise RuntimeError("the tests' spare has failed")
    return ours

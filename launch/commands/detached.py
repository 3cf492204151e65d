"""Implements `--detach`: the launcher returns, and the supervisor keeps running in a session of its own. `--attach`
shows the console of the run.

The launcher forks once it has locked the run directory and before it starts an event loop or a thread of its own. The
child inherits the locks, so there is no moment at which another launcher could take over the run.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from launch.viewers.ended import ended_text
from proto.messages import ErrorCode
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.runfiles.lines import FollowedFile
from shared.runfiles.logs import tail
from shared.runfiles.outcome import is_held, read_outcome

SHOWN_LINES = 20
POLL_S = 0.2
_READY = b"R"


@dataclass
class Detached:
    """The child's side of the fork: the process that keeps running."""

    _to_launcher: int

    def ready(self) -> None:
        """Let the launcher return. Later calls do nothing."""
        if self._to_launcher >= 0:
            try:
                os.write(self._to_launcher, _READY)
            except OSError:
                pass  # The launcher has ended.
            finally:
                os.close(self._to_launcher)
                self._to_launcher = -1


@dataclass
class Launcher:
    """The parent's side of the fork: the command that returns."""

    run: RunDir
    pid: int
    _from_child: int

    def wait(self) -> int:
        """Show the console until every service is READY or the start has failed, and return the exit status."""
        console = FollowedFile(console_of(self.run))
        # Ctrl-C works even if SIGINT was inherited as ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            while True:
                readable, _, _ = select.select([self._from_child], [], [], POLL_S)
                _print_new(console)
                if readable:
                    break
            ready = os.read(self._from_child, 1) == _READY
        except KeyboardInterrupt:
            print("startup continues without this command")
            ready = True
        if ready:
            print(f"detached   process {self.pid}")
            print(f"attach     python -m launch.cluster --attach --run-dir {self.run.path}")
            print(f"stop       python -m launch.ctl --run {self.run.path} stop", flush=True)
            return 0
        _, status = os.waitpid(self.pid, 0)
        _print_new(console)
        return max(os.waitstatus_to_exitcode(status), 1)


def detach(run: RunDir) -> Detached | Launcher:
    """Fork. Returns twice: a `Detached` in the process that keeps running, and a `Launcher` in the parent."""
    read, write = os.pipe()
    console = os.open(console_of(run), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(write)
        os.close(console)
        return Launcher(run, pid, read)
    os.close(read)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (console, 1), (console, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(console)
    return Detached(write)


def attach(run: RunDir) -> int:
    """Show the console of a detached run until it ends, and return its exit status. Ctrl-C leaves the run alone.

    Raises RpcError(bad_request) if the run is not running, or was not started with `--detach`.
    """
    file = console_of(run)
    if not is_held(run.path):
        raise RpcError(ErrorCode.BAD_REQUEST, ended_text(run) or f"run {run.path}: no launcher has started it")
    if not file.exists():
        text = f"run {run.path} was not started with --detach, so its console is where it was started; use ctl status"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    console = FollowedFile(file)
    list(console.new_lines())
    # Ctrl-C works even if SIGINT was inherited as ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for line in tail(file, SHOWN_LINES):
            print(line, flush=True)
        while is_held(run.path):
            _print_new(console)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        print("detached again; the run continues", flush=True)
        return 0
    _print_new(console)
    end = read_outcome(run.path)
    return 0 if end is not None and end.outcome == "done" else 1


def console_of(run: RunDir) -> Path:
    """Return the file that contains the console output of a detached run."""
    return run.logs / "console.out"


def _print_new(console: FollowedFile) -> None:
    for line in console.new_lines():
        print(line, flush=True)

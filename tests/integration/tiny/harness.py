"""Starts the tiny launcher in a test and checks what it leaves behind. Every wait has a limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from typer.testing import CliRunner

from launch.ctl import app
from launch.processes.plan import command_of
from launch.viewers.status import collect
from shared.rpc.errors import RpcError
from shared.rundir import RunDir

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"
TINY = "policy-trainer,policy-trainer-worker,critic,rollout,reference,reward-model"
ALL_TINY = f"scheduler,batch-store,{TINY}"
SERVICES = 8
LIMIT_S = 30.0
POLL_S = 0.05


def wait_for(what: str, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Return the first true value that `condition` returns."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        answer = condition()
        if answer:
            return answer
        time.sleep(POLL_S)
    raise AssertionError(f"{what}: not within {limit_s:g} s")


def environment(tiny: str = ALL_TINY) -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "TINY": tiny, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@dataclass
class Launched:
    """A launcher with its run directory."""

    process: subprocess.Popen[str]
    path: Path

    @property
    def run(self) -> RunDir:
        return RunDir.open(self.path)

    def status(self) -> dict[str, Any]:
        """Return what `ctl status --json` prints, or {} while the run does not answer."""
        return status_of(self.path)

    def wait_ready(self, ready: int = SERVICES) -> dict[str, dict[str, Any]]:
        """Return the services by name/instance, once `ready` of them are READY."""
        wait_for("run directory", (self.path / "run.json").exists)

        def all_ready() -> dict[str, dict[str, Any]]:
            rows = {f"{row['service']}/{row['instance']}": row for row in self.status().get("services", [])}
            return rows if sum(row["state"] == "READY" for row in rows.values()) == ready else {}

        answer: dict[str, dict[str, Any]] = wait_for(f"{ready} services READY", all_ready)
        return answer

    def end(self, limit_s: float = LIMIT_S) -> tuple[int, str, str]:
        """Wait for the launcher to exit, and return its exit status, stdout and stderr."""
        output, errors = self.process.communicate(timeout=limit_s)
        return self.process.returncode, output, errors


@contextlib.contextmanager
def launched(path: Path, *arguments: str, tiny: str = ALL_TINY, spares: bool = True) -> Iterator[Launched]:
    """Start a launcher of the quickstart in `path`, with tiny services instead of those in `tiny`, which may be empty.

    Any process left behind is killed at the end of the test.
    """
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.integration.tiny.launcher" if tiny else "launch.cluster",
            str(QUICKSTART),
            "--run-dir",
            str(path),
            "--set",
            "services.batch-store.memory=64MiB",
            "--set",
            f"run.spares={str(spares).lower()}",
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment(tiny),
    )
    try:
        yield Launched(process, path)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        for pid in processes_of(path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes_of(path: Path) -> list[int]:
    """Return the processes with this run directory on their command line (services, launcher)."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and str(path) in process.cmdline():
                found.append(process.pid)
    return found


def process_of(path: Path, service: str) -> int | None:
    """Return the process id of an instance of `service` in this run directory, or None if there is none."""
    words = ["-m", *command_of(service), "--run"]
    for pid in processes_of(path):
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).cmdline()[1 : 1 + len(words)] == words:
                return pid
    return None


def status_of(path: Path) -> dict[str, Any]:
    """Return the output of `ctl status --json`, or {} while the run does not answer. Tests poll this function, so it
    does not start a new process for each call, because the imports of that process would take longer than most answers
    do.
    """
    try:
        run = RunDir.open(path)
        with ThreadPoolExecutor(1) as other:  # The caller's thread may run an event loop, such as playwright's.
            return other.submit(lambda: asyncio.run(collect(run))).result()
    except (RpcError, OSError, ValueError):
        return {}


def ctl(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `launch.ctl` in this process. The imports of a new process would take longer than most commands."""
    with ThreadPoolExecutor(1) as other:  # The caller's thread may run an event loop.
        done = other.submit(CliRunner().invoke, app, ["--run", str(path), *arguments]).result(LIMIT_S)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def ctl_process(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `launch.ctl` as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "launch.ctl", "--run", str(path), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=LIMIT_S,
        check=False,
    )


def free_port() -> int:
    """Return a port on the loopback address that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def free_ports() -> dict[str, int]:
    """Return the topology keys that name ports, with ports that are free now."""
    keys = ("scheduler_port", "supervisor_port", "monitor_port")
    with contextlib.ExitStack() as stack:
        held = {key: stack.enter_context(socket.create_server(("127.0.0.1", 0))) for key in keys}
        return {f"transport.{key}": each.getsockname()[1] for key, each in held.items()}


def assert_nothing_left(run: RunDir) -> None:
    """Check that, within a short time, no process, socket or shared memory of the run is left."""
    wait_for("no process left", lambda: not processes_of(run.path))
    wait_for("no sockets left", lambda: not run.sockets.exists())
    wait_for("no shared memory left", lambda: not run.shm.exists())

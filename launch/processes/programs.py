"""Starts the programs of a run's processes and reaps them. The guard always knows which of them are left.

Programs are started from the main thread, because the kernel ties a child's parent-death signal to the thread that
created the child. Each has its own process group, so that a terminal's Ctrl-C reaches only the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil
import structlog

from launch.processes import guard
from launch.processes.plan import SUPERVISOR, Key, Resources
from proto.messages import WaitKind, WaitRow
from shared.rundir import RunDir, service_name

ROOT = Path(__file__).resolve().parents[2]
GLIBC_TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x300000"
"""Makes copies of 3 MiB or more bypass the caches, which reduces the memory traffic of putting weights. By default,
glibc derives the limit from the size of the last-level cache, which some virtual machines report as 320 MiB instead of
32 MiB."""

ORPHANS_END_S = 1.0
"""Seconds between the end of a service and the reaping of the killed processes that it left behind."""
ORPHANS_EVERY_S = 60.0
"""Seconds between two searches for other processes that services left behind and that have ended."""
GUARD_EVERY_S = 1.0
"""Seconds between two checks that the guard is running."""
_PR_SET_CHILD_SUBREAPER = 36
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LIBC = ctypes.CDLL(None, use_errno=True)


def child_environment(threads: int, gpus: str | None = None) -> dict[str, str]:
    """Return the environment of a service: our packages first on the path, `threads` threads, few malloc arenas, no
    look-ups on the network, and the GPUs `gpus` (None: the launcher's GPUs)."""
    old = os.environ.get("PYTHONPATH", "")
    seen = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    return {
        **inherited,
        "PYTHONUTF8": "1",  # all files of a run, and its logs, are UTF-8
        "PYTHONPATH": f"{ROOT}{os.pathsep}{old}" if old else str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # for numpy, which computes little here and starts its threads when it is imported
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # torch then counts GPUs through NVML: the default method initializes the CUDA driver, and a process that has
        # done so cannot be forked
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # with one arena per thread, a torch process would keep the memory that its threads free
        "MALLOC_ARENA_MAX": "2",
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", GLIBC_TUNABLES),
        **{name: _with_loopback(os.environ.get(name, "")) for name in ("NO_PROXY", "no_proxy")},
        **seen,
    }


def _with_loopback(hosts: str) -> str:
    """Return the hosts to be reached without a proxy, with those of this machine: agents call the policy there."""
    named = [host for host in hosts.split(",") if host.strip()]
    return ",".join([*named, *(host for host in LOOPBACK if host not in named)])


def own_environment(resources: Resources) -> dict[str, str]:
    """Return the environment variables of a process that differ from those of a process with 1 thread."""
    common = child_environment(1)
    own = child_environment(resources.threads, resources.gpus)
    return {name: value for name, value in own.items() if common.get(name) != value}


@dataclass(frozen=True)
class Child:
    """A child process of the supervisor."""

    pid: int
    descriptor: int
    """Its pidfd."""
    popen: subprocess.Popen[bytes] | None = None
    """None if the process is a fork of a spare."""

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, number)

    def wait(self) -> int:
        """Return the exit status, or minus the number of the signal that ended the process. Call it once.

        Return 0 if the status is lost.
        """
        if self.popen is not None:
            return self.popen.wait()
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return 0


class Programs:
    """The programs of one run. For the main thread and its event loop only."""

    def __init__(self, run: RunDir, *, lock: int | None, drain_limit_s: Callable[[Key], float]) -> None:
        """`lock` is the descriptor of the lock on the run directory, which the guard inherits. `drain_limit_s` returns
        how many seconds the guard gives a process to exit.
        """
        self._run = run
        self._lock = lock
        self._drain_limit_s = drain_limit_s
        self._guard: subprocess.Popen[bytes] | None = None
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        """The next call of each function that is called repeatedly."""
        self._alive: dict[int, float] = {}
        """The processes that have been started or adopted here and not yet reaped: by id, the number of seconds that
        the guard gives them to exit."""
        self._log = structlog.get_logger(SUPERVISOR)

    def start(
        self, key: Key, resources: Resources, command: Sequence[str], output: BinaryIO, pass_fds: Sequence[int] = ()
    ) -> Child:
        """Start `command` as the process `key` and announce it to the guard. Raises OSError."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=child_environment(resources.threads, resources.gpus),
            pass_fds=pass_fds,
            process_group=0,
        )
        try:
            return self.adopt(key, process.pid, process)
        except OSError:  # its exit would go unnoticed
            process.kill()
            process.wait()
            raise

    def adopt(self, key: Key, pid: int, popen: subprocess.Popen[bytes] | None = None) -> Child:
        """Return the child `pid`, which is process `key`, and announce it to the guard. Raises OSError."""
        child = Child(pid, os.pidfd_open(pid), popen)
        self._alive[pid] = self._drain_limit_s(key)
        self._tell_guard(f"+{pid} {self._alive[pid]}\n")
        return child

    def reap(self, child: Child) -> int:
        """Return the exit status of a process that has ended or is about to, and kill the processes that it started."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(child.descriptor)
        # The processes that it started (an engine's ranks, reward processes) use memory that other processes need next.
        # They are killed before the wait, while no other process can have this pid.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        status = child.wait()
        os.close(child.descriptor)
        self._alive.pop(child.pid, None)
        self._tell_guard(f"-{child.pid}\n")
        loop.call_later(ORPHANS_END_S, self._reap_orphans)
        return status

    def _reap_now_and_then(self) -> None:
        self._reap_orphans()
        self._again(self._reap_now_and_then, ORPHANS_EVERY_S)

    def _again(self, function: Callable[[], None], delay_s: float) -> None:
        self._timers[function] = asyncio.get_running_loop().call_later(delay_s, function)

    def _reap_orphans(self) -> None:
        """Reap processes that services left behind and that have ended. A subreaper is the parent of such processes.

        The launcher's own short-lived programs are in its process group, and are left to whoever waits for them.
        """
        waited_for = {*self._alive, self._guard.pid if self._guard is not None else 0}
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ChildProcessError, ProcessLookupError):
                orphan = process.pid not in waited_for and os.getpgid(process.pid) != os.getpgrp()
                if orphan and process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(process.pid, os.WNOHANG)

    def start_guard(self) -> None:
        """Start the process that stops the rest of the run if the launcher dies (`launch.processes.guard`), and again
        whenever it ends. Become the parent of processes whose parent ends, such as forks of a spare."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were inherited as ignored, exit statuses would be lost
        if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        self._reap_now_and_then()
        self._keep_guard()

    def _keep_guard(self) -> None:
        """Start the guard if it is not running, and tell it about all processes."""
        self._again(self._keep_guard, GUARD_EVERY_S)
        if self._guard is None or self._guard.poll() is not None:
            if self._guard is not None:
                self._log.warning("guard ended and starts again", pid=self._guard.pid, status=self._guard.returncode)
            environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
            folders = (self._run.sockets, self._run.shm, self._run.logs)
            self._guard = subprocess.Popen(
                [sys.executable, "-S", "-P", "-m", guard.__name__, *map(str, folders)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environment, "PYTHONPATH": str(ROOT)},
                pass_fds=() if self._lock is None else (self._lock,),
                start_new_session=True,
            )
            for pid, limit_s in self._alive.items():
                self._tell_guard(f"+{pid} {limit_s}\n")

    async def close_guard(self) -> None:
        """Stop the guard. Call this once every program has ended."""
        for timer in self._timers.values():
            timer.cancel()
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            await asyncio.get_running_loop().run_in_executor(None, self._guard.wait)
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def _tell_guard(self, line: str) -> None:
        """Send a line to the guard. A guard that has just ended is told when it starts again."""
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.write(line.encode())


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes, or 0 if the process is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss) if pid else 0
    except psutil.Error:
        return 0


def stopped_processes(pids: Mapping[Key, int]) -> list[WaitRow]:
    """Return a row for each process of the run that a signal has stopped, including processes started by services."""
    owners = {pid: key for key, pid in pids.items()}
    processes = {child.pid: child for child in psutil.process_iter(["ppid", "status"])}
    rows: list[WaitRow] = []
    for pid, process in processes.items():
        if process.info["status"] != psutil.STATUS_STOPPED:
            continue
        owner, steps = pid, 0
        while owner not in owners and owner in processes and steps < len(processes):
            owner, steps = processes[owner].info["ppid"], steps + 1
        if owner in owners:
            name = service_name(*owners[owner])
            whose = name if owner == pid else f"a process that {name} started"
            text = f"{whose} (process {pid}) is stopped by a signal; kill -CONT {pid} lets it continue"
            rows.append(WaitRow(WaitKind.STOPPED, text, 0.0, 0.0, name))
    return rows

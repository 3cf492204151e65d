"""Starts the processes of a run on this host, as forks of spares where possible, signals them and reaps them, and
notices those that no longer answer messages. The state machine decides; this file only carries out and reports.

The mailbox thread of a service never computes, so silence means a stopped or stuck process. A stuck *worker* thread is
not detected here; instead, the scheduler ends its lease. Only READY processes are asked, because starting and stopping
have their own deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

from launch.processes.plan import SUPERVISOR, Key, Resources, command_of
from launch.processes.programs import Child, Programs
from launch.spares.processes import SpareProcesses
from launch.supervisor.events import Exited, Spawned
from launch.supervisor.sockets import SupervisorSockets
from proto.messages import Ack, DrainService, Ping, Pong
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call
from shared.rundir import RunDir, service_name
from shared.stacks import STACK_SIGNAL, written

RETIRE_CALL_S = 5.0
CANNOT_START = 127
STACKS_LIMIT_S = 1.0
"""Maximum seconds to wait for the stacks of a hung process. To write them, the process needs processor time, but not
the interpreter lock."""
STACKS_LIMIT_BYTES = 128 << 10
_STACKS_POLL_S = 0.05


def program_of(service: str) -> list[str]:
    """Return the program of a service, without the arguments that every service takes."""
    return [sys.executable, "-m", *command_of(service)]


class Runner:
    """The processes of one run on this host. For the main thread and its event loop only."""

    def __init__(
        self,
        run: RunDir,
        sockets: SupervisorSockets,
        resources: Mapping[Key, Resources],
        programs: Programs,
        spares: SpareProcesses,
        *,
        on_exit: Callable[[Key, int, int], None],
    ) -> None:
        """`resources` is what each process is given. `on_exit` is called with the key, pid and exit status of each
        process that has ended.
        """
        self._run = run
        self._sockets = sockets
        self._resources = dict(resources)
        self._programs = programs
        self._spares = spares
        self._on_exit = on_exit
        self._children: dict[Key, Child] = {}
        self._ended: set[tuple[Key, int]] = set()
        """The processes that ran here and have ended, with their ids."""
        self._dying: dict[int, list[Call]] = {}
        """The calls to answer once a process is dead, by its pid."""
        self._log = structlog.get_logger(SUPERVISOR)

    def give(self, key: Key, resources: Resources) -> None:
        """Have the process `key` start with `resources` from now on."""
        self._resources[key] = resources

    def spawn(self, key: Key) -> Spawned | Exited:
        """Start the process `key`."""
        service, instance = key
        resources = self._resources.get(key, Resources())
        command = [*program_of(service), "--run", str(self._run.path), "--instance", str(instance)]
        command += ["--supervisor", self._sockets.endpoint, "--parent", str(os.getpid())]
        command += ["--listen", resources.listen] if resources.listen else []
        try:
            with self._output(key).open("ab") as output:
                child = self._spares.fork(key, resources, command, output)
                child = child or self._programs.start(key, resources, command, output)
        except OSError as error:
            self._log.error("cannot start", name=service_name(*key), error=str(error))
            return Exited(key, 0, CANNOT_START)
        self._children[key] = child
        asyncio.get_running_loop().add_reader(child.descriptor, self._reap, key, child)
        self._log.info("started", name=service_name(*key), pid=child.pid)
        return Spawned(key, child.pid)

    def signal(self, key: Key, pid: int, number: int) -> None:
        """Send a signal to the process `key`, unless `pid` has ended."""
        child = self._children.get(key)
        if child is not None and child.pid == pid:
            child.signal(number)
            if number == signal.SIGTERM:
                child.signal(signal.SIGCONT)  # a stopped process cannot drain

    async def retire(self, key: Key, pid: int) -> None:
        """Ask a service to finish its leases. If it does not answer, tell it to stop, so that it returns its leases."""
        try:
            request = DrainService(service=key[0], instance=key[1])
            await self._sockets.local(key).call(request, Ack, deadline_s=RETIRE_CALL_S)
        except RpcError as error:
            self._log.warning("does not finish its leases", name=service_name(*key), error=str(error))
            self.signal(key, pid, signal.SIGTERM)

    async def kill_hung(self, key: Key, pid: int, cause: str) -> None:
        """Append the stacks of a hung process to its log, and kill the process. `cause` says how it was detected."""
        try:
            await self._log_stacks(key, pid, cause)
        except OSError as error:  # a full disk, or a process that has ended in the meantime
            self._log.warning("no stacks", pid=pid, error=str(error))
        self.signal(key, pid, signal.SIGKILL)

    def confirm_death(self, key: Key, pid: int, call: Call) -> bool | None:
        """Return True if the process `pid`, which ran here, has ended. Return False if it runs: `call` is answered once
        it is dead. Return None if it was not started here."""
        child = self._children.get(key)
        if child is not None and child.pid == pid:
            self._dying.setdefault(pid, []).append(call)
            return False
        return True if (key, pid) in self._ended else None

    def ended(self, key: Key, pid: int) -> None:
        """Record that a process has ended, and answer the calls that wait for its death."""
        child = self._children.get(key)
        if child is not None and child.pid == pid:
            del self._children[key]
        self._ended.add((key, pid))
        for call in self._dying.pop(pid, []):
            call.reply(Ack())

    def close(self) -> None:
        """Kill what is left: spares, and processes after an error of the supervisor."""
        self._spares.close()
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        for child in self._children.values():
            child.wait()

    def _reap(self, key: Key, child: Child) -> None:
        status = self._programs.reap(child)
        self.ended(key, child.pid)
        self._log.info("exited", name=service_name(*key), pid=child.pid, status=status)
        self._on_exit(key, child.pid, status)

    def _output(self, key: Key) -> Path:
        return self._run.logs / f"{key[0]}-{key[1]}.out"

    async def _log_stacks(self, key: Key, pid: int, cause: str) -> None:
        """Make a process write the stacks of all its threads, and append them to its log. Raises OSError."""
        if _is_stopped(pid):
            stacks = "none: the process is stopped (SIGSTOP), and a stopped process cannot write them"
        else:
            with self._output(key).open("rb") as file:
                begin = os.fstat(file.fileno()).st_size
                self.signal(key, pid, STACK_SIGNAL)
                limits = {"limit_s": STACKS_LIMIT_S, "poll_s": _STACKS_POLL_S}
                stacks = await written(file.fileno(), begin, **limits, limit_bytes=STACKS_LIMIT_BYTES)
                stacks = stacks or f"none: it wrote nothing within {STACKS_LIMIT_S:g} s"
        line = {
            **{"service": key[0], "instance": key[1], "run": self._run.name, "pid": pid},
            **{"event": "hangs, and is killed", "level": "error", "cause": cause},
            **{"timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"), "stacks": stacks},
        }
        log = os.open(self._run.log_file(*key), os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            os.write(log, json.dumps(line).encode() + b"\n")
        finally:
            os.close(log)


def _is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by a signal or a debugger. Raises OSError if there is no such process."""
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state in ("T", "t")


PING_EVERY_S = 2.0
SILENCE_S = 20.0
"""Seconds without an answer after which a process counts as hung; see also `SLOWNESS`."""
SLOWNESS = 5.0
"""A process counts as hung only after this multiple of the longest time that any READY process of its service has taken
to answer in this run.
"""
TICK_S = 0.5
CALL_S = 3600.0


@dataclass
class _Question:
    pid: int
    task: asyncio.Task[None]
    asked_at: float
    reported: bool = False


class MailboxWatch:
    """Pings the mailbox of each given process. For the loop thread only.

    Time during which this process itself was not running (it was stopped, or the machine is overloaded) does not count:
    the other processes may not have been running either, and their answers may be waiting to be read.
    """

    def __init__(
        self,
        run: RunDir,
        sockets: SupervisorSockets,
        *,
        ready: Callable[[], Iterator[tuple[Key, int]]],
        on_silent: Callable[[Key, int, str], None],
        on_unreachable: Callable[[], None],
    ) -> None:
        """`ready` yields the (key, pid) of each process to ask. `on_silent` is called with the (key, pid, cause) of
        each process that counts as hung. `on_unreachable` is called if the folder of the sockets is gone, so that no
        process can connect to another one."""
        self._run = run
        self._sockets = sockets
        self._ready = ready
        self._on_silent = on_silent
        self._on_unreachable = on_unreachable
        self._questions: dict[Key, _Question] = {}
        self._longest_gap_s: dict[str, float] = {}
        """The longest time that an answer has taken, by service."""
        self._seen_at = time.monotonic()
        self._now = 0.0
        """Seconds that this process has run since the watch was created; time when it was stopped hardly counts."""

    async def watch(self) -> None:
        """Run until cancelled."""
        while True:
            now = self._time()
            if not self._run.sockets.is_dir():
                self._on_unreachable()
                return
            ready = dict(self._ready())
            for key in [key for key, question in self._questions.items() if ready.get(key) != question.pid]:
                self._questions.pop(key).task.cancel()  # that process has ended
            for key, pid in ready.items():
                question = self._questions.get(key)
                if question is None or (question.task.done() and now >= question.asked_at + PING_EVERY_S):
                    self._questions[key] = _Question(pid, asyncio.create_task(self._ask(key, now)), now)
                elif (
                    not question.task.done() and not question.reported and now - question.asked_at > self._limit_s(key)
                ):
                    question.reported = True
                    self._on_silent(key, pid, f"no answer for {now - question.asked_at:.0f} s")
            await asyncio.sleep(min(TICK_S, PING_EVERY_S))

    async def close(self) -> None:
        tasks = [question.task for question in self._questions.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _limit_s(self, key: Key) -> float:
        return max(SILENCE_S, SLOWNESS * self._longest_gap_s.get(key[0], 0.0))

    def _time(self) -> float:
        seen_at = time.monotonic()
        self._now += min(seen_at - self._seen_at, 2 * TICK_S)
        self._seen_at = seen_at
        return self._now

    async def _ask(self, key: Key, asked_at: float) -> None:
        with contextlib.suppress(RpcError):  # it answered with an error, or not in time
            await self._sockets.local(key).call(Ping(), Pong, deadline_s=CALL_S)
        gap_s = self._time() - asked_at
        self._longest_gap_s[key[0]] = max(gap_s, self._longest_gap_s.get(key[0], 0.0))

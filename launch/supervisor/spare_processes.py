"""Starts and watches the spare processes of a run (`shared.actor.spare`), and hands them to starting services."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import psutil
import structlog

from launch.supervisor.plan import SUPERVISOR, Key
from launch.supervisor.programs import Child, Programs
from launch.supervisor.spares import SpareKind, SpareRules
from proto.messages import SpareRow
from shared.rundir import RunDir

MIB = 1 << 20


@dataclass(frozen=True)
class SpareNotice:
    """A message for people: how much memory the spares use, or the reason why a kind has none."""

    text: str


class SpareProcesses:
    """The spares of one run. The object belongs to the main thread's event loop, on which it was created."""

    def __init__(
        self,
        run: RunDir,
        programs: Programs,
        keys: Iterable[Key],
        imports: Mapping[str, Sequence[str]],
        *,
        command: Callable[[Key], Sequence[str]],
        after_s: float,
        calm: Callable[[], bool],
        on_notice: Callable[[SpareNotice], None],
    ) -> None:
        """`keys` are the processes that may start from a spare. `imports` gives the imports of a spare, by service.
        `command` returns the command that starts a process without a spare. `calm` returns whether a spare may be
        started now. No spare is started earlier than `after_s` seconds after `calm` first returns True.
        """
        self._run = run
        self._programs = programs
        self._kinds = {key: programs.kind(key) for key in keys}
        self._imports = imports
        self._command = command
        self._after_s = after_s
        self._calm = calm
        self._begin_at: float | None = None
        self._on_notice = on_notice
        self._rules = SpareRules(self._kinds.values())
        self._children: dict[SpareKind, tuple[Child, socket.socket]] = {}
        self._reported = False
        self._loop = asyncio.get_running_loop()
        self._log = structlog.get_logger(SUPERVISOR)

    def refill(self) -> None:
        """Start the next missing spare, if it is due."""
        calm, now = self._calm(), self._loop.time()
        if calm and self._begin_at is None:
            self._begin_at = now + self._after_s
            self._loop.call_at(self._begin_at, self.refill)
        if self._begin_at is None or now < self._begin_at:
            return
        kind = self._rules.due(calm=calm)
        if kind is not None:
            self._start(kind)

    def adopt(self, key: Key, command: Sequence[str], output: BinaryIO) -> Child | None:
        """Turn a spare into the process `key` that `command` would start.

        Return that process, or None if there is no usable spare.
        """
        kind = self._kinds.get(key)
        if kind is None or not self._rules.take(kind):
            return None
        child, orders = self._release(kind)
        with orders:
            try:
                socket.send_fds(orders, [json.dumps(command[2:]).encode()], [output.fileno()])
            except OSError as error:  # the spare has just died
                self._log.warning("spare lost", kind=kind.service, pid=child.process.pid, error=str(error))
                child.process.kill()
                self._programs.reap(child)
                return None
        child.process.send_signal(signal.SIGCONT)  # someone may have stopped it
        self._log.info("spare used", kind=kind.service, pid=child.process.pid)
        return child

    def rows(self) -> list[SpareRow]:
        return [
            SpareRow(service=kind.service, pid=spare.pid, warm=spare.warm, rss_bytes=rss_bytes(spare.pid))
            for kind, spare in self._rules.spares.items()
        ]

    def close(self) -> None:
        """Kill all spares. No spare is started afterwards, provided that `calm` never returns True again."""
        for kind in list(self._children):
            child, orders = self._release(kind)
            orders.close()
            child.process.kill()
            self._programs.reap(child)
        self._rules.spares.clear()

    def _start(self, kind: SpareKind) -> None:
        keys = [key for key, each in self._kinds.items() if each == kind]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        size = max(len(_bytes(self._command(key))) for key in keys)
        command = [sys.executable, "-m", "shared.actor.spare", str(theirs.fileno()), "--run", str(self._run.path)]
        # The command line of the service will take the place of this one.
        command += ["-" * (size - len(_bytes(command)) - 1)] if size > len(_bytes(command)) + 1 else []
        ours.send(json.dumps(self._imports[kind.service]).encode())  # the socket buffers this until the spare reads it
        try:
            with theirs, (self._run.logs / f"{kind.service}-spare.out").open("wb") as output:
                child = self._programs.start(keys[0], command, output, (theirs.fileno(),))
        except OSError as error:
            ours.close()
            self._give_up(kind, self._rules.give_up(kind, str(error)))
            return
        ours.setblocking(False)
        self._children[kind] = child, ours
        self._rules.started(kind, child.process.pid)
        self._loop.add_reader(child.descriptor, self._on_exit, kind)
        self._loop.add_reader(ours, self._on_warm, kind)

    def _release(self, kind: SpareKind) -> tuple[Child, socket.socket]:
        """Stop watching the spare of `kind`. Return its process and its socket."""
        child, orders = self._children.pop(kind)
        self._loop.remove_reader(child.descriptor)
        self._loop.remove_reader(orders)
        return child, orders

    def _on_warm(self, kind: SpareKind) -> None:
        child, orders = self._children[kind]
        self._loop.remove_reader(orders)
        try:
            warm = bool(orders.recv(1))
        except OSError:
            warm = False
        if not warm:
            return  # it has died, which its pidfd also reports
        self._rules.warmed(kind)
        self._log.info("spare warm", kind=kind.service, pid=child.process.pid, rss_bytes=rss_bytes(child.process.pid))
        if self._rules.complete and not self._reported:
            self._reported = True
            sizes = ", ".join(f"{row.service} {row.rss_bytes / MIB:.0f} MiB" for row in self.rows())
            self._on_notice(
                SpareNotice(f"spare processes for fast restarts: {sizes} (run.spares: false leaves them out)")
            )
        self.refill()

    def _on_exit(self, kind: SpareKind) -> None:
        child, orders = self._release(kind)
        orders.close()
        status = self._programs.reap(child)
        self._log.warning("spare died", kind=kind.service, pid=child.process.pid, status=status)
        cause = self._rules.exited(kind, status, self._loop.time())
        if cause:
            self._give_up(kind, cause)
        self.refill()

    def _give_up(self, kind: SpareKind, cause: str) -> None:
        log = self._run.logs / f"{kind.service}-spare.out"
        self._on_notice(SpareNotice(f"{kind.service}: starts without a spare process from now on: {cause}, log: {log}"))


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes, or 0 if the process is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss) if pid else 0
    except psutil.Error:
        return 0


def _bytes(command: Sequence[str]) -> bytes:
    return b"\0".join(map(os.fsencode, command)) + b"\0"

"""Starts and watches the spare processes of a run (`launch.spares.spare`), and has services forked from them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import structlog

from launch.processes.plan import SUPERVISOR, Key, Resources
from launch.processes.programs import Child, Programs, own_environment, rss_bytes
from launch.spares.state import SpareKind, SpareRules
from proto.messages import SpareRow
from shared.rundir import RunDir, service_name

MIB = 1 << 20
SPARE: Key = ("spare", 0)
"""Stands for a spare wherever the key of a process is needed."""
COMMAND_BYTES = 1024
"""Length of a spare's command line, which each fork overwrites with the command line of its service."""
FORK_LIMIT_S = 5.0
"""Maximum time, in seconds, for a warm spare to fork. The supervisor does nothing else during this time."""


@dataclass(frozen=True)
class SpareNotice:
    """A notice for the user: how much memory the spares use, or the reason why a kind has none."""

    text: str


class SpareProcesses:
    """The spares of one run. The object belongs to the main thread's event loop, on which it was created."""

    def __init__(
        self,
        run: RunDir,
        programs: Programs,
        kinds: Iterable[SpareKind],
        *,
        start_limit_s: float,
        on_settled: Callable[[Collection[str]], None],
        on_notice: Callable[[SpareNotice], None],
    ) -> None:
        """A kind whose spare does not finish its imports within `start_limit_s` seconds is given up. `on_settled` is
        called with the names of services once their spare can be used or has failed."""
        self._run = run
        self._programs = programs
        self._kinds = list(kinds)
        self._start_limit_s = start_limit_s
        self._on_settled = on_settled
        self._on_notice = on_notice
        self._rules = SpareRules(self._kinds)
        self._children: dict[SpareKind, tuple[Child, socket.socket, asyncio.TimerHandle]] = {}
        self._reported = False
        self._loop = asyncio.get_running_loop()
        self._log = structlog.get_logger(SUPERVISOR)

    def fill(self) -> None:
        """Start the missing spares."""
        while missing := self._rules.missing:
            self._start(missing[0])

    def fork(self, key: Key, resources: Resources, command: Sequence[str], output: BinaryIO) -> Child | None:
        """Fork a spare to run `command` as the process `key`. Return the fork, or None if no spare can be used."""
        kind = next((candidate for candidate in self._kinds if key[0] in candidate.services), None)
        if kind is None or not self._rules.usable(kind):
            return None
        spare, orders, _ = self._children[kind]
        spare.signal(signal.SIGCONT)  # someone may have stopped it
        ours, theirs = socket.socketpair()
        order = json.dumps([command[2:], own_environment(resources)]).encode()
        try:
            with ours:
                with theirs:
                    socket.send_fds(orders, [order], [output.fileno(), theirs.fileno()])
                ours.settimeout(FORK_LIMIT_S)
                if not (pid := ours.recv(32)):
                    raise ConnectionError("the fork has ended")
                child = self._programs.adopt(key, int(pid))
                with contextlib.suppress(OSError):  # it has just died, which its pidfd reports
                    ours.send(b"!")
        except OSError as error:  # it has just died, was stopped again, or cannot fork
            self._log.warning("spare lost", services=kind.services, pid=spare.pid, error=str(error))
            self._rules.lost(kind)
            spare.signal(signal.SIGKILL)
            return None
        self._log.info("spare forked", name=service_name(*key), pid=child.pid)
        return child

    def rows(self) -> list[SpareRow]:
        return [
            SpareRow(services=list(kind.services), pid=spare.pid, warm=spare.warm, rss_bytes=rss_bytes(spare.pid))
            for kind, spare in self._rules.spares.items()
        ]

    def close(self) -> None:
        """Kill all spares. Services that were forked from them keep running."""
        for kind in list(self._children):
            child = self._release(kind)
            child.signal(signal.SIGKILL)
            self._programs.reap(child)
        self._rules.spares.clear()

    def _start(self, kind: SpareKind) -> None:
        try:
            child, ours = self._started(kind)
        except OSError as error:
            self._give_up(kind, str(error))
            self._loop.call_soon(self._on_settled, kind.services)
            return
        limit = self._loop.call_later(self._start_limit_s, self._on_limit, kind)
        self._children[kind] = child, ours, limit
        self._rules.started(kind, child.pid)
        self._loop.add_reader(child.descriptor, self._on_exit, kind)
        self._loop.add_reader(ours, self._on_warm, kind)

    def _started(self, kind: SpareKind) -> tuple[Child, socket.socket]:
        """Start a spare. Return it with the socket for its orders. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "launch.spares.spare", str(theirs.fileno()), "--run", str(self._run.path)]
        command.append("-" * max(COMMAND_BYTES - sum(len(os.fsencode(argument)) + 1 for argument in command), 1))
        try:
            with theirs, self._output(kind).open("ab") as output:
                ours.send(json.dumps(kind.imports).encode())  # the socket buffers this until the spare reads it
                child = self._programs.start(SPARE, Resources(), command, output, (theirs.fileno(),))
        except OSError:
            ours.close()
            raise
        ours.setblocking(False)
        return child, ours

    def _release(self, kind: SpareKind) -> Child:
        """Stop watching the spare of `kind`."""
        child, orders, limit = self._children.pop(kind)
        limit.cancel()
        self._loop.remove_reader(child.descriptor)
        self._loop.remove_reader(orders)
        orders.close()
        return child

    def _on_warm(self, kind: SpareKind) -> None:
        child, orders, limit = self._children[kind]
        self._loop.remove_reader(orders)
        try:
            warm = bool(orders.recv(1))
        except OSError:
            warm = False
        if not warm:
            return  # it has died, which its pidfd also reports
        limit.cancel()
        self._rules.warmed(kind)
        self._log.info("spare warm", services=kind.services, pid=child.pid, rss_bytes=rss_bytes(child.pid))
        if self._rules.complete and not self._reported:
            self._reported = True
            size = sum(row.rss_bytes for row in self.rows())
            names = ", ".join(kind.name for kind in self._rules.spares)
            self._on_notice(SpareNotice(f"libraries imported once for {names}: {size / MIB:.0f} MiB"))
        self._on_settled(kind.services)

    def _on_exit(self, kind: SpareKind) -> None:
        child = self._release(kind)
        status = self._programs.reap(child)
        self._log.warning("spare died", services=kind.services, pid=child.pid, status=status)
        cause = self._rules.exited(kind, status, self._loop.time())
        if cause:
            self._report(kind, cause)
        self._on_settled(kind.services)

    def _on_limit(self, kind: SpareKind) -> None:
        self._give_up(kind, f"its imports did not finish within {self._start_limit_s:g} s (run.start_limit_s)")
        self._children[kind][0].signal(signal.SIGKILL)

    def _give_up(self, kind: SpareKind, cause: str) -> None:
        self._report(kind, self._rules.give_up(kind, cause))

    def _report(self, kind: SpareKind, cause: str) -> None:
        self._log.warning("spare given up", services=kind.services, cause=cause)
        text = f"{kind.name}: started without a spare process from now on: {cause}, log: {self._output(kind)}"
        self._on_notice(SpareNotice(text))

    def _output(self, kind: SpareKind) -> Path:
        return self._run.logs / f"spare-{self._kinds.index(kind)}.out"

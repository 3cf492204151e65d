"""The launcher's side of placement by Ray: starts the keeper and passes its reports on.

The keeper (`launch.placement.ray_keeper`) is a separate process. If it dies, Ray kills its actors, and the agents of
all hosts exit as well. The keeper and the agents are then started again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from select import select
from typing import IO

import msgspec
import structlog

from launch.checks.findings import Findings
from launch.placement.desk import HostDesk
from launch.placement.facts import clock_ahead, facts, refusals
from launch.placement.ray_keeper import KeeperOrder, News
from launch.processes.programs import child_environment
from proto.messages import ErrorCode, HostFacts
from shared.rpc.errors import RpcError
from shared.security import access as accesses
from shared.security.access import Access
from shared.topology import Topology

OPEN_S = 180.0
"""Maximum time, in seconds, for the cluster to answer and for its hosts to check themselves."""
SILENCE_S = 45.0
"""Maximum time, in seconds, until the cluster gives its first answer."""
AGAIN_S = 5.0
"""Seconds before a keeper that died is started again."""
CLOSE_S = 20.0
"""Maximum time, in seconds, for the keeper to stop the agents and to exit."""
_LINE_BYTES = 1 << 16


class RayEngine:
    """The hosts of a run on a Ray cluster. Always call `close`, even after an error."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._address = os.environ.get("RAY_ADDRESS", "auto")
        self._keeper: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._desk: HostDesk | None = None
        self._started: KeeperOrder | None = None
        self._log = structlog.get_logger("ray")
        self.address = ""
        """The address of this node in the cluster, once `check` has returned."""
        self.machines: dict[str, str] = {}
        """The host name of the node of each host, once `check` has returned."""

    def check(self, path: Path, findings: Findings) -> None:
        """Connect to the cluster, find a node for each host and have it check itself. `path` is the run directory.

        A host on which nothing has to run may have no node yet.
        """
        self._path = path.absolute()
        needed = {spec.host for spec in self._topology.away_plan() if spec.service != "batch-store"}
        try:
            self._spawn(self._open_order())
            home = facts()  # while the keeper connects
            for news in self._until_ready():
                match news.kind:
                    case "opened":
                        self.address = news.address
                    case "failed" | "refused":
                        findings.errors.append(f"placement: {news.text}")
                    case "missing" if news.host in needed:
                        findings.errors.append(f"placement: {news.text}")
                    case "missing":
                        text = f"placement: {news.text}. The run can start without this host, which joins later"
                        findings.warnings.append(text)
                    case "warning":
                        findings.warnings.append(f"placement: {news.text}")
                    case "checked":
                        there = HostFacts(**msgspec.json.decode(news.facts))
                        self.machines[news.host] = there.name
                        there = msgspec.structs.replace(there, clock_s=clock_ahead(*news.times))
                        problems = refusals(self._topology, home, news.host, there)
                        findings.errors.extend(f"host {news.host}: {problem}" for problem in problems)
                        if there.niceness > home.niceness:
                            text = f"Ray runs its processes with niceness {there.niceness}, so others have priority"
                            remedy = "set RAY_worker_niceness=0 for `ray start`"
                            findings.warnings.append(f"host {news.host}: {text}; {remedy}")
        except RpcError as error:
            findings.errors.append(str(error))

    def start(self, access: Access, desk: HostDesk) -> None:
        """Keep an agent on every host from now on, and report losses to `desk`. Runs on the supervisor's event loop."""
        self._desk = desk
        secret = base64.b64encode(accesses.encode(access)).decode()
        self._started = msgspec.structs.replace(self._open_order(), kind="start", access=secret)
        self._send(self._started)
        self._watch()

    def close(self) -> None:
        """Stop all remaining agents and the keeper, and wait for the keeper to exit."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        self._unwatch(keeper)
        assert keeper.stdin is not None  # noqa: S101  # it is a pipe
        keeper.stdin.close()
        _end(keeper, CLOSE_S)

    def _open_order(self) -> KeeperOrder:
        transport = self._topology.transport
        hosts = {name: host.gpus for name, host in self._topology.placement.hosts.items()}
        hosts = {name: gpus for name, gpus in hosts.items() if name != self._topology.home}
        return KeeperOrder(
            "open",
            address=self._address,
            hosts=hosts,
            home=self._topology.home or "",
            listen=transport.listen or "",
            ports=[transport.scheduler_port, transport.supervisor_port],
            topology=self._topology.to_yaml(),
        )

    # ---- the keeper

    def _spawn(self, order: KeeperOrder) -> None:
        self._rest = b""
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "launch.placement.ray_keeper", str(self._path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(1),
            start_new_session=True,
        )
        self._send(order)

    def _send(self, order: KeeperOrder) -> None:
        assert self._keeper is not None  # noqa: S101
        assert self._keeper.stdin is not None  # noqa: S101
        try:
            self._keeper.stdin.write(msgspec.json.encode(order) + b"\n")
            self._keeper.stdin.flush()
        except BrokenPipeError:
            self._log.warning("the keeper has ended")  # the end of its output also reports this

    def _output(self) -> IO[bytes]:
        assert self._keeper is not None  # noqa: S101
        assert self._keeper.stdout is not None  # noqa: S101
        return self._keeper.stdout

    def _until_ready(self) -> Iterator[News]:
        """Yield the keeper's reports until every host is checked.

        Raises RpcError if the keeper takes too long or dies.
        """
        until, silent = time.monotonic() + OPEN_S, time.monotonic() + SILENCE_S
        while True:
            limit = until if self.address else min(until, silent)
            readable, _, _ = select([self._output()], [], [], max(0.0, limit - time.monotonic()))
            if not readable:
                text = f"placement: the Ray cluster at {self._address!r} is not responding"
                raise RpcError(ErrorCode.DEADLINE, f"{text}; check its address and `ray status`")
            news = self._read()
            if news is None:
                raise RpcError(ErrorCode.INTERNAL, "placement: the process that speaks to Ray died; see `ray status`")
            for event in news:
                if event.kind == "ready":
                    return
                yield event
                if event.kind == "failed":
                    return

    def _read(self) -> list[News] | None:
        """Return the messages that have arrived as whole lines, or None at the end of the output."""
        data = os.read(self._output().fileno(), _LINE_BYTES)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [msgspec.json.decode(line, type=News) for line in lines]

    def _watch(self) -> None:
        asyncio.get_running_loop().add_reader(self._output().fileno(), self._on_output)

    def _unwatch(self, keeper: subprocess.Popen[bytes]) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if keeper.stdout is not None:
            loop.remove_reader(keeper.stdout.fileno())

    def _on_output(self) -> None:
        desk = self._desk
        assert desk is not None  # noqa: S101  # set by `start`
        news = self._read()
        if news is None:
            self._on_end(desk)
            return
        for event in news:
            match event.kind:
                case "lost":
                    desk.lose(event.host, event.text)
                case "told" | "warning":
                    desk.tell(event.text)
                case "refused" if desk.book.hosts[event.host].report is None:
                    desk.on_unable(event.text)  # another start would not help
                case "failed" | "refused" | "missing":
                    desk.tell(event.text)
                case "opened" | "checked" | "ready":
                    pass

    def _on_end(self, desk: HostDesk) -> None:
        """Start the keeper again. Its actors ended with it."""
        keeper, self._keeper = self._keeper, None
        if keeper is None or self._started is None:
            return
        self._unwatch(keeper)
        _end(keeper, 0.0)
        for host in self._started.hosts:
            desk.lose(host, "the process that speaks to Ray died")
        asyncio.get_running_loop().call_later(AGAIN_S, self._restart, self._started)

    def _restart(self, started: KeeperOrder) -> None:
        self._spawn(msgspec.structs.replace(started, kind="open", access=""))
        self._send(started)
        self._watch()


def _end(keeper: subprocess.Popen[bytes], limit_s: float) -> None:
    """Wait for the keeper to exit, and kill it after `limit_s` seconds. Ray then kills its actors.

    With `--detach`, the keeper is not a child of this process, so its exit shows only in the end of its output.
    """
    assert keeper.stdout is not None  # noqa: S101  # it is a pipe
    output, until = keeper.stdout.fileno(), time.monotonic() + limit_s
    while select([output], [], [], max(0.0, until - time.monotonic()))[0]:
        if not os.read(output, _LINE_BYTES):
            break
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper.pid, signal.SIGKILL)
    keeper.wait()

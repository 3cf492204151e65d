"""A real service of any name that does no work and never imports torch. Files in the run directory control it.

`fail-<service>`: the service fails while it is starting. `refuse-<service>`: the service refuses to start, with a
one-line error. `hang-<service>`: the service hangs in C, holding the interpreter's lock. `finish`: the driver is done.
The service `scheduler` answers registrations and status.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys

from proto.messages import (
    GetStatus,
    Heartbeat,
    HeartbeatAck,
    Register,
    Registered,
    ServiceRow,
    Status,
)
from shared.actor.service import Service
from shared.rpc.errors import BadInput
from shared.rpc.mailbox import Call
from shared.rundir import RunDir

POLL_S = 0.02


class TinyService(Service):
    async def start(self) -> None:
        if (self.run.path / f"fail-{self.NAME}").exists():
            raise RuntimeError(f"{self.NAME} was told to fail")
        if (self.run.path / f"refuse-{self.NAME}").exists():
            raise BadInput(f"model of {self.NAME}: cannot be loaded")
        if self.NAME == "rollout":  # Like an engine, this service has ranks of its own.
            sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)", str(self.run.path), "rank"]
            subprocess.Popen(sleep, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with (self.run.path / "starts").open("a") as file:
            file.write(f"{self.NAME} {os.getpid()}\n")

    async def serve(self) -> None:
        self.keep(self._until_told_to_hang())
        await self.stopping.wait()

    async def _until_told_to_hang(self) -> None:
        while not (self.run.path / f"hang-{self.NAME}").exists():
            await asyncio.sleep(POLL_S)
        (self.run.path / f"hang-{self.NAME}").unlink()
        ctypes.PyDLL(None).sleep(600)


class TinyDriver(TinyService):
    NAME = "policy-trainer"

    async def serve(self) -> None:
        while not (self.run.path / "finish").exists():
            await asyncio.sleep(POLL_S)
        self.run.export.mkdir(exist_ok=True)


class TinyScheduler(TinyService):
    """A scheduler that lists the registered services and reports a run of one step, which is done once the file
    `finish` exists."""

    NAME = "scheduler"
    HEARTBEATS = False

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self._rows: dict[tuple[str, int], ServiceRow] = {}
        self.mailbox.handle(Register, self._on_register)
        self.mailbox.handle(Heartbeat, self._on_heartbeat)
        self.mailbox.handle(GetStatus, self._on_status)

    def _on_register(self, request: Register, call: Call) -> Registered:
        self._rows[(request.service, request.instance)] = ServiceRow(
            request.service, request.instance, "STARTING", request.pid, request.host, request.incarnation, 0.0, 0
        )
        return Registered(scheduler_incarnation=self.incarnation, heartbeat_s=1.0)

    def _on_heartbeat(self, beat: Heartbeat, call: Call) -> HeartbeatAck:
        key = (beat.service, beat.instance)
        known = key in self._rows and self._rows[key].incarnation == beat.incarnation
        if known:
            row = self._rows[key]
            self._rows[key] = ServiceRow(
                row.service, row.instance, beat.state, row.pid, row.host, row.incarnation, 0.0, beat.rss_bytes
            )
        return HeartbeatAck(scheduler_incarnation=self.incarnation, registered=known)

    def _on_status(self, _: GetStatus, call: Call) -> Status:
        return Status(
            run=self.run.name,
            step=int((self.run.path / "finish").exists()),
            steps=1,
            lineage=0,
            version=0,
            services=list(self._rows.values()),
            tasks={"PENDING": 3},
            store_bytes=0,
            store_limit_bytes=1 << 20,
            store_shards=0,
            last_row={},
        )


def service_class(name: str) -> type[TinyService]:
    for known in (TinyDriver, TinyScheduler):
        if name == known.NAME:
            return known
    return type("TinyOther", (TinyService,), {"NAME": name})

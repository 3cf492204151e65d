"""The tracker service, with one instance for each tracker in the topology. The run neither depends on it nor waits for
it.

The tracker library runs on a thread of its own, so the mailbox still answers while the library hangs. If the library
hangs for too long, a new process replaces this one and continues after the rows that the tracker already holds.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from proto import messages
from proto.messages import ErrorCode, Trouble, TroubleKind
from services.tracker import ledger
from services.tracker.exporter import missing
from services.tracker.feeder import Feeder, end_of, start
from shared import topology
from shared.actor.service import PEER_LOST_STATUS, Service
from shared.rpc.errors import BadInput, RpcError
from shared.rundir import RunDir

LOOK_S = 0.5
SLOW_S = 30.0
"""Seconds without an answer after which a tracker counts as hanging."""
HANG_S = 300.0
"""Seconds without an answer after which this process exits, so that another process can try."""
END_S = 5.0
"""Maximum time, in seconds, that a run waits for the tracker when it ends."""


class TrackerService(Service):
    """Feeds the tracker that its instance number selects."""

    NAME = "tracker"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self._feeder: Feeder | None = None
        self._lock = -1
        self.progress = lambda: self._feeder.rows_sent if self._feeder is not None else 0

    async def start(self) -> None:
        loaded = topology.load_resolved(self.run.topology)
        names = list(loaded.services.monitor.trackers)
        if self.instance >= len(names):
            text = f"{self.name}: the topology has {len(names)} trackers; start instances 0 to {len(names) - 1}"
            raise BadInput(text)
        name = names[self.instance]
        if lacking := missing(name):
            text = f"{name}: {', '.join(lacking)} not installed in this environment; run `make setup-trackers`"
            raise BadInput(text)
        self._lock = ledger.hold(self.run.path, name)
        self._feeder = Feeder(self.run, loaded, name)
        start(self._feeder)

    async def serve(self) -> None:
        if (feeder := self._feeder) is None:
            return
        while not feeder.refused:
            await asyncio.sleep(LOOK_S)
            if self._hanging_s() > HANG_S:
                self.exit_status = PEER_LOST_STATUS
                raise RpcError(ErrorCode.DEADLINE, f"{feeder.name}: no answer for {HANG_S:g} s")
        raise BadInput(f"{feeder.refused}; {feeder.name} will not receive any further steps")

    async def drain(self) -> None:
        if self._feeder is None:
            return
        self._feeder.end(end_of(self.run))
        await self.loop.run_in_executor(None, self._feeder.done.wait, END_S)
        if rest := await self.loop.run_in_executor(None, ledger.unsent, self.run.path, self._feeder.name):
            self.log.warning("not everything was sent", rest=rest)

    def heartbeat(self) -> messages.Heartbeat:
        return msgspec.structs.replace(super().heartbeat(), troubles=self._troubles())

    def _troubles(self) -> list[Trouble]:
        feeder = self._feeder
        if feeder is None:
            return []
        if feeder.problem:
            return [Trouble(TroubleKind.TRACKER, feeder.problem)]
        if self._hanging_s() > SLOW_S:
            return [Trouble(TroubleKind.TRACKER, f"{feeder.name}: no answer; rows are waiting in metrics.jsonl")]
        return []

    def _hanging_s(self) -> float:
        since = self._feeder.busy_since if self._feeder is not None else None
        return 0.0 if since is None else time.monotonic() - since

"""The tracker service, which feeds every experiment tracker in the topology.

The run neither depends on it nor waits for it.
"""

from __future__ import annotations

import asyncio
import threading

import msgspec

from proto import messages
from proto.messages import Trouble, TroubleKind
from services.tracker import ledger
from services.tracker.feeder import Feeder, end_of
from shared import topology
from shared.actor.service import Service
from shared.rpc.errors import BadInput
from shared.rundir import RunDir

LOOK_S = 0.5
END_S = 5.0
"""Maximum time, in seconds, that a run waits for the trackers when it ends."""


class TrackerService(Service):
    """Feeds the trackers of a run. Their libraries run on other threads, so the mailbox answers while they hang."""

    NAME = "tracker"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        loaded = topology.load_resolved(run.topology)
        self._names = list(loaded.services.monitor.trackers)
        self._feeder = Feeder(run, loaded, self._names)
        self._lock = -1
        self.progress = lambda: sum(outlet.sent for outlet in self._feeder.outlets)

    async def start(self) -> None:
        if not self._names or self.instance > 0:
            raise BadInput(f"{self.name}: the topology has {len(self._names)} trackers, and instance 0 feeds them all")
        self._lock = ledger.hold(self.run.path)
        threading.Thread(target=self._feeder.run, name="feeder", daemon=True).start()

    async def serve(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if all(outlet.given_up for outlet in self._feeder.outlets):
                raise BadInput("; ".join(outlet.given_up for outlet in self._feeder.outlets))

    async def drain(self) -> None:
        self._feeder.end(end_of(self.run))
        until = self.loop.time() + END_S
        while not self._feeder.done and (left_s := until - self.loop.time()) > 0:
            await self.loop.run_in_executor(None, self._feeder.wait, left_s)
        for name in self._names:
            if rest := await self.loop.run_in_executor(None, ledger.unsent, self.run.path, name):
                self.log.warning("not everything was sent", rest=rest)

    def heartbeat(self) -> messages.Heartbeat:
        problems = [outlet.problem for outlet in self._feeder.outlets if outlet.problem]
        troubles = [Trouble(TroubleKind.TRACKER, "; ".join(problems))] if problems else []
        return msgspec.structs.replace(super().heartbeat(), troubles=troubles)

"""The tracker service, which feeds every experiment tracker in the topology.

The run neither depends on it nor waits for it.
"""

from __future__ import annotations

import asyncio

import msgspec

from proto import messages
from proto.messages import Trouble, TroubleKind
from services.tracker import ledger
from services.tracker.outlet import CHECK_S, Outlet, end_of, finish
from shared import topology
from shared.actor.service import Service
from shared.rpc.errors import BadInput
from shared.rundir import RunDir

END_S = 5.0
"""Maximum time, in seconds, that a run waits for the trackers when it ends."""


class TrackerService(Service):
    """Feeds the trackers of a run. Their libraries run on other threads, so the mailbox answers while they hang."""

    NAME = "tracker"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        loaded = topology.load_resolved(run.topology)
        self._outlets = [Outlet(run, loaded, name) for name in loaded.monitor.trackers]
        self.progress = lambda: sum(outlet.sent for outlet in self._outlets)

    async def start(self) -> None:
        if not self._outlets or self.instance > 0:
            raise BadInput(
                f"{self.name}: the topology has {len(self._outlets)} trackers, and instance 0 feeds them all"
            )
        ledger.hold(self.run.path)
        for outlet in self._outlets:
            outlet.start()

    async def serve(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            for outlet in self._outlets:
                outlet.check()
            if all(outlet.given_up for outlet in self._outlets):
                raise BadInput("; ".join(outlet.given_up for outlet in self._outlets))

    async def drain(self) -> None:
        await self.loop.run_in_executor(None, finish, self._outlets, end_of(self.run), END_S)
        for outlet in self._outlets:
            if rest := await self.loop.run_in_executor(None, ledger.unsent, self.run.path, outlet.name):
                self.log.warning("not everything was sent", rest=rest)

    def heartbeat(self) -> messages.Heartbeat:
        problems = [outlet.problem for outlet in self._outlets if outlet.problem]
        troubles = [Trouble(TroubleKind.TRACKER, "; ".join(problems))] if problems else []
        return msgspec.structs.replace(super().heartbeat(), troubles=troubles)

"""The actor around the state machine: requests in, one journal commit a burst, then the effects out.

It decides nothing. Nothing leaves before the event that caused it is durable (DESIGN, "The actors").
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec

from proto.messages import Ack, Clear, ErrorCode, GetInventory, Inventory, KillInstance, Resolved
from services.scheduler import snapshot
from services.scheduler.devices import DeviceTurns
from services.scheduler.events import (
    Answer,
    Asked,
    ClearDone,
    DiscardRows,
    Effect,
    Event,
    Fail,
    KillProcess,
    Listed,
    Persist,
    ProcessGone,
    RequestInventory,
    Rewound,
    SaveEval,
    SaveStep,
    SendClear,
    StopClear,
    Tell,
    TellDevices,
    Tick,
    WriteRow,
)
from services.scheduler.journal import Journal
from services.scheduler.metrics_file import MetricsFile
from services.scheduler.planning import configuration, device_limits, make_plan
from services.scheduler.state import Scheduler
from shared.actor.service import Service
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import DEFERRED, Call
from shared.rpc.mailbox import Answer as Deferral
from shared.rundir import RunDir, parse_service_name, service_name
from shared.topology import TopologyError, load

TICK_S = 0.1
STORE_CALL_S = 5.0
SNAPSHOT_S = 0.02
"""Of every tick, at most, for a snapshot on its way to disk."""
SUPERVISOR = "supervisor"
SUPERVISOR_CALL_S = 5.0


class SchedulerService(Service):
    """`python -m services.scheduler`: see the module's first sentence."""

    NAME: ClassVar[str] = "scheduler"
    HEARTBEATS: ClassVar[bool] = False

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self._effects: list[Effect] = []
        self._discards: list[DiscardRows] = []
        self._state: Scheduler
        self._journal: Journal
        self._metrics: MetricsFile
        self._jobs: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None]
        self._listing: set[str] = set()
        self._clearing: dict[str, asyncio.Task[None]] = {}
        """The tracked clear that is on its way to a store."""

    # ---------------------------------------------------------------------------------------------- life

    def bind(self) -> str:
        """Rebuild the state, then open the mailbox: nobody is answered from half a journal."""
        self._failed = asyncio.get_running_loop().create_future()
        self._open()
        for kind in self._state.requests:
            self.mailbox.handle(kind, self._ask)
        return self.mailbox.bind(self.context, self.run.endpoint(self.NAME, self.instance), self._flush)

    def _open(self) -> None:
        try:
            topology = load(self.run.topology)
        except TopologyError as error:
            raise RpcError(ErrorCode.BAD_REQUEST, "; ".join(str(error).splitlines())) from None
        plan, bad = make_plan(topology, self.run.topology)
        for row in bad:
            self.log.warning("row left out", row=row.index, line=row.line, cause=row.message)
        self._state = Scheduler(
            plan,
            lease_s=topology.lease.lease_s,
            incarnation=self.incarnation,
            devices=DeviceTurns(device_limits(topology)),
        )
        self._journal = Journal(self.run.journal, plan.fingerprint())
        self._rebuild()
        core = self._state.core
        self._metrics = MetricsFile(self.run.metrics, self._journal.rows_after, core.next_row - 1, core.lineage)
        self._state.last_row = self._journal.last_row()
        self._state.bad_rows = len(bad)
        self._take(self._state.begin(configuration(topology), self._now()))

    def _rebuild(self) -> None:
        resumed = self._journal.has_snapshot
        try:
            if resumed:
                self._state.core = snapshot.load(self._state.core.plan, self._journal.snapshot())
        except (msgspec.MsgspecError, KeyError, ValueError, TypeError) as error:
            cause = f"journal {self.run.journal}: snapshot cannot be read ({error}); restore the file from a backup"
            raise RpcError(ErrorCode.BAD_REQUEST, cause) from None
        count = 0
        for event in self._journal.events():
            self._state.replay(event)
            count += 1
        if resumed or count:
            self.log.info("journal replayed", events=count, step=self._state.core.committed_step)

    async def serve(self) -> None:
        """Let time pass, until a stop or a journal that cannot be written."""
        self._flush()
        while not self.stopping.is_set():
            await asyncio.wait({self._failed}, timeout=TICK_S)
            if self._failed.done():
                self._failed.result()
            self._take(self._state.handle(Tick(), self._now()))
            self._flush()
            self._write_snapshot()

    def _write_snapshot(self) -> None:
        """Go on with a snapshot for a share of the time; requests come in between."""
        until = self._now() + SNAPSHOT_S
        while self._journal.write_part() and self._now() < until:
            pass

    async def drain(self) -> None:
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        self._flush()

    async def close(self) -> None:
        await super().close()
        if hasattr(self, "_metrics"):
            self._metrics.close()
        if hasattr(self, "_journal"):
            self._journal.close()

    async def resolve(self, service: str, instance: int) -> Resolved:
        """From its own registry: nobody else knows."""
        return self._state.where(service, instance)

    # ---------------------------------------------------------------------------------------------- events

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _ask(self, request: Any, call: Call) -> Deferral:
        event = Asked(call, request, call.deadline, (call.incarnation, call.request_id))
        self._take(self._state.handle(event, self._now()))
        return DEFERRED

    def _happened(self, event: Event) -> None:
        self._take(self._state.handle(event, self._now()))
        self._flush()

    def _take(self, effects: Iterable[Effect]) -> None:
        """Journal what must be durable; keep the rest for `_flush`."""
        effects = list(effects)
        if any(isinstance(effect, DiscardRows) for effect in effects):
            self._flush()  # the rows of before are in the file, where they can be discarded
        for effect in effects:
            match effect:
                case Persist():
                    self._journal.append(effect.event, time.time())
                case SaveStep() | SaveEval():
                    self._journal.save(effect, time.time())
                case Rewound():
                    self._journal.save(effect, time.time())
                    self.log.warning("back to an earlier step", step=effect.step, committed=effect.committed)
                case DiscardRows():
                    self._journal.save(effect, time.time())
                    self._discards.append(effect)
                case WriteRow():
                    self._journal.save(effect, time.time())
                    self._effects.append(effect)
                case _:
                    self._effects.append(effect)

    def _flush(self) -> None:
        """End of a burst: commit once, then let the effects go."""
        if self._failed.done():
            return
        try:
            for discard in self._discards:  # before the commit: the file never has a row that the journal has not
                self._metrics.discard(discard.lineage, discard.step, discard.waiting)
            self._discards.clear()
            self._journal.commit()
            effects, self._effects = self._effects, []
            for effect in effects:
                self._carry_out(effect)
            if self._journal.due:
                self._journal.begin_snapshot(snapshot.begin(self._state.core))
        except Exception as error:  # what is left of the burst would be lost in silence
            self._failed.set_exception(error)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Answer():
                effect.ref.reply(effect.body)
            case Fail():
                error = RpcError(effect.code, effect.message, retry_after_s=effect.retry_after_s)
                effect.ref.fail(error)
            case SendClear():
                job = self._start(self._clear(effect))
                if effect.tracked:
                    self._clearing[effect.store] = job
            case StopClear():
                self._clearing.pop(effect.store).cancel()
            case RequestInventory():
                if effect.store not in self._listing:
                    self._listing.add(effect.store)
                    self._start(self._list(effect.store))
            case WriteRow():
                self._metrics.write(json.dumps(effect.row))
            case Tell():
                self.telemetry.emit(effect.topic, effect.values)
            case KillProcess():
                self._start(self._kill(effect))
            case TellDevices():
                parts = " ".join(effect.parts)
                self.log.info("devices", phase=effect.phase, holder=effect.name, holds=parts)
                self.telemetry.emit(f"devices/{effect.name}", {"phase": effect.phase, "holds": parts})

    async def _kill(self, effect: KillProcess) -> None:
        """Have the supervisor kill a process, however often it takes to learn that it is dead."""
        service, instance = effect.holder
        request = KillInstance(service=service, instance=instance, pid=effect.pid, cause=effect.cause)
        self.log.warning("to be killed", name=service_name(service, instance), pid=effect.pid, cause=effect.cause)
        while True:
            try:
                await self.client(SUPERVISOR).call(request, Ack, deadline_s=SUPERVISOR_CALL_S)
            except RpcError as error:
                self.log.warning("kill not confirmed", name=service_name(service, instance), error=str(error))
                await asyncio.sleep(max(error.retry_after_s, TICK_S))
                continue
            self._happened(ProcessGone(service, instance, effect.incarnation))
            return

    # ---------------------------------------------------------------------------------------------- stores

    def _start(self, work: Any) -> asyncio.Task[None]:
        job: asyncio.Task[None] = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    async def _clear(self, effect: SendClear) -> None:
        """Clear at one store; a tracked clear is tried until the store acknowledges."""
        client = self.client(*parse_service_name(effect.store))
        while True:
            try:
                await client.call(Clear(tasks=effect.tasks), Ack, deadline_s=STORE_CALL_S)
            except RpcError as error:
                self.log.warning("clear not acknowledged", store=effect.store, error=str(error))
                if not effect.tracked:
                    return
                await asyncio.sleep(max(error.retry_after_s, TICK_S))  # it may have come at once: do not spin
                continue
            if effect.tracked:
                self._happened(ClearDone(effect.store, len(effect.tasks)))
            return

    async def _list(self, store: str) -> None:
        """Go through a store's inventory once; the next round repeats what fails."""
        client = self.client(*parse_service_name(store))
        cursor = 0
        try:
            while True:
                page = await client.call(GetInventory(cursor=cursor), Inventory, deadline_s=STORE_CALL_S)
                if page.tasks:
                    self._happened(Listed(store, list(page.tasks)))
                cursor = page.cursor
                if cursor == 0:
                    return
        except RpcError as error:
            self.log.warning("inventory not read", store=store, error=str(error))
        finally:
            self._listing.discard(store)

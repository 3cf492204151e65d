"""The actor around the state machine. It receives requests, commits the journal once per burst, and carries out
effects.

Decisions are made by the state machine (docs/architecture.md, "Layout"). An effect is carried out only after the event
that caused it is durable.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Coroutine, Iterable
from itertools import islice
from typing import ClassVar, cast, get_args

import msgspec

from proto.messages import Ack, Clear, ErrorCode, GetInventory, Inventory, KillInstance, Resolved, WaitRow
from services.scheduler import run_state
from services.scheduler.devices import DeviceTurns
from services.scheduler.events import (
    Answer,
    Asked,
    Checked,
    CheckShards,
    ClearDone,
    DiscardRows,
    Effect,
    Event,
    Fail,
    ForgetSteps,
    KillProcess,
    Listed,
    Persist,
    ProcessGone,
    Request,
    RequestInventory,
    Rewound,
    SaveStep,
    SendClear,
    ShardsLost,
    StopClear,
    TailLost,
    Tell,
    TellDevices,
    Tick,
    WriteRow,
)
from services.scheduler.journal import Journal
from services.scheduler.metrics_file import MetricsFile, traces
from services.scheduler.planning import configuration, device_limits, heartbeat_s, make_plan
from services.scheduler.state import Scheduler
from shared.actor.service import Service
from shared.inputs import check_model
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import DEFERRED, Call
from shared.rpc.mailbox import Answer as Deferral
from shared.rundir import RunDir, parse_service_name, service_name
from shared.topology import load_resolved

TICK_S = 0.1
STORE_CALL_S = 5.0
CHECK_CALL_S = 30.0
CHECKED_AT_ONCE = 512
"""Maximum number of tasks whose shards a store reads in one call."""
SUPERVISOR = "supervisor"
SUPERVISOR_CALL_S = 5.0


def rebuild(journal: Journal, state: Scheduler) -> int:
    """Replay the journal into a new state machine, and return the number of events after the snapshot.

    Raises an RpcError that names what is missing or damaged.
    """
    if journal.has_snapshot:
        try:
            state.run = run_state.load(state.run.plan, journal.snapshot())
        except (msgspec.MsgspecError, KeyError, ValueError, TypeError) as error:
            raise journal.broken(f"its snapshot cannot be read ({error}); use the release that wrote it") from None
    count = 0
    for event in journal.events():
        state.replay(event)
        count += 1
    journal.check(
        rows=range(0 if state.run.plan.evals else 1, state.run.history.next_row),
        steps=state.run.history.batched_step,
    )
    return count


class SchedulerService(Service):
    """The scheduler process, `python -m services.scheduler`."""

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
        """The tracked clear in flight to each store."""

    # ---------------------------------------------------------------------------------------------- life

    def bind(self) -> str:
        """Rebuild the state, then open the mailbox, so that no request arrives before the journal has been replayed."""
        self._failed = asyncio.get_running_loop().create_future()
        self._open()
        for kind in get_args(Request):
            self.mailbox.handle(kind, self._ask)
        return self.mailbox.bind(self.context, self.run.endpoint(self.NAME, self.instance), self._flush)

    def _open(self) -> None:
        topology = load_resolved(self.run.topology)
        check_model(self.run.path, "policy.model", topology.policy.model)
        plan, bad = make_plan(topology, self.run.topology)
        for row in bad:
            self.log.warning("row left out", row=row.index, line=row.line, cause=row.message)
        self._state = Scheduler(
            plan,
            lease_s=topology.lease.lease_s,
            incarnation=self.incarnation,
            devices=DeviceTurns(device_limits(topology)),
            heartbeat_s=heartbeat_s(topology),
        )
        self._journal = Journal(self.run.journal, plan.fingerprint())
        gc.disable()  # objects built from the journal stay alive, so garbage collections would traverse them in vain
        try:
            events = rebuild(self._journal, self._state)
        finally:
            gc.enable()
        run = self._state.run
        if self._journal.seq:
            self.log.info("journal replayed", events=events, step=run.history.committed_step)
        if self._journal.unmarked:
            self.log.warning("the journal has no mark and counts as complete")
        lost = self._lost_tail()
        lineage = run.history.lineage if lost is None else max(run.history.lineage, lost.lineage)
        self._metrics = MetricsFile(self.run.metrics, self._journal.rows_after, run.history.next_row - 1, lineage)
        if self._metrics.found < self._journal.forgotten:
            gap = [self._metrics.found + 1, self._journal.forgotten]
            self.log.warning("rows are missing from the metrics file, and the journal no longer has them", steps=gap)
        self._state.last_row = self._journal.last_row()
        self._state.bad_rows = len(bad)
        self._take(self._state.begin(configuration(topology), self._now(), lost))

    def _lost_tail(self) -> TailLost | None:
        """Return what traces reveal about a lost end of the journal, or None if the journal is complete."""
        cause = self._journal.lost
        if not cause:
            return None
        marked = self._journal.marked
        agreed, newest = traces(self.run.metrics, self._journal.rows_after(-1))
        reached = max(marked.step, newest)
        committed = self._state.run.history.committed_step
        self.log.warning("the end of the journal is lost", cause=cause, committed=committed, reached=reached)
        return TailLost(min(agreed, committed), reached, marked.fence, marked.lineage)

    async def serve(self) -> None:
        """Advance the clock until the service stops or the journal cannot be written."""
        self._flush()
        while not self.stopping.is_set():
            await asyncio.wait({self._failed}, timeout=TICK_S)
            if self._failed.done():
                self._failed.result()
            self._take(self._state.handle(Tick(), self._now()))
            self._flush()

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
        """Look up an instance in the scheduler's own registry."""
        return self._state.where(service, instance)

    async def open_waits(self) -> list[WaitRow]:
        return self._state.waits(self._now())

    # ---------------------------------------------------------------------------------------------- events

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _ask(self, request: Request, call: Call) -> Deferral:
        event = Asked(call, request, call.deadline, (call.incarnation, call.request_id))
        self._take(self._state.handle(event, self._now()))
        return DEFERRED

    def _happened(self, event: Event) -> None:
        self._take(self._state.handle(event, self._now()))
        self._flush()

    def _take(self, effects: Iterable[Effect]) -> None:
        """Journal the durable effects and keep the others for `_flush`."""
        effects = list(effects)
        if any(isinstance(effect, DiscardRows) for effect in effects):
            self._flush()  # earlier rows must be in the file before they can be discarded
        for effect in effects:
            match effect:
                case Persist():
                    self._journal.append(effect.event, time.time())
                    if isinstance(effect.event, ShardsLost):
                        names = [task.task_id for task in effect.event.tasks]
                        self.log.warning("shards lost", store=effect.event.store, tasks=names[:8], count=len(names))
                case SaveStep():
                    self._journal.save(effect, time.time())
                case Rewound():
                    self._journal.save(effect, time.time())
                    self.log.warning(
                        "back to an earlier step", step=effect.step, committed=effect.committed, cause=effect.cause
                    )
                case DiscardRows():
                    self._journal.save(effect, time.time())
                    self._discards.append(effect)
                case WriteRow():
                    self._journal.save(effect, time.time())
                    self._effects.append(effect)
                case _:
                    self._effects.append(effect)

    def _flush(self) -> None:
        """End a burst: commit once, then carry out the effects."""
        if self._failed.done():
            return
        try:
            for discard in self._discards:  # before the commit, so that the file never has a row that the journal lacks
                self._metrics.discard(discard.lineage, discard.step, discard.waiting)
            self._discards.clear()
            run = self._state.run
            self._journal.fence, self._journal.lineage = run.ledger.highest_fence, run.history.lineage
            self._journal.step = run.history.committed_step
            self._journal.commit()
            effects, self._effects = self._effects, []
            for effect in effects:
                self._carry_out(effect)
            if self._journal.due:
                self._journal.write_snapshot(run_state.dump(self._state.run))
        except Exception as error:  # otherwise the rest of the burst would be lost silently
            self._failed.set_exception(error)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Answer():
                cast(Call, effect.ref).reply(effect.body)
            case Fail():
                error = RpcError(effect.code, effect.message, retry_after_s=effect.retry_after_s)
                cast(Call, effect.ref).fail(error)
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
            case CheckShards():
                self._start(self._check(effect))
            case WriteRow():
                self._metrics.write(json.dumps(effect.row))
            case Tell():
                self.telemetry.emit(effect.topic, effect.values)
            case ForgetSteps():
                self._start(self._forget(effect))
            case KillProcess():
                self._start(self._kill(effect))
            case TellDevices():
                parts = " ".join(effect.parts)
                self.log.info("devices", phase=effect.phase, holder=effect.name, holds=parts)
                self.telemetry.emit(f"devices/{effect.name}", {"phase": effect.phase, "holds": parts})

    async def _forget(self, effect: ForgetSteps) -> None:
        """Delete old steps from the journal, once their rows in the metrics file would survive a power cut."""
        try:
            await asyncio.to_thread(self._metrics.sync)
        except OSError as error:
            self.log.warning("old steps stay in the journal", cause=f"{self.run.metrics}: {error.strerror or error}")
            return
        # Otherwise, the run has returned to before these steps.
        if self._state.run.history.checkpoint_step >= effect.step:
            self._journal.save(effect, time.time())
            self._flush()

    async def _kill(self, effect: KillProcess) -> None:
        """Have the supervisor kill a process, retrying until its death is confirmed. A process that the supervisor does
        not know counts as dead only after a long silence."""
        service, instance = effect.holder
        request = KillInstance(service=service, instance=instance, pid=effect.pid, cause=effect.cause)
        self.log.warning("to be killed", name=service_name(service, instance), pid=effect.pid, cause=effect.cause)
        while True:
            try:
                await self.client(SUPERVISOR).call(request, Ack, deadline_s=SUPERVISOR_CALL_S)
            except RpcError as error:
                self.log.warning("kill not confirmed", name=service_name(service, instance), error=str(error))
                foreign = error.code == ErrorCode.MISSING
                if foreign and self._state.is_over(service, instance, effect.incarnation, self._now()):
                    self._happened(ProcessGone(service, instance, effect.incarnation))
                    return
                await asyncio.sleep(max(error.retry_after_s, TICK_S))
                continue
            self._happened(ProcessGone(service, instance, effect.incarnation))
            return

    # ---------------------------------------------------------------------------------------------- stores

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        job: asyncio.Task[None] = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    async def _clear(self, effect: SendClear) -> None:
        """Send clears to one store. A tracked clear is retried until the store acknowledges it."""
        client = self.client(*parse_service_name(effect.store))
        while True:
            try:
                await client.call(Clear(tasks=effect.tasks), Ack, deadline_s=STORE_CALL_S)
            except RpcError as error:
                self.log.warning("clear not acknowledged", store=effect.store, error=str(error))
                if not effect.tracked:
                    return
                await asyncio.sleep(max(error.retry_after_s, TICK_S))  # the error may come at once, so do not spin
                continue
            if effect.tracked:
                self._happened(ClearDone(effect.store, len(effect.tasks)))
            return

    async def _check(self, order: CheckShards) -> None:
        """Have a store read shards again, and report the shards that are intact."""
        client = self.client(*parse_service_name(order.store))
        held: dict[tuple[str, int], list[int]] = {}
        try:
            for at in range(0, len(order.claims), CHECKED_AT_ONCE):
                tasks = [claim.task for claim in order.claims[at : at + CHECKED_AT_ONCE]]
                page = await client.call(GetInventory(tasks=tasks), Inventory, deadline_s=CHECK_CALL_S)
                hashes = _hashes(page, order.store)
                held.update(
                    ((task.task_id, task.fence), of_task) for task, of_task in zip(page.tasks, hashes, strict=True)
                )
        except RpcError as error:
            self.log.warning("shards not checked", store=order.store, error=str(error))
            self._happened(Checked(order, None))
        else:
            self._happened(Checked(order, held))

    async def _list(self, store: str) -> None:
        """Read the inventory of a store once. If reading fails, the next round reads the inventory again."""
        client = self.client(*parse_service_name(store))
        cursor = 0
        try:
            while True:
                first = cursor == 0
                page = await client.call(GetInventory(cursor=cursor), Inventory, deadline_s=STORE_CALL_S)
                cursor = page.cursor
                self._happened(Listed(store, list(page.tasks), _hashes(page, store), first, last=cursor == 0))
                if cursor == 0:
                    return
        except RpcError as error:
            self.log.warning("inventory not read", store=store, error=str(error))
        finally:
            self._listing.discard(store)


def _hashes(page: Inventory, store: str) -> list[list[int]]:
    """Return the content hashes of a page, one list per task. Raises RpcError(bad_request) if the counts differ."""
    if len(page.files) != len(page.tasks) or min(page.files, default=0) < 0 or sum(page.files) != len(page.hashes):
        text = (
            f"{store}: inventory of {len(page.tasks)} tasks with {len(page.files)} counts of {len(page.hashes)} hashes"
        )
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    rest = iter(page.hashes)
    return [[*islice(rest, count)] for count in page.files]

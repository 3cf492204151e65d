"""The state machine of the scheduler: `handle(event, now) -> effects`. It uses no I/O, clock, socket or thread.

Around the durable `RunState` it keeps the state that dies with the process: deferred calls, lease deadlines, and the
last heartbeats. Durable events are returned as `Persist` effects and read back through `replay`. A grant, an expiry and
a clear are journaled as decisions, so that replay needs neither heartbeats nor the clock.
"""

from __future__ import annotations

from functools import partial
from typing import assert_never

import msgspec

from proto import codec
from proto.errors import WireError
from proto.messages import (
    Ack,
    CheckpointSaved,
    CommitStep,
    Complete,
    ErrorCode,
    EvalsDone,
    FinishRun,
    GetRunInfo,
    GetStatus,
    Heartbeat,
    HeartbeatAck,
    HoldDevices,
    HoldShards,
    HostGone,
    LeaseGrant,
    LeaseRequest,
    NextBatch,
    PublishWeights,
    Register,
    Registered,
    ReleaseShards,
    ReportShards,
    Resolve,
    Resolved,
    TakeSamples,
    WaitEvals,
    WaitRow,
    WeightsRef,
)
from proto.registry import Message
from services.scheduler import view
from services.scheduler.audits import Audits, claims, is_stray, whole_steps
from services.scheduler.devices import DeviceTurns
from services.scheduler.ended import HandOver
from services.scheduler.events import (
    Answer,
    Asked,
    Checked,
    CheckShards,
    ClearDone,
    Cleared,
    Configure,
    DiscardRows,
    Durable,
    Effect,
    Event,
    Fail,
    Leased,
    LeaseExpired,
    Listed,
    Persist,
    ProcessGone,
    RequestInventory,
    Rewound,
    SamplesTaken,
    SendClear,
    ShardsLost,
    StopClear,
    StoreGone,
    TailLost,
    Tell,
    Tick,
    WriteRow,
)
from services.scheduler.leases import Holder, LeasePaces
from services.scheduler.leasing import describe, stage_of
from services.scheduler.plan import Plan
from services.scheduler.registry import STORE, Peers, Seen, check_numbers
from services.scheduler.run_state import Applied, Reply, RunState
from services.scheduler.steps import batch
from services.scheduler.waiting import DeferredCalls, answer_by
from shared.rpc.errors import RpcError
from shared.rundir import service_name
from shared.stages import ROLLOUT
from shared.topology import TRAINER_STORE

HEARTBEAT_S = 1.0
RECONCILE_S = 30.0
TELL_S = 1.0


class Scheduler:
    """The state machine of the scheduler. The journal rebuilds `run`; all other state is volatile."""

    def __init__(
        self,
        plan: Plan,
        *,
        lease_s: float,
        incarnation: int,
        devices: DeviceTurns | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """`devices` assigns turns on shared devices if services are colocated. `heartbeat_s` is the heartbeat interval,
        in seconds, of every service except the stores, whose interval is `HEARTBEAT_S`."""
        self.run = RunState(plan)
        self._devices = devices or DeviceTurns({})
        self.lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self.incarnation = incarnation
        self.last_row: dict[str, float] = {}
        self.bad_rows = 0
        """Number of unusable training rows, which count as dropped."""
        self._now = 0.0
        self._out: list[Effect] = []
        self._deferred = DeferredCalls(len(plan.stages))
        self._paces = LeasePaces(lease_s)
        self._peers = Peers()
        self._lost_lives: set[int] = set()
        """Incarnations that were lost with their hosts. They may be heard from until their agents stop them."""
        self._audits = Audits()
        self._clearing: dict[str, float] = {}
        """Stores with a clear in flight, and the time at which it was sent."""
        self._hand_over = HandOver()
        self._reconcile_at = 0.0
        self._tell_at = 0.0
        self._teller = view.Teller()

    # ---------------------------------------------------------------------------------------------- life

    def replay(self, event: Durable) -> None:
        """Apply a journaled event and discard its effects, which an earlier life carried out."""
        for effect in self.run.apply(event).effects:
            if isinstance(effect, WriteRow):
                self.last_row = effect.row

    def begin(self, config: Configure, now: float, lost: TailLost | None = None) -> list[Effect]:
        """Start after replay: renew live leases, reconcile known stores and send them their pending clears.

        `lost` is given if the end of the journal was lost.
        """
        self._now = now
        self._hand_over.begin(now)
        self._reconcile_at = now + (RECONCILE_S if lost is None else 0.0)
        if lost is not None:
            self._durable(lost)
        for lease in self.run.ledger.leases:
            self._paces.begin(lease.lease_id, now)
        for holder in self.run.shards.registry:
            self._peers.hear(holder, Seen(now))
        self._devices.begin(self.run.shards.registry, now)
        self.run.ledger.count_usable()  # the reward function might have been fixed before resuming
        if config != self.run.history.config:
            self._durable(config)
        self._settle()
        return self._take()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event at time `now` (seconds on a monotonic clock) and return the effects."""
        self._now = now
        match event:
            case Asked():
                self._ask(event)
            case Tick():
                self._tick()
            case ClearDone():
                if event.store in self._clearing:
                    del self._clearing[event.store]
                    self._durable(Cleared(event.store, event.count))
            case ProcessGone():
                self._devices.gone((event.service, event.instance), event.incarnation)
            case Listed():
                self._listed(event)
            case Checked():
                self._checked(event)
            case _:
                assert_never(event)
        self._settle()
        return self._take()

    def _ask(self, asked: Asked) -> None:
        request = asked.request
        try:
            match request:
                case Register():
                    self._register(asked, request)
                case Heartbeat():
                    self._heartbeat(asked, request)
                case ReportShards():
                    self._report(asked, request)
                case HoldDevices():
                    self._devices.hold(request, asked.ref, answer_by(asked, self._now), self._now)
                case HostGone():
                    self._lose_host(frozenset(request.incarnations))
                    self._answer(asked, Ack())
                case Resolve():
                    self._answer(asked, self.where(request.service, request.instance))
                case LeaseRequest():
                    self._lease(asked, request)
                case Complete():
                    self._complete(asked, request)
                case NextBatch():
                    self._deferred.poll(asked, partial(self._try_batch, asked, request), self._now)
                case TakeSamples():
                    self._take_samples(asked, request)
                case WaitEvals():
                    self._deferred.poll(asked, partial(self._try_evals, asked, request), self._now)
                case CommitStep():
                    nbytes, shards = view.stores_of(self._peers.seen)
                    row = {**request.metrics, "store/bytes": float(nbytes), "store/shards": float(shards)}
                    self._answer(asked, self._durable(msgspec.structs.replace(request, metrics=row)) or Ack())
                case GetRunInfo() | PublishWeights() | CheckpointSaved() | FinishRun() | HoldShards() | ReleaseShards():
                    self._answer(asked, self._durable(request) or Ack())
                case GetStatus():
                    self._answer(asked, view.status(self.run, self._peers.seen, self.last_row, self._now))
                case _:
                    assert_never(request)
        except RpcError as error:
            self._out.append(Fail(asked.ref, error.code, str(error), error.retry_after_s))
        except WireError as error:
            self._out.append(Fail(asked.ref, ErrorCode.BAD_REQUEST, str(error)))

    def _answer(self, asked: Asked, body: Message) -> None:
        self._out.append(Answer(asked.ref, body))

    def _durable(self, event: Durable) -> Reply | None:
        """Apply an event, and journal it if it changed anything."""
        applied = self.run.apply(event)
        if applied.reply is not None:
            self._note(event, applied)
        return applied.reply

    def _note(self, event: Durable, applied: Applied) -> None:
        """Journal an event that changed the run, and publish what came of it."""
        self._out.append(Persist(event))
        for effect in applied.effects:
            self._out.append(effect)
            if isinstance(effect, WriteRow):
                self.last_row = effect.row
                self._out.append(Tell("step", dict(effect.row)))
            elif isinstance(effect, DiscardRows):
                self.last_row = {}
            elif isinstance(effect, Rewound):
                self._out.append(Tell("scheduler/rewound", {"step": effect.step, "committed": effect.committed}))

    def _take(self) -> list[Effect]:
        out, self._out = self._out, []
        return out

    def _settle(self) -> None:
        """Answer the deferred calls that can be answered, and send pending clears to stores.

        This runs after every event.
        """
        self._out.extend(self._deferred.retry())
        self._out.extend(self._devices.settle(self._now))
        for store in self.run.shards.clears.take_changed():
            if store not in self._clearing and (tasks := self.run.shards.clears.head(store)):
                self._clearing[store] = self._now
                self._out.append(SendClear(store, tasks, tracked=True))

    def waits(self, now: float) -> list[WaitRow]:
        """Return rows that tell human readers what the run is waiting for at `now`."""
        clearing = {store: now - since for store, since in self._clearing.items()}
        awaited = self._deferred.awaited(now)
        return view.waits(self.run, self._peers.seen, awaited, dict(self._paces.idle(now)), self.lease_s, clearing)

    def _tick(self) -> None:
        self._out.extend(self._deferred.expire(self._now))
        for expired in self._paces.expired(self._now):
            lease = self.run.ledger.leases.get(expired.lease_id)
            if lease is not None:
                lost: dict[str, float | str] = {"holder": service_name(*lease.holder), "lease": float(lease.lease_id)}
                self._out.extend(self._teller.tell("scheduler/lost_lease", lost))
                self._durable(expired)
        for holder in self._peers.silent_stores(self._now):
            self._give_up_store(holder)
        if late := self._hand_over.late(self.run.ledger.records, self._now):
            self._durable(SamplesTaken(late, lost=True))
        self._audits.tick()
        self._out.extend(self._audits.compare(self.run.ledger))
        if self._reconcile_at <= self._now:
            self._reconcile_at = self._now + RECONCILE_S
            self._out.extend(RequestInventory(store) for store in self.run.shards.clears.queues)
        if self._tell_at <= self._now:
            self._tell_at = self._now + TELL_S
            self._out.extend(self._teller.state(self.run, waiting=self._deferred.leases, bad_rows=self.bad_rows))

    def _give_up_store(self, holder: Holder) -> None:
        store = service_name(*holder)
        self._durable(StoreGone(store))
        self._peers.forget(holder)
        if self._clearing.pop(store, None) is not None:
            self._out.append(StopClear(store))

    def _lose_host(self, lives: frozenset[int]) -> None:
        """End the leases, deferred requests and device turns of a lost host's processes, and give up on its
        stores."""
        self._lost_lives |= lives
        lost = [holder for holder, row in self.run.shards.registry.items() if row.incarnation in lives]
        for holder in lost:
            self._out.extend(self._deferred.fail(holder, f"{service_name(*holder)} was lost with its host"))
            for lease in list(self.run.ledger.leases.held_by(holder)):
                self._durable(LeaseExpired(lease.lease_id, not_started=True))
                self._paces.end(lease.lease_id)
            self._devices.gone(holder, self.run.shards.registry[holder].incarnation)
        for holder in lost:
            if holder[0] == STORE and service_name(*holder) != TRAINER_STORE:
                self._give_up_store(holder)

    # ---------------------------------------------------------------------------------------------- registry

    def _register(self, asked: Asked, request: Register) -> None:
        check_numbers(request)
        holder = (request.service, request.instance)
        if request.incarnation in self._lost_lives:
            raise RpcError(ErrorCode.LOST, f"{service_name(*holder)}: this life was lost with its host; stop it")
        self.run.shards.registry.check_room(holder)
        if self.run.shards.registry.get(holder) != request:
            restarted = f"{service_name(*holder)} restarted"
            self._out.extend(self._deferred.fail(holder, restarted, but=request.incarnation))
            self._durable(request)
            self._devices.registered(request, self._now)
        self._peers.hear(holder, Seen(self._now))
        if request.service == STORE:
            self._out.append(RequestInventory(service_name(*holder)))
        every_s = HEARTBEAT_S if request.service == STORE else self._heartbeat_s
        self._answer(asked, Registered(scheduler_incarnation=self.incarnation, heartbeat_s=every_s))

    def where(self, service: str, instance: int) -> Resolved:
        """Return the registered endpoint of an instance. Raises RpcError(missing) if it has not registered."""
        row = self.run.shards.registry.get((service, instance))
        if row is None:
            raise RpcError(ErrorCode.MISSING, f"{service_name(service, instance)} has not registered (yet)")
        return Resolved(endpoint=row.endpoint, host_id=row.host_id, incarnation=row.incarnation)

    def _heartbeat(self, asked: Asked, beat: Heartbeat) -> None:
        check_numbers(beat)
        holder = (beat.service, beat.instance)
        row = self.run.shards.registry.get(holder)
        if row is None or row.incarnation != beat.incarnation:
            self._answer(asked, HeartbeatAck(scheduler_incarnation=self.incarnation, registered=False))
            return
        troubles = list(beat.troubles)
        self._peers.hear(
            holder, Seen(self._now, beat.state, beat.rss_bytes, beat.store_bytes, beat.store_shards, troubles)
        )
        self._devices.beat(beat, self._now)
        lost: list[int] = []
        for report in beat.leases:
            lease = self.run.ledger.leases.get(report.lease_id)
            if lease is None or lease.holder != holder or lease.incarnation != beat.incarnation:
                lost.append(report.lease_id)
            else:
                self._paces.heard(report, self._now)
        is_present = partial(self._peers.is_present, now=self._now)
        upstream = self.run.shards.upstream(holder, is_present) if beat.service == STORE else []
        ack = HeartbeatAck(
            scheduler_incarnation=self.incarnation,
            registered=True,
            lost_leases=lost,
            weights=self._newer(beat),
            upstream=upstream,
        )
        self._answer(asked, ack)

    def is_over(self, service: str, instance: int, incarnation: int, now: float) -> bool:
        """Return whether a life of a process counts as ended at `now` even though its end was not observed.

        A life counts as ended if another life of the process has registered, or if the life has been silent for
        `GONE_S`.
        """
        row = self.run.shards.registry.get((service, instance))
        return row is None or row.incarnation != incarnation or self._peers.is_silent((service, instance), now)

    def _newer(self, beat: Heartbeat) -> WeightsRef | None:
        """Return the newest version if the engine holds an older one and has no evaluation lease, else None.

        A restarted engine, which holds no version yet, gets its first one with a lease.
        """
        newest = self.run.history.versions.newest
        if beat.service != ROLLOUT.service or beat.holds_step < 0 or newest is None:
            return None
        if any(lease.measured is not None for lease in self.run.ledger.leases.held_by((beat.service, beat.instance))):
            return None
        return self.run.history.versions.refs.get(newest) if newest > (beat.holds_lineage, beat.holds_step) else None

    # ---------------------------------------------------------------------------------------------- shards

    def _listed(self, page: Listed) -> None:
        """Clear the strays on an inventory page. After the last page, find out which shards are missing."""
        strays = [entry for entry in page.tasks if is_stray(self.run.ledger, entry)]
        if strays:
            self._out.append(SendClear(page.store, strays, tracked=False))
            strayed: dict[str, float | str] = {"strays": float(len(strays)), "store": page.store}
            self._out.extend(self._teller.tell("scheduler/gc", strayed))
        self._audits.add(page)
        self._out.extend(self._audits.compare(self.run.ledger))

    def _report(self, asked: Asked, request: ReportShards) -> None:
        """Have the store check the tasks that a reader could not read, and the other tasks of the same steps."""
        accused = claims(self.run.ledger, request.store, whole_steps(self.run.ledger, request.tasks))
        if accused:
            self._out.append(CheckShards(request.store, accused, asked.ref))
        else:  # these attempts have ended
            self._answer(asked, Ack())

    def _checked(self, checked: Checked) -> None:
        """Handle the shards that the store has lost, then answer the reader that reported them."""
        order, held = checked.order, checked.held
        lost = [claim.task for claim in order.claims if held is not None and not claim.met(held)]
        if lost and self._durable(ShardsLost(order.store, lost)) is not None:
            self._out.append(RequestInventory(order.store))  # more shards than those checked may be damaged
        if order.ref is None:
            return
        if held is None:
            self._out.append(
                Fail(order.ref, ErrorCode.NOT_READY, f"{order.store} is not responding; report the shards again")
            )
        else:
            self._out.append(Answer(order.ref, Ack()))

    # ---------------------------------------------------------------------------------------------- leases

    def _lease(self, asked: Asked, request: LeaseRequest) -> None:
        holder = (request.service, request.instance)
        row = self.run.shards.registry.get(holder)
        if row is not None and row.incarnation != request.incarnation:
            raise RpcError(ErrorCode.LOST, f"{service_name(*holder)}: another life of this process is registered")
        before = self.run.ledger.leases.answering(holder, asked.call)
        if before is not None:
            self._answer(asked, describe(self.run.ledger, before, self.lease_s))
            return
        stage = stage_of(self.run.ledger, request)
        self._deferred.lease(asked, holder, stage, partial(self._try_lease, asked, request), self._now)

    def _try_lease(self, asked: Asked, request: LeaseRequest) -> bool:
        applied = self.run.lease(request, asked.call)
        grant = applied.reply
        if not isinstance(grant, LeaseGrant):
            return False
        self._note(Leased(codec.encode_body(request), asked.call), applied)
        self._paces.begin(grant.lease_id, self._now)
        self._answer(asked, msgspec.structs.replace(grant, lease_s=self.lease_s))
        return True

    def _complete(self, asked: Asked, request: Complete) -> None:
        reply = self._durable(request)
        if self.run.ledger.leases.get(request.lease_id) is None:
            self._paces.end(request.lease_id)
        else:
            self._paces.result(request.lease_id, self._now)
        self._answer(asked, reply or Ack())

    # ---------------------------------------------------------------------------------------------- recorder

    def _take_samples(self, asked: Asked, request: TakeSamples) -> None:
        if request.taken:
            self._durable(SamplesTaken(request.taken))
        self._hand_over.asked_at = self._now
        self._deferred.poll(asked, partial(self._try_samples, asked, request), self._now)

    def _try_samples(self, asked: Asked, request: TakeSamples) -> bool:
        ledger = self.run.ledger
        samples = self._hand_over.samples(ledger.records, ledger.tasks, ledger.shards, request, self._now)
        if samples is not None:
            self._answer(asked, samples)
        return samples is not None

    # ---------------------------------------------------------------------------------------------- driver

    def _try_batch(self, asked: Asked, request: NextBatch) -> bool:
        formed = batch(self.run.ledger, request) or self._durable(request)
        if formed is None:
            self._peers.check_troubles()
            return False
        self._answer(asked, formed)
        return True

    def _try_evals(self, asked: Asked, request: WaitEvals) -> bool:
        history = self.run.history
        history.check_driver(request.driver)
        history.check_versions()
        results = history.evaluated(request.step)
        # Rows are written in step order: without the earlier evaluations, the run would end before this row is written.
        earlier = any(step < request.step for _, step in history.evaluations.open)
        if results is None or earlier:
            self._peers.check_troubles()
            return False
        metrics = history.evaluations.row(request.step)
        self._answer(asked, EvalsDone(step=request.step, accuracy=results, metrics=metrics))
        return True

"""The state machine of the scheduler: `handle(event, now) -> effects`. No I/O, no clock, no socket, no thread.

Around the durable `Core` it keeps the state that dies with the process: deferred calls, deadlines of leases, and the
last heartbeats. Durable events are returned as `Persist` effects and read back through `replay`. A grant, an expiry and
a clear are journaled as decisions, so that replay needs neither heartbeats nor the clock.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from proto import codec
from proto.errors import WireError
from proto.messages import (
    Ack,
    CheckpointSaved,
    CommitStep,
    Complete,
    CompleteAck,
    ErrorCode,
    EvalsDone,
    FinishRun,
    GetRunInfo,
    GetStatus,
    Heartbeat,
    HeartbeatAck,
    HoldDevices,
    LeaseGrant,
    LeaseRequest,
    NextBatch,
    PublishWeights,
    Register,
    Registered,
    Resolve,
    Resolved,
    WaitEvals,
    WeightsRef,
)
from services.scheduler import view
from services.scheduler.core import Core
from services.scheduler.devices import DeviceTurns
from services.scheduler.events import (
    Answer,
    Asked,
    ClearDone,
    Cleared,
    Configure,
    DiscardRows,
    Durable,
    Effect,
    Event,
    Fail,
    Leased,
    Listed,
    Persist,
    ProcessGone,
    RequestInventory,
    Rewound,
    SendClear,
    StopClear,
    StoreGone,
    Tell,
    Tick,
    WriteRow,
)
from services.scheduler.leases import Holder
from services.scheduler.pace import Paces
from services.scheduler.plan import Plan
from services.scheduler.plausible import check_numbers
from services.scheduler.stores import STORE
from services.scheduler.view import Seen
from shared.rpc.errors import RpcError
from shared.rundir import service_name
from shared.stages import ROLLOUT

HEARTBEAT_S = 1.0
RECONCILE_S = 30.0
STORE_GONE_S = 120.0
"""Seconds of silence after which a store of a joined host is considered gone. This run does not restart such stores."""
MARGIN_S = 0.5
"""Seconds before its deadline at which a deferred call is answered, at most a quarter of the time it had left."""
TELL_S = 1.0


@dataclass(eq=False)
class Waiting:
    """A deferred call."""

    asked: Asked
    answer_by: float
    open: bool = True


class Scheduler:
    """The state machine of the scheduler. The journal rebuilds `core`; all other state is volatile."""

    def __init__(self, plan: Plan, *, lease_s: float, incarnation: int, devices: DeviceTurns | None = None) -> None:
        """`devices` assigns turns on shared devices if services are colocated."""
        self.core = Core(plan)
        self._devices = devices or DeviceTurns({})
        self.lease_s = lease_s
        self.incarnation = incarnation
        self.last_row: dict[str, float] = {}
        self.bad_rows = 0
        """Number of unusable training rows, which count as dropped."""
        self._now = 0.0
        self._out: list[Effect] = []
        self._leasing: list[deque[Waiting]] = [deque() for _ in plan.stages]
        self._batches: list[Waiting] = []
        self._evals: list[Waiting] = []
        self._held: list[tuple[float, int, Waiting]] = []
        self._order = itertools.count()
        self._paces = Paces(lease_s)
        self._seen: dict[Holder, Seen] = {}
        self._clearing: set[str] = set()
        self._reconcile_at = 0.0
        self._tell_at = 0.0
        self._teller = view.Teller()
        self._requests: dict[type[Any], Callable[[Asked], None]] = {
            Register: self._register,
            Heartbeat: self._heartbeat,
            HoldDevices: self._hold_devices,
            Resolve: self._resolve,
            LeaseRequest: self._lease_request,
            Complete: self._complete,
            GetRunInfo: self._run_info,
            NextBatch: self._next_batch,
            CommitStep: self._commit,
            PublishWeights: self._change,
            CheckpointSaved: self._change,
            FinishRun: self._change,
            WaitEvals: self._wait_evals,
            GetStatus: self._status,
        }

    @property
    def requests(self) -> list[type[Any]]:
        """The message types that this machine answers."""
        return list(self._requests)

    # ---------------------------------------------------------------------------------------------- life

    def replay(self, event: Durable) -> None:
        """Apply a journaled event. Its effects, which an earlier life carried out, are discarded."""
        self.core.apply(event)
        for effect in self.core.out:
            if isinstance(effect, WriteRow):
                self.last_row = effect.row
        self.core.out.clear()

    def begin(self, config: Configure, now: float) -> list[Effect]:
        """Start after replay: renew live leases, reconcile known stores and send them their pending clears."""
        self._now = now
        for lease in self.core.leases:
            self._paces.begin(lease.lease_id, now)
        for holder in self.core.registry:
            self._seen[holder] = Seen(now)
        self._devices.begin(self.core.registry, now)
        self.core.dropped_in_a_row = 0  # the reward function may have been fixed before resuming
        if config != self.core.config:
            self._durable(config)
        self._reconcile_at = now + RECONCILE_S
        self._settle()
        return self._take()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event at time `now` (seconds of a monotonic clock) and return the effects."""
        self._now = now
        match event:
            case Asked():
                self._ask(event)
            case Tick():
                self._tick()
            case ClearDone() if event.store in self._clearing:
                self._clearing.discard(event.store)
                self._durable(Cleared(event.store, event.count))
            case ProcessGone():
                self._devices.gone((event.service, event.instance), event.incarnation)
            case Listed():
                strays = [entry for entry in event.tasks if self.core.is_stray(entry)]
                if strays:
                    self._out.append(SendClear(event.store, strays, tracked=False))
                    self._tell("scheduler/gc", {"strays": float(len(strays)), "store": event.store})
        self._settle()
        return self._take()

    def _ask(self, event: Asked) -> None:
        try:
            self._requests[type(event.request)](event)
        except RpcError as error:
            self._out.append(Fail(event.ref, error.code, str(error), error.retry_after_s))
        except WireError as error:
            self._out.append(Fail(event.ref, ErrorCode.BAD_REQUEST, str(error)))

    def _durable(self, event: Durable) -> Any:
        """Apply an event and journal it, unless it changed nothing (its result is None or False)."""
        result = self.core.apply(event)
        if result is not None and result is not False:
            self._out.append(Persist(event))
        return result

    def _take(self) -> list[Effect]:
        if self.core.out:
            for effect in self.core.out:
                if isinstance(effect, WriteRow):
                    self.last_row = effect.row
                    self._out.append(Tell("step", dict(effect.row)))
                elif isinstance(effect, DiscardRows):
                    self.last_row = {}
                elif isinstance(effect, Rewound):
                    told: dict[str, float | str] = {"step": effect.step, "committed": effect.committed}
                    self._out.append(Tell("scheduler/rewound", told))
            self._out.extend(self.core.out)
            self.core.out.clear()
        out, self._out = self._out, []
        return out

    def _settle(self) -> None:
        """After any event: answer the deferred calls that can be answered, and send pending clears to stores."""
        for queue in self._leasing:
            while queue:
                waiting = queue[0]
                if waiting.open and not self._try_lease(waiting.asked):
                    break
                waiting.open = False
                queue.popleft()
        if self._batches:
            self._batches = [waiting for waiting in self._batches if not self._retry(waiting, self._try_batch)]
        if self._evals:
            self._evals = [waiting for waiting in self._evals if not self._retry(waiting, self._try_evals)]
        self._out.extend(self._devices.settle(self._now))
        for store in self.core.clears.stores:
            if store not in self._clearing:
                tasks = self.core.clears.head(store)
                if tasks:
                    self._clearing.add(store)
                    self._out.append(SendClear(store, tasks, tracked=True))

    def _retry(self, waiting: Waiting, attempt: Callable[[Asked], bool]) -> bool:
        """Try to answer a deferred call. Return whether it is answered, now or before."""
        if waiting.open:
            try:
                waiting.open = not attempt(waiting.asked)
            except RpcError as error:
                waiting.open = False
                self._out.append(Fail(waiting.asked.ref, error.code, str(error)))
        return not waiting.open

    def _answer_by(self, asked: Asked) -> float:
        """Return the latest time at which a deferred call is answered."""
        left = max(asked.deadline - self._now, 0.0)
        return asked.deadline - min(MARGIN_S, left / 4)

    def _hold(self, asked: Asked) -> Waiting:
        waiting = Waiting(asked, self._answer_by(asked))
        heapq.heappush(self._held, (waiting.answer_by, next(self._order), waiting))
        return waiting

    def _tick(self) -> None:
        while self._held and self._held[0][0] <= self._now:
            waiting = heapq.heappop(self._held)[2]
            if waiting.open:
                waiting.open = False
                kind = type(waiting.asked.request).__name__
                self._out.append(Fail(waiting.asked.ref, ErrorCode.NOT_READY, f"scheduler: nothing yet for {kind}"))
        for expired in self._paces.expired(self._now):
            lease = self.core.leases.get(expired.lease_id)
            if lease is not None:
                lost: dict[str, float | str] = {"holder": service_name(*lease.holder), "lease": float(lease.lease_id)}
                self._tell("scheduler/lost_lease", lost)
                self._durable(expired)
        for holder in self._silent_stores():
            store = service_name(*holder)
            self._durable(StoreGone(store))
            del self._seen[holder]
            if store in self._clearing:
                self._clearing.discard(store)
                self._out.append(StopClear(store))
        if self._reconcile_at <= self._now:
            self._reconcile_at = self._now + RECONCILE_S
            self._out.extend(RequestInventory(store) for store in self.core.clears.stores)
        if self._tell_at <= self._now:
            self._tell_at = self._now + TELL_S
            held_back = sum(map(len, self._leasing))
            self._out.extend(self._teller.state(self.core, waiting=held_back, bad_rows=self.bad_rows))

    def _silent_stores(self) -> list[Holder]:
        return [
            holder
            for holder, seen in self._seen.items()
            if holder[0] == STORE and holder[1] >= self.core.plan.placed_stores and self._now - seen.at > STORE_GONE_S
        ]

    # ---------------------------------------------------------------------------------------------- registry

    def _register(self, asked: Asked) -> None:
        request: Register = asked.request
        check_numbers(request)
        holder = (request.service, request.instance)
        known = self.core.registry.get(holder)
        if known != request:
            for queue in self._leasing:
                for waiting in queue:
                    if self._is_former_life(waiting.asked.request, request):
                        waiting.open = False
                        self._out.append(Fail(waiting.asked.ref, ErrorCode.LOST, f"{service_name(*holder)} restarted"))
            self._durable(request)
            self._devices.registered(request, self._now)
        self._seen[holder] = Seen(self._now)
        if request.service == STORE:
            self._out.append(RequestInventory(service_name(*holder)))
        self._out.append(Answer(asked.ref, Registered(scheduler_incarnation=self.incarnation, heartbeat_s=HEARTBEAT_S)))

    @staticmethod
    def _is_former_life(request: LeaseRequest, new: Register) -> bool:
        return (request.service, request.instance) == (new.service, new.instance) and (
            request.incarnation != new.incarnation
        )

    def where(self, service: str, instance: int) -> Resolved:
        """Return the registered endpoint of an instance. Raises RpcError(missing) if it has not registered."""
        known = self.core.registry.get((service, instance))
        if known is None:
            raise RpcError(ErrorCode.MISSING, f"{service_name(service, instance)} has not registered (yet)")
        return Resolved(endpoint=known.endpoint, host_id=known.host_id, incarnation=known.incarnation)

    def _resolve(self, asked: Asked) -> None:
        self._out.append(Answer(asked.ref, self.where(asked.request.service, asked.request.instance)))

    def _heartbeat(self, asked: Asked) -> None:
        beat: Heartbeat = asked.request
        check_numbers(beat)
        holder = (beat.service, beat.instance)
        known = self.core.registry.get(holder)
        if known is None or known.incarnation != beat.incarnation:
            ack = HeartbeatAck(scheduler_incarnation=self.incarnation, registered=False)
            self._out.append(Answer(asked.ref, ack))
            return
        self._seen[holder] = Seen(
            self._now, beat.state, beat.rss_bytes, beat.store_bytes, beat.store_shards, list(beat.troubles)
        )
        self._devices.beat(beat, self._now)
        lost: list[int] = []
        for told in beat.leases:
            lease = self.core.leases.get(told.lease_id)
            if lease is None or lease.holder != holder or lease.incarnation != beat.incarnation:
                lost.append(told.lease_id)
                continue
            self._paces.told(told, self._now)
        ack = HeartbeatAck(
            scheduler_incarnation=self.incarnation, registered=True, lost_leases=lost, weights=self._newer(beat)
        )
        self._out.append(Answer(asked.ref, ack))

    def _newer(self, beat: Heartbeat) -> WeightsRef | None:
        """Return the newest version if the engine holds an older one and has no evaluation lease, else None.

        A restarted engine, which holds no version yet, gets its first one with a lease.
        """
        newest = self.core.versions.newest
        if beat.service != ROLLOUT.service or beat.holds_step < 0 or newest is None:
            return None
        if any(self.core.measures(lease) for lease in self.core.leases.held_by((beat.service, beat.instance))):
            return None
        return self.core.versions.get(newest) if newest > (beat.holds_lineage, beat.holds_step) else None

    def _hold_devices(self, asked: Asked) -> None:
        self._devices.hold(asked.request, asked.ref, self._answer_by(asked), self._now)

    # ---------------------------------------------------------------------------------------------- leases

    def _lease_request(self, asked: Asked) -> None:
        request: LeaseRequest = asked.request
        holder = (request.service, request.instance)
        known = self.core.registry.get(holder)
        if known is not None and known.incarnation != request.incarnation:
            raise RpcError(ErrorCode.LOST, f"{service_name(*holder)}: another life of this process is registered")
        before = self.core.leases.answering(holder, asked.call)
        if before is not None:
            self._out.append(Answer(asked.ref, self.core.describe(before, self.lease_s)))
            return
        stage = self.core.stage(request)
        if self._leasing[stage] or not self._try_lease(asked):
            self._leasing[stage].append(self._hold(asked))

    def _try_lease(self, asked: Asked) -> bool:
        request: LeaseRequest = asked.request
        grant: LeaseGrant | None = self.core.apply_lease(request, asked.call)
        if grant is None:
            return False
        self._out.append(Persist(Leased(codec.encode_body(request), asked.call)))
        self._paces.begin(grant.lease_id, self._now)
        self._out.append(Answer(asked.ref, msgspec.structs.replace(grant, lease_s=self.lease_s)))
        return True

    def _complete(self, asked: Asked) -> None:
        request: Complete = asked.request
        refused = self._durable(request)
        if self.core.leases.get(request.lease_id) is None:
            self._paces.end(request.lease_id)
        else:
            self._paces.result(request.lease_id, self._now)
        self._out.append(Answer(asked.ref, CompleteAck(refused=refused)))

    # ---------------------------------------------------------------------------------------------- driver

    def _run_info(self, asked: Asked) -> None:
        self._out.append(Answer(asked.ref, self._durable(asked.request)))

    def _next_batch(self, asked: Asked) -> None:
        if not self._try_batch(asked):
            self._batches.append(self._hold(asked))

    def _try_batch(self, asked: Asked) -> bool:
        request: NextBatch = asked.request
        batch = self.core.batch(request) or self._durable(request)
        if batch is None:
            self._check_troubles()
            return False
        self._out.append(Answer(asked.ref, batch))
        return True

    def _commit(self, asked: Asked) -> None:
        request: CommitStep = asked.request
        nbytes, shards = view.stores_of(self._seen)
        totals = {"store/bytes": float(nbytes), "store/shards": float(shards)}
        self._durable(msgspec.structs.replace(request, metrics={**request.metrics, **totals}))
        self._out.append(Answer(asked.ref, Ack()))

    def _change(self, asked: Asked) -> None:
        self._durable(asked.request)
        self._out.append(Answer(asked.ref, Ack()))

    def _wait_evals(self, asked: Asked) -> None:
        if not self._try_evals(asked):
            self._evals.append(self._hold(asked))

    def _try_evals(self, asked: Asked) -> bool:
        request: WaitEvals = asked.request
        self.core.check_driver(request.driver)
        results = self.core.evaluated(request.step)
        if results is None:
            self._check_troubles()
            return False
        self._out.append(Answer(asked.ref, EvalsDone(step=request.step, accuracy=results)))
        return True

    def _check_troubles(self) -> None:
        """Raises RpcError(bad_data) if a service gave up waiting for something that tasks need."""
        for holder, seen in self._seen.items():
            for each in seen.troubles:
                if each.ends_run:
                    raise RpcError(ErrorCode.BAD_DATA, f"{service_name(*holder)}: {each.text}")

    # ------------------------------------------------------------------------------------------ status and telemetry

    def _status(self, asked: Asked) -> None:
        self._out.append(Answer(asked.ref, view.status(self.core, self._seen, self.last_row, self._now)))

    def _tell(self, topic: str, values: dict[str, float | str]) -> None:
        self._out.extend(self._teller.tell(topic, values))

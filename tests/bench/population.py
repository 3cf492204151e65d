"""A simulated population of hosts and processes, which drives the production state machines on a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from launch.placement.book import HostBook, HostLost
from launch.processes.plan import Key
from proto.messages import (
    CommitStep,
    Complete,
    GetRunInfo,
    GetStatus,
    Heartbeat,
    HeartbeatAck,
    HostGone,
    HostOrders,
    HostReport,
    LeaseGrant,
    LeaseProgress,
    LeaseRequest,
    NextBatch,
    Outcome,
    ProcessRow,
    PublishWeights,
    PutTask,
    Register,
    Registered,
    StepBatch,
    TaskResult,
)
from services.scheduler.events import (
    Answer,
    Asked,
    Checked,
    CheckShards,
    ClearDone,
    Configure,
    Effect,
    Event,
    Fail,
    Listed,
    RequestInventory,
    SendClear,
    Tick,
)
from services.scheduler.plan import Plan
from services.scheduler.planning import heartbeat_s
from services.scheduler.server import TICK_S
from services.scheduler.state import Scheduler
from shared.rundir import service_name
from shared.topology import Topology, load
from tests.bench.scheduler_load import CANARY, SCALARS
from tests.weights_refs import weights_ref

GROUP = 8
ROLLOUTS = 10
"""Number of rollout processes on each host."""
BLOCK = 4
"""Number of tasks in a lease."""
STEP_TASKS = 2048
"""Number of tasks in a step: the largest number of tasks whose scalars fit into one message, with 8 samples per
task."""
LEASE_S = 120.0
WORK_S = (20.0, 60.0)
"""Range of the time, in seconds, that a lease takes."""
LINE_S = 0.002
STORE_S = 0.01
JOIN_S = 20.0
"""Seconds over which the processes of a run register at its start."""
START_S = 20.0
"""Seconds from the order to run a process until the process registers."""
WAIT_S = 30.0
STATUS_S = 1.0
REPORT_S = 1.0
NOTICED_S = 2.0
"""Seconds until the loss of a host is noticed."""
PAGE_TASKS = 1000
TOPOLOGY = """\
run: {{name: scale, steps: 1000000}}
policy: {{model: {model}, dtype: bfloat16}}
data: {{train: {{source: "builtin:addition", max_prompt_tokens: 8}}}}
reward: {{function: "builtin:exact_match"}}
sampling: {{max_new_tokens: 8}}
algorithm: {{tasks_per_step: 8, group_size: 8, advantage: {{name: grpo}}}}
optimizer: {{lr: 1.0e-3}}
transport: {{listen: 10.0.0.1}}
placement: {{hosts: {{{hosts}}}}}
services: {{batch-store: {{memory: 4TiB}}, rollout: {{host: [{names}], instances: {rollouts}}}}}
"""


@dataclass
class Cost:
    """The calls of one kind: their number, their total CPU seconds, and the longest one."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)


@dataclass(eq=False)
class Host:
    """A simulated host: the processes that its agent runs, and the content of its store."""

    name: str
    life: int
    alive: bool = True
    running: dict[Key, Process] = field(default_factory=dict)


@dataclass(eq=False)
class Process:
    """One incarnation of a simulated store or rollout."""

    key: Key
    incarnation: int
    host: Host
    store: str
    """Name of the store of its host."""
    registered: bool = False
    lease: int = 0
    progress: int = 0
    held: dict[tuple[str, int], int] = field(default_factory=dict)
    """Content of a store: the content hash by task and fence."""

    @property
    def alive(self) -> bool:
        return self.host.alive and self.host.running.get(self.key) is self


def make_topology(folder: Path, hosts: int) -> Topology:
    """Return a topology with rollouts on `hosts` hosts."""
    from safetensors.numpy import save_file

    model = folder / "model"
    model.mkdir()
    save_file({"w": np.zeros((4, 4), np.float32)}, model / "model.safetensors")
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    names = [f"h{number}" for number in range(hosts)]
    text = TOPOLOGY.format(
        model=model,
        hosts=", ".join(f"{name}: {{}}" for name in names),
        names=", ".join(names),
        rollouts=ROLLOUTS * hosts,
    )
    path = folder / "t.yaml"
    path.write_text(text)
    return load(path)


class Population:
    """All processes of a run except the scheduler and the supervisor, on a virtual clock."""

    def __init__(self, topology: Topology, hosts: int) -> None:
        tasks = ROLLOUTS * hosts * BLOCK
        step_tasks = min(STEP_TASKS, tasks // 2)
        staleness = -(-tasks // step_tasks)  # every rollout has work
        plan = Plan(
            run="scale",
            seed=1,
            tasks_per_step=step_tasks,
            group_size=GROUP,
            staleness=staleness,
            shuffle=True,
            deterministic=False,
            rows=range(1_000_000),
            block_tasks=BLOCK,
            task_bytes=1 << 20,
            weight_versions=2,
        )
        self.now = 0.0
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self.steps = 0
        every_s = heartbeat_s(topology)
        self.machine = Scheduler(plan, lease_s=LEASE_S, incarnation=1, heartbeat_s=every_s)
        self.book: HostBook = self.timed("plan the hosts", lambda: HostBook(topology))
        self.hosts = [Host(name, 0) for name in self.book.hosts]
        self._chance = random.Random(1)
        self._lives = itertools.count(1)
        self._refs = itertools.count(1)
        self._turns = itertools.count()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._pending: dict[int, Callable[[Any], None]] = {}
        self._stores: dict[str, Process] = {}
        self._handled(self.timed("begin", lambda: self.machine.begin(Configure(1 << 30, 3, 2, True), 0.0)))
        self._begin()

    def timed(self, kind: str, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        answer = work()
        self.costs[kind].add(time.thread_time() - began)
        return answer

    # ---- the clock

    def after(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self.now + seconds, next(self._turns), work))

    def run_until(self, end: float) -> None:
        while self._later and self._later[0][0] <= end:
            self.now, _, work = heapq.heappop(self._later)
            work()
        self.now = end

    # ---- the scheduler

    def event(self, kind: str, event: Event) -> None:
        self._handled(self.timed(kind, lambda: self.machine.handle(event, self.now)))

    def ask(self, request: Any, taken: Callable[[Any], None] = lambda answer: None, wait_s: float = WAIT_S) -> None:
        """Send a request to the scheduler. `taken` receives the answer, or a Fail, a moment later."""
        ref = next(self._refs)
        self._pending[ref] = taken
        self.event(type(request).__name__, Asked(ref, request, self.now + wait_s, (1, ref)))

    def _handled(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Answer(ref, body):
                    self._answered(ref, body)
                case Fail(ref):
                    self._answered(ref, effect)
                case SendClear():
                    self.after(STORE_S, lambda effect=effect: self._clear(effect))  # type: ignore[misc]
                case RequestInventory(store):
                    self.after(STORE_S, lambda store=store: self._list(store))  # type: ignore[misc]
                case CheckShards():
                    self.after(STORE_S, lambda effect=effect: self._check(effect))  # type: ignore[misc]
                case _:
                    pass

    def _answered(self, ref: Any, body: Any) -> None:
        taken = self._pending.pop(ref)
        self.after(LINE_S, lambda: taken(body))

    def _store(self, name: str) -> Process | None:
        store = self._stores.get(name)
        return store if store is not None and store.alive else None

    def _clear(self, effect: SendClear) -> None:
        store = self._store(effect.store)
        if store is None:
            return
        for task in effect.tasks:
            store.held.pop((task.task_id, task.fence), None)
        if effect.tracked:
            self.event("ClearDone", ClearDone(effect.store, len(effect.tasks)))

    def _list(self, name: str) -> None:
        store = self._store(name)
        if store is None:
            return
        held = list(store.held.items())
        for at in range(0, max(len(held), 1), PAGE_TASKS):
            page = held[at : at + PAGE_TASKS]
            tasks, hashes = [PutTask(*task) for task, _ in page], [[each] for _, each in page]
            self.event("Listed", Listed(name, tasks, hashes, at == 0, at + PAGE_TASKS >= len(held)))

    def _check(self, effect: CheckShards) -> None:
        store = self._store(effect.store)
        held = None if store is None else {task: [each] for task, each in store.held.items()}
        self.event("Checked", Checked(effect, held))

    # ---- the processes

    def _begin(self) -> None:
        home = Host("", 0)
        for key in [("batch-store", 0), ("policy-trainer", 0)]:
            self._start(home, key)
        self.after(JOIN_S, self._drive)
        self.after(TICK_S, self._tick)
        self.after(STATUS_S, self._ask_status)
        for host in self.hosts:
            self.after(self._chance.uniform(0, JOIN_S / 2), lambda host=host: self._join(host))  # type: ignore[misc]

    def _tick(self) -> None:
        self.event("Tick", Tick())
        self.after(TICK_S, self._tick)

    def _ask_status(self) -> None:
        self.ask(GetStatus())
        self.after(STATUS_S, self._ask_status)

    def _start(self, host: Host, key: Key) -> None:
        store = service_name(*self._store_of(host))
        process = host.running[key] = Process(key, next(self._lives), host, store)
        if key[0] == "batch-store":
            self._stores[service_name(*key)] = process
        self._register(process)

    def _store_of(self, host: Host) -> Key:
        return self.book.hosts[host.name].store if host.name else ("batch-store", 0)

    def _register(self, process: Process) -> None:
        if not process.alive:
            return
        service, instance = process.key
        request = Register(
            service=service,
            instance=instance,
            incarnation=process.incarnation,
            pid=1,
            host=process.host.name,
            endpoint="tcp://10.10.10.10:10000",
            limit_bytes=1 << 45 if service == "batch-store" else 0,
            data_id=f"{process.incarnation}",
            host_id=f"{process.host.name}/{process.host.life}",
        )
        self.ask(request, lambda answer: self._registered(process, answer))

    def _registered(self, process: Process, answer: Registered) -> None:
        first, process.registered = not process.registered, True
        if first:
            self._beat(process, answer.heartbeat_s)
            if process.key[0] == "rollout":
                self._lease(process)

    def _beat(self, process: Process, every_s: float) -> None:
        if not process.alive:
            return
        process.progress += 1
        service, instance = process.key
        beat = Heartbeat(
            service=service,
            instance=instance,
            incarnation=process.incarnation,
            state="READY",
            rss_bytes=1 << 30,
            holds_step=self.steps if service == "rollout" else -1,
            leases=[LeaseProgress(process.lease, process.progress)] if process.lease else [],
            store_bytes=len(process.held) << 20,
            store_shards=len(process.held),
            progress=process.progress,
        )

        def taken(answer: HeartbeatAck) -> None:
            if not answer.registered:
                self._register(process)

        self.ask(beat, taken)
        self.after(every_s, lambda: self._beat(process, every_s))

    def _lease(self, process: Process) -> None:
        if not process.alive:
            return
        service, instance = process.key
        request = LeaseRequest(
            stage=service,
            service=service,
            instance=instance,
            incarnation=process.incarnation,
            max_tasks=BLOCK,
            holds_step=self.steps,
        )
        self.ask(request, lambda answer: self._leased(process, answer))

    def _leased(self, process: Process, answer: LeaseGrant | Fail) -> None:
        if isinstance(answer, Fail):
            self._lease(process)
            return
        process.lease = answer.lease_id
        self.after(self._chance.uniform(*WORK_S), lambda: self._complete(process, answer))

    def _complete(self, process: Process, grant: LeaseGrant) -> None:
        if not process.alive:
            return
        results = []
        store = self._stores[process.store]
        for task in grant.batch.tasks:
            content = self._chance.getrandbits(63)
            store.held[task.task_id, task.fence] = content
            results.append(
                TaskResult(task.task_id, task.fence, Outcome.DONE, process.store, content, GROUP, GROUP * 500, 1 << 16)
            )
        count = GROUP * len(results)
        columns = {name: np.full(count, self.steps, dtype) for name, dtype in SCALARS.items()}
        columns["reward"] = np.arange(count, dtype=np.float32)
        process.lease = 0
        request = Complete(
            lease_id=grant.lease_id,
            stage=grant.stage,
            incarnation=process.incarnation,
            results=results,
            scalars=columns,
        )
        self.ask(request)
        self._lease(process)

    # ---- agents and the driver

    def _join(self, host: Host) -> None:
        host.alive, host.life = True, next(self._lives)
        host.running = {}
        self._report(host)

    def _report(self, host: Host) -> None:
        if not host.alive:
            return
        rows = [ProcessRow(*key, "READY", 1, each.incarnation, 0) for key, each in host.running.items()]
        report = HostReport(
            host=host.name, incarnation=host.life, endpoint="tcp://10.10.10.10:10000", gpus=8, processes=rows
        )
        orders, effects = self.timed("HostReport", lambda: self.book.report(report, self.now))
        self._obey(host, orders)
        self._told(effects)
        self.after(REPORT_S, lambda: self._report(host))

    def _obey(self, host: Host, orders: HostOrders) -> None:
        wanted = {(each.service, each.instance) for each in orders.processes}
        starting = {key for key in wanted if key not in host.running}
        for key in [key for key in host.running if key not in wanted]:
            del host.running[key]
        for key in sorted(starting):
            first = self.now < JOIN_S
            placeholder = host.running[key] = Process(key, 0, host, "")
            delay_s = self._chance.uniform(0, JOIN_S / 2) if first and key[0] != "batch-store" else 0.0

            def begin(key: Key = key, placeholder: Process = placeholder) -> None:
                if host.alive and host.running.get(key) is placeholder:
                    self._start(host, key)

            self.after(delay_s if first or key[0] == "batch-store" else START_S, begin)

    def _told(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, HostLost):
                gone = HostGone(host=effect.host, incarnations=effect.incarnations, cause=effect.cause)
                self.ask(gone)

    def lose(self, share: float) -> list[Host]:
        """Kill a fraction of the hosts at this moment. All of these losses are noticed together, `NOTICED_S` later."""
        lost = self._chance.sample(self.hosts, max(int(len(self.hosts) * share), 1))
        for host in lost:
            host.alive = False

        def noticed() -> None:
            for host in lost:
                self._told(self.timed("a host is lost", lambda host=host: self.book.lose(host.name, "dead", self.now)))  # type: ignore[misc]

        self.after(NOTICED_S, noticed)
        return lost

    def _drive(self) -> None:
        self.ask(GetRunInfo(driver=1))
        self._publish()
        self._next_batch()

    def _publish(self) -> None:
        ref = weights_ref(0, self.steps, CANARY)
        self._stores[ref.store].held[ref.task_id, ref.fence] = 0
        self.ask(PublishWeights(driver=1, ref=ref))

    def _next_batch(self) -> None:
        self.ask(NextBatch(driver=1, step=self.steps + 1), self._batched)

    def _batched(self, answer: StepBatch | Fail) -> None:
        if isinstance(answer, Fail):
            self._next_batch()
            return
        self.steps += 1
        self.ask(CommitStep(driver=1, step=self.steps, metrics={}))
        self._publish()
        self._next_batch()

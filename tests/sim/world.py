"""One simulated run: its processes, the supervisor that restarts them, and the faults."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import xxhash

from launch.processes.plan import DRIVER, SUPERVISOR, Resources
from launch.supervisor.events import Event, Exited, RunEnded, RunOutcome, Spawned
from launch.supervisor.server import Supervisor
from proto.registry import by_type
from shared.actor.service import PEER_LOST_STATUS
from shared.colocation.devices import NOTHING, Parts, barred_by
from shared.rundir import RunDir, checkpoint_steps, service_name
from tests.sim.actors import KINDS
from tests.sim.checks import Checks
from tests.sim.clock import CURRENT, START_S, Killed, Node, Stuck, VirtualLoop
from tests.sim.network import CALM, KIND, Network, kind_of
from tests.sim.scenario import Cut, Damage, Fault, Ghost, Key, Kill, LastWords, Scenario, Stop, Storm
from tests.sim.virtual import running, topology_of

LIMIT_S = 240.0
"""Virtual seconds within which the run must end after the last fault."""
FIRST_PID = 100_000_000
"""First simulated process id, above every process id of the machine."""
SIGKILL, SIGTERM = 9, 15
START_LIMIT_S = 600.0
MAPS_NOTHING = frozenset({"scheduler", "batch-store"})
"""Services that map no shards."""


@dataclass(frozen=True)
class SimRun(RunDir):
    """A run directory with simulated endpoints."""

    @property
    def host_id(self) -> str:
        return "sim"

    def endpoint(self, service: str, instance: int) -> str:
        return f"sim://{service}-{instance}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a world. `violation` is empty if every promise was kept."""

    violation: str
    trace_hash: int
    chain: int
    seconds: float
    """Duration in virtual seconds."""
    events: int
    history: Sequence[str] = ()


class World:
    """One run on a virtual clock. Every choice is drawn from the scenario's seed."""

    def __init__(self, scenario: Scenario, folder: Path, *, tracing: bool = False) -> None:
        self.scenario = scenario
        seed = scenario.seed
        self.ids = Random(f"ids {seed}")
        self._rng = Random(f"delays {seed}")
        self.loop = VirtualLoop(Random(f"threads {seed}"))
        self.network = Network(self, self.loop, Random(f"network {seed}"))
        self.groups: dict[int, dict[tuple[int, int], tuple[int, list[int]]]] = {}
        self.members: dict[int, dict[int, Node]] = {}
        self._devices: dict[Node, Parts] = {}
        self.nodes: dict[Key, Node] = {}
        """Living process of each service."""
        self.violation = ""
        self.complete = False
        """Whether the driver has exited because nothing was left to do."""
        self.history: list[str] = []
        self._tracing = tracing
        self._digest = xxhash.xxh3_64()
        self._events = 0
        self._next_pid = FIRST_PID
        self.run_dir = _make_run(folder)
        self._supervisor_node = self._node((SUPERVISOR, 0))
        self.checks = Checks(self)
        self._supervisor: SimSupervisor

    # ---- calls of the processes

    def current(self) -> Node:
        """Return the process whose code is running."""
        node = CURRENT.get()
        assert node is not None
        return node

    async def compute(self) -> None:
        """Advance the clock by the time that a computation takes."""
        await asyncio.sleep(self._rng.expovariate(1.0) * 0.1)

    def holds(self, parts: Parts) -> None:
        """Note the parts that the running process has on the shared devices, and check that all parts on them may
        coexist."""
        node = self.current()
        self._devices[node] = parts
        if not self.scenario.size.colocated:
            return
        for other, theirs in self._devices.items():
            both = barred_by(parts) & theirs if other is not node and other.alive else NOTHING
            self.check(
                not both, f"{node.name} has {', '.join(sorted(parts))} on the devices, {other.name} has {sorted(both)}"
            )

    def operation(self, node: Node | None, what: str) -> None:
        """Note an input or output operation of `node`, which may be its last."""
        if node is None:
            return
        node.operations += 1
        if node.strike_at is not None and node.operations >= node.strike_at and node.alive and CURRENT.get() is node:
            self.record("killed at", node.name, what)
            self.kill(node)
        if not node.alive:
            raise Killed

    def check(self, holds: bool, text: str) -> None:
        """Fail the world unless `holds`."""
        if not holds and not self.violation:
            self.violation = text
            self.record("VIOLATION", text)
            self.loop.stop()

    # ---- the history

    def note(self, what: str, source: str, target: str, header: bytes) -> None:
        """Record the fate of a message."""
        self._events += 1
        self._digest.update(f"{self.loop.time()} {what} {source} {target}".encode() + header[KIND])
        if self._tracing:
            kind, reply = kind_of(header)
            text = by_type(kind).__name__
            self._line(f"{source} {'=>' if reply else '->'} {target}  {text}{' LOST' if what == 'lost' else ''}")

    def record(self, *words: object) -> None:
        """Record anything else that happened."""
        text = " ".join(map(str, words))
        self._events += 1
        self._digest.update(f"{self.loop.time():.6f} {text}".encode())
        if self._tracing:
            self._line(text)

    def log(self, event: Mapping[str, Any]) -> None:
        """Show a line from a process's log."""
        if self._tracing:
            node = CURRENT.get()
            fields = " ".join(f"{key}={str(value)[:160]}" for key, value in event.items() if key != "event")
            self._line(f"    {node.name if node else '-'}: {event.get('event')} {fields}")

    def _line(self, text: str) -> None:
        self.history.append(f"{self.loop.time() - START_S:9.4f}  {text}")

    # ---- processes

    def _node(self, key: Key) -> Node:
        self._next_pid += 1
        node = Node(service_name(*key), self._next_pid)
        self.nodes[key] = node
        return node

    def start(self, key: Key, supervisor: str) -> Node:
        """Start a process, which takes a moment to boot."""
        node = self._node(key)
        self.record("start", node)
        self.loop.call_later(0.05 + self._rng.random() * 0.4, self._boot, key, node, supervisor, context=node.context)
        return node

    def _boot(self, key: Key, node: Node, supervisor: str) -> None:
        node.service = KINDS[key[0]](self.run_dir, key[1], supervisor)
        self.checks.watch(key, node)
        task = self.loop.create_task(_live(node.service), context=node.context)
        task.add_done_callback(lambda done: self._ended(key, node, done), context=node.context)

    def _ended(self, key: Key, node: Node, done: asyncio.Task[int]) -> None:
        status = 1 if done.cancelled() or done.exception() is not None else done.result()
        if not done.cancelled() and (error := done.exception()) is not None:
            self.record("crash", node.name, type(error).__name__, error)
        self.checks.died(key, node)
        cause = getattr(node.service, "cause", "")
        node.kill()
        self.check(status in (0, PEER_LOST_STATUS), f"{node.name} exited with status {status}: {cause}")
        self._exited(key, node, status)

    def kill(self, node: Node) -> None:
        """Kill a process now."""
        if not node.alive:
            return
        self.record("kill", node)
        key = next(key for key, each in self.nodes.items() if each is node)
        self.checks.died(key, node)
        node.kill()
        if key[0] not in MAPS_NOTHING:
            gc.collect()  # This unmaps the memory that the process had mapped.
        self._exited(key, node, -SIGKILL)

    def _exited(self, key: Key, node: Node, status: int) -> None:
        self.record("exit", node, status)
        self.loop.call_later(0.001, self._supervisor.exited, key, node, status, context=self._supervisor_node.context)

    def supervised(self, event: Event) -> None:
        """End the world when the driver has completed the run, unless the scenario continues."""
        if isinstance(event, Exited) and event.key[0] == DRIVER and event.status == 0 and event.run_complete:
            self.complete = True
            if not self.scenario.drains:
                self.loop.stop()

    # ---- faults

    def _begin(self, fault: Fault) -> None:
        self.record("fault", fault)
        match fault:
            case Kill(_, key, operations):
                node = self.nodes.get(key)
                if node is not None and operations:
                    node.strike_at = node.operations + operations
                elif node is not None:
                    self.loop.before_waiting.append(partial(self.kill, node))
            case Stop(_, key, for_s):
                node = self.nodes.get(key)
                if node is not None and node.stopped is None:
                    node.stopped = []
                    self.loop.call_later(for_s, self.loop.let_go_on, node)
            case Cut(_, one, other, for_s):
                pair = frozenset((service_name(*one), service_name(*other)))
                self.network.cut.add(pair)
                self.loop.call_later(for_s, self.network.cut.discard, pair)
            case Storm(_, weather, for_s):
                self.network.weather = weather
                self.loop.call_later(for_s, self._calm)
            case Ghost(_, key):
                self.network.ghosts.add(service_name(*key))
            case LastWords(_, key, after_s):
                self.network.last_words[service_name(*key)] = after_s
            case Damage(_, service):
                self._damage_newest_checkpoint(service)
            case _:
                raise TypeError(type(fault).__name__)

    def _damage_newest_checkpoint(self, service: str) -> None:
        model = next(each for each in topology_of(self.scenario.size).trained if each.service == service)
        folder = model.checkpoints(self.run_dir.checkpoints)
        steps = checkpoint_steps(folder)
        worker = self.nodes.get((service, 0))
        if len(self.checks.saved_steps()) < 2 or worker is None:
            return
        path = folder / f"step-{steps[-1]}" / "optimizer.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        self.loop.before_waiting.append(lambda: self.kill(worker))

    def _calm(self) -> None:
        self.network.weather = CALM

    # ---- the run

    def run(self) -> Outcome:
        """Run to the end, or to the first violation."""
        asyncio.set_event_loop(self.loop)
        with running(self):
            try:
                return self._run()
            finally:
                self._close()
                asyncio.set_event_loop(None)

    def _run(self) -> Outcome:
        context = self._supervisor_node.context
        task = self.loop.create_task(self._supervise(), context=context)
        task.add_done_callback(lambda _: self.loop.stop())
        for fault in self.scenario.faults:
            self.loop.call_at(START_S + fault.at_s, self._begin, fault)
        last = max((each.at_s + getattr(each, "for_s", 0.0) for each in self.scenario.faults), default=0.0)
        self.loop.call_at(START_S + last + LIMIT_S, self._too_late)
        try:
            self.loop.run_forever()
        except Stuck as error:
            self.check(False, f"promise 5: {error}\n{self.waits()}")
        if not self.violation and (self.scenario.drains or not self.complete):
            self._judge(task)
        elif not self.violation:
            self.checks.at_end()
        chain = self.checks.chain
        seconds = self.loop.time() - START_S
        return Outcome(self.violation, self._digest.intdigest(), chain, seconds, self._events, self.history)

    async def _supervise(self) -> RunEnded:
        self._supervisor = SimSupervisor(self)
        return await self._supervisor.run()

    def _too_late(self) -> None:
        self.check(False, f"promise 5: the run has not ended {LIMIT_S:g} s after the last fault\n{self.waits()}")

    def _judge(self, task: asyncio.Task[RunEnded]) -> None:
        if task.exception() is not None:
            error = task.exception()
            self.check(False, f"the supervisor failed: {type(error).__name__}: {error}")
            return
        ended = task.result()
        self.check(ended.outcome == RunOutcome.DONE, f"the run ended {ended.outcome}: {ended.cause}")
        if not self.violation:
            self.checks.at_end()

    def waits(self) -> str:
        """Return every unanswered request of a living process, with its sender and receiver."""
        lines: list[str] = []
        for node in self.nodes.values():
            service = node.service
            if node.alive and service is not None:
                state = getattr(service, "state", "")
                lines.append(f"  {node.name} is {state}" + (" (stopped)" if node.stopped is not None else ""))
                for client in getattr(service, "_clients", {}).values():
                    for pending in client._pending.values():
                        kind, _ = kind_of(pending.frames[0])
                        left = pending.deadline - self.loop.time()
                        lines.append(f"    waits for {client.peer}: {by_type(kind).__name__}, {left:.1f} s left")
        return "\n".join(lines)

    def _close(self) -> None:
        for node in self.nodes.values():
            node.kill()
        self.loop._scheduled.clear()  # type: ignore[attr-defined]
        self.loop._ready.clear()  # type: ignore[attr-defined]
        self.loop.close()
        shutil.rmtree(self.run_dir.path, ignore_errors=True)
        shutil.rmtree(self.run_dir.shm, ignore_errors=True)


async def _live(service: Any) -> int:
    return int(await service.run_until_stopped())


class SimProcess:
    """The supervisor's view of a child process."""

    def __init__(self, world: World, node: Node) -> None:
        self.pid = node.pid
        self._world = world
        self._node = node

    def signal(self, number: int) -> None:
        if number == SIGKILL:
            self.kill()
        elif number == SIGTERM and self._node.alive:
            if self._node.service is None:
                self.kill()
            else:
                self._world.loop.call_soon(self._node.service.request_stop, context=self._node.context)
        elif self._node.stopped is not None:
            self._world.loop.let_go_on(self._node)

    def kill(self) -> None:
        self._world.loop.before_waiting.append(lambda: self._world.kill(self._node))

    def wait(self) -> int:
        return 0


class SimSupervisor(Supervisor):
    """The supervisor, with simulated processes as its children."""

    def __init__(self, world: World) -> None:
        super().__init__(
            world.run_dir,
            {key: Resources() for key in world.scenario.size.plan()},
            start_limit_s=START_LIMIT_S,
            on_event=lambda event: None,
        )
        self._world = world
        self._programs.start_guard = lambda: None  # type: ignore[method-assign]  # nothing outlives the simulated world
        self._runner.spawn = self._start  # type: ignore[method-assign]

    def _start(self, key: Key) -> Spawned:
        node = self._world.start(key, self.sockets.endpoint)
        self._runner._children[key] = cast(Any, SimProcess(self._world, node))
        return Spawned(key, node.pid)

    def _feed(self, event: Event) -> None:
        super()._feed(event)
        self._world.supervised(event)

    def exited(self, key: Key, node: Node, status: int) -> None:
        """Do what the runner does when a real process has exited."""
        self._runner.ended(key, node.pid)
        self._exited(key, node.pid, status)


def _make_run(folder: Path) -> SimRun:
    path, shm = folder / "run", folder / "shm"
    for each in (path / "logs", path / "checkpoints", shm):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir(parents=True)
    return SimRun(path=path, sockets=folder, shm=shm)

"""Drives a supervisor's state machine with its own clock, for tests without processes or sleeps."""

from __future__ import annotations

from collections.abc import Collection

from launch.processes.plan import Key
from launch.supervisor import events as e
from launch.supervisor.state import RunLifecycle
from shared.actor.service import ProcessState

SCHEDULER, STORE, MONITOR = ("scheduler", 0), ("batch-store", 0), ("monitor", 0)


WORKER, DRIVER, REFERENCE, ROLLOUT = (
    ("policy-trainer-worker", 0),
    ("policy-trainer", 0),
    ("reference", 0),
    ("rollout", 0),
)


RECORDER = ("recorder", 0)
"""An optional service, which `PLAN` lacks."""


PLAN = [SCHEDULER, STORE, MONITOR, WORKER, DRIVER, REFERENCE, ROLLOUT]


SIGKILL = -9
START_LIMIT_S = 60.0


class World:
    """A simulated machine that carries out and records effects. Every start succeeds."""

    def __init__(self, plan: list[Key] = PLAN, save_limit_s: float = 0.0, held: Collection[str] = ()) -> None:
        self.state = RunLifecycle(plan, save_limit_s, start_limit_s=START_LIMIT_S, held=held)
        self.now = 100.0
        self.next_pid = 1
        self.pids: dict[Key, int] = {}
        self.spawned: list[Key] = []
        self.terminated: list[Key] = []
        self.retired: list[Key] = []
        self.killed: list[Key] = []
        self.died: list[e.Died] = []
        self.given_up: list[e.GivenUp] = []
        self.ended: list[e.RunEnded] = []

    def feed(self, event: e.Event) -> None:
        for effect in self.state.handle(event, self.now):
            match effect:
                case e.Spawn(key):
                    self.spawned.append(key)
                    self.pids[key] = self.next_pid
                    self.next_pid += 1
                    self.feed(e.Spawned(key, self.pids[key]))
                case e.Terminate(key, pid):
                    assert pid == self.pids[key]
                    self.terminated.append(key)
                case e.RetireProcess(key, pid):
                    assert pid == self.pids[key]
                    self.retired.append(key)
                case e.Kill(key, pid):
                    assert pid == self.pids[key]
                    self.killed.append(key)
                case e.Died():
                    self.died.append(effect)
                case e.GivenUp():
                    self.given_up.append(effect)
                case e.RunEnded():
                    self.ended.append(effect)

    def report(self, key: Key, state: str, cause: str = "") -> None:
        self.feed(e.Reported(key, self.pids[key], 1000 + self.pids[key], state, cause))

    def exit(self, key: Key, status: int, *, run_complete: bool = True) -> None:
        self.feed(e.Exited(key, self.pids[key], status, run_complete))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.feed(e.TimePassed())

    def run(self) -> World:
        """Bring every process to READY."""
        self.feed(e.TimePassed())
        for key in self.state.processes:
            self.report(key, ProcessState.READY)
        self.spawned.clear()
        return self

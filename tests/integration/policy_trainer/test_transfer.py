"""Tests weight transfers over gloo between real processes that are stopped or killed midway: no process waits for
another, none receives a partial version, and a restarted process begins a new transfer.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import pytest

from shared.rundir import RunDir
from tests.integration.policy_trainer.transfer_process import DEADLINE_S, digest, made
from tests.integration.store_process import REPOSITORY, StoreProcess, make_run

pytestmark = pytest.mark.timeout(240)
ANSWER_S = 90.0
"""Maximum seconds to wait for an answer. A process may first have to import torch on a busy machine."""


@dataclass
class End:
    """A process that runs `transfer_process`."""

    run: RunDir
    who: str
    said: Queue[dict[str, Any]] = field(default_factory=Queue)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start or restart the process."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.policy_trainer.transfer_process", str(self.run.path), self.who],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, args=(self.process, self.said), daemon=True).start()
        self.hears("ready")

    def _read(self, process: subprocess.Popen[str], said: Queue[dict[str, Any]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.put(json.loads(line))

    def tell(self, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hears(self, key: str) -> dict[str, Any]:
        """Return the next line containing `key` from the process."""
        while True:
            answer = self.said.get(timeout=ANSWER_S)
            if key in answer:
                return answer

    def receives(self, step: int, **more: object) -> dict[str, Any]:
        self.tell(step=step, **more)
        return self.hears("communicator")

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@dataclass
class Ends:
    trainer: End
    engines: list[End]

    def publish(self, step: int) -> str:
        self.trainer.tell(publish=step)
        found = self.trainer.hears("published")["digest"]
        assert isinstance(found, str)
        return found


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    run = make_run(tmp_path_factory.mktemp("transfer"), memory=1 << 30)
    store = StoreProcess(run)
    store.start()
    started: list[End] = []
    try:
        for who in ("trainer", "0", "1"):
            started.append(End(run, who))
        yield Ends(started[0], started[1:])
    finally:
        for each in started:
            each.end()
        store.kill()
        run.remove_volatile()


def test_versions_and_the_drill_arrive_complete_over_one_communicator_per_engine(ends: Ends) -> None:
    first = ends.publish(1)
    got = [engine.receives(1) for engine in ends.engines]
    assert [each["digest"] for each in got] == [first, first]
    communicators = [each["communicator"] for each in got]
    assert len(set(communicators)) == 2
    assert ends.engines[0].receives(1, drill=True)["digest"] == digest(made(-7 % 1000))
    second = ends.publish(2)
    assert second != first
    again = [engine.receives(2) for engine in ends.engines]
    assert [each["digest"] for each in again] == [second, second]
    assert [each["communicator"] for each in again] == communicators
    assert ends.engines[1].receives(1)["digest"] == first  # The version is served for as long as the store has it.


def test_a_version_that_was_not_published_is_refused_without_further_effect(ends: Ends) -> None:
    published = ends.publish(3)
    held = ends.engines[0].receives(3)["communicator"]
    refused = ends.engines[0].receives(99)
    assert "version 99 of lineage 1 was not published" in refused["failed"]
    assert ends.engines[0].receives(3) | {"seconds": 0, "at": 0} == {
        "digest": published,
        "communicator": held,
        "seconds": 0,
        "at": 0,
    }


def test_an_engine_that_stops_midway_is_abandoned_at_the_deadline_and_can_return(ends: Ends) -> None:
    published = ends.publish(4)
    stopped, other = ends.engines
    held = stopped.receives(4)["communicator"]
    stopped.tell(hurt="stop", after=3)
    stopped.tell(step=4)
    stopped.hears("hurt")
    assert other.receives(4)["digest"] == published  # Here the trainer is still waiting for the first engine.
    aborted = ends.trainer.hears("topic")
    assert (aborted["topic"], aborted["engine"]) == ("weights/aborted", 0)
    for _ in range(2):  # Here the trainer has stopped waiting for the first engine.
        assert other.receives(4)["digest"] == published
    stopped.process.send_signal(signal.SIGCONT)
    failed = stopped.hears("communicator")
    assert "failed" in failed
    assert failed["communicator"] == 0
    again = stopped.receives(4)
    assert again["digest"] == published
    assert again["communicator"] not in (0, held)


def test_an_engine_killed_midway_is_detected_at_once_and_its_next_incarnation_is_served(ends: Ends) -> None:
    published = ends.publish(5)
    killed, other = ends.engines[1], ends.engines[0]
    held = killed.receives(5)["communicator"]
    killed.tell(hurt="kill", after=5)
    killed.tell(step=5)
    killed.hears("hurt")
    aborted = ends.trainer.hears("topic")
    assert (aborted["topic"], aborted["engine"]) == ("weights/aborted", 1)
    # The loss was detected through the engine's closed sockets, not at the deadline.
    assert "not finished within" not in aborted["why"]
    assert other.receives(5)["digest"] == published
    killed.end()
    killed.start()
    again = killed.receives(5)
    assert again["digest"] == published
    assert again["communicator"] not in (0, held)


@pytest.mark.long
def test_sampling_continues_until_weights_are_sent_and_uses_shards_if_the_trainer_is_stopped(ends: Ends) -> None:
    engine = ends.engines[1]
    ends.publish(8)
    engine.tell(samples_with=8)
    engine.hears("samples")
    ends.publish(9)
    engine.tell(goes_on_with=9, within_s=30)
    sent = engine.hears("stood_still_s")
    ends.publish(10)
    ends.trainer.process.send_signal(signal.SIGSTOP)
    try:
        engine.tell(goes_on_with=10, within_s=30)
        taken = engine.hears("stood_still_s")
    finally:
        ends.trainer.process.send_signal(signal.SIGCONT)
    assert [sent["route"], taken["route"]] == ["gloo", "shards"]
    assert max(sent["stood_still_s"], taken["stood_still_s"]) < DEADLINE_S / 2


def test_a_trainer_killed_midway_leaves_an_engine_with_its_old_version(ends: Ends) -> None:
    ends.publish(6)
    engine = ends.engines[0]
    engine.receives(6)
    ends.trainer.tell(hurt="kill", after=7)
    engine.tell(step=6)
    ends.trainer.hears("hurt")
    failed = engine.hears("communicator")
    assert "failed" in failed
    assert failed["communicator"] == 0
    # The loss was detected through the trainer's closed sockets, not at the deadline.
    assert "Operation timed out" not in failed["failed"]
    ends.trainer.end()
    ends.trainer.start()
    assert "not published by this life" in engine.receives(6)["failed"]
    published = ends.publish(7)
    assert [each.receives(7)["digest"] for each in ends.engines] == [published, published]

"""Answers to heartbeats announce the newest version to engines that hold an older one."""

from __future__ import annotations

from typing import Any

import pytest

from proto.messages import Heartbeat, HeartbeatAck
from tests.unit.scheduler.bench import Bench


def told(bench: Bench, service: str, lineage: int, step: int) -> Any:
    """Return the step that is announced to an instance holding (lineage, step), or None."""
    bench.register(service, 0, 7)
    beat = Heartbeat(service=service, instance=0, incarnation=7, state="READY", holds_lineage=lineage, holds_step=step)
    ack = bench.ask(beat)
    assert isinstance(ack, HeartbeatAck)
    assert ack.registered
    return ack.weights.step if ack.weights is not None else None


@pytest.fixture
def bench() -> Bench:
    made = Bench().start()
    made.step(1)
    return made


def test_an_engine_behind_the_newest_version_is_notified_of_it(bench: Bench) -> None:
    assert told(bench, "rollout", 0, 0) == 1


@pytest.mark.parametrize("step", [1, 2])
def test_an_engine_that_holds_the_newest_version_is_not_notified(bench: Bench, step: int) -> None:
    assert told(bench, "rollout", 0, step) is None


def test_an_engine_without_weights_gets_its_first_version_with_a_lease(bench: Bench) -> None:
    assert told(bench, "rollout", 0, -1) is None


def test_a_service_without_the_policy_is_not_notified(bench: Bench) -> None:
    assert told(bench, "reference", 0, 0) is None

"""Tests what happens when processes of a real run are stopped (SIGSTOP) instead of killed: their sockets stay open, so
their peers must detect the stop. One run with short timeouts serves all tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.integration.whole_cluster import Cluster, cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 160
TASKS = 8
SILENCE_S = 15.0
QUICKSTART = Path(__file__).resolve().parents[3] / "launch" / "topologies" / "quickstart.yaml"
OVERRIDES = [
    f"run.steps={STEPS}",
    "data.eval={}",
    f"algorithm.tasks_per_step={TASKS}",
    "algorithm.group_size=4",
    "services.rollout.block_tasks=2",
    "services.policy-trainer.workers=2",
    "services.policy-trainer.collective_s=5",
    "lease.lease_s=6",
    "checkpoint.every=20",
]
STOPPED = ("policy-trainer-worker/1", "rollout/0", "reference/0", "batch-store/0", "scheduler/0", "policy-trainer/0")


@dataclass
class Seen:
    run: Cluster
    status: int = -1
    rows_at: dict[str, int] = field(default_factory=dict)
    """Number of rows that had been written when each service was stopped."""
    stopped_at: dict[str, str] = field(default_factory=dict)
    """Time at which each service was stopped, in the format of the logs."""


def _ready(run: Cluster, name: str) -> tuple[int, int] | None:
    """Return (process id, restarts) of a service, or None if it is not READY."""
    for row in run.status().get("services", []):
        if f"{row['service']}/{row['instance']}" == name and row["state"] == "READY":
            return int(row["pid"]), int(row["restarts"])
    return None


def _stop(run: Cluster, name: str, seen: Seen) -> None:
    """Stop the service while it is working; wait until it has been replaced and the run has made progress."""
    pid, restarts = run.wait_for(f"a ready {name}", lambda: _ready(run, name))
    os.kill(pid, signal.SIGSTOP)
    seen.stopped_at[name] = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
    seen.rows_at[name] = len(run.rows())
    try:
        found = run.wait_for(
            f"another {name}", lambda: again if (again := _ready(run, name)) and again[0] != pid else None
        )
        assert found[1] > restarts
        # Wait for two more rows, because a step that was already under way may complete without the service.
        run.wait_for(f"steps after {name}", lambda: len(run.rows()) >= seen.rows_at[name] + 2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("stopped")
    environment = {"TINY": "", "TINY_PING_EVERY_S": "1", "TINY_SILENCE_S": str(SILENCE_S)}
    with cluster(
        QUICKSTART,
        folder,
        *OVERRIDES,
        limit_s=580,
        launcher="tests.integration.tiny.launcher",
        environment=environment,
    ) as run:
        result = Seen(run)
        for name in STOPPED:
            run.wait_for("a step", lambda: len(run.rows()) >= 1)
            _stop(run, name, result)
        result.status = run.end()
        yield result


def test_the_run_survives_a_stop_of_each_service_and_succeeds(seen: Seen) -> None:
    assert seen.status == 0, seen.run.output()
    assert set(seen.rows_at) == set(STOPPED)
    assert max(seen.rows_at.values()) < STEPS
    assert [int(row["step"]) for row in seen.run.rows()] == list(range(1, STEPS + 1))


def test_every_task_is_trained_once(seen: Seen) -> None:
    steps = seen.run.journaled_steps()
    assert {state for state, _ in steps.values()} == {"TRAINED"}
    trained = [task for _, tasks in steps.values() for task in tasks]
    assert len(trained) == len(set(trained)) == STEPS * TASKS


def test_no_task_is_dropped_and_services_that_wait_for_the_store_keep_their_leases(seen: Seen) -> None:
    assert [row["rollout/tasks_dropped"] for row in seen.run.rows()] == [0] * STEPS
    # After the scheduler is stopped, a lease can be lost, because a completion that the scheduler had already accepted
    # may be retried.
    since, until = seen.stopped_at["batch-store/0"], seen.stopped_at["scheduler/0"]
    for waiting in ("rollout", "reference"):
        lines = [line for line in seen.run.log(waiting) if since <= line["timestamp"] < until]
        assert not [line for line in lines if line["event"] == "lease lost"]


def _causes(seen: Seen) -> dict[str, list[str]]:
    """Return the causes that the launcher logged for failed processes, by process name."""
    lines = [json.loads(line) for line in seen.run.run.log_file("supervisor", 0).read_text().splitlines()]
    causes: dict[str, list[str]] = {}
    for line in lines:
        if line["event"] == "process died":
            causes.setdefault(line["name"], []).append(line["cause"])
    return causes


def test_a_rank_that_misses_the_collective_is_named_by_the_other(seen: Seen) -> None:
    # The stop occurs during a collective or before one, so the other rank fails long before the launcher notices.
    (cause, *_) = _causes(seen)["policy-trainer-worker/0"]
    missed = ("policy-trainer-worker/1 died or did not answer", "policy-trainer-worker/1 did not join within 5 s")
    assert any(each in cause for each in missed), cause


def test_the_launcher_names_the_services_that_did_not_answer(seen: Seen) -> None:
    causes = _causes(seen)
    silent = {name for name, said in causes.items() if f"no answer for {SILENCE_S:g} s" in said}
    assert silent == set(STOPPED)

"""Tests that a real run can be scaled, drained and restarted, one process at a time, while it trains and without losing
a lease.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.tiny.harness import ROOT, ctl
from tests.integration.whole_cluster import Cluster, cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"
OVERRIDES = (
    "run.steps=100000",
    "data.eval={}",
    "algorithm.tasks_per_step=8",
    "algorithm.mini_batch_tasks=8",
    "algorithm.group_size=4",
    "services.rollout.block_tasks=2",
    "checkpoint.every=20",
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(QUICKSTART, tmp_path_factory.mktemp("rolling"), *OVERRIDES, limit_s=580) as running:
        running.wait_for("two steps", lambda: len(running.rows()) >= 2)
        yield running


def services(run: Cluster) -> dict[str, dict[str, Any]]:
    return {f"{row['service']}/{row['instance']}": row for row in run.status().get("services", [])}


def state(run: Cluster, name: str) -> str:
    return str(services(run).get(name, {}).get("state", ""))


def goes_on(run: Cluster) -> None:
    rows = len(run.rows())
    run.wait_for("more steps", lambda: len(run.rows()) >= rows + 3)


def events(run: Cluster, instance: int) -> list[str]:
    lines = run.run.log_file("rollout", instance).read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


def holders(run: Cluster) -> set[str]:
    """Return the instances that sampled the tasks of the newest trained step."""
    trained = {step: ids for step, (kind, ids) in run.journaled_steps().items() if kind == "TRAINED"}
    found: set[str] = set()
    for task_id in trained[max(trained)]:
        story = json.loads(ctl(run.path, "trace", task_id, "--json").stdout or '{"story": []}')["story"]
        found |= {each["service"] for each in story if each["what"] == "rollout completed"}
    return found


def test_a_second_engine_takes_leases_and_a_drained_engine_finishes_its_own(live: Cluster) -> None:
    assert ctl(live.path, "scale", "rollout", "2").returncode == 0
    live.wait_for("rollout/1", lambda: state(live, "rollout/1") == "READY")
    live.wait_for("tasks sampled by rollout/1", lambda: "rollout/1" in holders(live))
    assert ctl(live.path, "drain", "rollout/0").returncode == 0
    live.wait_for("rollout/0 to end", lambda: state(live, "rollout/0") == "DRAINED")
    assert not {"lease handed back", "lease lost", "block dropped"} & set(events(live, 0))
    goes_on(live)
    assert holders(live) == {"rollout/1"}
    assert ctl(live.path, "scale", "rollout", "1").returncode == 0
    live.wait_for("rollout/1 to end", lambda: (state(live, "rollout/0"), state(live, "rollout/1")) == READY_DRAINED)
    assert not {"lease handed back", "lease lost", "block dropped"} & set(events(live, 1))
    goes_on(live)


READY_DRAINED = ("READY", "DRAINED")


def test_the_run_continues_while_everything_is_restarted(live: Cluster) -> None:
    before = {name: row for name, row in services(live).items() if row["state"] == "READY"}
    assert ctl(live.path, "restart", "--all").returncode == 0

    def again() -> bool:
        now = services(live)
        return all(
            now.get(name, {}).get("state") == "READY" and now[name]["restarts"] == row["restarts"] + 1
            for name, row in before.items()
        )

    live.wait_for("a restart of each", again)
    after = services(live)
    assert all(after[name]["pid"] != row["pid"] for name, row in before.items())
    assert after["rollout/1"]["state"] == "DRAINED"
    goes_on(live)
    steps = [row["step"] for row in live.rows()]
    assert steps == sorted(set(steps))
    live.process.send_signal(signal.SIGINT)
    assert live.end() == 1

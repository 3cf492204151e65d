"""Tests that each warning of a run is recorded once, whatever happens to the monitor, and that topics, console and
status show it. Small real runs that go wrong cause the matching warnings and no others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from proto.messages import TopicRow
from services.monitor.warnings.desk import WarningFile
from services.scheduler.metrics_file import MetricsFile
from shared.rundir import RunDir
from shared.runfiles import warnings
from shared.topology import load
from tests.integration.monitor.test_monitor import Monitor, Sender
from tests.integration.tiny.harness import QUICKSTART, ctl, launched, wait_for
from tests.integration.whole_cluster import cluster
from tests.unit.monitor.recorded import FOLDER, Recording, read

SILENT = "kl-blow-up"


@pytest.fixture(scope="module")
def collapse() -> Recording:
    """Return a recorded quickstart run with 8 tasks per step in which the reward collapsed."""
    return read(FOLDER / "sick" / "small-batch.jsonl.xz")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    topology = load(QUICKSTART, [f"monitor.warnings.off={SILENT}"])
    run = RunDir.create(tmp_path / "run", topology=topology, shm_root=tmp_path / "shm")
    topology.dump_resolved(run.topology)
    yield run
    run.remove_volatile()


@pytest.fixture
def monitor(run: RunDir) -> Iterator[Monitor]:
    here = Monitor(run)
    yield here
    here.kill()


def told(run: RunDir) -> list[tuple[int, str]]:
    return [(each.step, each.kind) for each in warnings.read(run.warnings)]


async def topics(run: RunDir) -> list[TopicRow]:
    sender = Sender(run)
    try:
        return [row for row in (await sender.snapshot()).rows if row.topic.startswith("warning/")]
    finally:
        await sender.close()


def test_warnings_survive_kills_and_rewinds_and_are_not_repeated(
    run: RunDir, monitor: Monitor, collapse: Recording
) -> None:
    rows = [json.dumps(row) for row in collapse.rows]
    file = MetricsFile(run.metrics, lambda _: [], 0, 1)
    for row in rows[:100]:
        file.write(row)
    first = [(10, "zero-variance"), (30, "reward-flat")]
    wait_for("the first warnings", lambda: told(run) == first)
    monitor.kill()
    file.discard(1, 20, {})
    for row in rows[20:60]:
        file.write(row)
    monitor.start()
    wait_for("a monitor that has read the rows", lambda: len(asyncio.run(topics(run))) == 2)
    file.discard(2, 5, {})
    for row in rows[5:]:
        file.write(row)
    wait_for("the warning of step 189", lambda: told(run)[2:] == [(189, "truncation")])
    file.close()
    newest = {row.topic: row.values for row in asyncio.run(topics(run))}
    assert set(newest) == {"warning/zero-variance", "warning/reward-flat", "warning/truncation"}
    assert [warnings.of_topic(newest[f"warning/{each.kind}"]) for each in warnings.read(run.warnings)] == warnings.read(
        run.warnings
    )
    logged = [json.loads(line) for line in run.log_file("monitor", 0).read_text().splitlines()]
    assert [(each["step"], each["kind"]) for each in logged if each["event"] == "warning"] == told(run)


def test_the_console_and_the_status_show_each_warning_once(tmp_path: Path, collapse: Recording) -> None:
    with launched(tmp_path / "run") as here:
        here.wait_ready()
        run = here.run
        early = warnings.WarningRecord(1.0, 1, "gradient", "an early one", "nothing")
        with run.metrics.open("w") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in collapse.rows[:40])
        wait_for("two warnings", lambda: len(told(run)) == 2)
        own = WarningFile(run.warnings)
        own.append(early)
        own.close()
        lines = [warnings.line_of(each) for each in warnings.read(run.warnings)]
        status = json.loads(ctl(run.path, "status", "--json").stdout)
        assert [each["kind"] for each in status["warnings"]] == ["zero-variance", "reward-flat", "gradient"]
        table = " ".join(ctl(run.path, "status").stdout.split())
        assert all(line in table for line in lines)
        ctl(run.path, "stop")
        _, output, _ = here.end()
    assert [line for line in output.splitlines() if line.startswith("warning at")] == lines


def test_a_monitor_that_cannot_write_its_warnings_continues(run: RunDir) -> None:
    run.warnings.mkdir()
    monitor = Monitor(run)
    try:
        wait_for("the monitor's state", lambda: _answers(run))
        logged = [json.loads(line) for line in run.log_file("monitor", 0).read_text().splitlines()]
        assert any(each["event"].startswith("no warnings will be given") for each in logged)
        assert monitor.process.poll() is None
    finally:
        monitor.kill()


def _answers(run: RunDir) -> bool:
    asyncio.run(topics(run))
    return run.log_file("monitor", 0).exists() and '"READY"' in run.log_file("monitor", 0).read_text()


REWARDS = """
import random, time

def always_one(sample):
    time.sleep(0.02)
    if random.random() < 0.2:
        raise ValueError("no number in the answer")
    return 1.0
"""
SMALL = (
    "run.steps=24",
    "data.eval={}",
    "algorithm.tasks_per_step=8",
    "algorithm.mini_batch_tasks=8",
    "algorithm.kl=null",
    "services.reference=null",
)
LIMIT_S = 560.0


def warned(folder: Path, *overrides: str) -> set[str]:
    """Run the quickstart with overrides and return the kinds of its warnings; check that the console shows each warning
    once.
    """
    (folder / "my_odd_rewards.py").write_text(REWARDS)
    environment = {"PYTHONPATH": str(folder)}
    chosen = (*SMALL, *overrides)
    with cluster(QUICKSTART, folder, *chosen, limit_s=LIMIT_S, environment=environment, calls=False) as running:
        assert running.end() == 0
        told = warnings.read(running.run.warnings)
        output = (running.path / "cluster.out").read_text().splitlines()
    assert [line for line in output if line.startswith("warning at")] == [warnings.line_of(each) for each in told]
    kinds = [each.kind for each in told]
    assert len(kinds) == len(set(kinds))
    return set(kinds)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_warns_about_a_reward_that_is_slow_often_fails_and_never_varies(tmp_path: Path) -> None:
    kinds = warned(tmp_path, "reward.function=my_odd_rewards:always_one", "reward.processes=1")
    assert (
        {"reward-slow", "reward-failing", "reward-flat"}
        <= kinds
        <= {
            "reward-slow",
            "reward-failing",
            "reward-flat",
            "trainer-starved",
        }
    )


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_warns_about_a_short_length_limit_and_a_tiny_learning_rate(tmp_path: Path) -> None:
    kinds = warned(tmp_path, "sampling.max_new_tokens=3", "optimizer.lr=1.0e-12", "algorithm.tasks_per_step=16")
    assert {"truncation", "learning-rate"} <= kinds


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_same_run_gives_no_warnings_of_kinds_that_are_turned_off(tmp_path: Path) -> None:
    off = "monitor.warnings.off=[truncation, learning-rate]"
    kinds = warned(tmp_path, "sampling.max_new_tokens=3", "optimizer.lr=1.0e-12", "run.steps=12", off)
    assert not {"truncation", "learning-rate"} & kinds

"""Tests `ctl doctor` and `ctl trace` on one real run, which the tests disturb one after another."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from proto.ids import new_incarnation
from proto.messages import GetStory, PutBegin, PutGrant, PutTask, Story
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from tests.integration.tiny.harness import ROOT, ctl
from tests.integration.whole_cluster import Cluster, cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"
NAMED_S = 10.0
"""Maximum seconds until the cause of a stall is named."""
REWARDS = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def steered(sample):
    time.sleep(0.03)  # The run is watched, not measured, and leaves the processors to other tests.
    while (HERE / "hang").exists():
        time.sleep(0.05)
    if (HERE / "judge").exists():
        raise ConnectionRefusedError("the judge is away")
    return float(len(sample.completion) % 2)
"""
OVERRIDES = (
    "run.steps=100000",
    "data.eval={}",
    "algorithm.tasks_per_step=8",
    "algorithm.mini_batch_tasks=8",
    "algorithm.group_size=4",
    "services.rollout.block_tasks=4",
    "services.batch-store.memory=256MiB",
    "checkpoint.every=20",
    "reward.function=my_steered_rewards:steered",
    "reward.timeout_s=60",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operate")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Cluster]:
    (folder / "my_steered_rewards.py").write_text(REWARDS)
    environment = {"PYTHONPATH": str(folder)}
    with cluster(QUICKSTART, folder, *OVERRIDES, limit_s=280, environment=environment) as running:
        running.wait_for("two steps", lambda: len(running.rows()) >= 2)
        yield running


def doctor(run: Cluster) -> dict[str, Any]:
    done = ctl(run.path, "doctor", "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == bool(found["wrong"]), done.stderr
    return found


def named(run: Cluster, *words: str, stalls: str = "") -> dict[str, Any]:
    """Return the finding that contains these words and is the cause of a wait whose line contains `stalls`. Fail if the
    finding does not appear within NAMED_S.
    """
    began = time.monotonic()

    def found() -> dict[str, Any] | None:
        texts = doctor(run)["wrong"]
        found = (each for each in texts if all(word in each["text"] for word in words))
        return next((each for each in found if not stalls or any(stalls in line for line in each["stalls"])), None)

    finding: dict[str, Any] = run.wait_for(" ".join(words), found)
    took_s = time.monotonic() - began
    assert took_s < NAMED_S, (took_s, finding)
    return finding


def goes_on(run: Cluster) -> None:
    rows = len(run.rows())
    run.wait_for("more steps", lambda: len(run.rows()) >= rows + 2)
    run.wait_for("nothing wrong", lambda: not doctor(run)["wrong"])


def test_doctor_finds_nothing_wrong_with_a_run_that_trains(live: Cluster) -> None:
    goes_on(live)
    done = ctl(live.path, "doctor")
    assert "nothing is wrong" in done.stdout.splitlines()[0]
    assert done.returncode == 0


def test_doctor_names_a_hanging_function_its_line_and_the_step_that_waits(live: Cluster, folder: Path) -> None:
    (folder / "hang").touch()
    try:
        finding = named(live, "rollout/0", "reward", "my_steered_rewards.py:10", stalls="leased to rollout/0")
    finally:
        (folder / "hang").unlink()
    assert finding["since_s"] > 0
    assert finding["limit_s"] == 60
    assert finding["stalls"][0].startswith("scheduler/0: step ")
    goes_on(live)


def test_doctor_names_an_absent_judge_and_says_that_nothing_is_leased(live: Cluster, folder: Path) -> None:
    (folder / "judge").touch()
    try:
        named(live, "the judge of my_steered_rewards:steered is not responding", "is away", stalls="nothing is leased")
    finally:
        (folder / "judge").unlink()
    goes_on(live)


def test_doctor_names_a_full_store_and_its_producers(live: Cluster) -> None:
    async def fill() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        store = Client(context, live.run.endpoint("batch-store", 0), "batch-store/0", new_incarnation())
        held: list[int] = []
        try:
            for nbytes in (64 << 20, 8 << 20, 1 << 20, 64 << 10):
                with suppress(RpcError):  # The store answers BUSY once a put of this size no longer fits.
                    while True:
                        begin = PutBegin(
                            put_id=secrets.token_hex(16), nbytes=nbytes, tasks=[PutTask("train/999999/0", 1)]
                        )
                        grant = await store.call(begin, PutGrant, deadline_s=5)
                        held.append(os.open(grant.path, os.O_RDWR))
                        fcntl.flock(held[-1], fcntl.LOCK_SH)  # The lock shows that a producer is at work.
            await asyncio.to_thread(named, live, "batch-store/0 is full", "MiB in use", stalls="PutBegin")
        finally:
            for descriptor in held:
                os.close(descriptor)
            store.close()
            context.term()

    asyncio.run(fill())
    goes_on(live)


def test_doctor_names_a_stopped_process_and_trace_shows_what_happened_to_its_tasks(live: Cluster) -> None:
    pid = live.wait_for("a rollout", lambda: live.pid("rollout"))
    os.kill(pid, signal.SIGSTOP)
    try:
        finding = named(live, f"rollout/0 (process {pid}) is stopped by a signal", stalls="leased to rollout/0")
    finally:
        os.kill(pid, signal.SIGKILL)
    goes_on(live)
    line = next(each for each in finding["stalls"] if "leased to rollout/0" in each)
    task_id = line.rpartition("(")[2].partition(",")[0].partition(")")[0]
    story = json.loads(ctl(live.path, "trace", task_id, "--json").stdout)["story"]
    reason = next(each for each in story if each["what"] == "to be sampled again")["facts"]["because"]
    assert reason.startswith("rollout/0 restarted")
    assert ("supervisor/0", "process died") in [(each["service"], each["what"]) for each in story]


def test_trace_shows_the_history_of_a_task_from_admission_to_collection(live: Cluster) -> None:
    trained = [ids for state, ids in live.journaled_steps().values() if state == "TRAINED"]
    task_id = trained[0][0]
    story = json.loads(ctl(live.path, "trace", task_id, "--json").stdout)["story"]
    what = [each["what"] for each in story]
    wanted = ["admitted", "leased for rollout", "rollout completed", "leased for reference", "reference completed"]
    assert [each for each in what if each in wanted] == wanted
    assert what.index("batched") < what.index("trained")
    leased = next(each for each in story if each["what"] == "leased for rollout")
    assert leased["service"] == "rollout/0"
    assert {"lease", "fence", "version", "lineage"} <= set(leased["facts"])
    completed = next(each for each in story if each["what"] == "rollout completed")
    assert completed["facts"]["store"] == "batch-store/0"
    assert "token_ids" in completed["facts"]["keys"]
    assert completed["facts"]["bytes"] > 0
    assert [each["at"] for each in story] == sorted(each["at"] for each in story)


def test_other_machines_get_the_same_history_from_the_supervisor(live: Cluster) -> None:
    task_id = next(ids for state, ids in live.journaled_steps().values() if state == "TRAINED")[0]

    async def told() -> list[str]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        supervisor = Client(context, live.run.endpoint("supervisor", 0), "supervisor", new_incarnation())
        try:
            rows = (await supervisor.call(GetStory(task_id=task_id), Story, deadline_s=30)).rows
            with pytest.raises(RpcError, match="train/0/12345678"):
                await supervisor.call(GetStory(task_id="train/0/12345678"), Story, deadline_s=30)
            return [row.what for row in rows]
        finally:
            supervisor.close()
            context.term()

    here = json.loads(ctl(live.path, "trace", task_id, "--json").stdout)["story"]
    assert here
    assert asyncio.run(told())[: len(here)] == [each["what"] for each in here]  # It might be longer by now.


def test_trace_of_an_unknown_task_gives_a_one_line_error_and_exit_status_2(live: Cluster) -> None:
    done = ctl(live.path, "trace", "train/0/12345678")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "train/0/12345678" in done.stderr


def test_a_task_is_still_traced_after_the_end_of_the_run(live: Cluster) -> None:
    """This test must be the last one, because it stops the run."""
    assert ctl(live.path, "stop").returncode == 0
    assert live.end() == 1
    trained = [ids for state, ids in live.journaled_steps().values() if state == "TRAINED"]
    done = ctl(live.path, "trace", trained[0][0])
    assert done.returncode == 0, done.stderr
    assert "collected" in done.stdout
    assert "cleared" in done.stdout
    assert ctl(live.path, "doctor").returncode == 1

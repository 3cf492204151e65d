"""Tests that a deterministic run gives bit-identical results with a different number of engines, after kills, and when
resumed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.scheduler.journal_files import rewinds
from services.scheduler.recovery import TAIL_LOST
from tests.integration import parity_run as parity
from tests.integration.damage import flip, shards
from tests.integration.journal_cut import can_be_cut, cut
from tests.integration.whole_cluster import Cluster

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with parity.start(folder) as run:
        assert run.end() == 0, run.output()
        assert run.rows()[-1]["step"] == parity.STEPS
        assert {row["rollout/staleness_max"] for row in run.rows()[1:]} == {1.0}
        yield run.path


def test_the_compared_values_differ_from_step_to_step(undisturbed: Path) -> None:
    rows = parity.trained_rows(undisturbed)
    assert len({row["policy/grad_norm"] for row in rows[1:]}) == parity.STEPS
    assert len(set(parity.bits(undisturbed).values())) > 2


def test_a_run_with_two_engines_and_every_service_killed_once_gives_bit_identical_results(
    undisturbed: Path, tmp_path: Path
) -> None:
    """The second run has the same seed, but it has two engines and another route for the weights, and its services are
    killed."""
    kills = {2: ["rollout", "reference"], 4: ["batch-store", "scheduler"], 5: ["policy-trainer"]}
    kills |= {7: ["policy-trainer-worker", "monitor"]}
    with parity.start(tmp_path, "services.rollout.instances=2", "services.rollout.weights=gloo") as run:
        for step, services in kills.items():
            run.wait_for(f"step {step}", lambda step=step: parity.committed(run, step))
            for service in services:
                parity.kill(run, service)
        assert run.end() == 0, run.output()
    assert parity.forks(run) >= Counter({"policy-trainer-worker": 2, "reference": 2, "rollout": 3})
    loaded = [line for line in run.log("policy-trainer") if line["event"] == "workers loaded"][-1]
    assert (loaded["source"], loaded["replay"]) == ("snapshot", 0)
    assert parity.differences(undisturbed, run.path) == []
    assert max(row["sync/sent"] for row in run.rows()[1:]) == 1.0


@pytest.mark.long
def test_a_worker_killed_long_after_its_checkpoint_replays_only_the_steps_after_its_snapshot(
    undisturbed: Path, tmp_path: Path
) -> None:
    """The processes of the second run are not forked from spares; those of the first run are."""
    given = ("run.spares=false", "checkpoint.every=100", "checkpoint.memory_every=4")
    with parity.start(tmp_path, *given) as run:
        run.wait_for("step 5", lambda: parity.committed(run, 5))
        parity.kill(run, "policy-trainer-worker")
        assert run.end() == 0, run.output()
        log = run.log("policy-trainer")
    loaded = [line for line in log if line["event"] == "workers loaded"][-1]
    assert (loaded["source"], loaded["step"] % 4, loaded["lineage"]) == ("snapshot", 0, 1)
    assert 0 < loaded["replay"] < 4
    replayed = [line["step"] for line in log if line["event"] == "replayed"]
    assert replayed == list(range(loaded["step"] + 1, loaded["step"] + 1 + loaded["replay"]))
    assert parity.differences(undisturbed, run.path) == []


@pytest.mark.timeout(600)
def test_a_run_resumed_after_a_stop_and_after_a_kill_of_the_launcher_gives_bit_identical_results(
    undisturbed: Path, tmp_path: Path
) -> None:
    """Stopping the run saves an extra checkpoint at its last step, and the resumed run continues exactly there. When
    the launcher is killed, the store's memory is lost and the steps after the checkpoint are sampled and trained
    again.
    """
    with parity.start(tmp_path, "checkpoint.every=100") as run:
        run.wait_for("step 1", lambda: parity.committed(run, 1))
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 1
        rows = (run.path / "metrics.jsonl").read_text()
        stopped = int(run.rows()[-1]["step"])
        assert f"stopping: saving step {stopped} (again: kill now)" in run.output()
        assert [path.name for path in (run.path / "checkpoints").glob("step-*")] == [f"step-{stopped}"]
    with parity.resume(tmp_path, "checkpoint.every=100") as run:
        run.wait_for("a step after the stop", lambda: parity.committed(run, stopped + 1))
        begun = [line for line in run.log("policy-trainer") if line["event"] == "workers loaded"]
        assert begun[-1]["step"] == stopped
        assert (run.path / "metrics.jsonl").read_text().startswith(rows)
        assert "back to step" not in run.output()
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
    with parity.resume(tmp_path) as run:
        assert run.end() == 0, run.output()
        assert "will be trained again, with bit-identical results" in run.output()
    assert parity.differences(undisturbed, run.path) == []
    assert not (run.path / "metrics.discarded.jsonl").exists()


def lose_end(run: Cluster, chance: random.Random) -> None:
    """Kill the scheduler and cut its journal, while the launcher is stopped and cannot restart the scheduler."""

    def ready() -> bool:
        """Stop the scheduler at a moment when the end of its log can be lost. From time to time, SQLite copies the log
        into the database and restarts the log.
        """
        os.kill(pid, signal.SIGSTOP)
        if can_be_cut(run.run.journal):
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    run.process.send_signal(signal.SIGSTOP)
    pid = parity.process_of(run, "scheduler")
    run.wait_for("an end of the log", ready)
    os.kill(pid, signal.SIGKILL)
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert cut(run.run.journal, chance, least=0.5)  # so that steps are lost


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_that_loses_the_end_of_its_journal_gives_bit_identical_results(undisturbed: Path, tmp_path: Path) -> None:
    """First the scheduler alone is killed, so stores and workers have data from steps that its journal no longer has.
    Then the whole run is killed and resumed."""
    chance = random.Random(1)
    with parity.start(tmp_path) as run:
        run.wait_for("step 5", lambda: parity.committed(run, 5))
        lose_end(run, chance)
        run.process.send_signal(signal.SIGCONT)
        run.wait_for("the return to a checkpoint", lambda: TAIL_LOST in run.output())
        run.wait_for("step 7", lambda: parity.committed(run, 7))
        lose_end(run, chance)
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
    with parity.resume(tmp_path) as run:
        assert run.end() == 0, run.output()
        assert f"{TAIL_LOST}; " in run.output()
    assert parity.differences(undisturbed, run.path) == []


@pytest.mark.long
def test_shards_damaged_in_any_state_are_recreated_and_the_results_are_bit_identical(
    undisturbed: Path, tmp_path: Path
) -> None:
    """A bit flips in a shard that the worker reads next, in one that a restarted store drops, and in one of a trained
    task that a replay needs."""
    with parity.start(tmp_path, "checkpoint.memory_every=null") as run:
        run.wait_for("step 1", lambda: parity.committed(run, 1))
        damage_unread(run, "ref_logprobs")
        run.wait_for("the report of the worker", lambda: parity.losses(run) >= 1)
        found = parity.losses(run)
        damage_unread(run, "rollout_logprobs", restarts_store=True)
        assert parity.losses(run) > found
        run.wait_for("step 4", lambda: parity.committed(run, 4))
        run.wait_for("the checkpoint of step 3", (run.path / "checkpoints" / "step-3").is_dir)
        assert parity.damage(run, "token_ids", set(run.journaled_steps()[4][1]).__contains__)
        parity.kill(run, "policy-trainer-worker")
        assert run.end() == 0, run.output()
    assert parity.differences(undisturbed, run.path) == []
    assert [step for step, *_ in rewinds(run.run.journal)] == [3]


def damage_unread(run: Cluster, key: str, *, restarts_store: bool = False) -> None:
    """Flip a bit of a shard that the worker has not read. With `restarts_store`, wait until the store's restart reveals
    the damage."""

    def attempt() -> bool:
        with parity.stopped(run, "policy-trainer-worker"):
            damaged = parity.damage(run, key, parity.unread(run))
            if damaged and restarts_store:
                before = parity.losses(run)
                parity.kill(run, "batch-store")
                run.wait_for("the inventory of the store", lambda: parity.losses(run) > before)
        return bool(damaged)

    run.wait_for(f"a finished task that is in no step, with {key}", attempt)


# ------------------------------------------------------------------------------------------------------ longer runs


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("key", ["token_ids", "versions", "ref_logprobs"])
def test_a_run_with_damage_to_each_kind_of_shard_gives_bit_identical_results(
    undisturbed: Path, tmp_path: Path, key: str
) -> None:
    """A bit flips in each step, in a shard that some process might have read or be about to read."""
    with parity.start(tmp_path) as run:
        for step in range(1, parity.STEPS - 3):  # The last tasks are read before they can be damaged.
            run.wait_for(f"step {step}", lambda step=step: parity.committed(run, step))
            damage_unread(run, key, restarts_store=step % 4 == 0)
        assert run.end() == 0, run.output()
    assert parity.losses(run) > 1
    assert parity.differences(undisturbed, run.path) == []


@pytest.mark.long
@pytest.mark.parametrize("killed", ["batch-store", "policy-trainer-worker", ""])
def test_a_run_whose_shared_memory_is_deleted_gives_bit_identical_results(
    undisturbed: Path, tmp_path: Path, killed: str
) -> None:
    with parity.start(tmp_path) as run:
        run.wait_for("step 4", lambda: parity.committed(run, 4))
        shutil.rmtree(run.run.shm, ignore_errors=True)
        if killed:
            parity.kill(run, killed)
        assert run.end() == 0, run.output()
    assert parity.differences(undisturbed, run.path) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_with_damage_to_log_probs_that_the_worker_has_stored_gives_bit_identical_results(
    undisturbed: Path, tmp_path: Path
) -> None:
    """A bit flips in log-probs that the worker has put into the store for the open step but has not read back. The
    driver, which asks for the gradient next, is stopped in the meantime. Not every stop falls within that interval, so
    the test continues to stop the driver until the last step.
    """
    damaged = step = 0
    with parity.start(tmp_path) as run:
        run.wait_for("step 1", lambda: parity.committed(run, 1))
        while run.process.poll() is None and not parity.committed(run, parity.STEPS - 1):
            if parity.committed(run, step + 1) and damage_proximal(run):  # once per step
                damaged, step = damaged + 1, int(run.rows()[-1]["step"])
        assert run.end() == 0, run.output()
    assert damaged > 1
    assert parity.differences(undisturbed, run.path) == []


def damage_proximal(run: Cluster) -> bool:
    """Let the driver send its next request while the worker is stopped, then stop the driver, and flip a bit of the
    log-probs that the worker puts into the store. Return whether the request was for log-probs.
    """

    def known() -> set[Path]:
        return {file for file, _, key, _ in shards(run.run.shm / "batch-store-0") if key == "prox_logprobs"}

    with contextlib.ExitStack() as driver:
        with parity.stopped(run, "policy-trainer-worker"):
            before = known()
            time.sleep(0.2)
            driver.enter_context(parity.stopped(run, "policy-trainer"))
        until = time.monotonic() + 1.0
        while time.monotonic() < until and not known() - before:
            pass
        for file in known() - before:
            flip(file, next(offset for each, _, _, offset in shards(file.parent) if each == file))
            return True
    return False


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_task_is_trained_once_despite_damage_in_a_run_that_is_not_deterministic(tmp_path: Path) -> None:
    small = (*(each for each in parity.SMALL if "deterministic" not in each), "staleness=1")
    with parity.start(tmp_path, small=small) as run:
        for step, key in ((1, "ref_logprobs"), (2, "rollout_logprobs"), (3, "token_ids")):
            run.wait_for(f"step {step}", lambda step=step: parity.committed(run, step))
            damage_unread(run, key, restarts_store=step == 2)
        run.wait_for("step 5", lambda: parity.committed(run, 5))
        parity.damage(run, "token_ids", set(run.journaled_steps()[5][1]).__contains__)
        parity.kill(run, "policy-trainer-worker")
        assert run.end() == 0, run.output()
    assert [row["step"] for row in run.rows()] == list(range(1, parity.STEPS + 1))
    trained = [name for state, names in run.journaled_steps().values() if state == "TRAINED" for name in names]
    assert len(trained) == len(set(trained)) == 16 * parity.STEPS
    assert parity.losses(run) >= 3


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "override", ["staleness=0", "services.policy-trainer.workers=2"], ids=["staleness 0", "two workers"]
)
def test_runs_with_other_settings_give_bit_identical_results_after_kills(tmp_path: Path, override: str) -> None:
    paths = []
    for name in ("undisturbed", "killed"):
        with parity.start(tmp_path / name, override) as run:
            if name == "killed":
                for step, service in ((2, "rollout"), (4, "policy-trainer-worker"), (7, "policy-trainer")):
                    run.wait_for(f"step {step}", lambda step=step: parity.committed(run, step))
                    parity.kill(run, service)
            assert run.end() == 0, run.output()
        paths.append(run.path)
    assert parity.differences(*paths) == []


SERVICES = (
    "rollout",
    "reference",
    "batch-store",
    "scheduler",
    "policy-trainer",
    "policy-trainer-worker",
    "monitor",
    "recorder",
)
QUICKSTART = ("run.deterministic=true", "run.steps=30", "checkpoint.every=7", "services.rollout.block_tasks=32")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_quickstart_gives_bit_identical_results_after_random_kills(tmp_path: Path) -> None:
    """Setting PARITY_SEED to the printed number repeats the kills of a failed run."""
    seed = int(os.environ.get("PARITY_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"PARITY_SEED={seed}")
    chance = random.Random(seed)
    with parity.start(tmp_path / "undisturbed", small=QUICKSTART) as undisturbed:
        assert undisturbed.end() == 0, undisturbed.output()
    steps = sorted(chance.sample(range(29), 12))
    resumed_at = chance.choice(steps)
    with parity.start(tmp_path / "killed", small=QUICKSTART) as run:
        hurt(run, chance, [step for step in steps if step <= resumed_at])
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
    with parity.resume(tmp_path / "killed", small=QUICKSTART) as run:
        hurt(run, chance, [step for step in steps if step > resumed_at])
        assert run.end() == 0, run.output()
    assert parity.differences(undisturbed.path, run.path) == []


def hurt(run: Cluster, chance: random.Random, steps: list[int]) -> None:
    for step in steps:
        run.wait_for(f"step {step}", lambda step=step: parity.committed(run, step))
        for service in chance.sample(SERVICES, chance.choice([1, 1, 1, 2])):
            print(f"step {step}: {service}, process {parity.kill(run, service)}")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_with_damage_that_the_reference_finds_gives_bit_identical_results(
    undisturbed: Path, tmp_path: Path
) -> None:
    """A bit flips in a rollout that no reference has read, because the reference is stopped."""
    with parity.start(tmp_path) as run:
        run.wait_for("step 1", lambda: parity.committed(run, 1))
        folder = run.run.shm / "batch-store-0"

        def attempt() -> bool:
            with parity.stopped(run, "reference"):
                before = set(folder.glob("*.blk"))
                until = time.monotonic() + 5
                while time.monotonic() < until:
                    for file, task_id, key, offset in shards(folder):
                        if file not in before and task_id.startswith("train/") and key == "token_ids":
                            flip(file, offset)
                            return True
            return False

        run.wait_for("a rollout that no reference has read", attempt)
        run.wait_for("the report of the reference", lambda: parity.losses(run) >= 1)
        assert run.end() == 0, run.output()
    assert parity.differences(undisturbed, run.path) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_with_damaged_weights_that_an_engine_finds_gives_bit_identical_results(
    undisturbed: Path, tmp_path: Path
) -> None:
    """A bit flips in a version of the weights that no engine has read, because the engine is stopped."""
    with parity.start(tmp_path) as run:
        run.wait_for("step 2", lambda: parity.committed(run, 2))
        folder = run.run.shm / "batch-store-0"
        with parity.stopped(run, "rollout"):
            held = run.newest_weights()
            run.wait_for("another version", lambda: run.newest_weights() != held)
            newest = run.newest_weights()
            flip(newest, next(offset for file, _, _, offset in shards(folder) if file == newest))
        run.wait_for("the report of the engine", lambda: parity.losses(run) >= 1)
        assert run.end() == 0, run.output()
    assert parity.differences(undisturbed, run.path) == []

"""Tests that each tracker's real library receives every committed row once, whatever is killed, and that no process
waits for a tracker."""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from services.tracker import ledger
from services.tracker.server import END_S
from tests.integration.tiny.harness import wait_for
from tests.integration.tracker import read_back
from tests.integration.tracker.read_back import Held
from tests.integration.tracker.tracked import Tracked, tracked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EXIT_S = 10.0
"""Maximum seconds for a process to close its sockets and exit on a busy machine."""


def to_tensorboard(folder: Path) -> AbstractContextManager[Tracked]:
    return tracked(folder, "tensorboard", {})


def to_wandb(folder: Path) -> AbstractContextManager[Tracked]:
    return tracked(folder, "wandb", {"project": "p", "mode": "offline"}, WANDB_SILENT="true")


def to_mlflow(folder: Path) -> AbstractContextManager[Tracked]:
    return tracked(folder, "mlflow", {"uri": f"sqlite:///{folder}/mlflow.db"})


def to_trackio(folder: Path) -> AbstractContextManager[Tracked]:
    return tracked(folder, "trackio", {"project": "p"}, TRACKIO_DIR=str(folder / "trackio"))


EVERY = pytest.mark.parametrize(
    ("tracker", "read"),
    [
        pytest.param(to_tensorboard, read_back.tensorboard, id="tensorboard"),
        pytest.param(to_wandb, read_back.wandb, id="wandb"),
        pytest.param(to_mlflow, read_back.mlflow, id="mlflow", marks=pytest.mark.long),
        pytest.param(to_trackio, read_back.trackio, id="trackio", marks=pytest.mark.long),
    ],
)
Maker = Callable[[Path], AbstractContextManager[Tracked]]


@EVERY
def test_each_row_is_reported_once_despite_kills_of_the_tracker_and_a_rewind(
    tmp_path: Path, tracker: Maker, read: Callable[[Tracked], Held]
) -> None:
    with tracker(tmp_path) as here:
        here.commit(*range(6))
        here.warn("entropy-collapse", "entropy fell to 0.01", step=4)
        here.start()
        here.wait_sent()
        here.kill()
        here.rewind(3)
        here.commit(4, 5, 6, 7)
        here.sample("train", 6, "an answer <b>in training</b>")
        here.sample("eval/held", 6, "an answer in the evaluation")
        here.start()
        here.wait_sent()
        here.stop("failed", "rollout/0 died")
        held = read(here)
        assert held.rows == here.committed
        assert "grpo" in held.configuration
        assert "sk-secret" not in held.configuration
        assert "entropy fell to 0.01; lower lr" in held.notes
        assert "back to step 3: steps 4-5 were rolled back; lineage 1 begins" in held.notes
        assert "the run ended: failed (rollout/0 died)" in held.notes
        assert held.state in ("", "FAILED")
        assert here.ledger().see == read_back.SEE[here.name].format(run=here.run.path, id=here.ledger().id)
        assert "an answer <b>in training</b>" in held.samples
        assert "an answer in the evaluation" in held.samples
        assert ledger.unsent(here.run.path, here.name) == ""


@EVERY
def test_a_run_that_is_resumed_continues_in_the_tracker(
    tmp_path: Path, tracker: Maker, read: Callable[[Tracked], Held]
) -> None:
    with tracker(tmp_path) as here:
        here.commit(0, 1, 2)
        here.start()
        here.wait_sent()
        here.stop("stopped", "interrupted")
        before = here.ledger()
        assert (before.ended, before.sure) == ("stopped", 3)
        here.commit(3, 4)
        here.start()
        here.wait_sent()
        here.stop()
        after = here.ledger()
        assert (after.id, after.ended, after.sure) == (before.id, "done", 5)
        held = read(here)
        assert held.rows == here.committed
        assert "the run ended: stopped (interrupted)" in held.notes
        assert "the run ended: done" in held.notes
        assert held.state in ("", "FINISHED")


@EVERY
def test_training_samples_are_reported_without_any_evaluation(
    tmp_path: Path, tracker: Maker, read: Callable[[Tracked], Held]
) -> None:
    with tracker(tmp_path) as here:
        here.commit(*range(21), evaluated=False)
        for step in (9, 10, 20):
            here.sample("train", step, f"answer {step}.", rewards={"exact": 0.25, "short": 0.75}, versions=[7, 8])
        assert here.command().returncode == 0
        held = read(here)
        assert held.rows == here.committed
        assert [step for step in (9, 10, 20) if f"answer {step}." in held.samples] == [10, 20]
        for text in ("reward/exact", "0.25", "reward/short", "0.75", "7 8", "trained"):
            assert text in held.samples


def test_samples_that_are_written_after_the_next_step_are_reported(tmp_path: Path) -> None:
    with to_tensorboard(tmp_path) as here:
        here.commit(10, 11, evaluated=False)
        here.start()
        here.wait_sent()
        here.sample("train", 10, "a late answer")
        here.stop()
        assert "a late answer" in read_back.tensorboard(here).samples


def test_samples_are_reported_while_the_next_step_runs(tmp_path: Path) -> None:
    with to_tensorboard(tmp_path) as here:
        here.commit(10, evaluated=False)
        here.start()
        here.wait_sent()
        here.sample("train", 10, "an early answer")
        wait_for("samples", lambda: "an early answer" in read_back.tensorboard(here).samples)


def kill_at_random(here: Tracked, seed: int, lives: int) -> None:
    """Commit steps and roll some of them back while the tracker is repeatedly killed and restarted."""
    chance, step = random.Random(seed), -1
    for _ in range(lives):
        here.start()
        until = time.monotonic() + chance.uniform(0.3, 6.0)
        while time.monotonic() < until:
            if step > 3 and chance.random() < 0.05:
                step = chance.randrange(step - 3, step)
                here.rewind(step)
            step += 1
            here.commit(step)
            time.sleep(chance.uniform(0.0, 0.1))
        here.kill()
    here.start()
    here.wait_sent()
    here.stop()


def test_event_files_have_every_step_once_after_kills(tmp_path: Path) -> None:
    with to_tensorboard(tmp_path) as here:
        kill_at_random(here, seed=1, lives=2)
        assert read_back.tensorboard(here).rows == here.committed


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3])
@EVERY
def test_every_step_arrives_once_whenever_the_tracker_is_killed(
    tmp_path: Path, tracker: Maker, read: Callable[[Tracked], Held], seed: int
) -> None:
    with tracker(tmp_path) as here:
        kill_at_random(here, seed, lives=6)
        assert read(here).rows == here.committed


def test_rows_that_a_killed_tracker_wrote_but_did_not_record_are_not_written_again(tmp_path: Path) -> None:
    with to_tensorboard(tmp_path) as here:
        here.commit(*range(8))
        assert here.command().returncode == 0
        kept = here.ledger()
        kept.sent = kept.sure = 5  # as if the process had been killed before it recorded the last rows
        ledger.write(here.run.path, here.name, kept)
        here.rewind(6)
        here.commit(7, 8)
        assert here.command().returncode == 0
        assert read_back.tensorboard(here).rows == here.committed


def test_rows_after_a_torn_record_are_read(tmp_path: Path) -> None:
    with to_tensorboard(tmp_path) as here:
        here.commit(0, 1, 2)
        assert here.command().returncode == 0
        [path] = (here.run.path / "tensorboard" / "lineage-0").iterdir()
        with path.open("ab") as file:
            file.write(path.read_bytes()[:50])
        here.commit(3)
        assert here.command().returncode == 0
        assert read_back.tensorboard(here).rows == here.committed


@contextmanager
def silent_server() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_tracker_whose_server_never_answers_delays_the_end_no_longer_than_its_time_limit(tmp_path: Path) -> None:
    with silent_server() as url, tracked(tmp_path, "mlflow", {"uri": url}) as here:
        here.commit(0, 1, 2)
        here.start()
        wait_for("a tracker that is about to ask the server", lambda: here.ledger().pid != 0, 60.0)
        begun = time.monotonic()
        here.stop("stopped", "interrupted")
        assert time.monotonic() - begun < END_S + EXIT_S
        assert ledger.unsent(here.run.path, "mlflow").startswith("mlflow lacks steps 0-2")


def test_stopped_tracker_process_is_killed_and_loses_nothing(tmp_path: Path) -> None:
    with to_tensorboard(tmp_path) as here:
        here.commit(0, 1)
        here.start()
        here.wait_sent()
        assert here.process is not None
        here.process.send_signal(signal.SIGSTOP)
        here.commit(2, 3)
        here.kill()
        done = here.command()
        assert (done.returncode, done.stdout) == (0, "tensorboard: has every step and the end of the run\n")
        assert read_back.tensorboard(here).rows == here.committed


def test_the_command_says_which_steps_are_missing_when_the_server_is_unreachable(tmp_path: Path) -> None:
    with tracked(tmp_path, "trackio", {"project": "p", "url": "http://127.0.0.1:9"}) as here:
        here.commit(0, 1, 2)
        done = here.command()
        assert done.returncode == 1
        assert done.stderr.startswith("trackio lacks steps 0-2 (")
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1


def test_a_second_process_does_not_feed_the_same_tracker(tmp_path: Path) -> None:
    with to_tensorboard(tmp_path) as here:
        here.commit(0)
        here.start()
        here.wait_sent()
        done = here.command()
        assert done.returncode == 2
        assert "another process is feeding its trackers" in done.stderr

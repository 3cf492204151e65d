"""Tests that a supervised run continues and ends as it would without its trackers, whatever they do, and reports the
steps that they lack.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.scheduler.metrics_file import MetricsFile
from services.tracker import ledger
from services.tracker.server import END_S
from tests.integration.tiny.harness import (
    QUICKSTART,
    ROOT,
    SERVICES,
    TINY,
    Launched,
    assert_nothing_left,
    ctl,
    launched,
    wait_for,
)
from tests.integration.tracker.read_back import wandb_positions
from tests.integration.tracker.test_trackers import silent_server
from tests.integration.whole_cluster import cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EXIT_S = 15.0
"""Maximum seconds that the other processes take to exit on a busy machine."""


def commit(here: Launched, steps: int) -> None:
    file = MetricsFile(here.run.metrics, lambda _: [], -1, 0)
    for step in range(steps):
        file.write(json.dumps({"step": float(step), "loss/policy": 0.5}))
    file.close()


def wait_line(here: Launched, text: str) -> str:
    """Return the next console line that contains `text`."""
    assert here.process.stdout is not None
    for line in here.process.stdout:
        if text in line:
            return line
    raise AssertionError(f"the launcher exited without printing a line that contains {text!r}")


def test_a_run_reports_an_unreachable_tracker_and_the_steps_that_the_tracker_lacks(tmp_path: Path) -> None:
    sets = ("--set", "monitor.trackio={project: p, url: 'http://127.0.0.1:9'}")
    with launched(tmp_path / "run", *sets, tiny=TINY) as here:
        line = wait_line(here, "tracker/0: trackio: ")
        assert "all steps wait in metrics.jsonl" in line
        assert here.process.poll() is None
        commit(here, 4)
        assert ctl(here.path, "stop").returncode == 0
        status, _, errors = here.end(120)
        assert status == 1
        [told] = [line for line in errors.splitlines() if "trackio" in line]
        assert told.startswith("trackio lacks steps 0-3 (")
        assert told.endswith(f"; python -m launch.ctl --run {here.path} track trackio sends the rest")


def test_a_hanging_tracker_delays_the_end_of_the_run_no_longer_than_its_time_limit(tmp_path: Path) -> None:
    with silent_server() as url:
        sets = ("--set", f"monitor.trackio={{project: p, url: '{url}'}}", "--set", "monitor.tensorboard={}")
        with launched(tmp_path / "run", *sets) as here:
            here.wait_ready(SERVICES + 1)
            commit(here, 3)
            wait_for("event files", lambda: ledger.read(here.path, "tensorboard").sent == 3)
            begun = time.monotonic()
            assert ctl(here.path, "stop").returncode == 0
            _, _, errors = here.end(120)
            assert time.monotonic() - begun < END_S + EXIT_S
            assert "trackio lacks steps 0-2" in errors
            assert "tensorboard" not in errors  # this tracker also received the end of the run
            assert ledger.read(here.path, "tensorboard").ended == "stopped"
            assert_nothing_left(here.run)


def test_a_killed_tracker_is_restarted_and_sends_each_step_once(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "--set", "monitor.tensorboard={}") as here:
        pid = here.wait_ready(SERVICES + 1)["tracker/0"]["pid"]
        commit(here, 3)
        wait_for("first rows", lambda: ledger.read(here.path, "tensorboard").sent == 3)
        os.kill(pid, signal.SIGKILL)
        wait_for("next life", lambda: ledger.read(here.path, "tensorboard").pid not in (pid, 0))
        file = MetricsFile(here.run.metrics, lambda _: [], 2, 0)
        file.write(json.dumps({"step": 3.0, "loss/policy": 0.5}))
        wait_for("later rows", lambda: ledger.read(here.path, "tensorboard").sent == 4)


@pytest.mark.long
def test_resume_continues_the_same_run_in_each_tracker(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    sets = ("monitor.wandb={project: p, mode: offline}", f"monitor.mlflow.uri={uri}", "data.eval={}")
    ids = []
    for steps in (3, 6):
        with cluster(QUICKSTART, tmp_path, *sets, f"run.steps={steps}", limit_s=180, resume=steps > 3) as here:
            assert here.process.wait(180) == 0, (here.run.path / "cluster.out").read_text()
        ids.append({name: ledger.read(here.run.path, name).id for name in ("wandb", "mlflow")})
    assert ids[0] == ids[1]
    # On a busy machine, a run can end before the trackers have everything.
    subprocess.run([sys.executable, "-m", "launch.ctl", "--run", str(here.run.path), "track"], cwd=ROOT, check=True)
    files = sorted((here.run.path / "trackers" / "wandb").glob(f"wandb/offline-run-*-{ids[0]['wandb']}/*.wandb"))
    assert len(files) > 1
    assert wandb_positions(files) == list(range(6))
    client = MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("rlbus").experiment_id])
    history = client.get_metric_history(run.info.run_id, "step")
    assert sorted((each.step, each.value) for each in history) == [(step - 1, step) for step in range(1, 7)]
    assert run.info.status == "FINISHED"


@pytest.mark.long
def test_a_run_continues_without_a_tracker_that_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_API_KEY": "", "HOME": str(tmp_path), "NETRC": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with launched(tmp_path / "run", "--set", "monitor.wandb.project=p") as here:
        line = wait_line(here, "tracker/0: ")
        assert "WANDB_API_KEY" in line
        assert "the run goes on without it" in line
        assert here.process.poll() is None
        assert ctl(here.path, "stop").returncode == 0
        here.end(120)


def test_a_run_continues_without_a_tracker_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In every process of the run, importing trackio fails as if it were not installed.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['trackio'] = None")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sets = ("--set", "monitor.trackio.project=p", "--set", "monitor.tensorboard={}")
    with launched(tmp_path / "run", *sets, tiny=TINY) as here:
        assert "trackio: trackio not installed" in wait_line(here, "tracker/0: ")
        here.wait_ready(SERVICES + 1)
        commit(here, 3)
        wait_for("event files", lambda: ledger.read(here.path, "tensorboard").sent == 3)
        [row] = [each for each in here.status()["services"] if (each["service"], each["instance"]) == ("tracker", 0)]
        assert (row["state"], row["restarts"]) == ("READY", 0)
        assert ctl(here.path, "stop").returncode == 0
        _, printed, errors = here.end(120)
        assert f"tensorboard tensorboard --logdir {here.path}/tensorboard\n" in printed
        [warning] = [line for line in errors.splitlines() if line.startswith("warning: ")]
        assert "monitor.trackio: trackio not installed; the run goes on without trackio" in warning
        remedy = "trackio not installed in this environment; run `make setup-trackers`"
        assert f"trackio lacks steps 0-2 ({remedy}); python -m launch.ctl" in errors

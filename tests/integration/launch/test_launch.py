"""Tests the launcher with real processes, without torch: start order, kills, restarts, and every way in which a run can
end.

Tiny services replace those that need torch and, in tests of the launcher alone, the scheduler and the batch store.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.tiny.harness import (
    QUICKSTART,
    ROOT,
    SERVICES,
    TINY,
    Launched,
    assert_nothing_left,
    ctl,
    ctl_process,
    environment,
    launched,
    processes_of,
    wait_for,
)

SMALL_PACKAGES = {
    *("proto", "services", "shared", "zmq", "msgspec", "msgpack", "msgpack_numpy", "numpy", "ml_dtypes", "xxhash"),
    *("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "ruamel", "yaml"),
    *("structlog", "rich", "pygments", "psutil", "cryptography"),
    *("attr", "greenlet", "cython_runtime"),  # structlog and zmq import these if they are installed
}
STATUS_KEYS = {
    *("run", "step", "steps", "version", "services", "tasks", "store"),
    *("dropped", "lost", "last_drop", "spares", "troubles", "warnings", "hosts"),
}
SERVICE_KEYS = {
    "service",
    "instance",
    "state",
    "pid",
    "host",
    "incarnation",
    "restarts",
    "heartbeat_age_s",
    "rss_bytes",
}


def cluster(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch.cluster", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment(), "CUDA_VISIBLE_DEVICES": ""},
        timeout=30,
        check=False,
    )


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """A run for tests that leave it running."""
    with launched(tmp_path_factory.mktemp("live") / "run") as here:
        here.wait_ready()
        yield here


def test_a_run_is_done_when_the_driver_is_done_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        here.wait_ready()
        run = here.run
        (run.path / "finish").touch()
        status, output, errors = here.end()
    assert status == 0, errors
    assert str(run.export) in output
    assert_nothing_left(run)


def test_first_services_are_ready_before_the_others_start(live: Launched) -> None:
    names = [line.split()[0] for line in (live.path / "starts").read_text().splitlines()]
    assert set(names[:2]) == {"scheduler", "batch-store"}
    assert set(names[2:]) == {"policy-trainer", "policy-trainer-worker", "rollout", "reference"}


@pytest.mark.parametrize("service", ["scheduler", "batch_store", "monitor", "recorder"])
def test_light_service_imports_only_small_packages(service: str) -> None:
    """A light service starts within a second; importing torch, transformers or a web framework would take several
    seconds.
    """
    tell = f"import sys, services.{service}.server; print(*{{name.partition('.')[0] for name in sys.modules}})"
    told = subprocess.run(
        [sys.executable, "-c", tell],
        cwd=ROOT,
        env=environment(),
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    packages = {name for name in told.stdout.split() if not name.startswith("_")} - sys.stdlib_module_names
    assert packages <= SMALL_PACKAGES


def test_every_killed_service_is_restarted(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        before = here.wait_ready()
        for name, row in before.items():
            os.kill(row["pid"], signal.SIGKILL)
            wait_for(f"the end of {name}", lambda old=row["pid"]: not Path(f"/proc/{old}").exists())
        after = here.wait_ready()
        ranks = [pid for pid in processes_of(here.path) if psutil.Process(pid).cmdline()[-1] == "rank"]
        # The ranks of the killed service have also exited.
        assert [psutil.Process(pid).ppid() for pid in ranks] == [after["rollout/0"]["pid"]]
    assert {name: row["restarts"] for name, row in after.items()} == dict.fromkeys(before, 1)
    assert all(after[name]["incarnation"] != row["incarnation"] for name, row in before.items())


def test_stopped_service_is_found_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_PING_EVERY_S", "0.2")
    monkeypatch.setenv("TINY_SILENCE_S", "2")
    with launched(tmp_path / "run") as here:
        before = here.wait_ready()
        os.kill(before["rollout/0"]["pid"], signal.SIGSTOP)
        wait_for("the end of the stopped one", lambda: not Path(f"/proc/{before['rollout/0']['pid']}").exists())
        after = here.wait_ready()
    assert {name: row["restarts"] for name, row in after.items() if row["restarts"]} == {"rollout/0": 1}


def hang_line(path: Path, service: str) -> dict[str, str]:
    """Return the line in `service`'s log that reports that it hung."""
    lines = [json.loads(line) for line in (path / "logs" / f"{service}-0.jsonl").read_text().splitlines()]
    found: dict[str, str] = next(line for line in lines if line["event"] == "hangs, and is killed")
    return found


def test_service_that_hangs_in_c_writes_the_stacks_of_its_threads_before_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_PING_EVERY_S", "0.2")
    monkeypatch.setenv("TINY_SILENCE_S", "2")
    with launched(tmp_path / "run") as here:
        pid = here.wait_ready()["rollout/0"]["pid"]
        (here.path / "hang-rollout").touch()
        wait_for("the end of the hung rollout", lambda: not Path(f"/proc/{pid}").exists())
        line = hang_line(here.path, "rollout")
        assert here.wait_ready()["rollout/0"]["restarts"] == 1
        shown = ctl(here.path, "logs", "rollout", "-n", "200").stdout
    assert (line["pid"], line["cause"]) == (pid, "no answer for 2 s")
    assert "most recent call first" in line["stacks"]
    assert "in _until_told_to_hang" in line["stacks"]
    assert "in _until_told_to_hang" in shown


def test_the_log_says_that_a_stopped_service_could_not_write_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_PING_EVERY_S", "0.2")
    monkeypatch.setenv("TINY_SILENCE_S", "2")
    with launched(tmp_path / "run") as here:
        pid = here.wait_ready()["rollout/0"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        wait_for("the end of the stopped rollout", lambda: not Path(f"/proc/{pid}").exists())
        assert "stopped (SIGSTOP)" in hang_line(here.path, "rollout")["stacks"]


@pytest.mark.long
def test_slow_services_and_a_stopped_launcher_cause_no_false_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every processor has four busy processes, services are suspended for less than the limit, and the launcher is
    suspended for longer."""
    monkeypatch.setenv("TINY_PING_EVERY_S", "0.2")
    monkeypatch.setenv("TINY_SILENCE_S", "3")
    with launched(tmp_path / "run") as here, contextlib.ExitStack() as load:
        rows = here.wait_ready()
        for _ in range(4 * (os.cpu_count() or 1)):
            busy = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
            load.callback(busy.wait)
            load.callback(busy.kill)
        for name in ("rollout/0", "scheduler/0", "policy-trainer/0"):
            pause(rows[name]["pid"], 1.5)
        pause(here.process.pid, 6)
        time.sleep(1)
        after = here.wait_ready()
    assert {name: row["restarts"] for name, row in after.items()} == dict.fromkeys(rows, 0)


def test_the_time_limit_for_an_answer_grows_with_the_gaps_between_a_services_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_PING_EVERY_S", "0.1")
    monkeypatch.setenv("TINY_SILENCE_S", "3")
    with launched(tmp_path / "run") as here:
        rows = here.wait_ready()
        slow, other = rows["rollout/0"]["pid"], rows["reference/0"]["pid"]
        pause(slow, 2)  # Five times this gap is 10 s.
        here.wait_ready()  # This wait leaves the service time to answer.
        pause(slow, 4.5)
        assert here.wait_ready()["rollout/0"]["restarts"] == 0
        os.kill(other, signal.SIGSTOP)  # This service's answers have had no long gap.
        wait_for("the end of the reference", lambda: not Path(f"/proc/{other}").exists(), 9)
        assert here.wait_ready()["reference/0"]["restarts"] == 1


def pause(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.long
def test_stopped_service_is_found_within_25_seconds(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        pid = here.wait_ready()["rollout/0"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        wait_for("the end of the stopped rollout", lambda: not Path(f"/proc/{pid}").exists(), 40)
        assert 15 < time.monotonic() - begun < 25


def test_a_killed_launcher_leaves_no_process_shared_memory_or_socket_behind(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        here.wait_ready()
        run = here.run
        here.process.kill()
        assert_nothing_left(run)


def test_a_killed_launcher_leaves_no_stopped_service_behind(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        rows = here.wait_ready()
        run = here.run
        os.kill(rows["rollout/0"]["pid"], signal.SIGSTOP)
        here.process.kill()
        assert_nothing_left(run)


def test_a_launcher_killed_while_services_start_leaves_nothing_behind(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        wait_for("a started service", lambda: (here.path / "logs" / "rollout-0.out").exists())
        run = here.run
        here.process.kill()
        assert_nothing_left(run)


def test_a_killed_guard_is_replaced(tmp_path: Path) -> None:
    def guards() -> list[int]:
        found = ((each.pid, each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]))
        return [pid for pid, line in found if "launch.processes.guard" in line and str(run.sockets) in line]

    with launched(tmp_path / "run") as here:
        rows = here.wait_ready()
        run = here.run
        [guard] = guards()
        os.kill(guard, signal.SIGKILL)
        wait_for("another guard", lambda: guards() not in ([], [guard]))
        os.kill(rows["rollout/0"]["pid"], signal.SIGSTOP)  # only a guard that knows this process can end it
        here.process.kill()
        assert_nothing_left(run)


def test_an_interrupt_drains_the_run_and_says_how_to_resume_it(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        here.wait_ready()
        run = here.run
        here.process.send_signal(signal.SIGINT)
        status, output, errors = here.end()
    assert status == 1
    assert "--resume" in output
    assert "stopped" in errors
    assert_nothing_left(run)
    log = (run.logs / "supervisor-0.jsonl").read_text()
    assert all(json.loads(line)["status"] == 0 for line in log.splitlines() if '"exited"' in line)


def test_second_interrupt_kills_processes_that_do_not_exit(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        rows = here.wait_ready()
        run = here.run
        begun = time.monotonic()
        here.process.send_signal(signal.SIGINT)
        wait_for("the driver to end", lambda: not Path(f"/proc/{rows['policy-trainer/0']['pid']}").exists())
        here.process.send_signal(signal.SIGINT)
        status, _, _ = here.end()
    assert status == 1
    assert time.monotonic() - begun < 10
    assert_nothing_left(run)


def test_run_fails_with_the_cause_and_log_of_a_service_that_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "fail-rollout").touch()
    with launched(tmp_path / "run") as here:
        status, _, errors = here.end()
    assert status == 1
    assert "rollout/0: RuntimeError: rollout was told to fail" in errors
    assert "service failed" in errors
    assert "Traceback" in errors or "RuntimeError" in errors.split("service failed")[1]


def test_service_whose_failure_no_restart_can_fix_fails_the_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "refuse-rollout").touch()
    with launched(tmp_path / "run") as here:
        status, _, errors = here.end()
        assert_nothing_left(here.run)
        log = (here.run.logs / "supervisor-0.jsonl").read_text()
    assert status == 1
    assert (
        "the run failed: rollout/0: model of rollout: cannot be loaded (another start would fail, too)"
        in errors.splitlines()
    )
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["status"] for line in lines if line["event"] == "exited" and line["name"] == "rollout/0"] == [78]


def test_resume_continues_in_the_same_directory(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        here.wait_ready()
        here.process.kill()  # The guard stops the services, and the second launcher waits until it has done so.
        with launched(tmp_path / "run", "--resume") as again:
            wait_for("the second launcher's services", lambda: len(again.status().get("services", [])) == SERVICES)
            again.wait_ready()
            (again.path / "finish").touch()
            status, _, errors = again.end()
    assert status == 0, errors


def test_resume_with_other_data_is_refused(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        here.wait_ready()
        here.process.send_signal(signal.SIGINT)
        here.end()
    done = cluster(str(QUICKSTART), "--run-dir", str(tmp_path / "run"), "--resume", "--set", "run.seed=7")
    assert done.returncode == 2
    assert "run.seed" in done.stderr


def test_directory_of_a_live_run_is_refused(live: Launched) -> None:
    done = cluster(str(QUICKSTART), "--run-dir", str(live.path), "--resume")
    assert done.returncode == 2
    assert "in use by another launcher" in done.stderr


def test_dry_run_shows_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    done = cluster(str(QUICKSTART), "--run-dir", str(tmp_path / "run"), "--dry-run")
    assert done.returncode == 0
    assert "services.policy_trainer.worker" in done.stdout
    assert not (tmp_path / "run").exists()


def test_dry_run_shows_the_gpus_of_each_service_and_the_missing_ones() -> None:
    wanted = ("services.policy-trainer.gpus=2", "services.reference.gpus=2", "services.rollout={gpus: 1, instances: 2}")
    colocate = str(QUICKSTART.with_name("colocate.yaml"))
    done = cluster(colocate, "--dry-run", *(each for value in wanted for each in ("--set", value)))
    plan = {line.split()[0]: line.split()[2] for line in done.stdout.splitlines() if "services." in line}
    assert [plan[f"{name}/1"] for name in ("policy-trainer-worker", "reference", "rollout")] == ["1", "1", "1"]
    assert plan["scheduler/0"] == "-"
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "2 GPUs wanted (policy-trainer 2, reference 2 (the same), rollout 2 (the same))" in line
    assert "CUDA_VISIBLE_DEVICES names 0" in line


def test_every_topology_error_is_reported_in_one_line_with_exit_status_2(tmp_path: Path) -> None:
    done = cluster(str(QUICKSTART), "--set", "run.stepz=3", "--set", "algorithm.group_size=none")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) >= 2
    assert "run.stepz" in done.stderr


def test_a_store_larger_than_shared_memory_is_refused_and_the_message_names_its_size(tmp_path: Path) -> None:
    done = cluster(str(QUICKSTART), "--dry-run", "--set", "services.batch-store.memory=9000GiB")
    assert done.returncode == 2
    assert "9216000 MiB wanted" in done.stderr
    assert "--shm-size" in done.stderr


def test_bad_rows_cause_a_warning_and_a_file_without_good_rows_an_error(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n{"no": 1}\nnot json\n')
    arguments = (str(QUICKSTART), "--dry-run", "--set", f"data.train.source=jsonl:{rows}")
    done = cluster(*arguments)
    assert done.returncode == 0
    assert "2 of 3 rows" in done.stderr
    assert f"{rows}:2" in done.stderr
    rows.write_text("not json\n")
    done = cluster(*arguments)
    assert done.returncode == 2
    assert "1 of 1 rows" in done.stderr


# ------------------------------------------------------------------------------------------------------ ctl


def test_status_json_has_the_promised_fields_and_types(live: Launched) -> None:
    before = wait_for(
        "heartbeats of all services",
        lambda: (
            (answer := live.status())
            and sum(row["heartbeat_age_s"] is not None for row in answer["services"]) == SERVICES - 1
            and answer
        ),
    )
    done = ctl_process(live.path, "status", "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert set(status) == set(before) == STATUS_KEYS
    assert len(status["services"]) == SERVICES
    for row in status["services"]:
        assert set(row) == SERVICE_KEYS
        assert row["pid"] > 0
        assert row["rss_bytes"] > 1 << 20
        assert row["restarts"] == 0
    assert set(status["store"]) == {"bytes", "limit_bytes", "shards"}
    assert status["tasks"] == {"PENDING": 3}


def test_status_works_without_the_scheduler(live: Launched) -> None:
    scheduler = live.wait_ready()["scheduler/0"]["pid"]
    os.kill(scheduler, signal.SIGSTOP)
    try:
        done = ctl(live.path, "status", "--json")
    finally:
        os.kill(scheduler, signal.SIGCONT)
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert len(answer["services"]) == SERVICES
    assert answer["steps"] == 200


def test_a_run_whose_sockets_were_deleted_fails_instead_of_waiting_forever(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        here.wait_ready()
        sockets = here.run.sockets
        shutil.rmtree(sockets)
        status, output, errors = here.end()
    assert status == 1
    line = f"{sockets}, the folder of the run's sockets, was deleted; continue the run with --resume"
    assert line in output + errors


def test_stop_ends_the_run(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        here.wait_ready()
        run = here.run
        assert ctl(here.path, "stop").returncode == 0
        status, output, _ = here.end()
    assert status == 1
    assert "--resume" in output
    assert_nothing_left(run)
    gone = ctl_process(here.path, "stop")
    assert gone.returncode == 1
    assert len(gone.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["restart", "rolout"], "did you mean 'rollout'"),
        (["restart", "rollout/5"], "available: rollout/0"),
        (["logs", "schedular"], "did you mean 'scheduler'"),
    ],
)
def test_unknown_service_gives_a_one_line_error_and_exit_status_2(
    live: Launched, arguments: list[str], said: str
) -> None:
    done = ctl(live.path, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_run_gives_a_one_line_error_and_exit_status_2(tmp_path: Path) -> None:
    done = ctl_process(tmp_path, "status")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_logs_are_readable_and_bounded(live: Launched) -> None:
    done = ctl(live.path, "logs", "rollout", "-n", "1")
    raw = ctl(live.path, "logs", "supervisor", "--json")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    assert "rollout/0" in done.stdout
    assert all(json.loads(line)["service"] == "supervisor" for line in raw.stdout.splitlines())


def test_restart_stops_and_starts_one_service(live: Launched) -> None:
    before = live.wait_ready()
    done = ctl(live.path, "restart", "rollout/0")
    assert done.returncode == 0, done.stderr
    wait_for("a new rollout", lambda: live.wait_ready()["rollout/0"]["pid"] != before["rollout/0"]["pid"])
    after = live.wait_ready()
    assert {name for name in before if after[name]["pid"] != before[name]["pid"]} == {"rollout/0"}
    assert after["rollout/0"]["restarts"] == 1


# ------------------------------------------------------------------- the real scheduler and batch store


def test_killed_real_light_services_and_a_driver_that_exits_early_are_restarted(tmp_path: Path) -> None:
    """The real scheduler knows that no step was committed, so the driver is not done."""
    with launched(tmp_path / "run", tiny=TINY) as here:
        here.wait_ready()
        run = here.run
        for service in ("scheduler", "batch-store", "monitor", "recorder"):
            before = here.wait_ready()[f"{service}/0"]
            os.kill(before["pid"], signal.SIGKILL)
            wait_for(
                f"a new life of {service}",
                lambda service=service, before=before: (
                    here.wait_ready()[f"{service}/0"]["incarnation"] != before["incarnation"]
                ),
            )
        os.kill(here.wait_ready()["policy-trainer/0"]["pid"], signal.SIGTERM)
        wait_for("a new driver", lambda: here.wait_ready()["policy-trainer/0"]["restarts"] == 1)
        here.process.send_signal(signal.SIGINT)
        status, _, errors = here.end()
    assert status == 1, errors
    assert_nothing_left(run)


@pytest.mark.long
def test_a_killed_launcher_of_real_services_leaves_nothing_behind(tmp_path: Path) -> None:
    with launched(tmp_path / "run", tiny=TINY) as here:
        here.wait_ready()
        run = here.run
        here.process.kill()
        assert_nothing_left(run)

"""Tests small parts of the launcher: progress, logs, the sweep of killed runs, and the merge of two views of a run."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from launch.checks import preflight
from launch.commands.place import lock
from launch.processes import guard
from launch.processes.plan import threads_of
from launch.viewers.progress import PLAIN_EVERY_S, Metrics, Screen, Troubles, duration, evaluation_lines, rewind_text
from launch.viewers.status import _merge
from proto.messages import DropReason, HostRow, LossReason, ProcessRow, ServiceRow, Status, TroubleKind, TroubleRow
from shared.rpc.errors import RpcError
from shared.rundir import ABANDONED_S, RunDir, release, sweep_abandoned
from shared.runfiles.lines import FollowedFile
from shared.runfiles.logs import last_lines, readable, tail
from shared.topology import load

QUICKSTART = Path(__file__).resolve().parents[3] / "launch" / "topologies" / "quickstart.yaml"


def write_row(path: Path, **row: float) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_progress_is_updated_as_rows_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(tmp_path, steps=10)
    metrics.poll(0.0)
    assert metrics.last == {}
    write_row(path, **{"step": 0, "eval/heldout/accuracy": 0.25})
    write_row(path, **{"step": 1, "reward/mean": 0.5})
    metrics.poll(1.0)
    write_row(path, **{"step": 2, "reward/mean": 0.75, "throughput/tokens_per_s": 1234.0})
    metrics.poll(3.0)
    write_row(path, **{"step": 3, "reward/mean": 0.75, "throughput/tokens_per_s": 1234.0})
    metrics.poll(5.0)
    assert metrics.text() == "step 3/10  ETA 14s  reward 0.750  heldout 0.250 (0)  1,234 tok/s"
    assert metrics.eta_s() == pytest.approx(14.0)  # A step takes 2 s.


def test_a_partial_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = FollowedFile(path)
    path.write_text('{"step": 1}\n{"st')
    assert list(follower.new_lines()) == ['{"step": 1}']
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert list(follower.new_lines()) == ['{"step": 2}']


def test_summary_compares_first_and_last_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step, accuracy in ((0, 0.4), (5, 0.5), (10, 0.7)):
        write_row(path, **{"step": step, "eval/heldout/accuracy": accuracy})
    (line,) = evaluation_lines(Metrics(tmp_path, steps=10))
    assert "0.400 (step 0) -> 0.700 (step 10), +0.300" in line


def test_a_mean_reward_is_called_accuracy_only_if_every_reward_was_0_or_1(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_row(path, **{"step": 0, "eval/right/reward": 0.4, "eval/right/accuracy": 0.4, "eval/graded/reward": 0.0})
    write_row(path, **{"step": 5, "eval/right/reward": 0.6, "eval/right/accuracy": 0.6, "eval/graded/reward": 0.35})
    write_row(path, **{"step": 9, "eval/graded/accuracy": 0.0, "eval/graded/reward": 0.0, "eval/graded/part/form": 0.5})
    assert evaluation_lines(Metrics(tmp_path, steps=10)) == [
        "reward     graded: 0.000 (step 0) -> 0.000 (step 9), +0.000",
        "accuracy   right: 0.400 (step 0) -> 0.600 (step 5), +0.200",
    ]


def test_progress_goes_back_when_the_run_is_rewound(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(8):
        write_row(path, **{"step": step, "eval/heldout/accuracy": step / 10})
    metrics = Metrics(tmp_path, steps=10)
    kept = path.read_text().splitlines(keepends=True)[:3]
    path.write_text("".join(kept))
    metrics.poll(1.0)
    assert metrics.step == 2
    assert metrics.evaluations == {"heldout": ("accuracy", [(0, 0.0), (1, 0.1), (2, 0.2)])}


@pytest.mark.parametrize(
    ("step", "committed", "deterministic", "text"),
    [
        (
            20,
            48,
            False,
            "back to step 20 of 48: the weights of steps 21-48 died with their processes; they will be trained again",
        ),
        (0, 1, False, "back to step 0 of 1: the weights of step 1 died with their processes; it will be trained again"),
        (20, 48, True, "back to step 20 of 48: steps 21-48 will be trained again, with bit-identical results"),
    ],
)
def test_a_rewound_run_reports_the_lost_steps(step: int, committed: int, text: str, *, deterministic: bool) -> None:
    assert rewind_text(step, committed, deterministic=deterministic) == text


@pytest.mark.parametrize(
    ("deterministic", "end"), [(False, "trained again"), (True, "trained again, with bit-identical results")]
)
def test_a_rewind_with_a_given_cause_names_that_cause(end: str, *, deterministic: bool) -> None:
    text = rewind_text(20, 48, deterministic=deterministic, cause="the end of the journal was lost")
    assert text == f"back to step 20 of 48: the end of the journal was lost; steps 21-48 will be {end}"


def test_the_guard_gives_each_process_its_own_limit() -> None:
    programs = {
        0.2: "trap '' TERM; echo; while :; do sleep 0.1; done",
        30.0: "trap 'sleep 0.6; exit 7' TERM; echo; while :; do sleep 0.1; done",
    }
    processes = {
        limit_s: subprocess.Popen(["/bin/sh", "-c", program], stdout=subprocess.PIPE, process_group=0)
        for limit_s, program in programs.items()
    }
    for process in processes.values():
        assert process.stdout is not None
        process.stdout.readline()  # The shell has set its trap.
    guard.end(guard.watch(f"+{process.pid} {limit_s}\n" for limit_s, process in processes.items()))
    assert [process.wait(10) for process in processes.values()] == [-signal.SIGKILL, 7]


@pytest.mark.parametrize(("seconds", "text"), [(9.6, "10s"), (192.4, "3m12s"), (7260.0, "2h01m")])
def test_durations_are_printed_briefly(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_log_lines_are_formatted_for_people_and_keep_their_traceback() -> None:
    line = json.dumps(
        {
            "service": "rollout",
            "instance": 1,
            "incarnation": 5,
            "event": "service failed",
            "level": "error",
            "timestamp": "2026-01-02T03:04:05.678901Z",
            "lease": 7,
            "exception": "Traceback\nValueError: no",
        }
    )
    assert (
        readable(line)
        == "03:04:05.678 ERROR   rollout/1                service failed  lease=7\nTraceback\nValueError: no"
    )
    assert readable("not json") == "not json"


def test_last_lines_show_the_output_of_a_failed_import(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", shm_root=tmp_path / "shm")
    (run.logs / "rollout-0.out").write_text("Traceback\nImportError: no torch\n")
    assert last_lines(run, ("rollout", 0), 10)[-1] == "ImportError: no torch"
    assert tail(run.logs / "nothing.jsonl", 5) == []
    run.remove_volatile()


def test_sweep_removes_only_files_that_killed_runs_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tempfile.mkdtemp()  # ipc paths can be at most 107 bytes long.
    monkeypatch.setattr(tempfile, "tempdir", short)
    shm = tmp_path / "shm"
    dead, young, living = (RunDir.create(tmp_path / name, shm_root=shm) for name in ("dead", "young", "living"))
    for run in (dead, young):
        release(run.hold())
    lock = living.hold()
    for run in (dead, living):
        for folder in (run.shm, run.sockets):
            os.utime(folder, (0, time.time() - 2 * ABANDONED_S))
    assert set(sweep_abandoned(shm)) == {dead.shm, dead.sockets}
    assert [run.shm.exists() and run.sockets.exists() for run in (dead, young, living)] == [False, True, True]
    release(lock)
    shutil.rmtree(short)


def test_status_merges_the_views_of_supervisor_and_scheduler() -> None:
    registered = [
        ServiceRow("rollout", 0, "READY", 11, "host-a", 5, 0.5, 100),
        ServiceRow("reference", 0, "READY", 12, "host-b", 6, 0.25, 200),
        ServiceRow("monitor", 0, "READY", 13, "host-a", 7, 9.0, 300),
    ]
    supervised = [
        ProcessRow("rollout", 0, "READY", 11, 5, 2, "", 110),
        ProcessRow("monitor", 0, "STARTING", 14, 8, 1, "", 310),
        ProcessRow("batch-store", 1, "WAITING", 0, 0, 0),
    ]
    hosts = [HostRow("host-c", "AWAITED", 1.0, -1.0, ["batch-store/1"])]
    rows = {row["service"]: row for row in _merge(registered, supervised, hosts)}
    assert (rows["rollout"]["restarts"], rows["rollout"]["heartbeat_age_s"], rows["rollout"]["rss_bytes"]) == (
        2,
        0.5,
        110,
    )
    assert (rows["reference"]["restarts"], rows["reference"]["host"]) == (None, "host-b")
    assert rows["batch-store"]["host"] == "host-c"
    assert rows["monitor"]["heartbeat_age_s"] is None, "the heartbeat of an earlier life says nothing"


def test_number_of_threads_comes_from_the_topology() -> None:
    topology = load(QUICKSTART, ["services.rollout.threads=3"])
    assert threads_of(topology, "rollout") == 3
    assert threads_of(topology, "scheduler") == 1


def test_a_missing_user_module_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    topology = load(QUICKSTART, ["reward.function=my_rewards:score", "algorithm.advantage.name=my_folder.own:centred"])
    lines = [line for line in preflight.check(topology, "t.yaml").errors if "no module" in line]
    assert [line.split(": ")[1] for line in lines] == ["reward.function", "algorithm.advantage.name"]
    assert f"no module 'my_rewards' in {tmp_path} or on Python's path" in lines[0]
    (tmp_path / "my_rewards.py").write_text("raise SystemExit('never imported here')\n")
    (tmp_path / "my_folder").mkdir()
    assert not [line for line in preflight.check(topology, "t.yaml").errors if "no module" in line]


def test_a_closed_output_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    with Screen(plain=True) as screen:
        screen.notice("a service was killed")
        screen.progress("step 1 of 3")


def test_an_unusable_run_directory_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RpcError, match="--run-dir") as caught:
        lock(tmp_path / "file" / "run")
    assert "cannot be used as a run directory (Not a directory)" in str(caught.value)


def status(*troubles: TroubleRow, dropped: dict[str, int] | None = None, lost: dict[str, int] | None = None) -> Status:
    return Status(
        run="r",
        step=0,
        steps=3,
        lineage=0,
        version=0,
        services=[],
        tasks={},
        store_bytes=0,
        store_limit_bytes=0,
        store_shards=0,
        last_row={},
        troubles=list(troubles),
        dropped=dropped or {},
        lost=lost or {},
    )


def test_a_problem_is_announced_when_it_starts_and_ends_and_stays_on_the_status_line_in_between() -> None:
    troubles = Troubles()
    assert (troubles.take(status()), troubles.text, troubles.losses) == ([], "", "")
    failing = TroubleRow("rollout", 1, TroubleKind.REWARDS, "rewards failing: 1 of 4, x: late (at my_rewards.py:12)")
    assert troubles.take(status(failing)) == [f"rollout/1: {failing.text}"]
    worse = TroubleRow("rollout", 1, TroubleKind.REWARDS, "rewards failing: 64 of 64, x: late (at my_rewards.py:12)")
    counts = {DropReason.REWARD_FAILED: 3, DropReason.TOO_LONG: 12}
    assert troubles.take(status(worse, dropped=counts, lost={LossReason.TIMEOUT: 9})) == []
    assert troubles.text == f"rollout/1: {worse.text}"
    assert troubles.losses == "dropped tasks 15 (too_long 12, reward_failed 3)  lost samples 9 (timeout 9)"
    assert troubles.take(status(dropped=counts)) == [f"rollout/1: has ended: {worse.text}"]
    assert (troubles.text, troubles.losses) == ("", "dropped tasks 15 (too_long 12, reward_failed 3)")


def test_a_problem_that_comes_and_goes_with_other_numbers_is_announced_at_powers_of_ten() -> None:
    troubles, notices = Troubles(), list[str]()
    for count in range(1, 101):
        text = f"rewards failing: {count} of {2 * count}, x: took {count / 8:.3f} s (at my_rewards.py:12)"
        notices += troubles.take(status(TroubleRow("rollout", 0, TroubleKind.REWARDS, text)))
        notices += troubles.take(status())
    assert [notice.partition(" failing")[2].partition(",")[0] for notice in notices if "has ended" not in notice] == [
        ": 1 of 2",
        ": 10 of 20",
        ": 100 of 200",
    ]
    assert notices[-2].endswith("(at my_rewards.py:12) (100 times so far)")
    assert len(notices) == 6  # the end of each announced problem
    other = TroubleRow(
        "rollout", 0, TroubleKind.REWARDS, "rewards failing: 1 of 2, x: took 1.0 s (at my_rewards.py:13)"
    )
    assert troubles.take(status(other)) == [f"rollout/0: {other.text}"]


def test_a_failure_whose_count_grows_is_one_line_of_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    now_s, troubles = 0.0, Troubles()
    with Screen(plain=True, clock=lambda: now_s) as screen:
        for count in range(1, 95):
            now_s += PLAIN_EVERY_S
            row = TroubleRow("rollout", 0, TroubleKind.REWARDS, f"rewards failing: {count} of {count}, x: late")
            for notice in troubles.take(status(row, lost={LossReason.TIMEOUT: count})):
                screen.notice(notice)
            screen.progress("step 0/3", troubles=troubles.text, losses=troubles.losses)
        now_s += PLAIN_EVERY_S
        screen.progress("step 1/3", troubles=troubles.text, losses=troubles.losses)
    assert capsys.readouterr().out.splitlines() == [
        "rollout/0: rewards failing: 1 of 1, x: late",
        "lost samples 1 (timeout 1)  step 0/3",
        "lost samples 94 (timeout 94)  step 1/3",
    ]


def test_overridden_sampling_is_reported_once_and_not_on_the_status_line() -> None:
    troubles = Troubles()
    told = status(TroubleRow("rollout", 0, TroubleKind.OVERRIDDEN, "an agent asks for temperature 0.1"))
    assert troubles.take(told) == ["rollout/0: an agent asks for temperature 0.1"]
    assert (troubles.take(told), troubles.take(status()), troubles.take(told), troubles.text) == ([], [], [], "")

"""Tests the launcher as it starts and exits: signals, full disks, and a run directory that disappears. All processes
are real."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.rundir import ABANDONED_S, UNFINISHED_PREFIX, RunDir
from tests.chaos.points import Point, with_points
from tests.integration.store_process import fill, small_mount
from tests.integration.tiny.harness import (
    ALL_TINY,
    QUICKSTART,
    ROOT,
    assert_nothing_left,
    environment,
    launched,
    processes_of,
    wait_for,
)


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    return tmp_path / "shm"


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Yield a temporary directory for this test. Its path is short, because an ipc path can be at most 107 bytes
    long."""
    folder = Path(f"/tmp/t{os.getpid()}-{time.monotonic_ns() % 10**6}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


LAUNCHER = "tests.integration.tiny.launcher"


def start(
    path: Path, temporary: Path, shm: Path, *arguments: str, point: str = "", number: int = 0
) -> subprocess.Popen[str]:
    """Start a launcher with tiny services. Their shared memory and sockets are in folders that belong to this test. The
    launcher receives the signal `number` at `point`."""
    points = [Point.parse(LAUNCHER, point, number)] if point else []
    return subprocess.Popen(
        [
            *(sys.executable, "-m", LAUNCHER, str(QUICKSTART), "--run-dir", str(path)),
            *("--set", "data.train.max_prompt_tokens=16", "--set", "services.batch-store.memory=16MiB"),
            *("--set", f"services.batch-store.directory={shm}"),
            *arguments,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=with_points(environment(ALL_TINY), *points) | {"TMPDIR": str(temporary), "CUDA_VISIBLE_DEVICES": ""},
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def assert_it_runs(path: Path, temporary: Path, shm: Path, *arguments: str) -> None:
    """Start or resume the run in `path`, and let its driver finish."""
    process = start(path, temporary, shm, *arguments)
    wait_for("the run", (path / "starts").exists)
    (path / "finish").touch()
    status, _, errors = end(process)
    assert status == 0, errors
    assert list(temporary.iterdir()) == []
    assert list(shm.iterdir()) == []


POINTS = [
    "shared.security.keys:create before",
    "pathlib:Path.rename before",
    "launch.supervisor.server:Supervisor.__init__ after",
]
MORE_POINTS = [
    "tempfile:mkdtemp after 1",
    "os:symlink after",
    "shared.rundir:RunDir.create after",
    "shared.security.keys:create after",
    "shared.topology.schema:Topology.dump_resolved before",
    "tempfile:mkdtemp after 2",
    "pathlib:Path.replace after 4",  # The first four files are three keys and their list; the fifth is run.json.
    "shared.rundir:RunDir.hold after",
    "shared.actor.logging:configure after",
]
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


@pytest.mark.parametrize(
    ("point", "number"),
    [
        pytest.param(point, number, marks=[pytest.mark.long] if point in MORE_POINTS else [])
        for point, number in zip(POINTS + MORE_POINTS, itertools.cycle(SIGNALS), strict=False)
    ],
)
def test_a_signal_at_any_point_of_the_start_leaves_a_complete_run_or_nothing(
    tmp_path: Path, temporary: Path, shm: Path, point: str, number: int
) -> None:
    path = tmp_path / "runs" / "run"
    status, _, errors = end(start(path, temporary, shm, point=point, number=number))
    assert status == 1, errors
    assert "Traceback" not in errors
    assert list(temporary.iterdir()) == []
    assert not shm.exists() or list(shm.iterdir()) == []
    assert [each.name for each in path.parent.iterdir()] in ([], ["run"])
    assert_it_runs(path, temporary, shm, *(["--resume"] if path.exists() else []))


@pytest.mark.parametrize("point", [*POINTS, *(pytest.param(each, marks=pytest.mark.long) for each in MORE_POINTS)])
def test_folders_of_a_launcher_killed_at_any_point_of_its_start_are_swept_by_the_next_one(
    tmp_path: Path, temporary: Path, shm: Path, point: str
) -> None:
    path = tmp_path / "runs" / "run"
    process = start(path, temporary, shm, point=point, number=signal.SIGKILL)
    assert end(process)[0] == -signal.SIGKILL
    left = [*temporary.iterdir(), *(shm.iterdir() if shm.exists() else ()), *path.parent.glob(f"{UNFINISHED_PREFIX}*")]
    assert left or path.exists()
    for folder in left:
        os.utime(folder, (0, time.time() - 2 * ABANDONED_S))
    assert_it_runs(path, temporary, shm, *(["--resume"] if path.exists() else []))
    assert [each.name for each in path.parent.iterdir()] == ["run"]


def test_a_launcher_killed_while_it_fills_an_existing_directory_can_be_started_there_again(
    tmp_path: Path, temporary: Path, shm: Path
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "notes.txt").write_text("kept")
    process = start(path, temporary, shm, point="os:symlink after", number=signal.SIGKILL)
    assert end(process)[0] == -signal.SIGKILL
    assert not (path / "run.json").exists()
    for folder in (*temporary.iterdir(), *shm.iterdir()):
        os.utime(folder, (0, time.time() - 2 * ABANDONED_S))
    assert_it_runs(path, temporary, shm)
    assert (path / "notes.txt").read_text() == "kept"


def test_the_sweep_leaves_a_start_in_progress_alone(tmp_path: Path, temporary: Path, shm: Path) -> None:
    """The first launcher is suspended in the middle of its start, for longer than the age at which folders are
    swept."""
    path = tmp_path / "runs" / "first"
    first = start(path, temporary, shm, point="pathlib:Path.rename before", number=signal.SIGSTOP)
    try:
        wait_for("the stop", lambda: Path(f"/proc/{first.pid}/stat").read_text().split(") ")[1][0] == "T")
        begun = [*temporary.iterdir(), *shm.iterdir(), *path.parent.iterdir()]
        assert len(begun) == 3
        for folder in begun:
            os.utime(folder, (0, time.time() - 2 * ABANDONED_S))
        second = start(path.with_name("second"), temporary, shm)
        wait_for("the second run", (path.with_name("second") / "starts").exists)
        (path.with_name("second") / "finish").touch()
        assert end(second)[0] == 0
        first.send_signal(signal.SIGCONT)
        wait_for("the first run", lambda: (path / "starts").exists() or first.poll() is not None)
        assert first.poll() is None, first.communicate()
        (path / "finish").touch()
        assert end(first)[0] == 0
    finally:
        first.kill()
        first.communicate()


# ---------------------------------------------------------------------------------------------- inherited signals


def test_nohup_keeps_a_run_alive_when_its_terminal_closes(tmp_path: Path, temporary: Path, shm: Path) -> None:
    """The parent ignores both signals, as `nohup` does, and as a shell does for `&`. SIGTERM still stops the run."""
    path = tmp_path / "run"
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    try:
        process = start(path, temporary, shm)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    wait_for("the run", (path / "starts").exists)
    for pid in processes_of(path):
        ignored = int(Path(f"/proc/{pid}/status").read_text().split("SigIgn:")[1].split()[0], 16)
        assert ignored & 1 << signal.SIGHUP - 1, Path(f"/proc/{pid}/cmdline").read_bytes()
        os.kill(pid, signal.SIGHUP)
        os.kill(pid, signal.SIGINT)
    (path / "finish").touch()
    status, _, errors = end(process)
    assert (status, errors) == (0, "")


def test_sigterm_stops_a_run_that_ignores_the_terminal(tmp_path: Path, temporary: Path, shm: Path) -> None:
    path = tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(path, temporary, shm)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for("the run", (path / "starts").exists)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 1


# --------------------------------------------------------------------------------------------------- full disks


MOUNT_BYTES = 16 << 20


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    yield from small_mount(tmp_path / "mount", MOUNT_BYTES)


def use_up_bytes(mount: Path) -> None:
    fill(mount / "junk")


def use_up_files(mount: Path) -> None:
    with contextlib.suppress(OSError):
        for number in range(1 << 12):
            (mount / f"junk-{number}").touch()


@pytest.mark.parametrize(
    ("full", "use_up", "said"),
    [
        ("run", use_up_bytes, "has 0.0 of 16.0 MiB"),
        ("run", use_up_files, "and 0 of 1000 files left"),
        ("shm", use_up_files, "and 0 of 1000 files left"),
    ],
)
def test_a_full_disk_at_the_start_gives_a_one_line_error_and_leaves_nothing_behind(
    tmp_path: Path, temporary: Path, mount: Path, full: str, use_up: Callable[[Path], None], said: str
) -> None:
    """A full TMPDIR causes no error, because Python then uses the next of its temporary directories."""
    places = {"run": tmp_path / "runs", "shm": tmp_path / "shm"} | {full: mount}
    use_up(mount)
    status, _, errors = end(start(places["run"] / "run", temporary, places["shm"]))
    assert status == 2, errors
    [line] = [each for each in errors.splitlines() if not each.startswith("warning: ")]
    assert f"run directory {places['run'] / 'run'}: cannot be" in line
    assert said in line
    assert "make room there" in line
    left = [each for folder in (*places.values(), temporary) if folder.exists() for each in folder.iterdir()]
    assert all(each.name.startswith("junk") for each in left), left


def test_a_full_disk_at_resume_gives_a_one_line_error_and_the_run_resumes_when_there_is_room(
    mount: Path, temporary: Path, shm: Path
) -> None:
    path = mount / "run"
    process = start(path, temporary, shm)
    wait_for("the run", (path / "starts").exists)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 1
    topology = (path / "topology.yaml").read_text()
    use_up_bytes(mount)
    status, _, errors = end(start(path, temporary, shm, "--resume"))
    assert status == 2
    [line] = errors.splitlines()
    assert f"{mount} has 0.0 of 16.0 MiB" in line
    assert (path / "topology.yaml").read_text() == topology
    assert [*temporary.iterdir(), *shm.iterdir()] == []
    (mount / "junk").unlink()
    assert_it_runs(path, temporary, shm, "--resume")


# ------------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize(
    "point", ["asyncio.runners:Runner.close after", "launch.commands.console:Console.summarise before"]
)
def test_a_signal_after_the_loop_has_closed_does_not_change_the_outcome(
    tmp_path: Path, temporary: Path, shm: Path, point: str
) -> None:
    path = tmp_path / "run"
    process = start(path, temporary, shm, point=point, number=signal.SIGTERM)
    wait_for("the run", (path / "starts").exists)
    process.send_signal(signal.SIGTERM)
    status, output, errors = end(process)
    assert status == 1, errors
    assert "--resume" in output
    assert [*temporary.iterdir(), *shm.iterdir()] == []


def test_a_deleted_run_directory_ends_the_run_with_a_one_line_error(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        here.wait_ready()
        run = here.run
        shutil.rmtree(run.path)
        status, output, errors = here.end()
    assert status == 1
    assert errors.splitlines() == [f"run directory {run.path}: was deleted or moved during its run; begin a new run"]
    assert "continue" not in output
    assert not run.path.exists()
    assert_nothing_left(run)


def test_a_run_directory_deleted_at_the_very_end_is_not_a_success(tmp_path: Path, temporary: Path, shm: Path) -> None:
    path = tmp_path / "run"
    process = start(path, temporary, shm, point="asyncio.runners:Runner.close before", number=signal.SIGSTOP)
    wait_for("the run", (path / "starts").exists)
    (path / "finish").touch()
    wait_for("the stop", lambda: Path(f"/proc/{process.pid}/stat").read_text().split(") ")[1][0] == "T")
    RunDir.open(path)
    shutil.rmtree(path)
    process.send_signal(signal.SIGCONT)
    status, _, errors = end(process)
    assert status == 1
    assert "was deleted" in errors

"""The run directory is created once and opened by every process; its shared memory is swept when no process is left."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from shared.rpc.errors import RpcError
from shared.rundir import (
    MAX_IPC_PATH_BYTES,
    SHM_PREFIX,
    UNFINISHED_PREFIX,
    RunDir,
    newest_run,
    parse_service_name,
    release,
    service_name,
    sweep_abandoned,
)


@pytest.fixture
def shm_root(tmp_path: Path) -> Path:
    return tmp_path / "shm"


@pytest.fixture
def run(tmp_path: Path, shm_root: Path):
    made = RunDir.create(tmp_path / "runs" / "first", shm_root=shm_root)
    yield made
    made.remove_volatile()


def test_opened_run_equals_the_created_one(run: RunDir) -> None:
    opened = RunDir.open(run.path)
    assert opened == run
    assert opened.name == "first"
    assert run.logs.is_dir()
    assert run.checkpoints.is_dir()
    assert run.keys.stat().st_mode & 0o777 == 0o700
    assert run.sockets.stat().st_mode & 0o777 == 0o700
    assert run.shm.stat().st_mode & 0o777 == 0o700


def test_directory_that_holds_a_run_is_not_created_again(run: RunDir, shm_root: Path) -> None:
    with pytest.raises(RpcError, match=rf"run directory {run.path}: holds a run already"):
        RunDir.create(run.path, shm_root=shm_root)


def test_a_folder_of_a_model_is_not_made_a_run_directory(tmp_path: Path, shm_root: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RpcError, match=rf"run directory {tmp_path}: holds a model \(config.json\); choose another"):
        RunDir.create(tmp_path, shm_root=shm_root)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_reopened_run_has_fresh_sockets_and_shared_memory_and_keeps_the_rest(run: RunDir, shm_root: Path) -> None:
    (run.checkpoints / "step-1").mkdir()
    (run.shm / "old").write_bytes(b"x")
    again = RunDir.reopen(run.path, shm_root=shm_root)
    try:
        assert again.path == run.path
        assert again.sockets != run.sockets
        assert not run.sockets.exists()
        assert not run.shm.exists()
        assert (again.checkpoints / "step-1").is_dir()
        assert RunDir.open(run.path) == again
    finally:
        again.remove_volatile()


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"sockets": "/x"}'])
def test_directory_that_is_not_a_run_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(RpcError, match=rf"run directory {tmp_path}: not a run"):
        RunDir.open(tmp_path)


def test_every_socket_path_fits(run: RunDir) -> None:
    longest = run.endpoint("policy-trainer-worker", 9999).removeprefix("ipc://")
    assert Path(longest) == run.socket_file("policy-trainer-worker", 9999)
    assert len(os.fsencode(longest)) <= MAX_IPC_PATH_BYTES


def test_too_long_temporary_directory_is_refused_with_the_remedy(
    tmp_path: Path, shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(RpcError, match=r"ipc paths are limited to 107; set TMPDIR to a shorter path"):
        RunDir.create(tmp_path / "run", shm_root=shm_root)
    assert list(deep.iterdir()) == []


def long_ago(run: RunDir) -> None:
    """Make the run look as if it had begun in 1970."""
    for folder in (run.shm, run.sockets):
        os.utime(folder, (0, 0))


@pytest.fixture
def alone(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the sweep look for sockets in this test's own temporary directory."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.usefixtures("alone")
def test_sweep_removes_only_runs_that_no_process_holds(run: RunDir, shm_root: Path) -> None:
    for name in ("somebody-else", f"{SHM_PREFIX}else"):
        (shm_root / name).mkdir()
        (shm_root / name / "file").touch()
        os.utime(shm_root / name, (0, 0))
    held = run.hold()
    long_ago(run)
    assert sweep_abandoned(shm_root) == []
    second = run.hold()
    release(held)
    assert sweep_abandoned(shm_root) == []
    release(second)
    assert sweep_abandoned(shm_root) == [run.shm]
    assert not run.shm.exists()
    assert sorted(each.name for each in shm_root.iterdir()) == [f"{SHM_PREFIX}else", "somebody-else"]


@pytest.mark.usefixtures("alone")
def test_sweep_removes_a_run_that_was_never_held_and_folders_that_are_still_empty(
    run: RunDir, shm_root: Path, tmp_path: Path
) -> None:
    empty = [Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=root)) for root in (shm_root, tmp_path)]
    being_made = os.open(empty[1], os.O_RDONLY)
    fcntl.flock(being_made, fcntl.LOCK_SH)
    long_ago(run)
    for folder in empty:
        os.utime(folder, (0, 0))
    assert set(sweep_abandoned(shm_root)) == {run.shm, empty[0]}
    os.close(being_made)
    assert sweep_abandoned(shm_root) == [empty[1]]


@pytest.mark.usefixtures("alone")
def test_sweep_finds_shared_memory_elsewhere_through_the_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(short))
    made = RunDir.create(tmp_path / "run", shm_root=tmp_path / "elsewhere")
    long_ago(made)
    assert set(sweep_abandoned(tmp_path / "shm")) == {made.shm, made.sockets}
    short.rmdir()


@pytest.mark.usefixtures("alone")
def test_sweep_keeps_the_sockets_of_a_live_run_whose_shared_memory_it_cannot_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers can share the temporary directory but not /dev/shm."""
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(short))
    made = RunDir.create(tmp_path / "run", shm_root=tmp_path / "elsewhere")
    held = made.hold()
    made.shm.rename(made.shm.with_name("unseen"))
    os.utime(made.sockets, (0, 0))
    assert sweep_abandoned(tmp_path / "shm") == []
    release(held)
    assert sweep_abandoned(tmp_path / "shm") == [made.sockets]
    short.rmdir()


@pytest.mark.usefixtures("alone")
def test_sweep_does_not_remove_a_young_run(run: RunDir, shm_root: Path) -> None:
    release(run.hold())
    assert sweep_abandoned(shm_root) == []
    assert run.shm.exists()


@pytest.mark.usefixtures("alone")
def test_the_lock_of_a_process_ends_with_the_process(run: RunDir, shm_root: Path) -> None:
    child = os.fork()
    if child == 0:
        run.hold()
        os._exit(0)
    os.waitpid(child, 0)
    long_ago(run)
    assert sweep_abandoned(shm_root) == [run.shm]


def test_newest_run_is_the_one_that_began_last(run: RunDir, tmp_path: Path, shm_root: Path) -> None:
    with pytest.raises(RpcError, match="no run there"):
        newest_run(tmp_path / "elsewhere")
    later = RunDir.create(tmp_path / "runs" / "a-later", shm_root=shm_root)
    try:
        now = (run.path / "run.json").stat().st_mtime_ns
        os.utime(later.path / "run.json", ns=(now + 10**9, now + 10**9))
        (tmp_path / "runs" / "not-a-run").mkdir()
        unfinished = tmp_path / "runs" / f"{UNFINISHED_PREFIX}1"
        unfinished.mkdir()
        (unfinished / "run.json").touch()
        os.utime(unfinished / "run.json", ns=(now + 2 * 10**9, now + 2 * 10**9))
        evaluation = tmp_path / "runs" / "evaluate-later"
        evaluation.mkdir()
        (evaluation / "run.json").touch()
        os.utime(evaluation / "run.json", ns=(now + 2 * 10**9, now + 2 * 10**9))
        assert newest_run(tmp_path / "runs") == later.path
        only = tmp_path / "only" / "evaluate-1"
        only.mkdir(parents=True)
        (only / "run.json").touch()
        with pytest.raises(RpcError, match="only evaluations are there; give one with --run DIR"):
            newest_run(only.parent)
    finally:
        later.remove_volatile()


def test_service_names_can_be_split_into_their_parts() -> None:
    assert parse_service_name(service_name("policy-trainer", 3)) == ("policy-trainer", 3)
    assert parse_service_name("rollout") == ("rollout", -1)
    for name in ("", "/1", "rollout/x", "rollout/-1", "rollout/1/2"):
        with pytest.raises(RpcError, match="write NAME or NAME/INSTANCE"):
            parse_service_name(name)

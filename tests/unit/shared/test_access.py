"""Tests the writing, reading and refusal of access files, which hold the secret of one role and the endpoints of the
run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.commands import access as launch_access
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, release
from shared.security import access
from shared.security.keys import create, key_file, load
from shared.security.roles import Role
from tests.integration.store_process import make_run


@pytest.fixture
def home(tmp_path: Path) -> Iterator[RunDir]:
    run = make_run(tmp_path, memory=64 << 20, shm_root=tmp_path / "shm")
    with run.topology.open("a") as topology:
        topology.write("transport: {listen: 10.0.0.1, monitor_port: 9000}\n")
    yield run
    run.remove_volatile()


@pytest.mark.parametrize("role", list(Role))
def test_an_access_file_holds_one_secret_and_the_endpoints_of_the_run(home: RunDir, tmp_path: Path, role: Role) -> None:
    file = tmp_path / "file"
    launch_access.export(home, role, file)
    assert file.stat().st_mode & 0o777 == 0o600
    found = access.read(file)
    assert found.role == role
    assert found.name == home.name
    assert found.keys == load(home.keys, role)
    assert found.endpoints == {
        "scheduler": "tcp://10.0.0.1:7747",
        "supervisor": "tcp://10.0.0.1:7748",
        "monitor": "tcp://10.0.0.1:9000",
    }
    text = file.read_text()
    others = [load(home.keys, each).secret.decode() for each in Role if each != role]
    assert not any(secret in text for secret in others)
    assert bool(found.topology) == (role == Role.SERVICE)
    assert load(home.keys, role).secret.decode() not in repr(found)


def test_a_file_that_others_could_read_is_replaced_by_a_private_one(home: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    file.chmod(0o644)
    launch_access.export(home, Role.OBSERVER, file)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file: file.chmod(0o640), "mode 0640 gives others access; chmod 600"),
        (lambda file: file.unlink(), "No such file"),
        (lambda file: file.write_text(file.read_text()[:-40]), "not the JSON"),
        (lambda file: file.write_text(file.read_text().replace('"operator"', '"owner"')), "a role is missing"),
        (lambda file: file.write_text(file.read_text().replace("tcp://10.0.0.1:7748", "ipc:///x")), "where scheduler"),
        (lambda file: file.write_text(file.read_text().replace('role": "operator"', 'role": "service"')), "of service"),
    ],
)  # fmt: skip
def test_the_error_for_a_bad_access_file_is_one_line_that_names_the_file_but_not_the_secret(
    home: RunDir, tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    file = tmp_path / "file"
    launch_access.export(home, Role.OPERATOR, file)
    damage(file)
    with pytest.raises(RpcError) as failure:
        access.read(file)
    text = str(failure.value)
    assert text.startswith(f"keys {file}: ")
    assert says in text
    assert "\n" not in text
    assert load(home.keys, Role.OPERATOR).secret.decode() not in text


def test_a_run_that_listens_only_locally_writes_no_access_file(tmp_path: Path) -> None:
    run = make_run(tmp_path, memory=64 << 20, shm_root=tmp_path / "shm")
    try:
        with pytest.raises(RpcError, match=r"answers only this machine; set transport\.listen"):
            launch_access.export(run, Role.OPERATOR, tmp_path / "file")
        assert not (tmp_path / "file").exists()
    finally:
        run.remove_volatile()


def test_a_joined_host_has_its_own_sockets_and_the_keys_of_the_run(home: RunDir, tmp_path: Path) -> None:
    launch_access.export(home, Role.SERVICE, tmp_path / "file")
    away = RunDir.join(tmp_path / "away", access.read(tmp_path / "file"), shm_root=tmp_path / "shm2")
    try:
        assert away.scheduler == "tcp://10.0.0.1:7747"
        assert RunDir.open(away.path) == away
        assert away.sockets != home.sockets
        assert away.host_id != home.host_id
        assert load(away.keys, Role.SERVICE) == load(home.keys, Role.SERVICE)
        assert not key_file(away.keys, Role.OPERATOR).exists()
        assert away.topology.read_text() == home.topology.read_text()
        with pytest.raises(RpcError, match="holds a run already"):
            RunDir.join(away.path, access.read(tmp_path / "file"))
    finally:
        away.remove_volatile()


def test_a_host_joins_its_run_again_once_its_processes_have_ended(home: RunDir, tmp_path: Path) -> None:
    launch_access.export(home, Role.SERVICE, tmp_path / "file")
    access_file = access.read(tmp_path / "file")
    first = RunDir.rejoin(tmp_path / "away", access_file, shm_root=tmp_path / "shm2")
    (first.logs / "rollout-0.jsonl").write_text("{}\n")
    held = first.hold()
    with pytest.raises(RpcError, match="its services are still running; stop them first"):
        RunDir.rejoin(first.path, access_file, shm_root=tmp_path / "shm2")
    release(held)
    second = RunDir.rejoin(first.path, access_file, shm_root=tmp_path / "shm2")
    try:
        assert not first.sockets.exists()
        assert not first.shm.exists()
        assert second.host_id != ""
        assert (second.logs / "rollout-0.jsonl").exists()
        with pytest.raises(RpcError, match="holds another run"):
            RunDir.rejoin(home.path, access_file, shm_root=tmp_path / "shm2")
    finally:
        second.remove_volatile()


def test_access_can_be_piped_as_one_line(home: RunDir) -> None:
    made = launch_access.access_of(home, Role.SERVICE)
    line = access.encode(made)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert access.decode(line) == made
    for bad in (b"", b"[]", line[:-20]):
        with pytest.raises(RpcError, match="it is not an access file") as caught:
            access.decode(bad)
        assert made.keys.secret.decode() not in str(caught.value)


def test_only_an_access_file_with_the_service_role_allows_joining(home: RunDir, tmp_path: Path) -> None:
    launch_access.export(home, Role.OPERATOR, tmp_path / "file")
    with pytest.raises(RpcError, match="joining needs the role service, not operator"):
        RunDir.join(tmp_path / "away", access.read(tmp_path / "file"))
    assert not (tmp_path / "away").exists()


def test_another_runs_secret_is_refused_in_an_access_file(home: RunDir, tmp_path: Path) -> None:
    create(tmp_path / "other")
    file = tmp_path / "file"
    launch_access.export(home, Role.OPERATOR, file)
    mine, strange = (load(folder, Role.OPERATOR).secret.decode() for folder in (home.keys, tmp_path / "other"))
    file.write_text(file.read_text().replace(mine, strange))
    with pytest.raises(RpcError, match="two halves"):
        access.read(file)

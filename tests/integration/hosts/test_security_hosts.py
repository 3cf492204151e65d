"""Tests access between two hosts, each a network namespace: the scheduler, the store and the monitor are on one, and a
service and a stranger are on the other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from shared.rundir import RunDir
from shared.security import keys
from shared.security.access import Access
from shared.security.roles import Role
from tests.integration.netns import Host, two_hosts
from tests.integration.store_process import REPOSITORY, make_run
from tests.integration.tiny.harness import environment

PORT = 7747
WITHIN_S = 60.0


@pytest.fixture
def hosts() -> Iterator[Sequence[Host]]:
    with two_hosts() as both:
        yield both


@contextmanager
def process(host: Host, module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        host.command(sys.executable, "-m", module, *arguments),
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=10)


def ask(host: Host, *arguments: str) -> dict[str, object]:
    """Run `tests.integration.hosts.remote_peer` on `host` and return its result."""
    done = subprocess.run(
        host.command(sys.executable, "-m", "tests.integration.hosts.remote_peer", *arguments),
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


@pytest.fixture
def cluster(hosts: Sequence[Host], tmp_path: Path) -> Iterator[tuple[RunDir, RunDir, Callable[..., None]]]:
    """Yield the run on the home host, whose services listen, the run directory of the joined host, and a function that
    starts a service of the run on the home host.
    """
    home = make_run(tmp_path, memory=64 << 20, shm_root=tmp_path / "shm")
    scheduler = f"tcp://{hosts[0].address}:{PORT}"
    access = Access("run", keys.load(home.keys, Role.SERVICE), {"scheduler": scheduler}, home.topology.read_text())
    away = RunDir.join(tmp_path / "away", access, shm_root=tmp_path / "shm-away")
    listen = f"tcp://{hosts[0].address}:0"
    with ExitStack() as stack:

        def start(module: str, *, port: int = 0) -> None:
            at = f"tcp://{hosts[0].address}:{port}" if port else listen
            stack.enter_context(process(hosts[0], module, "--run", str(home.path), "--listen", at))

        start("services.scheduler", port=PORT)
        start("services.batch_store")
        start("services.monitor")
        yield home, away, start
    away.remove_volatile()
    home.remove_volatile()


def test_a_service_on_another_host_finds_and_uses_scheduler_store_and_monitor(
    hosts: Sequence[Host], cluster: tuple[RunDir, RunDir, Callable[..., None]]
) -> None:
    home, away, _ = cluster
    found = ask(hosts[1], "service", str(away.path))
    assert found["state"] == "STOPPED"
    assert str(found["scheduler"]) == away.scheduler
    for name in ("store", "monitor"):
        assert str(found[name]).startswith(f"tcp://{hosts[0].address}:")
    assert found["bytes"] == 0
    assert found["registered"] is True
    assert found["topic_seen"] is True
    log = (home.logs / "batch-store-0.jsonl").read_text()
    assert "refused" not in log


def test_a_scheduler_on_tcp_refuses_strangers_observers_and_unencrypted_clients(
    hosts: Sequence[Host], cluster: tuple[RunDir, RunDir, Callable[..., None]], tmp_path: Path
) -> None:
    home, away, _ = cluster
    assert ask(hosts[1], "operator", away.scheduler, str(home.keys), "operator", str(home.keys)) == {"answered": True}
    keys.create(tmp_path / "other-run")  # a stranger with the keys of another run
    for which, folder, role in (
        ("stranger", tmp_path / "other-run", Role.SERVICE),
        ("observer", home.keys, Role.OBSERVER),
        ("clear", home.keys, Role.SERVICE),
    ):
        answer = ask(hosts[1], which, away.scheduler, str(folder), role.label, str(home.keys))
        assert answer == {"answered": False}
    log = (home.logs / "scheduler-0.jsonl").read_text()
    assert '"reason": "unknown_key"' in log
    assert '"reason": "role"' in log


def test_an_observer_gets_the_monitors_snapshot_and_stream_and_nothing_else(
    hosts: Sequence[Host], cluster: tuple[RunDir, RunDir, Callable[..., None]], tmp_path: Path
) -> None:
    home, away, _ = cluster
    found = ask(hosts[1], "service", str(away.path))
    keys.save(tmp_path / "observer", keys.load(home.keys, Role.OBSERVER))
    answer = ask(hosts[1], "watch", str(found["monitor"]), str(tmp_path / "observer"))
    assert answer["rows"]
    assert str(answer["stream"]).startswith(f"tcp://{hosts[0].address}:")
    assert answer["updates"]
    assert "needs role service, you are observer" in str(answer["telemetry"])

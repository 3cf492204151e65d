"""Tests the spare processes of a run: how services are forked from them, how they are replaced, and how they exit."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.processes.programs import child_environment
from launch.spares.processes import spare_kinds
from shared.topology import load
from tests.integration.tiny.harness import (
    QUICKSTART,
    ROOT,
    SERVICES,
    Launched,
    assert_nothing_left,
    ctl,
    launched,
    processes_of,
    wait_for,
)

PR_SET_CHILD_SUBREAPER = 36
libc = ctypes.CDLL(None)
HEAVY = {"policy-trainer-worker", "reference", "rollout"}
FORKED = HEAVY | {"scheduler", "batch-store", "monitor", "policy-trainer", "recorder"}


def warm(here: Launched) -> int:
    """Wait until the spare is warm, and return its pid."""

    def answer() -> int:
        spares = here.status().get("spares") or ()
        return next((int(row["pid"]) for row in spares if row["warm"]), 0)

    pid: int = wait_for("a warm spare", answer)
    return pid


def forked(here: Launched) -> list[int]:
    """Return the pids of the services that were forked, in order."""
    log = (here.path / "logs" / "supervisor-0.jsonl").read_text().splitlines()
    return [line["pid"] for line in map(json.loads, log) if line["event"] == "spare forked"]


def identity(pid: int) -> dict[str, Any]:
    """Return those properties of a process that must not depend on how it was started."""
    process = psutil.Process(pid)
    signals = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {
        "command": process.cmdline()[1:6],
        "parent is the launcher": process.ppid(),
        "leads its group": os.getpgid(pid) == pid,
        "folder": process.cwd(),
        "priority": (os.sched_getscheduler(pid), process.nice()),
        "input": os.readlink(f"/proc/{pid}/fd/0"),
        "output": [Path(os.readlink(f"/proc/{pid}/fd/{number}")).name for number in (1, 2)],
        "signals": [line for line in signals if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
    }


def test_services_are_forked_from_one_spare_at_every_start_and_look_like_ordinary_processes(tmp_path: Path) -> None:
    found = {}
    for name, spares in (("run", False), ("other", True)):
        with launched(tmp_path / name / "run", spares=spares) as here:
            before = here.wait_ready()
            pids = {service: before[f"{service}/0"]["pid"] for service in FORKED}
            found[spares] = {service: identity(pid) for service, pid in pids.items()}
            for each in found[spares].values():
                assert each.pop("parent is the launcher") == here.process.pid
                assert each["command"].pop(3) == str(here.path)
            if not spares:
                continue
            spare = warm(here)
            assert set(forked(here)) == set(pids.values())
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
            wait_for(
                "restarts",
                lambda: all(row["restarts"] for row in here.wait_ready().values() if row["service"] in FORKED),
            )
            after = here.wait_ready()
            assert set(forked(here)[len(FORKED) :]) == {after[f"{service}/0"]["pid"] for service in FORKED}
            assert warm(here) == spare
            assert here.status()["spares"][0]["rss_bytes"] > 1 << 20
    assert found[True] == found[False]


def test_a_stopped_spare_is_continued_when_it_is_needed(tmp_path: Path) -> None:
    with launched(tmp_path / "run", spares=True) as here:
        here.wait_ready()
        os.kill(warm(here), signal.SIGSTOP)
        count = len(forked(here))
        assert ctl(here.path, "restart", "rollout").returncode == 0
        wait_for("a restart", lambda: here.wait_ready()["rollout/0"]["restarts"] == 1)
        assert len(forked(here)) == count + 1


def test_a_spare_that_is_killed_after_a_drain_is_replaced(tmp_path: Path) -> None:
    with launched(tmp_path / "run", spares=True) as here:
        here.wait_ready()
        spare = warm(here)
        assert ctl(here.path, "drain", "rollout").returncode == 0
        wait_for("the drain", lambda: here.wait_ready(SERVICES - 1)["rollout/0"]["state"] == "DRAINED")
        os.kill(spare, signal.SIGKILL)
        wait_for("another spare", lambda: warm(here) != spare)


def test_a_launcher_that_inherited_an_ignored_sigchld_notices_when_a_fork_exits(tmp_path: Path) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with launched(tmp_path / "run", spares=True) as here:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.kill(here.wait_ready()["rollout/0"]["pid"], signal.SIGKILL)
            wait_for("a restart", lambda: here.wait_ready()["rollout/0"]["restarts"] == 1)
            here.process.send_signal(signal.SIGINT)
            here.end()
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def test_a_killed_spare_is_replaced_and_no_service_restarts(tmp_path: Path) -> None:
    with launched(tmp_path / "run", spares=True) as here:
        before = here.wait_ready()
        spare = warm(here)
        os.kill(spare, signal.SIGKILL)
        wait_for("another spare", lambda: warm(here) != spare)
        assert {name: row["pid"] for name, row in here.wait_ready().items()} == {
            name: row["pid"] for name, row in before.items()
        }


@pytest.mark.parametrize("module", ["no_such_module", "tests.integration.tiny.thread_left"])
def test_services_start_without_a_spare_whose_imports_fail_or_leave_threads_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setenv("TINY_IMPORTS", module)
    with launched(tmp_path / "run", spares=True) as here:
        before = here.wait_ready()
        os.kill(before["rollout/0"]["pid"], signal.SIGKILL)
        wait_for("a restart", lambda: here.wait_ready()["rollout/0"]["restarts"] == 1)
        assert forked(here) == []
        here.process.send_signal(signal.SIGINT)
        _, output, errors = here.end()
        assert (here.path / "logs" / "supervisor-0.jsonl").read_text().count('"spare died"') == 1
    line = "started without a spare process from now on: exit status 1"
    assert (output + errors).count(line) == 1
    said = (here.path / "logs" / "spare-0.out").read_text()
    assert (module if module == "no_such_module" else "the imports have started 1 threads") in said


def test_no_spare_is_kept_if_spares_are_disabled(tmp_path: Path) -> None:
    with launched(tmp_path / "run", spares=False) as here:
        rows = here.wait_ready()
        os.kill(rows["rollout/0"]["pid"], signal.SIGKILL)
        wait_for("a restart", lambda: here.wait_ready()["rollout/0"]["restarts"] == 1)
        assert here.status()["spares"] == []
        assert not any("launch.spares.spare" in psutil.Process(pid).cmdline() for pid in processes_of(here.path))


def test_the_launcher_reaps_a_process_that_a_killed_service_started(tmp_path: Path) -> None:
    with launched(tmp_path / "run", spares=True) as here:
        rollout = here.wait_ready()["rollout/0"]["pid"]
        (child,) = psutil.Process(rollout).children()
        os.kill(rollout, signal.SIGKILL)
        wait_for("a restart", lambda: here.wait_ready()["rollout/0"]["restarts"] == 1)
        wait_for("the child to be reaped", lambda: not psutil.pid_exists(child.pid))


def test_spares_exit_when_the_run_ends_or_the_launcher_is_killed(tmp_path: Path) -> None:
    with launched(tmp_path / "stopped", spares=True) as here:
        here.wait_ready()
        # Spares are among the run's processes, so the checks below notice any that remain.
        assert warm(here) in processes_of(here.path)
        run = here.run
        here.process.send_signal(signal.SIGINT)
        here.end()
        assert_nothing_left(run)
    with launched(tmp_path / "killed", spares=True) as here:
        here.wait_ready()
        os.kill(warm(here), signal.SIGSTOP)
        run = here.run
        here.process.kill()
        assert_nothing_left(run)


@dataclass
class Alone:
    """A spare without a launcher, and the end of its socket pair that a supervisor would hold."""

    process: subprocess.Popen[bytes]
    orders: socket.socket

    def order(self, module: str, environment: dict[str, str], output: int) -> socket.socket:
        """Order the spare to fork a process that runs `module`. Return the socket on which it answers."""
        ours, theirs = socket.socketpair()
        with theirs:
            message = json.dumps([[module, "--instance", "0"], environment]).encode()
            socket.send_fds(self.orders, [message], [output, theirs.fileno()])
        ours.settimeout(30)
        return ours


@contextlib.contextmanager
def alone(folder: Path, imports: tuple[str, ...]) -> Iterator[Alone]:
    """Start a spare that can run modules in `folder`. The spare and its forks are children of this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**child_environment(1), "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    command = [sys.executable, "-m", "launch.spares.spare", str(theirs.fileno()), "-" * 80]
    process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        with theirs, ours:
            theirs.close()
            ours.settimeout(100)
            ours.send(json.dumps(imports).encode())
            assert ours.recv(64) == b"[]"
            yield Alone(process, ours)
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        process.kill()
        process.wait()


@pytest.mark.timeout(200)
def test_a_fork_has_the_imports_of_the_quickstart_its_own_environment_and_threads_and_no_device(tmp_path: Path) -> None:
    (tmp_path / "forked.py").write_text(
        "import json, numpy, os, sys, torch\n"
        "from shared.model.cpu import set_up\n"
        "set_up(int(os.environ['OMP_NUM_THREADS']))\n"
        "(torch.ones(500, 500) @ torch.ones(500, 500)).sum()\n"
        "print(json.dumps({\n"
        "    'modules': sorted(sys.modules), 'arguments': sys.argv[1:], 'name': __name__,\n"
        "    'drawn': float(numpy.random.rand()), 'cuda': torch.cuda.is_initialized(),\n"
        "    'threads': torch.get_num_threads(), 'added': os.environ['ADDED'],\n"
        "}))\n"
    )
    (kind,) = spare_kinds(load(QUICKSTART, []), HEAVY)
    with alone(tmp_path, kind.imports) as spare, (tmp_path / "out").open("w+") as output:
        drawn: set[float] = set()
        for threads in (2, 3):
            output.truncate(0)
            output.seek(0)
            answer = spare.order("forked", {"OMP_NUM_THREADS": str(threads), "ADDED": "yes"}, output.fileno())
            with answer:
                pid = int(answer.recv(32))
                answer.send(b"!")
                assert os.waitpid(pid, 0) == (pid, 0)
            output.seek(0)
            said = json.loads(output.read())
            assert {"torch", "transformers.models.qwen3.modeling_qwen3"} <= set(said.pop("modules"))
            drawn.add(said.pop("drawn"))
            assert said == {
                "arguments": ["--instance", "0"],
                "name": "__main__",
                "cuda": False,
                "threads": threads,
                "added": "yes",
            }
        assert len(drawn) == 2


def test_a_fork_that_the_supervisor_no_longer_wants_exits_without_running_anything(tmp_path: Path) -> None:
    (tmp_path / "touching.py").write_text("import pathlib\npathlib.Path(__file__).with_name('touched').touch()\n")
    with alone(tmp_path, ("json",)) as spare, (tmp_path / "out").open("w") as output:
        with spare.order("touching", {}, output.fileno()) as answer:
            pid = int(answer.recv(32))
        assert os.waitpid(pid, 0) == (pid, 0)
        assert not (tmp_path / "touched").exists()
        with spare.order("touching", {}, output.fileno()) as answer:
            pid = int(answer.recv(32))
            answer.send(b"!")
            assert os.waitpid(pid, 0) == (pid, 0)
        assert (tmp_path / "touched").exists()

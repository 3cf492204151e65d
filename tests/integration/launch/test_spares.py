"""Spare processes of a run: their use by services, their replacement, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.heavy import heavy_imports
from launch.supervisor.programs import child_environment
from shared.topology import load
from tests.integration.tiny.harness import (
    QUICKSTART,
    ROOT,
    Launched,
    assert_nothing_left,
    ctl,
    hurry,
    launched,
    processes_of,
    wait_for,
)

HEAVY = {"policy-trainer-worker", "reference", "rollout"}


def warm(here: Launched, kinds: set[str] = HEAVY) -> dict[str, int]:
    """Return the pids of the spares by service, once the spares of `kinds` are warm."""

    def answer() -> dict[str, int]:
        spares = here.status().get("spares") or ()
        hurry(row["pid"] for row in spares)
        found = {row["service"]: row["pid"] for row in spares if row["warm"]}
        return found if found.keys() == kinds else {}

    pids: dict[str, int] = wait_for(f"warm spares of {kinds}", answer)
    return pids


def priorities(pid: int) -> set[tuple[int, int]]:
    """Return the scheduling policies and nice values of all threads of a process."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # The thread has just ended.
            number = int(task.name)
            found.add((os.sched_getscheduler(number), os.getpriority(os.PRIO_PROCESS, number)))
    return found


def identity(pid: int) -> dict[str, Any]:
    """Return the properties that must not depend on how a process was started."""
    process = psutil.Process(pid)
    signals = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {
        "command": process.cmdline(),
        "parent": process.ppid(),
        "leads its group": os.getpgid(pid) == pid,
        "folder": process.cwd(),
        "environment": process.environ(),
        "priorities": priorities(pid),
        "output": [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)],
        "signals": [line for line in signals if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
    }


def test_a_killed_service_restarts_in_its_spare_like_a_new_process_and_the_spare_is_replaced(
    tmp_path: Path,
) -> None:
    with launched(tmp_path / "run", spares=True) as here:
        before = here.wait_ready()
        spares = warm(here)
        assert {row["pid"] for row in before.values()}.isdisjoint(spares.values())
        cold = {service: identity(before[f"{service}/0"]["pid"]) for service in HEAVY}
        for service in HEAVY:
            os.kill(before[f"{service}/0"]["pid"], signal.SIGKILL)
            wait_for("the kill to be seen", lambda service=service: here.status()["services"])
            wait_for(
                f"{service} in its spare",
                lambda service=service: here.wait_ready()[f"{service}/0"]["pid"] == spares[service],
            )
        assert {service: identity(spares[service]) for service in HEAVY} == cold
        after = here.wait_ready()
        assert {name: row["restarts"] for name, row in after.items()} == {
            name: int(name.removesuffix("/0") in HEAVY) for name in before
        }
        again = warm(here)
        assert set(again.values()).isdisjoint(spares.values())
        assert all(row["rss_bytes"] > 1 << 20 for row in here.status()["spares"])


@pytest.mark.long
def test_a_planned_restart_uses_a_stopped_spare(tmp_path: Path) -> None:
    with launched(tmp_path / "run", spares=True) as here:
        here.wait_ready()
        spare = warm(here)["rollout"]
        os.kill(spare, signal.SIGSTOP)
        assert ctl(here.path, "restart", "rollout").returncode == 0
        wait_for("rollout in its spare", lambda: here.wait_ready()["rollout/0"]["pid"] == spare)


def test_a_killed_spare_is_replaced_and_no_service_restarts(tmp_path: Path) -> None:
    with launched(tmp_path / "run", spares=True) as here:
        before = here.wait_ready()
        spare = warm(here)["rollout"]
        os.kill(spare, signal.SIGKILL)
        wait_for("another spare", lambda: warm(here)["rollout"] != spare)
        assert {name: row["pid"] for name, row in here.wait_ready().items()} == {
            name: row["pid"] for name, row in before.items()
        }


@pytest.mark.long
def test_spares_whose_imports_fail_are_reported_once_and_services_restart_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_IMPORTS", "no_such_module")
    with launched(tmp_path / "run", spares=True) as here:
        before = here.wait_ready()
        log = here.path / "logs" / "supervisor-0.jsonl"
        wait_for("three spares to fail", lambda: log.read_text().count('"spare died"') == len(HEAVY))
        os.kill(before["rollout/0"]["pid"], signal.SIGKILL)
        wait_for("a restart", lambda: here.wait_ready()["rollout/0"]["restarts"] == 1)
        here.process.send_signal(signal.SIGINT)
        _, output, errors = here.end()
        assert log.read_text().count('"spare died"') == len(HEAVY)
    for service in HEAVY:
        line = f"{service}: starts without a spare process from now on: exit status 1"
        assert (output + errors).count(line) == 1
    assert "no_such_module" in (here.path / "logs" / "rollout-spare.out").read_text()


def test_no_spare_is_kept_if_spares_are_disabled(tmp_path: Path) -> None:
    with launched(tmp_path / "run", spares=False) as here:
        rows = here.wait_ready()
        os.kill(rows["rollout/0"]["pid"], signal.SIGKILL)
        wait_for("a restart", lambda: here.wait_ready()["rollout/0"]["restarts"] == 1)
        assert here.status()["spares"] == []
        assert not any("shared.actor.spare" in psutil.Process(pid).cmdline() for pid in processes_of(here.path))


@pytest.mark.long
def test_the_first_spare_starts_some_time_after_all_services_are_ready(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "--set", "run.spares_after_s=3", spares=True) as here:
        rows = here.wait_ready()
        services = [psutil.Process(row["pid"]).create_time() for row in rows.values()]
        assert min(psutil.Process(pid).create_time() for pid in warm(here).values()) >= max(services) + 3


def test_spares_end_with_the_run_or_with_a_killed_launcher(tmp_path: Path) -> None:
    with launched(tmp_path / "stopped", spares=True) as here:
        here.wait_ready()
        spares = warm(here)
        # Spares are among the run's processes, so the checks below notice any that remain.
        assert set(spares.values()) <= set(processes_of(here.path))
        run = here.run
        here.process.send_signal(signal.SIGINT)
        here.end()
        assert_nothing_left(run)
    with launched(tmp_path / "killed", spares=True) as here:
        here.wait_ready()
        spares = warm(here)
        os.kill(spares["rollout"], signal.SIGSTOP)
        run = here.run
        here.process.kill()
        assert_nothing_left(run)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_spare_of_the_quickstart_imports_everything_at_low_priority_and_opens_no_device(tmp_path: Path) -> None:
    """The adopted module prints traces of actions that are forbidden to a spare. The test has no launcher."""
    imports = heavy_imports(load(QUICKSTART, []))["policy-trainer-worker"]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**child_environment(2, ""), "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    (tmp_path / "adopted.py").write_text(
        "import json, sys, time, torch\n"
        "from shared.actor.spare import threads_of_lowest_priority\n"
        "until = time.monotonic() + 20\n"
        "while threads_of_lowest_priority() and time.monotonic() < until:\n"
        "    time.sleep(0.01)  # the thread that imported is about to end\n"
        "print(json.dumps({\n"
        "    'modules': sorted(sys.modules), 'arguments': sys.argv[1:], 'name': __name__,\n"
        "    'cuda': torch.cuda.is_initialized(), 'threads': torch.get_num_threads(),\n"
        "    'slow': sorted(threads_of_lowest_priority()),\n"
        "}))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "shared.actor.spare", str(theirs.fileno()), "-" * 80],
        pass_fds=(theirs.fileno(),),
        env=environment,
    )
    try:
        with theirs, ours, (tmp_path / "out").open("w+") as output:
            theirs.close()
            ours.settimeout(250)  # On a busy machine the spare gets little time.
            ours.send(json.dumps(imports).encode())
            wait_for("imports at the lowest priority", lambda: os.SCHED_IDLE in dict(priorities(process.pid)))
            assert ours.recv(64) == b"[]"
            socket.send_fds(ours, [json.dumps(["adopted", "--instance", "0"]).encode()], [output.fileno()])
            assert process.wait(30) == 0
            output.seek(0)
            said = json.loads(output.read())
    finally:
        process.kill()
        process.wait()
    assert (said["arguments"], said["name"], said["cuda"], said["threads"]) == (
        ["--instance", "0"],
        "__main__",
        False,
        2,
    )
    assert said["slow"] == []
    assert {"torch", "transformers.models.qwen3.modeling_qwen3"} <= set(said["modules"])

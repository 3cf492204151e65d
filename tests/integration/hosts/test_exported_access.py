"""Tests that an agent that is started together with the run waits for the access file that the launcher writes."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch.test_remote_hands import ADDRESS
from tests.integration.tiny.harness import LIMIT_S, QUICKSTART, ROOT, SERVICES, ctl, environment, free_ports, launched

HOST = "b"


def host(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launch.host", "--name", HOST, *arguments],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def ports() -> list[str]:
    """Return settings with ports that no other run uses."""
    return [f"{key}={port}" for key, port in free_ports().items()]


def test_an_agent_waits_for_the_access_file_which_exists_as_long_as_the_run(tmp_path: Path) -> None:
    file, path = tmp_path / "run.access", tmp_path / "run"
    sets = [*ports(), f"transport.listen={ADDRESS}", f"placement.hosts={{{HOST}: {{}}}}"]
    words = [word for each in sets for word in ("--set", each)]
    agent = host("--access", str(file), "--wait", f"{LIMIT_S:g}", "--run-dir", str(tmp_path / "away"))
    try:
        with launched(path, *words, "--export-access", str(file), "--stopped-ok") as here:
            here.wait_ready(SERVICES + 1)  # The additional service is the store of the other host.
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            home, away = here.status()["hosts"]
            assert (home["state"], len(home["processes"])) == ("HOME", SERVICES)
            assert (away["host"], away["state"], away["processes"]) == (HOST, "JOINED", ["batch-store/1"])
            assert 0 <= away["silent_s"] < 5
            assert away["state_s"] < LIMIT_S
            assert f"{HOST}  " in ctl(path, "status").stdout
            assert ctl(path, "stop").returncode == 0
            assert here.end()[0] == 0
            assert agent.wait(LIMIT_S) == 0
        assert not file.exists()
    finally:
        agent.kill()
        agent.communicate()


def test_an_agent_gives_up_when_no_run_writes_its_access_file(tmp_path: Path) -> None:
    file = tmp_path / "run.access"
    agent = host("--access", str(file), "--wait", "0.2")
    _, errors = agent.communicate(timeout=LIMIT_S)
    assert agent.returncode == 1
    assert errors == (
        f"launch.host: {file}: not written within 0.2 s; is its launch.cluster --export-access running?\n"
    )


@pytest.mark.parametrize(
    ("listens", "folder", "why"),
    [
        (False, ".", "the run answers this machine only; set transport.listen"),
        (True, "missing", "missing is not a writable folder; name another"),
    ],
)
def test_an_access_file_that_cannot_be_written_is_refused_before_the_start(
    listens: bool, folder: str, why: str, tmp_path: Path
) -> None:
    sets = [f"--set={each}" for each in (f"transport.listen={ADDRESS}", *ports())] if listens else []
    done = subprocess.run(
        [
            *(sys.executable, "-m", "launch.cluster", str(QUICKSTART), "--run-dir", str(tmp_path / "run")),
            *("--export-access", str(tmp_path / folder / "run.access"), *sets),
        ],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("--export-access")
    assert line.endswith(why)
    assert not (tmp_path / "run").exists()

"""A folder beside a run has a name that is not UTF-8. Commands and the page leave it out."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.integration.tiny.harness import ROOT, environment
from tests.integration.web.shown_run import ended_run, page_of

BAD = os.fsdecode(b"bad-\xff")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make `runs/good`, which has ended, and a newer run with a name that is not UTF-8."""
    good = ended_run(tmp_path / "runs" / "good", steps=3)
    os.utime(good / "run.json", (1, 1))
    ended_run(tmp_path / "runs" / "other", steps=2).rename(tmp_path / "runs" / BAD)
    return good


def command(folder: Path, *words: str | bytes) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("words", [("launch.ctl", "status"), ("launch.monitor", "--plain")])
def test_commands_select_the_newest_run_whose_name_is_utf8(run: Path, words: tuple[str, ...]) -> None:
    done = command(run.parent.parent, *words)
    assert "bad-\\xff: left out, because its name is not UTF-8" in done.stderr
    assert "Traceback" not in done.stderr
    assert "good" in done.stdout + done.stderr


def test_a_run_is_refused_by_its_path_in_one_line_before_anything_is_written(run: Path) -> None:
    folder = run.parent.parent
    for words in (
        ("launch.monitor", "--run", b"runs/bad-\xff"),
        ("launch.ctl", "--run", b"runs/bad-\xff", "status"),
        ("launch.cluster", str(ROOT / "launch/topologies/quickstart.yaml"), "--run-dir", b"new-\xff"),
    ):
        done = command(folder, *words)
        assert done.returncode == 2, done.stderr
        [line] = done.stderr.splitlines()
        assert line.endswith("-\\xff: its path is not UTF-8; use another name")
    assert set(os.listdir(folder)) == {"runs"}


def test_the_page_goes_on_and_does_not_offer_the_folder(run: Path) -> None:
    ended_run(run.parent / "third", steps=2)
    with page_of(run) as url:
        bearer = {"Authorization": f"Bearer {url.partition('#token=')[2]}"}
        with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)) as follower:
            follower.request("GET", "/api/stream", headers=bearer)
            stream, lines = follower.getresponse(), b""
            while b"event: notices" not in lines:  # the last of the live parts
                line = stream.readline()
                assert line, "the page has ended"
                lines += line
        assert b'"runs":["third"]' in lines

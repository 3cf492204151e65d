"""When the disk fills up, log lines are lost and counted, and the process continues."""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from shared.actor import logging
from shared.bounded_file import LIMIT_BYTES
from tests.integration.store_process import fill, small_mount


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    yield from small_mount(tmp_path / "mount", 1 << 20)


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_lines_that_do_not_fit_on_the_disk_are_lost_and_counted(mount: Path) -> None:
    path = mount / "logs" / "a.jsonl"
    logging.configure(path, service="a")
    log = structlog.get_logger("a")
    log.info("first", value=1)
    junk = mount / "junk"
    fill(junk)
    for number in range(200):
        log.info("on a full disk", number=number, text="x" * 100)
    junk.unlink()
    log.info("room again")
    log.info("last")
    lines = path.read_text().split("\n")
    events = []
    for line in lines:
        with contextlib.suppress(ValueError):  # The torn line and the text after the last line are not JSON.
            events.append(json.loads(line))
    assert [events[0]["event"], events[0]["value"], events[0]["service"]] == ["first", 1, "a"]
    written = [each["number"] for each in events if "number" in each]
    assert written == list(range(len(written)))
    assert 0 < len(written) < 200
    assert [each["event"] for each in events[-2:]] == ["room again", "last"]
    assert events[-2]["lost_lines"] == 200 - len(written)
    assert "lost_lines" not in events[-1]


def test_a_log_keeps_its_newest_lines_and_says_how_many_bytes_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    logging.configure(path, service="a", instance=3, run="r")
    log = structlog.get_logger("a")
    count = LIMIT_BYTES // (60 << 10)
    for number in range(count):
        log.info("long", number=number, text="x" * (60 << 10))
    while any(thread.name == "log limit" for thread in threading.enumerate()):
        time.sleep(0.01)
    log.info("last")
    assert LIMIT_BYTES // 2 <= path.stat().st_size < LIMIT_BYTES
    head, torn, *rest = path.read_text().splitlines()
    first, *_, newest, last = map(json.loads, rest)
    assert last["event"] == "last"
    assert newest["number"] == count - 1
    told = json.loads(head)
    assert (told["event"], told["service"], told["instance"]) == ("earlier lines were dropped", "a", 3)
    lines = (told["dropped_bytes"] + len(torn) + 1) / first["number"]
    assert 60 << 10 < lines < 61 << 10, "the bytes of the lines before the first whole one"


def test_a_closed_console_does_not_end_the_process(tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    logging.configure(tmp_path / "a.jsonl", console=Gone())
    structlog.get_logger("a").info("said", value=2)
    assert json.loads((tmp_path / "a.jsonl").read_text())["value"] == 2

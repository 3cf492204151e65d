"""A file that is cut keeps its last bytes and says how many are gone, while others write to it and read it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import bounded_file
from shared.actor.logging import log_page
from shared.bounded_file import HEAD_BYTES, cut, head_of
from shared.runfiles.lines import FollowedFile

LIMIT = 64 << 10
LINES = 400_000
WRITE = '{for (i = 0; i < %d; i++) {print "%s", i; fflush()}}'
"""A program for awk. It writes each line by itself, because a line of another process may follow every write."""


@pytest.fixture(params=["folder", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file on the disk, and one in shared memory, from which no range can be removed."""
    if request.param == "folder":
        yield tmp_path / "a.out"
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / "a.out"


def removed_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return head_of(file.fileno()).dropped_bytes


def append(path: Path, first: int, last: int) -> None:
    with path.open("ab") as file:
        file.writelines(b"line %06d\n" % number for number in range(first, last))


def test_a_file_that_is_cut_keeps_its_last_bytes_and_counts_the_others(path: Path) -> None:
    written = b""
    for turn in range(4):
        append(path, turn * 8000, (turn + 1) * 8000)
        written += b"".join(b"line %06d\n" % number for number in range(turn * 8000, (turn + 1) * 8000))
        assert cut(path, LIMIT)
        kept = path.read_bytes()[HEAD_BYTES:]
        assert LIMIT // 2 <= len(kept) <= LIMIT // 2 + HEAD_BYTES
        assert written.endswith(kept)
        assert removed_bytes(path) == len(written) - len(kept)
    assert not cut(path, LIMIT)


def test_a_first_line_that_only_looks_like_a_head_is_not_one(path: Path) -> None:
    path.write_bytes(b'{"event": "earlier lines were dropped", "dropped_bytes": "many"}'.ljust(HEAD_BYTES - 1) + b"\n")
    assert removed_bytes(path) == 0
    path.write_bytes(b'{"event": "earlier lines were dropped", "dropped_bytes": 5000}\n')
    assert removed_bytes(path) == 0


def test_two_processes_that_write_fast_keep_their_order_and_their_last_lines(path: Path) -> None:
    with path.open("ab") as output:
        writers = [subprocess.Popen(["awk", "BEGIN " + WRITE % (LINES, name)], stdout=output) for name in "ab"]
    while any(writer.poll() is None for writer in writers):
        cut(path, LIMIT)
        time.sleep(0.005)
    cut(path, LIMIT)
    data = path.read_bytes()
    assert len(data) <= LIMIT
    for name in ("a", "b"):
        numbers = [int(words[1]) for line in data.decode().splitlines()[2:] if (words := line.split())[0] == name]
        assert numbers == sorted(numbers)
        assert not numbers or numbers[-1] == LINES - 1  # one of them may have ended long before the other
    total = removed_bytes(path) + len(data) - HEAD_BYTES
    everything = 2 * sum(len(f"a {number}\n") for number in range(LINES))
    assert total == everything if can_remove_ranges(path) else 0 < total <= everything


def can_remove_ranges(path: Path) -> bool:
    with path.open("r+b") as file:
        return bool(bounded_file._LIBC.fallocate(file.fileno(), 0x08, 0, HEAD_BYTES) == 0)


def test_readers_continue_where_they_were_when_the_file_is_cut(path: Path) -> None:
    append(path, 0, 7000)
    follower = FollowedFile(path)
    late = FollowedFile(path, last_bytes=100)
    _, position = log_page(path, 1, -1)
    assert len(list(follower.new_lines())) == 7000
    append(path, 7000, 7003)
    assert cut(path, LIMIT)
    wanted = [f"line {number:06d}" for number in range(7000, 7003)]
    assert list(follower.new_lines()) == wanted
    assert list(late.new_lines())[-3:] == wanted
    page, position = log_page(path, 1, position)
    assert page == wanted
    append(path, 7003, 7004)
    assert log_page(path, 1, position)[0] == list(follower.new_lines()) == ["line 007003"]
    assert log_page(path, 2, -1)[0] == ["line 007002", "line 007003"]


def test_a_reader_that_falls_behind_is_told_how_much_it_missed(path: Path) -> None:
    append(path, 0, 10)
    follower = FollowedFile(path)
    list(follower.new_lines())
    position = log_page(path, 1, -1)[1]
    append(path, 10, 8000)
    assert cut(path, LIMIT)
    for lines in (list(follower.new_lines()), log_page(path, 1, position)[0]):
        assert "earlier lines were dropped" in lines[0]
        assert lines[-1] == "line 007999"
    assert list(follower.new_lines()) == []


def test_a_file_that_was_replaced_is_read_from_its_beginning(path: Path) -> None:
    append(path, 0, 8000)
    assert cut(path, LIMIT)
    follower = FollowedFile(path)
    list(follower.new_lines())
    position = log_page(path, 1, -1)[1]
    path.unlink()
    append(path, 0, 2)
    assert list(follower.new_lines()) == log_page(path, 1, position)[0] == ["line 000000", "line 000001"]


def test_a_kill_while_the_file_is_cut_leaves_its_last_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    append(path, 0, 8000)
    for call in ("ftruncate", "pwrite"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, kill)
            with contextlib.suppress(Killed):
                cut(path, LIMIT)
        assert path.read_bytes().endswith(b"line 007998\nline 007999\n")

"""Tests the data that the page reads from a run directory: growing files, rows that are rolled back, and hostile
content."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from shared.runfiles.files import MAX_LOG_TEXT, MAX_NAME, RunFiles
from shared.runfiles.lines import FollowedFile


def write(path: Path, *rows: dict[str, object]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read(files: RunFiles) -> None:
    asyncio.run(files.read_all())
    files.read_logs()


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_complete_new_lines_are_returned(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    followed = FollowedFile(path)
    assert followed.poll() == ([], False)
    path.write_text("a\nb\nhal")
    assert followed.poll() == ([b"a", b"b"], False)
    assert followed.poll() == ([], False)
    append(path, "f\n")
    assert followed.poll() == ([b"half"], False)


@pytest.mark.parametrize("text", ["a\n", "a\nx\n", "a\nx\nlonger\n", ""])
def test_a_file_that_no_longer_has_its_last_read_line_is_read_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines"
    path.write_text("a\nb\n")
    followed = FollowedFile(path)
    assert followed.poll() == ([b"a", b"b"], False)
    path.write_text(text)
    assert followed.poll() == (text.encode().splitlines(), True)


def test_a_line_beyond_the_limit_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text(f"a\n{'x' * 500}\nb\n")
    followed, found = FollowedFile(path, read_bytes=64), []
    for _ in range(20):
        found += followed.poll()[0]
    assert found == [b"a", b"b"]


def test_the_end_of_a_long_file_begins_with_a_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("first\nsecond\nthird\n")
    assert FollowedFile(path, last_bytes=9).poll() == ([b"third"], False)


def test_rows_that_a_rewind_rolls_back_disappear_from_the_curves(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *({"step": step, "reward/mean": 0.1 * step} for step in range(5)))
    files = RunFiles(tmp_path)
    read(files)
    assert (files.epoch, files.last_step) == (0, 4)
    write(path, {"step": 0, "reward/mean": 0.0}, {"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 9.0})
    read(files)
    assert (files.epoch, files.last_step) == (1, 2)
    assert files.points(["reward/mean"], -1) == {"reward/mean": [(0, 0.0), (1, 0.1), (2, 9.0)]}
    append(path, '{"step": 3, "reward/mean": 8.0}\n')
    read(files)
    assert files.points(["reward/mean"], 2) == {"reward/mean": [(3, 8.0)]}
    assert files.epoch == 1


def test_damaged_rows_and_overlong_names_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "good": 1.0, "x" * (MAX_NAME + 1): 1.0})
    append(path, '{"step": 2, "good": "text"}\nnot json\n\x00\xff\n[1]\n{"step": 3, "good": null}\n')
    files = RunFiles(tmp_path)
    read(files)
    assert files.names() == ["good"]
    assert files.points(["good"], -1) == {"good": [(1, 1.0)]}


def test_logs_of_all_services_are_read_from_their_ends_and_long_lines_are_cut(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    line = {"timestamp": "2026-01-01T00:00:00Z", "level": "info", "service": "rollout", "instance": 1, "event": "began"}
    long = {**line, "event": "x" * 9000, "exception": "ValueError: the end of a traceback"}
    write(tmp_path / "logs" / "rollout-1.jsonl", {**line, "task": "train/0/1"}, long)
    files = RunFiles(tmp_path)
    read(files)
    first, second = files.view.log.lines()
    assert (first.service, first.text) == ("rollout/1", "began  task=train/0/1")
    whole = len("x" * 9000 + "\n" + str(long["exception"]))
    assert f"x… ({whole - MAX_LOG_TEXT:,} more characters) …x" in second.text
    assert second.text.endswith("ValueError: the end of a traceback")
    assert len(second.text) < MAX_LOG_TEXT + 40


def test_warnings_in_the_file_are_shown_in_the_view(tmp_path: Path) -> None:
    write(tmp_path / "warnings.jsonl", {"at": 1.0, "step": 7, "kind": "kl", "text": "KL rises", "remedy": "lower lr"})
    files = RunFiles(tmp_path)
    read(files)
    [warning] = files.view.warnings()
    assert (warning.step, warning.text, warning.remedy) == (7, "KL rises", "lower lr")

"""Tests that the file for Perfetto is valid at all times, has properly nested tracks, and stays within its limit."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from services.exporter.perfetto import EARLIER, FILE, MAX_LANES, TraceFile
from services.exporter.spans import Interval, Tracer, TraceSpan

Event = dict[str, Any]
LIMIT = 1 << 20


def placed(*given: Interval) -> list[tuple[Interval, list[TraceSpan]]]:
    tracer = Tracer("run")
    return [(each, list(tracer.spans(each))) for each in given]


def events(path: Path) -> list[Event]:
    """Return the events of a file, each checked against the Trace Event Format."""
    found: list[Event] = json.loads(path.read_text())
    for event in found:
        assert event["ph"] in {"X", "M", "b", "e", "i"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name"}
            assert isinstance(event["args"]["name"], str)
        else:
            assert isinstance(event["ts"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] in "be":
            assert event["id"]
            assert event["cat"]
    return found


def work(begin: float, end: float, what: str = "generate", process: str = "rollout/0", **more: Any) -> Interval:
    return Interval(process, what, begin, end, **more)


def test_each_process_and_kind_of_work_has_a_named_track(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "traces", LIMIT)
    file.write(placed(work(1, 2), work(3, 4), work(1, 2, "reward"), work(1, 2, "score", "reference/0")))
    found = events(tmp_path / "traces" / FILE)
    assert [event["args"]["name"] for event in found if event["name"] == "process_name"] == ["rollout/0", "reference/0"]
    named = [event["args"]["name"] for event in found if event["name"] == "thread_name"]
    assert named == ["generate", "reward", "score"]
    assert next((event["ts"], event["dur"]) for event in found if event["ph"] == "X") == (1_000_000, 1_000_000)


def test_overlapping_work_never_shares_a_track(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, LIMIT)
    file.write(placed(*(work(begin / 10, begin / 10 + 1.05) for begin in range(60))))
    ends: dict[tuple[int, int], int] = defaultdict(int)
    for event in events(tmp_path / FILE):
        if event["ph"] == "X":
            key = (event["pid"], event["tid"])
            assert event["ts"] >= ends[key]
            ends[key] = event["ts"] + event["dur"]
    assert len(ends) == 11


def test_the_number_of_tracks_is_limited(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, LIMIT)
    file.write(placed(*(work(0, 100) for _ in range(200))))
    assert sum(event["name"] == "thread_name" for event in events(tmp_path / FILE)) == MAX_LANES


def test_the_parts_of_a_task_nest_in_the_tracks_of_their_services(tmp_path: Path) -> None:
    parts = [
        work(1, 3, "lease", tasks=("train/0/1",), lease=1, stage="rollout"),
        work(1.5, 2, tasks=("train/0/1",), lease=1),
        work(2.9, 4, "lease", "reference/0", tasks=("train/0/1",), lease=2, stage="reference"),
        work(3, 3.5, "score", "reference/0", tasks=("train/0/1",), lease=2),
        work(4, 5, "train", "policy-trainer/0", tasks=("train/0/1",), step=3),
        work(6, 6.5, "collect", "batch-store/0", tasks=("train/0/1",)),
    ]
    file = TraceFile(tmp_path, LIMIT)
    file.write(placed(*parts))
    mine = sorted((event for event in events(tmp_path / FILE) if event["ph"] in "be"), key=lambda event: event["ts"])
    open_names: dict[str, list[str]] = defaultdict(list)
    for event in mine:
        if event["ph"] == "b":
            open_names[event["id"]].append(event["name"])
        else:
            assert open_names[event["id"]].pop() == event["name"]
    assert {track: names for track, names in open_names.items() if names} == {}
    services = ("rollout", "reference", "policy-trainer", "batch-store")
    assert set(open_names) == {"train/0/1", *(f"train/0/1 {service}" for service in services)}


def test_the_file_is_valid_after_every_write_and_stays_within_its_limit(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, 64 << 10)
    assert events(tmp_path / FILE) == []
    newest = 0
    for number in range(300):
        file.write(placed(*(work(number, number + 0.5, facts={"text": "x" * 50}) for _ in range(4))))
        found = [event["ts"] for event in events(tmp_path / FILE) if event["ph"] == "X"]
        assert max(found) == number * 1_000_000
        newest = number
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 64 << 10
    assert newest == 299
    assert events(tmp_path / EARLIER)
    names = [event for event in events(tmp_path / FILE) if event["name"] == "process_name"]
    assert len(names) == 1, "each file names its tracks itself"
    [told] = [event["name"] for event in events(tmp_path / FILE) if event["ph"] == "i"]
    dropped = int(told.replace(",", "").removesuffix(" earlier bytes were dropped"))
    kept = sum(len(events(tmp_path / name)) for name in (FILE, EARLIER))
    assert dropped > 2 * (64 << 10)
    assert 4 * 300 - kept == pytest.approx(dropped / (32 << 10) * len(events(tmp_path / EARLIER)), rel=0.05)


def test_a_restarted_exporter_keeps_the_file_of_the_previous_one(tmp_path: Path) -> None:
    TraceFile(tmp_path, LIMIT).write(placed(work(1, 2)))
    TraceFile(tmp_path, LIMIT).write(placed(work(5, 6)))
    assert [event["ts"] for event in events(tmp_path / EARLIER) if event["ph"] == "X"] == [1_000_000]
    assert [event["ts"] for event in events(tmp_path / FILE) if event["ph"] == "X"] == [5_000_000]


@pytest.mark.parametrize("kept", range(0, 420, 7))
def test_a_file_that_was_truncated_anywhere_is_repaired(tmp_path: Path, kept: int) -> None:
    file = TraceFile(tmp_path, LIMIT)
    file.write(placed(work(1, 2), work(3, 4), work(5, 6)))
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[: min(kept, len(data))])
    TraceFile(tmp_path, LIMIT)
    events(tmp_path / EARLIER)


def test_hostile_text_is_escaped_and_shortened(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, LIMIT)
    text = '"},\n{"ph":"X\u202e\x00\ud800'
    file.write(placed(work(1, 2, text, text, facts={text: text * 1000})))
    [event] = [event for event in events(tmp_path / FILE) if event["ph"] == "X"]
    assert event["name"].startswith('"},\n{"ph":"X')
    assert (tmp_path / FILE).stat().st_size < 4096

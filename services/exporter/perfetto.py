"""Writes spans to a file in Chrome's Trace Event Format, for Perfetto and chrome://tracing.

The file is valid JSON at all times. It has a track for each kind of work in each process, and tracks for each traced
task. Work that overlaps other work of the same kind gets another track, because the events of a track must nest. Once
`trace.json` reaches half of the size limit, the file is renamed to `trace.1.json`, so that the two files together stay
within the limit. If that replaces an earlier file, the first event of the new `trace.json` says how many bytes were
dropped.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from services.exporter.spans import TASK, Interval, TraceSpan

FILE, EARLIER = "trace.json", "trace.1.json"
HEAD, END = b"[\n", b"\n]\n"
MAX_LANES = 32
"""Maximum number of tracks for one kind of work of one process."""
TASKS = "tasks"
MAX_FACT_CHARS = 200
Event = dict[str, Any]


class Tracks:
    """Assigns numbers to processes and to the tracks of their work. Events refer to them by these numbers."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._tracks: dict[tuple[int, str], list[tuple[int, float]]] = {}
        """The number of each track and the end of its last event, by process and kind of work."""
        self._count = 0

    def events(self, interval: Interval) -> Iterator[Event]:
        """Yield the event of an interval. If its process or track is new, yield the events that name them first."""
        pid = self._pids.get(interval.process)
        if pid is None:
            pid = self._pids[interval.process] = len(self._pids) + 1
            yield _name("process_name", pid, 0, interval.process)
        kind = f"wait: {interval.what}" if interval.waits_for else interval.what
        lanes = self._tracks.setdefault((pid, kind), [])
        index = next((index for index, (_, end) in enumerate(lanes) if end <= interval.begin), len(lanes))
        if index == len(lanes) and len(lanes) < MAX_LANES:
            self._count += 1
            lanes.append((self._count, 0.0))
            yield _name("thread_name", pid, self._count, kind if not index else f"{kind} {index + 1}")
        index = min(index, len(lanes) - 1)
        lanes[index] = lanes[index][0], max(lanes[index][1], interval.end)
        yield {
            "ph": "X",
            "cat": "wait" if interval.waits_for else "work",
            "name": interval.what,
            "pid": pid,
            "tid": lanes[index][0],
            "ts": _us(interval.begin),
            "dur": max(0, _us(interval.end) - _us(interval.begin)),
            "args": _facts(interval),
        }

    def task_events(self, span: TraceSpan) -> Iterator[Event]:
        """Yield the begin and end events of a traced task. The task has its own track and one for each service.

        Two services may work on a task at once: a holder that has lost its lease keeps working until the scheduler
        tells it about the loss. By then, the scheduler may have leased the task to another service.
        """
        pid = self._pids.get(TASKS)
        if pid is None:
            pid = self._pids[TASKS] = len(self._pids) + 1
            yield _name("process_name", pid, 0, TASKS)
        name = span.subject if span.name == TASK else span.name
        service = span.interval.process.partition("/")[0]
        track = span.subject if span.name == TASK else f"{span.subject} {service}"
        same = {"cat": TASK, "id": track, "name": name, "pid": pid, "tid": 0}
        facts = {"process": span.interval.process, "trace": span.trace.hex(), **_facts(span.interval)}
        yield {**same, "ph": "b", "ts": _us(span.interval.begin), "args": facts}
        yield {**same, "ph": "e", "ts": _us(span.interval.end)}

    def forget_names(self) -> None:
        """Name processes and tracks again, for a new file."""
        self._pids.clear()
        self._tracks.clear()
        self._count = 0


class TraceFile:
    """The open trace file. Its methods raise OSError if the file cannot be written."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Keep the file of an earlier process, which may have been killed during a write, and open a new file."""
        folder.mkdir(exist_ok=True)
        self._path, self._half = folder / FILE, limit_bytes // 2
        self._earlier = folder / EARLIER
        self._tracks = Tracks()
        self._dropped_bytes = 0
        """Size of the events that this process has dropped."""
        if self._path.exists():
            self._set_aside()
            _repair(self._earlier, self._half)
        self._open()

    def write(self, placed: Sequence[tuple[Interval, list[TraceSpan]]]) -> None:
        """Append the events of intervals and of their tasks in a single write."""
        data = self._encoded(placed)
        if self._size + len(data) > self._half - len(END):
            os.close(self._descriptor)
            self._set_aside()
            self._open()
            data = self._encoded(placed)  # The new file has its own track names.
        if self._size + len(data) > self._half - len(END):
            self._dropped_bytes += len(data)
            return
        if not data:
            return
        if os.pwrite(self._descriptor, data + END, self._size) < len(data) + len(END):
            os.ftruncate(self._descriptor, self._size)
            os.pwrite(self._descriptor, END, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._size += len(data)

    def _encoded(self, placed: Sequence[tuple[Interval, list[TraceSpan]]]) -> bytes:
        """Return the events as JSON, separated by commas.

        A comma precedes the first event unless the file has no events yet.
        """
        first = self._size == len(HEAD)
        lines = [json.dumps(event, ensure_ascii=False) for event in self._events(placed)]
        text = "".join(f",\n{line}" for line in lines)
        return text.removeprefix(",\n" if first else "").encode("utf-8", "replace")

    def close(self) -> None:
        os.close(self._descriptor)

    def _set_aside(self) -> None:
        """Rename the file, which replaces an earlier one."""
        with contextlib.suppress(FileNotFoundError):
            self._dropped_bytes += self._earlier.stat().st_size
        self._path.replace(self._earlier)

    def _open(self) -> None:
        self._tracks.forget_names()
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o644)
        head = HEAD + json.dumps(_dropped(self._dropped_bytes)).encode() if self._dropped_bytes else HEAD
        os.pwrite(self._descriptor, head + (END if head != HEAD else END.lstrip()), 0)
        self._size = len(head)
        """Size of the file in bytes, without the end of the JSON list."""

    def _events(self, placed: Sequence[tuple[Interval, list[TraceSpan]]]) -> Iterator[Event]:
        for interval, spans in placed:
            yield from self._tracks.events(interval)
            for span in spans:
                if span.interval.tasks or span.name == TASK:
                    yield from self._tracks.task_events(span)


def _repair(path: Path, most_bytes: int) -> None:
    """Close the JSON list after the last complete event, in case the file's last write was cut off."""
    data = path.read_bytes()[: most_bytes + 1]
    if not data.endswith(END):
        path.write_bytes((data[: data.rfind(b"},\n") + 1] or HEAD.strip()) + END)


def _dropped(nbytes: int) -> Event:
    """Return an event that applies to the whole file."""
    name = f"{nbytes:,} earlier bytes were dropped"
    return {"ph": "i", "s": "g", "name": name, "pid": 0, "tid": 0, "ts": _us(time.time())}


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _facts(interval: Interval) -> dict[str, float | str]:
    facts = {key: value[:MAX_FACT_CHARS] if isinstance(value, str) else value for key, value in interval.facts.items()}
    if interval.step is not None:
        facts["step"] = interval.step
    if interval.tasks:
        facts["tasks"] = " ".join(interval.tasks)
    return facts


def _us(seconds: float) -> int:
    return round(seconds * 1e6)

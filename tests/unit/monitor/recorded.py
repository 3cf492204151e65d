"""Makes and reads recordings of real runs for the warning detectors: facts, rows from metrics.jsonl, and telemetry, in
order.

A recording is made from a finished run and from the topics that the monitor sent during the run:

    python -m launch.cluster T.yaml --set ... --run-dir RUN &
    python -m launch.monitor --run RUN --json > TOPICS
    python -m tests.unit.monitor.recorded RUN TOPICS tests/data/warnings/healthy/NAME.jsonl.xz
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from proto.messages import TopicRow
from services.monitor.warnings.facts import Facts
from services.monitor.warnings.watch import Watch
from shared.runfiles.warnings import WarningRecord
from shared.topology import load

FOLDER = Path(__file__).resolve().parents[2] / "data" / "warnings"
AVAILABLE_BYTES = 16 << 30
"""Memory that is assumed to be available on the machine, in bytes."""
_KEPT = {
    "cluster/status": ("step",),
    "cluster/services": ("pid", "rss_bytes"),
    "rollout": ("generate_s",),
    "reward": ("samples", "samples_failed", "seconds", "last_failure"),
    "store": ("bytes", "limit_bytes", "spilled_bytes", "busy"),
}
"""The values that detectors use, by topic. Each value is identified by the end of its name."""


@dataclass(frozen=True)
class Recording:
    """A recorded run. Each event is a row from metrics.jsonl or a topic."""

    name: str
    facts: Facts
    events: list[dict[str, float | None] | TopicRow]

    @property
    def rows(self) -> list[dict[str, float | None]]:
        return [event for event in self.events if isinstance(event, dict)]


def read(path: Path) -> Recording:
    with lzma.open(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    facts = msgspec.convert(lines[0]["facts"], Facts)
    events = [line["row"] if "row" in line else msgspec.convert(line["topic"], TopicRow) for line in lines[1:]]
    return Recording(path.name.partition(".")[0], facts, events)


def recordings(kind: str) -> list[Recording]:
    """Return the recordings in a folder under tests/data/warnings."""
    return [read(path) for path in sorted((FOLDER / kind).glob("*.jsonl.xz"))]


def replay(recording: Recording, watch: Watch | None = None) -> list[WarningRecord]:
    """Return the warnings that a monitor would have given if it had looked at the telemetry once per second."""
    watch = Watch(recording.facts) if watch is None else watch
    warnings: list[WarningRecord] = []
    now = next((event.at for event in recording.events if isinstance(event, TopicRow)), 0.0)
    for event in recording.events:
        if isinstance(event, TopicRow):
            while now < event.at:
                warnings += watch.tick(now, AVAILABLE_BYTES)
                now += 1.0
            watch.take_topic(event)
        else:
            warnings += watch.take_row(event, now)
    return warnings + watch.tick(now, AVAILABLE_BYTES)


def _events(rows: list[dict[str, Any]], topics: Path) -> Iterator[dict[str, Any]]:
    """Yield rows and topics. Each row is yielded as soon as the scheduler has reported its step or a later one."""
    waiting = list(rows)
    for line in topics.read_text().splitlines() if topics.exists() else ():
        told = json.loads(line)
        if told["topic"] in ("step", "cluster/metrics"):
            while waiting and waiting[0]["step"] <= told["values"].get("step", -1):
                yield {"row": _short(waiting.pop(0))}
        ends = _KEPT.get(told["topic"], ())
        kept = _short({name: value for name, value in told["values"].items() if name.rpartition("/")[2] in ends})
        if kept:
            yield {"topic": [told["service"], told["instance"], told["topic"], round(told["at"], 1), kept]}
    for row in waiting:
        yield {"row": _short(row)}


def _short(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values rounded to six significant digits, which reduces the file to a third of its size."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in values.items()}


def main(run: str, topics: str, out: str) -> None:
    """Write the recording of a run."""
    facts = asdict(Facts.of(load(Path(run) / "topology.yaml", check_files=False)))
    facts["local"] = sorted(facts["local"])
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    with lzma.open(out, "wt") as file:
        for line in ({"facts": facts}, *_events(rows, Path(topics))):
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Tests the page that is saved as one file: its size, its texts, and its samples and curves."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.web.saved import LIMIT_BYTES, page, thinned
from shared.samples.record import FOLDER, SampleRecord, SampleState, file_of

HOSTILE = "</script><script>alert(1)</script><!-- <script> <img src=x onerror=alert(2)>\u202e\x1b[31m\x00]]>"


class Tags(HTMLParser):
    """Collects the elements and attributes of a page, and the text of its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.saved = ""
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = ("id", "saved") in attrs

    def handle_data(self, data: str) -> None:
        self.saved += data if self._inside else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.saved)
        return found


def lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sample(task: str, reward: float, text: str, number: int = 0, split: str = "train", step: int = 3) -> SampleRecord:
    return SampleRecord(
        task=task, sample=number, split=split, step=step, state=SampleState.TRAINED, reason="", prompt=text,
        completion=text, reward=reward, rewards={text[:50]: reward}, length=len(text), finish_reason="stop",
        versions=[2], pieces=[text] * 9, logprobs=[-0.5] * 9,
    )  # fmt: skip


def write_samples(run: Path, records: Iterable[SampleRecord], split: str = "train", step: int = 3) -> None:
    path = run / FOLDER / file_of(split, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines(tmp_path / "metrics.jsonl", [{"step": step, "reward/mean": step / 10} for step in range(1, 4)])
    return tmp_path


def test_the_page_has_the_outcome_the_warnings_and_the_log(run: Path) -> None:
    (run / "outcome.json").write_text('{"outcome": "failed", "cause": "rollout/0: exit status 1"}')
    lines(run / "warnings.jsonl", [{"at": 1.0, "step": 2, "kind": "kl", "text": "KL rose", "remedy": "lower lr"}])
    event = {"timestamp": "2026-01-02T03:04:05Z", "level": "error", "event": "process died", "cause": "SIGKILL"}
    lines(run / "logs" / "supervisor-0.jsonl", [event])
    data = Tags(page([run])).data
    assert data["head"]["ended"] == "failed: rollout/0: exit status 1"
    assert [warning["text"] for warning in data["notices"]["warnings"]] == ["KL rose"]
    assert [line["text"] for line in data["log"]] == ["process died  cause=SIGKILL"]


def test_the_page_has_the_best_the_worst_and_the_longest_samples_and_some_of_each_evaluation(run: Path) -> None:
    write_samples(run, [sample(f"train/0/{n}", n / 10, "x" * (40 if n == 5 else n + 1)) for n in range(12)])
    write_samples(run, [sample(f"eval/held/3/{n}", n / 10, "wrong", split="eval/held") for n in range(9)], "eval/held")
    samples = Tags(page([run])).data["samples"]
    tasks = {split: sorted(int(each["task"].split("/")[-1]) for each in samples[split]["records"]) for split in samples}
    assert tasks == {"train": [0, 1, 2, 3, 5, 8, 9, 10, 11], "eval/held": [0, 1, 2, 3]}
    assert (samples["train"]["step"], samples["train"]["total"]) == (3, 12)


def test_hostile_text_neither_ends_the_data_nor_becomes_an_element(run: Path) -> None:
    plain = Tags(page([run]))
    write_samples(run, [sample(HOSTILE, 1.0, HOSTILE)])
    lines(run / "warnings.jsonl", [{"at": 1.0, "step": 1, "kind": HOSTILE, "text": HOSTILE, "remedy": HOSTILE}])
    lines(run / "logs" / "supervisor-0.jsonl", [{"level": "info", "event": HOSTILE, "name": HOSTILE}])
    lines(run / "metrics.jsonl", [{"step": 1, HOSTILE: 1.0, "reward/mean": 1.0}])
    (run / "outcome.json").write_text(json.dumps({"outcome": HOSTILE, "cause": HOSTILE}))
    shown = Tags(page([run]))
    assert shown.tags == plain.tags
    assert shown.attributes == plain.attributes
    data = shown.data
    assert data["samples"]["train"]["records"][0]["completion"] == HOSTILE
    assert HOSTILE in data["curves"][run.name]["points"]
    assert data["notices"]["warnings"][0]["text"] == HOSTILE


def test_the_page_refers_to_no_other_address(run: Path) -> None:
    shown = Tags(page([run]))
    assert [value for name, value in shown.attributes if name in ("src", "href")] == []
    [policy] = [value for name, value in shown.attributes if name == "content" and "default-src" in str(value)]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")


def test_the_page_of_a_large_run_is_small(run: Path) -> None:
    long = "<" * 300_000
    lines(
        run / "metrics.jsonl", [{"step": step, **{f"m/{n}": step / (n + 3) for n in range(60)}} for step in range(3000)]
    )
    event = {"timestamp": "2026-01-02T03:04:05Z", "level": "info", "event": "process died", "cause": long[:2000]}
    lines(run / "logs" / "supervisor-0.jsonl", [event] * 3000)
    warnings = [
        {"at": float(n), "step": n, "kind": "kl", "text": long[:5000], "remedy": long[:5000]} for n in range(300)
    ]
    lines(run / "warnings.jsonl", warnings)
    write_samples(run, [sample(f"train/0/{n}", n, long, n) for n in range(20)])
    began = time.process_time()
    text = page([run])
    assert time.process_time() - began < 20
    assert len(text.encode()) <= LIMIT_BYTES
    data = Tags(text).data
    assert len(data["curves"][run.name]["points"]) == 60
    assert data["notices"]["left_out"] + len(data["notices"]["warnings"]) == 300


def test_missing_and_damaged_files_leave_their_parts_of_the_page_empty(run: Path) -> None:
    (run / "logs").mkdir()
    (run / "logs" / "supervisor-0.jsonl").write_bytes(b'\xff\n{"event"\n[1]\n')
    (run / "warnings.jsonl").write_bytes(b"\x00\n{}\n")
    (run / "outcome.json").write_bytes(b"[")
    (run / "metrics.jsonl").write_bytes(b"\x00\n")
    write_samples(run, [])
    data = Tags(page([run])).data
    assert (data["head"]["ended"], data["log"], data["notices"]["warnings"]) == ("", [], [])


def test_a_long_curve_keeps_its_ends_and_its_peaks() -> None:
    points = [(float(step), 100.0 if step == 77_777 else math.sin(step)) for step in range(100_000)]
    kept = thinned(points, 260)
    assert (77_777.0, 100.0) in kept
    assert len(kept) <= 2 * 260 + 2
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})

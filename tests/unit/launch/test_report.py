"""Tests report.html: its content and size, how it deals with hostile text and damaged files, and how long a run waits
for it at the end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from launch.viewers import report
from launch.viewers.report import REPORT, page, write_in_time, write_report
from shared.rundir import RunDir
from shared.samples.record import FOLDER, Record, SampleState, file_of

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}\u202e\x1b[31m\x00]]>"
ALLOWED = frozenset(
    {
        *(
            "html",
            "head",
            "meta",
            "title",
            "style",
            "body",
            "h1",
            "h2",
            "h3",
            "p",
            "table",
            "tr",
            "th",
            "td",
            "details",
        ),
        *("summary", "span", "pre", "svg", "rect", "path", "text", "g", "polyline", "circle"),
    }
)


class Tags(HTMLParser):
    """Collects the elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sample(task: str, reward: float, text: str, number: int = 0, split: str = "train", step: int = 3) -> Record:
    return Record(
        task=task, sample=number, split=split, step=step, state=SampleState.TRAINED, reason="", prompt=text,
        completion=text, reward=reward, rewards={text: reward}, length=len(text), finish_reason="stop", versions=[2],
    )  # fmt: skip


def write_samples(run: RunDir, records: Iterable[Record], split: str = "train", step: int = 3) -> None:
    path = run.path / FOLDER / file_of(split, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in records))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run that a killed process interrupted and that then failed."""
    made = RunDir(path=tmp_path / "run", sockets=tmp_path / "sockets", shm=tmp_path / "shm")
    (made.path / "logs").mkdir(parents=True)
    made.topology.write_text("run: {name: 'a'}\n")
    rows = [{"step": 0, "eval/held/accuracy": 0.25}]
    rows += [{"step": step, "reward/mean": step / 10, "eval/held/accuracy": 0.75} for step in range(1, 4)]
    lines(made.metrics, rows)
    at = "2026-01-02T03:04:05.000000Z"
    log = [
        {"timestamp": at, "event": "started", "name": "rollout/0"},
        {"timestamp": at, "event": "process died", "name": "rollout/0", "cause": "killed by SIGKILL"},
        {"timestamp": at, "event": "started", "name": "rollout/0"},
        {"timestamp": at, "event": "ended", "outcome": "FAILED", "cause": "rollout/0: exit status 1"},
    ]
    lines(made.log_file("supervisor", 0), log)
    return made


def test_the_page_states_how_the_run_ended_and_why_its_services_restarted(run: RunDir) -> None:
    lines(run.path / "warnings.jsonl", [{"at": 1.0, "step": 2, "kind": "kl", "text": "KL rose", "remedy": "lower lr"}])
    write_samples(run, [sample(f"train/0/{number}", number / 10, f"answer {number}") for number in range(10)])
    write_samples(run, [sample("eval/held/3/1", 0.0, "wrong", split="eval/held")], "eval/held")
    shown = Tags(write_report(run).read_text())
    for text in (
        *("FAILED", "rollout/0: exit status 1", "killed by SIGKILL", "KL rose", "lower lr", "name: a"),
        *(
            "0.250 → 0.750 (step 3)",
            "eval/held, version 3: eval/held/3/1",
            "step 3, highest reward: train/0/9 sample 0",
        ),
    ):
        assert text in shown.text
    assert shown.tags.count("polyline") == 2
    assert shown.tags.count("pre") == 1 + 2 * (4 + 4 + 2 + 1)


def test_the_configuration_is_shown_without_secrets(run: RunDir) -> None:
    run.topology.write_text(
        "reward: {params: {api_key: sk-secret, url: 'https://me:pw@judge/v1?token=tt'}}\nsampling: {max_new_tokens: 8}"
    )
    text = page(run)
    assert "max_new_tokens: 8" in text
    assert "judge/v1" in text
    assert not [secret for secret in ("sk-secret", "me:pw", "tt'", "token=tt") if secret in text]


def test_hostile_text_is_escaped(run: RunDir) -> None:
    write_samples(run, [sample(HOSTILE, 1.0, HOSTILE)])
    lines(run.path / "warnings.jsonl", [{"at": HOSTILE, "kind": HOSTILE, "text": HOSTILE, "step": [HOSTILE]}])
    lines(run.log_file("supervisor", 0), [{"event": "process died", "name": HOSTILE, "cause": HOSTILE}])
    lines(run.metrics, [{"step": 1, HOSTILE: 1.0, f"eval/{HOSTILE}/accuracy": 1.0}])
    run.topology.write_text(HOSTILE)
    text = page(run)
    shown = Tags(text)
    assert set(shown.tags) <= ALLOWED
    assert not [name for name, _ in shown.attributes if name in ("src", "href") or name.startswith("on")]
    assert not {"\u202e", "\x1b", "\x00"} & set(text)
    assert "{{ 7*7 }}" in shown.text
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in shown.attributes


def test_the_page_of_a_large_run_is_small(run: RunDir) -> None:
    long = "x" * 300_000
    lines(run.metrics, [{"step": step, **{f"m/{n}": step * n for n in range(60)}} for step in range(3000)])
    event = {"timestamp": "2026-01-02T03:04:05Z", "event": "process died", "name": long, "cause": long[:2000]}
    lines(run.log_file("supervisor", 0), [event] * 20 + [{**event, "name": f"rollout/{n}"} for n in range(3000)])
    warning = {"at": 1.0, "step": 1, "kind": long[:1000], "text": long[:5000], "remedy": long[:5000]}
    lines(run.path / "warnings.jsonl", [warning] * 1000)
    write_samples(run, [sample(f"train/0/{n}", n, long, n) for n in range(20)])
    run.topology.write_text(long * 4)
    began = time.process_time()
    assert len(page(run).encode()) < 2_000_000
    assert time.process_time() - began < 20


def test_missing_and_damaged_files_leave_their_parts_of_the_page_empty(run: RunDir) -> None:
    (run.path / "logs" / "supervisor-0.jsonl").write_bytes(b'\xff\n{"event"\n[1]\n')
    (run.path / "warnings.jsonl").write_bytes(b"\x00\n{}\n")
    write_samples(run, [])
    run.topology.unlink()
    assert "cannot be read: No such file or directory" in page(run)


def test_a_run_that_failed_before_its_first_step_has_a_report(run: RunDir) -> None:
    run.metrics.unlink()
    shown = Tags(write_report(run).read_text())
    assert "rollout/0: exit status 1" in shown.text
    assert "polyline" not in shown.tags


def test_a_failure_to_write_the_report_is_reported_and_leaves_no_file_behind(run: RunDir) -> None:
    (run.path / REPORT).mkdir()
    assert write_in_time(run, 60).startswith("not written (IsADirectoryError: ")
    assert [each.name for each in run.path.iterdir() if "report" in each.name] == [REPORT]


def test_the_end_of_a_run_does_not_wait_for_a_slow_report(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(report, "page", lambda _: "late" if gate.wait(30) else "never")
    began = time.monotonic()
    told = write_in_time(run, 0.1)
    assert time.monotonic() - began < 10
    assert told == f"not ready after 0.1 s; python -m launch.ctl --run {run.path} report writes it"
    assert not (run.path / REPORT).exists()
    gate.set()


def test_a_new_report_replaces_the_previous_one(run: RunDir) -> None:
    assert write_in_time(run, 60) == str(run.path / REPORT)
    first = (run.path / REPORT).read_text()
    lines(run.metrics, [{"step": 1, "reward/mean": 9.0}, {"step": 2, "reward/mean": 8.0}])
    write_report(run)
    assert (run.path / REPORT).read_text() != first
    assert [each.name for each in run.path.iterdir() if "report" in each.name] == [REPORT]
